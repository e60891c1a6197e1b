"""Inspection of sharded models: global and local statistics, ``watch``, ``find_nan`` and memory."""

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


def check_statistics_of_fsdp2_weights_equal_the_unsharded(ranks: Ranks) -> None:
    # 300, 5 and 1 rows give shards of unequal size, blocks cut by shards, and a rank without rows.
    for recipe in RECIPES:
        for features in (300, 5, 1):
            with float8lab.fp8_model_init(recipe=recipe):
                layer = float8lab.Linear(64, features, device=ranks.device)
            unsharded = layer.weight.detach().clone()
            original = unsharded.dequantize() + 0.001 * torch.randn(unsharded.shape).to(
                ranks.device
            )
            expected = unsharded.stats(original)
            model = nn.Sequential(layer)
            fully_shard(model, mesh=ranks.mesh())
            weight = model[0].weight
            sharded_original = distribute_tensor(original, weight.device_mesh, weight.placements)

            stats = inspect.stats(weight, sharded_original)
            for name in ("shape", "dtype", "amax", "scale_min", "scale_max", "codes"):
                assert getattr(stats, name) == getattr(expected, name), (name, recipe, features)
            a, b = stats.comparison, expected.comparison
            assert (a.numel, a.clipped_count, a.flushed_count, a.max_error) == (
                b.numel, b.clipped_count, b.flushed_count, b.max_error,
            )  # fmt: skip
            for name in ("signal", "noise", "mean_error"):  # sums in another order
                assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-9)
            assert torch.equal(inspect.histogram(weight).counts, unsharded.histogram().counts)

            with Collectives() as collectives:
                shard = inspect.stats(weight, sharded_original, local=True)
                blocks = inspect.stats(weight, sharded_original, local=True, per_block=True)
                inspect.summary(weight)
                inspect.blocks(weight)
                if recipe is RECIPES[0] and features == 300:  # its pictures take a second
                    inspect.html(weight)
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


def check_invalid_arguments_raise(ranks: Ranks) -> None:
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


def uneven_model(device: torch.device) -> nn.Sequential:
    """A model whose rows are no multiple of 128 or the ranks; a rank has no rows of one layer."""
    layers = [nn.Linear(64, 300), nn.GELU(), nn.Linear(300, 1)]
    return nn.Sequential(*layers).to(device)


def shard(model: nn.Sequential) -> nn.Sequential:
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model


def check_watch_of_weights_gathered_in_fp8(ranks: Ranks) -> None:
    for recipe in [*RECIPES, DelayedScaling()]:
        torch.manual_seed(0)
        model = float8lab.convert_to_float8(uneven_model(ranks.device), recipe)
        weight = model[0].weight.detach().clone()
        spec = recipe.linear.w
        unsharded = float8lab.quantize(weight, block=spec.block, scale_rule=spec.scale_rule)
        shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(8, 64, device=ranks.device) + ranks.rank
        collectives_of_runs = []
        for watched in (False, True):
            with Collectives() as collectives, watch(model) if watched else nullcontext() as w:
                for _ in range(2):
                    model(x).square().sum().backward()
                    optimizer.zero_grad()
                    if watched:
                        w.step()
            collectives_of_runs.append(collectives.seen[-10:])
        assert collectives_of_runs[0] == collectives_of_runs[1], "watching talks to no other rank"
        assert w.log.about["rank"] == f"{ranks.rank} of {ranks.world}"
        first, second = (
            {(r.layer, r.operand): r for r in w.log.records if r.step == step} for step in (0, 1)
        )
        rows = 150
        local_rows = slice(rows * ranks.rank, rows * (ranks.rank + 1))
        values = unsharded.qdata.float() * float8lab.tensor.blocks.expand_scale(
            unsharded.scale, spec.block, unsharded.shape
        )
        error = (values - weight)[local_rows].double()
        sqnr = 10 * torch.log10(weight[local_rows].double().square().sum() / error.square().sum())
        for record in (first["0", "w"], second["0", "w"]):
            assert record.elements == rows * 64
            assert record.amax == weight[local_rows].abs().max().item()
            assert not record.stored
            assert record.sqnr == pytest.approx(sqnr.item(), abs=1e-6)
        assert (("2", "w") in first) is (ranks.rank == 0)
        assert first["0", "x"].amax == x.abs().max().item()
        assert set(first) >= {(layer, o) for layer in "02" for o in ("x", "dy")}


def check_watch_of_weights_stored_in_fp8(ranks: Ranks) -> None:
    for recipe in RECIPES:
        with float8lab.fp8_model_init(recipe=recipe):
            model = nn.Sequential(float8lab.Linear(64, 300, device=ranks.device))
        largest = model[0].weight.dequantize().abs().max().item()
        fully_shard(model)
        with watch(model) as w, float8lab.autocast(recipe=recipe):
            model(torch.randn(8, 64, device=ranks.device)).sum().backward()
        (record,) = (r for r in w.log.records if r.operand == "w")
        assert (record.stored, record.amax, record.elements) == (True, largest, 300 * 64)


def check_watch_of_weights_gathered_in_high_precision(ranks: Ranks) -> None:
    model = float8lab.convert_to_float8(uneven_model(ranks.device), fp8_all_gather=False)
    weight = model[0].weight.detach().clone()
    shard(model)
    with watch(model, layers="0") as w:
        model(torch.randn(8, 64, device=ranks.device)).sum().backward()
    (record,) = (r for r in w.log.records if r.operand == "w")
    assert (record.elements, record.amax) == (300 * 64, weight.abs().max().item())


def check_each_rank_writes_its_log_file(ranks: Ranks) -> None:
    model = float8lab.convert_to_float8(uneven_model(ranks.device))
    with pytest.raises(ValueError, match=r"jsonl must have \{rank\} in it in a job of 2 ranks"):
        watch(model, jsonl="log.jsonl")
    with watch(model, jsonl=ranks.tmp_path / "log.{rank}.jsonl") as w:
        model(torch.randn(8, 64, device=ranks.device)).sum().backward()
    assert Log.from_jsonl(ranks.tmp_path / f"log.{ranks.rank}.jsonl") == w.log


def check_find_nan_stops_no_other_rank(ranks: Ranks) -> None:
    model = float8lab.convert_to_float8(uneven_model(ranks.device))
    shard(model)
    before = [p.to_local().detach().clone() for p in model.parameters()]
    x = torch.randn(8, 64, device=ranks.device)
    if ranks.rank == 1:
        x[0, 0] = torch.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The other rank continues; it would wait forever if this rank stopped.
    report = find_nan(model, x, steps=2, optimizer=optimizer)
    if ranks.rank == 1:
        assert (report.module, report.tensor, report.step) == ("", "input 0", 0)
    else:  # the first thing that it sees are the gradients, which are reduced over ranks
        assert (report.phase, report.step) == ("backward", 0)
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, parameter.to_local())


def check_a_gathered_model_still_trains(ranks: Ranks) -> None:
    for inspect_model in (find_nan, inspect.memory_report):
        model = uneven_model(ranks.device)
        fully_shard(model)
        x = torch.randn(8, 64, device=ranks.device)
        with torch.no_grad():
            model(x)  # after this call FSDP2's root stays gathered
        inspect_model(model, x)
        assert all(p.to_local().isfinite().all() for p in model.state_dict().values())
        model(x).square().mean().backward()
        assert all(p.grad is not None and hasattr(p, "placements") for p in model.parameters())


def check_memory_report_counts_the_local_shards(ranks: Ranks) -> None:
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
    loss = model(x).square().mean()  # the model still trains
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    after = [p.to_local() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


test_on_ranks = each_check(__name__, 2)
