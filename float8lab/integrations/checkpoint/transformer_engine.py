"""Convert the delayed-scaling state that TransformerEngine saved to this library's.

TransformerEngine's modules save a pickle, as ``<module>._extra_state``. Only tensors and plain
values are loaded from it; objects of TransformerEngine itself become objects without code.

For each GEMM of a module the state has the scales of input, weight and output, in this order, and
for backward the scales of the gradients of output and input. Scales are encode factors. Row 0 of a
history is the amax since the last update. The other rows are past amaxes: the last row is the
newest and row 1 the oldest.

Sources: TransformerEngine's documentation of delayed scaling and of recipe.h; the names and shapes
in its checkpoints.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from float8lab.arguments import check_instance, check_module, check_path
from float8lab.checkpoints.opening import open_checkpoint
from float8lab.checkpoints.source import CheckpointError, refusing
from float8lab.checkpoints.unpickling import TRANSFORMER_ENGINE_STATE, load_restricted
from float8lab.inspect.text import Printed
from float8lab.integrations.checkpoint.weights import delayed_slots
from float8lab.nn.precision import DY, Precision, W, X, named_precisions, precisions
from float8lab.ops import NO_DATA
from float8lab.recipes.delayed import DelayedSlots
from float8lab.recipes.recipe import DelayedScaling, Format

__all__ = ["ScalingReport", "load_te_scaling"]

_KEY = "_extra_state"
_FORWARD, _BACKWARD = 3, 2
"""The number of tensors of a GEMM in the saved state, in forward and in backward."""


@dataclass(frozen=True, repr=False)
class ScalingReport(Printed):
    """The result of ``load_te_scaling``; ``print`` it."""

    loaded: tuple[str, ...]
    """Modules whose scales were loaded."""
    ignored: tuple[str, ...]
    """Modules of the checkpoint, such as attention, whose scales have no counterpart here."""
    recipe: DelayedScaling
    """The recipe with which the checkpoint's modules were trained, as far as the checkpoint
    says."""

    def summary(self) -> str:
        """Say in one line what was loaded."""
        ignored = f"; ignored: {', '.join(self.ignored)}" if self.ignored else ""
        return f"scales of {len(self.loaded)} modules, {self.recipe!r}{ignored}"


def load_te_scaling(
    source: str | Path | Mapping[str, object],
    model: nn.Module,
    recipe: DelayedScaling | None = None,
) -> ScalingReport:
    """Continue with the scales and amax histories of a TransformerEngine checkpoint.

    ``model.load_state_dict`` loads the weights as usual. This function reads the ``_extra_state``
    of each module without running code from it. Modules must have their names of the checkpoint.
    The two GEMMs of a ``LayerNormMLP`` may each have a state, ``fc1`` and ``fc2``, as those of
    Megatron-LM have. Tensor-parallel ranks have equal scales there, so any rank's state will do.

    Args:
        source: the state dict, or a checkpoint in files as in ``float8lab.inspect.checkpoint``.
        model: made of ``TransformerLayer`` and its parts, or of converted layers of these names.
        recipe: the recipe under which the model's modules will run; None is a converted module's
            own or, if it has none, the report's ``recipe``, which you then pass to ``autocast``.

    Raises:
        CheckpointError: the state is damaged, has other shapes, or names code.
        ValueError: the state holds no delayed scales, or a module that is not in the model.

    The model is unchanged if this raises.
    """
    check_module("model", model)
    check_instance("recipe", recipe, DelayedScaling, "a DelayedScaling", optional=True)
    unpickled = {name: _unpickled(name, value) for name, value in _extra_states(source).items()}
    states = {name: state for name, state in unpickled.items() if state is not None}
    modules = _precisions_by_name(model)
    problems = [name or "(model)" for name in states if name not in modules]
    if problems or not states:
        got = f"it has {', '.join(problems[:5])}" if problems else f"it has no {_KEY} with scales"
        raise ValueError(
            f"the checkpoint must have delayed scales of modules of the model; {got}. Load it into "
            "a model whose modules have the same names."
        )
    saved_recipe = _recipe(next(iter(states.values())))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ready: list[tuple[DelayedSlots, dict[str, Tensor]]] = []
    loaded: list[str] = []
    ignored: list[str] = []
    for name, state in states.items():
        gemms = _scales_of_gemms(name, state, len(modules[name]))
        (ignored if gemms is None else loaded).append(name)
        for precision, scales in zip(modules[name], gemms, strict=True) if gemms else ():
            candidates = recipe, precision.recipe, saved_recipe
            chosen = next(r for r in candidates if isinstance(r, DelayedScaling))
            slots = delayed_slots(precision, chosen, device)
            ready.append((slots, _converted(scales, slots)))
    for slots, values in ready:
        slots.load(values)
    return ScalingReport(tuple(loaded), tuple(ignored), saved_recipe)


def _precisions_by_name(model: nn.Module) -> dict[str, tuple[Precision, ...]]:
    """Return the FP8 states of each module and, as in Megatron, of each GEMM of a fused module."""
    gemms = {path: (precision,) for path, _, precision in named_precisions(model)}
    return gemms | {
        name: tuple(precision for _, precision in precisions(module))
        for name, module in model.named_modules()
    }


def _extra_states(source: str | Path | Mapping[str, object]) -> dict[str, object]:
    """Return the extra state that each module saved, by the module's name."""
    if not isinstance(source, Mapping):
        check_path("source", source)
        entries = open_checkpoint(source).entries
        source = {e.name: e.read() for e in entries if e.name.endswith(_KEY)}
    return {
        name.removesuffix(_KEY).removesuffix("."): value
        for name, value in source.items()
        if name == _KEY or name.endswith(f".{_KEY}")
    }


def _unpickled(name: str, value: object) -> Mapping[str, object] | None:
    """Return the saved state of a module; None if it has no delayed scales."""
    key = f"{name}.{_KEY}" if name else _KEY
    with refusing(f"{key} must be as TransformerEngine saves it; it is damaged"):
        if isinstance(value, Tensor) and value.dtype == torch.uint8:
            value = io.BytesIO(bytes(value.cpu().reshape(-1).tolist()))
        if isinstance(value, io.BytesIO):
            content, subject = value.getvalue(), f"{name or 'the module'}: {_KEY}"
            file = io.BytesIO(content)
            value = load_restricted(file, TRANSFORMER_ENGINE_STATE, subject) if content else None
    if value is None or (isinstance(value, dict) and "scale_fwd" not in value):
        return None  # the module did not run in FP8, or had a recipe without delayed scales
    if not isinstance(value, dict):
        raise CheckpointError(f"{key} must be a dict; it is a {type(value).__name__}.")
    return value


# Scales.


_Scaling = tuple[Tensor, Tensor]
"""The delayed scaling state of one tensor: its encode factor and its history of amaxes."""
_GemmScales = Sequence[_Scaling]
"""The states of a GEMM's input, weight and output gradient, in this order."""


def _scales_of_gemms(
    name: str, state: Mapping[str, object], count: int
) -> list[_GemmScales] | None:
    """Return the state of each GEMM of a module; None if another number of GEMMs was saved."""
    forward, backward = (_saved_scales(name, state, suffix) for suffix in ("fwd", "bwd"))
    if not count or (len(forward), len(backward)) != (_FORWARD * count, _BACKWARD * count):
        return None
    inputs, weights = forward[::_FORWARD], forward[1::_FORWARD]
    return [*zip(inputs, weights, backward[::_BACKWARD], strict=True)]


def _saved_scales(name: str, state: Mapping[str, object], suffix: str) -> list[_Scaling]:
    """Return the state of a module's tensors in forward or backward, in the saved order."""
    scale = _saved_tensor(name, state, f"scale_{suffix}", 1)
    history = _saved_tensor(name, state, f"amax_history_{suffix}", 2)
    if len(scale) != history.shape[1] or not bool((scale > 0).all()):
        raise CheckpointError(
            f"{name}.{_KEY} must have a positive scale for each history; got {len(scale)} scales "
            f"and {history.shape[1]} histories. It is damaged."
        )
    return list(zip(scale, history.t(), strict=True))


def _saved_tensor(name: str, state: Mapping[str, object], key: str, ndim: int) -> Tensor:
    value = state.get(key)
    if isinstance(value, Tensor) and value.ndim == ndim and value.dtype == torch.float32:
        return value
    got = "none" if value is None else type(value).__name__
    if isinstance(value, Tensor):
        got = f"{value.dtype} of shape {tuple(value.shape)}"
    raise CheckpointError(
        f"{name}.{_KEY} must have {key}, a float32 tensor of {ndim} dimensions; got {got}."
    )


def _converted(scales: _GemmScales, slots: DelayedSlots) -> dict[str, Tensor]:
    """Convert the saved state of a GEMM to the tensors of ``DelayedSlots``."""
    names = ("history", "amax", "scale", "encode", "seeded", "steps")
    values = {name: slots.tensors()[name].clone() for name in names}
    for slot, (encode, history) in zip((X, W, DY), scales, strict=True):
        if float(encode) == 1.0 and not bool(history.any()):
            continue  # this tensor was never cast
        past = history[1:].flip(0)[: values["history"].shape[0]]
        values["history"][:, slot] = 0.0
        values["history"][: len(past), slot] = past
        values["amax"][slot] = history[0] if bool(history[0] > 0) else NO_DATA
        values["scale"][slot], values["encode"][slot] = 1.0 / encode, encode
        values["seeded"][slot] = True
    return values


def _recipe(state: Mapping[str, object]) -> DelayedScaling:
    """Return the recipe as far as a module's saved state has it; scales are no powers of two."""
    recipe = state.get("recipe")
    extra = state.get("extra_fp8_variables")
    if recipe is None and isinstance(extra, Mapping):
        recipe = extra.get("recipe")
    fields = getattr(recipe, "__dict__", {})
    margin, algorithm = fields.get("margin", 0), fields.get("amax_compute_algo", "max")
    # The format is an enumeration of pairs of maxima, whose two members may lack names.
    pair = (*getattr(fields.get("fp8_format"), "values", ()), None)[0]
    gradients = getattr(pair, "max_bwd", (*getattr(pair, "values", ()), None, None)[1])
    history = state.get("amax_history_fwd")
    length = history.shape[0] if isinstance(history, Tensor) and history.ndim else 1
    return DelayedScaling(
        margin=margin if isinstance(margin, int) else 0, amax_history_len=max(int(length), 1),
        amax_compute_algo=algorithm if algorithm in ("max", "most_recent") else "max",
        fp8_format=Format.E4M3 if gradients == 448 else Format.HYBRID, power_of_2_scale=False,
    )  # fmt: skip
