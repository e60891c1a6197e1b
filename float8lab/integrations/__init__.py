"""Other libraries and their checkpoint formats; none of them is imported before it is used."""

import importlib
from typing import Any

from float8lab.integrations.hf_weights import (
    from_transformer_layers,
    to_transformer_layers,
    transformer_layers,
)
from float8lab.integrations.onnx import onnx_export

__all__ = [
    "from_transformer_layers",
    "onnx_export",
    "to_transformer_layers",
    "transformer_layers",
]

_ADAPTERS = ("lightning",)
"""Modules that import another library at their top, loaded on their first use."""


def __getattr__(name: str) -> Any:
    if name not in _ADAPTERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ADAPTERS})
