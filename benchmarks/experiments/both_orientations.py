"""Measure what a cast of both orientations costs, and variants that did not make it faster.

    python -m benchmarks.experiments.both_orientations

This needs a CUDA GPU. A kernel casts a bfloat16 matrix per tensor. The kernel can leave out the
matrix or its transpose, write the matrix twice, and cut, order and store its tiles in other ways.
The bytes that it writes are first compared with those of ``float8lab.ops.cast_op``.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from benchmarks.common import time_device
from benchmarks.experiments.both_orientations_kernels import cast
from float8lab import ops
from float8lab.formats import E4M3

SIZES = ((16384, 4096), (16384, 14336))

PARTS: dict[str, dict[str, Any]] = {
    "the matrix": {"transposed": False},
    "its transpose": {"straight": 0},
    "the matrix twice": {"straight": 2, "transposed": False},
    "both": {},
}
TILES = (
    ((128, 64), 4), ((64, 128), 4), ((256, 64), 8), ((256, 128), 8), ((256, 128), 16),
    ((128, 256), 16), ((512, 64), 16),
)  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    **{
        f"both, tiles of {rows} x {columns}, {warps} warps": {
            "tile": (rows, columns),
            "warps": warps,
        }
        for (rows, columns), warps in TILES
    },
    **{f"both, {down} tiles down": {"down": down} for down in (2, 4, 128)},
    **{f"both, stored {write}": {"write": write} for write in (".cs", ".cg", ".wt")},
    "both, reads evicted first": {"read": "evict_first"},
}


def is_right(
    what: dict[str, Any], got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]
) -> bool:
    """Whether the bytes that were written equal those of the library."""
    q, q_t = (x.view(torch.uint8) for x in got)
    wanted_q, wanted_q_t = (x.view(torch.uint8) for x in wanted)
    straight, transposed = what.get("straight", 1), what.get("transposed", True)
    right = straight == 0 or torch.equal(q, wanted_q)
    if straight == 2:
        right = right and torch.equal(q_t.view(q.shape), wanted_q)
    return right and (not transposed or torch.equal(q_t, wanted_q_t))


def run(M: int, K: int, samples: int) -> None:
    """Time all variants on one size."""
    x = torch.randn(M, K, device="cuda").bfloat16()
    encode = torch.full((1,), 2.0**6, device="cuda")
    cast_arguments = (E4M3, (-1, -1), "encode", 0.0, 16, True, True, False, encode)
    wanted = ops.cast_op("", [x], x.dtype, *cast_arguments)[0:4:3]
    time = partial(time_device, warm_up=3, samples=samples)
    print(f"{M} x {K}: a copy {time(x.clone).median:.4f} ms", flush=True)
    library = time(lambda: ops.cast_op("", [x], x.dtype, *cast_arguments))
    print(f"  {library.median:.4f} ms  the library's cast of both")
    for name, what in (PARTS | CHANGES).items():
        got = tuple(torch.zeros_like(q) for q in wanted)
        call = partial(cast, x, encode, *got, **what)
        call()
        if is_right(what, got, tuple(wanted)):
            print(f"  {time(call).median:.4f} ms  {name}", flush=True)
        else:
            print(f"  wrong, not timed: {name}", flush=True)


def main() -> None:
    """Time all variants on all sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    for M, K in SIZES:
        run(M, K, options.samples)


if __name__ == "__main__":
    main()
