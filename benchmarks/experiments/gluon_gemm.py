"""Time Gluon's GEMM and cuBLASLt's: ``python -m benchmarks.experiments.gluon_gemm [variant ...]``.

Each variant is compared with float64 first, and timed only if it is right. Each runs in its own
process, which is ended after ``--seconds``: a kernel that hangs does not stop other variants.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import sqnr, time_device
from benchmarks.experiments.gluon_gemm_kernels import gemm
from float8lab.ops.kernels.gemm import scaled_mm

CHANGES: dict[str, dict[str, int]] = {
    "held": {"held": 1},
    "early": {"early": 1},
    "turns": {"turns": 1},
    "half-turns": {"turns": 2, "early": 1},
    "held-half-turns": {"held": 1, "turns": 2, "early": 1},
    "tied": {"tied": 1},
    "128": {"columns": 128, "stages": 6},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fast": ("fast", {"stages": 3}),
    **{mode: (mode, {}) for mode in ("precise", "block")},
    **{
        f"{mode}-{name}": (mode, changes)
        for mode in ("precise", "block")
        for name, changes in CHANGES.items()
    },
}
"""The mode and the arguments of ``gemm`` by the name of the variant."""
DEFAULT = [
    *("precise", "precise-held", "precise-early", "precise-half-turns"),
    *("block", "block-held", "block-half-turns", "fast"),
]

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]

SHAPES = (
    (16384, 4096, 4096),
    (16384, 14336, 4096),
    (16384, 4096, 14336),
    (4096, 14336, 16384),
)
"""The timed sizes: M, N, K."""

CHECKS = ((512, 512, 1024, 132), (640, 768, 1536, 3), (1280, 256, 512, 4))
"""The checked sizes: M, N, K, and the number of programs that share the tiles."""


def _operand(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 100
    return x.clamp_(-448, 448).to(dtype)


def _inputs(mode: str, M: int, N: int, K: int, dtype: torch.dtype) -> Inputs:
    a, b = _operand(M, K, dtype), _operand(N, K, torch.float8_e4m3fn)
    if mode == "block":
        a_scale = torch.rand(K // 128, M, device="cuda").add_(0.5).t()
        b_scale = torch.rand(N // 128, K // 128, device="cuda").add_(0.5)
    else:
        a_scale, b_scale = torch.rand(2, 1, 1, device="cuda").add_(0.5)
        a_scale, b_scale = a_scale.view(1), b_scale.clone().view(1)
    return a, a_scale, b, b_scale


def _cublas(mode: str, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    blocks = ((1, 128), (128, 128)) if mode == "block" else ((-1, -1), (-1, -1))
    fast = mode == "fast"
    out = torch.bfloat16
    return scaled_mm(a, a_scale, blocks[0], b, b_scale, blocks[1], None, out, fast)


def _decoded(x: Tensor, scale: Tensor) -> Tensor:
    if scale.numel() == 1:
        return x.double() * scale.double()
    for dim in (0, 1):
        scale = scale.repeat_interleave(x.shape[dim] // scale.shape[dim], dim)
    return x.double() * scale.double()


def _is_right(mode: str, arguments: dict[str, Any], dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether each element's error is within that of the tensor cores' sums and bfloat16."""
    right = True
    for M, N, K, programs in CHECKS:
        for dtype in dtypes:
            inputs = _inputs(mode, M, N, K, dtype)
            y, _ = gemm(*inputs, mode, **{**arguments, "programs": programs})
            torch.cuda.synchronize()
            a, b = _decoded(*inputs[:2]), _decoded(*inputs[2:])
            exact, magnitude = a @ b.t(), a.abs() @ b.abs().t()
            error = (y.double() - exact).abs()
            worst = float((error / (2**-8 * exact.abs() + 2**-11 * magnitude)).max())
            right &= worst <= 1  # this is False for NaN
            theirs = _cublas(mode, *inputs)
            same = float((y == theirs).double().mean())
            print(
                f"  {'right' if worst <= 1 else 'WRONG'} {M}x{N}x{K} {dtype}, {programs} programs:"
                f" worst error {worst:.3f} of the bound, {sqnr(y, exact):.1f} dB, cuBLASLt"
                f" {sqnr(theirs, exact):.1f} dB, equal bits {same:.3f}",
                flush=True,
            )
    return right


def _sustained(call: Callable[[], object], calls: int = 60) -> float:
    """Measure the ms of a call among many consecutive calls, at the power limit."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for index in range(2 * calls):  # the first half reaches the power limit
        if index == calls:
            start.record()
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def _run(mode: str, arguments: dict[str, Any], options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    began = time.perf_counter()
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    dtypes = (e4m3, e5m2) if options.e5m2 else (e4m3,)
    if not options.no_check and not _is_right(mode, arguments, dtypes):
        print("  WRONG: not timed")
        return
    for index, (M, N, K) in enumerate(SHAPES):
        inputs = _inputs(mode, M, N, K, e4m3)
        y, kernel = gemm(*inputs, mode, **arguments)
        if index == 0:
            print(
                f"  {kernel.n_regs} registers, {kernel.n_spills} spilled,"
                f" {kernel.metadata.shared} bytes shared;"
                f" {time.perf_counter() - began:.1f} s so far",
                flush=True,
            )
        same = float((y == _cublas(mode, *inputs)).double().mean())
        calls: dict[str, Callable[[], object]] = {
            "ours": partial(gemm, *inputs, mode, **arguments),
            "cuBLASLt": partial(_cublas, mode, *inputs),
        }
        calls["ours again"], calls["cuBLASLt again"] = calls["ours"], calls["cuBLASLt"]
        if mode == "precise":
            calls["cuBLASLt fast"] = partial(_cublas, "fast", *inputs)
        operations = 2e-9 * M * N * K
        apart = {
            name: operations / time_device(call, warm_up=3, samples=options.samples).median
            for name, call in calls.items()
        }
        sustained = {name: operations / _sustained(calls[name]) for name in ("ours", "cuBLASLt")}
        ratios = [
            max(apart["ours"], apart["ours again"])
            / max(apart["cuBLASLt"], apart["cuBLASLt again"]),
            sustained["ours"] / sustained["cuBLASLt"],
        ]
        print(
            f"  {M}x{N}x{K}: {ratios[0]:.3f}x apart, {ratios[1]:.3f}x sustained; TFLOP/s apart:",
            ", ".join(f"{name} {rate:.0f}" for name, rate in apart.items()) + "; sustained:",
            ", ".join(f"{name} {rate:.0f}" for name, rate in sustained.items()),
            f"; equal bits {same:.3f}",
            flush=True,
        )
        del inputs, y, calls


def _variant(word: str) -> tuple[str, dict[str, Any]]:
    """Parse a variant such as ``precise-band8`` or ``precise,band=8,stages=3``."""
    name, *changes = word.split(",")
    mode, arguments = VARIANTS[name]
    changed = {key: int(value) for key, value in (change.split("=") for change in changes)}
    return mode, {**arguments, **changed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "variants",
        nargs="*",
        default=DEFAULT,
        metavar="variant",
        help=f"name or name,key=number,...; names: {' '.join(VARIANTS)}",
    )
    parser.add_argument("--seconds", type=float, default=12, help="of each variant at most")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--e5m2", action="store_true", help="check with a in that format too")
    parser.add_argument("--no-check", action="store_true", help="of a variant that passed before")
    options = parser.parse_args()
    print("starting", flush=True)
    _within(60, _build)  # this builds what Triton builds once
    for word in options.variants:
        print(word, flush=True)
        _within(options.seconds, _run, *_variant(word), options)


def _build() -> None:
    inputs = _inputs("fast", 256, 256, 256, torch.float8_e4m3fn)
    gemm(*inputs, "fast", stages=3)
    torch.cuda.synchronize()


def _within(seconds: float, fn: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Call a function in a process that is ended after ``seconds``."""
    processes = multiprocessing.get_context("fork")  # the parent does not use CUDA
    child = processes.Process(target=_reported, args=(fn, args, kwargs))
    began = time.perf_counter()
    child.start()
    child.join(seconds)
    if child.is_alive():
        child.kill()
        child.join()
        print(f"  HUNG or slow: ended after {seconds:g} s", flush=True)
    elif child.exitcode:
        print(f"  died with {child.exitcode}", flush=True)
    print(f"  took {time.perf_counter() - began:.1f} s", flush=True)


def _reported(fn: Callable[..., object], args: Any, kwargs: Any) -> None:
    try:
        fn(*args, **kwargs)
    except Exception:
        traceback.print_exc(file=sys.stdout)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
