"""Training runs what decoding runs: same outputs, and nothing from the future."""

import pytest
import torch

from dflash.modeling.cache_dflash import DFlashDraftCache
from dflash.training.anchors import candidates, draw_anchors
from dflash.training.blocks import pack_blocks
from dflash.training.documents import Document
from dflash.training.features import TargetStates
from dflash.training.losses import LossMix
from dflash.training.step import Objective, TrainableDrafter
from dflash.training.target import TargetParts, TrainedHead
from tiny import MASK, VOCAB, WIDTH, tiny_drafter, tiny_target


def texts(lengths=(30, 9, 50), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        Document(str(i), torch.randint(0, MASK, (length,), generator=generator), torch.arange(length) > 2)
        for i, length in enumerate(lengths)
    ]


def random_states(documents, taps=3):
    torch.manual_seed(1)
    return [
        TargetStates(torch.randn(len(d), taps * WIDTH).double(), torch.randn(len(d), WIDTH).double()) for d in documents
    ]


def decoded_blocks(draft, embed, document, features, anchors):
    """Outputs [A, B, H] of blocks as decoding fills them: context through the cache, piece by piece."""
    config = draft.config
    windows = [config.layer_window(i) for i in range(config.num_hidden_layers)]
    cache, held, outputs = DFlashDraftCache(windows, capacity=4), 0, []
    for anchor in anchors.tolist():
        ids = torch.full((1, config.block_size), config.mask_token_id)
        ids[0, 0] = document.input_ids[anchor]
        fresh = features[None, held:anchor]
        outputs.append(draft(noise_embeds=embed(ids), context_hidden_states=fresh, cache=cache).last_hidden_state)
        cache.keep_context(anchor - held)
        held = anchor
    return torch.cat(outputs)


@pytest.mark.parametrize("sample_from_anchor", [False, True])
@pytest.mark.parametrize("causal", [None, True, False])
@pytest.mark.parametrize("layers", ["full", "sliding", "mixed"])
@torch.no_grad()
def test_packed_blocks_are_those_of_decoding(layers, causal, sample_from_anchor):
    draft = tiny_drafter(layers, is_causal=causal, sample_from_anchor=sample_from_anchor, input_embedding_scale=0.5)
    documents = texts()
    states = random_states(documents)
    anchors = [draw_anchors(document, 0, 0, 512) for document in documents]  # every one: blocks overlap
    batch = pack_blocks(documents, anchors, states, draft.config)
    parts = TargetParts(tiny_target())
    found = TrainableDrafter(draft, parts, Objective()).block_outputs(batch)
    expected = [
        decoded_blocks(draft, lambda ids: parts.embed(ids, 0.5), document, state.features, chosen)
        for document, state, chosen in zip(documents, states, anchors, strict=True)
    ]
    assert (found - torch.cat(expected)).abs().max() < 1e-5
    assert torch.allclose(found, torch.cat(expected), atol=1e-9)
    head = parts.head
    logits = [draft.compute_logits(outputs, head) for outputs in (found, torch.cat(expected))]
    assert (logits[0] - logits[1]).abs().max() < 1e-5


@torch.no_grad()
def test_features_from_the_anchor_on_change_nothing():
    draft, documents = tiny_drafter("mixed"), texts((30,))
    (state,) = random_states(documents)
    model = TrainableDrafter(draft, TargetParts(tiny_target()), Objective())

    def outputs(anchors, changed=None):
        features = state.features.clone()
        if changed is not None:
            features[changed] += 10
        batch = pack_blocks(documents, [torch.tensor(anchors)], [TargetStates(features, None)], draft.config)
        return model.block_outputs(batch)

    plain = outputs([10, 20])
    for changed, first_same in ((9, False), (10, True), (15, True)):
        moved = outputs([10, 20], changed)
        assert torch.equal(moved[0], plain[0]) is first_same
        assert not torch.equal(moved[1], plain[1])
    assert torch.equal(outputs([10, 20], 20), plain)


def test_labels_are_the_tokens_after_the_anchor_in_both_layouts():
    documents = texts((12,))
    (document,) = documents
    for sampled, slots in ((False, 3), (True, 4)):
        config = tiny_drafter(block_size=4, sample_from_anchor=sampled).config
        batch = pack_blocks(documents, [torch.tensor([4, 9])], random_states(documents), config)
        assert batch.valid.tolist() == [[True] * slots, [True] * 2 + [False] * (slots - 2)]
        text = document.input_ids.tolist()
        assert batch.labels.tolist() == text[5 : 5 + slots] + text[10:12]
        first = 0 if sampled else 1
        assert batch.rows.tolist() == [*range(first, 4), 4 + first, 5 + first]
        assert batch.block_ids.tolist() == [[text[4], MASK, MASK, MASK], [text[9], MASK, MASK, MASK]]


@pytest.mark.parametrize("sampled", [False, True])
def test_the_target_is_asked_where_it_predicts_the_label(sampled):
    documents = texts((12,))
    (state,) = random_states(documents)
    config = tiny_drafter(block_size=4, sample_from_anchor=sampled).config
    batch = pack_blocks(documents, [torch.tensor([4, 9])], [state], config)
    before = [4, 5, 6, 7, 9, 10] if sampled else [4, 5, 6, 9, 10]
    assert torch.equal(batch.last_hidden, state.last_hidden[before])


def test_blocks_stop_where_the_target_did_not_write():
    """Across a user's turn nothing is ever drafted, and the anchor's document ends where it ends."""
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    document = Document("turns", torch.arange(9), mask)
    assert candidates(mask).tolist() == [2, 3, 7]
    batch = pack_blocks([document], [candidates(mask)], random_states([document]), tiny_drafter(block_size=8).config)
    assert batch.labels.tolist() == [3, 4, 4, 8]
    assert (batch.covered, batch.supervised) == (3, 5)


def test_states_of_another_document_are_an_error():
    documents = texts((12, 20))
    states = random_states(documents)[::-1]
    with pytest.raises(ValueError, match="document 0 has 12 tokens, but its features are of 20"):
        pack_blocks(documents, [torch.tensor([4])] * 2, states, tiny_drafter().config)


def summed(model, documents, states, seed=0):
    anchors = [draw_anchors(document, 0, seed, 512) for document in documents]
    return model(pack_blocks(documents, anchors, states, model.draft.config))


@pytest.mark.parametrize("position_weights", ["dpace", "decay", "none"])
def test_sums_add_up_over_batches(position_weights):
    documents = texts()
    states = random_states(documents)
    objective = Objective(LossMix(1.0, 0.3, 0.2), position_weights=position_weights)
    model = TrainableDrafter(tiny_drafter("mixed"), TargetParts(tiny_target()), objective)
    whole = summed(model, documents, states)
    parts = [summed(model, [d], [s]) for d, s in zip(documents, states, strict=True)]
    for name, value in whole.items():
        assert torch.allclose(value.double(), sum(part[name].double() for part in parts), rtol=1e-6), name
    assert whole["weight"] > 0 and whole["rows"] == whole["counts"].sum()


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
@pytest.mark.parametrize("mix", [LossMix(), LossMix(0.1, 0.5, 0.9)])
def test_chunks_of_the_head_change_nothing(mix, chunk):
    documents = texts()
    states = random_states(documents)
    draft, parts = tiny_drafter(final_logit_softcapping=5.0), TargetParts(tiny_target())
    model = TrainableDrafter(draft, parts, Objective(mix, head_chunk=chunk))
    sums = summed(model, documents, states)
    sums["loss"].backward()
    gradients = [parameter.grad.clone() for parameter in draft.parameters()]
    draft.zero_grad()
    loss, weight = direct_loss(model, documents, states)
    loss.backward()
    assert abs(sums["loss"] - loss) < 1e-6 * abs(loss) and torch.allclose(sums["weight"], weight)
    for chunked, parameter in zip(gradients, draft.parameters(), strict=True):
        assert torch.allclose(chunked, parameter.grad, atol=1e-9)


def direct_loss(model, documents, states):
    """The loss with all logits at once, by autograd alone."""
    anchors = [draw_anchors(document, 0, 0, 512) for document in documents]
    batch = pack_blocks(documents, anchors, states, model.draft.config)
    parts, mix = model._borrowed[0], model.objective.mix
    hidden = model.block_outputs(batch)[:, 1:][batch.valid]
    log_q = model.draft.compute_logits(hidden, parts.head).log_softmax(-1)
    p = parts.logits(batch.last_hidden).softmax(-1)
    cross_entropy = -log_q[range(len(log_q)), batch.labels]
    rows = mix.ce * cross_entropy + mix.kl * (p * (p.log() - log_q)).sum(-1)
    rows = rows + mix.tv * 0.5 * (p - log_q.exp()).abs().sum(-1)
    grid = torch.zeros(batch.valid.shape, dtype=rows.dtype).masked_scatter(batch.valid, cross_entropy.detach())
    weights = model.objective.weigh(grid, batch.valid, model.draft.config.block_size)[batch.valid]
    return (rows * weights).sum(), weights.sum()


def test_a_head_of_all_tokens_is_the_head_and_others_are_an_error():
    documents = texts()
    states, parts = random_states(documents), TargetParts(tiny_target())
    draft = tiny_drafter()
    whole = summed(TrainableDrafter(draft, parts, Objective()), documents, states)
    head = TrainedHead(parts.head, torch.arange(VOCAB))
    same = summed(TrainableDrafter(draft, parts, Objective(), head=head), documents, states)
    for name, value in whole.items():
        assert torch.allclose(value, same[name]), name
    some = torch.arange(0, MASK, 2)
    head = TrainedHead(parts.head, some)
    hidden = torch.randn(3, WIDTH).double()
    assert torch.allclose(head(hidden), parts.head(hidden)[:, some])
    with pytest.raises(ValueError, match=r"tokens \[1, 3, .* not in the restricted head"):
        summed(TrainableDrafter(draft, parts, Objective(), head=head), documents, states)


def test_distributions_of_a_restricted_head_are_over_its_tokens():
    documents = [Document("0", torch.randint(0, MASK // 2, (20,)) * 2, torch.arange(20) > 2)]
    states, parts, some = random_states(documents), TargetParts(tiny_target()), torch.arange(0, MASK, 2)
    model = TrainableDrafter(
        tiny_drafter(), parts, Objective(LossMix(0.0, 0.7, 0.3)), head=TrainedHead(parts.head, some)
    )
    batch = pack_blocks(documents, [torch.tensor([4, 9])], states, model.draft.config)
    rows = model.block_outputs(batch).flatten(0, 1)[batch.rows]
    q = parts.head(rows)[:, some].softmax(-1)
    p = parts.head(batch.last_hidden)[:, some].softmax(-1)
    expected = 0.7 * (p * (p / q).log()).sum(-1) + 0.3 * 0.5 * (p - q).abs().sum(-1)
    assert torch.allclose(model._row_losses(model.block_outputs(batch), batch)[0], expected)


def test_losses_on_distributions_need_the_last_hidden_states():
    documents = texts()
    states = [TargetStates(state.features, None) for state in random_states(documents)]
    model = TrainableDrafter(tiny_drafter(), TargetParts(tiny_target()), Objective(LossMix(kl=1.0)))
    with pytest.raises(ValueError, match="need the target's last_hidden"):
        summed(model, documents, states)


def test_the_target_is_not_trained_nor_part_of_the_model():
    target = tiny_target()
    model = TrainableDrafter(tiny_drafter(), TargetParts(target), Objective())
    assert not any(parameter.requires_grad for parameter in target.parameters())
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"draft"}


def test_simulated_tau_counts_complete_blocks():
    documents = texts((12,))
    model = TrainableDrafter(tiny_drafter(block_size=4), TargetParts(tiny_target()), Objective())
    batch = pack_blocks(documents, [torch.tensor([4, 5, 10])], random_states(documents), model.draft.config)
    outputs = model.block_outputs(batch)[:, 1:]
    right = model.draft.compute_logits(outputs, model._borrowed[0].head).argmax(-1)[:2].tolist()
    text = documents[0].input_ids.tolist()
    runs = []
    for anchor, tokens in zip((4, 5), right, strict=True):
        run = 0
        while run < 3 and tokens[run] == text[anchor + 1 + run]:
            run += 1
        runs.append(run)
    found = model(batch)
    assert found["blocks"] == 2 and found["emitted"] == sum(runs) + 2
