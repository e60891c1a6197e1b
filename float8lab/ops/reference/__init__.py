"""Every op in plain PyTorch: the specification, the test oracle and the CPU implementation.

M rows, K columns, N output features, S delayed-scaling slots, H history length. Matrices are 2-D;
a *block* is ``(rows, columns)`` as in ``float8lab.formats``.
"""

from float8lab.ops.reference.blocks import (
    ALIGN,
    CastResults,
    as_matrix,
    block_amax,
    encode_from_amax,
    factors_from_amax,
    quantize,
    round_to_fp8,
    round_up,
    scale_in_tiles,
)
from float8lab.ops.reference.cast import amax_of, cast, cast_many_, has_amax, transpose
from float8lab.ops.reference.gemm import scaled_mm, scaled_mm_into
from float8lab.ops.reference.grouped import SPAN, padded_rows, plan_groups
from float8lab.ops.reference.norm import norm, norm_backward
from float8lab.ops.reference.prologue import ACTIVATIONS, dequantize, prologue_shape, value_of
from float8lab.ops.reference.scaling import NO_DATA, update_scales_

__all__ = [
    "ACTIVATIONS", "ALIGN", "NO_DATA", "SPAN", "CastResults", "amax_of", "as_matrix", "block_amax",
    "cast", "cast_many_", "dequantize", "encode_from_amax", "factors_from_amax", "has_amax", "norm",
    "norm_backward", "padded_rows", "plan_groups", "prologue_shape", "quantize", "round_to_fp8",
    "round_up", "scale_in_tiles", "scaled_mm", "scaled_mm_into", "transpose",
    "update_scales_", "value_of",
]  # fmt: skip
