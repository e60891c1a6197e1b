"""Rows that move to where a map says, and back; ``reference/permute.py`` specifies these ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8lab.ops.declare import declare
from float8lab.ops.reference import permute as reference

__all__ = ["empty_row_map", "gather_rows_op", "row_map_op", "scatter_outputs", "scatter_rows_op"]


def empty_row_map(of: Any) -> tuple[Tensor, Tensor]:
    """Room for the row map of a routing map, and for the offsets of the experts' rows."""
    T, S = of.routing_map.shape
    row_map = of.routing_map.new_empty((T, S + 1), dtype=torch.int32)
    return row_map, row_map.new_empty(of.experts or S)


def scatter_outputs(of: Any) -> tuple[Tensor | None, ...]:
    """Room for the rows, for what moves beside them, and for their scales and amaxes."""
    row_values = scale = amax = None
    if of.probs is not None:
        row_values = of.probs.new_empty((of.rows,) if of.merged is None else of.probs.shape)
    if of.scale is not None:
        scale, amax = (of.scale.new_empty((of.scale.shape[1], of.rows)).t() for _ in range(2))
    y = of.x.new_empty((of.rows, of.x.shape[1]))
    return reference.ScatteredRows(y, row_values, scale, amax)


def _gather_outputs(of: Any) -> tuple[Tensor | None, ...]:
    T, S = of.row_map.shape[0], of.row_map.shape[1] - 1
    row_values = None if of.row_values is None else of.row_values.new_empty((T, S))
    return of.y.new_empty((T, of.y.shape[1]), dtype=of.dtype), row_values


row_map_op = declare(
    reference.row_map_of, cuda="permute:row_map_of", outputs=empty_row_map, any_strides=True
)
scatter_rows_op = declare(
    reference.scatter_rows, cuda="permute:scatter_rows", outputs=scatter_outputs, any_strides=True
)
gather_rows_op = declare(
    reference.gather_rows, cuda="permute:gather_rows", outputs=_gather_outputs, any_strides=True
)
