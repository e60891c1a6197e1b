"""watch under FSDP2: each rank records what it casts, and its own rows of a gathered weight."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import float8lab
from float8lab.inspect import find_nan, watch
from float8lab.inspect.watch.records import Log
from float8lab.recipes import DelayedScaling
from tests.distributed.ranks import RECIPES, Collectives, Ranks, check_names, ranks_fixture


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
        model = make(ranks.device)
        float8lab.convert_to_float8(model, recipe)
        weight = model[0].weight.detach().clone()
        spec = recipe.linear.w
        whole = float8lab.quantize(weight, block=spec.block, scale_rule=spec.scale_rule)
        shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(8, 64, device=ranks.device) + ranks.rank
        seen = []
        for watched in (False, True):
            with Collectives() as collectives:
                if watched:
                    with watch(model) as w:
                        for _ in range(2):
                            model(x).square().sum().backward()
                            optimizer.zero_grad()
                            w.step()
                else:
                    for _ in range(2):
                        model(x).square().sum().backward()
                        optimizer.zero_grad()
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
    torch.manual_seed(0)
    model = make(ranks.device)
    float8lab.convert_to_float8(model, fp8_all_gather=False)
    weight = model[0].weight.detach().clone()
    shard(model)
    with watch(model, layers="0") as w:
        model(torch.randn(8, 64, device=ranks.device)).sum().backward()
    (found,) = (r for r in w.log.records if r.operand == "w")
    assert (found.elements, found.amax) == (300 * 64, weight.abs().max().item())


def check_a_file_for_each_rank(ranks: Ranks) -> None:
    model = make(ranks.device)
    float8lab.convert_to_float8(model)
    with pytest.raises(ValueError, match=r"jsonl must have \{rank\} in it in a job of 2 ranks"):
        watch(model, jsonl="log.jsonl")
    with watch(model, jsonl=ranks.tmp_path / "log.{rank}.jsonl") as w:
        model(torch.randn(8, 64, device=ranks.device)).sum().backward()
    assert Log.from_jsonl(ranks.tmp_path / f"log.{ranks.rank}.jsonl") == w.log


def check_find_nan_on_one_rank(ranks: Ranks) -> None:
    model = make(ranks.device)
    float8lab.convert_to_float8(model)
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


outcome = ranks_fixture(__name__, 2)


@pytest.mark.parametrize("name", check_names(sys.modules[__name__]))
def test_on_ranks(outcome, name):
    outcome(name)
