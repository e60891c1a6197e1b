"""Find the FP8 weights among the tensors of a checkpoint, and their scales.

A scale is the decode factor in each of these conventions, ``x ~= codes.float() * scale``; so it is
in DeepSeek's, which calls it the inverse.

=================== ======================== =====================================================
convention          codes                    scales
=================== ======================== =====================================================
DeepSeek            ``X`` in FP8             ``X_scale_inv``, 128x128 blocks unless the
                                             configuration says otherwise; also Transformers'
DeepSeek, converted ``X.weight`` in FP8      ``X.scale``
compressed-tensors  ``X`` in FP8             ``X_scale``, a number, one for each output channel, or
                                             blocks; also vLLM's and ModelOpt's
scaled FP8          ``X.weight`` in FP8      ``X.scale_weight``, a number
float8lab           ``X.qdata``, bytes       ``X.scale``, and ``X.amax``
=================== ======================== =====================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from float8lab.formats import E4M3, FP8_DTYPES, Float8Spec, scale_shape
from float8lab.inspect.checkpoint.source import Entry, Source

__all__ = ["Finding", "Item", "recognize"]


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
    """A tensor to look at: an FP8 weight with its scales, or any other."""

    name: str
    entry: Entry
    """The tensor as it lies in the file: for an FP8 weight, its codes."""
    convention: str = ""
    """The convention that an FP8 weight follows; empty for one without a scale, and for any other
    tensor."""
    scale: Entry | None = None
    spec: Float8Spec | None = None
    """Format, blocks and scale rule of an FP8 weight, with one block for all if no scale can be
    used; None for any other tensor."""
    others: tuple[Entry, ...] = ()
    """Amaxes, and a scale that cannot be used."""
    is_scale: bool = False
    """Whether it is a scale without an FP8 weight of its own, such as one of activations."""
    findings: tuple[Finding, ...] = ()

    @property
    def fp8(self) -> bool:
        """Whether it is a weight in FP8."""
        return self.spec is not None

    def describe(self, spec: Float8Spec | None = None) -> str:
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
        """Bytes of codes, scales and amaxes."""
        parts = (self.entry, *filter(None, (self.scale, *self.others)))
        return sum(part.nbytes for part in parts)


_BLOCKS = ((-1, -1), (1, -1), (128, 128), (1, 128), (1, 32), (-1, 1))
"""Blocks of a weight, in the order in which they are tried."""
_SIZES = (128, 32, 64, 16, 256, 512, 1024, 8)
_COMPANIONS = ("input_scale", "output_scale", "input_scale_inv", "activation_scale", "scale_input")
_SCALE_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e8m0fnu,
    torch.uint8,  # exponents, as e8m0
)


def recognize(source: Source) -> list[Item]:
    """The tensors of a checkpoint in its order, with scales folded into their weights."""
    entries = {entry.name: entry for entry in source.entries}
    wanted = _configured(source.config)
    taken: set[str] = set()
    weights: dict[str, Item] = {}
    for entry in source.entries:
        item = _stored(entry, entries) if _is_ours(entry) else None
        if item is None and entry.dtype in FP8_DTYPES and not _names_scale(entry):
            item = _weight(entry, entries, wanted)
        if item is not None:
            weights[entry.name] = item
            taken |= {part.name for part in (item.scale, *item.others) if part is not None}
    return [
        weights.get(entry.name) or _other(entry, entries, weights)
        for entry in source.entries
        if entry.name not in taken
    ]


def _configured(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The blocks of weights that a configuration names; None if it names none, or several."""
    blocks = [config.get("weight_block_size")]
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            strategy, size = weights.get("strategy"), weights.get("group_size")
            named = {"tensor": (-1, -1), "channel": (1, -1), "group": (1, size)}
            blocks.append(weights.get("block_structure") or named.get(str(strategy)))
    pairs = {
        (block[0], block[1])
        for block in blocks
        if isinstance(block, Sequence)
        and len(block) == 2
        and all(type(b) is int and (b == -1 or b > 0) for b in block)
    }
    return pairs.pop() if len(pairs) == 1 else None


def _stem(name: str) -> str:
    """The name of a module, with a dot at its end, from the name of its weight."""
    return name[: name.rfind(".") + 1]


def _scale_names(name: str) -> Iterator[tuple[str, str]]:
    """Yield each name that the scale of an FP8 weight may have, with the convention of the name."""
    yield f"{name}_scale_inv", "DeepSeek"
    yield f"{name}_scale", "compressed-tensors"
    if name.endswith(".weight") or name == "weight":
        yield f"{_stem(name)}scale_weight", "scaled FP8"
        yield f"{_stem(name)}scale", "DeepSeek, converted"


def _is_ours(entry: Entry) -> bool:
    return entry.name.endswith(".qdata") and (
        entry.dtype == torch.uint8 or entry.dtype in FP8_DTYPES
    )


def _stored(entry: Entry, entries: Mapping[str, Entry]) -> Item:
    name = entry.name.removesuffix(".qdata")
    scale, amax = entries.get(f"{name}.scale"), entries.get(f"{name}.amax")
    # Weights that are stored as bytes are in e4m3, under every recipe.
    dtype = entry.dtype if entry.dtype in FP8_DTYPES else E4M3
    assert dtype is not None
    item = _with_scale(name, entry, "float8lab", scale, dtype, None)
    spec = entry.spec
    if spec is not None and scale is not None and spec.scale_shape(entry.shape) == scale.shape:
        item = Item(name, entry, "float8lab", scale, spec)
    return item if amax is None else replace(item, others=(*item.others, amax))


def _weight(
    entry: Entry, entries: Mapping[str, Entry], wanted: tuple[int, int] | None
) -> Item | None:
    assert entry.dtype is not None
    for name, convention in _scale_names(entry.name):
        if name in entries:
            if wanted is None and convention.startswith("DeepSeek"):
                wanted = (128, 128)
            scale = entries[name]
            return _with_scale(entry.name, entry, convention, scale, entry.dtype, wanted)
    return _with_scale(entry.name, entry, "", None, entry.dtype, None)


def _with_scale(
    name: str,
    entry: Entry,
    convention: str,
    scale: Entry | None,
    dtype: torch.dtype,
    wanted: tuple[int, int] | None,
) -> Item:
    spec = Float8Spec(dtype, (-1,) * len(entry.shape))
    if scale is None:
        missing = Finding("missing-scale", "no scale in the checkpoint")
        return Item(name, entry, convention, None, spec, findings=(missing,))
    if scale.dtype not in _SCALE_DTYPES:
        wrong = Finding("bad-scale", f"its scale {scale.name} is {scale.dtype_name}")
        return Item(name, entry, convention, None, spec, (scale,), findings=(wrong,))
    block = _block(entry.shape, scale.shape, wanted)
    if block is None:
        text = f"scale of shape {_shape(scale.shape)} fits no blocks of {_shape(entry.shape)}"
        wrong = Finding("scale-shape", text)
        return Item(name, entry, convention, None, spec, (scale,), findings=(wrong,))
    rule = "e8m0" if scale.dtype in (torch.float8_e8m0fnu, torch.uint8) else "fp32"
    spec = Float8Spec(dtype, block, rule)
    findings = []
    if wanted is not None and not _fits(entry.shape, scale.shape, _leading(wanted, entry.shape)):
        words = Float8Spec(dtype, wanted).granularity
        text = f"scales by {spec.granularity}, where blocks of {words} are usual or configured"
        findings.append(Finding("other-blocks", text, wrong=False))
    return Item(name, entry, convention, scale, spec, findings=tuple(findings))


def _block(
    shape: tuple[int, ...], scales: tuple[int, ...], wanted: tuple[int, int] | None
) -> tuple[int, ...] | None:
    """Find the blocks of a tensor from the shape of its scales; None if no blocks fit.

    >>> _block((300, 256), (3, 2), None), _block((300, 256), (300,), None)
    ((128, 128), (1, -1))
    """
    if not shape or math.prod(scales) == 1:
        blocks = _leading(wanted, shape) if wanted else (-1,) * len(shape)
        fits = wanted is not None and _fits(shape, scales, blocks)
        return blocks if fits else (-1,) * len(shape) if math.prod(scales) == 1 else None
    for pair in filter(None, (wanted, *_BLOCKS)):
        block = _leading(pair, shape)
        if _fits(shape, scales, block):
            return block
    padded = scales + (1,) * (len(shape) - len(scales))
    if len(padded) != len(shape):
        return None
    result = []
    for size, count in zip(shape, padded, strict=True):
        fitting = (b for b in _SIZES if -(-size // b) == count)
        even = size // count if count and size % count == 0 else None
        found = -1 if count == 1 else 1 if count == size else next(fitting, even)
        if found is None:
            return None
        result.append(found)
    return tuple(result)


def _leading(pair: tuple[int, int], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same blocks for a batch of matrices, or for a vector."""
    return (1,) * (len(shape) - 2) + pair[max(0, 2 - len(shape)) :]


def _fits(shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, ...]) -> bool:
    # Scales of rows may come without their last dimension, as [N] or [experts, N].
    padded = scales + (1,) * (len(shape) - len(scales))
    return scale_shape(shape, block) == padded


def _names_scale(entry: Entry) -> bool:
    """Whether the name is that of a scale; scales of 4-bit weights are in FP8 themselves."""
    return entry.name.endswith(("_scale", "_scale_inv", "_scales", ".scale_weight"))


def _other(entry: Entry, entries: Mapping[str, Entry], weights: Mapping[str, Item]) -> Item:
    name = entry.name
    last = name[name.rfind(".") + 1 :]
    if last in _COMPANIONS:
        stem = _stem(name)
        owner = any(other.startswith(f"{stem}weight") for other in entries)
        return Item(
            name, entry, is_scale=True, findings=() if owner else (_orphan(stem, "tensor"),)
        )
    if name.endswith("_scale_inv"):
        return _unowned(entry, name.removesuffix("_scale_inv"), entries)
    if last.endswith("weight_scale"):
        # Packed and integer weights have scales of that name as well.
        stem = name.removesuffix("_scale")
        packed = [other for other in entries if other.startswith(f"{stem}_packed")]
        return Item(name, entry) if packed else _unowned(entry, stem, entries)
    if last == "scale_weight":
        return _unowned(entry, f"{_stem(name)}weight", entries)
    if last in ("scale", "amax") and f"{_stem(name)}{'amax' if last == 'scale' else 'scale'}" in (
        entries
    ):
        return _unowned(entry, f"{_stem(name)}qdata", entries)
    return Item(name, entry)


def _unowned(entry: Entry, owner: str, entries: Mapping[str, Entry]) -> Item:
    if owner not in entries:
        return Item(entry.name, entry, is_scale=True, findings=(_orphan(owner, "weight"),))
    dtype = entries[owner].dtype
    if dtype is None or not dtype.is_floating_point:
        return Item(entry.name, entry, is_scale=True)  # of a weight in integers
    text = f"a scale, but {owner} is in {entries[owner].dtype_name}"
    return Item(entry.name, entry, is_scale=True, findings=(Finding("orphaned-scale", text),))


def _orphan(owner: str, what: str) -> Finding:
    return Finding("orphaned-scale", f"a scale, but there is no {what} {owner}")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "()"
