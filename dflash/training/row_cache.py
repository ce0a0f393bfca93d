"""A key/value cache whose rows are texts of their own length, so that a finished row can be given to another text.

Shapes: R rows, h heads, L positions that a row has room for, n positions in use by the longest row, d head width.
"""

import torch
from transformers.cache_utils import Cache, DynamicCache


class RowCache(Cache):
    """Keys and values of R rows. Each forward appends one token to every row, at that row's own end.

    Only for targets all of whose layers keep keys and values of every position; see `suits`.

    Args:
        rows, capacity (`int`): R and L.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device):
        super().__init__(layers=[])
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.capacity = capacity
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    @staticmethod
    def suits(target) -> bool:
        """Whether a target can decode with such a cache: full attention, and a mask that says what a row sees."""
        config = target.config.get_text_config(decoder=True)
        kinds = {type(layer).__name__ for layer in DynamicCache(config=target.config).layers}
        return kinds == {"DynamicLayer"} and config._attn_implementation in ("eager", "sdpa")

    def fill(self, row: int, cache: DynamicCache) -> None:
        """Makes a row what the cache of one text [1, h, n, d] holds."""
        if not self.keys:
            for layer in cache.layers:
                for store, states in ((self.keys, layer.keys), (self.values, layer.values)):
                    _, heads, _, width = states.shape
                    store.append(states.new_zeros(len(self.lengths), heads, self.capacity, width))
        length = cache.get_seq_length()
        for stores, name in ((self.keys, "keys"), (self.values, "values")):
            for store, layer in zip(stores, cache.layers, strict=True):
                store[row, :, :length] = getattr(layer, name)[0]
        self.lengths[row] = length

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Writes the states [R, h, 1, d] of a token at the end of each row -> keys and values [R, h, n, d]."""
        rows, end = torch.arange(len(self.lengths), device=self.lengths.device), self.in_use
        kept = []
        for store, states in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            store[rows, :, self.lengths] = states[:, :, 0]
            kept.append(store[:, :, :end])
        return tuple(kept)

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """What the next token of each row sees, [R, 1, 1, n]: the row, and itself at the row's end. Fixes n."""
        self.in_use = int(self.lengths.max()) + 1
        hidden = torch.arange(self.in_use, device=self.lengths.device) > self.lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill(hidden, torch.finfo(dtype).min)[:, None, None]

    def advance(self) -> None:
        self.lengths += 1

    def keep(self, rows: list[int]) -> None:
        """Drops all rows but these."""
        index = torch.tensor(rows, device=self.lengths.device)
        self.lengths = self.lengths[index]
        self.keys, self.values = [k[index] for k in self.keys], [v[index] for v in self.values]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.lengths.max())
