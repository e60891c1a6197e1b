"""``load_fp8`` loads a checkpoint with FP8 or 4-bit weights into a model, stored or dequantized.

Names, shapes, dtypes and scales are checked before the model changes, since they are known without
reading weights. Weights are then read one at a time, each in pieces.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from float8lab.arguments import check_flags, check_module, check_path
from float8lab.checkpoints import experts
from float8lab.checkpoints.item import Item
from float8lab.checkpoints.layouts import recognize
from float8lab.checkpoints.opening import open_checkpoint
from float8lab.checkpoints.replacing import leftovers
from float8lab.checkpoints.source import CheckpointError, CheckpointSource, boxes, listed
from float8lab.formats import E4M3, HIGH_PRECISION_DTYPES, Spec
from float8lab.inspect.text import Printed
from float8lab.integrations.checkpoint.quantizers import without_quantizer
from float8lab.integrations.checkpoint.saved_names import saved_names
from float8lab.integrations.checkpoint.weights import GemmWeight, gemm_weights, specs_of_parameters
from float8lab.nn.convert import convert_to_float8
from float8lab.nn.convert.other_experts import routers
from float8lab.nn.convert.report import conversion_report, explain_layer
from float8lab.nn.convert.walk import recipes_of, walk_model
from float8lab.nn.precision import Precision, W, X, precisions
from float8lab.recipes.recipe import ALL, DelayedScaling, Float8CurrentScaling, Recipe
from float8lab.tensor import Float4Tensor, Float8Tensor
from float8lab.tensor.dtensor import is_dtensor
from float8lab.tensor.float4_tensor import pack

__all__ = ["LoadReport", "load_fp8"]

_RECIPES = {
    (recipe.linear.w.block, recipe.linear.w.element_dtype): recipe
    for recipe in ALL.values()
    if not recipe.linear.delayed
}
"""The recipe that uses the bytes of a stored weight unchanged, by its blocks and elements."""
_PART = re.compile(r".*-(\d{5})-of-(\d{5})\.safetensors")
_COMPUTED = ("rotary_emb.inv_freq", "_extra_state", "input_global_scale")
"""Suffixes of checkpoint tensors that models compute, or that only other libraries use."""
_few = functools.partial(listed, most=8)


@dataclass(frozen=True, repr=False)
class LoadReport(Printed):
    """The result of ``load_fp8``; ``print`` it."""

    path: str
    fp8: Mapping[str, str]
    """The format of each parameter that is now stored in FP8, by name."""
    dequantized: tuple[str, ...]
    """Parameters that are quantized in the checkpoint and in high precision in the model."""
    plain: tuple[str, ...]
    """All other tensors that were loaded."""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    fp4: Mapping[str, str] = field(default_factory=dict)
    """The format of each parameter that is now stored in packed 4 bits, by name."""

    def summary(self) -> str:
        """Say what was loaded, and what is missing."""
        packed = f"{len(self.fp4)} in 4 bits, " if self.fp4 else ""
        first = (
            f"{self.path}: {len(self.fp8)} weights in FP8, {packed}{len(self.dequantized)} "
            f"dequantized, {len(self.plain)} other tensors"
        )
        kinds = {"missing": self.missing, "unexpected": self.unexpected}
        lines = [f"{kind}: {_few(names)}" for kind, names in kinds.items() if names]
        return "\n".join([first, *lines, *self.notes])


def load_fp8(
    source: str | Path | Mapping[str, Tensor],
    model: nn.Module,
    *,
    dequantize: bool = False,
    strict: bool = True,
) -> LoadReport:
    """Load a checkpoint with weights in FP8 or packed 4 bits into a model.

    Weights of linear layers become FP8-stored, one byte an element. They hold the bytes and scales
    of the checkpoint with ``requires_grad`` False, for inference or as the frozen base of adapters.
    Unless the layers have a recipe already, they run in FP8 by the recipe that has these blocks.
    Backward computes the gradient of the input. A scale of activations in the checkpoint becomes
    the layer's delayed scale, which evaluation does not change.

    Experts are loaded in the model's layout: one by one, or stacked ``[experts, rows, columns]``
    like ``gate_up_proj`` and ``down_proj`` of Transformers 5. A stack becomes FP8-stored, too.

    Weights in NVFP4 or MXFP4 become ``Float4Tensor``s, which hold the packed bytes of the
    checkpoint, are frozen and are dequantized on use. Their layers run in high precision.

    Names are the model's. Everything that is known without reading weights is checked first, and
    the model is unchanged if a check fails.

    Args:
        source: a path as in ``float8lab.inspect.checkpoint``, in any layout that function knows
            (docs/checkpoints.md), or a state dict.
        model: plain or converted, with or without weights stored in FP8; parameters on the meta
            device are moved to the default device.
        dequantize: load all values in the dtypes of the model's parameters instead, for training
            or other libraries. No layer is converted then.
        strict: require every tensor of the model in the checkpoint, and no other tensors.

    Returns:
        A printable report.

    Raises:
        CheckpointError: the checkpoint or its scales are damaged or incomplete.
        ValueError: the checkpoint does not fit the model.
        OSError: the checkpoint cannot be read.

    >>> stored = float8lab.quantize(torch.randn(256, 128), block=(128, 128))
    >>> state = {"weight": stored.qdata, "weight_scale_inv": stored.scale}
    >>> layer = torch.nn.Linear(128, 256, bias=False)
    >>> float8lab.integrations.load_fp8(state, layer).fp8
    {'weight': 'e4m3 128x128 fp32'}
    >>> layer.weight.spec.block
    (128, 128)
    """
    check_module("model", model)
    check_flags(dequantize=dequantize, strict=strict)
    opened = _open(source)
    with without_quantizer(model) as devices, torch.no_grad():
        targets = _Targets(model, devices)
        plan = _plan(opened, targets, dequantize=dequantize, strict=strict)
        for item, names in plan.stored:
            target = targets.state[names[0]]
            targets.replace(target, _stored(item, target, targets.devices[names[0]]))
        for item, name in plan.values:
            _load_values(item, name, targets)
    if not dequantize:
        _run_in_fp8(model, plan)
    fp8 = {names[0]: item.describe() for item, names in plan.stored if item.fp8}
    fp4 = {names[0]: item.describe() for item, names in plan.stored if not item.fp8}
    dequantized = tuple(name for item, name in plan.values if _is_quantized(item))
    plain = tuple(name for item, name in plan.values if not _is_quantized(item))
    notices = tuple(plan.missing), tuple(plan.unexpected), tuple(plan.notes)
    return LoadReport(opened.path, fp8, dequantized, plain, *notices, fp4)


def _open(source: str | Path | Mapping[str, Tensor]) -> CheckpointSource:
    if isinstance(source, Mapping):
        return open_checkpoint(source)
    check_path("source", source)
    path = Path(source)
    left = leftovers(path)
    if not path.exists():
        old = [entry for entry in left if entry.suffix == ".old"]
        text = f"{path} must exist; it does not."
        if old:
            text += f" A write was interrupted: {old[0]} is the checkpoint before. Rename it back."
        elif left:
            text += f" A write was interrupted, and left {left[0]} unfinished. Repeat the export."
        raise FileNotFoundError(text)
    if path.suffix == ".partial":
        raise CheckpointError(
            f"{path} must be whole; its write was interrupted. Repeat the export."
        )
    if path.is_dir() and not any(path.glob("*.safetensors.index.json")):
        files = [match for entry in path.iterdir() if (match := _PART.fullmatch(entry.name))]
        if files and len(files) < int(files[0][2]):
            raise CheckpointError(
                f"{path} must have all of {int(files[0][2])} files; it has {len(files)}, and no "
                "index. The write or the download did not finish: repeat it."
            )
    return open_checkpoint(path)


class _Targets:
    """The tensors of a model by name, with the modules and devices where each is."""

    def __init__(self, model: nn.Module, devices: Mapping[str, torch.device]) -> None:
        state, default = model.state_dict(keep_vars=True), torch.get_default_device()
        self.state = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self.devices = {
            name: devices.get(name, default if value.is_meta else value.device)
            for name, value in self.state.items()
        }
        self.places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
        self.names: dict[int, list[str]] = defaultdict(list)
        for module in model.modules():
            for local, value in [*module._parameters.items(), *module._buffers.items()]:
                self.places[id(value)].append((module, local))
        for name, value in self.state.items():
            self.names[id(value)].append(name)
        self.layers: dict[str, nn.Module] = {
            path: weight.module
            for weight in gemm_weights(model)
            if not weight.is_stack or len(weight.paths) == 1
            for path in weight.paths
        }
        self.saved = saved_names(model).to_model()

    def multiplies(self, name: str) -> bool:
        """Whether a parameter is only the weight of linear layers, or a stack of experts."""
        target = id(self.state[name])
        users = {module for module, _ in self.places[target]}
        modules = {self.layers[n] for n in self.names[target] if n in self.layers}
        return bool(users and users == modules) or experts.is_stack(name, self.state[name])

    def replace(self, target: Tensor, value: Tensor) -> None:
        """Replace one tensor by another wherever a module has it."""
        for module, local in self.places[id(target)]:
            setattr(module, local, value)


@dataclass
class _Plan:
    """The tensors to load, those that have no counterpart, and the recipes that layers get."""

    stored: list[tuple[Item, list[str]]] = field(default_factory=list)
    """Weights that keep the bytes of the checkpoint, each with all its names in the model."""
    values: list[tuple[Item, str]] = field(default_factory=list)
    loaded: set[int] = field(default_factory=set)
    """The ids of the model's tensors that have a counterpart in the checkpoint."""
    input_scales: dict[str, float] = field(default_factory=dict)
    """Scales of activations by the part of the name before ``input_scale``, such as
    ``"model.layers.0.mlp.up_proj."``."""
    unused: list[str] = field(default_factory=list)
    """Names of scales that belong to stacked experts, which do not use them."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    recipes: dict[str, Recipe] = field(default_factory=dict)
    """The recipe of each layer that gets one."""
    requantized: list[str] = field(default_factory=list)
    """Layers whose existing recipe requantizes the weights that the checkpoint has."""
    notes: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Reasons why tensors of the checkpoint cannot be loaded into the model's tensors."""

    def add(self, item: Item, targets: _Targets, *, dequantize: bool) -> None:
        """Plan how to load a tensor of the checkpoint that the model has, too."""
        target = targets.state[item.name]
        if problem := _problem(item, target):
            self.problems.append(problem)
        elif id(target) in self.loaded:
            return  # this is another name of a tied parameter
        elif item.quantized and not dequantize and targets.multiplies(item.name):
            self.stored.append((item, targets.names[id(target)]))
        else:
            self.values.append((item, item.name))
            if not dequantize and _is_quantized(item):
                reason = "it is not a linear layer's weight alone"
                if not item.quantized:
                    reason = "its experts' blocks make no one weight"
                self.notes.append(f"{item.name} is dequantized: {reason}")
        self.loaded.add(id(target))

    def add_input_scale(self, item: Item, targets: _Targets) -> None:
        """Record the scale of a layer's activations."""
        stem = item.name.removesuffix("input_scale")
        value = item.entry.read().float().reshape(-1) if item.entry.dtype is not None else None
        if value is None or value.numel() != 1 or not bool((value > 0) & value.isfinite()):
            self.damage.append(f"{item.name} is not one positive number")
        else:
            self.input_scales[stem] = float(value)
        if f"{stem}weight" not in targets.state:
            self.unexpected.append(item.name)


def _plan(source: CheckpointSource, targets: _Targets, *, dequantize: bool, strict: bool) -> _Plan:
    """Match a checkpoint with a model; raise if they do not fit."""
    plan = _Plan()
    items = experts.stack_experts(_named_as_in_the_model(recognize(source), targets), targets.state)
    stacked = [item for item in items if isinstance(item, experts.Stack)]
    matrices = {matrix.name for stack in stacked for matrix in stack.matrices}
    for item in items:
        plan.damage += _damage(item)
        if item.is_scale and f"{item.name.rpartition('.')[0]}.weight" in matrices:
            plan.unused.append(item.name)
        elif item.name.endswith("input_scale"):
            plan.add_input_scale(item, targets)
        elif not item.is_scale and item.name in targets.state:
            plan.add(item, targets, dequantize=dequantize)
        elif not item.name.endswith(_COMPUTED):
            plan.unexpected.append(item.name)
    state = targets.state.items()
    plan.missing += [name for name, value in state if id(value) not in plan.loaded]
    stacks = {name: value.shape[0] for name, value in state if value.ndim == 3}
    _check(plan, source.path, experts.incomplete_stacks(items, stacks), strict=strict)
    return plan


def _check(
    plan: _Plan, path: str, stacks: Mapping[str, tuple[list[str], list[str]]], *, strict: bool
) -> None:
    """Raise if a checkpoint is damaged or does not fit; add notes on stacks that are not loaded."""
    if plan.damage:
        raise CheckpointError(
            f"{path} must have its FP8 weights whole; {_few(plan.damage, separator='; ')}. The "
            "model is unchanged. Repeat the write, or the download."
        )
    problems = list(plan.problems)
    if strict:
        explained = {name for _, names in stacks.values() for name in names}
        problems += [problem for reasons, _ in stacks.values() for problem in reasons]
        problems += [f"{name} is missing" for name in plan.missing if name not in stacks]
        problems += [f"{n} is not in the model" for n in plan.unexpected if n not in explained]
    else:
        plan.notes += [f"{n} is not loaded: {_few(reasons)}" for n, (reasons, _) in stacks.items()]
    if problems:
        raise ValueError(
            f"{path} must fit the model; {_few(problems, separator='; ')}. The model is "
            "unchanged. Build the model that the checkpoint is of"
            f"{', rename tensors in a state dict, or pass strict=False' if strict else ''}."
        )


def _named_as_in_the_model(items: Sequence[Item], targets: _Targets) -> list[Item]:
    """Rename items to the model's names where a Transformers checkpoint has other names."""
    scales = {
        f"{saved.removesuffix('weight')}input_scale": f"{name.removesuffix('weight')}input_scale"
        for saved, name in targets.saved.items()
    }
    taken = {item.name for item in items}
    renamed = {s: name for s, name in (targets.saved | scales).items() if name not in taken}
    return [replace(item, name=renamed.get(item.name, item.name)) for item in items]


def _damage(item: Item) -> list[str]:
    """Return sentences about damage to a quantized weight and its scales; empty without damage."""
    wrong = [f"{item.name}: {finding.text}" for finding in item.findings if finding.wrong]
    if item.spec is None or wrong:
        return wrong if _is_quantized(item) else []
    if item.entry.dtype not in (torch.uint8, item.spec.fp8_dtype):
        return [f"{item.name} is {item.entry.dtype_name}, and said to be {item.spec.describe()}"]
    scale = item.factors()
    bad = int((~scale.isfinite() | (scale < 0)).sum())
    return [f"{item.name}: {bad} scales NaN, infinite or negative"] if bad else []


def _is_quantized(item: Item) -> bool:
    """Whether an item is a weight in FP8 or 4 bits, or a stack of such weights."""
    matrices = item.matrices if isinstance(item, experts.Stack) else [item]
    return any(matrix.quantized for matrix in matrices)


def _problem(item: Item, target: Tensor) -> str | None:
    """Return why a checkpoint's tensor cannot be loaded into the model's; None if it can."""
    entry = item.entry
    if is_dtensor(target):
        return f"{item.name} is sharded in the model (load before sharding)"
    if entry.shape != tuple(target.shape):
        return f"{item.name} is {list(entry.shape)} there and {list(target.shape)} in the model"
    if item.quantized:
        if target.dtype in HIGH_PRECISION_DTYPES and target.ndim >= 1:
            return None
        kind = "FP8" if item.fp8 else "4 bits"
        return f"{item.name} is {kind} there and {target.dtype} in the model"
    if entry.dtype is None:
        return f"{item.name} is {entry.dtype_name}, which torch cannot read"
    if entry.dtype.is_floating_point != target.dtype.is_floating_point:
        return f"{item.name} is {entry.dtype_name} there and {target.dtype} in the model"
    return None


def _stored(item: Item, target: Tensor, device: torch.device) -> nn.Parameter:
    """Return the weight as the checkpoint stores it, frozen."""
    spec = cast("Spec", item.spec)  # the plan's ``stored`` holds only quantized tensors
    if spec.is_packed:
        return nn.Parameter(_packed(item, spec, target.dtype, device), requires_grad=False)
    data = torch.empty(item.entry.shape, dtype=torch.uint8, device=device)
    for box in boxes(item.entry.shape, item.block):
        data[box] = item.qdata(box).to(device)
    scale = item.scales().to(device)
    amaxes = [x for x in item.extras if x.name.endswith(".amax") and x.shape == tuple(scale.shape)]
    amax = amaxes[0].read().to(device) if amaxes else scale * spec.largest()
    stored = Float8Tensor(data.view(spec.fp8_dtype), scale, amax, spec, target.dtype)
    return nn.Parameter(stored, requires_grad=False)


def _packed(item: Item, spec: Spec, dtype: torch.dtype, device: torch.device) -> Float4Tensor:
    """Return a weight in 4 bits; in memory the packed dimension comes last."""
    dim = spec.packed_dim
    shape = [n // 2 if d == dim else n for d, n in enumerate(item.entry.shape)]
    shape[dim], shape[-1] = shape[-1], shape[dim]
    packed = torch.empty(shape, dtype=torch.uint8, device=device).transpose(dim, -1)
    for box in boxes(item.entry.shape, item.block):
        place = list(box)
        place[dim] = slice(box[dim].start // 2, box[dim].stop // 2)
        packed[tuple(place)] = pack(item.qdata(box), dim).to(device)
    scale = item.scales().to(spec.scale_dtype)  # exact: they had this dtype in the checkpoint
    if (tensor_scale := item.read_tensor_scale()) is not None:
        tensor_scale = tensor_scale.to(device)
    return Float4Tensor(packed, scale.to(device), tensor_scale, spec, dtype)


def _load_values(item: Item, name: str, targets: _Targets) -> None:
    """Load the values of a tensor in the dtype of the model's tensor."""
    target = targets.state[name]
    if target.is_meta or isinstance(target, Float4Tensor):  # such tensors cannot be written to
        made = torch.empty(target.shape, dtype=target.dtype, device=targets.devices[name])
        if isinstance(target, nn.Parameter):
            made = nn.Parameter(made, requires_grad=target.requires_grad)
        targets.replace(target, made)
        target = made
    into = target.detach()
    if isinstance(into, Float8Tensor):
        into.requantize_(item.values().to(into.device))
        return
    dtype = item.entry.dtype
    exact = dtype is not None and not dtype.is_floating_point and not item.quantized
    for box in boxes(item.entry.shape, item.block):
        into[box] = (item.entry.read(box) if exact else item.values(box)).to(into.device)


def _run_in_fp8(model: nn.Module, plan: _Plan) -> None:
    """Give the layers of FP8 weights recipes that use these bytes; add notes on exceptions."""
    by_name = {name: item for item, names in plan.stored for name in names}
    stacks: dict[str, list[GemmWeight]] = {}
    for gemm in gemm_weights(model):
        specs = {spec for name in gemm.paths if name in by_name and (spec := by_name[name].spec)}
        if gemm.is_stack:
            stacks.setdefault(gemm.name, []).append(gemm)
        elif specs:
            _choose_for_gemm(plan, gemm, specs)
    for weights in stacks.values():
        _choose_for_stacks(plan, weights, by_name)
    for recipe in dict.fromkeys(plan.recipes.values()):
        layers = {name for name, chosen in plan.recipes.items() if chosen == recipe}
        plan.notes += _convert(model, recipe, layers)
    if plan.recipes:
        _say_what_stays(model, plan.recipes)
    if unused := _set_input_scales(model, by_name, plan.input_scales) + plan.unused:
        plan.notes.append(f"{_few(unused)}: not used, for the recipe scales activations itself")
    if plan.requantized:
        names = _few(plan.requantized)
        plan.notes.append(f"{names}: the recipe they have requantizes these weights")


def _choose_for_gemm(plan: _Plan, gemm: GemmWeight, specs: Collection[Spec]) -> None:
    """Choose the recipe of a linear layer whose weight is stored in these formats."""
    precision = gemm.precision
    if precision is not None and (precision.recipe is not None or precision.pinned):
        # The recipe must cast to the blocks of one of these FP8 formats.
        blocks = {spec.block for spec in specs if not any(s.is_packed for s in specs)}
        if precision.recipe is None or precision.recipe.linear.w.block not in blocks:
            plan.requantized.append(gemm.name)
    elif all(not spec.is_packed for spec in specs):  # otherwise it runs in high precision
        kinds = {(s.block, s.element_dtype) for s in specs if s.element_dtype == E4M3}
        recipe = _RECIPES.get(kinds.pop()) if len(kinds) == 1 else None
        static = any(name.removesuffix("weight") in plan.input_scales for name in gemm.paths)
        if recipe is None:
            plan.notes.append(f"{gemm.name} runs without a recipe: none has its blocks")
        elif static and recipe == Float8CurrentScaling():
            plan.recipes[gemm.name] = DelayedScaling()  # evaluation leaves the scale as it is
        else:
            plan.recipes[gemm.name] = recipe


def _choose_for_stacks(
    plan: _Plan, weights: Sequence[GemmWeight], by_name: Mapping[str, Item]
) -> None:
    """Choose a recipe for experts, or another module with stacks, that uses the stored bytes."""
    name = weights[0].name
    stored = [by_name[path] for weight in weights for path in weight.paths if path in by_name]
    if not any(item.fp8 for item in stored):
        return
    fitting = [r for r in _RECIPES.values() if all(_fits(w, by_name, r) for w in weights)]
    states = [precision for _, precision in precisions(weights[0].module)]
    recipes_now = {state.recipe for state in states if state.recipe is not None or state.pinned}
    if recipes_now:
        plan.requantized += [] if recipes_now <= set(fitting) else [name]
    elif weights[0].castable and fitting:
        plan.recipes[name] = fitting[0]
    elif weights[0].castable:
        plan.notes.append(f"{name} runs without a recipe: none has the blocks of all its experts")


def _set_input_scales(
    model: nn.Module, by_name: Mapping[str, Item], scales: Mapping[str, float]
) -> list[str]:
    """Start delayed recipes from the checkpoint's scales; return the names of unused scales."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    used: set[str] = set()
    for gemm in gemm_weights(model):
        if gemm.precision is None or gemm.is_stack:
            continue
        gemm.precision.prepare(device)
        names = [name for name in gemm.paths if name in by_name]
        stems = [name.removesuffix("weight") for name in names]
        inputs = [scales[stem] for stem in stems if stem in scales]
        if inputs and isinstance(gemm.precision.recipe, DelayedScaling):
            # The largest scale covers the entire weight if it is requantized.
            weight = max(float(by_name[name].scales().max()) for name in names)
            _start_delayed(gemm.precision, {X: max(inputs), W: weight})
            used |= {name.removesuffix("weight") for name in gemm.paths}
    return [f"{stem}input_scale" for stem in scales if stem not in used]


def _start_delayed(precision: Precision, scales: Mapping[int, float]) -> None:
    """Start the delayed recipe of a layer from given scales, one for each slot."""
    for (recipe, _), slots in precision.slots.items():
        if recipe == precision.recipe:
            state = {name: slots.tensors()[name].clone() for name in ("scale", "seeded")}
            for slot, scale in scales.items():
                if scale > 0:
                    start = slots.column_starts[slot]
                    columns = slice(start, start + slots.widths[slot])
                    state["scale"][columns] = scale
                    state["seeded"][columns] = True
            slots.load(state)


def _fits(weight: GemmWeight, by_name: Mapping[str, Item], recipe: Recipe) -> bool:
    """Whether a recipe uses the bytes of a weight as the checkpoint stores them."""
    stored = [item.spec for path in weight.paths if (item := by_name.get(path)) is not None]
    specs = specs_of_parameters(weight, recipe) or []
    return len(stored) == len(specs) > 0 and all(
        spec is not None
        and spec.element_dtype == cast_spec.element_dtype == E4M3
        and spec.block == cast_spec.block
        for spec, cast_spec in zip(stored, specs, strict=True)
    )


def _say_what_stays(model: nn.Module, chosen: Container[str]) -> None:
    """Explain in the conversion report why layers without a recipe stay in high precision."""
    walk = walk_model(model)
    choosing = routers(walk.modules)
    for candidate in walk.candidates:
        layer = candidate.layer
        if candidate.name in chosen or recipes_of(layer):
            continue
        kinds = set(map(type, layer.parameters(recurse=False)))
        note = "in high precision in the checkpoint"
        if layer in choosing:
            note = "a router, which stays in high precision"
        elif Float4Tensor in kinds:
            note = "stored in 4 bits, and multiplied in high precision"
        elif Float8Tensor in kinds:
            note = "stored in FP8 by blocks that no recipe has"
        explain_layer(layer, note)


def _convert(model: nn.Module, recipe: Recipe, layers: Container[str]) -> list[str]:
    with warnings.catch_warnings():  # the notes report the same
        warnings.filterwarnings("ignore", "convert_to_float8 converted none")
        convert_to_float8(model, recipe, filter_fn=lambda _, name: name in layers)
    undone = [layer for layer in conversion_report(model).skipped if layer.name in layers]
    return [f"{layer.name} runs without a recipe: {layer.note}" for layer in undone]
