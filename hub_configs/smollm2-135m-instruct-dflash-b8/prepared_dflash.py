"""Decoding by what `generate` has prepared: its logits processors, stopping criteria and generation config.

A processor may look at all tokens before, and remember what it saw. So the positions of a block are judged one by one:
each processor, and each criterion, is called once for every token of the output, in order, on the very tokens that come
before it, and never for a token that is not kept. That is what `generate` does, so none has to be refused.

Shapes: one row, P prompt tokens, w positions of a verified block, V vocabulary.
"""

import torch
from transformers.cache_utils import DynamicCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .decoding_dflash import speculative_generate
from .sampling_dflash import DraftProposal, Sampler, Verdict, acceptance_probability, next_token_distribution

# Warpers that look at nothing but each position's own scores, so that a whole block may be given to them at once.
_POINTWISE = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
# What `generate` passes on besides tokens, mask and positions, and what follows from them.
_EXPECTED = ("use_cache", "logits_to_keep", "attention_mask", "position_ids", "cache", "past_key_values")


class PreparedSampler(Sampler):
    """Chooses and judges the tokens of one call by prepared processors and criteria, position by position.

    Args:
        input_ids (`torch.LongTensor` of shape [1, P]): the prompt as `generate` has it, padding included.
        processors (`LogitsProcessorList`), criteria (`StoppingCriteriaList`): what `generate` prepared.
        scores, logits (`bool`): keep the processed scores, or the target's logits, of every token of the output.
        settings: those of `Sampler`; `temperature` is 1 to sample, as the processors hold the user's, and 0 if not.

    Attributes:
        finished: whether the criteria have ended the text.
        scores, logits: tuples of [1, V], or None.
    """

    def __init__(self, input_ids, processors, criteria, scores=False, logits=False, **settings):
        super().__init__(**settings)
        self.sequence, self.processors, self.criteria = input_ids, processors, criteria
        self.scores, self.logits = () if scores else None, () if logits else None

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        return self._next(logits, None)[0]

    def verify(self, proposal: DraftProposal | None, logits: torch.Tensor) -> Verdict:
        drafted = 0 if proposal is None else proposal.tokens.shape[1]
        for slot in range(drafted + 1):
            token, kept = self._next(logits[:, slot], proposal.at(slot) if slot < drafted else None)
            if self.finished or not kept:
                break
        # A text may end with a draft token: it is then what the target would have chosen, and no other token follows.
        return Verdict(torch.full_like(token, slot), token)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _next(self, logits: torch.Tensor, draft: DraftProposal | None) -> tuple[torch.Tensor, bool]:
        """The token [1] after the sequence, of logits [1, V], and whether it is the draft's; appends and ends.

        Processors and criteria may keep what they are given, so nothing of it belongs to inference mode.
        """
        device, home = logits.device, self.sequence.device
        logits = logits.to(home, torch.float32, copy=True)
        scores = self.processors(self.sequence, logits)
        token, kept = self._judge(scores, None if draft is None else draft.to(home))
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        self.sequence = torch.cat([self.sequence, token[:, None]], dim=1)
        self.finished = bool(self.criteria(self.sequence, self.scores).all())
        return token.to(device), kept

    def _judge(self, scores: torch.Tensor, draft: DraftProposal | None) -> tuple[torch.Tensor, bool]:
        if self.greedy:
            token = scores.argmax(-1)
            return token, draft is not None and torch.equal(draft.tokens[:, 0], token)
        target = scores.softmax(-1)
        if draft is None:
            return self.draw(target), False
        pair = target[:, None].expand(-1, 2, -1)
        chance = acceptance_probability(pair, draft)
        if torch.rand(chance.shape, generator=self.generator, device=chance.device, dtype=chance.dtype) < chance:
            return draft.tokens[:, 0].clone(), True
        return self.draw(next_token_distribution(pair, draft, torch.zeros_like(draft.tokens[:, 0]))), False


def generate_prepared(
    draft, target, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, **options
):
    """The decoding method behind `target.generate(custom_generate=draft.custom_generate)`; see there.

    Args:
        options: `streamer`, `generator`, `draft_temperature`, `block_size`, `draft_context_window` and
            `draft_confidence` as in `speculative_generate`.

    Raises:
        ValueError: the call asks for what the loop cannot do; the message names it.
    """
    attention_mask = _check_request(input_ids, generation_config, model_kwargs)
    wants_dict = generation_config.return_dict_in_generate
    settings = {
        "temperature": 1.0 if generation_config.do_sample else 0.0,
        "draft_temperature": options.pop("draft_temperature"),
        "generator": options.pop("generator"),
        **{name: getattr(generation_config, name, None) for name in ("top_k", "top_p", "min_p")},
    }
    keeps = {name: bool(wants_dict and getattr(generation_config, f"output_{name}")) for name in ("scores", "logits")}
    stops = _stop_tokens(stopping_criteria)
    if stops is not None and _is_pointwise(logits_processor, generation_config) and not any(keeps.values()):
        sampler = Sampler(**settings)
        sampler.warp = logits_processor
    else:
        sampler = PreparedSampler(input_ids, logits_processor, stopping_criteria, **keeps, **settings)
    longest = stopping_criteria.max_length or generation_config.max_length
    output = speculative_generate(
        draft,
        target,
        input_ids,
        attention_mask,
        return_dict=wants_dict,
        sampler=sampler,
        max_new_tokens=max(1, longest - input_ids.shape[1]),
        max_length=None,
        stop_token_ids=list(stops or ()),
        prefill_chunk_size=getattr(generation_config, "prefill_chunk_size", None),
        cache_config=None,
        **_cache_options(model_kwargs),
        **options,
    )
    if wants_dict:
        output.scores, output.logits = (getattr(sampler, name) if keeps[name] else None for name in keeps)
    return output


def _check_request(input_ids, generation_config, model_kwargs) -> torch.Tensor | None:
    """Raises `ValueError`, with the name, for what is asked for and cannot be done; gives the attention mask."""
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"a drafter speeds up greedy decoding and sampling; the settings ask for {mode.value}")
    for name in ("output_attentions", "output_hidden_states"):
        if generation_config.return_dict_in_generate and getattr(generation_config, name):
            raise ValueError(f"{name}=True is not supported, as several tokens come from one forward of the target")
    foreign = [name for name, value in model_kwargs.items() if name not in _EXPECTED and value is not None]
    if foreign:
        raise ValueError(f"the prompt has to be input_ids alone; not supported: {', '.join(foreign)}")
    for name in ("cache", "past_key_values"):
        cache = model_kwargs.get(name)
        if cache is not None and cache.get_seq_length():
            raise ValueError(
                f"{name} is a {type(cache).__name__} of {int(cache.get_seq_length())} tokens, of which the drafter has "
                "no context; spec_generate(cache=...) continues a conversation"
            )
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    length = input_ids.shape[1] if mask is None else int(mask[0].sum())
    if mask is not None and not mask[0, mask.shape[1] - length :].all():
        raise ValueError(
            "attention_mask has zeros after the padding on the left; where it is not given, `generate` puts them at "
            f"every pad_token_id ({generation_config.pad_token_id}): pass attention_mask=torch.ones_like(input_ids)"
        )
    if positions is not None:
        plain = torch.arange(length, device=positions.device)
        if not (positions[..., positions.shape[-1] - length :] == plain).all():
            raise ValueError(f"position_ids have to count from 0 after the padding, got {positions.tolist()}")
    return mask


def _cache_options(model_kwargs) -> dict:
    """Which cache to fill: the empty one that `generate` made, unless it is of the kind that is made anyway."""
    made = next(
        (model_kwargs[name] for name in ("cache", "past_key_values") if model_kwargs.get(name) is not None), None
    )
    if made is None or type(made) is DynamicCache:
        return {"cache": None, "cache_implementation": "dynamic"}
    return {"cache": made, "cache_implementation": None}


def _is_pointwise(processors, generation_config) -> bool:
    return not processors or (generation_config.do_sample and all(type(item) in _POINTWISE for item in processors))


def _stop_tokens(criteria) -> list[int] | None:
    """The stop tokens, if stop tokens and a maximal length are all there is."""
    if not all(type(item) in (MaxLengthCriteria, EosTokenCriteria) for item in criteria):
        return None
    return [token for item in criteria if type(item) is EosTokenCriteria for token in item.eos_token_id.tolist()]
