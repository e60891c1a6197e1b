"""The ways to compute attention, tried in order.  B batch, H heads, G key/value heads, D head size.

========== ==========================================================================
sdpa        torch's scaled_dot_product_attention with no mask or a square causal one
flex        FlexAttention: windows, padding, ALiBi, softcaps and sinks on CUDA
sdpa_masked scaled_dot_product_attention with the mask and the bias as a matrix
reference   plain PyTorch, float32 inside; takes everything
========== ==========================================================================

With every backend, a query that sees no key or is padding has output 0 and passes no gradient on.
If the matrix of all queries would have more than ``MOST_SCORES`` numbers, the last two backends
hold the matrix of a block of queries at a time, and recompute it in backward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from float8lab.distributed.context_parallel import ContextParallel
from float8lab.nn.attention.bias import Alibi
from float8lab.nn.attention.layout import Packed
from float8lab.nn.attention.masks import AttentionMask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, BlockMask
from float8lab.tensor.differentiation import is_exporting

__all__ = [
    "BACKENDS", "MOST_SCORES", "Attended", "Explanation", "Problem", "attend", "explain",
    "largest_of_heads", "reference_attention", "why_a_matrix",
]  # fmt: skip

MOST_SCORES = 2**25
"""The most numbers in a matrix of scores, or in a mask made for it, that is held at once."""

Attended: TypeAlias = tuple[Tensor, Tensor | None]
"""The output and, if the problem asks for it, the largest score of each head, ``[H]`` float32."""


class Problem(NamedTuple):
    """Everything that attention needs besides q ``[B, H, Sq, D]``, k ``[B, G, Sk, D]`` and v."""

    mask: AttentionMask
    scale: float
    bias: Tensor | None = None
    """A bias added to the scaled scores; it broadcasts to ``[B, H, Sq, Sk]``."""
    alibi: Alibi | None = None
    dropout: float = 0.0
    """Dropout rate of the probabilities; 0 outside training."""
    softcap: float = 0.0
    """The scaled scores become ``softcap * tanh(scores / softcap)``; 0 leaves them unchanged."""
    sink: Tensor | None = None
    """``[H]``, the score of an extra key with value 0, which all queries see."""
    wants_max: bool = False
    packed: tuple[Packed, Packed] | None = None
    """The positions of the sequences of queries and of keys in ``[1, H, T, D]``."""
    context: ContextParallel | None = None
    """The context-parallel ranks; if they share tokens, q, k and v are this rank's shards."""

    def of_queries(self, start: int, stop: int, Sk: int) -> tuple[Problem, slice]:
        """Return the problem of queries ``start`` to ``stop``, and the keys that they may see."""
        mask, first, last = self.mask, 0, Sk
        if isinstance(mask.diagonal, int):
            position = mask.diagonal + start
            first = max(0, position - mask.left) if mask.left >= 0 else 0
            last = min(Sk, mask.diagonal + stop + mask.right) if mask.right >= 0 else Sk
        # Queries that see nothing still get a key, for their scores must not be empty.
        first = min(first, Sk - 1)
        keys, queries = slice(first, max(last, first + 1)), slice(start, stop)
        mask = mask._replace(
            diagonal=mask.diagonal + start - first,
            q_padding=None if mask.q_padding is None else mask.q_padding[:, queries],
            kv_padding=None if mask.kv_padding is None else mask.kv_padding[:, keys],
            arbitrary=_corner(mask.arbitrary, queries, keys),
        )
        if (alibi := self.alibi) is not None:
            alibi = alibi._replace(diagonal=alibi.diagonal + start - first)
        return self._replace(mask=mask, bias=_corner(self.bias, queries, keys), alibi=alibi), keys

    def scores_bias(self, Sq: int, Sk: int) -> Tensor | None:
        """Return ``bias``, or ALiBi as a matrix; a call has only one of them, or none."""
        return self.bias if self.alibi is None else self.alibi.dense(Sq, Sk)

    def visible(
        self, Sq: int, Sk: int, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the keys that each query may see, and the blind queries, whose output must be 0.

        Blind queries, ``[1 or B, 1 or H, Sq, 1]``, may see all keys here, or their softmax would be
        0 / 0. None stands for all keys, and for no blind query.
        """
        allowed = self.mask.allowed(Sq, Sk, device)
        blind = self.mask.padded_queries
        if allowed is not None and not self.mask.leaves_no_query_blind(Sq, Sk):
            sees_nothing = ~allowed.any(-1, keepdim=True)
            allowed = allowed | sees_nothing
            blind = sees_nothing if blind is None else blind | sees_nothing
        return allowed, blind


def _corner(x: Tensor | None, queries: slice, keys: slice) -> Tensor | None:
    """Return the entries for some queries and keys of a tensor that broadcasts to the scores."""
    if x is not None and x.ndim > 1 and x.shape[-2] > 1:
        x = x[..., queries, :]
    return x if x is None or not x.ndim or x.shape[-1] == 1 else x[..., keys]


def _zero_blind(out: Tensor, blind: Tensor | None) -> Tensor:
    """Set the output of blind queries to 0, so that no gradient passes through them."""
    return out if blind is None else out.masked_fill(blind, 0.0)


class Explanation(NamedTuple):
    """Which backend a call gets, and why it does not get the others."""

    backend: str
    rejected: dict[str, str]
    """Reasons against backends: all before the chosen backend, and unsuitable ones after it."""
    block: int | None = None
    """The number of queries in a block, if a matrix for all queries is too large."""

    def __repr__(self) -> str:
        blocks = "" if self.block is None else f", {self.block} queries at a time"
        lines = [f"backend: {self.backend}{blocks}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.rejected.items()]
        return "\n".join(lines)


def reference_attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Attended:
    """Compute ``dropout(softmax(q @ k.T * scale + bias)) @ v`` in float32 (float64 for float64).

    The inputs are q ``[B, H, Sq, D]``, k ``[B, G, Sk, D]`` and v ``[B, G, Sk, Dv]``, where G
    divides H; the output is ``[B, H, Sq, Dv]`` in the dtype of q.
    """
    (B, H, Sq, D), (G, Sk) = q.shape, k.shape[1:3]
    with torch.autocast(q.device.type, enabled=False):
        # The query heads of a group count as further queries of its only key head.
        q_high, k_high, v_high = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v))
        grouped = q_high.reshape(B, G, H // G * Sq, D)
        scores = (grouped @ k_high.transpose(2, 3)).view(B, H, Sq, Sk) * problem.scale
        if problem.softcap:
            scores = (scores / problem.softcap).tanh() * problem.softcap
        if (bias := problem.scores_bias(Sq, Sk)) is not None:
            scores = scores + bias
        allowed, blind = problem.visible(Sq, Sk, q.device)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        largest = largest_of_heads(scores, blind) if problem.wants_max else None
        if problem.sink is None:
            p = scores.softmax(-1)
        else:
            sinks = problem.sink.to(scores.dtype).view(1, H, 1, 1).expand(B, H, Sq, 1)
            p = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        p = F.dropout(p, problem.dropout).reshape(B, G, H // G * Sq, Sk)
        out = (p @ v_high).view(B, H, Sq, v.shape[3])
        return _zero_blind(out, blind).to(q.dtype), largest


def largest_of_heads(scores: Tensor, blind: Tensor | None = None) -> Tensor:
    """Return each head's largest score of ``[B, H, Sq, ...]``; -inf if no query sees a key."""
    scores = scores.detach().float()
    if not scores.numel():
        return scores.new_full(scores.shape[1:2], -torch.inf)
    if blind is not None:
        scores = scores.masked_fill(blind, -torch.inf)
    return scores.transpose(0, 1).flatten(1).amax(1)


def _in_blocks(
    run: Callable[..., Attended], rows: int, q: Tensor, k: Tensor, v: Tensor, problem: Problem
) -> Attended:
    """Call ``run`` for blocks of ``rows`` queries, each of which backward recomputes."""
    attended = []
    for start in range(0, q.shape[2], rows):
        stop = min(start + rows, q.shape[2])
        block_problem, keys = problem.of_queries(start, stop, k.shape[2])
        block = q[:, :, start:stop], k[:, :, keys], v[:, :, keys], block_problem
        grad = torch.is_grad_enabled()
        attended.append(checkpoint(run, *block, use_reentrant=False) if grad else run(*block))
    maxima = [largest for _, largest in attended if largest is not None]
    largest = torch.stack(maxima).amax(0) if maxima else None
    return torch.cat([out for out, _ in attended], 2), largest


def _sdpa(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Attended:
    Sq, Sk = q.shape[2], k.shape[2]
    # Torch's only fused kernel for these inputs does not take grouped heads.
    repeats = q.dtype == torch.float32 or q.shape[3] != v.shape[3] or q.shape[3] > 256
    # cuDNN prepares a plan, some 30 ms on an H200, for each length that a cache grows to.
    reads_a_cache = Sq < Sk and not torch.is_grad_enabled()
    causal = problem.mask.is_plain_causal(Sq, Sk)
    out = _call_sdpa(q, k, v, problem, None, repeats, reads_a_cache, is_causal=causal)
    return _zero_blind(out, problem.mask.padded_queries), None


def _sdpa_masked(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Attended:
    Sq, Sk = q.shape[2], k.shape[2]
    mask, blind = problem.visible(Sq, Sk, q.device)
    if (bias := problem.scores_bias(Sq, Sk)) is not None:
        bias = bias.to(q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    if mask is not None:
        mask = mask.expand(*torch.broadcast_shapes(mask.shape, (q.shape[0], 1, Sq, Sk)))
    # With a mask, torch has no fused kernel for grouped heads. With a bool mask [B, 1, Sq, Sk],
    # cuDNN's bfloat16 results had errors of 1.4 times their norm (torch 2.11, H200); the same call
    # in float32, which cuDNN does not take, is right.
    return _zero_blind(_call_sdpa(q, k, v, problem, mask, True, mask is not None), blind), None


def _call_sdpa(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, mask: Tensor | None, repeats: bool,
    avoids_cudnn: bool, is_causal: bool = False,
) -> Tensor:  # fmt: skip
    """Call torch's attention; on a GPU, repeat the key heads of groups and avoid cuDNN if asked."""
    if q.is_cuda and repeats and k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    with _without_cudnn() if q.is_cuda and avoids_cudnn else contextlib.nullcontext():
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=problem.dropout, is_causal=is_causal,
            scale=problem.scale, enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip


class _CudnnOff:
    """Switches cuDNN off like ``sdpa_kernel``, but in half a microsecond instead of thirty."""

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)

    def __exit__(self, *error: object) -> None:
        torch.backends.cuda.enable_cudnn_sdp(self.before)


def _without_cudnn() -> AbstractContextManager[Any]:
    """Switch cuDNN off, and other kernels on if the enabled ones might not take the call."""
    cuda = torch.backends.cuda
    if not torch.compiler.is_compiling() and (  # Dynamo cannot trace these two calls
        cuda.mem_efficient_sdp_enabled() or cuda.math_sdp_enabled()
    ):
        return _CudnnOff()
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


def _flex_library() -> ModuleType:
    """Import FlexAttention, which loads sympy; torch 2.15 loads sympy only when it compiles."""
    from torch.nn.attention import flex_attention

    return flex_attention


def _masked_flex(
    q: Tensor, k: Tensor, v: Tensor, blind: Tensor | None, hidden: Tensor | None, **options: object
) -> tuple[Tensor, AuxOutput]:
    """Run FlexAttention with an output of 0 for ``blind`` queries; return its statistics, too.

    ``hidden`` keys lie between or after packed sequences. They and blind queries are set to 0,
    since they may hold any values, and 0 * inf is not 0.
    """
    if hidden is not None:
        q, k, v = _zero_blind(q, blind), _zero_blind(k, hidden), _zero_blind(v, hidden)
    library: Any = _flex_library()
    result = library.flex_attention(q, k, v, **options)
    out, statistics = result if isinstance(result, tuple) else (result, library.AuxOutput())
    return _zero_blind(out, blind), statistics


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(_masked_flex)


class _Places(NamedTuple):
    """The positions of queries among the keys; each field is ``[B, Sq]`` or a number."""

    sequence: Tensor
    position: Tensor
    """The key position of each query if the diagonal is 0."""
    start: Tensor | int
    """The first key of the query's sequence."""
    stop: Tensor | int
    """The index after the last key of that sequence; 0 for a packed query without a sequence."""
    outside: Tensor | None = None
    """Which packed queries belong to no sequence."""

    @classmethod
    def of(cls, q: Tensor, k: Tensor, packed: tuple[Packed, Packed] | None) -> _Places:
        """Find the positions; sequences are rows of the batch, or packed one after the other."""
        B, Sq = q.shape[0], q.shape[2]
        if packed is None:
            sequence = torch.arange(B, device=q.device).view(-1, 1).expand(B, Sq)
            return cls(sequence, torch.arange(Sq, device=q.device).expand(B, Sq), 0, k.shape[2])
        queries, keys = packed
        sequence, position, outside = (x.unsqueeze(0) for x in queries.places(Sq))
        start = keys.starts[sequence]
        stop = (start + keys.lengths[sequence]).masked_fill(outside, 0)
        return cls(sequence, position + start, start, stop, outside)

    def on(self, diagonal: int | Tensor) -> Tensor:
        """Return the key position of each query; the diagonal may differ between sequences."""
        if isinstance(diagonal, Tensor):
            diagonal = diagonal[self.sequence]
        return self.position + diagonal

    def window(self, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """Return the first and the last key of each query's window."""
        position = self.on(mask.diagonal)
        first = position - mask.left if mask.left >= 0 else torch.zeros_like(position)
        last = position + mask.right if mask.right >= 0 else torch.full_like(position, _UNLIMITED)
        return first.clamp(min=self.start).int(), last.clamp(max=self.stop - 1).int()


def _flex_modifiers(
    q: Tensor, k: Tensor, problem: Problem, places: _Places
) -> tuple[Callable[..., Tensor] | None, BlockMask | None]:
    """Make FlexAttention's score_mod, which applies softcap and then ALiBi, and its block_mask."""
    # Values that differ between calls, also windows, are in tensors: a number in a closure becomes
    # part of the compiled code, and Dynamo gives up compiling after 8 versions of the code.
    mask, alibi, packed = problem.mask, problem.alibi, problem.packed
    caps = torch.full((q.shape[0],), problem.softcap, device=q.device) if problem.softcap else None
    has_alibi = alibi is not None
    if alibi is not None:
        slopes, centres = alibi.slopes.view(-1, q.shape[1]), places.on(alibi.diagonal)
        rows = places.sequence if slopes.shape[0] > 1 else torch.zeros_like(places.sequence)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if caps is not None:
            score = (score / caps[b]).tanh() * caps[b]
        return score - slopes[rows[b, i], h] * (centres[b, i] - j).abs() if has_alibi else score

    modifier = score_mod if has_alibi or caps is not None else None
    if mask.lets_all and packed is None:
        return modifier, None
    first, last = places.window(mask)
    kv_padding = mask.kv_padding if packed is None else None

    def may_see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        in_window = (j >= first[b, i]) & (j <= last[b, i])
        return in_window if kv_padding is None else in_window & ~kv_padding[b, j]

    return modifier, _block_mask(first, last, kv_padding, k.shape[2], may_see)


def _block_mask(
    first: Tensor, last: Tensor, kv_padding: Tensor | None, Sk: int, may_see: Callable[..., Tensor]
) -> BlockMask:
    """Find the blocks of queries and keys with a visible pair, and those with only visible pairs.

    They follow from the first and last key of each query in a block, for looking at each pair would
    take as much memory as the scores. A query that sees no key has first > last.
    """
    Sq = first.shape[1]
    first, last = torch.where(first > last, Sk, first), torch.where(first > last, -1, last)
    # Queries after the end see no key.
    first, last = (
        F.pad(x, (0, -Sq % _FLEX_BLOCK), value=beyond).unflatten(1, (-1, _FLEX_BLOCK))
        for x, beyond in ((first, Sk), (last, -1))
    )
    (least, latest_first), (earliest_last, most) = (
        (x.view(*x.shape[:1], 1, -1, 1) for x in bounds.aminmax(dim=2)) for bounds in (first, last)
    )
    first_j = torch.arange(0, Sk, _FLEX_BLOCK, device=first.device)
    last_j = (first_j + _FLEX_BLOCK - 1).clamp(max=Sk - 1)
    seen = (last_j >= least) & (first_j <= most)
    # In a fully visible block, FlexAttention applies no mask and does not know where keys end.
    fully_seen = (first_j >= latest_first) & (first_j + _FLEX_BLOCK - 1 <= earliest_last)
    if kv_padding is not None:
        missing = -Sk % _FLEX_BLOCK
        real = F.pad(~kv_padding, (0, missing)).unflatten(1, (-1, _FLEX_BLOCK))
        seen = seen & real.any(-1)[:, None, None]
        fully_seen = fully_seen & real.all(-1)[:, None, None]
    lists = []  # the count and the indices of partly visible blocks, then of fully visible blocks
    for blocks in (seen & ~fully_seen, fully_seen):
        order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        lists += [blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)]
    return _flex_library().BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=_FLEX_BLOCK, mask_mod=may_see, seq_lengths=(Sq, Sk)
    )


def _flex(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Attended:
    places = _Places.of(q, k, problem.packed)
    score_mod, block_mask = _flex_modifiers(q, k, problem, places)
    blind, hidden, sink = problem.mask.padded_queries, None, problem.sink
    if problem.packed is not None and places.outside is not None:
        blind = places.outside.view(-1, 1)
        hidden = problem.packed[1].places(k.shape[2])[2].view(-1, 1)
    run = _compiled_flex() if q.is_cuda and not torch.compiler.is_compiling() else _masked_flex
    head, options = max(q.shape[3], v.shape[3]), None
    if head > 128:  # the tiles that torch chooses would exceed a GPU's shared memory
        names = ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")
        options = {**dict.fromkeys(names, 32 if head <= 256 else 16), "num_stages": 1}
    asks = sink is not None or problem.wants_max
    request = _flex_library().AuxRequest(sink is not None, problem.wants_max) if asks else None
    out, statistics = run(
        q, k, v, blind, hidden, score_mod=score_mod, block_mask=block_mask, scale=problem.scale,
        enable_gqa=q.shape[1] != k.shape[1], kernel_options=options, return_aux=request,
    )  # fmt: skip
    if sink is not None and statistics.lse is not None:
        # The keys contribute exp(lse) / (exp(lse) + exp(sink)) of the sum over keys and sink.
        fraction = torch.sigmoid(statistics.lse - sink.view(-1, 1))
        out = (out * fraction.unsqueeze(-1)).to(q.dtype)
    scores = statistics.max_scores
    return out, None if scores is None else largest_of_heads(scores.unsqueeze(-1), blind)


_FLEX_BLOCK = 128
_UNLIMITED = 2**30
"""A distance larger than that of any key."""


def why_a_matrix(Sq: int, Sk: int, problem: Problem) -> str | None:
    """Return why bias or mask must be a matrix; None without bias, if at most square and causal."""
    mask = problem.mask
    if problem.bias is not None:
        return "core_attention_bias must be a matrix to it"
    if problem.alibi is not None:
        return "ALiBi must be a matrix to it"
    if mask.lets_all or mask.is_plain_causal(Sq, Sk):
        return None
    if mask.arbitrary is not None:
        return "an arbitrary mask must be a matrix to it"
    if mask.kv_padding is not None:
        return "a padding mask must be a matrix to it"
    if mask.left >= 0 or mask.right > 0:
        return f"the sliding window {(mask.left, mask.right)} must be a matrix to it"
    return f"its causal mask is square, and this one is for {Sq} queries and {Sk} keys"


_FLEX_MIN_QUERIES = 128


def _why_not_flex(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> str | None:
    has_matrix = problem.bias is not None or problem.mask.arbitrary is not None
    on_cpu = not q.is_cuda
    reasons = {
        "it has no dropout": problem.dropout,
        "the bias or the mask is a matrix already": has_matrix,
        "it has no float64": q.dtype == torch.float64,
        "ONNX has no operator for it": is_exporting(),
        "it has no backward on this device": on_cpu and any(x.requires_grad for x in (q, k, v)),
        "it does not give the largest scores on this device": on_cpu and problem.wants_max,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _flex_does_not_pay(q: Tensor) -> str | None:
    if q.is_cuda and q.shape[2] < _FLEX_MIN_QUERIES:
        return f"fewer than {_FLEX_MIN_QUERIES} queries: their mask is small"
    return None if q.is_cuda else "it is fused on CUDA only"


def _why_not_plain(problem: Problem) -> str | None:
    """Return which part of a problem a kernel with plain softmax cannot compute, or None."""
    if problem.softcap:
        return "it has no softcap"
    if problem.sink is not None:
        return "it has no sinks"
    return "it does not give the largest scores" if problem.wants_max else None


def _why_not_sdpa_masked(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> str | None:
    wide = problem.alibi is not None or (
        problem.bias is not None and problem.bias.dtype not in (q.dtype, torch.bool)
    )
    if wide and q.dtype in (torch.float16, torch.bfloat16):
        return f"it would round the bias to {str(q.dtype).removeprefix('torch.')}"
    return _why_not_plain(problem)


def _why_not_sdpa(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> str | None:
    return why_a_matrix(q.shape[2], k.shape[2], problem) or _why_not_plain(problem)


_TABLE: dict[str, tuple[Callable[..., Attended], Callable[..., str | None]]] = {
    "sdpa": (_sdpa, _why_not_sdpa),
    "flex": (_flex, _why_not_flex),
    "sdpa_masked": (_sdpa_masked, _why_not_sdpa_masked),
    "reference": (reference_attention, lambda *call: None),
}
"""The function that runs each backend, and the function that returns why it rejects a call."""

BACKENDS = tuple(_TABLE)
"""Names of the backends, in the order in which they are tried."""


def _why_not(name: str, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> str | None:
    """Return why a backend does not take a call; None if it does."""
    if name != "reference" and not (q.numel() and k.numel() and v.numel()):
        return "an input is empty"
    if name.startswith("sdpa") and q.is_cuda and q.dtype == torch.float64:
        return "its fused kernels have no float64"
    return _TABLE[name][1](q, k, v, problem)


def explain(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, backends: Sequence[str]
) -> Explanation:
    """Choose the first of ``backends`` that can take this call.

    Raises:
        NotImplementedError: none of the backends can.
    """
    rejected, tensors = {}, _tensors_of_backends(q, k, v, problem)
    for name in backends:
        reason = _why_not(name, *tensors[name], problem)
        if reason is None and name == "flex" and len(backends) > 1:
            reason = _flex_does_not_pay(q)
        if reason is not None:
            rejected[name] = reason
    chosen = next((name for name in backends if name not in rejected), None)
    if chosen is None:
        candidates = [n for n in BACKENDS if n != "flex" or _flex_does_not_pay(q) is None]
        able = [n for n in candidates if _why_not(n, *tensors[n], problem) is None]
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
        raise NotImplementedError(
            f"backends must hold one that supports this call; got {tuple(backends)} ({reasons}). "
            f"Add {able[0]!r}."
        )
    return Explanation(chosen, rejected, _block_of_queries(chosen, *tensors[chosen][:2], problem))


def _tensors_of_backends(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return tensors with the shapes that each backend gets; only flex takes packed sequences."""
    if problem.packed is None:
        return dict.fromkeys(BACKENDS, (q, k, v))
    queries, keys = problem.packed
    rows = queries.shape_of_rows(q), keys.shape_of_rows(k), keys.shape_of_rows(v)
    has_tokens = rows[0].numel() and rows[1].numel()
    return {**dict.fromkeys(BACKENDS, rows), "flex": (q, k, v) if has_tokens else rows}


_LEAST_QUERIES = 64


def _block_of_queries(name: str, q: Tensor, k: Tensor, problem: Problem) -> int | None:
    """Return the number of queries in a block of a backend; None if it takes all at once."""
    (B, H, Sq, _), Sk = q.shape, k.shape[2]
    if name in ("sdpa", "flex") or is_exporting():
        return None
    # How many numbers the backend computes for a query of each sequence.
    scores = B * H * Sk if name == "reference" else _mask_size(q, k, problem)
    if Sq * scores <= MOST_SCORES:
        return None
    rows = max(_LEAST_QUERIES, MOST_SCORES // scores)
    return rows if rows < Sq else None


def _mask_size(q: Tensor, k: Tensor, problem: Problem) -> int:
    """Return how many numbers ``sdpa_masked``'s mask has for a query of each sequence, or 0 if the
    mask is no larger than the matrix that the caller gave."""
    (B, H, Sq, _), Sk, mask, bias = q.shape, k.shape[2], problem.mask, problem.bias
    if bias is not None and mask.lets_all:
        return 0
    matrix = mask.arbitrary if bias is None else bias
    heads = H if problem.alibi is not None else 1
    if matrix is not None and matrix.ndim > 2:
        heads = max(heads, matrix.shape[-3])
    # A bias has a row for each sequence if masks differ; torch converts a bool mask to a bias.
    differ = bias is None or mask.kv_padding is not None or isinstance(mask.diagonal, Tensor)
    size = (B if differ else 1) * heads * Sk
    return 0 if matrix is not None and matrix.numel() >= size * Sq else size


def attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem, chosen: Explanation) -> Attended:
    """Compute attention by the ``chosen`` backend; shapes are those of ``reference_attention``.

    Packed sequences become rows of a batch for all backends but flex, and their output is packed.
    """
    run, tokens = _TABLE[chosen.backend][0], q.shape[2]
    packed = None if chosen.backend == "flex" else problem.packed
    if packed is not None:
        q, k, v = packed[0].unpack(q), packed[1].unpack(k), packed[1].unpack(v)
    if chosen.block is None:
        out, largest = run(q, k, v, problem)
    else:
        out, largest = _in_blocks(run, chosen.block, q, k, v, problem)
    return out if packed is None else packed[0].pack(out, tokens), largest
