"""The layouts of FP8 weights in checkpoints: which tensors they are, found and written.

Those of weights in 4 bits are in ``packed``.

A scale is the decode factor in each of these conventions, ``x ~= codes.float() * scale``; so it is
in DeepSeek's, which calls it the inverse. ``export`` writes three of them, called formats, with
scales in float32.

=================== ================ =================================== ==========================
convention          codes            scales                              format, and what it holds
=================== ================ =================================== ==========================
DeepSeek            ``X`` in FP8     ``X_scale_inv``, 128x128 blocks     block-fp8: e4m3 by 128x128
                                     unless the configuration says       blocks or tensor
                                     otherwise; also Transformers'
DeepSeek, converted ``X.weight``     ``X.scale``
                    in FP8
compressed-tensors  ``X`` in FP8     ``X_scale``, a number, one for each compressed-tensors: e4m3
                                     output channel, or blocks; also     by tensor, row, or 128x128
                                     vLLM's and ModelOpt's               blocks; ``X.input_scale``
scaled FP8          ``X.weight``     ``X.scale_weight``, a number
                    in FP8
float8lab           ``X.qdata``,     ``X.scale``, and ``X.amax``         float8lab: any, the FP8
                    bytes or FP8                                         dtype as such
=================== ================ =================================== ==========================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab.checkpoints.item import Finding, Item, sizes
from float8lab.checkpoints.packed import find_packed
from float8lab.checkpoints.safetensors import SPECS_KEY, Group, Part
from float8lab.checkpoints.source import Entry, Source, dtype_name
from float8lab.formats import E4M3, FP8_DTYPES, Float8Spec, scale_shape
from float8lab.recipes.recipe import (
    ALL,
    Recipe,
)

__all__ = [
    "FORMATS",
    "Format",
    "Stored",
    "Weight",
    "recognize",
]

_BLOCK = (128, 128)
_SCALES = {
    "DeepSeek": "{name}_scale_inv",
    "compressed-tensors": "{name}_scale",
    "scaled FP8": "{module}scale_weight",
    "DeepSeek, converted": "{module}scale",
}
"""Names of the scale of an FP8 weight by convention; ``module`` is the name of a weight without
``weight``."""


# Weights that are found.


_BLOCKS = ((-1, -1), (1, -1), _BLOCK, (1, 128), (1, 32), (-1, 1))
"""Blocks of a weight, in the order in which they are tried."""
_SIZES = (128, 32, 64, 16, 256, 512, 1024, 8)
_COMPANIONS = (
    "input_scale",
    "output_scale",
    "input_scale_inv",
    "input_global_scale",
    "activation_scale",
    "scale_input",
)
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
    weights = {}
    for entry in source.entries:
        packed = find_packed(entry, entries)
        if packed is not None:
            weights[entry.name] = packed
        elif entry.name.endswith(".qdata") and entry.dtype in (torch.uint8, *FP8_DTYPES):
            weights[entry.name] = _stored(entry, entries)
        # Scales of 4-bit weights are in FP8 themselves.
        elif entry.dtype in FP8_DTYPES and not entry.name.endswith(_SCALE_ENDS):
            weights[entry.name] = _weight(entry, entries, wanted)
    parts = (p for i in weights.values() for p in (i.scale, i.tensor_scale, *i.others))
    taken = {part.name for part in parts if part is not None}
    return [
        weights.get(entry.name) or _other(entry, entries)
        for entry in source.entries
        if entry.name not in taken
    ]


_SCALE_ENDS = ("_scale", "_scale_inv", "_scales", ".scale_weight")


def _configured(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The blocks of weights that a configuration names; None if it names none, or several."""
    blocks = [config.get("weight_block_size")]
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("num_bits") != 4:
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


def _stored(entry: Entry, entries: Mapping[str, Entry]) -> Item:
    """A weight as float8lab stores it."""
    name = entry.name.removesuffix(".qdata")
    scale, amax = entries.get(f"{name}.scale"), entries.get(f"{name}.amax")
    item = _with_scale(name, entry, "float8lab", scale, None)
    spec = entry.spec
    if (
        spec is not None
        and not spec.is_packed
        and scale is not None
        and spec.scale_shape(entry.shape) == scale.shape
    ):
        item = Item(name, entry, "float8lab", scale, spec)
    return item if amax is None else replace(item, others=(*item.others, amax))


def _weight(entry: Entry, entries: Mapping[str, Entry], wanted: tuple[int, int] | None) -> Item:
    module = _module(entry.name)
    for convention, pattern in _SCALES.items():
        scale = entries.get(pattern.format(name=entry.name, module=module))
        if scale is not None and ("{name}" in pattern or entry.name == f"{module}weight"):
            usual = _BLOCK if convention.startswith("DeepSeek") else None
            return _with_scale(entry.name, entry, convention, scale, wanted or usual)
    return _with_scale(entry.name, entry, "", None, None)


def _with_scale(
    name: str,
    entry: Entry,
    convention: str,
    scale: Entry | None,
    wanted: tuple[int, int] | None,
) -> Item:
    # Bytes are in e4m3, under every recipe.
    dtype = entry.dtype if entry.dtype in FP8_DTYPES else E4M3
    assert dtype is not None
    item = Item(name, entry, convention, None, Float8Spec(dtype, (-1,) * len(entry.shape)))
    if scale is None:
        missing = Finding("missing-scale", "no scale in the checkpoint")
        return replace(item, findings=(missing,))
    if scale.dtype not in _SCALE_DTYPES:
        wrong = Finding("bad-scale", f"its scale {scale.name} is {scale.dtype_name}")
        return replace(item, others=(scale,), findings=(wrong,))
    block = _block(entry.shape, scale.shape, wanted)
    if block is None:
        text = f"scale of shape {sizes(scale.shape)} fits no blocks of {sizes(entry.shape)}"
        return replace(item, others=(scale,), findings=(Finding("scale-shape", text),))
    rule = "e8m0" if scale.dtype in (torch.float8_e8m0fnu, torch.uint8) else "fp32"
    item = replace(item, scale=scale, spec=Float8Spec(dtype, block, rule))
    if wanted is None or _fits(entry.shape, scale.shape, _leading(wanted, entry.shape)):
        return item
    words, usual = (Float8Spec(dtype, blocks).granularity for blocks in (block, wanted))
    text = f"scales by {words}, where blocks of {usual} are usual or configured"
    return replace(item, findings=(Finding("other-blocks", text, wrong=False),))


def _block(
    shape: tuple[int, ...], scales: tuple[int, ...], wanted: tuple[int, int] | None
) -> tuple[int, ...] | None:
    """Find the blocks of a tensor from the shape of its scales; None if no blocks fit.

    >>> _block((300, 256), (3, 2), None), _block((300, 256), (300,), None)
    ((128, 128), (1, -1))
    """
    one = math.prod(scales) == 1
    for pair in filter(None, (wanted, *(() if one else _BLOCKS))):
        block = _leading(pair, shape)
        if _fits(shape, scales, block):
            return block
    if one:
        return (-1,) * len(shape)
    padded = scales + (1,) * (len(shape) - len(scales))
    if not shape or len(padded) != len(shape):
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


def _other(entry: Entry, entries: Mapping[str, Entry]) -> Item:
    """Any tensor but an FP8 weight; a scale whose weight is not there is suspicious."""
    name, module = entry.name, _module(entry.name)
    last = name.removeprefix(module)
    kind = "weight"
    if last in _COMPANIONS:
        kind, owner = "tensor", module
        if any(other.startswith(f"{module}weight") for other in entries):
            return Item(name, entry, is_scale=True)
    elif name.endswith("_scale_inv"):
        owner = name.removesuffix("_scale_inv")
    elif last.endswith("weight_scale"):
        owner = name.removesuffix("_scale")
        # Packed and integer weights have scales of that name as well.
        if any(other.startswith(f"{owner}_packed") for other in entries):
            return Item(name, entry)
    elif last == "scale_weight":
        owner = f"{module}weight"
    elif last in ("scale", "amax") and {f"{module}scale", f"{module}amax"} <= entries.keys():
        owner = f"{module}qdata"
    else:
        return Item(name, entry)
    text = f"a scale, but there is no {kind} {owner}"
    if kind == "weight" and owner in entries:
        dtype = entries[owner].dtype
        if dtype is None or not dtype.is_floating_point:
            return Item(name, entry, is_scale=True)  # of a weight in integers
        text = f"a scale, but {owner} is in {entries[owner].dtype_name}"
    return Item(name, entry, is_scale=True, findings=(Finding("orphaned-scale", text),))


def _module(name: str) -> str:
    """The name of a module, with a dot at its end, from the name of its weight."""
    return name[: name.rfind(".") + 1]


# Weights that are written.


class Stored(NamedTuple):
    """A matrix in FP8."""

    codes: Tensor
    scale: Tensor
    """float32, one for each block."""
    amax: Tensor | None = None
    """Only where it was asked for."""


@dataclass(frozen=True)
class Weight:
    """A weight to store in FP8: one parameter, or several that are cast as one matrix."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    module: str
    spec: Float8Spec
    activations: Float8Spec | None
    """How the recipe casts the input; None if it is not known."""
    make: Callable[..., list[Stored]]
    """``make(scale, amax=...)`` returns a part for each parameter. ``scale`` is a scale per tensor
    to use in place of its own, or None; ``amax`` says whether amaxes, which take a pass of their
    own, are wanted."""
    input_scale: Tensor | None = None
    """Scale of the input under a calibrated recipe, ``[1]``."""
    stored: bool = False
    """Whether the parameter is stored in FP8."""
    parameters: tuple[str, ...] = ()
    """The parameters of the model, where they are not called ``names``."""
    experts: Callable[[], tuple[Weight, ...]] | None = None
    """For experts that the model has stacked, the matrices that other libraries have."""
    obstacle: str = ""
    """Why no format of another library has names for it; empty if one has."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The parameters of the model that it is made of."""
        return self.parameters or self.names


@dataclass(frozen=True)
class Format:
    """A format of checkpoints."""

    name: str
    recipe: Recipe
    """Recipe of layers for which nothing else says how they are cast."""
    blocks: tuple[tuple[int, int], ...] = ()
    """Blocks that it holds, in e4m3; empty if it holds any weight."""

    def taken(self, weight: Weight) -> tuple[Weight, ...]:
        """The weight as the format has it: stacked experts, or each matrix of theirs."""
        if self.blocks and weight.experts is not None:
            return weight.experts()
        return (weight,)

    def lacks_names(self, weight: Weight) -> bool:
        """Whether a weight must stay in high precision, as no reader would find it in FP8.

        Raises:
            ValueError: it is stored in FP8.
        """
        if not self.blocks or not weight.obstacle:
            return False
        if weight.stored:
            raise ValueError(
                f"weights stored in FP8 must have names in format {self.name!r}; "
                f"{weight.names[0]} is stored in {weight.spec.describe()}, and "
                f"{weight.obstacle}. Export it in format='float8lab', or dequantize it."
            )
        return True

    def check(self, weight: Weight) -> None:
        """Raise unless the format can hold the very bytes of the weight."""
        spec = weight.spec
        if not self.blocks or (spec.fp8_dtype == E4M3 and spec.block in self.blocks):
            return
        held = ", ".join(Float8Spec(block=block).granularity for block in self.blocks)
        fitting = [f.name for f in FORMATS.values() if not f.blocks or spec.block in f.blocks]
        raise ValueError(
            f"weights in format {self.name!r} must be e4m3 by {held}; {weight.names[0]} is "
            f"{'stored in' if weight.stored else 'cast to'} {spec.describe()}. Exclude it, choose "
            f"format={' or '.join(map(repr, fitting))}"
            f"{'' if weight.stored else ', or give another recipe'}."
        )

    def group(self, weight: Weight) -> Group:
        """The tensors of a weight."""
        parts = [
            self._parts(name, shape, weight)
            for name, shape in zip(weight.names, weight.shapes, strict=True)
        ]

        def make() -> list[Tensor]:
            ours = self.name == "float8lab"
            tensors: list[Tensor] = []
            for named, stored in zip(parts, weight.make(amax=ours), strict=True):
                more = stored.amax if ours else weight.input_scale
                for part, value in zip(named, (stored.codes, stored.scale, more), strict=False):
                    assert value is not None, "asked for, or no part"
                    whole = value.reshape(1) if part.shape == (1,) else value.expand(part.shape)
                    tensors.append(whole)
            return tensors

        spec = weight.spec
        told = (dtype_name(spec.fp8_dtype), spec.block, spec.scale_rule)
        notes = {} if self.blocks else dict.fromkeys(weight.names, told)
        return Group(tuple(part for named in parts for part in named), make, notes)

    def _parts(self, name: str, shape: tuple[int, ...], weight: Weight) -> list[Part]:
        fp8, blocks = weight.spec.fp8_dtype, weight.spec.scale_shape(shape)
        if self.name == "float8lab":
            scales = [Part(f"{name}.{kind}", torch.float32, blocks) for kind in ("scale", "amax")]
            return [Part(f"{name}.qdata", fp8, shape), *scales]
        if self.name == "block-fp8":
            convention, blocks = "DeepSeek", scale_shape(shape, _BLOCK)
        else:
            convention, blocks = self.name, (1,) if weight.spec.per_tensor else blocks
        scale = Part(_SCALES[convention].format(name=name), torch.float32, blocks)
        parts = [Part(name, fp8, shape), scale]
        if self.name == "compressed-tensors" and weight.input_scale is not None:
            stem = name.removesuffix("weight")
            parts.append(Part(f"{stem}input_scale", torch.float32, (1,)))
        return parts

    def quantization_config(
        self, weights: Sequence[Weight], others: Sequence[str]
    ) -> Mapping[str, Any]:
        """``quantization_config`` of ``config.json``.

        Args:
            weights: in FP8.
            others: names of modules that are not.
        """
        if self.name == "float8lab":
            return {"quant_method": "float8lab", "format_version": 1, "metadata": SPECS_KEY}
        if self.name == "block-fp8":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(_BLOCK),
                "modules_to_not_convert": list(others),
            }
        groups: list[dict[str, Any]] = []
        for weight in weights:
            scheme = _scheme(weight)
            same = next((g for g in groups if g | {"targets": []} == scheme), None)
            if same is None:
                groups.append(same := dict(scheme, targets=[]))
            same["targets"].append(weight.module)
        if len(groups) == 1:
            groups[0]["targets"] = ["Linear"]
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "ignore": list(others),
            "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        }


_STRATEGIES: dict[tuple[int, ...], tuple[dict[str, Any], tuple[int, ...]]] = {
    (-1, -1): ({"strategy": "tensor"}, (-1, -1)),
    (1, -1): ({"strategy": "channel"}, (1, -1)),
    _BLOCK: ({"strategy": "block", "block_structure": list(_BLOCK)}, (1, 128)),
}
"""Names in compressed-tensors of the blocks of weights, with the usual blocks of their inputs."""
_INPUTS: dict[tuple[int, ...], dict[str, Any]] = {
    (-1, -1): {"strategy": "tensor"},
    (1, -1): {"strategy": "token"},
    (1, 128): {"strategy": "group", "group_size": 128},
}


def _scheme(weight: Weight) -> dict[str, Any]:
    """The entry of a weight's group in compressed-tensors' configuration, without its targets."""
    weights, usual = _STRATEGIES[weight.spec.block]
    inputs = usual if weight.activations is None else weight.activations.block
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "targets": [],
        "weights": common | weights | {"dynamic": False},
        "input_activations": common | _INPUTS[inputs] | {"dynamic": weight.input_scale is None},
        "output_activations": None,
    }


FORMATS = {
    found.name: found
    for found in (
        Format("block-fp8", ALL["block"], (_BLOCK, (-1, -1))),
        Format("compressed-tensors", ALL["rowwise"], ((-1, -1), (1, -1), _BLOCK)),
        Format("float8lab", ALL["current"]),
    )
}
"""The formats by name."""
