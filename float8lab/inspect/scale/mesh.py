"""How GPUs share the work: a mesh of five kinds of parallelism, and all meshes of so many GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from float8lab.arguments import check_size
from float8lab.inspect.scale.sizes import ModelSize, read_pairs

__all__ = ["Links", "Mesh", "meshes", "parse"]


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links between GPUs, in bytes a second that one GPU sends."""

    node: int = 8
    """GPUs of one machine."""
    nvlink: float = 260e9
    """Within a machine, as NCCL's collectives reach it: between two H200s, by ``links.py`` of the
    benchmarks."""
    network: float = 45e9
    """Between machines, for each GPU."""
    hop: float = 1e-6
    """Seconds from one GPU to the next, and five times as many from machine to machine."""

    def seconds(self, size: float, ranks: int, stride: int, *, ring: bool = False) -> float:
        """Seconds of an all-gather or a reduce-scatter of ``size`` bytes in all.

        Ranks of a group are ``stride`` from each other, and those of one machine are neighbours.
        In a ``ring`` all goes from rank to rank, and from machine to machine by one GPU.

        >>> from float8lab.inspect.scale.mesh import Links
        >>> f"{1e3 * Links().seconds(360e6, ranks=2, stride=1):.2f} ms"
        '0.69 ms'
        """
        if ranks == 1:
            return 0.0
        near = max(1, min(ranks, self.node // stride))
        machines = -(-ranks // near)
        cards = 1 if ring else near  # each GPU has a network card of its own
        rate = self.nvlink if machines == 1 else min(self.nvlink, cards * self.network)
        hops = near - 1 + 5 * (machines - 1)
        return size * (ranks - 1) / ranks / rate + self.hop * hops


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Ranks of each kind of parallelism; tensor parallel ranks are neighbours, not stages."""

    dp: int = 1
    """Data parallel ranks, among which parameters are sharded (FSDP2)."""
    tp: int = 1
    """Tensor and sequence parallel ranks."""
    cp: int = 1
    """Context parallel ranks, which share each sequence."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Ranks that share the experts; these are ``dp * cp`` ranks, or some of them."""

    def __post_init__(self) -> None:
        for name, ranks in vars(self).items():
            check_size(f"mesh {name}", ranks, minimum=1)

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.dp * self.tp * self.cp * self.pp

    def __str__(self) -> str:
        return ",".join(f"{name}={n}" for name, n in vars(self).items() if n > 1 or name == "dp")

    def why_not(self, size: ModelSize, sequence: int) -> str:
        """Why a model cannot be shared in this way; empty if it can."""
        chunks = self.tp * (2 * self.cp if self.cp > 1 else 1)  # of equal length, of a sequence
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
    """Read a mesh such as ``"dp=32,tp=8"``; without ``dp``, it is what is left of the GPUs.

    >>> from float8lab.inspect.scale.mesh import parse
    >>> parse("tp=8,cp=4", 1024)
    Mesh(dp=32, tp=8, cp=4, pp=1, ep=1)
    """
    told = read_pairs("mesh", text, [*Mesh.__dataclass_fields__])
    mesh = Mesh(**told)
    if gpus is None or mesh.gpus == gpus:
        return mesh
    if "dp" in told or gpus % mesh.gpus:
        raise ValueError(
            f"mesh must be of {gpus} GPUs; got {text!r}, which is of {mesh.gpus}. "
            "dp * tp * cp * pp is the number of GPUs."
        )
    return Mesh(**{**told, "dp": gpus // mesh.gpus})


def meshes(size: ModelSize, gpus: int, sequence: int, links: Links) -> Iterator[Mesh]:
    """All meshes of so many GPUs that a model can be shared by, in powers of two."""
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
