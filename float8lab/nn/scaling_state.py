"""Delayed-scaling state as ordinary tensors, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from float8lab.arguments import check_module
from float8lab.nn.precision import precisions
from float8lab.recipes.delayed import DelayedSlots
from float8lab.recipes.recipe import Recipe, check_recipe
from float8lab.recipes.reduction import channel_of

__all__ = ["ScalingState"]

_NAMES = ("history", "amax", "scale", "steps")


class ScalingState:
    """The delayed-scaling state of a model: ``Stateful``, and apart from its ``state_dict``.

    A model's own ``state_dict`` has the plain model's keys and nothing else, so a checkpoint
    without this state loads strictly; the scales then start from the tensors' own amaxes. With it,
    training resumes bit for bit.

    ``state_dict`` is a collective where amaxes are reduced over ranks: gradients' amaxes wait for
    the next step's reduction, and the ranks exchange them here.

    Args:
        model: any module.
        recipe: under which an ``autocast`` runs modules that have no recipe of their own; needed to
            load their state before their first call.

    >>> layer = torch.nn.Linear(16, 16)
    >>> _ = float8lab.convert_to_float8(layer, float8lab.recipes.DelayedScaling())
    >>> sorted(key.split("/")[-1] for key in float8lab.nn.ScalingState(layer).state_dict())
    ['amax', 'history', 'scale', 'seeded', 'steps']
    """

    def __init__(self, model: nn.Module, recipe: Recipe | None = None) -> None:
        check_module("model", model)
        check_recipe("recipe", recipe)
        self.model = model
        self.recipe = recipe

    def state_dict(self) -> dict[str, Tensor]:
        """All slots' tensors, by module name and recipe."""
        found = list(self._slots())
        for group in dict.fromkeys(slots.pack.group for _, slots in found):
            channel = channel_of(group)
            if channel is not None:
                for _, slots in found:
                    if slots.pack.group is group and slots.pack.recipe.reduce_amax:
                        channel[1].add(slots)
                channel[1].reduce(channel[0], agree=True)
        state = {}
        for key, slots in found:
            tensors = slots.tensors()
            state.update({f"{key}/{name}": tensors[name].clone() for name in _NAMES})
            state[f"{key}/seeded"] = tensors["seeded"] | (tensors["steps"] > 0)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over the state of the modules and recipes that ``state`` knows."""
        for key, slots in self._slots():
            if f"{key}/scale" not in state:
                continue
            slots.load({name: state[f"{key}/{name}"] for name in (*_NAMES, "seeded")})

    def _slots(self) -> Iterator[tuple[str, DelayedSlots]]:
        home = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        for name, module in self.model.named_modules():
            device = next((p.device for p in module.parameters()), home)
            for part, precision in precisions(module):
                precision.prepare(device)
                if self.recipe is not None and precision.recipe is None:
                    precision.prepare(device, self.recipe)
                path = ".".join(filter(None, (name, part)))
                for (recipe, _), slots in precision.slots.items():
                    yield f"{path}/{recipe!r}", slots
