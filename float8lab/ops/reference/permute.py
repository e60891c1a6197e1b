"""Move rows to where a map says, and back, in plain PyTorch.

T tokens, S places that a token may go to, R rows that tokens go to, H features, B blocks of a row.

A *row map* is ``[T, S + 1]`` int32. ``row_map[t, s]`` is the row that token ``t`` goes to from its
place ``s``; a number outside ``[0, R)`` means no row. The last column is the number of rows that
tokens fill, the same for every token. No two entries name the same row, and the filled rows are the
first rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab.ops.declare import declare

__all__ = [
    "ScatteredRows", "empty_row_map", "gather_rows", "gather_rows_op", "row_map_of", "row_map_op",
    "row_tokens", "scatter_outputs", "scatter_rows", "scatter_rows_op",
]  # fmt: skip


class ScatteredRows(NamedTuple):
    """The rows, a value of each row, and the rows' scales and amaxes."""

    y: Tensor
    row_values: Tensor | None
    scale: Tensor | None
    amax: Tensor | None


def row_map_of(routing_map: Tensor, experts: int = 0) -> tuple[Tensor, Tensor]:
    """Make the row map that puts the tokens of each expert side by side, in their order.

    Args:
        routing_map: ``[T, S]``. Without ``experts``, bools or integers that are not 0 where an
            expert gets a token. Otherwise the expert of each place; other numbers mean no expert.
        experts: E; 0 means that each place is an expert.

    Returns:
        - ``[T, S + 1]`` int32: the row map.
        - ``[E]`` int32: the offset after the rows of each expert.
    """
    T, S = routing_map.shape
    if experts:
        is_routed = (routing_map >= 0) & (routing_map < experts)
        expert = torch.where(is_routed, routing_map, experts).reshape(-1).long()
        rows = torch.empty_like(expert)
        rows[expert.argsort(stable=True)] = torch.arange(T * S, device=expert.device)
        rows = torch.where(is_routed, rows.view(T, S), -1)
        counts = expert.bincount(minlength=experts + 1)[:experts]
    else:
        is_routed = routing_map != 0
        by_expert = is_routed.t().reshape(-1)
        rows = (by_expert.cumsum(0) * by_expert - 1).view(S, T).t()
        counts = is_routed.sum(0)
    offsets = counts.cumsum(0, dtype=torch.int32)
    row_map = offsets.new_empty((T, S + 1))
    row_map[:, :-1] = rows
    row_map[:, -1] = counts.sum()
    return row_map, offsets


def _moves(row_map: Tensor, rows: int | torch.SymInt) -> tuple[Tensor, Tensor, Tensor]:
    """Return token, place and row of each move, ordered by token and then by place."""
    row_numbers = row_map[:, :-1]
    token, place = ((row_numbers >= 0) & (row_numbers < rows)).nonzero(as_tuple=True)
    return token, place, row_numbers[token, place].long()


def scatter_rows(
    x: Tensor, row_map: Tensor, rows: int | torch.SymInt, probs: Tensor | None = None,
    merged: Tensor | None = None, scale: Tensor | None = None, amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Copy each token to its rows; the rows that no token fills are zero.

    Args:
        x: ``[T, H]``, any float, or bytes, which move as they are.
        probs: ``[T, S]``, any float.
        merged: ``[R, H]``, rows that ``gather_rows`` multiplied by ``probs`` and added up. ``x`` is
            the gradient of that sum; the results are the gradients of ``merged`` and ``probs``.
        scale: ``[T, B]`` float32, scales of the tokens.
        amax: ``[T, B]`` float32, given with ``scale``.

    Returns:
        - ``[R, H]``: the rows; with ``merged``, times ``probs``.
        - ``[R]``: the probabilities of the rows, 0 for an empty row; with ``merged``, ``[T, S]``:
          ``x`` times ``merged``, summed over H in float32, 0 for a place without a row. None
          without ``probs``.
        - ``[R, B]``: scales of the rows, 1 for an empty row. None without ``scale``.
        - ``[R, B]``: amaxes of the rows, 0 for an empty row. None without ``scale``.
    """
    token, place, row = _moves(row_map, rows)
    y, moved = x.new_zeros((rows, x.shape[1])), x[token]
    row_values = scales = amaxes = None
    if probs is not None and merged is not None:
        wide = torch.promote_types(x.dtype, torch.float32)
        moved = moved.to(wide)
        row_values = torch.zeros_like(probs)
        row_values[token, place] = (moved * merged[row].to(wide)).sum(1).to(probs.dtype)
        moved = (moved * probs[token, place].to(wide)[:, None]).to(x.dtype)
    elif probs is not None:
        row_values = probs.new_zeros(rows)
        row_values[row] = probs[token, place]
    y[row] = moved
    if scale is not None and amax is not None:
        scales = scale.new_ones((scale.shape[1], rows)).t()
        amaxes = torch.zeros_like(scales)
        scales[row], amaxes[row] = scale[token], amax[token]
    return ScatteredRows(y, row_values, scales, amaxes)  # type: ignore[return-value]  # see declare


def gather_rows(
    y: Tensor, row_map: Tensor, dtype: torch.dtype, probs: Tensor | None = None,
    row_values: Tensor | None = None, scale: Tensor | None = None, block: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add up the rows of each token, in the order of its places, in float32.

    Args:
        y: ``[R, H]``, any float, FP8 too.
        dtype: the dtype of the sums; sums in float64 are also added up in float64.
        probs: ``[T, S]``, any float, by which the rows are multiplied.
        row_values: ``[R]``, any float: an additional number of each row.
        scale: ``[R, B]`` float32, by which ``y`` is multiplied.
        block: columns that share a scale.

    Returns:
        - ``[T, H]``: the sums in ``dtype``; 0 for a token without rows.
        - ``[T, S]``: the row value of each place, 0 for a place without a row; None without values.
    """
    token, place, row = _moves(row_map, y.shape[0])
    wide = torch.promote_types(dtype, torch.float32)
    x = y.new_zeros((row_map.shape[0], y.shape[1]), dtype=wide)
    terms = (y.view(torch.uint8)[row].view(y.dtype) if y.element_size() == 1 else y[row]).to(wide)
    if scale is not None:
        terms *= scale[row].repeat_interleave(block, 1)[:, : y.shape[1]]
    if probs is not None:
        terms *= probs[token, place].to(wide)[:, None]
    x.index_add_(0, token, terms)
    place_values = None
    if row_values is not None:
        place_values = row_values.new_zeros((row_map.shape[0], row_map.shape[1] - 1))
        place_values[token, place] = row_values[row]
    return x.to(dtype), place_values  # type: ignore[return-value]  # see declare


def empty_row_map(of: Any) -> tuple[Tensor, Tensor]:
    """Allocate the row map of a routing map, and the offsets of the experts' rows."""
    T, S = of.routing_map.shape
    row_map = of.routing_map.new_empty((T, S + 1), dtype=torch.int32)
    return row_map, row_map.new_empty(of.experts or S)


def scatter_outputs(of: Any) -> tuple[Tensor | None, ...]:
    """Allocate the rows, a value of each row, and their scales and amaxes."""
    row_values = scale = amax = None
    if of.probs is not None:
        row_values = of.probs.new_empty((of.rows,) if of.merged is None else of.probs.shape)
    if of.scale is not None:
        scale, amax = (of.scale.new_empty((of.scale.shape[1], of.rows)).t() for _ in range(2))
    return ScatteredRows(of.x.new_empty((of.rows, of.x.shape[1])), row_values, scale, amax)


def _gather_outputs(of: Any) -> tuple[Tensor | None, ...]:
    T, S = of.row_map.shape[0], of.row_map.shape[1] - 1
    row_values = None if of.row_values is None else of.row_values.new_empty((T, S))
    return of.y.new_empty((T, of.y.shape[1]), dtype=of.dtype), row_values


row_map_op = declare(row_map_of, cuda="permute:row_map_of", outputs=empty_row_map, any_strides=True)
scatter_rows_op = declare(
    scatter_rows, cuda="permute:scatter_rows", outputs=scatter_outputs, any_strides=True
)
gather_rows_op = declare(
    gather_rows, cuda="permute:gather_rows", outputs=_gather_outputs, any_strides=True
)


def row_tokens(row_map: Tensor, rows: int | torch.SymInt) -> Tensor:
    """Return the token that goes to each row, ``[rows]`` int32, or -1 for an empty row."""
    # ``scatter_rows_op`` moves bytes unchanged, and leaves zeros in rows that no token fills.
    count = row_map.shape[0]
    numbers = torch.arange(1, count + 1, dtype=torch.int32, device=row_map.device)
    moved = scatter_rows_op(numbers.view(torch.uint8).view(count, 4), row_map, rows)[0]
    return moved.view(torch.int32).view(rows) - 1
