"""Settings of a run: YAML and flags give the same record, and mistakes are named."""

import pytest
import yaml

from dflash.cli import build_parser
from dflash.training.config import FIELDS, build_config, read_settings

LEAST = {"target": "t", "documents": "d.jsonl", "output": "o", "draft_config": "c.json"}


def parsed(*arguments):
    found = vars(build_parser().parse_args(["train", *arguments]))
    return {name: value for name, value in found.items() if name in FIELDS}


def test_yaml_round_trip(tmp_path):
    config = build_config({**LEAST, "init_layers": [1, 2], "learning_rate": 1e-3, "report_to": ["tensorboard"]})
    config.write(tmp_path / "train.yaml")
    assert build_config(read_settings(tmp_path / "train.yaml")) == config


def test_numbers_as_yaml_reads_them(tmp_path):
    (tmp_path / "c.yaml").write_text("learning_rate: 6e-4\nepochs: 2\nbetas: [0.9, 0.999]\n")
    config = build_config({**LEAST, **read_settings(tmp_path / "c.yaml")})
    assert (config.learning_rate, config.epochs, config.betas) == (6e-4, 2.0, (0.9, 0.999))
    assert isinstance(config.epochs, float)


def test_every_field_is_a_flag():
    flags = {action.dest for action in _train_parser()._actions}
    assert set(FIELDS) <= flags
    assert parsed() == {}
    given = parsed("--learning-rate", "1e-3", "--init-layers", "1", "2", "--cpu", "--no-gradient-checkpointing")
    assert given == {"learning_rate": 1e-3, "init_layers": [1, 2], "cpu": True, "gradient_checkpointing": False}


def _train_parser():
    (commands,) = (a for a in build_parser()._actions if a.dest == "command")
    return commands.choices["train"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lerning_rate": 1.0}, "unknown settings: lerning_rate; known are target,"),
        ({"target": None}, "settings lack target"),
        ({"batch_size": "8"}, "batch_size must be int, got '8'"),
        ({"batch_size": True}, "batch_size must be int, got True"),
        ({"max_steps": 1.5}, "max_steps must be int or null, got 1.5"),
        ({"init_layers": ["a"]}, "init_layers must be list or null"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0, got nan"),
        ({"schedule": "linear"}, "schedule must be one of cosine, wsd, constant, got 'linear'"),
        ({"init_from": "x"}, "draft_config .* or init_from .* not both"),
        ({"draft_config": None}, "draft_config .* or init_from .* not both"),
        ({"ce_weight": 0.0}, "not all 0"),
        ({"anchor_share": 2.0}, r"anchor_share must lie in 0\.\.1, got 2\.0"),
        ({"eval_every": 5}, "there are no eval_prompts or eval_documents"),
        ({"eval_prompts": "a", "eval_documents": "b"}, "eval_prompts .* or eval_documents .* not both"),
        ({"betas": [0.9]}, "betas must have 2 entries"),
        ({"report_to": 3}, "report_to must be list"),
    ],
)
def test_mistakes(changes, message):
    with pytest.raises(ValueError, match=message):
        build_config({**LEAST, **changes})


def test_a_file_that_is_no_mapping(tmp_path):
    (tmp_path / "c.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="must hold settings as `name: value`, it holds a list"):
        read_settings(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("a: [1\n")
    with pytest.raises(ValueError, match=r"c\.yaml is not YAML"):
        read_settings(tmp_path / "c.yaml")


def test_what_is_written_is_yaml(tmp_path):
    build_config(LEAST).write(tmp_path / "train.yaml")
    assert set(yaml.safe_load((tmp_path / "train.yaml").read_text())) == set(FIELDS)
