"""Find the fastest mesh, and where FP8 stops paying on a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from float8lab.inspect.scale.mesh import Mesh, meshes
from float8lab.inspect.scale.predict import Job, Step, predict
from float8lab.inspect.scale.sizes import ModelSize
from float8lab.recipes import ALL, Recipe, cost

__all__ = ["RECIPES", "Gemm", "best", "by_tokens", "fastest", "gemms_of_rank"]

RECIPES: dict[str, Recipe] = {name: r for name, r in ALL.items() if cost.has_rates(r)}
"""Recipes whose speed is known, by name."""
_FEWEST_TOKENS = 64


def _ways(job: Job, mesh: Mesh, micro: int | None, recompute: bool | None) -> Iterator[Job]:
    per_rank, remainder = divmod(job.batch, mesh.dp)
    ranks = mesh.dp * mesh.cp
    if remainder or not per_rank or (job.shard and ranks % min(job.shard, ranks)):
        return
    sizes = [2**power for power in range(per_rank.bit_length())] if micro is None else [micro]
    for sequences in [size for size in sizes if per_rank % size == 0]:
        for recomputed in (False, True) if recompute is None else (recompute,):
            yield replace(job, micro=sequences, recompute=recomputed)


def best(
    size: ModelSize, recipe: Recipe | None, job: Job, mesh: Mesh, micro: int | None = None,
    recompute: bool | None = None,
) -> Step | None:  # fmt: skip
    """Return the fastest step on a mesh that fits in memory, or else that of the least memory.

    ``micro`` and ``recompute`` replace those of the job; None tries powers of two, and both values.
    The result is None if the mesh cannot share the batch.
    """
    steps = [predict(size, recipe, variant, mesh) for variant in _ways(job, mesh, micro, recompute)]
    if fitting := [step for step in steps if step.fits]:
        return min(fitting, key=lambda step: step.seconds)
    return min(steps, key=lambda step: step.bytes, default=None)


def fastest(
    size: ModelSize, recipe: Recipe | None, job: Job, gpus: int, micro: int | None = None,
    recompute: bool | None = None,
) -> list[Step]:  # fmt: skip
    """Return the best step on each mesh, the fastest first; those beyond the memory are last."""
    layouts = meshes(size, gpus, job.sequence, job.links)
    steps = filter(None, (best(size, recipe, job, mesh, micro, recompute) for mesh in layouts))
    return sorted(
        steps, key=lambda step: (not step.fits, step.seconds if step.fits else step.bytes)
    )


@dataclass(frozen=True)
class Gemm:
    """The shard of a linear layer on a rank, and how many times faster FP8 makes it."""

    name: str
    N: int
    K: int
    gains: dict[str, float]


def gemms_of_rank(size: ModelSize, job: Job, mesh: Mesh, recipes: dict[str, Recipe]) -> list[Gemm]:
    """Predict the gains of each linear layer of a rank, forward and backward with casts."""
    M = job.micro * job.sequence // mesh.cp
    expert_rows = -(-M * size.active * mesh.ep // size.experts) if size.experts else M
    names = ("qkv", "attention out", "gate and up" if size.gated else "up", "down")
    weights = size.attention_weights(mesh.tp) + size.mlp_weights(size.ffn, mesh.tp)
    result = []
    for name, (N, K), rows in zip(names, weights, (M, M, expert_rows, expert_rows), strict=True):
        high_seconds = cost.estimate(None, rows, N, K).gpu
        gains = {
            key: high_seconds / cost.estimate(recipe, rows, N, K).gpu
            for key, recipe in recipes.items()
        }
        result.append(Gemm(name if rows == M else f"{name} of an expert", N, K, gains))
    return result


def by_tokens(
    size: ModelSize, job: Job, mesh: Mesh, recipes: dict[str, Recipe]
) -> dict[int, dict[str, float]]:
    """Predict how many times faster FP8 is, by the tokens of a micro-batch on each rank."""
    # The number of micro-batches stays. Once they have one sequence, sequences get shorter.
    count = job.batch // mesh.dp // job.micro
    speedups: dict[int, dict[str, float]] = {}
    micro, sequence = job.micro, job.sequence
    while True:
        smaller = replace(job, micro=micro, sequence=sequence, batch=count * mesh.dp * micro)
        if mesh.why_not(size, sequence):
            return speedups
        high_seconds = predict(size, None, smaller, mesh).seconds
        speedups[micro * sequence // mesh.cp] = {
            name: high_seconds / predict(size, recipe, smaller, mesh).seconds
            for name, recipe in recipes.items()
        }
        if micro > 1:
            micro //= 2
        elif sequence // 2 // mesh.cp >= _FEWEST_TOKENS and sequence % 2 == 0:
            sequence //= 2
        else:
            return speedups
