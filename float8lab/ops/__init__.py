"""One file per op family: plain tensors in, fresh plain tensors out.

``reference/`` holds every op in plain PyTorch; ``kernels/`` holds the CUDA launchers and is the
only place that imports triton.
"""

from float8lab.ops._register import announce_flops, compute_intensive_ops, register_stateful
from float8lab.ops.attention import (
    LARGEST_HEAD,
    fp8_attention_backward_op,
    fp8_attention_op,
    has_fp8_attention,
)
from float8lab.ops.gemm import scaled_bmm_op, scaled_mm_op
from float8lab.ops.norm import (
    fp8_norm_backward_op,
    fp8_norm_op,
    norm_backward_op,
    norm_op,
    norm_stats_op,
)
from float8lab.ops.quantize import (
    amax_op,
    cast_many_op,
    cast_op,
    cast_pair_op,
    cast_unrecorded_op,
    dequantize_after_op,
    dequantize_op,
    quantize_many_op,
    quantize_op,
    quantize_pair_op,
    transpose_after_op,
    transpose_op,
)
from float8lab.ops.reference import (
    ACTIVATIONS,
    as_matrix,
    encode_from_amax,
    factors_from_amax,
    round_up,
    scale_from_amax,
)
from float8lab.ops.rotary import rotate_op
from float8lab.ops.scaling import NO_DATA, update_scales_op
from float8lab.ops.source import (
    Source,
    amax_of_op,
    cast_of_op,
    cast_of_unrecorded_op,
    cast_pair_of_op,
    quantize_of_op,
    quantize_pair_of_op,
    value_of_op,
)

__all__ = [
    "ACTIVATIONS",
    "LARGEST_HEAD",
    "NO_DATA",
    "Source",
    "amax_of_op",
    "amax_op",
    "as_matrix",
    "cast_many_op",
    "cast_of_op",
    "cast_of_unrecorded_op",
    "cast_op",
    "cast_pair_of_op",
    "cast_pair_op",
    "cast_unrecorded_op",
    "compute_intensive_ops",
    "dequantize_after_op",
    "dequantize_op",
    "encode_from_amax",
    "factors_from_amax",
    "fp8_attention_backward_op",
    "fp8_attention_op",
    "fp8_norm_backward_op",
    "fp8_norm_op",
    "has_fp8_attention",
    "norm_backward_op",
    "norm_op",
    "norm_stats_op",
    "quantize_many_op",
    "quantize_of_op",
    "quantize_op",
    "quantize_pair_of_op",
    "quantize_pair_op",
    "register_stateful",
    "rotate_op",
    "round_up",
    "scale_from_amax",
    "scaled_bmm_op",
    "scaled_mm_op",
    "transpose_after_op",
    "transpose_op",
    "update_scales_op",
    "value_of_op",
]

announce_flops()
