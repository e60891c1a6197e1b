"""conversion_report: which linear layers of a converted model run in FP8, which do not, and why.

The report is made when it is asked for. ``convert_to_float8`` leaves a sentence with each layer it
has looked at, and its notes on the whole call with the module that it was given. Both are plain
attributes, so they follow the modules into copies, pickles and other models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from float8lab.arguments import check_module
from float8lab.nn.attention.dot_product import DotProductAttention
from float8lab.nn.attention.fp8 import asks_for_fp8_attention
from float8lab.nn.convert.other_experts import experts_class
from float8lab.nn.convert.other_linear import known_linear, sizes
from float8lab.nn.expert_mlp import ExpertMLP
from float8lab.nn.fused_module import FusedModule
from float8lab.nn.grouped_linear import GroupedLinear
from float8lab.nn.layernorm_mlp import LayerNormMLP
from float8lab.nn.precision import precisions
from float8lab.ops.gemm import may_multiply
from float8lab.recipes.recipe import LinearPlan, Recipe

__all__ = [
    "ConversionReport",
    "LayerReport",
    "candidates",
    "conversion_report",
    "emulated_gemms",
    "explain_layer",
    "forget_conversion",
    "has_recipe",
    "is_unseen",
    "mark_unseen",
    "own_matrices",
    "remember_conversion",
    "shape_of",
    "shapes_of",
    "was_converted",
]


@dataclass(frozen=True)
class LayerReport:
    """The entry of one candidate layer in a ``ConversionReport``."""

    name: str
    shape: tuple[int, ...]
    """(out_features, in_features); for stacked matrices, their number comes first."""
    converted: bool
    note: str
    """The recipe of a converted layer, or the reason why it was skipped; with predicted times where
    the recipe was chosen."""
    parameters: int


@dataclass(frozen=True)
class ConversionReport:
    """The linear layers of a model, in FP8 or not, and why; ``print`` it for a table.

    Attributes:
        layers: one entry for each candidate, in the model's order.
        unmatched: names given in ``exclude`` or ``overrides`` that no layer has.
        total_parameters: of the whole model, shared ones counted once.
        notes: sentences about the whole, each printed as a line.
    """

    layers: tuple[LayerReport, ...]
    unmatched: tuple[str, ...]
    total_parameters: int
    notes: tuple[str, ...] = ()

    @property
    def converted(self) -> tuple[LayerReport, ...]:
        """The layers that run in FP8."""
        return tuple(layer for layer in self.layers if layer.converted)

    @property
    def skipped(self) -> tuple[LayerReport, ...]:
        """The candidates left in high precision."""
        return tuple(layer for layer in self.layers if not layer.converted)

    @property
    def summary(self) -> str:
        """How much of the model runs in FP8, in one line."""
        in_fp8 = sum(layer.parameters for layer in self.converted)
        return (
            f"{len(self.converted)} of {len(self.layers)} linear layers in FP8, "
            f"{self._share(in_fp8)} of {self.total_parameters:,} parameters"
        )

    def __str__(self) -> str:
        rows = [_HEADINGS, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            "  ".join(
                cell.rjust(width) if i == 4 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join([*lines, *self._remarks()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table that notebooks show."""
        head = "".join(f"<th>{escape(cell)}</th>" for cell in _HEADINGS)
        rows = [
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self._rows()
        ]
        remarks = "<br>".join(escape(line) for line in self._remarks())
        table = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
        return f"<table>{table}</table><p>{remarks}</p>"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                layer.name or "(model)",
                " x ".join(map(str, layer.shape)),
                "FP8" if layer.converted else "skipped",
                layer.note,
                self._share(layer.parameters),
            )
            for layer in self.layers
        ]

    def _remarks(self) -> list[str]:
        unmatched = [f"no layer is called {name!r}" for name in self.unmatched]
        return [self.summary, *unmatched, *self.notes]

    def _share(self, parameters: int) -> str:
        return f"{100 * parameters / max(self.total_parameters, 1):.1f} %"


_HEADINGS = ("layer", "out x in", "", "", "share")


def conversion_report(model: nn.Module) -> ConversionReport:
    """Say which linear layers of a converted model run in FP8, which do not, and why.

    The report is of the model as it is now, after all conversions of it or of parts of it. A layer
    that no conversion has looked at is reported as not converted.

    Args:
        model: a model that ``convert_to_float8`` was given, or one that has such a model in it or
            is part of one.

    Raises:
        ValueError: no part of the model was converted, or ``to_high_precision`` has undone it.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.LSTM(96, 8))
    >>> report = float8lab.conversion_report(float8lab.convert_to_float8(model))
    >>> for layer in report.skipped:
    ...     print(f"{layer.name}, {layer.parameters} parameters: {layer.note}")
    1, 3392 parameters: no linear layer: LSTM multiplies by its weight_ih_l0, weight_hh_l0 itself
    >>> report.summary
    '1 of 2 linear layers in FP8, 64.8 % of 9,632 parameters'
    """
    check_module("model", model)
    if not was_converted(model):
        raise ValueError(
            f"model must have been converted; got a {type(model).__name__} without a converted "
            "part. Call float8lab.convert_to_float8(model) first."
        )
    calls = [vars(module)[_CALL] for module in model.modules() if _CALL in vars(module)]
    layers = list(candidates(model))
    return ConversionReport(
        layers=tuple(_report(name, layer) for name, layer in layers),
        unmatched=tuple(name for unmatched, _ in calls for name in unmatched),
        total_parameters=sum(_size(p) for p in model.parameters()),
        notes=(
            *(note for _, notes in calls for note in notes),
            *_emulation_notes([layer for _, layer in layers]),
            *_attention_notes(model),
        ),
    )


# Names of the attributes; their values are a string, two tuples of strings, and True.
_NOTE = "_float8_note"
_CALL = "_float8_conversion"
_UNSEEN = "_float8_unseen"


def remember_conversion(
    model: nn.Module, *, unmatched: Sequence[str], notes: Sequence[str], layers: Any
) -> None:
    """Keep the notes of a conversion, in place of those of earlier ones.

    Args:
        model: the model that was converted.
        unmatched: names given that no layer has.
        notes: sentences about the whole.
        layers: pairs of a candidate and the sentence about it.
    """
    for module in model.modules():
        vars(module).pop(_CALL, None)
    vars(model)[_CALL] = (tuple(unmatched), tuple(notes))
    for layer, note in layers:
        vars(layer)[_NOTE] = note
        vars(layer).pop(_UNSEEN, None)


def explain_layer(layer: nn.Module, note: str) -> None:
    """Say in the report why a layer stays in high precision, in place of what was said before."""
    vars(layer)[_NOTE] = note


def mark_unseen(layer: nn.Module) -> None:
    """Note that the forward of a converted layer did not run when the model was called."""
    vars(layer)[_UNSEEN] = True


def is_unseen(layer: nn.Module) -> bool:
    """Whether a converted layer was found not to run, and has not run since."""
    return _UNSEEN in vars(layer) and all(p._last is None for _, p in precisions(layer))


def forget_conversion(model: nn.Module) -> None:
    """Remove all notes of conversions from a model and its parts."""
    for module in model.modules():
        vars(module).pop(_CALL, None)
        vars(module).pop(_NOTE, None)
        vars(module).pop(_UNSEEN, None)


def was_converted(model: nn.Module) -> bool:
    """Whether there is something to report."""
    return any(_NOTE in vars(module) or _CALL in vars(module) for module in model.modules())


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that multiply by a matrix of parameters, and their names."""
    for name, module in model.named_modules():
        if (
            known_linear(type(module))
            or isinstance(module, _OWN)
            or experts_class(module)
            or own_matrices(module)
        ):
            yield name, module


def has_recipe(layer: nn.Module) -> bool:
    """Whether a layer runs in FP8 by a recipe of its own."""
    return any(precision.recipe is not None for _, precision in precisions(layer))


def _report(name: str, layer: nn.Module) -> LayerReport:
    recipe = next((p.recipe for _, p in precisions(layer) if p.recipe is not None), None)
    note = vars(layer).get(_NOTE, "not converted" if recipe is None else repr(recipe))
    if unseen := is_unseen(layer):
        note = f"{note}, but its forward did not run: its parent reads its weight"
    names = own_matrices(layer)
    own: Any = layer._parameters.values() if names else layer.parameters()
    count = sum(_size(p) for p in own if p is not None)
    converted = recipe is not None and not unseen
    return LayerReport(name, shape_of(layer), converted, note, count)


def shape_of(layer: nn.Module) -> tuple[int, ...]:
    """The sizes of the (first) matrix that a candidate multiplies by."""
    return shapes_of(layer)[0]


def shapes_of(layer: Any) -> list[tuple[int, ...]]:
    """The sizes of the matrices that a candidate multiplies by; of experts their number first."""
    if names := own_matrices(layer):
        return [tuple(layer.get_parameter(name).shape) for name in names]
    if isinstance(layer, (LayerNormMLP, ExpertMLP)):
        return [tuple(layer.fc1_weight.shape), tuple(layer.fc2_weight.shape)]
    if isinstance(layer, GroupedLinear):
        return [(layer.num_gemms, layer.out_features, layer.in_features)]
    kind = experts_class(layer)
    return [sizes(layer)] if kind is None else kind.shapes(layer)


def _size(parameter: Tensor) -> int:
    """Number of elements; 0 for a lazy layer's parameter that has no shape yet."""
    return 0 if isinstance(parameter, UninitializedParameter) else parameter.numel()


_OWN = (FusedModule, GroupedLinear, ExpertMLP)
"""Modules of this library that have no class of torch's."""

_NO_MATRICES = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LayerNorm,
    nn.RMSNorm,
    _ConvNd,
    ParametrizationList,
)
"""Modules whose parameters may have the shape of a matrix that a linear layer multiplies by."""


def own_matrices(module: nn.Module) -> list[str]:
    """Parameters of a module that is no linear layer, but seems to multiply by them like one.

    They are those with three dimensions, as the experts of a mixture are stacked, and those with
    two that are called a weight, as a router's is or those of torch.nn.MultiheadAttention. Tables
    of positions have other names and sizes.
    """
    known = known_linear(type(module)) is not None or isinstance(module, (*_OWN, *_NO_MATRICES))
    if known or experts_class(module):
        return []
    return [
        name
        for name, parameter in module._parameters.items()
        if parameter is not None
        and not isinstance(parameter, UninitializedParameter)
        and (parameter.ndim == 3 or (parameter.ndim == 2 and "weight" in name))
        and min(parameter.shape) > 1
    ]


def _emulation_notes(layers: Sequence[nn.Module]) -> list[str]:
    """Recipes for which the device of the layers has to run GEMMs in high precision."""
    notes: dict[Recipe, str] = {}
    for layer in layers:
        for _, precision in precisions(layer):
            if precision.recipe is None:
                continue
            device = next(layer.parameters()).device
            if gemms := emulated_gemms(precision.recipe.linear, device):
                notes[precision.recipe] = (
                    f"{precision.recipe}: {device} has no FP8 GEMM for {', '.join(gemms)}; "
                    "they run in high precision"
                )
    return list(notes.values())


def emulated_gemms(plan: LinearPlan, device: torch.device) -> list[str]:
    """The FP8 GEMMs of a plan that a device runs in high precision."""
    return [
        name
        for name, gemm in plan.gemms().items()
        if gemm is not None
        and not may_multiply(
            gemm.left.block, gemm.right.block, device,
            a_dtype=gemm.left.fp8_dtype, b_dtype=gemm.right.fp8_dtype,
        )
    ]  # fmt: skip


def _attention_notes(model: nn.Module) -> list[str]:
    """Whether the attention that recipes ask for in FP8 runs in FP8."""
    attention = [m for m in model.modules() if isinstance(m, DotProductAttention)]
    asking = [
        (module, precision.recipe)
        for module in model.modules()
        for _, precision in precisions(module)
        if precision.recipe is not None and asks_for_fp8_attention(precision.recipe)
    ]
    if count := sum(isinstance(module, DotProductAttention) for module, _ in asking):
        return [f"{count} of {len(attention)} attention modules in FP8"]
    if attention:
        return []
    return [
        f"{recipe}: the model has no float8lab.DotProductAttention; attention stays in high "
        "precision"
        for recipe in dict.fromkeys(recipe for _, recipe in asking)
    ]
