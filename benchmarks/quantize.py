"""The ops that cast to FP8: time, bandwidth, and share of what a plain copy reaches.

    python -m benchmarks.quantize [--model llama-8b] [--dtype bfloat16]

Needs a CUDA GPU. Each op is first compared with its reference in plain PyTorch, run on the same
GPU tensors: bytes and scales must be equal bit for bit, or no time is printed. Bytes are counted as
each input read once and each output written once, so an op that has to read its input twice (a
scale per tensor from the tensor's own amax) cannot reach 100 %. M rows, K columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import common
from benchmarks.shapes import MODELS, select
from float8lab import ops
from float8lab.formats import E4M3, E5M2
from float8lab.ops import reference

__all__ = ["Case", "cases", "compare", "main"]

ALIGN = 16
COPY_BYTES = 2 * 2**30
"""Bytes of the tensor whose copy gives the bandwidth that the ops are compared with."""

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

    def run(self) -> Outputs:
        return self.op(*self.arguments)

    def bytes_moved(self, outputs: Outputs) -> int:
        """Each input tensor once and each output once."""
        inputs = (argument for argument in self.arguments if isinstance(argument, Tensor))
        return sum(t.numel() * t.element_size() for t in (*inputs, *_each(outputs)))


def _each(outputs: Outputs) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


SUM_FLOOR_DB = 90.0
"""For float32 sums in another order."""


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
    """Every cast on one matrix."""
    per_tensor, rule = (-1, -1), "fp32"
    blocks = {"tensor": (-1, -1), "row": (1, -1), "1x128": (1, 128), "128x128": (128, 128)}
    for name, block in blocks.items():
        arguments = (x, E4M3, block, rule, 0.0, ALIGN)
        yield Case(f"quantize {name}", ops.quantize_op, reference.quantize, arguments)
    yield Case(
        "quantize MX 1x32", ops.quantize_op, reference.quantize, (x, E4M3, (1, 32), "e8m0", 0.0, 32)
    )
    pair = partial(Case, op=ops.quantize_pair_op, reference=reference.quantize_pair, inexact=(4,))
    for name, block in blocks.items():
        yield pair(f"quantize pair {name}", arguments=(x, E4M3, block, rule, 0.0, ALIGN, False))
    yield pair("quantize pair MX 1x32", arguments=(x, E4M3, (1, 32), "e8m0", 0.0, 32, False))
    yield pair(
        "quantize pair tensor + column sums",
        arguments=(x, E5M2, per_tensor, rule, 0.0, ALIGN, True),
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


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy on the device."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (1e-3 * common.time_device(lambda: target.copy_(source)).median)


@dataclass(frozen=True)
class Result:
    """What was measured of one op on one matrix."""

    op: str
    shape: tuple[int, int]
    refusal: str | None
    bytes_moved: int = 0
    device_ms: tuple[float, ...] = ()

    def format_row(self, bandwidth: float) -> list[str]:
        """One line of the table; a wrong op gets its error and no time."""
        if self.refusal is not None:
            return [self.op, self.refusal, "-", "-"]
        timing = common.Timing(self.device_ms)
        rate = self.bytes_moved / (1e-3 * timing.median)
        return [self.op, timing.describe(), f"{rate / 1e12:.2f}", f"{100 * rate / bandwidth:.0f}"]


def measure(case: Case, shape: tuple[int, int]) -> Result:
    """Check an op, then time it."""
    if refusal := compare(case):
        return Result(case.name, shape, refusal)
    moved = case.bytes_moved(case.run())
    return Result(case.name, shape, None, moved, common.time_device(case.run).samples)


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Measure and print."""
    parser = common.new_parser(__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    args = parser.parse_args(argv)
    common.require_cuda("benchmarks.quantize")
    bandwidth = copy_bandwidth()
    facts = common.header() | {"copy": f"{bandwidth / 1e12:.2f} TB/s, read and written"}
    print(common.describe_header(facts))
    generator = torch.Generator("cuda").manual_seed(args.seed)
    everything = []
    for M, K in dict.fromkeys((shape.M, shape.K) for shape in select(args.model)):
        x = torch.randn(M, K, generator=generator, device="cuda").to(getattr(torch, args.dtype))
        results = [measure(case, (M, K)) for case in cases(x)]
        rows = [result.format_row(bandwidth) for result in results]
        columns = ["op", "ms (quartiles)", "TB/s", "% of copy"]
        print(f"\n{M} x {K}, {args.dtype}\n\n{common.table(columns, rows)}", flush=True)
        everything += results
    common.append_json(args.json, facts, [asdict(result) for result in everything])
    return everything


if __name__ == "__main__":
    main()
