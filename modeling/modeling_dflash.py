"""DFlash drafter: a Qwen3-shaped decoder whose keys and values also come from a target's hidden states."""

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_rope_utils import dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
)

from .attention_dflash import BlockAttention, join_sink
from .cache_dflash import DFlashDraftCache
from .configuration_dflash import DFlashConfig
from .correction_dflash import DFlashBlockConv, DFlashCandidateSelector
from .decoding_dflash import speculative_generate
from .draft_tokens_dflash import RestrictedHead
from .native_dflash import check_native
from .pairing_dflash import PairReport, report_pair
from .prepared_dflash import generate_prepared
from .publishing_dflash import DFlashPublishing
from .resume_dflash import one_cache
from .sampling_dflash import DraftProposal
from .vocabulary_dflash import add_own_parts, check_vocabulary, in_target_vocabulary, target_ids


class DFlashRMSNorm(nn.RMSNorm):
    """RMS norm as in Qwen3: normalised in float32, weighted in the model's dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (
            x.dtype == torch.float32 and x.device.type == "cpu"
        ):  # one reduction where PyTorch's own makes several passes
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x * torch.rsqrt(length.square() / x.shape[-1] + self.eps) * self.weight
        normed = functional.rms_norm(x.float(), self.normalized_shape, None, self.eps)
        return self.weight * normed.to(x.dtype)


class DFlashRotaryEmbedding(Qwen3RotaryEmbedding):
    """Qwen3's RoPE whose frequencies stay in float32 when the model is cast: bfloat16 ones drift with position."""

    def _apply(self, fn, *args, **kwargs):
        exact = self.inv_freq, self.original_inv_freq
        super()._apply(fn, *args, **kwargs)
        if not exact[0].is_meta:
            self.inv_freq, self.original_inv_freq = (freq.to(self.inv_freq.device) for freq in exact)
        return self

    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines [N, 1, n, head_dim] of positions [N, n], as `rotate_positions` takes them."""
        angles = position_ids[:, None, :, None].float() * self.inv_freq.to(x.device, torch.float32)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_scaling != 1.0:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        return torch.cat([cos, cos], dim=-1).to(x.dtype), torch.cat([-sin, sin], dim=-1).to(x.dtype)

    def turn_back(self, keys: torch.Tensor, count: int) -> torch.Tensor:
        """Keys [N, heads, n, head_dim] at positions p -> the same at p - count: rotations add up."""
        exact = keys if keys.dtype == torch.float64 else keys.float()
        angles = -count * self.inv_freq.to(keys.device, torch.float32)
        cos, sin = angles.cos().to(exact.dtype), angles.sin().to(exact.dtype)
        return rotate_positions(exact, torch.cat([cos, cos]), torch.cat([-sin, sin])).to(keys.dtype)


def rotate_positions(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Applies RoPE to x [N, heads, n, head_dim]: its halves, swapped, meet sines whose first half is negated."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([second, first], dim=-1), signed_sin)


class DFlashAttention(nn.Module):
    """Queries from the block; keys and values from the target's features and the block, in one cache."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = config.layer_is_causal(layer_idx)
        window = config.layer_window(layer_idx)
        self.sliding_window = None if config.window_from_anchor else window
        self.context_window = window if config.window_from_anchor else None
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, width, bias=bias)
        self.q_norm = DFlashRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = DFlashRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.attention_sink_bias = None
        if config.attention_sink_bias:
            self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(self, hidden_states, context, position_embeddings, attention: BlockAttention, cache=None):
        """hidden_states [N, B, H], context [N, n, H], angles for n + B positions -> [N, B, H].

        Training gives A blocks one context: hidden_states [A, B, H], context [1, n, H], angles for n + A*B positions.
        """
        rows, width = context.shape[0], context.shape[-1]
        source = torch.cat([context, hidden_states.reshape(rows, -1, width)], dim=1)
        query = self.q_norm(self.q_proj(hidden_states).view(rows, -1, self.num_heads, self.head_dim)).transpose(1, 2)
        block = query.shape[2]
        cos, sin = position_embeddings
        query = rotate_positions(query, cos[:, :, -block:], sin[:, :, -block:])
        key, value = self.keys_and_values(source, position_embeddings)
        if isinstance(cache, DFlashDraftCache):
            key, value = cache.update(key, value, self.layer_idx, block)
        elif cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if self.context_window is not None:
            key, value = (x[:, :, -(self.context_window + block) :] for x in (key, value))
        mask = attention.mask(self.is_causal, self.sliding_window, key)
        if self.attention_sink_bias is not None:
            attention.check_sink()
            key, value, mask = join_sink(self.attention_sink_bias, query, key, value, mask)
        output, _ = attention.implementation(
            self,
            query,
            key,
            value,
            mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            is_causal=self.is_causal,
            sliding_window=self.sliding_window,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:2], -1))

    def keys_and_values(self, source, position_embeddings) -> tuple[torch.Tensor, torch.Tensor]:
        """source [N, n, H] and its angles -> rotated keys and values [N, heads, n, head_dim]."""
        rows, length = source.shape[:2]
        key = self.k_norm(self.k_proj(source).view(rows, length, -1, self.head_dim)).transpose(1, 2)
        value = self.v_proj(source).view(rows, length, -1, self.head_dim).transpose(1, 2)
        return rotate_positions(key, *position_embeddings), value


class DFlashDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = DFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = DFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention_conv = DFlashBlockConv(config) if config.has_correction else None
        self.mlp_conv = DFlashBlockConv(config) if config.has_correction else None

    def forward(self, hidden_states, context, position_embeddings, attention, cache=None):
        def attend(x):
            return self.self_attn(x, context, position_embeddings, attention, cache)

        hidden_states = hidden_states + _convolved(self.attention_conv, attend, self.input_layernorm(hidden_states))
        return hidden_states + _convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(hidden_states))


def _convolved(conv: DFlashBlockConv | None, sublayer, x: torch.Tensor) -> torch.Tensor:
    if conv is None:
        return sublayer(x)
    before, after = conv(x)
    return conv.convolve(sublayer(conv.convolve(x, before)), after)


class DFlashPreTrainedModel(PreTrainedModel):
    config_class = DFlashConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DFlashDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _keys_to_ignore_on_load_unexpected = [r"rotary_emb\.inv_freq"]

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, DFlashBlockConv):
            nn.init.zeros_(module.base_kernel)
            nn.init.ones_(module.base_kernel[:, 0])
            nn.init.zeros_(module.kernel_projection.weight)
        elif isinstance(module, DFlashCandidateSelector):
            nn.init.normal_(module.predecessor_codebook, std=self.config.initializer_range)
            nn.init.zeros_(module.successor_codebook)
        elif isinstance(module, DFlashAttention) and module.attention_sink_bias is not None:
            nn.init.zeros_(module.attention_sink_bias)


class DFlashDraftModel(DFlashPublishing, DFlashPreTrainedModel):
    """A DFlash drafter (arXiv 2602.06036). It borrows the target's embedding and head, unless it brings its own."""

    _auto_class = "AutoModel"

    def __init__(self, config: DFlashConfig):
        config.check()
        super().__init__(config)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = DFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = DFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DFlashRotaryEmbedding(config)
        self.candidate_selector = DFlashCandidateSelector(config) if config.has_correction else None
        add_own_parts(self, config)
        self.feature_width = len(config.target_layer_ids) * config.hidden_size
        self.output_multiplier = config.output_multiplier
        self.softcap = config.final_logit_softcapping
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """As in Transformers, but a checkpoint whose tensors are not exactly this model's raises `ValueError`."""
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs.update(output_loading_info=True, ignore_mismatched_sizes=True)  # so that all problems are named at once
        model, info = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        problems = {
            "tensors that the config asks for but the file lacks": info["missing_keys"],
            "tensors that the config has no place for": info["unexpected_keys"],
            "tensors whose shape in the file is not that of the config": info["mismatched_keys"],
        }
        found = "; ".join(f"{what}: {', '.join(sorted(map(str, names)))}" for what, names in problems.items() if names)
        if found:
            raise ValueError(f"{pretrained_model_name_or_path}: config.json and weights disagree. {found}")
        model.check_tensors()
        return (model, info) if wants_info else model

    def check_tensors(self) -> None:
        """Raises `ValueError` for tensors that contradict each other, as `d2t` and `t2d` may."""
        if self.config.has_draft_vocabulary:
            check_vocabulary(self.d2t, self.t2d)

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache=None,
        past_key_values=None,
        use_cache: bool | None = None,
        attention: BlockAttention | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        """Fills a block, by the contract of Transformers' own DFlash generation.

        Args:
            noise_embeds: [N, B, H] embeddings of the anchor and the masks.
            context_hidden_states: [N, n, K*H] features of the n context positions that the cache does not hold yet.
            position_ids: [N, n + B]; default: counted on from the cache.
            attention_mask: [N, past + n + B], 0 at padding.
            cache: a cache whose `update` takes keys, values and the layer's index; the caller removes the block
                from it afterwards. `past_key_values` is its name in older versions.
            attention: what `BlockAttention` offers, for blocks that no `attention_mask` describes: training runs A
                blocks [A, B, H] over the context [1, n, K*H] of packed documents, with `position_ids` [1, n + A*B].

        Returns:
            `BaseModelOutput` with `last_hidden_state` [N, B, H], after the final norm.
        """
        cache = past_key_values if cache is None else cache
        if not isinstance(cache, DFlashDraftCache | None):
            check_native(self.config)
        block = noise_embeds.shape[1]
        self._check_features(context_hidden_states)
        context = self.hidden_norm(self.fc(context_hidden_states))
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(past, past + context.shape[1] + block, device=noise_embeds.device)[None]
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)
        if attention is None:
            name = self.config._attn_implementation
            implementation = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
            attention = BlockAttention(implementation, name, block, attention_mask, noise_embeds.dtype)
        hidden_states = noise_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states, context, position_embeddings, attention, cache)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def absorb(self, features: torch.Tensor, position_ids: torch.LongTensor, cache: DFlashDraftCache) -> None:
        """Puts features [N, n, K*H] at positions [N, n] into `cache` as context, without filling a block."""
        self._check_features(features)
        context = self.hidden_norm(self.fc(features))
        position_embeddings = self.rotary_emb(context, position_ids)
        for layer_idx, layer in enumerate(self.layers):
            keys, values = layer.self_attn.keys_and_values(context, position_embeddings)
            cache.update(keys, values, layer_idx, block=0)
        cache.keep_context(features.shape[1])

    def _check_features(self, features: torch.Tensor) -> None:
        if features.shape[-1] != self.feature_width:
            raise ValueError(
                f"context_hidden_states have width {features.shape[-1]}, but {len(self.config.target_layer_ids)} taps "
                f"of width {self.config.hidden_size} make {self.feature_width}"
            )

    def compute_logits(self, hidden_states: torch.Tensor, output_head: nn.Module) -> torch.Tensor:
        """Draft logits [..., V] of block outputs [..., H]: the head, then multiplier, then softcap.

        The head is the drafter's own, [..., V_d], where it has one, and else `output_head`, the target's.
        """
        logits = output_head(hidden_states) if self.lm_head is None else self.lm_head(hidden_states)
        if self.output_multiplier != 1.0:
            logits = logits * self.output_multiplier
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits

    def propose(self, hidden_states: torch.Tensor, anchor: torch.Tensor, output_head: nn.Module, pick) -> DraftProposal:
        """Turns block outputs into draft tokens: the one place where a correction head acts.

        Args:
            hidden_states: [N, B, H], what `forward` gives.
            anchor: [N], the token in slot 0.
            output_head: the target's head, or a `RestrictedHead` of it.
            pick: maps logits [..., C] to chosen indices [...] and their distribution [..., C] or None.
        """
        slots = hidden_states if self.config.sample_from_anchor else hidden_states[:, 1:]
        logits = self.compute_logits(slots, output_head).to(anchor.device)
        if self.candidate_selector is not None:
            return self.candidate_selector(slots, logits, anchor, pick)
        proposal = DraftProposal(*pick(logits))
        if self.config.has_draft_vocabulary:
            return in_target_vocabulary(proposal, target_ids(self.d2t), self.config.vocab_size)
        if isinstance(output_head, RestrictedHead):
            return in_target_vocabulary(proposal, output_head.token_ids, self.config.vocab_size)
        return proposal

    def check_target(self, target: PreTrainedModel, tokenizer=None) -> PairReport:
        """What was checked and resolved for this drafter on `target`; see `pairing_dflash.PairReport`.

        Args:
            target: the target.
            tokenizer (*optional*): the target's tokenizer, without which mask and provenance are not compared with it.

        Raises:
            ValueError: the two cannot work together; the message names both values.
        """
        return report_pair(self, target, tokenizer)

    def spec_generate(
        self,
        target: PreTrainedModel,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        draft_temperature: float = 0.0,
        stop_token_ids: int | list[int] | None = None,
        prefill_chunk_size: int | None = None,
        draft_context_window: int | None = None,
        draft_confidence: float = 0.0,
        block_size: int | None = None,
        cache=None,
        past_key_values=None,
        cache_implementation: str | None = None,
        cache_config: dict | None = None,
        streamer=None,
        generator: torch.Generator | None = None,
        return_dict: bool = False,
    ):
        """Decodes with `target`, faster, without changing its output. See `decoding_dflash.speculative_generate`."""
        return speculative_generate(
            self,
            target,
            input_ids,
            attention_mask,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            draft_temperature=draft_temperature,
            stop_token_ids=stop_token_ids,
            prefill_chunk_size=prefill_chunk_size,
            draft_context_window=draft_context_window,
            draft_confidence=draft_confidence,
            block_size=block_size,
            cache=one_cache(cache, past_key_values),
            cache_implementation=cache_implementation,
            cache_config=cache_config,
            streamer=streamer,
            generator=generator,
            return_dict=return_dict,
        )

    def custom_generate(
        self,
        target: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer=None,
        synced_gpus: bool = False,
        draft_temperature: float = 0.0,
        draft_context_window: int | None = None,
        draft_confidence: float = 0.0,
        block_size: int | None = None,
        generator: torch.Generator | None = None,
        **model_kwargs,
    ):
        """A decoding method for `target.generate(..., custom_generate=draft.custom_generate)`.

        `generate` prepares everything as ever: prompt, logits processors, stopping criteria, generation config. The
        output is the same as without a drafter. The arguments from `draft_temperature` on are those of `spec_generate`
        and may be passed to `generate`. It keeps `streamer` to itself, so bind that one:
        `custom_generate=functools.partial(draft.custom_generate, streamer=streamer)`. `stop_strings` go in as
        `stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)]`.

        Returns:
            Sequences [1, P + T]; with `return_dict_in_generate`, a `DFlashGenerateOutput`.

        Raises:
            ValueError: beams, several rows, prompts that are not tokens, a cache of the caller's, or outputs besides
                scores and logits.
        """
        options = dict(draft_context_window=draft_context_window, draft_confidence=draft_confidence)
        options.update(block_size=block_size, draft_temperature=draft_temperature)
        options.update(streamer=streamer, generator=generator)
        return generate_prepared(
            self, target, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, **options
        )
