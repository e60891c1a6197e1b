"""Time the ops that cast to FP8, and compare their bandwidth with a plain copy's.

    python -m benchmarks.quantize [--model llama-8b] [--dtype bfloat16]

This needs a CUDA GPU. Each op is first compared with its reference in plain PyTorch, run on the
same GPU tensors: bytes and scales must be equal bit for bit, or no time is printed. Casts of other
libraries are compared by their values. The bytes are those that must move: each output is written
once, and each input read once, or twice where a scale depends on an entire column or tensor and is
not given. The floor is the time of these bytes at the rate of a large copy. ``copy`` copies the
same matrix.

Then it times casts of matrices that are computed inside the cast and never written: a norm, SwiGLU
and its gradient. Their reference casts the values of ``value_of``. These are compared with plain
PyTorch's separately, since exponentials may differ in the last bit.

M rows, K columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from float8lab.ops.reference import ALIGN

__all__ = [
    "SUBJECT",
    "Case",
    "cases",
    "compare",
    "main",
    "measure",
    "rows",
    "source_cases",
    "source_rows",
]

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
"""Targets of casts of matrices. Delayed scaling casts with a known scale; block and current scaling
quantize. A pair is both orientations."""

Outputs = Tensor | tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Case:
    """An op with its inputs and its reference."""

    name: str
    op: Callable[..., Outputs]
    reference: Callable[..., Outputs]
    arguments: tuple[Any, ...]
    inexact: Mapping[int, float] = field(default_factory=dict)
    """The least SQNR in dB by index, of outputs that are not compared bit for bit."""
    passes: int = 1
    """The number of times that the inputs must be read."""

    def run(self) -> Outputs:
        return self.op(*self.arguments)

    def bytes_moved(self, outputs: Outputs) -> int:
        """Count the bytes of each input tensor ``passes`` times and of each output once."""
        inputs = sum(t.nbytes for argument in self.arguments for t in _tensors(argument))
        return self.passes * inputs + sum(t.nbytes for t in _each(outputs))


def _reference_cast(*arguments: Any) -> Outputs:
    """Call the reference with positional arguments, as the op is called."""
    named = dict(zip(("offs", "plan", "slot"), arguments[12:], strict=False))
    return reference.cast(*arguments[:12], **named)


def _each(outputs: Outputs) -> tuple[Tensor, ...]:
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    return tuple(one for one in outputs if one is not None)


def _tensors(argument: Any) -> Sequence[Tensor]:
    """Return an argument that is a tensor or a list of tensors, as a sequence; else empty."""
    if isinstance(argument, Tensor):
        return (argument,)
    return argument if isinstance(argument, list) else ()


SUM_FLOOR_DB = 90.0
"""The least SQNR of float32 sums in another order."""
ROUNDING_FLOOR_DB = 60.0
"""The least SQNR of bfloat16 values of which few are rounded differently: all would give 50."""
VALUES_FLOOR_DB = 25.0
"""The least SQNR of other libraries' casts, whose bytes may differ: e4m3 leaves 31.5 dB."""


def compare(case: Case) -> str | None:
    """Return what differs between an op and its reference; None if nothing differs."""
    results, right = case.op(*case.arguments), case.reference(*case.arguments)
    results = (results,) if isinstance(results, Tensor) else results
    right = (right,) if isinstance(right, Tensor) else right
    if [one is None for one in results] != [one is None for one in right]:
        return f"wrong: {len(_each(results))} outputs instead of {len(_each(right))}"
    for index, (a, b) in enumerate(zip(results, right, strict=True)):
        if a is None or b is None:
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"wrong: output {index} is {a.dtype} {list(a.shape)}"
        if index in case.inexact:
            if not common.sqnr(a, b) >= case.inexact[index]:
                return f"wrong: output {index}, {common.sqnr(a, b):.1f} dB"
        elif unequal := int((_bytes(a) != _bytes(b)).sum()):
            return f"wrong: output {index}, {unequal} of {a.numel() * a.element_size()} bytes"
    return None


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


_SUMS = {5: SUM_FLOOR_DB}
"""The least SQNR of the column sums, the last output of a cast."""


def cases(x: Tensor) -> Iterable[Case]:
    """Iterate over a copy and every cast of one matrix."""
    yield Case("copy", torch.clone, torch.clone, (x,))
    per_tensor, rule, matrix = (-1, -1), "fp32", ("", [x], x.dtype)
    cast = partial(Case, op=ops.cast_op, reference=_reference_cast, inexact=_SUMS)
    blocks = {"tensor": (-1, -1), "row": (1, -1), "1x128": (1, 128), "128x128": (128, 128)}
    for name, block in blocks.items():
        arguments: Any = (*matrix, E4M3, block, rule, 0.0, ALIGN)
        passes = 2 if name == "tensor" else 1
        yield cast(f"quantize {name}", arguments=arguments, passes=passes)
    mx = (*matrix, E4M3, (1, 32), "e8m0", 0.0, 32)
    yield cast("quantize MX 1x32", arguments=mx)
    for name, block in blocks.items():
        arguments = (*matrix, E4M3, block, rule, 0.0, ALIGN, True, True)
        passes = 2 if -1 in block else 1
        yield cast(f"quantize pair {name}", arguments=arguments, passes=passes)
    yield cast("quantize pair MX 1x32", arguments=(*mx, True, True))
    arguments = (*matrix, E5M2, per_tensor, rule, 0.0, ALIGN, True, True, True)
    yield cast("quantize pair tensor + column sums", arguments=arguments, passes=2)
    _, encode = reference.factors_from_amax(reference.block_amax(x, per_tensor), E4M3, "pow2")
    slot = torch.full((1,), ops.NO_DATA, device=x.device)
    for name, fp8_dtype, wanted in (
        ("cast tensor", E4M3, (True, False, False)),
        ("cast pair", E4M3, (True, True, False)),
        ("cast pair + column sums", E5M2, (True, True, True)),
    ):
        how = (fp8_dtype, per_tensor, "encode", 0.0, ALIGN, *wanted, encode, None, None, slot)
        yield cast(name, arguments=(*matrix, *how))
    q, scale, _ = reference.quantize(x, E4M3, per_tensor, rule, 0.0, ALIGN)
    yield Case("transpose", ops.transpose_op, reference.transpose, (q, ALIGN))
    yield Case(
        "dequantize tensor",
        ops.value_of_op,
        reference.value_of,
        ("dequantize", (q, scale), x.dtype, per_tensor),
    )
    yield Case("amax tensor", ops.amax_op, reference.amax_of, matrix)


def source_cases(source: ops.Prologue, fp8_dtype: torch.dtype) -> Iterable[Case]:
    """Iterate over casts of a matrix that is computed inside the cast, as modules need them: both
    orientations, or one if backward makes the other; for gradients also the column sums (a bias's).
    """
    computed = source[:3]
    encode = reference.factors_from_amax(source.amax(), fp8_dtype, "pow2")[1].view(1)
    last = encode, None, None, torch.full((1,), ops.NO_DATA, device=encode.device)

    def cast_values(prologue: str, inputs: list[Tensor], dtype: torch.dtype, *how: Any) -> Outputs:
        value = ops.value_of_op(prologue, inputs, dtype)
        outputs = list(_reference_cast("", [value], dtype, *how))
        if not reference.has_amax(prologue, how[1], None):
            outputs[2] = None
        return tuple(outputs)

    cast = partial(Case, op=ops.cast_op, reference=cast_values, inexact=_SUMS)
    yield Case("values", ops.value_of_op, reference.value_of, computed, {0: ROUNDING_FLOOR_DB})
    for sums in (False, True):
        more = " + column sums" if sums else ""
        how: Any = (fp8_dtype, (-1, -1), "encode", 0.0, ALIGN, True, True, sums, *last)
        yield cast(f"cast pair{more}", arguments=(*computed, *how))
        for name, block, passes in (("tensor", (-1, -1), 2), ("1x128", (1, 128), 1)):
            how = (fp8_dtype, block, "fp32", 0.0, ALIGN, True, True, sums)
            yield cast(f"quantize pair {name}{more}", arguments=(*computed, *how), passes=passes)
    for name, block, rowwise in (
        ("transpose 1x128", (1, 128), False),
        ("quantize row", (1, -1), True),
    ):
        how = (fp8_dtype, block, "fp32", 0.0, ALIGN, rowwise, not rowwise)
        yield cast(name, arguments=(*computed, *how))


def sources(
    M: int, D: int, F: int, generator: torch.Generator, dtype: torch.dtype
) -> Iterator[tuple[str, ops.Prologue, torch.dtype]]:
    """Iterate over prologues of an MLP with ``D`` and ``F`` features: name, prologue, FP8 dtype."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(dtype)

    x, weight, h, dy = normal(M, D), normal(D), normal(M, 2 * F), normal(M, F)
    rstd = torch.rand(M, generator=generator, device=x.device) + 0.5
    yield f"RMSNorm, {M} x {D}", ops.Prologue("rms_norm", [x, rstd, weight], dtype), E4M3
    yield f"SwiGLU, {M} x {F}", ops.Prologue("swiglu", [h], dtype), E4M3
    yield f"SwiGLU's gradient, {M} x {2 * F}", ops.Prologue("swiglu_backward", [h, dy], dtype), E5M2


def measure(setting: Setting, table: str, case: Case, targets: tuple[Target, ...] = ()) -> Row:
    """Check the result of an op, then time it."""
    if refusal := compare(case):
        return setting.row(table, case.name, refusal=refusal)
    return setting.row(
        table,
        case.name,
        ms=setting.time(case.run).samples,
        floor_ms=setting.floor.move_ms(case.bytes_moved(case.run())),
        bytes=case.bytes_moved(case.run()),
        targets=targets,
    )


def amax_and_cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast to e4m3 per tensor as in usual PyTorch code; return the data and the decode scale."""
    scale = x.abs().amax().float() / largest(E4M3)
    return (x.float() / scale).to(E4M3), scale


def measure_other(setting: Setting, table: str, name: str, x: Tensor, other: OtherCast) -> Row:
    """Check the values of another library's cast, then time it."""
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
    """Return the casts of other libraries."""
    found = {}
    if setting.compile:
        found["torch.compile of amax and cast"] = OtherCast(
            lambda: torch.compile(amax_and_cast),
            lambda result: result[0].float() * result[1],
            passes=2,
        )
    return found | quantize_peers(setting.device)


def rows(setting: Setting, sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> Iterator[Row]:
    """Measure a copy and every cast of each matrix."""
    generator = setting.generator()
    for M, K in sizes:
        x = torch.randn(M, K, generator=generator, device=setting.device).to(dtype)
        table = f"{M} x {K}, {str(dtype).removeprefix('torch.')}"
        for case in cases(x):
            run = partial(measure, setting, table, case, TARGETS.get(case.name, ()))
            yield setting.attempt(table, case.name, run)
        for name, other in others(setting).items():
            run = partial(measure_other, setting, table, name, x, other)
            yield setting.attempt(table, name, run)


def source_rows(setting: Setting, M: int, D: int, F: int, dtype: torch.dtype) -> Iterator[Row]:
    """Measure every cast of each matrix that is computed inside the cast."""
    for name, source, fp8_dtype in sources(M, D, F, setting.generator(), dtype):
        table = f"{name}, {str(dtype).removeprefix('torch.')}"
        for case in source_cases(source, fp8_dtype):
            yield setting.attempt(table, case.name, partial(measure, setting, table, case))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    shapes, dtype = select(options.model), getattr(torch, options.dtype)
    yield from rows(setting, list(dict.fromkeys((s.M, s.K) for s in shapes)), dtype)
    down = next(shape for shape in shapes if shape.name == "down")
    yield from source_rows(setting, down.M, down.N, down.K, dtype)


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


main = partial(report.main, SUBJECT)

if __name__ == "__main__":
    report.finish(main())
