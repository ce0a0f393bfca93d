"""Taking tokens back from a target's cache, exactly, whatever its layers keep.

Keys and values (full, sliding, latent) have one entry per token and are cropped. A convolutional or recurrent state has
none: it is copied before a forward that may be taken back, and a rollback restores the copy and runs only the modules
that drive it (the *mixers*) over the tokens that stay, on the very inputs they got in that forward.

Shapes: N rows, T tokens of the last forward, n of them that stay, H width.
"""

import contextlib
import weakref

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, DynamicSlidingWindowLayer, StaticSlidingWindowLayer

from .cache_layers_dflash import StaticWindow, crop_keys, keeps_keys, keeps_state, room_of, states_of
from .devices_dflash import execution_device

_PROBE_PREFIX, _PROBE_BLOCK = 5, 4

# Names of each target's mixers. The search costs two short forwards, so it is made once per target.
_MIXERS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class CacheRollback:
    """The rollback of one cache.

    Args:
        cache (`Cache`): made for the target, and so far used only with a rollback after each forward, or not at all.
        layers (`nn.ModuleList`): the target's decoder layers.
        mixers (`list[str]`): names, within `layers`, of the modules that drive its states; see `find_mixers`.
    """

    def __init__(self, cache: Cache, layers: nn.ModuleList, mixers: list[str]):
        self.cache = cache
        self.mixers = [layers.get_submodule(name) for name in mixers]
        self._stateful = [layer for layer in cache.layers if keeps_state(layer)]
        self._recording = False
        self._tokens = 0
        self._calls: list[tuple] | None = None
        self._copies: list[tuple[dict, dict]] = []
        self._frozen = [layer for layer in cache.layers if room_of(layer) is not None]  # these go back with help only
        self._windows: list[StaticWindow] = []
        self._tentative = False
        self._sliding = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
        for layer in self._sliding:
            layer.activate_past_recording()

    def close(self) -> None:
        """Leaves the cache as Transformers uses it: sliding layers trim themselves again, without being told."""
        for layer in self._sliding:
            layer.record_past = False

    def attach(self) -> list:
        """Hooks that note the mixers' inputs, for the caller to remove. Other users of the target pass unnoticed."""

        def note(module, args, kwargs):
            if self._recording and any(value is self.cache for value in (*args, *kwargs.values())):
                self._calls.append((module, args, kwargs))

        return [mixer.register_forward_pre_hook(note, with_kwargs=True) for mixer in self.mixers]

    def room(self, tokens: int) -> int:
        """How many of `tokens` tokens a tentative forward may have now, so that any of its last can be taken back."""
        return min([tokens, *(room_of(layer) for layer in self._frozen)])

    @contextlib.contextmanager
    def forward(self, tokens: int, tentative: bool):
        """Goes around each forward over `tokens` tokens; only a tentative one can be taken back from every layer."""
        self._tokens, self._calls, self._tentative = tokens, None, tentative
        static = [layer for layer in self._frozen if isinstance(layer, StaticSlidingWindowLayer)]
        self._windows = [StaticWindow(layer, tokens) for layer in static] if tentative else []
        if not (tentative and self._stateful):
            yield
            return
        self._copies = [
            ({place: state.clone() for place, state in states_of(layer).items()}, dict(layer.has_previous_state))
            for layer in self._stateful
        ]
        self._calls, self._recording = [], True
        try:
            with step_form(self.mixers):
                yield
        finally:
            self._recording = False

    def take_back(self, count: int) -> None:
        """Takes the last `count` tokens back. Due after every forward: sliding layers trim themselves here.

        Raises:
            ValueError: the forward was not a tentative one, or had fewer tokens.
        """
        bound = self._stateful or self._frozen
        if count and bound and (not self._tentative or count >= self._tokens):
            raise ValueError(
                f"{count} of {self._tokens} tokens cannot be taken back: a recurrent state, a static window or "
                "quantised keys go back only within the last forward, and only if that gave the logits of several "
                "tokens; ask for more with logits_to_keep"
            )
        windows = {id(window.layer): window for window in self._windows}
        for layer in self.cache.layers:
            if id(layer) in windows:
                windows[id(layer)].take_back(count)
            else:
                crop_keys(layer, count)
        if count and self._stateful:
            self.restore()
            self.replay(0, self._tokens - count)
        self._calls, self._copies, self._windows, self._tentative = None, [], [], False

    def restore(self) -> None:
        """Puts the states back to where they were before the last forward."""
        for layer, (copies, flags) in zip(self._stateful, self._copies, strict=True):
            for place, state in states_of(layer).items():
                state.copy_(copies[place] if place in copies else torch.zeros_like(state))
            layer.has_previous_state.update(flags)

    def replay(self, start: int, stop: int) -> list[torch.Tensor]:
        """Runs every mixer over tokens start..stop of its noted inputs; gives their outputs [N, stop - start, H]."""
        outputs = []
        with step_form(self.mixers):
            for module, args, kwargs in self._calls:
                args = [_cut(value, self._tokens, start, stop) for value in args]
                kwargs = {name: _cut(value, self._tokens, start, stop) for name, value in kwargs.items()}
                output = module(*args, **kwargs)
                outputs.append(output if isinstance(output, torch.Tensor) else output[0])
        return outputs


@contextlib.contextmanager
def step_form(mixers):
    """Makes chunks of tokens mean what the same tokens mean one by one, within this context.

    A state-space mixer clamps its time steps to `time_step_limit` in chunks, but not in steps of one token (neither in
    Transformers nor in the kernels it calls). Decoding goes in steps, so a block must not be clamped either.
    """
    limits = [(mixer, mixer.time_step_limit) for mixer in mixers if hasattr(mixer, "time_step_limit")]
    try:
        for mixer, _ in limits:
            mixer.time_step_limit = (0.0, float("inf"))
        yield
    finally:
        for mixer, limit in limits:
            mixer.time_step_limit = limit


def find_mixers(target, run) -> list[str]:
    """Names, within the target's decoder layers, of the modules that drive its states; none if it keeps none.

    They are found, and shown to continue a state over several tokens just as one by one, by two forwards over a few
    tokens: what a module does decides, not what it is called.

    Args:
        target (`PreTrainedModel`): the target.
        run: calls the target with ids [1, n], positions [1, n] and a cache.

    Raises:
        ValueError: no such modules, or they cannot continue their state over several tokens.
    """
    if target not in _MIXERS:
        cache = DynamicCache(config=target.config)
        stateful = any(keeps_state(layer) for layer in cache.layers)
        _MIXERS[target] = _probe(target, run, cache) if stateful else []
    return _MIXERS[target]


@torch.inference_mode()
def _probe(target, run, cache) -> list[str]:
    layers = target.get_decoder().layers
    embedding = target.get_input_embeddings()
    rows, device = embedding.weight, execution_device(embedding)
    total = _PROBE_PREFIX + _PROBE_BLOCK
    ids = torch.arange(1, total + 1, device=device)[None] * (rows.shape[0] - 1) // total
    positions = torch.arange(total, device=device)[None]
    first, block = slice(_PROBE_PREFIX), slice(_PROBE_PREFIX, total)
    try:
        with _watched(layers, cache) as mixers:
            run(ids[:, first], positions[:, first], cache)
        rollback = CacheRollback(cache, layers, mixers)
        rollback.take_back(0)
        hooks = rollback.attach()
        try:
            with rollback.forward(_PROBE_BLOCK, tentative=True):
                run(ids[:, block], positions[:, block], cache)
        finally:
            for hook in hooks:
                hook.remove()
        error = _continuation_error(rollback)
    except Exception as problem:
        raise ValueError(
            f"{type(target).__name__} cannot be rolled back on Transformers' DynamicCache, as the modules that drive "
            f"its state do not run by themselves: {type(problem).__name__}: {problem}"
        ) from problem
    allowed = max(1e-3, 8 * torch.finfo(rows.dtype).eps)
    if not error <= allowed:
        raise ValueError(
            f"{type(target).__name__} cannot continue its state over several tokens at once: {_PROBE_BLOCK} tokens "
            f"after {_PROBE_PREFIX} come out {error:.1e} away from the same ones one by one (allowed: {allowed:.1e}), "
            "so a block cannot be verified in one forward; decode it without a drafter"
        )
    return mixers


@contextlib.contextmanager
def _watched(layers: nn.ModuleList, cache):
    """Gives a list that fills, during a first forward, with the names of the modules that give `cache` its states.

    A mixer is the innermost module that is handed the cache and after which a state is there that was not before.
    """
    claimed, mixers, hooks = set(), [], []

    def present():
        return {(i, *place) for i, layer in enumerate(cache.layers) if keeps_state(layer) for place in states_of(layer)}

    def watch(name):
        def hook(module, args, kwargs, output):
            if any(value is cache for value in (*args, *kwargs.values())) and not present() <= claimed:
                claimed.update(present())
                mixers.append(name)

        return hook

    for name, module in layers.named_modules():
        if name:
            hooks.append(module.register_forward_hook(watch(name), with_kwargs=True))
    try:
        yield mixers
    finally:
        for hook in hooks:
            hook.remove()
    if not mixers or not present() <= claimed:
        raise ValueError("no module that is handed the cache was seen to change its state")


def _continuation_error(rollback: CacheRollback) -> float:
    """Largest relative difference, over mixers, between their last block run in one chunk and one by one.

    Raises:
        ValueError: a mixer also writes keys.
    """
    lengths = _key_lengths(rollback.cache)
    rollback.restore()
    chunk = rollback.replay(0, _PROBE_BLOCK) + _clones(rollback.cache)
    rollback.restore()
    steps = [rollback.replay(i, i + 1) for i in range(_PROBE_BLOCK)]
    steps = [torch.cat(outputs, dim=1) for outputs in zip(*steps, strict=True)] + _clones(rollback.cache)
    if lengths != _key_lengths(rollback.cache):
        raise ValueError("it also writes keys, which a replay would write twice")
    return max(((a - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in zip(chunk, steps, strict=True))


def _key_lengths(cache) -> list[int]:
    return [layer.get_seq_length() for layer in cache.layers if keeps_keys(layer)]


def _clones(cache) -> list[torch.Tensor]:
    return [state.clone() for layer in cache.layers if keeps_state(layer) for state in states_of(layer).values()]


def _cut(value, tokens: int, start: int, stop: int):
    """Tokens start..stop of an argument [N, tokens, ...]; any other argument as it is."""
    if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == tokens:
        return value[:, start:stop]
    return value
