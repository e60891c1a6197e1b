"""Make candidates of torchao and TransformerEngine, where these are installed.

A library is imported only when it is used. Each function returns the candidates of one subject, or
none if the library is not installed. torchao is measured eager and, with ``--compile``, compiled;
TransformerEngine is measured eager.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.models import (
    Candidate,
    Context,
    InContext,
    LayerSize,
    PlainNormLinear,
    copy_layer_weights,
    layer_arguments,
    rotary_angles,
)

__all__ = [
    "OtherCast",
    "attention_peers",
    "installed",
    "layer_peers",
    "linear_peers",
    "mlp_peers",
    "norm_linear_peers",
    "quantize_peers",
    "te_context",
    "te_stack",
    "torchao_converted",
    "torchao_stack",
]

TORCHAO_RECIPES = ("tensorwise", "rowwise")
TE_RECIPES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
}

_TE_TENSORS = {
    "delayed": "float8_tensor",
    "current": "float8_tensor",
    "block": "float8_blockwise_tensor",
}


def installed(library: str) -> bool:
    """Whether a library can be imported, without importing it."""
    return importlib.util.find_spec(library) is not None


def torchao_converted(model: nn.Module, recipe: str) -> nn.Module:
    """Return a copy with torchao's linear layers; the model itself must not be such a layer."""
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    converted: nn.Module = float8.convert_to_float8_training(copy.deepcopy(model), config=config)
    return converted


def _torchao(
    model: nn.Module, modes: Sequence[str], parameters: dict[str, str]
) -> Iterator[Candidate]:
    if not installed("torchao"):
        return
    for recipe in TORCHAO_RECIPES:
        for mode in modes:
            yield Candidate(
                f"torchao {recipe}, {mode}",
                partial(torchao_converted, model, recipe),
                parameters,
                compiled=mode == "compile",
                fp8=True,
                has_floor=False,
            )


def te_context(recipe: str | None, **fields: Any) -> Context:
    """Return TransformerEngine's autocast of one of ``TE_RECIPES``; None disables it."""
    te = importlib.import_module("transformer_engine.pytorch")
    te_recipe = None
    if recipe is not None:
        module = importlib.import_module("transformer_engine.common.recipe")
        te_recipe = getattr(module, TE_RECIPES[recipe])(**fields)
    if hasattr(te, "autocast"):
        return partial(te.autocast, enabled=recipe is not None, recipe=te_recipe)
    return partial(te.fp8_autocast, enabled=recipe is not None, fp8_recipe=te_recipe)


def _te(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(importlib.import_module("transformer_engine.pytorch"), name)(*args, **kwargs)


def _copied(module: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)
    return module


def _te_candidates(
    make: Any, parameters: dict[str, str], *, bf16: bool = False
) -> Iterator[Candidate]:
    """Iterate over ``make()`` in the autocast of each recipe and, if asked, in bfloat16."""
    if not installed("transformer_engine"):
        return
    prefixed = {name: f"module.{own}" for name, own in parameters.items()}
    for recipe in [*([None] if bf16 else []), *TE_RECIPES]:
        yield Candidate(
            f"TE {recipe or 'bfloat16'}",
            partial(_in_te_context, make, recipe),
            prefixed,
            fp8=recipe is not None,
            has_floor=False,
        )


def _in_te_context(make: Any, recipe: str | None) -> nn.Module:
    return InContext(make(), te_context(recipe))


class OtherCast(NamedTuple):
    """A cast to e4m3 by another library."""

    make: Callable[[], Callable[[Tensor], Any]]
    values: Callable[[Any], Tensor]
    """Returns the values of the cast's result, dequantized to float32."""
    passes: int = 1
    """The number of times that the input must be read."""
    written: int = 1
    """The bytes that are written for each element."""


def quantize_peers(device: torch.device) -> dict[str, OtherCast]:
    """Return TransformerEngine's quantizers, with and without the transpose."""
    if not installed("transformer_engine"):
        return {}

    def make(kind: str, transposed: bool) -> Callable[[Tensor], Any]:
        tensors = importlib.import_module(f"transformer_engine.pytorch.tensor.{_TE_TENSORS[kind]}")
        e4m3 = importlib.import_module("transformer_engine_torch").DType.kFloat8E4M3
        both = {"rowwise": True, "columnwise": transposed}
        if kind == "delayed":
            scale, amax = torch.ones(1, device=device), torch.zeros(1, device=device)
            quantizer = tensors.Float8Quantizer(scale, amax, e4m3, **both)
        elif kind == "current":
            quantizer = tensors.Float8CurrentScalingQuantizer(e4m3, device, **both)
        else:
            quantizer = tensors.Float8BlockQuantizer(e4m3, block_scaling_dim=1, **both)
        called: Callable[[Tensor], Any] = quantizer
        return called

    return {
        f"TE {kind}{', pair' if transposed else ''}": OtherCast(
            partial(make, kind, transposed),
            lambda result: result.dequantize().float(),
            passes=2 if kind == "current" else 1,
            written=1 + transposed,
        )
        for kind in _TE_TENSORS
        for transposed in (False, True)
    }


def linear_peers(plain: nn.Linear, modes: Sequence[str]) -> Iterator[Candidate]:
    """Iterate over the candidates for a linear layer without bias."""

    def make() -> nn.Module:
        N, K = plain.weight.shape
        layer = _te("Linear", K, N, bias=False, params_dtype=plain.weight.dtype)
        return _copied(layer, {"weight": plain.weight})

    yield from _torchao(nn.Sequential(plain), modes, {"dW": "0.weight"})
    yield from _te_candidates(make, {"dW": "weight"})


def norm_linear_peers(plain: PlainNormLinear, modes: Sequence[str]) -> Iterator[Candidate]:
    """Iterate over the candidates for an RMSNorm and a linear layer without bias."""
    norm, linear = plain.norm, plain.linear

    def make() -> nn.Module:
        layer = _te(
            "LayerNormLinear", linear.in_features, linear.out_features, eps=norm.eps, bias=False,
            normalization="RMSNorm", params_dtype=linear.weight.dtype,
        )  # fmt: skip
        return _copied(layer, {"layer_norm_weight": norm.weight, "weight": linear.weight})

    yield from _torchao(plain, modes, {"dgamma": "norm.weight", "dW": "linear.weight"})
    yield from _te_candidates(make, {"dgamma": "layer_norm_weight", "dW": "weight"})


def mlp_peers(plain: Any, modes: Sequence[str]) -> Iterator[Candidate]:
    """Iterate over the candidates for a ``PlainMlp``."""

    def make() -> nn.Module:
        D, F = plain.fc2.weight.shape
        activation = "swiglu" if plain.gated else "gelu"
        layer = _te(
            "LayerNormMLP", D, F, eps=plain.norm.eps, bias=False, normalization="RMSNorm",
            activation=activation, params_dtype=plain.fc2.weight.dtype,
        )  # fmt: skip
        weights = {"layer_norm_weight": plain.norm.weight}
        weights |= {"fc1_weight": plain.fc1.weight, "fc2_weight": plain.fc2.weight}
        return _copied(layer, weights)

    names = {"dgamma": "norm.weight", "dW1": "fc1.weight", "dW2": "fc2.weight"}
    yield from _torchao(plain, modes, names)
    names = {"dgamma": "layer_norm_weight", "dW1": "fc1_weight", "dW2": "fc2_weight"}
    yield from _te_candidates(make, names)


def layer_peers(
    plain: nn.Module,
    size: LayerSize,
    modes: Sequence[str],
    parameters: dict[str, str],
    fused: dict[str, str],
) -> Iterator[Candidate]:
    """Iterate over the candidates for the decoder layer of ``models.plain_layer``.

    Args:
        plain: the plain layer.
        size: the size of the plain layer.
        modes: the modes in which torchao's layers run.
        parameters: the names of the compared weights in the plain layer.
        fused: the names of these in ``models.our_layer``, equal to TransformerEngine's names.
    """

    yield from _torchao(plain, modes, parameters)
    yield from _te_candidates(partial(_te_layer, plain, size), fused, bf16=True)


def _te_layer(plain: nn.Module, size: LayerSize) -> nn.Module:
    device = next(plain.parameters()).device
    layer = _te("TransformerLayer", **layer_arguments(size, device))
    copy_layer_weights(layer, plain)
    # The recipe's autocast is entered around the module.
    return InContext(layer, nullcontext, rotary_pos_emb=rotary_angles(size, device))


StackMaker = tuple[str, Callable[[], nn.Module], bool]
"""A name, the function that makes a stack of layers, and whether the layers are compiled."""


def torchao_stack(plain: nn.Sequential, modes: Sequence[str]) -> Iterator[StackMaker]:
    """Iterate over torchao's stacks of plain decoder layers."""
    for candidate in _torchao(plain, modes, {}):
        yield candidate.name, candidate.make, candidate.compiled


def te_stack(plain: nn.Sequential, size: LayerSize) -> Iterator[StackMaker]:
    """Iterate over TransformerEngine's stacks with the plain weights, under one autocast."""

    def make() -> nn.Module:
        return nn.Sequential(*(_te_layer(layer, size) for layer in plain))

    for candidate in _te_candidates(make, {}):
        yield candidate.name, candidate.make, False


def attention_peers(
    H: int, D: int, *, causal: bool
) -> Iterator[tuple[str, bool, Callable[[], nn.Module]]]:
    """Iterate over TransformerEngine's attention: its name, whether it is FP8, and its factory."""
    if not installed("transformer_engine"):
        return
    mask = "causal" if causal else "no_mask"

    def make(recipe: str | None, **fields: Any) -> nn.Module:
        module = _te("DotProductAttention", H, D, qkv_format="bshd", attn_mask_type=mask)
        return InContext(module, te_context(recipe, **fields))

    yield "TE bfloat16", False, partial(make, None)
    yield "TE FP8 delayed", True, partial(make, "delayed", fp8_dpa=True)
