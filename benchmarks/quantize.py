"""The ops that cast to FP8: time, bandwidth, and share of what a plain copy reaches.

    python -m benchmarks.quantize [--model llama-8b] [--dtype bfloat16]

Needs a CUDA GPU. Each op is first compared with its reference in plain PyTorch, run on the same
GPU tensors: bytes and scales must be equal bit for bit, or no time is printed; other libraries'
casts are compared by their values. The bytes are those
that must move: each output written once, and each input read once, or twice where a scale depends
on a whole column or the whole tensor and is not given. The floor is these bytes at the rate of a
large copy. ``copy`` is a copy of this very matrix.

M rows, K columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import common, report
from benchmarks.peers import OtherCast, quantize_peers
from benchmarks.report import Row, Setting, Subject, Target
from benchmarks.shapes import MODELS, select
from float8lab import ops
from float8lab.formats import E4M3, E5M2, largest
from float8lab.ops import reference

__all__ = ["SUBJECT", "Case", "cases", "compare", "main", "measure", "rows"]

ALIGN = 16
_FAST = (Target("% of copy", ">=", 92.0),)
_CURRENT = (Target("% of copy", ">=", 90.0),)
TARGETS = {
    "cast tensor": _FAST,
    "cast pair": _FAST,
    "quantize 1x128": _FAST,
    "quantize pair 1x128": _FAST,
    "quantize tensor": _CURRENT,
    "quantize pair tensor": _CURRENT,
}
"""Delayed scaling casts, block scaling and current scaling quantize; a pair is with transpose."""

Outputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """An op on its inputs, and its reference."""

    name: str
    op: Callable[..., Outputs]
    reference: Callable[..., Outputs]
    arguments: tuple[Any, ...]
    inexact: tuple[int, ...] = ()
    """Outputs that are sums, whose order is free: compared by SQNR instead of bit for bit."""
    passes: int = 1
    """How often the inputs must be read."""

    def run(self) -> Outputs:
        return self.op(*self.arguments)

    def bytes_moved(self, outputs: Outputs) -> int:
        """Each input tensor ``passes`` times and each output once."""
        inputs = (argument for argument in self.arguments if isinstance(argument, Tensor))
        return self.passes * sum(t.nbytes for t in inputs) + sum(t.nbytes for t in _each(outputs))


def _each(outputs: Outputs) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


SUM_FLOOR_DB = 90.0
"""For float32 sums in another order."""
VALUES_FLOOR_DB = 25.0
"""For other libraries' casts, whose bytes may differ: e4m3 leaves 31.5 dB."""


def compare(case: Case) -> str | None:
    """What differs between an op and its reference; None if nothing does."""
    results, right = _each(case.op(*case.arguments)), _each(case.reference(*case.arguments))
    if len(results) != len(right):
        return f"wrong: {len(results)} outputs instead of {len(right)}"
    for index, (a, b) in enumerate(zip(results, right, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"wrong: output {index} is {a.dtype} {list(a.shape)}"
        if index in case.inexact:
            if not common.sqnr(a, b) >= SUM_FLOOR_DB:
                return f"wrong: output {index}, {common.sqnr(a, b):.1f} dB"
        elif unequal := int((_bytes(a) != _bytes(b)).sum()):
            return f"wrong: output {index}, {unequal} of {a.numel() * a.element_size()} bytes"
    return None


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def cases(x: Tensor) -> Iterable[Case]:
    """Every cast on one matrix, after a copy."""
    yield Case("copy", torch.clone, torch.clone, (x,))
    per_tensor, rule = (-1, -1), "fp32"
    blocks = {"tensor": (-1, -1), "row": (1, -1), "1x128": (1, 128), "128x128": (128, 128)}
    for name, block in blocks.items():
        arguments = (x, E4M3, block, rule, 0.0, ALIGN)
        passes = 2 if name == "tensor" else 1
        yield Case(
            f"quantize {name}", ops.quantize_op, reference.quantize, arguments, passes=passes
        )
    yield Case(
        "quantize MX 1x32", ops.quantize_op, reference.quantize, (x, E4M3, (1, 32), "e8m0", 0.0, 32)
    )
    pair = partial(Case, op=ops.quantize_pair_op, reference=reference.quantize_pair, inexact=(4,))
    for name, block in blocks.items():
        passes = 2 if -1 in block else 1
        yield pair(
            f"quantize pair {name}",
            arguments=(x, E4M3, block, rule, 0.0, ALIGN, False),
            passes=passes,
        )
    yield pair("quantize pair MX 1x32", arguments=(x, E4M3, (1, 32), "e8m0", 0.0, 32, False))
    yield pair(
        "quantize pair tensor + column sums",
        arguments=(x, E5M2, per_tensor, rule, 0.0, ALIGN, True),
        passes=2,
    )
    scale = reference.scale_from_amax(reference.amax(x, per_tensor), E4M3, "pow2")
    slot = torch.full((1,), ops.NO_DATA, device=x.device)
    given = (x, scale, slot, E4M3)
    yield Case("cast tensor", ops.cast_op, reference.cast, (*given, per_tensor, ALIGN))
    yield Case("cast pair", ops.cast_pair_op, reference.cast_pair, (*given, ALIGN, False), (2,))
    yield Case(
        "cast pair + column sums",
        ops.cast_pair_op,
        reference.cast_pair,
        (x, scale, slot, E5M2, ALIGN, True),
        (2,),
    )
    q, scale, _ = reference.quantize(x, E4M3, per_tensor, rule, 0.0, ALIGN)
    yield Case("transpose", ops.transpose_op, reference.transpose, (q, ALIGN))
    yield Case(
        "dequantize tensor",
        ops.dequantize_op,
        reference.dequantize,
        (q, scale, per_tensor, x.dtype),
    )
    yield Case("amax tensor", ops.amax_op, reference.amax, (x, per_tensor))


def measure(setting: Setting, table: str, case: Case) -> Row:
    """Check an op, then time it."""
    if refusal := compare(case):
        return setting.row(table, case.name, refusal=refusal)
    return setting.row(
        table,
        case.name,
        ms=setting.time(case.run).samples,
        floor_ms=setting.floor.move_ms(case.bytes_moved(case.run())),
        bytes=case.bytes_moved(case.run()),
        targets=TARGETS.get(case.name, ()),
    )


def amax_and_cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """What one writes in plain PyTorch: e4m3 per tensor, and the decode scale."""
    scale = x.abs().amax().float() / largest(E4M3)
    return (x.float() / scale).to(E4M3), scale


def measure_other(setting: Setting, table: str, name: str, x: Tensor, other: OtherCast) -> Row:
    """Check a cast of another library by its values, then time it."""
    gate = common.Gate({"values": x.float()}, VALUES_FLOOR_DB)
    cast = other.make()
    db = gate.measure({"values": other.values(cast(x))})
    if refusal := gate.refusal(db):
        return setting.row(table, name, refusal=refusal)
    moved = x.numel() * (other.passes * x.element_size() + other.written)
    return setting.row(
        table,
        name,
        ms=setting.time(lambda: cast(x)).samples,
        floor_ms=setting.floor.move_ms(moved),
        bytes=moved,
    )


def others(setting: Setting) -> dict[str, OtherCast]:
    """Casts that are not ours."""
    found = {}
    if setting.compile:
        found["torch.compile of amax and cast"] = OtherCast(
            lambda: torch.compile(amax_and_cast),
            lambda result: result[0].float() * result[1],
            passes=2,
        )
    return found | quantize_peers(setting.device)


def rows(setting: Setting, sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> Iterator[Row]:
    """Every cast on every matrix, after a copy of it."""
    generator = setting.generator()
    for M, K in sizes:
        x = torch.randn(M, K, generator=generator, device=setting.device).to(dtype)
        table = f"{M} x {K}, {str(dtype).removeprefix('torch.')}"
        for case in cases(x):
            yield setting.attempt(table, case.name, partial(measure, setting, table, case))
        for name, other in others(setting).items():
            run = partial(measure_other, setting, table, name, x, other)
            yield setting.attempt(table, name, run)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    sizes = dict.fromkeys((shape.M, shape.K) for shape in select(options.model))
    return rows(setting, list(sizes), getattr(torch, options.dtype))


SUBJECT = Subject(
    "quantize",
    "Quantize",
    __doc__,
    (
        report.NAME,
        report.TIME,
        report.FLOOR,
        report.Column("TB/s"),
        report.Column("% of copy", 0),
        report.TARGET,
    ),
    _rows,
    _options,
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Measure and print."""
    return report.main(SUBJECT, argv)


if __name__ == "__main__":
    report.finish(main())
