"""Statistics of FP8 weights that are sharded: of all ranks together, and of one shard."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import float8lab
from float8lab import inspect
from tests.distributed.ranks import RECIPES, Collectives, Ranks, check_names, ranks_fixture


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
                b.numel,
                b.clipped_count,
                b.flushed_count,
                b.max_error,
            )
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


outcome = ranks_fixture(__name__, 2)


@pytest.mark.parametrize("name", check_names(sys.modules[__name__]))
def test_on_ranks(outcome, name):
    outcome(name)
