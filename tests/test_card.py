"""The model card: valid metadata, what the config says, and no figure that was not given."""

import json

import pytest
import yaml

from dflash.card import CardFacts, Measurement, read_benchmark, write_card
from tiny import tiny_drafter

FACTS = dict(repo="me/tiny-DFlash", target="them/tiny", parameters=1234567)


def card(config=None, **changes):
    text = write_card(config or tiny_drafter().config, CardFacts(**FACTS, **changes))
    _, metadata, body = text.split("---\n", 2)
    return yaml.safe_load(metadata), body


def test_metadata():
    metadata, _ = card(license="mit")
    assert metadata["base_model"] == "them/tiny" and metadata["library_name"] == "transformers"
    assert metadata["license"] == "mit" and metadata["pipeline_tag"] == "text-generation"
    assert {"dflash", "speculative-decoding"} <= set(metadata["tags"])
    assert "license" not in card()[0], "a licence is named only if it is known"


def test_every_way_of_using_it():
    config = tiny_drafter(block_size=6).config
    _, body = card(config)
    for heading in ("## Transformers", "## vLLM", "## SGLang", "## TensorRT-LLM", "## Training"):
        assert heading in body
    assert body.count("me/tiny-DFlash") >= 4 and "trust_remote_code=True" in body
    line = next(line for line in body.splitlines() if line.startswith("vllm serve them/tiny"))
    settings = json.loads(line.split("'")[1])
    assert settings == {"method": "dflash", "model": "me/tiny-DFlash", "num_speculative_tokens": 5}
    assert "--speculative-num-draft-tokens 6" in body and "max_draft_len: 5" in body


def test_figures_only_if_measured():
    assert "Measured" not in card()[1] and "tau" not in card()[1]
    rows = [Measurement("gsm8k", 4.257, 2.5), Measurement("mt-bench", 3.0)]
    _, body = card(measurements=rows, measured_on="one H200")
    assert "| gsm8k | 4.26 | 2.50x |" in body and "| mt-bench | 3.00 | not timed |" in body and "one H200" in body


def test_what_is_known_of_the_training():
    assert "does not say" in card()[1]
    _, body = card(provenance={"thinking_mode": "off", "target_revision": "abc", "steps": 10})
    assert "trained for `off`" in body and '| target_revision | `"abc"` |' in body and "| steps | `10` |" in body


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"tau": 2.5}, [Measurement("run 1", 2.5)]),
        ([{"dataset": "a", "tau": 2, "speedup": 1.5}, {"name": "b", "tau": 1}], None),
        ({"results": [{"tau": 3, "tokens_per_second": 30.0, "plain_tokens_per_second": 10.0}]}, None),
    ],
)
def test_benchmark_files(tmp_path, content, expected):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(content))
    rows, _ = read_benchmark(path)
    assert expected is None or rows == expected
    if isinstance(content, list):
        assert rows == [Measurement("a", 2, 1.5), Measurement("b", 1)]
    if "results" in content:
        assert rows[0].speedup == 3.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no results"),
        ('[{"speedup": 2}]', "row 0: tau"),
        ('{"tau": true}', "tau"),
        ('{"tau": 0.5}', "at least 1"),
        ('[{"tau": 2}, {"tau": 2, "speedup": "fast"}]', "row 1: speedup"),
        ("[3]", "row 0"),
    ],
)
def test_wrong_benchmarks_are_refused(tmp_path, text, message):
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_benchmark(tmp_path / "bench.json")
