"""The target's own distribution is what its logits say, through its own modules."""

import pytest
import torch

from dflash.training.documents import Document
from dflash.training.features import OnlineFeatures
from dflash.training.target import TargetParts
from families import FAMILIES, VOCABULARY, build_target, exists

NAMED = ["llama", "qwen3", "qwen3_5", "qwen3_5_wrapper", "gemma2", "gemma3", "gemma4", "gemma4_shared", "granite"]
NAMED += ["cohere2", "qwen3_moe", "falcon_h1", "muse_glimmer"]


def documents():
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in (17, 30)]
    return [Document(str(i), tokens, torch.ones(len(tokens), dtype=torch.bool)) for i, tokens in enumerate(ids)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", NAMED)
def test_logits_are_those_of_the_target(family, tied):
    if not exists(family):
        assert FAMILIES[family][0] not in {"llama", "qwen3", "qwen3_5_text", "gemma2", "gemma3_text", "gemma4_text"}
        return
    changes = {"final_logit_softcapping": 3.0} if family == "gemma2" else {}
    target = build_target(family, tie_word_embeddings=tied, **changes)
    own = [target(input_ids=document.input_ids[None], use_cache=False).logits[0] for document in documents()]
    parts = TargetParts(target)
    parts.check_logits(documents()[0].input_ids)
    for logits, state in zip(own, OnlineFeatures(target, [0, 3], last_hidden=True)(documents()), strict=True):
        assert (parts.logits(state.last_hidden) - logits).abs().max() < 1e-5


def test_softcap_and_scale_are_really_there():
    """The figures above would also agree if a family's tiny target left them out."""
    capped = build_target("gemma2", final_logit_softcapping=3.0)
    assert capped(input_ids=documents()[0].input_ids[None]).logits.abs().max() < 3.0
    for family in ("gemma2", "granite", "cohere2"):
        parts = TargetParts(build_target(family))
        hidden = torch.randn(1, 32).double()
        assert not torch.allclose(parts.logits(hidden), parts.head(hidden), rtol=1e-3), family


def test_embedding_rows_are_raw():
    """Gemma scales them inside its embedding; a drafter gets them as decoding gives them, raw."""
    target = build_target("gemma3")
    parts, ids = TargetParts(target), torch.tensor([3, 5])
    assert not torch.allclose(target.get_input_embeddings()(ids), parts.embed(ids))
    assert torch.equal(parts.embed(ids, 2.0), target.get_input_embeddings().weight[ids] * 2.0)


def test_a_target_that_changes_its_logits_unseen_is_refused():
    target = build_target("llama")
    plain = target.forward
    target.forward = lambda *args, **kwargs: _doubled(plain(*args, **kwargs))
    with pytest.raises(ValueError, match="does something to its head's output that is not known here"):
        TargetParts(target).check_logits(documents()[0].input_ids)


def _doubled(output):
    output.logits = output.logits * 2
    return output
