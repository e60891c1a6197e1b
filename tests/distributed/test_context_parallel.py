"""Context parallelism: attention has the numbers of one rank, whatever the mask and the format."""

import contextlib
import copy
import functools
import itertools
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel

import float8lab
from float8lab.distributed import (
    CPAttentionLoadBalancingStrategy,
    get_batch_on_this_cp_rank,
    join_sequence,
    shard_sequence,
)
from float8lab.nn.attention.fp8 import cast_operand
from float8lab.recipes import DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, Recipe
from tests.distributed.equality import Step, assert_row, summed, take_step
from tests.distributed.ranks import Collectives, Ranks, each_check

H, D, B, S = 8, 16, 2, 24
LENGTHS = torch.tensor([0, 16, 16, 24, 40])
ORDERS = ("dual_chunk_swap", "no_load_balance")
COMM_TYPES = ("a2a", "p2p", "all_gather", "a2a+p2p")
CASTS = [f"float8lab.nn.attention.{module}.cast_operand" for module in ("ring", "fp8")]


def group_of(ranks: Ranks) -> Any:
    return dist.group.WORLD


def groups_of(ranks: Ranks, comm_type: str) -> Any:
    """The group of all ranks, or pairs that exchange heads and those of which keys go around."""
    if comm_type != "a2a+p2p":
        return group_of(ranks)
    mesh = ranks.mesh(ranks.world // 2, 2, names=("tokens", "heads"))
    return [mesh["heads"].get_group(), mesh["tokens"].get_group()]


def sized(ranks: Ranks, *shape: int) -> Tensor:
    return torch.randn(shape).to(ranks.device)


class Case(NamedTuple):
    """Calls of a module on one rank, with tensors of all tokens."""

    tensors: list[Tensor]
    dim: int
    calls: list[dict[str, Any]]
    module: dict[str, Any]
    starts: Tensor | None = None

    def shard(self, x: Tensor, ranks: Ranks, order: str) -> Tensor:
        """A rank's tokens."""
        return shard_sequence(
            x, group_of(ranks), dim=self.dim, cu_seqlens=self.starts, load_balancing_strategy=order
        )

    def run(
        self, module: Any, call: dict[str, Any], tensors: list[Tensor], dtype: torch.dtype,
        **region: Any,
    ) -> list[Tensor]:  # fmt: skip
        """The output and the gradients of all tensors."""
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        call = {
            name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in call.items()
        }
        with float8lab.autocast(**region or {"enabled": False}):
            y = module(*leaves, **call)
        return [y, *torch.autograd.grad((y * y.detach().cos()).sum(), leaves)]


def pair(
    ranks: Ranks, *args: Any, comm_type: str = "a2a", order: str = ORDERS[0], **options: Any
) -> tuple[Any, Any]:
    """A module on one rank, and the same on all."""
    made = [float8lab.DotProductAttention(H, *args, **options).to(ranks.device) for _ in range(2)]
    groups = groups_of(ranks, comm_type)
    made[1].set_context_parallel_group(groups, [*range(ranks.world)], None, comm_type, order)
    return made[0], made[1]


def error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact.double()).norm() / exact.double().norm().clamp(min=1)).item()


def assert_near(
    ranks: Ranks, case: Case, results: list[Tensor], alone: list[Tensor], exact: list[Tensor],
    order: str,
) -> None:  # fmt: skip
    """A rank's results are as near to the exact ones as those of one rank alone."""
    for got, one, right in zip(results, alone, exact, strict=True):
        wanted = case.shard(right, ranks, order)
        rounding = torch.finfo(got.dtype).eps
        assert got.shape == wanted.shape
        assert error(got, wanted) <= 2 * (error(case.shard(one, ranks, order), wanted) + rounding)


def cases_of(ranks: Ranks) -> dict[str, Case]:
    """Masks, biases and formats."""
    lengths = torch.tensor([0, 19, 19 + 24], device=ranks.device)
    arbitrary = torch.rand(B, H, S, S).to(ranks.device) > 0.7
    calls: list[dict[str, Any]] = [
        {"attn_mask_type": "causal"},
        {"attn_mask_type": "no_mask"},
        {"attn_mask_type": "causal", "window_size": (5, 0)},
        {"attn_mask_type": "padding_causal", "cu_seqlens_q": lengths},
        {"attn_mask_type": "arbitrary", "attention_mask": arbitrary},
        {
            "core_attention_bias_type": "post_scale_bias",
            "core_attention_bias": sized(ranks, 1, H, S, S),
        },
        {"core_attention_bias_type": "alibi"},
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.rand(H).to(ranks.device)},
        {"checkpoint_core_attention": True},
    ]
    starts = LENGTHS.to(ranks.device)
    ends = torch.tensor([0, 13, 13, 21, 30], device=ranks.device)
    padded = {"cu_seqlens_q": ends, "cu_seqlens_q_padded": starts}
    slopes = torch.rand(len(LENGTHS) - 1, H).to(ranks.device)
    alibi = {**padded, "core_attention_bias_type": "alibi", "alibi_slopes": slopes}
    packed = [{"cu_seqlens_q": starts}, padded, {**padded, "window_size": (5, 0)}, alibi]

    def qkv(
        *shape: int, groups: int, queries: int = 1, keys: int = 1, channels: int = D
    ) -> list[Tensor]:
        factors = (queries, keys, keys)
        tokens = [tuple(n * factor if n == S else n for n in shape) for factor in factors]
        heads = ((H, D), (groups, D), (groups, channels))
        return [sized(ranks, *n, *last) for n, last in zip(tokens, heads, strict=True)]

    thd = {"num_gqa_groups": 4, "qkv_format": "thd", "attn_mask_type": "padding_causal"}
    cross = {"num_gqa_groups": 4, "attention_type": "cross"}
    masks = ("no_mask", "causal_bottom_right")
    return {
        "sbhd": Case(qkv(S, B, groups=H), 0, calls, {"kv_channels": D}),
        "bshd, GQA": Case(
            qkv(B, S, groups=2), 1, calls,
            {"kv_channels": D, "num_gqa_groups": 2, "qkv_format": "bshd"},
        ),
        # 8 tokens are of no sequence, and one sequence is empty.
        "thd": Case(qkv(48, groups=4), 0, packed, {"kv_channels": D, **thd}, starts),
        "cross, D != Dv": Case(
            qkv(S, B, groups=4, keys=2, channels=8), 0,
            [{"attn_mask_type": mask} for mask in masks], {"kv_channels": (D, 8), **cross},
        ),
        "cross, more queries": Case(
            qkv(S, B, groups=4, queries=2), 0, [{"attn_mask_type": "no_mask"}],
            {"kv_channels": D, **cross},
        ),
        "cross, more keys": Case(
            qkv(S, B, groups=4, keys=2), 0, [{"attn_mask_type": "no_mask"}],
            {"kv_channels": D, **cross},
        ),
    }  # fmt: skip


def check_masks_and_formats(ranks: Ranks) -> None:
    """Results are those of one rank, by ``a2a`` bit for bit but for sums over heads.

    On a CPU the calls of a case have each order with every second of ``COMM_TYPES``, in turns.
    """
    on_cpu = ranks.device.type == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    for name, case in cases_of(ranks).items():
        made = {
            (comm_type, order): pair(ranks, comm_type=comm_type, order=order, **case.module)
            for comm_type, order in itertools.product(COMM_TYPES, ORDERS)
        }
        for index, call in enumerate(case.calls):
            modules = {
                (comm_type, order): module
                for (comm_type, order), (_, module) in made.items()
                if not on_cpu
                or (COMM_TYPES.index(comm_type) + ORDERS.index(order) + index) % 2 == 0
            }
            alone, exact = (
                case.run(made["p2p", ORDERS[0]][0], call, case.tensors, wide)
                for wide in (dtype, torch.float64)
            )
            for (comm_type, order), module in modules.items():
                mine = [case.shard(x, ranks, order) for x in case.tensors]
                results = case.run(module, call, mine, dtype)
                label = f"{name}, {comm_type}, {order}, {call}"
                try:
                    assert_near(ranks, case, results, alone, exact, order)
                    # A GPU's backward adds in no fixed order.
                    is_bitwise = comm_type == "a2a" and on_cpu
                    if is_bitwise and case.tensors[1].shape[-2] >= ranks.world:
                        shards = [case.shard(x, ranks, order) for x in alone]
                        assert all(map(torch.equal, results, shards))
                except AssertionError as wrong:
                    raise AssertionError(label) from wrong


def check_largest_scores(ranks: Ranks) -> None:
    """Every rank has the largest score of each head."""
    tensors = [sized(ranks, S, B, heads, D).bfloat16() for heads in (H, 2, 2)]
    case = Case(tensors, 0, [{}], {"kv_channels": D})
    regions: list[dict[str, Any]] = [
        {"enabled": False}, {"recipe": Float8CurrentScaling(fp8_dpa=True)}
    ]  # fmt: skip
    for comm_type, order, region in itertools.product(COMM_TYPES, ORDERS, regions):
        options: dict[str, Any] = {"num_gqa_groups": 2, "return_max_logit": True}
        one, module = pair(ranks, D, comm_type=comm_type, order=order, **options)
        with float8lab.autocast(**region):
            y, largest = one(*tensors)
            got, scores = module(*(case.shard(x, ranks, order) for x in tensors))
        torch.testing.assert_close(got, case.shard(y, ranks, order))
        torch.testing.assert_close(scores, largest)


def check_fp8_attention(ranks: Ranks) -> None:
    """Operands are cast to one rank's bytes, and results are as near to what these should give."""
    # Heads of very different sizes.
    sizes = torch.logspace(-2, 1, H, device=ranks.device)[:, None]
    tensors = [(sized(ranks, S, B, H, D) * sizes).bfloat16() for _ in range(3)]
    case = Case(tensors, 0, [{}], {"kv_channels": D})
    for comm_type, order, recipe in itertools.product(
        COMM_TYPES, ORDERS, (Float8CurrentScaling(fp8_dpa=True), DelayedScaling(fp8_dpa=True))
    ):
        modules = pair(ranks, comm_type=comm_type, order=order, **case.module)
        mine = [case.shard(x, ranks, order) for x in tensors]
        steps = []
        for module, given in zip(modules, (tensors, mine), strict=True):
            for factor in (1, 2):  # the second by the scales of the first, if they are delayed
                operands: dict[int, tuple[Tensor, Tensor]] = {}
                with casts_to(operands):
                    scaled = [x * factor for x in given]
                    results = case.run(module, {}, scaled, torch.bfloat16, recipe=recipe)
            steps.append((results, operands))
        (alone, casts), (results, casts_of_rank) = steps
        for index, (data, scale) in casts.items():
            local, local_scale = casts_of_rank[index]
            assert torch.equal(scale, local_scale)
            if comm_type in ("p2p", "all_gather"):
                bytes_of_all = data.view(torch.uint8).permute(2, 0, 1, 3)
                got = local.view(torch.uint8).permute(2, 0, 1, 3)
                assert torch.equal(got, case.shard(bytes_of_all, ranks, order))
        if comm_type == "a2a":
            assert all(
                torch.equal(r, case.shard(x, ranks, order))
                for r, x in zip(results, alone, strict=True)
            )
        decoded = [
            (data.double() * scale.double()).permute(2, 0, 1, 3)
            for _, (data, scale) in sorted(casts.items())
        ]
        exact = case.run(modules[0], {}, decoded, torch.float64)
        assert_near(ranks, case, results, alone, exact, order)
        with float8lab.autocast(recipe=recipe):
            modules[1](*mine)
            with Collectives() as collectives:
                explained = [m.explain(*t) for m, t in zip(modules, (tensors, mine), strict=True)]
        assert not collectives.seen
        assert explained[0] == explained[1]
        assert explained[0].backend == "fp8"


def check_batches(ranks: Ranks) -> None:
    """The tokens of all ranks are the batch again; one function cuts it as the other does."""
    batch = functools.partial(get_batch_on_this_cp_rank, cp_group=group_of(ranks))
    starts = LENGTHS.to(ranks.device)
    for order, (qkv_format, shape, dim) in itertools.product(
        ORDERS, (("thd", (48,), 0), ("thd", (1, 48), 1), ("bshd", (B, S), 1), ("sbhd", (S, B), 0))
    ):
        ids = sized(ranks, *shape)
        where: Any = {"dim": dim, "cu_seqlens": starts if qkv_format == "thd" else None}
        where["load_balancing_strategy"] = order
        positions = torch.arange(ids.shape[dim], device=ranks.device)
        strategy = CPAttentionLoadBalancingStrategy(order)
        got = batch(
            starts, ids, None, positions, qvk_format=qkv_format, load_balancing_strategy=strategy
        )
        local = shard_sequence(ids, group_of(ranks), **where)
        assert torch.equal(got[0], local)
        assert got[1] is None
        assert torch.equal(got[0], ids.index_select(dim, got[2]))
        assert torch.equal(join_sequence(local, group_of(ranks), **where), ids)
    ids = torch.arange(48, device=ranks.device)
    by_default = get_batch_on_this_cp_rank(starts, ids, None, None)[0]
    assert torch.equal(by_default, shard_sequence(ids, group_of(ranks), cu_seqlens=starts))


@contextlib.contextmanager
def casts_to(operands: dict[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Record what q, k and v are cast to, by their indices."""

    def spy(x: Tensor, index: int, *args: Any) -> tuple[Tensor, Tensor]:
        operands[index] = cast_operand(x, index, *args)
        return operands[index]

    with mock.patch(CASTS[0], spy), mock.patch(CASTS[1], spy):
        yield


def layer(ranks: Ranks, **options: Any) -> Any:
    torch.manual_seed(3)
    return float8lab.TransformerLayer(
        H * D, 96, H, attention_dropout=0.0, hidden_dropout=0.0, device=ranks.device, **options
    )


def assert_layers(
    ranks: Ranks, alone: Any, spread: Any, group: Any, x: Tensor, order: str = ORDERS[0]
) -> None:
    """Outputs and gradients are one rank's; those of weights are partial on each of ``group``.

    FSDP2 has averaged these over the group and two ranks with one batch. Rotary angles are those
    of the tokens.
    """
    shard = functools.partial(shard_sequence, cp_group=group, load_balancing_strategy=order)
    angles = float8lab.RotaryPositionEmbedding(D)(x.shape[0]).to(ranks.device)
    leaf, mine = x.clone().requires_grad_(), shard(x).clone().requires_grad_()
    y, got = alone(leaf, rotary_pos_emb=angles), spread(mine, rotary_pos_emb=angles)
    torch.testing.assert_close(got, shard(y))
    (y * y.detach().cos()).sum().backward()
    (got * got.detach().cos()).sum().backward()
    torch.testing.assert_close(mine.grad, shard(leaf.grad))
    for name, p in spread.named_parameters():
        wanted = alone.get_parameter(name).grad
        if isinstance(p.grad, DTensor):
            gradient = p.grad.full_tensor() * dist.get_world_size(group)
        else:
            gradient = p.grad.clone()
            dist.all_reduce(gradient, group=group)
        if gradient.shape == wanted.shape:  # it is no shard
            torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=1e-4)


def check_modules(ranks: Ranks) -> None:
    x = sized(ranks, S, B, H * D)
    mesh = ranks.mesh(ranks.world // 2, 2, names=("tp", "cp"))
    for comm_type, order in zip((*COMM_TYPES, "p2p"), (*ORDERS, *ORDERS, ORDERS[1]), strict=True):
        if comm_type == "a2a+p2p" and ranks.device.type == "cuda":
            continue  # which has no kernel for float32
        spread = layer(ranks, num_gqa_groups=4)
        groups = groups_of(ranks, comm_type)
        spread.set_context_parallel_group(groups, None, None, comm_type, order)
        alone = layer(ranks, num_gqa_groups=4)
        assert_layers(ranks, alone, copy.deepcopy(spread), group_of(ranks), x, order)
    if ranks.world > 2:
        parallel = {"tp_group": mesh["tp"].get_group(), "set_parallel_mode": True}
        for comm_type in ("a2a", "p2p"):
            spread, group = layer(ranks, num_gqa_groups=4, **parallel), mesh["cp"].get_group()
            spread.set_context_parallel_group(group, None, None, comm_type)
            assert_layers(ranks, layer(ranks, num_gqa_groups=4), spread, group, x)
    packed = x.view(S * B, H * D)
    starts = torch.tensor([0, 16, 48], device=ranks.device)
    attention = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "attention_dropout": 0.0}
    modules = []
    for _ in range(2):
        torch.manual_seed(3)
        modules.append(
            float8lab.MultiheadAttention(H * D, H, device=ranks.device, **attention)  # type: ignore[arg-type]
        )
    modules[1].set_context_parallel_group(group_of(ranks))
    angles = float8lab.RotaryPositionEmbedding(D)(S * B).to(ranks.device)
    call = {"cu_seqlens_q": starts, "rotary_pos_emb": angles}
    want = modules[0](packed, **call)
    got = modules[1](shard_sequence(packed, group_of(ranks), cu_seqlens=starts), **call)
    torch.testing.assert_close(got, shard_sequence(want, group_of(ranks), cu_seqlens=starts))


def check_what_is_equal(ranks: Ranks) -> None:
    """Ranks share the tokens, and each casts its own."""
    group, groups = group_of(ranks), [dist.new_group([r]) for r in range(ranks.world)]
    x, dy = (sized(ranks, S, B, H * D) * sized(ranks, S, 1, 1).mul(2).exp() for _ in range(2))
    mine, mine_dy = (shard_sequence(t, group) for t in (x, dy))

    def whole_layer(recipe: Recipe) -> tuple[Step, Step]:
        # The gradient of a key's bias is noise: softmax does not see it.
        alone, spread = layer(ranks, bias=False), layer(ranks, bias=False)
        spread.set_context_parallel_group(group, None, None, "a2a")
        got = take_step(spread, recipe, mine, mine_dy)
        want = take_step(alone, recipe, x, dy, group=groups[ranks.rank])
        y, dx = (shard_sequence(t, group) for t in want[:2])
        return got._replace(gradients=[summed(g) for g in got.gradients]), Step(y, dx, want[2])

    def attention(recipe: Recipe) -> tuple[Step, Step]:
        """In FP8 by the recipes that have it."""
        if isinstance(recipe, (Float8CurrentScaling, DelayedScaling)):
            recipe = replace(recipe, fp8_dpa=True)

        def take(module: Any, x: Tensor, dy: Tensor) -> Step:
            heads = x.bfloat16().view(*x.shape[:2], H, D)
            return take_step(module, recipe, heads, dy.bfloat16(), call=lambda t: module(t, t, t))

        alone, spread = pair(ranks, D)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No FP8 module ran")
            got, want = take(spread, mine, mine_dy), take(alone, x, dy)
        return got, Step(*(shard_sequence(t, group) for t in want[:2]), [])

    assert_row(ranks, "context: attention", attention)
    assert_row(ranks, "context: `TransformerLayer`", whole_layer)


def check_compiled(ranks: Ranks) -> None:
    """Heads are exchanged, and keys and values go around, in a graph."""
    comm_type = "a2a+p2p" if ranks.device.type == "cpu" else "p2p"
    _, module = pair(ranks, D, num_gqa_groups=4, comm_type=comm_type)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = []
    for run in (module, compiled):
        torch.manual_seed(ranks.rank)
        q, k, v = (sized(ranks, S, B, n, D).requires_grad_() for n in (H, 4, 4))
        y = run(q, k, v)
        results.append([y, *torch.autograd.grad((y * y.detach().cos()).sum(), (q, k, v))])
    torch.testing.assert_close(*results)


def check_wrong_calls(ranks: Ranks) -> None:
    group, world = group_of(ranks), ranks.world
    for heads, groups in ((world + 1, None), (3 * world, 3)):
        module = float8lab.DotProductAttention(heads, D, num_gqa_groups=groups)
        with pytest.raises(ValueError, match=f"cp_group must have ranks that share .* got {world}"):
            module.set_context_parallel_group(group, cp_comm_type="a2a")
        assert module.context_parallel is None
    with pytest.raises(ValueError, match="cp_comm_type must be one of"):
        float8lab.DotProductAttention(H, D, cp_group=group, cp_comm_type="ring")
    with pytest.raises(ValueError, match="cp_group must be 1 groups for cp_comm_type='p2p'; got 2"):
        float8lab.DotProductAttention(H, D, cp_group=[group, group])
    with pytest.raises(ValueError, match="load_balancing_strategy must be 'dual"):
        float8lab.DotProductAttention(H, D, cp_group=group, load_balancing_strategy="zigzag")
    module = float8lab.DotProductAttention(H, D, cp_group=group).to(ranks.device)
    x = sized(ranks, 3, 1, H, D)
    with pytest.raises(ValueError, match=f"query_layer must have .* multiples of {2 * world}, "):
        module(x, x, x)
    cache = float8lab.InferenceParams(1, 8)
    x = sized(ranks, 4, 1, H, D)
    with pytest.raises(NotImplementedError, match="inference_params must be None with a context"):
        module(x, x, x, inference_params=cache)
    with pytest.raises(RuntimeError, match=f"pickled with one of {world} ranks"):
        pickle.loads(pickle.dumps(module))(x, x, x)
    module.set_context_parallel_group(None)
    assert module(x, x, x).shape == (4, 1, H * D)
    with pytest.raises(ValueError, match=f"x must have a multiple of {2 * world} tokens along dim"):
        shard_sequence(x[:3], group)
    if ranks.device.type == "cpu":
        with pytest.raises(ValueError, match="cu_seqlens must have sequences whose lengths are"):
            shard_sequence(sized(ranks, 8 * world), group, cu_seqlens=torch.tensor([0, 3]))


class Attention(nn.Module):
    """Causal attention between two layers, as plain models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(256, 3 * 256), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, 4, 64)).movedim(2, 0).transpose(2, 3)
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def manager_of_torch(ranks: Ranks) -> None:
    """A converted model's attention inside torch's ``context_parallel``, which needs GPUs."""
    model = Attention().to(ranks.device, torch.bfloat16)
    model = float8lab.convert_to_float8(model, Float8RowwiseScaling())
    x, dy = (sized(ranks, B, 256, 256).bfloat16() for _ in range(2))
    y = model(x)
    alone = torch.autograd.grad(y, list(model.parameters()), dy)
    local, local_dy, wanted = x.clone(), dy.clone(), y.detach().clone()
    buffers = [local, local_dy, wanted]
    with context_parallel(ranks.mesh(), buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
        got = model(local)
        assert got.shape == (B, 256 // ranks.world, 256)
        assert error(got, wanted) < torch.finfo(torch.float8_e4m3fn).eps
        gradients = torch.autograd.grad(got, list(model.parameters()), local_dy)
    for gradient, right in zip(gradients, alone, strict=True):
        assert error(summed(gradient), right) < torch.finfo(torch.float8_e4m3fn).eps


@pytest.mark.multi_gpu
@pytest.mark.parametrize("outcome", [("cuda", 2)], indirect=True)
def test_context_manager_of_torch(outcome: Any) -> None:
    outcome("manager_of_torch")


test_on_ranks = each_check(__name__, 2, 4, cpu=4)
