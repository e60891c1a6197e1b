"""Handlers that gather or join elements into new FP8 tensors; bytes are moved, values stay.

If an op would mix or cut blocks, the result has smaller blocks (a divisor of the size), so it is
exact. Joining tensors with one scale each gives one block per tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor
from torch._ops import OpOverload

from float8lab.tensor.dispatch import implements
from float8lab.tensor.float8_tensor import Float8Tensor
from float8lab.tensor.views import cut

__all__: list[str] = []

aten = torch.ops.aten

_Function = Callable[[Tensor], Tensor]


def _make_like(
    x: Float8Tensor, data: _Function, scales: _Function, block: Sequence[int]
) -> Float8Tensor:
    """Make a new tensor from ``x`` with one function for its bytes and one for its scales."""
    q = data(x.qdata.view(torch.uint8)).view(x.qdata.dtype)
    scale, amax = (scales(t).clone() for t in (x.scale, x.amax))
    return x._make(q, scale, amax, replace(x.spec, block=tuple(block)), x.dtype)


def _replace_size(block: tuple[int, ...], dim: int, *sizes: int) -> tuple[int, ...]:
    return (*block[:dim], *sizes, *block[dim + 1 :])


def _pick(x: Float8Tensor, dim: int, index: Tensor, take: Callable[..., Tensor]) -> Float8Tensor:
    """Return ``take(tensor, index)``, in which the dimensions of ``index`` replace ``dim``."""
    if x.spec.block[dim] == -1:
        size, blocks = -1, index.new_zeros((1,) * index.ndim)
    else:
        size, blocks = 1, torch.where(index < 0, index + x.shape[dim], index) // x.spec.block[dim]
    block = _replace_size(x.spec.block, dim, *(size,) * index.ndim)
    return _make_like(x, lambda t: take(t, index), lambda t: take(t, blocks), block)


@implements(aten.index_select.default)
def _index_select(op: OpOverload, x: Float8Tensor, dim: int, index: Tensor) -> Float8Tensor:
    if not x.ndim:
        return _make_like(x, lambda t: op(t, dim, index), lambda t: t, ())
    index = index.reshape(-1)
    return _pick(x, dim % x.ndim, index, lambda t, i: op(t, dim, i))


@implements(aten.index.Tensor)
def _index(op: OpOverload, x: Tensor, indices: Sequence[Tensor | None]) -> object:
    indexed = [(d, i) for d, i in enumerate(indices) if i is not None]
    if isinstance(x, Float8Tensor) and len(indexed) == 1:
        dim, index = indexed[0]
        lead = [None] * dim
        if index.dtype == torch.bool and index.shape == x.shape[dim : dim + 1]:
            index = index.nonzero().squeeze(1)
        if not isinstance(index, Float8Tensor) and index.dtype in (torch.int64, torch.int32):
            return _pick(x, dim, index.long(), lambda t, i: op(t, [*lead, i]))
    return NotImplemented


@implements(aten.embedding.default)
def _embedding(op: OpOverload, weight: Float8Tensor, index: Tensor, *args: object) -> Float8Tensor:
    return _pick(weight, 0, index, op)


@implements(aten.flip.default)
def _flip(op: OpOverload, x: Float8Tensor, dims: Sequence[int]) -> Float8Tensor:
    block = list(x.spec.block)
    for d in dims:
        if x.ndim and block[d] > 1:
            block[d] = math.gcd(block[d], x.shape[d])
    x = cut(x, tuple(block))
    return _make_like(x, lambda t: op(t, dims), lambda t: op(t, dims), block)


@implements(aten.roll.default)
def _roll(
    op: OpOverload, x: Float8Tensor, shifts: Sequence[int], dims: Sequence[int] = ()
) -> object:
    if not dims:  # rolls the flattened tensor
        if not x.spec.per_tensor:
            return NotImplemented
        return _make_like(x, lambda t: op(t, shifts), lambda t: t, x.spec.block)
    block = list(x.spec.block)
    for shift, d in zip(shifts, dims, strict=True):
        if block[d] > 1:
            block[d] = math.gcd(block[d], x.shape[d], shift)
    sizes = [(shift, block[d]) for shift, d in zip(shifts, dims, strict=True)]
    block_shifts = [0 if size == -1 else shift // size for shift, size in sizes]
    x = cut(x, tuple(block))
    return _make_like(x, lambda t: op(t, shifts, dims), lambda t: op(t, block_shifts, dims), block)


@implements(aten.repeat.default)
def _repeat(op: OpOverload, x: Float8Tensor, repeats: Sequence[int]) -> object:
    if len(repeats) < x.ndim:
        return NotImplemented  # torch raises
    sizes = zip(x.spec.block, x.shape, repeats[len(repeats) - x.ndim :], strict=True)
    x = cut(x, tuple(math.gcd(b, n) if b > 1 and times > 1 else b for b, n, times in sizes))
    block = x.spec.expand(len(repeats)).block
    scale_repeats = [1 if b == -1 else times for b, times in zip(block, repeats, strict=True)]
    return _make_like(x, lambda t: op(t, repeats), lambda t: op(t, scale_repeats), block)


def _joinable(tensors: Sequence[Tensor]) -> TypeGuard[Sequence[Float8Tensor]]:
    quantized = [x for x in tensors if isinstance(x, Float8Tensor)]
    kinds = {(x.spec.fp8_dtype, x.spec.scale_rule, x.dtype, x.ndim) for x in quantized}
    return len(kinds) == 1 and len(quantized) == len(tensors)


def _common_block(tensors: Sequence[Float8Tensor]) -> tuple[int, ...]:
    """Return the largest block that fits into the blocks of all tensors."""
    block = []
    for d, sizes in enumerate(zip(*(x.spec.block for x in tensors), strict=True)):
        lengths = [x.shape[d] if b == -1 else b for x, b in zip(tensors, sizes, strict=True)]
        block.append(sizes[0] if len(set(sizes)) == 1 else math.gcd(*lengths))
    return tuple(block)


@implements(aten.cat.default)
def _cat(op: OpOverload, tensors: Sequence[Tensor], dim: int = 0) -> object:
    if not _joinable(tensors) or tensors[0].ndim == 0:
        return NotImplemented
    data = op([x.qdata.view(torch.uint8) for x in tensors], dim)  # raises if sizes do not fit
    dim %= tensors[0].ndim
    joined = [x for x in tensors if x.shape[dim]] or list(tensors[:1])
    if len(joined) == 1:
        return joined[0].map(torch.clone)
    lengths = [x.shape[dim] for x in joined]
    block = _common_block(joined)
    b = block[dim]
    if b == -1:
        b = math.gcd(*lengths)
    elif b > 1:
        b = math.gcd(b, *lengths[:-1])  # the last tensor may end with a partial block
    block = _replace_size(block, dim, b)
    joined = [cut(x, block) for x in joined]
    scale, amax = op([x.scale for x in joined], dim), op([x.amax for x in joined], dim)
    return joined[0].replace(qdata=data.view(joined[0].qdata.dtype), scale=scale, amax=amax)


@implements(aten.stack.default)
def _stack(op: OpOverload, tensors: Sequence[Tensor], dim: int = 0) -> object:
    return _cat(aten.cat.default, [x.unsqueeze(dim) for x in tensors], dim)
