"""Products that run while their operand arrives from other GPUs, or while their result leaves.

M rows of all ranks, N columns of a product, K contraction, R ranks, each on a GPU that reads and
writes the others' memory.

``gather_mm`` is an all-gather of the rows of ``a`` and the product with ``b``: this rank's rows
are multiplied while the others' arrive. ``mm_scatter`` is a product and the reduce-scatter of
its rows: the others' rows are computed first, and leave while this rank's are computed. Both can
gather other tensors meanwhile. What travels is copied from memory to memory, which takes no
multiprocessor from the products. Where ranks do not see each other's memory they use collectives.

Ranks copy through memory that all of them see, a ``Window`` of torch's symmetric memory. It has two
halves that calls take in turns, and a call has a barrier of all ranks, after which

- an all-gather reads what the others have put into their own half before it;
- a reduce-scatter reads what the others have put into this rank's half before it.

A rank writes to a half again two calls later, behind the barrier of the call between. So all ranks
have come that far, and before it waited for whatever they read in the half. A CUDA graph replays
between any two calls, so from the first that is captured on each call has one more barrier, ahead
of it. A rank that does not come to a barrier makes an error of the others, after the timeout of
their group.

The bytes of gathered operands are those of a collective. So are products where the GEMM gives a
row the same bits whatever rows are beside it, which was seen of cuBLASLt for all recipes; sums of
two ranks are, too, and those of more are rounded once, in place of once a rank.
"""

from __future__ import annotations

import functools
import math
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from float8lab.distributed.ranks import all_gathered
from float8lab.ops import scaled_mm_into
from float8lab.ops.declare import declare
from float8lab.recipes.reduction import group_named

__all__ = [
    "Window",
    "gather_mm",
    "is_worth_it",
    "mm_scatter",
    "sees_others",
    "window_of",
]

_ALIGN = 512
"""Bytes between what lies in a half; FP8 products want at least 16."""
_LEAST_GFLOP: dict[tuple[int, ...], int] = {(-1, -1): 100, (1, -1): 100, (1, 128): 200}
"""From which size of this rank's product on its overlap pays, by the left operand's block.

Measured on 2 H200s, K and N of a Llama-3-8B layer of which each rank has half. With 16384 rows (275
to 1924 GFLOP) plain collectives take 0.15 to 0.37 ms more than the products alone, overlapped ones
0.03 to 0.14, unless the CPU takes longer. With 4096 rows (69 to 481 GFLOP) the CPU needs longer to
queue a call than the GPU for the smallest, most of all with scales for each block.
"""
_SMALL_K = 2048
"""Up to which the other ranks' rows of a product are cut in two: computing this rank's rows takes
less time than sending the others'."""


class Window:
    """Memory of each rank of a group, which all of them read and write.

    Args:
        group: the process group.
        device: this rank's GPU.
        nbytes: of a half.
        before: a window that CUDA graphs may still use.
    """

    HALVES = 2
    of_groups: ClassVar[weakref.WeakKeyDictionary[Any, Window | None]] = weakref.WeakKeyDictionary()
    """The window of each process group; None where its ranks do not see each other's memory."""

    def __init__(
        self, group: Any, device: torch.device, nbytes: int, before: Window | None = None
    ) -> None:
        self.rank, self.size, self.nbytes = group.rank(), group.size(), nbytes
        self.before = before
        self.memory: Any = symmetric.empty(self.HALVES * nbytes, dtype=torch.uint8, device=device)
        self.handle: Any = symmetric.rendezvous(self.memory, group.group_name)
        timeout = group._get_backend(device).options._timeout
        self.timeout_ms = int(1000 * timeout.total_seconds())
        self.half, self.is_captured = 0, False
        self._parts: dict[Any, Tensor] = {}

    def begin(self, device: torch.device) -> None:
        """Take a half for a call."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.is_captured = True
        if self.is_captured:
            self.barrier()
        self.half = 1 - self.half

    def barrier(self) -> None:
        """Wait for all ranks, on the current stream."""
        self.handle.barrier(channel=0, timeout_ms=self.timeout_ms)

    def part(self, rank: int, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of a rank, ``start`` bytes into the half."""
        key = (self.half, rank, start, shape, dtype)
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self._part(rank, start, shape, dtype)
        return found

    def _part(self, rank: int, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        place = (self.half * self.nbytes + start) // dtype.itemsize
        found: Tensor = self.handle.get_buffer(rank, tuple(shape), dtype, place)
        return found


def window_of(group: Any, device: torch.device, nbytes: int) -> Window | None:
    """The window of a group, with halves of at least so many bytes; None if there cannot be one.

    All ranks call it together, and the first time it waits for all of them.
    """
    found = Window.of_groups.get(group)
    if found is None and group in Window.of_groups:
        return None
    if found is not None and found.nbytes >= nbytes:
        return found
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    torch.cuda.synchronize(device)
    keep = found if found is not None and (found.is_captured or found.before) else None
    made: Window | None = None
    why: str | None = None
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    if len(set(hosts)) == 1:
        try:
            step = max(1 << 21, 1 << (nbytes.bit_length() - 3))  # or each new size makes another
            made = Window(group, device, -(-nbytes // step) * step, keep)
        except RuntimeError as error:  # a GPU or driver without it
            why = str(error)
        reasons: list[Any] = [None] * group.size()
        dist.all_gather_object(reasons, why, group=group)
        made = made if not any(reasons) else None
    Window.of_groups[group] = made
    return made


def sees_others(group: Any, x: Tensor) -> bool:
    """Whether this rank may see the others' memory, as far as one can tell without asking them."""
    if x.is_cuda or torch.compiler.is_compiling():
        return x.is_cuda
    return Window.of_groups.get(group) is not None


def is_worth_it(M: int, N: int, K: int, a_block: Sequence[int]) -> bool:
    """Whether overlap pays for a product of ``[M, K]`` and ``[N, K]``.

    >>> is_worth_it(16384, 3072, 4096, (1, -1)), is_worth_it(512, 3072, 4096, (1, -1))
    (True, False)
    """
    return 1e9 * _LEAST_GFLOP.get(tuple(a_block), 100) <= 2 * M * N * K


class _Beside:
    """A stream of copies beside the current one, in order; on a CPU there is one order anyway.

    Its events are recorded again in every call: whoever waits for one does so for what it was
    recorded for last. Making an event takes the CPU as long as a copy does, and so does asking for
    the current stream, which callers do once.
    """

    def __init__(self, device: torch.device) -> None:
        self.module, self.index = torch.get_device_module(device), device.index
        self.stream = self.module.Stream(priority=-1)
        self.switch = getattr(self.module, "set_stream", lambda stream: None)
        self.events: list[Any] = []

    def current(self) -> Any:
        """The stream that is current, of products."""
        return self.module.current_stream(self.index)

    def event(self, index: int, stream: Any) -> Any:
        """After what has been queued to a stream."""
        while len(self.events) <= index:
            self.events.append(self.module.Event())
        event = self.events[index]
        event.record(stream)
        return event

    @contextmanager
    def copies(self, after: Any, current: Any) -> Iterator[None]:
        """Queue what runs inside to the stream of copies, behind an event."""
        self.switch(self.stream)
        try:
            after.wait(self.stream)
            yield
        finally:
            self.switch(current)


_beside = functools.cache(_Beside)


class _Arrivals:
    """An all-gather of some tensors, each a ``shape`` to ``[R, *shape]``, under way.

    Args:
        near: of the ranks.
        mine: this rank's.
        first: how many of them are waited for rank by rank; the others come behind these.
        keep: whether this rank's own of the first are wanted, too.
    """

    def __init__(
        self, near: Window, mine: Sequence[Tensor], first: int, *, keep: bool = False
    ) -> None:
        starts, start = [], 0
        for one in mine:
            near.part(near.rank, start, one.shape, one.dtype).copy_(one)
            starts.append(start)
            start += _round_up(one.nbytes)
        self.whole = [one.new_empty((near.size, *one.shape)) for one in mine]
        self.arrived: dict[int, Any] = {}
        """The event by which a rank's first are there, by rank."""
        parts = [one.unbind() for one in self.whole]
        near.barrier()
        beside = _beside(mine[0].device)
        self.current = beside.current()
        ready, others = beside.event(0, self.current), _others(near)

        def fetch(rank: int, which: slice) -> None:
            for part, start, one in zip(parts[which], starts[which], mine[which], strict=True):
                own = rank == near.rank
                part[rank].copy_(one if own else near.part(rank, start, one.shape, one.dtype))

        with beside.copies(ready, self.current):
            for index, rank in enumerate(others if first else ()):
                fetch(rank, slice(first))
                self.arrived[rank] = beside.event(1 + index, beside.stream)
            for rank in (*others, near.rank) if first < len(mine) else ():
                fetch(rank, slice(first, None))
            if keep:
                fetch(near.rank, slice(first))
            self.last = beside.event(near.size, beside.stream)


def _others(near: Window) -> list[int]:
    """The other ranks, from the next on, so that no two ranks start with the same."""
    return [(near.rank + step) % near.size for step in range(1, near.size)]


def _gather_mm(
    operands: Sequence[Tensor],
    a_block: Sequence[int],
    b_block: Sequence[int],
    out_dtype: torch.dtype,
    fast_accum: bool,
    group: str,
    also: Sequence[Tensor],
    keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """``all_gather(a) @ b.T + bias``, ``[M, N]``, and what was gathered.

    Args:
        operands: of the same sizes on all ranks:

            - ``a``, ``[M / R, K]`` FP8, contiguous;
            - its scales, of (parts of) rows; or one of the whole, which is then equal on all ranks;
            - ``b``, ``[N, K]`` FP8, and its scales;
            - ``[N]``, if there is a bias.
        a_block: of the scales of ``a``.
        b_block: of those of ``b``.
        out_dtype: of the product.
        fast_accum: as that of ``scaled_mm``.
        group: name of the process group.
        also: up to two contiguous tensors to be gathered meanwhile, of the same sizes on all ranks.
        keep: return the gathered ``a``.

    Returns:
        - the product;
        - with ``keep``, the gathered ``a``, ``[M, K]``, and its scales;
        - ``[R, *shape]`` of each of ``also``.
    """
    q, scale, *b = operands
    ranks, by_row = group_named(group), a_block[0] != -1
    turned = by_row and scale.shape[1] > 1 and scale.stride(0) == 1
    mine = [q]
    if by_row:
        mine.append((scale.t() if turned else scale).contiguous())
    first = len(mine)
    mine += also
    near = window_of(ranks, q.device, _room(mine))
    me, size, arrivals = ranks.rank(), ranks.size(), None
    order: Sequence[int] = [rank for rank in range(size) if rank != me]
    if near is None:
        whole = [_gathered(one, ranks) for one in mine]
    else:
        near.begin(q.device)
        arrivals = _Arrivals(near, mine, first, keep=keep)
        whole, order = arrivals.whole, _others(near)

    (rows, K), N = q.shape, b[0].shape[0]
    y = q.new_empty((size, rows, N), dtype=out_dtype)
    outs, codes = y.unbind(), whole[0].unbind()
    scales = whole[1].unbind() if by_row else ()
    how = a_block, b[0], b[1], b_block, b[2] if len(b) > 2 else None, fast_accum
    scaled_mm_into(outs[me], q, scale, *how)
    for rank in order:
        if arrivals is not None:
            arrivals.arrived[rank].wait(arrivals.current)
        its_scale = scale
        if by_row:
            its_scale = scales[rank].t() if turned else scales[rank]
        scaled_mm_into(outs[rank], codes[rank], its_scale, *how)
    if arrivals is not None:
        arrivals.last.wait(arrivals.current)
    all_codes = all_scales = None
    if keep:
        all_codes, all_scales = whole[0].view(size * rows, K), scale.clone()
        if by_row:
            by_column = whole[1].transpose(0, 1).flatten(1).t() if turned else None
            all_scales = whole[1].flatten(0, 1) if by_column is None else by_column
    rest = [*whole[first:], None, None]
    return y.view(size * rows, N), all_codes, all_scales, rest[0], rest[1]


def _mm_scatter(
    operands: Sequence[Tensor],
    a_block: Sequence[int],
    b_block: Sequence[int],
    out_dtype: torch.dtype,
    fast_accum: bool,
    group: str,
    also: Sequence[Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """This rank's rows, ``[M / R, N]``, of the sum over ranks of ``a @ b.T + bias``.

    Args:
        operands: of the same sizes on all ranks:

            - ``a``, ``[M, K]`` FP8, contiguous, M divisible by R;
            - its scales, of (parts of) rows, or of the whole;
            - ``b``, ``[N, K]`` FP8, and its scales;
            - ``[N]``, if there is a bias.
        a_block: of the scales of ``a``.
        b_block: of those of ``b``.
        out_dtype: of the products, which are sent, and of their sum.
        fast_accum: as that of ``scaled_mm``.
        group: name of the process group.
        also: up to two contiguous tensors to be gathered meanwhile, of the same sizes on all ranks.

    Returns:
        - the sum;
        - ``[R, *shape]`` of each of ``also``.
    """
    q, scale, *b = operands
    ranks, (M, K), N = group_named(group), q.shape, b[0].shape[0]
    size, first = ranks.size(), _room(also)
    rows, how = M // size, (a_block, b[0], b[1], b_block, b[2] if len(b) > 2 else None, fast_accum)

    def multiply(out: Tensor, start: int) -> None:
        here = slice(start, start + out.shape[0])
        scaled_mm_into(out, q[here], scale if a_block[0] == -1 else scale[here], *how)

    near = window_of(ranks, q.device, first + M * N * out_dtype.itemsize)
    if near is None:
        partial = q.new_empty((M, N), dtype=out_dtype)
        multiply(partial, 0)
        total, gathered = _scattered(partial, ranks), [_gathered(one, ranks) for one in also]
    else:
        near.begin(q.device)
        gathered = _Arrivals(near, also, 0).whole if also else []
        landing = near.part(near.rank, first, (size, rows, N), out_dtype).unbind()
        beside = _beside(q.device)
        current = beside.current()
        part = rows // 2 if K <= _SMALL_K and rows % 256 == 0 else rows
        kept, sent = [], None
        for rank in _others(near):
            theirs = near.part(rank, first, (size, rows, N), out_dtype)[near.rank]
            for start in range(0, rows, part):
                out = q.new_empty((part, N), dtype=out_dtype)
                multiply(out, rank * rows + start)
                kept.append(out)  # until the copies have been waited for
                with beside.copies(beside.event(0, current), current):
                    (theirs if part == rows else theirs[start : start + part]).copy_(out)
                    sent = beside.event(1, beside.stream)
        multiply(landing[near.rank], near.rank * rows)
        if sent is not None:
            sent.wait(current)
        near.barrier()
        total = torch.add(*landing) if size == 2 else torch.stack(landing).sum(0)
    rest = [*gathered, None, None]
    return total, rest[0], rest[1]


def _gathered(one: Tensor, ranks: Any) -> Tensor:
    """``[R, *shape]``, by a collective."""
    size = ranks.size()
    return all_gathered(one, size, ranks.group_name).view(size, *one.shape)


def _scattered(partial: Tensor, ranks: Any) -> Tensor:
    """This rank's rows of the sum, by a collective."""
    ops = torch.ops._c10d_functional
    total: Tensor = ops.wait_tensor(
        ops.reduce_scatter_tensor(partial, "sum", ranks.size(), ranks.group_name)
    )
    return total


def _like_gather_mm(of: Any) -> tuple[Tensor | None, ...]:
    (q, scale, b, *_), size = of.operands, group_named(of.group).size()
    y = q.new_empty((size * q.shape[0], b.shape[0]), dtype=of.out_dtype)
    if not of.keep:
        return y, None, None, *_like_rest(of, size)
    whole, whole_scale = q.new_empty((size * q.shape[0], q.shape[1])), scale.clone()
    if of.a_block[0] != -1:
        count, blocks = size * scale.shape[0], scale.shape[1]
        whole_scale = scale.new_empty((count, blocks))
        if blocks > 1 and scale.stride(0) == 1:
            whole_scale = scale.new_empty((blocks, count)).t()
    return y, whole, whole_scale, *_like_rest(of, size)


def _like_mm_scatter(of: Any) -> tuple[Tensor | None, ...]:
    (q, _, b, *_), size = of.operands, group_named(of.group).size()
    total = q.new_empty((q.shape[0] // size, b.shape[0]), dtype=of.out_dtype)
    return total, *_like_rest(of, size)


def _like_rest(of: Any, size: int) -> list[Tensor | None]:
    whole = [one.new_empty((size, *one.shape)) for one in of.also]
    return [*whole, None, None][:2]


def _flops_of_gather(operands: Any, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    return 2 * math.prod(out_shape[0]) * operands[0][1]


def _flops_of_scatter(operands: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(operands[0]) * operands[2][0]


gather_mm_op = declare(
    _gather_mm, name="gather_mm", outputs=_like_gather_mm, flops=_flops_of_gather
)
mm_scatter_op = declare(
    _mm_scatter, name="mm_scatter", outputs=_like_mm_scatter, flops=_flops_of_scatter
)


def _called(function: Callable[..., Any], op: Callable[..., Any]) -> Callable[..., Any]:
    """The op where something sees ops; else the function, without torch's dispatcher."""

    def call(*args: Any) -> Any:
        seen = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
        return op(*args) if seen else function(*args)

    return call


gather_mm = _called(_gather_mm, gather_mm_op)
mm_scatter = _called(_mm_scatter, mm_scatter_op)


def _room(tensors: Sequence[Tensor]) -> int:
    """Bytes that they take in a half."""
    return sum(_round_up(one.nbytes) for one in tensors)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
