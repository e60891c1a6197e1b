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
from float8lab.nn.convert.report import conversion_report
from float8lab.nn.linear import Linear
from float8lab.ops import compute_intensive_ops

with needs("float8lab.integrations.torchtitan", "torchtitan", '"float8lab[torchtitan]"'):
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.distributed.parallel_dims import MeshAxisName
    from torchtitan.tools.logging import logger

__all__ = ["Float8Converter", "Float8SelectiveAC"]


class Float8Converter(QuantizationConverter):
    """Have torchtitan's model converted by ``convert_to_float8`` when it is built.

    ``Float8Converter.Config`` has arguments of that function, and goes in ``converters`` of
    ``model_registry``. A recipe may also be the name of one, or a mapping of plain values; None is
    ``Float8CurrentScaling()``. The conversion report is logged.

    Raises:
        TypeError: a recipe is none of those, when the model is built.
        ValueError: no recipe has that name; or ``strict``, and something cannot be done.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: Any = None
        exclude: list[str] = field(default_factory=lambda: ["lm_head"])
        overrides: dict[str, Any] = field(default_factory=dict)
        strict: bool = False
        fp8_all_gather: bool = True

        def to_dict(self) -> dict[str, Any]:
            """Every field as text, since a recipe is no plain value."""
            return {part.name: str(getattr(self, part.name)) for part in fields(self)}

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Return the model's configuration, of a class derived from its own."""
        kind = _float8_model(type(model_config)._owner).Config
        parts = {part.name: getattr(model_config, part.name) for part in fields(model_config)}
        return kind(**parts, float8=self.config)


@functools.cache
def _float8_model(model: Any) -> Any:
    """The class of a torchtitan model that converts itself."""

    class Float8Model(model):
        @dataclass(kw_only=True, slots=True)
        class Config(model.Config):
            float8: Float8Converter.Config

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            for module in self.modules():
                module._cache_pos_arg_names()  # shardings name arguments of the plain forward
            how = {part.name: getattr(config.float8, part.name) for part in fields(config.float8)}
            how["overrides"] = {name: _recipe(r) for name, r in how["overrides"].items()}
            del how["model_compile_enabled"]  # of the base class
            convert_to_float8(self, _recipe(how.pop("recipe")), **how)
            logger.info("float8lab:\n%s", conversion_report(self))

        def parallelize(self, parallel_dims: Any) -> None:
            """Have layers whose weights become plain shards scale by the whole weights' amaxes."""
            super().parallelize(parallel_dims)
            mesh = parallel_dims.get_optional_mesh("tp")
            if mesh is None or parallel_dims.spmd_backend != "spmd_types":
                return
            for layer in self.modules():
                sharding: Any = getattr(layer, "_sharding_config", None)
                if isinstance(layer, Linear) and sharding is not None:
                    layout = sharding.state_shardings["weight"]
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
    """Selective activation checkpointing that saves FP8 GEMMs; ``SelectiveAC`` recomputes them."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        """The ops whose results are saved."""
        return {*super().get_save_ops(), *compute_intensive_ops()}
