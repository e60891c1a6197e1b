"""Cross entropy of logits whose vocabulary is sharded, on the GPU.  M tokens, V local logits.

A program of the forward has one row, which it reads once: the sum of the exponentials is kept
relative to the largest logit so far. A program of the backward has a block of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.ops.kernels._common import by_rows, ceil_div, next_power_of_2
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.reference import cross_entropy as reference

BLOCK, _WARPS = 4096, 8
"""Logits of a row that a program holds at a time, and its warps; short rows need fewer."""


@triton.jit
def _finite(largest):
    """Return what exponents are relative to: 0 for -inf, since -inf minus -inf is NaN."""
    return tl.where(largest == -float("inf"), 0.0, largest)


@launched
def _statistics_kernel(
    logits_ptr,  # [M, V] any float
    target_ptr,  # [M] integers
    stats_ptr,  # [4, M] fp32
    M, V, stride_m,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_V)
    target = tl.load(target_ptr + row).to(tl.int64)
    row_ptr = logits_ptr + row * stride_m
    largest = tl.max(tl.zeros([BLOCK_V], tl.float32) - float("inf"), 0)
    exp_sum = tl.sum(tl.zeros([BLOCK_V], tl.float32), 0)
    target_logit, logit_sum = exp_sum, exp_sum
    for start in range(0, V, BLOCK_V):
        indices = start + columns
        inside = indices < V
        x = tl.load(row_ptr + indices, mask=inside, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, 0))
        exp_sum = exp_sum * tl.exp(largest - _finite(new)) + tl.sum(tl.exp(x - _finite(new)), 0)
        largest = new
        target_logit += tl.sum(tl.where(indices == target, x, 0.0), 0)
        logit_sum += tl.sum(tl.where(inside, x, 0.0), 0)
    tl.store(stats_ptr + row, largest)
    tl.store(stats_ptr + M + row, exp_sum)
    tl.store(stats_ptr + 2 * M + row, tl.where((target >= 0) & (target < V), target_logit, 0.0))
    tl.store(stats_ptr + 3 * M + row, logit_sum)


def _tile(V: int) -> dict[str, int]:
    block = min(BLOCK, next_power_of_2(V))
    return {"BLOCK_V": block, "num_warps": min(_WARPS, max(block // 256, 1))}


@replayed
def cross_entropy_statistics(logits: Tensor, target: Tensor) -> Tensor:
    M, V = logits.shape
    if logits.dtype == torch.float64 or not logits.numel():
        return reference.cross_entropy_statistics(logits, target)
    stats, logits = reference.empty_statistics(logits), by_rows(logits)
    _statistics_kernel[(M,)](
        logits, target.contiguous(), stats, M, V, logits.stride(0),
        **_tile(V), enable_fp_fusion=False,
    )  # fmt: skip
    return stats


@launched
def _backward_kernel(
    logits_ptr,  # [M, V] any float
    target_ptr,  # [M] integers
    factors_ptr,  # [4, M] fp32
    dlogits_ptr,  # [M, V]
    M, V, stride_m,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    indices = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = indices < V
    target = tl.load(target_ptr + row).to(tl.int64)
    log_sum = tl.load(factors_ptr + row)
    factor = tl.load(factors_ptr + M + row)
    at_target = tl.load(factors_ptr + 2 * M + row)
    everywhere = tl.load(factors_ptr + 3 * M + row)
    x = tl.load(logits_ptr + row * stride_m + indices, mask=inside, other=0.0).to(tl.float32)
    softmax = tl.where(factor == 0, 0.0, factor * tl.exp(x - log_sum))
    dlogits = softmax - tl.where(indices == target, at_target, 0.0) - everywhere
    tl.store(dlogits_ptr + row * V + indices, dlogits.to(dlogits_ptr.dtype.element_ty), mask=inside)


@replayed
def cross_entropy_backward(logits: Tensor, target: Tensor, factors: Tensor) -> Tensor:
    M, V = logits.shape
    if logits.dtype == torch.float64 or not logits.numel():
        return reference.cross_entropy_backward(logits, target, factors)
    dlogits, logits = logits.new_empty(logits.shape), by_rows(logits)
    tile = _tile(V)
    _backward_kernel[(M, ceil_div(V, tile["BLOCK_V"]))](
        logits, target.contiguous(), factors.contiguous(), dlogits, M, V, logits.stride(0), **tile,
        enable_fp_fusion=False,
    )  # fmt: skip
    return dlogits
