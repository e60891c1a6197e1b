"""Run torchtitan's jobs in FP8. This module needs the extra ``torchtitan``."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from typing import Any

from float8lab.arguments import needs
from float8lab.distributed.comm import TensorParallel
from float8lab.distributed.shard_map import ShardMap
from float8lab.integrations.recipe_mapping import ConversionArguments, RecipeChoice
from float8lab.nn import Linear, conversion_report
from float8lab.ops import compute_intensive_ops

with needs("float8lab.integrations.torchtitan", "torchtitan", "torchtitan"):
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.tools.logging import logger

__all__ = ["Float8Converter", "Float8SelectiveAC"]


class Float8Converter(QuantizationConverter):
    """Convert torchtitan's model by ``convert_to_float8`` when the model is built.

    ``Float8Converter.Config`` has the arguments of ``convert_to_float8``, except ``filter_fn``, and
    goes in ``converters`` of ``model_registry``. A recipe may also be a name or a mapping of plain
    values. The conversion report is logged. Errors are raised when the model is built.

    Raises:
        TypeError: a recipe has another type.
        ValueError: no recipe has that name; or ``strict`` is True and something cannot be done."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: RecipeChoice = None
        exclude: list[str] = field(default_factory=lambda: ["lm_head"])
        overrides: dict[str, RecipeChoice] = field(default_factory=dict)
        strict: bool = False
        fp8_all_gather: bool = True

        def to_dict(self) -> dict[str, object]:
            """Return every field as text, since a recipe is not a plain value."""
            return {f.name: str(getattr(self, f.name)) for f in fields(self)}

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Return the model's configuration in the ``Config`` of a model class that is converted."""
        values = {f.name: getattr(model_config, f.name) for f in fields(model_config)}
        return _float8_model(type(model_config)._owner).Config(**values, float8=self.config)


@functools.cache
def _float8_model(model: Any) -> Any:
    """Return a subclass of a torchtitan model class whose instances convert themselves."""

    class Float8Model(model):
        @dataclass(kw_only=True, slots=True)
        class Config(model.Config):
            float8: Float8Converter.Config

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.apply(lambda m: m._cache_pos_arg_names())  # shardings name the plain arguments
            names = Float8Converter.Config.__annotations__
            options = {name: getattr(config.float8, name) for name in names}
            ConversionArguments(**options).convert(self)
            logger.info("float8lab:\n%s", conversion_report(self))

        def parallelize(self, parallel_dims: Any) -> None:
            """Make weights that become plain shards use the amaxes of the unsharded weights."""
            unsharded = {m: m.weight.shape for m in self.modules() if isinstance(m, Linear)}
            super().parallelize(parallel_dims)
            for layer, (rows, columns) in unsharded.items():
                if layer.weight.shape != (rows, columns):
                    mode = "row" if layer.weight.shape[0] == rows else "column"
                    group = parallel_dims.get_mesh("tp").get_group()
                    features = columns if mode == "row" else rows
                    shards = ShardMap.of(features, group.size(), group.rank())
                    parallel = TensorParallel(group, mode, partial=True, features=(shards,))
                    layer._fp8.set_parallel(parallel)

    Float8Model.__name__ = Float8Model.__qualname__ = model.__name__
    return Float8Model


class Float8SelectiveAC(SelectiveAC):
    """Selective activation checkpointing that saves FP8 GEMMs; ``SelectiveAC`` recomputes them."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[object]:
        """Return the ops whose results are saved, with those of FP8 GEMMs."""
        return {*super().get_save_ops(), *compute_intensive_ops()}
