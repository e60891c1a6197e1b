"""Products that run while their operand arrives from other GPUs, or while their result leaves.

M rows of all ranks, N columns of a product, K contraction, R ranks, each on a GPU that reads and
writes the others' memory.

``gather_mm`` is an all-gather of the rows of ``a`` and the product with ``b``: this rank's rows are
multiplied while the others' arrive. ``mm_scatter`` is a product and the reduce-scatter of its rows:
the others' rows are computed first, and leave while this rank's are computed. What travels is
copied from memory to memory, which takes no multiprocessor from the products.

Ranks copy through memory that all of them see, a ``Window`` of torch's symmetric memory. It has two
halves that calls take in turns, and a call has a barrier of all ranks, after which

- an all-gather reads what the others have put into their own half before it;
- a reduce-scatter reads what the others have put into this rank's half before it.

A rank writes to a half again two calls later, behind the barrier of the call between. So all ranks
have come that far, and before it waited for whatever they read in the half. A CUDA graph, which
replays between any two calls, has a half of its own and one more barrier ahead of each call. A rank
that does not come to a barrier makes an error of the others, after the timeout of their group.

The bytes of gathered operands are those of a collective. So are products where the GEMM gives a
row the same bits whatever rows are beside it, which was seen of cuBLASLt for all recipes; sums of
two ranks are, too, and those of more are rounded once, in place of once a rank.
"""

from __future__ import annotations

import functools
import socket
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from float8lab.ops import scaled_mm_into_op

__all__ = ["Window", "gather_mm", "is_worth_it", "mm_scatter", "window_of"]

_ALIGN = 512
"""Bytes between what lies in a half; FP8 products want at least 16."""
_LEAST_GFLOP = {(-1, -1): 100, (1, -1): 100, (1, 128): 200}
"""From which size of this rank's product on its overlap pays, by the left operand's block.

Measured on 2 H200s, K and N of a Llama-3-8B layer of which each rank has half. With 16384 rows (275
to 1924 GFLOP) plain collectives take 0.11 to 0.37 ms more than the products alone, overlapped ones
0.03 to 0.14. With 4096 rows (69 to 481 GFLOP) the CPU needs longer to queue a call than the GPU for
the smallest, most of all with scales for each block, of which cuBLASLt takes long to find a kernel.
"""
_SMALL_K = 4096
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

    HALVES = 3
    """Two in turns, and that of CUDA graphs."""
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
            self.barrier()
            self.half = 2
        else:
            self.half = 1 if self.half == 0 else 0

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
    if torch.cuda.is_current_stream_capturing():
        return None
    torch.cuda.synchronize(device)
    keep = found if found is not None and (found.is_captured or found.before) else None
    made: Window | None = None
    why: str | None = None
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    if len(set(hosts)) == 1:
        try:
            made = Window(group, device, 1 << (nbytes - 1).bit_length(), keep)
        except RuntimeError as error:  # a GPU or driver without it
            why = str(error)
        reasons: list[Any] = [None] * group.size()
        dist.all_gather_object(reasons, why, group=group)
        made = made if not any(reasons) else None
    Window.of_groups[group] = made
    return made


def is_worth_it(a_shape: Sequence[int], N: int, a_block: Sequence[int]) -> bool:
    """Whether overlap pays for a product of ``[M, K]`` and ``[N, K]``.

    >>> is_worth_it((16384, 4096), 3072, (1, -1)), is_worth_it((512, 4096), 3072, (1, -1))
    (True, False)
    """
    M, K = a_shape
    return 1e9 * _LEAST_GFLOP.get(tuple(a_block), 100) <= 2 * M * N * K


class _Beside:
    """A stream of copies beside the current one, in order; on a CPU there is one order anyway."""

    def __init__(self, device: torch.device) -> None:
        self.module = torch.get_device_module(device)
        self.stream = self.module.Stream(priority=-1)

    def event(self) -> Any:
        """After what has been queued to the current stream."""
        event = self.module.Event()
        event.record()
        return event

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Any) -> Any:
        """Copy the second of each pair to the first; returns the event of their arrival."""
        with self.module.stream(self.stream):
            after.wait()
            for to, what in pairs:
                to.copy_(what)
            return self.event()


_beside = functools.cache(_Beside)


class _Arrivals:
    """An all-gather under way of some tensors, each a ``shape`` to ``[R, *shape]``.

    The parts of this rank come last, and only if they are wanted.
    """

    def __init__(self, near: Window, mine: Sequence[Tensor], beside: Any) -> None:
        self.near, self.mine, self.beside = near, mine, beside
        self.starts, start = [], 0
        for one in mine:
            near.part(near.rank, start, one.shape, one.dtype).copy_(one)
            self.starts.append(start)
            start += _round_up(one.nbytes)
        near.barrier()
        self.ready = beside.event()
        self.whole = [one.new_empty((near.size, *one.shape)) for one in mine]

    def fetch(self, rank: int, which: slice) -> Any:
        """Copy what ``which`` are another rank's; returns the event of their arrival."""
        pairs = [
            (whole[rank], self.near.part(rank, start, one.shape, one.dtype))
            for whole, start, one in zip(
                self.whole[which], self.starts[which], self.mine[which], strict=True
            )
        ]
        return self.beside.copy(pairs, self.ready)

    def fill(self, which: slice) -> Any:
        """Copy what is of this rank."""
        pairs = [
            (whole[self.near.rank], one)
            for whole, one in zip(self.whole[which], self.mine[which], strict=True)
        ]
        return self.beside.copy(pairs, self.ready)


def _others(near: Window) -> list[int]:
    """The other ranks, from the next on, so that no two ranks start with the same."""
    return [(near.rank + step) % near.size for step in range(1, near.size)]


Operand = tuple[Tensor, Tensor]
"""FP8 data and decode scales."""
How = tuple[Sequence[int], Sequence[int], bool]
"""Blocks of both operands, and whether to accumulate fast."""


def gather_mm(
    group: Any,
    a: Operand,
    b: Operand,
    how: How,
    dtype: torch.dtype,
    bias: Tensor | None,
    *,
    keep: bool = False,
    also: Sequence[Tensor] = (),
) -> tuple[Tensor, Operand | None, list[Tensor]] | None:
    """``all_gather(a) @ b.T + bias``, ``[M, N]``; None if ranks do not see each other's memory.

    Args:
        group: the process group.
        a: ``[M / R, K]``, contiguous, the same size on all ranks; scales of (parts of) the rows, or
            one of the whole, which is then the same on all ranks.
        b: ``[N, K]``.
        how: the blocks of both, and whether to accumulate fast.
        dtype: of the product.
        bias: ``[N]`` or None.
        keep: return what was gathered.
        also: contiguous tensors to be gathered meanwhile, of the same size on all ranks.

    Returns:
        - the product;
        - with ``keep``, the gathered ``a``, ``[M, K]``, and its scales, else None;
        - ``[R, *shape]`` of each of ``also``.
    """
    (q, scale), device, by_row = a, a[0].device, how[0][0] != -1
    turned = by_row and scale.shape[1] > 1 and scale.stride(0) == 1
    operand = [q, *[(scale.t() if turned else scale).contiguous()] * by_row]
    near = window_of(group, device, _room([*operand, *also]))
    if near is None:
        return None
    near.begin(device)
    arrivals = _Arrivals(near, [*operand, *also], _beside(device))
    of_operand, of_rest = slice(0, len(operand)), slice(len(operand), None)
    events = [arrivals.fetch(rank, of_operand) for rank in _others(near)]
    last = events[-1] if events else None
    if also:
        for rank in _others(near):
            arrivals.fetch(rank, of_rest)
        last = arrivals.fill(of_rest)
    if keep:
        last = arrivals.fill(of_operand)

    (rows, K), N, size = q.shape, b[0].shape[0], near.size
    y = q.new_empty((size, rows, N), dtype=dtype)
    _multiply(y[near.rank], a, b, how, bias)
    codes, *scales = arrivals.whole[of_operand]
    for rank, arrived in zip(_others(near), events, strict=True):
        arrived.wait()
        if by_row:
            scale = scales[0][rank].t() if turned else scales[0][rank]
        _multiply(y[rank], (codes[rank], scale), b, how, bias)
    if last is not None:
        last.wait()
    whole = None
    if keep:
        if turned:
            scale = scales[0].transpose(0, 1).flatten(1).t()
        elif by_row:
            scale = scales[0].flatten(0, 1)
        whole = codes.view(size * rows, K), scale
    return y.view(size * rows, N), whole, arrivals.whole[of_rest]


def mm_scatter(
    group: Any,
    a: Operand,
    b: Operand,
    how: How,
    dtype: torch.dtype,
    bias: Tensor | None,
    *,
    also: Sequence[Tensor] = (),
) -> tuple[Tensor, list[Tensor]] | None:
    """This rank's rows, ``[M / R, N]``, of the sum over ranks of ``a @ b.T + bias``.

    None if ranks do not see each other's memory.

    Args:
        group: the process group.
        a: ``[M, K]``, contiguous, M divisible by R; scales of (parts of) the rows, or of the whole.
        b: ``[N, K]``.
        how: the blocks of both, and whether to accumulate fast.
        dtype: of the products, which are sent, and of their sum.
        bias: ``[N]`` or None.
        also: contiguous tensors to be gathered meanwhile, of the same size on all ranks.

    Returns:
        - the sum;
        - ``[R, *shape]`` of each of ``also``.
    """
    (q, scale), size, device = a, group.size(), a[0].device
    (M, K), N = q.shape, b[0].shape[0]
    rows, beside, first = M // size, _beside(device), _room(also)
    near = window_of(group, device, first + M * N * dtype.itemsize)
    if near is None:
        return None
    near.begin(device)
    gathered: list[Tensor] = []
    if also:
        arrivals = _Arrivals(near, also, beside)
        for rank in _others(near):
            arrivals.fetch(rank, slice(None))
        arrivals.fill(slice(None))
        gathered = arrivals.whole
    landing = near.part(near.rank, first, (size, rows, N), dtype)
    part = rows // 2 if K < _SMALL_K and rows % 256 == 0 else rows

    def multiply(out: Tensor, start: int) -> None:
        here = slice(start, start + out.shape[0])
        its_scale = scale if how[0][0] == -1 else scale[here]
        _multiply(out, (q[here], its_scale), b, how, bias)

    sent, kept = None, []
    for rank in _others(near):
        theirs = near.part(rank, first, (size, rows, N), dtype)[near.rank]
        for start in range(0, rows, part):
            out = q.new_empty((part, N), dtype=dtype)
            multiply(out, rank * rows + start)
            sent = beside.copy([(theirs[start : start + part], out)], beside.event())
            kept.append(out)  # until the copies have been waited for
    multiply(landing[near.rank], near.rank * rows)
    if sent is not None:
        sent.wait()
    near.barrier()
    return landing[0] + landing[1] if size == 2 else landing.sum(0), gathered


def _multiply(out: Tensor, a: Operand, b: Operand, how: How, bias: Tensor | None) -> None:
    scaled_mm_into_op(out, *a, how[0], *b, how[1], bias, how[2])


def _room(tensors: Sequence[Tensor]) -> int:
    """Bytes that they take in a half."""
    return sum(_round_up(one.nbytes) for one in tensors)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
