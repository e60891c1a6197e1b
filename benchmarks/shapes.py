"""Linear layers of real models.  M tokens, K input features, N output features."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MODELS", "LinearShape", "select"]


@dataclass(frozen=True)
class LinearShape:
    """One linear layer on a batch: ``y[M, N] = x[M, K] @ w[N, K].T``."""

    name: str
    M: int
    K: int
    N: int

    def gemms(self) -> dict[str, tuple[int, int, int]]:
        """Return rows, columns and contraction length of the three GEMMs of a training step."""
        return {
            "fprop": (self.M, self.N, self.K),
            "dgrad": (self.M, self.K, self.N),
            "wgrad": (self.N, self.K, self.M),
        }

    def flops(self) -> int:
        """Count FLOPs of forward and backward: each of the three GEMMs has ``2 * M * N * K``."""
        return sum(2 * rows * columns * depth for rows, columns, depth in self.gemms().values())

    def describe(self) -> str:
        """Return the name of this shape in tables.

        >>> LinearShape("up", 16, 8, 32).describe()
        'up: 16 x 8 -> 32'
        """
        return f"{self.name}: {self.M} x {self.K} -> {self.N}"


MODELS = {
    "llama-8b": (
        LinearShape("attention out", 16384, 4096, 4096),
        LinearShape("up", 16384, 4096, 14336),
        LinearShape("down", 16384, 14336, 4096),
    ),
    "llama-70b": (
        LinearShape("attention out", 8192, 8192, 8192),
        LinearShape("up", 8192, 8192, 28672),
        LinearShape("down", 8192, 28672, 8192),
    ),
    "gpt2-124m": (
        LinearShape("qkv", 16384, 768, 2304),
        LinearShape("attention out", 16384, 768, 768),
        LinearShape("up", 16384, 768, 3072),
        LinearShape("down", 16384, 3072, 768),
    ),
}


def select(model: str, M: int | None = None) -> list[LinearShape]:
    """Return the layers of one of ``MODELS``, with ``M`` tokens if it is given."""
    return [LinearShape(s.name, M or s.M, s.K, s.N) for s in MODELS[model]]
