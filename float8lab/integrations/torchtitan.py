"""FP8 for torchtitan's job files. Needs the extra ``torchtitan``."""

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
    """Have torchtitan's model converted by ``convert_to_float8`` when it is built.

    ``Float8Converter.Config`` has its arguments and goes in ``converters`` of ``model_registry``. A
    recipe may also be a name, or a mapping of plain values. The conversion report is logged.

    Raises:
        TypeError: a recipe is none of those, when the model is built.
        ValueError: no recipe has that name; or ``strict``, and something cannot be done.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: RecipeChoice = None
        exclude: list[str] = field(default_factory=lambda: ["lm_head"])
        overrides: dict[str, RecipeChoice] = field(default_factory=dict)
        strict: bool = False
        fp8_all_gather: bool = True

        def to_dict(self) -> dict[str, object]:
            """Every field as text, since a recipe is no plain value."""
            return {f.name: str(getattr(self, f.name)) for f in fields(self)}

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Return the model's configuration, of a class derived from its own."""
        values = {f.name: getattr(model_config, f.name) for f in fields(model_config)}
        return _float8_model(type(model_config)._owner).Config(**values, float8=self.config)


@functools.cache
def _float8_model(model: Any) -> Any:
    """The class of a torchtitan model that converts itself."""

    class Float8Model(model):
        @dataclass(kw_only=True, slots=True)
        class Config(model.Config):
            float8: Float8Converter.Config

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.apply(lambda m: m._cache_pos_arg_names())  # shardings name the plain forward's
            names = Float8Converter.Config.__annotations__
            options = {name: getattr(config.float8, name) for name in names}
            ConversionArguments(**options).convert(self)
            logger.info("float8lab:\n%s", conversion_report(self))

        def parallelize(self, parallel_dims: Any) -> None:
            """Scale weights that become plain shards by the amaxes of the unsharded weights."""
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
        """The ops whose results are saved."""
        return {*super().get_save_ops(), *compute_intensive_ops()}
