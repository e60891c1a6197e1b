"""The weights of a model's FP8 products, and the bytes of these that the products use.

Bytes come from the very cast that modules run, with the scales in force: a weight in high precision
has the bytes that a forward in evaluation would use now, and a weight stored in FP8 has its own.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8lab.checkpoints.experts import STACKED
from float8lab.checkpoints.layouts import Stored, Weight
from float8lab.formats import Float8Spec
from float8lab.integrations.checkpoint.saved_names import SavedNames
from float8lab.nn.casts import cast, cast_by, spec_of_experts
from float8lab.nn.convert import matches
from float8lab.nn.convert.other_experts import ExpertWeight, experts_class
from float8lab.nn.convert.other_linear import OtherLinear, known_linear, load_float8_class
from float8lab.nn.convert.walk import is_unseen
from float8lab.nn.expert_mlp import ExpertsBase
from float8lab.nn.grouped_linear import GroupedLinear
from float8lab.nn.precision import Call, Precision, W, X, precisions
from float8lab.ops import cast_op
from float8lab.recipes.delayed import DelayedSlots, Factors, QuantParams
from float8lab.recipes.recipe import DelayedScaling, Recipe
from float8lab.tensor import Float4Tensor, Float8Tensor
from float8lab.tensor.blocks import block_amax
from float8lab.tensor.dispatch import fallback

__all__ = [
    "FoundWeights",
    "HeldWeight",
    "Product",
    "find_weights",
    "held_weights",
    "products",
    "spec_of_held",
]


class Product(NamedTuple):
    """A product of a module, with the weight that some of its parameters form."""

    module: nn.Module
    name: str
    """Qualified name of the module."""
    parameters: tuple[str, ...]
    """Their names in the module; they are concatenated along dimension 0."""
    precision: Precision | None
    """None for a plain ``torch.nn.Linear``."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Qualified names of the parameters."""
        return tuple(f"{self.name}.{p}" if self.name else p for p in self.parameters)


def products(model: nn.Module) -> list[Product]:
    """The linear products of a model, in its order; a module that is used twice comes once.

    Layers of other libraries, such as Conv1D, are left out, since no reader has an FP8 form for
    them, and so are the layers of experts, which are no single product.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, (OtherLinear, GroupedLinear, ExpertsBase)):
            continue
        parts = [(part, p) for part, p in precisions(module) if _names(module, part)]
        found += [Product(module, name, _names(module, part), p) for part, p in parts]
        if not parts and isinstance(module, nn.Linear):
            found.append(Product(module, name, ("weight",), None))
    return found


def _names(module: nn.Module, part: str) -> tuple[str, ...]:
    """The parameters that form the weight of a product."""
    if part:
        names: Sequence[str] = (f"{part}_weight",)
    else:
        prefixes: Any = getattr(module, "_prefixes", None) or getattr(module, "_names", ("",))
        names = [f"{prefix}weight" for prefix in prefixes]
    return tuple(names) if all(name in module._parameters for name in names) else ()


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
    linears, held = products(model), list(held_weights(model))
    converted = any(product.precision is not None for product in linears)
    converted |= any(
        weight.precision is not None or isinstance(weight.parameter(), Float8Tensor)
        for weight in held
    )
    shared = _shared_with_others(model, linears, held)
    reasons: dict[str, str] = {}

    def chosen_for(
        layer: Product | HeldWeight, paths: Sequence[str], parameters: Sequence[Any]
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
        elif any(id(parameter) in shared for parameter in parameters):
            reason = "a module uses it in another way, too"
        else:
            return chosen
        reasons.update(dict.fromkeys(paths, reason))
        return None

    weights: list[Weight] = []
    for product in linears:
        parameters = [getattr(product.module, name) for name in product.parameters]
        if any(isinstance(parameter, Float8Tensor) for parameter in parameters):
            if _excluded_by(product.name, exclude) is None:
                weights += [_as_stored(product, i) for i in range(len(parameters))]
        elif (chosen := chosen_for(product, product.paths, parameters)) is not None:
            weights.append(_as_cast(product, chosen))
    weights = _tie(weights, share_scales)
    for weight in held:
        if isinstance(weight.parameter(), Float8Tensor):
            if _excluded_by(weight.name, exclude) is None:
                weights.append(_held_weight(weight, None, names))
        elif weight.precision is not None:
            chosen = chosen_for(weight, (weight.path,), (weight.parameter(),))
            if chosen is not None and spec_of_held(weight, chosen) is None:
                reasons[weight.path] = (
                    "blocks of its scales lie across matrices that are cast as one"
                )
            elif chosen is not None:
                weights.append(_held_weight(weight, chosen, names))
    return FoundWeights(weights, reasons)


def _excluded_by(name: str, exclude: Sequence[str]) -> str | None:
    return next((pattern for pattern in exclude if matches(name, pattern)), None)


class HeldWeight(NamedTuple):
    """A parameter that is no ``torch.nn.Linear``'s weight, and how its module casts it."""

    module: nn.Module
    name: str
    """Qualified name of the module."""
    local: str
    """Name of the parameter below the module."""
    precision: Precision | None
    """None for modules that were not converted."""
    shape: tuple[int, ...]
    """Of what is cast: the matrices of all experts, or of this one."""
    take: Callable[[slice], Tensor]
    """What is cast, of some experts."""
    lay_out: Callable[[Any], Any]
    """The cast of all that, laid out as the parameter is."""
    obstacle: str = ""
    """Why no format of another library has names for it; empty if one has."""
    first: int = 0
    """The number of the first expert."""
    joined: bool = False
    """Whether other parameters are cast with it as one matrix."""

    @property
    def path(self) -> str:
        """Qualified name of the parameter."""
        return f"{self.name}.{self.local}" if self.name else self.local

    @property
    def castable(self) -> bool:
        """Whether its module can be converted; experts in a loop of a model's own cannot."""
        return isinstance(self.module, (ExpertsBase, GroupedLinear)) or bool(
            experts_class(self.module) or known_linear(type(self.module))
        )

    def parameter(self) -> Tensor:
        """The parameter; parametrized, its value."""
        parameter: Tensor = operator.attrgetter(self.local)(self.module)
        return parameter


def held_weights(model: nn.Module) -> Iterator[HeldWeight]:
    """The weights of layers of other libraries, and of experts: one, or all in a parameter."""
    for name, module in model.named_modules():
        known = known_linear(type(module))
        if known is not None:
            if known is not nn.Linear:
                yield _held_by_linear(name, module, known)
        elif isinstance(module, GroupedLinear):
            yield from _held_by_grouped(name, module)
        else:
            kind = experts_class(module)
            if kind is not None:
                descriptions = kind.weights(module)
            elif isinstance(module, ExpertsBase):
                descriptions = {f"{layer}_weight": ExpertWeight(layer) for layer in module.parts}
            else:
                stacks = ((local, module._parameters.get(local)) for local in STACKED)
                descriptions = {
                    local: ExpertWeight("")
                    for local, stack in stacks
                    if isinstance(stack, Float8Tensor) and stack.ndim == 3
                }
            for local, weight in descriptions.items():
                yield _held_by_experts(name, module, local, weight)


def _held_by_linear(name: str, module: Any, known: type) -> HeldWeight:
    kind = load_float8_class(known)

    def take(experts: slice) -> Tensor:
        return kind.matrix(module).detach().unsqueeze(0)

    return HeldWeight(
        module, name, "weight", module._fp8 if isinstance(module, OtherLinear) else None,
        (1, *kind.matrix(module).shape), take, lambda x: kind.from_matrix(x[0]),
        f"no other library has an FP8 form of {known.__name__}",
    )  # fmt: skip


def _held_by_grouped(name: str, module: GroupedLinear) -> Iterator[HeldWeight]:
    locals_of = module._names["weight"]
    obstacle = "no other library has names for the weights of GroupedLinear"
    for index, local in enumerate(locals_of):
        single = len(locals_of) == 1 and local == "weight"

        def take(experts: slice, local: str = local, single: bool = single) -> Tensor:
            weight: Tensor = getattr(module, local).detach()
            return weight[experts] if single else weight.unsqueeze(0)

        weight = getattr(module, local)
        shape = tuple(weight.shape) if single else (1, *weight.shape)
        yield HeldWeight(
            module, name, local, module._fp8, shape, take,
            _same if single else operator.itemgetter(0), obstacle, index,
        )  # fmt: skip


def _same(x: Any) -> Any:
    return x


def _held_by_experts(name: str, module: nn.Module, local: str, weight: ExpertWeight) -> HeldWeight:
    kind = experts_class(module)
    parameter: Tensor = operator.attrgetter(local)(module)
    experts = parameter.shape[0] if kind is None else kind.shapes(module)[0][0]

    def matrices(parameter_name: str) -> Tensor:
        value: Tensor = operator.attrgetter(parameter_name)(module).detach()
        value = value.view(experts, -1, value.shape[-1]) if value.ndim == 2 else value
        return value.mT if weight.transposed else value

    joined = weight.joined or (local,)
    rows = [matrices(sibling).shape[1] for sibling in joined]
    first = sum(rows[: joined.index(local)])
    own_rows = slice(first, first + matrices(local).shape[1])

    def take(which: slice) -> Tensor:
        batches = [matrices(sibling)[which] for sibling in joined]
        return batches[0] if len(batches) == 1 else torch.cat(batches, 1)

    def lay_out(x: Any) -> Any:
        x = x[:, own_rows] if len(joined) > 1 else x
        x = x.mT if weight.transposed else x
        return x if x.shape == parameter.shape else x.reshape(parameter.shape)

    precision = dict(precisions(module)).get(weight.part)
    return HeldWeight(
        module, name, local, precision if isinstance(module, ExpertsBase) else None,
        (experts, sum(rows), matrices(local).shape[2]), take, lay_out,
        _obstacle(module, local, weight), joined=len(joined) > 1,
    )  # fmt: skip


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


def spec_of_held(held: HeldWeight, recipe: Recipe) -> Float8Spec | None:
    """How a parameter is stored that holds the cast of its layer; None if no blocks say it."""
    with fallback("silent"):
        laid_out = held.lay_out(_hollow(held.shape, spec_of_experts(recipe.linear.w)))
    return laid_out.spec if isinstance(laid_out, Float8Tensor) else None


def _cast_batch(
    held: HeldWeight, recipe: Recipe, experts: slice = slice(None), *, amax: bool = False
) -> Float8Tensor:
    """Cast matrices as a forward in evaluation would now."""
    x, spec = held.take(experts), recipe.linear.w
    assert held.precision is not None, "of a converted module"
    slots = _slots(held.precision, recipe, x.device)
    params = None
    with torch.no_grad():
        if slots is not None:
            factors = slots.scale_for(W, x, record=False).factors
            scale, encode = factors.scale.view(-1, 1, 1), factors.encode.view(-1, 1, 1)
            start = held.first + (experts.start or 0)
            if scale.shape[0] > 1:
                of = slice(start, start + x.shape[0])
                scale, encode = scale[of], encode[of]
            params = QuantParams(Factors(scale, encode), None)
        qdata, scale = cast_by(x, spec, None, recipe.linear, params).rowwise
    batch = spec_of_experts(spec)
    counts = batch.scale_shape(tuple(x.shape))
    scale = scale.reshape(-1, 1, 1) if spec.per_tensor else scale[:, : counts[1], : counts[2]]
    amaxes = block_amax(x, batch.block) if amax else scale
    return Float8Tensor(qdata[:, : x.shape[1], : x.shape[2]], scale, amaxes, batch, x.dtype)


def _held_weight(held: HeldWeight, recipe: Recipe | None, names: SavedNames) -> Weight:
    """A parameter that is stored in FP8, if ``recipe`` is None, or cast by it.

    ``experts`` are each expert's matrices, as other libraries have them.
    """
    parameter: Any = held.parameter()
    spec = parameter.spec if recipe is None else spec_of_held(held, recipe)
    assert spec is not None, "it was found before"

    def make(*, amax: bool = False) -> list[Stored]:
        if recipe is None:
            stored: Any = held.parameter().detach()
        else:
            stored = held.lay_out(_cast_batch(held, recipe, amax=amax))
        return [Stored(stored.qdata, stored.scale, stored.amax)]

    def make_part(expert: int, rows: slice, *, amax: bool = False) -> list[Stored]:
        if recipe is None:
            matrix: Any = held.parameter().detach()[expert]
        else:
            matrix = _cast_batch(held, recipe, slice(expert, expert + 1), amax=amax)[0]
        cut = matrix[rows]
        return [Stored(cut.qdata, cut.scale, cut.amax)]

    def split() -> tuple[Weight, ...]:
        return _split_experts(held, spec, make_part, names, stored=recipe is None)

    what = (held.path,), (tuple(parameter.shape),), held.path, spec
    return Weight(
        *what, None, make, stored=recipe is None, obstacle=held.obstacle,
        experts=None if held.obstacle else split,
    )  # fmt: skip


def _split_experts(
    held: HeldWeight,
    spec: Float8Spec,
    make_part: Callable[..., list[Stored]],
    names: SavedNames,
    *,
    stored: bool,
) -> tuple[Weight, ...]:
    """The matrices of the experts in a stack, under the names that other libraries read."""
    experts, rows, columns = held.shape
    if held.path in names.stacks:
        saved = names.stacks[held.path]
        raise ValueError(
            f"{held.path} must be a stack that Transformers saves matrix by matrix, since it reads "
            f"no other experts in FP8; it saves this one as {saved or 'something else'}. Leave "
            f"the experts in high precision by exclude=[{held.name!r}], or a pattern such as "
            f"{'*.' + held.name.rpartition('.')[2]!r}, or export the model in format='float8lab'."
        )
    matrices = names.matrices_per_expert(held.path)
    each, (height, width) = rows // matrices, spec.block[1:]
    height = -1 if width == -1 and height in (-1, each) else height
    if matrices > 1 and height > 1 and each % height:
        raise ValueError(
            f"{held.path} must have a multiple of {height} rows for each of "
            f"{' and '.join(STACKED[held.local])}, or blocks would lie across them; got {each}. "
            "Exclude it, or export it in format='float8lab'."
        )
    matrix = replace(spec, block=(height, width))
    weights = []
    for expert in range(experts):
        for index in range(matrices):
            name = names.matrix(held.path, expert, index)
            make = functools.partial(make_part, expert, slice(index * each, (index + 1) * each))
            module = name.removesuffix(".weight")
            weights.append(
                Weight(
                    (name,), ((each, columns),), module, matrix, None, make,
                    stored=stored, parameters=(held.path,),
                )
            )  # fmt: skip
    return tuple(weights)


def _shared_with_others(
    model: nn.Module, linears: Sequence[Product], held: Sequence[HeldWeight]
) -> set[int]:
    """Parameters that some module uses in another way, as an embedding does."""
    ours = {(id(p.module), name) for p in linears for name in p.parameters}
    for weight in held:
        below, _, local = weight.local.rpartition(".")
        ours.add((id(weight.module.get_submodule(below)), local))
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


def _as_stored(product: Product, index: int) -> Weight:
    name = product.parameters[index]
    weight: Any = getattr(product.module, name)
    if not isinstance(weight, Float8Tensor):
        raise ValueError(
            f"{product.name} must have all parts of its weight in FP8, or none; {name} is "
            f"{weight.dtype}. Exclude it."
        )

    def make(*, amax: bool = False) -> list[Stored]:
        own: Any = weight.detach()
        return [Stored(own.qdata, own.scale, own.amax)]

    precision = product.precision
    activations = scale = None
    if precision is not None and precision.recipe is not None:
        activations = precision.recipe.linear.x
        scale = _input_scale(precision, precision.recipe)
    what = (product.paths[index],), (tuple(weight.shape),), product.name, weight.spec
    return Weight(*what, activations, make, scale, stored=True)


def _as_cast(product: Product, recipe: Recipe) -> Weight:
    module, plan = product.module, recipe.linear
    parameters = [getattr(module, name) for name in product.parameters]
    shapes = tuple(tuple(parameter.shape) for parameter in parameters)
    precision = product.precision or Precision(recipe)
    scale = _input_scale(precision, recipe)

    def make(given: Tensor | None = None, *, amax: bool = False) -> list[Stored]:
        weights = [getattr(module, name).detach() for name in product.parameters]
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        if given is None:
            codes, scales = _cast(whole, precision, recipe)
        else:
            scales = given.to(whole.device).reshape(1, 1)
            codes, *_ = cast_op(
                *("", (whole,), whole.dtype, plan.w.fp8_dtype, plan.w.block, "decode", 0.0, 1),
                *(True, False, False, scales),
            )
        amaxes = block_amax(whole, plan.w.block) if amax else scales
        return _split(Stored(codes, scales, amaxes), shapes, plan.w)

    found = Weight(product.paths, shapes, product.name, plan.w, plan.x, make, scale)
    rows = plan.w.block[0]
    if rows > 1 and any(shape[0] % rows for shape in shapes[:-1]):
        raise ValueError(
            f"{product.name} must have parts of a multiple of {rows} rows, since its weight is "
            f"cast whole and blocks would lie across them; got {[s[0] for s in shapes]}. Exclude "
            "it, or give a recipe with other blocks."
        )
    return found


def _cast(weight: Tensor, precision: Precision, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Cast a weight as a forward in evaluation would now; codes and scales have no padding."""
    slots = _slots(precision, recipe, weight.device)
    spec = recipe.linear.w
    with torch.no_grad():
        qdata, scale = cast(weight, spec, W, Call(recipe, slots, False)).rowwise
    rows, columns = spec.scale_shape(tuple(weight.shape))
    scale = scale.reshape(1, 1) if spec.per_tensor else scale[:rows, :columns]
    return qdata[: weight.shape[0], : weight.shape[1]], scale


def _slots(precision: Precision, recipe: Recipe, device: torch.device) -> DelayedSlots | None:
    if not isinstance(recipe, DelayedScaling):
        return None
    if not any(used == recipe for used, _ in precision.slots):
        precision.prepare(device, recipe)
    return next(slots for (used, _), slots in precision.slots.items() if used == recipe)


def _input_scale(precision: Precision, recipe: Recipe) -> Tensor | None:
    """The scale of the input under a delayed recipe; None unless the recipe has seen an input."""
    for (used, _), slots in precision.slots.items():
        if used == recipe:
            state = slots.tensors()
            if bool(state["seeded"][X] | (state["steps"][X] > 0)):
                return state["scale"][X].detach().clone().reshape(1)
    return None


def _split(whole: Stored, shapes: Sequence[tuple[int, ...]], spec: Float8Spec) -> list[Stored]:
    """Split a matrix into the parts of these shapes, along dimension 0."""
    if len(shapes) == 1:
        return [whole]
    codes = whole.qdata.split([shape[0] for shape in shapes])
    if spec.block[0] == -1:
        return [Stored(part, whole.scale, whole.amax) for part in codes]
    counts = [spec.scale_shape(shape)[0] for shape in shapes]
    scales = whole.scale.split(counts)
    amaxes = whole.amax.split(counts)
    return [Stored(*parts) for parts in zip(codes, scales, amaxes, strict=True)]


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
            own = torch.cat([part.scale.view(1) for m in members for part in m.make()])
            if not bool((own == own[0]).all()):
                raise ValueError(
                    f"share_scales must name layers that are not stored in FP8, or have one scale; "
                    f"{names} have {own.tolist()}. Leave them out: stored bytes are not changed."
                )
            continue
        for index, member in zip(indices, members, strict=True):
            result[index] = replace(member, make=functools.partial(_with_scale, member, scales))
    return result


def _with_scale(weight: Weight, scale: Callable[[], Tensor], *, amax: bool = False) -> list[Stored]:
    return weight.make(scale(), amax=amax)


def _largest_scale(makers: Sequence[Callable[..., list[Stored]]]) -> Tensor:
    return torch.stack([part.scale.view(()) for make in makers for part in make()]).max()
