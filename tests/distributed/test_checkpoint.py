"""Checkpoints of sharded models load on other numbers of ranks, bit for bit."""

import itertools
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import float8lab
from float8lab.distributed import ModelState
from float8lab.nn import ScalingState, whole_state_dict
from float8lab.optim import MasterWeights
from float8lab.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from tests.distributed.ranks import RECIPES, Ranks, each_check


def make_stored(ranks: Ranks, recipe: Any, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    with float8lab.fp8_model_init(recipe=recipe):
        return nn.Sequential(
            float8lab.Linear(64, 300, device=ranks.device),
            float8lab.Linear(300, 5, device=ranks.device),
        )


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model, mesh=mesh)
    return model


def meshes(ranks: Ranks) -> dict[int, DeviceMesh]:
    """The meshes of all ranks and of half of them, by number of ranks."""
    sizes = sorted({ranks.world, max(ranks.world // 2, 1)}, reverse=True)
    return {n: DeviceMesh(ranks.device.type, list(range(n))) for n in sizes}


def save(state: Any, path: Any, group: Any, function: Any = dcp.save) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own warnings, about its formats
        return function(state, checkpoint_id=path, process_group=group)


def load(state: Any, path: Any, group: Any, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, process_group=group, **options)


def assert_equal_states(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert list(a) == list(b)
    for name, value in a.items():
        expected = b[name]
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(full.cpu(), expected.cpu()), name


def check_stored_weights_load_on_other_numbers_of_ranks(ranks: Ranks) -> None:
    mesh_of_size = meshes(ranks)
    for i, recipe in enumerate(RECIPES):
        unsharded_state = ModelState(make_stored(ranks, recipe, 0)).state_dict()
        saved_model = shard(make_stored(ranks, recipe, 0), mesh_of_size[ranks.world])
        save({"model": ModelState(saved_model)}, ranks.tmp_path / f"{i}", None)
        for size, mesh in mesh_of_size.items():
            if ranks.rank >= size:
                continue
            model = shard(make_stored(ranks, recipe, 1), mesh)
            load({"model": ModelState(model)}, ranks.tmp_path / f"{i}", mesh.get_group())
            assert_equal_states(ModelState(model).state_dict(), unsharded_state)
            save({"model": ModelState(model)}, ranks.tmp_path / f"{i}-{size}", mesh.get_group())
        dist.barrier()
        for size in mesh_of_size:
            model = shard(make_stored(ranks, recipe, 2), mesh_of_size[ranks.world])
            load({"model": ModelState(model)}, ranks.tmp_path / f"{i}-{size}", None)
            assert_equal_states(ModelState(model).state_dict(), unsharded_state)
        if ranks.rank == 0:
            single = make_stored(ranks, recipe, 3)
            load({"model": ModelState(single)}, ranks.tmp_path / f"{i}", None, no_dist=True)
            assert_equal_states(ModelState(single).state_dict(), unsharded_state)
        dist.barrier()


def check_masters_save_the_checkpoint_of_the_plain_model(ranks: Ranks) -> None:
    def plain() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(64, 130, device=ranks.device), nn.Linear(130, 5, device=ranks.device)
        )

    reference = plain()
    unsharded_state = {k: v.detach().clone() for k, v in reference.state_dict().items()}
    for recipe in (Float8CurrentScaling(), DelayedScaling()):
        float8lab.convert_to_float8(reference, recipe)
        model = shard(reference, ranks.mesh())
        model(torch.ones(2, 64, device=ranks.device)).sum().backward()
        path = ranks.tmp_path / recipe.linear.w.describe().replace(" ", "")
        save({"model": get_model_state_dict(model)}, path, None)
        unsharded = plain()  # not converted
        state = unsharded.state_dict()
        load({"model": state}, path, None)
        unsharded.load_state_dict(state, strict=True)
        assert_equal_states(unsharded.state_dict(), unsharded_state)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert_equal_states(full, unsharded_state)
        set_model_state_dict(
            model,
            {k: v * 2 for k, v in full.items()},
            options=StateDictOptions(full_state_dict=True),
        )
        assert_equal_states(
            dict(model.state_dict()), {k: v * 2 for k, v in unsharded_state.items()}
        )
        reference = plain()
        reference.load_state_dict(unsharded_state)


def check_full_state_dict_has_the_values_of_stored_weights(ranks: Ranks) -> None:
    for recipe in RECIPES:
        unsharded = make_stored(ranks, recipe, 0)
        model = shard(make_stored(ranks, recipe, 0), ranks.mesh())
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        gathered = whole_state_dict(model)
        for name, value in unsharded.state_dict().items():
            expected = value.dequantize() if isinstance(value, float8lab.Float8Tensor) else value
            for got in (full[name], gathered[name]):
                got = got.dequantize() if isinstance(got, float8lab.Float8Tensor) else got
                assert torch.equal(got, expected), (recipe, name)


def check_async_save_loads_bit_for_bit(ranks: Ranks) -> None:
    group = dist.new_group(backend="gloo")
    recipe = Float8BlockScaling()
    unsharded_state = ModelState(make_stored(ranks, recipe, 0)).state_dict()
    model = shard(make_stored(ranks, recipe, 0), ranks.mesh())
    save({"model": ModelState(model)}, ranks.tmp_path / "async", group, dcp.async_save).result()
    loaded_model = shard(make_stored(ranks, recipe, 1), ranks.mesh())
    load({"model": ModelState(loaded_model)}, ranks.tmp_path / "async", None)
    assert_equal_states(ModelState(loaded_model).state_dict(), unsharded_state)


def check_fp8_moments_load_on_other_numbers_of_ranks(ranks: Ranks) -> None:
    """Steps, a checkpoint and the steps after it give the bytes of the unsharded optimizer."""
    mesh_of_size = meshes(ranks) | {1: DeviceMesh(ranks.device.type, [0])}
    for dtype in (torch.float32, torch.bfloat16):

        def make(mesh: DeviceMesh | None, seed: int, dtype: torch.dtype = dtype) -> Any:
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(200, 70), nn.Linear(70, 64)).to(ranks.device, dtype)
            if mesh is not None:
                shard(model, mesh)
            options = {"fp8_moments": True, "stochastic_rounding": True}
            return model, MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.1, **options)

        def steps(model: nn.Module, optimizer: Any, seeds: range) -> dict[str, Any]:
            for seed in seeds:
                torch.manual_seed(seed)
                x = torch.randn(8, 200, device=ranks.device, dtype=next(model.parameters()).dtype)
                model(x).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return states(model, optimizer)

        def states(model: nn.Module, optimizer: Any) -> dict[str, Any]:
            optimizer_state = get_optimizer_state_dict(model, optimizer)["state"]
            return {
                f"{p}.{name}": x.full_tensor() if hasattr(x, "full_tensor") else x
                for p, entry in optimizer_state.items()
                for name, x in entry.items()  # type: ignore[union-attr]
            } | {
                k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in model.state_dict().items()
            }

        unsharded = make(None, 0)
        early = {name: x.clone() for name, x in steps(*unsharded, range(2)).items()}
        assert early["0.weight.exp_avg.bits"].dtype == torch.uint8
        late = steps(*unsharded, range(2, 4))
        for size, mesh in mesh_of_size.items():
            if ranks.rank < size:
                model, optimizer = make(mesh, 0)
                assert_equal_states(steps(model, optimizer, range(2)), early)
                state = {"model": get_model_state_dict(model)}
                state["optimizer"] = get_optimizer_state_dict(model, optimizer)
                save(state, ranks.tmp_path / f"{dtype}-{size}", mesh.get_group())
        dist.barrier()
        for old, (size, mesh) in itertools.product(mesh_of_size, mesh_of_size.items()):
            if ranks.rank < size:
                model, optimizer = make(mesh, 1)
                state = {"model": get_model_state_dict(model)}
                state["optimizer"] = get_optimizer_state_dict(model, optimizer)
                load(state, ranks.tmp_path / f"{dtype}-{old}", mesh.get_group())
                set_model_state_dict(model, state["model"])
                set_optimizer_state_dict(model, optimizer, state["optimizer"])
                assert_equal_states(states(model, optimizer), early)
                assert_equal_states(steps(model, optimizer, range(2, 4)), late)
        dist.barrier()


def check_column_shards_have_fp8_moments_only_where_they_cut_no_block(ranks: Ranks) -> None:
    for columns, is_quantized in ((128 * ranks.world, True), (64 * ranks.world, False)):
        unsharded = nn.Parameter(torch.ones(70, columns, device=ranks.device))
        p = nn.Parameter(distribute_tensor(unsharded.detach(), ranks.mesh(), [Shard(1)]))
        grad = torch.randn(unsharded.shape, generator=torch.Generator().manual_seed(0))
        unsharded.grad = grad.to(ranks.device)
        p.grad = distribute_tensor(unsharded.grad, ranks.mesh(), [Shard(1)])
        unsharded_optimizer, sharded_optimizer = (
            MasterWeights([x], torch.optim.AdamW, fp8_moments=True) for x in (unsharded, p)
        )
        unsharded_optimizer.step()
        sharded_optimizer.step()
        assert ("exp_avg.scale" in sharded_optimizer.state[p]) == is_quantized
        for name, x in sharded_optimizer.state[p].items() if is_quantized else ():
            full = x.full_tensor() if hasattr(x, "full_tensor") else x
            assert torch.equal(full, unsharded_optimizer.state[unsharded][name]), name


def check_delayed_state_resumes_bit_for_bit(ranks: Ranks) -> None:
    """The lines are those of docs/many_gpus.md, "Resume on another mesh", with optimizer state."""
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo="max")

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(64, 96, device=ranks.device), nn.Linear(96, 5, device=ranks.device)
        )
        float8lab.convert_to_float8(model, recipe)
        shard(model, ranks.mesh())
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: Any, i: int) -> torch.Tensor:
        torch.manual_seed(100 * i + ranks.rank)
        x = torch.randn(8, 64, device=ranks.device)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        state: dict[str, Any] = {"model": ModelState(model), "scaling": ScalingState(model)}
        return {**state, "optimizer": get_optimizer_state_dict(model, optimizer)}

    first, optimizer = make(0)
    for i in range(3):
        step(first, optimizer, i)
    path = ranks.tmp_path / "resume"
    save(state_of(first, optimizer), path, None)
    expected = [step(first, optimizer, i) for i in range(3, 6)]

    second, optimizer = make(1)
    state = state_of(second, optimizer)
    load(state, path, None)
    set_optimizer_state_dict(second, optimizer, state["optimizer"])
    resumed = [step(second, optimizer, i) for i in range(3, 6)]
    assert torch.equal(torch.stack(expected), torch.stack(resumed)), (expected, resumed)
    full_state = StateDictOptions(full_state_dict=True)
    assert_equal_states(*(get_model_state_dict(m, options=full_state) for m in (first, second)))

    # Without the scaling state the model also loads with strict=True, and training goes on.
    third, optimizer = make(2)
    state = {"model": third.state_dict()}
    load(state, path, None)
    third.load_state_dict(state["model"], strict=True)
    assert step(third, optimizer, 3).isfinite()


test_on_ranks = each_check(__name__, 2, 4)
