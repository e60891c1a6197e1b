"""Formats of checkpoints: the tensors of a weight in FP8, and the content of ``config.json``.

In each of them a scale is the decode factor, ``x ~= codes.float() * scale``, in float32.

================== ============================================== ===============================
format             tensors of a weight ``X.weight``                weights that it holds
================== ============================================== ===============================
block-fp8          codes, ``X.weight_scale_inv``                   e4m3 by 128x128 blocks or tensor
compressed-tensors codes, ``X.weight_scale``, ``X.input_scale``    e4m3 by tensor, row, or blocks
float8lab          ``X.weight.qdata``, ``.scale``, ``.amax``       any
================== ============================================== ===============================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from float8lab.formats import E4M3, Float8Spec, scale_shape
from float8lab.inspect.checkpoint.safetensors_source import SPECS_KEY
from float8lab.integrations.checkpoint.weights import Stored, Weight
from float8lab.integrations.checkpoint.writing import Group, Part
from float8lab.recipes.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Recipe,
)

__all__ = ["FORMATS", "Format"]

_BLOCK = (128, 128)


@dataclass(frozen=True)
class Format:
    """A format of checkpoints."""

    name: str
    recipe: Recipe
    """Recipe of layers for which nothing else says how they are cast."""
    blocks: tuple[tuple[int, int], ...] = ()
    """Blocks that it holds, in e4m3; empty if it holds any weight."""

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
            part
            for name, shape in zip(weight.names, weight.shapes, strict=True)
            for part in self._parts(name, shape, weight)
        ]

        def make() -> list[Tensor]:
            made = weight.make(amax=self.name == "float8lab")
            return [
                tensor
                for shape, stored in zip(weight.shapes, made, strict=True)
                for tensor in self._tensors(shape, stored, weight)
            ]

        spec = weight.spec
        dtype = str(spec.fp8_dtype).removeprefix("torch.")
        told = dict.fromkeys(weight.names, (dtype, spec.block, spec.scale_rule))
        return Group(tuple(tensors), make, {} if self.blocks else told)

    def _parts(self, name: str, shape: tuple[int, ...], weight: Weight) -> list[Part]:
        fp8, blocks = weight.spec.fp8_dtype, weight.spec.scale_shape(shape)
        if self.name == "float8lab":
            scales = [Part(f"{name}.{kind}", torch.float32, blocks) for kind in ("scale", "amax")]
            return [Part(f"{name}.qdata", fp8, shape), *scales]
        codes = Part(name, fp8, shape)
        if self.name == "block-fp8":
            blocks = scale_shape(shape, _BLOCK)
            return [codes, Part(f"{name}_scale_inv", torch.float32, blocks)]
        blocks = (1,) if weight.spec.per_tensor else blocks
        parts = [codes, Part(f"{name}_scale", torch.float32, blocks)]
        if weight.input_scale is not None:
            stem = name.removesuffix("weight")
            parts.append(Part(f"{stem}input_scale", torch.float32, (1,)))
        return parts

    def _tensors(self, shape: tuple[int, ...], stored: Stored, weight: Weight) -> list[Tensor]:
        codes, scale, amax = stored
        if self.name == "float8lab":
            assert amax is not None, "asked for"
            return [codes, scale, amax]
        if self.name == "block-fp8":
            return [codes, scale.expand(scale_shape(shape, _BLOCK))]
        scale = scale.reshape(1) if weight.spec.per_tensor else scale
        return [codes, scale, *([] if weight.input_scale is None else [weight.input_scale])]

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


def _scheme(weight: Weight) -> dict[str, Any]:
    """The entry of a weight's group in compressed-tensors' configuration, without its targets."""
    strategies: dict[tuple[int, ...], dict[str, Any]] = {
        (-1, -1): {"strategy": "tensor"},
        (1, -1): {"strategy": "channel"},
        _BLOCK: {"strategy": "block", "block_structure": list(_BLOCK)},
    }
    activations: dict[tuple[int, ...], dict[str, Any]] = {
        (-1, -1): {"strategy": "tensor"},
        (1, -1): {"strategy": "token"},
        (1, 128): {"strategy": "group", "group_size": 128},
    }
    usual: dict[tuple[int, ...], tuple[int, ...]] = {
        (-1, -1): (-1, -1),
        (1, -1): (1, -1),
        _BLOCK: (1, 128),
    }
    inputs = usual[weight.spec.block] if weight.activations is None else weight.activations.block
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    static = weight.input_scale is not None
    return {
        "targets": [],
        "weights": common | strategies[weight.spec.block] | {"dynamic": False},
        "input_activations": common | activations[inputs] | {"dynamic": not static},
        "output_activations": None,
    }


FORMATS = {
    found.name: found
    for found in (
        Format("block-fp8", Float8BlockScaling(), (_BLOCK, (-1, -1))),
        Format("compressed-tensors", Float8RowwiseScaling(), ((-1, -1), (1, -1), _BLOCK)),
        Format("float8lab", Float8CurrentScaling()),
    )
}
"""The formats by name."""
