"""Ops that take plain tensors and return fresh plain tensors.

``reference/`` holds every op in plain PyTorch. It also declares an op there, unless callers need
more than the op itself: then the op has a file here. ``kernels/`` holds the CUDA launchers and is
the only place that imports triton.
"""

from float8lab.ops import graph_casts, inductor  # noqa: F401
from float8lab.ops.attention import (
    LARGEST_HEAD,
    fp8_attention_backward_op,
    fp8_attention_op,
    has_fp8_attention,
    has_fp8_backward,
    has_linear_backward,
    merge_attention_,
)
from float8lab.ops.cast import Prologue, amax_op, cast_many_op, cast_op, transpose_op, value_of_op
from float8lab.ops.declare import compute_intensive_ops
from float8lab.ops.gemm import scaled_mm_into, scaled_mm_op
from float8lab.ops.grouped import Groups, Offsets, plan_groups_op
from float8lab.ops.paged_attention import has_paged_attention, paged_attention, write_pages_
from float8lab.ops.reference import (
    ACTIVATIONS,
    NO_DATA,
    as_matrix,
    encode_from_amax,
    factors_from_amax,
    prologue_shape,
    round_to_fp8,
    round_up,
)
from float8lab.ops.reference.attention import pack_tokens, unpack_tokens
from float8lab.ops.reference.cross_entropy import (
    cross_entropy_backward_op,
    cross_entropy_statistics_op,
)
from float8lab.ops.reference.norm import norm_backward_op, norm_op
from float8lab.ops.reference.permute import gather_rows_op, row_map_op, row_tokens, scatter_rows_op
from float8lab.ops.reference.rotary import rotate_op
from float8lab.ops.reference.router import SCORE_FUNCTIONS, route_backward_op, route_op
from float8lab.ops.reference.scaling import update_scales_op

__all__ = [
    "ACTIVATIONS", "LARGEST_HEAD", "NO_DATA", "SCORE_FUNCTIONS", "Groups", "Offsets", "Prologue",
    "amax_op", "as_matrix", "cast_many_op", "cast_op", "compute_intensive_ops",
    "cross_entropy_backward_op", "cross_entropy_statistics_op", "encode_from_amax",
    "factors_from_amax", "fp8_attention_backward_op", "fp8_attention_op", "gather_rows_op",
    "has_fp8_attention", "has_fp8_backward", "has_linear_backward", "has_paged_attention",
    "merge_attention_", "norm_backward_op", "norm_op", "pack_tokens", "paged_attention",
    "plan_groups_op", "prologue_shape", "rotate_op", "round_to_fp8", "round_up",
    "route_backward_op", "route_op", "row_map_op", "row_tokens", "scaled_mm_into", "scaled_mm_op",
    "scatter_rows_op", "transpose_op", "unpack_tokens", "update_scales_op", "value_of_op",
    "write_pages_",
]  # fmt: skip
