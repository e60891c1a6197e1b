"""Attention in FP8: the cast of q, k and v, and the autograd function.

A recipe with ``fp8_dpa`` (or ``fp8_mha``) asks for FP8 attention. q, k and v are cast to the
recipe's forward format with one scale per tensor, whatever blocks the recipe has for linear layers.
This scale is delayed under ``DelayedScaling``, else made from the tensor by the recipe's rule. FP8
q, k and v, the output and two float32 per query are saved for backward; its op chooses a precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from float8lab import ops
from float8lab.nn.attention.backends import Attended, Problem, largest_of_heads
from float8lab.nn.attention.layout import Packed
from float8lab.nn.casts import show_cast
from float8lab.nn.precision import Call, Precision
from float8lab.ops import Prologue
from float8lab.recipes.delayed import own_amax
from float8lab.recipes.recipe import LinearPlan, Recipe
from float8lab.recipes.region import in_backward
from float8lab.tensor.differentiation import Float8Function, once_differentiable
from float8lab.tensor.operands import Matrix

__all__ = [
    "AttentionPrecision", "HeadRows", "K", "Q", "V", "amaxes_over_ranks", "asks_for_fp8_attention",
    "cast_operand", "fp8_attention", "why_not_fp8",
]  # fmt: skip

Q, K, V = 0, 1, 2
"""Indices of the tensors that attention casts."""


class AttentionPrecision(Precision):
    """The FP8 state of one attention module."""

    def slot_formats(self, plan: LinearPlan) -> tuple[list[torch.dtype], list[bool]]:
        """Return the formats of q, k and v."""
        return [plan.x.fp8_dtype] * 3, [True] * 3

    def active_recipe(self) -> Recipe | None:
        """Return the recipe in force if it asks for FP8 attention."""
        recipe = super().active_recipe()
        return recipe if recipe is not None and asks_for_fp8_attention(recipe) else None

    def has_slots(self, recipe: Recipe) -> bool:
        """Whether a recipe has delayed scales of q, k and v."""
        return super().has_slots(recipe) and asks_for_fp8_attention(recipe)


def asks_for_fp8_attention(recipe: Recipe) -> bool:
    """Whether attention runs in FP8 under a recipe."""
    return recipe.fp8_dpa or recipe.fp8_mha


def why_not_fp8(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, precision: AttentionPrecision
) -> str | None:
    """Return why attention stays in high precision; None if Hopper's kernel takes the call."""
    # The kernel's limits hold on a CPU, too: a call beyond them would need memory for all scores.
    if q.dtype == torch.float64:
        return "float64 stays in high precision"
    heads = q.shape[3], v.shape[3]
    if max(heads) > ops.LARGEST_HEAD:
        return f"its heads are of up to {ops.LARGEST_HEAD}, and these are of {heads[0]}, {heads[1]}"
    if not ops.has_fp8_attention(q.device):
        return "it needs a Hopper GPU (SM90)"
    why = _why_not_problem(problem)
    window, _, longest, is_packed, _ = _settings_of(q, k, problem)
    if why is None and not ops.has_linear_backward(*longest, window, packed=is_packed):
        recipe = precision.active_recipe()
        if recipe is None or not ops.has_fp8_backward(q, k, v, recipe.linear.x.fp8_dtype):
            return "its backward has no such window for so many queries and keys"
    return why


def _why_not_problem(problem: Problem) -> str | None:
    """Return why the kernel cannot compute a problem, whatever its sizes."""
    mask, packed = problem.mask, problem.packed
    for name, given in (
        ("dropout", problem.dropout or None),
        ("softcap", problem.softcap or None),
        ("core_attention_bias", problem.bias),
        ("ALiBi", problem.alibi),
        ("arbitrary mask", mask.arbitrary),
    ):
        if given is not None:
            return f"it has no {name}"
    if not mask.has_window:
        return None
    if packed is None:
        if mask.kv_padding is None or mask.lets_tokens_be_packed:
            return None
        return (
            "it packs what is not padding, which keeps a window or a bottom-right mask only if "
            "cu_seqlens_q gives the lengths, and no top-left mask of keys with their own padding"
        )
    if not isinstance(mask.diagonal, Tensor) and packed[0].lengths is not packed[1].lengths:
        return "of packed keys with lengths of their own, it aligns a mask at the last one"
    return None


class _Settings(NamedTuple):
    """The arguments of the op that are not tensors."""

    window: tuple[int, int, int]
    """The limits of the mask, relative to the last query and the last key."""
    scale: float
    longest: tuple[int, int]
    """The most queries and keys of a sequence."""
    is_packed: bool
    wants_max: bool


def _settings_of(q: Tensor, k: Tensor, problem: Problem) -> _Settings:
    """Return the settings with which the op computes a problem."""
    (left, right, diagonal), packed = problem.mask[:3], problem.packed
    longest = q.shape[2], k.shape[2]
    is_packed = packed is not None or problem.mask.kv_padding is not None
    if is_packed or isinstance(diagonal, Tensor) or not problem.mask.has_window:
        diagonal = 0
    elif longest[0] != longest[1]:  # sizes of a compiled graph would make it symbolic
        diagonal -= longest[1] - longest[0]
    if packed is not None:
        longest = packed[0].longest, packed[1].longest
    return _Settings((left, right, diagonal), problem.scale, longest, is_packed, problem.wants_max)


def fp8_attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem, call: Call) -> Attended:
    """Compute attention with FP8 GEMMs, for a call that ``why_not_fp8`` does not refuse."""
    packings, settings = _packings(q, k, problem), _settings_of(q, k, problem)
    result = _Attention.run(q, k, v, problem.sink, *packings, settings, call)
    return result if problem.wants_max else (result, None)


def _packings(q: Tensor, k: Tensor, problem: Problem) -> tuple[Tensor | None, ...]:
    """Return ``_packing`` of queries and keys."""
    packed, padding, kv_padding = problem.packed, problem.mask.q_padding, problem.mask.kv_padding
    sides: tuple[Packed | Tensor, Packed | Tensor]
    if packed is not None:
        sides, are_alike = packed, packed[1].lengths is packed[0].lengths
    elif padding is not None and kv_padding is not None:
        sides, are_alike = (padding, kv_padding), kv_padding is padding
    else:
        return (None,) * 4
    of_queries = _packing(q, sides[0])
    return *of_queries, *(of_queries if are_alike else _packing(k, sides[1]))


def _packing(x: Tensor, side: Packed | Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ``cu_seqlens`` and, if ``x`` is not packed yet, the token of each row, ``[T]`` int32.

    After the packed rows, it has the bitwise complements of the other tokens. ``side`` holds the
    sequences of ``x``, or says which tokens are padding.
    """
    if isinstance(side, Tensor):
        is_padding = side.expand(x.shape[0], -1)
        lengths = (~is_padding).sum(1)
    elif side.cu_seqlens is not None:
        return side.cu_seqlens.int(), None
    else:
        is_padding, lengths = side.places(x.shape[2])[2], side.lengths
    is_padding, cu_seqlens = is_padding.flatten(), F.pad(lengths.cumsum(0), (1, 0)).int()
    row_map, _ = ops.row_map_op(torch.stack((~is_padding, is_padding), 1))
    token = ops.row_tokens(row_map, is_padding.shape[0])
    row = torch.arange(is_padding.shape[0], device=token.device)
    return cu_seqlens, torch.where(row < cu_seqlens[-1], token, ~token)


def _as_batch(x: Tensor, token: Tensor | None, B: int, S: int) -> Tensor:
    """View ``[1, H, B * S, D]`` as ``[B, H, S, D]`` if tokens are packed."""
    return x if token is None else x[0].unflatten(1, (B, S)).transpose(0, 1)


_ORDERS = (((0, 2, 1, 3), (0, 2, 1, 3)), ((2, 0, 1, 3), (1, 2, 0, 3)))
"""Permutations of ``[B, H, S, D]`` to ``[B, S, H, D]`` and ``[S, B, H, D]``, and back."""


class HeadRows(NamedTuple):
    """q, k or v, ``[B, H, S, D]``, as a matrix to be cast."""

    matrix: Matrix
    shape: Sequence[int]
    """The four sizes of the matrix, in their order in memory."""
    order: tuple[int, ...]
    """The permutation of the four dimensions to ``[B, H, S, D]``."""

    @classmethod
    def of(cls, x: Tensor, token: Tensor | None = None) -> HeadRows:
        """Take the rows of ``x``, in their order in memory if they can be a matrix.

        With ``token``, ``[B * S]``, the tokens are packed as ``[1, H, B * S, D]``: it has the token
        of each row. Rows after the tokens, where it is negative, are 0, so that padding, which may
        hold anything, does not influence scales.
        """
        if token is not None:
            tokens = x.transpose(1, 2).flatten(0, 1)
            packed = Prologue("permute", (tokens.flatten(1), token), x.dtype)
            return cls(packed, (1, *tokens.shape), (0, 2, 1, 3))
        y, back = x, (0, 1, 2, 3)
        for order, inverse in _ORDERS:
            stride, size = x.permute(order).stride(), x.permute(order).shape
            if stride[3] == 1 and stride[2] == size[3] and stride[0] == size[1] * stride[1]:
                y, back = x.permute(order), inverse
                break
        matrix = y.reshape(y.shape[0] * y.shape[1], y.shape[2] * y.shape[3])
        return cls(matrix, y.shape, back)


def amaxes_over_ranks(call: Call, *rows: HeadRows) -> Sequence[Tensor | None]:
    """Return amaxes ``[1, 1]`` of q, k and v over ranks, by one message; None if not shared."""
    scales = call.scales
    if scales.parallel is None or scales.are_given:
        return [None] * len(rows)
    return scales.parallel.amax(torch.cat([own_amax(x.matrix) for x in rows])).split(1)


def cast_operand(
    rows: HeadRows, index: int, call: Call, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the FP8 data of q, k or v, ``[B, H, S, D]``, and its scale."""
    spec = call.plan.x.with_one_scale()
    operand = call.scales.quantize(rows.matrix, index, spec, align=1, amax=amax).rowwise
    if call.watched and not in_backward():  # there checkpointing repeats the cast
        show_cast(rows.matrix, operand, spec, index, call)
    return operand.data.view(rows.shape).permute(rows.order), operand.scale


class _Attention(Float8Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
        cu_seqlens_q: Tensor | None, token_q: Tensor | None, cu_seqlens_k: Tensor | None,
        token_k: Tensor | None, settings: _Settings, call: Call,
    ) -> Tensor | Attended:  # fmt: skip
        rows = [HeadRows.of(x, token) for x, token in ((q, token_q), (k, token_k), (v, token_k))]
        amaxes = amaxes_over_ranks(call, *rows)
        casts = [cast_operand(rows[i], i, call, amaxes[i]) for i in (Q, K, V)]
        operands = (*[data for data, _ in casts], *[scale for _, scale in casts])
        out, lse, max_scores = ops.fp8_attention_op(
            *operands, *settings[:2], q.dtype, cu_seqlens_q, cu_seqlens_k, token_q
        )
        if sink is not None:  # the sink is one more key, with the head's score and value 0
            lse_of_keys, lse = lse, torch.logaddexp(lse, sink.view(-1, 1))
            weight = ops.unpack_tokens((lse_of_keys - lse).exp().unsqueeze(-1), token_q)
            out = (out * weight).to(out.dtype)
        if any(ctx.needs_input_grad[:4]):
            ctx.save_for_backward(
                *operands, out, lse, max_scores, sink, token_q, token_k, cu_seqlens_q, cu_seqlens_k
            )
        ctx.settings, ctx.sizes = settings, (q.shape[0], q.shape[2], k.shape[2])
        out = _as_batch(out, token_q, q.shape[0], q.shape[2])
        if not settings.wants_max:
            return out
        largest = largest_of_heads(max_scores)
        ctx.mark_non_differentiable(largest)
        return out, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        *saved, sink, token_q, token_k, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        window, scale, longest, *_ = ctx.settings
        if token_q is not None:  # tokens are packed: undo ``_as_batch``
            dout = dout.transpose(0, 1).flatten(1, 2).unsqueeze(0)
        gradients = ops.fp8_attention_backward_op(
            dout, *saved, window, scale, cu_seqlens_q, cu_seqlens_k, *longest, token_q, token_k
        )
        (B, Sq, Sk), needs = ctx.sizes, ctx.needs_input_grad
        packings = zip(gradients, (token_q, token_k, token_k), (Sq, Sk, Sk), needs, strict=False)
        grads = (_as_batch(x, token, B, S) if need else None for x, token, S, need in packings)
        dsink = None
        if ctx.needs_input_grad[3]:
            # The sink's value and its probability's gradient are 0; softmax subtracts dout @ out.
            out, lse, _ = saved[-3:]
            delta = ops.pack_tokens((dout.float() * out).sum(-1, keepdim=True), token_q)
            dsink = -((sink.view(-1, 1) - lse).exp() * delta.squeeze(-1)).sum((0, 2))
        return (*grads, dsink, *[None] * 6)
