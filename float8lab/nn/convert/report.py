"""conversion_report: which linear layers of a converted model run in FP8, which do not, and why.

The report is made on request. ``convert_to_float8`` leaves a sentence with each layer that it has
examined, and its notes on the call with the module that it was given. Both are plain attributes, so
they follow the modules into copies, pickles and other models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from float8lab.arguments import check_module
from float8lab.nn.attention.dot_product import DotProductAttention
from float8lab.nn.attention.fp8 import asks_for_fp8_attention
from float8lab.nn.convert.walk import (
    UNSEEN,
    Candidate,
    ModelWalk,
    is_unseen,
    matrix_shapes,
    recipes_of,
    walk_model,
)
from float8lab.ops.gemm import may_multiply
from float8lab.recipes.recipe import LinearPlan, Recipe
from float8lab.tables import aligned, html_table

__all__ = [
    "ConversionReport", "LayerReport", "conversion_report", "emulated_gemms", "explain_layer",
    "forget_conversion", "remember_conversion", "report_of_walk", "was_converted",
]  # fmt: skip


@dataclass(frozen=True)
class LayerReport:
    """The entry of one candidate layer in a ``ConversionReport``."""

    name: str
    shape: tuple[int, ...]
    """(out_features, in_features); for stacked matrices, their number comes first."""
    converted: bool
    note: str
    """The recipe of a converted layer, or the reason why it was skipped; with predicted times if
    ``Auto`` chose the recipe."""
    parameters: int


@dataclass(frozen=True, repr=False)
class ConversionReport:
    """The linear layers of a model, in FP8 or not, and why; ``print`` it for a table."""

    layers: tuple[LayerReport, ...]
    """An entry for each candidate, in the model's order."""
    unmatched: tuple[str, ...]
    """Names given in ``exclude`` or ``overrides`` that no layer has."""
    total_parameters: int
    """The number of the model's parameters, where shared parameters count once."""
    notes: tuple[str, ...] = ()
    """Sentences about the model, each printed as a line."""

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
        """A line that says how much of the model runs in FP8."""
        in_fp8 = sum(layer.parameters for layer in self.converted)
        return (
            f"{len(self.converted)} of {len(self.layers)} linear layers in FP8, "
            f"{self._share(in_fp8)} of {self.total_parameters:,} parameters"
        )

    def __str__(self) -> str:
        return "\n".join([*aligned([_HEADINGS, *self._rows()], left=4), *self._remarks()])

    def __repr__(self) -> str:
        return f"<ConversionReport: {self.summary}>"

    def _repr_html_(self) -> str:
        """Return the table that notebooks show."""
        remarks = "<br>".join(escape(line) for line in self._remarks())
        return f"{html_table(_HEADINGS, self._rows())}<p>{remarks}</p>"

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for layer in self.layers:
            shape, kind = " x ".join(map(str, layer.shape)), "FP8" if layer.converted else "skipped"
            share = self._share(layer.parameters)
            rows.append((layer.name or "(model)", shape, kind, layer.note, share))
        return rows

    def _remarks(self) -> list[str]:
        unmatched = [f"no layer is called {name!r}" for name in self.unmatched]
        return [self.summary, *unmatched, *self.notes]

    def _share(self, parameters: int) -> str:
        return f"{100 * parameters / max(self.total_parameters, 1):.1f} %"


_HEADINGS = ("layer", "out x in", "", "", "share")


def conversion_report(model: nn.Module) -> ConversionReport:
    """Report which linear layers of a converted model run in FP8, which do not, and why.

    The report describes the present model, after all conversions of the model or its parts. A layer
    that no conversion has examined is reported as not converted.

    Args:
        model: a model that was given to ``convert_to_float8``, or that contains or is part of one.

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
    return report_of_walk(model, walk_model(model))


def report_of_walk(model: nn.Module, walk: ModelWalk) -> ConversionReport:
    """Make the report of a model from a walk over its modules."""
    conversions = [vars(m)[_CONVERSION] for m in walk.modules if _CONVERSION in vars(m)]
    notes_of_calls = (note for _, notes in conversions for note in notes)
    return ConversionReport(
        layers=tuple(map(_report_layer, walk.candidates)),
        unmatched=tuple(name for unmatched, _ in conversions for name in unmatched),
        total_parameters=sum(map(_size, model.parameters())),
        notes=(*notes_of_calls, *_emulation_notes(walk), *_attention_notes(walk)),
    )


# Names of the attributes; their values are a string, and two tuples of strings.
_NOTE = "_float8_note"
_CONVERSION = "_float8_conversion"


def remember_conversion(
    model: nn.Module, walk: ModelWalk, unmatched: Sequence[str], notes: Sequence[str],
    layers: Iterable[tuple[nn.Module, str]],
) -> None:  # fmt: skip
    """Replace the notes on a model by a conversion's; ``layers`` has the notes on candidates."""
    for module in walk.modules:
        vars(module).pop(_CONVERSION, None)
    vars(model)[_CONVERSION] = (tuple(unmatched), tuple(notes))
    for layer, note in layers:
        explain_layer(layer, note)
        vars(layer).pop(UNSEEN, None)


def explain_layer(layer: nn.Module, note: str) -> None:
    """Set what the report says about a layer, such as why it stays in high precision."""
    vars(layer)[_NOTE] = note


def forget_conversion(model: nn.Module) -> None:
    """Remove all notes of conversions from a model and its parts."""
    for module in model.modules():
        for attribute in (_CONVERSION, _NOTE, UNSEEN):
            vars(module).pop(attribute, None)


def was_converted(model: nn.Module) -> bool:
    """Whether a model has notes of a conversion to report."""
    return any(_NOTE in vars(module) or _CONVERSION in vars(module) for module in model.modules())


def _report_layer(candidate: Candidate) -> LayerReport:
    layer = candidate.layer
    recipe = next(iter(recipes_of(layer)), None)
    note = vars(layer).get(_NOTE, "not converted" if recipe is None else repr(recipe))
    if unseen := is_unseen(layer):
        note = f"{note}, but its forward did not run: its parent reads its weight"
    is_lazy = any(isinstance(p, UninitializedParameter) for p in layer.parameters())
    if is_lazy and recipe is not None:
        note = f"{note}, converts when it materialises"
    # A module that multiplies by its own parameters may contain candidates.
    has_own = bool(candidate.matrices) or isinstance(layer, nn.MultiheadAttention)
    parameters = layer._parameters.values() if has_own else layer.parameters()
    count = sum(_size(p) for p in parameters if p is not None)
    converted = recipe is not None and not unseen and not is_lazy
    return LayerReport(candidate.name, matrix_shapes(candidate)[0], converted, note, count)


def _size(parameter: Tensor) -> int:
    """Return the number of elements; 0 for a lazy layer's parameter that has no shape yet."""
    return 0 if isinstance(parameter, UninitializedParameter) else parameter.numel()


def _emulation_notes(walk: ModelWalk) -> list[str]:
    """Return notes on recipes whose GEMMs the layers' device must run in high precision."""
    notes: dict[Recipe, str] = {}
    for candidate in walk.candidates:
        for recipe in recipes_of(candidate.layer):
            device = next(candidate.layer.parameters()).device
            if gemms := emulated_gemms(recipe.linear, device):
                notes[recipe] = (
                    f"{recipe}: {device} has no FP8 GEMM for {', '.join(gemms)}; "
                    "they run in high precision"
                )
    return list(notes.values())


def emulated_gemms(plan: LinearPlan, device: torch.device) -> list[str]:
    """Return the names of a plan's FP8 GEMMs that a device runs in high precision."""
    return [
        name
        for name, gemm in plan.gemms().items()
        if gemm is not None
        and not may_multiply(
            gemm.left.block, gemm.right.block, device,
            a_dtype=gemm.left.fp8_dtype, b_dtype=gemm.right.fp8_dtype,
        )
    ]  # fmt: skip


def _attention_notes(walk: ModelWalk) -> list[str]:
    """Return notes on whether attention runs in FP8 where recipes ask for it."""
    pairs = ((module, recipe) for module in walk.modules for recipe in recipes_of(module))
    asking = [(module, recipe) for module, recipe in pairs if asks_for_fp8_attention(recipe)]
    if count := sum(isinstance(module, DotProductAttention) for module, _ in asking):
        return [f"{count} of {len(walk.attention)} attention modules in FP8"]
    if walk.attention:
        return []
    return [
        f"{recipe}: the model has no float8lab.DotProductAttention; attention stays in high "
        "precision"
        for recipe in dict.fromkeys(recipe for _, recipe in asking)
    ]
