"""Hugging Face Accelerate: ``mixed_precision="fp8"`` by this library.

Needs ``pip install float8lab[transformers]``; ``import float8lab`` does not load this module.
``python -m float8lab.integrations.accelerate launch ...`` is ``accelerate launch ...`` that starts
``--mixed_precision fp8`` without Transformer Engine, torchao and MS-AMP, which that asks for.

Note: Accelerate has no table of FP8 backends; it is written into ``Accelerator``. So ``enable``
gives seven names of Accelerate's another value in this process, ``_entries``, and ``disable`` gives
each the very object back that it had. The *handler* of an ``Accelerator`` is the object in
``kwargs_handlers`` that says how it converts, or else the arguments of ``enable``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

from torch import nn

from float8lab.arguments import check_callables, check_flags, needs
from float8lab.nn.convert.conversion import checked_options, convert_to_float8
from float8lab.nn.convert.report import was_converted
from float8lab.nn.precision import precisions_below
from float8lab.nn.scaling_state import ScalingState
from float8lab.recipes import (
    Auto,
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    Recipe,
)

with needs("float8lab.integrations.accelerate", "Accelerate", '"float8lab[transformers]"'):
    import accelerate.state
    import accelerate.utils.dataclasses
    import accelerate.utils.launch
    from accelerate import Accelerator, DistributedType
    from accelerate.utils import (
        AORecipeKwargs,
        KwargsHandler,
        MSAMPRecipeKwargs,
        TERecipeKwargs,
        parse_flag_from_env,
    )

__all__ = ["Float8RecipeKwargs", "disable", "enable"]

_RecipeChoice = Recipe | Auto | Literal["auto"] | None
_BACKEND = "FLOAT8LAB"
"""``Accelerator.fp8_backend``, beside Accelerate's own ``"TE"``, ``"AO"``, ``"MSAMP"``."""
_REPLACED = "_replaced_by_float8lab"
"""The attribute of ``Accelerator`` that holds the replaced objects while ``enable`` is in force."""


@dataclass(kw_only=True)
class Float8RecipeKwargs(KwargsHandler):
    """How one ``Accelerator`` converts: ``kwargs_handlers=[Float8RecipeKwargs(recipe=...)]``.

    It wins over the arguments of ``enable``, which must be in force. The fields are the arguments
    of ``convert_to_float8``, but for ``freeze_weights``: ``prepare`` gets optimizers of the
    parameters that there are.

    Raises:
        TypeError: a field has another type.

    >>> from float8lab.integrations.accelerate import Float8RecipeKwargs
    >>> handler = Float8RecipeKwargs(recipe="auto", exclude=["lm_head"])
    """

    recipe: _RecipeChoice = None
    filter_fn: Callable[[nn.Module, str], bool] | None = None
    exclude: Sequence[str] = ()
    overrides: Mapping[str, _RecipeChoice] | None = None
    strict: bool = False
    fp8_all_gather: bool = True

    def __post_init__(self) -> None:
        check_callables(("module", "name"), filter_fn=self.filter_fn)
        check_flags(strict=self.strict, fp8_all_gather=self.fp8_all_gather)
        checked_options(self.recipe, self.filter_fn, self.exclude, self.overrides)

    def convert(self, model: nn.Module) -> None:
        """Convert a model in place."""
        convert_to_float8(model, **{f.name: getattr(self, f.name) for f in fields(self)})


class _Entry(NamedTuple):
    """A name of Accelerate's and the value that ``enable`` gives it."""

    owner: object
    name: str
    value: object


def enable(
    recipe: _RecipeChoice = None,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    exclude: Sequence[str] = (),
    overrides: Mapping[str, _RecipeChoice] | None = None,
    strict: bool = False,
    fp8_all_gather: bool = True,
) -> None:
    """Have ``Accelerator(mixed_precision="fp8")`` of this process convert models in ``prepare``.

    Call it before the ``Accelerator`` is made; a second call replaces the arguments of the first.
    ``prepare`` and ``prepare_model`` convert a model before it is sharded or compiled; one that
    has FP8 layers already, and one for ``evaluation_mode``, is left as it is. All that is not in
    FP8 runs under bfloat16 autocast, as with Accelerate's own backends. The state of delayed
    scaling is in ``save_state`` and ``load_state``.

    The arguments are those of ``convert_to_float8``. Where ``recipe`` is None and a configuration
    file or a ``TERecipeKwargs`` asks for a backend, the recipe is that backend's: for TE
    ``DelayedScaling``, or ``MXFP8BlockScaling``, with the fields that it sets; for AO
    ``Float8CurrentScaling``, and FSDP2 gathers weights in FP8 unless it says not to. An
    ``Accelerator`` with ``AORecipeKwargs`` or ``MSAMPRecipeKwargs`` is left to those libraries.

    Raises:
        TypeError: an argument has another type; nothing is replaced.

    When an ``Accelerator`` is made:
        NotImplementedError: the distributed type is Megatron-LM, or the backend MS-AMP.
        ValueError: a ``Float8RecipeKwargs`` without ``mixed_precision="fp8"``, or two of them.

    >>> from float8lab.integrations.accelerate import disable, enable
    >>> enable(exclude=["lm_head"])
    >>> disable()
    """
    default = Float8RecipeKwargs(
        recipe=recipe,
        filter_fn=filter_fn,
        exclude=exclude,
        overrides=overrides,
        strict=strict,
        fp8_all_gather=fp8_all_gather,
    )
    disable()
    entries = _entries(default)
    before = tuple(entry._replace(value=vars(entry.owner)[entry.name]) for entry in entries)
    setattr(Accelerator, _REPLACED, before)
    _enter(entries)


def disable() -> None:
    """Give Accelerate back all that ``enable`` replaced; without ``enable`` nothing happens.

    An ``Accelerator`` that was made in between prepares no further model in FP8.
    """
    if _REPLACED in vars(Accelerator):
        _enter(vars(Accelerator)[_REPLACED])
        delattr(Accelerator, _REPLACED)


def _enter(entries: Iterable[_Entry]) -> None:
    for entry in entries:
        setattr(entry.owner, entry.name, entry.value)


def _entries(default: Float8RecipeKwargs) -> list[_Entry]:
    """The seven names and their values, which call the functions that they replace."""
    prepare, prepare_model = Accelerator.prepare, Accelerator.prepare_model

    @functools.wraps(prepare)
    def convert_and_prepare(self: Accelerator, *args: object, **options: object) -> object:
        for model in args:
            _convert(self, model)
        return prepare(self, *args, **options)

    @functools.wraps(prepare_model)
    def convert_and_prepare_model(
        self: Accelerator,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> object:
        if not evaluation_mode:
            _convert(self, model)
        return prepare_model(self, model, device_placement, evaluation_mode)

    return [
        _Entry(accelerate.state, "is_fp8_available", _is_available),
        _Entry(accelerate.utils.launch, "is_fp8_available", _is_available),
        # A TERecipeKwargs reads what a configuration file says of Transformer Engine.
        _Entry(accelerate.utils.dataclasses, "is_transformer_engine_available", _is_available),
        _Entry(Accelerator, "__init__", _init_with_handler(default)),
        _Entry(Accelerator, "fp8_backend", _backend_with_ours()),
        _Entry(Accelerator, "prepare", convert_and_prepare),
        _Entry(Accelerator, "prepare_model", convert_and_prepare_model),
    ]


def _is_available() -> bool:
    return True


def _init_with_handler(default: Float8RecipeKwargs) -> Callable[..., None]:
    """``Accelerator.__init__`` that takes a ``Float8RecipeKwargs`` in ``kwargs_handlers``."""
    init, backend = Accelerator.__init__, Accelerator.fp8_backend
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_with_handler(self: Accelerator, *args: object, **kwargs: object) -> None:
        call = signature.bind(self, *args, **kwargs)
        handlers = call.arguments.get("kwargs_handlers") or []
        ours = [handler for handler in handlers if isinstance(handler, Float8RecipeKwargs)]
        theirs = [handler for handler in handlers if not isinstance(handler, Float8RecipeKwargs)]
        if len(ours) > 1:
            raise ValueError(
                f"kwargs_handlers must hold one Float8RecipeKwargs; got {len(ours)}. Use overrides "
                "for single layers."
            )
        if ours or not any(isinstance(h, (AORecipeKwargs, MSAMPRecipeKwargs)) for h in theirs):
            self.float8_recipe_handler = (*ours, default)[0]
        call.arguments["kwargs_handlers"] = theirs
        init(*call.args, **call.kwargs)
        if ours and not self.fp8_enabled:
            raise ValueError(
                'mixed_precision must be "fp8" for a Float8RecipeKwargs in kwargs_handlers; got '
                f'"{self.mixed_precision}". Pass Accelerator(mixed_precision="fp8").'
            )
        if self.fp8_backend == _BACKEND:
            self.float8_recipe_handler = _configured(self, backend)

    return init_with_handler


def _backend_with_ours() -> property:
    """``Accelerator.fp8_backend`` that is ours where an ``Accelerator`` has a handler of ours."""
    backend = Accelerator.fp8_backend

    def fp8_backend(self: Accelerator) -> str:
        is_ours = "float8_recipe_handler" in vars(self) and self.fp8_enabled
        return _BACKEND if is_ours else backend.fget(self)

    return property(fp8_backend, doc=backend.__doc__)


def _configured(accelerator: Accelerator, backend: property) -> Float8RecipeKwargs:
    """The handler of an ``Accelerator``, with the recipe that its configuration asks for.

    Args:
        accelerator: made, and with a handler.
        backend: ``Accelerator.fp8_backend`` without ``enable``.
    """
    handler: Float8RecipeKwargs = accelerator.float8_recipe_handler
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        raise NotImplementedError(
            'distributed_type must not be MEGATRON_LM with mixed_precision="fp8" here; Megatron-LM '
            "builds the model itself. Set its own fp8 arguments, or use FSDP2."
        )
    name = "NO" if handler.recipe is not None else backend.fget(accelerator).value
    if name == "TE":
        te = accelerator.te_recipe_handler or TERecipeKwargs()
        return replace(handler, recipe=_recipe_of_te(te))
    if name == "AO":
        gathers = parse_flag_from_env("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", default=True)
        gathers = handler.fp8_all_gather and gathers
        return replace(handler, recipe=Float8CurrentScaling(), fp8_all_gather=gathers)
    if name == "MSAMP":
        raise NotImplementedError(
            "backend of fp8_config must be TE or AO; got MSAMP, whose levels are no recipes here. "
            "Leave it out, or pass enable(recipe=...)."
        )
    return handler


def _recipe_of_te(te: TERecipeKwargs) -> Recipe:
    if getattr(te, "use_mxfp8_block_scaling", False):  # since Accelerate 1.11
        return MXFP8BlockScaling()
    return DelayedScaling(
        margin=te.margin,
        interval=te.interval,
        fp8_format=Format[te.fp8_format],
        amax_history_len=te.amax_history_len,
        amax_compute_algo=te.amax_compute_algo,
        override_linear_precision=tuple(te.override_linear_precision),
    )


def _convert(accelerator: Accelerator, model: object) -> None:
    """Convert what ``prepare`` got, if it is a model and new."""
    if accelerator.fp8_backend != _BACKEND or not isinstance(model, nn.Module):
        return
    if was_converted(model) or any(p.recipe is not None for p in precisions_below(model)):
        return
    accelerator.float8_recipe_handler.convert(model)
    recipes = [precision.recipe for precision in precisions_below(model)]
    if any(recipe is not None and recipe.linear.delayed for recipe in recipes):
        accelerator.register_for_checkpointing(ScalingState(model))


if __name__ == "__main__":
    enable()
    importlib.import_module("accelerate.commands.accelerate_cli").main()
