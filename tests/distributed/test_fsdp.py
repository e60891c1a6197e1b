"""FP8 all-gather of high-precision weights under FSDP2."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import float8lab
from float8lab.distributed.fsdp.shards import MasterShard
from float8lab.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.distributed.ranks import Collectives, Ranks, each_check, on_ranks, slow_check

RECIPES = [
    Float8CurrentScaling(), Float8CurrentScaling(power_of_2_scale=True, amax_epsilon=0.5),
    Float8RowwiseScaling(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling(),
    DelayedScaling(margin=1),
]  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, device: Any = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, device=device)
        self.up = nn.Linear(width, hidden, device=device)
        self.down = nn.Linear(hidden, width, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_model(device: Any, width: int = 64, hidden: int = 200, blocks: int = 2) -> nn.Sequential:
    """Blocks whose rows divide by neither the world size nor 128, and a head of 3 rows."""
    parts = [Block(width, hidden, device) for _ in range(blocks)]
    return nn.Sequential(*parts, nn.Linear(width, 3, device=device))


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    """Apply FSDP2 to each block and to the model."""
    for part in model:
        fully_shard(part, **options)
    fully_shard(model, **options)
    return model


def sharded_model(ranks: Ranks, recipe: Any = None, **options: Any) -> nn.Sequential:
    """A converted model under FSDP2."""
    model = float8lab.convert_to_float8(make_model(ranks.device), recipe)
    return shard(model, **{"mesh": ranks.mesh(), **options})


def fp8_linears(model: nn.Module) -> dict[str, float8lab.Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, float8lab.Linear)}


def for_each_unit(model: nn.Module, action: Callable[[FSDPModule], Any]) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            action(module)


def full_cast(weight: Tensor, recipe: Any) -> float8lab.Float8Tensor:
    """The cast that one process makes of the full weight."""
    plan = recipe.linear
    cast = float8lab.quantize(
        weight, plan.w.fp8_dtype, block=plan.w.block, scale_rule=plan.w.scale_rule,
        amax_epsilon=plan.amax_epsilon,
    )  # fmt: skip
    if isinstance(recipe, DelayedScaling):
        scale = cast.scale * 2.0**recipe.margin
        return float8lab.quantize(weight, plan.w.fp8_dtype, block=plan.w.block, scale=scale)
    return cast


def assert_gathered_equal_cast(model: nn.Module, recipe: Any) -> None:
    for_each_unit(
        model, FSDPModule.reshard
    )  # the root stays unsharded after a forward without backward
    weights = {n: m.weight.full_tensor() for n, m in fp8_linears(model).items()}
    for_each_unit(model, FSDPModule.unshard)
    for name, layer in fp8_linears(model).items():
        gathered, expected = layer.weight, full_cast(weights[name].detach(), recipe)
        assert isinstance(gathered, float8lab.Float8Tensor), name
        assert torch.equal(gathered.qdata.view(torch.uint8), expected.qdata.view(torch.uint8)), name
        assert torch.equal(gathered.scale, expected.scale), name
        assert torch.equal(gathered.dequantize().isfinite(), weights[name].isfinite()), name
    for_each_unit(model, FSDPModule.reshard)


def batch(ranks: Ranks, step: int, width: int = 64, rows: int = 8) -> tuple[Tensor, Tensor]:
    """The inputs of one step: those of all ranks, and those of this rank."""
    generator = torch.Generator().manual_seed(step)
    all_rows = torch.randn(ranks.world * rows, width, generator=generator).to(ranks.device)
    return all_rows, all_rows[ranks.rank * rows : (ranks.rank + 1) * rows]


def train_step(model: nn.Module, x: Tensor, optimizer: Any) -> Tensor:
    loss = (model(x) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(model: nn.Module, ranks: Ranks, steps: int) -> Tensor:
    """The losses of AdamW steps on this rank's inputs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.stack([train_step(model, batch(ranks, s)[1], optimizer) for s in range(steps)])


@on_ranks(4)
def check_gathered_bytes_are_those_of_the_full_cast(ranks: Ranks) -> None:
    for recipe in RECIPES:
        model = make_model(ranks.device)
        with torch.no_grad():
            model[0].up.weight[150] *= 1000  # one rank alone has the largest value
            model[0].down.weight[3, 7] = 0
            model[1].up.weight[:130] = 0  # whole blocks and whole shards of zeros
        float8lab.convert_to_float8(model, recipe)
        shard(model, mesh=ranks.mesh())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        assert_gathered_equal_cast(model, recipe)
        for step in range(2):
            train_step(model, batch(ranks, step)[1], optimizer)
            assert_gathered_equal_cast(model, recipe)


@on_ranks(4)
def check_stacked_experts_are_gathered_as_each_expert_is_cast(ranks: Ranks) -> None:
    """Each rank has some experts or none; one size has whole blocks, the other has not."""
    x, splits = batch(ranks, 0, rows=16)[0][:16], torch.tensor([3, 0, 7, 5, 1])
    for recipe, features in ((r, n) for r in RECIPES for n in (40, 128)):
        torch.manual_seed(0)
        options = {"single_grouped_weight": True, "device": ranks.device}
        single = float8lab.GroupedLinear(5, 64, features, **options)
        with torch.no_grad():
            single.weight[3] *= 1000
        model = copy.deepcopy(float8lab.convert_to_float8(single, recipe))
        fully_shard(model, mesh=ranks.mesh())
        with Collectives() as collectives:
            model.unshard()
        if ranks.world > 1:
            assert {dtype for dtype, _ in collectives.of("allgather")} == {torch.uint8}
        for gathered, weight in zip(model.weight, single.weight, strict=True):
            expected = full_cast(weight.detach(), recipe)
            assert torch.equal(gathered.qdata.view(torch.uint8), expected.qdata.view(torch.uint8))
            assert torch.equal(gathered.scale, expected.scale)
        model.reshard()
        results = [layer(x, splits.to(x.device)) for layer in (model, single)]
        assert torch.equal(*results)
        results[0].sum().backward()
        assert model.weight.grad.to_local().shape == model.weight.to_local().shape


def check_returned_biases_outlive_their_unit(ranks: Ranks) -> None:
    """FSDP2 frees the parameters of a unit after its forward, before the caller adds the bias."""
    options = {"return_bias": True, "device": ranks.device}
    layers = [
        (float8lab.Linear(64, 24, **options), ()),
        (float8lab.Linear(64, 24, parameters_split=("a", "b"), **options), ()),
        (float8lab.LayerNormLinear(64, 24, **options), ()),
        (float8lab.LayerNormMLP(64, 32, **options), ()),
        (float8lab.MultiheadAttention(64, 4, attention_dropout=0.0, **options), ()),
        (float8lab.GroupedLinear(2, 64, 24, **options), ([3, 5],)),
        (float8lab.GroupedLinear(2, 64, 24, single_grouped_bias=True, **options), ([3, 5],)),
    ]
    x = batch(ranks, 0)[0][:8, None]
    for layer, splits in layers:
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
        sharded = fully_shard(copy.deepcopy(layer), mesh=ranks.mesh())
        results = []
        for module in (layer, sharded):
            y, biases = module(x, *splits)
            biases = torch.cat([b.flatten() for b in biases]) if splits else biases
            (y.square().sum() + biases.square().sum()).backward()
            results.append([y, biases, *(p.grad for p in module.parameters())])
        for expected, actual in zip(*results, strict=True):
            actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
            assert torch.equal(expected, actual), type(layer)


def check_packed_attention_weight_is_gathered_in_high_precision(ranks: Ranks) -> None:
    """The weights of linear layers are gathered in FP8."""
    single = nn.TransformerEncoderLayer(64, 4, 128, 0.0, device=ranks.device)
    float8lab.convert_to_float8(single)
    model = fully_shard(copy.deepcopy(single), mesh=ranks.mesh())
    all_rows, x = batch(ranks, 0)
    with Collectives() as collectives:
        y = model(x[:, None])
    if ranks.world > 1:
        assert torch.uint8 in {dtype for dtype, _ in collectives.of("allgather")}
    assert torch.equal(y, single(x[:, None]))
    y.square().sum().backward()
    # Each gradient is the mean over ranks of the gradients of each rank's rows.
    grads = []
    for rows in all_rows.chunk(ranks.world):
        single.zero_grad()
        single(rows[:, None]).square().sum().backward()
        grads.append(single.self_attn.in_proj_weight.grad)
    expected = torch.stack(grads).mean(0)
    torch.testing.assert_close(model.self_attn.in_proj_weight.grad.full_tensor(), expected)


def check_nonfinite_and_huge_weights_are_gathered_as_cast(ranks: Ranks) -> None:
    model = nn.Sequential(nn.Linear(32, 40, bias=False, device=ranks.device))
    with torch.no_grad():
        model[0].weight[39, 3] = torch.nan
    for value in (torch.nan, torch.inf, 3e38):
        with torch.no_grad():
            model[0].weight[0, 5] = value
        sharded = copy.deepcopy(model)
        recipe = Float8RowwiseScaling()
        float8lab.convert_to_float8(sharded, recipe)
        fully_shard(sharded, mesh=ranks.mesh())
        assert_gathered_equal_cast(sharded, recipe)


def check_gathers_send_one_byte_an_element_and_one_reduction_a_step(ranks: Ranks) -> None:
    if ranks.world == 1:
        return  # nothing is sent
    for recipe in RECIPES:
        model = sharded_model(ranks, recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=True)
        amax_reductions = 1 if recipe.linear.delayed else 0  # the reduction of activations' amaxes
        for step in range(3):
            with Collectives() as collectives:
                train_step(model, batch(ranks, step)[1], optimizer)
            if step > 0:
                assert len(collectives.of("allreduce")) == 1 + amax_reductions, collectives.seen
        in_fp8 = {f"{name}.weight" for name in fp8_linears(model)}
        padded = {
            n: -(-p.shape[0] // ranks.world) * p[0].numel() for n, p in model.named_parameters()
        }
        bytes_of = {n: count * (1 if n in in_fp8 else 4) for n, count in padded.items()}
        gathers = collectives.of("allgather")
        assert all(dtype == torch.uint8 for dtype, _ in gathers), gathers
        # Forward and backward gather every unit; the last one stays unsharded in between.
        per_unit = [
            sum(size for n, size in bytes_of.items() if n.startswith(f"{unit}."))
            for unit in range(len(model))
        ]
        forward = [size for _, size in gathers[: len(model)]]
        assert forward == per_unit, (forward, per_unit)
        assert sum(size for _, size in gathers) <= 2 * sum(per_unit)


def assert_losses_follow_a_single_process(ranks: Ranks, recipes: list[Any]) -> None:
    # Results in FP8 depend on the rows that share a scale, so the losses differ, but by less than
    # FP8 differs from high precision: that difference is the tolerance.
    def losses_of(model: nn.Module, *, sharded: bool = False) -> Tensor:
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
        for step in range(20):
            all_rows, local_rows = batch(ranks, step, rows=16)
            loss = train_step(model, local_rows if sharded else all_rows, optimizer)
            if sharded:
                dist.all_reduce(loss)
                loss = loss / ranks.world
            losses.append(loss.item())
        return torch.tensor(losses)

    torch.manual_seed(1)
    plain = make_model(ranks.device)
    high_precision = losses_of(copy.deepcopy(plain))
    for recipe in recipes:
        single, sharded = copy.deepcopy(plain), copy.deepcopy(plain)
        float8lab.convert_to_float8(single, recipe)
        float8lab.convert_to_float8(sharded, recipe)
        shard(sharded, mesh=ranks.mesh())
        fp8, fsdp = losses_of(single), losses_of(sharded, sharded=True)
        assert fsdp[-1] < fsdp[0] / 2
        error = (fsdp - high_precision).abs() / high_precision
        assert error.max() < 0.03 + 3 * ((fp8 - high_precision).abs() / high_precision).max(), (
            high_precision,
            fp8,
            fsdp,
        )


def check_losses_follow_a_single_process(ranks: Ranks) -> None:
    assert_losses_follow_a_single_process(ranks, [RECIPES[2], RECIPES[-1]])


@slow_check
def check_losses_follow_a_single_process_under_other_recipes(ranks: Ranks) -> None:
    assert_losses_follow_a_single_process(ranks, [*RECIPES[:2], *RECIPES[3:-1]])


def check_equal_to_unsharded_numerics_when_every_rank_has_the_same_batch(ranks: Ranks) -> None:
    # The mean of equal gradients is each of them, so results are bitwise equal where w has square
    # blocks.
    for recipe in (Float8CurrentScaling(), Float8BlockScaling()):
        single = make_model(ranks.device)
        sharded = copy.deepcopy(single)
        float8lab.convert_to_float8(single, recipe)
        float8lab.convert_to_float8(sharded, recipe)
        shard(sharded, mesh=ranks.mesh())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (single, sharded)]
        for step in range(5):
            x = batch(ranks, step)[0]
            single_loss = train_step(single, x, optimizers[0])
            sharded_loss = train_step(sharded, x, optimizers[1])
            assert torch.equal(single_loss, sharded_loss), (step, single_loss, sharded_loss)
        for (name, p), (_, q) in zip(
            single.named_parameters(), sharded.named_parameters(), strict=True
        ):
            assert torch.equal(p, q.full_tensor()), name


def check_losses_do_not_depend_on_the_reshard_policy(ranks: Ranks) -> None:
    losses = []
    for policy in (True, False):
        torch.manual_seed(0)
        model = sharded_model(ranks, reshard_after_forward=policy)
        losses.append(train(model, ranks, 4))
        assert_gathered_equal_cast(model, Float8CurrentScaling())
    assert torch.equal(*losses)


def check_weights_are_gathered_as_cast_after_gradient_accumulation(ranks: Ranks) -> None:
    model = sharded_model(ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            model(batch(ranks, 2 * step + micro)[1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_gathered_equal_cast(model, Float8CurrentScaling())


def check_mixed_precision_casts_the_float32_masters(ranks: Ranks) -> None:
    for recipe in RECIPES:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded_model(ranks, recipe, mp_policy=policy)
        dtypes = []
        layer = model[0].up
        layer.register_forward_pre_hook(
            lambda m, args, dtypes=dtypes: dtypes.extend([m.weight.dtype, args[0].dtype])
        )
        train(model, ranks, 2)
        assert set(dtypes) == {torch.bfloat16}
        assert layer.weight.dtype == torch.float32
        assert_gathered_equal_cast(model, recipe)  # cast from the float32 masters


def check_weights_made_on_the_meta_device_are_gathered_as_cast(ranks: Ranks) -> None:
    for recipe in (Float8CurrentScaling(), Float8BlockScaling()):
        model = float8lab.convert_to_float8(make_model("meta"), recipe)
        shard(model, mesh=ranks.mesh())
        model.to_empty(device=ranks.device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().normal_()  # ranks draw different numbers of values
        assert_gathered_equal_cast(model, recipe)
        train_step(model, batch(ranks, 0)[1], torch.optim.AdamW(model.parameters()))
        assert_gathered_equal_cast(model, recipe)


def check_weights_are_gathered_as_cast_after_loading(ranks: Ranks) -> None:
    recipe = Float8CurrentScaling()
    model = make_model(ranks.device)
    keys = list(model.state_dict())
    float8lab.convert_to_float8(model, recipe)
    shard(model, mesh=ranks.mesh())
    assert list(model.state_dict()) == keys
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, batch(ranks, 0)[1], optimizer)
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    assert all(type(v.to_local()) is Tensor for v in saved.values())
    train_step(model, batch(ranks, 1)[1], optimizer)
    model.load_state_dict(saved)
    assert_gathered_equal_cast(model, recipe)
    model.load_state_dict({k: v * 3 for k, v in saved.items()}, assign=True)
    assert isinstance(model[0].up.weight._local_tensor, MasterShard)
    assert_gathered_equal_cast(model, recipe)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    model.load_state_dict(saved)
    torch.__future__.set_swap_module_params_on_conversion(before)
    assert_gathered_equal_cast(model, recipe)


def check_one_reduction_a_step_after_loading_and_moving(ranks: Ranks) -> None:
    if ranks.world == 1:
        return  # nothing is sent
    recipe = Float8CurrentScaling()
    model = sharded_model(ranks, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, batch(ranks, 0)[1], optimizer)
    changes: list[Callable[[], Any]] = [
        lambda: model.to(ranks.device),
        lambda: model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}),
        lambda: model.load_state_dict(
            {k: v / 2 for k, v in model.state_dict().items()}, assign=True
        ),
    ]
    for step, change in enumerate(changes, 1):
        change()
        with Collectives() as collectives:
            train_step(model, batch(ranks, step)[1], optimizer)
        assert len(collectives.of("allreduce")) == 1, collectives.seen
        assert_gathered_equal_cast(model, recipe)


def check_offloaded_weights_are_gathered_in_fp8_on_the_device(ranks: Ranks) -> None:
    policy = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    model = sharded_model(ranks, Float8BlockScaling(), offload_policy=policy)
    train(model, ranks, 2)
    assert model[0].up.weight.device.type == "cpu"
    full = {n: p.to_local() for n, p in model.named_parameters()}
    for_each_unit(model, FSDPModule.unshard)
    for layer in fp8_linears(model).values():
        assert isinstance(layer.weight, float8lab.Float8Tensor)
        assert layer.weight.qdata.device == ranks.device
    for_each_unit(model, FSDPModule.reshard)
    assert all(local.device.type == "cpu" for local in full.values())


@on_ranks(4)
def check_weights_are_gathered_as_cast_under_hybrid_sharding(ranks: Ranks) -> None:
    if ranks.world < 4:
        return
    for recipe in (Float8CurrentScaling(), Float8BlockScaling()):
        mesh = ranks.mesh(2, ranks.world // 2, names=("copies", "shards"))
        model = sharded_model(ranks, recipe, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(2):
            train_step(model, batch(ranks, step)[1], optimizer)
            assert_gathered_equal_cast(model, recipe)
            ranks.assert_same(model[0].up.weight.full_tensor())


def check_weights_are_gathered_as_cast_where_steps_skip_layers(ranks: Ranks) -> None:
    class OptionalLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64, device=ranks.device)
            self.second = nn.Linear(64, 64, device=ranks.device)
            self.uses_layer = (True, True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) if self.uses_layer[0] else x
            return self.second(x) if self.uses_layer[1] else x

    recipe = Float8CurrentScaling()
    model = float8lab.convert_to_float8(OptionalLayers(), recipe)
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=ranks.mesh(), reshard_after_forward=False)
    fully_shard(model, mesh=ranks.mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=10.0, foreach=True)
    schedule = [
        (True, True),
        (False, True),
        (True, False),
        (False, True),
        (True, True),
        (True, False),
    ]
    for step, model.uses_layer in enumerate(schedule):
        train_step(model, batch(ranks, step)[1], optimizer)
        assert_gathered_equal_cast(model, recipe)


def check_weights_are_gathered_as_cast_where_a_rank_skips_a_layer_of_a_unit(ranks: Ranks) -> None:
    class ExpertsOfOtherRanks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(
                nn.Linear(64, 64, device=ranks.device) for _ in range(ranks.world)
            )

        def forward(self, x: Tensor) -> Tensor:
            # All experts but this rank's own. Every weight gets a gradient, if only of zeros.
            y = sum(e(x) for i, e in enumerate(self.experts) if i != ranks.rank)
            return y + 0 * sum(p.sum() for p in self.experts.parameters() if p.ndim == 1)

    for recipe in (Float8CurrentScaling(), DelayedScaling()):
        model = float8lab.convert_to_float8(ExpertsOfOtherRanks(), recipe)
        fully_shard(model, mesh=ranks.mesh())
        with torch.no_grad():
            for step in range(3):
                model(batch(ranks, step)[1])
        assert_gathered_equal_cast(model, recipe)


def check_weights_are_gathered_as_cast_after_other_models_are_deleted(ranks: Ranks) -> None:
    # Ranks collect garbage at different times.
    model = sharded_model(ranks, mesh=(mesh := ranks.mesh()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.disable()
    for round_ in range(3):
        temporary = sharded_model(ranks, mesh=mesh)
        temporary_optimizer = torch.optim.SGD(temporary.parameters(), lr=0.1)
        train_step(model, batch(ranks, round_)[1], optimizer)
        train_step(temporary, batch(ranks, round_)[1], temporary_optimizer)
        del temporary, temporary_optimizer
        if ranks.rank == 0:
            gc.collect()
        train_step(model, batch(ranks, round_)[1], optimizer)
        assert_gathered_equal_cast(model, Float8CurrentScaling())
    gc.enable()


def check_tied_and_unconverted_weights_stay_in_high_precision(ranks: Ranks) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 64, device=ranks.device)
            self.body = nn.Linear(64, 64, device=ranks.device)
            self.head = nn.Linear(64, 32, bias=False, device=ranks.device)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.embedding(x)))

    model = float8lab.convert_to_float8(Tied())
    fully_shard(model, mesh=ranks.mesh())
    model(torch.arange(8, device=ranks.device)).square().mean().backward()
    model.unshard()
    assert type(model.head.weight) is nn.Parameter
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.body.weight, float8lab.Float8Tensor)
    model.reshard()

    for recipe, option in (
        (Float8CurrentScaling(override_linear_precision=(False, True, False)), True),
        (Float8CurrentScaling(), False),
    ):
        layer = nn.Linear(64, 64, device=ranks.device)
        float8lab.convert_to_float8(layer, recipe, fp8_all_gather=option)
        fully_shard(layer, mesh=ranks.mesh())
        layer(batch(ranks, 0)[1]).sum().backward()
        layer.unshard()
        assert type(layer.weight) is nn.Parameter
        layer.reshard()


def check_conversion_after_sharding_keeps_the_losses(ranks: Ranks) -> None:
    recipe, mesh = Float8CurrentScaling(), ranks.mesh()
    plain = make_model(ranks.device)
    losses = []
    for converted_before in ("fully_shard", "forward", "step", "backward"):
        model = copy.deepcopy(plain)
        if converted_before == "fully_shard":
            float8lab.convert_to_float8(model, recipe)
        shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if converted_before == "step":
            model(batch(ranks, 0)[1]).sum().backward()
            optimizer.zero_grad()
        if converted_before == "backward":
            model(batch(ranks, 0)[1])  # the head stays unsharded
        if converted_before != "fully_shard":
            float8lab.convert_to_float8(model, recipe)
            note = "5 weights were sharded before they were converted"
            assert note in str(float8lab.conversion_report(model))
        losses.append([train_step(model, batch(ranks, s)[1], optimizer) for s in range(3)])
    expected = torch.stack(losses[0])
    assert all(torch.equal(torch.stack(later), expected) for later in losses[1:])


def check_activation_checkpointing_keeps_the_losses(ranks: Ranks) -> None:
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = float8lab.convert_to_float8(make_model(ranks.device))
        if checkpointed:
            for part in model:
                forward: Callable[..., Tensor] = part.forward
                part.forward = lambda x, forward=forward: torch.utils.checkpoint.checkpoint(
                    forward, x, use_reentrant=False
                )
        shard(model, mesh=ranks.mesh())
        results.append(train(model, ranks, 3))
    assert torch.equal(*results)


def check_inference_equals_the_unsharded_model(ranks: Ranks) -> None:
    # FSDP2 itself fails in inference mode on one process.
    for mode in (torch.inference_mode, torch.no_grad)[ranks.world == 1 :]:
        model = make_model(ranks.device)
        single = copy.deepcopy(model)
        for m in (model, single):
            float8lab.convert_to_float8(m)
        shard(model, mesh=ranks.mesh()).eval()
        x = batch(ranks, 0)[0]
        with mode():
            assert torch.equal(model(x), single(x))
            assert torch.equal(model(x), single(x))


def check_tensor_parallel_weights_are_told_from_fsdp_shards(ranks: Ranks) -> None:
    plan = {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()}
    mesh = ranks.mesh(1, ranks.world, names=("dp", "tp"))
    x = batch(ranks, 0)[0]
    for then_shard in (False, True):
        model = make_model(ranks.device, blocks=1)
        high_precision = model(x)
        single = float8lab.convert_to_float8(copy.deepcopy(model))
        parallelize_module(model, mesh["tp"], plan)
        if then_shard:
            shard(model, mesh=mesh["dp"])
        float8lab.convert_to_float8(model)
        assert fp8_linears(model).keys() == fp8_linears(single).keys()
        got, want = model(x), single(x)
        if x.is_cuda:  # sums of 14 bits in another order change an FP8 value now and then
            assert (got - want).norm() < 0.8 * (want - high_precision).norm()
        else:
            torch.testing.assert_close(got, want)
    # A layer without a tensor-parallel style takes no DTensor, and a placement on two mesh
    # dimensions cannot be converted.
    model = float8lab.convert_to_float8(make_model(ranks.device, blocks=1))
    replicated = distribute_tensor(x, mesh["tp"], [Replicate()])
    with pytest.raises(NotImplementedError, match=r"^inp must not be a DTensor where"):
        model[0].up(replicated)
    layer = nn.Linear(8, 8, device=ranks.device)
    twice_sharded = distribute_tensor(layer.weight.detach(), mesh, [Shard(0), Shard(1)])
    layer.weight = nn.Parameter(twice_sharded)
    with pytest.raises(ValueError, match=r"its weight is placed as .*; FP8 takes one shard"):
        float8lab.convert_to_float8(layer, strict=True)
    # DTensors of FSDP2 are accepted, also under hybrid sharding and where a part is converted.
    for mesh in (ranks.mesh(), ranks.mesh(1, ranks.world, names=("replicate", "shard"))):
        model = make_model(ranks.device)
        single = float8lab.convert_to_float8(copy.deepcopy(model))
        shard(model, mesh=mesh)
        for part in (model[0].up, model[0], model):
            float8lab.convert_to_float8(part, strict=True)
        assert torch.equal(model(x), single(x))


def check_clipped_gradient_norm_is_equal_on_all_ranks(ranks: Ranks) -> None:
    model = sharded_model(ranks)
    model(batch(ranks, 0)[1]).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    ranks.assert_same(norm)
    assert all(p.grad.dtype == p.dtype for p in model.parameters())


test_on_ranks = each_check(__name__, 1, 2, 4)
