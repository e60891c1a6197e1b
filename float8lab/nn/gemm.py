"""The three GEMMs of a linear layer in FP8, fprop, dgrad and wgrad, and the tensors they save.

M tokens, N out features, K in features. The autograd functions of all modules are compositions of
``forward`` and ``backward``.

Note: this file uses the nouns of ``tensor/operands.py`` and these.

- *requantize*: to cast a matrix in backward to the bytes that it had in forward. This takes its
  scale and a second value, from which the encode factor follows exactly.
- *save policy*: the form in which autograd saves each operand, decided before anything runs.
- *call*: how one forward of a layer and its backward run. Its *plan* holds the recipe's specs.

With the ``offsets`` of experts' rows, the three are grouped GEMMs: each row is multiplied by the
weight of its expert, from ``[E, N, K]``. Ranks share the GEMMs of a *sharded* layer: the *comm* of
a call sends each rank what it lacks, and sends nothing on one GPU (``distributed/comm.py``).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8lab.distributed.comm import Gemm, GemmTask, OneGpu, TokenShard
from float8lab.distributed.offload import WEIGHT_CASTS
from float8lab.formats import E8M0, FP8_DTYPES, Spec
from float8lab.nn.casts import (
    WeightSource,
    amaxes_of_shards,
    input_source,
    keeps_fp8_data,
    kept_transpose,
    note_weight,
    plain,
    remember_input,
    show_cast,
    show_gemm,
    show_quantized,
    transposed,
    weight_source,
)
from float8lab.nn.main_grad import accumulate
from float8lab.nn.precision import Call
from float8lab.nn.producer import Recast, origin_of
from float8lab.nn.scales import DY, W, X
from float8lab.ops import Groups, Offsets, Prologue, as_matrix, scaled_mm_op
from float8lab.ops.declare import planned
from float8lab.ops.operand import Operand, Orientations, Quantized
from float8lab.ops.reference import ALIGN
from float8lab.recipes.delayed import QuantParams
from float8lab.recipes.recipe import LinearPlan, Recipe, recipe_numbered
from float8lab.tensor import Float4Tensor, Float8Tensor
from float8lab.tensor.differentiation import Float8Function, once_differentiable, wanted_gradients
from float8lab.tensor.operands import Matrix, quantize, replayed_quantize, value_of

Value = TypeVar("Value")

__all__ = [
    "Gradient", "Keep", "LinearFunction", "SavePolicy", "Saved", "backward", "forward",
    "output_dtype", "recompute_forward", "save_policy",
]  # fmt: skip


# The tensors that are saved for backward.


class Saved(NamedTuple):
    """The tensors of a GEMM's operands that backward needs; a field it does not need is None.

    Autograd saves the fields in this order, and ``Saved._make`` restores them from its tuple.
    """

    x: Tensor | None = None
    """The columnwise FP8 data of a matrix; or the matrix, which wgrad takes unchanged or casts."""
    x_scale: Tensor | None = None
    """The scale of that data, or the scale that requantizes the matrix or a prologue."""
    x_requant: Tensor | None = None
    """The second value that requantizes the matrix or a prologue, next to the scale."""
    weight: Tensor | None = None
    """The weight as the caller gave it."""
    w: Tensor | None = None
    """The rowwise FP8 data of the weight."""
    w_scale: Tensor | None = None
    w_requant: Tensor | None = None
    """The second value that requantizes the weight, next to the scale."""


class Keep(enum.Enum):
    """The form in which an operand of fprop is saved for backward."""

    NOTHING = enum.auto()
    FP8_DATA = enum.auto()
    REQUANTIZE = enum.auto()
    """Only the values that requantize the operand, which is alive in backward anyway."""
    HIGH_PRECISION = enum.auto()
    GATHERED = enum.auto()
    """The FP8 data of the tokens of all ranks, which fprop gathered."""


class SavePolicy(NamedTuple):
    """The forms in which a GEMM's operands are saved."""

    x: Keep
    w: Keep
    weight: bool
    """Whether the weight is saved as the caller gave it, next to ``w``."""


def save_policy(
    plan: LinearPlan, needs: tuple[bool, bool], *, is_prologue: bool, recomputes: bool = False,
    requantizes_x: bool = False, requantizes_weight: bool = False, keeps_gathered: bool = False,
    gathers_before_cast: bool = False,
) -> SavePolicy:  # fmt: skip
    """Decide which tensors ``forward`` saves.

    The FP8 data of a weight are saved where their transpose has the bytes that dgrad takes: with
    one scale per tensor, or in square blocks.

    Args:
        needs: whether the gradients of x and of the weight are needed.
        is_prologue: whether a prologue computes x; its inputs are alive in backward.
        recomputes: whether backward recomputes the output, by ``recompute_forward``.
        requantizes_x: whether a matrix x is kept and cast in backward, rather than kept in FP8.
        requantizes_weight: whether the weight is kept and cast in backward in the same way.
        keeps_gathered: whether wgrad also takes the x that fprop gathered over ranks.
        gathers_before_cast: whether ranks gather x in high precision; then each saves its shard.
    """
    needs_dx, needs_dw = needs
    fp8_wgrad = needs_dw and plan.wgrad is not None
    recomputes_in_fp8 = recomputes and plan.fprop is not None
    w = Keep.NOTHING
    reuses_w = needs_dx and plan.dgrad is not None and plan.dgrad.right == plan.w
    if plan.w.is_square and (reuses_w or recomputes_in_fp8):
        w = Keep.REQUANTIZE if requantizes_weight else Keep.FP8_DATA
    if keeps_gathered and fp8_wgrad:
        x = Keep.GATHERED
    elif is_prologue:
        has_use = plan.x.per_tensor and (fp8_wgrad or recomputes_in_fp8)
        x = Keep.REQUANTIZE if has_use else Keep.NOTHING
    elif fp8_wgrad and not gathers_before_cast:
        x = Keep.FP8_DATA
        if requantizes_x and plan.casts_x_once:
            x = Keep.REQUANTIZE if plan.x.per_tensor else Keep.HIGH_PRECISION
    else:
        x = Keep.HIGH_PRECISION if needs_dw else Keep.NOTHING
    return SavePolicy(x, w, _saves_weight(plan, needs_dx, recomputes, has_data=w is Keep.FP8_DATA))


def _saves_weight(plan: LinearPlan, needs_dx: bool, recomputes: bool, *, has_data: bool) -> bool:
    """Whether a GEMM of backward needs the weight, since no saved FP8 data can replace it."""
    in_high_precision = (needs_dx and plan.dgrad is None) or (recomputes and plan.fprop is None)
    return in_high_precision or ((needs_dx or recomputes) and not has_data)


def _saved_value(value: Value | None) -> Value:
    """Return a value that the save policy or the caller has kept, and check that it is there."""
    if value is None:
        raise AssertionError("a GEMM asked for a tensor that was not kept; report this, please")
    return value


class _FpropCasts:
    """How fprop casts x: rowwise for itself, and columnwise for wgrad if that operand is saved.

    Recorded launches compare these objects by identity, so equal ones are made only once.
    """

    __slots__ = ("keeps_gathered", "recipe", "specs")

    def __init__(self, recipe: int, specs: Orientations, keeps_gathered: bool) -> None:
        self.recipe = recipe_numbered(recipe)
        self.specs, self.keeps_gathered = specs, keeps_gathered


_fprop_casts = functools.lru_cache(maxsize=1024)(_FpropCasts)


@functools.lru_cache(maxsize=1024)
def _decide(
    recipe: int, needs: tuple[bool, bool], casts_for_backward: bool, is_prologue: bool,
    recomputes: bool, requantizes_weight: bool, keeps_gathered: bool, gathers_before_cast: bool,
    requantizes_x: bool,
) -> tuple[SavePolicy, _FpropCasts, bool]:  # fmt: skip
    """Decide what is saved, how x is cast, and whether the weight is cast."""
    plan = recipe_numbered(recipe).linear
    policy = save_policy(
        plan, (True, True) if casts_for_backward else needs, is_prologue=is_prologue,
        recomputes=recomputes, requantizes_x=requantizes_x, requantizes_weight=requantizes_weight,
        keeps_gathered=keeps_gathered, gathers_before_cast=gathers_before_cast,
    )  # fmt: skip
    if is_prologue:
        rowwise, columnwise = plan.x if plan.fprop or policy.x is Keep.REQUANTIZE else None, None
    else:
        rowwise = None if plan.fprop is None else plan.fprop.left
        columnwise = plan.wgrad.right if plan.wgrad and policy.x is Keep.FP8_DATA else None
    casts = _fprop_casts(recipe, Orientations(rowwise, columnwise), policy.x is Keep.GATHERED)
    return policy, casts, plan.fprop is not None or policy.w is not Keep.NOTHING


# fprop.


class _Fprop(NamedTuple):
    """The results of fprop: the output, or None if fprop runs in high precision; the operands."""

    y: Tensor | None
    x: Quantized
    w: Quantized
    gathered: Operand | None = None
    """The x that the GEMM of a sharded layer took."""


def forward(
    x: Tensor | Prologue, weight: Tensor, bias: Tensor | None, call: Call, *,
    needs: tuple[bool, bool], dtype: torch.dtype, inp: Tensor | None = None,
    written: Tensor | None = None, recomputes: bool = False, offsets: Offsets | None = None,
    save_memory: bool = False, has_origin: bool = False,
) -> tuple[Tensor, Saved]:  # fmt: skip
    """Compute ``x @ weight.T + bias``, ``[M, N]``, and return it with the tensors to save.

    Args:
        x: ``[M, K]``.
        weight: ``[N, K]``, ordinary or a Float8Tensor.
        bias: ``[N]`` or None.
        needs: whether the gradients of x and of the weight are needed.
        inp: if x is a matrix, the layer's input, of which x has the values.
        written: if x is a prologue, its values, where they are written anyway.
        recomputes: also save what ``recompute_forward`` needs, if x is a prologue.
        offsets: the offsets of experts' rows; then weight and bias are those of E experts, and rows
            beyond the last offset give zeros.
        save_memory: requantize the weight in backward rather than keep its FP8 data. A parameter in
            high precision is alive until then and always requantized, unless its cast is kept.
        has_origin: backward can compute a matrix x, so neither x nor its FP8 data are saved where
            x can be cast then.
    """
    plan, comm, is_prologue = call.plan, call.comm, isinstance(x, Prologue)
    is_parameter = type(weight) is nn.Parameter and call.first_microbatch is None
    saves_memory = save_memory and not keeps_fp8_data(weight, call)
    policy, casts, casts_weight = _decide(
        call.recipe.number, needs, call.casts_for_backward, is_prologue, recomputes,
        saves_memory or is_parameter or call.weight_is_alive, comm.keeps_gathered,
        comm.gathers_x_first,
        _requantizes_input(x, call, offsets) if call.in_graph else has_origin,
    )  # fmt: skip
    specs = casts.specs
    computed = x if written is None else written
    matrix: Matrix = computed if offsets is None else Groups.of(computed, offsets)
    value = comm.gather(value_of(matrix)) if comm.gathers_x_first and any(specs) else matrix

    # Everything that depends on the state of the module comes before the GEMM, or after it.
    amaxes = amaxes_of_shards(value, weight, call) if comm.is_sharded else (None, None)
    source = input_source(value, inp, specs, call, amaxes[0])
    w_source = weight_source(weight, call, amaxes[1]) if casts_weight else WeightSource()
    run: Any = _fprop
    if (x if isinstance(x, Tensor) else x.inputs[0]).is_cuda:
        run = _fprop if comm.is_sharded or call.watched else _planned_fprop
    fprop: _Fprop = run(
        value, casts, source.params, source.quantized, w_source, bias, weight.shape[-2],
        dtype, comm, call.watched,
    )  # fmt: skip
    if source.shared is not None:
        remember_input(*source.shared, fprop.x)
    if call.watched or WEIGHT_CASTS.outlive_step is not None:
        _show_forward(value, specs, weight, fprop, call)
    y = _in_high_precision(matrix, weight, bias, dtype, comm) if fprop.y is None else fprop.y
    return y, _saved(policy, x, weight, fprop, plan, has_origin=has_origin)


def _requantizes_input(x: Tensor | Prologue, call: Call, offsets: Offsets | None) -> bool:
    """Whether a matrix x is cast in backward for wgrad, rather than saved in FP8.

    In a graph the compiler decides in the end: where x would cost memory until backward, the
    compiler makes both casts in forward (``ops/graph_casts.py``).
    """
    if isinstance(x, Prologue) or offsets is not None or call.comm.is_sharded or call.watched:
        return False
    return bool(x.numel() >= call.plan.recast_size)


def _show_forward(x: Matrix, specs: Orientations, w: Tensor, fprop: _Fprop, call: Call) -> None:
    """Tell an observer and CPU offload which tensors forward has cast."""
    if call.watched:
        show_quantized(x, specs, fprop.x, X, call)
    if fprop.w.rowwise is not None:
        note_weight(w, fprop.w, call)
    if call.watched:
        operands = (fprop.gathered or fprop.x.rowwise, fprop.w.rowwise) if call.plan.fprop else ()
        show_gemm("fprop", call, *operands)


def _saved(
    policy: SavePolicy, x: Tensor | Prologue, weight: Tensor, fprop: _Fprop, plan: LinearPlan, *,
    has_origin: bool,
) -> Saved:  # fmt: skip
    """Return the tensors that a save policy asks for."""
    matrix_x = x if isinstance(x, Tensor) and not has_origin else None
    data = scale = requant = w_data = w_scale = w_requant = None
    if policy.x is Keep.GATHERED:
        data, scale = transposed(*_saved_value(fprop.gathered))
        requant = fprop.x.requant
    elif policy.x is Keep.REQUANTIZE:
        data, scale, requant = matrix_x, fprop.x.rowwise.scale, fprop.x.requant
    elif policy.x is Keep.FP8_DATA:
        data, scale = fprop.x.columnwise
        if plan.wgrad is not None and plan.wgrad.right.scale_dtype == E8M0:
            scale = scale.to(torch.float8_e8m0fnu)  # exact, and one byte each
    elif policy.x is Keep.HIGH_PRECISION:
        data = matrix_x
    if policy.w is Keep.REQUANTIZE:
        w_scale, w_requant = fprop.w.rowwise.scale, fprop.w.requant
    elif policy.w is Keep.FP8_DATA:
        w_data, w_scale = fprop.w.rowwise
    kept_weight = weight if policy.weight else None
    return Saved(data, scale, requant, kept_weight, w_data, w_scale, w_requant)


def _fprop(
    x: Matrix, casts: _FpropCasts, x_params: QuantParams | None, x_quantized: Quantized | None,
    weight: WeightSource, bias: Tensor | None, features: int, dtype: torch.dtype, comm: OneGpu,
    keep_gathered: bool,
) -> _Fprop:  # fmt: skip
    """Compute ``x @ weight.T + bias``, ``[M, features]``, and its operands from arguments alone.

    Args:
        x_quantized: the cast of x, if it exists already.
        weight: the weight; empty if nothing takes it in FP8.
        keep_gathered: return the x gathered over ranks, whether or not it is saved.
    """
    plan, (rowwise, columnwise) = casts.recipe.linear, casts.specs
    if x_quantized is None:
        x_quantized = Quantized()
        if rowwise or columnwise:
            x_quantized = quantize(x, rowwise, columnwise, x_params, plan.epsilon)
    w_quantized = weight.quantized or Quantized()
    if weight.high_precision is not None:
        w_quantized = quantize(weight.high_precision, plan.w, None, weight.params, plan.epsilon)
    if plan.fprop is None:
        return _Fprop(None, x_quantized, w_quantized)
    a, b = x_quantized.rowwise, w_quantized.rowwise
    offsets = None
    tokens = (x if isinstance(x, Tensor) else x.inputs[0]).shape[0]
    if isinstance(x, Groups):
        offsets, tokens = Offsets(x.offs, x.plan), a.data.shape[0]
    task = GemmTask(plan.fprop, (tokens, features), dtype, offsets)
    y, left = comm.mm(a, b, task, bias, keep=keep_gathered or casts.keeps_gathered)
    return _Fprop(y.contiguous(), x_quantized, w_quantized, left if comm.is_sharded else None)


_planned_fprop = planned(_fprop)


def _in_high_precision(
    x: Matrix, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, comm: OneGpu
) -> Tensor:
    """Compute fprop in high precision, where the plan has no specs for it."""
    matrix, bias = comm.gather(value_of(x).to(dtype)), comm.bias(bias)
    cast_bias = None if bias is None else bias.to(dtype)
    if isinstance(x, Groups):
        return _mm_in_groups(matrix, plain(weight).to(dtype), x.offs, dtype, cast_bias)
    return comm.reduce(F.linear(matrix, plain(weight).to(dtype), cast_bias))


def _mm_in_groups(
    a: Tensor, b: Tensor, offs: Tensor | None, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Compute a grouped GEMM in high precision."""
    return scaled_mm_op(a, None, (), b, None, (), bias, dtype, False, offs)


def recompute_forward(
    x: Prologue, bias: Tensor | None, saved: Saved, call: Call, features: int
) -> Tensor:
    """Recompute in backward the output that ``forward`` gave for a prologue, bit for bit."""
    plan, scales = call.plan, call.scales
    if plan.fprop is None:
        if call.watched:
            show_gemm("fprop", call)
        return _in_high_precision(x, _saved_value(saved.weight), bias, x.dtype, call.comm)
    value: Matrix = call.comm.gather(x.value()) if call.comm.gathers_x_first else x
    x_params = scales.requant_params(saved.x_scale, saved.x_requant)
    x_quantized = quantize(value, plan.fprop.left, None, x_params, scales.epsilon)
    if saved.w is not None and saved.w_scale is not None:
        source = WeightSource(quantized=Quantized(Operand(saved.w, saved.w_scale)))
    else:
        weight = _saved_value(saved.weight)
        params = scales.requant_params(saved.w_scale, saved.w_requant)
        source = WeightSource(plain(weight), params) if params else weight_source(weight, call)
    casts = _fprop_casts(call.recipe.number, Orientations(None, None), False)
    fprop = _fprop(
        value, casts, None, x_quantized, source, bias, features, x.dtype, call.comm, call.watched
    )
    if call.watched:
        show_gemm("fprop", call, fprop.gathered or x_quantized.rowwise, fprop.w.rowwise)
    return _saved_value(fprop.y)


# The gradients.


class Gradient:
    """The cast gradient of a GEMM's output; its fields can be freed one by one after use."""

    __slots__ = ("columnwise", "dbias", "high_precision", "rowwise", "transposes_gathered")

    high_precision: Tensor | None
    rowwise: Operand | None
    """The operand of dgrad; None if dgrad runs in high precision."""
    columnwise: Operand | TokenShard | None
    """The operand of wgrad; None if wgrad runs in high precision."""
    dbias: Tensor | None
    """The column sums, of all rows or of each expert's rows, where the cast gives them for free."""
    transposes_gathered: bool
    """Whether wgrad takes the transpose of the operand that dgrad gathers from other ranks."""

    def __init__(
        self, dy: Tensor | Prologue, call: Call, *, needs: tuple[bool, bool, bool],
        offsets: Offsets | None = None,
    ) -> None:  # fmt: skip
        """Cast ``dy`` for those of the gradients of x, weight and bias that are needed."""
        plan, (needs_dx, needs_dw, needs_db) = call.plan, needs
        specs = _gradient_specs(plan, needs_dx=needs_dx, needs_dw=needs_dw)
        wants_dbias = needs_db and (offsets is not None or all(specs))
        if isinstance(dy, Prologue):  # its values are written unless casts alone serve every GEMM
            lacks_dw = specs.columnwise is None if needs_dw else needs_db
            dy = dy.value() if specs.rowwise is None or lacks_dw else dy
        self.high_precision = None if isinstance(dy, Prologue) else dy
        self.rowwise = self.columnwise = self.dbias = None
        self.transposes_gathered = False
        if not any(specs):
            return
        if call.comm.transposes_gathered and specs.rowwise == specs.columnwise:
            self.transposes_gathered, specs = True, Orientations(specs.rowwise, None)
        x: Matrix = dy if offsets is None else Groups.of(dy, offsets)
        if call.comm.gathers_dy_first:
            value = value_of(x)
            self.dbias = value.float().sum(0) if wants_dbias else None
            x, wants_dbias = call.comm.gather(value, backward=True), False
        quantized = call.scales.quantize(x, DY, *specs, dbias=wants_dbias)
        self.rowwise = quantized.rowwise
        if specs.columnwise:
            block = specs.columnwise.block
            self.columnwise = call.comm.token_operand(quantized.columnwise, block, backward=True)
        self.dbias = quantized.dbias if wants_dbias else self.dbias
        if call.watched:
            show_quantized(x, specs, quantized, DY, call)


def _gradient_specs(plan: LinearPlan, *, needs_dx: bool, needs_dw: bool) -> Orientations:
    """Return the specs by which dy is cast: rowwise for dgrad, columnwise for wgrad."""
    dgrad, wgrad = plan.dgrad if needs_dx else None, plan.wgrad if needs_dw else None
    return Orientations(dgrad and dgrad.left, wgrad and wgrad.left)


class _DgradWeight(NamedTuple):
    """The weight as dgrad's operand, in one of three forms, and the dtype of dx."""

    high_precision: Tensor | None
    """The weight, which dgrad casts or takes in high precision."""
    data: Tensor | None
    """The rowwise FP8 data of forward, which dgrad transposes."""
    scale: Tensor | None
    """The scale of that FP8 data."""
    params: QuantParams | None
    """The parameters that requantize the weight to its FP8 data of forward."""
    columnwise: Operand | None
    """The finished operand."""
    dtype: torch.dtype
    after: Tensor | None = None
    """In a graph, a tensor that is computed before the GEMM begins."""


class _WgradInput(NamedTuple):
    """The input x as wgrad's operand, and the dtype of dw."""

    prologue: Prologue | None
    data: Tensor | None
    """The columnwise FP8 data, or the matrix in high precision; None if there is a prologue."""
    scale: Tensor | None
    """The scale of the FP8 data."""
    params: QuantParams | None
    """The parameters that requantize the matrix or the prologue."""
    operand: Operand | TokenShard | None
    """The finished operand, of a sharded layer or of a caller that has cast x."""
    dtype: torch.dtype

    @property
    def is_matrix(self) -> bool:
        """Whether x is a matrix in high precision."""
        return self.data is not None and self.scale is None and self.operand is None


class _Gradients(NamedTuple):
    """The gradients of x, ``[M, K]``, of the weight, ``[N, K]``, and of the bias, ``[N]``."""

    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None


def backward(
    dy: Tensor | Gradient, x: Prologue | None, saved: Saved, call: Call, *,
    needs: tuple[bool, bool, bool], shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None], offsets: Offsets | None = None,
    has_gradient: Sequence[bool] = (), operand: Operand | TokenShard | None = None,
) -> _Gradients:  # fmt: skip
    """Compute the gradients of x, ``[M, K]``, of the weight, ``[N, K]``, and of the bias, ``[N]``.

    A gradient of the weight that goes into ``main_grad`` is returned as ``accumulate`` returns it.

    Args:
        dy: the gradient of the output. A caller that no longer needs it casts it first, to a
            ``Gradient``, whose fields this function frees.
        x: the input of fprop, if it was a prologue.
        saved: the tensors that ``forward`` returned.
        needs: whether the gradients of x, weight and bias are needed.
        shape: M, N, K.
        has_gradient: where each expert's weight is its own parameter, which of them need gradients.
        operand: x as wgrad's operand, if the caller has cast it.
    """
    if isinstance(dy, Tensor) and (call.in_graph or call.watched or call.cast_parallel is not None):
        dy = Gradient(dy, call, needs=needs, offsets=offsets)
    for_dx, for_dw, fused = None, None, call.fused_weights
    if needs[1]:
        if call.comm.is_sharded and call.plan.wgrad:  # first, so that it travels during dgrad
            operand = _wgrad_operand(x, saved, call, call.plan.wgrad.right)
        dw_dtype = fused[0].main_grad.dtype if fused else dtypes[1]
        params, x_scale = None, saved.x_scale
        if saved.x is None or saved.x.dtype not in FP8_DTYPES:
            params, x_scale = call.scales.requant_params(x_scale, saved.x_requant), None
        for_dw = _WgradInput(x, saved.x, x_scale, params, operand, dw_dtype)
    if needs[0]:
        for_dx = _dgrad_weight(dy, saved, call, dtypes[0], in_groups=offsets is not None)
    db_dtype = dtypes[2] if needs[2] else None
    if isinstance(dy, Tensor):
        run: Any = _planned_gradients if dy.is_cuda else _gradients
        params = None
        if call.scales.are_given:
            specs = _gradient_specs(call.plan, needs_dx=needs[0], needs_dw=needs[1])
            matrix = dy if offsets is None else Groups.of(dy, offsets)
            params = call.scales.params(DY, matrix) if any(specs) else None
        context = shape, call.recipe, None, offsets, call.comm
        grads = run(dy, None, params, for_dx, for_dw, db_dtype, *context)
    else:
        grads = _gradients_of_cast(dy, for_dx, for_dw, db_dtype, call, shape, offsets)
    if fused and grads.dw is not None:
        overwrite = call.first_microbatch is True
        dw = accumulate(fused, grads.dw, overwrite=overwrite, has_gradient=has_gradient)
        grads = grads._replace(dw=dw)
    return grads


def _wgrad_operand(
    x: Prologue | None, saved: Saved, call: Call, right: Spec
) -> Operand | TokenShard:
    """Return a sharded layer's x as wgrad's FP8 operand, or the ``TokenShard`` that gathers it."""
    comm = call.comm
    if saved.x is not None and saved.x_scale is not None:
        operand = Operand(saved.x, saved.x_scale.float())
    else:
        matrix = _saved_value(saved.x) if x is None else x
        if comm.gathers_x_first:
            matrix = comm.gather(value_of(matrix))
        if saved.x_scale is None:
            operand = call.scales.quantize(matrix, X, None, right).columnwise
        else:
            params = call.scales.requant_params(saved.x_scale, saved.x_requant)
            operand = quantize(matrix, None, right, params, call.scales.epsilon).columnwise
    if comm.keeps_gathered:
        return operand
    return comm.token_operand(operand, right.block, backward=False)


def _dgrad_weight(
    dy: Tensor | Gradient, saved: Saved, call: Call, dtype: torch.dtype, *, in_groups: bool
) -> _DgradWeight:
    """Return the weight for dgrad; it is cast here where other ranks or a graph take part."""
    plan, data, scale = call.plan, saved.w, saved.w_scale
    value = None if data is not None and plan.dgrad else saved.weight
    shards_cast = scale is None and call.cast_parallel is not None
    params = columnwise = None
    if data is None:
        params, scale = call.scales.requant_params(scale, saved.w_requant), None
    if isinstance(dy, Gradient) and plan.dgrad and (call.in_graph or shards_cast):
        # A graph that gets a tensor of backward as prior cannot move the transpose into forward.
        prior = None if dy.rowwise is None else dy.rowwise.scale
        if data is not None and scale is not None:
            columnwise = transposed(data, scale, prior)
        else:
            value = plain(_saved_value(value), prior)
            if params is None:
                columnwise = call.scales.quantize(value, W, None, plan.dgrad.right).columnwise
    elif in_groups and data is not None and call.first_microbatch is not None:
        columnwise = kept_transpose(data, scale, call)
    elif isinstance(value, (Float8Tensor, Float4Tensor)):
        value = plain(value, dy if isinstance(dy, Tensor) else dy.high_precision)
    return _DgradWeight(value, data, scale, params, columnwise, dtype)


def _gradients_of_cast(
    dy: Gradient, for_dx: _DgradWeight | None, for_dw: _WgradInput | None,
    db_dtype: torch.dtype | None, call: Call, shape: tuple[int, int, int], offsets: Offsets | None,
) -> _Gradients:  # fmt: skip
    """Compute the gradients from a dy that is cast, and free each operand after its last use."""
    context = shape, call.recipe, call if call.watched else None, offsets, call.comm
    run: Any = functools.partial(_run_of_cast(dy, call), dy.high_precision)
    dx, weight_grads = None, _Gradients(None, None, None)
    wgrad_first = call.plan.wgrad and for_dw and for_dw.is_matrix and call.in_graph
    if wgrad_first:  # otherwise Inductor recomputes x in the loop that reads dx, and holds both
        cast_dy = Quantized(None, dy.columnwise, None, dy.dbias)
        weight_grads = run(cast_dy, None, None, for_dw, db_dtype, *context)
        for_dx = for_dx and for_dx._replace(after=weight_grads.dw)
    if for_dx is not None and call.comm.is_sharded:
        dx = _sharded_dgrad(dy, for_dx, for_dw, context)
    elif for_dx is not None:
        dx = run(Quantized(dy.rowwise), None, for_dx, None, None, *context).dx
    dy.rowwise = None  # dw may use its memory
    if not wgrad_first and (for_dw is not None or db_dtype is not None):
        cast_dy = Quantized(None, dy.columnwise, None, dy.dbias)
        weight_grads = run(cast_dy, None, None, for_dw, db_dtype, *context)
    return weight_grads._replace(dx=dx)


def _sharded_dgrad(
    dy: Gradient, weight: _DgradWeight, for_dw: _WgradInput | None, context: tuple[Any, ...]
) -> Tensor:
    """Compute dgrad of a sharded layer, and gather an operand of wgrad meanwhile if it can."""
    (M, _, K), recipe, watching, offsets, comm = context
    left = dy.rowwise if recipe.linear.dgrad else dy.high_precision
    operands = dy.columnwise, None if for_dw is None else for_dw.operand
    waiting = (x for x in operands if isinstance(x, TokenShard) and x.gathered is None)
    dx, gathered = _dgrad(
        left, recipe, (M, K), watching, offsets, weight, comm,
        companion=next(waiting, None), keep=dy.transposes_gathered,
    )  # fmt: skip
    if dy.transposes_gathered:
        dy.columnwise = transposed(*gathered)
    return dx


def _run_of_cast(dy: Gradient, call: Call) -> Any:
    """Return ``_gradients``, or on a GPU its recorded launches if no observer watches the call."""
    if call.watched or call.comm.is_sharded:
        return _gradients
    operand: Any = dy.rowwise or dy.columnwise
    tensor = dy.high_precision if operand is None else operand.data
    return _planned_gradients if tensor is not None and tensor.is_cuda else _gradients


def _gradients(
    dy: Tensor | None, cast_dy: Quantized | None, params: QuantParams | None,
    for_dx: _DgradWeight | None, for_dw: _WgradInput | None, db_dtype: torch.dtype | None,
    shape: tuple[int, int, int], recipe: Recipe, watching: Call | None, offsets: Offsets | None,
    comm: OneGpu,
) -> _Gradients:  # fmt: skip
    """Compute the gradients of x, of the weight and of the bias; None for those not asked for.

    Args:
        dy: the gradient in high precision, if it is written.
        cast_dy: the gradient in FP8; None if it is to be cast here.
        params: the quantization parameters of that cast.
    """
    (M, N, K), plan = shape, recipe.linear
    dx = dw = db = None
    if cast_dy is None:
        specs = _gradient_specs(plan, needs_dx=for_dx is not None, needs_dw=for_dw is not None)
        cast_dy = Quantized()
        if any(specs):
            value = _saved_value(dy)
            matrix = value if offsets is None else Groups.of(value, offsets)
            dbias_is_free = db_dtype is not None and (offsets is not None or all(specs))
            cast_dy = quantize(matrix, *specs, params, plan.epsilon, dbias_is_free)
    rowwise, columnwise, _, dbias = cast_dy
    del cast_dy
    if for_dx is not None:
        left: Any = rowwise if plan.dgrad else dy
        del rowwise  # dw may use its memory, and that of the weight's transpose
        dx = _dgrad(left, recipe, (M, K), watching, offsets, for_dx, comm).y
        del left
    if for_dw is not None:
        right: Any = columnwise if plan.wgrad else dy
        dw = _wgrad(right, recipe, (N, K), watching, offsets, for_dw, comm)
    if db_dtype is not None:
        dbias = _column_sums(dy, offsets) if dbias is None else dbias
        db = dbias.to(db_dtype)
    return _Gradients(dx, dw, db)


_planned_gradients = planned(_gradients)


def _column_sums(dy: Tensor | None, offsets: Offsets | None) -> Tensor:
    """Return the sums over the rows of dy, or over the rows of each expert."""
    dy = _saved_value(dy)
    if offsets is None:
        return dy.sum(0, dtype=torch.float32)
    # The grouped GEMM with a matrix of ones computes the sums. The matrix has 8 columns, for torch
    # wants rows of 16 bytes, and is the transpose of contiguous rows for any number of tokens.
    return _mm_in_groups(dy.t(), dy.new_ones((len(dy), 8)).t(), offsets.offs, dy.dtype)[..., 0]


def _dgrad(
    dy: Any, recipe: Recipe, shape: tuple[int, int], watching: Call | None,
    offsets: Offsets | None, weight: _DgradWeight, comm: OneGpu, *,
    companion: TokenShard | None = None, keep: bool = False,
) -> Gemm:  # fmt: skip
    """Compute ``dy @ weight``, from dy in high precision or from its rowwise FP8 data.

    ``companion`` may be gathered meanwhile; with ``keep`` the result holds the gathered dy.
    """
    plan, value, dgrad = recipe.linear, weight.high_precision, recipe.linear.dgrad
    if dgrad is None:
        value = _saved_value(value)
        if watching is not None:
            show_gemm("dgrad", watching)
        dy = comm.gather(dy, backward=True)
        if offsets is not None:
            return Gemm(_mm_in_groups(dy, value.to(dy.dtype).mT, offsets.offs, weight.dtype), dy)
        return Gemm(comm.reduce((dy @ value.to(dy.dtype)).to(weight.dtype), backward=True), dy)
    operand = weight.columnwise
    if operand is None and weight.data is not None and weight.scale is not None:
        operand = transposed(weight.data, weight.scale)
    elif operand is None:
        value = _saved_value(value)
        operand = quantize(value, None, dgrad.right, weight.params, plan.epsilon).columnwise
    is_forward_cast = weight.scale is not None or weight.params is not None
    if watching is not None and not (is_forward_cast or plan.fprop) and offsets is None:
        show_cast(_saved_value(value).t(), operand, dgrad.right, W, watching, only_in_backward=True)
    task = GemmTask(dgrad, shape, weight.dtype, offsets, weight.after)
    keep = keep or watching is not None
    gemm = comm.mm(dy, operand, task, backward=True, companion=companion, keep=keep)
    if watching is not None:
        show_gemm("dgrad", watching, gemm.left, operand)
    return gemm


def _wgrad(
    dy: Any, recipe: Recipe, shape: tuple[int, int], watching: Call | None,
    offsets: Offsets | None, x: _WgradInput, comm: OneGpu,
) -> Tensor:  # fmt: skip
    """Compute ``dy.T @ x``, from dy in high precision or from its columnwise FP8 data."""
    plan, wgrad = recipe.linear, recipe.linear.wgrad
    if wgrad is None:
        value = _saved_value(x.data) if x.prologue is None else x.prologue.value()
        if watching is not None:
            show_gemm("wgrad", watching)
        dy, value = comm.gather(dy, backward=True), comm.gather(value)
        if offsets is not None:
            return _mm_in_groups(dy.t(), value.to(dy.dtype).t(), offsets.offs, x.dtype)
        return (dy.t() @ value.to(dy.dtype)).to(x.dtype)
    operand: Any = x.operand
    if operand is None and x.data is not None and x.scale is not None:
        operand = Operand(x.data, x.scale.float())
    elif operand is None:
        operand = _cast_input(x, wgrad.right, plan.epsilon, offsets)
    dy, operand = (x.gather() if isinstance(x, TokenShard) else x for x in (dy, operand))
    if watching is not None:
        show_gemm("wgrad", watching, dy, operand)
    return comm.mm_of_gathered(dy, operand, GemmTask(wgrad, shape, x.dtype, offsets))


def _cast_input(x: _WgradInput, spec: Spec, epsilon: float, offsets: Offsets | None) -> Any:
    """Cast the input x, a matrix or a prologue, for wgrad."""
    matrix: Any = x.data if x.prologue is None else x.prologue
    matrix = matrix if offsets is None else Groups.of(matrix, offsets)
    operand: Any = quantize(matrix, None, spec, x.params, epsilon).columnwise
    if spec.scale_dtype == E8M0 and torch.compiler.is_compiling():
        # A compiler may move this cast into forward, and then saves each scale in one byte.
        return Operand(operand.data, operand.scale.to(torch.float8_e8m0fnu).float())
    return operand


# A linear layer, the simplest composition.


def output_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of torch.autocast if that is active and ``x`` not float64, else of ``x``."""
    # torch.autocast does not know the meta device.
    if not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _recast(
    saved: Saved, call: Call, shared: Recast, make_input: Callable[[], Tensor | Prologue]
) -> Operand:
    """Cast the input of an eager layer in backward for wgrad, once for layers that share it."""
    scales, scale, wgrad = call.scales, saved.x_scale, call.plan.wgrad
    params = scales.requant_params(scale, saved.x_requant)

    def cast() -> Operand:
        spec = _saved_value(wgrad).right
        result = replayed_quantize(make_input(), None, spec, params, scales.epsilon, False, ALIGN)
        return _saved_value(result.columnwise)

    if scales.are_given:  # each layer has its own scale, so layers cannot share the cast
        return cast()
    return shared.operand((call.recipe, None if scale is None else scale.data_ptr()), cast)


class LinearFunction(Float8Function):
    """Compute ``x @ weight.T + bias`` with FP8 GEMMs, forward and backward, by ``run``.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, ordinary or a Float8Tensor.
        bias: ``[N]`` or None.

    Returns:
        ``[..., N]`` in the dtype of torch.autocast if that is active, else of ``x``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        rows = x if x.ndim == 2 else as_matrix(x)
        N, K = weight.shape
        needs = ctx.needs_input_grad[:2]
        origin = None
        is_large = needs[1] and x.numel() >= call.plan.recast_size and call.plan.wgrad is not None
        if is_large and not call.in_graph and _requantizes_input(x, call, None):
            origin = origin_of(x)  # a compiled graph needs none: the compiler recomputes x
        y, saved = forward(
            rows, weight, bias, call,
            needs=needs, dtype=output_dtype(x), inp=x, has_origin=origin is not None,
        )  # fmt: skip
        ctx.call, ctx.recast = call, None
        if origin is None or saved.x is not None:
            ctx.save_for_backward(*saved)
        else:
            ctx.save_for_backward(*saved, *origin.tensors)
            ctx.make_input, ctx.recast = origin.make, origin.recast(x)
        M, shape = call.comm.output_shape(x.shape, rows.shape[0], N)
        ctx.shapes = x.shape, (M, N, K)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        # Do not return a view: FSDP2 hooks the output, and in-place ops on views lose the hook.
        if not call.in_graph and y.shape == shape and not y._is_view():
            return y
        return torch.ops.aten._unsafe_view.default(y, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs, (x_shape, shape) = wanted_gradients(ctx)[:3], ctx.shapes
        if dy.ndim != 2:
            dy = dy.reshape(shape[:2]) if ctx.call.comm.tokens is None else as_matrix(dy)
        tensors, operand = ctx.saved_tensors, None
        saved, inputs = Saved._make(tensors[: len(Saved._fields)]), tensors[len(Saved._fields) :]
        if needs[1] and ctx.recast is not None:
            operand = _recast(saved, ctx.call, ctx.recast, lambda: ctx.make_input(*inputs))
        dx, dw, db = backward(
            dy, None, saved, ctx.call, needs=needs, shape=shape, dtypes=ctx.dtypes, operand=operand
        )
        if dx is not None and len(x_shape) != 2:
            dx = dx.reshape(x_shape)
        return dx, dw, db, None
