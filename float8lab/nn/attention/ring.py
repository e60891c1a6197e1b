"""Attention of ranks that share tokens.  B batch, H heads, G key/value heads, D head size.

Note: the nouns of this room; others are those of ``distributed/context_parallel.py``.

- *shard*: a rank's tokens of S, ``[B, H, S / R, D]``: one chunk, or two, of each sequence;
- *visit*: keys and values of one rank, which go from rank to rank, or were gathered;
- *pair*: queries, and keys of one visit, all of which they see, or, causal, up to their own place.

A rank attends with its own queries, visit by visit, and merges the outputs of pairs in float32 by
the logarithms of their sums of exponentials. Backward computes each pair's gradients from the
merged output and logarithm; those of keys and values go around with them. In FP8 all are cast
before they are sent, with scales that all ranks share, to the bytes that one rank would have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from float8lab import ops
from float8lab.distributed.context_parallel import ContextParallel, TokenRanks
from float8lab.distributed.ranks import all_gathered
from float8lab.nn.attention import masks
from float8lab.nn.attention.arguments import Rules, is_plain
from float8lab.nn.attention.backends import Problem
from float8lab.nn.attention.fp8 import K, Q, V, cast_operand
from float8lab.nn.attention.layout import Sizes
from float8lab.nn.precision import Call
from float8lab.tensor.differentiation import AutogradContext, Float8Function, once_differentiable

__all__ = ["Pair", "pairs_of", "ring_attention", "takes_ring"]

aten, collectives = torch.ops.aten, torch.ops._c10d_functional

_LARGEST_HEAD = 128
"""The largest head that cuDNN's backward takes."""


def takes_ring(query: Tensor, value: Tensor, rules: Rules, sizes: Sizes, ranks: int) -> bool:
    """Whether ranks that share tokens attend to keys and values visit by visit.

    That is where the mask is none or a square causal one, and a kernel gives the logarithms.
    ``sizes`` are of the sequences of all ranks.
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


class Pair(NamedTuple):
    """Queries and keys of a visit, as ranges of tokens."""

    queries: slice
    keys: slice
    causal: bool = False
    """Query i sees the keys up to the i-th; else all."""


_ALL = slice(None)


def pairs_of(queries: list[int], keys: list[int], length: int) -> list[Pair]:
    """The pairs that queries of a causal mask make with a visit.

    Args:
        queries: numbers of their chunks, which rise, as those of ``keys``.
        length: tokens of a chunk.

    >>> pairs_of([0, 3], [1, 2], 2)
    [Pair(queries=slice(2, 4, None), keys=slice(0, 4, None), causal=False)]
    """
    if queries == keys:
        return [Pair(_ALL, _ALL, True)]
    earlier = [sum(key < query for key in keys) for query in queries]
    pairs = []
    for count in dict.fromkeys(earlier):
        first, chunks = earlier.index(count), earlier.count(count)
        if count:
            rows = slice(first * length, (first + chunks) * length)
            pairs.append(Pair(rows, slice(0, count * length)))
    return pairs


class _Ring(NamedTuple):
    """A call."""

    ranks: TokenRanks
    gathers: bool
    causal: bool
    scale: float

    def visits(self, kv: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Pair]]]:
        """Keys and values of all ranks, this one first, and what this rank's queries see of them.

        Those of the next visit are received while the caller computes.
        """
        ranks, queries, vector = self.ranks, self.ranks.chunks_of(self.ranks.rank), _joined(kv)
        gathered = all_gathered(vector, ranks.size, ranks.name) if self.gathers else vector[:0]
        for step in range(ranks.size):
            is_last = step == ranks.size - 1
            pending = None if self.gathers or is_last else self.send(vector)
            keys = ranks.chunks_of(self.visitor(step))
            pairs = pairs_of(queries, keys, kv[0].shape[2] // len(queries))
            yield kv, pairs if self.causal else [Pair(_ALL, _ALL)]
            if not is_last:
                if pending is None:
                    vector = gathered.view(ranks.size, -1)[self.visitor(step + 1)]
                else:
                    vector = collectives.wait_tensor(pending)
                kv = _split(vector, kv)

    def visitor(self, step: int) -> int:
        """The rank whose keys and values are here at a step."""
        return (self.ranks.rank - step) % self.ranks.size

    def send(self, vector: Tensor) -> Tensor:
        """Start to send a vector to the next rank, and to receive the previous one's."""
        size, rank = self.ranks.size, self.ranks.rank
        counts = [[0] * size, [0] * size]  # bytes to receive, and to send
        counts[0][rank - 1] = counts[1][(rank + 1) % size] = vector.numel()
        sent: Tensor = collectives.all_to_all_single(vector, *counts, self.ranks.name)
        return sent


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors, behind each other."""
    return torch.cat([x.reshape(-1).view(torch.uint8) for x in tensors])


def _split(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors whose bytes these are, of the shapes of others."""
    pieces = vector.split([x.numel() * x.element_size() for x in like])
    return [piece.view(x.dtype).view(x.shape) for piece, x in zip(pieces, like, strict=True)]


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, context: ContextParallel, call: Call | None
) -> Tensor:
    """Attention of this rank's queries to the keys and values of the ranks that share tokens.

    q, k and v are shards, and the problem is one that ``takes_ring``. ``call`` says how attention
    runs in FP8; None is in high precision.
    """
    causal = problem.mask.is_plain_causal(q.shape[2], k.shape[2])
    ring = _Ring(context.share_tokens, context.gathers, causal, problem.scale)
    return _Attention.run(q, k, v, ring, call)


class _Attention(Float8Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, q: Tensor, k: Tensor, v: Tensor, ring: _Ring, call: Call | None
    ) -> Tensor:
        (B, H, Sq, _), Dv, scales = q.shape, v.shape[3], ()
        # Outputs that are merged once are rounded once.
        dtype = q.dtype if ring.ranks.size == 2 else _sum_dtype(q.dtype)
        out = q.new_empty((B, Sq, H, Dv), dtype=dtype).transpose(1, 2)
        lse = q.new_empty((B, H, Sq), dtype=_sum_dtype(q.dtype))
        result_dtype = q.dtype
        if call is not None:
            casts = [cast_operand(x, index, call) for index, x in ((Q, q), (K, k), (V, v))]
            (q, k, v), scales = zip(*casts, strict=True)
        merge = _compiled_merge() if q.is_cuda and not torch.compiler.is_compiling() else _merge
        for step, (kv, pairs) in enumerate(ring.visits([k, v])):
            for queries, keys, causal in pairs:
                operands = q[:, :, queries], kv[0][:, :, keys], kv[1][:, :, keys]
                if scales:
                    window = (-1, 0 if causal else -1, 0)
                    seen = ops.fp8_attention_op(*operands, *scales, window, ring.scale, dtype)
                else:
                    seen = _attend_pair(*operands, causal, ring.scale)
                if step == 0:  # no key of these queries came before
                    out[:, :, queries], lse[:, :, queries] = seen
                else:
                    merge(out[:, :, queries], lse[:, :, queries], *seen)
        if out.dtype != result_dtype:  # else a graph of torch 2.11 loses the gradient
            out = out.to(result_dtype)
        if any(ctx.needs_input_grad[:3]):
            ctx.save_for_backward(q, k, v, *scales, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *scales, out, lse = ctx.saved_tensors
        ring, dtype = ctx.ring, _sum_dtype(dout.dtype)
        dout = dout if dout.stride(3) == 1 else dout.contiguous()
        dq, dkv = torch.empty_like(q, dtype=dtype), [k, v]
        sums: dict[int, Tensor] = {}  # gradients of keys and values, by whose these are
        pending: Tensor | None = None  # or sums that go around with them
        for step, (kv, pairs) in enumerate(ring.visits([k, v])):
            dkv = [torch.zeros_like(x, dtype=dtype) for x in kv]
            for queries, keys, causal in pairs:
                local_dout, local_q, local_out = (x[:, :, queries] for x in (dout, q, out))
                operands = local_dout, local_q, kv[0][:, :, keys], kv[1][:, :, keys]
                seen = local_out, lse[:, :, queries].contiguous()
                if scales:
                    window = (-1, 0 if causal else -1, 0)
                    gradients = ops.fp8_attention_backward_op(
                        *operands, *scales, *seen, window, ring.scale
                    )
                else:
                    gradients = _pair_gradients(*operands, *seen, causal, ring.scale)
                if step == 0:
                    dq[:, :, queries] = gradients[0]
                else:
                    dq[:, :, queries] += gradients[0]
                for x, gradient in zip(dkv, gradients[1:], strict=True):
                    x[:, :, keys] += gradient
            vector = _joined(dkv).view(dtype)
            if ring.gathers:
                sums[ring.visitor(step)] = vector
                continue
            if pending is not None:
                vector += collectives.wait_tensor(pending)
            pending = ring.send(vector)
        if pending is None:
            rows, ranks = torch.stack([sums[rank] for rank in range(len(sums))]), ring.ranks
            pending = collectives.reduce_scatter_tensor(rows, "sum", ranks.size, ranks.name)
        dkv = _split(collectives.wait_tensor(pending).view(-1).view(torch.uint8), dkv)
        return (*(x.to(dout.dtype) for x in (dq, *dkv)), None, None)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are summed."""
    return torch.promote_types(dtype, torch.float32)


def _merge(out: Tensor, lse: Tensor, seen: Tensor, seen_lse: Tensor) -> None:
    """Add what queries see of more keys to what they have seen, in place."""
    weight = torch.sigmoid(seen_lse - lse).unsqueeze(-1)
    out.copy_(torch.lerp(out.to(lse.dtype), seen.to(lse.dtype), weight))
    lse.copy_(torch.logaddexp(lse, seen_lse))


@functools.cache
def _compiled_merge() -> Callable[..., None]:
    """One kernel, which passes once through memory."""
    return torch.compile(_merge, dynamic=True)


# A pair in high precision, by torch's kernels.


def _attend_pair(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The output of a pair, and the logarithms of the sums of exponentials, ``[B, H, Sq]``."""
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return out, lse.view(out.shape[:3])


def _pair_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k and v by a pair; ``out`` and ``lse`` are of all that its queries see."""
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    seed = lse.new_zeros(2, dtype=torch.int64)  # of the dropout that there is not
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.unsqueeze(-1), seed[0], seed[1], None, None, None, q.shape[2],
        k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip
