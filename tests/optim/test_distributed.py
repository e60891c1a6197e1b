"""MasterWeights of DTensor parameters, and distributed checkpoints, on one gloo process."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import float8lab
from float8lab.optim import MasterWeights
from float8lab.tensor import quantize
from tests.same_bytes import assert_same_bytes, assert_same_state

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "foreach": False}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
}
each_optimizer = pytest.mark.parametrize(
    ("optimizer_class", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys()
)
BLOCKS = {"tensor": (-1, -1), "row": (1, -1), "block": (128, 128)}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def shard(x: Tensor, mesh: DeviceMesh, placement=None) -> nn.Parameter:
    return nn.Parameter(
        DTensor.from_local(x, mesh, [placement or Shard(0)], run_check=False), requires_grad=True
    )


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
@each_optimizer
def test_sharded_parameter_steps_like_its_shard(mesh, optimizer_class, options, block, placement):
    value = torch.randn(150, 140).bfloat16()
    local = nn.Parameter(quantize(value, block=block))
    sharded = shard(quantize(value, block=block), mesh, placement)
    plain = shard(torch.ones(140), mesh, placement if placement != Shard(1) else Shard(0))
    local_optimizer = MasterWeights([local], optimizer_class, **options)
    sharded_optimizer = MasterWeights([sharded, plain], optimizer_class, **options)
    master = sharded_optimizer.masters[sharded]
    assert list(sharded_optimizer.masters) == [sharded]
    assert isinstance(master, DTensor)
    assert (master.placements, master.shape) == (sharded.placements, sharded.shape)
    assert master.dtype == torch.float32
    for _ in range(3):
        local.grad = torch.randn(150, 140).bfloat16()
        sharded.grad = DTensor.from_local(local.grad.clone(), mesh, sharded.placements)
        plain.grad = DTensor.from_local(torch.ones(140), mesh, plain.placements)
        for optimizer in (local_optimizer, sharded_optimizer):
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"][:1], 1.0)
            optimizer.step()
        assert_same_bytes(sharded._local_tensor, local)
        assert torch.equal(master._local_tensor, local_optimizer.masters[local])


def test_empty_shard_steps(mesh):
    # The second of two ranks has no part of a single row.
    shape, stride = torch.Size((1, 8)), (8, 1)
    empty = DTensor.from_local(
        quantize(torch.randn(0, 8), block=(1, -1)), mesh, [Shard(0)], shape=shape, stride=stride,
        run_check=False,
    )  # fmt: skip
    p = nn.Parameter(empty)
    optimizer = MasterWeights([p], torch.optim.AdamW, lr=0.1)
    assert optimizer.masters[p].shape == shape
    p.grad = DTensor.from_local(
        torch.randn(0, 8), mesh, [Shard(0)], shape=shape, stride=stride, run_check=False
    )
    optimizer.step()
    assert p._local_tensor.shape == (0, 8)


def test_masters_of_a_shard_start_from_kept_initial_values(mesh):
    value = torch.randn(16, 16)
    p = shard(quantize(value), mesh)
    p._local_tensor._high_precision_init_val = value.clone()
    optimizer = MasterWeights([p], torch.optim.SGD, lr=0.1)
    assert torch.equal(optimizer.masters[p]._local_tensor, value)
    assert p._local_tensor.get_high_precision_init_val() is None


def test_training_resumes_from_a_sharded_state_dict_bit_for_bit(mesh):
    def make() -> tuple[nn.Parameter, MasterWeights]:
        p = shard(quantize(torch.randn(32, 16)), mesh)
        return p, MasterWeights([p], torch.optim.AdamW, lr=0.1)

    def step(p: nn.Parameter, optimizer: MasterWeights, i: int) -> None:
        gradient = torch.randn(32, 16, generator=torch.Generator().manual_seed(i))
        p.grad = DTensor.from_local(gradient, mesh, [Shard(0)])
        optimizer.step()

    p, optimizer = make()
    step(p, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    assert isinstance(saved["state"][0]["master"], DTensor)
    q, other_optimizer = make()
    other_optimizer.load_state_dict(saved)
    for i in (1, 2):
        step(p, optimizer, i)
        step(q, other_optimizer, i)
    assert_same_bytes(q._local_tensor, p._local_tensor)
    twin, twin_optimizer = copy.deepcopy((p, optimizer))
    step(p, optimizer, 3)
    step(twin, twin_optimizer, 3)
    assert_same_bytes(twin._local_tensor, p._local_tensor)


def test_shard_written_by_other_code_becomes_its_master(mesh):
    p = shard(quantize(torch.randn(8, 8)), mesh)
    optimizer = MasterWeights([p], torch.optim.SGD, lr=0.0)
    with torch.no_grad():
        p.copy_(shard(quantize(torch.randn(8, 8)), mesh))
    written = p._local_tensor.dequantize()
    p.grad = DTensor.from_local(torch.ones(8, 8), mesh, [Shard(0)])
    optimizer.step()
    assert torch.equal(optimizer.masters[p]._local_tensor, written)


@pytest.mark.parametrize("steps", [0, 2])
def test_training_resumes_from_a_distributed_checkpoint_bit_for_bit(mesh, tmp_path, steps):
    def make() -> tuple[nn.Module, MasterWeights]:
        with float8lab.fp8_model_init(preserve_high_precision_init_val=True):
            model = nn.Sequential(
                float8lab.Linear(16, 8, device="cpu"), float8lab.Linear(8, 4, device="cpu")
            )
        return model, MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.1)

    def train(model: nn.Module, optimizer: MasterWeights, start: int, count: int) -> None:
        for i in range(start, start + count):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(i))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    model, optimizer = make()
    train(model, optimizer, 0, steps)
    optimizer.zero_grad()
    weights = copy.deepcopy(model.state_dict())
    with float8lab.fallback("silent"):
        saved = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    assert "master" in saved["optimizer"]["state"]["0.weight"]
    dcp.save(saved, checkpoint_id=tmp_path / str(steps))

    twin, twin_optimizer = make()
    with float8lab.fallback("silent"):
        loaded = {"optimizer": get_optimizer_state_dict(twin, twin_optimizer)}
    dcp.load(loaded, checkpoint_id=tmp_path / str(steps))
    twin.load_state_dict(weights)
    set_optimizer_state_dict(twin, twin_optimizer, loaded["optimizer"])
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        if p in optimizer.masters:
            assert torch.equal(optimizer.masters[p], twin_optimizer.masters[q])
    train(model, optimizer, steps, 2)
    train(twin, twin_optimizer, steps, 2)
    assert_same_state(dict(model.named_parameters()), dict(twin.named_parameters()))
