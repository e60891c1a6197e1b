"""A tensor of a checkpoint to look at: a weight in FP8 or 4 bits with its scales, or any other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from float8lab.checkpoints.source import Box, Entry, whole_box
from float8lab.formats import Spec
from float8lab.tensor.blocks import expand_scale
from float8lab.tensor.float4_tensor import decode_codes

__all__ = ["Finding", "Item", "blocks_of_box", "broadcast_box", "sizes", "usual_name"]

_USUAL_NAMES = (
    (re.compile(r"e2m1 (1x)*16(x1)* e4m3 fp32"), "nvfp4"),
    (re.compile(r"e2m1 (1x)*32(x1)* e8m0"), "mxfp4"),
    (re.compile(r"e4m3 (1x)*32(x1)* e8m0"), "mxfp8"),
    (re.compile(r"e4m3 (1x)*128x128( fp32)?"), "block-fp8"),
)


@dataclass(frozen=True)
class Finding:
    """Why a tensor is suspicious."""

    kind: str
    """A short name for programs, such as ``"missing-scale"``."""
    text: str
    """A phrase for people."""
    wrong: bool = True
    """Whether values are lost or wrong for certain; False if the tensor is odd, but may be meant
    so."""


@dataclass(frozen=True)
class Item:
    """A tensor to look at: a weight in FP8 or 4 bits with its scales, or any other."""

    name: str
    entry: Entry
    """The tensor in the file: for a quantized weight, its data. 4-bit elements come as bytes of
    their own, so the shape is the weight's."""
    convention: str = ""
    """The convention that a quantized weight follows; empty for one without a scale, and for any
    other tensor."""
    scale: Entry | None = None
    spec: Spec | None = None
    """Format, blocks and scales of a quantized weight: one block for all of an FP8 weight whose
    scale cannot be used. None for any other tensor."""
    tensor_scale: Entry | None = None
    """The second level of a weight in 4 bits: a decode factor, float32."""
    extras: tuple[Entry, ...] = ()
    """Amaxes, and a scale that cannot be used."""
    is_scale: bool = False
    """Whether it is a scale without an FP8 weight of its own, such as one of activations."""
    findings: tuple[Finding, ...] = ()

    @property
    def fp8(self) -> bool:
        """Whether it is a weight in FP8."""
        return self.spec is not None and not self.spec.is_packed

    @property
    def quantized(self) -> bool:
        """Whether it is a weight in FP8 or 4 bits."""
        return self.spec is not None

    def describe(self, spec: Spec | None = None) -> str:
        """Describe the format in words, by ``spec`` if more is known than the names say."""
        spec = spec or self.spec
        if spec is None:
            return self.entry.dtype_name
        if self.scale is not None:
            return spec.describe()
        missing = any(finding.kind == "missing-scale" for finding in self.findings)
        return f"{spec.describe().split()[0]}, {'no' if missing else 'unusable'} scale"

    @property
    def nbytes(self) -> int:
        """Bytes of data, scales and amaxes."""
        entries = (self.entry, *filter(None, (self.scale, self.tensor_scale, *self.extras)))
        return sum(entry.nbytes for entry in entries)

    @property
    def block(self) -> tuple[int, ...]:
        """Sizes of blocks, none larger than its dimension: a spec may name any."""
        if self.spec is None:
            return (1,) * len(self.entry.shape)
        pairs = zip(self.spec.block, self.entry.shape, strict=True)
        return tuple(min(block, max(size, 1)) for block, size in pairs)

    def qdata(self, box: Box) -> Tensor:
        """The bytes of a quantized weight in a box, uint8."""
        data = self.entry.read(box)
        return data if data.dtype == torch.uint8 else data.view(torch.uint8)

    def scales(self, box: Box | None = None) -> Tensor:
        """The scales of a box that starts at whole blocks, or all of them, float32.

        They have one size per dimension, and are 1 if the tensor has no scales. They are the
        blocks' own: ``tensor_scale`` is a further factor.
        """
        box = box or whole_box(self.entry.shape)
        blocks = blocks_of_box(box, self.block)
        if self.scale is None or self.spec is None:
            return torch.ones([s.stop - s.start for s in blocks], device="cpu")
        if self.spec.per_tensor:
            return _as_scale(self.scale.read()).reshape((1,) * len(self.entry.shape))
        scales = _as_scale(self.scale.read(blocks[: len(self.scale.shape)]))
        return scales.reshape([s.stop - s.start for s in blocks])

    def read_tensor_scale(self, box: Box | None = None) -> Tensor | None:
        """``tensor_scale`` as it broadcasts against the data of a box; None if there is none."""
        if self.tensor_scale is None:
            return None
        return self.tensor_scale.read(box and broadcast_box(box, self.tensor_scale.shape))

    def factors(self, box: Box | None = None) -> Tensor:
        """The decode factor of each block of a box: both levels of scales."""
        tensor_scale = self.read_tensor_scale(box)
        return self.scales(box) if tensor_scale is None else self.scales(box) * tensor_scale

    def values(self, box: Box | None = None) -> Tensor:
        """The values of a box, or all, in float32 (float64 of a float64 tensor), not rounded."""
        if self.spec is None:
            value = self.entry.read(box)
            return value if value.dtype in (torch.float64, torch.complex128) else value.float()
        box = box or whole_box(self.entry.shape)
        data, scales = self.qdata(box), self.scales(box)
        if self.spec.is_packed:
            return decode_codes(data, self.block, scales, self.read_tensor_scale(box))
        data = data.view(self.spec.fp8_dtype)
        return data.float() * expand_scale(scales, self.block, data.shape)


def blocks_of_box(box: Box, block: Sequence[int]) -> Box:
    """The range of blocks that a box covers, in each dimension."""
    return tuple(
        slice(0, 1) if size == -1 else slice(s.start // size, -(-s.stop // size))
        for s, size in zip(box, block, strict=True)
    )


def _as_scale(values: Tensor) -> Tensor:
    return (values.view(torch.float8_e8m0fnu) if values.dtype == torch.uint8 else values).float()


def broadcast_box(box: Box, sizes: Sequence[int]) -> Box:
    """The box of a tensor that broadcasts: its single elements are in every box."""
    return tuple(slice(0, 1) if size == 1 else s for s, size in zip(box, sizes, strict=True))


def sizes(shape: Sequence[int]) -> str:
    """``(300, 200)`` -> ``300x200``."""
    return "x".join(map(str, shape)) or "()"


def usual_name(description: str) -> str:
    """Name a format as people do, by the words of ``Item.describe``, which stay where there is no
    such name.

    >>> [usual_name(text) for text in ("e2m1 1x32x1 e8m0", "e4m3 128x128 pow2", "e4m3 row fp32")]
    ['mxfp4', 'block-fp8 pow2', 'e4m3 row fp32']
    """
    for pattern, name in _USUAL_NAMES:
        if pattern.match(description):
            return pattern.sub(name, description)
    return description
