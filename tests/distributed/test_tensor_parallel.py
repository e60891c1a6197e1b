"""Tensor and sequence parallelism: operands have one rank's bytes, results its sums."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import float8lab
from float8lab.distributed.styles import Float8ColwiseParallel, Float8RowwiseParallel
from float8lab.nn.precision import precisions
from float8lab.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from tests.distributed.equality import Step, assert_row, take_step
from tests.distributed.ranks import Collectives, Ranks, each_check, on_ranks
from tests.recorder import observing

CURRENT = Float8CurrentScaling()
RECIPES: list[Recipe | None] = [
    CURRENT,
    DelayedScaling(),
    DelayedScaling(reduce_amax=False, amax_compute_algo="max", amax_history_len=2),
    Float8RowwiseScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
    Float8RowwiseScaling(high_precision_wgrad=True),
    Float8CurrentScaling(override_linear_precision=(True, False, True)),
    None,
]


class Operands:
    """An observer that keeps the operands of each GEMM, with the name of its FP8 state."""

    def __init__(self, layer: nn.Module) -> None:
        self.names = {precision: name for name, precision in precisions(layer)}
        self.gemms: list[tuple[str, str, Any, Any]] = []

    def saw_cast(self, *args: Any) -> None:
        pass

    def saw_gemm(self, kind: str, call: Any, a: Any, b: Any) -> None:
        """Keep the operands."""
        self.gemms.append((self.names[call.precision], kind, a, b))


class Layout(NamedTuple):
    """How a module is spread."""

    shards: dict[str, int]
    """The dimension along which each parameter is a shard; others are replicas."""
    modes: dict[str, str]
    """"column" or "row", of each of its GEMMs."""
    gated: bool = False
    """Its column-parallel parameters are two behind each other."""
    partial: tuple[str, ...] = ()
    """Parameters whose gradients are partial sums under sequence parallelism."""


def part_of(x: Tensor, dim: int, ranks: Ranks, pieces: int = 1) -> Tensor:
    """This rank's shard, by the rule of torch.chunk, empty ones included."""
    if pieces > 1:
        return torch.cat([part_of(piece, dim, ranks) for piece in x.chunk(pieces, dim)], dim)
    chunk = -(-x.shape[dim] // ranks.world)
    start = min(x.shape[dim], chunk * ranks.rank)
    return x.narrow(dim, start, min(chunk, x.shape[dim] - start))


def assert_summed_alike(mine: Tensor, whole: Tensor, ranks: Ranks, depth: int, what: Any) -> None:
    """Assert equality but for the order of sums.

    Each of R partial sums, and each sum of two of them, is rounded to the output's dtype; and what
    is computed of such sums, ``depth`` layers on, carries their errors.
    """
    assert mine.shape == whole.shape, what
    if whole.numel():
        eps = torch.finfo(whole.dtype).eps
        bound = 2 * ranks.world * depth * eps * whole.float().abs().max()
        assert (mine.float() - whole.float()).abs().max() <= bound, what


def values_of(operand: tuple[Tensor, Tensor], block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """FP8 bytes of an operand, and the scale of each."""
    q, scale = operand
    if scale.ndim == 2:
        for dim, size in enumerate(block):
            if size > 0:
                scale = scale.repeat_interleave(size, dim).narrow(dim, 0, q.shape[dim])
    return q.view(torch.uint8), scale.expand(q.shape)


DIMENSIONS = {"fprop": ("MK", "NK"), "dgrad": ("MN", "KN"), "wgrad": ("NM", "KM")}
"""Of the operands of each GEMM."""


def assert_same_operands(
    mine: Operands, whole: Operands, layer: Any, layout: Layout, recipe: Recipe, ranks: Ranks,
    what: Any,
) -> None:  # fmt: skip
    """Assert that a rank's bytes and scales are its part of one rank's."""
    assert [gemm[:2] for gemm in mine.gemms] == [gemm[:2] for gemm in whole.gemms], what
    for (name, kind, *here), (*_, a, b) in zip(mine.gemms, whole.gemms, strict=True):
        gemm, cut = recipe.linear.gemms()[kind], "N" if layout.modes[name] == "column" else "K"
        pieces = 2 if layout.gated and cut == "N" else 1
        for side, operand, expected in zip(("left", "right"), here, (a, b), strict=True):
            if operand is None:
                assert expected is None
                continue
            block = getattr(gemm, side).block
            for x, y in zip(values_of(operand, block), values_of(expected, block), strict=True):
                for dim, dimension in enumerate(DIMENSIONS[kind][side == "right"]):
                    y = y.narrow(dim, 0, whole.sizes[name][dimension])
                    if dimension == cut:
                        y = part_of(y, dim, ranks, pieces)
                x = x[: y.shape[0], : y.shape[1]]
                assert torch.equal(x, y), (*what, name, kind, side)


def run(layer: Any, x: Tensor, dy: Tensor, recipe: Recipe | None) -> list[dict[str, Tensor]]:
    """Output and gradients of steps: enough to see scales that are delayed, and plans repeated."""
    results = []
    several = recipe is not None and (recipe.linear.delayed or x.is_cuda)
    for step in range(3 if several else 1):
        inp = (x * (step + 1)).requires_grad_()
        with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(inp)
        y.backward(dy * (step + 1))
        gradients = {name: p.grad for name, p in layer.named_parameters()}
        results.append({"y": y.detach(), "dx": inp.grad, **gradients})
        layer.zero_grad()
    return results


def compare(
    ranks: Ranks, make: Any, layout: Layout, recipe: Recipe | None, M: int, features: int,
    out_features: int, sequence_parallel: bool,
) -> None:  # fmt: skip
    """Compare a module that is spread over all ranks with the same on one."""
    what = recipe, layout.modes, sequence_parallel, M
    made = {"device": ranks.device, "params_dtype": torch.bfloat16}
    torch.manual_seed(M)
    whole = make(**made)
    torch.manual_seed(M)
    layer = make(tp_group=dist.group.WORLD, sequence_parallel=sequence_parallel, **made)

    def parameter(name: str, value: Tensor) -> Tensor:
        dim = layout.shards.get(name)
        pieces = 2 if layout.gated and dim == 0 else 1
        return value if dim is None else part_of(value, dim, ranks, pieces)

    for (name, p), mine in zip(whole.named_parameters(), layer.parameters(), strict=True):
        if p.ndim == 1:
            p.data.add_(torch.randn_like(p))
            mine.data.copy_(parameter(name, p.data))
        assert getattr(mine, "sequence_parallel", False) == (
            sequence_parallel and name in layout.partial
        ), name
        assert torch.equal(mine, parameter(name, p)), name

    x = torch.randn(M, 2, features).mul(torch.linspace(0.1, 3, M)[:, None, None])
    x, dy = x.bfloat16().to(ranks.device), torch.randn(M, 2, out_features).bfloat16()
    dy = dy.to(ranks.device)
    rows = 0 if sequence_parallel else None
    enters = rows if "column" in layout.modes.values() else 2
    leaves = rows if "row" in layout.modes.values() else 2

    def shard(value: Tensor, dim: int | None) -> Tensor:
        return value if dim is None else part_of(value, dim, ranks)

    with observing(Operands(whole)) as expected:
        wanted = run(whole, x, dy, recipe)
    with observing(Operands(layer)) as seen:
        found = run(layer, shard(x, enters), shard(dy, leaves), recipe)
    for mine, one in zip(found, wanted, strict=True):
        for name, value in one.items():
            if name in ("y", "dx"):
                value = shard(value, leaves if name == "y" else enters)
            else:
                value = parameter(name, value)
                if sequence_parallel and name in layout.partial:
                    dist.all_reduce(mine[name])
            depth = len(layout.modes)
            assert_summed_alike(mine[name], value, ranks, depth, (*what, name))
    if recipe is not None and M:
        expected.sizes = sizes_of(whole, 2 * M)
        assert_same_operands(seen, expected, layer, layout, recipe, ranks, what)


def sizes_of(layer: Any, M: int) -> dict[str, dict[str, int]]:
    """M, N, K of each GEMM of a module."""
    names = {"": "weight", "fc1": "fc1_weight", "fc2": "fc2_weight"}
    shapes = {name: getattr(layer, names[name]).shape for name, _ in precisions(layer)}
    return {name: {"M": M, "N": shape[0], "K": shape[1]} for name, shape in shapes.items()}


COLUMN = Layout({"weight": 0, "bias": 0}, {"": "column"}, partial=("layer_norm_weight",))
ROW = Layout({"weight": 1}, {"": "row"}, partial=("bias",))
MLP = Layout(
    {"fc1_weight": 0, "fc1_bias": 0, "fc2_weight": 1},
    {"fc1": "column", "fc2": "row"},
    partial=("layer_norm_weight", "layer_norm_bias", "fc2_bias"),
)


def fitting(features: int, recipe: Recipe | None) -> int:
    """At least so many features, that end where a block does."""
    block = 1 if recipe is None else recipe.linear.largest_block
    return -(-features // block) * block


@on_ranks(4)
def check_linear(ranks: Ranks) -> None:
    kinds = itertools.product(RECIPES, (COLUMN, ROW), (False, True))
    for i, (recipe, layout, sequence_parallel) in enumerate(kinds):
        N, K = (fitting(size, recipe) * ranks.world for size in (32, 48))
        make = partial(float8lab.Linear, K, N, parallel_mode=layout.modes[""])
        M = (7, 0, 150, 1)[(i + i // 4) % 4]  # each with every recipe and every way
        compare(ranks, make, layout, recipe, M, K, N, sequence_parallel)


def check_layernorm_linear(ranks: Ranks) -> None:
    K, kind = 80, float8lab.LayerNormLinear
    for recipe, sequence_parallel in itertools.product(RECIPES, (False, True)):
        N = fitting(48, recipe) * ranks.world
        make = partial(kind, K, N, parallel_mode="column", normalization="RMSNorm")
        compare(ranks, make, COLUMN, recipe, 7 if recipe else 150, K, N, sequence_parallel)
    for i, recipe in enumerate(RECIPES):
        N = fitting(48, recipe) * ranks.world
        row = partial(kind, N, K, parallel_mode="row")
        compare(ranks, row, ROW, recipe, (7, 0)[recipe == CURRENT], N, K, i % 2 == 0)


def check_layernorm_mlp(ranks: Ranks) -> None:
    K = 80
    for recipe, sequence_parallel in itertools.product(RECIPES, (False, True)):
        F = fitting(48, recipe) * ranks.world
        for activation, M in (("swiglu", 7), ("gelu", 150)):
            gated = activation == "swiglu"
            make = partial(
                float8lab.LayerNormMLP, K, F, activation=activation, set_parallel_mode=True,
                checkpoint=gated and sequence_parallel,
            )  # fmt: skip
            layout = MLP._replace(gated=gated)
            compare(ranks, make, layout, recipe, M, K, K, sequence_parallel)


def two_of(
    ranks: Ranks, make: Any, layout: Layout, **options: Any
) -> tuple[Any, Any, Callable[[Tensor, str], Tensor]]:
    """A module on one rank and the same on all, and what takes this rank's part of a parameter."""
    made = {"device": ranks.device, "params_dtype": torch.bfloat16}
    torch.manual_seed(7)
    whole = make(**made, **options)
    torch.manual_seed(7)
    layer = make(tp_group=dist.group.WORLD, sequence_parallel=True, **made, **options)

    def parameter(value: Tensor, name: str) -> Tensor:
        dim = layout.shards.get(name)
        return value if dim is None else part_of(value, dim, ranks)

    return whole, layer, parameter


def inputs(ranks: Ranks, rows: int, features: int) -> tuple[Tensor, Tensor]:
    """An input, and this rank's tokens of it."""
    x = torch.randn(rows, features).mul(torch.linspace(0.1, 3, rows)[:, None])
    x = x.bfloat16().to(ranks.device)
    return x.clone().requires_grad_(), part_of(x, 0, ranks).clone().requires_grad_()


def check_stored_weights(ranks: Ranks) -> None:
    """The bytes of weights stored in FP8, at first and after steps, and of what is written."""
    K, F = 64, 128 * ranks.world
    for recipe in filter(None, RECIPES[:6]):
        make = partial(float8lab.LayerNormMLP, K, F, set_parallel_mode=True)
        with float8lab.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            whole, layer, parameter = two_of(ranks, make, MLP)
        optimizers = [
            float8lab.optim.MasterWeights(m.parameters(), torch.optim.SGD, lr=0.5)
            for m in (whole, layer)
        ]
        for step in range(3):
            for name, p in whole.named_parameters():
                mine = layer.get_parameter(name)
                what = recipe, step, name
                if p.ndim == 2:
                    mine, p = mine.detach(), p.detach()
                    data = parameter(p.qdata.view(torch.uint8), name)
                    assert torch.equal(mine.qdata.view(torch.uint8), data), what
                    assert torch.equal(mine.dequantize(), parameter(p.dequantize(), name)), what
            if step == 1:
                with torch.no_grad():
                    for name in MLP.shards:
                        if name.endswith("weight"):
                            new = torch.randn_like(whole.get_parameter(name).dequantize())
                            here = {"device": new.device}
                            new = new * torch.linspace(0.1, 2, new.shape[1], **here)
                            new *= torch.linspace(0.1, 2, len(new), **here)[:, None]
                            whole.get_parameter(name).copy_(new)
                            layer.get_parameter(name).copy_(parameter(new, name))
                continue
            for name, p in whole.named_parameters():
                p.grad = torch.randn_like(p)
                layer.get_parameter(name).grad = parameter(p.grad, name).clone()
            for optimizer in optimizers:
                optimizer.step()
        x, mine = inputs(ranks, 7, K)
        with float8lab.autocast(recipe=recipe):
            y, y_mine = whole(x), layer(mine)
        assert_summed_alike(y_mine, part_of(y, 0, ranks), ranks, 2, recipe)
    again = pickle.loads(pickle.dumps(layer))
    with pytest.raises(RuntimeError, match="tp_group must be set"):
        again(mine)
    again.set_tensor_parallel_group(dist.group.WORLD)
    again.fc1_weight.detach().copy_(layer.fc1_weight.detach())
    with float8lab.autocast(recipe=recipe):
        assert torch.equal(again(mine), layer(mine))
    with (
        float8lab.fp8_model_init(recipe=Float8BlockScaling()),
        pytest.raises(ValueError, match="whole blocks of 128 to store them in FP8; got 64 for"),
    ):
        float8lab.Linear(
            K, 64 * ranks.world, parallel_mode="column", tp_group=dist.group.WORLD, device="cpu"
        )


def assert_same_step(
    ranks: Ranks, pair: Any, call: Callable[[Any, Tensor], Any], recipe: Recipe, what: Any,
    features: int = 64,
) -> None:  # fmt: skip
    """Assert that a step of a module with tokens in shards is that of the same on one rank.

    ``call(layer, x)`` gives an output whose tokens are in shards, too, or whole.
    """
    whole, layer, parameter = pair
    x, mine = inputs(ranks, 6 * ranks.world, features)
    results = []
    for module, inp in ((whole, x), (layer, mine)):
        module.zero_grad()
        with float8lab.autocast(recipe=recipe):
            y = call(module, inp)
        y.square().sum().backward()
        results.append((y.detach(), inp.grad))
    (y, dx), (y_mine, dx_mine) = results
    for dim in range(2):
        y = y if y_mine.shape[dim] == y.shape[dim] else part_of(y, dim, ranks)
    assert_summed_alike(y_mine, y, ranks, 2, (what, "y"))
    assert_summed_alike(dx_mine, part_of(dx, 0, ranks), ranks, 4, (what, "dx"))
    for name, p in whole.named_parameters():
        mine = layer.get_parameter(name)
        if p.grad is None:
            assert mine.grad is None, (what, name)
            continue
        if mine.shape == p.shape and getattr(mine, "sequence_parallel", False):
            dist.all_reduce(mine.grad)
        assert_summed_alike(mine.grad, parameter(p.grad, name), ranks, 4, (what, name))


def check_what_is_equal(ranks: Ranks) -> None:
    """Layers that share weights, with the tokens in shards; and torch's styles for plain models."""
    width, mesh = 128 * ranks.world, ranks.mesh()  # blocks fit the shards
    x, dy = (torch.randn(7 * ranks.world, width, device=ranks.device) for _ in range(2))

    def linear(column: bool, spread: bool) -> Any:
        torch.manual_seed(3)
        options: dict[str, Any] = {"sequence_parallel": True, "tp_group": dist.group.WORLD}
        mode = "column" if column else "row"
        return float8lab.Linear(
            width, width, bias=False, parallel_mode=mode, device=ranks.device,
            **options if spread else {},
        )  # fmt: skip

    def layer(recipe: Recipe, column: bool) -> tuple[Step, Step]:
        want = take_step(linear(column, False), recipe, x, dy)
        tokens, features = (
            partial(part_of, dim=0, ranks=ranks),
            partial(part_of, dim=1, ranks=ranks),
        )
        into, out = (tokens, features) if column else (features, tokens)
        got = take_step(linear(column, True), recipe, into(x).clone(), out(dy))
        return got, Step(out(want.y), into(want.dx), [part_of(want[2][0], 1 - column, ranks)])

    def plain(recipe: Recipe) -> tuple[Step, Step]:
        models = []
        for _ in range(2):
            torch.manual_seed(3)
            here = {"device": ranks.device, "bias": False}
            model = nn.Sequential(nn.Linear(width, width, **here), nn.Linear(width, width, **here))
            models.append(float8lab.convert_to_float8(model))
        tokens: Any = {"use_local_output": True}
        plan = {
            "0": Float8ColwiseParallel(input_layouts=Shard(0)),
            "1": Float8RowwiseParallel(output_layouts=Shard(0), **tokens),
        }
        want = take_step(models[0], recipe, x, dy)
        parallelize_module(models[1], mesh, plan)
        got = take_step(models[1], recipe, part_of(x, 0, ranks).clone(), part_of(dy, 0, ranks))
        gradients = [g.full_tensor() for g in got.gradients]
        y, dx = (part_of(t, 0, ranks) for t in want[:2])
        return got._replace(gradients=gradients), Step(y, dx, want.gradients)

    assert_row(ranks, "tensor, sequence: a column parallel layer", partial(layer, column=True))
    assert_row(ranks, "tensor, sequence: a row parallel layer", partial(layer, column=False))
    assert_row(ranks, "tensor, sequence: a pair of `parallelize_module`", plain)


def check_arguments(ranks: Ranks) -> None:
    N = 128 * ranks.world
    linear = partial(float8lab.Linear, 64, 2 * N, parallel_mode="column")
    split = dict.fromkeys(("q", "k"), N)
    parts = Layout({f"{n}_{p}": 0 for n in split for p in ("weight", "bias")}, {"": "column"})

    def joined(layer: Any, x: Tensor) -> Tensor:
        y = layer(x)
        q, k = y[0].chunk(2, -1)
        assert torch.equal(y[1], torch.cat([layer.q_bias, layer.k_bias]))
        return torch.cat([q, 2 * k])

    def both_outputs(layer: Any, x: Tensor) -> Tensor:
        y, normed = layer(x)
        return torch.cat([y, normed if layer.tp_size == 1 else part_of(normed, 1, ranks)])

    for recipe in (CURRENT, Float8RowwiseScaling(), Float8BlockScaling()):
        pair = two_of(ranks, linear, parts, parameters_split=split, return_bias=True)
        assert_same_step(ranks, pair, joined, recipe, "split")
        both = {"return_layernorm_output": True, "return_layernorm_output_gathered": True}
        square = partial(float8lab.LayerNormLinear, N, N, parallel_mode="column")
        pair = two_of(ranks, square, COLUMN, **both)
        assert_same_step(ranks, pair, both_outputs, recipe, "norm", N)

    def microbatches(layer: Any, x: Tensor) -> Tensor:
        layer(x, is_first_microbatch=True)
        return layer(x, is_first_microbatch=False)

    def evaluated(layer: Any, x: Tensor) -> Tensor:
        layer.eval()(x)
        return layer.train()(x)

    def recomputed(layer: Any, x: Tensor, reentrant: bool = True) -> Tensor:
        return float8lab.checkpoint(layer, x, use_reentrant=reentrant)

    calls = [microbatches, evaluated, recomputed, partial(recomputed, reentrant=False)]
    for recipe, call in itertools.product((CURRENT, DelayedScaling(), Float8BlockScaling()), calls):
        mlp = partial(float8lab.LayerNormMLP, set_parallel_mode=True)
        pair = two_of(ranks, partial(mlp, 64, fitting(32, recipe) * ranks.world), MLP)
        for step in range(2 if recipe.linear.delayed else 1):
            assert_same_step(ranks, pair, call, recipe, (call, step))

    mlp = partial(float8lab.LayerNormMLP, 64, 32 * ranks.world, set_parallel_mode=True)
    pair = two_of(ranks, mlp, MLP, fuse_wgrad_accumulation=True)
    for module in pair[:2]:
        for p in (module.fc1_weight, module.fc2_weight):
            p.main_grad = torch.ones_like(p, dtype=torch.float32)
    assert_same_step(ranks, pair, lambda m, x: m(x), CURRENT, "fused")
    for name in ("fc1_weight", "fc2_weight"):
        want = pair[2](pair[0].get_parameter(name).main_grad, name).bfloat16()
        got = pair[1].get_parameter(name).main_grad.bfloat16()
        assert_summed_alike(got, want, ranks, 4, name)


@on_ranks(4)
def check_group_that_is_set_later(ranks: Ranks) -> None:
    torch.manual_seed(3)
    layer = float8lab.LayerNormMLP(
        64, 32 * ranks.world, set_parallel_mode=True, tp_size=ranks.world, device=ranks.device
    )
    x = torch.randn(5, 64, device=ranks.device)
    with pytest.raises(RuntimeError, match="tp_group must be set before the first call"):
        layer(x)
    layer.set_tensor_parallel_group(dist.group.WORLD)
    with float8lab.autocast(recipe=CURRENT):
        ranks.assert_same(layer(x))
    # From call to call the tokens change, and those of some ranks do not.
    options = {"parallel_mode": "column", "sequence_parallel": True, "device": ranks.device}
    column = float8lab.Linear(32, 128 * ranks.world, tp_size=ranks.world, **options)
    column.set_tensor_parallel_group(dist.group.WORLD)
    with float8lab.autocast(recipe=Float8BlockScaling()):
        for tokens in (7, 8, 4092, 1, 0, 5):
            x = torch.randn(tokens, 32, device=ranks.device)
            dist.broadcast(x, 0)
            y, same = column(part_of(x, 0, ranks)), column(part_of(x, 0, ranks))
            parallel: Any = column._fp8.parallel
            column._fp8.set_parallel(None)
            assert torch.equal(y, column(x)), tokens
            assert torch.equal(y, same), tokens
            column._fp8.set_parallel(parallel)
    alone = dist.new_group([ranks.rank], use_local_synchronization=True)
    with pytest.raises(ValueError, match=f"tp_group must have the {ranks.world} ranks"):
        layer.set_tensor_parallel_group(alone)
    with pytest.raises(ValueError, match=f"tp_size must be the {ranks.world} ranks of tp_group"):
        float8lab.Linear(
            64, 64, tp_group=dist.group.WORLD, tp_size=ranks.world + 1, parallel_mode="row"
        )


@on_ranks(4)
def check_delayed_scales_over_two_kinds_of_groups(ranks: Ranks) -> None:
    """Amaxes are those of all tokens and features, whatever group autocast reduces over."""
    if ranks.world < 4:
        return
    mesh = ranks.mesh(2, 2, names=("dp", "tp"))
    data, tensor = mesh["dp"].get_group(), mesh["tp"].get_group()
    torch.manual_seed(5)
    whole = float8lab.Linear(64, 64, bias=False, device=ranks.device)
    torch.manual_seed(5)
    layer = float8lab.Linear(
        64, 64, bias=False, parallel_mode="row", tp_group=tensor, device=ranks.device
    )
    alone = dist.new_group([ranks.rank], use_local_synchronization=True)
    for _ in range(3):
        x = torch.randn(8, 64).mul(torch.linspace(0.1, 3, 8)[:, None]).to(ranks.device)
        dy = torch.randn(8, 64).to(ranks.device)
        mine = x.chunk(2)[dist.get_rank(data)].chunk(2, 1)[dist.get_rank(tensor)]
        for module, inp, grad, group in (
            (whole, x, dy, alone), (layer, mine, dy.chunk(2)[dist.get_rank(data)], data),
        ):  # fmt: skip
            with float8lab.autocast(recipe=DelayedScaling(), amax_reduction_group=group):
                y = module(inp.clone().requires_grad_())
            y.backward(grad)
        states = [next(iter(m._fp8.slots.values())).tensors() for m in (whole, layer)]
        assert torch.equal(*(state["history"] for state in states))
        # Not of the gradient: its first scale is from the tokens that a data-parallel rank has.
        assert torch.equal(*(state["factors"][:, :2] for state in states))


def check_rank_that_does_not_come(ranks: Ranks) -> None:
    """The others fail at their group's timeout, and so does the rank when it comes later."""
    if ranks.device.type == "cuda":
        return  # NCCL's watchdog ends the processes
    group = dist.new_group(timeout=timedelta(seconds=1))
    layer = float8lab.Linear(
        16 * ranks.world, 32, parallel_mode="row", tp_group=group, device=ranks.device
    )
    if ranks.rank == 1:
        time.sleep(1.3)
    with pytest.raises(RuntimeError):
        layer(torch.ones(5, 16))
    dist.barrier()


def check_tokens_that_do_not_fit_together(ranks: Ranks) -> None:
    layer = float8lab.Linear(
        16, 8 * ranks.world, parallel_mode="column", sequence_parallel=True,
        tp_group=dist.group.WORLD, device=ranks.device,
    )  # fmt: skip
    first = (1, 2, *[1] * ranks.world)  # the later rank has more
    for shape in ((first[ranks.rank], 16), (3, 1 + ranks.rank % 2, 16)):
        x = torch.ones(shape, device=ranks.device)
        with (
            pytest.raises(ValueError, match="inp must be a shard of one tensor on each"),
            float8lab.autocast(recipe=CURRENT),
        ):
            layer(x)


def check_what_is_gathered_once(ranks: Ranks) -> None:
    """``keep_gathered`` spares the gather for wgrad where that takes the FP8 data of fprop."""
    kinds: dict[str, tuple[Any, Layout]] = {
        "linear": (partial(float8lab.Linear, parallel_mode="column"), COLUMN),
        "norm": (partial(float8lab.LayerNormLinear, parallel_mode="column"), COLUMN),
        "mlp": (partial(float8lab.LayerNormMLP, set_parallel_mode=True), MLP),
    }
    kinds["recomputed"] = partial(kinds["mlp"][0], checkpoint=True), MLP
    e4m3 = Float8CurrentScaling(fp8_format=Format.E4M3)
    delayed = DelayedScaling(amax_history_len=4, reduce_amax=False)
    for recipe, (kind, (make, layout)) in itertools.product(
        (CURRENT, e4m3, delayed, Float8RowwiseScaling(), Float8BlockScaling()), kinds.items()
    ):
        counts, N = [], fitting(32, recipe) * ranks.world
        for keep in (False, True):
            pair = two_of(ranks, partial(make, 64, N), layout)
            pair[1].set_tensor_parallel_group(dist.group.WORLD, keep_gathered=keep)
            assert_same_step(ranks, pair, lambda m, x: m(x), recipe, (kind, keep))
            x = inputs(ranks, 6 * ranks.world, 64)[1]
            with (
                Collectives() as collectives,
                torch.autograd.set_multithreading_enabled(False),
                float8lab.autocast(recipe=recipe),
            ):
                pair[1](x).float().square().sum().backward()
            # Integers are what ranks tell each other, from time to time the order of calls.
            dtypes = [dtype for dtype, _ in collectives.of("all_gather")]
            counts.append(sum(dtype != torch.int64 for dtype in dtypes))
        single = recipe.linear.x.block == (-1, -1)
        assert counts[0] - counts[1] == int(single), (recipe, kind, counts)


def check_repeated_calls(ranks: Ranks) -> None:
    """Casts and products between what is sent are plans, with the bytes of the first time."""
    if ranks.device.type == "cpu":
        return  # which has no plans
    launching = pytest.importorskip("float8lab.ops.kernels._launch")
    for recipe, keep in itertools.product(filter(None, RECIPES), (False, True)):
        results = []
        for enabled in (True, False):
            make = partial(float8lab.LayerNormMLP, 64, 128 * ranks.world, set_parallel_mode=True)
            _, layer, _ = two_of(ranks, make, MLP)
            layer.set_tensor_parallel_group(dist.group.WORLD, keep_gathered=keep)
            torch.manual_seed(9)
            _, x = inputs(ranks, 7, 64)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(launching, "ENABLED", enabled)
                found = []
                for step in range(5):  # a stale scale would show
                    leaf = (x * 2**step).detach().requires_grad_()
                    with float8lab.autocast(recipe=recipe):
                        y = layer(leaf)
                    leaves = [leaf, *layer.parameters()]
                    found += [y, *torch.autograd.grad(y.square().sum(), leaves)]
            results.append(found)
        for i, (one, other) in enumerate(zip(*results, strict=True)):
            assert torch.equal(one, other), (recipe, keep, i)


def check_shards_of_features_that_cut_blocks(ranks: Ranks) -> None:
    """The layer runs in high precision, and says once which sizes fit."""
    N, x = 48 * ranks.world, torch.randn(7, 64, device=ranks.device)
    options = {"tp_group": dist.group.WORLD, "device": ranks.device}
    fit = "multiples of {}, such as {}".format
    kinds: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "column": (partial(float8lab.Linear, 64, N, parallel_mode="column"), (x,)),
        "row": (partial(float8lab.Linear, N, 64, parallel_mode="row"), (torch.randn(7, 48),)),
        "mlp": (partial(float8lab.LayerNormMLP, 64, N, set_parallel_mode=True), (x,)),
        "norm": (partial(float8lab.LayerNormLinear, 64, N, parallel_mode="column"), (x,)),
        "experts": (
            partial(float8lab.GroupedLinear, 2, 64, N, parallel_mode="column"),
            (x, [3, 4]),
        ),
    }
    for recipe, (kind, (make, inputs)) in itertools.product(
        (MXFP8BlockScaling(), Float8BlockScaling()), kinds.items()
    ):
        block = recipe.linear.largest_block
        step, layer = block * ranks.world, make(**options)
        inputs = tuple(t.to(ranks.device) if isinstance(t, Tensor) else t for t in inputs)
        sizes = f"{step} or {2 * step}" if block == 32 else f"{step}"
        message = f"its {N} features on {ranks.world} .* cut blocks of {block}; .*"
        message += fit(step, sizes)
        want = layer(*inputs)
        with float8lab.autocast(recipe=recipe), observing(Operands(layer)) as seen:
            with pytest.warns(UserWarning, match=message) as warned:
                y = layer(*inputs)
            assert torch.equal(layer(*inputs), y)  # without a warning, which would raise
            y.sum().backward()
        assert len(warned) == 1, kind
        assert torch.equal(y, want), kind
        assert seen.gemms == [], kind
        with pytest.raises(ValueError, match=message):
            float8lab.convert_to_float8(layer, recipe, strict=True)
        if kind == "column":
            torch._dynamo.reset()
            again = make(**options)
            compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
            with float8lab.autocast(recipe=recipe), pytest.warns(UserWarning, match=message):
                assert torch.equal(compiled(*inputs), again(*inputs))
        float8lab.convert_to_float8(layer, CURRENT, strict=True)  # which has no such blocks


def check_tokens_that_cut_blocks(ranks: Ranks) -> None:
    """Their operands are gathered in high precision, and others in FP8."""
    N = 128 * ranks.world
    kinds = {
        "column": (partial(float8lab.Linear, 64, N, parallel_mode="column"), COLUMN),
        "mlp": (partial(float8lab.LayerNormMLP, 64, N, set_parallel_mode=True), MLP),
    }
    for (make, layout), rows in itertools.product(kinds.values(), (127, 128)):
        _, layer, _ = two_of(ranks, make, layout)
        x = torch.randn(rows * ranks.world, 64, device=ranks.device).bfloat16()
        leaf = part_of(x, 0, ranks).clone().requires_grad_()
        with (
            Collectives() as collectives,
            torch.autograd.set_multithreading_enabled(False),
            float8lab.autocast(recipe=Float8BlockScaling()),
        ):
            layer(leaf).float().square().sum().backward()
        dtypes = {dtype for dtype, size in collectives.of("all_gather") if size > 3 * ranks.world}
        assert (torch.bfloat16 in dtypes) == (rows == 127), (rows, dtypes)
        assert (torch.uint8 in dtypes) == (rows == 128), (rows, dtypes)


def check_compiled(ranks: Ranks) -> None:
    N = 32 * ranks.world
    column = partial(float8lab.Linear, 64, N, parallel_mode="column"), COLUMN
    mlp = partial(float8lab.LayerNormMLP, 64, N, set_parallel_mode=True), MLP
    for recipe, (make, layout) in ((CURRENT, column), (DelayedScaling(), mlp)):
        torch._dynamo.reset()
        _, layer, _ = two_of(ranks, make, layout)
        other = copy.deepcopy(layer)
        compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
        for step in range(2):
            _, x = inputs(ranks, 6 * ranks.world, 64)
            results = []
            for module, run in ((layer, layer), (other, compiled)):
                module.zero_grad()
                inp = x.detach().requires_grad_()
                with float8lab.autocast(recipe=recipe):
                    y = run(inp)
                y.square().sum().backward()
                results.append([y, inp.grad, *(p.grad for p in module.parameters())])
            for one, same in zip(*results, strict=True):
                assert torch.equal(one, same), (recipe, layout.modes, step)


test_on_several_ranks = each_check(__name__, 2, 4)
