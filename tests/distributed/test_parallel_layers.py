"""Attention and transformer layers spread over tensor-parallel ranks, against one rank."""

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
from tests.distributed.test_tensor_parallel import DIMENSIONS, part_of
from tests.integrations.checkpoint import layouts
from tests.recorder import observing
from tests.same_bytes import assert_same_state

H, G, D = 8, 4, 8  # query heads, key/value heads, channels of a head
HIDDEN = 64
DELAYED = recipes.DelayedScaling(amax_history_len=4, amax_compute_algo="max")
ALL = [*RECIPES, DELAYED]


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
                decoded(q, scale.float(), spec.block)
                for (q, scale), spec in ((a, plan.left), (b, plan.right))
            ]


def decoded(q: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """A matrix, or a batch of them, dequantized; rows of experts by the scale of each expert."""
    if scale.ndim > q.ndim:
        return q.float() * scale
    if q.ndim == 2:
        return value_of_op("dequantize", (q, scale), torch.float32, block)
    return torch.stack([decoded(*one, block) for one in zip(q, scale, strict=True)])


Given = dict[str, tuple[list[Tensor], list[Tensor]]]


def given_to(model: nn.Module) -> Given:
    """Filled by each step: what layers with GEMMs, and attention, get in forward and backward."""
    found: Given = {}
    kinds = (fnn.Linear, fnn.LayerNormLinear, fnn.DotProductAttention)
    for path, module in model.named_modules():
        if isinstance(module, kinds):

            def note(_: Any, args: Any, y: Any, path: str = path) -> None:
                found[path] = [x.detach() for x in args[:3] if isinstance(x, Tensor)], []
                y = y[0] if isinstance(y, tuple) else y
                if y.requires_grad:
                    y.register_hook(lambda dy, path=path: found[path][1].append(dy))

            module.register_forward_hook(note)
    return found


def joined(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """The parts of all ranks."""
    return torch.cat(ranks.gather(x.cpu()), dim).to(x.device)


def compare_operands(
    ranks: Ranks, spread: nn.Module, alone: nn.Module, given: Given, gemms: Gemms, recipe: Any
) -> None:
    """Operands, forward and backward, are those of one rank's layer, given the same tensors."""
    for path, (tensors, gradients) in given.items():
        layer: Any = spread.get_submodule(path)
        one: Any = copy.deepcopy(alone.get_submodule(path))
        if isinstance(layer, fnn.DotProductAttention):
            if not recipe.fp8_dpa:
                continue
            whole = [joined(x, -2, ranks) for x in tensors]
            with observing(Gemms(one)) as wanted, float8lab.autocast(recipe=recipe):
                one(*whole)
            for name in "qkv":
                (scale,) = gemms.seen[f"{path}.", name]
                assert torch.equal(scale, wanted.seen[".", name][0]), (path, name)
            continue
        row = layer.parallel_mode == "row"
        features = tuple(shards.length for shards in layer._fp8.parallel.features)
        shard = ParameterShard(-1, ranks.rank, ranks.world, features)
        x = whole_of(tensors[0], row, layer.sequence_parallel, ranks).requires_grad_()
        with observing(Gemms(one)) as wanted:
            with float8lab.autocast(recipe=recipe):
                y = one(x)
            if gradients:
                dy = gradients[0]
                if row and layer.sequence_parallel:
                    dy = joined(dy, 0, ranks)
                elif not row:
                    parts = [part.to(dy) for part in ranks.gather(dy.cpu())]
                    dy = shard.unshard(parts)
                (y[0] if isinstance(y, tuple) else y).backward(dy)
            assert not gradients or len(wanted.seen) == 3, path
        sizes = {"M": x.shape[:-1].numel(), "N": one.out_features, "K": one.in_features}
        for (_, kind), operands in wanted.seen.items():
            pairs = zip(gemms.seen[f"{path}.", kind], operands, DIMENSIONS[kind], strict=True)
            for mine, want, (down, across) in pairs:
                want = want[: sizes[down], : sizes[across]]
                for dim, name in enumerate((down, across)):
                    if name == "NK"[row]:
                        want = shard.shard(want.movedim(dim, -1)).movedim(-1, dim)
                mine = mine[: want.shape[0], : want.shape[1]]
                assert torch.equal(mine, want), (path, kind, down + across, recipe)


def whole_of(x: Tensor, by_features: bool, by_tokens: bool, ranks: Ranks) -> Tensor:
    """A layer's input on one rank."""
    if by_features:
        return joined(x, -1, ranks)
    return joined(x, 0, ranks) if by_tokens else x.clone()


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
    """Within the order of sums; where that turns codes, a share of the error of FP8 itself.

    Rounding to n codes of steps s costs ``sqrt(n * mean(s**2) / 12)``, and one that turns a step:
    so in the least of these tensors, a key's gradient of 18 tokens and 16 features on each rank,
    one of the larger codes, 4 times the mean, that turns is ``4 * sqrt(12 / 288)`` = 0.8 of all
    roundings. Hopper sums FP8 products in 14 bits, and turns one code in some thousands; a CPU,
    whose sums have 24, none. A missing sum is as large as the result; operands are compared apart.

    ``size`` is a norm beside which roundings are small: a key's bias has no gradient but these.
    """
    assert got.shape == want.shape, what
    share = 0.8 if got.is_cuda else 0.1
    error = 0.0 if high is None else share * (want - high).norm()
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
    shards, given = shards_of(spread), given_to(spread)

    def part(t: Tensor) -> Tensor:
        return part_of(t, 0, ranks) if sequence_parallel else t

    mine = {n: part(v) if n == "encoder_output" else v for n, v in how.items()}
    for step in range(steps):
        with observing(Gemms(spread)) as gemms:
            got = run(spread, part(x), mine, recipe)
        reduce_sequence_parallel_gradients(spread)
        want = run(alone, x, how, recipe)
        reference = run(high, x, how, None) if recipe is not None else [None] * len(want)
        for number, (one, other, h) in enumerate(zip(got, want, reference, strict=True)):
            zero = torch.zeros((), device=x.device)
            close(one, part(other), None if h is None else part(h), zero, (step, number))
        if operands and not step and recipe is not None:
            compare_operands(ranks, spread, fresh, given, gemms, recipe)
        size = max(p.grad.norm() for p in alone.parameters())
        wanted, exact = (dict(m.named_parameters()) for m in (alone, high))
        for name, p in spread.named_parameters():
            grads = [wanted[name].grad, exact[name].grad if recipe is not None else None]
            grads = [
                shards[name].shard(g) if g is not None and name in shards else g for g in grads
            ]
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
    apart = {"fuse_qkv_params": True, "qkv_weight_interleaved": False}
    for sequence_parallel, more in ((False, {"fuse_qkv_params": True}), (True, apart)):
        compare(ranks, attention(**more), x, {}, current, sequence_parallel=sequence_parallel)
        cross = attention(attention_type="cross", attn_mask_type="no_mask", **more)
        how = {"encoder_output": y}
        compare(ranks, cross, x, how, current, sequence_parallel=not sequence_parallel)
    sinks = attention(qk_norm_type="RMSNorm", softmax_type="learnable")
    compare(ranks, sinks, x, {"rotary_pos_emb": angles}, None, sequence_parallel=False)
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


def transformer(ffn: int = 96, **options: Any) -> Callable[..., Any]:
    how = {
        "num_gqa_groups": G, "attention_dropout": 0.0, "hidden_dropout": 0.0, "device": "cpu",
        **options,
    }  # fmt: skip
    return lambda **more: float8lab.TransformerLayer(HIDDEN, ffn, H, **{**how, **more})


LLAMA = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}


def check_transformer_layer(ranks: Ranks) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(7, 2, HIDDEN).to(ranks.device), torch.randn(5, 2, HIDDEN).to(ranks.device)
    angles = {"rotary_pos_emb": float8lab.RotaryPositionEmbedding(D)(7).to(ranks.device)}
    for recipe in (None, *ALL):
        block, sizes, given = 1 if recipe is None else recipe.linear.largest_block, {}, angles
        if block > 1:  # each rank has whole blocks of features
            sizes = {"kv_channels": block * ranks.world // G, "ffn": block * ranks.world}
            turned = float8lab.RotaryPositionEmbedding(sizes["kv_channels"])(7)
            given = {"rotary_pos_emb": turned.to(ranks.device)}
        compare(
            ranks, transformer(**sizes, **LLAMA), x, given, recipe, sequence_parallel=True,
            steps=3 if recipe is DELAYED else 1,
        )  # fmt: skip
    current = recipes.Float8CurrentScaling()
    decoder = {
        "layer_type": "decoder", "apply_residual_connection_post_layernorm": True,
        "fuse_qkv_params": True, "qkv_weight_interleaved": False,
    }  # fmt: skip
    for sequence_parallel, more, how in (
        (False, {"fuse_qkv_params": True, "parallel_attention_mlp": True}, {}),
        (True, {"output_layernorm": True, "activation": "reglu"}, {}),
        (False, LLAMA, angles),
        (True, decoder, {"encoder_output": y}),
    ):
        compare(ranks, transformer(**more), x, how, current, sequence_parallel=sequence_parallel)


@on_ranks(4)
def check_sizes_are_exchanged_once(ranks: Ranks) -> None:
    """Where tokens come from outside; what layers make of them has known rows."""
    group = {
        "tp_group": dist.group.WORLD, "set_parallel_mode": True, "sequence_parallel": True,
    }  # fmt: skip
    decoder = {"layer_type": "decoder", "apply_residual_connection_post_layernorm": True}
    mixed = {"parallel_attention_mlp": True, **LLAMA}
    layers = nn.ModuleList(
        transformer(**more)(**group) for more in (LLAMA, mixed, decoder, {"output_layernorm": True})
    ).to(ranks.device)
    for tokens in (7, 8, 0):  # with 4 ranks the first has as many of 7 as of 8
        x = part_of(torch.randn(tokens, 2, HIDDEN), 0, ranks).to(ranks.device)
        y = part_of(torch.randn(5, 2, HIDDEN), 0, ranks).to(ranks.device)
        with Collectives() as collectives, float8lab.autocast(recipe=ALL[0]):
            for layer in layers:
                of_encoder = {"encoder_output": y} if layer.layer_type == "decoder" else {}
                x = layer(x, **of_encoder)
        assert collectives.of("all_gather").count((torch.int64, 3)) == 2, tokens


def check_formats_and_masks(ranks: Ranks) -> None:
    """The first dimension is spread, be it that of batches or tokens; masks are of the whole."""
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


def check_recomputation_and_random_numbers(ranks: Ranks) -> None:
    """Checkpoints repeat the layer; dropout differs on ranks' heads, and not on replicas."""
    torch.manual_seed(1)
    x = torch.randn(8, 2, HIDDEN).to(ranks.device)
    how = {"attention_dropout": 0.5, "hidden_dropout": 0.25, "drop_path_rate": 0.25}
    for sequence_parallel in (False, True):
        tracker = float8lab.CudaRNGStatesTracker(ranks.device)
        tracker.add("model-parallel-rng", 11 + ranks.rank)
        torch.manual_seed(3)
        layer = transformer(get_rng_state_tracker=lambda t=tracker: t, **how)(
            tp_group=dist.group.WORLD, set_parallel_mode=True, sequence_parallel=sequence_parallel
        ).to(ranks.device)
        streams, results = tracker.get_states(), []
        for mode in ("plain", "checkpoint", "core", "spread"):
            if mode == "spread" and sequence_parallel:
                continue
            tracker.set_states(streams)
            torch.manual_seed(5)
            leaf = (part_of(x, 0, ranks) if sequence_parallel else x).clone().requires_grad_()
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
                    precision.slots.clear()  # every run begins anew
        for other in results[1:]:
            for one, two in zip(results[0], other, strict=True):
                assert torch.equal(one, two)
        if not sequence_parallel:
            ranks.assert_same(results[0][0])
            ranks.assert_same(results[0][1])
        else:  # a sample is left out by all ranks, or by none
            layer.eval()
            torch.manual_seed(ranks.rank)
            layer.train()
            layer.hidden_dropout = layer.self_attention.core_attention.attention_dropout = 0.0
            y = layer(part_of(x, 0, ranks))
            out = (y == part_of(x, 0, ranks)).all(0).all(-1)  # both blocks were left out
            ranks.assert_same(out)


@on_ranks(4)
def check_the_group_comes_later(ranks: Ranks) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 2, HIDDEN).to(ranks.device)
    make = transformer(**LLAMA, device=ranks.device)
    torch.manual_seed(3)
    alone = make()
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
    layer.load_state_dict(fnn.shard_state_dict(layer, alone.state_dict()))
    layer = copy.deepcopy(layer)
    current = recipes.Float8CurrentScaling()
    with float8lab.autocast(recipe=current):
        y, want = layer(x), alone(x)
    high = alone(x)
    close(y, want, high, want.norm(), "later")
    assert {m.tp_group for m in layer.modules() if hasattr(m, "tp_group")} == {dist.group.WORLD}
    # Without the mode every rank has all of the layer, whatever the group.
    whole = make(tp_group=dist.group.WORLD)
    whole.load_state_dict(alone.state_dict())
    assert torch.equal(whole(x), high)


@slow_check  # quick: its layers in test_tensor_parallel.py
def check_compiled(ranks: Ranks) -> None:
    """Collectives are in the graph; the numbers are those of eager mode."""
    torch.manual_seed(1)
    x = part_of(torch.randn(ranks.world, 2, HIDDEN).to(ranks.device), 0, ranks)
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
    for one, other in zip(
        run(layers[0], x, {}, current), run(compiled, x, {}, current), strict=True
    ):
        assert torch.equal(one, other)
    for one, other in zip(*(layer.parameters() for layer in layers), strict=True):
        assert torch.equal(one.grad, other.grad)


def check_cuda_graphs(ranks: Ranks) -> None:
    """Collectives are in the graphs; a step gives the bytes of an eager one."""
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
                    module.overlap = overlap  # whether or not it pays
            layer.set_tensor_parallel_group(group, keep_gathered=overlap)
            layers.append(layer)
        torch.manual_seed(1 + ranks.rank)
        x = torch.randn(16, 2, HIDDEN, device=ranks.device)
        sample = torch.zeros_like(x, requires_grad=True)
        graphed = float8lab.make_graphed_callables(layers[1], (sample,), recipe=recipe)
        for _ in range(3):
            eager, replayed = (run(layer, x, {}, recipe) for layer in (layers[0], graphed))
            for one, other in zip(eager, replayed, strict=True):
                assert torch.equal(one, other)
            for one, other in zip(*(layer.parameters() for layer in layers), strict=True):
                assert torch.equal(one.grad, other.grad)
                one.grad = other.grad = None
                with torch.no_grad():
                    one.mul_(1.01), other.mul_(1.01)


def check_stored_weights(ranks: Ranks) -> None:
    """A rank's part of a weight that is stored in FP8 has the bytes of the whole."""
    torch.manual_seed(1)
    x = torch.randn(5, 2, HIDDEN).to(ranks.device)
    group = {"tp_group": dist.group.WORLD}
    sizes = (3, HIDDEN, 32 * ranks.world)
    for i, recipe in enumerate((DELAYED, *RECIPES[:2], RECIPES[3])):
        made = []
        grouped = {"device": "cpu", "single_grouped_weight": i % 2 == 0}
        for more, mode in (
            ({}, {}),
            ({**group, "set_parallel_mode": True}, {"parallel_mode": "column", **group}),
            ({"set_parallel_mode": True}, {"parallel_mode": "column"}),
        ):
            torch.manual_seed(3)
            with float8lab.fp8_model_init(recipe=recipe):
                layer = transformer(ffn=128, activation="swiglu", kv_channels=32)(**more)
                experts = float8lab.GroupedLinear(*sizes, **grouped, **mode)
            made.append(nn.ModuleList([layer, experts]).to(ranks.device))
        alone, spread, single = made
        states = [spread.state_dict(), alone.state_dict()]
        on_cpu = {name: value.cpu() for name, value in states[0].items()}
        assert_same_state(states[0], fnn.shard_state_dict(spread, states[1]))
        assert_same_state(states[1], fnn.whole_state_dict(spread))
        assert_same_state(states[1], fnn.shard_state_dict(single, ranks.gather(on_cpu)))
        shards, values = shards_of(spread), dict(alone.named_parameters())
        for step in range(2):
            for name, p in spread.named_parameters():
                q, want = (plain(t.detach()) for t in (p, values[name]))
                assert torch.equal(q, shards[name].shard(want) if name in shards else want), name
                values[name].grad = torch.randn_like(want)
                p.grad = (
                    shards[name].shard(values[name].grad) if name in shards else values[name].grad
                )
            for model in () if step else (alone, spread):
                optimizer = float8lab.optim.MasterWeights(
                    model.parameters(), torch.optim.SGD, lr=0.5
                )
                optimizer.step()
        with float8lab.autocast(recipe=recipe):
            got, want = spread[0](x), alone[0](x)
            y, whole = spread[1](x, [4, 3, 3]), alone[1](x, [4, 3, 3])
        close(got, want, alone[0](x), want.norm(), recipe)
        assert (
            y - whole.chunk(ranks.world, -1)[ranks.rank]
        ).abs().max() <= 1e-5 * whole.abs().max()


@on_ranks(4)
def check_shards_in_transformer_engines_layout(ranks: Ranks) -> None:
    """Files of four ranks load on four, on two and on one, and those of two on four."""
    torch.manual_seed(1)
    reference = {llama: layouts.Layer(llama) for llama in (True, False)}
    x = torch.randn(5, 2, layouts.HIDDEN)
    pairs = [dist.new_group([r, r + 1]) for r in range(0, ranks.world, 2)]
    groups = {1: None, 2: pairs[ranks.rank // 2], ranks.world: dist.group.WORLD}
    for llama, layout in itertools.product(reference, ("split", "grouped", "apart")):
        how: dict[str, Any] = {
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
                layouts.HIDDEN, layouts.FFN, layouts.HEADS, layouts.GROUPS, tp_group=group, **how
            )
            own = shards[size][ranks.rank % size]
            for found in (own, *(fnn.shard_state_dict(layer, every) for every in shards.values())):
                layer.load_state_dict(found)  # strictly
                for name, value in layer.state_dict().items():
                    assert torch.equal(value.cpu(), own[name]), (llama, layout, size, name)
            y = layer(x.to(ranks.device)).cpu()
            close(y, want, None, torch.zeros(()), (llama, layout, size))
    with pytest.raises(ValueError, match="state_dict must have the same names on all ranks"):
        fnn.shard_state_dict(layer, [own, {}])
    with pytest.raises(ValueError, match="of one kind and shape on all ranks; got self_attention"):
        fnn.shard_state_dict(layer, [shards[1][0], *shards[2]])
    with pytest.raises(ValueError, match="model must have parallel modes to join"):
        fnn.shard_state_dict(transformer()(), shards[2])


def check_grouped_linear(ranks: Ranks) -> None:
    """What ranks have of the experts' features; tokens are sent, and sums made, by others."""
    splits = torch.tensor([3, 0, 4], device=ranks.device)
    for recipe, mode in itertools.product((None, *ALL), ("column", "row")):
        has_blocks = recipe is not None and recipe.linear.largest_block > 1
        features = ranks.world * (128 if has_blocks else 24)
        torch.manual_seed(1)
        sizes = {"column": (40, features), "row": (features, 40)}[mode]
        x, dy = (torch.randn(9, n).to(ranks.device) for n in sizes)
        layers: list[Any] = []
        for more in ({}, {"tp_group": dist.group.WORLD, "parallel_mode": mode}):
            torch.manual_seed(3)
            layer = float8lab.GroupedLinear(
                3, *sizes, device=ranks.device, single_grouped_weight=mode == "row",
                fuse_wgrad_accumulation=True, **more,
            )  # fmt: skip
            for name, p in layer.named_parameters() if mode == "row" or recipe == ALL[0] else ():
                if name.startswith("weight"):
                    p.main_grad = torch.empty_like(p)
            layers.append(layer)
        alone, spread = layers
        state = fnn.shard_state_dict(spread, alone.state_dict())
        assert all(torch.equal(v, state[n]) for n, v in spread.state_dict().items())

        def part(t: Tensor, wanted: bool) -> Tensor:
            return t.chunk(ranks.world, -1)[ranks.rank] if wanted else t

        column = mode == "column"
        results, seen = [], []
        # Hopper sums FP8 products in 14 bits, on each rank in an order of its own.
        unit = 2.0**-12 if recipe is not None and x.is_cuda else 32 * torch.finfo(x.dtype).eps
        for step in range(3 if recipe is DELAYED else 1):
            for layer, inp, grad in (
                (alone, x, dy), (spread, part(x, not column), part(dy, column)),
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
            (y, dx, grads), (my_y, my_dx, my_grads) = results[-2:]
            pairs = [
                (part(y, True) if column else y, my_y if column else summed(my_y)),
                (dx if column else part(dx, True), summed(my_dx) if column else my_dx),
            ]
            shards = shards_of(spread)
            for name, grad in grads.items():
                pairs.append((shards[name].shard(grad) if name in shards else grad, my_grads[name]))
            for number, (want, got) in enumerate(pairs):
                bound = unit * want.norm()
                assert (got - want).norm() <= bound, (recipe, mode, features, step, number)
            if recipe is None:
                continue
            a, b = seen[-2].seen[".", "fprop"]
            mine_a, mine_b = seen[-1].seen[".", "fprop"]
            for e in range(3):
                mine = mine_b[e]
                want = (
                    part(b[e, : sizes[1], : sizes[0]].mT, True).mT
                    if column
                    else part(b[e, : sizes[1], : sizes[0]], True)
                )
                assert torch.equal(mine[: want.shape[0], : want.shape[1]], want), (recipe, mode, e)
            # With a scale for each expert, x is decoded by each of them.
            want = part(a[..., : sizes[0]], not column)
            assert torch.equal(mine_a[..., : want.shape[-1]], want), (recipe, mode)


test_on_ranks = each_check(__name__, 2, 4)
