"""Attention of ranks that share tokens.  B batch, H heads, G key/value heads, D head size.

Note: the nouns of this file; ``distributed/context_parallel.py`` defines the others.

- *shard*: a rank's tokens of S, ``[B, H, S / R, D]``: one chunk, or two, of each sequence;
- *visit*: keys and values of one rank, which go from rank to rank, or were gathered;
- *pair*: queries, and the keys of a visit that they see; only a rank's own pair has a causal mask.

A rank attends with its own queries, visit by visit, and merges the outputs of pairs in float32 by
the logarithms of their sums of exponentials. Backward computes each pair's gradients from the
merged output and logarithm, and sends the gradients of a visit's keys and values to their rank. In
FP8, q, k and v are cast before they are sent, with scales that all ranks share: their bytes are
those that a single rank would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from float8lab import ops
from float8lab.distributed.context_parallel import ContextParallel
from float8lab.nn.attention import masks
from float8lab.nn.attention.arguments import Rules, is_plain
from float8lab.nn.attention.backends import Problem
from float8lab.nn.attention.fp8 import HeadRows, K, Q, V, amaxes_over_ranks, cast_operand
from float8lab.nn.attention.layout import Sizes
from float8lab.nn.precision import Call
from float8lab.tensor.differentiation import AutogradContext, Float8Function, once_differentiable

__all__ = ["ring_attention", "takes_ring"]

aten, collectives = torch.ops.aten, torch.ops._c10d_functional

_LARGEST_HEAD = 128
"""The largest head that cuDNN's backward takes."""


def takes_ring(query: Tensor, value: Tensor, rules: Rules, sizes: Sizes, ranks: int) -> bool:
    """Whether ranks that share tokens attend to keys and values visit by visit.

    The mask must be none or square causal, and a kernel must return the logarithms.
    ``sizes`` are those of the unsharded sequences.
    """
    mask = masks.make_mask(rules.mask_type, rules.window, sizes.Sq, sizes.Sk)
    if not (is_plain(rules) and (mask.lets_all or mask.is_plain_causal(sizes.Sq, sizes.Sk))):
        return False
    head, is_short = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    on_gpu = is_short and head % 8 == 0 and head <= _LARGEST_HEAD
    on_gpu = on_gpu and min(sizes[1:]) >= 4 * ranks  # cuDNN has no backward of a single token
    if torch.are_deterministic_algorithms_enabled():
        on_gpu = on_gpu and torch.is_deterministic_algorithms_warn_only_enabled()
    return min(sizes) > 0 and head == value.shape[-1] and (on_gpu or not query.is_cuda)


class _Ring(NamedTuple):
    """The settings of a call."""

    group: str  # its name
    size: int
    rank: int
    chunks: int  # of each rank
    gathers: bool
    causal: bool
    scale: float

    def visits(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield keys and values of each rank, ``[2, B, G, S / R, D]``, and the slices of the pair.

        This rank's come first. The next visit arrives while the caller computes.
        """
        (size, rank), kv, tokens = (self.size, self.rank), _stacked(k, v), k.shape[2]
        vector = kv.flatten().view(torch.uint8)
        if self.gathers:
            pending = collectives.all_gather_into_tensor(vector, size, self.group)
        else:
            pending = self.send(kv, 1, tokens)
        for step in range(size):
            if step:
                if step == 1 or not self.gathers:
                    pending = collectives.wait_tensor(pending)
                index = self.visitor(step) if self.gathers else 0
                kv = pending.view(-1, vector.numel())[index].view(kv.dtype).view(kv.shape)
                if not self.gathers and step < size - 1:
                    pending = self.send(kv, 1, tokens)
            if kv.is_cuda and kv.element_size() > 1 and not torch.compiler.is_compiling():
                # Until the message has begun, attention would leave it no multiprocessor; in FP8
                # casts come first.
                torch.cuda._sleep(20_000)  # cycles, some 10 us
            yield kv.transpose(2, 3), *self.pair(rank, self.visitor(step), tokens)

    def visitor(self, step: int) -> int:
        """Return the rank whose keys and values visit this rank at a step."""
        return (self.rank - step) % self.size

    def pair(self, rank: int, visitor: int, tokens: int) -> tuple[slice, slice]:
        """Return which queries of a rank see keys of a visitor, and these; both have ``tokens``.

        A rank's first chunk is as far from the start as its second is from the end. So both chunks
        of a later rank see the first of a visitor, and the second of an earlier rank sees both.
        """
        if not self.causal or rank == visitor:
            return slice(None), slice(0, tokens)
        length = tokens // self.chunks
        if visitor < rank:
            return slice(0, tokens), slice(0, length)
        return slice(length, tokens), slice(0, tokens if self.chunks > 1 else 0)

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of sums; a sum of two values is rounded once in any dtype."""
        return dtype if self.size == 2 else torch.promote_types(dtype, torch.float32)

    def send(self, kv: Tensor, distance: int, tokens: int) -> Tensor:
        """Start to send keys and values, ``[2, B, S, G, D]``, to the rank ``distance`` ahead.

        The rank that is as far behind sends ``tokens`` tokens, which arrive as bytes.
        """
        size, rank, vector = self.size, self.rank, kv.flatten().view(torch.uint8)
        _, B, _, G, D = kv.shape
        counts = [[0] * size, [0] * size]  # bytes to receive, and to send
        counts[0][(rank - distance) % size] = 2 * B * tokens * G * D * kv.element_size()
        counts[1][(rank + distance) % size] = vector.numel()
        return collectives.all_to_all_single(vector, *counts, self.group)


def _stacked(k: Tensor, v: Tensor) -> Tensor:
    """Stack keys and values, ``[B, G, S, D]``, as one message, ``[2, B, S, G, D]``."""
    raw = torch.uint8 if k.element_size() == 1 else k.dtype
    return torch.stack([x.transpose(1, 2).view(raw) for x in (k, v)]).view(k.dtype)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, context: ContextParallel, call: Call | None
) -> Tensor:
    """Compute attention of this rank's queries to keys and values of the ranks that share tokens.

    q, k and v are shards, and the problem is one that ``takes_ring``. ``call`` says how attention
    runs in FP8; None means high precision.
    """
    causal = problem.mask.is_plain_causal(q.shape[2], k.shape[2])
    ranks = context.share_tokens
    shared = ranks.name, ranks.size, ranks.rank, len(ranks.chunks_of(0))
    ring = _Ring(*shared, context.gathers, causal, problem.scale)
    return _Attention.run(q, k, v, ring, call)


class _Attention(Float8Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, q: Tensor, k: Tensor, v: Tensor, ring: _Ring, call: Call | None
    ) -> Tensor:
        scales: tuple[Tensor, ...] = ()
        max_scores: list[Tensor] = []  # those of each pair, in FP8
        result_dtype, dtype = q.dtype, ring.sum_dtype(q.dtype)
        if call is not None:
            rows = [HeadRows.of(x) for x in (q, k, v)]
            amaxes = amaxes_over_ranks(call, *rows)
            k, k_scale = cast_operand(rows[K], K, call, amaxes[K])
            v, v_scale = cast_operand(rows[V], V, call, amaxes[V])
        for step, (kv, queries, keys) in enumerate(ring.visits(k, v)):
            if call is not None and step == 0:  # meanwhile keys and values are sent
                q, q_scale = cast_operand(rows[Q], Q, call, amaxes[Q])
                scales = q_scale, k_scale, v_scale
            elif keys.stop == 0:
                continue
            operands = q[:, :, queries], kv[0, :, :, keys], kv[1, :, :, keys]
            seen = _attend_pair(*operands, scales, ring.causal and step == 0, ring.scale, dtype)
            max_scores += seen[2:]
            if step == 0:
                out, lse = _as_dtype(seen[0], dtype), seen[1]
            else:
                ops.merge_attention_(out[:, :, queries], lse[:, :, queries], *seen[:2])
        out = _as_dtype(out, result_dtype)
        if any(ctx.needs_input_grad[:3]):
            ctx.save_for_backward(q, k, v, out, lse, *scales, *max_scores)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *fp8_tensors = ctx.saved_tensors
        ring, scales, max_scores = ctx.ring, fp8_tensors[:3], fp8_tensors[3:]
        # PyTorch 2.11 caches cuDNN's backward by the strides of q, k and v alone.
        dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
        sums: list[Tensor] = []  # gradients of q, k and v
        pending: list[tuple[Tensor, int]] = []  # another rank's for k and v, and how many tokens
        for step, (kv, queries, keys) in enumerate(ring.visits(k, v)):
            operands = dout[:, :, queries], q[:, :, queries], kv[0, :, :, keys], kv[1, :, :, keys]
            seen = out[:, :, queries], lse[:, :, queries].contiguous(), *max_scores[:1]
            gradients = _pair_gradients(
                *operands, scales, seen, ring.causal and step == 0, ring.scale
            )
            if keys.stop:
                max_scores = max_scores[1:]
            if step == 0:
                sums = [x.to(ring.sum_dtype(dout.dtype)) for x in gradients]
                continue
            count = ring.pair(ring.visitor(-step), ring.rank, k.shape[2])[1].stop
            sent = ring.send(_stacked(*gradients[1:]), -step, count)
            sums[0][:, :, queries] += gradients[0]
            _add_arrived(sums[1:], pending, dout.dtype)
            pending = [(sent, count)]
        _add_arrived(sums[1:], pending, dout.dtype)
        return (*(x.to(dout.dtype) for x in sums), None, None)


def _as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Do ``x.to(dtype)``, which loses the gradient in graphs of torch 2.11 if it copies nothing."""
    return x if x.dtype == dtype else x.to(dtype)


def _add_arrived(
    sums: Sequence[Tensor], pending: Sequence[tuple[Tensor, int]], dtype: torch.dtype
) -> None:
    """Add the gradients that another rank has sent, if any, to those of keys and values."""
    for vector, count in pending:
        B, G, _, D = sums[0].shape
        arrived = collectives.wait_tensor(vector).view(dtype).view(2, B, count, G, D)
        for gradient, x in zip(sums, arrived, strict=True):
            gradient[:, :, :count] += x.transpose(1, 2)


def _attend_pair(
    q: Tensor, k: Tensor, v: Tensor, scales: Sequence[Tensor], causal: bool, scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return a pair's output, its logarithms of sums, and in FP8 the queries' largest scores."""
    if scales:
        window = (-1, 0 if causal else -1, 0)
        return ops.fp8_attention_op(q, k, v, *scales, window, scale, dtype)
    if q.is_cuda:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    return out, lse.view(out.shape[:3])


def _pair_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, scales: Sequence[Tensor],
    seen: Sequence[Tensor], causal: bool, scale: float,
) -> Sequence[Tensor]:  # fmt: skip
    """Return a pair's gradients of q, k, v; ``seen`` has its queries' output and statistics."""
    if k.shape[2] == 0:
        return [torch.empty_like(x, dtype=dout.dtype) for x in (q, k, v)]
    if scales:
        window = (-1, 0 if causal else -1, 0)
        return ops.fp8_attention_backward_op(dout, q, k, v, *scales, *seen, window, scale)
    out, lse = seen
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    seed = lse.new_zeros(2, dtype=torch.int64)  # there is no dropout
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.unsqueeze(-1), seed[0], seed[1], None, None, None, q.shape[2],
        k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip
