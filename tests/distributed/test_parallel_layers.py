"""Attention and transformer layers over tensor-parallel ranks, against one rank."""

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
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
from float8lab.nn.casts import plain
from float8lab.nn.parallel import ParameterShard, shards_of
from float8lab.nn.precision import precisions
from float8lab.ops import value_of_op
from tests.distributed.equality import summed
from tests.distributed.ranks import RECIPES, Collectives, Ranks, each_check, on_ranks, slow_check
from tests.distributed.test_tensor_parallel import DIMENSIONS, local_shard
from tests.integrations.checkpoint import layouts
from tests.recorder import observing
from tests.same_bytes import assert_same_state

H, G, D = 8, 4, 8  # query heads, key/value heads, channels of a head
HIDDEN = 64
DELAYED = recipes.DelayedScaling(amax_history_len=4, amax_compute_algo="max")
ALL = [*RECIPES, DELAYED]


class Gemms:
    """Records the operands of a model's GEMMs, dequantized, by layer, GEMM and side."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {
            id(p): f"{path}.{suffix}"
            for path, m in model.named_modules()
            for suffix, p in precisions(m)
        }
        self.seen: dict[tuple[str, str], list[Tensor]] = {}

    def saw_cast(self, x: Any, operand: Any, spec: Any, index: int, call: Any) -> None:
        if isinstance(call.precision, AttentionPrecision):
            self.seen[self.names[id(call.precision)], "qkv"[index]] = [operand[1]]

    def saw_gemm(self, kind: str, call: Any, a: Any, b: Any) -> None:
        plan = getattr(call.plan, kind)
        if plan is not None:
            self.seen[self.names[id(call.precision)], kind] = [
                dequantize_operand(q, scale.float(), spec.block)
                for (q, scale), spec in ((a, plan.left), (b, plan.right))
            ]


def dequantize_operand(q: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Dequantize a matrix or a batch of them; rows of experts have the scale of each expert."""
    if scale.ndim > q.ndim:
        return q.float() * scale
    if q.ndim == 2:
        return value_of_op("dequantize", (q, scale), torch.float32, block)
    return torch.stack(
        [dequantize_operand(*matrix, block) for matrix in zip(q, scale, strict=True)]
    )


LayerInputs = dict[str, tuple[list[Tensor], list[Tensor]]]


def record_layer_inputs(model: nn.Module) -> LayerInputs:
    """Return a dict that steps fill with inputs and output gradients of GEMMs and attention."""
    inputs: LayerInputs = {}
    kinds = (fnn.Linear, fnn.LayerNormLinear, fnn.DotProductAttention)
    for path, module in model.named_modules():
        if isinstance(module, kinds):

            def record(_: Any, args: Any, y: Any, path: str = path) -> None:
                inputs[path] = [x.detach() for x in args[:3] if isinstance(x, Tensor)], []
                y = y[0] if isinstance(y, tuple) else y
                if y.requires_grad:
                    y.register_hook(lambda dy, path=path: inputs[path][1].append(dy))

            module.register_forward_hook(record)
    return inputs


def gather_shards(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """Concatenate the shards of all ranks."""
    return torch.cat(ranks.gather(x.cpu()), dim).to(x.device)


def compare_operands(
    ranks: Ranks,
    sharded: nn.Module,
    single: nn.Module,
    layer_inputs: LayerInputs,
    gemms: Gemms,
    recipe: Any,
) -> None:
    """Assert that operands are those of one rank's layer, in forward and backward."""
    for path, (tensors, gradients) in layer_inputs.items():
        layer: Any = sharded.get_submodule(path)
        reference: Any = copy.deepcopy(single.get_submodule(path))
        if isinstance(layer, fnn.DotProductAttention):
            if not recipe.fp8_dpa:
                continue
            full_inputs = [gather_shards(x, -2, ranks) for x in tensors]
            with observing(Gemms(reference)) as expected, float8lab.autocast(recipe=recipe):
                reference(*full_inputs)
            for name in "qkv":
                (scale,) = gemms.seen[f"{path}.", name]
                assert torch.equal(scale, expected.seen[".", name][0]), (path, name)
            continue
        row = layer.parallel_mode == "row"
        features = tuple(shards.length for shards in layer._fp8.parallel.features)
        shard = ParameterShard(-1, ranks.rank, ranks.world, features)
        x = unsharded_input(tensors[0], row, layer.sequence_parallel, ranks).requires_grad_()
        with observing(Gemms(reference)) as expected:
            with float8lab.autocast(recipe=recipe):
                y = reference(x)
            if gradients:
                dy = gradients[0]
                if row and layer.sequence_parallel:
                    dy = gather_shards(dy, 0, ranks)
                elif not row:
                    dy_shards = [dy_shard.to(dy) for dy_shard in ranks.gather(dy.cpu())]
                    dy = shard.unshard(dy_shards)
                (y[0] if isinstance(y, tuple) else y).backward(dy)
            assert not gradients or len(expected.seen) == 3, path
        sizes = {"M": x.shape[:-1].numel(), "N": reference.out_features, "K": reference.in_features}
        for (_, kind), operands in expected.seen.items():
            pairs = zip(gemms.seen[f"{path}.", kind], operands, DIMENSIONS[kind], strict=True)
            for got, want, (row_dim, column_dim) in pairs:
                want = want[: sizes[row_dim], : sizes[column_dim]]
                for dim, name in enumerate((row_dim, column_dim)):
                    if name == "NK"[row]:
                        want = shard.shard(want.movedim(dim, -1)).movedim(-1, dim)
                got = got[: want.shape[0], : want.shape[1]]
                assert torch.equal(got, want), (path, kind, row_dim + column_dim, recipe)


def unsharded_input(
    x: Tensor, has_sharded_features: bool, has_sharded_tokens: bool, ranks: Ranks
) -> Tensor:
    """Return a layer's input on one rank."""
    if has_sharded_features:
        return gather_shards(x, -1, ranks)
    return gather_shards(x, 0, ranks) if has_sharded_tokens else x.clone()


def run(layer: Any, x: Tensor, keywords: dict[str, Any], recipe: Any) -> list[Tensor]:
    """Return the output, and the gradients of the input and of an ``encoder_output``."""
    leaves = [x.detach().clone().requires_grad_()]
    arguments = dict(keywords)
    if "encoder_output" in keywords:
        arguments["encoder_output"] = keywords["encoder_output"].detach().clone().requires_grad_()
        leaves.append(arguments["encoder_output"])
    context: Any = nullcontext() if recipe is None else float8lab.autocast(recipe=recipe)
    with context:
        y = layer(leaves[0], **arguments)
    layer.zero_grad()
    (y * (y * 3).cos().detach()).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]  # they have one


def assert_close(
    got: Tensor, want: Tensor, high_precision: Tensor | None, size: Tensor, label: Any
) -> None:
    """Assert equality up to the order of sums, and up to a share of FP8's error where it rounds.

    Rounding n values by steps s costs ``sqrt(n * mean(s**2) / 12)``, and a value that rounds the
    other way costs one step. The smallest of these tensors is a key's gradient of 18 tokens and 16
    features on each rank. If one of its larger values, 4 times the mean, rounds the other way, that
    costs ``4 * sqrt(12 / 288)`` = 0.8 of all roundings. Hopper sums FP8 products in 14 bits, so one
    value in some thousands rounds the other way. On a CPU, whose sums have 24 bits, none does. A
    missing sum is as large as the result; operands are compared separately.

    ``size`` is a norm next to which roundings are small: a key's bias has a gradient of roundings.
    """
    assert got.shape == want.shape, label
    share = 0.8 if got.is_cuda else 0.1
    error = 0.0 if high_precision is None else share * (want - high_precision).norm()
    rounding = 32 * torch.finfo(want.dtype).eps * torch.maximum(want.norm(), size)
    assert (got - want).norm() <= error + rounding, label


def compare(
    ranks: Ranks, make: Callable[..., Any], x: Tensor, keywords: dict[str, Any], recipe: Any, *,
    sequence_parallel: bool, steps: int = 1, operands: bool = True,
) -> None:  # fmt: skip
    """Train a few steps on all ranks together and on one rank alone, and compare them."""

    def build(**options: Any) -> Any:
        torch.manual_seed(3)
        return make(**options).to(ranks.device)

    single, untrained, high_precision = build(), build(), build()
    sharded = build(
        tp_group=dist.group.WORLD, set_parallel_mode=True, sequence_parallel=sequence_parallel
    )
    state = fnn.shard_state_dict(sharded, single.state_dict())
    for name, value in sharded.state_dict().items():
        assert torch.equal(value, state[name]), name
    unsharded_state = fnn.whole_state_dict(sharded)
    for name, value in single.state_dict().items():
        assert torch.equal(value, unsharded_state[name]), name
    shards, layer_inputs = shards_of(sharded), record_layer_inputs(sharded)

    def shard(t: Tensor) -> Tensor:
        return local_shard(t, 0, ranks) if sequence_parallel else t

    local_keywords = {n: shard(v) if n == "encoder_output" else v for n, v in keywords.items()}
    for step in range(steps):
        with observing(Gemms(sharded)) as gemms:
            got = run(sharded, shard(x), local_keywords, recipe)
        reduce_sequence_parallel_gradients(sharded)
        want = run(single, x, keywords, recipe)
        reference = (
            run(high_precision, x, keywords, None) if recipe is not None else [None] * len(want)
        )
        for index, (actual, expected, exact_result) in enumerate(
            zip(got, want, reference, strict=True)
        ):
            zero = torch.zeros((), device=x.device)
            assert_close(
                actual,
                shard(expected),
                None if exact_result is None else shard(exact_result),
                zero,
                (step, index),
            )
        if operands and not step and recipe is not None:
            compare_operands(ranks, sharded, untrained, layer_inputs, gemms, recipe)
        size = max(p.grad.norm() for p in single.parameters())
        single_parameters, exact_parameters = (
            dict(m.named_parameters()) for m in (single, high_precision)
        )
        for name, p in sharded.named_parameters():
            grads = [
                single_parameters[name].grad,
                exact_parameters[name].grad if recipe is not None else None,
            ]
            grads = [
                shards[name].shard(g) if g is not None and name in shards else g for g in grads
            ]
            assert_close(p.grad, *grads, size, (step, name))  # type: ignore[arg-type]
            with torch.no_grad():
                p.sub_(grads[0], alpha=1e-3)  # type: ignore[arg-type]
                for model in (single_parameters, exact_parameters):
                    model[name].sub_(single_parameters[name].grad, alpha=1e-3)


def attention(**options: Any) -> Callable[..., Any]:
    keywords = {"num_gqa_groups": G, "attention_dropout": 0.0, "device": "cpu", **options}
    return lambda **extra_options: float8lab.MultiheadAttention(
        HIDDEN, H, **{**keywords, **extra_options}
    )


def check_attention_equals_that_of_one_rank(ranks: Ranks) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(7, 2, HIDDEN).to(ranks.device), torch.randn(5, 2, HIDDEN).to(ranks.device)
    angles = float8lab.RotaryPositionEmbedding(D)(7).to(ranks.device)
    current = recipes.Float8CurrentScaling()
    for recipe in (None, current, DELAYED):
        compare(
            ranks, attention(), x, {"rotary_pos_emb": angles}, recipe, sequence_parallel=True,
            steps=3 if recipe is DELAYED else 1,
        )  # fmt: skip
    separate_options = {"fuse_qkv_params": True, "qkv_weight_interleaved": False}
    for sequence_parallel, extra_options in (
        (False, {"fuse_qkv_params": True}),
        (True, separate_options),
    ):
        compare(
            ranks, attention(**extra_options), x, {}, current, sequence_parallel=sequence_parallel
        )
        cross = attention(attention_type="cross", attn_mask_type="no_mask", **extra_options)
        keywords = {"encoder_output": y}
        compare(ranks, cross, x, keywords, current, sequence_parallel=not sequence_parallel)
    sinks = attention(qk_norm_type="RMSNorm", softmax_type="learnable")
    compare(ranks, sinks, x, {"rotary_pos_emb": angles}, None, sequence_parallel=False)
    for tokens in (1, 0):
        compare(ranks, attention(), x[:tokens], {}, current, sequence_parallel=True)


def check_fp8_attention_equals_that_of_one_rank(ranks: Ranks) -> None:
    torch.manual_seed(1)
    x = torch.randn(7, 2, HIDDEN).to(ranks.device)
    for recipe in (
        recipes.Float8CurrentScaling(fp8_dpa=True),
        recipes.DelayedScaling(amax_history_len=4, fp8_dpa=True),
    ):
        compare(ranks, attention(), x, {}, recipe, sequence_parallel=True, steps=3)


def transformer(ffn: int = 96, **options: Any) -> Callable[..., Any]:
    keywords = {
        "num_gqa_groups": G, "attention_dropout": 0.0, "hidden_dropout": 0.0, "device": "cpu",
        **options,
    }  # fmt: skip
    return lambda **extra_options: float8lab.TransformerLayer(
        HIDDEN, ffn, H, **{**keywords, **extra_options}
    )


LLAMA = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}


def check_transformer_layer_equals_that_of_one_rank(ranks: Ranks) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(7, 2, HIDDEN).to(ranks.device), torch.randn(5, 2, HIDDEN).to(ranks.device)
    angles = {"rotary_pos_emb": float8lab.RotaryPositionEmbedding(D)(7).to(ranks.device)}
    for recipe in (None, *ALL):
        block, sizes, rotary = 1 if recipe is None else recipe.linear.largest_block, {}, angles
        if block > 1:  # each rank has whole blocks of features
            sizes = {"kv_channels": block * ranks.world // G, "ffn": block * ranks.world}
            block_angles = float8lab.RotaryPositionEmbedding(sizes["kv_channels"])(7)
            rotary = {"rotary_pos_emb": block_angles.to(ranks.device)}
        compare(
            ranks, transformer(**sizes, **LLAMA), x, rotary, recipe, sequence_parallel=True,
            steps=3 if recipe is DELAYED else 1,
        )  # fmt: skip
    current = recipes.Float8CurrentScaling()
    decoder = {
        "layer_type": "decoder", "apply_residual_connection_post_layernorm": True,
        "fuse_qkv_params": True, "qkv_weight_interleaved": False,
    }  # fmt: skip
    for sequence_parallel, extra_options, keywords in (
        (False, {"fuse_qkv_params": True, "parallel_attention_mlp": True}, {}),
        (True, {"output_layernorm": True, "activation": "reglu"}, {}),
        (False, LLAMA, angles),
        (True, decoder, {"encoder_output": y}),
    ):
        compare(
            ranks,
            transformer(**extra_options),
            x,
            keywords,
            current,
            sequence_parallel=sequence_parallel,
        )


@on_ranks(4)
def check_sizes_are_exchanged_once(ranks: Ranks) -> None:
    """Tokens that come from outside need the exchange; the outputs of layers have known rows."""
    group = {
        "tp_group": dist.group.WORLD, "set_parallel_mode": True, "sequence_parallel": True,
    }  # fmt: skip
    decoder = {"layer_type": "decoder", "apply_residual_connection_post_layernorm": True}
    mixed = {"parallel_attention_mlp": True, **LLAMA}
    layers = nn.ModuleList(
        transformer(**extra_options)(**group)
        for extra_options in (LLAMA, mixed, decoder, {"output_layernorm": True})
    ).to(ranks.device)
    for tokens in (7, 8, 0):  # the first of 4 ranks has as many of 7 tokens as of 8
        x = local_shard(torch.randn(tokens, 2, HIDDEN), 0, ranks).to(ranks.device)
        y = local_shard(torch.randn(5, 2, HIDDEN), 0, ranks).to(ranks.device)
        with Collectives() as collectives, float8lab.autocast(recipe=ALL[0]):
            for layer in layers:
                encoder_keywords = {"encoder_output": y} if layer.layer_type == "decoder" else {}
                x = layer(x, **encoder_keywords)
        assert collectives.of("all_gather").count((torch.int64, 3)) == 2, tokens


def check_input_formats_and_masks_equal_one_rank(ranks: Ranks) -> None:
    """The first dimension is sharded, be it batches or tokens; masks are of the full tensor."""
    torch.manual_seed(1)
    current = recipes.Float8CurrentScaling()
    x, y = torch.randn(3, 6, HIDDEN).to(ranks.device), torch.randn(3, 4, HIDDEN).to(ranks.device)
    layer = transformer(attn_input_format="bshd", self_attn_mask_type="padding_causal")
    padding = torch.zeros(3, 1, 1, 6, dtype=torch.bool, device=ranks.device)
    padding[1, ..., 4:] = True
    compare(ranks, layer, x, {"attention_mask": padding}, current, sequence_parallel=True)
    packed = transformer(attn_input_format="thd", self_attn_mask_type="padding_causal")
    offsets = torch.tensor([0, 4, 4, 9], device=ranks.device)
    compare(
        ranks,
        packed,
        x.flatten(0, 1)[:9],
        {"cu_seqlens_q": offsets},
        current,
        sequence_parallel=True,
    )
    decoder = transformer(layer_type="decoder", enc_dec_attn_mask_type="padding")
    mask = (padding, padding[..., :4])
    keywords = {"encoder_output": y.transpose(0, 1), "enc_dec_attn_mask": mask}
    compare(ranks, decoder, x.transpose(0, 1), keywords, current, sequence_parallel=True)
    biased = {"core_attention_bias_type": "alibi"}
    compare(ranks, transformer(), x, biased, current, sequence_parallel=True)


def check_recomputation_repeats_random_numbers(ranks: Ranks) -> None:
    """Checkpoints repeat the layer; dropout differs by rank for heads, but not for replicas."""
    torch.manual_seed(1)
    x = torch.randn(8, 2, HIDDEN).to(ranks.device)
    keywords = {"attention_dropout": 0.5, "hidden_dropout": 0.25, "drop_path_rate": 0.25}
    for sequence_parallel in (False, True):
        tracker = float8lab.CudaRNGStatesTracker(ranks.device)
        tracker.add("model-parallel-rng", 11 + ranks.rank)
        torch.manual_seed(3)
        layer = transformer(get_rng_state_tracker=lambda t=tracker: t, **keywords)(
            tp_group=dist.group.WORLD, set_parallel_mode=True, sequence_parallel=sequence_parallel
        ).to(ranks.device)
        streams, results = tracker.get_states(), []
        for mode in ("plain", "checkpoint", "core", "spread"):
            if mode == "spread" and sequence_parallel:
                continue
            tracker.set_states(streams)
            torch.manual_seed(5)
            leaf = (local_shard(x, 0, ranks) if sequence_parallel else x).clone().requires_grad_()
            outer = tracker.fork() if sequence_parallel else nullcontext()
            with outer, float8lab.autocast(recipe=DELAYED):
                if mode in ("plain", "core"):
                    y = layer(leaf, checkpoint_core_attention=mode == "core")
                else:
                    y = float8lab.checkpoint(
                        layer, leaf, get_rng_state_tracker=lambda t=tracker: t,
                        distribute_saved_activations=mode == "spread", tp_group=dist.group.WORLD,
                    )  # fmt: skip
            layer.zero_grad()
            y.square().sum().backward()
            results.append([y.detach(), leaf.grad, *(p.grad for p in layer.parameters())])
            for slots in layer.modules():
                for _, precision in precisions(slots):
                    precision.slots.clear()  # every run starts without scales
        for repeated in results[1:]:
            for expected, actual in zip(results[0], repeated, strict=True):
                assert torch.equal(expected, actual)
        if not sequence_parallel:
            ranks.assert_same(results[0][0])
            ranks.assert_same(results[0][1])
        else:  # all ranks leave a sample out, or none
            layer.eval()
            torch.manual_seed(ranks.rank)
            layer.train()
            layer.hidden_dropout = layer.self_attention.core_attention.attention_dropout = 0.0
            y = layer(local_shard(x, 0, ranks))
            # Both blocks were left out.
            is_left_out = (y == local_shard(x, 0, ranks)).all(0).all(-1)
            ranks.assert_same(is_left_out)


@on_ranks(4)
def check_group_set_after_construction(ranks: Ranks) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 2, HIDDEN).to(ranks.device)
    make = transformer(**LLAMA, device=ranks.device)
    torch.manual_seed(3)
    single = make()
    layer = make(tp_size=ranks.world, set_parallel_mode=True)
    with pytest.raises(RuntimeError, match=r"tp_group must be set before the first call"):
        layer(x)
    with pytest.raises(RuntimeError, match="must have tensor-parallel groups"):
        fnn.whole_state_dict(layer)
    pairs = [dist.new_group([r, r + 1]) for r in range(0, ranks.world, 2)]
    if ranks.world > 2:
        with pytest.raises(ValueError, match=f"tp_group must have the {ranks.world} ranks"):
            layer.set_tensor_parallel_group(pairs[ranks.rank // 2])
    layer.set_tensor_parallel_group(dist.group.WORLD)
    layer.load_state_dict(fnn.shard_state_dict(layer, single.state_dict()))
    layer = copy.deepcopy(layer)
    current = recipes.Float8CurrentScaling()
    with float8lab.autocast(recipe=current):
        y, want = layer(x), single(x)
    high_precision = single(x)
    assert_close(y, want, high_precision, want.norm(), "later")
    assert {m.tp_group for m in layer.modules() if hasattr(m, "tp_group")} == {dist.group.WORLD}
    # Without a parallel mode every rank has the complete layer, whatever the group.
    replica = make(tp_group=dist.group.WORLD)
    replica.load_state_dict(single.state_dict())
    assert torch.equal(replica(x), high_precision)


@slow_check  # a quick check in test_tensor_parallel.py compiles its layers
def check_compiled_layer_equals_eager_layer(ranks: Ranks) -> None:
    """The graph contains the collectives; results are those of eager mode."""
    torch.manual_seed(1)
    x = local_shard(torch.randn(ranks.world, 2, HIDDEN).to(ranks.device), 0, ranks)
    layers: list[Any] = []
    for _ in range(2):
        torch.manual_seed(3)
        layers.append(
            attention(input_layernorm=True, fuse_qkv_params=True)(
                tp_group=dist.group.WORLD, set_parallel_mode=True, sequence_parallel=True
            ).to(ranks.device)
        )
    current = recipes.Float8CurrentScaling()
    compiled = torch.compile(layers[1], fullgraph=True, backend="aot_eager")
    for expected, actual in zip(
        run(layers[0], x, {}, current), run(compiled, x, {}, current), strict=True
    ):
        assert torch.equal(expected, actual)
    for expected, actual in zip(*(layer.parameters() for layer in layers), strict=True):
        assert torch.equal(expected.grad, actual.grad)


def check_captured_layer_equals_eager_layer(ranks: Ranks) -> None:
    """The graphs contain the collectives; a step has the bytes of an eager one."""
    if ranks.device.type == "cpu":
        return
    group = dist.group.WORLD
    for recipe, overlap in (
        (recipes.DelayedScaling(), True),
        (recipes.Float8CurrentScaling(), False),
        (recipes.Float8BlockScaling(), True),
    ):
        layers = []
        for _ in range(2):
            torch.manual_seed(3)
            make = transformer(ffn=128 * ranks.world, kv_channels=128, **LLAMA, device=ranks.device)
            layer: Any = make(tp_size=ranks.world, set_parallel_mode=True, sequence_parallel=True)
            for module in layer.modules():
                if hasattr(module, "overlap"):
                    module.overlap = overlap  # even where it does not pay
            layer.set_tensor_parallel_group(group, keep_gathered=overlap)
            layers.append(layer)
        torch.manual_seed(1 + ranks.rank)
        x = torch.randn(16, 2, HIDDEN, device=ranks.device)
        sample = torch.zeros_like(x, requires_grad=True)
        graphed = float8lab.make_graphed_callables(layers[1], (sample,), recipe=recipe)
        for _ in range(3):
            eager, replayed = (run(layer, x, {}, recipe) for layer in (layers[0], graphed))
            for expected, actual in zip(eager, replayed, strict=True):
                assert torch.equal(expected, actual)
            for expected, actual in zip(*(layer.parameters() for layer in layers), strict=True):
                assert torch.equal(expected.grad, actual.grad)
                expected.grad = actual.grad = None
                with torch.no_grad():
                    expected.mul_(1.01), actual.mul_(1.01)


def check_stored_shards_have_the_bytes_of_the_unsharded_weight(ranks: Ranks) -> None:
    """The bytes also agree after a step, and in state dicts that are sharded and joined."""
    torch.manual_seed(1)
    x = torch.randn(5, 2, HIDDEN).to(ranks.device)
    group = {"tp_group": dist.group.WORLD}
    sizes = (3, HIDDEN, 32 * ranks.world)
    for i, recipe in enumerate((DELAYED, *RECIPES[:2], RECIPES[3])):
        models = []
        grouped = {"device": "cpu", "single_grouped_weight": i % 2 == 0}
        for extra_options, mode in (
            ({}, {}),
            ({**group, "set_parallel_mode": True}, {"parallel_mode": "column", **group}),
            ({"set_parallel_mode": True}, {"parallel_mode": "column"}),
        ):
            torch.manual_seed(3)
            with float8lab.fp8_model_init(recipe=recipe):
                layer = transformer(ffn=128, activation="swiglu", kv_channels=32)(**extra_options)
                experts = float8lab.GroupedLinear(*sizes, **grouped, **mode)
            models.append(nn.ModuleList([layer, experts]).to(ranks.device))
        unsharded, sharded, single = models
        states = [sharded.state_dict(), unsharded.state_dict()]
        on_cpu = {name: value.cpu() for name, value in states[0].items()}
        assert_same_state(states[0], fnn.shard_state_dict(sharded, states[1]))
        assert_same_state(states[1], fnn.whole_state_dict(sharded))
        assert_same_state(states[1], fnn.shard_state_dict(single, ranks.gather(on_cpu)))
        shards, values = shards_of(sharded), dict(unsharded.named_parameters())
        for step in range(2):
            for name, p in sharded.named_parameters():
                q, want = (plain(t.detach()) for t in (p, values[name]))
                assert torch.equal(q, shards[name].shard(want) if name in shards else want), name
                values[name].grad = torch.randn_like(want)
                p.grad = (
                    shards[name].shard(values[name].grad) if name in shards else values[name].grad
                )
            for model in () if step else (unsharded, sharded):
                optimizer = float8lab.optim.MasterWeights(
                    model.parameters(), torch.optim.SGD, lr=0.5
                )
                optimizer.step()
        with float8lab.autocast(recipe=recipe):
            got, want = sharded[0](x), unsharded[0](x)
            y, expected_y = sharded[1](x, [4, 3, 3]), unsharded[1](x, [4, 3, 3])
        assert_close(got, want, unsharded[0](x), want.norm(), recipe)
        assert (
            y - expected_y.chunk(ranks.world, -1)[ranks.rank]
        ).abs().max() <= 1e-5 * expected_y.abs().max()


@on_ranks(4)
def check_shards_load_from_transformer_engines_layout(ranks: Ranks) -> None:
    """Files of four ranks load on four, on two and on one rank, and those of two ranks on four."""
    torch.manual_seed(1)
    reference = {llama: layouts.Layer(llama) for llama in (True, False)}
    x = torch.randn(5, 2, layouts.HIDDEN)
    pairs = [dist.new_group([r, r + 1]) for r in range(0, ranks.world, 2)]
    groups = {1: None, 2: pairs[ranks.rank // 2], ranks.world: dist.group.WORLD}
    for llama, layout in itertools.product(reference, ("split", "grouped", "apart")):
        keywords: dict[str, Any] = {
            "bias": not llama, "fuse_qkv_params": layout != "split", "set_parallel_mode": True,
            "qkv_weight_interleaved": layout == "grouped", "hidden_dropout": 0.0,
            "attention_dropout": 0.0, "device": ranks.device,
            "normalization": "RMSNorm" if llama else "LayerNorm",
            "activation": "swiglu" if llama else "gelu",
        }  # fmt: skip
        model = reference[llama]
        shards = {
            size: [layouts.of_transformer_engine(model, layout, size, rank) for rank in range(size)]
            for size in groups
        }
        want = model(x)
        for size, group in groups.items():
            layer = float8lab.TransformerLayer(
                layouts.HIDDEN,
                layouts.FFN,
                layouts.HEADS,
                layouts.GROUPS,
                tp_group=group,
                **keywords,
            )
            local_state = shards[size][ranks.rank % size]
            for state in (
                local_state,
                *(fnn.shard_state_dict(layer, rank_states) for rank_states in shards.values()),
            ):
                layer.load_state_dict(state)  # with strict=True
                for name, value in layer.state_dict().items():
                    assert torch.equal(value.cpu(), local_state[name]), (llama, layout, size, name)
            y = layer(x.to(ranks.device)).cpu()
            assert_close(y, want, None, torch.zeros(()), (llama, layout, size))
    with pytest.raises(ValueError, match="state_dict must have the same names on all ranks"):
        fnn.shard_state_dict(layer, [local_state, {}])
    with pytest.raises(ValueError, match="of one kind and shape on all ranks; got self_attention"):
        fnn.shard_state_dict(layer, [shards[1][0], *shards[2]])
    with pytest.raises(ValueError, match="model must have parallel modes to join"):
        fnn.shard_state_dict(transformer()(), shards[2])


def check_sharded_experts_equal_those_of_one_rank(ranks: Ranks) -> None:
    """Each rank has a shard of the experts' features; other code sends tokens and sums outputs."""
    splits = torch.tensor([3, 0, 4], device=ranks.device)
    for recipe, mode in itertools.product((None, *ALL), ("column", "row")):
        has_blocks = recipe is not None and recipe.linear.largest_block > 1
        features = ranks.world * (128 if has_blocks else 24)
        torch.manual_seed(1)
        sizes = {"column": (40, features), "row": (features, 40)}[mode]
        x, dy = (torch.randn(9, n).to(ranks.device) for n in sizes)
        layers: list[Any] = []
        for extra_options in ({}, {"tp_group": dist.group.WORLD, "parallel_mode": mode}):
            torch.manual_seed(3)
            layer = float8lab.GroupedLinear(
                3, *sizes, device=ranks.device, single_grouped_weight=mode == "row",
                fuse_wgrad_accumulation=True, **extra_options,
            )  # fmt: skip
            for name, p in layer.named_parameters() if mode == "row" or recipe == ALL[0] else ():
                if name.startswith("weight"):
                    p.main_grad = torch.empty_like(p)
            layers.append(layer)
        single, sharded = layers
        state = fnn.shard_state_dict(sharded, single.state_dict())
        assert all(torch.equal(v, state[n]) for n, v in sharded.state_dict().items())

        def local_features(t: Tensor, is_sharded: bool) -> Tensor:
            return t.chunk(ranks.world, -1)[ranks.rank] if is_sharded else t

        column = mode == "column"
        results, seen = [], []
        # Hopper sums FP8 products in 14 bits, and each rank sums in its own order.
        unit = 2.0**-12 if recipe is not None and x.is_cuda else 32 * torch.finfo(x.dtype).eps
        for step in range(3 if recipe is DELAYED else 1):
            for layer, inp, grad in (
                (single, x, dy),
                (sharded, local_features(x, not column), local_features(dy, column)),
            ):  # fmt: skip
                leaf = (inp * (step + 1)).detach().requires_grad_()
                context = nullcontext() if recipe is None else float8lab.autocast(recipe=recipe)
                layer.zero_grad()
                with observing(Gemms(layer)) as gemms, context:
                    y = layer(leaf, splits, is_first_microbatch=None if step else True)
                y.backward(grad)
                gradients = {
                    n: getattr(p, "main_grad", p.grad) for n, p in layer.named_parameters()
                }
                results.append(
                    [y.detach(), leaf.grad, {n: g.clone() for n, g in gradients.items()}]
                )
                seen.append(gemms)
            (y, dx, grads), (local_y, local_dx, local_grads) = results[-2:]
            pairs = [
                (local_features(y, True) if column else y, local_y if column else summed(local_y)),
                (
                    dx if column else local_features(dx, True),
                    summed(local_dx) if column else local_dx,
                ),
            ]
            shards = shards_of(sharded)
            for name, grad in grads.items():
                pairs.append(
                    (shards[name].shard(grad) if name in shards else grad, local_grads[name])
                )
            for index, (want, got) in enumerate(pairs):
                bound = unit * want.norm()
                assert (got - want).norm() <= bound, (recipe, mode, features, step, index)
            if recipe is None:
                continue
            a, b = seen[-2].seen[".", "fprop"]
            local_a, local_b = seen[-1].seen[".", "fprop"]
            for e in range(3):
                local_weight = local_b[e]
                want = (
                    local_features(b[e, : sizes[1], : sizes[0]].mT, True).mT
                    if column
                    else local_features(b[e, : sizes[1], : sizes[0]], True)
                )
                assert torch.equal(local_weight[: want.shape[0], : want.shape[1]], want), (
                    recipe,
                    mode,
                    e,
                )
            # Where each expert has a scale, x is dequantized with each of them.
            want = local_features(a[..., : sizes[0]], not column)
            assert torch.equal(local_a[..., : want.shape[-1]], want), (recipe, mode)


test_on_ranks = each_check(__name__, 2, 4)
