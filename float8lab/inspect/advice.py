"""Find whether FP8 pays, layer by layer and for a step.  M tokens, N out features, K in features.

A *step* is a forward and a backward pass. The CPU queues the work of the GPU and runs ahead of it,
so a step takes the sum of its GPU times or of its CPU times, whichever is more. The same holds for
a single layer.

The step is measured in high precision. Each *case*, which is a layer of one kind and size with one
kind of input, is measured separately, in high precision and in FP8. It is measured on copies of the
layer with a single backward pass, since starting one costs as much CPU time as a layer. The step in
FP8 is then predicted: its layers take their FP8 times, and the time outside of layers stays.

Layers with the same input share its cast (``nn/casts.py``); the time that the second layer saves by
this is measured, too.
"""

from __future__ import annotations

import copy
import json
import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from float8lab.arguments import check_callables, check_choice, check_module
from float8lab.inspect.memory import OUTPUT, saved_by_layer
from float8lab.inspect.text import Grid, Printed
from float8lab.inspect.timing import CudaTimer, Timer, Times
from float8lab.inspect.trial import (
    LossFn,
    Trial,
    on_trial,
    refuse_dtensors,
    start_anew,
    unambiguous,
    without_reduction,
)
from float8lab.nn.casts import SHARED_CAST
from float8lab.nn.convert.walk import matrix_shapes, walk_model
from float8lab.nn.count import GEMM_OPS
from float8lab.nn.linear import Linear
from float8lab.recipes.auto import Prediction, choose, predict
from float8lab.recipes.cost import MODES, Parts
from float8lab.recipes.recipe import Float8CurrentScaling, Recipe, check_recipe
from float8lab.recipes.region import Region, inside

__all__ = ["Advice", "LayerAdvice", "advise"]

_COPIES = 8
_COPIED_ELEMENTS = 2**28
"""Most elements in all copies of a layer together. A large layer needs no copies, since its GPU
time exceeds its CPU time."""
_MOST_TOKENS = 2**24
_TIMES = ("high_gpu", "high_cpu", "quantize", "gemm", "cpu")


@dataclass(frozen=True)
class LayerAdvice:
    """Seconds of one layer in a step, forward and backward, and the bytes that FP8 saves in it."""

    name: str
    M: int
    K: int
    N: int
    """For an MLP or experts, K and N are those of the first GEMM; the times include both GEMMs."""
    calls: int
    """The number of calls in a forward pass; the times are sums over all these calls."""
    high_gpu: float
    high_cpu: float
    """CPU time in high precision; ``high_gpu`` is the GPU time."""
    quantize: float
    """GPU time in FP8 outside GEMMs: casts, and the norm and activation of a fused module."""
    gemm: float
    cpu: float
    """CPU time in FP8."""
    break_even: int | None
    """The number of tokens from which FP8 is faster for this layer; None if it never is."""
    saved: int
    """Bytes by which FP8 lowers the memory that is kept from forward to backward, less the bytes
    that FP8 weights add; it is negative if the input is kept in any case, for example by an
    activation function."""

    @property
    def high(self) -> float:
        """Seconds in high precision: GPU or CPU time, whichever is more."""
        return max(self.high_gpu, self.high_cpu)

    @property
    def fp8(self) -> float:
        """Seconds in FP8: GPU or CPU time, whichever is more."""
        return max(self.quantize + self.gemm, self.cpu)

    @property
    def ratio(self) -> float:
        """How many times faster FP8 is for this layer."""
        return self.high / self.fp8 if self.fp8 else 1.0


@dataclass(frozen=True, repr=False)
class Advice(Printed):
    """The result of ``advise``; ``print`` it for a table.

    Attributes:
        layers: the layers, in the model's order.
        recipe: the FP8 recipe that was compared with high precision.
        measured: whether the times were measured on this machine's GPU; else they are modelled.
        device: the device that the times hold for.
        step: predicted seconds of a step in ``"high precision"``, ``"FP8"`` and ``"advised"``,
            where only layers that pay run in FP8. Modelled steps have linear layers only.
        saved: bytes by which FP8 lowers the memory kept from forward to backward in a step.
        overrides: ``overrides`` for ``convert_to_float8``, with None for layers that do not pay.
    """

    layers: tuple[LayerAdvice, ...]
    recipe: Recipe
    measured: bool
    device: str
    step: dict[str, float]
    saved: int
    overrides: dict[str, Recipe | None]

    def to_json(self) -> str:
        """Return the advice as JSON text, in seconds and bytes."""
        readable = {
            "layers": [vars(layer) for layer in self.layers],
            "overrides": {name: repr(recipe) for name, recipe in self.overrides.items()},
        }
        return json.dumps(vars(self) | readable, default=repr)

    def summary(self) -> str:
        """Return how many layers pay, and the predicted times of steps."""
        steps = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in self.step.items())
        measured_part = "step" if self.measured else "linear layers of a step"
        in_fp8 = len(self.layers) - sum(r is None for r in self.overrides.values())
        return (
            f"{in_fp8} of {len(self.layers)} layers pay; "
            f"{round(self.saved / 1e6, 1) + 0.0} MB less kept from forward to backward\n"
            f"{measured_part}, predicted: {steps}\n"
            f"{self.recipe}, {'measured on' if self.measured else 'modelled for'} {self.device}"
        )

    def tables(self, limit: int | None = 40) -> list[Grid]:
        """Return a table with a row for each layer."""
        columns = ("M", "K", "N", "high ms", "CPU", "FP8 quantize", "GEMM", "CPU", "x", "pays from")
        rows = [
            (
                layer.name or "(model)", *map(str, (layer.M, layer.K, layer.N)),
                *(f"{1e3 * getattr(layer, time):.3f}" for time in _TIMES), f"{layer.ratio:.2f}",
                "never" if layer.break_even is None else str(layer.break_even),
                str(round(layer.saved / 1e6, 1) + 0.0),  # 0.0 in place of -0.0
            )
            for layer in self.layers
        ]  # fmt: skip
        return [Grid("Layers", ("layer", *columns, "MB less"), rows, left=1).first(limit)]


def advise(
    model: nn.Module,
    batch: object,
    recipe: Recipe | None = None,
    *,
    loss_fn: LossFn | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    exclude: Sequence[str] = (),
    mode: str = "eager",
) -> Advice:
    """Find where FP8 pays, by times of this model on this GPU.

    On a CUDA device everything is measured: each layer, a step in high precision and a step with
    all layers in FP8, to which the layers' FP8 times are scaled. On other devices, meta included,
    times are modelled for an H200 by the rates of ``recipes.Auto``, and the report says so. The
    model is left as it was. A recomputation by activation checkpointing is not counted as FP8.

    Args:
        model: a model with unsharded parameters, on the device and in the dtype it will run in.
        batch: an example of the real size: a tensor, or a tuple or dict of arguments.
        recipe: None is ``Float8CurrentScaling()``, as in ``convert_to_float8``.
        loss_fn: ``loss_fn(model, batch)`` returns the loss; None takes the output's ``loss``, or
            the mean of its squares.
        filter_fn: as in ``convert_to_float8``.
        exclude: as in ``convert_to_float8``.
        mode: how the model will run, as in ``recipes.Auto``: ``"eager"``, in a ``"cuda_graph"``,
            which takes no CPU time, or, if times are modelled, also ``"compile"``.

    Raises:
        ValueError: an unknown mode, or, where times are modelled, a recipe whose speed is not
            known.
        NotImplementedError: ``"compile"`` on a GPU; sharded parameters.

    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(torch.nn.Linear(8192, 8192, bias=False))
    >>> found = float8lab.inspect.advise(model, torch.empty(16384, 8192, device="meta"))
    >>> found.measured, found.overrides, found.layers[0].ratio > 1.3
    (False, {}, True)
    """
    check_module("model", model)
    check_recipe("recipe", recipe)
    check_callables(("model", "batch"), loss_fn=loss_fn)
    check_choice("mode", mode, MODES)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    is_measured, recipe = device.type == "cuda", recipe or Float8CurrentScaling()
    if is_measured and mode == "compile":
        raise NotImplementedError(
            "mode must be 'eager' or 'cuda_graph' where times are measured; got 'compile'. "
            "Pass a model on the meta device to have them modelled."
        )
    timer = CudaTimer(device) if is_measured else None
    return advise_by(timer, model, batch, recipe, loss_fn, filter_fn, exclude, mode)


def advise_by(
    timer: Timer | None, model: nn.Module, batch: object, recipe: Recipe, loss_fn: LossFn | None,
    filter_fn: Callable[[nn.Module, str], bool] | None, exclude: Sequence[str], mode: str,
) -> Advice:  # fmt: skip
    """Run ``advise`` with times by ``timer``, or with modelled times if ``timer`` is None."""
    refuse_dtensors(model, "advise")
    timer = _without_cpu(timer) if timer is not None and mode == "cuda_graph" else timer
    with on_trial(model, batch, loss_fn) as trial:
        trial.convert(filter_fn, exclude)
        calls, saved, saved_in_all = _look(trial, recipe)
        all_cases = [case for layer_cases in calls.values() for case in layer_cases]
        beyond_layers = Times(0.0, 0.0)
        if timer is None:
            cases = {case: _modelled(case, recipe, mode) for case in all_cases}
        else:
            step = timer(trial.step)
            cases = {case: _measured(case, recipe, timer) for case in dict.fromkeys(all_cases)}
            beyond_layers = Times(
                max(0.0, step.gpu - sum(cases[case].high_precision.gpu for case in all_cases)),
                max(0.0, step.cpu - sum(cases[case].high_precision.cpu for case in all_cases)),
            )
            trial.use(dict.fromkeys(trial.layers, recipe))
            fp8_step = timer(trial.step)
            trial.use({})
            all_fp8 = [cases[case].fp8 for case in all_cases]
            cases = _calibrated(cases, all_fp8, fp8_step, beyond_layers)
    layers = tuple(
        _row(name, layer_cases, cases, saved.get(name, 0))
        for name, layer_cases in calls.items()
        if layer_cases
    )
    predictions: list[Prediction] = [
        {None: Parts(0.0, a.high_gpu, a.high_cpu), recipe: Parts(a.quantize, a.gemm, a.cpu)}
        for a in layers
    ]
    predictions.append({None: Parts(0.0, *beyond_layers)})
    chosen = choose(predictions)
    choices = {layer.name: choice for layer, choice in zip(layers, chosen[:-1], strict=True)}
    unconverted = {name: choice for name, choice in choices.items() if choice is None}
    return Advice(
        layers=layers,
        recipe=recipe,
        measured=timer is not None,
        device="an H200, from rates measured there" if timer is None else _describe(model),
        step={
            "high precision": _total(predictions, [None] * len(predictions)),
            "FP8": _total(predictions, [*[recipe] * len(layers), None]),
            "advised": _total(predictions, chosen),
        },
        saved=saved_in_all,
        overrides=unambiguous(unconverted, {**dict.fromkeys(trial.skipped), **choices}),
    )


def _calibrated(
    cases: dict[_Case, _Times], all_fp8: Sequence[Parts], fp8_step: Times, beyond_layers: Times
) -> dict[_Case, _Times]:
    """Scale the FP8 times so that they add up to ``fp8_step`` together with ``beyond_layers``."""
    # This is needed because a layer that is measured alone finds its code in the CPU's caches, but
    # does not find its data in the GPU's.
    gpu = sum(times.gpu for times in all_fp8)
    cpu = sum(times.cpu for times in all_fp8)
    gpu_factor = max(0.0, fp8_step.gpu - beyond_layers.gpu) / gpu if gpu else 1.0
    cpu_factor = max(0.0, fp8_step.cpu - beyond_layers.cpu) / cpu if cpu else 1.0
    factors = Parts(gpu_factor, gpu_factor, cpu_factor)
    return {
        case: measured._replace(fp8=Parts(*map(operator.mul, factors, measured.fp8)))
        for case, measured in cases.items()
    }


def _total(predictions: Sequence[Prediction], chosen: Sequence[Recipe | None]) -> float:
    times = [prediction[recipe] for prediction, recipe in zip(predictions, chosen, strict=True)]
    return max(sum(seconds.gpu for seconds in times), sum(seconds.cpu for seconds in times))


def _describe(model: nn.Module) -> str:
    device = next(p.device for p in model.parameters())
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _without_cpu(timer: Timer) -> Timer:
    """Return a timer for work in a CUDA graph, which takes no CPU time."""
    return lambda fn: timer(fn)._replace(cpu=0.0)


# Cases: the layers and inputs of a step.


@dataclass(frozen=True)
class _Case:
    """A class of layers with inputs that all take the same time; ``layer`` is one of them."""

    key: tuple[object, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_dx: bool
    autocast: torch.dtype | None
    shares: bool
    """Whether the linear layer before this one had the same input, so that both share its cast."""
    layer: nn.Module = field(compare=False)
    more_inputs: Sequence[object] = field(compare=False)
    """The layer's arguments besides its input, such as the routing of tokens to experts."""

    @property
    def tokens(self) -> int:
        return torch.Size(self.shape[:-1]).numel()

    @property
    def weights(self) -> list[tuple[int, ...]]:
        """Weight shapes: ``(N, K)`` of each GEMM, or ``(E, N, K)`` for experts."""
        candidates = walk_model(self.layer).candidates
        return next((matrix_shapes(c) for c in candidates if c.layer is self.layer), [])

    @property
    def experts_of_a_token(self) -> int:
        """How many experts each token goes to: the rows that the GEMMs have for it."""
        routings = [x.shape[1] for x in self.more_inputs if _is_routing(x, self.tokens)]
        return routings[0] if routings else 1

    def with_fewer(self, tokens: int) -> _Case:
        """Return this case with fewer tokens, of which each expert gets the same share."""
        arguments = [_shorten(value, self.tokens, tokens) for value in self.more_inputs]
        shape = (tokens, self.shape[-1])
        return replace(self, shape=shape, shares=False, more_inputs=arguments)


def _is_routing(x: object, tokens: int) -> TypeGuard[Tensor]:
    """Return whether an argument has the numbers of the experts that each token goes to."""
    return (
        isinstance(x, Tensor)
        and not (x.is_floating_point() or x.dtype == torch.bool)
        and x.ndim == 2
        and x.shape[0] == tokens
    )


def _shorten(value: object, tokens: int, fewer: int) -> object:
    if isinstance(value, Tensor) and value.ndim and value.shape[0] == tokens:
        return value[:fewer]
    if isinstance(value, Tensor) and not value.is_floating_point():
        return value * fewer // max(tokens, 1)
    if isinstance(value, (list, tuple)) and all(isinstance(size, int) for size in value):
        return [size * fewer // max(tokens, 1) for size in value]
    return value


def _look(trial: Trial, recipe: Recipe) -> tuple[dict[str, list[_Case]], dict[str, int], int]:
    """Run the model; return each layer's calls, and the bytes saved by FP8 by layer and in all."""
    calls: dict[str, list[_Case]] = {name: [] for name in trial.layers}
    last: list[tuple[object, int]] = []
    plan = recipe.linear
    shares = not plan.delayed and plan.fprop is not None and plan.wgrad is not None

    def look(name: str, layer: nn.Module, x: Tensor, y: Tensor) -> None:
        shared = False
        if isinstance(layer, Linear) and x.grad_fn is not None:
            shared = shares and bool(last) and last[0][0] is x and last[0][1] == x._version
            last[:] = [(x, x._version)]
        kind = x.device.type
        has_autocast = kind != "meta" and torch.is_autocast_enabled(kind)
        case = _Case(
            key=(type(layer), repr(layer), *((p.shape, p.dtype) for p in layer.parameters())),
            shape=tuple(x.shape),
            dtype=x.dtype,
            needs_dx=x.requires_grad,
            autocast=torch.get_autocast_dtype(kind) if has_autocast else None,
            shares=shared,
            layer=layer,
            more_inputs=[o.detach() if isinstance(o, Tensor) else o for o in trial.others],
        )
        calls[name].append(case)

    trial.rewind()
    with trial.looking(look):
        high_saved = saved_by_layer(trial)
    last.clear()
    trial.rewind()
    trial.use(dict.fromkeys(trial.layers, recipe))
    fp8 = saved_by_layer(trial)
    trial.use({})
    saved = {name: high_saved.get(name, 0) - fp8.get(name, 0) for name in {**high_saved, **fp8}}
    return calls, saved, sum(size for name, size in saved.items() if name != OUTPUT)


# Times of a case.


class _Times(NamedTuple):
    high_precision: Times | Parts
    fp8: Parts
    break_even: int | None


def _modelled(case: _Case, recipe: Recipe, mode: str) -> _Times:
    def times_for(tokens: int) -> tuple[Parts, Parts]:
        rows = tokens * case.experts_of_a_token
        times = predict(case.weights, [recipe], tokens=rows, mode=mode)
        return times[None], times[recipe]

    return _Times(*times_for(case.tokens), _break_even(times_for))


def _break_even(times: Callable[[int], tuple[Times | Parts, Times | Parts]]) -> int | None:
    """Find the fewest tokens for which FP8 is no slower; None if not even ``_MOST_TOKENS`` suffice.

    ``times`` maps a number of tokens to the times in high precision and in FP8.
    """

    def pays(tokens: int) -> bool:
        high_time, fp8 = times(tokens)
        return max(fp8.gpu, fp8.cpu) <= max(high_time.gpu, high_time.cpu)

    most = 1
    while not pays(most):
        most *= 2
        if most > _MOST_TOKENS:
            return None
    between = range(most // 2 + 1, most)
    return between.start + bisect_left(between, True, key=pays)


def _measured(case: _Case, recipe: Recipe, timer: Timer) -> _Times:
    high_time, fp8 = (_Bench(case, choice).time(timer) for choice in (None, recipe))
    gemm = _Bench(case, recipe).time_gemms(timer)
    saving = _Bench(case, recipe).time_shared_cast(timer) if case.shares else Times(0.0, 0.0)
    fewer = max(1, case.tokens // 4)
    small_case = case.with_fewer(fewer)
    small_high, small_fp8 = (_Bench(small_case, choice).time(timer) for choice in (None, recipe))

    def line(tokens: int, full: Times, small: Times) -> Times:
        """Extrapolate GPU time linearly from two times; CPU time does not depend on tokens."""
        slope = (full.gpu - small.gpu) / (case.tokens - fewer) if case.tokens > fewer else 0.0
        return Times(max(0.0, full.gpu + slope * (tokens - case.tokens)), full.cpu)

    quantize = max(0.0, fp8.gpu - saving.gpu - gemm)
    return _Times(
        high_time,
        Parts(quantize, gemm, max(0.0, fp8.cpu - saving.cpu)),
        _break_even(
            lambda tokens: (line(tokens, high_time, small_high), line(tokens, fp8, small_fp8))
        ),
    )


class _Bench:
    """Copies of a layer, each with its own input; all outputs get the same gradient."""

    def __init__(self, case: _Case, recipe: Recipe | None) -> None:
        self.case, self.recipe = case, without_reduction(recipe)
        elements = sum(math.prod(w) + case.tokens * (w[-1] + w[-2]) for w in case.weights)
        self.count = max(1, min(_COPIES, _COPIED_ELEMENTS // max(elements, 1)))
        self.layers: list[nn.Module] = [copy.deepcopy(case.layer) for _ in range(self.count)]
        for layer in self.layers:
            start_anew(layer, recipe)
        device = next(case.layer.parameters()).device
        self.inputs = [
            torch.randn(case.shape, device=device, dtype=case.dtype).requires_grad_(case.needs_dx)
            for _ in self.layers
        ]
        with torch.no_grad():
            y = self._call(self.layers[0], self.inputs[0])
        self.gradient = torch.randn_like(y)
        self.sources = [
            [t for t in (x, *layer.parameters()) if t.requires_grad]
            for x, layer in zip(self.inputs, self.layers, strict=True)
        ]

    def _call(self, layer: nn.Module, x: Tensor) -> Tensor:
        case = self.case
        with torch.autocast(x.device.type, case.autocast, enabled=case.autocast is not None):
            y = layer(x, *case.more_inputs)
        return y[0] if isinstance(y, tuple) else y

    def run(self, count: int | None = None) -> None:
        """Run forward and backward of the first ``count`` copies, or of all copies."""
        # One region advances the delayed scales of all calls together, as in a converted model.
        region = Region() if self.recipe is not None and self.recipe.linear.delayed else None
        with inside(region):
            outputs = [
                self._call(layer, x)
                for layer, x in zip(self.layers[:count], self.inputs, strict=False)
            ]
        if region is not None:
            region.close()
        if sources := [t for inputs in self.sources[:count] for t in inputs]:
            torch.autograd.grad(outputs, sources, [self.gradient] * len(outputs), allow_unused=True)

    def time(self, timer: Timer) -> Times:
        """Measure the time of forward and backward of one layer."""
        return Times(*(seconds / self.count for seconds in timer(self.run)))

    def time_gemms(self, timer: Timer) -> float:
        """Measure GPU seconds of the GEMMs of one layer by repeating them on recorded operands."""
        with _Recorded() as recorded:
            self.run(1)

        @torch.no_grad()
        def repeat() -> None:
            for op, args, kwargs in recorded.calls:
                op(*args, **kwargs)

        return timer(repeat).gpu if recorded.calls else 0.0

    def time_shared_cast(self, timer: Timer) -> Times:
        """Measure the time that a layer saves if the layer before it has cast the same input."""
        layer = self.layers[0]
        x = self.inputs[0].detach().requires_grad_().clone()  # casts of leaves are not shared

        def forward(calls: int) -> None:
            SHARED_CAST.last = None
            for _ in range(calls):
                self._call(layer, x)

        first, both_calls = (timer(partial(forward, calls)) for calls in (1, 2))
        SHARED_CAST.last = None
        return Times(*(max(0.0, 2 * a - b) for a, b in zip(first, both_calls, strict=True)))


class _Recorded(TorchDispatchMode):
    """A mode that records the GEMMs that reach the dispatcher, with their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., object], tuple[object, ...], dict[str, object]]] = []

    def __torch_dispatch__(
        self, op: Callable[..., object], types: object, args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:  # fmt: skip
        if op in GEMM_OPS:
            self.calls.append((op, args, kwargs or {}))
        return op(*args, **(kwargs or {}))


def _row(
    name: str, calls: Sequence[_Case], cases: Mapping[_Case, _Times], saved: int
) -> LayerAdvice:
    results = [cases[case] for case in calls]
    *_, N, K = calls[0].weights[0]
    sums = (sum(getattr(t.high_precision, unit) for t in results) for unit in Times._fields)
    fp8 = Parts(*map(sum, zip(*(t.fp8 for t in results), strict=True)))
    sizes = calls[0].tokens, K, N, len(calls)
    return LayerAdvice(name, *sizes, *Times(*sums), *fp8, results[0].break_even, saved)
