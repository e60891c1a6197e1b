"""Other libraries and their checkpoint formats; none of them is imported or needed."""

from float8lab.integrations.hf_weights import (
    from_transformer_layers,
    to_transformer_layers,
    transformer_layers,
)

__all__ = ["from_transformer_layers", "to_transformer_layers", "transformer_layers"]
