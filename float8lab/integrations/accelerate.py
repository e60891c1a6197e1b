"""Run Hugging Face Accelerate's ``mixed_precision="fp8"`` with this library.

This module needs the extra ``transformers``; ``import float8lab`` does not load it.
``python -m float8lab.integrations.accelerate`` runs Accelerate's command after ``enable()``.

Note: Accelerate's FP8 backends are written into ``Accelerator``. So ``enable`` replaces seven
attributes of Accelerate in this process, and ``disable`` restores the original of each. If an
``Accelerator`` has this library as its backend, its *handler* says how it converts models.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from float8lab import recipes
from float8lab.arguments import needs
from float8lab.integrations import recipe_mapping
from float8lab.nn.convert.report import was_converted
from float8lab.nn.scaling_state import ScalingState

with needs("float8lab.integrations.accelerate", "accelerate", "transformers"):
    import accelerate.state
    import accelerate.utils.dataclasses
    import accelerate.utils.launch
    from accelerate import Accelerator

__all__ = ["Float8RecipeKwargs", "disable", "enable"]

_BACKEND = "FLOAT8LAB"
"""The value of ``Accelerator.fp8_backend`` if this library is the backend."""
_RESTORE = "_restore_from_float8lab"
"""The attribute of ``Accelerator`` whose ``close()`` restores what ``enable`` replaced."""


@dataclass(eq=False)
class Float8RecipeKwargs(recipe_mapping.ConversionArguments, accelerate.utils.KwargsHandler):
    """Say how one ``Accelerator`` converts: pass it in ``kwargs_handlers`` after ``enable``.

    The arguments are those of ``enable``; this handler replaces all of them.

    >>> from float8lab.integrations.accelerate import Float8RecipeKwargs
    >>> handler = Float8RecipeKwargs(recipe="auto", exclude=["lm_head"])
    """


def enable(
    recipe: recipe_mapping.RecipeChoice = None,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    exclude: Sequence[str] = (),
    overrides: Mapping[str, recipe_mapping.RecipeChoice] | None = None,
    strict: bool = False,
    fp8_all_gather: bool = True,
) -> None:
    """Make ``Accelerator(mixed_precision="fp8")`` of this process convert models in ``prepare``.

    Call it before you create the ``Accelerator``; a second call replaces the first one's arguments.
    Models are converted before they are sharded or compiled. A model that has recipes already, or
    is prepared for ``evaluation_mode``, stays unchanged. ``save_state`` saves delayed scales.

    The arguments are those of ``Float8Callback``, except ``freeze_weights``. Where ``recipe`` is
    None and a configuration file or a ``TERecipeKwargs`` asks for a backend, the recipe is
    ``DelayedScaling`` or ``MXFP8BlockScaling`` for TE and ``Float8CurrentScaling`` for AO. An
    ``Accelerator`` with another backend's handler, such as ``AORecipeKwargs``, uses that handler.

    Raises:
        TypeError: an argument has another type; nothing is replaced.
        ValueError: no recipe has that name.

    >>> from float8lab.integrations.accelerate import disable, enable
    >>> enable(exclude=["lm_head"])
    >>> disable()
    """
    default = Float8RecipeKwargs(
        recipe, filter_fn=filter_fn, exclude=exclude, overrides=overrides, strict=strict,
        fp8_all_gather=fp8_all_gather,
    )  # fmt: skip
    disable()
    backend_of = Accelerator.fp8_backend.fget

    @functools.wraps(backend_of)
    def fp8_backend(self: Accelerator) -> str:
        is_ours = "float8_recipe_handler" in vars(self) and self.fp8_enabled
        return _BACKEND if is_ours else backend_of(self)

    replacements = [
        (accelerate.state, "is_fp8_available", lambda: True),
        (accelerate.utils.launch, "is_fp8_available", lambda: True),
        # TERecipeKwargs calls it before it reads TE's entries of a configuration file.
        (accelerate.utils.dataclasses, "is_transformer_engine_available", lambda: True),
        (Accelerator, "__init__", _init_with_handler(default)),
        (Accelerator, "fp8_backend", property(fp8_backend)),
        (Accelerator, "prepare", _convert_first(Accelerator.prepare)),
        (Accelerator, "prepare_model", _convert_first(Accelerator.prepare_model)),
    ]
    restore = contextlib.ExitStack()
    for owner, name, value in replacements:
        restore.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, value)
    setattr(Accelerator, _RESTORE, restore)


def disable() -> None:
    """Restore everything in Accelerate that ``enable`` replaced; do nothing without ``enable``.

    An ``Accelerator`` that was created before this call converts no further model.
    """
    if _RESTORE in vars(Accelerator):
        vars(Accelerator)[_RESTORE].close()
        delattr(Accelerator, _RESTORE)


def _init_with_handler(default: Float8RecipeKwargs) -> Callable[..., None]:
    """Return an ``Accelerator.__init__`` that takes ``Float8RecipeKwargs`` in kwargs_handlers."""
    init, backend_of = Accelerator.__init__, Accelerator.fp8_backend.fget
    libraries = (accelerate.utils.AORecipeKwargs, accelerate.utils.MSAMPRecipeKwargs)

    @functools.wraps(init)
    def init_with_handler(self: Accelerator, *args: object, **kwargs: object) -> None:
        call = inspect.signature(init).bind(self, *args, **kwargs)
        handlers = call.arguments.get("kwargs_handlers") or []
        ours = [handler for handler in handlers if isinstance(handler, Float8RecipeKwargs)]
        if len(ours) > 1:
            raise ValueError(
                f"kwargs_handlers must hold one Float8RecipeKwargs; got {len(ours)}. Use overrides "
                "for single layers."
            )
        if ours or not any(isinstance(handler, libraries) for handler in handlers):
            self.float8_recipe_handler = (*ours, default)[0]
        call.arguments["kwargs_handlers"] = [h for h in handlers if h not in ours]
        init(*call.args, **call.kwargs)
        if ours and not self.fp8_enabled:
            raise ValueError(
                'mixed_precision must be "fp8" for a Float8RecipeKwargs in kwargs_handlers; got '
                f'"{self.mixed_precision}". Pass Accelerator(mixed_precision="fp8").'
            )
        if self.fp8_backend == _BACKEND and self.float8_recipe_handler.recipe is None:
            self.float8_recipe_handler = _configured(self, backend_of(self).value)

    return init_with_handler


def _configured(accelerator: Accelerator, backend: str) -> Float8RecipeKwargs:
    """Return the handler of an ``Accelerator`` with the recipe that its ``backend`` implies."""
    handler: Float8RecipeKwargs = accelerator.float8_recipe_handler
    if backend == "TE":
        te = vars(accelerator.te_recipe_handler or accelerate.utils.TERecipeKwargs())
        if te.get("use_mxfp8_block_scaling"):  # since Accelerate 1.11
            return replace(handler, recipe=recipes.MXFP8BlockScaling())
        shared = recipes.DelayedScaling.__dataclass_fields__.keys() & te.keys()
        recipe = recipe_mapping.recipe_of({name: te[name] for name in shared})
        return replace(handler, recipe=recipe)
    if backend == "AO":
        flag = "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"  # as AORecipeKwargs reads it
        gathers = handler.fp8_all_gather and accelerate.utils.parse_flag_from_env(flag, True)
        return replace(handler, recipe=recipes.Float8CurrentScaling(), fp8_all_gather=gathers)
    if backend == "MSAMP":
        raise NotImplementedError(
            "backend of fp8_config must be TE or AO; got MSAMP, whose levels are no recipes here. "
            "Leave it out, or pass enable(recipe=...)."
        )
    return handler


def _convert_first(prepare: Callable[..., object]) -> Callable[..., object]:
    """Wrap ``prepare`` or ``prepare_model`` to convert the models among its arguments first."""

    @functools.wraps(prepare)
    def convert_and_prepare(self: Accelerator, *args: object, **kwargs: object) -> object:
        call = inspect.signature(prepare).bind(self, *args, **kwargs)
        if self.fp8_backend == _BACKEND and not call.arguments.get("evaluation_mode"):
            for value in (*args, *kwargs.values()):
                _convert(self, value)
        return prepare(self, *args, **kwargs)

    return convert_and_prepare


def _convert(accelerator: Accelerator, model: object) -> None:
    """Convert an argument of ``prepare`` if it is a model without recipes."""
    if not isinstance(model, nn.Module) or was_converted(model):
        return
    if recipe_mapping.recipes_below(model):
        return
    if accelerator.distributed_type == accelerate.DistributedType.MEGATRON_LM:
        raise NotImplementedError(
            'distributed_type must not be MEGATRON_LM for mixed_precision="fp8" after enable(); '
            "Megatron-LM builds the model. Call disable() and set its own FP8 arguments."
        )
    accelerator.float8_recipe_handler.convert(model)
    if any(recipe.linear.delayed for recipe in recipe_mapping.recipes_below(model)):
        accelerator.register_for_checkpointing(ScalingState(model))


if __name__ == "__main__":
    enable()
    importlib.import_module("accelerate.commands.accelerate_cli").main()
