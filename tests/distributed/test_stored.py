"""Weights stored in FP8 under FSDP2, DDP and DTensor."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import float8lab
from float8lab.distributed.broadcast import broadcast_parameters
from float8lab.recipes import Float8CurrentScaling
from tests.copies import saved_and_loaded
from tests.distributed.ranks import RECIPES, Collectives, Ranks, each_check, on_ranks
from tests.recorder import Ops
from tests.same_bytes import assert_same_bytes


def make_model(ranks: Ranks, recipe: Any, sizes: tuple[int, ...] = (64, 300, 64, 5)) -> Any:
    torch.manual_seed(0)
    with float8lab.fp8_model_init(recipe=recipe):
        layers = [float8lab.Linear(a, b, device=ranks.device) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(
                torch.randn_like(layer.weight)
                * (1 + torch.arange(layer.weight.shape[0], device=ranks.device)[:, None])
            )
    return model


def shard(model: nn.Sequential, ranks: Ranks, **options: Any) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, mesh=ranks.mesh(), **options)
    fully_shard(model, mesh=ranks.mesh(), **options)
    return model


def local(parameter: Any) -> float8lab.Float8Tensor:
    result = parameter._local_tensor
    assert isinstance(result, float8lab.Float8Tensor)
    return result


def assert_gathered(layer: Any, expected: Any) -> None:
    """Assert the bytes and scales of the unsharded weight; a shard has an amax of its own."""
    layer.unshard()
    assert_same_bytes(layer.weight, expected, amax=False)
    layer.reshard()


def inputs(ranks: Ranks, step: int, width: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, width, generator=generator).to(ranks.device)


def assert_trains_as_unsharded(
    single: nn.Module, model: nn.Module, recipe: Any, ranks: Ranks, *arguments: Tensor
) -> set[torch.dtype]:
    """Assert steps equal to those of the unsharded module; return the dtypes that are gathered."""
    for step in range(2):
        results = []
        for module in (single, model):
            module.zero_grad()
            with float8lab.autocast(recipe=recipe), Collectives() as collectives:
                y = module(inputs(ranks, step), *arguments)
            y.square().mean().backward()
            results.append(y)
        assert torch.equal(*results)
        for name, parameter in model.named_parameters():
            expected = single.get_parameter(name)
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
    return {dtype for dtype, _ in collectives.of("allgather")}


def check_stacked_experts_train_as_unsharded_ones(ranks: Ranks) -> None:
    """Each rank has some experts or none; every matrix is gathered with its own bytes."""
    cases = [(RECIPES[0], True, 1), (RECIPES[2], False, 5), *((r, True, 5) for r in RECIPES)]
    for recipe, stored, experts in cases:
        torch.manual_seed(0)
        with float8lab.fp8_model_init(stored, recipe=recipe):
            single = float8lab.GroupedLinear(
                experts, 64, 48, single_grouped_weight=True, device=ranks.device
            )
        model = copy.deepcopy(single)
        fully_shard(model, mesh=ranks.mesh())
        splits = torch.tensor([16] if experts == 1 else [3, 0, 7, 5, 1], device=ranks.device)
        assert_trains_as_unsharded(single, model, recipe, ranks, splits)


def check_expert_mlps_train_as_unsharded_ones(ranks: Ranks) -> None:
    """Both weights of ``ExpertMLP`` are stored in FP8, or neither is."""
    for recipe, stored in ((RECIPES[0], True), *((recipe, False) for recipe in RECIPES)):
        torch.manual_seed(0)
        with float8lab.fp8_model_init(stored, recipe=recipe):
            single = float8lab.ExpertMLP(5, 64, 48, device=ranks.device)
        if not stored:  # FSDP2 cannot cast weights that are not converted
            float8lab.convert_to_float8(single, recipe)
        model = copy.deepcopy(single)
        fully_shard(model, mesh=ranks.mesh())
        index = torch.arange(32, device=ranks.device).view(16, 2) % 5
        weights = torch.rand(16, 2, generator=torch.Generator().manual_seed(1)).to(ranks.device)
        sent = assert_trains_as_unsharded(single, model, recipe, ranks, weights, index)
        assert sent == ({torch.uint8} if ranks.world > 1 else set())


@on_ranks(4)
def check_gathered_bytes_and_results_equal_unsharded_ones(ranks: Ranks) -> None:
    for recipe in RECIPES:
        for policy in (True, False):
            single = make_model(ranks, recipe)
            weights = [layer.weight.detach().clone() for layer in single]
            model = shard(make_model(ranks, recipe), ranks, reshard_after_forward=policy)
            for step in range(2):
                x = inputs(ranks, step)
                with float8lab.autocast(recipe=recipe), Collectives() as collectives:
                    y = model(x)
                with float8lab.autocast(recipe=recipe):
                    expected = single(x)
                assert torch.equal(y, expected)
                y.square().mean().backward()
                expected.square().mean().backward()
            sent = {torch.uint8} if ranks.world > 1 else set()
            assert {dtype for dtype, _ in collectives.of("allgather")} == sent
            for layer, reference, weight in zip(model, single, weights, strict=True):
                grad = layer.weight.grad
                assert grad.dtype == layer.weight.dtype
                assert type(grad.to_local()) is Tensor
                torch.testing.assert_close(grad.full_tensor(), reference.weight.grad)
                assert_gathered(layer, weight)


def check_shards_are_written_by_updates_only(ranks: Ranks) -> None:
    # FSDP2 reads shards on streams of its own, which wait only for the optimizer's writes.
    for recipe in RECIPES:
        model = shard(make_model(ranks, recipe), ranks)
        before: list[Any] = []
        for step in range(3):
            with float8lab.autocast(recipe=recipe):
                model(inputs(ranks, step)).square().mean().backward()
            shards = [local(layer.weight) for layer in model]
            before = before or [
                (s, s.qdata._version, s.scale, s.scale._version, s.amax) for s in shards
            ]
        for layer, (shard_, version, scale, scale_version, amax) in zip(model, before, strict=True):
            assert local(layer.weight) is shard_
            assert shard_.qdata._version == version
            assert shard_.scale is scale
            assert scale._version == scale_version
            assert shard_.amax is amax


def check_resident_bytes_are_those_of_a_shard(ranks: Ranks) -> None:
    for recipe in RECIPES:
        model = make_model(ranks, recipe)
        counts = [layer.weight.numel() for layer in model]
        shard(model, ranks)
        with float8lab.autocast(recipe=recipe):
            model(inputs(ranks, 0)).sum().backward()
        for layer, count in zip(model, counts, strict=True):
            shard_ = local(layer.weight)
            chunk = -(-layer.weight.shape[0] // ranks.world) * layer.weight.shape[1]
            assert shard_.qdata.untyped_storage().nbytes() <= chunk <= count
            blocks = layer.weight.spec if hasattr(layer.weight, "spec") else shard_.spec
            assert shard_.scale.numel() <= max(1, shard_.numel()), blocks


def check_weights_made_on_the_meta_device_are_gathered(ranks: Ranks) -> None:
    for recipe in RECIPES:
        with float8lab.fp8_model_init(recipe=recipe):
            layer = float8lab.Linear(64, 300, device="meta")
        model = fully_shard(nn.Sequential(layer), mesh=ranks.mesh()).to_empty(device=ranks.device)
        with torch.no_grad(), float8lab.fallback("silent"):
            layer.weight.to_local().normal_().mul_(1 + ranks.rank)
        before = local(layer.weight).dequantize()
        for step in range(2):
            with float8lab.autocast(recipe=recipe):
                model(inputs(ranks, step)).sum().backward()
        assert torch.equal(local(layer.weight).dequantize(), before)
        values = torch.cat(ranks.gather(before.cpu())).to(ranks.device)
        model.unshard()
        assert layer.weight.spec == recipe.linear.w
        step = layer.weight.scale.max() * 448 / 16
        assert (layer.weight.dequantize() - values).abs().max() <= step
        ranks.assert_same(layer.weight.qdata.view(torch.uint8))


def check_plain_modules_gather_stored_weights(ranks: Ranks) -> None:
    for recipe in RECIPES:
        weight = make_model(ranks, recipe)[0].weight.detach()
        model = nn.Sequential(nn.Linear(64, 300, bias=False), nn.Linear(64, 300, bias=False))
        for layer in model:
            layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
            fully_shard(layer, mesh=ranks.mesh())
        for _ in range(2):
            for layer in model:
                layer.unshard()
                assert layer.weight.spec == weight.spec
                # FSDP2 requantizes shards, and such a module does not correct that.
                step = layer.weight.scale.max() * 448 / 16
                assert (layer.weight.dequantize() - weight.dequantize()).abs().max() <= step
                ranks.assert_same(layer.weight.qdata.view(torch.uint8))
                layer.reshard()


def check_moved_shard_sends_the_same_bytes(ranks: Ranks) -> None:
    # With CPU offload, FSDP2 asks a copy on the device, and keeps the shard.
    mesh = ranks.mesh()
    for recipe in RECIPES:
        stored = make_model(ranks, recipe)
        master = nn.Sequential(nn.Linear(64, 300, device=ranks.device))
        float8lab.convert_to_float8(master, recipe)
        for layer in (shard(stored, ranks)[0], shard(master, ranks)[0]):
            shard_ = layer.weight._local_tensor
            moved = shard_.to(ranks.device, copy=True)
            assert type(moved) is type(shard_)
            arguments = (mesh, layer.weight.shape, layer.weight.stride(), layer, None)
            (data,), scales = shard_.fsdp_pre_all_gather(*arguments)
            (moved_data,), moved_scales = moved.fsdp_pre_all_gather(*arguments)
            assert torch.equal(data, moved_data)
            assert all(torch.equal(a, b) for a, b in zip(scales, moved_scales, strict=True))
            assert shard_.weight.shard() is shard_


def check_copies_of_a_shard_are_plain_float8_tensors(ranks: Ranks) -> None:
    for recipe in RECIPES:
        model = shard(make_model(ranks, recipe), ranks)
        model[0].unshard()
        model[0].reshard()
        shard_ = local(model[0].weight)
        loaded = saved_and_loaded(shard_, weights_only=True)
        for copied in (copy.deepcopy(shard_), loaded, shard_.detach()):
            assert type(copied) is float8lab.Float8Tensor
            assert_same_bytes(copied, shard_)


def check_mixed_precision_and_frozen_weights_train(ranks: Ranks) -> None:
    recipe = Float8CurrentScaling()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(make_model(ranks, recipe), ranks, mp_policy=policy)
    model[0].weight.requires_grad_(False)
    with float8lab.autocast(recipe=recipe):
        y = model(inputs(ranks, 0))
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    assert model[0].weight.grad is None
    assert model[1].weight.grad.dtype == torch.float32


def check_shards_with_scales_of_their_own_are_gathered(ranks: Ranks) -> None:
    # A plain optimizer writes to each shard, which is then quantized by itself.
    for recipe in RECIPES:
        model = shard(make_model(ranks, recipe), ranks)
        # The weights are large, and so are gradients: up to 1e13.
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-12, foreach=True)
        for step in range(2):
            with float8lab.autocast(recipe=recipe), float8lab.fallback("silent"):
                model(inputs(ranks, step)).square().mean().backward()
                optimizer.step()
        values = [ranks.gather(local(layer.weight).dequantize().cpu()) for layer in model]
        for layer, rank_values in zip(model, values, strict=True):
            layer.unshard()
            weight, expected = layer.weight.dequantize().cpu(), torch.cat(rank_values)
            step = layer.weight.scale.max().item() * 448 / 16
            assert (weight - expected).abs().max() <= step
            ranks.assert_same(layer.weight.qdata.view(torch.uint8))
            layer.reshard()


def check_master_weights_train_as_unsharded_ones(ranks: Ranks) -> None:
    # Every rank has the same batch, so the mean of the gradients equals each of them.
    for recipe in RECIPES:
        single = make_model(ranks, recipe)
        model = shard(make_model(ranks, recipe), ranks)
        optimizers = [
            float8lab.optim.MasterWeights(m.parameters(), torch.optim.AdamW, lr=0.01)
            for m in (single, model)
        ]
        for step in range(3):
            losses = []
            for m, optimizer in zip((single, model), optimizers, strict=True):
                with float8lab.autocast(recipe=recipe):
                    loss = m(inputs(ranks, step)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            assert torch.equal(losses[0], losses[1]), (recipe, step, losses)
            for layer, reference in zip(model, single, strict=True):
                assert_gathered(layer, reference.weight)


def check_shards_are_cast_by_one_op(ranks: Ranks) -> None:
    model = shard(make_model(ranks, Float8CurrentScaling()), ranks)
    optimizer = float8lab.optim.MasterWeights(model.parameters(), torch.optim.SGD, lr=1e-12)
    for step in range(2):
        model(inputs(ranks, step)).square().mean().backward()
        with Ops() as ops:
            optimizer.step()
    # In the second step: the first one also checks that masters and shards agree. Amaxes are
    # computed shard by shard, where there are rows.
    own_ops = [name for name in ops.names if name.startswith("float8lab.")]
    assert [n for n in own_ops if n != "float8lab.cast.amax"] == ["float8lab.cast.many_"], own_ops


def check_masters_start_from_kept_values(ranks: Ranks) -> None:
    options = {"bias": False, "device": ranks.device}
    for recipe in RECIPES:
        torch.manual_seed(0)
        with float8lab.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            layer = float8lab.Linear(48, 150, **options)
            experts = [
                float8lab.GroupedLinear(5, 64, 48, single_grouped_weight=single, **options)
                for single in (False, True)
            ]
        model = nn.Sequential(layer, *experts)
        initial_values = [
            p.get_high_precision_init_val().to(ranks.device) for p in model.parameters()
        ]
        shard(model, ranks)
        optimizer = float8lab.optim.MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1)
        for parameter, values in zip(model.parameters(), initial_values, strict=True):
            assert torch.equal(optimizer.masters[parameter].full_tensor(), values)
            assert local(parameter).get_high_precision_init_val() is None


@on_ranks(4)
def check_hybrid_sharding_gathers_equal_bytes(ranks: Ranks) -> None:
    if ranks.world < 4:
        return
    for recipe in RECIPES:
        model = make_model(ranks, recipe)
        weights = [layer.weight.detach().clone() for layer in model]
        mesh = ranks.mesh(2, ranks.world // 2, names=("copies", "shards"))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        for layer, weight in zip(model, weights, strict=True):
            assert_gathered(layer, weight)


def check_shards_of_columns_raise(ranks: Ranks) -> None:
    for recipe in RECIPES:
        model = make_model(ranks, recipe)
        fully_shard(model, mesh=ranks.mesh(), shard_placement_fn=lambda p: Shard(p.ndim - 1))
        with pytest.raises(NotImplementedError, match=r"FP8 weights along dim 0; got"):
            model(torch.randn(4, model[0].in_features, device=ranks.device))


def check_ddp_after_broadcast_parameters_has_equal_weights_and_gradients(ranks: Ranks) -> None:
    for recipe in RECIPES:
        model = make_model(ranks, recipe)
        if ranks.rank:
            with torch.no_grad():
                for layer in model:
                    layer.weight.copy_(torch.full_like(layer.weight, ranks.rank))
        expected_model = copy.deepcopy(make_model(ranks, recipe))
        ids = [ranks.device.index] if ranks.device.type == "cuda" else None
        broadcast_parameters(model)
        parallel = DistributedDataParallel(model, device_ids=ids, init_sync=False)
        for layer, expected_layer in zip(model, expected_model, strict=True):
            assert_same_bytes(layer.weight, expected_layer.weight)
        with float8lab.autocast(recipe=recipe):
            parallel(inputs(ranks, ranks.rank)).square().mean().backward()
        for layer in model:
            ranks.assert_same(layer.weight.grad)


def check_ddp_broadcasts_stored_weights_itself(ranks: Ranks) -> None:
    model = make_model(ranks, Float8CurrentScaling())
    with torch.no_grad():
        model[0].weight.mul_(1 + ranks.rank)
    ids = [ranks.device.index] if ranks.device.type == "cuda" else None
    with float8lab.fallback("silent"):
        DistributedDataParallel(model, device_ids=ids)
    ranks.assert_same(model[0].weight.qdata.view(torch.uint8))
    ranks.assert_same(model[0].weight.scale)


def check_broadcast_sends_data_and_scales(ranks: Ranks) -> None:
    for block in ((-1, -1), (1, -1), (128, 128)):
        torch.manual_seed(ranks.rank)
        # So many bytes that their broadcast takes longer than those of scales and amaxes.
        rows = 2000 if ranks.device.type == "cuda" else 500
        x = float8lab.quantize(torch.randn(rows, 4000, device=ranks.device), block=block)
        torch.distributed.broadcast(x, ranks.world - 1)
        ranks.assert_same(x.qdata.view(torch.uint8))
        ranks.assert_same(x.scale)


def check_dtensors_are_made_of_quantized_tensors(ranks: Ranks) -> None:
    mesh = ranks.mesh()
    x = torch.randn(128 * ranks.world, 48, device=ranks.device)
    x = distribute_tensor(x, mesh, [Shard(0)])
    for block in ((-1, -1), (1, -1), (1, 16), (128, 128)):
        with pytest.raises(NotImplementedError, match=r"got a DTensor.*distribute_tensor"):
            float8lab.quantize(x, block=block)
        quantized = float8lab.quantize(x.full_tensor(), block=block)
        q = distribute_tensor(quantized, mesh, [Shard(0)])
        assert "Float8Tensor" in repr(q)
        assert_same_bytes(q.full_tensor(), quantized)


def check_redistributed_dtensors_keep_their_values(ranks: Ranks) -> None:
    mesh = ranks.mesh()
    for block in ((-1, -1), (1, -1), (1, 16), (128, 128)):
        for rows in (128 * ranks.world, 130):
            torch.manual_seed(0)
            quantized = float8lab.quantize(torch.randn(rows, 48, device=ranks.device), block=block)
            chunks = list(quantized.chunk(ranks.world))
            sharded = DTensor.from_local(
                chunks[ranks.rank].clone(), mesh, [Shard(0)],
                run_check=False, shape=quantized.shape, stride=quantized.stride(),
            )  # fmt: skip
            full = sharded.full_tensor()
            assert isinstance(full, float8lab.Float8Tensor)
            assert torch.equal(full.dequantize(), quantized.dequantize())
            if rows % 128 == 0:
                assert_same_bytes(full, quantized)
            replicated = sharded.redistribute(mesh, [Replicate()])
            back = replicated.redistribute(mesh, [Shard(0)]).to_local()
            assert torch.equal(back.dequantize(), chunks[ranks.rank].dequantize())


test_on_ranks = each_check(__name__, 1, 2, 4)
