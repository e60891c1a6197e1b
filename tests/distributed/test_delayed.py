"""Delayed scaling on several ranks: one reduction per region, equal scales, no waiting rank."""

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import float8lab
from float8lab.recipes import DelayedScaling, Recipe
from tests.distributed.equality import Step, assert_row, local_rows, take_step
from tests.distributed.ranks import Collectives, Ranks, each_check, on_ranks

RECIPE = DelayedScaling(amax_history_len=4, amax_compute_algo="max")


def make_model(ranks: Ranks, recipe: Any = RECIPE, layers: int = 3) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(32, 32, device=ranks.device) for _ in range(layers)))
    float8lab.convert_to_float8(model, recipe)
    return model


def inputs(ranks: Ranks, step: int) -> Tensor:
    """Inputs whose magnitude differs by rank; the largest moves from rank to rank."""
    generator = torch.Generator().manual_seed(100 * step + ranks.rank)
    size = 4.0 ** ((ranks.rank + step) % ranks.world)
    return (size * torch.randn(16, 32, generator=generator)).to(ranks.device)


def state_of(model: nn.Module) -> Tensor:
    """Every scale and amax history of a model, in the order of its modules.

    The scale of a slot is left out before its first update: until then a tensor is scaled by its
    own amax.
    """
    rows = []
    for module in model.modules():
        if isinstance(module, float8lab.Linear):
            for slots in module._fp8.slots.values():
                tensors = slots.tensors()
                scale = torch.where(tensors["steps"] > 0, tensors["scale"], 0)
                rows += [scale, tensors["steps"].float(), *tensors["history"]]
    return torch.stack(rows)


def train_step(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.sub_(p.grad, alpha=1e-3)
                p.grad = None


def check_scales_are_equal_and_follow_the_largest_amax(ranks: Ranks) -> None:
    for recipe in (RECIPE, DelayedScaling(), DelayedScaling(interval=2, margin=1)):
        model = make_model(ranks, recipe)
        for step in range(6):
            x = inputs(ranks, step)
            with Collectives() as collectives:
                model(x).square().mean().backward()
            assert len(collectives.of("allreduce")) == 1
            model.zero_grad()
            ranks.assert_same(state_of(model))
            largest = max(ranks.gather(x.abs().max().item()))
            slots = next(iter(model[0]._fp8.slots.values()))
            newest = slots.tensors()["history"][0, 0].item()
            assert newest == pytest.approx(largest), (recipe, step, newest, largest)


def check_compiled_model_has_the_state_of_an_eager_one(ranks: Ranks) -> None:
    torch._dynamo.reset()
    eager = make_model(ranks)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    # The first region exchanges names, which a compiled one does not.
    train_step(model, inputs(ranks, 0))
    train_step(eager, inputs(ranks, 0))
    expected = []
    # One model after the other: a region takes in all amaxes that there are.
    for step in range(1, 4):
        train_step(eager, inputs(ranks, step))
        expected.append((state_of(eager), [p.detach().clone() for p in eager.parameters()]))
    for step, (state, parameters) in enumerate(expected, start=1):
        train_step(compiled, inputs(ranks, step))
        ranks.assert_same(state_of(model))
        assert torch.equal(state_of(model), state)
        assert all(map(torch.equal, model.parameters(), parameters))


def check_model_compiled_from_the_first_step_has_equal_scales(ranks: Ranks) -> None:
    torch._dynamo.reset()
    model = make_model(ranks)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in range(3):
        train_step(compiled, inputs(ranks, step))
        ranks.assert_same(state_of(model))


@on_ranks(4)
def check_scales_are_equal_where_ranks_skip_modules(ranks: Ranks) -> None:
    class ChosenLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32, device=ranks.device) for _ in range(4))
            self.order: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            for i in self.order:
                x = self.layers[i](x)
            return x

    model = float8lab.convert_to_float8(ChosenLayers(), RECIPE)
    rank = ranks.rank
    for step, model.order in enumerate(
        (
            [0, 1] if rank else [],
            [1, 0] if rank else [0, 1],
            [3, 2] if rank else [2],
            [rank % 4],
            [],
            [3, 0],
        )
    ):
        y = model(inputs(ranks, step))
        if y.requires_grad:
            y.square().mean().backward()
        model.zero_grad()
        ranks.assert_same(state_of(model))


def check_scales_are_equal_where_ranks_first_use_modules_at_different_steps(ranks: Ranks) -> None:
    layers = [float8lab.Linear(32, 32, device=ranks.device) for _ in range(3)]
    model = nn.ModuleList(layers)
    for step in range(8):
        layers_of_step = {
            0: [0] if ranks.rank == 1 else [],
            1: [0],
            2: [1] if ranks.rank == 0 else [2],
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No FP8 module ran")
            with float8lab.autocast(recipe=DelayedScaling()):
                with Collectives() as collectives:
                    for i in layers_of_step.get(step, [2, 1, 0]):
                        layers[i](inputs(ranks, step)).sum().backward()
                assert not collectives.seen  # the reduction comes at the end of the region
    ranks.assert_same(state_of(model))
    scales = state_of(model)
    assert scales.isfinite().all()


def check_evaluation_on_one_rank_leaves_scales_equal(ranks: Ranks) -> None:
    model = make_model(ranks)
    train_step(model, inputs(ranks, 0))
    if ranks.rank == 0:
        model.eval()
        with torch.no_grad(), float8lab.autocast(recipe=RECIPE):
            model(inputs(ranks, 5))
        with torch.no_grad():
            model(inputs(ranks, 5))
        model.train()
    train_step(model, inputs(ranks, 1))
    ranks.assert_same(state_of(model))


def check_copies_of_a_model_have_scales_of_their_own(ranks: Ranks) -> None:
    if ranks.rank == 0:  # a model that other ranks do not have
        make_model(ranks)
    model = make_model(ranks)
    average = copy.deepcopy(model) if ranks.rank == 0 else None  # used on one rank only
    second_copy = copy.deepcopy(model)
    for step in range(3):
        train_step(model, inputs(ranks, step))
        train_step(second_copy, inputs(ranks, step + 1))
        if average is not None:
            average.eval()(inputs(ranks, step))
    ranks.assert_same(state_of(model))
    ranks.assert_same(state_of(second_copy))
    assert not torch.equal(state_of(model), state_of(second_copy))


def check_nonfinite_amaxes_do_not_enter_the_history(ranks: Ranks) -> None:
    model = make_model(ranks)
    train_step(model, inputs(ranks, 0))
    before = state_of(model)
    for value in (torch.nan, torch.inf):
        x = inputs(ranks, 1)
        if ranks.rank == 1:
            x[0, 0] = value
        model(x).sum().backward()
        model.zero_grad()
    ranks.assert_same(state_of(model))
    slots = next(iter(model[0]._fp8.slots.values()))
    assert torch.equal(slots.tensors()["history"][:, 0], before[2:6, 0])


def check_no_reduction_without_reduce_amax_or_delayed_scaling(ranks: Ranks) -> None:
    model = make_model(ranks, DelayedScaling(reduce_amax=False))
    with Collectives() as collectives:
        model(inputs(ranks, 0)).sum().backward()
        with float8lab.autocast(recipe=float8lab.recipes.Float8CurrentScaling()):
            model(inputs(ranks, 0)).sum().backward()
    assert not collectives.seen


@on_ranks(4)
def check_scales_are_equal_within_each_amax_reduction_group(ranks: Ranks) -> None:
    groups = [dist.new_group([i, i + 1]) for i in range(0, ranks.world, 2)]
    group = groups[ranks.rank // 2]
    layer = float8lab.Linear(32, 32, device=ranks.device)
    for step in range(3):
        with float8lab.autocast(recipe=RECIPE, amax_reduction_group=group):
            layer(inputs(ranks, step)).sum().backward()
    states = ranks.gather(state_of(nn.Sequential(layer)).cpu())
    for i in range(0, ranks.world, 2):
        assert torch.equal(states[i], states[i + 1])
    if ranks.world > 2:
        assert not torch.equal(states[0], states[2])


@on_ranks(4)
def check_scaling_state_resumes_under_a_group(ranks: Ranks) -> None:
    """The state of a module belongs to the group of its autocast, which other ranks do not have."""
    groups = [dist.new_group([i, i + 1]) for i in range(0, ranks.world, 2)]
    group = groups[ranks.rank // 2]

    def train(layer: nn.Module, steps: range) -> Tensor:
        for step in steps:
            with float8lab.autocast(recipe=RECIPE, amax_reduction_group=group):
                y = layer(inputs(ranks, step))
            y.sum().backward()
        return y

    reference, resumed = (float8lab.Linear(32, 32, device=ranks.device) for _ in range(2))
    resumed.load_state_dict(reference.state_dict())
    # Makes ranks know the module; nothing else of these steps may remain.
    train(resumed, range(5, 7))
    train(reference, range(2))
    state = float8lab.nn.ScalingState(reference, RECIPE, group).state_dict()
    # One module after the other: a region takes in all amaxes that there are.
    expected = train(reference, range(2, 4)), state_of(nn.Sequential(reference))
    float8lab.nn.ScalingState(resumed, RECIPE, group).load_state_dict(state)
    assert torch.equal(train(resumed, range(2, 4)), expected[0])
    assert torch.equal(state_of(nn.Sequential(resumed)), expected[1])


@on_ranks(4)
def check_table_row_of_data_parallelism(ranks: Ranks) -> None:
    """Each rank casts its own tokens, under DDP and on FSDP2's meshes of one and two dimensions."""
    groups = [dist.new_group([r]) for r in range(ranks.world)]

    def linear() -> Any:
        torch.manual_seed(3)
        return nn.Sequential(float8lab.Linear(64, 64, device=ranks.device))

    def step(recipe: Recipe, tokens: int, wrapper: Any) -> tuple[Step, Step]:
        torch.manual_seed(0)
        tokens *= ranks.world
        x, dy = (torch.randn(tokens, 64) * torch.randn(tokens, 1).mul(4).exp() for _ in range(2))
        x, dy = x.to(ranks.device), dy.to(ranks.device)
        want = take_step(linear(), recipe, x, dy, group=groups[ranks.rank])
        model = wrapper(linear())
        got = take_step(model, recipe, local_rows(x, ranks), local_rows(dy, ranks))
        means = [g.full_tensor() if isinstance(g, DTensor) else g for g in got.gradients]
        gradients = [g * ranks.world for g in means]
        y, dx = (local_rows(t, ranks) for t in want[:2])
        return got._replace(gradients=gradients), Step(y, dx, want.gradients)

    def sharded(*shape: int) -> Any:
        names = ("replicas", "shards")[-len(shape) :]
        return partial(fully_shard, mesh=ranks.mesh(*shape, names=names))

    meshes = [sharded(ranks.world)]
    if ranks.world == 4:
        meshes.append(sharded(2, 2))
    for wrapper in (DistributedDataParallel, *meshes):
        assert_row(ranks, "data: DDP, FSDP2, HSDP", partial(step, tokens=24, wrapper=wrapper))
        name = "data, the tokens of a rank in whole blocks"
        assert_row(ranks, name, partial(step, tokens=128, wrapper=wrapper))


def check_training_under_ddp_keeps_ranks_equal(ranks: Ranks) -> None:
    model = make_model(ranks)
    ids = [ranks.device.index] if ranks.device.type == "cuda" else None
    parallel = DistributedDataParallel(model, device_ids=ids)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    for step in range(4):
        parallel(inputs(ranks, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ranks.assert_same(state_of(model))
        ranks.assert_same(model[1].weight)


test_on_ranks = each_check(__name__, 2, 4)
