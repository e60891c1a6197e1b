"""The layouts of weights in packed 4 bits: NVFP4 and MXFP4, found in checkpoints.

Elements are e2m1, two in a byte, the low half first along the contraction, ``K``; the scales of
blocks along ``K`` have 8 bits. A weight is ``[N, K]`` or ``[E, N, K]``. A scale of the tensor is a
decode factor but where noted; there its reciprocal, in float32, is taken, and vLLM multiplies by
that, too.

=================== ====================== ============================== =========================
convention          packed data            scales of blocks               scale of the tensor
=================== ====================== ============================== =========================
ModelOpt            ``X``, uint8           ``X_scale``: e4m3 ``[N, K/16]``  ``X_scale_2``
                    ``[N, K/2]``           or e8m0 as uint8 ``[N, K/32]``
compressed-tensors  ``X_packed``, uint8    ``X_scale``, the same           ``X_global_scale``, an
                                                                          encode factor
GPT-OSS             ``X_blocks``, uint8    ``X_scales``, e8m0 as uint8
                    ``[E, N, K/32, 16]``   ``[E, N, K/32]``
GPT-OSS, original   ``X.blocks``, as such  ``X.scales``
DeepSeek            ``X``, int8            ``X_scale_inv``, e8m0, as
                    ``[N, K/2]``           Transformers names it
DeepSeek, converted ``X.weight``, int8     ``X.scale``, e8m0 ``[N, K/32]``:
                                           experts of DeepSeek-V4
float8lab           ``X.packed``           ``X.scale``                    ``X.tensor_scale``
=================== ====================== ============================== =========================

The parameter of GPT-OSS's model in Transformers is ``[E, K, N]``, and so is the weight here that
``X_blocks`` make.

Sources: TensorRT Model Optimizer, "Unified HuggingFace Checkpoint", and vLLM's reader of it
(``modelopt.py``); compressed-tensors, ``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized``;
Transformers, ``integrations/mxfp4.py`` and ``integrations/finegrained_fp8.py``; the OCP
Microscaling Formats (MX) v1.0; NVIDIA NeMo AutoModel, ``deepseek_v4/state_dict_adapter``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from float8lab.checkpoints.item import Finding, Item, sizes
from float8lab.checkpoints.source import Box, Entry
from float8lab.formats import E2M1, E4M3, E8M0, MXFP4, NVFP4, Float4Spec, Spec
from float8lab.tensor.float4_tensor import unpack

__all__ = ["FACTOR_DTYPES", "find_packed"]


class _Layout(NamedTuple):
    """The suffixes that the tensors of a weight add to its name."""

    convention: str
    data: str
    scale: str
    tensor_scale: str = ""
    """Empty where the tensor has no scale."""
    in_blocks: bool = False
    """Whether the data has a dimension for the blocks, and one for the bytes of a block."""
    transposed: bool = False
    """Whether the model's parameter is ``[E, K, N]``."""
    inverse: bool = False
    """Whether the scale of the tensor is an encode factor."""


_LAYOUTS = (
    _Layout("float8lab", ".packed", ".scale", ".tensor_scale"),
    _Layout("compressed-tensors", "_packed", "_scale", "_global_scale", inverse=True),
    _Layout("GPT-OSS", "_blocks", "_scales", in_blocks=True, transposed=True),
    _Layout("GPT-OSS, original", ".blocks", ".scales", in_blocks=True),
    _Layout("ModelOpt", "", "_scale", "_scale_2"),
    _Layout("DeepSeek", "", "_scale_inv"),
)
_CONVERTED = _Layout("DeepSeek, converted", "weight", "scale")
_BYTES = (torch.uint8, torch.int8, E2M1)
_SCALES = (E4M3, E8M0, torch.uint8)
FACTOR_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class _Packed(NamedTuple):
    """The tensors of a weight, and the layout that they follow."""

    name: str
    data: Entry
    scale: Entry
    tensor_scale: Entry | None
    layout: _Layout

    @property
    def usual(self) -> Spec:
        """The usual format with scales of this dtype."""
        return NVFP4 if self.scale.dtype == E4M3 else MXFP4

    @property
    def block_size(self) -> int | None:
        """The length of a block along K, from the sizes of data and scales; None if none fits.

        Only usual lengths fit: 16 under scales in e4m3, and 32 under powers of two.
        """
        shape, spec = self.data.shape, self.data.spec
        if spec is not None and spec.is_packed:
            unpacked = tuple(n * 2 if d == spec.packed_dim else n for d, n in enumerate(shape))
            fits = spec.scale_shape(unpacked) == self.scale.shape
            return spec.block[spec.packed_dim] if fits else None
        if self.layout.in_blocks:
            shape = (*shape[:-2], shape[-2] * shape[-1])
        usual = self.usual.block[-1]
        counts = (*shape[:-1], shape[-1] * 2 // usual)
        return usual if shape[-1] * 2 % usual == 0 and counts == self.scale.shape else None

    def factor(self) -> Entry | None:
        """The decode factor of the tensor, float32 with one size for each dimension of the weight.

        It is one number, or one for each expert of a stack; None if it is neither.
        """
        if self.tensor_scale is None or self.tensor_scale.dtype not in FACTOR_DTYPES:
            return None
        if self.layout.convention == "float8lab":
            return self.tensor_scale
        ndim, count = len(self.scale.shape), math.prod(self.tensor_scale.shape)
        if count != 1 and not (ndim == 3 and count == self.scale.shape[0]):
            return None
        shape, scale = (count,) + (1,) * (ndim - 1), self.tensor_scale

        def read(box: Box) -> Tensor:
            value = scale.read().float().reshape(shape)
            return (value.reciprocal() if self.layout.inverse else value)[box]

        return replace(scale, shape=shape, dtype=torch.float32, reader=read)


def find_packed(entry: Entry, entries: Mapping[str, Entry]) -> Item | None:
    """The weight whose data a tensor holds; None if it holds none in 4 bits."""
    if entry.dtype in _BYTES and len(entry.shape) >= 2:
        for layout in (*_LAYOUTS, _CONVERTED):
            if (packed := _packed(entry, entries, layout)) is not None:
                return _item(packed)
    return None


def _packed(entry: Entry, entries: Mapping[str, Entry], layout: _Layout) -> _Packed | None:
    """The weight whose data a tensor holds under a layout; None if names or sizes do not fit."""
    name = entry.name.removesuffix(layout.data)
    scale = entries.get(f"{name}{layout.scale}")
    if scale is None or not entry.name.endswith(layout.data) or scale.dtype not in _SCALES:
        return None
    if len(entry.shape) < 2 + layout.in_blocks + layout.transposed:
        return None
    certain = scale.dtype == E4M3
    if layout is _CONVERTED:
        if entry.name.rpartition(".")[2] != "weight":
            return None
        name = entry.name
    else:
        certain |= bool(layout.data)
    tensor_scale = entries.get(f"{name}{layout.tensor_scale}") if layout.tensor_scale else None
    packed = _Packed(name, entry, scale, tensor_scale, layout)
    # Integers of 8 bits have scales of these names, too, though hardly any in bytes.
    return packed if certain or packed.block_size is not None else None


def _item(packed: _Packed) -> Item:
    name, entry, scale, tensor_scale, layout = packed
    data = _join_blocks(entry) if layout.in_blocks else entry
    spec = entry.spec
    if spec is None or not spec.is_packed:
        block = (1,) * max(len(scale.shape) - 1, 1) + packed.usual.block[-1:]
        spec = Float4Spec(block, packed.usual.scale_dtype, tensor_scale is not None)
    factor = None
    findings: list[Finding] = []
    extras: tuple[Entry, ...] = ()
    usable: Entry | None = scale
    if packed.block_size is None:
        text = f"scale of shape {sizes(scale.shape)} fits no blocks of bytes {sizes(entry.shape)}"
        findings.append(Finding("scale-shape", text))
        usable, extras = None, tuple(filter(None, (scale, tensor_scale)))
        spec = replace(spec, block=(1,) * (len(data.shape) - 1) + spec.block[-1:])
    elif spec.tensor_scale and tensor_scale is not None:
        if (factor := packed.factor()) is None:
            shape = sizes(tensor_scale.shape)
            text = f"its scale {tensor_scale.name} is {tensor_scale.dtype_name} of shape {shape}"
            findings.append(Finding("bad-scale", text))
            extras, spec = (tensor_scale,), Float4Spec(spec.block, spec.scale_dtype, False)
    elif scale.dtype == E4M3 and layout.tensor_scale:
        text = f"no scale of the tensor, {name}{layout.tensor_scale}"
        findings.append(Finding("missing-scale", text))
    if layout.transposed:
        data, usable = _transpose(data), usable and _transpose(usable)
        spec = replace(spec, block=(*spec.block[:-2], spec.block[-1], 1))
    weight = _unpacked(data, spec.packed_dim)
    numerics = layout.convention, usable, spec, factor, extras
    return Item(name, weight, *numerics, findings=tuple(findings))


def _join_blocks(entry: Entry) -> Entry:
    """Bytes ``[..., K/32, 16]`` as ``[..., K/2]``; boxes hold whole blocks."""
    *lead, count, size = entry.shape

    def read(box: Box) -> Tensor:
        *front, last = box
        blocks = slice(last.start // size, -(-last.stop // size))
        return entry.read((*front, blocks, slice(0, size))).flatten(-2)

    return replace(entry, shape=(*lead, count * size), reader=read)


def _transpose(entry: Entry) -> Entry:
    """A tensor with its last two dimensions transposed."""
    *lead, rows, columns = entry.shape

    def read(box: Box) -> Tensor:
        *front, first, second = box
        return entry.read((*front, second, first)).transpose(-1, -2)

    return replace(entry, shape=(*lead, columns, rows), reader=read)


def _unpacked(entry: Entry, dim: int) -> Entry:
    """4-bit elements in bytes of their own; boxes start at whole bytes."""
    shape = tuple(n * 2 if d == dim else n for d, n in enumerate(entry.shape))

    def read(box: Box) -> Tensor:
        place = list(box)
        place[dim] = slice(box[dim].start // 2, -(-box[dim].stop // 2))
        packed = entry.read(tuple(place)).view(torch.uint8)
        return unpack(packed.transpose(dim, -1)).transpose(dim, -1)

    return replace(entry, shape=shape, dtype=torch.uint8, reader=read)
