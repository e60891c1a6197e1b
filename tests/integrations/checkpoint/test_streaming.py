"""``export_stream``: the tensors of ``export``, one after the other, also from FSDP2 shards."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import float8lab
from float8lab import recipes
from float8lab.integrations import export, export_stream, load_fp8
from tests.distributed.ranks import Collectives, Ranks, each_check
from tests.integrations.checkpoint.test_experts import block_fp8, checkpoint_of
from tests.integrations.checkpoint.test_experts import build_model as model_with_experts

CASES = [
    (recipes.Float8BlockScaling(), "block-fp8"),
    (recipes.Float8CurrentScaling(), "block-fp8"),
    (recipes.Float8RowwiseScaling(), "compressed-tensors"),
    (recipes.MXFP8BlockScaling(), "float8lab"),
]


def tensor_bytes(stream: Any) -> dict[str, Tensor]:
    """Return the bytes of the tensors of a stream, or of a state dict."""
    pairs = stream.items() if isinstance(stream, dict) else stream
    return {name: x.cpu().contiguous().view(-1).view(torch.uint8) for name, x in pairs}


def assert_same(a: Any, b: Any) -> None:
    a, b = tensor_bytes(a), tensor_bytes(b)
    assert list(a) == list(b)
    assert not [name for name in a if not torch.equal(a[name], b[name])]


def train(model: nn.Module, x: Tensor, steps: int = 2) -> None:
    optimizer = float8lab.optim.MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def shard(model: nn.Module, ranks: Ranks) -> nn.Module:
    for layer in model.children():
        fully_shard(layer, mesh=ranks.mesh())
    return fully_shard(model, mesh=ranks.mesh())


def check_trained_shards_are_streamed_as_exported_on_one_gpu(ranks: Ranks) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).to(ranks.device)
    for recipe, format in CASES:
        for stored in (False, True):
            torch.manual_seed(0)
            layers = nn.Linear(128, 300), nn.GELU(), nn.Linear(300, 40)
            single = nn.Sequential(*layers).to(ranks.device)
            float8lab.convert_to_float8(single, recipe, freeze_weights=stored)
            single.requires_grad_(True)
            model = shard(copy.deepcopy(single), ranks)
            for trained in (single, model):
                train(trained, x)
            if not stored:  # rowwise gradients of a weight that was gathered in FP8 differ
                unsharded_state = {name: p.full_tensor() for name, p in model.state_dict().items()}
                single.load_state_dict(unsharded_state)
            before = [p.to_local().clone() for p in model.parameters()]
            with Collectives() as collectives:
                streamed = tensor_bytes(export_stream(model, format))
            assert_same(streamed, export_stream(single, format))
            largest = max(p.numel() for p in single.parameters())
            assert all(size <= largest for _, size in collectives.of("gather"))
            # The ranks multiply these bytes, and the model is unchanged.
            for layer in (model[0], model[2]):
                layer.unshard()
                if isinstance(layer.weight, float8lab.Float8Tensor):
                    name = f"{'02'[layer is model[2]]}.weight"
                    tensor_name = f"{name}.qdata" if format == "float8lab" else name
                    assert_same(
                        {tensor_name: streamed[tensor_name]}, {tensor_name: layer.weight.qdata}
                    )
                layer.reshard()
            for p, local in zip(model.parameters(), before, strict=True):
                assert torch.equal(p.to_local(), local)
            with pytest.raises(ValueError, match=r"must not be sharded.*export_stream"):
                export(model, ranks.tmp_path / "out", format)


def check_sharded_experts_are_streamed_matrix_by_matrix(ranks: Ranks) -> None:
    loaded = model_with_experts(seed=1).to(ranks.device)
    load_fp8(checkpoint_of(model_with_experts(), block_fp8), loaded)
    single = loaded.requires_grad_(True)["mlp"]
    model = shard(copy.deepcopy(single), ranks)
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)).to(ranks.device)
    for trained in (single, model):
        train(trained, x)
    with Collectives() as collectives:
        streamed = tensor_bytes(export_stream(model))
    assert_same(streamed, export_stream(single))
    assert sum("experts.1" in name for name in streamed) == 6
    gathered = [size for dtype, size in collectives.of("gather") if dtype == torch.uint8]
    # Each stack is gathered once, for all its matrices.
    assert len(gathered) == 2 * (ranks.world > 1), gathered


test_ranks = each_check(__name__, 1, 2)


@pytest.mark.parametrize("format", ["block-fp8", "compressed-tensors", "float8lab"])
def test_the_stream_has_the_tensors_that_export_writes(tmp_path: Any, format: str) -> None:
    from safetensors.torch import load_file

    model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 128))
    export(model, tmp_path / "out", format, exclude=["2"])
    streamed = dict(export_stream(model, format, exclude=["2"]))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert_same({name: written[name] for name in streamed}, streamed)
    assert len(written) == len(streamed)
    with pytest.raises(ValueError, match="format must be"):
        export_stream(model, "fp8")
