"""Float8Converter: FP8 as a converter of model configurations that torchtitan's job files name.

Needs ``pip install float8lab[torchtitan]``; ``import float8lab`` does not load this module.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from typing import Any

from float8lab.arguments import needs
from float8lab.distributed.tensor_parallel import TensorParallel
from float8lab.integrations.recipe_mapping import recipe_of
from float8lab.nn.convert import convert_to_float8
from float8lab.nn.linear import Linear
from float8lab.nn.report import conversion_report
from float8lab.ops.declare import compute_intensive_ops

with needs("float8lab.integrations.torchtitan", "torchtitan", '"float8lab[torchtitan]"'):
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.distributed.parallel_dims import MeshAxisName
    from torchtitan.tools.logging import logger

__all__ = ["Float8Converter", "Float8SelectiveAC"]


class Float8Converter(QuantizationConverter):
    """Convert the model that torchtitan builds by ``convert_to_float8``.

    Name its ``Config`` in a job file: ``model_registry("8B", converters=[Float8Converter.Config()])``.
    It has arguments of ``convert_to_float8``; a recipe may also be the name of one, or a mapping of
    plain values. The model is converted when it is built, before torchtitan parallelizes, compiles
    and initialises it. The names of its parameters stay. The conversion report is logged.

    Raises:
        TypeError: a recipe is none of those, when the model is built.
        ValueError: no recipe has that name; or ``strict``, and something cannot be done.

    >>> from torchtitan.models.llama3 import model_registry
    >>> converter = Float8Converter.Config(recipe="Float8RowwiseScaling", exclude=["lm_head", "0"])
    >>> spec = model_registry("debugmodel", converters=[converter])
    >>> with torch.device("meta"):
    ...     model = spec.model.build()
    >>> float8lab.conversion_report(model).summary
    '25 of 31 linear layers in FP8, 69.1 % of 6,163,712 parameters'
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: Any = None
        """None is ``Float8CurrentScaling()``."""
        exclude: list[str] = field(default_factory=lambda: ["lm_head"])
        """Routers stay in high precision without being named."""
        overrides: dict[str, Any] = field(default_factory=dict)
        strict: bool = False
        fp8_all_gather: bool = True

        def to_dict(self) -> dict[str, Any]:
            """Every field as text, since a recipe is no plain value."""
            return {part.name: str(getattr(self, part.name)) for part in fields(self)}

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Return the configuration of the model in FP8, of a class derived from the model's."""
        kind = _float8_model(type(model_config)._owner).Config
        parts = {part.name: getattr(model_config, part.name) for part in fields(model_config)}
        return kind(**parts, float8=self.config)


@functools.cache
def _float8_model(model: Any) -> Any:
    """The class of a torchtitan model that converts itself when it is built."""

    class Float8Model(model):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(model.Config):  # type: ignore[misc]
            float8: Float8Converter.Config

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            for module in self.modules():
                module._cache_pos_arg_names()  # shardings name arguments of the plain forward
            asked = config.float8
            convert_to_float8(
                self,
                _recipe(asked.recipe),
                exclude=asked.exclude,
                overrides={name: _recipe(recipe) for name, recipe in asked.overrides.items()},
                strict=asked.strict,
                fp8_all_gather=asked.fp8_all_gather,
            )
            logger.info("float8lab:\n%s", conversion_report(self))

        def parallelize(self, parallel_dims: Any) -> None:
            """Have layers whose weights become plain shards scale by the whole weights' amaxes."""
            super().parallelize(parallel_dims)
            mesh = parallel_dims.get_optional_mesh("tp")
            if mesh is None or parallel_dims.spmd_backend != "spmd_types":
                return
            for layer in self.modules():
                if isinstance(layer, Linear) and layer._sharding_config is not None:
                    layout = layer._sharding_config.state_shardings["weight"]
                    cut = getattr(layout.per_axis_spmd_types()[MeshAxisName.TP], "dim", None)
                    if cut is not None:
                        mode = "row" if cut else "column"
                        layer._fp8.spread(TensorParallel(mesh.get_group(), mode, partial=True))

    Float8Model.__name__ = Float8Model.__qualname__ = model.__name__
    return Float8Model


def _recipe(said: Any) -> Any:
    is_name = isinstance(said, str) and said != "auto"
    return None if said is None else recipe_of({"name": said} if is_name else said)


class Float8SelectiveAC(SelectiveAC):
    """Selective activation checkpointing that saves FP8 GEMMs, which ``SelectiveAC`` recomputes.

    A job file sets ``config.activation_checkpoint = Float8SelectiveAC.Config()``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        """The ops whose results are saved."""
        return {*super().get_save_ops(), *compute_intensive_ops()}
