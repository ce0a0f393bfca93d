"""Own embeddings and heads: used instead of the target's, in the target's ids, and lossless."""

from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.modeling.sampling_dflash import DraftProposal
from dflash.modeling.vocabulary_dflash import check_vocabulary, in_target_vocabulary, target_ids
from tiny import VOCAB, ScriptedDrafter, plain, tiny_drafter, tiny_prompt, tiny_target

CHOSEN = torch.tensor([*range(0, VOCAB, 3), 1, 4]).sort().values


def reduced_drafter(chosen=CHOSEN, **changes):
    """A drafter whose head covers the `chosen` target ids."""
    vocab = changes.get("vocab_size", VOCAB)
    draft = tiny_drafter(has_lm_head=True, draft_vocab_size=len(chosen), **changes)
    draft.d2t.copy_(chosen - torch.arange(len(chosen)))
    draft.t2d.copy_(torch.isin(torch.arange(vocab), chosen))
    return draft


def decode(draft, target, ids, new, **options):
    return draft.spec_generate(target=target, input_ids=ids, max_new_tokens=new, return_dict=True, **options)


@pytest.mark.parametrize("size", [2, 7, VOCAB])
def test_draft_ids_become_target_ids_one_by_one(size):
    generator = torch.Generator().manual_seed(size)
    chosen = torch.randperm(VOCAB, generator=generator)[:size].sort().values
    probabilities = torch.rand(2, 3, size, generator=generator).softmax(-1)
    tokens = torch.randint(0, size, (2, 3), generator=generator)
    proposal = in_target_vocabulary(DraftProposal(tokens, probabilities), chosen, VOCAB)
    for row, slot in product(range(2), range(3)):
        assert proposal.tokens[row, slot] == chosen[tokens[row, slot]]
        expected = torch.zeros(VOCAB)
        for draft_id, token in enumerate(chosen.tolist()):
            expected[token] = probabilities[row, slot, draft_id]
        assert torch.equal(proposal.probabilities[row, slot], expected)
    assert in_target_vocabulary(DraftProposal(tokens), chosen, VOCAB).probabilities is None
    assert target_ids(chosen - torch.arange(size)).tolist() == chosen.tolist()


WRONG = {
    "outside": (lambda d2t, t2d: d2t[-1].fill_(VOCAB), "target ids"),
    "negative": (lambda d2t, t2d: d2t[0].fill_(-1), "-1"),
    "twice": (lambda d2t, t2d: d2t[1].fill_(d2t[0] - 1), "different target ids"),
    "flag": (lambda d2t, t2d: t2d[2].fill_(True), "target id 2.*lacks"),
    "no flag": (lambda d2t, t2d: t2d[3].fill_(False), "target id 3.*has"),
    "absolute": (lambda d2t, t2d: d2t.copy_(CHOSEN), "target"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_vocabulary_that_contradicts_itself_is_refused(case, tmp_path):
    draft = reduced_drafter()
    check_vocabulary(draft.d2t, draft.t2d)
    WRONG[case][0](draft.d2t, draft.t2d)
    with pytest.raises(ValueError, match=WRONG[case][1]):
        check_vocabulary(draft.d2t, draft.t2d)
    draft.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=WRONG[case][1]):
        type(draft).from_pretrained(tmp_path)


def test_a_saved_vocabulary_loads(tmp_path):
    draft = reduced_drafter(has_embed_tokens=True)
    draft.save_pretrained(tmp_path)
    names = {"d2t", "t2d", "lm_head.weight", "embed_tokens.weight"}
    assert names <= set(load_file(tmp_path / "model.safetensors"))
    loaded = type(draft).from_pretrained(tmp_path, dtype=torch.float64)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in draft.state_dict().items())
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("d2t")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="d2t"):
        type(draft).from_pretrained(tmp_path)


@pytest.mark.parametrize("shifted", [False, True])
def test_greedy_is_lossless_with_own_parts(shifted):
    target, ids = tiny_target(), tiny_prompt(12)
    draft = reduced_drafter(has_embed_tokens=True, sample_from_anchor=shifted)
    output = decode(draft, target, ids, 30)
    assert torch.equal(output.sequences, plain(target, ids, 30)) and output.emitted.shape[1] > 0
    text = plain(target, ids, 60)
    scripted = tiny_drafter(has_embed_tokens=True, has_lm_head=True, cls=ScriptedDrafter, sample_from_anchor=shifted)
    output = decode(scripted.script(text, lambda call: (None, 2, 0)[call % 3]), target, ids, 40)
    assert torch.equal(output.sequences, text[:, :52]) and output.emitted.max() == 8 + shifted


def test_own_parts_that_equal_the_targets_change_nothing():
    target, ids = tiny_target(), tiny_prompt(12)
    borrowed = tiny_drafter()
    own = tiny_drafter(has_embed_tokens=True, has_lm_head=True)
    own.load_state_dict(borrowed.state_dict(), strict=False)
    own.embed_tokens.load_state_dict(target.get_input_embeddings().state_dict())
    own.lm_head.load_state_dict(target.get_output_embeddings().state_dict())
    drafts = [proposals(draft, target, ids) for draft in (borrowed, own)]
    assert drafts[0] == drafts[1] and len(drafts[0]) > 5
    own.lm_head.weight.data.copy_(own.lm_head.weight.roll(1, 0))
    assert proposals(own, target, ids)[0] == [(token + 1) % VOCAB for token in drafts[0][0]]


def proposals(draft, target, ids):
    """The draft tokens of each round."""
    seen, propose = [], type(draft).propose
    draft.propose = lambda *arguments: seen.append(propose(draft, *arguments)) or seen[-1]
    decode(draft, target, ids, 30)
    return [proposal.tokens[0].tolist() for proposal in seen]


@pytest.mark.parametrize("own_head", [True, False])
@pytest.mark.parametrize("draft_temperature", [0.0, 1.3])
def test_sampling_is_lossless_over_a_part_of_the_vocabulary(draft_temperature, own_head):
    """Two tokens after the first, by the whole loop, against the target's law; a head of its own, or target rows."""
    vocab, runs = 6, 250
    target = tiny_target(vocab_size=vocab, dtype=torch.float32)
    dflash = {"mask_token_id": vocab - 1, "target_layer_ids": [0, 2]}
    settings = dict(block_size=3, dtype=torch.float32, vocab_size=vocab, dflash_config=dflash)
    if own_head:
        draft = reduced_drafter(torch.tensor([1, 2, 5]), **settings)
    else:
        draft = tiny_drafter(draft_token_ids="1-2,5", **settings)
    ids, generator = tiny_prompt(4, vocab=vocab), torch.Generator().manual_seed(0)
    counts, accepted = torch.zeros(vocab, vocab, vocab, dtype=torch.float64), 0
    for _ in range(runs):
        options = {"temperature": 1.4, "draft_temperature": draft_temperature, "generator": generator}
        output = decode(draft, target, ids, 3, **options)
        counts[tuple(output.sequences[0, 4:].tolist())] += 1
        accepted += int(output.emitted.max()) > 1
    expected = torch.zeros_like(counts)
    with torch.no_grad():
        for x in product(range(vocab), repeat=3):
            chances = (target(torch.cat([ids, torch.tensor([x])], dim=1)).logits[0, 3:6] / 1.4).softmax(-1)
            expected[x] = runs * chances[range(3), x].double().prod()
    kept = expected >= 5
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 and 0 < accepted < runs
