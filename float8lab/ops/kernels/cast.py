"""Cast on the GPU: which launcher takes which arguments of the op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8lab.formats import SCALE_RULES
from float8lab.ops import reference
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.kernels.pair import cast_pair, quantize_pair
from float8lab.ops.kernels.quantize import amax, cast_one, quantize
from float8lab.ops.kernels.source import amax_of, value_of
from float8lab.ops.kernels.source_cast import cast_of, cast_pair_of
from float8lab.ops.kernels.source_quantize import quantize_of, quantize_pair_of

__all__ = ["cast"]

Six = tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]


@replayed
def cast(
    prologue: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float = 0.0,
    align: int = 1,
    straight: bool = True,
    transposed: bool = False,
    column_sum: bool = False,
    given: Tensor | None = None,
    slot: Tensor | None = None,
) -> Six:
    finds, whole, both = rule in SCALE_RULES, tuple(block) == (-1, -1), straight and transposed
    odd = (finds and slot is not None) or (column_sum and not both)
    if odd or (both and not finds and (rule == "decode" or not whole)):
        return reference.cast(
            *(prologue, inputs, dtype, fp8_dtype, block, rule, eps, align),
            *(straight, transposed, column_sum, given, slot),
        )
    simple = whole and rule != "decode" if not finds else whole or straight or transposed
    if prologue and not simple:
        inputs, prologue = [value_of(prologue, inputs, dtype)], ""
    x = inputs[0]
    how: Any = (fp8_dtype, block, rule, eps, align)
    found: Tensor | None
    scale: Tensor | None
    q: Tensor | None
    q_t: Tensor | None
    if prologue:
        source = (prologue, inputs, dtype)
        if not (straight or transposed):
            return None, None, amax_of(*source), None, None, None
        if both and finds:
            q, scale, q_t, scale_t, total = quantize_pair_of(
                *source, fp8_dtype, block, rule, eps, align, column_sum
            )
            return q, scale, None, q_t, scale_t, total if column_sum else None
        if both:
            assert given is not None, "the rule says so"
            q, q_t, total = cast_pair_of(*source, given, slot, fp8_dtype, align, column_sum)
            return q, None, None, q_t, None, total if column_sum else None
        if finds:
            q, scale, found = quantize_of(*source, transposed, given, *how)
        else:
            assert given is not None, "the rule says so"
            q = cast_of(*source, transposed, given, slot, fp8_dtype, align)
            scale = found = None
    elif not (straight or transposed):
        return None, None, amax(x, block), None, None, None
    elif both and finds:
        q, scale, q_t, scale_t, total = quantize_pair(
            x, fp8_dtype, block, rule, eps, align, column_sum, given
        )
        return q, scale, None, q_t, scale_t, total if column_sum else None
    elif both:
        assert given is not None, "the rule says so"
        q, q_t, total = cast_pair(x, given, slot, fp8_dtype, align, column_sum)
        return q, None, None, q_t, None, total if column_sum else None
    elif finds:
        q, scale, found = quantize(
            x.t() if transposed else x, fp8_dtype, block, rule, eps, align, given
        )
        found = found if given is None else None
    else:
        assert given is not None, "the rule says so"
        rows = x.t() if transposed else x
        q, scale, found = (
            cast_one(rows, given, slot, fp8_dtype, block, align, rule == "decode"),
            None,
            None,
        )
    if transposed:
        return None, None, found, q, scale, None
    return q, scale, found, None, None, None
