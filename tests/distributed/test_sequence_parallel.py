"""The steps of a training loop around tensor-parallel layers, on the ranks of one job.

They are sums of gradients under sequence parallelism, cross entropy over a sharded vocabulary,
distributed saved activations, and random streams that ranks share or do not.
"""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import float8lab
from float8lab import recipes
from float8lab.distributed import parallel_cross_entropy, reduce_sequence_parallel_gradients
from tests.distributed.ranks import Collectives, Ranks, each_check

VOCABULARY = 56


def local_shard(x: Tensor, ranks: Ranks, dim: int = -1) -> Tensor:
    return x.chunk(ranks.world, dim)[ranks.rank].contiguous()


class MarkedNorms(nn.Module):
    """Norms under sequence parallelism, and a norm whose gradients are complete."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "sequence_parallel": True}
        self.first = float8lab.LayerNorm(16, **options)
        self.second = float8lab.RMSNorm(16, params_dtype=torch.bfloat16, **options)
        self.plain = float8lab.LayerNorm(16, device=device)


def check_gradients_of_sequence_parallel_parameters_are_summed(ranks: Ranks) -> None:
    model = MarkedNorms(ranks.device)
    for index, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, ranks.rank + index)
    model.first.bias.main_grad = torch.full((16,), 0.5, device=ranks.device)  # type: ignore[attr-defined]
    with Collectives() as collectives:
        reduce_sequence_parallel_gradients(model)
    assert collectives.of("allreduce") == [(torch.float32, 48), (torch.bfloat16, 16)]
    total = sum(range(ranks.world))
    for index, (name, p) in enumerate(model.named_parameters()):
        marked = not name.startswith("plain")
        want = total + ranks.world * index if marked else ranks.rank + index
        assert torch.equal(p.grad, torch.full_like(p, want)), name
    main_grad: Tensor = model.first.bias.main_grad  # type: ignore[attr-defined]
    assert torch.equal(main_grad, torch.full_like(main_grad, 0.5 * ranks.world))

    # With shards of FSDP2 in the other dimension of a mesh.
    mesh = ranks.mesh(ranks.world // 2, 2, names=("dp", "tp"))
    sharded = fully_shard(MarkedNorms(ranks.device), mesh=mesh["dp"])
    for p in sharded.parameters():
        p.grad = torch.full_like(p, ranks.rank)
    reduce_sequence_parallel_gradients(sharded, mesh["tp"].get_group())
    first_of_pair = ranks.rank // 2 * 2
    for p, want in (
        (sharded.first.weight, 2 * first_of_pair + 1), (sharded.plain.weight, ranks.rank),
    ):  # fmt: skip
        assert p.grad.to_local().unique().tolist() == [want]

    groups = [dist.new_group([r for r in range(ranks.world) if r % 2 == odd]) for odd in (0, 1)]
    model.first.tp_group, model.plain.tp_group = groups  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^group must be given .* 2 groups"):
        reduce_sequence_parallel_gradients(model)
    model.plain.tp_group = groups[0]  # type: ignore[assignment]
    if ranks.rank % 2 == 0:
        with Collectives() as collectives:
            reduce_sequence_parallel_gradients(model)
        # A single rank has nothing to sum.
        assert len(collectives.of("allreduce")) == 2 * (ranks.world > 2)


def check_sharded_cross_entropy_equals_unsharded(ranks: Ranks) -> None:
    group = dist.group.WORLD
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for shape in ((3, 5), (1,), (0, 2)):
            logits = (torch.randn(*shape, VOCABULARY) * 4).to(ranks.device, dtype)
            target = torch.randint(0, VOCABULARY, shape).to(ranks.device)
            if target.numel() > 1:
                target[0, :2] = -100
                logits[0, 2, :30] = -torch.inf  # all logits of a rank, or not
                target[0, 2] = 40
            grad = torch.randn(shape).to(ranks.device)
            for smoothing, z_loss, mean in ((0.0, 0.0, False), (0.25, 0.0, True), (0.0, 0.5, True)):
                if smoothing:
                    logits = logits.nan_to_num(neginf=-20.0)
                if mean and not target.numel():
                    continue
                unsharded, local = logits.clone().requires_grad_(), local_shard(logits, ranks)
                local.requires_grad_()
                arguments = (target, smoothing, mean)
                with Collectives() as collectives:
                    got = parallel_cross_entropy(
                        local, *arguments, group, z_loss_weight=z_loss, return_log_sum_exp=True
                    )
                assert len(collectives.of("all_reduce")) == 2
                want = parallel_cross_entropy(
                    unsharded, *arguments, z_loss_weight=z_loss, return_log_sum_exp=True
                )
                for tensor in (*got, *want):
                    assert tensor.dtype == torch.promote_types(dtype, torch.float32)
                ranks.assert_same(got[0])
                torch.testing.assert_close(got, want)
                outer = grad.to(got[0].dtype).sum() if mean else grad.to(got[0].dtype)
                (local_grad,) = torch.autograd.grad(got[0], local, outer)
                (unsharded_grad,) = torch.autograd.grad(want[0], unsharded, outer)
                assert local_grad.dtype == dtype
                torch.testing.assert_close(local_grad, local_shard(unsharded_grad, ranks))


def check_targets_beyond_the_vocabulary_give_nan(ranks: Ranks) -> None:
    local_logits = local_shard(torch.randn(4, VOCABULARY), ranks).to(ranks.device).requires_grad_()
    target = torch.tensor([0, VOCABULARY, -1, VOCABULARY - 1], device=ranks.device)
    loss = parallel_cross_entropy(local_logits, target, dist_process_group=dist.group.WORLD)
    assert loss.isnan().tolist() == [False, True, True, False]
    loss.sum().backward()
    assert local_logits.grad is not None
    assert local_logits.grad.isnan().all(1).tolist() == [False, True, True, False]
    first_rank_group = dist.new_group([0])
    if ranks.rank:
        with pytest.raises(ValueError, match=r"^dist_process_group must have this process"):
            parallel_cross_entropy(local_logits, target, dist_process_group=first_rank_group)


class FeedForward(nn.Module):
    """An FP8 layer with dropout from a stream that ranks share and from a stream of this rank."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.up = float8lab.Linear(32, 64, device=device)
        self.down = float8lab.Linear(64, 32, device=device)
        self.tracker = float8lab.CudaRNGStatesTracker(device)
        self.tracker.add("model-parallel-rng", 100 + dist.get_rank())
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor, _: Any = None) -> Tensor:
        y = F.gelu(self.up(x))
        with self.tracker.fork():
            mask = F.dropout(torch.ones_like(y), 0.5)
        self.masks.append(mask)
        return F.dropout(self.down(y * mask), 0.25)


def check_distributed_activations_and_random_streams_change_nothing(ranks: Ranks) -> None:
    for recipe in (recipes.DelayedScaling(), recipes.Float8CurrentScaling()):
        for tokens in (7, 1, 0):
            results = []
            for distributes in (False, True):
                torch.manual_seed(1)
                model = FeedForward(ranks.device)
                for p in model.parameters():
                    dist.broadcast(p.data, 0)
                leaf = torch.randn(tokens, 32).to(ranks.device).requires_grad_()
                dist.broadcast(leaf.data, 0)
                x = leaf * 2  # not a leaf, so nothing else holds it
                alive = weakref.ref(x)
                with float8lab.autocast(recipe=recipe), Collectives() as collectives:
                    y = float8lab.checkpoint(
                        model, x, torch.ones(3), distribute_saved_activations=distributes,
                        get_rng_state_tracker=lambda m=model: m.tracker,
                    )  # fmt: skip
                assert not collectives.of("gather")
                del x
                assert (alive() is None) == distributes
                torch.rand(3, device=ranks.device)
                with Collectives() as collectives:
                    y.square().sum().backward()
                shard_bytes = -(-tokens * 32 // ranks.world) * 4
                assert collectives.of("all_gather") == [(torch.uint8, shard_bytes)] * distributes
                mask, repeated_mask = model.masks
                assert torch.equal(mask, repeated_mask)
                results.append([y, leaf.grad, *(p.grad for p in model.parameters())])
                if tokens > 1:
                    masks = ranks.gather(mask.cpu())
                    assert not any(torch.equal(masks[0], other_mask) for other_mask in masks[1:])
            torch.testing.assert_close(*results, rtol=0, atol=0)


test_on_ranks = each_check(__name__, 2, 4, cpu=4)
