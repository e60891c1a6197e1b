"""The dispatch table, which holds the handler for each aten op on a Float8Tensor.

``implements`` enters a handler. An op without a handler *falls back*: its Float8Tensor arguments
are dequantized, the op runs on ordinary tensors, and arguments written in place are requantized.
``fallback`` sets whether a fall back warns (once per op), raises, or stays silent.

Torch splits a *composite* op into other ops before it reaches this table. ``implements_composite``
enters a function that ``__torch_function__`` runs in place of the op, before torch splits it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from float8lab.arguments import check_choice
from float8lab.tensor.window import StoredInBlocks, Window, merge_into

__all__ = [
    "ANY_VIEW", "announce", "announce_address", "check_size", "fallback", "implements",
    "implements_composite", "overloads", "run_fallback", "table", "written_tensors",
]  # fmt: skip

Handler = Callable[..., object]
AnyHandler = TypeVar("AnyHandler", bound=Handler)


class Quantized(StoredInBlocks, Protocol):
    """The attributes of a Float8Tensor that the fallback uses."""

    requires_grad: bool
    _window: Window | None

    def _decode(self) -> Tensor: ...
    def requantize_(self, value: Tensor) -> object: ...


class HandlerTable(dict[OpOverload | str, Handler]):
    """Handlers by overload: ``handler(op, *args, **kwargs)``.

    Attributes:
        composite: handlers of composite ops, by the torch function that is called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.composite: dict[Handler, Handler] = {}


table = HandlerTable()
"""Modules of handlers fill this table while the package is imported."""

ANY_VIEW = "any view"
"""The table's key for the handler of view ops that have no handler of their own."""

# In-place ops that write only some elements: the blocks of unwritten elements keep their bits.
_PARTIAL = frozenset(
    f"aten::{name}"
    for name in (
        "fill_diagonal_", "index_add_", "index_copy_", "index_fill_", "index_put_",
        "_index_put_impl_", "index_reduce_", "masked_fill_", "masked_scatter_", "put_", "scatter_",
        "scatter_add_", "scatter_reduce_", "tril_", "triu_", "embedding_renorm_",
    )
)  # fmt: skip


@dataclass(slots=True)
class _Policy:
    name: str = "warn"
    warned: set[OpOverload | str] = field(default_factory=set)


_POLICY = _Policy()


class fallback:
    """Set the policy for ops without an FP8 implementation, whose operands are dequantized.

    It takes effect at once; as a context manager it also restores the earlier policy.

    Args:
        policy: ``"warn"`` (the default; once per op), ``"error"`` or ``"silent"``.

    Raises:
        ValueError: unknown policy.

    >>> with float8lab.fallback("silent"):
    ...     _ = float8lab.quantize(torch.ones(2, 2)) + 1
    """

    __slots__ = ("_before",)

    def __init__(self, policy: str) -> None:
        check_choice("policy", policy, ("error", "warn", "silent"))
        self._before, _POLICY.name = _POLICY.name, policy

    def __enter__(self) -> fallback:
        return self

    def __exit__(self, *exc: object) -> None:
        _POLICY.name = self._before


def overloads(*names: str, namespace: object = torch.ops.aten) -> frozenset[OpOverload]:
    """Return the overloads without ``out`` of the named ops, as far as this torch has them."""
    packets = [getattr(namespace, name) for name in names if hasattr(namespace, name)]
    return frozenset(
        getattr(packet, overload)
        for packet in packets
        for overload in packet.overloads()
        if "out" not in overload
    )


def implements(*overloads: OpOverload | str) -> Callable[[AnyHandler], AnyHandler]:
    """Enter the decorated handler for these overloads; a second handler for an overload raises.

    If a handler returns ``NotImplemented``, the op falls back.
    """

    def enter(handler: AnyHandler) -> AnyHandler:
        for overload in overloads:
            if overload in table:
                raise ValueError(f"{overload} must have one handler; got a second one.")
            table[overload] = handler
        return handler

    return enter


def implements_composite(
    *functions: Handler, autocast: Callable[[str], torch.dtype | None] | None = None
) -> Callable[[AnyHandler], AnyHandler]:
    """Enter the decorated function, which is differentiable, for a composite op.

    The function gets the op's arguments, at least one of which is a Float8Tensor, and returns
    ``NotImplemented`` to let torch split the op.

    Args:
        functions: torch functions, tensor methods and overloads with the same signature.
        autocast: maps a device type to the dtype that ``torch.autocast`` gives the op's tensors, or
            None if autocast leaves them. Omitted where torch's own function handles autocast.
    """

    def enter(handler: AnyHandler) -> AnyHandler:
        def run(*args: object, **kwargs: object) -> object:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            device = tensors[0].device.type
            dtype = autocast(device) if autocast and torch.is_autocast_enabled(device) else None
            if dtype is None:
                return handler(*args, **kwargs)

            def cast(x: Tensor) -> Tensor:
                return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
            with torch.autocast(device, enabled=False):
                result = handler(*args, **kwargs)
                return functions[0](*args, **kwargs) if result is NotImplemented else result

        table.composite.update(dict.fromkeys(functions, handler if autocast is None else run))
        return handler

    return enter


def announce(op: OpOverload) -> None:
    """Warn once that an op dequantizes, or raise, according to the policy."""
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
            stacklevel=4,
        )


def _announce_update(op: OpOverload, written: Sequence[Quantized], arguments: object) -> None:
    """Warn once that an update of a parameter stored in FP8 may be lost to rounding."""
    tensors = {id(x) for x in tree_leaves(arguments) if isinstance(x, Tensor)}
    update = not tensors <= {id(x) for x in written}  # False for nn.init and clamping
    if update and _POLICY.name == "warn" and "update" not in _POLICY.warned:
        _POLICY.warned.add("update")
        warnings.warn(
            f"{op} updated a parameter stored in FP8: what is below half a unit in its last place, "
            "3 to 6 % of a weight in e4m3, is lost, and training stalls. Train with "
            "float8lab.optim.MasterWeights(params, optimizer_class, ...) (said once).",
            stacklevel=4,
        )


def announce_address(dtype: torch.dtype, stored: str, keeper: str) -> None:
    """Warn once that the memory of a quantized weight is read as ``dtype``, or raise."""
    # ``stored`` names the storage format, ``keeper`` the function that saves in this format.
    if _POLICY.name == "error":
        raise NotImplementedError(
            f"data_ptr() of a weight stored in {stored} must dequantize it. Save with {keeper}, "
            f'which keeps {stored}, or allow dequantizing with float8lab.fallback("warn").'
        )
    if _POLICY.name == "warn" and f"data_ptr {stored}" not in _POLICY.warned:
        _POLICY.warned.add(f"data_ptr {stored}")
        warnings.warn(
            f"weights stored in {stored} are read, and so saved, in {dtype}: safetensors and what "
            "saves by it, such as save_pretrained, get dequantized copies. "
            f"{keeper} writes them in {stored} "
            '(said once; float8lab.fallback("silent") or ("error") changes this).',
            stacklevel=3,
        )


def run_fallback(
    cls: type[Tensor], op: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object], *,
    quiet: bool = False,
) -> object:  # fmt: skip
    """Run ``op`` on dequantized arguments and requantize those that it wrote in place.
    An op that writes a Float8Tensor in place needs the values, so it does not warn. An op that got
    a Float8Tensor only as its ``out`` argument warns."""
    written = [] if not op._schema.is_mutable else written_tensors(cls, op, args, kwargs)
    in_place = bool(written) and not any(a.is_out for a in op._schema.arguments)
    if not quiet and not in_place:
        announce(op)
    if in_place and any(x.requires_grad for x in written):
        _announce_update(op, written, (args, kwargs))
    plain: dict[int, Tensor] = {}

    def dequantized(x: Quantized) -> Tensor:
        if id(x) not in plain:
            plain[id(x)] = x._decode()
        return plain[id(x)]

    args, kwargs = tree_map_only(cls, dequantized, (args, kwargs))
    partial = op._schema.name in _PARTIAL
    old_values = [plain[id(x)].clone() if partial else None for x in written]
    result = op(*args, **kwargs)
    for x in written:  # check all of them before any is requantized
        check_size(op, x, plain[id(x)].shape)
    for x, old in zip(written, old_values, strict=True):
        value = plain[id(x)]
        if old is not None and x._window is None:
            merge_into(x, value, (value != old) & ~(value.isnan() & old.isnan()))
        else:
            x.requantize_(value)
    if not written:
        return result
    originals = {id(plain[id(x)]): x for x in written}
    return tree_map_only(torch.Tensor, lambda t: originals.get(id(t), t), result)


def check_size(op: OpOverload, x: StoredInBlocks, size: Sequence[int]) -> None:
    """Raise if ``op`` resizes the Float8Tensor ``x`` in place, as torch may do with ``out``."""
    if tuple(size) != tuple(x.shape):
        raise NotImplementedError(
            f"{op} must keep the size of a Float8Tensor, {tuple(x.shape)}; got {tuple(size)}. Use "
            "view(), or quantize() a new tensor."
        )


def written_tensors(
    cls: type[Tensor], op: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> list[Quantized]:
    """Return the Float8Tensors that the op writes to, without duplicates."""
    written: dict[int, Quantized] = {}
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for x in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(x, cls):
                written[id(x)] = cast("Quantized", x)
    return list(written.values())
