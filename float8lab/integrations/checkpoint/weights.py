"""Find the weights of a model's FP8 GEMMs, and the FP8 bytes that these GEMMs use.

The bytes come from the same cast that modules run, with the current scales. A weight in high
precision gets the bytes that a forward in evaluation mode would use now; a weight stored in FP8
keeps its own bytes.

Nouns: a *GEMM weight* is what a module casts in one cast: a matrix, or a *stack* of the matrices of
experts, ``[E, N, K]``. It consists of one parameter, in any layout, or of several parameters whose
rows are joined. A weight that its layer stores transposed counts as a stack of one matrix."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from float8lab.checkpoints.experts import STACKED
from float8lab.checkpoints.layouts import Weight
from float8lab.distributed.checkpoint import StoredWeight
from float8lab.formats import Float8Spec
from float8lab.integrations.checkpoint.saved_names import SavedNames
from float8lab.nn.casts import spec_of_experts
from float8lab.nn.convert import matches
from float8lab.nn.convert.other_experts import ExpertWeight, experts_class
from float8lab.nn.convert.other_linear import OtherLinear, known_linear, load_float8_class
from float8lab.nn.convert.walk import is_unseen
from float8lab.nn.expert_mlp import ExpertsBase
from float8lab.nn.grouped_linear import GroupedLinear
from float8lab.nn.layer import GemmModule
from float8lab.nn.precision import Precision, W, X, call_under, precisions
from float8lab.recipes.delayed import DelayedSlots, QuantParams
from float8lab.recipes.recipe import DelayedScaling, Recipe
from float8lab.tensor import Float4Tensor, Float8Tensor
from float8lab.tensor.blocks import block_amax
from float8lab.tensor.dispatch import fallback
from float8lab.tensor.dtensor import is_dtensor, local_of
from float8lab.tensor.operands import quantize

__all__ = [
    "GemmWeight", "delayed_slots", "find_weights", "gemm_weights", "is_stored",
    "specs_of_parameters",
]  # fmt: skip


class GemmWeight(NamedTuple):
    """A matrix, or a stack of matrices, that a module casts in one cast."""

    module: nn.Module
    name: str
    """The qualified name of the module."""
    local_names: tuple[str, ...]
    """The names of the weight's parameters, relative to the module."""
    precision: Precision | None
    """The FP8 state of the GEMM; None for modules that were not converted."""
    shape: tuple[int, ...]
    """``[E, N, K]`` for a stack, where E is 1 if it holds one expert; ``()`` for a matrix."""
    matrices: Callable[[slice], Tensor]
    """Returns the matrix, or the matrices of a slice of the experts, in high precision."""
    lay_out: Callable[[Tensor], Sequence[Tensor]]
    """Splits the cast of the entire weight into tensors with the layouts of its parameters."""
    obstacle: str = ""
    """The reason why no other library's format has names for this weight; empty if one has."""
    first: int = 0
    """The number of the first expert in the stack."""

    @property
    def is_stack(self) -> bool:
        """Whether this weight is a stack."""
        return bool(self.shape)

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the qualified names of the parameters."""
        return tuple(f"{self.name}.{local}" if self.name else local for local in self.local_names)

    @property
    def parameters(self) -> list[Tensor]:
        """Return the parameters, or their computed values where they are parametrized."""
        return [_tensor(self.module, local) for local in self.local_names]

    @property
    def castable(self) -> bool:
        """Whether the module can be converted; experts in a model's own Python loop cannot."""
        return isinstance(self.module, (ExpertsBase, GroupedLinear)) or bool(
            experts_class(self.module) or known_linear(type(self.module))
        )


def is_stored(x: Tensor) -> bool:
    """Whether a parameter, or this rank's shard of the parameter, is stored in FP8."""
    return isinstance(local_of(x), Float8Tensor)


def _tensor(module: nn.Module, path: str) -> Tensor:
    return operator.attrgetter(path)(module)


Read = Callable[[nn.Module, str], Tensor]
"""The type of ``read_unsharded``, and of a cached version of that function."""


def read_unsharded(module: nn.Module, path: str) -> Tensor:
    """Return a module's parameter, detached and unsharded; a collective if it is sharded."""
    value = _tensor(module, path)
    if not is_dtensor(value):
        return value.detach()
    if is_stored(value):
        return StoredWeight(module, path, value).unsharded()
    return value.full_tensor().detach()


def gemm_weights(model: nn.Module, read: Read = read_unsharded) -> list[GemmWeight]:
    """Return the GEMM weights of a model: all matrices in the model's order, then all stacks.
    A module that is used twice is listed once. Layers of other libraries, such as Conv1D, are
    listed as stacks of one matrix, since no reader has an FP8 form for them."""
    weights: list[GemmWeight] = []
    for name, module in model.named_modules():
        linear_class = known_linear(type(module))
        if isinstance(module, GroupedLinear):
            weights += _stacks_of_grouped(name, module, read)
        elif linear_class not in (None, nn.Linear, nn.MultiheadAttention):
            weights.append(_stack_of_linear(name, module, linear_class))
        else:
            if not isinstance(module, (ExpertsBase, nn.MultiheadAttention)):
                weights += _matrices_of(name, module, read)
            if linear_class is None:
                weights += _stacks_of_experts(name, module, read)
    return sorted(weights, key=lambda weight: weight.is_stack)


def _matrices_of(name: str, module: nn.Module, read: Read) -> Iterator[GemmWeight]:
    """Iterate over the weights of a module that consists of linear layers."""
    definitions = module.gemms if isinstance(module, GemmModule) else ()
    states: dict[tuple[str, ...], Precision | None] = {}
    for gemm, precision in precisions(module):
        names = next((d.weights for d in definitions if d.name == gemm), ("weight",))
        if all(local in module._parameters for local in names):
            states[names] = precision
    # Readers of FP8 files do not know how torch.nn.MultiheadAttention uses this weight.
    is_projection = isinstance(module, NonDynamicallyQuantizableLinear)
    if is_projection or (not states and isinstance(module, nn.Linear)):
        states = {("weight",): None}
    for local_names, state in states.items():
        matrix = _joined(name, module, local_names, None, read)
        yield matrix._replace(precision=state)


def _stack_of_linear(name: str, module: nn.Module, linear_class: type) -> GemmWeight:
    kind, precision = load_float8_class(linear_class), getattr(module, "_fp8", None)
    shape = (1, *kind.matrix(module).shape)
    return GemmWeight(
        module, name, ("weight",), precision if isinstance(module, OtherLinear) else None, shape,
        lambda _: kind.matrix(module).detach().unsqueeze(0),
        lambda stack: [kind.from_matrix(stack[0])],
        f"no other library has an FP8 form of {linear_class.__name__}",
    )  # fmt: skip


def _stacks_of_grouped(name: str, module: GroupedLinear, read: Read) -> Iterator[GemmWeight]:
    """Iterate over the stacks: one stack of all experts, or one for the weight of each expert."""
    obstacle = "no other library has names for the weights of GroupedLinear"
    for index, local in enumerate(module.gemms[0].weights):
        shape = _tensor(module, local).shape
        stack = _joined(name, module, (local,), shape[0] if len(shape) == 3 else 1, read)
        yield stack._replace(precision=module._fp8, obstacle=obstacle, first=index)


def _stacks_of_experts(name: str, module: nn.Module, read: Read) -> Iterator[GemmWeight]:
    """Iterate over the weights of experts, converted or not, and other stacks stored in FP8."""
    if (kind := experts_class(module)) is not None:
        weights = kind.weights(module)
    elif isinstance(module, ExpertsBase):
        weights = {f"{layer}_weight": ExpertWeight(layer) for layer in module.layer_names}
    else:
        stacks = {local: module._parameters.get(local) for local in STACKED}
        weights = {
            local: ExpertWeight(local)
            for local, stack in stacks.items()
            if stack is not None and is_stored(stack) and stack.ndim == 3
        }
    states = dict(precisions(module)) if isinstance(module, ExpertsBase) else {}
    for layer in dict.fromkeys(weight.layer for weight in weights.values()):
        joined = tuple(local for local, weight in weights.items() if weight.layer == layer)
        weight, count = weights[joined[0]], _tensor(module, joined[0]).shape[0]
        experts = count if kind is None else kind.shapes(module)[0][0]
        stack = _joined(name, module, joined, experts, read, transposed=weight.transposed)
        obstacle = _obstacle(module, joined[0], weight)
        yield stack._replace(precision=states.get(layer), obstacle=obstacle)


def _joined(
    name: str, module: nn.Module, local_names: tuple[str, ...], experts: int | None, read: Read, *,
    transposed: bool = False,
) -> GemmWeight:  # fmt: skip
    """Join rows of parameters: matrices, or stacks of shape ``[E, N, K]`` or ``[E * N, K]``."""
    shapes = [tuple(_tensor(module, local).shape) for local in local_names]

    def weight_of(value: Tensor) -> Tensor:
        if experts is not None and value.ndim == 2:
            value = value.view(experts, -1, value.shape[-1])
        return value.mT if transposed else value

    sizes = [weight_of(torch.empty(shape, device="meta")).shape for shape in shapes]
    counts = [size[-2] for size in sizes]

    def matrices(numbers: slice) -> Tensor:
        weights = [weight_of(read(module, local))[numbers] for local in local_names]
        return weights[0] if len(weights) == 1 else torch.cat(weights, -2)

    def lay_out(weight: Tensor) -> Sequence[Tensor]:
        weights = [weight] if len(counts) == 1 else weight.split(counts, -2)
        weights = [rows.mT if transposed else rows for rows in weights]
        return [
            rows if rows.shape == shape else rows.reshape(shape)
            for rows, shape in zip(weights, shapes, strict=True)
        ]

    shape = () if experts is None else (experts, sum(counts), sizes[0][-1])
    return GemmWeight(module, name, local_names, None, shape, matrices, lay_out)


def _obstacle(module: nn.Module, local: str, weight: ExpertWeight) -> str:
    """Return why no other library has names for a parameter's matrices; empty if one has."""
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    down = parameters.get("down_proj")
    up = parameters.get("gate_up_proj", parameters.get("up_proj"))
    if local not in STACKED or up is None or down is None or not up.ndim == down.ndim == 3:
        kind = getattr(module, "original", type(module)).__name__
        return f"no other library has names for the matrices of {kind}"
    if any(name.endswith("_bias") for name in parameters):
        return "other libraries' FP8 experts have no biases"
    gates = 2 if "gate_up_proj" in parameters else 1
    if weight.transposed or up.shape[1:] != (gates * down.shape[2], down.shape[1]):
        return "other libraries' FP8 experts are [experts, out, in], and these are transposed"
    return ""


def find_weights(
    model: nn.Module, *, recipe: Recipe | None, default: Recipe, exclude: Sequence[str],
    share_scales: Sequence[Sequence[str]], unseen: bool, names: SavedNames,
) -> tuple[list[Weight], dict[str, str]]:  # fmt: skip
    """Return the weights to store in FP8, and why other parameters of FP8 layers are left out.

    The weights are those of layers that run in FP8 or, if no layer does, of all ``nn.Linear``.
    ``recipe`` is for layers without a recipe of their own. ``default`` is for layers that then have
    neither a recipe nor delayed scales. ``names`` are the names under which ``export`` saves the
    matrices of experts. The other arguments are those of ``export``."""
    # The cache holds the last parameter, since the matrices of a stack are read one by one.
    read = functools.lru_cache(maxsize=1)(read_unsharded)
    candidates = gemm_weights(model, read)
    converted = any(
        weight.precision is not None or (weight.is_stack and any(map(is_stored, weight.parameters)))
        for weight in candidates
    )
    used_otherwise = _used_otherwise(model, candidates)
    reasons: dict[str, str] = {}

    def choose(weight: GemmWeight) -> tuple[Recipe, Float8Spec] | str:
        """Return how to cast a weight, or why not: empty if its layer does not run in FP8."""
        parameters, chosen = weight.parameters, _recipe(weight.precision, recipe, default)
        passed_over = weight.precision is None and (converted or weight.is_stack)
        passed_over |= any(isinstance(parameter, Float4Tensor) for parameter in parameters)
        if chosen is None or not chosen.linear.fprop or passed_over:
            return ""
        if (pattern := _excluded_by(weight.name, exclude)) is not None:
            return f"excluded by {pattern!r}"
        if is_unseen(weight.module) and not unseen:
            return "its layer's forward did not run; unseen=True quantizes it"
        if any(id(parameter) in used_otherwise for parameter in parameters):
            return "a module uses it in another way, too"
        specs = specs_of_parameters(weight, chosen)
        crossed = "blocks of its scales cross matrices that are cast as one"
        return crossed if specs is None else (chosen, specs[0])

    matrices: list[Weight] = []
    stacks: list[Weight] = []
    for weight in candidates:
        weights = stacks if weight.is_stack else matrices
        if any(map(is_stored, weight.parameters)):
            if _excluded_by(weight.name, exclude) is None:
                weights += _stored_weights(weight, names, read)
        elif isinstance(chosen := choose(weight), tuple):
            weights.append(_cast_weight(weight, *chosen, names))
        elif chosen:
            reasons.update(dict.fromkeys(weight.paths, chosen))
    return [*_tie(matrices, share_scales), *stacks], reasons


def _excluded_by(name: str, exclude: Sequence[str]) -> str | None:
    return next((pattern for pattern in exclude if matches(name, pattern)), None)


def specs_of_parameters(weight: GemmWeight, recipe: Recipe) -> list[Float8Spec] | None:
    """Return the spec of each parameter that holds a weight's cast; None if no blocks fit."""
    spec = recipe.linear.w
    if not weight.is_stack:
        rows = [parameter.shape[0] for parameter in weight.parameters]
        height = spec.block[0]
        if height > 1 and any(count % height for count in rows[:-1]):
            raise ValueError(
                f"{weight.name} must have parts of a multiple of {height} rows, since its weight "
                f"is cast whole and blocks would cross them; got {rows}. Exclude it, or give a "
                "recipe with other blocks."
            )
        return [spec] * len(rows)
    batch = spec_of_experts(spec)  # the tensors below are on the meta device, without values
    scale = torch.empty(batch.scale_shape(weight.shape), device="meta")
    data = torch.empty(weight.shape, dtype=torch.uint8, device="meta").view(batch.fp8_dtype)
    with fallback("silent"):
        laid_out = weight.lay_out(Float8Tensor(data, scale, scale, batch, torch.float32))
    specs = [x.spec for x in laid_out if isinstance(x, Float8Tensor)]
    return specs if len(specs) == len(laid_out) else None


def _cast(
    weight: GemmWeight, recipe: Recipe, experts: slice = slice(None), scale: Tensor | None = None,
    *, amax: bool = False,
) -> Float8Tensor:  # fmt: skip
    """Cast a weight as a forward in evaluation would cast it now, or by a given tensor scale."""
    x, spec = weight.matrices(experts), recipe.linear.w
    with torch.no_grad():
        if scale is not None or weight.is_stack:
            if scale is None:
                params = _params_of_experts(weight, recipe, x, experts.start or 0)
            else:
                params = QuantParams.of_scale(scale.to(x.device).reshape(1, 1), spec)
            qdata, scale = quantize(x, spec, None, params, recipe.linear.epsilon).rowwise
        else:
            slots = None
            if isinstance(recipe, DelayedScaling):
                slots = delayed_slots(weight.precision or Precision(recipe), recipe, x.device)
            qdata, scale = call_under(recipe, slots).scales.quantize(x, W, spec).rowwise
    stored_spec = spec_of_experts(spec) if weight.is_stack else spec
    counts = stored_spec.scale_shape(tuple(x.shape))
    scale = scale.reshape(counts) if spec.per_tensor else scale[tuple(map(slice, counts))]
    qdata = qdata[tuple(map(slice, x.shape))]
    amaxes = block_amax(x, stored_spec.block) if amax else scale
    return Float8Tensor(qdata, scale, amaxes, stored_spec, x.dtype)


def _params_of_experts(
    weight: GemmWeight, recipe: Recipe, x: Tensor, start: int
) -> QuantParams | None:
    """Return the delayed factors of experts from ``start`` on; None under other recipes."""
    if weight.precision is None or not isinstance(recipe, DelayedScaling):
        return None
    first = weight.first + start
    experts = range(first, first + x.shape[0])
    slots = delayed_slots(weight.precision, recipe, x.device)
    return slots.scale_for(W, x, record=False, experts=experts)


def _stored_weights(weight: GemmWeight, names: SavedNames, read: Read) -> Iterator[Weight]:
    """Describe each parameter of a weight whose parameters are stored in FP8."""
    recipe = None if weight.precision is None else weight.precision.recipe
    for local, path, parameter in zip(
        weight.local_names, weight.paths, weight.parameters, strict=True
    ):
        if not is_stored(parameter):
            raise ValueError(
                f"{weight.name} must have all parts of its weight in FP8, or none; "
                f"{local} is {parameter.dtype}. Exclude it."
            )

        def make(local: str = local, *, amax: bool = False) -> list[Float8Tensor]:
            return [cast("Float8Tensor", read(weight.module, local))]

        def make_matrix(
            expert: int, rows: slice, local: str = local, *, amax: bool = False
        ) -> list[Float8Tensor]:
            return [cast("Float8Tensor", read(weight.module, local)[expert][rows])]

        spec = cast("Float8Tensor", local_of(parameter)).spec
        if is_dtensor(parameter):
            spec = StoredWeight(weight.module, local, parameter).spec
        described = _described(weight, (path,), spec, recipe, make, make_matrix, names)
        yield replace(described, stored=True)


def _cast_weight(weight: GemmWeight, recipe: Recipe, spec: Float8Spec, names: SavedNames) -> Weight:
    """Describe a weight in high precision that a recipe casts."""

    def make(
        scale: Callable[[], Tensor] | None = None, *, amax: bool = False
    ) -> list[Float8Tensor]:
        matrix = _cast(weight, recipe, scale=scale and scale(), amax=amax)
        return cast("list[Float8Tensor]", weight.lay_out(matrix))

    def make_matrix(expert: int, rows: slice, *, amax: bool = False) -> list[Float8Tensor]:
        matrix = _cast(weight, recipe, slice(expert, expert + 1), amax=amax)[0]
        return [cast("Float8Tensor", matrix[rows])]

    return _described(weight, weight.paths, spec, recipe, make, make_matrix, names)


def _described(
    weight: GemmWeight, paths: tuple[str, ...], spec: Float8Spec, recipe: Recipe | None,
    make: Callable[..., list[Float8Tensor]], make_matrix: Callable[..., list[Float8Tensor]],
    names: SavedNames,
) -> Weight:  # fmt: skip
    """Describe a weight as it is written; ``make_matrix`` makes rows of an expert's matrix."""
    parameters = dict(zip(weight.paths, weight.parameters, strict=True))
    shapes = tuple(tuple(parameters[path].shape) for path in paths)
    if not weight.is_stack:
        activations = None if recipe is None else recipe.linear.x
        scale = _input_scale(weight.precision, recipe)
        return Weight(paths, paths, shapes, weight.name, spec, activations, make, scale)
    split = functools.partial(_split_experts, weight, spec, make_matrix, names)
    experts = None if weight.obstacle else split
    return Weight(
        paths, paths, shapes, paths[0], spec, None, make, experts=experts, obstacle=weight.obstacle
    )


def _split_experts(
    weight: GemmWeight, spec: Float8Spec, make_matrix: Callable[..., list[Float8Tensor]],
    names: SavedNames,
) -> tuple[Weight, ...]:  # fmt: skip
    """Return the matrices of the experts in a stack under the names that other libraries read."""
    experts, rows, columns = weight.shape
    (path,) = weight.paths
    if path in names.stacks:
        saved = names.stacks[path]
        raise ValueError(
            f"{path} must be a stack that Transformers saves matrix by matrix, since it "
            f"reads no other experts in FP8; it saves this one as {saved or 'something else'}. "
            f"Leave the experts in high precision by exclude=[{weight.name!r}], or a pattern such "
            f"as {'*.' + weight.name.rpartition('.')[2]!r}, or export the model in "
            "format='float8lab'."
        )
    count = names.matrices_per_expert(path)
    size, (height, width) = rows // count, spec.block[1:]
    height = -1 if width == -1 and height in (-1, size) else height
    if count > 1 and height > 1 and size % height:
        raise ValueError(
            f"{path} must have a multiple of {height} rows for each of "
            f"{' and '.join(STACKED[weight.local_names[0]])}, or blocks would cross them; got "
            f"{size}. Exclude it, or export it in format='float8lab'."
        )
    return tuple(
        Weight(
            (name := names.matrix(path, expert, index),),
            (path,),
            ((size, columns),),
            name.removesuffix(".weight"),
            replace(spec, block=(height, width)),
            None,
            functools.partial(make_matrix, expert, slice(index * size, (index + 1) * size)),
            stored=is_stored(weight.parameters[0]),
        )
        for expert in range(experts)
        for index in range(count)
    )


def _used_otherwise(model: nn.Module, weights: Sequence[GemmWeight]) -> set[int]:
    """Return the ids of parameters that a module uses in another way, as an embedding does."""
    paths = [(w.module, local.rpartition(".")) for w in weights for local in w.local_names]
    ours = {(module.get_submodule(below), local) for module, (below, _, local) in paths}
    return {
        id(parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if (module, name) not in ours
    }


def _recipe(precision: Precision | None, asked: Recipe | None, default: Recipe) -> Recipe | None:
    """Return the recipe by which a weight is cast; None if the weight is not cast."""
    if precision is None:
        return asked or default
    if precision.pinned:
        return precision.recipe
    used = {recipe for recipe, _ in precision.slots}
    sole: Recipe | None = used.pop() if len(used) == 1 else None
    return asked or precision.recipe or sole or default


def delayed_slots(
    precision: Precision, recipe: DelayedScaling, device: torch.device
) -> DelayedSlots:
    """Return the delayed scales of a layer under a recipe; create them if there are none."""
    if not any(used == recipe for used, _ in precision.slots):
        precision.prepare(device, recipe)
    return next(slots for (used, _), slots in precision.slots.items() if used == recipe)


def _input_scale(precision: Precision | None, recipe: Recipe | None) -> Tensor | None:
    """Return the input's scale under a delayed recipe; None if the recipe has seen no input."""
    for (used, _), slots in () if precision is None else precision.slots.items():
        if used == recipe:
            state = slots.tensors()
            if bool(state["seeded"][X] | (state["steps"][X] > 0)):
                return state["scale"][X].detach().clone().reshape(1)
    return None


def _tie(weights: list[Weight], share_scales: Sequence[Sequence[str]]) -> list[Weight]:
    """Give siblings the largest of their scales; siblings stored in FP8 must share one already."""
    siblings: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for index, weight in enumerate(weights):
        parent, _, last = weight.module.rpartition(".")
        for group in share_scales:
            if last in group:
                siblings.setdefault((parent, tuple(group)), []).append(index)
    result = list(weights)
    for (parent, _), indices in siblings.items():
        members = [weights[index] for index in indices]
        if len(members) < 2:
            continue
        names = ", ".join(member.module for member in members)
        if not all(member.spec.per_tensor for member in members):
            raise ValueError(
                f"share_scales must name layers with one scale for each weight; {names} have "
                f"{members[0].spec.describe()}. Give a recipe with scales per tensor, or leave "
                f"{parent or 'them'} out."
            )
        scale = functools.cache(functools.partial(_largest_scale, tuple(members)))
        if any(member.stored for member in members):
            stored = torch.cat([matrix.scale.view(1) for m in members for matrix in m.make()])
            if not bool((stored == stored[0]).all()):
                raise ValueError(
                    f"share_scales must name layers that are not stored in FP8, or have one scale; "
                    f"{names} have {stored.tolist()}. Leave them out: stored bytes are not changed."
                )
            continue
        for index, member in zip(indices, members, strict=True):
            result[index] = replace(member, make=functools.partial(member.make, scale))
    return result


def _largest_scale(weights: Sequence[Weight]) -> Tensor:
    return torch.stack([matrix.scale.view(()) for w in weights for matrix in w.make()]).max()
