"""Tensor and sequence parallelism: operands have the bytes of one rank, results its sums."""

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
    """How a module is sharded."""

    shards: dict[str, int]
    """The dimension along which each parameter is sharded; other parameters are replicas."""
    modes: dict[str, str]
    """The mode of each GEMM: "column" or "row"."""
    gated: bool = False
    """Each column-parallel parameter holds two, one after the other."""
    partial: tuple[str, ...] = ()
    """Parameters whose gradients are partial sums under sequence parallelism."""


def local_shard(x: Tensor, dim: int, ranks: Ranks, pieces: int = 1) -> Tensor:
    """This rank's shard by the rule of torch.chunk, which may be empty."""
    if pieces > 1:
        return torch.cat([local_shard(piece, dim, ranks) for piece in x.chunk(pieces, dim)], dim)
    chunk = -(-x.shape[dim] // ranks.world)
    start = min(x.shape[dim], chunk * ranks.rank)
    return x.narrow(dim, start, min(chunk, x.shape[dim] - start))


def assert_equal_up_to_sum_order(
    got: Tensor, want: Tensor, ranks: Ranks, depth: int, label: Any
) -> None:
    """Assert equality up to the order of sums.

    Each of R partial sums, and each sum of two of them, is rounded to the output's dtype. Results
    that are computed from such sums, ``depth`` layers later, carry their errors.
    """
    assert got.shape == want.shape, label
    if want.numel():
        eps = torch.finfo(want.dtype).eps
        bound = 2 * ranks.world * depth * eps * want.float().abs().max()
        assert (got.float() - want.float()).abs().max() <= bound, label


def bytes_and_scales(
    operand: tuple[Tensor, Tensor], block: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The FP8 bytes of an operand, and the scale of each byte."""
    q, scale = operand
    if scale.ndim == 2:
        for dim, size in enumerate(block):
            if size > 0:
                scale = scale.repeat_interleave(size, dim).narrow(dim, 0, q.shape[dim])
    return q.view(torch.uint8), scale.expand(q.shape)


DIMENSIONS = {"fprop": ("MK", "NK"), "dgrad": ("MN", "KN"), "wgrad": ("NM", "KM")}
"""The dimensions of both operands of each GEMM."""


def assert_same_operands(
    sharded: Operands, unsharded: Operands, layer: Any, layout: Layout, recipe: Recipe,
    ranks: Ranks, label: Any,
) -> None:  # fmt: skip
    """Assert that a rank's bytes and scales are its shard of one rank's."""
    assert [gemm[:2] for gemm in sharded.gemms] == [gemm[:2] for gemm in unsharded.gemms], label
    for (name, kind, *local_operands), (*_, a, b) in zip(
        sharded.gemms, unsharded.gemms, strict=True
    ):
        gemm, sharded_dimension = (
            recipe.linear.gemms()[kind],
            "N" if layout.modes[name] == "column" else "K",
        )
        pieces = 2 if layout.gated and sharded_dimension == "N" else 1
        for side, operand, expected in zip(("left", "right"), local_operands, (a, b), strict=True):
            if operand is None:
                assert expected is None
                continue
            block = getattr(gemm, side).block
            for x, y in zip(
                bytes_and_scales(operand, block), bytes_and_scales(expected, block), strict=True
            ):
                for dim, dimension in enumerate(DIMENSIONS[kind][side == "right"]):
                    y = y.narrow(dim, 0, unsharded.sizes[name][dimension])
                    if dimension == sharded_dimension:
                        y = local_shard(y, dim, ranks, pieces)
                x = x[: y.shape[0], : y.shape[1]]
                assert torch.equal(x, y), (*label, name, kind, side)


def run(layer: Any, x: Tensor, dy: Tensor, recipe: Recipe | None) -> list[dict[str, Tensor]]:
    """Return output and gradients of each step; delayed scales and repeated plans need several."""
    results = []
    repeats = recipe is not None and (recipe.linear.delayed or x.is_cuda)
    for step in range(3 if repeats else 1):
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
    """Compare a module that is sharded over all ranks with the same module on one rank."""
    label = recipe, layout.modes, sequence_parallel, M
    options = {"device": ranks.device, "params_dtype": torch.bfloat16}
    torch.manual_seed(M)
    unsharded = make(**options)
    torch.manual_seed(M)
    layer = make(tp_group=dist.group.WORLD, sequence_parallel=sequence_parallel, **options)

    def parameter(name: str, value: Tensor) -> Tensor:
        dim = layout.shards.get(name)
        pieces = 2 if layout.gated and dim == 0 else 1
        return value if dim is None else local_shard(value, dim, ranks, pieces)

    for (name, p), local_p in zip(unsharded.named_parameters(), layer.parameters(), strict=True):
        if p.ndim == 1:
            p.data.add_(torch.randn_like(p))
            local_p.data.copy_(parameter(name, p.data))
        assert getattr(local_p, "sequence_parallel", False) == (
            sequence_parallel and name in layout.partial
        ), name
        assert torch.equal(local_p, parameter(name, p)), name

    x = torch.randn(M, 2, features).mul(torch.linspace(0.1, 3, M)[:, None, None])
    x, dy = x.bfloat16().to(ranks.device), torch.randn(M, 2, out_features).bfloat16()
    dy = dy.to(ranks.device)
    rows = 0 if sequence_parallel else None
    input_dim = rows if "column" in layout.modes.values() else 2
    output_dim = rows if "row" in layout.modes.values() else 2

    def shard(value: Tensor, dim: int | None) -> Tensor:
        return value if dim is None else local_shard(value, dim, ranks)

    with observing(Operands(unsharded)) as expected:
        expected_steps = run(unsharded, x, dy, recipe)
    with observing(Operands(layer)) as seen:
        local_steps = run(layer, shard(x, input_dim), shard(dy, output_dim), recipe)
    for local_step, expected_step in zip(local_steps, expected_steps, strict=True):
        for name, value in expected_step.items():
            if name in ("y", "dx"):
                value = shard(value, output_dim if name == "y" else input_dim)
            else:
                value = parameter(name, value)
                if sequence_parallel and name in layout.partial:
                    dist.all_reduce(local_step[name])
            depth = len(layout.modes)
            assert_equal_up_to_sum_order(local_step[name], value, ranks, depth, (*label, name))
    if recipe is not None and M:
        expected.sizes = sizes_of(unsharded, 2 * M)
        assert_same_operands(seen, expected, layer, layout, recipe, ranks, label)


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


def round_up_to_block(features: int, recipe: Recipe | None) -> int:
    """The smallest multiple of the recipe's block that has at least ``features`` features."""
    block = 1 if recipe is None else recipe.linear.largest_block
    return -(-features // block) * block


@on_ranks(4)
def check_linear_equals_that_of_one_rank(ranks: Ranks) -> None:
    kinds = itertools.product(RECIPES, (COLUMN, ROW), (False, True))
    for i, (recipe, layout, sequence_parallel) in enumerate(kinds):
        N, K = (round_up_to_block(size, recipe) * ranks.world for size in (32, 48))
        make = partial(float8lab.Linear, K, N, parallel_mode=layout.modes[""])
        M = (7, 0, 150, 1)[(i + i // 4) % 4]  # each with every recipe, mode and kind of parallelism
        compare(ranks, make, layout, recipe, M, K, N, sequence_parallel)


def check_layernorm_linear_equals_that_of_one_rank(ranks: Ranks) -> None:
    K, kind = 80, float8lab.LayerNormLinear
    for recipe, sequence_parallel in itertools.product(RECIPES, (False, True)):
        N = round_up_to_block(48, recipe) * ranks.world
        make = partial(kind, K, N, parallel_mode="column", normalization="RMSNorm")
        compare(ranks, make, COLUMN, recipe, 7 if recipe else 150, K, N, sequence_parallel)
    for i, recipe in enumerate(RECIPES):
        N = round_up_to_block(48, recipe) * ranks.world
        row = partial(kind, N, K, parallel_mode="row")
        compare(ranks, row, ROW, recipe, (7, 0)[recipe == CURRENT], N, K, i % 2 == 0)


def check_layernorm_mlp_equals_that_of_one_rank(ranks: Ranks) -> None:
    K = 80
    for recipe, sequence_parallel in itertools.product(RECIPES, (False, True)):
        F = round_up_to_block(48, recipe) * ranks.world
        for activation, M in (("swiglu", 7), ("gelu", 150)):
            gated = activation == "swiglu"
            make = partial(
                float8lab.LayerNormMLP, K, F, activation=activation, set_parallel_mode=True,
                checkpoint=gated and sequence_parallel,
            )  # fmt: skip
            layout = MLP._replace(gated=gated)
            compare(ranks, make, layout, recipe, M, K, K, sequence_parallel)


def make_pair(
    ranks: Ranks, make: Any, layout: Layout, **options: Any
) -> tuple[Any, Any, Callable[[Tensor, str], Tensor]]:
    """Return a module on one rank, the same on all ranks, and what shards a parameter."""
    device_options = {"device": ranks.device, "params_dtype": torch.bfloat16}
    torch.manual_seed(7)
    unsharded = make(**device_options, **options)
    torch.manual_seed(7)
    layer = make(tp_group=dist.group.WORLD, sequence_parallel=True, **device_options, **options)

    def parameter(value: Tensor, name: str) -> Tensor:
        dim = layout.shards.get(name)
        return value if dim is None else local_shard(value, dim, ranks)

    return unsharded, layer, parameter


def inputs(ranks: Ranks, rows: int, features: int) -> tuple[Tensor, Tensor]:
    """An input, and this rank's tokens of it."""
    x = torch.randn(rows, features).mul(torch.linspace(0.1, 3, rows)[:, None])
    x = x.bfloat16().to(ranks.device)
    return x.clone().requires_grad_(), local_shard(x, 0, ranks).clone().requires_grad_()


def check_stored_weights_have_the_bytes_of_one_rank(ranks: Ranks) -> None:
    """The bytes agree at first, after steps, and after a write to the weights."""
    K, F = 64, 128 * ranks.world
    for recipe in filter(None, RECIPES[:6]):
        make = partial(float8lab.LayerNormMLP, K, F, set_parallel_mode=True)
        with float8lab.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            unsharded, layer, parameter = make_pair(ranks, make, MLP)
        optimizers = [
            float8lab.optim.MasterWeights(m.parameters(), torch.optim.SGD, lr=0.5)
            for m in (unsharded, layer)
        ]
        for step in range(3):
            for name, p in unsharded.named_parameters():
                local_p = layer.get_parameter(name)
                label = recipe, step, name
                if p.ndim == 2:
                    local_p, p = local_p.detach(), p.detach()
                    data = parameter(p.qdata.view(torch.uint8), name)
                    assert torch.equal(local_p.qdata.view(torch.uint8), data), label
                    assert torch.equal(local_p.dequantize(), parameter(p.dequantize(), name)), label
            if step == 1:
                with torch.no_grad():
                    for name in MLP.shards:
                        if name.endswith("weight"):
                            new = torch.randn_like(unsharded.get_parameter(name).dequantize())
                            device_options = {"device": new.device}
                            new = new * torch.linspace(0.1, 2, new.shape[1], **device_options)
                            new *= torch.linspace(0.1, 2, len(new), **device_options)[:, None]
                            unsharded.get_parameter(name).copy_(new)
                            layer.get_parameter(name).copy_(parameter(new, name))
                continue
            for name, p in unsharded.named_parameters():
                p.grad = torch.randn_like(p)
                layer.get_parameter(name).grad = parameter(p.grad, name).clone()
            for optimizer in optimizers:
                optimizer.step()
        x, local_x = inputs(ranks, 7, K)
        with float8lab.autocast(recipe=recipe):
            y, local_y = unsharded(x), layer(local_x)
        assert_equal_up_to_sum_order(local_y, local_shard(y, 0, ranks), ranks, 2, recipe)
    unpickled = pickle.loads(pickle.dumps(layer))
    with pytest.raises(RuntimeError, match="tp_group must be set"):
        unpickled(local_x)
    unpickled.set_tensor_parallel_group(dist.group.WORLD)
    unpickled.fc1_weight.detach().copy_(layer.fc1_weight.detach())
    with float8lab.autocast(recipe=recipe):
        assert torch.equal(unpickled(local_x), layer(local_x))
    with (
        float8lab.fp8_model_init(recipe=Float8BlockScaling()),
        pytest.raises(ValueError, match="whole blocks of 128 to store them in FP8; got 64 for"),
    ):
        float8lab.Linear(
            K, 64 * ranks.world, parallel_mode="column", tp_group=dist.group.WORLD, device="cpu"
        )


def assert_same_step(
    ranks: Ranks, pair: Any, call: Callable[[Any, Tensor], Any], recipe: Recipe, label: Any,
    features: int = 64,
) -> None:  # fmt: skip
    """Assert that a step on sharded tokens equals a step of the same module on one rank.

    ``call(layer, x)`` returns an output whose tokens are sharded, too, or unsharded.
    """
    unsharded, layer, parameter = pair
    x, local_x = inputs(ranks, 6 * ranks.world, features)
    results = []
    for module, inp in ((unsharded, x), (layer, local_x)):
        module.zero_grad()
        with float8lab.autocast(recipe=recipe):
            y = call(module, inp)
        y.square().sum().backward()
        results.append((y.detach(), inp.grad))
    (y, dx), (local_y, local_dx) = results
    for dim in range(2):
        y = y if local_y.shape[dim] == y.shape[dim] else local_shard(y, dim, ranks)
    assert_equal_up_to_sum_order(local_y, y, ranks, 2, (label, "y"))
    assert_equal_up_to_sum_order(local_dx, local_shard(dx, 0, ranks), ranks, 4, (label, "dx"))
    for name, p in unsharded.named_parameters():
        local_p = layer.get_parameter(name)
        if p.grad is None:
            assert local_p.grad is None, (label, name)
            continue
        if local_p.shape == p.shape and getattr(local_p, "sequence_parallel", False):
            dist.all_reduce(local_p.grad)
        assert_equal_up_to_sum_order(local_p.grad, parameter(p.grad, name), ranks, 4, (label, name))


def check_table_rows_of_tensor_parallelism(ranks: Ranks) -> None:
    """Layers of equal weights with sharded tokens, and torch's styles for plain models."""
    width, mesh = 128 * ranks.world, ranks.mesh()  # whole blocks on each rank
    x, dy = (torch.randn(7 * ranks.world, width, device=ranks.device) for _ in range(2))

    def linear(column: bool, is_sharded: bool) -> Any:
        torch.manual_seed(3)
        options: dict[str, Any] = {"sequence_parallel": True, "tp_group": dist.group.WORLD}
        mode = "column" if column else "row"
        return float8lab.Linear(
            width, width, bias=False, parallel_mode=mode, device=ranks.device,
            **options if is_sharded else {},
        )  # fmt: skip

    def layer(recipe: Recipe, column: bool) -> tuple[Step, Step]:
        want = take_step(linear(column, False), recipe, x, dy)
        tokens, features = (
            partial(local_shard, dim=0, ranks=ranks),
            partial(local_shard, dim=1, ranks=ranks),
        )
        shard_input, shard_output = (tokens, features) if column else (features, tokens)
        got = take_step(linear(column, True), recipe, shard_input(x).clone(), shard_output(dy))
        return got, Step(
            shard_output(want.y), shard_input(want.dx), [local_shard(want[2][0], 1 - column, ranks)]
        )

    def plain(recipe: Recipe) -> tuple[Step, Step]:
        models = []
        for _ in range(2):
            torch.manual_seed(3)
            options = {"device": ranks.device, "bias": False}
            model = nn.Sequential(
                nn.Linear(width, width, **options), nn.Linear(width, width, **options)
            )
            models.append(float8lab.convert_to_float8(model))
        tokens: Any = {"use_local_output": True}
        plan = {
            "0": Float8ColwiseParallel(input_layouts=Shard(0)),
            "1": Float8RowwiseParallel(output_layouts=Shard(0), **tokens),
        }
        want = take_step(models[0], recipe, x, dy)
        parallelize_module(models[1], mesh, plan)
        got = take_step(
            models[1], recipe, local_shard(x, 0, ranks).clone(), local_shard(dy, 0, ranks)
        )
        gradients = [g.full_tensor() for g in got.gradients]
        y, dx = (local_shard(t, 0, ranks) for t in want[:2])
        return got._replace(gradients=gradients), Step(y, dx, want.gradients)

    assert_row(ranks, "tensor, sequence: a column parallel layer", partial(layer, column=True))
    assert_row(ranks, "tensor, sequence: a row parallel layer", partial(layer, column=False))
    assert_row(ranks, "tensor, sequence: a pair of `parallelize_module`", plain)


def check_steps_with_other_arguments_equal_one_rank(ranks: Ranks) -> None:
    N = 128 * ranks.world
    linear = partial(float8lab.Linear, 64, 2 * N, parallel_mode="column")
    split = dict.fromkeys(("q", "k"), N)
    split_layout = Layout(
        {f"{n}_{p}": 0 for n in split for p in ("weight", "bias")}, {"": "column"}
    )

    def concatenate_split_outputs(layer: Any, x: Tensor) -> Tensor:
        y = layer(x)
        q, k = y[0].chunk(2, -1)
        assert torch.equal(y[1], torch.cat([layer.q_bias, layer.k_bias]))
        return torch.cat([q, 2 * k])

    def both_outputs(layer: Any, x: Tensor) -> Tensor:
        y, normed = layer(x)
        return torch.cat([y, normed if layer.tp_size == 1 else local_shard(normed, 1, ranks)])

    for recipe in (CURRENT, Float8RowwiseScaling(), Float8BlockScaling()):
        pair = make_pair(ranks, linear, split_layout, parameters_split=split, return_bias=True)
        assert_same_step(ranks, pair, concatenate_split_outputs, recipe, "split")
        norm_options = {"return_layernorm_output": True, "return_layernorm_output_gathered": True}
        square = partial(float8lab.LayerNormLinear, N, N, parallel_mode="column")
        pair = make_pair(ranks, square, COLUMN, **norm_options)
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
        pair = make_pair(ranks, partial(mlp, 64, round_up_to_block(32, recipe) * ranks.world), MLP)
        for step in range(2 if recipe.linear.delayed else 1):
            assert_same_step(ranks, pair, call, recipe, (call, step))

    mlp = partial(float8lab.LayerNormMLP, 64, 32 * ranks.world, set_parallel_mode=True)
    pair = make_pair(ranks, mlp, MLP, fuse_wgrad_accumulation=True)
    for module in pair[:2]:
        for p in (module.fc1_weight, module.fc2_weight):
            p.main_grad = torch.ones_like(p, dtype=torch.float32)
    assert_same_step(ranks, pair, lambda m, x: m(x), CURRENT, "fused")
    for name in ("fc1_weight", "fc2_weight"):
        want = pair[2](pair[0].get_parameter(name).main_grad, name).bfloat16()
        got = pair[1].get_parameter(name).main_grad.bfloat16()
        assert_equal_up_to_sum_order(got, want, ranks, 4, name)


@on_ranks(4)
def check_group_set_after_construction(ranks: Ranks) -> None:
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
    # From call to call the number of tokens changes, though not on every rank.
    options = {"parallel_mode": "column", "sequence_parallel": True, "device": ranks.device}
    column = float8lab.Linear(32, 128 * ranks.world, tp_size=ranks.world, **options)
    column.set_tensor_parallel_group(dist.group.WORLD)
    with float8lab.autocast(recipe=Float8BlockScaling()):
        for tokens in (7, 8, 4092, 1, 0, 5):
            x = torch.randn(tokens, 32, device=ranks.device)
            dist.broadcast(x, 0)
            y, repeated = column(local_shard(x, 0, ranks)), column(local_shard(x, 0, ranks))
            parallel: Any = column._fp8.parallel
            column._fp8.set_parallel(None)
            assert torch.equal(y, column(x)), tokens
            assert torch.equal(y, repeated), tokens
            column._fp8.set_parallel(parallel)
    single_rank_group = dist.new_group([ranks.rank], use_local_synchronization=True)
    with pytest.raises(ValueError, match=f"tp_group must have the {ranks.world} ranks"):
        layer.set_tensor_parallel_group(single_rank_group)
    with pytest.raises(ValueError, match=f"tp_size must be the {ranks.world} ranks of tp_group"):
        float8lab.Linear(
            64, 64, tp_group=dist.group.WORLD, tp_size=ranks.world + 1, parallel_mode="row"
        )


@on_ranks(4)
def check_delayed_scales_over_data_and_tensor_parallel_groups(ranks: Ranks) -> None:
    """Amaxes are those of all tokens and features, whatever group autocast reduces over."""
    if ranks.world < 4:
        return
    mesh = ranks.mesh(2, 2, names=("dp", "tp"))
    data, tensor = mesh["dp"].get_group(), mesh["tp"].get_group()
    torch.manual_seed(5)
    unsharded = float8lab.Linear(64, 64, bias=False, device=ranks.device)
    torch.manual_seed(5)
    layer = float8lab.Linear(
        64, 64, bias=False, parallel_mode="row", tp_group=tensor, device=ranks.device
    )
    single_rank_group = dist.new_group([ranks.rank], use_local_synchronization=True)
    for _ in range(3):
        x = torch.randn(8, 64).mul(torch.linspace(0.1, 3, 8)[:, None]).to(ranks.device)
        dy = torch.randn(8, 64).to(ranks.device)
        local_x = x.chunk(2)[dist.get_rank(data)].chunk(2, 1)[dist.get_rank(tensor)]
        for module, inp, grad, group in (
            (unsharded, x, dy, single_rank_group),
            (layer, local_x, dy.chunk(2)[dist.get_rank(data)], data),
        ):  # fmt: skip
            with float8lab.autocast(recipe=DelayedScaling(), amax_reduction_group=group):
                y = module(inp.clone().requires_grad_())
            y.backward(grad)
        states = [next(iter(m._fp8.slots.values())).tensors() for m in (unsharded, layer)]
        assert torch.equal(*(state["history"] for state in states))
        # Without the gradient, whose first scale is from the tokens of one data-parallel rank.
        assert torch.equal(*(state["factors"][:, :2] for state in states))


def check_late_rank_causes_errors_on_all_ranks(ranks: Ranks) -> None:
    """The other ranks fail at their group's timeout, and the late rank fails when it comes."""
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


def check_mismatched_tokens_raise(ranks: Ranks) -> None:
    layer = float8lab.Linear(
        16, 8 * ranks.world, parallel_mode="column", sequence_parallel=True,
        tp_group=dist.group.WORLD, device=ranks.device,
    )  # fmt: skip
    first = (1, 2, *[1] * ranks.world)  # a later rank has more
    for shape in ((first[ranks.rank], 16), (3, 1 + ranks.rank % 2, 16)):
        x = torch.ones(shape, device=ranks.device)
        with (
            pytest.raises(ValueError, match="inp must be a shard of one tensor on each"),
            float8lab.autocast(recipe=CURRENT),
        ):
            layer(x)


def check_keep_gathered_saves_a_gather(ranks: Ranks) -> None:
    """``keep_gathered`` saves the gather for wgrad where wgrad takes the FP8 data of fprop."""
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
        counts, N = [], round_up_to_block(32, recipe) * ranks.world
        for keep in (False, True):
            pair = make_pair(ranks, partial(make, 64, N), layout)
            pair[1].set_tensor_parallel_group(dist.group.WORLD, keep_gathered=keep)
            assert_same_step(ranks, pair, lambda m, x: m(x), recipe, (kind, keep))
            x = inputs(ranks, 6 * ranks.world, 64)[1]
            with (
                Collectives() as collectives,
                torch.autograd.set_multithreading_enabled(False),
                float8lab.autocast(recipe=recipe),
            ):
                pair[1](x).float().square().sum().backward()
            # Ranks gather integers to compare the order of their calls from time to time.
            dtypes = [dtype for dtype, _ in collectives.of("all_gather")]
            counts.append(sum(dtype != torch.int64 for dtype in dtypes))
        single = recipe.linear.x.block == (-1, -1)
        assert counts[0] - counts[1] == int(single), (recipe, kind, counts)


def check_repeated_calls_have_the_bytes_of_the_first(ranks: Ranks) -> None:
    """Casts and GEMMs between collectives become plans, which give the bytes of the first call."""
    if ranks.device.type == "cpu":
        return  # a CPU has no plans
    launching = pytest.importorskip("float8lab.ops.kernels._launch")
    for recipe, keep in itertools.product(filter(None, RECIPES), (False, True)):
        results = []
        for enabled in (True, False):
            make = partial(float8lab.LayerNormMLP, 64, 128 * ranks.world, set_parallel_mode=True)
            _, layer, _ = make_pair(ranks, make, MLP)
            layer.set_tensor_parallel_group(dist.group.WORLD, keep_gathered=keep)
            torch.manual_seed(9)
            _, x = inputs(ranks, 7, 64)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(launching, "ENABLED", enabled)
                step_results = []
                for step in range(5):  # so that an outdated scale shows
                    leaf = (x * 2**step).detach().requires_grad_()
                    with float8lab.autocast(recipe=recipe):
                        y = layer(leaf)
                    leaves = [leaf, *layer.parameters()]
                    step_results += [y, *torch.autograd.grad(y.square().sum(), leaves)]
            results.append(step_results)
        for i, (expected, actual) in enumerate(zip(*results, strict=True)):
            assert torch.equal(expected, actual), (recipe, keep, i)


def check_layers_whose_features_cut_blocks_run_in_high_precision(ranks: Ranks) -> None:
    """The layer says once which sizes fit."""
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
            second_layer = make(**options)
            compiled = torch.compile(second_layer, fullgraph=True, backend="aot_eager")
            with float8lab.autocast(recipe=recipe), pytest.warns(UserWarning, match=message):
                assert torch.equal(compiled(*inputs), second_layer(*inputs))
        float8lab.convert_to_float8(layer, CURRENT, strict=True)  # this recipe has no such blocks


def check_tokens_that_cut_blocks_are_gathered_in_high_precision(ranks: Ranks) -> None:
    """Operands of other tokens are gathered in FP8."""
    N = 128 * ranks.world
    kinds = {
        "column": (partial(float8lab.Linear, 64, N, parallel_mode="column"), COLUMN),
        "mlp": (partial(float8lab.LayerNormMLP, 64, N, set_parallel_mode=True), MLP),
    }
    for (make, layout), rows in itertools.product(kinds.values(), (127, 128)):
        _, layer, _ = make_pair(ranks, make, layout)
        x = torch.randn(rows * ranks.world, 64, device=ranks.device).bfloat16()
        leaf = local_shard(x, 0, ranks).clone().requires_grad_()
        with (
            Collectives() as collectives,
            torch.autograd.set_multithreading_enabled(False),
            float8lab.autocast(recipe=Float8BlockScaling()),
        ):
            layer(leaf).float().square().sum().backward()
        dtypes = {dtype for dtype, size in collectives.of("all_gather") if size > 3 * ranks.world}
        assert (torch.bfloat16 in dtypes) == (rows == 127), (rows, dtypes)
        assert (torch.uint8 in dtypes) == (rows == 128), (rows, dtypes)


def check_compiled_layers_equal_eager_ones(ranks: Ranks) -> None:
    N = 32 * ranks.world
    column = partial(float8lab.Linear, 64, N, parallel_mode="column"), COLUMN
    mlp = partial(float8lab.LayerNormMLP, 64, N, set_parallel_mode=True), MLP
    for recipe, (make, layout) in ((CURRENT, column), (DelayedScaling(), mlp)):
        torch._dynamo.reset()
        _, layer, _ = make_pair(ranks, make, layout)
        compiled_layer = copy.deepcopy(layer)
        compiled = torch.compile(compiled_layer, fullgraph=True, backend="aot_eager")
        for step in range(2):
            _, x = inputs(ranks, 6 * ranks.world, 64)
            results = []
            for module, run in ((layer, layer), (compiled_layer, compiled)):
                module.zero_grad()
                inp = x.detach().requires_grad_()
                with float8lab.autocast(recipe=recipe):
                    y = run(inp)
                y.square().sum().backward()
                results.append([y, inp.grad, *(p.grad for p in module.parameters())])
            for expected, actual in zip(*results, strict=True):
                assert torch.equal(expected, actual), (recipe, layout.modes, step)


test_on_ranks = each_check(__name__, 2, 4)
