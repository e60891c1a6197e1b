"""Attention and transformer layers spread over tensor-parallel ranks, against one rank."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import float8lab
from float8lab import nn as fnn
from float8lab import recipes
from float8lab.distributed import reduce_sequence_parallel_gradients
from float8lab.nn.attention.fp8 import AttentionPrecision
from float8lab.nn.precision import precisions
from float8lab.nn.sharding import shards_of
from float8lab.ops import dequantize_op
from float8lab.recipes.region import PROCESS
from tests.distributed.ranks import RECIPES, Ranks, check_names, ranks_fixture

H, G, D = 8, 4, 8  # query heads, key/value heads, channels of a head
HIDDEN = 64
DELAYED = recipes.DelayedScaling(amax_history_len=4, amax_compute_algo="max")
ALL = [*RECIPES, DELAYED]


def of_rank(x: Tensor, ranks: Ranks) -> Tensor:
    """This rank's part of the first dimension, by the rule of torch.chunk."""
    chunk = -(-x.shape[0] // ranks.world)
    return x[ranks.rank * chunk : (ranks.rank + 1) * chunk]


class Gemms:
    """What the GEMMs of a model multiply, dequantized: by layer, GEMM and side."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {
            id(p): f"{path}.{own}" for path, m in model.named_modules() for own, p in precisions(m)
        }
        self.seen: dict[tuple[str, str], list[Tensor]] = {}

    def saw_cast(self, x: Any, operand: Any, spec: Any, index: int, call: Any) -> None:
        if isinstance(call.precision, AttentionPrecision):
            self.seen[self.names[id(call.precision)], "qkv"[index]] = [operand[1]]

    def saw_gemm(self, kind: str, call: Any, a: Any, b: Any) -> None:
        plan = getattr(call.plan, kind)
        if plan is not None:
            self.seen[self.names[id(call.precision)], kind] = [
                dequantize_op(q, scale.float(), spec.block, torch.float32)
                for (q, scale), spec in ((a, plan.left), (b, plan.right))
            ]


@contextmanager
def watched(model: nn.Module) -> Any:
    gemms = Gemms(model)
    PROCESS.observer = gemms
    try:
        yield gemms
    finally:
        PROCESS.observer = None


def inputs_of(model: nn.Module) -> dict[str, list[Tensor]]:
    """Filled by each forward: the tensors that the layers with GEMMs, and attention, are given."""
    found: dict[str, list[Tensor]] = {}
    kinds = (fnn.Linear, fnn.LayerNormLinear, fnn.DotProductAttention)
    for path, module in model.named_modules():
        if isinstance(module, kinds):

            def note(_: Any, args: Any, path: str = path) -> None:
                found[path] = [x.detach() for x in args[:3] if isinstance(x, Tensor)]

            module.register_forward_pre_hook(note)
    return found


def joined(parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim)


def compare_operands(
    ranks: Ranks, spread: nn.Module, alone: nn.Module, inputs: dict[str, list[Tensor]],
    gemms: Gemms, recipe: Any,
) -> None:  # fmt: skip
    """The operands of the forward are those of one rank's layer, given the same input."""
    for path, tensors in inputs.items():
        layer: Any = spread.get_submodule(path)
        one = copy.deepcopy(alone.get_submodule(path))
        if isinstance(layer, fnn.DotProductAttention):
            if not recipe.fp8_dpa:
                continue
            whole = [joined(ranks.gather(x), -2) for x in tensors]
            with watched(one) as wanted, float8lab.autocast(recipe=recipe):
                one(*whole)
            for name in "qkv":
                (scale,) = gemms.seen[f"{path}.", name]
                assert torch.equal(scale, wanted.seen[".", name][0]), (path, name)
            continue
        row = layer.parallel_mode == "row"
        x = tensors[0]
        if row:
            x = joined(ranks.gather(x), -1)
        elif layer.sequence_parallel:
            x = joined(ranks.gather(x), 0)
        with watched(one) as wanted, float8lab.autocast(recipe=recipe):
            one(x)
        got = gemms.seen[f"{path}.", "fprop"]
        a, b = wanted.seen[".", "fprop"]
        N, K = layer.out_features, layer.in_features
        weights = [p for n, p in one.named_parameters() if n.endswith("weight") and p.ndim == 2]
        pieces = layer._joined or tuple(len(w) for w in weights)
        shard = fnn.sharding.Shard(-1 if row else -2, ranks.rank, ranks.world, pieces)
        want_a, want_b = a[: x.numel() // K, :K], shard.of(b[:N, :K])
        if row:
            want_a = want_a.chunk(ranks.world, 1)[ranks.rank]
        for mine, want in ((got[0], want_a), (got[1], want_b)):
            assert torch.equal(mine[: want.shape[0], : want.shape[1]], want), path


def run(layer: Any, x: Tensor, how: dict[str, Any], recipe: Any) -> list[Tensor]:
    """Output, and gradients of the inputs: tensors of ``how`` with a gradient are inputs, too."""
    leaves = [x.detach().clone().requires_grad_()]
    given = dict(how)
    if "encoder_output" in how:
        given["encoder_output"] = how["encoder_output"].detach().clone().requires_grad_()
        leaves.append(given["encoder_output"])
    context: Any = nullcontext() if recipe is None else float8lab.autocast(recipe=recipe)
    with context:
        y = layer(leaves[0], **given)
    layer.zero_grad()
    (y * (y * 3).cos().detach()).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]  # they have one


def close(got: Tensor, want: Tensor, high: Tensor | None, size: Tensor, what: Any) -> None:
    """Within the order of sums; where that turns a code, a tenth of the error of FP8 itself.

    ``size`` is a norm beside which roundings are small: a key's bias has no gradient but these.
    """
    assert got.shape == want.shape, what
    error = 0.0 if high is None else 0.1 * (want - high).norm()
    rounding = 32 * torch.finfo(want.dtype).eps * torch.maximum(want.norm(), size)
    assert (got - want).norm() <= error + rounding, what


def compare(
    ranks: Ranks, make: Callable[..., Any], x: Tensor, how: dict[str, Any], recipe: Any, *,
    sequence_parallel: bool, steps: int = 1, operands: bool = True,
) -> None:  # fmt: skip
    """Train a few steps on all ranks together and alone."""

    def build(**options: Any) -> Any:
        torch.manual_seed(3)
        return make(**options).to(ranks.device)

    alone, fresh, high = build(), build(), build()
    spread = build(
        tp_group=dist.group.WORLD, set_parallel_mode=True, sequence_parallel=sequence_parallel
    )
    state = fnn.shard_state_dict(spread, alone.state_dict())
    for name, value in spread.state_dict().items():
        assert torch.equal(value, state[name]), name
    whole = fnn.whole_state_dict(spread)
    for name, value in alone.state_dict().items():
        assert torch.equal(value, whole[name]), name
    shards, inputs = shards_of(spread), inputs_of(spread)

    def part(t: Tensor) -> Tensor:
        return of_rank(t, ranks) if sequence_parallel else t

    mine = {n: part(v) if n == "encoder_output" else v for n, v in how.items()}
    for step in range(steps):
        with watched(spread) as gemms:
            got = run(spread, part(x), mine, recipe)
        reduce_sequence_parallel_gradients(spread)
        want = run(alone, x, how, recipe)
        reference = run(high, x, how, None) if recipe is not None else [None] * len(want)
        for number, (one, other, h) in enumerate(zip(got, want, reference, strict=True)):
            zero = torch.zeros((), device=x.device)
            close(one, part(other), None if h is None else part(h), zero, (step, number))
        if operands and not step and recipe is not None:
            compare_operands(ranks, spread, fresh, inputs, gemms, recipe)
        size = max(p.grad.norm() for p in alone.parameters())
        wanted, exact = (dict(m.named_parameters()) for m in (alone, high))
        for name, p in spread.named_parameters():
            grads = [wanted[name].grad, exact[name].grad if recipe is not None else None]
            grads = [shards[name].of(g) if g is not None and name in shards else g for g in grads]
            close(p.grad, *grads, size, (step, name))  # type: ignore[arg-type]
            with torch.no_grad():
                p.sub_(grads[0], alpha=1e-3)  # type: ignore[arg-type]
                for model in (wanted, exact):
                    model[name].sub_(wanted[name].grad, alpha=1e-3)


def attention(**options: Any) -> Callable[..., Any]:
    how = {"num_gqa_groups": G, "attention_dropout": 0.0, "device": "cpu", **options}
    return lambda **more: float8lab.MultiheadAttention(HIDDEN, H, **{**how, **more})


def check_attention(ranks: Ranks) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(7, 2, HIDDEN).to(ranks.device), torch.randn(5, 2, HIDDEN).to(ranks.device)
    angles = float8lab.RotaryPositionEmbedding(D)(7).to(ranks.device)
    current = recipes.Float8CurrentScaling()
    for recipe in (None, current, DELAYED):
        compare(
            ranks, attention(), x, {"rotary_pos_emb": angles}, recipe, sequence_parallel=True,
            steps=3 if recipe is DELAYED else 1,
        )  # fmt: skip
    for sequence_parallel in (False, True):
        for more in (
            {"fuse_qkv_params": True},
            {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
            {"bias": False},
        ):
            compare(ranks, attention(**more), x, {}, current, sequence_parallel=sequence_parallel)
        for more in ({}, {"fuse_qkv_params": True}):
            cross = attention(attention_type="cross", attn_mask_type="no_mask", **more)
            how = {"encoder_output": y}
            compare(ranks, cross, x, how, current, sequence_parallel=sequence_parallel)
    for tokens in (1, 0):
        compare(ranks, attention(), x[:tokens], {}, current, sequence_parallel=True)


def check_fp8_attention(ranks: Ranks) -> None:
    torch.manual_seed(1)
    x = torch.randn(7, 2, HIDDEN).to(ranks.device)
    for recipe in (
        recipes.Float8CurrentScaling(fp8_dpa=True),
        recipes.DelayedScaling(amax_history_len=4, fp8_dpa=True),
    ):
        compare(ranks, attention(), x, {}, recipe, sequence_parallel=True, steps=3)


def transformer(**options: Any) -> Callable[..., Any]:
    how = {
        "num_gqa_groups": G, "attention_dropout": 0.0, "hidden_dropout": 0.0, "device": "cpu",
        **options,
    }  # fmt: skip
    return lambda **more: float8lab.TransformerLayer(HIDDEN, 96, H, **{**how, **more})


LLAMA = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}


def check_transformer_layer(ranks: Ranks) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(7, 2, HIDDEN).to(ranks.device), torch.randn(5, 2, HIDDEN).to(ranks.device)
    angles = {"rotary_pos_emb": float8lab.RotaryPositionEmbedding(D)(7).to(ranks.device)}
    for recipe in (None, *ALL):
        compare(
            ranks, transformer(**LLAMA), x, angles, recipe, sequence_parallel=True,
            steps=3 if recipe is DELAYED else 1,
        )  # fmt: skip
    current = recipes.Float8CurrentScaling()
    for sequence_parallel in (False, True):
        for more, how in (
            ({"fuse_qkv_params": True, "parallel_attention_mlp": True}, {}),
            ({"output_layernorm": True, "activation": "reglu"}, {}),
            ({"layer_type": "decoder", "apply_residual_connection_post_layernorm": True,
              "fuse_qkv_params": True, "qkv_weight_interleaved": False}, {"encoder_output": y}),
        ):  # fmt: skip
            compare(ranks, transformer(**more), x, how, current, sequence_parallel=sequence_parallel)


def check_formats_and_masks(ranks: Ranks) -> None:
    """Batches and packed sequences are spread by their first dimension, and masks are of the whole."""
    torch.manual_seed(1)
    current = recipes.Float8CurrentScaling()
    x, y = torch.randn(3, 6, HIDDEN).to(ranks.device), torch.randn(3, 4, HIDDEN).to(ranks.device)
    layer = transformer(attn_input_format="bshd", self_attn_mask_type="padding_causal")
    padding = torch.zeros(3, 1, 1, 6, dtype=torch.bool, device=ranks.device)
    padding[1, ..., 4:] = True
    compare(ranks, layer, x, {"attention_mask": padding}, current, sequence_parallel=True)
    packed = transformer(attn_input_format="thd", self_attn_mask_type="padding_causal")
    ends = torch.tensor([0, 4, 4, 9], device=ranks.device)
    compare(
        ranks, packed, x.flatten(0, 1)[:9], {"cu_seqlens_q": ends}, current, sequence_parallel=True
    )
    decoder = transformer(layer_type="decoder", enc_dec_attn_mask_type="padding")
    mask = (padding, padding[..., :4])
    how = {"encoder_output": y.transpose(0, 1), "enc_dec_attn_mask": mask}
    compare(ranks, decoder, x.transpose(0, 1), how, current, sequence_parallel=True)
    biased = {"core_attention_bias_type": "alibi"}
    compare(ranks, transformer(), x, biased, current, sequence_parallel=True)


outcome = ranks_fixture(__name__, 2, 4)


@pytest.mark.parametrize("name", check_names(sys.modules[__name__]))
def test_on_ranks(name: str, outcome: Callable[[str], None]) -> None:
    outcome(name)
