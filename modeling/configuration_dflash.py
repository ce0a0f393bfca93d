"""Configuration of a DFlash drafter: every key a published checkpoint carries, read once and checked."""

import math
import warnings
from types import SimpleNamespace

import torch
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from .draft_tokens_dflash import check_token_ids, read_token_ids, write_token_ids

ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
LAYER_TYPES = ("full_attention", "sliding_attention")

# Keys that define the drafter; checkpoints put them in `dflash_config`, at top level, or in both places.
_REQUIRED_DFLASH = ("block_size", "mask_token_id", "target_layer_ids")
_CORRECTION_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_SWITCHES = ("sample_from_anchor", "window_from_anchor", "attention_sink_bias", "has_embed_tokens", "has_lm_head")
_OPTIONAL_DFLASH = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "draft_token_ids": None,
    **dict.fromkeys(_SWITCHES, False),
    **dict.fromkeys(_CORRECTION_KEYS),
}

# Keys of the transformer itself whose library defaults would be a guess.
_REQUIRED_LAYERS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "layer_types",
    "num_target_layers",
)

# Keys that, at any other value than these, describe a different model than the one implemented here.
_NEUTRAL = {
    "use_swa": (False, None),
    "swa_window_size": (None,),
    "projector_type": ("dflash", None),
    "causal_head": (False, None),
    "markov_rank": (0, None),
    "markov_head_type": (None,),
    "use_confidence_head": (False, None),
    "enable_confidence_head": (False, None),
    "speculators_model_type": (None,),
    "speculators_config": (None,),
    "transformer_layer_config": (None,),
}

# All keys of a config.json that this config reads or refuses.
KNOWN_KEYS = frozenset(
    (
        *(*_REQUIRED_LAYERS, *_REQUIRED_DFLASH, *_OPTIONAL_DFLASH, *_NEUTRAL),
        *("architectures", "dflash_config", "draft_vocab_size", "is_causal", "model_type", "shift_label"),
        *("sliding_window", "use_sliding_window", "rope_theta", "rope_scaling", "rope_parameters"),
        *("partial_rotary_factor", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"),
    )
)


class DFlashConfig(Qwen3Config):
    """Settings of a DFlash drafter, in the schemas of z-lab's checkpoints (legacy and nested).

    The transformer keys are those of [`Qwen3Config`], and all that change the result are required. The DFlash keys
    may stand in `dflash_config`, at top level, or in both places with equal values.

    Args:
        block_size (`int`): positions a block has: one known anchor token and `block_size - 1` masks.
        sample_from_anchor (`bool`): what slot k of a block after an anchor at position p predicts: position p + k
            (False, z-lab's layout: the anchor's own slot predicts nothing) or p + k + 1 (True, DeepSpec's layout: all
            slots predict, `block_size` proposals). Model-Optimizer calls it `shift_label`.
        mask_token_id (`int`): id whose embedding stands for a position to fill.
        target_layer_ids (`list[int]`): strictly increasing ids of the target layers that are read (*taps*); id i is
            the output of decoder layer i, `hidden_states[i + 1]`.
        num_target_layers (`int`): decoder layers of the target.
        is_causal (`bool`, *optional*): attention inside a block. Absent: `dflash_config.causal`; absent too: sliding
            layers are causal and full layers bidirectional (the rule of z-lab and vLLM).
        window_from_anchor (`bool`): in sliding layers every slot sees the `sliding_window` positions before the anchor
            and the block (speculators' rule); False: each slot counts from its own position, the block included.
        attention_sink_bias (`bool`): each head of each layer has a learned logit that joins its softmax and whose value
            is zero (Model-Optimizer).
        has_embed_tokens, has_lm_head (`bool`): the checkpoint brings its own embedding or head, used instead of the
            target's.
        draft_vocab_size (`int`, *optional*): rows of that head, if it covers a part of the vocabulary, named by the
            tensors `d2t` and `t2d`. Default: `vocab_size`.
        draft_token_ids (`list[int]` or `str`, *optional*): the only tokens that the drafter proposes, ascending, or
            ranges of them ("0-2,5"); then only their rows of the target's head are used. Default: all.
        input_embedding_scale (`float`): factor on the raw embedding rows.
        output_multiplier (`float`): factor on the draft logits, before the softcap.
        final_logit_softcapping (`float`, *optional*): draft logits become `cap * tanh(logits / cap)`.
        conv_kernel_size, conv_group_size, selector_rank, selector_top_k (`int`, *optional*): DFlash 2's in-block
            convolutions and candidate selector; all four or none.

    Raises:
        ValueError: a required key is absent, a value cannot be right, two places disagree, or a key asks for a model
            that is not DFlash.
    """

    model_type = "qwen3"
    has_no_defaults_at_init = True
    _auto_class = "AutoConfig"

    def __init__(self, **kwargs):
        settings = dict(kwargs)
        dflash = _dflash_settings(settings)
        _require(settings, _REQUIRED_LAYERS, "config.json")
        _check_rope(settings)
        _check_windows(settings)
        _check_dtype(settings)
        draft_vocabulary = settings.pop("draft_vocab_size", None)
        dflash["draft_vocab_size"] = settings["vocab_size"] if draft_vocabulary is None else draft_vocabulary
        causal = dflash.pop("causal")
        is_causal = settings.pop("is_causal", None)
        if None not in (causal, is_causal) and causal != is_causal:
            warnings.warn(f"is_causal={is_causal} decides over dflash_config.causal={causal}", stacklevel=2)
        dflash["is_causal"] = causal if is_causal is None else is_causal
        _check_positive_int("vocab_size", settings["vocab_size"])
        dflash["draft_token_ids"] = read_token_ids(dflash["draft_token_ids"], settings["vocab_size"])
        _check(SimpleNamespace(**{"architectures": None, **settings, **dflash}))
        try:
            super().__init__(**settings)
        except Exception as error:  # the kinds differ between versions of Transformers
            raise ValueError(f"config.json is not a Qwen3 config: {error}") from error
        for key, value in dflash.items():
            setattr(self, key, value)

    def proposals(self, block_size: int | None = None) -> int:
        """Draft tokens that a block of `block_size` positions (default: as trained) proposes."""
        return (block_size or self.block_size) - (not self.sample_from_anchor)

    @property
    def has_correction(self) -> bool:
        """Whether the checkpoint is a DFlash 2 drafter (in-block convolutions and candidate selector)."""
        return self.selector_rank is not None

    def layer_is_causal(self, layer_idx: int) -> bool:
        """Whether a block position is hidden from earlier positions of its block in this layer."""
        return self.layer_types[layer_idx] == "sliding_attention" if self.is_causal is None else self.is_causal

    def layer_window(self, layer_idx: int) -> int | None:
        """Sliding window of the layer: keys at distance < window are seen, on both sides when not causal."""
        return self.sliding_window if self.layer_types[layer_idx] == "sliding_attention" else None

    def cache_window(self, layer_idx: int) -> int | None:
        """Keys at this distance before the anchor or further are seen by no slot of a block; None: all are seen."""
        window = self.layer_window(layer_idx)
        return window if window is None or not self.window_from_anchor else window + 1

    @property
    def has_draft_vocabulary(self) -> bool:
        """Whether the drafter's own head covers a part of the vocabulary only."""
        return self.draft_vocab_size != self.vocab_size

    def check(self) -> None:
        """Raises `ValueError`, naming the value, for settings no drafter can have; cheap, so models call it again."""
        _check(self)

    def to_dict(self) -> dict:
        """The canonical schema: DFlash keys nested, `block_size` and RoPE's theta in both places readers look."""
        output = super().to_dict()
        dflash = {key: output.pop(key, None) for key in _REQUIRED_DFLASH}
        for key, neutral in _OPTIONAL_DFLASH.items():
            value = output.pop(key, neutral)
            if value != neutral:
                dflash[key] = write_token_ids(value) if key == "draft_token_ids" else value
        for key, neutral in (("is_causal", None), ("draft_vocab_size", self.vocab_size)):
            if output.get(key) == neutral:
                output.pop(key, None)
        return {
            **output,
            "dflash_config": dflash,
            "block_size": dflash["block_size"],
            "rope_theta": (output["rope_parameters"] or {}).get("rope_theta"),
        }


def _check(config) -> None:
    """The checks of `DFlashConfig.check`, on anything with its attributes."""
    for name in (*_REQUIRED_LAYERS, "block_size"):
        if name not in ("hidden_act", "rms_norm_eps", "attention_bias", "layer_types"):
            _check_positive_int(name, getattr(config, name))
    if not isinstance(config.hidden_act, str) or config.hidden_act not in ACT2FN:
        raise ValueError(f"hidden_act {config.hidden_act!r} is not an activation that Transformers knows")
    _check_numbers(config)
    _check_layers(config)
    _check_taps(config.target_layer_ids, config.num_target_layers)
    _check_correction(config)
    _check_vocabulary(config)
    mask = config.mask_token_id
    if not _is_int(mask) or not 0 <= mask < config.vocab_size:
        raise ValueError(f"mask_token_id {mask!r} is not an id of the vocabulary: vocab_size is {config.vocab_size}")


def _dflash_settings(settings: dict) -> dict:
    """Takes the DFlash keys out of `settings`, from `dflash_config` and from top level."""
    nested = settings.pop("dflash_config", None)
    if not isinstance(nested, (dict, type(None))):
        raise ValueError(f"dflash_config must be a dictionary, config.json has {nested!r}")
    nested = dict(nested or {})
    _refuse_other_models(settings, nested)
    dflash = {"causal": _agreed("causal", nested, {})}
    for key in _REQUIRED_DFLASH:
        dflash[key] = _agreed(key, nested, settings)
    _require(dflash, _REQUIRED_DFLASH, "dflash_config")
    for key in _OPTIONAL_DFLASH:
        dflash[key] = _agreed(key, nested, settings)
    _merge_shift_label(dflash, _agreed("shift_label", nested, settings))
    dflash.update({key: neutral for key, neutral in _OPTIONAL_DFLASH.items() if dflash[key] is None})
    unknown = sorted(key for key in nested if key not in _NEUTRAL)
    if unknown:
        raise ValueError(f"dflash_config has keys this code does not know: {', '.join(unknown)}")
    _check_aux_ids(settings, dflash["target_layer_ids"])
    return dflash


def _merge_shift_label(dflash: dict, shifted) -> None:
    """`shift_label` is another name of `sample_from_anchor`; the two may not disagree."""
    if shifted is None:
        return
    if dflash["sample_from_anchor"] not in (None, shifted):
        raise ValueError(f"sample_from_anchor is {dflash['sample_from_anchor']!r} but shift_label is {shifted!r}")
    dflash["sample_from_anchor"] = shifted


def _agreed(key: str, nested: dict, top: dict):
    """Removes `key` from both dictionaries and gives its one value, or None."""
    values = [place.pop(key) for place in (nested, top) if place.get(key) is not None]
    nested.pop(key, None)
    top.pop(key, None)
    if len(values) == 2 and values[0] != values[1]:
        raise ValueError(f"{key} is {values[0]!r} in dflash_config but {values[1]!r} at top level of config.json")
    return values[0] if values else None


def _refuse_other_models(settings: dict, nested: dict) -> None:
    architectures = settings.get("architectures")
    if not isinstance(architectures, (list, tuple, type(None))) or not all(
        isinstance(name, str) for name in architectures or ()
    ):
        raise ValueError(f"architectures must be a list of names, config.json has {architectures!r}")
    if architectures and not set(architectures) & set(ARCHITECTURES):
        raise ValueError(f"architectures is {architectures}; this code implements {' and '.join(ARCHITECTURES)}")
    for place in (settings, nested):
        for key, neutral in _NEUTRAL.items():
            if key in place and place[key] not in neutral:
                raise ValueError(
                    f"{key}={place[key]!r} describes another kind of drafter, which is not implemented here"
                )


def _check_aux_ids(settings: dict, taps) -> None:
    """Serving engines repeat the taps as `i + 1`; a repetition that says otherwise is an error."""
    for key in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        shifted = settings.get(key)
        if shifted is not None and shifted != [tap + 1 for tap in taps]:
            raise ValueError(f"{key} {shifted} is not target_layer_ids {taps} plus one")


def _require(settings: dict, names, place: str) -> None:
    missing = [name for name in names if settings.get(name) is None]
    if missing:
        raise ValueError(f"{place} lacks {', '.join(missing)}; a drafter is not usable with a guess, so none is made")


def _check_rope(settings: dict) -> None:
    scaling, parameters = settings.get("rope_scaling"), settings.get("rope_parameters")
    for name, value in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if not isinstance(value, (dict, type(None))):
            raise ValueError(f"{name} must be a dictionary, config.json has {value!r}")
    given = [dict(place) for place in (scaling, parameters) if place]
    thetas = [place["rope_theta"] for place in (*given, settings) if place.get("rope_theta") is not None]
    for theta in thetas:
        if not _is_number(theta) or theta <= 0:
            raise ValueError(f"rope_theta must be a positive number, config.json has {theta!r}")
    if len(set(thetas)) != 1:
        problem = f"gives several: {thetas}" if thetas else "gives none"
        raise ValueError(f"RoPE needs one rope_theta (top level or in rope_parameters); config.json {problem}")
    partial = [place["partial_rotary_factor"] for place in (*given, settings) if "partial_rotary_factor" in place]
    if any(factor not in (1.0, None) for factor in partial):
        raise ValueError(f"partial_rotary_factor {partial} is not implemented; RoPE covers the whole head")
    kinds = [place.get("rope_type", place.get("type", "default")) for place in given]
    for kind in kinds:
        if not isinstance(kind, str) or kind not in {"default", *ROPE_INIT_FUNCTIONS}:
            raise ValueError(f"rope_type must be one that Transformers knows, config.json has {kind!r}")
    if len(set(kinds)) > 1:
        raise ValueError(f"rope_scaling and rope_parameters name different RoPE types: {kinds}")
    known = {key for place in given for key, value in place.items() if value is not None} | set(settings)
    extra = {key for place in given for key in place if key in known} - {"rope_theta", "rope_type", "type"}
    if kinds and kinds[0] == "default" and extra - {"partial_rotary_factor"}:
        raise ValueError(f"RoPE has {', '.join(sorted(extra))} but no rope_type that uses them")
    if kinds and kinds[0] in ("yarn", "longrope", "llama3") and "original_max_position_embeddings" not in known:
        raise ValueError(f"RoPE type {kinds[0]!r} needs original_max_position_embeddings, config.json has none")


def _check_windows(settings: dict) -> None:
    """`Qwen3Config` drops the window when `use_sliding_window` is not true; here that is a contradiction."""
    layer_types = settings["layer_types"]
    if not isinstance(layer_types, (list, tuple)) or not all(kind in LAYER_TYPES for kind in layer_types):
        raise ValueError(f"layer_types must be a list of {' and '.join(LAYER_TYPES)}, config.json has {layer_types!r}")
    slides = "sliding_attention" in layer_types
    if slides and settings.get("use_sliding_window") is not True:
        raise ValueError(
            f"layer_types has sliding_attention but use_sliding_window is {settings.get('use_sliding_window')!r}; "
            "set it to true, or name every layer full_attention"
        )
    if slides:
        _check_positive_int("sliding_window", settings.get("sliding_window"))
    if settings.get("use_sliding_window") and not slides:
        raise ValueError("use_sliding_window is true but no entry of layer_types is sliding_attention")


def _check_dtype(settings: dict) -> None:
    dtype = settings.get("dtype", settings.get("torch_dtype"))
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, (torch.dtype, type(None))) or (found is None and dtype is not None):
        raise ValueError(f"dtype must name a torch dtype, config.json has {dtype!r}")


def _check_numbers(config) -> None:
    positive = ("rms_norm_eps", "input_embedding_scale", "output_multiplier")
    for name in positive:
        value = getattr(config, name)
        if not _is_number(value) or value <= 0:
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    cap = config.final_logit_softcapping
    if cap is not None and (not _is_number(cap) or cap < 0):
        raise ValueError(f"final_logit_softcapping must be a number >= 0 (0: none), got {cap!r}")
    for name in ("attention_bias", "is_causal", *_SWITCHES):
        value = getattr(config, name)
        if not isinstance(value, bool) and (name, value) != ("is_causal", None):
            raise ValueError(f"{name} must be true or false, got {value!r}")


def _check_layers(config) -> None:
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )
    if config.head_dim % 2:
        raise ValueError(f"RoPE needs an even head_dim, got {config.head_dim}")
    if len(config.layer_types) != config.num_hidden_layers:
        raise ValueError(
            f"layer_types names {len(config.layer_types)} layers but num_hidden_layers is {config.num_hidden_layers}"
        )
    if config.block_size < 2 - config.sample_from_anchor:
        raise ValueError(f"block_size counts the anchor, so it is at least 2; got {config.block_size}")


def _check_taps(taps, num_target_layers: int) -> None:
    if not isinstance(taps, (list, tuple)) or not taps or not all(_is_int(tap) for tap in taps):
        raise ValueError(f"target_layer_ids must be a list of integers, got {taps!r}")
    if list(taps) != sorted(set(taps)):
        raise ValueError(f"target_layer_ids must be strictly increasing, got {list(taps)}")
    if taps[0] < 0 or taps[-1] >= num_target_layers:
        raise ValueError(f"target_layer_ids {list(taps)} must lie in 0..{num_target_layers - 1} (num_target_layers)")


def _check_correction(config) -> None:
    given = [key for key in _CORRECTION_KEYS if getattr(config, key) is not None]
    wanted = "DFlash2DraftModel" in (config.architectures or ())
    missing = [key for key in _CORRECTION_KEYS if key not in given]
    if missing and (given or wanted):
        raise ValueError(f"a DFlash 2 drafter needs {', '.join(_CORRECTION_KEYS)}; {', '.join(missing)} is missing")
    if given and config.architectures and not wanted:
        raise ValueError(f"{', '.join(given)} belong to DFlash2DraftModel but architectures is {config.architectures}")
    for key in given:
        _check_positive_int(key, getattr(config, key))
    if given and config.hidden_size % config.conv_group_size:
        raise ValueError(
            f"hidden_size {config.hidden_size} is not a multiple of conv_group_size {config.conv_group_size}"
        )
    if given and config.selector_top_k > config.vocab_size:
        raise ValueError(f"selector_top_k {config.selector_top_k} exceeds vocab_size {config.vocab_size}")


def _check_vocabulary(config) -> None:
    size, draft = config.vocab_size, config.draft_vocab_size
    _check_positive_int("draft_vocab_size", draft)
    if draft > size:
        raise ValueError(f"draft_vocab_size {draft} exceeds vocab_size {size}")
    if draft != size and not config.has_lm_head:
        raise ValueError(
            f"draft_vocab_size {draft} differs from vocab_size {size}, so the drafter needs a head of its own, but "
            "has_lm_head is not true"
        )
    if draft != size and config.selector_rank is not None:
        raise ValueError(f"a candidate selector over draft_vocab_size {draft} of {size} tokens is not implemented")
    if config.draft_token_ids is not None:
        check_token_ids(config.draft_token_ids, size)
        if config.has_lm_head or config.selector_rank is not None:
            raise ValueError("draft_token_ids are rows of the target's head; has_lm_head or a selector cannot use them")


def _check_positive_int(name: str, value) -> None:
    if not _is_int(value) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
