"""Match the names of a model's layers with a user's names and patterns."""

from __future__ import annotations

from fnmatch import fnmatchcase

__all__ = ["ADAPTERS", "TRAINED_COPIES", "matches"]

# Names that PEFT gives to modules. PEFT may not be installed, and other libraries use them too.
ADAPTERS = ("lora_A", "lora_B")
"""The linear layers of low-rank adapters."""
TRAINED_COPIES = "modules_to_save"
"""The module that holds the trained copy of a layer; the layer itself does not run."""


def matches(name: str, pattern: str) -> bool:
    """Whether a qualified layer name matches a pattern.

    A pattern has one or more full path components, which may be anywhere in the name; a component
    may be a glob; a glob may also match the full name.

    >>> matches("blocks.0.attn.qkv", "attn"), matches("blocks.0.attn.qkv", "blocks.0")
    (True, True)
    >>> matches("blocks.0.attn.qkv", "at"), matches("blocks.10.mlp", "blocks.1")
    (False, False)
    >>> matches("blocks.0.attn.qkv", "*.qkv"), matches("blocks.10.mlp", "blocks.1?.mlp")
    (True, True)
    """
    components, globs = name.split("."), pattern.split(".")
    inside = any(
        all(fnmatchcase(c, g) for c, g in zip(components[i:], globs, strict=False))
        for i in range(len(components) - len(globs) + 1)
    )
    return inside or fnmatchcase(name, pattern)
