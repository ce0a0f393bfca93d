"""`dflash init-config`: what it prints is a config that loads."""

import json

import pytest

from dflash import DFlashConfig, cli


def run(capsys, *arguments):
    code = cli.main(["init-config", *arguments])
    return code, *capsys.readouterr()


def test_what_is_printed_can_be_loaded(pair, capsys, tmp_path):
    options = ["--layers", "2", "--block-size", "8", "--num-taps", "2", "--mask-token-id", "60"]
    code, out, _ = run(capsys, pair[1], *options)
    config = DFlashConfig(**json.loads(out))
    assert code == 0 and config.target_layer_ids == [0, 3] and config.num_hidden_layers == 2 and config.block_size == 8
    assert run(capsys, pair[1], *options, "--output", str(tmp_path / "new" / "config.json"))[1] == ""
    assert (tmp_path / "new" / "config.json").read_text() == out and "LABEL" not in out
    assert DFlashConfig.from_pretrained(tmp_path / "new").to_dict() == config.to_dict()


def test_nothing_is_overwritten(pair, capsys, tmp_path):
    (tmp_path / "config.json").write_text("mine")
    options = ["--taps", "1,2", "--mask-token-id", "60", "--output", str(tmp_path / "config.json")]
    code, _, err = run(capsys, pair[1], *options)
    assert code == 1 and "config.json" in err and (tmp_path / "config.json").read_text() == "mine"


def test_without_a_mask_token_it_says_what_to_do(pair, capsys):
    code, out, err = run(capsys, pair[1], "--num-taps", "2")
    assert code == 1 and "--mask-token-id" in err and out == ""


def test_wrong_usage(capsys):
    for arguments in ([], ["x", "--demo"], ["x", "--taps", "1", "--num-taps", "2"]):
        with pytest.raises(SystemExit):
            cli.main(["init-config", *arguments])
