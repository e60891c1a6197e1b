"""Time the three GEMMs of a linear layer's training step in bfloat16 and FP8, by granularity.

    python -m benchmarks.gemm [--model llama-8b] [--layer up]

This needs a CUDA GPU. ``torch.mm`` is the baseline; FP8 GEMMs use the op that the layers call.
``precise`` and ``fast`` are cuBLASLt's two ways to accumulate; block scaling has only one way.
Blocks of e5m2 by e4m3, as for gradients under ``Format.HYBRID``, use our own kernel.
Each GEMM is compared with the GEMM of the dequantized operands in float64. ``% of ceiling`` is
relative to the fastest FP8 (or bfloat16) GEMM of the header. These times are the larger part of the
floor of every other subject.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks import common, report
from benchmarks.floor import BF16, Gemm, GemmOperands
from benchmarks.report import Row, Setting, Subject
from benchmarks.shapes import MODELS, LinearShape, select
from float8lab.formats import E4M3, E5M2, Float8Spec

__all__ = ["SUBJECT", "gemms", "main", "rows"]

PRECISE_DB = 45.0
"""The least SQNR of a precise GEMM; rounding the result to bfloat16 leaves 55 dB."""
FAST_DB = 25.0
"""The least SQNR of fast accumulation, which truncates sums to 14 bits K / 32 times in a row."""


def gemms(name: str) -> dict[str, Gemm]:
    """Return the candidates for one of fprop, dgrad and wgrad."""
    tensor, row = Float8Spec(E4M3, (-1, -1)), Float8Spec(E4M3, (1, -1))
    across, tile = Float8Spec(E4M3, (1, 128)), Float8Spec(E4M3, (128, 128))
    blocks = ("1x128 by 1x128", across) if name == "wgrad" else ("1x128 by 128x128", tile)
    by_name = {
        "bfloat16": BF16,
        "tensor, precise": Gemm(tensor, tensor, False),
        "tensor, fast": Gemm(tensor, tensor, True),
        "row, precise": Gemm(row, row, False),
        "row, fast": Gemm(row, row, True),
        blocks[0]: Gemm(across, blocks[1], False),
    }
    if name != "fprop":  # the other GEMMs read gradients
        gradient_spec = Float8Spec(E5M2, (1, 128))
        by_name[f"{blocks[0]}, e5m2 by e4m3"] = Gemm(gradient_spec, blocks[1], False)
    return by_name


def check(operands: GemmOperands) -> tuple[dict[str, float], str | None]:
    """Return the SQNR of a GEMM, and why it may not be timed; None if it may be."""
    floor_db = FAST_DB if operands.gemm.fast_accum else PRECISE_DB
    gate = common.Gate({"y": operands.exact()}, floor_db)
    db = gate.measure({"y": operands.multiply()})
    return db, gate.refusal(db)


def measure(setting: Setting, case: str, name: str, gemm: Gemm, sizes: tuple[int, int, int]) -> Row:
    """Check a GEMM, then time it."""
    M, N, K = sizes
    operands = gemm.operands(M, N, K, setting.generator())
    db, refusal = check(operands)
    if refusal is not None:
        return setting.row(case, name, sqnr_db=db, refusal=refusal)
    return setting.row(
        case,
        name,
        sqnr_db=db,
        ms=setting.time(operands.multiply).samples,
        flops=2.0 * M * N * K,
        fp8=gemm is not BF16,
        baseline=gemm is BF16,
    )


def rows(setting: Setting, shapes: Sequence[LinearShape]) -> Iterator[Row]:
    """Measure every GEMM of the shapes with every candidate."""
    for shape in shapes:
        for name, (M, N, K) in shape.gemms().items():
            case = f"{shape.name}, {name}: {M} x {N}, contraction {K}"
            for candidate, gemm in gemms(name).items():
                run = partial(measure, setting, case, candidate, gemm, (M, N, K))
                yield setting.attempt(case, candidate, run)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--layer", help="only the layer of this name, such as 'up'")


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    shapes = select(options.model)
    return rows(setting, [s for s in shapes if options.layer in (None, s.name)])


SUBJECT = Subject(
    "gemm",
    "GEMM",
    __doc__,
    (
        report.NAME,
        report.decibels("y"),
        report.TIME,
        report.FLOPS,
        report.CEILING,
        report.SPEED_UP,
    ),
    _rows,
    _options,
)


main = partial(report.main, SUBJECT)

if __name__ == "__main__":
    report.finish(main())
