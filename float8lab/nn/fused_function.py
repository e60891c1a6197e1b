"""The autograd functions of a linear layer and of an MLP, each with a front.  M rows.

Note: this file uses these nouns.

- *front*: the computation before a module's first GEMM, done while that GEMM's input is cast: a
  norm of the tokens (``NormFront``), or their permutation to experts' rows (``ExpertFront``).
- *prologue*: a front or an activation as the input of a cast. Neither is ever written, nor is the
  gradient between the activation and fc1.
- *front tensors*: the two inputs of the front besides x, and the five tensors that it saves.

Forward saves the front tensors and fc1's output, which the derivatives need. wgrad requantizes
them, and dgrad requantizes the weights, with the scales of forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from float8lab.formats import E4M3, Spec
from float8lab.nn.expert_parameters import is_memory_of_parameter
from float8lab.nn.gemm import Gradient, Saved, backward, forward, output_dtype, recompute_forward
from float8lab.nn.norm_function import NormKind, backward_of_norm, source_of_norm
from float8lab.nn.precision import Call, X
from float8lab.ops import Offsets, Prologue, as_matrix, gather_rows_op, row_tokens, value_of_op
from float8lab.tensor.differentiation import Float8Function, once_differentiable, wanted_gradients
from float8lab.tensor.operands import quantize

__all__ = [
    "ExpertFront", "ExpertMlpFunction", "Layer", "MlpCall", "NormFront", "NormLinearFunction",
    "NormMlpFunction",
]  # fmt: skip

Layer: TypeAlias = tuple[Tensor, Tensor | None]
"""Weight ``[N, K]``, or ``[E, N, K]`` in any layout, and bias ``[N]``, ``[E, N]`` or None."""

_FrontTensors: TypeAlias = tuple[Tensor | None, ...]
_NormTensors: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]
"""The tensors that a norm saves: x, ``[M, K]``, weight, bias, mean and rstd."""


class _FrontData(NamedTuple):
    """The results of the front of a call."""

    source: Tensor | Prologue
    """The first GEMM's input, ``[M, K]``."""
    saved: _FrontTensors
    """The five tensors that backward needs."""
    rows: int
    """M."""
    value: Tensor | None = None
    """The values of the source, if the call returns them."""
    offsets: Offsets | None = None
    """The offsets of experts' rows."""


class NormFront(NamedTuple):
    """A norm; its tensors are the norm's weight, ``[K]``, and its bias, ``[K]`` or None."""

    kind: NormKind
    return_norm: bool
    """Whether the call returns the norm's output as well."""

    def begin(
        self, x: Tensor, tensors: tuple[Tensor, Tensor | None], dtype: torch.dtype, call: Call, *,
        needs_dx: bool, needs_dw: bool,
    ) -> _FrontData:  # fmt: skip
        """Compute the statistics of the norm, and its values if they are returned."""
        weight, bias = tensors
        x2 = as_matrix(x)
        plan = call.plan
        has_cast = plan.fprop is not None or (needs_dw and plan.wgrad is not None)
        want_amax = has_cast and plan.x.block == (-1, -1) and not self.return_norm
        want_amax = want_amax and call.scales.uses_amax(X)
        source, stats = source_of_norm(x2, weight, bias, self.kind, dtype, want_amax=want_amax)
        saved = (x2, weight, bias, *stats) if needs_dx or needs_dw else (None,) * 5
        return _FrontData(source, saved, x2.shape[0], source.value() if self.return_norm else None)

    def source(self, saved: _FrontTensors, dtype: torch.dtype) -> Prologue:
        """Return the norm; an empty prologue where only biases need gradients."""
        if saved[0] is None:
            return Prologue("", [], dtype)
        x, weight, bias, mean, rstd = cast("_NormTensors", saved)
        return source_of_norm(x, weight, bias, self.kind, dtype, (mean, rstd))[0]

    def gradients(
        self, dx: Tensor, saved: _FrontTensors, shape: torch.Size
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute the gradients of x, and of the norm's weight and bias."""
        x, weight, bias, mean, rstd = cast("_NormTensors", saved)
        bias_dtype = None if bias is None else bias.dtype
        dx, dgamma, dbeta = backward_of_norm(dx, x, weight, mean, rstd, self.kind, bias_dtype)
        return dx.reshape(shape), dgamma, dbeta


class ExpertFront(NamedTuple):
    """The rows of experts; its tensors are their offsets, ``[E]``, and a row map or None.

    With the row map of ``moe_permute``, x holds tokens, which the cast permutes to these rows.
    """

    rows: int

    def begin(
        self, x: Tensor, tensors: tuple[Tensor, Tensor | None], dtype: torch.dtype, call: Call, *,
        needs_dx: bool, needs_dw: bool,
    ) -> _FrontData:  # fmt: skip
        """Find the token of each row."""
        offs, row_map = tensors
        offsets = Offsets.of(offs, self.rows)
        if row_map is None:
            return _FrontData(x, (*offsets, None, None, None), self.rows, offsets=offsets)
        token = row_tokens(row_map, self.rows)
        tokens = (x, token) if needs_dw else (None, None)
        source = Prologue("permute", [x, token], dtype)
        return _FrontData(source, (*offsets, row_map, *tokens), self.rows, offsets=offsets)

    def source(self, saved: _FrontTensors, dtype: torch.dtype) -> Prologue | None:
        """Return the permutation of tokens; None if x already held experts' rows."""
        *_, row_map, x, token = saved
        if row_map is None:
            return None
        return Prologue("permute", [] if x is None or token is None else [x, token], dtype)

    def gradients(
        self, dx: Tensor, saved: _FrontTensors, shape: torch.Size
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradient of the rows, or its sum over the rows of each token."""
        row_map = saved[2]
        dx = dx if row_map is None else gather_rows_op(dx, row_map, dx.dtype)[0]
        return dx, None, None


class MlpCall(NamedTuple):
    """How one call of an MLP runs."""

    front: NormFront | ExpertFront
    activation: str
    fc1: Call
    fc2: Call
    checkpoint: bool = False
    """Whether backward recomputes the activation's input, so that forward does not save it."""
    fp8_input: bool = False
    """Whether forward saves the activation's input in FP8; no effect with ``checkpoint``."""


class NormLinearFunction(Float8Function):
    """Compute ``norm(x) @ weight.T + bias``, and ``norm(x)`` if the front returns it, by ``run``.

    Args:
        x: ``[..., K]``.
        norm_weight: ``[K]``.
        norm_bias: ``[K]`` for LayerNorm, None for RMSNorm.
        weight: ``[N, K]``, ordinary or a Float8Tensor.
        bias: ``[N]`` or None.

    It returns ``[..., N]``, in the dtype that ``LinearFunction`` would return.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor,
        bias: Tensor | None, front: NormFront, call: Call,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        (N, K), dtype = weight.shape, output_dtype(x)
        needs_dx, needs_dw = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
        front_data = front.begin(
            x, (norm_weight, norm_bias), dtype, call, needs_dx=needs_dx, needs_dw=needs_dw
        )
        y, saved = forward(
            front_data.source, weight, bias, call,
            needs=(needs_dx, needs_dw), dtype=dtype, written=front_data.value,
        )  # fmt: skip
        ctx.save_for_backward(*front_data.saved, *saved)
        ctx.front, ctx.call, ctx.dtype, ctx.x_shape = front, call, dtype, x.shape
        M, shape = call.comm.output_shape(x.shape, front_data.rows, N)
        ctx.shape = M, N, K
        ctx.dtypes = dtype, weight.dtype, None if bias is None else bias.dtype
        # Do not return views: torch refuses in-place ops on views of autograd functions' outputs.
        y = torch.ops.aten._unsafe_view.default(y, shape)
        if front_data.value is None:
            return y
        return y, torch.ops.aten._unsafe_view.default(front_data.value, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *dnorm: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needs = ctx.saved_tensors, wanted_gradients(ctx)
        front, saved = tensors[:5], Saved._make(tensors[5:])
        dn, dw, db = backward(
            dy.reshape(ctx.shape[:2]), ctx.front.source(front, ctx.dtype), saved, ctx.call,
            needs=(any(needs[:3]), needs[3], needs[4]), shape=ctx.shape, dtypes=ctx.dtypes,
        )  # fmt: skip
        gemm_gradients = (dw, db, None, None)
        if dn is None:
            return (None,) * 3 + gemm_gradients
        if dnorm:
            dn = dn + dnorm[0].reshape(dn.shape)
        return ctx.front.gradients(dn, front, ctx.x_shape) + gemm_gradients


_SAVED_SPEC = Spec(E4M3, (1, 128))
"""The spec that saves an activation's input in one byte an element, with 4 significant bits."""


class _Mlp(Float8Function):
    """Compute ``activation(front(x) @ w1.T + b1) @ w2.T + b2``, by ``run``.

    Args:
        x: ``[..., K]``.
        front_weight: a norm's weight, ``[K]``; for experts, the offsets of their rows, ``[E]``.
        front_bias: a norm's bias, ``[K]`` or None; for experts, the row map of ``moe_permute``,
            which assigns tokens to rows, or None if x holds rows, of which those after the last
            offset give zeros.
        fc1_weight: ``[F, K]``, or ``[2 F, K]`` if the activation gates; for experts, ``[E, ...]``.
        fc1_bias: ``[F]``, ``[2 F]``, or None.
        fc2_weight: ``[K, F]``.
        fc2_bias: ``[K]`` or None.

    It returns ``[..., K]``, in the dtype of ``LinearFunction``, and the norm's output if asked to.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, front_weight: Tensor, front_bias: Tensor | None, fc1_weight: Tensor,
        fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None, call: MlpCall,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        dtype, needs = output_dtype(x), ctx.needs_input_grad
        needs_dx, needs_dw1 = any(needs[:3]), needs[3]
        needs_dh, needs_dw2 = any(needs[:5]), needs[5]
        recomputes = call.checkpoint and (needs_dh or needs_dw2)
        front_data = call.front.begin(
            x, (front_weight, front_bias), dtype, call.fc1,
            needs_dx=needs_dx, needs_dw=needs_dw1 or recomputes,
        )  # fmt: skip
        offsets = front_data.offsets
        h, saved1 = forward(
            front_data.source, fc1_weight, fc1_bias, call.fc1,
            needs=(needs_dx, needs_dw1), dtype=dtype, written=front_data.value,
            recomputes=recomputes, offsets=offsets,
            save_memory=offsets is not None and is_memory_of_parameter(fc1_weight),
        )  # fmt: skip
        y, saved2 = forward(
            Prologue(call.activation, [h], dtype), fc2_weight, fc2_bias, call.fc2,
            needs=(needs_dh, needs_dw2), dtype=dtype, offsets=offsets,
            save_memory=offsets is not None and is_memory_of_parameter(fc2_weight),
        )  # fmt: skip

        saved_h: tuple[Tensor | None, Tensor | None] = (None, None)
        if (needs_dh or needs_dw2) and not recomputes:
            saved_h = quantize(h, _SAVED_SPEC, align=1).rowwise if call.fp8_input else (h, None)
        recomputed = fc1_bias if recomputes else None
        ctx.save_for_backward(*front_data.saved, *saved1, *saved2, *saved_h, recomputed)
        ctx.call, ctx.dtype, ctx.x_shape = call, dtype, x.shape
        N, K = fc1_weight.shape[-2:]
        M, _ = call.fc1.comm.output_shape(x.shape, front_data.rows, N)
        ctx.shapes = (M, N, K), (M, K, fc2_weight.shape[-1])
        x_dtype = x.dtype if isinstance(front_data.source, Tensor) else dtype
        ctx.dtypes = (
            (x_dtype, fc1_weight.dtype, None if fc1_bias is None else fc1_bias.dtype),
            (dtype, fc2_weight.dtype, None if fc2_bias is None else fc2_bias.dtype),
        )
        if offsets is None:
            y = torch.ops.aten._unsafe_view.default(y, x.shape)
        if front_data.value is None:
            return y
        return y, torch.ops.aten._unsafe_view.default(front_data.value, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *dnorm: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needs = ctx.saved_tensors, wanted_gradients(ctx)
        call: MlpCall = ctx.call
        second = 5 + len(Saved._fields)
        front, (h, h_scale, fc1_bias) = tensors[:5], tensors[-3:]
        saved1, saved2 = Saved._make(tensors[5:second]), Saved._make(tensors[second:-3])
        source = call.front.source(front, ctx.dtype)
        offsets = Offsets(*front[:2]) if isinstance(call.front, ExpertFront) else None
        (shape1, shape2), (dtypes1, dtypes2) = ctx.shapes, ctx.dtypes
        if h_scale is not None:
            h = value_of_op("dequantize", (h, h_scale), ctx.dtype, _SAVED_SPEC.block)
        elif h is None and call.checkpoint and source is not None and source.inputs:
            h = recompute_forward(source, fc1_bias, saved1, call.fc1, shape1[1])
        activated = Prologue(call.activation, [] if h is None else [h], ctx.dtype)
        dy = dy.reshape(shape2[:2]) if call.fc2.comm.tokens is None else as_matrix(dy)
        da, dw2, db2 = backward(
            dy, activated, saved2, call.fc2, needs=(any(needs[:5]), needs[5], needs[6]),
            shape=shape2, dtypes=dtypes2, offsets=offsets,
        )  # fmt: skip
        if da is None:
            return (None,) * 5 + (dw2, db2, None)
        wants = (any(needs[:3]), needs[3], needs[4])
        dh = Prologue(f"{call.activation}_backward", [h, da], ctx.dtype)
        gradient = Gradient(dh, call.fc1, needs=wants, offsets=offsets)
        # Free the largest tensors of a layer: the GEMMs need only their cast.
        del h, da, dh, activated, saved2, tensors
        # Autograd would free them only after backward. In a retained graph, this frees nothing.
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()
        dn, dw1, db1 = backward(
            gradient, source, saved1, call.fc1,
            needs=wants, shape=shape1, dtypes=dtypes1, offsets=offsets,
        )  # fmt: skip
        gemm_gradients = (dw1, db1, dw2, db2, None)
        if dn is None:
            return (None,) * 3 + gemm_gradients
        if dnorm:
            dn = dn + dnorm[0].reshape(dn.shape)
        return call.front.gradients(dn, front, ctx.x_shape) + gemm_gradients


class NormMlpFunction(_Mlp):
    """The MLP after a norm."""


class ExpertMlpFunction(_Mlp):
    """The MLPs of experts, for which ONNX has no operators."""
