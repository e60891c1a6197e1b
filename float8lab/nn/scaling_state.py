"""Delayed-scaling state as ordinary tensors, for checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from float8lab.arguments import check_flags, check_group, check_module
from float8lab.nn.precision import named_precisions, without_wrappers
from float8lab.recipes.delayed import DelayedSlots
from float8lab.recipes.recipe import Recipe, check_recipe
from float8lab.recipes.reduction import channel, reducing_group

__all__ = ["ScalingState"]

_NAMES = ("history", "amax", "scale", "encode", "steps")


class ScalingState:
    """The delayed-scaling state of a model, ``Stateful`` and separate from its ``state_dict``.

    A model's own ``state_dict`` has only the keys of the plain model, so a checkpoint without this
    state loads strictly. A model that has not run yet then takes the first scales from the tensors'
    own amaxes; one that has run keeps the scales of the former weights. With this state, training
    resumes bit for bit, even if the model is compiled in only one of the two runs.

    ``state_dict`` is a collective where amaxes are reduced over ranks: the amaxes of gradients wait
    for the next step's reduction, so ranks exchange them in ``state_dict``.

    Args:
        recipe: the recipe under which an ``autocast`` runs the modules; needed to load their state
            before their first call.
        amax_reduction_group: the group of that ``autocast``, if it has one.

    >>> layer = torch.nn.Linear(16, 16)
    >>> layer = float8lab.convert_to_float8(layer, float8lab.recipes.DelayedScaling())
    >>> sorted(key.split("/")[-1] for key in float8lab.nn.ScalingState(layer).state_dict())
    ['amax', 'encode', 'history', 'scale', 'seeded', 'steps']
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe | None = None,
        amax_reduction_group: ProcessGroup | None = None,
    ) -> None:
        check_module("model", model)
        check_recipe("recipe", recipe)
        check_group("amax_reduction_group", amax_reduction_group)
        self.model = model
        self.recipe = recipe
        self.amax_reduction_group = amax_reduction_group

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of all slots, by module name and recipe."""
        slots_by_key = list(self._slots())
        for group in dict.fromkeys(slots.pack.group for _, slots in slots_by_key):
            if (ranks := reducing_group(group)) is not None:
                for _, slots in slots_by_key:
                    if slots.pack.group is group and slots.pack.recipe.reduce_amax:
                        channel(ranks).add(slots)
                channel(ranks).reduce(ranks, agree=True)
        state = {}
        for key, slots in slots_by_key:
            tensors = slots.tensors()
            state.update({f"{key}/{name}": tensors[name].clone() for name in _NAMES})
            state[f"{key}/seeded"] = tensors["seeded"] | (tensors["steps"] > 0)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Load a state in place.

        Args:
            state: the result of ``state_dict`` of the same model, trained under the same recipes.
            strict: False loads the entries that fit, and warns about all others.

        Raises:
            TypeError: ``state`` is not a mapping.
            ValueError: ``state`` does not fit the model's modules and recipes; nothing is loaded.
        """
        check_flags(strict=strict)
        if not isinstance(state, Mapping):
            raise TypeError(
                f"state must be a mapping of names to tensors; got {type(state).__name__}. Pass "
                "what state_dict() returned."
            )
        state = {without_wrappers(str(k)): v for k, v in state.items()}  # older keys name wrappers
        missing, different = [], []
        expected: set[str] = set()
        values = {}
        for key, slots in list(self._slots()):
            expected.update(f"{key}/{name}" for name in (*_NAMES, "seeded"))
            has_encode = f"{key}/encode" in state  # otherwise it is computed as 1 / scale
            names = [name for name in (*_NAMES, "seeded") if has_encode or name != "encode"]
            shapes = {name: slots.tensors()[name].shape for name in names}
            loaded = {name: state.get(f"{key}/{name}") for name in names}
            fitted = {n: slots.fitted(x) for n, x in loaded.items() if isinstance(x, Tensor)}
            if any(value is None for value in loaded.values()):
                missing.append(key)
            elif {name: x.shape for name, x in fitted.items()} != shapes or not all(
                ((fitted[name] > 0) & (fitted[name] < torch.inf)).all()
                for name in {"scale", "encode"}.intersection(names)
            ):
                different.append(key)
            else:
                values[slots] = fitted
        extra = [k.rpartition("/")[0] or k for k in state if k not in expected]
        self._report(missing, list(dict.fromkeys(extra)), different, strict)
        for slots, value in values.items():
            slots.load(value)

    def _report(
        self, missing: Sequence[str], extra: Sequence[str], different: Sequence[str], strict: bool
    ) -> None:
        """Raise if ``strict``, else warn, where a state belongs to another model or recipe."""
        if missing or extra or different:
            problem = (
                "state must be that of this model's modules and recipes; got one where "
                f"{_counted(missing)} are missing, {_counted(extra)} are extra, and "
                f"{_counted(different)} have other shapes, are no tensors, or hold a scale that is "
                "not positive. Convert the model with the recipe it was trained with, or name that "
                "of the autocast: ScalingState(model, recipe)."
            )
            if strict:
                raise ValueError(f"{problem} strict=False takes over what fits.")
            warnings.warn(problem, UserWarning, stacklevel=3)

    def _slots(self) -> Iterator[tuple[str, DelayedSlots]]:
        model_device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        for path, module, precision in named_precisions(self.model):
            device = next((p.device for p in module.parameters()), model_device)
            # An autocast's recipe wins over a module's own, unless overrides set the module's.
            for recipe in (precision.recipe, None if precision.pinned else self.recipe):
                precision.prepare(device, recipe, self.amax_reduction_group)
            for (recipe, _), slots in precision.slots.items():
                yield f"{path}/{recipe!r}", slots


def _counted(keys: Sequence[object]) -> str:
    if not keys:
        return "0"
    more = ", ..." if len(keys) > 2 else ""
    return f"{len(keys)} ({', '.join(map(str, keys[:2]))}{more})"
