"""The key/value cache of generation.  B rows, G key/value heads, S positions, D head size."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from float8lab.arguments import (
    INTEGER_DTYPES,
    check_dtype,
    check_instance,
    check_size,
    check_tensor,
    has_values,
    shown,
)
from float8lab.formats import FP8_DTYPES, HIGH_PRECISION_DTYPES, Spec
from float8lab.ops import value_of_op
from float8lab.tensor.operands import quantize

__all__ = ["InferenceParams", "Step", "positions_reached"]


_CACHE_DTYPES = (*HIGH_PRECISION_DTYPES, torch.float64, *FP8_DTYPES)


class Step(NamedTuple):
    """The sequences of one call, in its order, as ``InferenceParams.pre_step`` placed them."""

    slots: tuple[int, ...]
    """Rows of the cache."""
    before: tuple[int, ...]
    """Tokens already in the cache."""
    lengths: tuple[int, ...]
    """Tokens of this call."""

    @property
    def totals(self) -> list[int]:
        """Tokens in the cache after this call."""
        return [b + n for b, n in zip(self.before, self.lengths, strict=True)]


class _Store:
    """Keys or values of one layer, ``[max B, G, max S, D]``; in FP8 one scale for each vector."""

    def __init__(self, like: Tensor, rows: int, length: int, dtype: torch.dtype | None) -> None:
        shape = (rows, like.shape[1], length, like.shape[3])
        self.dtype = dtype or like.dtype
        self.scale: Tensor | None = None
        with torch.inference_mode(False):  # a call outside inference mode may write it, too
            self.data = torch.zeros(shape, dtype=self.dtype, device=like.device)
            if self.dtype in FP8_DTYPES:
                self.scale = torch.ones(*shape[:3], 1, dtype=torch.float32, device=like.device)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def write(self, index: tuple[Tensor | slice, ...], x: Tensor) -> None:
        """Put head vectors ``[..., D]`` where ``index``, into ``[B, G, S]``, says."""
        if self.scale is None:
            self.data[index] = x.to(self.dtype)
            return
        q, scale = quantize(x.reshape(-1, x.shape[-1]), Spec(self.dtype, (1, -1)), align=1).rowwise
        # Bytes: not every device writes FP8 by index.
        self.data.view(torch.uint8)[index] = q.view(torch.uint8).view(x.shape)
        self.scale[index] = scale.view(*x.shape[:-1], 1)

    def read(self, rows: slice | Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """The first ``length`` positions of some rows, ``[B, G, length, D]``."""
        if self.scale is None:
            return self.data[rows, :, :length].to(dtype)
        data = self.data.view(torch.uint8)[rows, :, :length].view(self.dtype)
        flat = data.reshape(-1, data.shape[-1])
        scale = self.scale[rows, :, :length].reshape(-1, 1)
        out: Tensor = value_of_op("dequantize", (flat, scale), dtype, (1, -1))
        return out.view(data.shape)

    def reorder(self, rows: Tensor) -> None:
        data = self.data.view(torch.uint8) if self.scale is not None else self.data
        data[: len(rows)] = data[rows]
        if self.scale is not None:
            self.scale[: len(rows)] = self.scale[rows]


class InferenceParams:
    """The key/value cache of a model, passed to each of its layers during generation.

    Two ways to use it. *Rows in step*: every row of the batch has the same number of tokens. Call
    the model on the prompt, add its length to ``sequence_len_offset``, call it on one more token,
    add 1, and so on; the caller adjusts the offset after the whole model has run.

    *Ragged*: before each call of the model, ``pre_step({name: tokens, ...})`` says which sequences
    the rows of the batch are, in order, and how many tokens of each are given; shorter rows are
    padded at the end, and their output there is 0. A new name gets a free row of the cache; a name
    that is missing from a step is finished, and its row becomes free.

    Nothing in the cache has gradients. In both ways a causal mask is aligned to the end of the
    cached sequence.

    Args:
        max_batch_size: rows of the cache.
        max_sequence_length: positions of the cache.
        cache_dtype: None is the dtype of the keys and values. ``torch.float8_e4m3fn`` or
            ``torch.float8_e5m2`` stores them in FP8, each head vector of each token with its own
            scale: 1 + 4 / D bytes an element, rounded to within 1/16 (e5m2: 1/8) of each value or
            2^-18 (2^-32) of the head vector's largest, whichever is more.

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
    ) -> None:
        self.max_batch_size = check_size("max_batch_size", max_batch_size, minimum=1)
        self.max_sequence_length = check_size("max_sequence_length", max_sequence_length, minimum=1)
        check_dtype("cache_dtype", cache_dtype, _CACHE_DTYPES)
        self.cache_dtype = cache_dtype
        self.sequence_len_offset = 0
        self.batch_size_offset = 0
        self.key_value_memory_dict: dict[int, tuple[_Store, _Store]] = {}
        self.step: Step | None = None
        self._slots: dict[Hashable, tuple[int, int]] = {}  # row and tokens in it, by name

    def reset(self) -> None:
        """Forget all sequences; the caches' memory is kept."""
        self.sequence_len_offset = self.batch_size_offset = 0
        self.step = None
        self._slots = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of all layers, scales included; 0 before the first call."""
        return sum(store.nbytes for pair in self.key_value_memory_dict.values() for store in pair)

    def pre_step(self, tokens: Mapping[Hashable, int]) -> Step:
        """Say which sequences the next call of the model holds, and how many tokens of each.

        Raises:
            ValueError: more sequences than rows, or a sequence longer than the cache.
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
        self.step = Step(tuple(slots), tuple(before), tuple(tokens.values()))
        self._slots = {
            name: (slot, tokens_now)
            for name, slot, tokens_now in zip(tokens, slots, self.step.totals, strict=True)
        }
        return self.step

    def swap_key_value_dict(self, batch_indices: Tensor | Sequence[int]) -> None:
        """Reorder the rows of all caches, for beam search: row i becomes ``batch_indices[i]``.

        Raises:
            TypeError: ``batch_indices`` are no integers.
            ValueError: there are more of them than rows, or some are no rows; of a tensor on a GPU
                the values are not looked at.
        """
        rows = batch_indices
        if not isinstance(rows, Tensor):
            if isinstance(rows, str) or not isinstance(rows, Iterable):
                raise TypeError(
                    f"batch_indices must be a sequence of rows; got {shown(rows)}. Pass a list."
                )
            numbers = [check_size("batch_indices", row) for row in rows]
            rows = torch.tensor(numbers, dtype=torch.long)
        if rows.dtype not in INTEGER_DTYPES:
            raise TypeError(
                f"batch_indices must be integers; got {shown(rows)}. Pass the rows' numbers."
            )
        outside = has_values(rows) and bool(((rows < 0) | (rows >= self.max_batch_size)).any())
        if rows.ndim != 1 or rows.shape[0] > self.max_batch_size or outside:
            raise ValueError(
                f"batch_indices must be one row, from 0 to {self.max_batch_size - 1}, for each of "
                f"at most {self.max_batch_size} rows (max_batch_size); got {shown(batch_indices)}. "
                "Make a larger cache, or check the indices."
            )
        for stores in self.key_value_memory_dict.values():
            for store in stores:
                store.reorder(rows.to(store.data.device))

    def append(self, layer_number: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add a call's keys and values to a layer's cache, and return what it now holds.

        Args:
            k: ``[B, G, S, D]``.
            v: ``[B, G, S, Dv]``.

        Returns:
            ``[B, G, S', D]`` and ``[B, G, S', Dv]`` with S' cached positions; of ragged sequences
            S' is that of the longest one.
        """
        self._check_entries(layer_number, k, v)
        self.check_room(k.shape[0], k.shape[2])
        with torch.no_grad():
            k, v = k.detach(), v.detach()
            if layer_number not in self.key_value_memory_dict:
                size = (self.max_batch_size, self.max_sequence_length)
                self.key_value_memory_dict[layer_number] = (
                    _Store(k, *size, self.cache_dtype),
                    _Store(v, *size, self.cache_dtype),
                )
            stores = self.key_value_memory_dict[layer_number]
            if self.step is not None:
                return self._append_ragged(stores, k, v, self.step)
            return self._append_in_step(stores, k, v)

    def _check_entries(self, layer_number: int, k: Tensor, v: Tensor) -> None:
        """Raise unless keys and values are those of a layer of this cache."""
        check_size("layer_number", layer_number, minimum=1)
        cached = self.key_value_memory_dict.get(layer_number, (None, None))
        for name, x, store in zip("kv", (k, v), cached, strict=True):
            check_tensor(name, x)
            if x.ndim != 4 or not x.is_floating_point() or x.shape[:3] != k.shape[:3]:
                raise ValueError(
                    f"{name} must be floating-point, [B, G, S, D], keys and values of the same "
                    f"tokens; got {shown(x)}. Reshape it."
                )
            if store is not None and (x.shape[1], x.shape[3]) != store.data.shape[1::2]:
                G, _, D = store.data.shape[1:]
                raise ValueError(
                    f"{name} must have {G} heads of {D}, as in layer {layer_number} so far; got "
                    f"{shown(x)}. Give each layer its own layer_number."
                )

    def check_room(self, rows: int, positions: int) -> int:
        """Raise unless a call of so many rows and positions fits; return how many keys it sees."""
        if self.step is not None:
            most = max(self.step.lengths, default=0)
            if rows != len(self.step.slots) or positions < most:
                raise ValueError(
                    f"the batch must have {len(self.step.slots)} rows of {most} positions, as "
                    f"pre_step was told inference_params; got {rows} rows of {positions}. Call "
                    "pre_step before each call of the model."
                )
            return positions_reached(positions, self)
        last, end = self.batch_size_offset + rows, positions_reached(positions, self)
        if last > self.max_batch_size or end > self.max_sequence_length:
            raise ValueError(
                f"inference_params must have room for rows up to {last} and positions up to {end}; "
                f"got max_batch_size={self.max_batch_size} and max_sequence_length="
                f"{self.max_sequence_length}. Make a larger cache, or reset the offsets."
            )
        return end

    def _append_in_step(
        self, stores: tuple[_Store, _Store], k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = slice(self.batch_size_offset, self.batch_size_offset + k.shape[0])
        start, end = self.sequence_len_offset, self.sequence_len_offset + k.shape[2]
        sequences = []
        for store, x in zip(stores, (k, v), strict=True):
            store.write((rows, slice(None), slice(start, end)), x)
            sequences.append(store.read(rows, end, x.dtype))
        return sequences[0], sequences[1]

    def _append_ragged(
        self, stores: tuple[_Store, _Store], k: Tensor, v: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:
        places = [
            (row, token, step.slots[row], step.before[row] + token)
            for row, length in enumerate(step.lengths)
            for token in range(length)
        ]
        index = torch.tensor(places, dtype=torch.long, device=k.device).view(-1, 4)
        row, token, slot, position = index.unbind(1)
        rows = torch.tensor(step.slots, dtype=torch.long, device=k.device)
        longest = max(step.totals, default=0)
        sequences = []
        for store, x in zip(stores, (k, v), strict=True):
            # Indices on both sides of a slice: their dimension comes first, [tokens, G, D].
            store.write((slot, slice(None), position), x[row, :, token])
            sequences.append(store.read(rows, longest, x.dtype))
        return sequences[0], sequences[1]


def positions_reached(tokens: int, inference_params: InferenceParams | None) -> int:
    """How many positions a call of so many tokens reaches, behind those in the cache."""
    if inference_params is None:
        return tokens
    step = inference_params.step
    if step is None:
        return inference_params.sequence_len_offset + tokens
    return max(step.totals, default=0)
