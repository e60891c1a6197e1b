"""Describe how GPUs share work: a mesh of five kinds of parallelism, and all meshes to choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from float8lab.arguments import check_size
from float8lab.inspect.scale.sizes import ModelSize, read_pairs

__all__ = ["Links", "Mesh", "meshes", "parse"]


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links between GPUs; rates are bytes a second that one GPU sends."""

    node: int = 8
    """The number of GPUs in a machine."""
    nvlink: float = 260e9
    """The rate of NCCL's collectives within a machine, measured between two H200s by
    ``benchmarks/links.py``."""
    network: float = 45e9
    """The rate between machines, for each GPU."""
    hop: float = 1e-6
    """Seconds of latency between GPUs; between machines it is five times as much."""

    def seconds(self, size: float, ranks: int, stride: int, *, ring: bool = False) -> float:
        """Predict the seconds of an all-gather or a reduce-scatter of ``size`` bytes in total.

        The ranks of a group are every ``stride``-th, and those of a machine are neighbours. In a
        ``ring``, data go from rank to rank, and only one GPU of a machine sends to the next.

        >>> from float8lab.inspect.scale.mesh import Links
        >>> f"{1e3 * Links().seconds(360e6, ranks=2, stride=1):.2f} ms"
        '0.69 ms'
        """
        if ranks == 1:
            return 0.0
        near = max(1, min(ranks, self.node // stride))
        machines = -(-ranks // near)
        cards = 1 if ring else near  # each GPU has its own network card
        rate = self.nvlink if machines == 1 else min(self.nvlink, cards * self.network)
        hops = near - 1 + 5 * (machines - 1)
        return size * (ranks - 1) / ranks / rate + self.hop * hops


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Ranks of each kind of parallelism; tensor parallel ranks are neighbours, stages are not."""

    dp: int = 1
    """Data parallel ranks, among which parameters are sharded (FSDP2)."""
    tp: int = 1
    """Tensor and sequence parallel ranks."""
    cp: int = 1
    """Context parallel ranks, which share each sequence."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Expert parallel ranks, which share the experts; they are some or all of ``dp * cp`` ranks."""

    def __post_init__(self) -> None:
        for name, ranks in vars(self).items():
            check_size(f"mesh {name}", ranks, minimum=1)

    @property
    def gpus(self) -> int:
        """The total number of GPUs."""
        return self.dp * self.tp * self.cp * self.pp

    def __str__(self) -> str:
        return ",".join(f"{name}={n}" for name, n in vars(self).items() if n > 1 or name == "dp")

    def why_not(self, size: ModelSize, sequence: int) -> str:
        """Return why this mesh cannot share a model, or an empty string if it can."""
        chunks = self.tp * (2 * self.cp if self.cp > 1 else 1)  # equal chunks of a sequence
        divisions = (
            ("tp", "the key-value heads", size.kv_heads, self.tp),
            ("tp", "the features of the MLP", size.ffn, self.tp),
            ("tp", "the vocabulary", size.vocabulary + -size.vocabulary % 128, self.tp),
            ("cp and tp", "two parts of the sequence a rank", sequence, chunks),
            ("ep", "the experts", size.experts or 1, self.ep),
            ("ep", "dp * cp", self.dp * self.cp, self.ep),
        )
        for name, dimension, extent, ranks in divisions:
            if extent % ranks:
                return f"{name} must divide {dimension} ({extent}); got {ranks}"
        if self.pp > size.layers:
            return f"pp must be at most the layers ({size.layers}); got {self.pp}"
        return ""


def parse(text: str, gpus: int | None) -> Mesh:
    """Read a mesh such as ``"dp=32,tp=8"``; the default of ``dp`` makes the mesh use all GPUs.

    >>> from float8lab.inspect.scale.mesh import parse
    >>> parse("tp=8,cp=4", 1024)
    Mesh(dp=32, tp=8, cp=4, pp=1, ep=1)
    """
    ranks = read_pairs("mesh", text, [*Mesh.__dataclass_fields__])
    mesh = Mesh(**ranks)
    if gpus is None or mesh.gpus == gpus:
        return mesh
    if "dp" in ranks or gpus % mesh.gpus:
        raise ValueError(
            f"mesh must be of {gpus} GPUs; got {text!r}, which is of {mesh.gpus}. "
            "dp * tp * cp * pp is the number of GPUs."
        )
    return Mesh(**{**ranks, "dp": gpus // mesh.gpus})


def meshes(size: ModelSize, gpus: int, sequence: int, links: Links) -> Iterator[Mesh]:
    """Yield all meshes of this many GPUs that can share a model, in powers of two."""
    for tp in _powers(min(gpus, links.node)):
        for cp in _powers(min(gpus // tp, 16)):
            for pp in _powers(min(gpus // tp // cp, 16)):
                if gpus % (tp * cp * pp):
                    continue
                dp = gpus // (tp * cp * pp)
                for ep in _powers(min(size.experts, dp * cp)) if size.experts else (1,):
                    mesh = Mesh(dp=dp, tp=tp, cp=cp, pp=pp, ep=ep)
                    if not mesh.why_not(size, sequence):
                        yield mesh


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
