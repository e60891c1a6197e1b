"""Looks at sharded models: statistics of all ranks and of one, watch, find_nan, memory."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import float8lab
from float8lab import inspect
from float8lab.inspect import find_nan, watch
from float8lab.inspect.watch.records import Log
from float8lab.recipes import DelayedScaling
from tests.distributed.ranks import RECIPES, Collectives, Ranks, each_check


def check_fsdp2_weights_as_if_whole(ranks: Ranks) -> None:
    # 300, 5 and 1 rows: shards of unequal size, blocks that they cut, a rank without rows.
    for recipe in RECIPES:
        for features in (300, 5, 1):
            with float8lab.fp8_model_init(recipe=recipe):
                layer = float8lab.Linear(64, features, device=ranks.device)
            whole = layer.weight.detach().clone()
            original = whole.dequantize() + 0.001 * torch.randn(whole.shape).to(ranks.device)
            expected = whole.stats(original)
            model = nn.Sequential(layer)
            fully_shard(model, mesh=ranks.mesh())
            weight = model[0].weight
            shared = distribute_tensor(original, weight.device_mesh, weight.placements)

            found = inspect.stats(weight, shared)
            for name in ("shape", "dtype", "amax", "scale_min", "scale_max", "codes"):
                assert getattr(found, name) == getattr(expected, name), (name, recipe, features)
            a, b = found.comparison, expected.comparison
            assert (a.numel, a.clipped_count, a.flushed_count, a.max_error) == (
                b.numel, b.clipped_count, b.flushed_count, b.max_error,
            )  # fmt: skip
            for name in ("signal", "noise", "mean_error"):  # sums in another order
                assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-9)
            assert torch.equal(inspect.histogram(weight).counts, whole.histogram().counts)

            with Collectives() as collectives:
                shard = inspect.stats(weight, shared, local=True)
                blocks = inspect.stats(weight, shared, local=True, per_block=True)
                inspect.summary(weight)
                inspect.html(weight)
                inspect.blocks(weight)
            assert not collectives.seen
            rows = weight._local_tensor.shape[0]
            assert shard.shape == (rows, 64)
            assert shard.numel == rows * 64 == blocks.numel.sum().item()
            assert blocks.counts["zero"].sum().item() == shard.count("zero")
            counts = ranks.gather(shard.codes)
            assert tuple(map(sum, zip(*counts, strict=True))) == expected.codes


def check_replicas_count_once(ranks: Ranks) -> None:
    mesh = ranks.mesh(1, ranks.world, names=("shard", "replicate"))
    t = float8lab.quantize(torch.randn(8, 64, device=ranks.device), block=(1, 32))
    x = DTensor.from_local(t, mesh, [Shard(0), Replicate()], run_check=False)
    with Collectives() as collectives:
        assert inspect.stats(x).codes == t.stats().codes
    assert len(collectives.seen) == 2


def check_what_it_refuses(ranks: Ranks) -> None:
    t = float8lab.quantize(torch.randn(8, 64, device=ranks.device))
    x = DTensor.from_local(t, ranks.mesh(), [Shard(0)], run_check=False)
    with pytest.raises(ValueError, match="per_block must come with local=True"):
        inspect.stats(x, per_block=True)
    with pytest.raises(ValueError, match="original must have the placements of x"):
        inspect.compare(x, torch.ones(x.shape, device=ranks.device))
    partial = DTensor.from_local(t, ranks.mesh(), [Partial()], run_check=False)
    with pytest.raises(ValueError, match="x must be sharded or replicated"):
        inspect.stats(partial)
    plain = DTensor.from_local(torch.ones(2, 2), ranks.mesh(), [Shard(0)], run_check=False)
    with pytest.raises(TypeError, match="a DTensor whose local tensor is one"):
        inspect.stats(plain)


def make(device: torch.device) -> nn.Sequential:
    """Rows that neither the world size nor 128 divide, and a layer that one rank has no rows of."""
    layers = [nn.Linear(64, 300), nn.GELU(), nn.Linear(300, 1)]
    return nn.Sequential(*layers).to(device)


def shard(model: nn.Sequential) -> nn.Sequential:
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model


def check_weights_that_are_gathered_in_fp8(ranks: Ranks) -> None:
    for recipe in [*RECIPES, DelayedScaling()]:
        torch.manual_seed(0)
        model = float8lab.convert_to_float8(make(ranks.device), recipe)
        weight = model[0].weight.detach().clone()
        spec = recipe.linear.w
        whole = float8lab.quantize(weight, block=spec.block, scale_rule=spec.scale_rule)
        shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(8, 64, device=ranks.device) + ranks.rank
        seen = []
        for watched in (False, True):
            with Collectives() as collectives, watch(model) if watched else nullcontext() as w:
                for _ in range(2):
                    model(x).square().sum().backward()
                    optimizer.zero_grad()
                    if watched:
                        w.step()
            seen.append(collectives.seen[-10:])
        assert seen[0] == seen[1], "watching talks to no other rank"
        assert w.log.about["rank"] == f"{ranks.rank} of {ranks.world}"
        first, second = (
            {(r.layer, r.operand): r for r in w.log.records if r.step == step} for step in (0, 1)
        )
        rows = 150
        mine = slice(rows * ranks.rank, rows * (ranks.rank + 1))
        values = whole.qdata.float() * float8lab.tensor.blocks.expand_scale(
            whole.scale, spec.block, whole.shape
        )
        error = (values - weight)[mine].double()
        sqnr = 10 * torch.log10(weight[mine].double().square().sum() / error.square().sum())
        for found in (first["0", "w"], second["0", "w"]):
            assert found.elements == rows * 64
            assert found.amax == weight[mine].abs().max().item()
            assert not found.stored
            assert found.sqnr == pytest.approx(sqnr.item(), abs=1e-6)
        assert (("2", "w") in first) is (ranks.rank == 0)
        assert first["0", "x"].amax == x.abs().max().item()
        assert set(first) >= {(layer, o) for layer in "02" for o in ("x", "dy")}


def check_weights_that_are_stored_in_fp8(ranks: Ranks) -> None:
    for recipe in RECIPES:
        with float8lab.fp8_model_init(recipe=recipe):
            model = nn.Sequential(float8lab.Linear(64, 300, device=ranks.device))
        largest = model[0].weight.dequantize().abs().max().item()
        fully_shard(model)
        with watch(model) as w, float8lab.autocast(recipe=recipe):
            model(torch.randn(8, 64, device=ranks.device)).sum().backward()
        (found,) = (r for r in w.log.records if r.operand == "w")
        assert (found.stored, found.amax, found.elements) == (True, largest, 300 * 64)


def check_weights_that_are_gathered_in_high_precision(ranks: Ranks) -> None:
    model = float8lab.convert_to_float8(make(ranks.device), fp8_all_gather=False)
    weight = model[0].weight.detach().clone()
    shard(model)
    with watch(model, layers="0") as w:
        model(torch.randn(8, 64, device=ranks.device)).sum().backward()
    (found,) = (r for r in w.log.records if r.operand == "w")
    assert (found.elements, found.amax) == (300 * 64, weight.abs().max().item())


def check_a_file_for_each_rank(ranks: Ranks) -> None:
    model = float8lab.convert_to_float8(make(ranks.device))
    with pytest.raises(ValueError, match=r"jsonl must have \{rank\} in it in a job of 2 ranks"):
        watch(model, jsonl="log.jsonl")
    with watch(model, jsonl=ranks.tmp_path / "log.{rank}.jsonl") as w:
        model(torch.randn(8, 64, device=ranks.device)).sum().backward()
    assert Log.from_jsonl(ranks.tmp_path / f"log.{ranks.rank}.jsonl") == w.log


def check_find_nan_on_one_rank(ranks: Ranks) -> None:
    model = float8lab.convert_to_float8(make(ranks.device))
    shard(model)
    before = [p.to_local().detach().clone() for p in model.parameters()]
    x = torch.randn(8, 64, device=ranks.device)
    if ranks.rank == 1:
        x[0, 0] = torch.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The other rank goes on, and would wait for ever for one that stops.
    found = find_nan(model, x, steps=2, optimizer=optimizer)
    if ranks.rank == 1:
        assert (found.module, found.tensor, found.step) == ("", "input 0", 0)
    else:  # the gradients, which are reduced over ranks, are the first that it sees
        assert (found.phase, found.step) == ("backward", 0)
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, parameter.to_local())


def check_a_model_that_is_gathered_still_trains(ranks: Ranks) -> None:
    for look in (find_nan, inspect.memory_report):
        model = make(ranks.device)
        fully_shard(model)
        x = torch.randn(8, 64, device=ranks.device)
        with torch.no_grad():
            model(x)  # after which FSDP2's root stays gathered
        look(model, x)
        assert all(p.to_local().isfinite().all() for p in model.state_dict().values())
        model(x).square().mean().backward()
        assert all(p.grad is not None and hasattr(p, "placements") for p in model.parameters())


def check_shards_count_as_what_the_rank_holds(ranks: Ranks) -> None:
    layers = [nn.Linear(64, 64, bias=False, device=ranks.device) for _ in range(2)]
    model = float8lab.convert_to_float8(nn.Sequential(*layers))
    for layer in model:
        fully_shard(layer, mesh=ranks.mesh())
    fully_shard(model, mesh=ranks.mesh())
    x = torch.randn(32, 64, device=ranks.device)
    report = inspect.memory_report(model, x)
    rows = {row.name: row for row in report.layers}
    assert rows["0"].weights == rows["1"].weights == 4 * 64 * 64 // ranks.world
    before = [p.to_local().clone() for p in model.parameters()]
    for name in ("sensitivity", "advise"):
        with pytest.raises(NotImplementedError, match=f"{name} must be given parameters"):
            getattr(inspect, name)(model, x)
    loss = model(x).square().mean()  # still trains
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    after = [p.to_local() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


test_on_ranks = each_check(__name__, 2)
