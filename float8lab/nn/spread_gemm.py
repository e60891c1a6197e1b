"""The three GEMMs of a linear layer that is spread over tensor-parallel ranks.

``gemm.py`` comes here where a call is ``spread``; its ``Gradient`` is what ``dy`` stands for. Casts
give operands the bytes that they have in the whole, and these products send what ranks lack and add
up what they have parts of.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8lab.distributed.tensor_parallel import note, noted
from float8lab.distributed.tensor_parallel_mm import Product, Shards, multiply, spread_mm
from float8lab.nn.casts import Operand, cast, cast_by, show_cast, show_gemm
from float8lab.nn.precision import Call, W, X
from float8lab.ops import Source, transpose_op
from float8lab.recipes.delayed import Factors, QuantParams
from float8lab.recipes.recipe import GemmPlan

__all__ = [
    "is_gathered_once",
    "on_all_ranks",
    "operands_of_wgrad",
    "spread_dgrad",
    "spread_product",
    "spread_wgrad",
]


def spread_product(
    a: Operand,
    b: Operand,
    gemm: GemmPlan,
    shape: tuple[int, int],
    dtype: torch.dtype,
    call: Call,
    bias: Tensor | None = None,
    *,
    backward: bool = False,
    beside: Shards | None = None,
    keep: bool = False,
) -> tuple[Tensor, Operand]:
    """``spread_mm`` of operands that this rank has; ``shape`` has the rows of ``a``, or all."""
    parallel, rows = call.parallel, call.rows
    assert parallel is not None, "of a layer that is spread"
    if rows is not None:
        shape = rows.total, shape[1]
    edge = call.plan.edge if backward == (parallel.mode == "row") else 1  # of a product's shard
    features, wide = shape[1], parallel.spaced_size(shape[1], edge)
    bias = parallel.added(bias)
    if bias is not None:
        bias = parallel.spaced(bias, 0, edge)
        bias = F.pad(bias, (0, b[0].shape[0] - bias.shape[0]))
    blocks, keep = (gemm.left.block, gemm.right.block), keep or call.watched
    product = Product(*blocks, gemm.fast_accum, (shape[0], wide), dtype, keep)
    known = noted(a[0])
    y, whole = spread_mm(
        parallel, rows, (a, b), product, bias, backward=backward, beside=beside, whole=known
    )
    if known is None and whole[0] is not a[0]:
        note(a[0], whole)
    return parallel.cropped(y, 1, features, edge), whole


def is_gathered_once(call: Call) -> bool:
    """Whether what arrives of x for fprop is kept, transposed, for wgrad, which wants its codes."""
    plan, parallel = call.plan, call.parallel
    if parallel is None or not parallel.keeps:
        return False
    if plan.fprop is None or plan.wgrad is None:
        return False
    return plan.wgrad.right == plan.fprop.left and plan.x.block == (-1, -1)


def operands_of_wgrad(
    dy: Any, x: Source | None, kept: Tensor | None, factors: Factors, call: Call
) -> list[Operand | Shards | None]:
    """The transposes of dy and x; None for one that is made of what dgrad gathers."""
    plan, parallel, rows = call.plan, call.parallel, call.rows
    assert parallel is not None, "of a layer that is spread"
    assert plan.wgrad is not None, "in FP8"
    left, right, _ = plan.wgrad
    dy_t: Any = dy.columnwise
    x_t: Any
    if x is None or kept is not None:
        assert kept is not None, "a prologue is cast"
        x_t = Operand(kept, factors.scale.float())
    elif factors.scale is not None:
        assert x is not None, "kept for this"
        x_t = cast_by(x, None, right, plan, QuantParams(factors, None)).columnwise
    else:
        x_t = cast(x, None, X, call, columnwise=right).columnwise
    if parallel.gathers and not is_gathered_once(call):
        assert rows is not None, "under sequence parallelism"
        x_t = Shards(parallel, rows, x_t, right.block)
    elif parallel.scatters and dy_t is not None:
        assert rows is not None, "under sequence parallelism"
        dy_t = Shards(parallel, rows, dy_t, left.block)
    return [dy_t, x_t]


def spread_dgrad(
    dy: Any,
    weight: Tensor | None,
    w_t: Any,
    turns: bool,
    call: Call,
    shape: tuple[int, int],
    dtype: torch.dtype,
    for_wgrad: Any,
) -> Tensor:
    """``_dgrad`` of a layer that is spread over ranks; ``for_wgrad`` may get what that gathers."""
    plan, parallel = call.plan, call.parallel
    assert parallel is not None, "of a layer that is spread"
    if dy.rowwise is None:
        assert weight is not None, "kept for this"
        assert dy.high_precision is not None, "written"
        if call.watched:
            show_gemm("dgrad", call, None, None)
        high = parallel.entered(dy.high_precision, call.rows, backward=True)
        return parallel.left((high @ weight.to(high.dtype)).to(dtype), call.rows, backward=True)
    assert plan.dgrad is not None, "cast for it"
    shards = (one for one in for_wgrad or () if isinstance(one, Shards))
    beside = next((one for one in shards if one.whole is None), None)
    dx, whole = spread_product(
        dy.rowwise,
        w_t,
        plan.dgrad,
        shape,
        dtype,
        call,
        backward=True,
        beside=beside,
        keep=dy.transposes_gathered,
    )
    if call.watched:
        if not turns and not plan.fprop:  # else the forward has cast it
            assert weight is not None, "cast just now"
            show_cast(weight.t(), w_t, plan.dgrad.right, W, call, only_in_backward=True)
        show_gemm("dgrad", call, whole, w_t)
    if dy.transposes_gathered:
        for_wgrad[0] = Operand(transpose_op(whole[0], 1, None), whole[1])
    return dx


def spread_wgrad(
    dy: Any,
    x: Source | None,
    kept: Tensor | None,
    operands: Any,
    call: Call,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """``_wgrad`` of a layer that is spread over ranks, of ``operands`` if it runs in FP8."""
    plan, parallel, rows = call.plan, call.parallel, call.rows
    assert parallel is not None, "of a layer that is spread"
    if plan.wgrad is None:
        high = kept if x is None else x.value()
        assert high is not None, "kept for this"
        assert dy.high_precision is not None, "written"
        if call.watched:
            show_gemm("wgrad", call, None, None)
        high = parallel.entered(high, rows)
        dy_high = parallel.entered(dy.high_precision, rows, backward=True)
        return (dy_high.t() @ high.to(dy_high.dtype)).to(dtype)
    left, right, fast_accum = plan.wgrad
    dy_t, x_t = (one.gathered() if isinstance(one, Shards) else one for one in operands)
    if call.watched:
        show_gemm("wgrad", call, dy_t, x_t)
    padded = dy_t[0].shape[0], x_t[0].shape[0]
    dw = multiply((dy_t, x_t), Product(left.block, right.block, fast_accum, padded, dtype))
    dim = int(parallel.mode == "row")
    dw = parallel.cropped(dw, dim, shape[dim], plan.edge)
    if torch.compiler.is_compiling() or dw.shape != shape:
        dw = dw[: shape[0], : shape[1]]
    return dw


def on_all_ranks(x: Tensor, features: int, call: Call) -> tuple[int, tuple[int, ...]]:
    """How many tokens a layer's GEMMs have under sequence parallelism; its output's shape here."""
    assert call.parallel is not None, "of a layer that is spread"
    assert call.rows is not None, "under sequence parallelism"
    return call.rows.total, call.parallel.shape_of_output(x.shape, call.rows, features)
