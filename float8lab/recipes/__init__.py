"""Recipes as data, the autocast settings in force, and the state of delayed scaling."""

from float8lab.recipes.auto import Auto
from float8lab.recipes.recipe import (
    ALL,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    LinearPlan,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from float8lab.recipes.state import autocast, fp8_autocast, fp8_model_init, quantized_model_init

__all__ = [
    "ALL", "Auto", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling",
    "Float8RowwiseScaling", "Format", "LinearPlan", "MXFP8BlockScaling", "NVFP4BlockScaling",
    "Recipe", "autocast", "fp8_autocast", "fp8_model_init", "quantized_model_init",
]  # fmt: skip
