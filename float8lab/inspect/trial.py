"""Run a model and restore it afterwards.

The reports of this package run a model in place, under recipes of their choice. Then they restore
everything that these runs have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from float8lab.distributed.fsdp.shards import reshard
from float8lab.nn.casts import SHARED_CAST
from float8lab.nn.convert import convert_to_float8, matches
from float8lab.nn.convert.call_region import CallRegion
from float8lab.nn.convert.first_call import remove_hooks
from float8lab.nn.convert.report import conversion_report
from float8lab.nn.layer import GemmModule
from float8lab.nn.precision import precisions, precisions_below
from float8lab.recipes.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from float8lab.recipes.region import DEFAULT_RECIPE, STATE, Autocast, in_backward
from float8lab.tensor import Float8Tensor
from float8lab.tensor.dtensor import is_dtensor, local_of

__all__ = [
    "LossFn", "Trial", "as_before", "call", "hooked", "on_trial", "own_loss",
    "refuse_dtensors", "start_anew", "tensors_in", "unambiguous", "without_reduction",
]  # fmt: skip

LossFn = Callable[[Any, Any], Tensor]
"""A function of model and batch that returns the loss."""


def without_reduction(recipe: Recipe | None) -> Recipe | None:
    """Return the recipe without communication between ranks, which a trial must not do."""
    return replace(recipe, reduce_amax=False) if isinstance(recipe, DelayedScaling) else recipe


def start_anew(module: nn.Module, recipe: Recipe | None) -> None:
    """Give a recipe to a module, but not to its children, and empty its delayed scales."""
    for _, precision in precisions(module):
        precision.recipe, precision.pinned = without_reduction(recipe), True
        precision.slots, precision.weight_cast = {}, None


def call(model: nn.Module, batch: object) -> object:
    """Call the model with ``*batch`` of a tuple or list, ``**batch`` of a mapping, else ``batch``.

    >>> call(torch.nn.Flatten(), torch.ones(2, 3, 4)).shape
    torch.Size([2, 12])
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def own_loss(output: object) -> object:
    """Return the ``loss`` that an output has as a key or an attribute; None if it has none."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def _default_loss(output: object) -> object:
    if (loss := own_loss(output)) is not None:
        return loss
    tensors = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
    return sum((t.float().square().mean() for t in tensors), torch.zeros(())) if tensors else None


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in an output or a batch of any nesting."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for element in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(element)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of the block."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


def refuse_dtensors(model: nn.Module, name: str) -> None:
    """Raise for a sharded model, whose gradients only ``backward`` itself reduces over ranks."""
    if any(is_dtensor(p) for p in model.parameters()):
        raise NotImplementedError(
            f"{name} must be given parameters that are whole; got DTensors. "
            "Call it before the model is sharded."
        )


# Each ``_keep_`` function saves some state, and returns functions that restore it.

_Restore = Callable[[], object]


def _keep_contents(owner: object) -> _Restore:
    """Keep an object's class, its attributes, and the content of its dicts, lists and sets."""
    cls, attributes = type(owner), dict(vars(owner))
    held = [(v, v.copy()) for v in attributes.values() if isinstance(v, (dict, list, set))]

    def restore() -> None:
        if type(owner) is not cls:
            owner.__class__ = cls
        vars(owner).clear()
        vars(owner).update(attributes)
        for container, copy in held:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(copy)

    return restore


def _keep_values(tensors: Iterable[Tensor]) -> _Restore:
    """Keep the values of tensors: of a DTensor's local shard, of a Float8Tensor's inner tensors."""
    local = [local_of(x) for x in tensors]
    buffers = ((x.qdata, x.scale, x.amax) if isinstance(x, Float8Tensor) else (x,) for x in local)
    copies = [(x, x.detach().clone()) for tensors_of_value in buffers for x in tensors_of_value]

    @torch.no_grad()
    def restore() -> None:
        # Copy all values: versions do not tell which changed, since batch_norm does not count its
        # writes. Writes by .data are not counted either, so a graph of the caller stays valid.
        for x, copy in copies:
            x.data.copy_(copy)

    return restore


def _keep_random(model: nn.Module) -> list[_Restore]:
    """Keep the states of the random generators that a model draws from."""
    tensors = (*model.parameters(), *model.buffers())
    devices = sorted({t.device.index for t in tensors if t.is_cuda})
    getters = [getattr(m, "get_rng_state_tracker", None) for m in model.modules()]
    trackers = {id(t): t for t in (getter() for getter in getters if callable(getter))}
    return [
        partial(torch.random.set_rng_state, torch.random.get_rng_state()),
        *(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(d), d) for d in devices),
        *(
            partial(t.set_states, t.get_states())
            for t in trackers.values()
            if hasattr(t, "set_states")
        ),
    ]


def _keep_scaling(model: nn.Module) -> list[_Restore]:
    """Keep delayed scales, and the packs that the end of the surrounding region will advance."""
    owned = [slots for p in precisions_below(model) for slots in p.slots.values()]
    scales = [partial(s.load, {name: x.clone() for name, x in s.tensors().items()}) for s in owned]
    region = STATE.region
    packs = [] if region is None else [partial(setattr, region, "packs", dict(region.packs))]
    return [*scales, *packs]


def _keep_training(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[_Restore]:
    """Keep gradients and, with an optimizer, also parameters and the optimizer's state."""
    parameters = list(model.parameters())
    mains = (getattr(p, "main_grad", None) for p in parameters)
    changed = [main for main in mains if main is not None]
    gradients = [partial(setattr, p, "grad", p.grad) for p in parameters]
    if optimizer is None:
        return [_keep_values(changed), *gradients]
    state = deepcopy(optimizer.state_dict())
    values = _keep_values([*changed, *parameters])
    return [values, *gradients, partial(optimizer.load_state_dict, state)]


class Trial:
    """A model whose runs leave no trace; ``on_trial`` makes a trial.

    Attributes:
        model: the model, which runs as it was given until ``convert`` is called.
        parameters: the parameters that require gradients, which ``step`` returns.
        layers: after ``convert``, the layers that can run in FP8, by name.
        skipped: after ``convert``, the reasons why the other candidates cannot, by name.
        others: in ``looking``, the arguments of the layer's call besides its input.
    """

    def __init__(
        self, model: nn.Module, batch: object, loss_fn: LossFn | None, start: Sequence[_Restore]
    ) -> None:
        self.model, self.batch, self.loss_fn = model, batch, loss_fn
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.layers: dict[str, GemmModule] = {}
        self.skipped: dict[str, str] = {}
        self.others: list[object] = []
        self._start = start

    def forward(self) -> object:
        """Run the model on the batch and return its output."""
        return call(self.model, self.batch)

    def loss(self) -> Tensor:
        """Return ``loss_fn(model, batch)``, or by default the output's ``loss`` or mean square.

        Raises:
            ValueError: the loss is not one number that requires a gradient.
        """
        model, batch = self.model, self.batch
        loss = self.loss_fn(model, batch) if self.loss_fn else _default_loss(self.forward())
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"loss_fn must return one number that requires a gradient; got {got}. "
                "Pass loss_fn(model, batch) that calls the model and returns the loss."
            )
        return loss if loss.ndim == 0 else loss.reshape(())

    def step(self) -> tuple[Tensor, list[Tensor | None]]:
        """Run forward and backward; return the loss and the gradients of ``parameters``."""
        loss = self.loss()
        if not self.parameters:
            return loss, []
        # Unlike backward, this neither writes grad nor calls hooks that accumulate gradients.
        return loss, [*torch.autograd.grad(loss, self.parameters, allow_unused=True)]

    @contextmanager
    def looking(self, look: Callable[[str, nn.Module, Tensor, Tensor], None]) -> Iterator[None]:
        """Call ``look`` with name, layer, input and output after each call of a layer in the block.

        Calls that only recompute an activation are ignored.
        """

        def hook(
            name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            if not in_backward():
                y = output[0] if isinstance(output, tuple) else output
                given = [*args, *kwargs.values()]
                self.others = given[1:]
                look(name, layer, given[0], y)

        with hooked(
            layer.register_forward_hook(partial(hook, name), with_kwargs=True)
            for name, layer in self.layers.items()
        ):
            yield

    def convert(
        self, filter_fn: Callable[[nn.Module, str], bool] | None, exclude: Sequence[str]
    ) -> None:
        """Prepare every layer that can run in FP8 to do so once ``use`` gives it a recipe."""
        convert = partial(convert_to_float8, filter_fn=filter_fn, exclude=exclude)
        convert(self.model, Float8CurrentScaling(), fp8_all_gather=False)
        report = conversion_report(self.model)
        modules: dict[str, Any] = dict(self.model.named_modules())
        self.layers = {layer.name: modules[layer.name] for layer in report.converted}
        self.skipped = {layer.name: layer.note for layer in report.skipped}
        before = STATE.autocast
        STATE.autocast = Autocast(recipe=before.recipe, group=before.group)
        self.use({})

    def use(self, recipes: Mapping[str, Recipe | None]) -> None:
        """Run these layers by these recipes, and all other layers in high precision."""
        chosen = {id(self.layers[name]): recipe for name, recipe in recipes.items()}
        for module in self.model.modules():
            start_anew(module, chosen.get(id(module)))

    def rewind(self) -> None:
        """Restore the buffers and random states that every run starts from."""
        for restore in self._start:
            restore()


@contextmanager
def on_trial(
    model: nn.Module, batch: object = None, loss_fn: LossFn | None = None
) -> Iterator[Trial]:
    """Yield a trial of a model, isolated from the state and the regions around it.

    At its end, the block restores the model. It writes neither parameters nor their gradients if it
    takes gradients by ``torch.autograd.grad``. In it, delayed scaling starts empty and stays local.
    """
    with _kept(model) as start, torch.inference_mode(False), torch.enable_grad():
        _isolate(model)
        yield Trial(model, batch, loss_fn, start)


def as_before(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> AbstractContextManager[object]:
    """Restore after the block all that training steps change, also parameters and optimizer."""
    return _kept(model, lambda: [*_keep_scaling(model), *_keep_training(model, optimizer)])


@contextmanager
def _kept(
    model: nn.Module, more: Callable[[], Sequence[_Restore]] = lambda: ()
) -> Iterator[Sequence[_Restore]]:
    """Restore at the end, also after an exception, all that a run changes.

    That is classes, attributes, hooks, training modes, buffers, random states and ``more``. Yield
    the functions that restore buffers and random states, with which each run starts.
    """
    reshard(model.modules())  # the shards are the state to keep
    state = [partial(setattr, owner, name, getattr(owner, name)) for owner, name in _ISOLATED]
    start = [_keep_values(model.buffers()), *_keep_random(model)]
    owners = [*model.modules(), *precisions_below(model)]
    restorers: list[_Restore] = [*map(_keep_contents, owners), *more(), *start, *state]
    try:
        yield start
    finally:
        reshard(model.modules())
        for restore in restorers:
            restore()


_ISOLATED = ((STATE, "autocast"), (STATE, "region"), (STATE, "in_graph"), (SHARED_CAST, "last"))
"""The state outside the model that a trial changes: objects and the names of their fields."""


def _isolate(model: nn.Module) -> None:
    """Isolate a model from regions, its delayed-scaling state and fused gradient accumulation."""
    in_autocast = STATE.autocast.enabled and STATE.autocast.recipe is None
    for module in model.modules():
        remove_hooks(module, CallRegion)
        if getattr(module, "fuse_wgrad_accumulation", False):
            module.fuse_wgrad_accumulation = False  # type: ignore[assignment]  # a plain attribute
        for _, precision in precisions(module):
            if in_autocast and not precision.pinned and precision.recipe is None:
                precision.recipe = DEFAULT_RECIPE
            precision.recipe = without_reduction(precision.recipe)
            precision.slots, precision.weight_cast = {}, None
    recipe = without_reduction(STATE.autocast.recipe)
    outer = STATE.autocast
    STATE.autocast = Autocast(outer.enabled, recipe, group=outer.group, backward=outer.backward)
    STATE.region = STATE.in_graph = None
    SHARED_CAST.last = None


def unambiguous(
    changed: Mapping[str, Recipe | None], recipes: Mapping[str, Recipe | None]
) -> dict[str, Recipe | None]:
    """Return ``overrides`` that change exactly these layers, though names are patterns, too.

    Args:
        changed: the overrides to express, by layer.
        recipes: the recipe that each layer of the model shall have, changed or not.

    >>> unambiguous({"0": None}, {"0": None, "1.0": float8lab.recipes.Float8CurrentScaling()})
    {'0': None, '1.0': Float8CurrentScaling()}
    """
    overrides = dict(changed)
    while True:
        overrides = dict(sorted(overrides.items(), key=lambda item: item[0].count(".")))
        for name, recipe in recipes.items():
            patterns = [pattern for pattern in overrides if matches(name, pattern)]
            if patterns and patterns[-1] != name:
                overrides[name] = recipe
                break
        else:
            return overrides
