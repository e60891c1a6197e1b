"""The weights of a model's FP8 GEMMs, and the bytes of these that the GEMMs use.

Bytes come from the very cast that modules run, with the scales in force: a weight in high precision
has the bytes that a forward in evaluation would use now, and a weight stored in FP8 has its own.

Nouns: a *GEMM weight* is one matrix, of one parameter or of several whose rows are joined. A
*stacked weight* is a parameter with the matrices of experts, ``[E, N, K]``, in a layout of its own;
a weight that its layer has transposed counts as a stack of one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from float8lab.checkpoints.experts import STACKED
from float8lab.checkpoints.layouts import Stored, Weight
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
from float8lab.ops import cast_op
from float8lab.recipes.delayed import DelayedSlots, Factors, QuantParams
from float8lab.recipes.recipe import DelayedScaling, Recipe
from float8lab.tensor import Float4Tensor, Float8Tensor
from float8lab.tensor.blocks import block_amax
from float8lab.tensor.dispatch import fallback
from float8lab.tensor.operands import quantize

__all__ = [
    "FoundWeights",
    "GemmWeight",
    "StackedWeight",
    "find_weights",
    "gemm_weights",
    "spec_of_stacked",
    "stacked_weights",
]


class GemmWeight(NamedTuple):
    """The weight of a module's GEMM, a matrix that some of its parameters form."""

    module: nn.Module
    name: str
    """Qualified name of the module."""
    local_names: tuple[str, ...]
    """The parameters' names in the module; they are concatenated along dimension 0."""
    precision: Precision | None
    """None for a plain ``torch.nn.Linear``."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Qualified names of the parameters."""
        return tuple(_path(self.name, local) for local in self.local_names)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters; parametrized, their values."""
        return [cast("Tensor", getattr(self.module, local)) for local in self.local_names]


def _path(module: str, local: str) -> str:
    return f"{module}.{local}" if module else local


def gemm_weights(model: nn.Module) -> list[GemmWeight]:
    """The weights of linear layers, in the model's order; a module that is used twice comes once.

    Layers of other libraries, such as Conv1D, are left out, since no reader has an FP8 form for
    them, and so are the layers of experts, which are no single GEMM.
    """
    weights = []
    for name, module in model.named_modules():
        if isinstance(module, (OtherLinear, GroupedLinear, ExpertsBase)):
            continue
        gemms = [(_local_names(module, gemm), precision) for gemm, precision in precisions(module)]
        gemms = [(names, precision) for names, precision in gemms if names]
        weights += [GemmWeight(module, name, names, precision) for names, precision in gemms]
        if not gemms and isinstance(module, nn.Linear):
            weights.append(GemmWeight(module, name, ("weight",), None))
    return weights


def _local_names(module: nn.Module, gemm: str) -> tuple[str, ...]:
    """The parameters that form the weight of a module's GEMM."""
    definitions = module.gemms if isinstance(module, GemmModule) else ()
    names = next((d.weights for d in definitions if d.name == gemm), ("weight",))
    return names if all(name in module._parameters for name in names) else ()


class FoundWeights(NamedTuple):
    """The weights of a model to store in FP8."""

    weights: list[Weight]
    reasons: dict[str, str]
    """Why parameters whose layers run in FP8 are not among them."""


def find_weights(
    model: nn.Module,
    *,
    recipe: Recipe | None,
    default: Recipe,
    exclude: Sequence[str],
    share_scales: Sequence[Sequence[str]],
    unseen: bool,
    names: SavedNames,
) -> FoundWeights:
    """The weights to store in FP8.

    Args:
        model: its layers that run in FP8; if it has none, all its ``torch.nn.Linear``.
        recipe: for layers that have none of their own.
        default: for layers that have no recipe by now; delayed scales in use win over it.
        exclude: layers to leave in high precision, as in ``convert_to_float8``.
        share_scales: names of siblings that get one scale.
        unseen: cast the weights of layers whose forward does not run, too.
        names: under which the matrices of experts are saved one by one.

    Raises:
        ValueError: siblings that cannot share a scale.
    """
    gemms, stacks = gemm_weights(model), list(stacked_weights(model))
    converted = any(gemm.precision is not None for gemm in gemms)
    converted |= any(stack.precision is not None for stack in stacks)
    converted |= any(isinstance(stack.parameter(), Float8Tensor) for stack in stacks)
    used_otherwise = _used_otherwise(model, gemms, stacks)
    reasons: dict[str, str] = {}

    def recipe_for(
        layer: GemmWeight | StackedWeight, paths: Sequence[str], parameters: Sequence[Tensor]
    ) -> Recipe | None:
        """The recipe by which parameters in high precision are cast, or None and the reason."""
        chosen = _recipe(layer.precision, recipe, default)
        passed_over = layer.precision is None and converted
        passed_over |= any(isinstance(parameter, Float4Tensor) for parameter in parameters)
        if chosen is None or not chosen.linear.fprop or passed_over:
            return None
        pattern = _excluded_by(layer.name, exclude)
        if pattern is not None:
            reason = f"excluded by {pattern!r}"
        elif is_unseen(layer.module) and not unseen:
            reason = "its layer's forward did not run; unseen=True quantizes it"
        elif any(id(parameter) in used_otherwise for parameter in parameters):
            reason = "a module uses it in another way, too"
        else:
            return chosen
        reasons.update(dict.fromkeys(paths, reason))
        return None

    weights: list[Weight] = []
    for gemm in gemms:
        parameters = gemm.parameters
        if any(isinstance(parameter, Float8Tensor) for parameter in parameters):
            if _excluded_by(gemm.name, exclude) is None:
                weights += [_stored_weight(gemm, i) for i in range(len(parameters))]
        elif (chosen := recipe_for(gemm, gemm.paths, parameters)) is not None:
            weights.append(_cast_weight(gemm, chosen))
    weights = _tie(weights, share_scales)
    for stack in stacks:
        parameter = stack.parameter()
        if isinstance(parameter, Float8Tensor):
            if _excluded_by(stack.name, exclude) is None:
                weights.append(_stacked_weight(stack, parameter.spec, None, names))
        elif stack.precision is not None:
            chosen = recipe_for(stack, (stack.path,), (parameter,))
            spec = None if chosen is None else spec_of_stacked(stack, chosen)
            if spec is not None:
                weights.append(_stacked_weight(stack, spec, chosen, names))
            elif chosen is not None:
                reasons[stack.path] = "blocks of its scales cross matrices that are cast as one"
    return FoundWeights(weights, reasons)


def _excluded_by(name: str, exclude: Sequence[str]) -> str | None:
    return next((pattern for pattern in exclude if matches(name, pattern)), None)


class StackedWeight(NamedTuple):
    """A parameter that its module casts as a stack of matrices, and how it does."""

    module: nn.Module
    name: str
    """Qualified name of the module."""
    local: str
    """Name of the parameter below the module."""
    precision: Precision | None
    """None for modules that were not converted."""
    shape: tuple[int, ...]
    """Shape of the stack: the matrices of all experts, or of this one."""
    matrices: Callable[[slice], Tensor]
    """The matrices of some experts."""
    lay_out: Callable[[Tensor], Tensor]
    """The cast of all matrices, laid out as the parameter is."""
    obstacle: str = ""
    """Why no format of another library has names for it; empty if one has."""
    first: int = 0
    """The number of the first expert."""
    joined: bool = False
    """Whether other parameters are cast with it as one matrix."""

    @property
    def path(self) -> str:
        """Qualified name of the parameter."""
        return _path(self.name, self.local)

    @property
    def castable(self) -> bool:
        """Whether its module can be converted; experts in a loop of a model's own cannot."""
        return isinstance(self.module, (ExpertsBase, GroupedLinear)) or bool(
            experts_class(self.module) or known_linear(type(self.module))
        )

    def parameter(self) -> Tensor:
        """The parameter; parametrized, its value."""
        return _tensor(self.module, self.local)


def _tensor(module: nn.Module, path: str) -> Tensor:
    return operator.attrgetter(path)(module)


def stacked_weights(model: nn.Module) -> Iterator[StackedWeight]:
    """The weights of layers of other libraries, and of experts: one, or all in a parameter."""
    for name, module in model.named_modules():
        linear_class = known_linear(type(module))
        if linear_class is not None:
            if linear_class is not nn.Linear:
                yield _stack_of_linear(name, module, linear_class)
        elif isinstance(module, GroupedLinear):
            yield from _stacks_of_grouped(name, module)
        else:
            for local, weight in _expert_weights(module).items():
                yield _stack_of_experts(name, module, local, weight)


def _expert_weights(module: nn.Module) -> dict[str, ExpertWeight]:
    """The parameters with experts' matrices, by their names below the module."""
    kind = experts_class(module)
    if kind is not None:
        return kind.weights(module)
    if isinstance(module, ExpertsBase):
        return {f"{layer}_weight": ExpertWeight(layer) for layer in module.layer_names}
    stacks = ((local, module._parameters.get(local)) for local in STACKED)
    return {
        local: ExpertWeight("")
        for local, stack in stacks
        if isinstance(stack, Float8Tensor) and stack.ndim == 3
    }


def _stack_of_linear(name: str, module: nn.Module, linear_class: type) -> StackedWeight:
    kind = load_float8_class(linear_class)
    precision = module._fp8 if isinstance(module, OtherLinear) else None
    shape = (1, *kind.matrix(module).shape)
    obstacle = f"no other library has an FP8 form of {linear_class.__name__}"

    def matrices(experts: slice) -> Tensor:
        return kind.matrix(module).detach().unsqueeze(0)

    def lay_out(stack: Tensor) -> Tensor:
        return kind.from_matrix(stack[0])

    return StackedWeight(module, name, "weight", precision, shape, matrices, lay_out, obstacle)


def _stacks_of_grouped(name: str, module: GroupedLinear) -> Iterator[StackedWeight]:
    local_names = module.gemms[0].weights
    for index, local in enumerate(local_names):
        single = len(local_names) == 1 and local == "weight"

        def matrices(experts: slice, local: str = local, single: bool = single) -> Tensor:
            weight = _tensor(module, local).detach()
            return weight[experts] if single else weight.unsqueeze(0)

        shape = tuple(_tensor(module, local).shape)
        shape, lay_out = (shape, _same) if single else ((1, *shape), operator.itemgetter(0))
        obstacle = "no other library has names for the weights of GroupedLinear"
        yield StackedWeight(
            module, name, local, module._fp8, shape, matrices, lay_out, obstacle, index
        )


_T = TypeVar("_T")


def _same(x: _T) -> _T:
    return x


def _stack_of_experts(
    name: str, module: nn.Module, local: str, weight: ExpertWeight
) -> StackedWeight:
    kind = experts_class(module)
    shape = _tensor(module, local).shape
    experts = shape[0] if kind is None else kind.shapes(module)[0][0]

    def stack_of(parameter: str) -> Tensor:
        value = _tensor(module, parameter).detach()
        value = value.view(experts, -1, value.shape[-1]) if value.ndim == 2 else value
        return value.mT if weight.transposed else value

    joined = weight.joined or (local,)
    counts = [stack_of(parameter).shape[1] for parameter in joined]
    start = sum(counts[: joined.index(local)])
    rows = slice(start, start + counts[joined.index(local)])

    def matrices(numbers: slice) -> Tensor:
        stacks = [stack_of(parameter)[numbers] for parameter in joined]
        return stacks[0] if len(stacks) == 1 else torch.cat(stacks, 1)

    def lay_out(stack: Tensor) -> Tensor:
        stack = stack[:, rows] if len(joined) > 1 else stack
        stack = stack.mT if weight.transposed else stack
        return stack if stack.shape == shape else stack.reshape(shape)

    states = dict(precisions(module)) if isinstance(module, ExpertsBase) else {}
    stack_shape = (experts, sum(counts), stack_of(local).shape[2])
    obstacle = _obstacle(module, local, weight)
    return StackedWeight(
        module,
        name,
        local,
        states.get(weight.layer),
        stack_shape,
        matrices,
        lay_out,
        obstacle,
        joined=len(joined) > 1,
    )


def _obstacle(module: nn.Module, local: str, weight: ExpertWeight) -> str:
    """Why no other library has names for the matrices in a parameter, if none has."""
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


def _hollow(shape: tuple[int, ...], spec: Float8Spec) -> Float8Tensor:
    """A tensor without values."""
    scale = torch.empty(spec.scale_shape(shape), device="meta")
    data = torch.empty(shape, dtype=torch.uint8, device="meta").view(spec.fp8_dtype)
    return Float8Tensor(data, scale, scale, spec, torch.float32)


def spec_of_stacked(stack: StackedWeight, recipe: Recipe) -> Float8Spec | None:
    """How a parameter is stored that holds the cast of its layer; None if no blocks say it."""
    with fallback("silent"):
        laid_out = stack.lay_out(_hollow(stack.shape, spec_of_experts(recipe.linear.w)))
    return laid_out.spec if isinstance(laid_out, Float8Tensor) else None


def _cast_stack(
    stack: StackedWeight, recipe: Recipe, experts: slice = slice(None), *, amax: bool = False
) -> Float8Tensor:
    """Cast matrices as a forward in evaluation would now."""
    x, spec = stack.matrices(experts), recipe.linear.w
    slots = None if stack.precision is None else _slots(stack.precision, recipe, x.device)
    params = None
    with torch.no_grad():
        if slots is not None:
            factors = slots.scale_for(W, x, record=False).factors
            scale, encode = factors.scale.view(-1, 1, 1), factors.encode.view(-1, 1, 1)
            if scale.shape[0] > 1:
                start = stack.first + (experts.start or 0)
                numbers = slice(start, start + x.shape[0])
                scale, encode = scale[numbers], encode[numbers]
            params = QuantParams(Factors(scale, encode), None, "encode")
        qdata, scale = quantize(x, spec, None, params, float(recipe.linear.epsilon)).rowwise
    batch = spec_of_experts(spec)
    counts = batch.scale_shape(tuple(x.shape))
    scale = scale.reshape(-1, 1, 1) if spec.per_tensor else scale[:, : counts[1], : counts[2]]
    amaxes = block_amax(x, batch.block) if amax else scale
    return Float8Tensor(qdata[:, : x.shape[1], : x.shape[2]], scale, amaxes, batch, x.dtype)


def _buffers(x: Tensor) -> Stored:
    """The buffers of a Float8Tensor."""
    stored = cast("Float8Tensor", x)
    return Stored(stored.qdata, stored.scale, stored.amax)


def _stacked_weight(
    stack: StackedWeight, spec: Float8Spec, recipe: Recipe | None, names: SavedNames
) -> Weight:
    """A parameter that is stored in FP8, if ``recipe`` is None, or cast by it.

    ``experts`` are each expert's matrices, as other libraries have them.
    """

    def make(*, amax: bool = False) -> list[Stored]:
        if recipe is None:
            return [_buffers(stack.parameter().detach())]
        return [_buffers(stack.lay_out(_cast_stack(stack, recipe, amax=amax)))]

    def make_matrix(expert: int, rows: slice, *, amax: bool = False) -> list[Stored]:
        if recipe is None:
            matrix = stack.parameter().detach()[expert]
        else:
            matrix = _cast_stack(stack, recipe, slice(expert, expert + 1), amax=amax)[0]
        return [_buffers(matrix[rows])]

    def split() -> tuple[Weight, ...]:
        return _split_experts(stack, spec, make_matrix, names, stored=recipe is None)

    return Weight(
        (stack.path,),
        (tuple(stack.parameter().shape),),
        stack.path,
        spec,
        None,
        make,
        stored=recipe is None,
        obstacle=stack.obstacle,
        experts=None if stack.obstacle else split,
    )


def _split_experts(
    stack: StackedWeight,
    spec: Float8Spec,
    make_matrix: Callable[..., list[Stored]],
    names: SavedNames,
    *,
    stored: bool,
) -> tuple[Weight, ...]:
    """The matrices of the experts in a stack, under the names that other libraries read."""
    experts, rows, columns = stack.shape
    if stack.path in names.stacks:
        saved = names.stacks[stack.path]
        raise ValueError(
            f"{stack.path} must be a stack that Transformers saves matrix by matrix, since it "
            f"reads no other experts in FP8; it saves this one as {saved or 'something else'}. "
            f"Leave the experts in high precision by exclude=[{stack.name!r}], or a pattern such "
            f"as {'*.' + stack.name.rpartition('.')[2]!r}, or export the model in "
            "format='float8lab'."
        )
    count = names.matrices_per_expert(stack.path)
    size, (height, width) = rows // count, spec.block[1:]
    height = -1 if width == -1 and height in (-1, size) else height
    if count > 1 and height > 1 and size % height:
        raise ValueError(
            f"{stack.path} must have a multiple of {height} rows for each of "
            f"{' and '.join(STACKED[stack.local])}, or blocks would cross them; got {size}. "
            "Exclude it, or export it in format='float8lab'."
        )
    weights = []
    for expert in range(experts):
        for index in range(count):
            name = names.matrix(stack.path, expert, index)
            of_matrix = slice(index * size, (index + 1) * size)
            matrix = Weight(
                (name,),
                ((size, columns),),
                name.removesuffix(".weight"),
                replace(spec, block=(height, width)),
                None,
                functools.partial(make_matrix, expert, of_matrix),
                stored=stored,
                parameters=(stack.path,),
            )
            weights.append(matrix)
    return tuple(weights)


def _used_otherwise(
    model: nn.Module, gemms: Sequence[GemmWeight], stacks: Sequence[StackedWeight]
) -> set[int]:
    """Parameters that some module uses in another way, as an embedding does."""
    ours = {(id(gemm.module), name) for gemm in gemms for name in gemm.local_names}
    for stack in stacks:
        below, _, local = stack.local.rpartition(".")
        ours.add((id(stack.module.get_submodule(below)), local))
    return {
        id(parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if (id(module), name) not in ours
    }


def _recipe(precision: Precision | None, asked: Recipe | None, default: Recipe) -> Recipe | None:
    """The recipe by which a weight is cast; None if it is not cast."""
    if precision is None:
        return asked or default
    if precision.pinned:
        return precision.recipe
    used = {recipe for recipe, _ in precision.slots}
    sole: Recipe | None = used.pop() if len(used) == 1 else None
    return asked or precision.recipe or sole or default


def _stored_weight(gemm: GemmWeight, index: int) -> Weight:
    """A parameter that is stored in FP8."""
    weight = gemm.parameters[index]
    if not isinstance(weight, Float8Tensor):
        raise ValueError(
            f"{gemm.name} must have all parts of its weight in FP8, or none; "
            f"{gemm.local_names[index]} is {weight.dtype}. Exclude it."
        )

    def make(*, amax: bool = False) -> list[Stored]:
        return [_buffers(weight.detach())]

    recipe = None if gemm.precision is None else gemm.precision.recipe
    return Weight(
        (gemm.paths[index],),
        (tuple(weight.shape),),
        gemm.name,
        weight.spec,
        None if recipe is None else recipe.linear.x,
        make,
        _input_scale(gemm.precision, recipe),
        stored=True,
    )


def _cast_weight(gemm: GemmWeight, recipe: Recipe) -> Weight:
    """Parameters in high precision that a recipe casts as one matrix."""
    plan = recipe.linear
    shapes = tuple(tuple(parameter.shape) for parameter in gemm.parameters)
    precision = gemm.precision or Precision(recipe)

    def make(scale: Tensor | None = None, *, amax: bool = False) -> list[Stored]:
        matrices = [parameter.detach() for parameter in gemm.parameters]
        matrix = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        if scale is None:
            qdata, scales = _cast(matrix, precision, recipe)
        else:
            scales = scale.to(matrix.device).reshape(1, 1)
            qdata, *_ = cast_op(
                *("", (matrix,), matrix.dtype, plan.w.fp8_dtype, plan.w.block, "decode", 0.0, 1),
                *(True, False, False, scales),
            )
        amaxes = block_amax(matrix, plan.w.block) if amax else scales
        return _split(Stored(qdata, scales, amaxes), shapes, plan.w)

    rows = plan.w.block[0]
    if rows > 1 and any(shape[0] % rows for shape in shapes[:-1]):
        raise ValueError(
            f"{gemm.name} must have parts of a multiple of {rows} rows, since its weight is cast "
            f"whole and blocks would cross them; got {[s[0] for s in shapes]}. Exclude it, or give "
            "a recipe with other blocks."
        )
    input_scale = _input_scale(precision, recipe)
    return Weight(gemm.paths, shapes, gemm.name, plan.w, plan.x, make, input_scale)


def _cast(weight: Tensor, precision: Precision, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Cast a weight as a forward in evaluation would now; data and scales have no padding."""
    slots = _slots(precision, recipe, weight.device)
    spec = recipe.linear.w
    with torch.no_grad():
        qdata, scale = call_under(recipe, slots).scales.quantize(weight, W, spec).rowwise
    rows, columns = spec.scale_shape(tuple(weight.shape))
    scale = scale.reshape(1, 1) if spec.per_tensor else scale[:rows, :columns]
    return qdata[: weight.shape[0], : weight.shape[1]], scale


def _slots(precision: Precision, recipe: Recipe, device: torch.device) -> DelayedSlots | None:
    if not isinstance(recipe, DelayedScaling):
        return None
    if not any(used == recipe for used, _ in precision.slots):
        precision.prepare(device, recipe)
    return next(slots for (used, _), slots in precision.slots.items() if used == recipe)


def _input_scale(precision: Precision | None, recipe: Recipe | None) -> Tensor | None:
    """The scale of the input under a delayed recipe; None unless the recipe has seen an input."""
    for (used, _), slots in () if precision is None else precision.slots.items():
        if used == recipe:
            state = slots.tensors()
            if bool(state["seeded"][X] | (state["steps"][X] > 0)):
                return state["scale"][X].detach().clone().reshape(1)
    return None


def _split(matrix: Stored, shapes: Sequence[tuple[int, ...]], spec: Float8Spec) -> list[Stored]:
    """Split a matrix into matrices of these shapes, along dimension 0."""
    data = matrix.qdata.split([shape[0] for shape in shapes])
    if spec.block[0] == -1:
        return [Stored(rows, matrix.scale, matrix.amax) for rows in data]
    counts = [spec.scale_shape(shape)[0] for shape in shapes]
    scales, amaxes = matrix.scale.split(counts), matrix.amax.split(counts)
    return [Stored(*buffers) for buffers in zip(data, scales, amaxes, strict=True)]


def _tie(weights: list[Weight], share_scales: Sequence[Sequence[str]]) -> list[Weight]:
    """Give siblings one scale, the largest of theirs; those stored in FP8 must have it already."""
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
        scales = functools.cache(functools.partial(_largest_scale, tuple(m.make for m in members)))
        if any(member.stored for member in members):
            stored = torch.cat([matrix.scale.view(1) for m in members for matrix in m.make()])
            if not bool((stored == stored[0]).all()):
                raise ValueError(
                    f"share_scales must name layers that are not stored in FP8, or have one scale; "
                    f"{names} have {stored.tolist()}. Leave them out: stored bytes are not changed."
                )
            continue
        for index, member in zip(indices, members, strict=True):
            result[index] = replace(member, make=functools.partial(_with_scale, member, scales))
    return result


def _with_scale(weight: Weight, scale: Callable[[], Tensor], *, amax: bool = False) -> list[Stored]:
    return weight.make(scale(), amax=amax)


def _largest_scale(makers: Sequence[Callable[..., list[Stored]]]) -> Tensor:
    return torch.stack([matrix.scale.view(()) for make in makers for matrix in make()]).max()
