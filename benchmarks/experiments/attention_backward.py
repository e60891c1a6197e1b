"""FP8 backward of attention beside cuDNN's.

    python -m benchmarks.experiments.attention_backward

Gradients are compared with float64 first, on grouped heads, odd lengths, large scores and gradients
of unequal size, and timed only if all of them are right. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.attention import SIZES
from benchmarks.common import sqnr, time_device
from benchmarks.experiments.attention_backward_kernels import backward
from float8lab import ops
from float8lab.ops.kernels.attention import _cudnn_backward

FLOOR_DB = 24.0
SCALE = 128**-0.5


class Case(NamedTuple):
    """Sizes, and how large scores are and how unequal the gradients of queries."""

    B: int
    H: int
    G: int
    SQ: int
    SK: int
    scores: float = 1.0
    unequal: float = 0.0
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case(2, 4, 4, 512, 512),
    Case(1, 2, 2, 2048, 2048, 4.0, 2.0),
    Case(2, 8, 2, 384, 384),
    Case(1, 4, 2, 200, 717),
    Case(1, 4, 1, 717, 200),
    Case(1, 2, 2, 20, 300),
    Case(2, 2, 2, 130, 129),
    Case(1, 2, 2, 65, 63, dtype=torch.float16),
    Case(2, 2, 2, 256, 256, 8.0, 5.0, torch.float32),
    Case(3, 46, 46, 640, 640),  # several tiles for each multiprocessor
)


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax() / 448
    return (x / scale).to(torch.float8_e4m3fn), scale.view(1)


class Problem:
    """Random FP8 operands, what forward makes of them, and a gradient of the output."""

    def __init__(self, case: Case, *, causal: bool) -> None:
        sizes = (case.H, case.SQ), (case.G, case.SK), (case.G, case.SK), (case.H, case.SQ)
        q, k, v, dout = (
            torch.randn(case.B, S, heads, 128, device="cuda").transpose(1, 2) for heads, S in sizes
        )
        dout *= (case.unequal * torch.randn(*dout.shape[:3], 1, device="cuda")).exp()
        self.dout = dout.to(case.dtype)
        pairs = [_quantized(x) for x in (q * case.scores, k, v)]
        self.operands, self.scales = zip(*pairs, strict=True)
        self.causal = causal
        window = (-1, 0 if causal else -1, case.SQ - case.SK)
        self.out, self.lse = ops.fp8_attention_op(
            *self.operands, *self.scales, window, SCALE, case.dtype
        )

    def decoded(self) -> list[Tensor]:
        """q, k and v, with a head of keys for each head of queries, in float64."""
        heads = self.dout.shape[1]
        values = [x.double() * s for x, s in zip(self.operands, self.scales, strict=True)]
        return [x.repeat_interleave(heads // x.shape[1], 1) for x in values]

    def exact(self) -> tuple[Tensor, ...]:
        """The gradients of the same FP8 data."""
        q, k, v = self.decoded()
        dout, groups = self.dout.double(), self.operands[1].shape[1]
        scores = q @ k.mT * SCALE
        if self.causal:
            scores.masked_fill_(scores.new_ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
        p = scores.softmax(-1)
        ds = p * (dout @ v.mT - (dout * (p @ v)).sum(-1, keepdim=True)) * SCALE
        dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (ds.mT @ q, p.mT @ dout))
        return ds @ k, dk, dv

    def fp8(self) -> tuple[Tensor, ...]:
        """By the experiment."""
        saved = self.out, self.lse, SCALE
        return backward(self.dout, *self.operands, *self.scales, *saved, causal=self.causal)


def _is_right(case: Case, *, causal: bool) -> bool:
    problem = Problem(case, causal=causal)
    first, second = problem.fp8(), problem.fp8()
    db = [sqnr(x, y) for x, y in zip(first, problem.exact(), strict=True)]
    same = all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    right = same and all(x >= FLOOR_DB for x in db)  # and not where it is NaN
    figures = " ".join(f"{x:.1f}" for x in db)
    mask = "causal" if causal else "full"
    print("right" if right else "WRONG", mask, *case, f"dq dk dv {figures} dB", flush=True)
    return right


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.manual_seed(0)
    right = [_is_right(case, causal=causal) for case in CASES for causal in (True, False)]
    if not all(right):
        print("WRONG: not timed")
        return
    for size in SIZES:
        problem = Problem(Case(size.B, size.H, size.H, size.S, size.S), causal=size.causal)
        wide = [x.bfloat16() for x in problem.decoded()]
        tensors = [problem.dout, *wide, problem.out]
        calls: dict[str, Callable[[], object]] = {
            "FP8": problem.fp8,
            "cuDNN bfloat16": partial(_cudnn_backward, tensors, problem.lse, size.causal, SCALE),
        }
        for name, call in [*calls.items()] * 2:
            ms = time_device(call, warm_up=3, samples=20).median
            rate = 2.5 * size.flops() / ms / 1e9
            print(f"{size.describe()}: {name} {ms:.3f} ms, {rate:.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
