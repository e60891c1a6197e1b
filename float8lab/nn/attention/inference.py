"""The key/value cache of generation.  B rows, G key/value heads, S positions, D head size."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from float8lab.arguments import (
    INTEGER_DTYPES,
    check_dtype,
    check_flags,
    check_instance,
    check_size,
    check_tensor,
    has_values,
    shown,
)
from float8lab.formats import FP8_DTYPES, HIGH_PRECISION_DTYPES
from float8lab.nn.attention.cache import Cached, Pages, Places, Step, Store
from float8lab.nn.attention.layout import Packed
from float8lab.recipes.region import capturing

__all__ = ["InferenceParams", "Step", "positions_reached"]

_CACHE_DTYPES = (*HIGH_PRECISION_DTYPES, torch.float64, *FP8_DTYPES)


class InferenceParams:
    """The key/value cache of a model, passed to each of its layers during generation.

    There are two ways to use it. *Rows in step*: every row of the batch has the same number of
    tokens. Call the model on the prompt, add its length to ``sequence_len_offset``, call the model
    on a further token, add 1, and so on; adjust the offset only after the full model has run.

    *Ragged*: before each call of the model, ``pre_step({name: tokens, ...})`` says which sequences
    the rows of the batch are, in order, and how many tokens each has. Shorter rows are padded at
    the end, where their output is 0; thd has no such padding. A new name gets a free row of the
    cache; a name that is missing from a step is finished, and its row becomes free.

    A paged cache has memory for ``total_num_pages * page_size`` positions in all, which sequences
    take page by page as they grow, instead of ``max_sequence_length`` for each row.

    A decoding step can be a CUDA graph: call ``pre_step`` and the model once, capture the model,
    then call ``pre_step`` before each replay, with the same number of sequences and tokens.

    Nothing in the cache has gradients. In both ways a causal mask is aligned to the end of the
    cached sequence.

    Args:
        max_batch_size: number of rows of the cache.
        max_sequence_length: number of positions of the cache.
        cache_dtype: None is the dtype of the keys and values. ``torch.float8_e4m3fn`` or
            ``torch.float8_e5m2`` stores them in FP8, each head vector of each token with its own
            scale: 1 + 4 / D bytes an element, rounded to within 1/16 (e5m2: 1/8) of each value or
            2^-18 (2^-32) of the head vector's largest value, whichever is more.
        is_paged: keep sequences in pages. Otherwise the next two arguments have no effect.
        page_size: number of positions of a page; None is 128.
        total_num_pages: number of pages of a layer; None is enough for all rows at full length.
        num_heads_kv: heads of keys and values; if given, the layers must have as many.
        head_dim_k: the same for the head size of keys.
        head_dim_v: the same for the head size of values.
        dtype: another name for ``cache_dtype``; give at most one name.

    Attributes:
        sequence_len_offset: tokens in the cache, for rows in step.
        batch_size_offset: first row of the cache that a call uses, for rows in step.
        key_value_memory_dict: the layers' caches by ``layer_number``.

    >>> params = float8lab.InferenceParams(max_batch_size=2, max_sequence_length=16)
    >>> attention = float8lab.DotProductAttention(4, 8, qkv_format="bshd", layer_number=1)
    >>> q, k, v = torch.randn(3, 2, 6, 4, 8)
    >>> whole = attention(q, k, v)
    >>> for token in range(6):
    ...     one = [x[:, token : token + 1] for x in (q, k, v)]
    ...     y = attention(*one, inference_params=params)
    ...     params.sequence_len_offset += 1
    >>> torch.allclose(y[:, 0], whole[:, -1], atol=1e-6)
    True
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        *,
        cache_dtype: torch.dtype | None = None,
        is_paged: bool = False,
        page_size: int | None = None,
        total_num_pages: int | None = None,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        head_dim_v: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.max_batch_size = check_size("max_batch_size", max_batch_size, minimum=1)
        self.max_sequence_length = check_size("max_sequence_length", max_sequence_length, minimum=1)
        check_dtype("cache_dtype", cache_dtype, _CACHE_DTYPES)
        check_dtype("dtype", dtype, _CACHE_DTYPES)
        if cache_dtype is not None and dtype is not None:
            raise ValueError(
                f"dtype must be None beside cache_dtype={cache_dtype}; got {dtype}. Leave it out."
            )
        check_flags(is_paged=is_paged)
        self.cache_dtype = dtype if cache_dtype is None else cache_dtype
        self.is_paged = is_paged
        self.page_size = check_size("page_size", page_size, minimum=1, optional=True) or 128
        pages = check_size("total_num_pages", total_num_pages, minimum=1, optional=True)
        self.total_num_pages = pages or max_batch_size * -(-max_sequence_length // self.page_size)
        if not is_paged:
            self.page_size, self.total_num_pages = max_sequence_length, max_batch_size
        sizes = {"num_heads_kv": num_heads_kv, "head_dim_k": head_dim_k, "head_dim_v": head_dim_v}
        for name, size in sizes.items():
            check_size(name, size, minimum=1, optional=True)
        self._heads = sizes
        self.key_value_memory_dict: dict[int, tuple[Store, Store]] = {}
        self._places: dict[tuple[torch.device, int, int], Places] = {}  # by device and sizes
        self._sizes_in_graphs: set[tuple[torch.device, int, int]] = set()
        self.reset()

    def reset(self) -> None:
        """Forget all sequences but keep the caches' memory."""
        self.sequence_len_offset = self.batch_size_offset = 0
        self.step: Step | None = None
        self._slots: dict[Hashable, tuple[int, int]] = {}  # row and number of tokens, by name
        self._placed: dict[torch.device, Step] = {}  # the step whose places each device has
        rows, longest = self.max_batch_size, self.max_sequence_length
        self._pages = Pages(rows, longest, self.page_size, self.total_num_pages)
        if not self.is_paged:  # row i has page i
            self._pages.take(dict.fromkeys(range(rows), 1))

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of all layers, scales included; 0 before the first call."""
        return sum(store.nbytes for pair in self.key_value_memory_dict.values() for store in pair)

    def pre_step(self, tokens: Mapping[Hashable, int]) -> Step:
        """Say which sequences the next call of the model holds, and how many tokens of each.

        Raises:
            ValueError: there are more sequences than rows, or a sequence is longer than the cache.
        """
        check_instance("tokens", tokens, Mapping, "a mapping of names to numbers of tokens")
        tokens = {name: check_size(f"tokens[{name!r}]", n) for name, n in tokens.items()}
        if len(tokens) > self.max_batch_size:
            raise ValueError(
                f"tokens must hold at most {self.max_batch_size} sequences (max_batch_size); got "
                f"{len(tokens)}. Finish some first."
            )
        slots_in_use = {name: self._slots[name] for name in tokens if name in self._slots}
        taken = {slot for slot, _ in slots_in_use.values()}
        free = (slot for slot in range(self.max_batch_size) if slot not in taken)
        slots, before = [], []
        for name, count in tokens.items():
            slot, length = slots_in_use.get(name) or (next(free), 0)
            if length + count > self.max_sequence_length:
                raise ValueError(
                    f"tokens must fit into {self.max_sequence_length} positions "
                    f"(max_sequence_length); got {count} for {name!r} after {length}. Make a "
                    "longer cache."
                )
            slots.append(slot)
            before.append(length)
        step = Step(tuple(slots), tuple(before), tuple(tokens.values()))
        finished = set(range(self.max_batch_size)) - taken if self.is_paged else set()
        self._pages.take(self._pages.missing("tokens", step, finished), finished)
        self.step = step
        self._slots = dict(zip(tokens, zip(slots, step.totals, strict=True), strict=True))
        self._placed.clear()  # an equal earlier step may have had other pages
        for device in {device for device, *_ in self._places}:
            self._places_on(device, step)
        return step

    def _places_on(self, device: torch.device, step: Step) -> Places:
        """Return the places of a step, in the tensors that CUDA graphs of its sizes read."""
        key = device, len(step.slots), sum(step.lengths)
        if self._placed.get(device) == step:
            return self._places[key]
        rows, before, lengths = (torch.tensor(x, dtype=torch.long, device="cpu") for x in step)
        number, stops = torch.arange(key[2], device="cpu"), lengths.cumsum(0)
        # repeat_interleave would wake all threads of a CPU, which has taken 4 ms.
        row = torch.bucketize(number, stops, right=True)
        token = number - (stops - lengths)[row]
        position = before[row] + token
        page = self._pages.table[rows[row], position // self.page_size]
        tokens = torch.stack((row, token, page.long(), position % self.page_size))
        places = Places(tokens, torch.stack((rows, before, lengths)).int(), self._pages.table)
        if key in self._places:
            self._places[key].copy_(places)
        else:
            in_use = {k for k in self._places if k in self._sizes_in_graphs or k[0] != device}
            self._places = {k: self._places[k] for k in in_use}
            with torch.inference_mode(False):
                self._places[key] = Places(*(x.to(device, copy=True) for x in places))
        self._placed[device] = step
        return self._places[key]

    def sequences(self, device: torch.device) -> Tensor | None:
        """Return ``[3, B]``: each sequence's row, its tokens before the call, and its new tokens.

        The result is None for rows in step.
        """
        return None if self.step is None else self._places_on(device, self.step).sequences

    def packed(self, device: torch.device) -> Packed:
        """Return the positions of sequences in the tokens of a thd call, after ``pre_step``."""
        step = self.step or Step((), (), ())
        lengths = self._places_on(device, step).sequences[2].long()
        return Packed(lengths.cumsum(0) - lengths, lengths, max((0, *step.lengths)), None)

    def swap_key_value_dict(self, batch_indices: Tensor | Sequence[int]) -> None:
        """Reorder the rows of all caches, for beam search: row i becomes ``batch_indices[i]``.

        After ``pre_step`` with several lengths, row i also gets the length of that sequence.

        Raises:
            TypeError: ``batch_indices`` are not integers.
            ValueError: there are more indices than rows, or some are not rows, which is not checked
                for a tensor on a GPU.
        """
        rows = batch_indices
        if not isinstance(rows, Tensor):
            unordered = isinstance(rows, (str, bytes, Mapping, set, frozenset))
            if unordered or not isinstance(rows, Iterable):
                raise TypeError(
                    f"batch_indices must be a sequence of rows; got {shown(rows)}. Pass a list."
                )
            rows = torch.tensor([check_size("batch_indices", n) for n in rows], dtype=torch.long)
        if rows.dtype not in INTEGER_DTYPES:
            raise TypeError(f"batch_indices must be integers; got {shown(rows)}. Pass row numbers.")
        outside = has_values(rows) and bool(((rows < 0) | (rows >= self.max_batch_size)).any())
        if rows.ndim != 1 or rows.shape[0] > self.max_batch_size or outside:
            raise ValueError(
                f"batch_indices must be one row, from 0 to {self.max_batch_size - 1}, for each of "
                f"at most {self.max_batch_size} rows (max_batch_size); got {shown(batch_indices)}. "
                "Make a larger cache, or check the indices."
            )
        count, pages = rows.shape[0], self._pages
        held = {len(row) for row in (*filter(None, pages.of_rows), *pages.of_rows[:count])}
        if len(held) > 1:
            raise ValueError(
                "batch_indices must be rows that hold equally many pages; got rows of "
                f"{sorted(held)} pages. Reorder sequences of the same length."
            )
        for stores in self.key_value_memory_dict.values():
            for store in stores:
                table = pages.table[:, : min(held, default=0)].long().to(store.data.device)
                store.copy_pages(table[rows.to(store.data.device)], table[:count])
        lengths = dict(self._slots.values())
        if len(set(lengths.values())) > 1:  # otherwise there is no need to read rows from a GPU
            lengths |= {row: lengths.get(n, 0) for row, n in enumerate(rows.tolist())}
            self._slots = {name: (row, lengths[row]) for name, (row, _) in self._slots.items()}

    def append(self, layer_number: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add a call's keys and values to a layer's cache, and return its contents.

        Args:
            k: ``[B, G, S, D]``.
            v: ``[B, G, S, Dv]``.

        Returns:
            ``[B, G, S', D]`` and ``[B, G, S', Dv]`` with S' cached positions, where S' is the
            length of the longest sequence.
        """
        return self.write(layer_number, k, v).read(k.dtype)

    def write(self, layer_number: int, k: Tensor, v: Tensor) -> Cached:
        """Add a call's keys and values to a layer's cache, like ``append``."""
        self._check_entries(layer_number, k, v)
        self.check_room(k.shape[0], k.shape[2])
        step = self.step or self._step_of_rows(k.shape[0], k.shape[2])
        if self.step is None:
            self._pages.take(self._pages.missing("inference_params", step))
        with torch.no_grad():
            if layer_number not in self.key_value_memory_dict:
                size = self.total_num_pages, self.page_size, self.cache_dtype
                self.key_value_memory_dict[layer_number] = Store(k, *size), Store(v, *size)
            stores = self.key_value_memory_dict[layer_number]
            if not torch.compiler.is_compiling() and capturing():
                self._sizes_in_graphs.add((k.device, len(step.slots), sum(step.lengths)))
            cached = Cached(*stores, self._places_on(k.device, step), step, self.is_paged)
            cached.keys.write(cached.places, k.detach())
            cached.values.write(cached.places, v.detach())
            return cached

    def _step_of_rows(self, rows: int, tokens: int) -> Step:
        slots = tuple(range(self.batch_size_offset, self.batch_size_offset + rows))
        return Step(slots, (self.sequence_len_offset,) * rows, (tokens,) * rows)

    def _check_entries(self, layer_number: int, k: Tensor, v: Tensor) -> None:
        """Raise unless keys and values fit a layer of this cache."""
        check_size("layer_number", layer_number, minimum=1)
        cached = self.key_value_memory_dict.get(layer_number, (None, None))
        for name, x, store in zip("kv", (k, v), cached, strict=True):
            check_tensor(name, x)
            if x.ndim != 4 or not x.is_floating_point() or x.shape[:3] != k.shape[:3]:
                raise ValueError(
                    f"{name} must be floating-point, [B, G, S, D], keys and values of the same "
                    f"tokens; got {shown(x)}. Reshape it."
                )
            like = x if store is None else store.data
            if (*x.shape[1::2], x.device) != (*like.shape[1::2], like.device):
                raise ValueError(
                    f"{name} must have {like.shape[1]} heads of {like.shape[3]} on {like.device}, "
                    f"as in layer {layer_number} so far; got {shown(x)} on {x.device}. Give each "
                    "layer its own layer_number, and each device its own InferenceParams."
                )
        sizes = k.shape[1], k.shape[3], v.shape[3]
        for (name, expected), size in zip(self._heads.items(), sizes, strict=True):
            if expected not in (None, size):
                raise ValueError(
                    f"{name} must be that of the layers, {size} in layer {layer_number}; got "
                    f"{expected}. Leave it out."
                )

    def check_room(self, rows: int, positions: int) -> int:
        """Return how many keys a call of these sizes sees; raise if the cache has no room."""
        end = positions_reached(positions, self)
        if self.step is not None:
            most = max((0, *self.step.lengths))
            if rows != len(self.step.slots) or positions < most:
                raise ValueError(
                    f"the batch must have {len(self.step.slots)} rows of {most} positions, as "
                    f"pre_step was told inference_params; got {rows} rows of {positions}. Call "
                    "pre_step before each call of the model."
                )
            return end
        last = check_size("batch_size_offset", self.batch_size_offset) + rows
        if last > self.max_batch_size or end > self.max_sequence_length:
            raise ValueError(
                f"inference_params must have room for rows {self.batch_size_offset} to {last} and "
                f"positions {self.sequence_len_offset} to {end}; got max_batch_size="
                f"{self.max_batch_size} and max_sequence_length={self.max_sequence_length}. Make a "
                "larger cache, or reset batch_size_offset and sequence_len_offset."
            )
        self._pages.missing("inference_params", self._step_of_rows(rows, positions))
        return end


def positions_reached(tokens: int, inference_params: InferenceParams | None) -> int:
    """Return how many positions a call reaches, including the positions in the cache."""
    if inference_params is None:
        return tokens
    if inference_params.step is None:
        return check_size("sequence_len_offset", inference_params.sequence_len_offset) + tokens
    return inference_params.step.longest
