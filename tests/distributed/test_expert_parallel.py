"""Tokens sent to the ranks of their experts give the bytes of one rank that has all experts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import float8lab
from float8lab import recipes
from float8lab.distributed.ranks import exchanged
from float8lab.formats import E5M2, Float8Spec
from tests.distributed.equality import Step, assert_row, take_step
from tests.distributed.ranks import Ranks, each_check, on_ranks

E, H = 8, 96
BLOCKS = ((-1, -1), (1, -1), (1, 32))


def batch(ranks: Ranks, *sizes: int, skip: int = 99) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Tokens of all ranks, ``sizes`` of each rank; experts from ``skip`` on get no tokens."""
    generator = torch.Generator().manual_seed(sum(sizes))
    x, scores = (torch.randn(sum(sizes), n, generator=generator) for n in (H, E))
    scores[:, skip:] = -torch.inf
    routing_map = torch.zeros_like(scores, dtype=torch.bool)
    routing_map.scatter_(1, scores.topk(3).indices, True)
    routing_map[::5] = False
    tensors = (t.to(ranks.device) for t in (x, scores.softmax(1), routing_map))
    return *tensors, [sum(sizes[: r + 1]) - sizes[r] for r in range(len(sizes))]


def experts(rows: Tensor, probs: Tensor, counts: Tensor, first: int) -> Tensor:
    """Apply a function to each row that differs by expert.

    It is computed in float64: on a GPU, the number of rows decides in which order a row is summed.
    """
    index = torch.arange(first, first + len(counts), device=rows.device)
    weight = (index + 1.5).repeat_interleave(counts)[:, None]
    return ((rows.double() * weight).sin() * probs.double()[:, None]).float()


def layer(
    x: Tensor, probs: Tensor, routing_map: Tensor, group: Any, first: int, **options: Any
) -> list[Tensor]:
    """Return the experts' rows, probabilities and counts, the output, and both gradients."""
    x, probs = (t.clone().requires_grad_() for t in (x, probs))
    rows, row_probs, counts, handle = float8lab.moe_dispatch(
        x, probs, routing_map, group, **options
    )
    assert isinstance(rows, float8lab.Float8Tensor) == isinstance(x, float8lab.Float8Tensor)
    values = rows.dequantize() if isinstance(rows, float8lab.Float8Tensor) else rows
    y = float8lab.moe_combine(experts(values, row_probs, counts, first), handle)
    dx, dprobs = torch.autograd.grad(y, (x, probs), (y * 1.7).cos().detach())
    return [values.detach(), row_probs.detach(), counts, y.detach(), dx, dprobs]


@on_ranks(4)
def check_dispatch_and_combine_have_the_bytes_of_one_rank(ranks: Ranks) -> None:
    groups = [dist.new_group([r]) for r in range(ranks.world)]
    experts_per_rank = E // ranks.world
    for sizes, skip in (([5, 0, 17, 2], 99), ([3, 4, 1, 6], 4), ([0, 0, 0, 1], 3), ([0] * 4, 99)):
        x, probs, routing_map, starts = batch(ranks, *sizes[: ranks.world], skip=skip)
        local_tokens = slice(starts[ranks.rank], starts[ranks.rank] + sizes[ranks.rank])
        for kind in (torch.float32, torch.bfloat16, *BLOCKS):
            options: dict[str, Any] = {}
            tokens = x.to(kind) if isinstance(kind, torch.dtype) else x
            if isinstance(kind, tuple):
                options["gradient"] = Float8Spec(E5M2, (1, 32), "pow2")
                # As delayed scaling has it: one scale for all ranks.
                scale = 0.02 if kind == (-1, -1) else None
                tokens = float8lab.quantize(x, block=kind, scale=scale)
            local_rows = tokens[local_tokens]
            got = layer(
                local_rows,
                probs[local_tokens],
                routing_map[local_tokens],
                None,
                ranks.rank * experts_per_rank,
                **options,
            )
            want = layer(tokens, probs, routing_map, groups[ranks.rank], 0, **options)
            offsets = want[2].cumsum(0).tolist()
            rows = slice(
                ([0, *offsets])[ranks.rank * experts_per_rank],
                offsets[(ranks.rank + 1) * experts_per_rank - 1],
            )
            local_experts = slice(
                ranks.rank * experts_per_rank, (ranks.rank + 1) * experts_per_rank
            )
            slices = [rows, rows, local_experts, local_tokens, local_tokens, local_tokens]
            names = ("rows", "row_probs", "counts", "y", "dx", "dprobs")
            for name, actual, expected, index in zip(names, got, want, slices, strict=True):
                assert actual.dtype == expected.dtype
                assert torch.equal(actual, expected[index]), (kind, name)


def check_rows_of_one_value_are_exchanged_with_any_strides(ranks: Ranks) -> None:
    """A GPU's scales of blocks are stored by columns, so those of one block have such strides."""
    values = 10.0 * ranks.rank + torch.arange(ranks.world, device=ranks.device)
    x = values.as_strided((ranks.world, 1), (1, ranks.world))
    one_each = [1] * ranks.world
    expected = 10.0 * torch.arange(ranks.world, device=ranks.device)[:, None] + ranks.rank
    assert torch.equal(exchanged(x, one_each, one_each, None), expected)


class Experts(nn.Module):
    """The experts of torchtitan versions that have no method for grouped GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("w1", "w2", "w3"):
            self.register_parameter(name, nn.Parameter(torch.randn(E, H, H) / 8))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Raise an error, since conversion replaces this method."""
        raise NotImplementedError


def stacked(kind: str, device: torch.device) -> Any:
    """Return a module of experts that has all weights of a layer in one parameter."""
    torch.manual_seed(0)
    if kind == "experts":
        module: Any = Experts().to(device)
    elif kind == "mlp":
        module = float8lab.ExpertMLP(E, H, H, bias=True, device=device)
    else:
        options = {"single_grouped_weight": True, "single_grouped_bias": True}
        module = float8lab.GroupedLinear(E, H, H, **options, device=device)
    return module


def place(_: str, module: nn.Module, mesh: Any) -> None:
    """Give each rank some experts of every parameter."""
    for name, p in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])))


def check_sharded_experts_have_the_bytes_of_one_rank(ranks: Ranks) -> None:
    """Experts that are DTensors, converted before or after sharding, have the bytes of one rank.

    Delayed scaling takes three steps. In the first step some experts have no tokens, and the
    magnitude of rows differs by expert.
    """
    groups, mesh = [dist.new_group([r]) for r in range(ranks.world)], ranks.mesh()
    sizes = [6, 0, 1, 9][: ranks.world]
    batches = [batch(ranks, *sizes, skip=skip) for skip in (5, 99, 99)]
    starts = batches[0][3]
    local_tokens = slice(starts[ranks.rank], [*starts, sum(sizes)][ranks.rank + 1])

    def train(module: Any, method: str, token_slice: slice, group: Any, steps: int) -> list[Tensor]:
        module.zero_grad()
        results = []
        for x, probs, routing_map, _ in batches[:steps]:
            tokens = x[token_slice].clone().requires_grad_()
            arguments = tokens, probs[token_slice], routing_map[token_slice]
            rows, row_probs, counts, handle = float8lab.moe_dispatch(*arguments, group)
            magnitude = row_probs.detach()[:, None].square().square()  # differs by expert
            out = getattr(module, method)(rows * magnitude, counts) * row_probs[:, None]
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
            single, module = stacked(kind, ranks.device), stacked(kind, ranks.device)
            float8lab.convert_to_float8(single, recipe)
            if converted_first:
                float8lab.convert_to_float8(module, recipe)
            distribute_module(module, mesh, place)
            if not converted_first:
                float8lab.convert_to_float8(module, recipe)
            assert float8lab.conversion_report(module).converted
            scaling_states = [
                float8lab.nn.ScalingState(experts_module) for experts_module in (module, single)
            ]
            for state in scaling_states:  # makes ranks agree on the slots that they reduce
                state.state_dict()
            got = train(module, method, local_tokens, None, steps)
            want = train(single, method, slice(None), groups[ranks.rank], steps)
            for index, (actual, expected) in enumerate(zip(got, want, strict=True)):
                actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
                assert torch.equal(
                    actual, expected[local_tokens] if index < 2 * steps else expected
                )
            if not (recipe.linear.delayed and recipe.reduce_amax):
                continue
            # Every rank has the scales of all experts; the state of one rank loads in their place.
            states = [state.state_dict() for state in scaling_states]
            for name, local_state in states[0].items():
                forward = (..., slice(2 * E))  # the amaxes of gradients wait for the next region
                assert torch.equal(local_state[forward], states[1][name][forward])
            scaling_states[0].load_state_dict(states[1])


def check_experts_in_other_placements_raise(ranks: Ranks) -> None:
    mesh = ranks.mesh()
    x, probs, routing_map, _ = batch(ranks, 3, 4, 1, 6)
    module = distribute_module(stacked("mlp", ranks.device), mesh, place)
    with pytest.raises(NotImplementedError, match="ExpertMLP must be given the rows"):
        module(x, probs, routing_map)
    partial_module = float8lab.convert_to_float8(
        stacked("mlp", ranks.device), recipes.DelayedScaling()
    )
    for name, p in list(partial_module.named_parameters()):
        partial_module.register_parameter(name, nn.Parameter(p[:3].detach()))
    with pytest.raises(NotImplementedError, match="weights must be those of all 8 experts"):
        partial_module.run_rows(x, [1, 1, 1])
    ones = torch.ones(E, H, H, device=ranks.device)
    replicated = nn.Parameter(distribute_tensor(ones, mesh, [Replicate()]))
    module.register_parameter("fc2_weight", replicated)
    with pytest.raises(NotImplementedError, match="experts' parameters must be placed as"):
        module.run_rows(x, [len(x)] * E)


@on_ranks(4)
def check_table_row_of_expert_parallelism(ranks: Ranks) -> None:
    """Each rank has some of the experts and some of the tokens."""
    groups = [dist.new_group([r]) for r in range(ranks.world)]
    group = groups[ranks.rank]  # the ranks that hold an expert
    x, probs, routing_map, starts = batch(ranks, *[6, 1, 0, 9][: ranks.world])
    x *= x[:, :1].exp()
    dy = x.flip(0)
    local_tokens = slice(starts[ranks.rank], [*starts, len(x)][ranks.rank + 1])
    local_experts = slice(E // ranks.world * ranks.rank, E // ranks.world * (ranks.rank + 1))

    def call(module: Any, token_slice: slice, group: Any) -> Callable[[Tensor], Tensor]:
        def run(tokens: Tensor) -> Tensor:
            arguments = tokens, probs[token_slice], routing_map[token_slice]
            rows, row_probs, counts, handle = float8lab.moe_dispatch(*arguments, group)
            out = module.run_rows(rows, counts) * row_probs[:, None]
            return float8lab.moe_combine(out, handle)

        return run

    def layer(recipe: recipes.Recipe) -> tuple[Step, Step]:
        single = stacked("mlp", ranks.device)
        module = float8lab.ExpertMLP(E // ranks.world, H, H, bias=True, device=ranks.device)
        with torch.no_grad():
            for p, unsharded in zip(module.parameters(), single.parameters(), strict=True):
                p.copy_(unsharded[local_experts])
        run, run_single = call(module, local_tokens, None), call(single, slice(None), group)
        got = take_step(module, recipe, x[local_tokens], dy[local_tokens], group=group, call=run)
        want = take_step(single, recipe, x, dy, group=group, call=run_single)
        return got, Step(
            want.y[local_tokens], want.dx[local_tokens], [g[local_experts] for g in want.gradients]
        )

    assert_row(ranks, "experts: `moe_dispatch`, `ExpertMLP`", layer)


test_on_ranks = each_check(__name__, 2, 4)


def test_dispatch_on_one_process_is_a_permutation() -> None:
    single_rank = Ranks(0, 1, torch.device("cpu"), None)  # type: ignore[arg-type]
    x, probs, routing_map, _ = batch(single_rank, 20)
    got = layer(x, probs, routing_map, None, 0)
    leaves = [t.clone().requires_grad_() for t in (x, probs)]
    rows, row_probs, row_map = float8lab.moe_permute_with_probs(*leaves, routing_map)
    y = float8lab.moe_unpermute(experts(rows, row_probs, routing_map.sum(0), 0), row_map)
    gradients = torch.autograd.grad(y, leaves, (y * 1.7).cos().detach())
    want = [rows, row_probs, routing_map.sum(0), y, *gradients]
    torch.testing.assert_close(got, want, rtol=0, atol=0)
