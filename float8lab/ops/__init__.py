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

# SHIM
_old = (amax_op, amax_of_op, quantize_op, quantize_of_op, quantize_pair_op, quantize_pair_of_op, cast_op, cast_of_op, cast_pair_op, cast_pair_of_op, transpose_op, transpose_after_op)
def cast_op(prologue, inputs, dtype, fp8_dtype, block, rule, eps=0.0, align=1, straight=True, transposed=False, column_sum=False, given=None, slot=None):
    x = inputs[0]
    if straight and transposed:
        if rule == "encode":
            if prologue: q, qt, t = _old[9](prologue, inputs, dtype, given, slot, fp8_dtype, align, column_sum)
            else: q, qt, t = _old[8](x, given, slot, fp8_dtype, align, column_sum)
            return q, None, None, qt, None, t
        if prologue: q, s, qt, st, t = _old[5](prologue, inputs, dtype, fp8_dtype, block, rule, eps, align, column_sum)
        else: q, s, qt, st, t = _old[4](x, fp8_dtype, block, rule, eps, align, column_sum, given)
        return q, s, None, qt, st, t
    if rule == "encode":
        if prologue: q = _old[7](prologue, inputs, dtype, transposed, given, slot, fp8_dtype, align)
        else: q = _old[6](x.t() if transposed else x, given, slot, fp8_dtype, block, align)
        s = am = None
    elif prologue: q, s, am = _old[3](prologue, inputs, dtype, transposed, given, fp8_dtype, block, rule, eps, align)
    else: q, s, am = _old[2](x.t() if transposed else x, fp8_dtype, block, rule, eps, align, given)
    return (None, None, am, q, s, None) if transposed else (q, s, am, None, None, None)
def transpose_op(q, align, event=None):
    return _old[10](q, align) if event is None else _old[11](q, align, event)
