"""The weights of a model's FP8 products, and the bytes of these that the products use.

Bytes come from the very cast that modules run, with the scales in force: a weight in high precision
has the bytes that a forward in evaluation would use now, and a weight stored in FP8 has its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8lab.checkpoints.experts import PARTS
from float8lab.checkpoints.layouts import Stored, Weight
from float8lab.formats import Float8Spec
from float8lab.nn.casts import cast, spec_of_experts
from float8lab.nn.convert import matches
from float8lab.nn.convert.other_linear import OtherLinear
from float8lab.nn.convert.walk import is_unseen
from float8lab.nn.expert_mlp import ExpertsBase
from float8lab.nn.grouped_linear import GroupedLinear
from float8lab.nn.precision import Call, Precision, W, X, precisions
from float8lab.ops import cast_op
from float8lab.recipes.delayed import DelayedSlots
from float8lab.recipes.recipe import DelayedScaling, Recipe
from float8lab.tensor import Float4Tensor, Float8Tensor
from float8lab.tensor.blocks import block_amax, quantize_blocks

__all__ = ["Product", "find_weights", "products"]


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


def find_weights(
    model: nn.Module,
    *,
    recipe: Recipe | None,
    default: Recipe,
    exclude: Sequence[str],
    share_scales: Sequence[Sequence[str]],
    unseen: bool,
) -> list[Weight]:
    """The weights to store in FP8.

    Args:
        model: its layers that run in FP8; if it has none, all its ``torch.nn.Linear``.
        recipe: for layers that have none of their own.
        default: for layers that have no recipe by now; delayed scales in use win over it.
        exclude: layers to leave in high precision, as in ``convert_to_float8``.
        share_scales: names of siblings that get one scale.
        unseen: cast the weights of layers whose forward does not run, too.

    Raises:
        ValueError: siblings that cannot share a scale.
    """
    found = products(model)
    stacks = _stacks(model, exclude, recipe, default, unseen)
    converted = bool(stacks) or any(p.precision is not None for p in found)
    plain = _shared_with_others(model, found)
    weights = []
    for product in found:
        if any(matches(product.name, pattern) for pattern in exclude):
            continue
        parameters = [getattr(product.module, name) for name in product.parameters]
        if any(isinstance(parameter, Float8Tensor) for parameter in parameters):
            weights += [_as_stored(product, i) for i in range(len(parameters))]
            continue
        chosen = _recipe(product.precision, recipe, default)
        passed_over = product.precision is None and converted
        passed_over |= any(isinstance(parameter, Float4Tensor) for parameter in parameters)
        passed_over |= is_unseen(product.module) and not unseen
        if chosen is None or passed_over or any(id(p) in plain for p in parameters):
            continue
        if chosen.linear.fprop:
            weights.append(_as_cast(product, chosen))
    return [*_tie(weights, share_scales), *stacks]


def _stacks(
    model: nn.Module, exclude: Sequence[str], recipe: Recipe | None, default: Recipe, unseen: bool
) -> list[Weight]:
    """Experts that one parameter ``[E, N, K]`` holds: stored in FP8, or cast by their modules."""
    weights = []
    for name, module in model.named_modules():
        if any(matches(name, pattern) for pattern in exclude):
            continue
        prefix = f"{name}." if name else ""
        for local, part in zip(PARTS, ExpertsBase.parts, strict=True):
            parameter = module._parameters.get(local)
            if parameter is None or parameter.ndim != 3:
                continue
            spec = parameter.spec if isinstance(parameter, Float8Tensor) else None
            precision = dict(precisions(module)).get(part)
            if spec is None and precision is not None and isinstance(module, ExpertsBase):
                chosen = _recipe(precision, recipe, default)
                passed_over = isinstance(parameter, Float4Tensor) or not _is_usual(module)
                passed_over |= is_unseen(module) and not unseen
                # Delayed scales lie with the module, one for each expert: its weights stay as they
                # are.
                if chosen is None or passed_over or chosen.linear.delayed:
                    continue
                spec = spec_of_experts(chosen.linear.w) if chosen.linear.fprop else None
            if spec is not None:
                weights.append(_stack(module, prefix, local, spec))
    return weights


def _stack(module: nn.Module, prefix: str, local: str, spec: Float8Spec) -> Weight:
    """A stacked parameter; ``experts`` are each expert's matrices, as Transformers saves them."""

    def of(weight: Any, spec: Float8Spec) -> Any:
        if isinstance(weight, Float8Tensor):
            return weight.detach()
        with torch.no_grad():
            return Float8Tensor(*quantize_blocks(weight.detach(), spec), spec, weight.dtype)

    def make(*, amax: bool = False) -> list[Stored]:
        whole = of(getattr(module, local), spec)
        return [Stored(whole.qdata, whole.scale, whole.amax)]

    def make_part(expert: int, rows: slice, *, amax: bool = False) -> list[Stored]:
        one = of(getattr(module, local)[expert], replace(spec, block=spec.block[1:]))
        part = one[rows]
        return [Stored(part.qdata, part.scale, part.amax)]

    weight: Any = module._parameters[local]
    path, (experts, rows, columns) = f"{prefix}{local}", weight.shape
    stored = isinstance(weight, Float8Tensor)

    def split() -> tuple[Weight, ...]:
        kinds = PARTS[local]
        if not _is_usual(module):
            return ()
        each, (height, width) = rows // len(kinds), spec.block[1:]
        height = -1 if width == -1 and height in (-1, each) else height
        if len(kinds) > 1 and height > 1 and each % height:
            raise ValueError(
                f"{path} must have a multiple of {height} rows for each of {' and '.join(kinds)}, "
                f"or blocks would lie across them; got {each}. Exclude it, or export it in "
                "format='float8lab'."
            )
        matrix = replace(spec, block=(height, width))
        return tuple(
            Weight(
                (f"{prefix}{expert}.{kind}.weight",),
                ((each, columns),),
                f"{prefix}{expert}.{kind}",
                matrix,
                None,
                functools.partial(make_part, expert, slice(i * each, (i + 1) * each)),
                stored=stored,
                parameters=(path,),
            )
            for expert in range(experts)
            for i, kind in enumerate(kinds)
        )

    what = (path,), (tuple(weight.shape),), path, spec
    return Weight(*what, None, make, stored=stored, experts=split)


def _is_usual(module: nn.Module) -> bool:
    """Whether stacked parameters lie as Transformers has them in most models.

    Not transposed, nor with biases, as in models whose rows alternate between gate and up: no other
    library has names for the matrices of these.
    """
    own = {name: p for name, p in module._parameters.items() if p is not None}
    up, down = (own.get(name) for name in PARTS)
    if up is None or down is None or not up.ndim == down.ndim == 3:
        return False
    biased = any(name.endswith("_bias") for name in own)
    return up.shape[1:] == (2 * down.shape[2], down.shape[1]) and not biased


def _shared_with_others(model: nn.Module, found: Sequence[Product]) -> set[int]:
    """Parameters that some module uses in another way, as an embedding does."""
    ours = {(id(p.module), name) for p in found for name in p.parameters}
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
        amaxes = block_amax(whole, plan.w.block) if amax else None
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
    codes = whole.codes.split([shape[0] for shape in shapes])
    if spec.block[0] == -1:
        return [Stored(part, whole.scale, whole.amax) for part in codes]
    counts = [spec.scale_shape(shape)[0] for shape in shapes]
    scales = whole.scale.split(counts)
    amaxes = [None] * len(counts) if whole.amax is None else whole.amax.split(counts)
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
