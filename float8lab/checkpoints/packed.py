"""The layouts of weights in packed 4 bits: NVFP4 and MXFP4, found in checkpoints.

Codes are e2m1, two in a byte, of which the low half comes first along the contraction, ``K``; the
scales of blocks along ``K`` have 8 bits. A weight is ``[N, K]`` or ``[E, N, K]``. A scale of the
whole tensor is a decode factor but where noted; then its reciprocal, in float32, is taken for one,
which is what vLLM multiplies by.

=================== ====================== ============================== =========================
convention          codes                  scales of blocks               scale of the tensor
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

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from float8lab.checkpoints.item import Finding, Item, sizes
from float8lab.checkpoints.source import Box, Entry
from float8lab.formats import E2M1, E4M3, E8M0, MXFP4, NVFP4, Float4Spec
from float8lab.tensor.float4_tensor import unpack

__all__ = ["find_packed"]


class _Layout(NamedTuple):
    """The ends of the names that a weight's tensors have after its own."""

    convention: str
    codes: str
    scale: str
    whole: str = ""
    """The end of the name of the tensor's scale; empty where it has none."""
    cut: bool = False
    """Whether codes have a dimension for the blocks, and one for the bytes of a block."""
    transposed: bool = False
    """Whether the model's parameter is ``[E, K, N]``."""
    inverse: bool = False
    """Whether the scale of the tensor is an encode factor."""


_LAYOUTS = (
    _Layout("float8lab", ".packed", ".scale", ".tensor_scale"),
    _Layout("compressed-tensors", "_packed", "_scale", "_global_scale", inverse=True),
    _Layout("GPT-OSS", "_blocks", "_scales", cut=True, transposed=True),
    _Layout("GPT-OSS, original", ".blocks", ".scales", cut=True),
    _Layout("ModelOpt", "", "_scale", "_scale_2"),
    _Layout("DeepSeek", "", "_scale_inv"),
)
_CONVERTED = _Layout("DeepSeek, converted", "weight", "scale")
_BYTES = (torch.uint8, torch.int8, E2M1)
_SCALES = (E4M3, E8M0, torch.uint8)


def find_packed(entry: Entry, entries: Mapping[str, Entry]) -> Item | None:
    """The weight whose codes a tensor holds; None if it holds none in 4 bits.

    Args:
        entry: any tensor.
        entries: all of the checkpoint by name.
    """
    if entry.dtype not in _BYTES or len(entry.shape) < 2:
        return None
    for layout in (*_LAYOUTS, _CONVERTED):
        name = entry.name.removesuffix(layout.codes)
        scale = entries.get(f"{name}{layout.scale}")
        if scale is None or not entry.name.endswith(layout.codes) or scale.dtype not in _SCALES:
            continue
        if len(entry.shape) < 2 + layout.cut + layout.transposed:
            continue
        # Integers of 8 bits have scales of these names, too, though hardly any in bytes.
        certain = scale.dtype == E4M3
        if layout is _CONVERTED:
            if entry.name.rpartition(".")[2] != "weight":
                continue
            name = entry.name
        else:
            certain |= bool(layout.codes)
        if certain or _size(entry, scale, layout) is not None:
            whole = entries.get(f"{name}{layout.whole}") if layout.whole else None
            return _item(name, entry, scale, whole, layout)
    return None


def _item(name: str, entry: Entry, scale: Entry, whole: Entry | None, layout: _Layout) -> Item:
    usual = NVFP4 if scale.dtype == E4M3 else MXFP4
    size = _size(entry, scale, layout)
    lead, findings = len(scale.shape) - 1, []
    spec = entry.spec
    if spec is None or not spec.is_packed:
        block = (1,) * max(lead, 1) + (size or usual.block[-1],)
        spec = Float4Spec(block, usual.scale_dtype, whole is not None)
    codes = _joined(entry) if layout.cut else entry
    others: tuple[Entry, ...] = ()
    factor = None
    if size is None:
        text = f"scale of shape {sizes(scale.shape)} fits no blocks of bytes {sizes(entry.shape)}"
        findings.append(Finding("scale-shape", text))
        others = (scale,) if whole is None else (scale, whole)
        spec = replace(spec, block=(1,) * (len(codes.shape) - 1) + spec.block[-1:])
    elif spec.tensor_scale and whole is not None:
        factor = _factor(whole, scale, layout)
        if factor is None:
            text = f"its scale {whole.name} is {whole.dtype_name} of shape {sizes(whole.shape)}"
            findings.append(Finding("bad-scale", text))
            others, spec = (whole,), Float4Spec(spec.block, spec.scale_dtype, False)
    elif scale.dtype == E4M3 and layout.whole:
        findings.append(Finding("missing-scale", f"no scale of the tensor, {name}{layout.whole}"))
    if layout.transposed:
        codes, scale = _swapped(codes), scale if size is None else _swapped(scale)
        spec = replace(spec, block=(*spec.block[:-2], spec.block[-1], 1))
    return Item(
        name,
        _unpacked(codes, spec.packed_dim),
        layout.convention,
        None if size is None else scale,
        spec,
        factor,
        others,
        findings=tuple(findings),
    )


def _size(entry: Entry, scale: Entry, layout: _Layout) -> int | None:
    """The length of a block along K, from the numbers of codes and scales; None if they do not fit.

    Only such as are usual: 16 under scales in e4m3, and 32 under powers of two.
    """
    if entry.spec is not None and entry.spec.is_packed:
        dim = entry.spec.packed_dim
        whole = tuple(n * 2 if d == dim else n for d, n in enumerate(entry.shape))
        fits = entry.spec.scale_shape(whole) == scale.shape
        return entry.spec.block[dim] if fits else None
    usual = (NVFP4 if scale.dtype == E4M3 else MXFP4).block[-1]
    shape = (*entry.shape[:-2], entry.shape[-2] * entry.shape[-1]) if layout.cut else entry.shape
    counts = (*shape[:-1], shape[-1] * 2 // usual)
    whole_blocks = shape[-1] * 2 % usual == 0
    return usual if whole_blocks and counts == scale.shape else None


def _factor(whole: Entry, scale: Entry, layout: _Layout) -> Entry | None:
    """The decode factor of the tensor, float32 with one size for each dimension of the weight.

    It is one number, or one for each expert of a stack.
    """
    ndim, count = len(scale.shape), math.prod(whole.shape)
    if whole.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return None
    if layout.convention == "float8lab":
        return whole
    experts = ndim == 3 and count == scale.shape[0]
    if count != 1 and not experts:
        return None
    shape = (count,) + (1,) * (ndim - 1)
    read = functools.partial(_read_factor, whole, shape, layout.inverse)
    return replace(whole, shape=shape, dtype=torch.float32, reader=read)


def _read_factor(whole: Entry, shape: tuple[int, ...], inverse: bool, box: Box) -> Tensor:
    value = whole.read().float().reshape(shape)
    return (value.reciprocal() if inverse else value)[box]


def _joined(entry: Entry) -> Entry:
    """Bytes ``[..., K/32, 16]`` as ``[..., K/2]``; boxes hold whole blocks."""
    *lead, count, size = entry.shape

    def read(box: Box) -> Tensor:
        *front, last = box
        whole = slice(last.start // size, -(-last.stop // size))
        return entry.read((*front, whole, slice(0, size))).flatten(-2)

    return replace(entry, shape=(*lead, count * size), reader=read)


def _swapped(entry: Entry) -> Entry:
    """A tensor with its last two dimensions swapped."""
    *lead, rows, columns = entry.shape

    def read(box: Box) -> Tensor:
        *front, first, second = box
        return entry.read((*front, second, first)).transpose(-1, -2)

    return replace(entry, shape=(*lead, columns, rows), reader=read)


def _unpacked(entry: Entry, dim: int) -> Entry:
    """Bytes as codes, in bytes of their own; boxes start at whole bytes."""
    shape = tuple(n * 2 if d == dim else n for d, n in enumerate(entry.shape))

    def read(box: Box) -> Tensor:
        place = list(box)
        place[dim] = slice(box[dim].start // 2, -(-box[dim].stop // 2))
        found = entry.read(tuple(place)).view(torch.uint8)
        return unpack(found.transpose(dim, -1)).transpose(dim, -1)

    return replace(entry, shape=shape, dtype=torch.uint8, reader=read)
