"""Attention, forward and forward with backward: torch's bfloat16 backends and FP8, casts included.

    python -m benchmarks.attention [--compile] [--shape 4 4096 causal]

Needs a CUDA GPU. 32 heads of 128 features. ``DotProductAttention`` is ours; in FP8 its inputs and
the gradient of its output are bfloat16, and the times contain their casts. The baseline is cuDNN in
bfloat16. All are compared with float32 arithmetic, head by head. FLOPs are those of two matrix
products forward and five backward, half of them where it is causal. The floor is these FLOPs at the
rate of the fastest GEMM of the same precision, and every tensor moved once.

B batch, S positions, H heads, D head size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import float8lab
from benchmarks import common, report
from benchmarks.floor import Floor, read_passes
from benchmarks.models import InContext, attention_flops, our_context
from benchmarks.peers import attention_peers
from benchmarks.recipes import RECIPES
from benchmarks.report import Row, Setting, Subject, Target
from float8lab.recipes import Recipe

__all__ = ["SUBJECT", "AttentionSize", "Problem", "exact", "main", "rows"]

BF16_FLOOR_DB = 35.0
"""Rounding the probabilities and the output to bfloat16 leaves more than 45 dB."""
FP8_FLOOR_DB = 15.0
"""Two matrix products forward and five backward of e4m3 and e5m2 operands."""
FORWARD_MS, FORWARD_RATE = "forward ms", "forward TFLOP/s"


class AttentionSize(NamedTuple):
    """Of self attention."""

    B: int
    S: int
    H: int = 32
    D: int = 128
    causal: bool = True

    def describe(self) -> str:
        """As tables name it."""
        mask = "causal" if self.causal else "full"
        return f"batch {self.B}, {self.S} positions, {mask}, {self.H} heads of {self.D}"

    def flops(self) -> float:
        """Of the forward."""
        return attention_flops(self.B, self.H, self.S, self.D, causal=self.causal)


SIZES = (AttentionSize(4, 4096), AttentionSize(4, 4096, causal=False), AttentionSize(1, 16384))
_BOUNDS = ((620.0, 600.0), (800.0, 720.0), (850.0, 700.0))
TARGETS = {
    size: (Target(FORWARD_RATE, ">=", forward), Target("TFLOP/s", ">=", both))
    for size, (forward, both) in zip(SIZES, _BOUNDS, strict=True)
}
"""Of FP8."""


class Problem(NamedTuple):
    """Inputs and the output's gradient, ``[B, S, H, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def make(cls, size: AttentionSize, generator: torch.Generator) -> Problem:
        """Normal values in bfloat16."""
        shape = (size.B, size.S, size.H, size.D)
        device = generator.device
        return cls(
            *(torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(4))
        )


def exact(problem: Problem, *, causal: bool) -> dict[str, Tensor]:
    """Output and gradients in float32, ``[B, S, H, D]``."""
    B, S, H, D = problem.q.shape
    results = {name: torch.empty_like(problem.q, dtype=torch.float32) for name in NAMES}
    scale = D**-0.5
    hidden = torch.ones(S, S, dtype=torch.bool, device=problem.q.device).triu(1)
    for b in range(B):
        for h in range(H):
            q, k, v, dout = (x[b, :, h].float() for x in problem)
            scores = q @ k.t() * scale
            if causal:
                scores.masked_fill_(hidden, -torch.inf)
            p = scores.softmax(-1)
            del scores
            out = p @ v
            dp = dout @ v.t()
            ds = p * (dp - (dout * out).sum(-1, keepdim=True))
            gradients = (ds @ k * scale, ds.t() @ q * scale, p.t() @ dout)
            for name, value in zip(NAMES, (out, *gradients), strict=True):
                results[name][b, :, h] = value
    return results


NAMES = ("y", "dq", "dk", "dv")


class Sdpa(nn.Module):
    """One backend of torch."""

    def __init__(self, backend: SDPBackend, *, causal: bool) -> None:
        super().__init__()
        self.backend, self.causal = backend, causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(self.backend):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return out.transpose(1, 2).flatten(2)


def ours(size: AttentionSize, recipe: Recipe | None = None) -> InContext:
    """``DotProductAttention``; with a recipe in FP8."""
    mask = "causal" if size.causal else "no_mask"
    module = float8lab.DotProductAttention(size.H, size.D, qkv_format="bshd", attn_mask_type=mask)
    if recipe is not None:
        recipe = replace(recipe, fp8_dpa=True)
    return InContext(module, our_context(recipe))


def floor_ms(floor: Floor, size: AttentionSize, recipe: Recipe | None, *, fp8: bool) -> float:
    """Forward and backward: FLOPs and bytes."""
    elements = size.B * size.S * size.H * size.D
    # Forward: read q, k, v, write out; backward: read these and dout, write three gradients.
    moved = (4 + 8) * 2.0 * elements
    if recipe is not None:
        # q, k, v, dout are read to be cast and written in one byte, and then read as such.
        moved = 4 * elements * (2.0 * read_passes(recipe) + 1.0)
        moved += elements * (3 * 1.0 + 2.0 + 4 * 1.0 + 2.0 + 3 * 2.0)
    flops = 3.5 * size.flops()
    return flops / floor.ceiling(fp8=fp8) / 1e9 + floor.move_ms(moved)


class Candidate(NamedTuple):
    """A module of q, k and v."""

    name: str
    make: Callable[[], nn.Module]
    fp8: bool = False
    recipe: Recipe | None = None
    baseline: bool = False
    compiled: bool = False
    peer: bool = False


def candidates(setting: Setting, size: AttentionSize) -> Iterator[Candidate]:
    """Torch's backends, ours, and other libraries'."""
    backends = {
        "cuDNN bfloat16": SDPBackend.CUDNN_ATTENTION,
        "flash bfloat16": SDPBackend.FLASH_ATTENTION,
    }
    if setting.device.type == "cpu":
        backends = {"math bfloat16": SDPBackend.MATH}
    for index, (name, backend) in enumerate(backends.items()):
        make = partial(Sdpa, backend, causal=size.causal)
        yield Candidate(name, make, baseline=index == 0)
    for mode in setting.modes:
        compiled = mode == "compile"
        suffix = ", compile" if compiled else ""
        bf16 = f"DotProductAttention, bfloat16{suffix}"
        yield Candidate(bf16, partial(ours, size), compiled=compiled)
        # How attention is cast depends on whether scales are delayed, not on a recipe's blocks.
        for name in setting.recipes:
            if name in ("delayed", "current"):
                recipe = RECIPES[name]()
                yield Candidate(
                    f"DotProductAttention, FP8 {name}{suffix}",
                    partial(ours, size, recipe),
                    fp8=True,
                    recipe=recipe,
                    compiled=compiled,
                )
    for name, is_fp8, make_peer in attention_peers(size.H, size.D, causal=size.causal):
        yield Candidate(name, make_peer, fp8=is_fp8, peer=True)


def measure(
    setting: Setting,
    size: AttentionSize,
    candidate: Candidate,
    problem: Problem,
    right: dict[str, Tensor],
) -> Row:
    """Check output and gradients, then time."""
    module, dout = candidate.make(), problem.dout.flatten(2)
    if candidate.compiled:
        module.compile()
    leaves = [x.detach().requires_grad_() for x in problem[:3]]

    def forward() -> Tensor:
        out: Tensor = module(*leaves)
        return out

    def both() -> tuple[Tensor, ...]:
        out = forward()
        return (out, *torch.autograd.grad(out, leaves, dout))

    for _ in range(2):  # delayed scales have a history
        both()
    shape = problem.q.shape
    gate = common.Gate(right, FP8_FLOOR_DB if candidate.fp8 else BF16_FLOOR_DB)
    found = [x.detach().reshape(shape) for x in both()]
    db = gate.measure(dict(zip(NAMES, found, strict=True)))
    del found
    if refusal := gate.refusal(db):
        return setting.row(size.describe(), candidate.name, sqnr_db=db, refusal=refusal)
    forward_ms = setting.time(forward).median
    recipe, fp8 = candidate.recipe, candidate.fp8
    return setting.row(
        size.describe(),
        candidate.name,
        sqnr_db=db,
        ms=setting.time(both).samples,
        floor_ms=None if candidate.peer else floor_ms(setting.floor, size, recipe, fp8=fp8),
        flops=3.5 * size.flops(),
        fp8=fp8,
        baseline=candidate.baseline,
        values={FORWARD_MS: forward_ms, FORWARD_RATE: size.flops() / forward_ms / 1e9},
        targets=TARGETS.get(size, ()) if recipe is not None else (),
    )


def rows(setting: Setting, sizes: Sequence[AttentionSize] = SIZES) -> Iterator[Row]:
    """All candidates on every size."""
    for size in sizes:
        problem = Problem.make(size, setting.generator())
        right = exact(problem, causal=size.causal)
        for candidate in candidates(setting, size):
            run = partial(measure, setting, size, candidate, problem, right)
            yield setting.attempt(size.describe(), candidate.name, run)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", nargs=3, metavar=("B", "S", "MASK"), help="one shape; MASK is causal or full"
    )


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    if options.shape is None:
        return rows(setting)
    B, S, mask = options.shape
    return rows(setting, [AttentionSize(int(B), int(S), causal=mask == "causal")])


SUBJECT = Subject(
    "attention",
    "Attention",
    __doc__,
    (
        report.NAME,
        report.decibels(*NAMES),
        report.Column(FORWARD_MS, 3),
        report.Column(FORWARD_RATE, 0),
        replace(report.TIME, title="both GPU ms (quartiles)"),
        report.FLOPS,
        report.FLOOR,
        report.TIMES_FLOOR,
        report.SPEED_UP,
        report.CEILING,
        report.TARGET,
    ),
    _rows,
    _options,
)


main = partial(report.main, SUBJECT)

if __name__ == "__main__":
    report.finish(main())
