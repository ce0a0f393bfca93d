"""Pushing to a local Hub by the real client, loading it back, and killing the pushing process anywhere."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import huggingface_hub.constants as constants
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load, save, save_file

from dflash import DFlashDraftModel, cli, push
from dflash.checkpoint import shipped_files, write_checkpoint
from dflash.modeling.pairing_dflash import chat_template_hash, tokenizer_hash
from hub_server import TOKEN, LocalHub, Repo, Stall
from tiny import drafter_settings, plain, tiny_drafter, tiny_prompt, tiny_target, word_tokenizer

REPO, TARGET = "me/tiny-DFlash", "them/tiny"
WHOLE = {path.name for path in shipped_files()}
WHOLE |= {"config.json", "model.safetensors", "README.md", "custom_generate/generate.py"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A local Hub that this process' client uses."""
    with LocalHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # it keeps the endpoint of its first use
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture
def proven(monkeypatch):
    """The folders that were proven, as the files they had; the proof itself is tested once, as it takes seconds."""
    folders = []
    monkeypatch.setattr(push, "prove", lambda folder, draft: folders.append({path.name for path in folder.iterdir()}))
    return folders


def options(**changes):
    return push.PushOptions(**{"repo": REPO, "target_repo": TARGET, **changes})


def settings_of(files):
    return json.loads(files["config.json"])


BACK = """
import sys
sys.modules["dflash"] = None  # importing it fails from here on
import torch
from transformers import AutoModel, AutoModelForCausalLM

draft = AutoModel.from_pretrained("{repo}", trust_remote_code=True, dtype="auto")
assert type(draft).__module__.startswith("transformers_modules.me."), type(draft)
target = AutoModelForCausalLM.from_pretrained("target", dtype="auto")
ids, expected = torch.tensor([{ids}]), torch.tensor([{expected}])
prompt = dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20)
calls = []
draft.register_forward_hook(lambda *_: calls.append(1))
for way in (
    dict(custom_generate=draft.custom_generate),
    dict(assistant_model=draft, speculation_type="dflash"),
    dict(custom_generate="{repo}", trust_remote_code=True, assistant_model=draft),
    dict(custom_generate="{repo}", trust_remote_code=True, assistant_model="{repo}"),
):
    calls.clear()
    assert torch.equal(target.generate(**prompt, do_sample=False, **way), expected), way
    assert calls or way["assistant_model"] == "{repo}", way
assert torch.equal(draft.spec_generate(target=target, **prompt), expected)
draft.push_to_hub("me/again")
"""


def test_push_and_load_back_without_this_library(hub, tmp_path, capsys):
    target, ids = tiny_target("qwen3"), tiny_prompt(7)
    target.save_pretrained(tmp_path / "target")
    word_tokenizer().save_pretrained(tmp_path / "target")
    folder = write_checkpoint(tiny_drafter("mixed"), tmp_path / "draft")
    (folder / "LICENSE").write_text("free")
    facts = ["--target-repo", TARGET, "--target-revision", "abc", "--thinking-mode", "off", "--license", "mit"]
    tokenizer = ["--tokenizer", str(tmp_path / "target")]
    assert cli.main(["push", str(folder), REPO, "--private", *facts, *tokenizer]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    files, repo = hub.files(REPO), hub.repos[REPO]
    assert set(files) == WHOLE | {"LICENSE"} and repo.private
    assert [branch for branch, _ in repo.log] == ["main", "main"], "the initial commit and one more"
    assert settings_of(files)["provenance"] == {
        "library": "dflash-transformers",
        "library_version": push.dflash.__version__,
        "target": TARGET,
        "target_revision": "abc",
        "target_tokenizer_hash": tokenizer_hash(word_tokenizer()),
        "target_chat_template_hash": chat_template_hash(word_tokenizer()),
        "thinking_mode": "off",
    }
    assert ModelCard(files["README.md"].decode()).data.license == "mit"
    code = textwrap.dedent(BACK).format(repo=REPO, ids=ids[0].tolist(), expected=plain(target, ids, 20)[0].tolist())
    environment = {**os.environ, **hub.environment(tmp_path / "home"), "HF_HUB_CACHE": str(tmp_path / "home" / "hub")}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    again = hub.files("me/again")
    assert set(again) == WHOLE and len(hub.repos["me/again"].log) == 2
    same = WHOLE - {"config.json", "README.md"}
    assert all(again[name] == files[name] for name in same), "who has no library still publishes whole checkpoints"


def test_a_folder_that_does_not_work_is_not_uploaded(hub, tmp_path, monkeypatch):
    draft = tiny_drafter()
    save = draft.save_pretrained

    def broken(folder):
        save(folder)
        weights = {name: tensor * 1.01 for name, tensor in draft.state_dict().items() if "inv_freq" not in name}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    draft.save_pretrained = broken
    with pytest.raises(RuntimeError, match="outputs are"):
        push.publish(draft, options(output=str(tmp_path / "kept")))
    assert REPO not in hub.repos and not list(tmp_path.glob("*kept*")) and not list(tmp_path.glob(".dflash*"))


def test_dry_run_uploads_nothing_and_keeps_the_folder(hub, tmp_path, proven, capsys):
    draft, kept = tiny_drafter(), tmp_path / "new" / "kept"
    push.publish(draft, options(dry_run=True, output=str(kept)))
    assert hub.requests == [] and len(proven) == 1
    found = {path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()}
    assert found == WHOLE and [path.name for path in kept.parent.iterdir()] == ["kept"]
    out = capsys.readouterr().out
    assert all(name in out for name in WHOLE)
    with pytest.raises(FileExistsError, match="kept"):
        push.publish(draft, options(dry_run=True, output=str(kept)))
    loaded = DFlashDraftModel.from_pretrained(kept, dtype="auto")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), draft.parameters(), strict=True))


def test_branches_and_pull_requests(hub, proven):
    push.publish(tiny_drafter(seed=1), options())
    main = hub.repos[REPO].heads["main"]
    push.publish(tiny_drafter(seed=2), options(revision="second", message="another"))
    push.publish(tiny_drafter(seed=3), options(create_pr=True))
    repo = hub.repos[REPO]
    assert repo.heads["main"] == main and set(repo.heads) == {"main", "second", "refs/pr/1"}
    assert repo.log[-2] == ("second", "another") and len(repo.log) == 4 and len(proven) == 3
    weights = {hub.files(REPO, branch)["model.safetensors"] for branch in repo.heads}
    assert len(weights) == 3 and not repo.private


def test_private_is_not_ignored_on_a_public_repository(hub, proven):
    push.publish(tiny_drafter(), options())
    with pytest.raises(ValueError, match="public"):
        push.publish(tiny_drafter(seed=1), options(private=True, revision="secret"))
    assert set(hub.repos[REPO].heads) == {"main"} and len(hub.repos[REPO].log) == 2


def test_what_an_earlier_version_left_is_replaced(hub, proven):
    push.publish(tiny_drafter(), options())
    repo = hub.repos[REPO]
    old = repo.commits[repo.heads["main"]]
    stale = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "old_dflash.py"]
    kept = ["notes.md", "plot.png", "tokenizer.json"]
    repo.commit("main", {**old, **{name: old["config.json"] for name in stale + kept}}, "by hand")
    push.publish(tiny_drafter(seed=1), options())
    assert set(hub.files(REPO)) == WHOLE | set(kept) and len(repo.log) == 4


def test_a_card_of_the_user_is_kept(hub, tmp_path, proven):
    mine = "---\nlicense: apache-2.0\n---\nmine\n"
    folder = write_checkpoint(tiny_drafter(), tmp_path / "draft")
    (folder / "README.md").write_text(mine)
    (folder / "training.log").write_text("x")
    push.publish(push.load_source(str(folder), None), options(source=str(folder), target_repo=None))
    assert hub.files(REPO)["README.md"].decode() == mine and "training.log" not in hub.files(REPO)
    other = write_checkpoint(tiny_drafter(seed=1), tmp_path / "other")
    push.publish(push.load_source(str(other), None), options(source=str(other)))
    assert hub.files(REPO)["README.md"].decode() == mine, "the card that is on the Hub"
    push.publish(push.load_source(str(folder), None), options(source=str(folder), new_card=True))
    card = ModelCard(hub.files(REPO)["README.md"].decode())
    assert card.data.base_model == TARGET and card.data.license == "apache-2.0"


def test_another_drafter_is_republished_by_one_command(hub, tmp_path, proven):
    """Out of a repository without our code, in z-lab's legacy schema."""
    hub.repos["them/old"] = push_raw(hub, drafter_settings(), tiny_drafter(dtype=torch.float32))
    assert cli.main(["push", "them/old", REPO, "--target-repo", TARGET]) == 0 and proven
    files = hub.files(REPO)
    assert set(files) == WHOLE and settings_of(files)["auto_map"]["AutoModel"] == "modeling_dflash.DFlashDraftModel"
    assert ModelCard(files["README.md"].decode()).data.license == "apache-2.0"
    ours, theirs = (load(each["model.safetensors"]) for each in (files, hub.files("them/old")))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def push_raw(hub, settings, draft):
    """A repository with nothing but a config, weights and somebody's card."""
    weights = {name: tensor for name, tensor in draft.state_dict().items() if "inv_freq" not in name}
    contents = {
        "config.json": json.dumps({**settings, "model_type": "qwen3", "dtype": "float32"}).encode(),
        "model.safetensors": save(weights, metadata={"format": "pt"}),
        "README.md": b"---\nlicense: apache-2.0\n---\ntheirs\n",
    }
    repo = Repo(private=False)
    for name, content in contents.items():
        hub.blobs[f"{name:0<64}"] = content
    repo.commit("main", {name: f"{name:0<64}" for name in contents}, "theirs")
    return repo


def test_contradictions_and_what_is_missing_are_named(hub, proven):
    with pytest.raises(ValueError, match="--target-repo"):
        push.publish(tiny_drafter(), options(target_repo=None))
    draft = tiny_drafter(provenance={"target": "them/else", "steps": 3})
    with pytest.raises(ValueError, match=r"'them/tiny'.*'them/else'"):
        push.publish(draft, options())
    push.push_to_hub(draft, REPO)
    provenance = settings_of(hub.files(REPO))["provenance"]
    assert provenance["target"] == "them/else" and provenance["steps"] == 3 and len(proven) == 1
    with pytest.raises(ValueError, match="dictionary"):
        push.publish(tiny_drafter(provenance="me"), options())


def test_wrong_usage(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["push", "a", "b/c", "--create-pr", "--revision", "x"])
    assert error.value.code == 2 and "--create-pr" in capsys.readouterr().err


def test_what_transformers_offers_is_complete_too(hub, tmp_path):
    """By the methods of the model alone, in one commit, with tags in the card."""
    draft = tiny_drafter()
    draft.push_to_hub("me/one", private=True, tags=["more"])
    draft.save_pretrained(tmp_path / "two", push_to_hub=True, commit_message="mine")
    for name, private in (("me/one", True), ("me/two", False)):
        repo = hub.repos[name]
        assert set(hub.files(name)) == WHOLE and len(repo.log) == 2 and repo.private == private
        tags = ModelCard(hub.files(name)["README.md"].decode()).data.tags
        assert {"dflash", "speculative-decoding"} <= set(tags) and ("more" in tags) == private
    assert hub.repos["me/two"].log[-1][1] == "mine"


STALLS = {
    "creating the repository": ("POST", "/repos/create"),
    "asking how to upload": ("POST", "/preupload/"),
    "asking where to upload": ("POST", "/objects/batch"),
    "half of the weights": ("PUT", "/lfs/", False, True),
    "all of the weights": ("PUT", "/lfs/", True),
    "half of the commit": ("POST", "/commit/", False, True),
    "the commit sent": ("POST", "/commit/"),
    "the commit made": ("POST", "/commit/", True),
}


@pytest.mark.parametrize("point", STALLS)
def test_killed_while_uploading(hub, tmp_path, proven, point):
    """The repository then has either nothing of it, or all."""
    hub.stall = Stall(*STALLS[point])
    folder = tmp_path / "kept"
    kill(lambda: push.publish(tiny_drafter(), options(output=str(folder))), hub.stall.reached.is_set)
    hub.stall.released.set()
    deadline = time.monotonic() + 20
    while hub.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not folder.exists() and not hub.busy
    files = set(hub.files(REPO)) if REPO in hub.repos else set()
    assert files == (WHOLE if point in ("the commit sent", "the commit made") else set())


@pytest.mark.parametrize("point", ["save_pretrained", "ship", "prove", "rename"])
def test_killed_while_assembling(hub, tmp_path, proven, point, monkeypatch):
    """Nothing is on the Hub, and the folder is absent or whole."""
    place = {"save_pretrained": DFlashDraftModel, "rename": os}.get(point, push)
    begun, real = multiprocessing.Event(), getattr(place, point)

    def stuck(*args, **kwargs):
        if point in ("save_pretrained", "ship"):
            real(*args, **kwargs)
        begun.set()
        time.sleep(60)

    monkeypatch.setattr(place, point, stuck)
    folder = tmp_path / "kept"
    kill(lambda: push.publish(tiny_drafter(), options(output=str(folder), dry_run=True)), begun.is_set)
    assert not folder.exists() and hub.requests == []


def kill(work, when):
    """Runs `work` in a process of its own and kills it as soon as `when()` holds."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    deadline = time.monotonic() + 60
    while not when():
        assert process.is_alive() and time.monotonic() < deadline, "it ended before it was killed"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
