"""Every op in plain PyTorch: the specification, the test oracle and the CPU implementation.

M rows, K columns, N output features, S delayed-scaling slots, H history length. Matrices are 2-D;
a *block* is ``(rows, columns)`` as in ``float8lab.formats``.
"""

from float8lab.ops.reference.activation import ACTIVATIONS
from float8lab.ops.reference.gemm import scaled_bmm, scaled_mm
from float8lab.ops.reference.norm import (
    fp8_norm,
    fp8_norm_backward,
    norm,
    norm_backward,
    norm_stats,
)
from float8lab.ops.reference.quantize import (
    amax,
    as_matrix,
    cast,
    cast_many_,
    cast_pair,
    dequantize,
    encode_from_amax,
    factors_from_amax,
    quantize,
    quantize_many_,
    quantize_pair,
    round_up,
    scale_from_amax,
    scales_by_column,
    sum_of_rows,
    transpose,
)
from float8lab.ops.reference.scaling import NO_DATA, update_scales_
from float8lab.ops.reference.source import (
    amax_of,
    cast_of,
    cast_pair_of,
    quantize_of,
    quantize_pair_of,
    source_shape,
    value_of,
)

__all__ = [
    "ACTIVATIONS",
    "NO_DATA",
    "amax",
    "amax_of",
    "as_matrix",
    "cast",
    "cast_many_",
    "cast_of",
    "cast_pair",
    "cast_pair_of",
    "dequantize",
    "encode_from_amax",
    "factors_from_amax",
    "fp8_norm",
    "fp8_norm_backward",
    "norm",
    "norm_backward",
    "norm_stats",
    "quantize",
    "quantize_many_",
    "quantize_of",
    "quantize_pair",
    "quantize_pair_of",
    "round_up",
    "scale_from_amax",
    "scaled_bmm",
    "scaled_mm",
    "scales_by_column",
    "source_shape",
    "sum_of_rows",
    "transpose",
    "update_scales_",
    "value_of",
]
