"""Handlers of collectives on Float8Tensors: data and scales are sent, without requantization.

FP8 data is sent as bytes, since gloo does not know the FP8 formats. The bytes of a tensor are laid
out by *rows*, the slices along its first dimension: each row has its FP8 data and the scales and
amaxes of its blocks. So a tensor can be cut and joined along that dimension at any row, even inside
a block. Received rows keep their bytes in a block whose rows have the same scale; a block of rows
with different scales is requantized with a new scale.

Sums are taken of the dequantized values, in float32, and quantized.

Before a collective, ranks exchange descriptions of the tensors they send and expect: tensors that
are quantized differently have different numbers of bytes, and ranks would wait forever. A rank also
reports why its tensor cannot be written to, so all ranks raise and nothing is sent. The exceptions
are functional collectives, which compiled graphs hold, and point-to-point calls: the receiver
raises before it posts a receive, but the sender does not learn of that, and tensors that are
quantized differently are not detected before the messages arrive.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import ScriptObject, Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from float8lab.formats import Float8Spec
from float8lab.tensor import blocks
from float8lab.tensor.dispatch import implements, overloads
from float8lab.tensor.float8_tensor import Float8Tensor
from float8lab.tensor.views import cut
from float8lab.tensor.window import merge_into

if dist.is_available():
    import torch.distributed._functional_collectives  # defines ops that are handled below

__all__: list[str] = []

aten = torch.ops.aten
c10d = torch.ops.c10d
functional = torch.ops._c10d_functional

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
Tensors = list[Float8Tensor]
"""The tensors that a rank gets or sends in a collective of lists."""
_Started = tuple[object, ScriptObject] | ScriptObject | None
"""The result of a collective op: its outputs and a work handle, or only the handle, which is None
for an op that torch coalesces."""


# Tensors as rows of bytes.


def _with_rows(x: AnyTensor) -> AnyTensor:
    """Return the tensor itself, or a scalar as a tensor with one row."""
    return x if x.ndim else aten.view.default(x, (1,))


def _width(x: Float8Tensor) -> int:
    """Return the number of bytes per row."""
    return math.prod(x.shape[1:]) + 2 * 4 * math.prod(x.spec.scale_shape(tuple(x.shape))[1:])


def _pack(x: Float8Tensor) -> Tensor:
    """Copy a tensor to rows of bytes, ``[rows, _width(x)]`` in uint8."""
    x._refresh()  # dispatch does not refresh views in lists of lists
    x = cut(x, (1, *x.spec.block[1:]))
    scales = (t.clone(memory_format=torch.contiguous_format) for t in (x.scale, x.amax))
    fields = (*scales, x.qdata)
    sizes = [math.prod(t.shape[1:]) * t.element_size() for t in fields]
    rows = [t.view(torch.uint8).reshape(x.shape[0], n) for t, n in zip(fields, sizes, strict=True)]
    return torch.cat(rows, 1)


def _unpack(data: Tensor, like: Float8Tensor) -> Float8Tensor:
    """Make a Float8Tensor like ``like`` from the rows of ``_pack``; each block is within a row."""
    spec = replace(like.spec, block=(1, *like.spec.block[1:]))
    shape = (data.shape[0], *like.shape[1:])
    scales = spec.scale_shape(shape)
    per_row = 4 * math.prod(scales[1:])
    columns = data.split([per_row, per_row, data.shape[1] - 2 * per_row], 1)
    # Copies, since bytes can only be viewed as float32 from an address that is a multiple of 4.
    scale, amax, q = (t.clone(memory_format=torch.contiguous_format) for t in columns)
    scale, amax = (t.view(torch.float32).reshape(scales) for t in (scale, amax))
    return Float8Tensor._make(q.view(spec.fp8_dtype).reshape(shape), scale, amax, spec, like.dtype)


def _in_blocks(x: Float8Tensor, block: tuple[int, ...]) -> Float8Tensor:
    """Change the block of a tensor; a new block may join several old blocks or parts of them.
    A block whose elements share a scale keeps that scale and its bytes; others are requantized."""
    if x.spec.block == block:
        return x
    elements = cut(x, (1,) * x.ndim)
    scale, amax = (blocks.block_amax(t, block) for t in (elements.scale, elements.amax))
    is_other = elements.scale != blocks.expand_scale(scale, block, x.shape)
    differ = blocks.block_amax(is_other.float(), block) > 0
    buffers = torch.empty_like(x.qdata), torch.ones_like(scale), torch.zeros_like(amax)
    result = Float8Tensor._make(*buffers, replace(x.spec, block=block), x.dtype)
    values = blocks.dequantize_blocks(x.qdata, x.scale, x.spec, torch.float32)
    everywhere = torch.ones_like(values, dtype=torch.bool)
    merge_into(result, values, everywhere, scale=scale.masked_fill(differ, 0.0), amax=amax)
    return result


@torch.no_grad()
def _receive(tensors: Sequence[Tensor], received: Sequence[Tensor]) -> None:
    """Write to each tensor its number of rows from the received bytes."""
    for x, data in zip(tensors, received, strict=True):
        assert isinstance(x, Float8Tensor), "ranks have agreed on that"
        width = _width(x)
        rows = _unpack(data.view(-1)[: x.shape[0] * width].view(x.shape[0], width), x)
        x.copy_(_in_blocks(rows, x.spec.block))


def _padded(data: Tensor, size: int) -> Tensor:
    """Append zero bytes up to ``size``, since backends want the same size from all ranks."""
    return torch.nn.functional.pad(data.view(-1), (0, size - data.numel()))


# Agreement between ranks, and work that is still running.


def _rank_and_size(group: ScriptObject) -> tuple[int, int]:
    ranks = dist.ProcessGroup.unbox(group)
    return ranks.rank(), ranks.size()


_NOTHING = "nothing"


def _text(x: Tensor, shape: Sequence[int] | None = None) -> str:
    """Describe a tensor, or some of its rows, for comparison between sender and receiver."""
    stored = f" as {x.spec}" if isinstance(x, Float8Tensor) else ", not quantized"
    return f"{x.dtype} {tuple(x.shape if shape is None else shape)}{stored}"


def _refusal(x: Tensor) -> str:
    """Say why a tensor cannot be written to; return an empty string if it can."""
    if not isinstance(x, Float8Tensor):
        return ""  # an ordinary tensor can be written to, or ``_agree`` refuses it
    if x._window is not None and x._window.base is None:
        return "a view that has lost its base in a compiled function"
    if torch._debug_has_internal_overlap(x.qdata) == 1:
        return "a view whose elements share memory"
    return ""


def _written(text: str, *tensors: Tensor) -> str:
    """Return ``text``, which describes the expected tensor, or say why it cannot be written to."""
    refusals = filter(None, map(_refusal, tensors))
    return next((f"no tensor, for {refusal}," for refusal in refusals), text)


def _texts(x: Tensor, world: int, name: str, splits: Sequence[int] = ()) -> list[str]:
    """Return ``_text`` of the rows for each rank: ``splits`` rows, or else equally many."""
    rows = x.shape[0]
    if not splits and rows % world == 0:
        splits = [rows // world] * world
    if len(splits) != world or sum(splits) != rows:
        return [f"parts {list(splits)} of the {rows} rows of {name}"] * world
    return [_text(x, (n, *x.shape[1:])) for n in splits]


def _agree(group: ScriptObject, sends: list[str], expects: list[str], size: int = 0) -> int:
    """Return the largest ``size`` of all ranks; raise unless each sends what others expect."""
    ranks = dist.ProcessGroup.unbox(group)
    if dist.get_backend(ranks) == "fake":  # torch's backend that simulates ranks in one process
        return size
    claims: list[tuple[list[str], list[str], int]] = [(sends, expects, size)] * ranks.size()
    dist.all_gather_object(claims, claims[0], ranks)
    for source, (sent, _, _) in enumerate(claims):
        for target, (_, expected, _) in enumerate(claims):
            if sent[target] != expected[source]:
                raise ValueError(
                    f"the tensor that rank {source} of the group sends to rank {target} must be "
                    f"the one expected there; got {sent[target]} sent, {expected[source]} "
                    "expected. Quantize both alike, with equal shapes."
                )
    return max(size for _, _, size in claims)


# Torch may be built without distributed support and its base class.
class _Work(dist.Work if dist.is_available() else object):  # type: ignore[misc]  # dynamic base
    """The works of several ops as one, and a function to run after them.

    Torch passes a work through C++ to the caller, and drops its Python half unless something holds
    it. ``latest`` holds it until the next work is made or this one has been waited for.
    """

    latest = threading.local()

    def __init__(
        self, results: Iterable[_Started], finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        handles = (result[1] if isinstance(result, tuple) else result for result in results)
        works = (dist.Work.unbox(handle) for handle in handles if handle is not None)
        # NCCL's handle of an op that the host need not wait for holds no work.
        self.works = [work for work in works if work is not None]
        self.finish = finish
        self.source = -1
        self.latest.work = self

    def wait(self, *timeout: timedelta) -> bool:
        for work in self.works:
            work.wait(*timeout)
        finish, self.works, self.finish = self.finish, [], None
        if finish is not None:
            finish()
        if getattr(self.latest, "work", None) is self:
            self.latest.work = None
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works) and self.wait()

    def _source_rank(self) -> int:
        return self.source


# Collectives in place.


@implements(*overloads("broadcast_", namespace=c10d))
def _broadcast(
    op: OpOverload, tensors: Tensors, group: ScriptObject, root: int, *args: object
) -> tuple[Tensors, ScriptObject]:
    (x,) = map(_with_rows, tensors)
    me, world = _rank_and_size(group)
    text = _text(x) if me == root else _written(_text(x), x)
    expected = [text if rank == root else _NOTHING for rank in range(world)]
    _agree(group, [expected[me]] * world, expected)
    data = _pack(x)
    result = op([data], group, root, *args)
    finish = None if me == root else partial(_receive, [x], [data])
    return tensors, _Work([result], finish).boxed()


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Return the bytes of each tensor; 0 for a tensor not in FP8, which ``_agree`` refuses."""
    return [x.shape[0] * _width(x) if isinstance(x, Float8Tensor) else 0 for x in tensors]


@implements(*overloads("allgather_", "gather_", namespace=c10d))
def _gather_list(
    op: OpOverload, outputs: list[Tensors], inputs: Tensors, group: ScriptObject, *args: object
) -> object:
    """Gather on every rank, or on the root rank, which is then the first of ``args``."""
    (x,), root = map(_with_rows, inputs), None if op is c10d.allgather_.default else args[0]
    targets = [_with_rows(out) for out in outputs[0]] if outputs else []
    _, world = _rank_and_size(group)
    sends = [_text(x) if root in (None, rank) else _NOTHING for rank in range(world)]
    expects = [_written(_text(target), target) for target in targets] or [_NOTHING] * world
    size = _agree(group, sends, expects, max(_sizes([x])))
    received = [torch.empty(size, dtype=torch.uint8, device=x.device) for _ in targets]
    result = op([received] if outputs else [], [_padded(_pack(x), size)], group, *args)
    work = _Work([result], partial(_receive, targets, received)).boxed()
    return (outputs, work) if root is None else work


@implements(*overloads("scatter_", namespace=c10d))
def _scatter_list(
    op: OpOverload, outputs: Tensors, inputs: list[Tensors], group: ScriptObject, root: int,
    *args: object,
) -> tuple[Tensors, ScriptObject]:  # fmt: skip
    (x,) = map(_with_rows, outputs)
    sources = [_with_rows(source) for source in inputs[0]] if inputs else []
    if isinstance(x, Float8Tensor):  # shards of one tensor may have cut blocks at their edges
        sources = tree_map_only(Float8Tensor, partial(_in_blocks, block=x.spec.block), sources)
    _, world = _rank_and_size(group)
    sends = list(map(_text, sources)) or [_NOTHING] * world
    expects = [_written(_text(x), x) if rank == root else _NOTHING for rank in range(world)]
    size = _agree(group, sends, expects, max(_sizes([x])))
    received = torch.empty(size, dtype=torch.uint8, device=x.device)
    data = [[_padded(_pack(source), size) for source in sources]] if inputs else []
    result = op([received], data, group, root, *args)
    return outputs, _Work([result], partial(_receive, [x], [received])).boxed()


@implements(*overloads("alltoall_", namespace=c10d))
def _all_to_all_list(
    op: OpOverload, outputs: Tensors, inputs: Tensors, group: ScriptObject, *args: object
) -> tuple[Tensors, ScriptObject]:
    """Exchange lists as one tensor of bytes, since gloo has no all-to-all of lists."""
    sources, targets = ([_with_rows(x) for x in tensors] for tensors in (inputs, outputs))
    _agree(group, list(map(_text, sources)), [_written(_text(x), x) for x in targets])
    sent, expected = _sizes(sources), _sizes(targets)
    data = torch.cat([_pack(x).view(-1) for x in sources])
    received = data.new_empty(sum(expected))
    result = c10d.alltoall_base_.default(received, data, group, expected, sent, *args)
    return outputs, _Work([result], partial(_receive, targets, received.split(expected))).boxed()


@implements(*overloads("_allgather_base_", namespace=c10d))
def _all_gather_base(
    op: OpOverload, output: Tensor, x: Float8Tensor, group: ScriptObject, *args: object
) -> tuple[Tensor, ScriptObject]:
    _, world = _rank_and_size(group)
    if output.ndim > x.ndim > 0:  # the output has an extra dimension of ranks
        out, expects = output.flatten(0, 1), [_text(target) for target in output]
    else:
        out, x = _with_rows(output), _with_rows(x)
        expects = _texts(out, world, "the output")
    _agree(group, [_text(x)] * world, [_written(text, out) for text in expects])
    data = _pack(x)
    received = data.new_empty(out.shape[0], data.shape[1])
    result = op(received, data, group, *args)
    return output, _Work([result], partial(_receive, [out], [received])).boxed()


@implements(*overloads("alltoall_base_", namespace=c10d))
def _all_to_all_base(
    op: OpOverload, out: Float8Tensor, x: Float8Tensor, group: ScriptObject,
    out_splits: Sequence[int], in_splits: Sequence[int], *args: object,
) -> ScriptObject:  # fmt: skip
    _, world = _rank_and_size(group)
    sends = _texts(x, world, "the input", in_splits)
    expects = [_written(text, out) for text in _texts(out, world, "the output", out_splits)]
    _agree(group, sends, expects)
    data = _pack(x)
    received = data.new_empty(out.shape[0], data.shape[1])
    result = op(received, data, group, out_splits, in_splits, *args)
    return _Work([result], partial(_receive, [out], [received])).boxed()


# Collectives that sum.


def _value(x: Tensor, shape: Sequence[float] | None = None) -> str:
    """Return ``_text`` for collectives of values, which send a Float8Tensor in float32."""
    dtype = torch.float32 if isinstance(x, Float8Tensor) else x.dtype
    return f"{dtype} {tuple(x.shape if shape is None else shape)}"


def _reduce_values(
    op: OpOverload, args: Sequence[object], written: Sequence[Tensor], *tensors: object
) -> ScriptObject:
    """Run a collective on values in float32; quantize the results when the returned work is done.

    Args:
        op: the collective, which takes ``tensors`` without Float8Tensors, and ``args``.
        written: the tensors that the collective writes.
        tensors: nested lists of tensors.
    """
    values = {
        id(x): blocks.dequantize_blocks(x.qdata, x.scale, x.spec, torch.float32)
        for x in tree_leaves(tensors)
        if isinstance(x, Float8Tensor)
    }
    result = op(*tree_map_only(Float8Tensor, lambda x: values[id(x)], tensors), *args)

    def finish() -> None:
        for x in written:
            if isinstance(x, Float8Tensor):
                x.requantize_(values[id(x)])

    return _Work([result], finish).boxed()


@implements(*overloads("allreduce_", "allreduce_coalesced_", "reduce_", namespace=c10d))
def _reduce(op: OpOverload, tensors: Tensors, group: ScriptObject, *args: object) -> object:
    """Sum on every rank, or on the root rank, which is then the second of ``args``."""
    me, world = _rank_and_size(group)
    root = args[1] if op is c10d.reduce_.default else None
    text, gets = "; ".join(map(_value, tensors)), root in (None, me)
    sends = [text if root in (None, rank) else _NOTHING for rank in range(world)]
    _agree(group, sends, [_written(text, *tensors) if gets else _NOTHING] * world)
    work = _reduce_values(op, (group, *args), tensors if gets else [], tensors)
    return (tensors, work) if op is c10d.allreduce_.default else work


@implements(*overloads("reduce_scatter_", namespace=c10d))
def _reduce_scatter_list(
    op: OpOverload, outputs: Tensors, inputs: list[Tensors], group: ScriptObject, *args: object
) -> tuple[Tensors, ScriptObject]:
    _, world = _rank_and_size(group)
    _agree(group, list(map(_value, inputs[0])), [_written(_value(outputs[0]), *outputs)] * world)
    return outputs, _reduce_values(op, (group, *args), outputs, outputs, inputs)


@implements(*overloads("_reduce_scatter_base_", namespace=c10d))
def _reduce_scatter_base(
    op: OpOverload, out: Tensor, x: Tensor, group: ScriptObject, *args: object
) -> tuple[Tensor, ScriptObject]:
    _, world = _rank_and_size(group)
    expected = _written(_value(out, (world * out.numel(),)), out)
    _agree(group, [_value(x, (x.numel(),))] * world, [expected] * world)
    return out, _reduce_values(op, (group, *args), [out], out, x)


_SINGLE = {
    "allgather_coalesced_": "allgather_",
    "allgather_into_tensor_coalesced_": "_allgather_base_",
    "reduce_scatter_tensor_coalesced_": "_reduce_scatter_base_",
}
"""Maps a collective of many tensors to the collective of one tensor."""


@implements(*overloads(*_SINGLE, namespace=c10d))
def _run_each(
    op: OpOverload, outputs: list[Tensors] | Tensors, inputs: Tensors, group: ScriptObject,
    *args: object,
) -> ScriptObject:  # fmt: skip
    """Run the collective of one tensor for each pair of output and input."""
    name = op._schema.name.split("::")[1]
    pairs: Iterable[tuple[object, object]] = zip(outputs, inputs, strict=True)
    if name == "allgather_coalesced_":  # its outputs are lists by rank
        columns = zip(*outputs, strict=True)
        pairs = (([list(outs)], [x]) for outs, x in zip(columns, inputs, strict=True))
    single = getattr(c10d, _SINGLE[name]).default
    # Not a list: the next call of ``single`` would drop the Python half of a work not yet unboxed.
    return _Work(single(out, x, group, *args) for out, x in pairs).boxed()


# Point to point. Data and scales are sent in the order in which ``quantize`` stores them, so such a
# tensor is sent and received without a copy. Empty tensors are not sent.


def _wire_buffers(x: Float8Tensor) -> list[Tensor]:
    """Return views of the tensors to send; they are contiguous if ``quantize`` made ``x``."""
    scales = (_in_stored_order(t, x.spec) for t in (x.scale, x.amax))
    return [t for t in (*scales, x.qdata.view(torch.uint8)) if t.numel()]


def _in_stored_order(scales: Tensor, spec: Float8Spec) -> Tensor:
    """View scales so that a row-by-row walk visits them in the order ``quantize`` stores them."""
    return scales.movedim(-1, 0) if blocks.stores_scales_by_column(spec) else scales


@implements(*overloads("send", namespace=c10d))
def _send(
    op: OpOverload, tensors: Tensors, group: ScriptObject, target: int, tag: int
) -> ScriptObject:
    buffers = [t.contiguous() for x in tensors for t in _wire_buffers(x)]
    return _Work([op([t], group, target, tag) for t in buffers]).boxed()


def _buffer_like(x: Float8Tensor) -> Float8Tensor:
    """Make an empty tensor to receive into, stored as ``quantize`` stores it."""
    scale = x.scale.new_empty(_in_stored_order(x.scale, x.spec).shape)
    if blocks.stores_scales_by_column(x.spec):
        scale = scale.movedim(0, -1)
    return Float8Tensor(x.qdata.new_empty(x.shape), scale, torch.empty_like(scale), x.spec, x.dtype)


def _targets(tensors: Tensors, group: ScriptObject) -> tuple[list[Tensor], Callable[[], None]]:
    """Return contiguous tensors to receive into, and a function that copies them to ``tensors``.

    Coalesced calls have no work of their own after which to copy, so they need tensors that can be
    received in place.
    """
    # Torch holds back the calls of a group that it coalesces, and runs them as one.
    coalesces = dist.ProcessGroup.unbox(group) in dist.distributed_c10d._world.pg_coalesce_state
    buffers = []
    for x in tensors:
        is_buffer = x._window is None and all(t.is_contiguous() for t in _wire_buffers(x))
        if refusal := _refusal(x):
            raise ValueError(
                f"tensor must be one that can be written to; got {refusal}. Receive into a tensor "
                "that quantize() made."
            )
        if not is_buffer and coalesces:
            raise ValueError(
                "tensor must own its blocks and be stored as quantize() stores it to be received "
                "in a batch of coalesced calls; got a view or another layout. Receive into a "
                "tensor that quantize() made and copy_() it, or call irecv() alone."
            )
        buffers.append(x if is_buffer else _buffer_like(x))

    @torch.no_grad()
    def finish() -> None:
        for x, buffer in zip(tensors, buffers, strict=True):
            if buffer is not x:
                x.copy_(buffer)

    return [t for x in buffers for t in _wire_buffers(x)], finish


@implements(*overloads("recv_", namespace=c10d))
def _recv(
    op: OpOverload, tensors: Tensors, group: ScriptObject, source: int, tag: int
) -> ScriptObject:
    buffers, finish = _targets(tensors, group)
    return _Work([op([t], group, source, tag) for t in buffers], finish).boxed()


@implements(*overloads("recv_any_source_", namespace=c10d))
def _recv_any(op: OpOverload, tensors: Tensors, group: ScriptObject, tag: int) -> ScriptObject:
    """Wait for the first message, which identifies the rank that sends the other ones."""
    buffers, finish = _targets(tensors, group)
    if not buffers:
        raise ValueError(
            "src must be a rank for an empty tensor, of which no message comes; got None. Pass the "
            "rank that sends it."
        )
    message = dist.Work.unbox(op(buffers[:1], group, tag))
    message.wait()
    source, recv = message._source_rank(), c10d.recv_.default
    work = _Work([recv([t], group, source, tag) for t in buffers[1:]], finish)
    work.source = source
    return work.boxed()


# Functional collectives; they wait before they return.


@implements(*overloads("all_gather_into_tensor", namespace=functional))
def _all_gather(op: OpOverload, x: Float8Tensor, size: int, group: str) -> object:
    """Gather the rows of all ranks; a shard that shares no block with others keeps its blocks."""
    rows, block = x.shape[0] if x.ndim else 0, x.spec.block[0] if x.ndim else 0
    if rows == 0:
        return NotImplemented
    if block > 1 and rows % block:
        x = cut(x, (math.gcd(rows, block), *x.spec.block[1:]))

    def gather(t: Tensor) -> Tensor:
        return functional.wait_tensor(op(t.contiguous(), size, group))

    spec = replace(x.spec, block=(rows, *x.spec.block[1:])) if block == -1 else x.spec
    qdata = gather(x.qdata.view(torch.uint8)).view(x.qdata.dtype)
    scale, amax = gather(x.scale), gather(x.amax)
    if x.spec.per_tensor and bool((scale == scale[:1]).all()):
        scale, amax, spec = scale[:1], amax.amax(0, keepdim=True), x.spec
    return Float8Tensor._make(qdata, scale, amax, spec, x.dtype)


@implements(*overloads("wait_tensor", "_wrap_tensor_autograd", namespace=functional))
def _wait(op: OpOverload, x: Float8Tensor) -> Float8Tensor:
    return x.map(lambda t: t)  # the handler that gathered has waited


@implements(aten.constant_pad_nd.default)
def _pad(op: OpOverload, x: Float8Tensor, pad: Sequence[int], value: float = 0) -> object:
    """Append zeros along dimensions, as DTensor does to make all shards equally long."""
    if value != 0 or any(pad[::2]) or min(pad) < 0:
        return NotImplemented
    qdata = op(x.qdata.view(torch.uint8), pad, 0).view(x.qdata.dtype)
    counts = x.spec.scale_shape(tuple(qdata.shape))
    missing = [new - old for new, old in zip(counts, x.scale.shape, strict=True)]
    tail = [n for count in reversed(missing) for n in (0, count)]
    return x.replace(qdata=qdata, scale=op(x.scale, tail, 1.0), amax=op(x.amax, tail, 0.0))


@implements(*overloads("all_gather_into_tensor_coalesced", namespace=functional))
def _all_gather_many(op: OpOverload, tensors: Tensors, size: int, group: str) -> list[Tensor]:
    return [functional.all_gather_into_tensor(x, size, group) for x in tensors]


@implements(
    *overloads("all_gather_into_tensor_out", "reduce_scatter_tensor_out", namespace=functional)
)
def _into_out(op: OpOverload, x: Tensor, *args: object, out: Tensor) -> Tensor:
    name = op._schema.name.split("::")[1].removesuffix("_out")
    return out.copy_(functional.wait_tensor(getattr(functional, name)(x, *args)))


@implements(*overloads("broadcast", "broadcast_", namespace=functional))
def _broadcast_functional(op: OpOverload, x: Float8Tensor, source: int, group: str) -> Float8Tensor:
    result = x if op._schema.is_mutable else x.map(torch.empty_like)
    data = functional.wait_tensor(functional.broadcast(_pack(_with_rows(x)), source, group))
    _receive([_with_rows(result)], [data])
    return result


@implements(*overloads("all_to_all_single", namespace=functional))
def _all_to_all(
    op: OpOverload, x: Float8Tensor, out_splits: Sequence[int], in_splits: Sequence[int], group: str
) -> Float8Tensor:
    """Exchange rows with other ranks; each block of the result is within one row."""
    return _unpack(functional.wait_tensor(op(_pack(x), out_splits, in_splits, group)), x)


@implements(*overloads("all_reduce_", "all_reduce_coalesced_", namespace=functional))
def _all_reduce_functional(
    op: OpOverload, tensors: Tensor | list[Tensor], *args: object
) -> Tensor | list[Tensor]:
    for x in tensors if isinstance(tensors, list) else [tensors]:
        x.copy_(functional.wait_tensor(functional.all_reduce(x.dequantize(), *args)))
    return tensors


@implements(*overloads("isend", "irecv", "batch_p2p_ops", namespace=functional))
def _refuse(op: OpOverload, *args: object) -> object:
    raise NotImplementedError(
        f"{op} must not get a Float8Tensor. Use torch.distributed.isend and irecv outside "
        "torch.compile, or send .dequantize()."
    )
