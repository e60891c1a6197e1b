"""List gains of FP8 that others published for many GPUs, and predict the same work.

These gains were not measured by this project, and not with its kernels. They are of torchao's FP8,
whose casts cost more, on machines that are only partly described. Assumptions are named as such.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from float8lab.inspect.scale.mesh import Mesh
from float8lab.inspect.scale.predict import Job, predict
from float8lab.inspect.scale.search import RECIPES
from float8lab.inspect.scale.sizes import KNOWN

__all__ = ["PUBLISHED", "Published"]


@dataclass(frozen=True)
class Published:
    """A published ratio of tokens a second, FP8 to bfloat16."""

    label: str
    source: str
    least: float
    most: float
    model: str
    recipe: str
    mesh: Mesh
    job: Job
    assumed: str = ""
    """Assumptions about facts that the source does not state."""
    baseline: Job | None = None
    """How bfloat16 runs; None if it runs as FP8 does."""

    def predicted(self) -> float:
        """Compute the same ratio by ``predict``."""
        size = KNOWN[self.model]
        high_precision = predict(size, None, self.baseline or self.job, self.mesh)
        fp8 = predict(size, RECIPES[self.recipe], self.job, self.mesh)
        return high_precision.seconds / fp8.seconds


_TORCHTITAN = "github.com/pytorch/torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
_CRUSOE = (
    "pytorch.org/blog, Accelerating Large Scale Training and Convergence with PyTorch Float8 "
    "Rowwise on Crusoe 2K H200s"
)
_VANILLA = Job(batch=512, micro=16, recompute=True)
_ASYNC = replace(_VANILLA, tp_overlap=0.5)

PUBLISHED = (
    Published(
        "70B, 256 H100, tensorwise, TP 8", _TORCHTITAN, 1.36, 1.36, "llama-3-70b", "current",
        Mesh(dp=32, tp=8), _VANILLA,
    ),
    Published(
        "70B, 256 H100, tensorwise, async TP 8", _TORCHTITAN, 1.44, 1.44, "llama-3-70b",
        "current", Mesh(dp=32, tp=8), _ASYNC, "half of TP is hidden",
    ),
    Published(
        "the same, of bfloat16 without async TP", _TORCHTITAN, 1.58, 1.58, "llama-3-70b",
        "current", Mesh(dp=32, tp=8), _ASYNC, "half of TP is hidden", _VANILLA,
    ),
    Published(
        "70B, 1,920 H200, rowwise, HSDP and CP", _CRUSOE, 1.34, 1.43, "llama-3-70b", "rowwise",
        Mesh(dp=960, cp=2), Job(batch=1920, micro=2, recompute=True, shard=64),
        "CP 2, 8192 tokens a GPU, recomputed, 64 ranks share parameters",
    ),
)  # fmt: skip
"""Published gains on 256 and about 2,000 GPUs. The first source also has 1.00x for rowwise with TP
8, and says that this result is being investigated."""
