"""Tokens sent to the ranks of their experts: the bytes of one rank that has all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import float8lab
from float8lab import recipes
from float8lab.formats import E5M2, Float8Spec
from tests.distributed.equality import Step, assert_row, take_step
from tests.distributed.ranks import Ranks, each_check, on_ranks

E, H = 8, 96
BLOCKS = ((-1, -1), (1, -1), (1, 32))


def batch(ranks: Ranks, *sizes: int, skip: int = 99) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Tokens of all ranks, ``sizes`` of each; none for the experts from ``skip`` on."""
    generator = torch.Generator().manual_seed(sum(sizes))
    x, scores = (torch.randn(sum(sizes), n, generator=generator) for n in (H, E))
    scores[:, skip:] = -torch.inf
    routing_map = torch.zeros_like(scores, dtype=torch.bool)
    routing_map.scatter_(1, scores.topk(3).indices, True)
    routing_map[::5] = False
    tensors = (t.to(ranks.device) for t in (x, scores.softmax(1), routing_map))
    return *tensors, [sum(sizes[: r + 1]) - sizes[r] for r in range(len(sizes))]


def experts(rows: Tensor, probs: Tensor, counts: Tensor, first: int) -> Tensor:
    """A function of each row that differs by expert."""
    number = torch.arange(first, first + len(counts), device=rows.device)
    weight = (number + 1.5).repeat_interleave(counts)[:, None]
    return (rows * weight).sin() * probs[:, None]


def layer(
    x: Tensor, probs: Tensor, routing_map: Tensor, group: Any, first: int, **options: Any
) -> list[Tensor]:
    """The rows that experts get, the output, and the gradients of tokens and probabilities."""
    x, probs = (t.clone().requires_grad_() for t in (x, probs))
    rows, beside, counts, handle = float8lab.moe_dispatch(x, probs, routing_map, group, **options)
    assert isinstance(rows, float8lab.Float8Tensor) == isinstance(x, float8lab.Float8Tensor)
    values = rows.dequantize() if isinstance(rows, float8lab.Float8Tensor) else rows
    y = float8lab.moe_combine(experts(values, beside, counts, first), handle)
    dx, dprobs = torch.autograd.grad(y, (x, probs), (y * 1.7).cos().detach())
    return [values.detach(), beside.detach(), counts, y.detach(), dx, dprobs]


@on_ranks(4)
def check_the_bytes_of_one_rank(ranks: Ranks) -> None:
    groups = [dist.new_group([r]) for r in range(ranks.world)]
    mine = E // ranks.world
    for sizes, skip in (([5, 0, 17, 2], 99), ([3, 4, 1, 6], 4), ([0, 0, 0, 1], 3), ([0] * 4, 99)):
        x, probs, routing_map, starts = batch(ranks, *sizes[: ranks.world], skip=skip)
        here = slice(starts[ranks.rank], starts[ranks.rank] + sizes[ranks.rank])
        for kind in (torch.float32, torch.bfloat16, *BLOCKS):
            options: dict[str, Any] = {}
            tokens = x.to(kind) if isinstance(kind, torch.dtype) else x
            if isinstance(kind, tuple):
                options["gradient"] = Float8Spec(E5M2, (1, 32), "pow2")
                scale = 0.02 if kind == (-1, -1) else None  # delayed scaling's, one for all ranks
                tokens = float8lab.quantize(x, block=kind, scale=scale)
            part = tokens[here]
            got = layer(part, probs[here], routing_map[here], None, ranks.rank * mine, **options)
            want = layer(tokens, probs, routing_map, groups[ranks.rank], 0, **options)
            ends = want[2].cumsum(0).tolist()
            rows = slice(([0, *ends])[ranks.rank * mine], ends[(ranks.rank + 1) * mine - 1])
            experts_here = slice(ranks.rank * mine, (ranks.rank + 1) * mine)
            parts = [rows, rows, experts_here, here, here, here]
            for one, other, where in zip(got, want, parts, strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other[where])


class Experts(nn.Module):
    """torchtitan's, of versions without a method for grouped products."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("w1", "w2", "w3"):
            self.register_parameter(name, nn.Parameter(torch.randn(E, H, H) / 8))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """What conversion replaces."""
        raise NotImplementedError


def stacked(kind: str, device: torch.device) -> Any:
    """A module of experts, with all weights of a layer in one parameter."""
    torch.manual_seed(0)
    if kind == "experts":
        module: Any = Experts().to(device)
    elif kind == "mlp":
        module = float8lab.ExpertMLP(E, H, H, bias=True, device=device)
    else:
        whole = {"single_grouped_weight": True, "single_grouped_bias": True}
        module = float8lab.GroupedLinear(E, H, H, **whole, device=device)
    return module


def place(_: str, module: nn.Module, mesh: Any) -> None:
    """Give each rank some experts of every parameter."""
    for name, p in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])))


def check_shards_of_stacked_weights(ranks: Ranks) -> None:
    """Experts that are DTensors, converted before and after, have the bytes of one rank's.

    Of three steps, in whose first some experts have no tokens, and some are louder than others.
    """
    groups, mesh = [dist.new_group([r]) for r in range(ranks.world)], ranks.mesh()
    sizes = [6, 0, 1, 9][: ranks.world]
    batches = [batch(ranks, *sizes, skip=skip) for skip in (5, 99, 99)]
    starts = batches[0][3]
    here = slice(starts[ranks.rank], [*starts, sum(sizes)][ranks.rank + 1])

    def train(module: Any, method: str, where: slice, group: Any, steps: int) -> list[Tensor]:
        module.zero_grad()
        results = []
        for x, probs, routing_map, _ in batches[:steps]:
            tokens = x[where].clone().requires_grad_()
            sent = tokens, probs[where], routing_map[where]
            rows, beside, counts, handle = float8lab.moe_dispatch(*sent, group)
            loud = beside.detach()[:, None].square().square()  # of another size for each expert
            out = getattr(module, method)(rows * loud, counts) * beside[:, None]
            y = float8lab.moe_combine(out, handle)
            y.backward((y.detach() * 1.7).cos())
            results += [y.detach(), tokens.grad]
        return [*results, *(p.grad for p in module.parameters())]

    for recipe in (
        recipes.Float8RowwiseScaling(), recipes.Float8BlockScaling(), recipes.MXFP8BlockScaling(),
        recipes.Float8CurrentScaling(), recipes.DelayedScaling(),
        recipes.DelayedScaling(amax_history_len=2, reduce_amax=False),
    ):  # fmt: skip
        steps = 3 if recipe.linear.delayed else 1
        for kind, method in (("experts", "forward"), ("mlp", "run_rows"), ("linear", "forward")):
            if kind != "mlp" and recipe.linear.delayed and not recipe.reduce_amax:
                continue
            converted_first = kind == "mlp"
            alone, module = stacked(kind, ranks.device), stacked(kind, ranks.device)
            float8lab.convert_to_float8(alone, recipe)
            if converted_first:
                float8lab.convert_to_float8(module, recipe)
            distribute_module(module, mesh, place)
            if not converted_first:
                float8lab.convert_to_float8(module, recipe)
            assert float8lab.conversion_report(module).converted
            saved = [float8lab.nn.ScalingState(one) for one in (module, alone)]
            for state in saved:  # ranks agree on the slots that they reduce
                state.state_dict()
            got = train(module, method, here, None, steps)
            want = train(alone, method, slice(None), groups[ranks.rank], steps)
            for index, (one, other) in enumerate(zip(got, want, strict=True)):
                one = one.full_tensor() if isinstance(one, DTensor) else one
                assert torch.equal(one, other[here] if index < 2 * steps else other)
            if not (recipe.linear.delayed and recipe.reduce_amax):
                continue
            # Every rank knows the scales of all experts, in whose place those of one rank load.
            states = [state.state_dict() for state in saved]
            for name, mine in states[0].items():
                forward = (..., slice(2 * E))  # gradients' amaxes wait for the next region
                assert torch.equal(mine[forward], states[1][name][forward])
            saved[0].load_state_dict(states[1])


def check_experts_that_are_placed_otherwise(ranks: Ranks) -> None:
    mesh = ranks.mesh()
    x, probs, routing_map, _ = batch(ranks, 3, 4, 1, 6)
    module = distribute_module(stacked("mlp", ranks.device), mesh, place)
    with pytest.raises(NotImplementedError, match="ExpertMLP must be given the rows"):
        module(x, probs, routing_map)
    few = float8lab.convert_to_float8(stacked("mlp", ranks.device), recipes.DelayedScaling())
    for name, p in list(few.named_parameters()):
        few.register_parameter(name, nn.Parameter(p[:3].detach()))
    with pytest.raises(NotImplementedError, match="weights must be those of all 8 experts"):
        few.run_rows(x, [1, 1, 1])
    ones = torch.ones(E, H, H, device=ranks.device)
    replicated = nn.Parameter(distribute_tensor(ones, mesh, [Replicate()]))
    module.register_parameter("fc2_weight", replicated)
    with pytest.raises(NotImplementedError, match="experts' parameters must be placed as"):
        module.run_rows(x, [len(x)] * E)


@on_ranks(4)
def check_what_is_equal(ranks: Ranks) -> None:
    """Each rank has some of the experts, and some of the tokens."""
    groups = [dist.new_group([r]) for r in range(ranks.world)]
    group = groups[ranks.rank]  # the ranks that hold an expert
    x, probs, routing_map, starts = batch(ranks, *[6, 1, 0, 9][: ranks.world])
    x *= x[:, :1].exp()
    dy = x.flip(0)
    here = slice(starts[ranks.rank], [*starts, len(x)][ranks.rank + 1])
    own = slice(E // ranks.world * ranks.rank, E // ranks.world * (ranks.rank + 1))

    def call(module: Any, where: slice, group: Any) -> Callable[[Tensor], Tensor]:
        def run(tokens: Tensor) -> Tensor:
            sent = tokens, probs[where], routing_map[where]
            rows, beside, counts, handle = float8lab.moe_dispatch(*sent, group)
            out = module.run_rows(rows, counts) * beside[:, None]
            return float8lab.moe_combine(out, handle)

        return run

    def layer(recipe: recipes.Recipe) -> tuple[Step, Step]:
        alone = stacked("mlp", ranks.device)
        module = float8lab.ExpertMLP(E // ranks.world, H, H, bias=True, device=ranks.device)
        with torch.no_grad():
            for p, whole in zip(module.parameters(), alone.parameters(), strict=True):
                p.copy_(whole[own])
        run, run_alone = call(module, here, None), call(alone, slice(None), group)
        got = take_step(module, recipe, x[here], dy[here], group=group, call=run)
        want = take_step(alone, recipe, x, dy, group=group, call=run_alone)
        return got, Step(want.y[here], want.dx[here], [g[own] for g in want.gradients])

    assert_row(ranks, "experts: `moe_dispatch`, `ExpertMLP`", layer)


test_on_ranks = each_check(__name__, 2, 4)


def test_one_process_is_a_permutation() -> None:
    alone = Ranks(0, 1, torch.device("cpu"), None)  # type: ignore[arg-type]
    x, probs, routing_map, _ = batch(alone, 20)
    got = layer(x, probs, routing_map, None, 0)
    leaves = [t.clone().requires_grad_() for t in (x, probs)]
    rows, beside, row_map = float8lab.moe_permute_with_probs(*leaves, routing_map)
    y = float8lab.moe_unpermute(experts(rows, beside, routing_map.sum(0), 0), row_map)
    gradients = torch.autograd.grad(y, leaves, (y * 1.7).cos().detach())
    want = [rows, beside, routing_map.sum(0), y, *gradients]
    torch.testing.assert_close(got, want, rtol=0, atol=0)
