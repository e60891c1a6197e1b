"""The parameters of a module: their device, their initial values, the names of a split weight.

Parameters that are stored in FP8 stay the same objects when their module moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from float8lab.arguments import check_callables, check_dtype, check_instance, check_size, shown
from float8lab.distributed.comm import SharedScales
from float8lab.formats import HIGH_PRECISION_DTYPES
from float8lab.nn.parallel import ParameterShard
from float8lab.nn.precision import place_precisions
from float8lab.recipes.recipe import Recipe
from float8lab.recipes.region import STATE
from float8lab.tensor import Float8Tensor
from float8lab.tensor.blocks import quantize_blocks

__all__ = [
    "GetRngStateTracker", "InitMethod", "JoinedSplit", "MovedInPlace", "default_device",
    "draw_from_tracker", "initialise", "materialize", "reset_children", "sizes_of_split",
    "store_in_fp8", "stored_for",
]  # fmt: skip

InitMethod: TypeAlias = Callable[[Tensor], object]
"""Initialises a tensor in place; its return value is ignored."""
_normal_init = partial(nn.init.normal_, mean=0.0, std=0.023)


class _RngStateTracker(Protocol):
    """A ``CudaRNGStatesTracker`` of this library, Megatron or Transformer Engine."""

    def fork(self, *names: str) -> AbstractContextManager[None]: ...
    def get_states(self) -> dict[str, Tensor]: ...
    def set_states(self, states: dict[str, Tensor]) -> None: ...


GetRngStateTracker: TypeAlias = Callable[[], _RngStateTracker]


def default_device() -> torch.device:
    """Return the device for new parameters: the default device if the user set one, else CUDA."""
    chosen, torch_device = torch.get_default_device(), torch.utils._device
    modes = torch.overrides._get_current_function_mode_stack()
    was_set = torch_device.CURRENT_DEVICE is not None or any(
        isinstance(mode, torch_device.DeviceContext) for mode in modes
    )
    if chosen.type != "cpu" or was_set or not torch.cuda.is_available():
        return chosen
    return torch.device("cuda", torch.cuda.current_device())


def materialize(module: nn.Module) -> None:
    """Give a module's parameters on the meta device memory on the default device."""
    if any(p is not None and p.is_meta for p in module._parameters.values()):
        device = default_device()
        module._apply(
            lambda t: torch.empty_like(t, device=device) if t.is_meta else t, recurse=False
        )


def reset_children(module: nn.Module) -> None:
    """Call ``reset_parameters`` of a module's children."""
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            reset()


def draw_from_tracker(
    init_method: InitMethod | None, get_rng_state_tracker: GetRngStateTracker | None,
    rng_tracker_name: str | None,
) -> InitMethod | None:  # fmt: skip
    """Return the init method, which draws from a stream of the tracker if a tracker is given."""
    check_callables(("weight",), init_method=init_method)
    check_callables((), get_rng_state_tracker=get_rng_state_tracker)
    check_instance("rng_tracker_name", rng_tracker_name, str, "a name", optional=True)
    if get_rng_state_tracker is None:
        return init_method
    names = () if rng_tracker_name is None else (rng_tracker_name,)
    return partial(_draw_from, init_method or _normal_init, get_rng_state_tracker, names)


def _draw_from(
    init: InitMethod, get_rng_state_tracker: GetRngStateTracker, names: tuple[str, ...], x: Tensor
) -> None:
    with get_rng_state_tracker().fork(*names):
        init(x)


def initialise(
    weights: Sequence[Tensor], init_method: InitMethod | None, *, keep: bool,
    shard: ParameterShard | None,
) -> None:  # fmt: skip
    """Initialise the weight whose rows the parameters form, by one call of the init method.

    Parameters of experts, ``[E, N, K]``, take a call for each expert. With ``keep``, parameters
    that are stored in FP8 keep these initial values in high precision. A shard gets the values that
    it would have in the unsharded weight, which every rank initialises.
    """
    init, weight = init_method or _normal_init, weights[0]
    with torch.no_grad():
        if len(weights) == 1 and weight.ndim == 2 and not keep and shard is None:
            init(weight)
            return
        shard = shard or ParameterShard()
        shapes = [shard.unsharded_shape(weight.shape) for weight in weights]
        rows = [shape[0] for shape in shapes]
        values = torch.empty((sum(rows), *shapes[0][1:]), device=weight.device, dtype=weight.dtype)
        for matrix in values if weight.ndim == 3 else (values,):
            init(matrix)
        for weight, value in zip(weights, values.split(rows), strict=True):
            local = shard.shard(value)
            weight.copy_(local)
            if keep:
                _keep_initial_value(weight, local.clone())


class JoinedSplit(dict[str, int]):
    """A ``parameters_split`` of a single parameter, which joins matrices of these sizes."""


def sizes_of_split(
    split: Sequence[str] | Mapping[str, int] | None, out_features: int
) -> dict[str, int] | None:
    """Return ``parameters_split`` as a mapping from names to sizes."""
    if split is None:
        return None
    is_split = isinstance(split, (Mapping, Sequence)) and not isinstance(split, (str, bytes))
    if not is_split or not all(isinstance(name, str) for name in split):
        raise TypeError(
            "parameters_split must be None, a sequence of names or a mapping from names to sizes; "
            f"got {shown(split)}. Pass one, such as ('query', 'key', 'value')."
        )
    # A name with the suffix _weight or _bias stands for the pair.
    names = [name.rstrip("_").removesuffix("_weight").removesuffix("_bias") for name in split]
    if not all(names) or "." in "".join(names) or len(set(names)) != len(names) or not names:
        raise ValueError(
            "parameters_split must have at least one name, each another one and without a dot; got "
            f"{shown(split)}. Each name_weight and name_bias becomes a parameter."
        )
    if isinstance(split, Mapping):
        sizes = [check_size(f"parameters_split[{n!r}]", size) for n, size in split.items()]
    elif out_features % len(split):
        raise ValueError(
            f"parameters_split must name a number of parameters that divides out_features "
            f"{out_features}; got {len(split)} names. Pass a mapping from names to sizes instead."
        )
    else:
        sizes = [out_features // len(names)] * len(names)
    if sum(sizes) != out_features:
        raise ValueError(
            f"parameters_split must add up to out_features {out_features}; got {shown(split)}. "
            "Correct the sizes."
        )
    return dict(zip(names, sizes, strict=True))


# Parameters that are stored in FP8.


def stored_for(weight: Tensor, recipe: Recipe, sharing: SharedScales | None = None) -> Float8Tensor:
    """Quantize a weight, or a batch of weights, for the forward of a recipe, without gradients.

    ``sharing`` says how ranks share the weight, if they do.
    """
    check_dtype("weight", weight.dtype, HIGH_PRECISION_DTYPES, optional=False)
    value, spec, epsilon = weight.detach(), recipe.linear.w, recipe.linear.amax_epsilon
    spec = replace(spec, block=(1,) * (weight.ndim - 2) + spec.block)
    amax = None if sharing is None else sharing.amaxes(value, spec)
    q = quantize_blocks(value, spec, amax_epsilon=epsilon, known_amax=amax)
    return Float8Tensor._make(*q, spec, weight.dtype)


def store_in_fp8(
    module: nn.Module, names: Sequence[str], sharing: SharedScales | None = None
) -> bool:
    """Replace parameters by parameters in FP8 if a ``fp8_model_init`` block is active.

    ``sharing`` says how ranks share the parameters, if they do. The result says whether parameters
    must keep their initial values in high precision.
    """
    if (init := STATE.init) is None:
        return False
    for name in names:
        value = getattr(module, name).detach()
        if sharing is not None:
            sharing.check(name, value.shape, init.recipe.linear.w)
        parameter = nn.Parameter(stored_for(value, init.recipe, sharing))
        parameter._shared_scales = sharing  # type: ignore[attr-defined]  # it is a Float8Tensor
        if init.preserve_high_precision_init_val:
            _keep_initial_value(parameter, value)
        setattr(module, name, parameter)
    return init.preserve_high_precision_init_val


def _keep_initial_value(parameter: Tensor, value: Tensor) -> None:
    """Keep ``value`` for ``get_high_precision_init_val``; on the meta device there is none yet."""
    if isinstance(parameter, Float8Tensor):
        parameter._high_precision_init_val = None if value.is_meta else value.detach().cpu()


class MovedInPlace(nn.Module):
    """A module whose FP8 parameters stay the same objects when it moves.

    The parameters keep their attributes and hooks, and references to them stay valid, as with
    ordinary parameters; torch would put a new tensor in their place. Torch handles parameters that
    move to or from the meta device.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        parameters = self._parameters
        present = [(name, p) for name, p in parameters.items() if p is not None]
        stored = [(name, p) for name, p in present if isinstance(p, Float8Tensor)]
        moved: dict[str, nn.Parameter] = {}
        try:
            with torch.no_grad():
                for name, parameter in stored:
                    value = fn(parameter)
                    if not torch._has_compatible_shallow_copy_type(parameter, value):
                        continue
                    parameters[name] = None  # so that torch skips the parameter
                    moved[name] = parameter
                    if value is not parameter:
                        parameter.data = value
                    if parameter.grad is not None:
                        parameter.grad.data = fn(parameter.grad)
            module: nn.Module = super()._apply(fn, recurse)
        finally:
            parameters.update(moved)
        place_precisions(self)
        return module
