"""Time attention of one new token to a paged key/value cache, and compare it with a copy.

    python -m benchmarks.decode [--page-size 128]

This needs a CUDA GPU. Each call is first compared with the reference in plain PyTorch. The bytes
are those that must move: each key and value once, and scales, queries, table and output. The floor
is the time to move these bytes at the rate of a large copy.

B sequences of S keys each.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks import quantize, report
from benchmarks.quantize import Case
from benchmarks.report import Row, Setting, Subject, Target
from float8lab import ops
from float8lab.formats import E4M3, E5M2
from float8lab.ops.reference import paged_attention as reference

__all__ = ["SUBJECT", "main", "rows"]

SIZES = (8, 32768), (1, 32768), (64, 4096), (8, 4096), (1, 4096), (64, 1024), (8, 1024)
CACHES = {"bfloat16": torch.bfloat16, "FP8 e4m3": E4M3, "FP8 e5m2": E5M2}
HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
VALUES_FLOOR_DB = 45.0
"""The least SQNR: rounding outputs and probabilities to bfloat16 leaves about 54 dB each time."""
TARGETS = {(8, 32768): (Target("% of copy", ">=", 80),)}


def case(setting: Setting, name: str, B: int, S: int, page_size: int) -> Case:
    """Make a case: each sequence's newest token attends to all keys, in pages in random order."""
    device, generator, pages = setting.device, setting.generator(), B * -(-S // page_size)
    stores, scales = [], []
    for _ in "kv":
        shape = pages, KV_HEADS, page_size, HEAD_SIZE
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        is_fp8 = CACHES[name].itemsize == 1
        stores.append(x.to(CACHES[name]))
        scale = torch.rand(*shape[:3], 1, generator=generator, device=device) + 0.5
        scales.append(scale if is_fp8 else None)
    q = torch.randn(B, HEADS, 1, HEAD_SIZE, generator=generator, device=device).bfloat16()
    table = torch.randperm(pages, generator=generator, device=device).int().view(B, -1)
    sequences = torch.tensor([range(B), [S - 1] * B, [1] * B], dtype=torch.int32, device=device)
    arguments = (q, *stores, *scales, table, sequences, -1, 0, HEAD_SIZE**-0.5)
    return Case(
        name, ops.paged_attention, reference.paged_attention, arguments, {0: VALUES_FLOOR_DB}
    )


def rows(setting: Setting, B: int, S: int, page_size: int) -> Iterator[Row]:
    """Measure a row for each dtype of the cache."""
    table = (
        f"{B} sequence{'s' * (B > 1)} of {S} keys, {KV_HEADS} key/value heads for {HEADS} of "
        f"queries, {HEAD_SIZE} features, pages of {page_size}"
    )
    for name in CACHES:

        def run(name: str = name) -> Row:
            decode_case = case(setting, name, B, S, page_size)
            return quantize.measure(setting, table, decode_case, TARGETS.get((B, S), ()))

        yield setting.attempt(table, name, run)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page-size", type=int, default=128, help="positions (default: 128)")


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    for B, S in SIZES:
        yield from rows(setting, B, S, options.page_size)


SUBJECT = Subject(
    "decode", "Decoding from a cache", __doc__, quantize.SUBJECT.columns, _rows, _options
)


main = partial(report.main, SUBJECT)

if __name__ == "__main__":
    report.finish(main())
