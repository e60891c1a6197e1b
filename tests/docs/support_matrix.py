"""Try every recipe with every module, feature and kind of device, and write docs/support.md.

    python -m tests.docs.support_matrix

Devices: ``inspect.environment`` answers as on a GPU of each kind. Modules and features: each cell
is a run on the CPU, which takes the same decisions as a Hopper GPU, and a comparison.
"""

import contextlib
import copy
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

import float8lab
from float8lab import recipes
from float8lab.formats import E2M1
from float8lab.inspect.environment import environment
from float8lab.integrations import export, load_fp8
from float8lab.ops import declare

PAGE = Path(__file__).resolve().parents[2] / "docs" / "support.md"

RECIPES = tuple(type(recipe) for recipe in recipes.ALL.values())

DEVICES = {
    "CPU": None, "SM 8.0 (A100), not run": (8, 0), "SM 8.9 (L40S), not run": (8, 9),
    "SM 9.0 (H100, H200)": (9, 0), "SM 10.0 (B200), not run": (10, 0),
}  # fmt: skip
"""Compute capabilities."""

WIDTH = 64


def _attention_inputs() -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 8, 4, 16, requires_grad=True) for _ in range(3))


def _tokens() -> tuple[Tensor, ...]:
    return (torch.randn(2, 8, WIDTH, requires_grad=True),)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "`torch.nn.Linear`, converted": (lambda: nn.Linear(WIDTH, WIDTH), _tokens),
    "`Linear`": (lambda: float8lab.Linear(WIDTH, WIDTH, device="cpu"), _tokens),
    "`LayerNormLinear`": (lambda: float8lab.LayerNormLinear(WIDTH, WIDTH, device="cpu"), _tokens),
    "`LayerNormMLP`": (lambda: float8lab.LayerNormMLP(WIDTH, WIDTH, device="cpu"), _tokens),
    "`DotProductAttention`": (
        lambda: float8lab.DotProductAttention(4, 16, qkv_format="bshd"),
        _attention_inputs,
    ),
    "`MultiheadAttention`": (
        lambda: float8lab.MultiheadAttention(
            WIDTH, 4, fuse_qkv_params=True, attention_dropout=0.0, qkv_format="bshd", device="cpu"
        ),
        _tokens,
    ),
    "`TransformerLayer`": (
        lambda: float8lab.TransformerLayer(
            WIDTH, WIDTH, 4, fuse_qkv_params=True, hidden_dropout=0.0, attention_dropout=0.0,
            attn_input_format="bshd", device="cpu",
        ),
        _tokens,
    ),
}  # fmt: skip

Recipe = recipes.Recipe
Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]
Run = Callable[..., Tensor]


def build(case: Case, recipe: Recipe) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Build a module and its inputs, the same each time."""
    torch.manual_seed(0)
    module = case[0]()
    if type(module) is nn.Linear:
        float8lab.convert_to_float8(module, recipe)
    return module, case[1]()


def step(
    module: nn.Module, inputs: tuple[Tensor, ...], recipe: Recipe, run: Run | None = None
) -> list[Tensor]:
    """Output and all gradients of a forward and backward, by ``run(module, *inputs)`` if given."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with float8lab.autocast(recipe=recipe):
        y = run(module, *leaves) if run else module(*leaves)
    module.zero_grad()
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in (*leaves, *module.parameters()))]


def all_equal(results: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def count_gemms(case: Case, recipe: Recipe) -> str:
    """How many GEMMs of one forward and backward a Hopper GPU runs in FP8."""
    module, inputs = build(case, recipe)
    with float8lab.count_gemms() as counts:
        step(module, inputs, recipe)
    return f"{counts.fp8} of {counts.fp8 + counts.high_precision}"


# Features return True, False, or None if the feature does not apply to the module.
def attends_in_fp8(case: Case, recipe: Recipe) -> bool | None:
    module, inputs = build(case, recipe)
    if not any(isinstance(m, float8lab.DotProductAttention) for m in module.modules()):
        return None
    reference = step(copy.deepcopy(module), inputs, recipe)
    rounded = step(module, inputs, replace(recipe, fp8_dpa=True))
    return not torch.equal(reference[0], rounded[0])


def stores_weights(case: Case, recipe: Recipe) -> bool | None:
    torch.manual_seed(0)
    with float8lab.fp8_model_init(recipe=recipe):
        module = case[0]()
    stored = [p for p in module.parameters() if isinstance(p, float8lab.Float8Tensor)]
    if not stored:
        return None
    before = [p.dequantize() for p in stored]
    optimizer = float8lab.optim.MasterWeights(module.parameters(), torch.optim.SGD, lr=0.1)
    with float8lab.autocast(recipe=recipe):
        module(*case[1]()).square().sum().backward()
    optimizer.step()
    assert all(p.qdata.element_size() == 1 for p in stored)
    return not any(torch.equal(a, p.dequantize()) for a, p in zip(before, stored, strict=True))


def compiles(case: Case, recipe: Recipe) -> bool | None:
    module, inputs = build(case, recipe)
    if type(module) is not float8lab.Linear or case is MODULES["`torch.nn.Linear`, converted"]:
        return None  # tests/nn/ compiles the others, which takes long
    eager = step(copy.deepcopy(module), inputs, recipe)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    return all_equal(step(module, inputs, recipe, lambda _, *x: compiled(*x)), eager)


def checkpoints(case: Case, recipe: Recipe) -> bool:
    module, inputs = build(case, recipe)
    reference = step(copy.deepcopy(module), inputs, recipe)
    return all_equal(step(module, inputs, recipe, float8lab.checkpoint), reference)


def keeps_casts(case: Case, recipe: Recipe) -> bool | None:
    module, inputs = build(case, recipe)
    if not list(module.parameters()):
        return None
    reference = copy.deepcopy(module)
    return all(
        all_equal(
            step(module, inputs, recipe, functools.partial(_microbatch, first)),
            step(reference, inputs, recipe),
        )
        for first in (True, False)
    )


def _microbatch(first: bool, module: nn.Module, x: Tensor) -> Tensor:
    return module(x, is_first_microbatch=first)


def calibrates(case: Case, recipe: Recipe) -> bool | None:
    module, inputs = build(case, recipe)
    if not recipe.linear.delayed or not list(module.parameters()):
        return None
    with float8lab.autocast(enabled=False, calibrating=True, recipe=recipe):
        module(*inputs)
    return bool(float8lab.nn.ScalingState(module).state_dict())


def exports(format: str, recipe: Recipe) -> bool:
    """Export and load all modules with weights, as one model."""
    model, frozen, dequantized = (nn.ModuleDict() for _ in range(3))
    for number, case in enumerate(MODULES.values()):
        module, inputs = build(case, recipe)
        step(module, inputs, recipe)  # delayed scaling needs its scales
        model[str(number)] = module
        frozen[str(number)], dequantized[str(number)] = case[0](), case[0]()
    with tempfile.TemporaryDirectory() as directory:
        try:
            export(model, f"{directory}/out", format, recipe=recipe)
        except ValueError:
            return False  # the format has no layout for the recipe's blocks
        load_fp8(f"{directory}/out", frozen)
        load_fp8(f"{directory}/out", dequantized, dequantize=True)
    parameters, weights = dict(model.named_parameters()), dict(dequantized.named_parameters())
    stored = {n: p for n, p in frozen.named_parameters() if isinstance(p, float8lab.Float8Tensor)}
    assert all(torch.equal(p.dequantize(), weights[name]) for name, p in stored.items())
    floor = 15 if recipe.linear.w.element_dtype == E2M1 else 30
    assert all(float8lab.inspect.compare(p, parameters[n]).sqnr > floor for n, p in stored.items())
    return len(stored) == sum(p.dim() == 2 for p in parameters.values())


FEATURES: dict[str, Callable[[Case, Recipe], bool | None]] = {
    "FP8 attention, `fp8_dpa=True`": attends_in_fp8,
    "weights stored in FP8, trained by `MasterWeights`": stores_weights,
    "`torch.compile(fullgraph=True)` of `Linear`": compiles,
    "`checkpoint`": checkpoints,
    "`is_first_microbatch`": keeps_casts,
    "`autocast(calibrating=True)`": calibrates,
}

FORMATS = ("block-fp8", "compressed-tensors", "float8lab")


def try_feature(feature: Callable[[Case, Recipe], bool | None], recipe: Recipe) -> str:
    """Return ``yes``, ``no``, ``-``, or the modules that differ."""
    results = {name: feature(case, recipe) for name, case in MODULES.items()}
    applicable = {name: result for name, result in results.items() if result is not None}
    if not applicable:
        return "-"
    failing = [name for name, result in applicable.items() if not result]
    if len(failing) == len(applicable):
        return "no"
    return "yes" if not failing else f"not {', '.join(failing)}"


@contextlib.contextmanager
def simulated_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Let torch report a GPU of this capability."""
    declare._capability_of.cache_clear()
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        yield
    declare._capability_of.cache_clear()


def support(device: str) -> tuple[dict[str, str], list[str]]:
    """How each recipe runs on a kind of device, and why some recipes do not run in FP8."""
    capability = DEVICES[device]
    if capability is None:
        rows = environment("cpu").support
    else:
        with simulated_gpu(capability):
            rows = environment("cuda").support
    reasons = [f"{row.name}: {row.reason}" for row in rows if row.reason]
    return {row.name: row.status for row in rows}, reasons


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


PAGE_TEXT = """\
# What runs where

<!-- Made by `python -m tests.docs.support_matrix`; do not edit. -->

## Recipes and devices

The table shows what `python -m float8lab env` says on each device. *Native*: all three GEMMs of a
linear layer run in FP8. *Emulated*: operands are quantized to the same bytes, then dequantized and
multiplied in high precision. *High precision*: torch's attention runs, which does not store the
scores, and float8lab warns once. The tests run on CPUs and on Hopper GPUs (H200). The other columns
show what float8lab decides on such a GPU; it was not run there.

An A100, V100 or T4 has no FP8, and Triton does not support e4m3 there. PyTorch does the casts, on
the GPU, and torch's GEMMs multiply the dequantized operands. Weights stored in FP8 still take one
byte. Ops that cast nothing, such as norms, routers and permutations, run by the same kernels as on
Hopper. A CUDA graph cannot record casts of experts' rows there, because these casts wait for the
GPU. One test covers this case on a Hopper GPU that reports itself as SM 8.0.

On SM 10, `MXFP8BlockScaling` runs its GEMMs by `torch.nn.functional.scaled_mm`; experts are
emulated. Without such a GPU, tests check the position of each scale, that torch accepts the
operands of all three GEMMs, and that the kernels compile for it.

{devices}

Why:

{reasons}

## Releases of torch

float8lab supports torch from 2.11 on. Continuous integration runs 2.13;
`python3 dev.py test --torch VERSION` runs the same checks with another release, in a separate
environment.

| torch | checks on a CPU |
| --- | --- |
| 2.11 | passed |
| 2.13 | passed |
| 2.15 | passed on 2026-11-29; registers of Triton 3.9 are not checked |

## Releases of other libraries

`python3 dev.py test --latest` runs the integration tests with the newest releases of these
libraries. They passed on 2026-11-26 with torch 2.13: accelerate 1.15.0, compressed-tensors 0.20.0,
lightning 2.6.6, mlflow 3.17.2, onnx 1.23.2, onnxruntime 1.32.0, onnxscript 0.7.2, peft 0.21.2,
safetensors 0.8.0, tensorboard 2.21.0, transformers 5.24.0, trl 1.16.0, wandb 0.31.0.

## Recipes and modules

Each cell says how many of the linear layers' GEMMs a Hopper GPU runs in FP8, in one forward and
backward pass.

{modules}

## Recipes and features

*Yes*: the feature ran with every module above that can have it, and the result was right: the same
bits as without the feature (`torch.compile`, `checkpoint`, `is_first_microbatch`), weights of one
byte that an optimizer changes, a checkpoint that loads as it was written. *No*: the combination
raises an error that says why. A dash: the feature does not apply.

{features}

For several processes see [distributed](distributed.md), for CUDA graphs and compiling the other
modules [compile](compile.md), for ONNX [around the layers](services.md), and for ops on a
`Float8Tensor` the [dispatch table](dispatch_table.md).
"""


def render() -> str:
    """Return the text of the page."""
    names = [kind.__name__ for kind in RECIPES]
    columns = [f"`{name}`" for name in names]
    devices = {device: support(device) for device in DEVICES}
    row_names = [*names, "FP8 attention"]
    modules = {name: case for name, case in MODULES.items() if "DotProduct" not in name}
    features = [
        [name, *(try_feature(feature, kind()) for kind in RECIPES)]
        for name, feature in FEATURES.items()
    ]
    features += [
        [
            f'`export` as `"{format}"`, `load_fp8`',
            *("yes" if exports(format, kind()) else "no" for kind in RECIPES),
        ]
        for format in FORMATS
    ]
    return PAGE_TEXT.format(
        devices=table(
            ["recipe", *DEVICES],
            [
                [title, *(statuses[name] for statuses, _ in devices.values())]
                for title, name in zip([*columns, "FP8 attention"], row_names, strict=True)
            ],
        ),
        reasons="\n".join(
            f"- {device}: {'; '.join(group_by_reason(why))}"
            for device, (_, why) in devices.items()
            if why
        ),
        modules=table(
            ["module", *columns],
            [
                [name, *(count_gemms(case, kind()) for kind in RECIPES)]
                for name, case in modules.items()
            ],
        ),
        features=table(["feature", *columns], features),
    )


def group_by_reason(reasons: Sequence[str]) -> list[str]:
    """Names with one reason together.

    >>> group_by_reason(["A: old", "B: old", "C: new"])
    ['old (A, B)', 'new (C)']
    """
    names_by_reason: dict[str, list[str]] = {}
    for reason in reasons:
        name, text = reason.split(": ", 1)
        names_by_reason.setdefault(text, []).append(name)
    return [f"{text} ({', '.join(recipe_names)})" for text, recipe_names in names_by_reason.items()]


if __name__ == "__main__":
    PAGE.write_text(render())
