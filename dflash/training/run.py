"""From settings to a run: loads what a `TrainConfig` names and checks that it belongs together."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash.dialects import load_drafter
from dflash.evaluation import real_tau
from dflash.loading import say
from dflash.modeling.configuration_dflash import DFlashConfig
from dflash.modeling.modeling_dflash import DFlashDraftModel
from dflash.modeling.pairing_dflash import check_pair
from dflash.prompts import encode_messages, read_prompts
from dflash.training.config import TrainConfig
from dflash.training.documents import read_documents, read_sidecar
from dflash.training.features import CachedFeatures, OnlineFeatures
from dflash.training.identity import differences, identify
from dflash.training.initialise import copy_target_layers
from dflash.training.loop import Trainer, TrainResult, make_accelerator
from dflash.training.replay import replayed_tau


def train(config: TrainConfig, resume: bool = False) -> TrainResult:
    """Trains as `config` says; with `resume`, goes on with the run in its output folder if there is one.

    Raises:
        ValueError: target, drafter, documents and features do not belong together.
        FileExistsError: the output folder holds a run and `resume` is not set.
    """
    accelerator = make_accelerator(config)
    target = load_target(config, accelerator.device)
    tokenizer = AutoTokenizer.from_pretrained(config.target, revision=config.revision)
    draft = make_drafter(config, target)
    check_pair(draft.config, target)
    documents = load_documents(config.documents, target, tokenizer)
    source = make_source(config, draft.config, target, tokenizer)
    draft.config.provenance = provenance(config, draft.config, target, tokenizer)
    evaluate = make_evaluation(config, target, tokenizer)
    trainer = Trainer(config, draft, target, documents, source, evaluate, accelerator)
    return trainer.run(resume)


def load_target(config: TrainConfig, device: torch.device):
    dtype = config.target_dtype
    if dtype == "auto" and device.type == "cpu":
        dtype = "float32"
    target = AutoModelForCausalLM.from_pretrained(config.target, revision=config.revision, dtype=dtype)
    return target.to(device).eval()


def make_drafter(config: TrainConfig, target):
    """The drafter to train, in float32: new and random by `seed`, from layers of the target, or an earlier one."""
    draft = _load_or_build(config, target)
    if config.block_size is not None:
        if draft.config.proposals(config.block_size) < 1:
            raise ValueError(f"block_size {config.block_size} counts the anchor, so the block would predict nothing")
        draft.config.block_size = config.block_size
    return draft


def _load_or_build(config: TrainConfig, target):
    if config.init_from is not None:
        return load_drafter(config.init_from, dtype=torch.float32, target=target)
    path = Path(config.draft_config)
    path = path / "config.json" if path.is_dir() else path
    settings = DFlashConfig(**json.loads(path.read_text(encoding="utf-8")))
    torch.manual_seed(config.seed)
    draft = DFlashDraftModel(settings).float()
    if config.init_layers is not None:
        copy_target_layers(draft, target, config.init_layers)
    return draft


def load_documents(path, target, tokenizer, limit: int | None = None):
    """The documents in a file; raises `ValueError` if their record says that another target or tokenizer made them."""
    rows = target.get_input_embeddings().weight.shape[0]
    documents = read_documents(path, vocab_size=rows, limit=limit)
    record = read_sidecar(path)
    if record is None:
        say(f"{path} has no record of the target that wrote it, so this is not checked")
    elif problems := differences(record, identify(target, tokenizer)):
        raise ValueError(f"{path} was not written by this target: {'; '.join(problems)}")
    return documents


def check_greedy(path) -> None:
    """Raises `ValueError` if the record of a file's answers says that they are not the target's greedy ones."""
    record = read_sidecar(path) or {}
    temperature = record.get("generation", {}).get("temperature")
    if temperature or record.get("answers") == "kept":
        how = f"sampled at temperature {temperature}" if temperature else "not written by the target"
        raise ValueError(f"{path} has answers that were {how}; only the target's greedy ones can be replayed")


def provenance(config: TrainConfig, draft_config, target, tokenizer) -> dict:
    """What the drafter's config says of its training: that of an earlier run, and what this one knows.

    A target in a local folder is not named, as its path means nothing elsewhere.
    """
    found = identify(target, tokenizer)
    record = read_sidecar(config.documents) or {}
    known = {
        "target": None if Path(config.target).exists() else config.target,
        "target_revision": found["target_revision"],
        "target_weights_hash": found["target_weights_hash"],
        "target_tokenizer_hash": found["target_tokenizer_hash"],
        "target_chat_template_hash": found["target_chat_template_hash"],
        "thinking_mode": record.get("thinking_mode"),
    }
    earlier = getattr(draft_config, "provenance", None) or {}
    return {**earlier, **{name: value for name, value in known.items() if value is not None}}


def make_source(config: TrainConfig, draft_config, target, tokenizer):
    """What gives the target's states of documents: a cache, or the target itself."""
    last_hidden = bool(config.kl_weight or config.tv_weight)
    if config.features is None:
        return OnlineFeatures(target, draft_config.target_layer_ids, last_hidden=last_hidden)
    cached = CachedFeatures(config.features)
    cached.check(draft_config.target_layer_ids, target, tokenizer, last_hidden)
    return cached


def make_evaluation(config: TrainConfig, target, tokenizer):
    """What gives a drafter's tau in greedy decoding: of held-out prompts, or of texts; None without either."""
    if config.eval_documents is not None:
        texts = load_documents(config.eval_documents, target, tokenizer, config.eval_limit)
        check_greedy(config.eval_documents)
        return lambda draft: {"tau": replayed_tau(draft, target, texts, config.eval_max_new_tokens)}
    if config.eval_prompts is None:
        return None
    prompts = [
        encode_messages(tokenizer, prompt.messages, tools=prompt.tools)
        for prompt in read_prompts(config.eval_prompts, config.eval_limit)
    ]
    return lambda draft: {"tau": real_tau(draft, target, prompts, config.eval_max_new_tokens)}
