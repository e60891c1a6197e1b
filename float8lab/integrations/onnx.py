"""onnx_export writes float8lab modules as ONNX QuantizeLinear and DequantizeLinear nodes.

M tokens, N out features, K in features. A node's FP8 bytes are those of the library's own cast, by
the same scale, rounding and saturation. (ONNX divides by the scale where the library multiplies by
its inverse; this can change the last bit of float32 before the rounding to FP8.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from float8lab.arguments import check_flags
from float8lab.formats import FLOAT32_MAX, Float8Spec, largest
from float8lab.nn import activation_function, fused_function, gemm, grouped_function, norm_function
from float8lab.nn.activation_function import activate
from float8lab.nn.attention import fp8
from float8lab.nn.casts import plain, stored_as
from float8lab.nn.fused_function import MlpCall, NormFront
from float8lab.nn.gemm import output_dtype
from float8lab.nn.norm_function import NormKind, normalize
from float8lab.nn.precision import Call, W, X
from float8lab.ops import as_matrix, reference
from float8lab.recipes.recipe import DelayedScaling
from float8lab.recipes.region import STATE
from float8lab.tensor import Float8Tensor, float8_tensor
from float8lab.tensor.blocks import block_amax
from float8lab.tensor.differentiation import EXPORT

__all__ = ["onnx_export"]


@contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Export float8lab modules to ONNX inside the ``with`` block.

    ``torch.onnx.export(model, args, dynamo=True, opset_version=21)`` then writes each FP8 linear
    layer as QuantizeLinear and DequantizeLinear nodes (``float8e4m3fn``) on the input and on the
    weight, and a MatMul in float32. These, and the operators of norms, activations and attention,
    are standard ONNX. A fused module becomes the operators of its components. onnxruntime runs the
    file, if you tell it that the pairs of nodes are not int8 (``session.disable_quant_qdq``, see
    docs/services.md).

    All recipes can be exported. Ask for ``opset_version`` 21 or higher: ONNX has FP8 since 19, and
    blocks, which ``Float8BlockScaling`` and ``MXFP8BlockScaling`` need, since 21. Scales of current
    recipes are computed in the graph; those of ``DelayedScaling`` are constants. Only the forward
    is exported: gradients are disabled inside the block, and no state changes.

    Args:
        enabled: whether modules are exported so; False changes nothing.

    Raises:
        ValueError: a layer under ``DelayedScaling`` has no scales yet.
        NotImplementedError: attention in FP8, with ``qkv_format="thd"`` or a key/value cache.

    >>> with float8lab.onnx_export(enabled=True):
    ...     pass  # torch.onnx.export(model, (x,), "model.onnx", dynamo=True, opset_version=21)
    """
    check_flags(enabled=enabled)
    outer, EXPORT.translations = EXPORT.translations, _TRANSLATIONS if enabled else None
    try:
        # Only the forward is exported: nothing is saved for a backward.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not enabled):
            yield
    finally:
        EXPORT.translations = outer


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """Quantize and dequantize x and weight, and apply a MatMul to the dequantized tensors."""
    plan = call.plan
    dtype = output_dtype(x)
    if STATE.region is not None:
        STATE.region.fp8_calls += 1
    if not plan.fprop:
        added = None if bias is None else bias.to(dtype)
        return F.linear(x.to(dtype), plain(weight).to(dtype), added)
    a = _round_trip((x if plan.x.per_tensor else as_matrix(x)).float(), plan.x, X, call)
    b = plain(weight).float()
    if not stored_as(weight, plan.w):
        b = _round_trip(b, plan.w, W, call)
    y = a @ b.t()
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype).reshape(*x.shape[:-1], weight.shape[0])


def _grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, call: Call | None, *_: object
) -> Tensor:
    """Apply each expert to all rows and keep its own rows, since a graph has no sizes of groups.

    Padding rows are set to 0, so that they do not change any scale.
    """
    dtype = output_dtype(x)
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    stops = offs.to(rows.dtype)
    x = torch.where(rows < stops[-1], x, torch.zeros_like(x))
    if call is not None and STATE.region is not None:
        STATE.region.fp8_calls += 1
    call = call if call is not None and call.plan.fprop is not None else None
    wide, stored = dtype, False
    if call is not None:
        wide, stored = torch.promote_types(dtype, torch.float32), stored_as(weight, call.plan.w)
        if not call.plan.x.per_tensor:
            x = _round_trip(x.float(), call.plan.x, X, call)
    y = torch.zeros((x.shape[0], weight.shape[1]), dtype=wide, device=x.device)
    for expert, matrix in enumerate(plain(weight).to(wide).unbind()):
        start = stops[expert - 1] if expert else 0
        inside = (rows >= start) & (rows < stops[expert])
        expert_y = _apply_expert(x, matrix, inside, expert, call, stored)
        if bias is not None:
            expert_y = expert_y + bias[expert].to(wide)
        y = torch.where(inside, expert_y, y)
    return y.to(dtype)


def _apply_expert(
    x: Tensor, matrix: Tensor, inside: Tensor, expert: int, call: Call | None, stored: bool
) -> Tensor:
    """Run an expert's GEMM on all rows; a scale per tensor is computed from the rows ``inside``."""
    if call is not None and not stored:
        matrix = _round_trip(matrix, call.plan.w, W, call, expert=expert)
    if call is not None and call.plan.x.per_tensor:
        x = torch.where(inside, x, torch.zeros_like(x)).float()
        x = _round_trip(x, call.plan.x, X, call, expert=expert)
    return x.to(matrix.dtype) @ matrix.t()


def _norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: NormKind, dtype: torch.dtype
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    x, gamma = x.to(wide), kind.gamma(weight).to(wide)
    if kind.center:
        y = F.layer_norm(x, x.shape[-1:], gamma, None if bias is None else bias.to(wide), kind.eps)
    else:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + kind.eps) * gamma
    return y.to(dtype)


def _activation(h: Tensor, activation: str) -> Tensor:
    """Compute an activation by the op's reference, whose operators ONNX has."""
    h2 = as_matrix(h).to(torch.promote_types(h.dtype, torch.float32))
    y = reference.value_of(activation, [h2], h.dtype)
    return y.reshape(*h.shape[:-1], y.shape[-1])


def _norm_linear(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
    front: NormFront, call: Call,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    normed = normalize(x, norm_weight, norm_bias, front.kind, output_dtype(x))
    y = _linear(normed, weight, bias, call)
    return (y, normed) if front.return_norm else y


def _norm_mlp(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, fc1_weight: Tensor,
    fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None, calls: MlpCall,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    assert isinstance(calls.front, NormFront), "the translated function is that of a norm"
    normed = normalize(x, norm_weight, norm_bias, calls.front.kind, output_dtype(x))
    h = _linear(normed, fc1_weight, fc1_bias, calls.fc1)
    y = _linear(activate(h, calls.activation), fc2_weight, fc2_bias, calls.fc2)
    return (y, normed) if calls.front.return_norm else y


def _dequantized(x: Float8Tensor) -> Tensor:
    scale, axis = _as_onnx(x.scale, x.spec.block, x.shape)
    return _node("DequantizeLinear", x.qdata, scale, axis, x.qdata.dtype).to(x.dtype)


def _refused_attention(*args: object) -> Tensor:
    raise NotImplementedError(
        "recipe must have fp8_dpa=False and fp8_mha=False inside onnx_export; got "
        f"{getattr(args[-1], 'recipe', None)}. ONNX has no attention in FP8: export under a recipe "
        "without it."
    )


_TRANSLATIONS: tuple[tuple[type, Callable[..., object]], ...] = (
    (gemm.LinearFunction, _linear),
    (grouped_function.GroupedFunction, _grouped_linear),
    (norm_function._Norm, _norm),
    (activation_function._Activation, _activation),
    (fused_function.NormLinearFunction, _norm_linear),
    (fused_function.NormMlpFunction, _norm_mlp),
    (float8_tensor._Dequantize, _dequantized),
    (fp8._Attention, _refused_attention),
)
"""Autograd functions, each with the function that replaces it and uses only ONNX operators.

Autograd functions are translated rather than their ops, since the ops pad operands for Hopper and
look up delayed scales when they run, and neither belongs in the ONNX graph."""


def _round_trip(x: Tensor, spec: Float8Spec, index: int, call: Call, *, expert: int = 0) -> Tensor:
    """Quantize and dequantize float32 ``x``, which is a matrix unless the scale is per tensor."""
    scale = _delayed_scale(x, index, call, expert) if call.plan.delayed else None
    if scale is None:
        scale = _scale(block_amax(as_matrix(x), spec.block), spec, call.plan.amax_epsilon)
        if isinstance(call.recipe, DelayedScaling):
            scale = scale * 2.0**call.recipe.margin
    scale, axis = _as_onnx(scale, spec.block, x.shape)
    # QuantizeLinear saturates an infinity, but the library's cast gives NaN: a forward casts to
    # e4m3, which has no infinities.
    x = torch.where(x.abs() == torch.inf, torch.nan, x)
    quantized = _node("QuantizeLinear", x, scale, axis, spec.fp8_dtype)
    return _node("DequantizeLinear", quantized, scale, axis, spec.fp8_dtype)


def _node(
    op: str, x: Tensor, scale: Tensor, axis: dict[str, int], fp8_dtype: torch.dtype
) -> Tensor:
    """Add a QuantizeLinear node to FP8, or a DequantizeLinear node from FP8 to float32."""
    dtype = fp8_dtype if op == "QuantizeLinear" else torch.float32
    # The dtype of the zeros tells ONNX the format. They are cast: ONNX cannot fill FP8 tensors.
    zeros = torch.zeros_like(scale).to(fp8_dtype)
    return torch.onnx.ops.symbolic(op, (x, scale, zeros), {**axis}, dtype=dtype, shape=x.shape)


def _delayed_scale(x: Tensor, index: int, call: Call, expert: int) -> Tensor | None:
    """Return the scale of a tensor or an expert's rows; None if the expert has had no tokens."""
    # An expert that has had no tokens uses the scale of its present rows, as in eager mode.
    by_recipe = {} if call.precision is None else call.precision.slots
    slots = by_recipe.get((call.recipe, STATE.autocast.group))
    scales: list[float | None] = []
    if slots is not None:
        columns = slots.columns_of(index)
        with _disable_current_modes():  # read the values and not symbols
            pairs = zip(slots.pack.has_scale()[columns], slots.pack.scale[columns], strict=True)
            scales = [float(scale) if has_scale else None for has_scale, scale in pairs]
    if not any(scale is not None for scale in scales):
        raise ValueError(
            "model must have the scales of its delayed recipe before it is exported; got a layer "
            "without. Train it for a step, or run it under autocast(calibrating=True)."
        )
    scale = scales[expert]
    return None if scale is None else torch.full((), scale, dtype=torch.float32, device=x.device)


def _scale(amax: Tensor, spec: Float8Spec, epsilon: float) -> Tensor:
    """Compute scales like ``ops.factors_from_amax``, but without bit operations, for ONNX."""
    # We use a maximum, since ONNX's clamp would also limit to the largest finite float32.
    raised = torch.maximum(amax, torch.full_like(amax, epsilon))
    limit = largest(spec.fp8_dtype)
    if spec.scale_rule == "e8m0":
        floor = _power_of_two_below(raised / limit)
        scale = torch.where(floor < raised / limit, 2 * floor, floor).clamp(min=2.0**-126)
    elif spec.scale_rule == "pow2":
        scale = 1.0 / _power_of_two_below((limit / raised).clamp(max=FLOAT32_MAX))
    else:
        scale = 1.0 / (limit / raised).clamp(max=FLOAT32_MAX)
    return torch.where((raised > 0) & (raised < torch.inf), scale, torch.ones_like(scale))


def _power_of_two_below(x: Tensor) -> Tensor:
    """Return the largest power of two that does not exceed a positive ``x``."""
    guess = torch.exp2(torch.floor(torch.log2(x)))  # off by one where the logarithm is rounded
    guess = torch.where(guess > x, 0.5 * guess, guess)
    return torch.where(2 * guess <= x, 2 * guess, guess)


def _as_onnx(
    scale: Tensor, block: Sequence[int], shape: Sequence[int]
) -> tuple[Tensor, dict[str, int]]:
    """Return scales in the layout that ONNX requires, and the attributes of both nodes."""
    if tuple(block) == (-1, -1):
        return scale if scale.ndim == 0 else scale.reshape(()), {}
    if tuple(block) == (1, -1):
        return scale.reshape(-1), {"axis": 0}
    rows, columns = block
    if rows > 1:  # ONNX has blocks along one axis: repeat the scale for each row
        scale = scale.unsqueeze(1).expand(-1, rows, -1).reshape(-1, scale.shape[1])[: shape[0]]
    return scale, {"axis": 1, "block_size": columns}
