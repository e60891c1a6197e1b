"""Attention, forward and forward with backward: torch's bfloat16 backends and FP8, casts included.

    python -m benchmarks.attention [--compile] [--shape 4 4096 causal]

This needs a CUDA GPU. There are 32 heads of 128 features. ``DotProductAttention`` is ours; in FP8
its inputs and the gradient of its output are bfloat16, and the times contain their casts. The
baseline is cuDNN in bfloat16 or, for windows and packed sequences, torch's flash attention, which
has both. All are compared with float32 arithmetic, head by head. FLOPs are those of two GEMMs
forward and five backward, for the unmasked scores. The floor is the time of these FLOPs at the rate
of the fastest GEMM of the same precision, plus the time to move every tensor once.

B batch, S positions, H heads, D head size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

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
"""The least SQNR; rounding the probabilities and the output to bfloat16 leaves over 45 dB."""
FP8_FLOOR_DB = 15.0
"""The least SQNR after two GEMMs forward and five backward of e4m3 and e5m2 operands."""
FORWARD_MS, FORWARD_RATE = "forward ms", "forward TFLOP/s"


class AttentionSize(NamedTuple):
    """The sizes and the mask of a self attention."""

    B: int
    S: int
    H: int = 32
    D: int = 128
    causal: bool = True
    window: int | None = None
    """The number of keys before its own position that a causal query sees; None stands for all."""
    packed: bool = False
    """Whether the sequences are concatenated, with their boundaries in ``cu_seqlens``."""

    @property
    def is_for_varlen(self) -> bool:
        """Whether the baseline is ``varlen_attn``, as scaled_dot_product_attention lacks this."""
        return self.packed or self.window is not None

    def describe(self) -> str:
        """Return the name of this size in tables."""
        batch = f"{self.B} packed sequences" if self.packed else f"batch {self.B}"
        mask = "causal" if self.causal else "full"
        if self.window is not None:
            mask = f"window of {self.window}"
        return f"{batch}, {self.S} positions, {mask}, {self.H} heads of {self.D}"

    def flops(self) -> float:
        """Count the FLOPs of the forward."""
        flops = attention_flops(self.B, self.H, self.S, self.D, causal=self.causal)
        if self.window is None:
            return flops
        hidden = max(self.S - self.window, 0)  # keys that the last query does not see
        return flops - attention_flops(self.B, self.H, hidden, self.D, causal=True)

    def hidden(self, device: torch.device) -> Tensor | None:
        """Return the mask ``[S, S]`` of keys that a query does not see; None if it sees all."""
        if not self.causal:
            return None
        hidden = torch.ones(self.S, self.S, dtype=torch.bool, device=device).triu(1)
        if self.window is not None:
            hidden |= torch.ones_like(hidden).tril_(-self.window - 1)
        return hidden

    def ends(self, device: torch.device) -> Tensor:
        """Return ``cu_seqlens`` of the sequences, ``[B + 1]``."""
        stop = self.B * self.S + 1
        return torch.arange(0, stop, self.S, dtype=torch.int32, device=device)


SIZES = (
    AttentionSize(4, 4096),
    AttentionSize(4, 4096, causal=False),
    AttentionSize(1, 16384),
    AttentionSize(1, 32768, window=1024),
    AttentionSize(1, 32768, window=4096),
    AttentionSize(8, 4096, packed=True),
)
_BOUNDS = ((620.0, 600.0), (800.0, 720.0), (850.0, 700.0))
TARGETS = {
    size: (Target(FORWARD_RATE, ">=", forward), Target("TFLOP/s", ">=", both))
    for size, (forward, both) in zip(SIZES, _BOUNDS, strict=False)
}
"""The targets of the FP8 candidates by size."""


class Problem(NamedTuple):
    """The inputs and the output's gradient, ``[B, S, H, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def make(cls, size: AttentionSize, generator: torch.Generator) -> Problem:
        """Draw normal values in bfloat16."""
        shape = (size.B, size.S, size.H, size.D)
        device = generator.device
        return cls(
            *(torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(4))
        )


def exact(problem: Problem, hidden: Tensor | None) -> dict[str, Tensor]:
    """Compute the output and the gradients in float32, ``[B, S, H, D]``."""
    B, _, H, D = problem.q.shape
    results = {name: torch.empty_like(problem.q, dtype=torch.float32) for name in NAMES}
    scale = D**-0.5
    for b in range(B):
        for h in range(H):
            q, k, v, dout = (x[b, :, h].float() for x in problem)
            scores = q @ k.t() * scale
            if hidden is not None:
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
    """Torch's scaled_dot_product_attention with one backend."""

    def __init__(self, backend: SDPBackend, size: AttentionSize) -> None:
        super().__init__()
        self.backend, self.causal = backend, size.causal and size.window is None
        hidden = size.hidden(torch.device("cpu")) if size.window is not None else None
        self.seen = None if hidden is None else ~hidden

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(self.backend):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=self.seen, is_causal=self.causal
            )
        return out.transpose(1, 2).flatten(2)


class Packed(nn.Module):
    """Attention of packed sequences, called with a batch of sequences of equal length."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.attend(*(x.flatten(0, 1) for x in (q, k, v)))
        return out.view(*q.shape[:2], -1)


def flash(size: AttentionSize, device: torch.device) -> nn.Module:
    """Make torch's flash attention of packed sequences, which has windows."""
    ends, left = size.ends(device), -1 if size.window is None else size.window
    return Packed(
        partial(
            varlen_attn, cu_seq_q=ends, cu_seq_k=ends, max_q=size.S, max_k=size.S,
            window_size=(left, 0 if size.causal else -1),
        )
    )  # fmt: skip


def ours(size: AttentionSize, recipe: Recipe | None, device: torch.device) -> nn.Module:
    """Make our ``DotProductAttention``, which runs in FP8 if a recipe is given."""
    mask = "causal" if size.causal else "no_mask"
    if size.packed:
        mask = "padding_causal" if size.causal else "padding"
    module = float8lab.DotProductAttention(
        size.H,
        size.D,
        qkv_format="thd" if size.packed else "bshd",
        attn_mask_type=mask,
        window_size=None if size.window is None else (size.window, 0),
    )
    if recipe is not None:
        recipe = replace(recipe, fp8_dpa=True)
    context, ends = our_context(recipe), size.ends(device)
    if not size.packed:
        return InContext(module, context)
    return Packed(
        InContext(
            module, context, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=size.S,
            max_seqlen_kv=size.S,
        )
    )  # fmt: skip


def floor_ms(floor: Floor, size: AttentionSize, recipe: Recipe | None, *, fp8: bool) -> float:
    """Return the floor of forward and backward in ms, from FLOPs and bytes."""
    elements = size.B * size.S * size.H * size.D
    # Forward: read q, k, v, write out; backward: read these and dout, write three gradients.
    moved = (4 + 8) * 2.0 * elements
    if recipe is not None:
        # The casts read q, k, v, dout and write them in one byte; the kernels read these bytes.
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
    """Iterate over torch's backends, ours, and other libraries."""
    device, is_cpu = setting.device, setting.device.type == "cpu"
    backends = {"math bfloat16": SDPBackend.MATH} if is_cpu else {
        "cuDNN bfloat16": SDPBackend.CUDNN_ATTENTION,
        "flash bfloat16": SDPBackend.FLASH_ATTENTION,
    }  # fmt: skip
    if not is_cpu and size.is_for_varlen:
        yield Candidate("flash bfloat16", partial(flash, size, device), baseline=True)
        backends = {}
    for index, (name, backend) in enumerate(backends.items()):
        yield Candidate(name, partial(Sdpa, backend, size), baseline=index == 0)
    for mode in setting.modes:
        compiled = mode == "compile"
        suffix = ", compile" if compiled else ""
        bf16 = f"DotProductAttention, bfloat16{suffix}"
        yield Candidate(bf16, partial(ours, size, None, device), compiled=compiled)
        # How attention is cast depends on whether scales are delayed, not on a recipe's blocks.
        for name in setting.recipes:
            if name in ("delayed", "current"):
                recipe = RECIPES[name]()
                yield Candidate(
                    f"DotProductAttention, FP8 {name}{suffix}",
                    partial(ours, size, recipe, device),
                    fp8=True,
                    recipe=recipe,
                    compiled=compiled,
                )
    if size.is_for_varlen:
        return
    for name, is_fp8, make_peer in attention_peers(size.H, size.D, causal=size.causal):
        yield Candidate(name, make_peer, fp8=is_fp8, peer=True)


def measure(
    setting: Setting,
    size: AttentionSize,
    candidate: Candidate,
    problem: Problem,
    right: dict[str, Tensor],
) -> Row:
    """Check the output and the gradients of a candidate, then time it."""
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

    for _ in range(2):  # afterwards delayed scales have a history
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
    """Measure all candidates on every size."""
    for size in sizes:
        problem = Problem.make(size, setting.generator())
        right = exact(problem, size.hidden(setting.device))
        for candidate in candidates(setting, size):
            run = partial(measure, setting, size, candidate, problem, right)
            yield setting.attempt(size.describe(), candidate.name, run)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        nargs=3,
        metavar=("B", "S", "MASK"),
        help="one shape; MASK is causal, full, packed, or the number of keys of a causal window",
    )


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    if options.shape is None:
        return rows(setting)
    B, S, mask = options.shape
    window = int(mask) if mask.isdecimal() else None
    size = AttentionSize(int(B), int(S), causal=mask != "full", window=window)
    return rows(setting, [size._replace(packed=mask == "packed")])


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
