"""GEMMs that run while their left operand arrives from other GPUs, or while their output leaves.

M rows of all ranks, N columns of the output, K contraction, R ranks. Each rank has a GPU that reads
and writes the memory of the others.

``gather_mm`` all-gathers the rows of ``a`` and multiplies by ``b``: the GEMM of this rank's rows
runs while other ranks' rows arrive. ``mm_scatter`` computes a GEMM and reduce-scatters its rows:
rows for other ranks are computed first, and leave while this rank's rows are computed. Both can
gather other tensors, the ``extras``, meanwhile. Tensors are copied from memory to memory, which
takes no multiprocessor from the GEMMs. Ranks without access to each other use collectives.

Note: the terms used here.

- *window*: memory of each rank that all ranks access, torch's symmetric memory, in two *halves*;
- *gather*: an all-gather in progress; *extras*: tensors gathered at the same time for a later GEMM;
- *landing*: the memory to which other ranks write their partial sums of this rank's rows.

Calls use the two halves alternately. Each call has a barrier of all ranks, after which

- an all-gather reads the tensors that other ranks have put into their own halves before it;
- a reduce-scatter reads the rows that other ranks have put into this rank's half before it.

A rank writes to the same half two calls later, after the barrier of the call in between. All ranks
have then reached that barrier, and have waited before it for what they read in the half. A CUDA
graph may be replayed between any two calls, so from the first captured call on each call has an
additional barrier before it. If a rank does not reach a barrier, the other ranks raise after the
timeout of their group.

Gathered operands have the same bytes as by a collective. Outputs do too if the GEMM of a row does
not depend on the other rows, as observed with cuBLASLt for all recipes. Sums of two ranks are the
same, too; sums over more ranks are rounded once instead of once per rank.
"""

from __future__ import annotations

import functools
import math
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from float8lab.distributed.ranks import all_gathered, all_objects, reduce_scattered
from float8lab.ops import round_up, scaled_mm_into
from float8lab.ops.declare import declare
from float8lab.ops.operand import Operand
from float8lab.recipes.reduction import group_named

__all__ = ["Window", "gather_mm", "is_worth_it", "mm_scatter", "sees_others", "window_of"]

_ALIGN = 512
"""Alignment in bytes of the tensors in a half; FP8 GEMMs need at least 16."""
_LEAST_GFLOP: dict[tuple[int, ...], int] = {(-1, -1): 100, (1, -1): 100, (1, 128): 200}
"""The size of this rank's GEMM above which overlap pays, by the left operand's block.

Measured on 2 H200s, with K and N of a Llama-3-8B layer of which each rank has half. With 16384 rows
(275 to 1924 GFLOP) plain collectives add 0.15 to 0.37 ms to the GEMMs, and overlapped ones 0.03 to
0.14 ms, unless the CPU takes longer. With 4096 rows (69 to 481 GFLOP) the CPU takes longer to queue
a call than the GPU takes for the smallest GEMM, especially with a scale for each block.
"""
_SMALL_K = 2048
"""The largest K for which the GEMM of another rank's rows is cut in two, since sending these rows
takes longer than computing this rank's rows."""


class Window:
    """Memory of each rank of a group that all ranks read and write.

    Args:
        nbytes: the size of a half.
        before: an earlier window that CUDA graphs may still use.
    """

    HALVES = 2
    of_groups: ClassVar[WeakKeyDictionary[dist.ProcessGroup, Window | None]] = WeakKeyDictionary()
    """The window of each process group; None if its ranks cannot access each other's memory."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, nbytes: int, before: Window | None
    ) -> None:
        self.rank, self.size, self.nbytes = group.rank(), group.size(), nbytes
        self.before = before
        self.memory = symmetric.empty(self.HALVES * nbytes, dtype=torch.uint8, device=device)
        self.handle = symmetric.rendezvous(self.memory, group.group_name)
        self.timeout_ms = int(1000 * group._get_backend(device).options._timeout.total_seconds())
        self.half, self.is_captured = 0, False
        self._views: dict[tuple[object, ...], Tensor] = {}

    def begin(self, device: torch.device) -> None:
        """Choose the half for a call."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.is_captured = True
        if self.is_captured:
            self.barrier()
        self.half = 1 - self.half

    def barrier(self) -> None:
        """Wait for all ranks on the current stream."""
        self.handle.barrier(channel=0, timeout_ms=self.timeout_ms)

    def view(self, rank: int, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """View a rank's memory as a tensor that begins ``start`` bytes into the current half."""
        key = (self.half, rank, start, shape, dtype)
        if key not in self._views:
            offset = (self.half * self.nbytes + start) // dtype.itemsize
            self._views[key] = self.handle.get_buffer(rank, tuple(shape), dtype, offset)
        return self._views[key]


def window_of(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> Window | None:
    """Return the window of a group with halves of at least ``nbytes``; None if it cannot have one.
    All ranks must call it together; it waits for all of them the first time."""
    window = Window.of_groups.get(group)
    if group in Window.of_groups and (window is None or window.nbytes >= nbytes):
        return window
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    torch.cuda.synchronize(device)
    before = window if window is not None and (window.is_captured or window.before) else None
    larger: Window | None = None
    if len(set(all_objects(socket.gethostname(), group))) == 1:
        with suppress(RuntimeError):  # a GPU or driver may not support symmetric memory
            step = max(1 << 21, 1 << (nbytes.bit_length() - 3))  # so not each size needs a new one
            larger = Window(group, device, round_up(nbytes, step), before)
        larger = larger if all(all_objects(larger is not None, group)) else None
    Window.of_groups[group] = larger
    return larger


def sees_others(group: dist.ProcessGroup, x: Tensor) -> bool:
    """Whether this rank may access other ranks' memory, as far as can be told without asking."""
    if x.is_cuda or torch.compiler.is_compiling():
        return x.is_cuda
    return Window.of_groups.get(group) is not None


def is_worth_it(M: int, N: int, K: int, a_block: Sequence[int]) -> bool:
    """Whether overlap is worth it for a GEMM of ``[M, K]`` and ``[N, K]``.

    >>> is_worth_it(16384, 3072, 4096, (1, -1)), is_worth_it(512, 3072, 4096, (1, -1))
    (True, False)
    """
    return 1e9 * _LEAST_GFLOP.get(tuple(a_block), 100) <= 2 * M * N * K


class _CopyStream:
    """A stream for copies that run beside the GEMMs of the current stream; a CPU has one order.

    Each call records the same events, and a wait refers to the latest record of an event. Creating
    an event takes the CPU as long as a copy, and so does asking for the current stream, which
    callers therefore do once.
    """

    def __init__(self, device: torch.device) -> None:
        self.module, self.index = torch.get_device_module(device), device.index
        self.stream: torch.Stream = self.module.Stream(priority=-1)
        self.set_stream = getattr(self.module, "set_stream", lambda stream: None)
        self.events: defaultdict[int, torch.Event] = defaultdict(self.module.Event)

    def current(self) -> torch.Stream:
        """Return the current stream, which runs the GEMMs."""
        return self.module.current_stream(self.index)

    def record(self, index: int, stream: torch.Stream) -> torch.Event:
        """Record an event after all work queued to a stream so far."""
        event = self.events[index]
        event.record(stream)
        return event

    @contextmanager
    def copies(self, after: torch.Event, current: torch.Stream) -> Iterator[None]:
        """Queue the copies of the ``with`` block to this stream, after an event."""
        self.set_stream(self.stream)
        try:
            after.wait(self.stream)
            yield
        finally:
            self.set_stream(current)


_copy_stream = functools.cache(_CopyStream)


class _CollectiveGather:
    """An all-gather of tensors by collectives, from ``shape`` to ``[R, *shape]`` each."""

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        name, size = group.group_name, group.size()
        self.gathered = [all_gathered(x[None], size, name) for x in tensors]
        self.order = [rank for rank in range(group.size()) if rank != group.rank()]
        """The other ranks, in the order in which their tensors arrive."""

    def wait(self, rank: int) -> None:
        """Make the current stream wait for a rank's tensors."""

    def wait_for_all(self) -> None:
        """Make the current stream wait for all tensors of all ranks."""


class _WindowGather(_CollectiveGather):
    """An all-gather through a window, by copies on a separate stream."""

    # The first ``early`` tensors are waited for rank by rank, and the others come after them. With
    # ``keep``, the early tensors of this rank are copied, too.

    def __init__(
        self, window: Window, tensors: Sequence[Tensor], early: int, *, keep: bool = False
    ) -> None:
        starts, start = [], 0
        for x in tensors:
            window.view(window.rank, start, x.shape, x.dtype).copy_(x)
            starts.append(start)
            start += round_up(x.nbytes, _ALIGN)
        self.gathered = [x.new_empty((window.size, *x.shape)) for x in tensors]
        self.order = _other_ranks(window)
        self._events: dict[int, torch.Event] = {}
        slots = [x.unbind() for x in self.gathered]
        window.barrier()
        stream = _copy_stream(tensors[0].device)
        self._current = stream.current()
        ready = stream.record(0, self._current)

        def copy_from(rank: int, run: slice) -> None:
            for slot, start, x in zip(slots[run], starts[run], tensors[run], strict=True):
                slot[rank].copy_(window.view(rank, start, x.shape, x.dtype))

        with stream.copies(ready, self._current):
            for index, rank in enumerate(self.order if early else ()):
                copy_from(rank, slice(early))
                self._events[rank] = stream.record(1 + index, stream.stream)
            for rank in (*self.order, window.rank) if early < len(tensors) else ():
                copy_from(rank, slice(early, None))
            if keep:
                copy_from(window.rank, slice(early))
            self._last = stream.record(window.size, stream.stream)

    def wait(self, rank: int) -> None:
        self._events[rank].wait(self._current)

    def wait_for_all(self) -> None:
        self._last.wait(self._current)


def _other_ranks(window: Window) -> list[int]:
    """Return the other ranks, starting after this one, so that no two ranks start with the same."""
    return [(window.rank + step) % window.size for step in range(1, window.size)]


def _mm_into(
    operands: Sequence[Tensor], a_block: Sequence[int], b_block: Sequence[int], fast_accum: bool
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return a function ``(out, a, a_scale)`` that writes the GEMM of some rows of ``a`` to out."""
    _, _, b, b_scale, *bias = operands
    constants = a_block, b, b_scale, b_block, next(iter(bias), None), fast_accum
    return lambda out, a, a_scale: scaled_mm_into(out, a, a_scale, *constants)


def _gather_mm(
    operands: Sequence[Tensor], a_block: Sequence[int], b_block: Sequence[int],
    out_dtype: torch.dtype, fast_accum: bool, group: str, extras: Sequence[Tensor],
    keep_gathered: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute ``all_gather(a) @ b.T + bias``, ``[M, N]``, and return it with gathered tensors.

    The operands are ``a``, ``[M / R, K]`` in FP8 and contiguous, its scales, ``b``, ``[N, K]`` in
    FP8, its scales, and ``[N]`` if there is a bias. ``a`` has scales of (parts of) rows, or one
    scale that is equal on all ranks. Up to two ``extras``, contiguous tensors, are gathered at the
    same time. All sizes are the same on all ranks. After the output come the gathered ``a``,
    ``[M, K]``, and its scales (None without ``keep_gathered``), and ``[R, *shape]`` of each extra.
    """
    q, scale, b, *_ = operands
    ranks, has_row_scales = group_named(group), a_block[0] != -1
    by_column = has_row_scales and scale.shape[1] > 1 and scale.stride(0) == 1
    tensors = [q]
    if has_row_scales:
        tensors.append((scale.t() if by_column else scale).contiguous())
    early = len(tensors)
    tensors += extras
    if (window := window_of(ranks, q.device, _window_bytes(tensors))) is None:
        arrivals = _CollectiveGather(tensors, ranks)
    else:
        window.begin(q.device)
        arrivals = _WindowGather(window, tensors, early, keep=keep_gathered)

    (rows, K), N, size = q.shape, b.shape[0], ranks.size()
    mm_into = _mm_into(operands, a_block, b_block, fast_accum)
    y = q.new_empty((size, rows, N), dtype=out_dtype)
    outs, all_q = y.unbind(), arrivals.gathered[0]
    mm_into(outs[ranks.rank()], q, scale)
    shards, scales = all_q.unbind(), [scale] * size
    if has_row_scales:
        scales = [x.t() if by_column else x for x in arrivals.gathered[1].unbind()]
    for rank in arrivals.order:
        arrivals.wait(rank)
        mm_into(outs[rank], shards[rank], scales[rank])
    arrivals.wait_for_all()
    y = y.view(size * rows, N)
    if not keep_gathered:
        return y, *(None, None), *_pair(arrivals.gathered[early:])
    gathered = Operand(all_q.view(size * rows, K), scale.clone())
    if by_column:
        gathered = gathered._replace(scale=arrivals.gathered[1].transpose(0, 1).flatten(1).t())
    elif has_row_scales:
        gathered = gathered._replace(scale=arrivals.gathered[1].flatten(0, 1))
    return y, *gathered, *_pair(arrivals.gathered[early:])


def _mm_scatter(
    operands: Sequence[Tensor], a_block: Sequence[int], b_block: Sequence[int],
    out_dtype: torch.dtype, fast_accum: bool, group: str, extras: Sequence[Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return this rank's rows ``[M / R, N]`` of the sum over ranks of ``a @ b.T + bias``.

    The arguments are those of ``_gather_mm``, but ``a`` is ``[M, K]``, M is divisible by R, and
    scales may differ between ranks. The partial sums that are sent, and their sum, have
    ``out_dtype``. The gathered ``[R, *shape]`` of each of ``extras`` follows the sum.
    """
    q, scale, b, *_ = operands
    ranks, (M, K), N = group_named(group), q.shape, b.shape[0]
    mm_into = _mm_into(operands, a_block, b_block, fast_accum)
    size, offset = ranks.size(), _window_bytes(extras)
    rows = M // size

    def mm_from(start: int, out: Tensor) -> None:
        run = slice(start, start + out.shape[0])
        mm_into(out, q[run], scale if a_block[0] == -1 else scale[run])

    if (window := window_of(ranks, q.device, offset + M * N * out_dtype.itemsize)) is None:
        partial_sum = q.new_empty((M, N), dtype=out_dtype)
        mm_from(0, partial_sum)
        shard = reduce_scattered(partial_sum, size, group)
        return shard, *_pair(_CollectiveGather(extras, ranks).gathered)
    window.begin(q.device)
    gathered = _WindowGather(window, extras, 0).gathered if extras else []
    landing = window.view(window.rank, offset, (size, rows, N), out_dtype).unbind()
    stream = _copy_stream(q.device)
    current = stream.current()
    step = rows // 2 if K <= _SMALL_K and rows % 256 == 0 else rows
    unsent, sent = [], None
    for rank in _other_ranks(window):
        remote = window.view(rank, offset, (size, rows, N), out_dtype)[window.rank]
        for start in range(0, rows, step):
            out = q.new_empty((step, N), dtype=out_dtype)
            mm_from(rank * rows + start, out)
            unsent.append(out)  # kept until the copies have been waited for
            with stream.copies(stream.record(0, current), current):
                (remote if step == rows else remote[start : start + step]).copy_(out)
                sent = stream.record(1, stream.stream)
    mm_from(window.rank * rows, landing[window.rank])
    if sent is not None:
        sent.wait(current)
    window.barrier()
    local_sum = torch.add(*landing) if size == 2 else torch.stack(landing).sum(0)
    return local_sum, *_pair(gathered)


def _pair(gathered: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return the two gathered extras, with None for missing ones."""
    data, scale, *_ = [*gathered, None, None]
    return data, scale


def _allocate_gather_mm(args: SimpleNamespace) -> tuple[Tensor | None, ...]:
    (q, scale, b, *_), size = args.operands, group_named(args.group).size()
    y = q.new_empty((size * q.shape[0], b.shape[0]), dtype=args.out_dtype)
    extras = _pair([x.new_empty((size, *x.shape)) for x in args.extras])
    if not args.keep_gathered:
        return y, *(None, None), *extras
    gathered = Operand(q.new_empty((size * q.shape[0], q.shape[1])), scale.clone())
    if args.a_block[0] != -1:
        rows, blocks = size * scale.shape[0], scale.shape[1]
        gathered = gathered._replace(scale=scale.new_empty((rows, blocks)))
        if blocks > 1 and scale.stride(0) == 1:
            gathered = gathered._replace(scale=scale.new_empty((blocks, rows)).t())
    return y, *gathered, *extras


def _allocate_mm_scatter(args: SimpleNamespace) -> tuple[Tensor | None, ...]:
    (q, _, b, *_), size = args.operands, group_named(args.group).size()
    shard = q.new_empty((q.shape[0] // size, b.shape[0]), dtype=args.out_dtype)
    return shard, *_pair([x.new_empty((size, *x.shape)) for x in args.extras])


def _declare(function: Callable[..., Any], **declaration: Any) -> Callable[..., Any]:
    """Declare an op, and return a function that calls it only if a mode or compiler is active."""
    op = declare(function, **declaration)

    def call(*args: object) -> object:
        is_watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
        return op(*args) if is_watched else function(*args)

    return call


gather_mm = _declare(
    _gather_mm, name="gather_mm", outputs=_allocate_gather_mm,
    flops=lambda operands, *_, out_shape, **__: 2 * math.prod(out_shape[0]) * operands[0][1],
)  # fmt: skip
mm_scatter = _declare(
    _mm_scatter, name="mm_scatter", outputs=_allocate_mm_scatter,
    flops=lambda operands, *_, **__: 2 * math.prod(operands[0]) * operands[2][0],
)  # fmt: skip


def _window_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes that tensors take in a half."""
    return sum(round_up(x.nbytes, _ALIGN) for x in tensors)
