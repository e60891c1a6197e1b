"""Converted layers whose forward does not run: when a warning names them, and when none does."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import float8lab
from float8lab.integrations import export


class Attention(nn.Module):
    """Reads the weight of one layer and calls the other, as BEiT's attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)
        self.proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.qkv.weight).chunk(3, -1)
        return self.proj(F.scaled_dot_product_attention(q, k, v))


class Model(nn.Module):
    """Two attention blocks, a layer for images that a batch may lack, and experts with one idle."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Attention(), Attention())
        self.images = nn.Linear(16, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor, images: Tensor | None = None) -> dict[str, Any]:
        x = self.blocks(x) if images is None else self.blocks(x) + self.images(images)
        return {"y": [self.head(self.experts[0](x))]}


UNCALLED = ["blocks.0.qkv", "blocks.1.qkv"]
X = torch.ones(2, 3, 16)
warns_of_uncalled = pytest.warns(
    UserWarning, match=r"2 converted layers did not run.*: blocks.0.qkv, blocks.1.qkv"
)


def converted_model(recipe: Any = None) -> Model:
    return float8lab.convert_to_float8(Model(), recipe)


class AttentionPool(nn.Module):
    """Reads the weights of all its layers, as the pooling of CLIP's convolutional models does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        k, v = F.linear(x, self.kv.weight, self.kv.bias).chunk(2, -1)
        return F.scaled_dot_product_attention(F.linear(x, self.q.weight), k, v)


def number_of_hooks(model: nn.Module) -> int:
    return len(model._forward_hooks) + len(model._forward_pre_hooks)


@pytest.mark.parametrize("recipe", [None, float8lab.recipes.DelayedScaling()], ids=["", "delayed"])
def test_uncalled_layers_are_warned_of_counted_and_reported(recipe: Any) -> None:
    model = pickle.loads(pickle.dumps(copy.deepcopy(converted_model(recipe))))
    before = float8lab.conversion_report(model)
    with warns_of_uncalled, float8lab.count_gemms() as counts:
        y = model(X)["y"][0]
    y.sum().backward()
    assert counts.unseen == UNCALLED
    assert str(counts).endswith("blocks.1.qkv: not called; its parent multiplies by its weight")
    report = float8lab.conversion_report(model)
    assert [r.name for r in before.converted if r not in report.converted] == UNCALLED
    assert "its forward did not run: its parent reads its weight" in str(report)
    model(X)
    # A layer that runs later counts as FP8 from then on.
    model.blocks[0].qkv(X)
    assert [r.name for r in float8lab.conversion_report(model).skipped] == UNCALLED[1:]
    assert float8lab.conversion_report(copy.deepcopy(model)).skipped
    # A second conversion checks the layers a second time.
    with warns_of_uncalled:
        float8lab.convert_to_float8(model)(X)


def test_layers_whose_weights_are_only_read_are_warned_of() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(5, 16), nn.Linear(16, 16)
            self.pool = AttentionPool()
            self.skipped = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 5))
            self.skipped[1].weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.pool(self.body(self.embed(x)))

    model = float8lab.convert_to_float8(Pooled())
    with pytest.warns(UserWarning, match=r"2 converted layers did not run.*: pool.q, pool.kv\."):
        model(torch.ones(2, 3, dtype=torch.long)).sum().backward()
    skipped = float8lab.conversion_report(model).skipped
    assert [layer.name for layer in skipped] == ["pool.q", "pool.kv"]
    model = float8lab.convert_to_float8(Pooled())
    model.pool.q(X), model.pool.kv(X)  # as in the recording of CUDA graphs
    model(torch.ones(2, 3, dtype=torch.long)).sum().backward()


def test_a_call_that_raises_does_not_count_as_the_first() -> None:
    model = converted_model()
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 3))
    with warns_of_uncalled:
        model(X)


def test_without_gradients_unused_layers_are_warned_of_until_they_run() -> None:
    model = converted_model()
    with pytest.warns(UserWarning, match="3 converted layers"), torch.no_grad():
        model(X)
    model(X, X)
    assert [r.name for r in float8lab.conversion_report(model).skipped] == UNCALLED


def test_uncalled_layers_with_frozen_weights_are_warned_of() -> None:
    model = float8lab.convert_to_float8(Model(), freeze_weights=True)
    with pytest.warns(UserWarning, match="3 converted layers"):
        model(X)


def test_shared_weights_single_layers_and_undone_models_cause_no_warning() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    float8lab.convert_to_float8(Shares())(X)
    layer = float8lab.convert_to_float8(nn.Linear(16, 16))
    assert number_of_hooks(layer) == 0, "it has no parent"
    undone = float8lab.to_high_precision(converted_model())
    assert number_of_hooks(undone) == 0
    undone(X)


@pytest.mark.usefixtures("fresh_dynamo")
def test_converted_models_compile_without_graph_breaks_and_once() -> None:
    model = converted_model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(X)["y"][0].sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(X)["y"][0].sum().backward()
    # Large models are compiled by blocks, and then Python no longer calls their layers.
    model = converted_model()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    model(X)["y"][0].sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        model(X)["y"][0].sum().backward()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_layers_that_ran_compiled_are_not_reported_as_uncalled(backend: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), nn.Linear(16, 16))
    float8lab.convert_to_float8(model)[0].compile(fullgraph=True, backend=backend)
    model(X).sum().backward()
    assert not float8lab.conversion_report(model).skipped


def test_export_writes_weights_of_uncalled_layers_in_high_precision(tmp_path: Any) -> None:
    model = converted_model()
    with warns_of_uncalled:
        model(X)
    report = export(model, tmp_path / "a", "float8lab")
    assert [f"{name}.weight" in report.fp8 for name in UNCALLED] == [False, False]
    assert set(UNCALLED) <= set(report.high_precision)
    report = export(model, tmp_path / "b", "float8lab", unseen=True)
    assert all(f"{name}.weight" in report.fp8 for name in UNCALLED)


def test_converted_torch_encoders_call_their_layers_in_evaluation() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2).eval()
    plain = copy.deepcopy(model)
    float8lab.convert_to_float8(model)
    padding = torch.zeros(2, 3, dtype=torch.bool)
    padding[1, 2] = True
    x = torch.randn(2, 3, 16)
    for mask in (None, padding):
        with torch.no_grad(), float8lab.count_gemms() as counts:
            model(x, src_key_padding_mask=mask)
        names = {*counts.fp8_by_module, *counts.high_precision_by_module}
        assert {f"layers.{i}.linear{j}" for i in range(2) for j in (1, 2)} <= names
    float8lab.to_high_precision(model)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x)), "by the fused path"
