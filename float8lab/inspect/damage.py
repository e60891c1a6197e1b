"""Find where FP8 does the most damage in a model.  M tokens, N out features, K in features.

Three GEMMs of each linear layer can run in FP8: ``y = x @ w.T`` (fprop), ``dx = dy @ w`` (dgrad)
and ``dw = dy.T @ x`` (wgrad). The *damage* of a GEMM is the change of the loss and of the gradients
if it alone runs in FP8 and all other GEMMs stay in high precision.

The gradients are compared parameter by parameter, each relative to its own size, as Adam sees them:
a parameter's error is ``|g' - g| / |g|``, at most 1; the gradient error is the root mean square of
these over all elements. The loss error is ``|loss' - loss| / |loss|``. The damage is the square
root of the sum of both errors squared.

All damages are first *estimated*, in a pass that looks at x, w and dy of each layer. For wgrad the
estimate is final, since an error of dw affects nothing else. An error of y or dx passes through
the model, so the worst GEMMs of fprop and dgrad are measured, each by a *run*, which is a separate
pass. The other estimates are scaled by the ratio of measured to estimated damage in these runs.
"""

from __future__ import annotations

import json
import math
import operator
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from float8lab import arguments
from float8lab.formats import Float8Spec
from float8lab.inspect.text import Grid, Printed
from float8lab.inspect.trial import LossFn, Trial, on_trial, refuse_dtensors, unambiguous
from float8lab.nn.casts import plain
from float8lab.nn.linear import Linear
from float8lab.ops import as_matrix
from float8lab.recipes.recipe import Float8CurrentScaling, LinearPlan, Recipe
from float8lab.tensor import quantize

__all__ = ["Damage", "Sensitivity", "sensitivity"]

GEMMS = ("fprop", "dgrad", "wgrad")
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
_OUTLIER = 4.0
"""The default limit of ``Sensitivity.overrides``, in multiples of the median damage."""


@dataclass(frozen=True)
class Damage:
    """The damage of running one GEMM of one layer in FP8."""

    layer: str
    gemm: str
    """``"fprop"``, ``"dgrad"`` or ``"wgrad"``."""
    recipe: Recipe
    damage: float
    """``hypot(loss, gradient)``, by which rows are sorted."""
    loss: float
    """Relative change of the loss."""
    gradient: float
    """Relative error of the gradients of all parameters."""
    measured: bool
    """Whether the damage was measured by a run with this GEMM in FP8, and not estimated."""
    output: float | None = None
    """Relative error of the GEMM's result: the root mean square over its rows or over its columns,
    whichever is more; None without an estimate."""
    operands: Mapping[str, float] = field(default_factory=dict)
    """The error ``output`` with only one operand cast: ``"x"``, ``"w"`` or ``"dy"``."""


@dataclass(frozen=True, repr=False)
class Sensitivity(Printed):
    """The result of ``sensitivity``; ``print`` it for a table.

    Attributes:
        rows: a row for each GEMM of each layer and recipe, the worst first.
        layers: the names of the layers that can run in FP8, in the model's order.
        skipped: the names of the linear layers that cannot run in FP8.
        recipes: the recipes that were tried.
        loss: the loss of the batch in high precision.
        noise: the damage that a second run in high precision shows; it is not 0 if ops of the model
            are not deterministic. Damages of this size mean nothing.
        passes: the number of forward and backward passes that were run.
    """

    rows: tuple[Damage, ...]
    layers: tuple[str, ...]
    skipped: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    loss: float
    noise: float
    passes: int

    def by_layer(self, recipe: Recipe | None = None) -> dict[str, float]:
        """Combine the damages of each layer's GEMMs (root of the sum of squares), the worst first.

        Args:
            recipe: one of ``recipes``; None is the first.
        """
        damages: dict[str, float] = {}
        for row in self._rows_of(recipe):
            damages[row.layer] = math.hypot(damages.get(row.layer, 0.0), row.damage)
        return dict(sorted(damages.items(), key=operator.itemgetter(1), reverse=True))

    def by_operand(self, recipe: Recipe | None = None) -> dict[tuple[str, str], float]:
        """Split the damage of each GEMM between its two operands; return it by layer and operand.

        Each operand's share is in proportion to the error that it causes. The worst come first.
        Operands of fused modules are left out, since their errors are unknown.
        """
        damages: dict[tuple[str, str], float] = {}
        for row in self._rows_of(recipe):
            combined = math.hypot(*row.operands.values())
            for operand, error in row.operands.items():
                is_known, key = 0 < combined < math.inf, (row.layer, operand)
                operand_damage = row.damage * error / combined if is_known else row.damage
                damages[key] = math.hypot(damages.get(key, 0.0), operand_damage)
        return dict(sorted(damages.items(), key=operator.itemgetter(1), reverse=True))

    def overrides(
        self, max_damage: float | None = None, *, recipe: Recipe | None = None
    ) -> dict[str, Recipe | None]:
        """Choose ``overrides`` for ``convert_to_float8`` that keep the damage of every GEMM low.

        A layer that ``recipe`` damages too much gets the recipe with the fewest GEMMs above the
        limit, or the first of several such recipes, and these GEMMs run in high precision. A layer
        with all GEMMs above the limit gets None.

        Args:
            max_damage: limit for one GEMM. None finds outliers: the limit is four times the median
                under ``recipe``, of the same GEMM in all layers or of all GEMMs, if that is more.
            recipe: the recipe for the other layers, one of ``recipes``; None is the first of them.

        Raises:
            TypeError: ``max_damage`` is no number.
            ValueError: a recipe that was not tried.
        """
        max_damage = arguments.check_number("max_damage", max_damage, minimum=0, optional=True)
        base = self._tried_recipe(recipe)
        limits = {gemm: self._limit(gemm, base, max_damage) for gemm in GEMMS}
        too_much: dict[tuple[str, Recipe], set[str]] = {}
        for row in self.rows:
            above = too_much.setdefault((row.layer, row.recipe), set())
            if row.damage > limits[row.gemm]:
                above.add(row.gemm)
        order = [base, *(tried for tried in self.recipes if tried != base)]
        choices: dict[str, Recipe | None] = {}
        for name in self.layers:
            best = min(order, key=lambda tried: len(too_much.get((name, tried), ())))
            choices[name] = _without(best, too_much.get((name, best), set()))
        changed = {name: choice for name, choice in choices.items() if choice != base}
        return unambiguous(changed, {**dict.fromkeys(self.skipped), **choices})

    def to_json(self) -> str:
        """Return the rows, loss, noise and passes as JSON text."""
        totals = {"loss": self.loss, "noise": self.noise, "passes": self.passes}
        return json.dumps({"rows": [vars(row) for row in self.rows], **totals}, default=repr)

    def summary(self) -> str:
        """Return the loss in high precision, the noise, the number of passes and the recipes."""
        return (
            f"loss {self.loss:.4g} in high precision, noise {_show(self.noise)}; "
            f"{self.passes} forward and backward passes\n"
            f"FP8 by {', '.join(map(str, self.recipes))}"
        )

    def tables(self, limit: int | None = 30) -> list[Grid]:
        """Return a table with a row for each GEMM, the most damaged first."""
        several = len(self.recipes) > 1
        head = ["layer", "GEMM", *(["recipe"] if several else [])]
        columns = (*head, "damage", "loss", "gradient", "result", "of operands", "found by")
        rows = []
        for row in self.rows:
            operands = ", ".join(f"{name} {_show(error)}" for name, error in row.operands.items())
            rows.append(
                (
                    row.layer or "(model)", row.gemm, *([repr(row.recipe)] if several else []),
                    *map(_show, (row.damage, row.loss, row.gradient, row.output)),
                    operands or "-", "run" if row.measured else "estimate",
                )
            )  # fmt: skip
        return [Grid("GEMMs, the worst first", columns, rows, left=len(head)).first(limit)]

    def _tried_recipe(self, recipe: Recipe | None) -> Recipe:
        if recipe is None:
            return self.recipes[0]
        if recipe not in self.recipes:
            raise ValueError(
                f"recipe must be one that was tried, {self.recipes}; got {recipe!r}. "
                "Pass it to sensitivity(recipes=...) first."
            )
        return recipe

    def _rows_of(self, recipe: Recipe | None) -> Iterator[Damage]:
        recipe = self._tried_recipe(recipe)
        return (row for row in self.rows if row.recipe == recipe)

    def _limit(self, gemm: str, recipe: Recipe, max_damage: float | None) -> float:
        if max_damage is not None:
            return max_damage
        rows = list(self._rows_of(recipe))
        damages = [row.damage for row in rows], [row.damage for row in rows if row.gemm == gemm]
        medians = map(statistics.median, filter(None, damages))
        return max([self.noise, *(_OUTLIER * median for median in medians)])


def _show(share: float | None) -> str:
    """Format a fraction as a percentage.

    >>> _show(0.02634), _show(0.0), _show(1e-7), _show(None)
    ('2.63 %', '0 %', '1e-05 %', '-')
    """
    return "-" if share is None else f"{100 * share:.3g} %"


def _without(recipe: Recipe, gemms: set[str]) -> Recipe | None:
    """Return the recipe with these GEMMs in high precision; None if no GEMM is left in FP8."""
    if not gemms:
        return recipe
    if not set(_gemms_in_fp8(recipe.linear)) - gemms:
        return None
    before = recipe.override_linear_precision
    high_precision = tuple(was or gemm in gemms for was, gemm in zip(before, GEMMS, strict=True))
    return replace(recipe, override_linear_precision=high_precision)  # type: ignore[arg-type]  # of three


def _gemms_in_fp8(plan: LinearPlan) -> list[str]:
    return [name for name, gemm in plan.gemms().items() if gemm]


def sensitivity(
    model: nn.Module,
    batch: object,
    loss_fn: LossFn | None = None,
    recipes: Recipe | Sequence[Recipe] | None = None,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    exclude: Sequence[str] = (),
    runs: int = 100,
) -> Sensitivity:
    """Rank the layers of a model, their GEMMs and operands by the damage that FP8 does.

    The model, which may be converted, is left as it was, and so is the ``grad`` of its parameters.
    Every pass starts from the same buffers and random numbers. Delayed scaling is tried as in a
    first step, where each tensor's scale is computed from its own amax. The effect of stale scales
    shows only in training.

    The cost is ``2 + min(runs, 2 * layers * recipes)`` forward and backward passes (3 times the
    layers for fused modules, which have no estimate), and memory for one more set of gradients.

    Args:
        model: a model with unsharded parameters.
        batch: an example, as ``loss_fn`` takes it.
        loss_fn: ``loss_fn(model, batch)`` returns the loss. None calls the model on the batch
            (a tuple or dict holds its arguments) and takes the output's ``loss``, or the mean of
            its squares.
        recipes: recipes to try; None is ``Float8CurrentScaling()``, as in ``convert_to_float8``.
        filter_fn: as in ``convert_to_float8``.
        exclude: as in ``convert_to_float8``.
        runs: how many GEMMs, the worst by estimate, are each measured by a run.

    Raises:
        ValueError: no recipe, no loss, or a loss that is not finite.
        NotImplementedError: sharded parameters.

    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    >>> _ = model[1].weight.data[0].mul_(1e6)  # flushes the other rows to zero
    >>> found = float8lab.inspect.sensitivity(model, torch.ones(8, 32))
    >>> found.rows[0].layer
    '1'
    """
    arguments.check_module("model", model)
    arguments.check_callables(("model", "batch"), loss_fn=loss_fn)
    arguments.check_size("runs", runs)
    given = (recipes,) if isinstance(recipes, Recipe) else recipes
    arguments.check_instance(
        "recipes", given, (list, tuple), "a recipe or a list of them", optional=True
    )
    for recipe in given or ():
        arguments.check_instance("recipes", recipe, Recipe, "of float8lab.recipes")
    tried = tuple(dict.fromkeys(given or (Float8CurrentScaling(),)))
    refuse_dtensors(model, "sensitivity")
    with on_trial(model, batch, loss_fn) as trial:
        trial.convert(filter_fn, exclude)
        bench = _Bench(trial)
        noise, looks = bench.look(tried)
        rows = _measure_worst(_estimates(bench, looks, tried), bench, runs)
    return Sensitivity(
        rows=tuple(sorted(rows, key=lambda row: -row.damage)), layers=tuple(trial.layers),
        skipped=tuple(trial.skipped), recipes=tried, loss=bench.loss, noise=noise.damage,
        passes=bench.passes,
    )  # fmt: skip


class _Difference(NamedTuple):
    damage: float
    loss: float
    gradient: float


class _Bench:
    """Runs a model on its batch, and compares each run with the first, in high precision."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.parameters = trial, trial.parameters
        self.elements = sum(p.numel() for p in self.parameters)
        self.passes = 0
        self.loss, self.gradients = self._run()
        if not math.isfinite(self.loss):
            raise ValueError(
                f"loss_fn must return a finite loss in high precision; got {self.loss}. "
                "Check the batch."
            )
        self.norms = _norms(self.gradients)

    def _run(self) -> tuple[float, list[Tensor | None]]:
        self.trial.rewind()
        self.passes += 1
        loss, gradients = self.trial.step()
        return loss.item(), [None if g is None else g.detach() for g in gradients]

    def compare(self) -> _Difference:
        """Run the model under the recipes in use, and compare the run with high precision."""
        loss, gradients = self._run()
        differences = [
            None if g is None or right is None else g.float() - right.float()
            for g, right in zip(gradients, self.gradients, strict=True)
        ]
        norms = zip(self.parameters, _norms(differences), self.norms, strict=True)
        squares = sum(p.numel() * _relative(e, norm, most=1.0) ** 2 for p, e, norm in norms)
        gradient = math.sqrt(squares / max(self.elements, 1))
        loss = _relative(abs(loss - self.loss), abs(self.loss))
        return _Difference(math.hypot(loss, gradient), loss, gradient)

    def look(self, recipes: Sequence[Recipe]) -> tuple[_Difference, dict[_Key, _Look]]:
        """Repeat the high-precision run; return its difference and FP8's effect at each layer."""
        looks: dict[_Key, _Look] = {}

        def look(name: str, layer: nn.Module, inp: Tensor, y: Tensor) -> None:
            if isinstance(layer, Linear):
                x = plain(inp.detach())
                look_at = partial(_look_at, looks, recipes, name, layer, x, inp.requires_grad)
                if y.requires_grad:
                    y.register_hook(look_at)
                else:
                    look_at(None)

        with self.trial.looking(look):
            return self.compare(), looks

    def run_alone(self, row: Damage) -> Damage:
        """Run the model with only the row's GEMM in FP8, and return the row as measured."""
        high_precision = tuple(gemm != row.gemm for gemm in GEMMS)
        alone = replace(row.recipe, override_linear_precision=high_precision)  # type: ignore[arg-type]
        self.trial.use({row.layer: alone})
        difference = self.compare()
        self.trial.use({})
        return replace(row, **difference._asdict(), measured=True)


def _norms(tensors: Sequence[Tensor | None]) -> list[float]:
    """Compute the Euclidean norms of tensors; the norm of None is 0."""
    norms = [torch.linalg.vector_norm(t.float()) for t in tensors if t is not None]
    # Stacked, the norms wait for the GPU only once.
    values = iter(torch.stack([n.to(norms[0].device) for n in norms]).tolist() if norms else ())
    return [0.0 if t is None else next(values) for t in tensors]


def _relative(error: float, size: float, most: float = math.inf) -> float:
    """Return ``error / size``, at most ``most``; a nonfinite error gives ``most``."""
    if not math.isfinite(error):
        return most
    if error == 0.0:
        return 0.0
    return min(error / size, most) if size > 0.0 else most


_Key = tuple[str, str, Recipe]


@dataclass
class _Look:
    """The effect of FP8 on the result of one GEMM, over all calls of its layer."""

    error: float = 0.0
    """Sum of the squares of the errors of all elements of the result."""
    output: float = 0.0
    """Relative error of the result in the worst call."""
    operands: dict[str, float] = field(default_factory=dict)
    """The error ``output`` with only one operand cast, by operand."""
    loss: float = 0.0
    """First-order change of the loss that the error of y causes."""


def _relative_error(error: Tensor, exact: Tensor) -> Tensor:
    """Compute the root mean square of the relative errors of rows, or of columns if more."""
    # The relative error of the whole matrix would hide the errors of all rows besides a huge one,
    # though a norm, or a zero in the next weight, may make the other rows count as much.
    errors = []
    for dim in (0, 1):
        size, lost = (torch.linalg.vector_norm(t, dim=dim) for t in (exact, error))
        share = (lost / size).nan_to_num(nan=1.0, posinf=1.0).clamp(max=1.0)
        errors.append(share.masked_fill(lost == 0, 0.0).square().mean().sqrt())
    return torch.stack(errors).max()


@torch.no_grad()
def _look_at(
    looks: dict[_Key, _Look], recipes: Sequence[Recipe], name: str, layer: Linear, x: Tensor,
    needs_dx: bool, dy: Tensor | None,
) -> None:  # fmt: skip
    """Record the effect of FP8 on the GEMMs of one call of a layer, once dy is known."""
    weight, _ = layer._weight_and_bias(layer.gemms[0])
    w = plain(weight).detach().float()
    x = as_matrix(x).float()
    needs_dw = any(p.requires_grad for p in layer.parameters() if p.ndim == 2)
    if dy is not None:
        dy = as_matrix(plain(dy.detach())).float()
    for recipe in recipes:
        plan, compare = recipe.linear, partial(_compare, looks, name, recipe)
        if plan.fprop:
            error = compare("fprop", (x, plan.fprop.left), (w, plan.fprop.right))
            if dy is not None:
                change = torch.linalg.vecdot(dy.flatten(), error.flatten()).item()
                looks[name, "fprop", recipe].loss += change
        if dy is not None and plan.dgrad and needs_dx:
            compare("dgrad", (dy, plan.dgrad.left), (w.t(), plan.dgrad.right))
        if dy is not None and plan.wgrad and needs_dw:
            compare("wgrad", (dy.t(), plan.wgrad.left), (x.t(), plan.wgrad.right))


def _compare(
    looks: dict[_Key, _Look], name: str, recipe: Recipe, gemm: str, a: tuple[Tensor, Float8Spec],
    b: tuple[Tensor, Float8Spec],
) -> Tensor:  # fmt: skip
    """Record the effect of FP8 on ``a @ b.T``; return the error of the result."""
    a_cast, b_cast = (_cast(x, spec, recipe.linear.amax_epsilon) for x, spec in (a, b))
    exact = a[0] @ b[0].t()
    error = a_cast @ b_cast.t() - exact
    alone = (a_cast - a[0]) @ b[0].t(), a[0] @ (b_cast - b[0]).t()
    errors = torch.stack([_relative_error(lost, exact) for lost in (error, *alone)])
    output, *operands = errors.tolist()
    look = looks.setdefault((name, gemm, recipe), _Look())
    look.error += _norms([error])[0] ** 2
    look.output = max(look.output, output)
    for operand, value in zip(OPERANDS[gemm], operands, strict=True):
        look.operands[operand] = max(look.operands.get(operand, 0.0), value)
    return error


def _cast(x: Tensor, spec: Float8Spec, amax_epsilon: float) -> Tensor:
    return quantize(
        x.contiguous(), spec.fp8_dtype, block=spec.block, scale_rule=spec.scale_rule,
        amax_epsilon=amax_epsilon,
    ).dequantize()  # fmt: skip


def _estimates(
    bench: _Bench, looks: Mapping[_Key, _Look], recipes: Sequence[Recipe]
) -> list[Damage]:
    """Return a row for each GEMM; fused modules, which have no estimate, get infinite damage."""
    shares = {
        id(p): (norm, math.sqrt(p.numel() / max(bench.elements, 1)))
        for p, norm in zip(bench.parameters, bench.norms, strict=True)
    }
    rows = []
    for (name, gemm, recipe), look in looks.items():
        weight = getattr(bench.trial.layers[name], "weight", None)
        if gemm == "wgrad" and id(weight) in shares:
            norm, share = shares[id(weight)]
            gradient = _relative(math.sqrt(look.error), norm, most=1.0) * share
        else:
            gradient = look.output
        loss = _relative(abs(look.loss), abs(bench.loss)) if gemm == "fprop" else 0.0
        damages = math.hypot(loss, gradient), loss, gradient
        rows.append(Damage(name, gemm, recipe, *damages, False, look.output, look.operands))
    rows += [
        Damage(name, gemm, recipe, math.inf, math.inf, math.inf, False)
        for name, layer in bench.trial.layers.items()
        if not isinstance(layer, Linear)
        for recipe in recipes
        for gemm in _gemms_in_fp8(recipe.linear)
    ]
    return rows


def _measure_worst(rows: Sequence[Damage], bench: _Bench, runs: int) -> list[Damage]:
    """Measure at most ``runs`` of the worst rows, and scale the other estimates to match them."""
    order = sorted(range(len(rows)), key=lambda index: -rows[index].damage)
    due = [i for i in order if rows[i].gemm != "wgrad" or rows[i].output is None][:runs]
    done = list(rows)
    ratios: dict[tuple[str, Recipe], list[float]] = {}
    for index in due:
        before = rows[index]
        done[index] = after = bench.run_alone(before)
        if 0 < before.gradient < math.inf:
            alike = ratios.setdefault((before.gemm, before.recipe), [])
            alike.append(after.gradient / before.gradient)
    for index, row in enumerate(done):
        factors = ratios.get((row.gemm, row.recipe))
        if factors and not row.measured:
            gradient = row.gradient * statistics.median(factors)
            done[index] = replace(row, gradient=gradient, damage=math.hypot(row.loss, gradient))
    return done
