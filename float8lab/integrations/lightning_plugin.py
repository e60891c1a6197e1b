"""The plugin and the callback for both of Lightning's packages, without their base classes.

``lightning`` and ``pytorch_lightning`` (with ``lightning_fabric``) contain the same code, and each
accepts only plugins of its own classes. ``import float8lab`` does not load this module.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from float8lab import recipes
from float8lab.arguments import check_dtype, check_flags, needs
from float8lab.formats import HIGH_PRECISION_DTYPES
from float8lab.integrations.recipe_mapping import recipe_of
from float8lab.integrations.stats import StatsCallback
from float8lab.nn.convert import convert_to_float8
from float8lab.nn.convert.report import conversion_report, was_converted
from float8lab.nn.norm import convert_norms
from float8lab.nn.precision import precisions_below
from float8lab.nn.scaling_state import ScalingState

with needs("float8lab.integrations.lightning", "lightning", "lightning"):
    from lightning_utilities import apply_to_collection
    from lightning_utilities.core.rank_zero import rank_zero_info

__all__ = ["LightningPlugin", "LightningStats"]


def _base_method(name: str) -> property:
    """Return a property that is a method of the base class for the Trainer or for Fabric."""
    # The Trainer's methods call hooks of the Trainer, which Fabric lacks. Fabric checks whether the
    # methods are its own: where they are not, it demands ``fabric.backward(loss)`` in place of
    # ``loss.backward()``.
    return property(lambda plugin: getattr(plugin._base, name).__get__(plugin))


class LightningPlugin:
    """Precision plugin for training in FP8: ``Trainer(plugins=...)`` or ``Fabric(plugins=...)``.

    Users import it as ``Float8Precision``: from ``float8lab.integrations.lightning`` for the
    package ``lightning``, and from ``float8lab.integrations.pytorch_lightning`` for
    ``pytorch_lightning`` and ``lightning_fabric``.

    The parameters mean what they mean in Lightning's ``TransformerEnginePrecision``, with these
    differences: layers of any size run in FP8; the plugin works on a CPU, too; it takes every
    recipe; it changes layers in place when Lightning sets the model up, so checkpoints, optimizers
    and ``isinstance(layer, torch.nn.Linear)`` stay valid; ``module_init_context`` sets only the
    dtype, since a class swapped there would initialise its weights differently; the state of
    delayed scaling is in checkpoints. Neither plugin scales gradients under ``torch.float16``.

    A ``Trainer`` saves and restores the state of delayed scaling by itself. For Fabric the plugin
    is ``Stateful``: ``fabric.save(path, {"model": model, "optimizer": optimizer, "fp8": plugin})``.

    Args:
        weights_dtype: of parameters, buffers and inputs: float32, bfloat16 or float16.
        recipe: one of ``float8lab.recipes``; ``"auto"``, with which ``convert_to_float8`` chooses
            for each layer; a recipe's name; or a mapping with fields of ``DelayedScaling`` or of
            the recipe that its ``"name"`` names, ``"fp8_format"`` by name. None is
            ``DelayedScaling()``, but layers that you converted keep their own recipes.
        replace_layers: convert ``torch.nn.Linear`` and norm layers; False converts none. None and
            True leave a model unchanged that has FP8 layers already; True logs that.
        fallback_compute_dtype: bfloat16 or float16, used in ``torch.autocast`` for everything not
            in FP8 and for outputs of FP8 layers; None is ``weights_dtype``. If the dtype is
            float32, there is no such autocast.

    The replaced layers, and the reasons why others were not replaced, are logged on rank zero.

    Attributes:
        recipe: the given recipe, or the one made from the name or mapping.

    Raises:
        TypeError: ``weights_dtype`` or ``recipe`` is none of the above.
        ValueError: the name, mapping or ``fallback_compute_dtype`` is none of the above.

    >>> from float8lab.integrations.lightning import Float8Precision
    >>> Float8Precision(weights_dtype=torch.bfloat16, recipe={"margin": 1}).recipe
    DelayedScaling(margin=1)
    """

    fabric_base: ClassVar[type]
    """The ``Precision`` class of the package's Fabric."""
    trainer_base: ClassVar[Any]
    """The ``Precision`` class of the package's Trainer, which derives from Fabric's class."""

    precision: Any = "float8"

    def __init__(
        self,
        *,
        weights_dtype: torch.dtype,
        recipe: Mapping[str, object] | recipes.Recipe | recipes.Auto | str | None = None,
        replace_layers: bool | None = None,
        fallback_compute_dtype: torch.dtype | None = None,
    ) -> None:
        check_dtype("weights_dtype", weights_dtype, HIGH_PRECISION_DTYPES, optional=False)
        check_dtype("fallback_compute_dtype", fallback_compute_dtype, HIGH_PRECISION_DTYPES)
        if replace_layers is not None:
            check_flags(replace_layers=replace_layers)
        fallback = fallback_compute_dtype or weights_dtype
        self._autocasts = fallback in (torch.bfloat16, torch.float16)
        if not self._autocasts and fallback != weights_dtype:
            raise ValueError(
                "fallback_compute_dtype must be torch.bfloat16, torch.float16 or weights_dtype "
                f"({weights_dtype}); got {fallback}. torch.autocast has no other."
            )
        self.weights_dtype = weights_dtype
        self.fallback_compute_dtype = fallback
        self.recipe = recipe_of(recipe)
        # The recipe of an enclosing autocast would take precedence over the layers' own recipes.
        self._recipe_of_all = None if recipe is None else self._single_recipe()
        self.replace_layers = replace_layers
        self._modules: list[weakref.ref[nn.Module]] = []  # in the order of their setup
        self._is_new = False  # whether some of the modules were not trained yet
        self._base = self.fabric_base  # see _base_method

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_modules": []}  # a spawned process sets up its own modules

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert a module's layers to FP8 and its parameters to ``weights_dtype``, in place."""
        is_known = any(module is live for live in self._alive())
        has_fp8 = was_converted(module) or any(precisions_below(module))
        if not is_known:
            self._modules = [weakref.ref(live) for live in [*self._alive(), module]]
            self._is_new = True
        if self.replace_layers is not False and not has_fp8:
            self._replace_layers(module)
            self._is_new = True
        elif self.replace_layers and not is_known:
            rank_zero_info(
                "Float8Precision(replace_layers=True): the model has FP8 layers already and is "
                "left as it is"
            )
        return module.to(dtype=self.weights_dtype)

    def _replace_layers(self, module: nn.Module) -> None:
        convert_to_float8(module, self.recipe)
        norms = convert_norms(module)
        left = {name: why for name, why in norms.items() if why is not None}
        lines = [
            f"Float8Precision:\n{conversion_report(module)}",
            f"{len(norms) - len(left)} of {len(norms)} norm layers replaced",
            *(f"norm layer {name!r} left alone: {why}" for name, why in left.items()),
        ]
        rank_zero_info("\n".join(lines))

    @contextmanager
    def tensor_init_context(self) -> Iterator[None]:
        """Make ``weights_dtype`` the default dtype."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.weights_dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    module_init_context = tensor_init_context

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Open one FP8 region; everything else runs under ``fallback_compute_dtype`` in it."""
        if self._is_new and torch.is_grad_enabled():
            self._is_new = False
            self.state_dict()  # tells ranks of each other's modules one region earlier
        fallback: AbstractContextManager[object] = nullcontext()
        if self._autocasts:
            parameter = next((p for m in self._alive() for p in m.parameters()), torch.empty(0))
            fallback = torch.autocast(parameter.device.type, self.fallback_compute_dtype)
        with self.tensor_init_context(), fallback, recipes.autocast(recipe=self._recipe_of_all):
            yield

    def convert_input(self, data: object) -> object:
        """Return ``data`` with floating-point tensors, however nested, in ``weights_dtype``."""
        return _converted(data, self.weights_dtype)

    def convert_output(self, data: object) -> object:
        """Return ``data`` with floating-point tensors in the default dtype (Fabric only)."""
        return _converted(data, torch.get_default_dtype())

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of delayed scaling of each model that has any; a collective."""
        states = [self._scaling_state(module).state_dict() for module in self._alive()]
        return {str(index): state for index, state in enumerate(states) if state}

    def load_state_dict(self, state_dict: dict[str, dict[str, Tensor]]) -> None:
        """Load the state of the models that were set up so far, in the order of their setup."""
        for index, module in enumerate(self._alive()):
            self._scaling_state(module).load_state_dict(state_dict.get(str(index), {}))

    def _scaling_state(self, module: nn.Module) -> ScalingState:
        return ScalingState(module, self._single_recipe())

    def _single_recipe(self) -> recipes.Recipe | None:
        """Return the recipe of all layers; None if each layer gets a chosen recipe."""
        return self.recipe if isinstance(self.recipe, recipes.Recipe) else None

    def _alive(self) -> list[nn.Module]:
        modules = (reference() for reference in self._modules)
        return [module for module in modules if module is not None]

    def connect(self, model: nn.Module, optimizers: object, lr_schedulers: object) -> object:
        """Connect the plugin to a Trainer; Fabric does not call this."""
        self._base = self.trainer_base
        self._modules = self._modules[-1:]  # a Trainer trains one; checkpoints have only that one
        return self.trainer_base.connect(self, model, optimizers, lr_schedulers)

    def teardown(self) -> None:
        """End the Trainer's use of the plugin, after which Fabric may use it."""
        self._base = self.fabric_base

    pre_backward = _base_method("pre_backward")
    backward = _base_method("backward")
    post_backward = _base_method("post_backward")
    optimizer_step = _base_method("optimizer_step")


def _converted(data: object, dtype: torch.dtype) -> object:
    return apply_to_collection(data, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)


class LightningStats(StatsCallback):
    """``StatsCallback`` with the hooks of Lightning's Trainer: ``Trainer(callbacks=...)``."""

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Begin to watch the FP8 layers."""

        def send(metrics: dict[str, float], step: int) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step)

        self.begin(pl_module, trainer.global_step, [send] if trainer.is_global_zero else None)

    on_exception = StatsCallback.on_train_end
