"""Convert the delayed-scaling state that TransformerEngine saved to this library's.

TransformerEngine's modules save a pickle, as ``<module>._extra_state``. Only tensors and plain
values are loaded from it; objects of TransformerEngine itself become objects without code.

The state has, for each product of a module, the scales of input, weight and output, in this order,
and for backward the scales of the gradients of output and input. Scales are encode factors. Row 0
of a history is the amax since the last update; the others, from the last to row 1, are the past,
newest first.

Sources: TransformerEngine's documentation of delayed scaling and of recipe.h; the names and shapes
in its checkpoints.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from float8lab.arguments import check_instance, check_module, check_path
from float8lab.checkpoints.opening import open_checkpoint
from float8lab.checkpoints.pickles import Opaque, limited_unpickler, load_limited
from float8lab.checkpoints.source import CheckpointError, refusing
from float8lab.nn.precision import DY, Precision, W, X, precisions
from float8lab.ops import NO_DATA
from float8lab.recipes.delayed import DelayedSlots
from float8lab.recipes.recipe import DelayedScaling, Format

__all__ = ["ScalingReport", "load_te_scaling"]

_KEY = "_extra_state"
_FORWARD, _BACKWARD = 3, 2
"""Tensors of a product in the saved state, in forward and in backward."""


@dataclass(frozen=True)
class ScalingReport:
    """The result of ``load_te_scaling``; ``print`` it."""

    loaded: tuple[str, ...]
    """Modules that have their scales now."""
    ignored: tuple[str, ...]
    """Modules of the checkpoint, such as attention, whose scales have no counterpart here."""
    recipe: DelayedScaling
    """The recipe with which the checkpoint's modules were trained, as far as the checkpoint
    says."""

    def __str__(self) -> str:
        ignored = f"; ignored: {', '.join(self.ignored)}" if self.ignored else ""
        return f"scales of {len(self.loaded)} modules, {self.recipe!r}{ignored}"

    __repr__ = __str__


def load_te_scaling(
    source: str | Path | Mapping[str, Any],
    model: nn.Module,
    recipe: DelayedScaling | None = None,
) -> ScalingReport:
    """Continue with the scales and amax histories of a TransformerEngine checkpoint.

    Weights are loaded by ``model.load_state_dict`` as ever; this reads the ``_extra_state`` of each
    module, without running code from it. Modules have the names that they have in the checkpoint;
    the two products of a ``LayerNormMLP`` may have a state each, ``fc1`` and ``fc2``, as those of
    Megatron-LM have. Tensor-parallel ranks have equal scales there: any rank's state will do.

    Args:
        source: the state dict, or a checkpoint in files as in ``float8lab.inspect.checkpoint``.
        model: of ``TransformerLayer`` and its parts, or converted layers of these names.
        recipe: under which the model's modules will run; None is a converted module's own, or
            else the report's ``recipe``, to be given to ``autocast``.

    Raises:
        CheckpointError: the state is damaged, has other shapes, or names code.
        ValueError: it holds no delayed scales, or a module that is not in the model.

    The model is unchanged if it raises.
    """
    check_module("model", model)
    check_instance("recipe", recipe, DelayedScaling, "a DelayedScaling", optional=True)
    if not isinstance(source, Mapping):
        check_path("source", source)
    states = {
        name: state
        for name, value in _extra_states(source).items()
        if (state := _unpickled(name, value)) is not None
    }
    modules: dict[str, tuple[Precision, ...]] = {}
    for name, module in model.named_modules():
        parts = list(precisions(module))
        modules[name] = tuple(p for _, p in parts)
        if len(parts) > 1:  # in Megatron each has a module of its own
            modules |= {f"{name}.{part}" if name else part: (p,) for part, p in parts}
    problems = [name or "(model)" for name in states if name not in modules]
    if problems or not states:
        got = f"it has {', '.join(problems[:5])}" if problems else f"it has no {_KEY} with scales"
        raise ValueError(
            f"the checkpoint must have delayed scales of modules of the model; {got}. Load it into "
            "a model whose modules have the same names."
        )
    found = _recipe(next(iter(states.values())))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ready: list[tuple[DelayedSlots, dict[str, Tensor]]] = []
    loaded, ignored = [], []
    for name, state in states.items():
        owned = modules[name]
        columns = _columns(name, state, len(owned))
        if columns is None:
            ignored.append(name)
            continue
        for precision, column in zip(owned, columns, strict=True):
            slots = _slots(precision, recipe or found, device, given=recipe is not None)
            ready.append((slots, _converted(column, slots)))
        loaded.append(name)
    for slots, values in ready:
        slots.load(values)
    return ScalingReport(tuple(loaded), tuple(ignored), found)


def _extra_states(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The extra state that each module saved, by the module's name."""
    if isinstance(source, Mapping):
        pairs = list(source.items())
    else:
        entries = open_checkpoint(source).entries
        pairs = [(e.name, e.read()) for e in entries if e.name.endswith(_KEY)]
    return {
        name.removesuffix(_KEY).removesuffix("."): value
        for name, value in pairs
        if name == _KEY or name.endswith(f".{_KEY}")
    }


# Pickles.


def _storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _allowed(module: str, name: str) -> Any:
    if module.split(".")[0] in ("transformer_engine", "transformer_engine_torch"):
        return Opaque
    known = {
        ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
        # Pickles name this function for the elements of a tensor; torch's own loads any pickle.
        ("torch.storage", "_load_from_bytes"): _storage,
    }
    return known.get((module, name))


def _load(file: io.BytesIO, limited: type[pickle.Unpickler]) -> Any:
    """Load a pickle, or what ``torch.save`` wrote; None if the file is empty."""
    if not file.getbuffer().nbytes:
        return None
    written = file.getvalue().startswith(b"PK")
    return load_limited(file, limited) if written else limited(file).load()


def _unpickled(name: str, value: Any) -> dict[str, Any] | None:
    """The saved state of a module; None if it has no delayed scales."""
    where = f"{name}.{_KEY}" if name else _KEY

    def refusal(named: str) -> str:
        return (
            f"{name or 'the module'}: {_KEY} must hold tensors and values of TransformerEngine; it "
            f"names {named}, and loading that can run code. It is refused."
        )

    state, limited = value, limited_unpickler(_allowed, refusal)
    with refusing(f"{where} must be as TransformerEngine saves it; it is damaged"):
        if isinstance(value, Tensor) and value.dtype == torch.uint8:
            value = io.BytesIO(bytes(value.cpu().reshape(-1).tolist()))
        if isinstance(value, io.BytesIO):
            state = _load(io.BytesIO(value.getvalue()), limited)
    if state is None or (isinstance(state, dict) and "scale_fwd" not in state):
        return None  # of a module that did not run in FP8, or by another recipe
    if not isinstance(state, dict):
        raise CheckpointError(f"{where} must be a dict; it is a {type(state).__name__}.")
    return state


# Scales.


_Column = Sequence[tuple[Tensor, Tensor]]
"""Encode factor and amax history of a product's input, weight and output gradient."""


def _columns(name: str, state: Mapping[str, Any], count: int) -> list[_Column] | None:
    """The state of each of a module's products; None if another number of them was saved."""
    parts: dict[str, Tensor] = {}
    for key, ndim in (("scale", 1), ("amax_history", 2)):
        for way in ("fwd", "bwd"):
            value = state.get(f"{key}_{way}")
            if not isinstance(value, Tensor) or value.ndim != ndim or value.dtype != torch.float32:
                raise CheckpointError(
                    f"{name}.{_KEY} must have {key}_{way}, a float32 tensor of {ndim} dimensions; "
                    f"got {'none' if value is None else _shown(value)}."
                )
            parts[f"{key}_{way}"] = value
    for way in ("fwd", "bwd"):
        sizes = parts[f"scale_{way}"].shape[0], parts[f"amax_history_{way}"].shape[1]
        if sizes[0] != sizes[1] or not bool((parts[f"scale_{way}"] > 0).all()):
            raise CheckpointError(
                f"{name}.{_KEY} must have a positive scale for each history; got {sizes[0]} scales "
                f"and {sizes[1]} histories. It is damaged."
            )
    sizes = parts["scale_fwd"].numel(), parts["scale_bwd"].numel()
    if not count or sizes != (_FORWARD * count, _BACKWARD * count):
        return None

    def pair(way: str, at: int) -> tuple[Tensor, Tensor]:
        return parts[f"scale_{way}"][at], parts[f"amax_history_{way}"][:, at]

    return [
        [pair("fwd", _FORWARD * i), pair("fwd", _FORWARD * i + 1), pair("bwd", _BACKWARD * i)]
        for i in range(count)
    ]


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__


def _slots(
    precision: Precision, recipe: DelayedScaling, device: torch.device, *, given: bool
) -> DelayedSlots:
    own = precision.recipe
    chosen = own if isinstance(own, DelayedScaling) and not given else recipe
    precision.prepare(device, chosen)
    return next(slots for (used, _), slots in precision.slots.items() if used == chosen)


def _converted(column: _Column, slots: DelayedSlots) -> dict[str, Tensor]:
    """The tensors of ``DelayedSlots`` for a product, converted from its saved state."""
    values = {
        name: slots.tensors()[name].clone()
        for name in ("history", "amax", "scale", "encode", "seeded", "steps")
    }
    for slot, (encode, history) in zip((X, W, DY), column, strict=True):
        if float(encode) == 1.0 and not bool(history.any()):
            continue  # never used
        past = history[1:].flip(0)[: values["history"].shape[0]]
        values["history"][:, slot] = 0.0
        values["history"][: len(past), slot] = past
        values["amax"][slot] = history[0] if bool(history[0] > 0) else NO_DATA
        values["scale"][slot], values["encode"][slot] = 1.0 / encode, encode
        values["seeded"][slot] = True
    return values


def _recipe(state: Mapping[str, Any]) -> DelayedScaling:
    """The recipe in a module's saved state, as far as that says; scales are no powers of two."""
    told = state.get("recipe")
    extra = state.get("extra_fp8_variables")
    if told is None and isinstance(extra, Mapping):
        told = extra.get("recipe")
    said = getattr(told, "__dict__", {})
    margin, algorithm = said.get("margin", 0), said.get("amax_compute_algo", "max")
    gradients = _largest_gradient(said.get("fp8_format"))
    history = state.get("amax_history_fwd")
    length = history.shape[0] if isinstance(history, Tensor) and history.ndim else 1
    return DelayedScaling(
        margin=margin if isinstance(margin, int) else 0,
        amax_history_len=max(int(length), 1),
        amax_compute_algo=algorithm if algorithm in ("max", "most_recent") else "max",
        fp8_format=Format.E4M3 if gradients == 448 else Format.HYBRID,
        power_of_2_scale=False,
    )


def _largest_gradient(format: Any) -> Any:
    """Largest value of the gradients in a saved recipe's format; None if it is unknown.

    The format is an enumeration of pairs, each of which has names or not.
    """
    pair = (*getattr(format, "values", ()), None)[0]
    return getattr(pair, "max_bwd", (*getattr(pair, "values", ()), None, None)[1])
