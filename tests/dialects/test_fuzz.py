"""No changed checkpoint becomes silently another model: an error, a warning, or the same behaviour.

Every key of every format's config.json is dropped, renamed, moved to the other level and given values that it cannot
have; every tensor is dropped, renamed, reshaped, retyped or doubled. `python tests/dialects/test_fuzz.py` tries all of
them; a run of the tests tries a part that is the same each time.

Two things no reader can see, and they are left out: another value that is as valid as the first (`rope_theta` 10,000
for 1,000,000), unless the file says it twice; and the absence of a key where absence has a meaning of its own, which
`ABSENCE_MEANS` lists.
"""

import copy
import random
import sys
import warnings

import pytest
import torch

from dflash.dialects.findings import Findings
from dflash.dialects.reading import interpret
from samples import SAMPLES, behaviour, build, same

PART = 45  # mutations of each sample that a run of the tests tries
LEVELS = ("dflash_config", "transformer_layer_config")
WRONG = (None, "wrong", -7, 0, [1], {"a": 1}, True, False, 3.5)

# The last part of a key's path -> what its absence says, by the format's own rules.
ABSENCE_MEANS = {
    "is_causal": "sliding layers are causal, full layers are not",
    "final_logit_softcapping": "no softcap",
    "input_embedding_scale": "1.0",
    "shift_label": "false",
    "sliding_window_non_causal": "false, in files that are older than the key",
}
# Values among `WRONG` that are valid for a key, so that the file says clearly what it then means.
VALID = {
    "is_causal": (None, True, False),
    "sliding_window_non_causal": (True, False),
    "final_logit_softcapping": (None, 0, 3.5),
    "input_embedding_scale": (None, 3.5),
    "rope_theta": (3.5,),
    "rms_norm_eps": (3.5,),
    "mask_token_id": (0,),
    "target_layer_ids": ([1],),
    "causal": (True, False),
    "shift_label": (None, False),
    "layer_types": (),
}


def paths(settings: dict, prefix=()) -> list[tuple]:
    """The keys of nested dictionaries, as tuples."""
    found = []
    for key, value in settings.items():
        found.append((*prefix, key))
        if isinstance(value, dict):
            found += paths(value, (*prefix, key))
    return found


def place(settings: dict, path: tuple) -> dict:
    for key in path[:-1]:
        settings = settings[key]
    return settings


def config_mutations(settings: dict):
    """Pairs of a name and a function that changes settings in place."""
    for path in paths(settings):
        key, said = path[-1], place(settings, path)[path[-1]]
        if key not in ABSENCE_MEANS:
            yield f"drop {path}", lambda s, t, path=path: place(s, path).pop(path[-1])
        yield f"rename {path}", lambda s, t, path=path: rename(place(s, path), path[-1], f"{path[-1]}s")
        for value in WRONG:
            if value != said and not any(value is ok or value == ok for ok in VALID.get(key, ())):
                yield f"{path} = {value!r}", lambda s, t, path=path, v=value: place(s, path).update({path[-1]: v})
        for level in LEVELS:
            if level in settings and key not in LEVELS and isinstance(settings[level], dict):
                if len(path) == 1:
                    yield f"move {path} into {level}", lambda s, t, k=key, to=level: s[to].update({k: s.pop(k)})
                elif path[0] == level and len(path) == 2:
                    yield f"move {path} out", lambda s, t, k=key, of=level: s.update({k: s[of].pop(k)})


def rename(where: dict, old: str, new: str) -> None:
    where[new] = where.pop(old)


def tensor_mutations(tensors: dict):
    for name, tensor in tensors.items():
        yield f"drop {name}", lambda s, t, n=name: t.pop(n)
        yield f"rename {name}", lambda s, t, n=name: rename(t, n, f"other.{n}")
        yield f"prefix {name}", lambda s, t, n=name: rename(t, n, f"module.{n}")
        yield f"double {name}", lambda s, t, n=name: t.update({f"model.{n}": t[n] + 1 if t[n].numel() else t[n]})
        yield f"one row more {name}", lambda s, t, n=name: t.update({n: torch.cat([t[n], t[n][:1]])})
        yield f"flat {name}", lambda s, t, n=name: t.update({n: t[n][None]})
        retyped = torch.int32 if tensor.is_floating_point() else torch.float32
        yield f"{retyped} {name}", lambda s, t, n=name, kind=retyped: t.update({n: t[n].to(kind)})
    for extra in (
        "lm_head.weight",
        "embed_tokens.weight",
        "layers.2.mlp.up_proj.weight",
        "mask_hidden",
        "verifier_norm.w",
    ):
        if extra not in tensors:
            yield f"add {extra}", lambda s, t, n=extra: t.update({n: torch.zeros(4, 4)})


def mutations(sample) -> list:
    return [*config_mutations(sample.settings), *tensor_mutations(sample.tensors)]


def outcome(sample, change, expected) -> str:
    """'error', 'warning', 'same' or 'ANOTHER MODEL' of a sample after a change."""
    settings, tensors = copy.deepcopy(sample.settings), dict(sample.tensors)
    change(settings, tensors)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = build(interpret(settings, tensors, Findings("here"), **copy.deepcopy(sample.given)))
        except ValueError as error:
            assert len(str(error)) > 10
            return "error"
    if caught:
        return "warning"
    return "same" if same(behaviour(model), expected) else "ANOTHER MODEL"


@pytest.mark.parametrize("name", SAMPLES)
def test_a_changed_checkpoint_is_never_silently_another_model(name):
    sample = SAMPLES[name]()
    expected = behaviour(build(interpret(sample.settings, sample.tensors, Findings("here"), **sample.given)))
    tried = random.Random(name).sample(mutations(sample), PART)
    outcomes = {what: outcome(sample, change, expected) for what, change in tried}
    assert [what for what, found in outcomes.items() if found == "ANOTHER MODEL"] == []
    assert list(outcomes.values()).count("error") > PART // 4


if __name__ == "__main__":
    for name in sys.argv[1:] or SAMPLES:
        sample = SAMPLES[name]()
        expected = behaviour(build(interpret(sample.settings, sample.tensors, Findings("here"), **sample.given)))
        counts: dict[str, int] = {}
        for what, change in mutations(sample):
            try:
                found = outcome(sample, change, expected)
            except Exception as error:
                found = f"CRASH {type(error).__name__}: {error}"
            counts[found.split()[0]] = counts.get(found.split()[0], 0) + 1
            if found.isupper() or found.startswith("CRASH"):
                print(name, what, found, flush=True)
        print(name, counts, flush=True)
