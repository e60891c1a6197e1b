"""Restore the plain layers of models that Transformers loaded from quantized checkpoints.

``from_pretrained`` replaces a model's layers by its own (``FP8Linear``, ``FP8Experts``), or
compressed-tensors wraps them; their parameters are FP8 data and scales, which cannot be trained. A
model dequantized on loading quantizes what it saves, and its own Trainer cannot read that.

Source: Transformers, ``quantizers/base.py`` and ``core_model_loading.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

__all__ = ["without_quantizer"]

_CONVERSIONS = "_weight_conversions"
"""The attribute in which a model keeps how it was loaded; None stands for its class's default."""


@contextlib.contextmanager
def without_quantizer(model: nn.Module) -> Iterator[dict[str, torch.device]]:
    """Give a model the layers of its class, permanently unless the body of the ``with`` raises.

    Yields by name the devices to which the new layers' parameters, now on the meta device, belong.
    """
    before = dict(vars(model))
    quantizer = before.get("hf_quantizer")
    conversions = before.get(_CONVERSIONS) or ()
    operations = [op for entry in conversions for op in getattr(entry, "operations", ())]
    if quantizer is None and not any(hasattr(op, "hf_quantizer") for op in operations):
        yield {}
        return
    replaced = {} if quantizer is None else _replace_layers(model)
    vars(model)[_CONVERSIONS] = None
    try:
        yield {
            f"{name}.{local}": next(layer.parameters()).device
            for name, layer in replaced.items()
            for local in model.get_submodule(name)._parameters
        }
    except BaseException:
        for name, layer in replaced.items():
            model.set_submodule(name, layer)
        vars(model)[_CONVERSIONS] = before.get(_CONVERSIONS)
        raise
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    if hook := before.get("ct_decompress_hook"):  # with this hook compressed-tensors dequantizes
        hook.remove()


def _replace_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Replace layers by those of the model's class, on the meta device, where they differ."""
    with torch.device("meta"):
        original = type(model)(model.config).to(cast("torch.dtype", model.dtype))
    layers = dict(model.named_modules())
    replaced = {
        name: layers[name]
        for name, layer in original.named_modules()
        if name in layers and layers[name]._parameters.keys() != layer._parameters.keys()
    }
    for name, layer in replaced.items():
        model.set_submodule(name, original.get_submodule(name).train(layer.training))
    return replaced
