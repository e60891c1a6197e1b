"""The layouts of FP8 weights in checkpoints: which tensors they are, found and written.

``packed`` has the layouts of weights in 4 bits.

A scale is the decode factor in each of these conventions, ``x ~= qdata.float() * scale``, also in
DeepSeek's, which calls it the inverse. ``export`` writes three of them, called formats, with scales
in float32.

=================== ================ =================================== ==========================
convention          FP8 data         scales                              format, and what it holds
=================== ================ =================================== ==========================
DeepSeek            ``X``            ``X_scale_inv``, 128x128 blocks     block-fp8: e4m3 by 128x128
                                     unless the configuration says       blocks or tensor
                                     otherwise; also Transformers'
DeepSeek, converted ``X.weight``     ``X.scale``
compressed-tensors  ``X``            ``X_scale``, a number, one for each compressed-tensors: e4m3
                                     output channel, or blocks; also     by tensor, row, or 128x128
                                     vLLM's and ModelOpt's               blocks; ``X.input_scale``
scaled FP8          ``X.weight``     ``X.scale_weight``, a number
float8lab           ``X.qdata``,     ``X.scale``, and ``X.amax``         float8lab: any, in any FP8
                    bytes or FP8                                         dtype
=================== ================ =================================== ==========================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from float8lab.checkpoints.item import Finding, Item, sizes
from float8lab.checkpoints.packed import FACTOR_DTYPES, find_packed
from float8lab.checkpoints.safetensors import SPECS_KEY, Group, NewTensor
from float8lab.checkpoints.source import CheckpointSource, Entry, dtype_name
from float8lab.formats import E4M3, FP8_DTYPES, Float8Spec, scale_shape
from float8lab.recipes.recipe import ALL, Recipe
from float8lab.tensor import Float8Tensor

__all__ = ["FORMATS", "Format", "Weight", "recognize"]

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
_MatrixBlock = tuple[int, int]
_SIZES = (128, 32, 64, 16, 256, 512, 1024, 8)
_COMPANIONS = (
    "input_scale", "output_scale", "input_scale_inv", "input_global_scale", "activation_scale",
    "scale_input",
)  # fmt: skip
_SCALE_DTYPES = (*FACTOR_DTYPES, torch.float8_e8m0fnu, torch.uint8)  # bytes: exponents, as e8m0
_SCALE_SUFFIXES = ("_scale", "_scale_inv", "_scales", ".scale_weight")


def recognize(source: CheckpointSource) -> list[Item]:
    """The tensors of a checkpoint in its order, with scales folded into their weights."""
    entries = {entry.name: entry for entry in source.entries}
    configured = _configured_block(source.config)
    weights = {}
    for entry in source.entries:
        if (packed := find_packed(entry, entries)) is not None:
            weights[entry.name] = packed
        elif entry.name.endswith(".qdata") and entry.dtype in (torch.uint8, *FP8_DTYPES):
            weights[entry.name] = _stored(entry, entries)
        # Scales of 4-bit weights are in FP8 themselves.
        elif entry.dtype in FP8_DTYPES and not entry.name.endswith(_SCALE_SUFFIXES):
            weights[entry.name] = _weight(entry, entries, configured)
    taken = {
        entry.name
        for item in weights.values()
        for entry in (item.scale, item.tensor_scale, *item.extras)
        if entry is not None
    }
    return [
        weights.get(entry.name) or _plain_tensor(entry, entries)
        for entry in source.entries
        if entry.name not in taken
    ]


def _configured_block(config: Mapping[str, object]) -> tuple[int, int] | None:
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
    if spec and scale and not spec.is_packed and spec.scale_shape(entry.shape) == scale.shape:
        item = Item(name, entry, "float8lab", scale, spec)
    return item if amax is None else replace(item, extras=(*item.extras, amax))


def _weight(entry: Entry, entries: Mapping[str, Entry], configured: _MatrixBlock | None) -> Item:
    module = _module(entry.name)
    for convention, pattern in _SCALES.items():
        scale = entries.get(pattern.format(name=entry.name, module=module))
        if scale is not None and ("{name}" in pattern or entry.name == f"{module}weight"):
            usual = _BLOCK if convention.startswith("DeepSeek") else None
            return _with_scale(entry.name, entry, convention, scale, configured or usual)
    return _with_scale(entry.name, entry, "", None, None)


def _with_scale(
    name: str, entry: Entry, convention: str, scale: Entry | None, expected: _MatrixBlock | None
) -> Item:
    # Bytes are e4m3 under every recipe.
    dtype = next((fp8_dtype for fp8_dtype in FP8_DTYPES if fp8_dtype == entry.dtype), E4M3)
    item = Item(name, entry, convention, None, Float8Spec(dtype, (-1,) * len(entry.shape)))
    if scale is None:
        return replace(item, findings=(Finding("missing-scale", "no scale in the checkpoint"),))
    if scale.dtype not in _SCALE_DTYPES:
        wrong = Finding("bad-scale", f"its scale {scale.name} is {scale.dtype_name}")
        return replace(item, extras=(scale,), findings=(wrong,))
    if (block := _block(entry.shape, scale.shape, expected)) is None:
        text = f"scale of shape {sizes(scale.shape)} fits no blocks of {sizes(entry.shape)}"
        return replace(item, extras=(scale,), findings=(Finding("scale-shape", text),))
    rule = "e8m0" if scale.dtype in (torch.float8_e8m0fnu, torch.uint8) else "fp32"
    item = replace(item, scale=scale, spec=Float8Spec(dtype, block, rule))
    if expected is None or _fits(entry.shape, scale.shape, _for_shape(expected, entry.shape)):
        return item
    words, usual = (Float8Spec(dtype, blocks).granularity for blocks in (block, expected))
    text = f"scales by {words}, where blocks of {usual} are usual or configured"
    return replace(item, findings=(Finding("other-blocks", text, wrong=False),))


def _block(
    shape: tuple[int, ...], scales: tuple[int, ...], expected: _MatrixBlock | None
) -> tuple[int, ...] | None:
    """Find the blocks of a tensor from the shape of its scales; None if no blocks fit.

    >>> _block((300, 256), (3, 2), None), _block((300, 256), (300,), None)
    ((128, 128), (1, -1))
    """
    single = math.prod(scales) == 1
    for pair in filter(None, (expected, *(() if single else _BLOCKS))):
        block = _for_shape(pair, shape)
        if _fits(shape, scales, block):
            return block
    if single:
        return (-1,) * len(shape)
    counts = scales + (1,) * (len(shape) - len(scales))
    if not shape or len(counts) != len(shape):
        return None
    pairs = zip(shape, counts, strict=True)
    lengths = [length for pair in pairs if (length := _block_length(*pair)) is not None]
    return tuple(lengths) if len(lengths) == len(shape) else None


def _block_length(size: int, count: int) -> int | None:
    """The length of the ``count`` blocks along a dimension, if it is a usual one or divides it."""
    if count == 1:
        return -1
    if count == size:
        return 1
    usual = (length for length in _SIZES if -(-size // length) == count)
    return next(usual, size // count if count and size % count == 0 else None)


def _for_shape(pair: _MatrixBlock, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The blocks of a matrix for a batch of matrices, or for a vector."""
    return (1,) * (len(shape) - 2) + pair[max(0, 2 - len(shape)) :]


def _fits(shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, ...]) -> bool:
    # Scales of rows may come without their last dimension, as [N] or [experts, N].
    return scale_shape(shape, block) == scales + (1,) * (len(shape) - len(scales))


def _plain_tensor(entry: Entry, entries: Mapping[str, Entry]) -> Item:
    """Any tensor but a quantized weight; a scale whose weight is not there is suspicious."""
    name, module = entry.name, _module(entry.name)
    if name.removeprefix(module) in _COMPANIONS:
        orphaned = not any(key.startswith(f"{module}weight") for key in entries)
        text = f"a scale, but there is no tensor {module}"
    else:
        owner = _owner_of_scale(name, entries)
        # Packed and integer weights have scales of such names as well.
        packed = name.endswith("_scale") and any(k.startswith(f"{owner}_packed") for k in entries)
        if owner is None or packed:
            return Item(name, entry)
        weight, text = entries.get(owner), f"a scale, but there is no weight {owner}"
        orphaned = weight is None
        if weight is not None and weight.dtype is not None and weight.dtype.is_floating_point:
            orphaned, text = True, f"a scale, but {owner} is in {weight.dtype_name}"
    findings = (Finding("orphaned-scale", text),) if orphaned else ()
    return Item(name, entry, is_scale=True, findings=findings)


def _owner_of_scale(name: str, entries: Mapping[str, Entry]) -> str | None:
    """The weight that a tensor of this name is a scale of; None if it is no scale."""
    module = _module(name)
    last = name.removeprefix(module)
    if name.endswith("_scale_inv"):
        return name.removesuffix("_scale_inv")
    if last.endswith("weight_scale"):
        return name.removesuffix("_scale")
    if last == "scale_weight":
        return f"{module}weight"
    if last in ("scale", "amax") and {f"{module}scale", f"{module}amax"} <= entries.keys():
        return f"{module}qdata"
    return None


def _module(name: str) -> str:
    """The name of a module, with a dot at its end, from the name of its weight."""
    return name[: name.rfind(".") + 1]


# Weights that are written.


@dataclass(frozen=True)
class Weight:
    """A weight to store in FP8: one parameter, or several that are cast as one matrix."""

    names: tuple[str, ...]
    """Names in the checkpoint; ``export`` sets those that differ from the model's."""
    parameters: tuple[str, ...]
    """Names of the model's parameters that it is made of."""
    shapes: tuple[tuple[int, ...], ...]
    module: str
    spec: Float8Spec
    activations: Float8Spec | None
    """How the recipe casts the input; None if it is not known."""
    make: Callable[..., list[Float8Tensor]]
    """``make(scale, amax=...)`` returns a matrix for each parameter. ``scale`` returns a scale
    per tensor to use in place of its own, or is None; ``amax`` asks for amaxes, which take a pass
    of their own. If it is False, ``amax`` of the matrices may hold their scales."""
    input_scale: Tensor | None = None
    """Scale of the input under a calibrated recipe, ``[1]``."""
    stored: bool = False
    """Whether the parameter is stored in FP8."""
    experts: Callable[[], tuple[Weight, ...]] | None = None
    """For experts that the model has stacked, the matrices that other libraries have."""
    obstacle: str = ""
    """Why no format of another library has names for it; empty if one has."""


@dataclass(frozen=True)
class Format:
    """A format of checkpoints."""

    name: str
    recipe: Recipe
    """Recipe of layers for which nothing else says how they are cast."""
    blocks: tuple[tuple[int, int], ...] = ()
    """Blocks that it holds, in e4m3; empty if it holds any weight."""

    def split_experts(self, weight: Weight) -> tuple[Weight, ...]:
        """The weight as the format has it: stacked experts, or each of their matrices."""
        return weight.experts() if self.blocks and weight.experts is not None else (weight,)

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
        tensors = [
            self._tensors(name, shape, weight)
            for name, shape in zip(weight.names, weight.shapes, strict=True)
        ]

        def make() -> list[Tensor]:
            ours = self.name == "float8lab"
            values: list[Tensor] = []
            for named, stored in zip(tensors, weight.make(amax=ours), strict=True):
                last = stored.amax if ours else weight.input_scale
                made = (stored.qdata, stored.scale, *(() if last is None else (last,)))
                values += [
                    value.reshape(1) if tensor.shape == (1,) else value.expand(tensor.shape)
                    for tensor, value in zip(named, made, strict=False)
                ]
            return values

        spec = weight.spec
        described = (dtype_name(spec.fp8_dtype), spec.block, spec.scale_rule)
        notes = {} if self.blocks else dict.fromkeys(weight.names, described)
        return Group(tuple(tensor for named in tensors for tensor in named), make, notes)

    def _tensors(self, name: str, shape: tuple[int, ...], weight: Weight) -> list[NewTensor]:
        fp8, blocks = weight.spec.fp8_dtype, weight.spec.scale_shape(shape)
        if self.name == "float8lab":
            scales = [
                NewTensor(f"{name}.{kind}", torch.float32, blocks) for kind in ("scale", "amax")
            ]
            return [NewTensor(f"{name}.qdata", fp8, shape), *scales]
        if self.name == "block-fp8":
            convention, blocks = "DeepSeek", scale_shape(shape, _BLOCK)
        else:
            convention, blocks = self.name, (1,) if weight.spec.per_tensor else blocks
        scale = NewTensor(_SCALES[convention].format(name=name), torch.float32, blocks)
        tensors = [NewTensor(name, fp8, shape), scale]
        if self.name == "compressed-tensors" and weight.input_scale is not None:
            stem = name.removesuffix("weight")
            tensors.append(NewTensor(f"{stem}input_scale", torch.float32, (1,)))
        return tensors

    def quantization_config(
        self, weights: Sequence[Weight], high_precision: Sequence[str]
    ) -> Mapping[str, object]:
        """``quantization_config`` of ``config.json``, given the names of modules not in FP8."""
        if self.name == "float8lab":
            return {"quant_method": "float8lab", "format_version": 1, "metadata": SPECS_KEY}
        if self.name == "block-fp8":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(_BLOCK),
                "modules_to_not_convert": list(high_precision),
            }
        by_scheme: dict[str, list[Weight]] = {}
        for weight in weights:
            by_scheme.setdefault(str(_scheme(weight)), []).append(weight)
        several = len(by_scheme) > 1
        groups = [
            {"targets": [w.module for w in alike] if several else ["Linear"], **_scheme(alike[0])}
            for alike in by_scheme.values()
        ]
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "ignore": list(high_precision),
            "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        }


_STRATEGIES: dict[tuple[int, ...], tuple[dict[str, object], tuple[int, ...]]] = {
    (-1, -1): ({"strategy": "tensor"}, (-1, -1)),
    (1, -1): ({"strategy": "channel"}, (1, -1)),
    _BLOCK: ({"strategy": "block", "block_structure": list(_BLOCK)}, (1, 128)),
}
"""Names in compressed-tensors of the blocks of weights, with the usual blocks of their inputs."""
_INPUTS: dict[tuple[int, ...], dict[str, object]] = {
    (-1, -1): {"strategy": "tensor"},
    (1, -1): {"strategy": "token"},
    (1, 128): {"strategy": "group", "group_size": 128},
    (1, 32): {"strategy": "group", "group_size": 32},
    (1, 16): {"strategy": "group", "group_size": 16, "num_bits": 4},
}


def _scheme(weight: Weight) -> dict[str, object]:
    """The entry of a weight's group in compressed-tensors' configuration, but its targets."""
    weights, usual = _STRATEGIES[weight.spec.block]
    inputs = usual if weight.activations is None else weight.activations.block
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "weights": common | weights | {"dynamic": False},
        "input_activations": common | _INPUTS[inputs] | {"dynamic": weight.input_scale is None},
        "output_activations": None,
    }


FORMATS = {
    format.name: format
    for format in (
        Format("block-fp8", ALL["block"], (_BLOCK, (-1, -1))),
        Format("compressed-tensors", ALL["rowwise"], ((-1, -1), (1, -1), _BLOCK)),
        Format("float8lab", ALL["current"]),
    )
}
"""The formats by name."""
