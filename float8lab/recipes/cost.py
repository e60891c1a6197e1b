"""Predict GPU and CPU seconds of the work of a training step, from rates measured on an H200.

M tokens, N out features, K in features, E experts.

A training step of a linear layer is three GEMMs of ``2 M N K`` operations and, in FP8, a cast of x,
w and dy in both orientations. Experts share the tokens, but each expert has its own weight, which
is read and cast. Calls also take CPU time, whatever the size of their tensors. ``recipes.Auto``,
``inspect.advise`` without a GPU and ``python -m float8lab scale`` all predict by these functions.

Sources: benchmarks/RESULTS.md, one H200.

- GEMM rates: floors of "Linear layer" at commit 8b34738, minus the bytes of the casts at the rate
  of a copy, median of the three shapes. The rates of blocks, and the gain of fprop by rows: "GEMM".
- Casts: the line through the two sizes of "Quantize"; for blocks, at that commit. The time that a
  norm or an activation adds: the three tables below "Quantize" at commit 8b420462; for rows, which
  are missing there, the rows of "Norm and MLP" on an H100, scaled by its rate of a copy. Experts:
  times with which "Grouped linear layer" was met within 10 % on an H200 at cbf53cf; a grouped GEMM
  takes the hypotenuse of its compute time and its memory time.
- CPU: "CPU overhead": a layer of bfloat16 by itself; in FP8, also what the GPT's issue takes longer
  for each of its 56 layers. On the slow host of that table, eager blocks took 0.88 of rows' time.
- Attention: the line through the three shapes of "FP8 attention".
- Sustained load, with the GPU at its power limit: GEMMs and attention slow down by the excess of
  the rows of "Training steps of 8 layers" over the parts measured separately.
- Sharding: "FSDP2", on 2 H200s, compared with those rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from float8lab.recipes.recipe import Recipe

__all__ = [
    "MODES", "SHARDING", "Parts", "attention", "cast", "estimate", "gemm", "has_rates",
    "moved", "prologues",
]  # fmt: skip

MODES = ("eager", "compile", "cuda_graph")
"""How a model's calls reach the GPU."""
SHARDING = 14e-12
"""GPU seconds per parameter and step of gathering sharded parameters for forward and backward and
of scattering their gradients: the copies, and the slowdown of kernels that run beside them."""


class _PrologueTimes(NamedTuple):
    """GPU seconds per element for computing a norm, an activation or an activation's gradient.

    In FP8 this time is added to that of the cast, which computes the element.
    """

    norm: float
    activation: float
    gradient: float


@dataclass(frozen=True, kw_only=True)
class _Rates:
    """Rates, and times in seconds, of layers whose tensors have one kind of scales."""

    gemm: tuple[float, float, float]
    """Operations per second of fprop, dgrad and wgrad."""
    cast: float = 0.0
    """GPU time per element cast in both orientations; 0 in high precision."""
    grouped_cast: float = 0.0
    """The same for tensors that experts share, or that hold one weight per expert."""
    cast_start: float = 0.0
    """GPU time per tensor, whatever its size."""
    eager: float
    """CPU time of forward and backward."""
    compiled: float
    """The same in a compiled graph."""
    slowdown: float
    """Factor by which a GEMM takes longer under sustained load."""
    prologues: _PrologueTimes
    attention: float
    """GPU time of attention per element of q: casts, and other work proportional to q."""

    def cpu(self, mode: str) -> float:
        """Return the CPU time of forward and backward; a CUDA graph needs none."""
        return {"eager": self.eager, "compile": self.compiled, "cuda_graph": 0.0}[mode]


_COPY = 4.27e12
"""Bytes per second, read and written."""
_GEMM_START = 3.8e-6
"""GPU time of a kernel with almost no work: that of a cast with a given scale."""
_BFLOAT16 = _Rates(
    gemm=(763e12, 763e12, 763e12), eager=93e-6, compiled=42e-6, slowdown=1.13,
    prologues=_PrologueTimes(1.03e-12, 1.52e-12, 1.27e-12), attention=4.8e-12,
)  # fmt: skip
_ATTENTION = {False: 581e12, True: 812e12}
"""Operations per second of attention, forward and backward, by whether it is FP8; head size 128."""
_FP8: dict[tuple[tuple[int, ...], bool], _Rates] = {
    ((-1, -1), True): _Rates(
        gemm=(1451e12, 1451e12, 1451e12), slowdown=1.20,
        cast=1.03e-12, grouped_cast=1.36e-12, cast_start=3.8e-6, eager=475e-6, compiled=220e-6,
        prologues=_PrologueTimes(0.19e-12, 0.48e-12, 0.51e-12), attention=12e-12,
    ),
    ((-1, -1), False): _Rates(
        gemm=(1451e12, 1451e12, 1451e12), slowdown=1.20,
        cast=1.49e-12, grouped_cast=1.89e-12, cast_start=9.0e-6, eager=325e-6, compiled=170e-6,
        prologues=_PrologueTimes(0.19e-12, 0.92e-12, 0.78e-12), attention=14e-12,
    ),
    ((1, -1), False): _Rates(
        gemm=(1545e12, 1351e12, 1351e12), slowdown=1.24,
        cast=1.68e-12, grouped_cast=2.54e-12, cast_start=12.6e-6, eager=420e-6, compiled=160e-6,
        prologues=_PrologueTimes(1.00e-12, 2.20e-12, 2.20e-12), attention=14e-12,
    ),
    ((1, 128), False): _Rates(
        gemm=(1290e12, 1290e12, 1040e12), slowdown=1.22,
        cast=1.05e-12, grouped_cast=1.42e-12, cast_start=4.6e-6, eager=370e-6, compiled=150e-6,
        prologues=_PrologueTimes(0.18e-12, 0.61e-12, 0.79e-12), attention=14e-12,
    ),
}  # fmt: skip
"""Rates by the block shape of x, and by whether scales are delayed."""


class Parts(NamedTuple):
    """Seconds of a training step; GPU time is split by kind of work."""

    quantize: float
    gemm: float
    cpu: float

    @property
    def gpu(self) -> float:
        """All GPU time."""
        return self.quantize + self.gemm


def has_rates(recipe: Recipe | None) -> bool:
    """Whether the speed of a recipe was measured."""
    return recipe is None or (recipe.linear.x.block, recipe.linear.delayed) in _FP8


def _rates(recipe: Recipe | None) -> _Rates:
    if not has_rates(recipe):
        raise ValueError(
            f"recipe must have scales per tensor, row or 1x128 block; got {recipe!r}. "
            "Of others no speed is known."
        )
    return _BFLOAT16 if recipe is None else _FP8[recipe.linear.x.block, recipe.linear.delayed]


def estimate(
    recipe: Recipe | None, M: int, N: int, K: int, *, experts: int = 1, mode: str = "eager",
    sustained: bool = False,
) -> Parts:  # fmt: skip
    """Predict the time of a linear layer's training step on a Hopper GPU; None is bfloat16.

    Experts share the ``M`` rows. ``sustained``: the GPU is at its power limit, as in long training.

    Raises:
        ValueError: the recipe's kind of scales was not measured, as Hopper has no GEMM for it.

    >>> from float8lab.recipes import DelayedScaling
    >>> bf16, fp8 = (estimate(r, 16384, 4096, 14336).gpu for r in (None, DelayedScaling()))
    >>> print(f"{1e3 * bf16:.1f} ms, {1e3 * fp8:.1f} ms")
    7.6 ms, 4.4 ms
    """
    plan = recipe.linear if recipe is not None else None
    rows = M / experts
    shapes = {"fprop": (rows, N, K), "dgrad": (rows, K, N), "wgrad": (N, K, rows)}
    gemms = sum(
        gemm(recipe if getattr(plan, op, None) else None, op, *sizes, experts, sustained=sustained)
        for op, sizes in shapes.items()
    )
    casts = sum(cast(recipe, n, grouped=experts > 1) for n in (M * N, M * K, experts * N * K))
    return Parts(casts, gemms, _rates(recipe).cpu(mode))


def cast(recipe: Recipe | None, elements: int, *, grouped: bool = False) -> float:
    """Return GPU seconds of a cast in both orientations, ``grouped`` by experts; 0 in bfloat16."""
    rates = _rates(recipe)
    return rates.cast_start + elements * (rates.grouped_cast if grouped else rates.cast)


def gemm(
    recipe: Recipe | None, op: str, rows: float, columns: float, depth: float, experts: int = 1,
    *, sustained: bool = False,
) -> float:  # fmt: skip
    """Return GPU seconds of the GEMM ``"fprop"``, ``"dgrad"`` or ``"wgrad"`` that contracts depth.

    For several experts, whose GEMMs are one grouped GEMM, the sizes are those of one expert.

    >>> print(f"{1e3 * gemm(None, 'fprop', 16384, 4096, 4096):.2f} ms")
    0.72 ms
    """
    rates = _rates(recipe)
    rate = rates.gemm[("fprop", "dgrad", "wgrad").index(op)] / experts
    busy = 2 * rows * columns * depth / rate * (rates.slowdown if sustained else 1.0)
    size = 2 * rows * columns + (2 if recipe is None else 1) * depth * (rows + columns)
    return _GEMM_START + (max if experts == 1 else math.hypot)(busy, moved(experts * size))


def attention(
    recipe: Recipe | None, size: float, length: int, *, causal: bool = True, sustained: bool = False
) -> float:
    """Return GPU seconds of attention, forward and backward; in FP8 if the recipe has ``fp8_dpa``.

    Args:
        recipe: None is bfloat16.
        size: elements of q, in all sequences and heads.
        length: positions that each query may see.
        causal: each query sees half of them on average.

    >>> print(f"{1e3 * attention(None, 16384 * 4096, 4096):.2f} ms")
    3.63 ms
    """
    fp8 = recipe is not None and recipe.fp8_dpa
    operations = 14.0 * size * length * (0.5 if causal else 1.0)
    seconds = size * (_rates(recipe) if fp8 else _BFLOAT16).attention
    return seconds + (_BFLOAT16.slowdown if sustained else 1.0) * operations / _ATTENTION[fp8]


def moved(size: float) -> float:
    """Return GPU seconds of reading or writing ``size`` bytes."""
    return size / _COPY


def prologues(recipe: Recipe | None) -> _PrologueTimes:
    """Return GPU seconds per element of norms and activations, without any cast."""
    return _rates(recipe).prologues
