"""The dispatch table: which handler runs when an aten op meets a Float8Tensor.

``implements`` enters a handler; an op without one *falls back*: its Float8Tensor arguments are
dequantized, the op runs on ordinary tensors, what it wrote in place is quantized again.
``fallback`` sets whether that warns (once per op), raises, or stays silent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["fallback", "implements", "run_fallback", "table"]

Handler = Callable[..., Any]

table: dict[Any, Handler] = {}
"""Handlers by overload: ``handler(op, *args, **kwargs)``."""

_POLICIES = ("error", "warn", "silent")


class _Policy:
    __slots__ = ("name", "warned")

    def __init__(self) -> None:
        self.name = "warn"
        self.warned: set[Any] = set()


_POLICY = _Policy()


class fallback:
    """Set what happens when an op has no FP8 implementation and its operands are dequantized.

    Takes effect at once; as a context manager it also restores the earlier policy.

    Args:
        policy: ``"warn"`` (the default; once per op), ``"error"`` or ``"silent"``.

    Raises:
        ValueError: unknown policy.

    >>> with float8lab.fallback("silent"):
    ...     _ = float8lab.quantize(torch.ones(2, 2)) + 1
    """

    __slots__ = ("_before",)

    def __init__(self, policy: str) -> None:
        if policy not in _POLICIES:
            raise ValueError(f"policy must be one of {_POLICIES}; got {policy!r}. Choose one.")
        self._before = _POLICY.name
        _POLICY.name = policy

    def __enter__(self) -> fallback:
        return self

    def __exit__(self, *exc: Any) -> None:
        _POLICY.name = self._before


def implements(*overloads: Any) -> Callable[[Handler], Handler]:
    """Enter the decorated handler for these overloads; entering one twice raises."""

    def enter(handler: Handler) -> Handler:
        for overload in overloads:
            if overload in table:
                raise ValueError(f"{overload} must have one handler; got a second one.")
            table[overload] = handler
        return handler

    return enter


def _announce(op: Any) -> None:
    if _POLICY.name == "error":
        raise NotImplementedError(
            f"{op} has no FP8 implementation. Call .dequantize() on its Float8Tensor arguments, or "
            'allow dequantizing with float8lab.fallback("warn").'
        )
    if _POLICY.name == "warn" and op not in _POLICY.warned:
        _POLICY.warned.add(op)
        warnings.warn(
            f"{op} has no FP8 implementation: its Float8Tensor arguments are dequantized "
            '(said once per op; float8lab.fallback("silent") or ("error") changes this).',
            UserWarning,
            stacklevel=4,
        )


def run_fallback(cls: type[Tensor], op: Any, args: Any, kwargs: Any, *, quiet: bool = False) -> Any:
    """Run ``op`` on dequantized arguments and quantize again what it wrote in place."""
    if not quiet:
        _announce(op)
    plain: dict[int, Tensor] = {}

    def dequantized(x: Any) -> Tensor:
        if id(x) not in plain:
            plain[id(x)] = x.dequantize()
        return plain[id(x)]

    result = op(*tree_map_only(cls, dequantized, args), **tree_map_only(cls, dequantized, kwargs))
    written: dict[int, Any] = {}
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for x in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(x, cls):
                x.requantize_(plain[id(x)])  # type: ignore[attr-defined]  # cls is Float8Tensor
                written[id(plain[id(x)])] = x
    return tree_map_only(torch.Tensor, lambda t: written.get(id(t), t), result)
