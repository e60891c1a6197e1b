"""Context parallelism: attention has the numbers of one rank, whatever the mask and the format."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import float8lab
from float8lab.distributed import join_sequence, shard_sequence
from float8lab.recipes import DelayedScaling, Float8CurrentScaling, Recipe
from tests.distributed.equality import Step, assert_row, summed, take_step
from tests.distributed.ranks import Collectives, Ranks, each_check, on_ranks

H, D, B, S = 8, 16, 2, 24
LENGTHS = torch.tensor([0, 16, 16, 24, 40])


def group_of(ranks: Ranks) -> Any:
    return dist.group.WORLD


def pair(ranks: Ranks, *args: Any, **options: Any) -> tuple[Any, Any]:
    """A module on one rank, and the same on all."""
    made = [float8lab.DotProductAttention(H, *args, **options).to(ranks.device) for _ in range(2)]
    made[1].set_context_parallel_group(group_of(ranks), list(range(ranks.world)), None, "a2a")
    return made[0], made[1]


def assert_same(
    ranks: Ranks, modules: tuple[Any, Any], tensors: list[Tensor], dim: int,
    starts: tuple[Any, Any] = (None, None), recipe: Any = None, *, sums: bool = False, **how: Any,
) -> None:  # fmt: skip
    """Results of a rank's tokens, and the gradients of those, are those of one rank.

    ``sums``: the gradients of repeated heads are, and of what all heads share, which are sums.
    """
    alone, spread = modules
    group = group_of(ranks)
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    which = (0, 1, 1)
    mine = [
        shard_sequence(t, group, dim=dim, cu_seqlens=starts[i]).clone().requires_grad_()
        for t, i in zip(tensors, which, strict=True)
    ]
    results = []
    for step in range(2 if recipe is not None and recipe.linear.delayed else 1):
        results = []
        for module, given in ((alone, leaves), (spread, mine)):
            for leaf in given:
                leaf.grad = None
            with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
                y = module(*(leaf * (step + 1) for leaf in given), **how)
            results.append(y)
            (y * y.detach().cos()).sum().backward()
    want = shard_sequence(results[0], group, dim=dim, cu_seqlens=starts[0])
    assert torch.equal(results[1], want), how
    assert torch.equal(join_sequence(want, group, dim=dim, cu_seqlens=starts[0]), results[0])
    for one, other, i in zip(mine, leaves, which, strict=True):
        expected = shard_sequence(other.grad, group, dim=dim, cu_seqlens=starts[i])  # type: ignore[arg-type]
        if sums:
            torch.testing.assert_close(one.grad, expected)
        else:
            assert torch.equal(one.grad, expected), how  # type: ignore[arg-type]


def sized(ranks: Ranks, *shape: int) -> Tensor:
    return torch.randn(shape).to(ranks.device)


def check_masks_and_formats(ranks: Ranks) -> None:
    torch.manual_seed(0)
    bias = sized(ranks, 1, H, S, S)
    lengths = torch.tensor([0, 19, 19 + 24], device=ranks.device)
    arbitrary = torch.rand(B, H, S, S).to(ranks.device) > 0.7
    slopes = torch.rand(H).to(ranks.device)
    cases: list[dict[str, Any]] = [
        {"attn_mask_type": "causal"},
        {"attn_mask_type": "no_mask"},
        {"attn_mask_type": "causal", "window_size": (5, 0)},
        {"attn_mask_type": "padding_causal", "cu_seqlens_q": lengths},
        {"attn_mask_type": "arbitrary", "attention_mask": arbitrary},
        {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias},
        {"core_attention_bias_type": "alibi"},
        {"core_attention_bias_type": "alibi", "alibi_slopes": slopes},
        {"checkpoint_core_attention": True},
    ]
    for (groups, qkv_format), how in itertools.product(((H, "sbhd"), (2, "bshd")), cases):
        dim = int(qkv_format == "bshd")
        shape = (B, S) if dim else (S, B)
        tensors = [sized(ranks, *shape, n, D) for n in (H, groups, groups)]
        modules = pair(ranks, D, num_gqa_groups=groups, qkv_format=qkv_format)
        assert_same(ranks, modules, tensors, dim, sums=groups < ranks.world, **how)


def check_cross_attention(ranks: Ranks) -> None:
    """Keys and values have a sequence of their own, and heads of other sizes."""
    torch.manual_seed(0)
    q, k, v = sized(ranks, S, B, H, D), sized(ranks, 2 * S, B, 4, D), sized(ranks, 2 * S, B, 4, 8)
    modules = pair(
        ranks, (D, 8), num_gqa_groups=4, attention_type="cross", attn_mask_type="no_mask"
    )
    assert_same(ranks, modules, [q, k, v], 0)
    assert_same(ranks, modules, [q, k, v], 0, attn_mask_type="causal_bottom_right")


def check_packed_sequences(ranks: Ranks) -> None:
    """Each of them is shared out by itself, an empty one and unused tokens, too."""
    torch.manual_seed(0)
    starts = LENGTHS.to(ranks.device)
    tensors = [sized(ranks, 48, n, D) for n in (H, 4, 4)]  # 8 tokens of nobody
    modules = pair(ranks, D, num_gqa_groups=4, qkv_format="thd", attn_mask_type="padding_causal")
    assert_same(ranks, modules, tensors, 0, (starts, starts), cu_seqlens_q=starts)
    padded, lengths = starts, torch.tensor([0, 13, 13, 21, 30], device=ranks.device)
    assert_same(
        ranks, modules, tensors, 0, (padded, padded),
        cu_seqlens_q=lengths, cu_seqlens_kv=lengths,
        cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded,
    )  # fmt: skip


def check_fp8_attention(ranks: Ranks) -> None:
    """Scales are those of all heads."""
    torch.manual_seed(0)
    for recipe in (Float8CurrentScaling(fp8_dpa=True), DelayedScaling(fp8_dpa=True)):
        # Heads of very different sizes.
        sizes = torch.logspace(-2, 1, H, device=ranks.device)[:, None]
        tensors = [(sized(ranks, S, B, H, D) * sizes).bfloat16() for _ in range(3)]
        modules = pair(ranks, D)
        assert_same(ranks, modules, tensors, 0, recipe=recipe)
        with float8lab.autocast(recipe=recipe):
            mine = [shard_sequence(t, group_of(ranks)) for t in tensors]
            modules[1](*mine)
            with Collectives() as collectives:
                explained = [m.explain(*t) for m, t in zip(modules, (tensors, mine), strict=True)]
            assert not collectives.seen
        assert explained[0] == explained[1]


def check_modules(ranks: Ranks) -> None:
    """Rotary angles are those of the tokens; gradients of weights are partial on each rank."""
    torch.manual_seed(0)
    hidden = H * D
    x = sized(ranks, S, B, hidden)
    angles = float8lab.RotaryPositionEmbedding(D)(S).to(ranks.device)
    mesh = ranks.mesh(ranks.world // 2, 2, names=("tp", "cp"))
    for tp in (1, ranks.world // 2):
        group = group_of(ranks) if tp == 1 else mesh["cp"].get_group()
        parallel = {"tp_group": mesh["tp"].get_group(), "set_parallel_mode": True}
        made: list[Any] = []
        for more in ({}, parallel if tp > 1 else {}):
            torch.manual_seed(3)
            made.append(
                float8lab.TransformerLayer(
                    hidden, 96, H, attention_dropout=0.0, hidden_dropout=0.0, num_gqa_groups=4,
                    device=ranks.device, **more,
                )
            )  # fmt: skip
        alone, spread = made
        spread.set_context_parallel_group(group, dist.get_process_group_ranks(group), None)
        spread = copy.deepcopy(spread)
        leaf, mine = x.clone().requires_grad_(), shard_sequence(x, group).clone().requires_grad_()
        y, got = alone(leaf, rotary_pos_emb=angles), spread(mine, rotary_pos_emb=angles)
        torch.testing.assert_close(got, shard_sequence(y, group))
        (y * y.detach().cos()).sum().backward()
        (got * got.detach().cos()).sum().backward()
        torch.testing.assert_close(mine.grad, shard_sequence(leaf.grad, group))  # type: ignore[arg-type]
        for name, p in spread.named_parameters():
            dist.all_reduce(p.grad, group=group)
            wanted = alone.get_parameter(name).grad
            if p.shape == wanted.shape:
                torch.testing.assert_close(p.grad, wanted, atol=1e-4, rtol=1e-4)
    packed = x.view(S * B, hidden)
    starts = torch.tensor([0, 16, 48], device=ranks.device)
    attention = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "attention_dropout": 0.0}
    modules = []
    for _ in range(2):
        torch.manual_seed(3)
        modules.append(
            float8lab.MultiheadAttention(hidden, H, device=ranks.device, **attention)  # type: ignore[arg-type]
        )
    modules[1].set_context_parallel_group(group_of(ranks))
    call = {"cu_seqlens_q": starts, "rotary_pos_emb": angles.repeat(2, 1, 1, 1)}
    want = modules[0](packed, **call)
    got = modules[1](shard_sequence(packed, group_of(ranks), cu_seqlens=starts), **call)
    torch.testing.assert_close(got, shard_sequence(want, group_of(ranks), cu_seqlens=starts))


def check_what_is_equal(ranks: Ranks) -> None:
    """Ranks share the tokens, and each casts its own."""
    torch.manual_seed(0)
    group, groups = group_of(ranks), [dist.new_group([r]) for r in range(ranks.world)]
    x, dy = (sized(ranks, S, B, H * D) * sized(ranks, S, 1, 1).mul(2).exp() for _ in range(2))
    mine, mine_dy = (shard_sequence(t, group) for t in (x, dy))

    def transformer_layer() -> Any:
        torch.manual_seed(3)
        return float8lab.TransformerLayer(
            H * D, 96, H, attention_dropout=0.0, hidden_dropout=0.0, device=ranks.device,
            bias=False,  # the gradient of a key's is noise: softmax does not see it
        )  # fmt: skip

    def layer(recipe: Recipe) -> tuple[Step, Step]:
        alone, spread = transformer_layer(), transformer_layer()
        spread.set_context_parallel_group(group, dist.get_process_group_ranks(group), None)
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
    assert_row(ranks, "context: `TransformerLayer`", layer)


@on_ranks(2)
def check_compiled(ranks: Ranks) -> None:
    torch.manual_seed(0)
    _, module = pair(ranks, D, num_gqa_groups=4)
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
            module.set_context_parallel_group(group)
        assert module.context_parallel is None
    with pytest.raises(ValueError, match="cp_comm_type must be one of"):
        float8lab.DotProductAttention(H, D, cp_group=group, cp_comm_type="ring")
    with pytest.raises(NotImplementedError, match="cp_group must be one group; got 2"):
        float8lab.DotProductAttention(H, D, cp_group=[group, group])
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


test_on_ranks = each_check(__name__, 2, 4, cpu=4)
