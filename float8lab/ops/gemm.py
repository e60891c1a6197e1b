"""The FP8 GEMM ``y = a @ b.T``.  M rows of a, N rows of b, K contraction, B batch.

All three GEMMs of a linear layer have this form, with both operands contiguous along K, the only
form that Hopper's FP8 tensor cores take: ``y = x @ w.T``, ``dx = dy @ (w.T).T`` and
``dw = dy.T @ (x.T).T``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8lab.formats import E4M3, E5M2, HOPPER, gemm_support
from float8lab.ops import reference
from float8lab.ops.declare import called_by_ops, capability_of, declare

__all__ = ["is_cublas_gemm", "may_multiply", "scaled_mm_into", "scaled_mm_op"]


def _flops(
    a: Sequence[int], scale: object, _: object, b: Sequence[int], __: object, ___: object,
    bias: object, out_dtype: object, fast_accum: object, offs: Sequence[int] | None = None,
    *args: object, **kwargs: object,
) -> int:  # fmt: skip
    """Count a multiplication and an addition per output element and element of the contraction."""
    # For FP8 groups in the contraction, padding between them is excluded, to within one span.
    contraction = a[-1]
    if offs is not None and len(b) == 2 and scale is not None:
        padding = (offs[0] + 1) * (reference.SPAN - 1)
        contraction = max(contraction - padding, contraction // reference.SPAN)
    return 2 * math.prod(a[:-1]) * contraction * b[-2]


def _outputs(args: Any) -> Tensor:
    groups = args.offs.shape if args.offs is not None and args.b.ndim == 2 else ()
    return args.a.new_empty((*groups, *args.a.shape[:-1], args.b.shape[-2]), dtype=args.out_dtype)


scaled_mm_op = declare(reference.scaled_mm, cuda="gemm:scaled_mm", outputs=_outputs, flops=_flops)
scaled_mm_into = called_by_ops(reference.scaled_mm_into, cuda="gemm:scaled_mm_into")
"""A GEMM into a given output, for ops that multiply an operand shard by shard as shards arrive."""


def may_multiply(
    a_block: Sequence[int],
    b_block: Sequence[int],
    device: torch.device,
    *,
    a_dtype: torch.dtype = E4M3,
    b_dtype: torch.dtype = E4M3,
    grouped: bool = False,
) -> bool:
    """Whether the GEMM runs in FP8 on this device, rather than dequantizes its operands.

    A ``grouped`` GEMM, of experts, runs in FP8 only on Hopper. ``formats.gemm_support`` has the
    table of blocks. No GPU multiplies e5m2 by e5m2, and torch does not multiply 1x32 blocks of
    e5m2. A CPU counts as a Hopper GPU: it runs the reference of Hopper's GEMMs.

    >>> may_multiply((1, 128), (128, 128), torch.device("cpu"))
    True
    >>> may_multiply((1, 32), (1, 32), torch.device("cpu"))
    False
    """
    support, formats = gemm_support(a_block, b_block), {a_dtype, b_dtype}
    if support is None or (E5M2 in formats and (formats == {E5M2} or tuple(a_block) == (1, 32))):
        return False
    capability = capability_of(device)
    return support.includes(capability) and (HOPPER.includes(capability) or not grouped)


def is_cublas_gemm(
    a_block: Sequence[int], b_block: Sequence[int], a_dtype: torch.dtype, b_dtype: torch.dtype
) -> bool:
    """Whether cuBLASLt has a GEMM for these blocks on Hopper: for e4m3, since CUDA 12.9."""
    support = gemm_support(a_block, b_block)
    has_gemm = support is not None and support.cublas and a_dtype == b_dtype == E4M3
    return has_gemm and _cuda_version() >= (12, 9)


@functools.cache
def _cuda_version() -> tuple[int, ...]:
    return tuple(int(number) for number in (torch.version.cuda or "0").split("."))
