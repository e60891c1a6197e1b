"""Gluon's GEMM beside cuBLASLt's: ``python -m benchmarks.experiments.gluon_gemm [variant ...]``.

Each variant is compared with float64 first, and timed only if it is right. Each runs in a process
of its own, which is ended after ``--seconds``: a kernel that hangs takes no other with it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import traceback
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import require_cuda, sqnr, time_device
from benchmarks.experiments.gluon_gemm_kernels import gemm
from float8lab.ops.kernels.gemm import scaled_mm

VARIANTS: dict[str, tuple[str, dict[str, int]]] = {
    "precise": ("precise", {}),
    "block": ("block", {}),
    "fast": ("fast", {"stages": 3}),
    "precise-band8": ("precise", {"band": 8}),
    "precise-ahead": ("precise", {"columns": 128, "stages": 6}),
    "block-ahead": ("block", {"columns": 128, "stages": 6}),
    "block-band8": ("block", {"band": 8}),
    "precise-band32": ("precise", {"band": 32}),
    "precise-stages3": ("precise", {"stages": 3}),
}
"""Name: mode and arguments of ``gemm``. Those named on the command line may have ``key=number``."""
DEFAULT = "precise block fast precise-band8 precise-ahead block-ahead".split()

SHAPES = (
    (16384, 4096, 4096),
    (16384, 14336, 4096),
    (16384, 4096, 14336),
    (4096, 14336, 16384),
)
"""M, N, K."""

CHECKS = ((512, 512, 1024, 132), (640, 768, 1536, 3), (1280, 256, 512, 4))
"""M, N, K, and how many programs share the tiles."""


def _operand(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 100
    return x.clamp_(-448, 448).to(dtype)


def _inputs(mode: str, M: int, N: int, K: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
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


def _is_right(mode: str, arguments: dict[str, int]) -> bool:
    """Element by element within what the tensor cores' short sums and bfloat16 explain."""
    right = True
    for M, N, K, programs in CHECKS:
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            inputs = _inputs(mode, M, N, K, dtype)
            y, _ = gemm(*inputs, mode, **{**arguments, "programs": programs})
            torch.cuda.synchronize()
            a, b = _decoded(*inputs[:2]), _decoded(*inputs[2:])
            exact, magnitude = a @ b.t(), a.abs() @ b.abs().t()
            error = (y.double() - exact).abs()
            worst = float((error / (2**-8 * exact.abs() + 2**-11 * magnitude)).max())
            right &= worst <= 1  # and not where it is NaN
            theirs = _cublas(mode, *inputs)
            print(
                f"  {'right' if worst <= 1 else 'WRONG'} {M}x{N}x{K} {dtype}, {programs} programs:"
                f" worst error {worst:.3f} of the bound, {sqnr(y, exact):.1f} dB, cuBLASLt"
                f" {sqnr(theirs, exact):.1f} dB, equal bits {float((y == theirs).double().mean()):.3f}",
                flush=True,
            )
    return right


def _run(mode: str, arguments: dict[str, int], samples: int, check: bool) -> None:
    torch.manual_seed(0)
    began = time.perf_counter()
    if check and not _is_right(mode, arguments):
        print("  WRONG: not timed")
        return
    for index, (M, N, K) in enumerate(SHAPES):
        inputs = _inputs(mode, M, N, K, torch.float8_e4m3fn)
        y, kernel = gemm(*inputs, mode, **arguments)
        if index == 0:
            print(
                f"  {kernel.n_regs} registers, {kernel.n_spills} spilled,"
                f" {kernel.metadata.shared} bytes shared; {time.perf_counter() - began:.1f} s so far"
            )
        rates: dict[str, float] = {}
        for name in ("ours", "cuBLASLt", "ours again", "cuBLASLt fast"):
            if name == "cuBLASLt fast" and mode != "precise":
                continue

            def call(name: str = name, inputs: Any = inputs) -> object:
                if name.startswith("ours"):
                    return gemm(*inputs, mode, **arguments)
                return _cublas("fast" if name == "cuBLASLt fast" else mode, *inputs)

            rate = 2e-9 * M * N * K / time_device(call, warm_up=3, samples=samples).median
            rates[name] = rate
        ours = max(rates["ours"], rates["ours again"])
        described = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        ratio = ours / rates["cuBLASLt"]
        print(f"  {M}x{N}x{K}: {ratio:.3f}x; TFLOP/s: {described}", flush=True)
        print("  json " + json.dumps({"shape": (M, N, K), "mode": mode, **rates}), flush=True)
        del inputs, y


def _child(mode: str, arguments: dict[str, int], samples: int, check: bool) -> None:
    try:
        _run(mode, arguments, samples, check)
    except Exception:
        traceback.print_exc()


def _variant(word: str) -> tuple[str, dict[str, int]]:
    """``precise-band8`` or ``precise,band=8,stages=3``."""
    name, *changes = word.split(",")
    mode, arguments = VARIANTS[name]
    changed = {key: int(value) for key, value in (change.split("=") for change in changes)}
    return mode, {**arguments, **changed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*", default=DEFAULT, metavar="variant")
    parser.add_argument("--seconds", type=float, default=12, help="of each variant at most")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--no-check", action="store_true", help="of a variant that passed before")
    options = parser.parse_args()
    processes = multiprocessing.get_context("fork")  # of a parent that leaves CUDA alone
    for word in options.variants:
        print(word, flush=True)
        arguments = (*_variant(word), options.samples, not options.no_check)
        child = processes.Process(target=_child, args=arguments)
        child.start()
        child.join(options.seconds)
        if child.is_alive():
            child.kill()
            child.join()
            print(f"  HUNG or slow: ended after {options.seconds:g} s", flush=True)
        elif child.exitcode:
            print(f"  died with {child.exitcode}", flush=True)


if __name__ == "__main__":
    main()
