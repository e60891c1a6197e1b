"""Bytes per layer match a count by hand, other hooks and the CUDA allocator."""

import gc
import json

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.utils.checkpoint import checkpoint

import float8lab
from float8lab import inspect, recipes
from tests.inspect.models import StatefulModel, snapshot

ROWS = 96
each_recipe = pytest.mark.parametrize(
    "recipe",
    [
        recipes.DelayedScaling(), recipes.Float8CurrentScaling(), recipes.Float8RowwiseScaling(),
        recipes.Float8BlockScaling(), recipes.MXFP8BlockScaling(),
    ],
    ids=lambda recipe: type(recipe).__name__,
)  # fmt: skip


def mlp(**options) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256, **options), nn.GELU(), nn.Linear(256, 32, **options))


def layers_by_name(report: inspect.MemoryReport) -> dict[str, inspect.LayerMemory]:
    return {layer.name: layer for layer in report.layers}


def bytes_saved_by_hooks(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of what autograd saves, by storage, except parameters, buffers, x and the output."""
    storages = {}

    def storage_sizes(t):
        if isinstance(t, float8lab.Float8Tensor):
            return storage_sizes(t.qdata) | storage_sizes(t.scale) | storage_sizes(t.amax)
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}

    def record_storage(t):
        storages.update(storage_sizes(t))
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(record_storage, lambda t: t):
        y = model(x)
    excluded = [x, *model.parameters(), *model.buffers()]
    for t in excluded:
        for address in storage_sizes(t.detach()):
            storages.pop(address, None)
    for address in storage_sizes(y.detach()):
        storages.pop(address, None)
    return sum(storages.values())


def test_high_precision_bytes_match_a_count_by_hand():
    report = inspect.memory_report(mlp(), torch.randn(ROWS, 64))
    assert layers_by_name(report) == {
        "0": inspect.LayerMemory("0", weights=4 * (64 * 256 + 256)),
        "1": inspect.LayerMemory("1", activations=4 * ROWS * 256),
        "2": inspect.LayerMemory("2", weights=4 * (256 * 32 + 32), activations=4 * ROWS * 256),
        "(output)": inspect.LayerMemory("(output)", activations=4 * ROWS * 32),
    }
    assert report.total == report.by_device["cpu"] == sum(layer.total for layer in report.layers)


def test_fp8_bytes_match_a_count_by_hand():
    model = mlp()
    float8lab.convert_to_float8(model)  # one scale per tensor: x is saved in FP8
    layers = layers_by_name(inspect.memory_report(model, torch.randn(ROWS, 64)))
    scale = 4
    # Backward casts the weight again. The input of the first layer needs no gradient.
    assert layers["0"].activations == ROWS * 64 + scale
    assert layers["1"].activations == 4 * ROWS * 256
    assert layers["2"].activations == ROWS * 256 + scale + 2 * scale


@each_recipe
def test_activations_match_the_bytes_that_saved_tensor_hooks_count(recipe):
    model = nn.Sequential(mlp(), float8lab.LayerNormMLP(32, 64, device="cpu"))
    float8lab.convert_to_float8(model, recipe)
    x = torch.randn(ROWS, 64)
    report = inspect.memory_report(model, x)
    saved = sum(row.activations for row in report.layers if row.name != "(output)")
    assert saved == bytes_saved_by_hooks(model, x)


@each_recipe
def test_the_meta_device_gives_the_same_sizes_as_the_cpu(recipe):
    sizes = []
    for device in ("cpu", "meta"):
        model = float8lab.convert_to_float8(mlp(device=device), recipe)
        report = inspect.memory_report(model, torch.empty(ROWS, 64, device=device).fill_(1))
        sizes.append(report.layers)
    assert sizes[0] == sizes[1]


def test_tied_weights_count_once_and_for_the_first_layer():
    model = nn.ModuleDict({"tokens": nn.Embedding(100, 16), "head": nn.Linear(16, 100, bias=False)})
    model["head"].weight = model["tokens"].weight
    layers = layers_by_name(inspect.memory_report(model))
    assert {name: row.total for name, row in layers.items()} == {"tokens": 4 * 1600}


def test_activations_that_layers_share_count_once():
    class SharedInput(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x)
            return self.a(x) + self.b(x)

    layers = layers_by_name(inspect.memory_report(SharedInput(), torch.randn(ROWS, 8)))
    assert (layers["a"].activations, layers["b"].activations) == (4 * ROWS * 8, 0)


def test_bytes_of_fp8_weights_masters_and_optimizer_state():
    with float8lab.fp8_model_init(recipe=recipes.Float8BlockScaling()):
        layer = float8lab.Linear(256, 128, bias=False, device="cpu")
    optimizer = float8lab.optim.MasterWeights(layer.parameters(), torch.optim.AdamW)
    layer(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    report = inspect.memory_report(layer, optimizer=optimizer)
    elements = 256 * 128
    assert report.layers == (
        inspect.LayerMemory(
            "",
            weights=elements,
            scales=2 * 4 * 2,  # two blocks of 128x128: scale and amax
            gradients=4 * elements,
            masters=4 * elements,
            optimizer=4 + 2 * 4 * elements,  # AdamW: the step count and two averages
        ),
    )


def test_bytes_of_main_grad_delayed_scaling_state_and_cached_casts():
    layer = float8lab.Linear(64, 32, bias=False, fuse_wgrad_accumulation=True, device="cpu")
    layer.weight.main_grad = torch.zeros(32, 64)
    recipe = recipes.DelayedScaling(amax_history_len=16)
    with float8lab.autocast(recipe=recipe):
        layer(torch.ones(16, 64), is_first_microbatch=True)
    (row,) = inspect.memory_report(layer).layers
    # For x, w and dy: the amax history; amax, steps, limit, and twice a scale and an encode factor;
    # 2 flags
    state = 3 * (16 * 4 + 7 * 4 + 2)
    cached = 64 * 32 + 3 * 2 * 16  # the cast; a copy of the three pairs of factors, each aligned
    assert (row.scales, row.gradients) == (state + cached, 4 * 64 * 32)


def test_an_autocast_around_the_call_applies_to_the_report():
    layer = float8lab.Linear(64, 64, device="cpu")
    x = torch.randn(ROWS, 64, requires_grad=True)
    plain = inspect.memory_report(layer, x)
    with float8lab.autocast(recipe=recipes.Float8CurrentScaling()):
        fp8 = inspect.memory_report(layer, x)
    # x counts as the batch. FP8 also keeps the cast of x and the factors to cast the weight again.
    assert plain.sum("activations") == 4 * ROWS * 64
    assert fp8.sum("activations") == 4 * ROWS * 64 + ROWS * 64 + 3 * 4


def test_checkpointed_layers_keep_their_input_only():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(16, 64), mlp()

        def forward(self, x):
            return checkpoint(self.inner, self.first(x), use_reentrant=False)

    layers = layers_by_name(inspect.memory_report(Checkpointed(), torch.randn(ROWS, 16)))
    saved = sum(row.activations for name, row in layers.items() if name != "(output)")
    assert saved == 4 * ROWS * 64


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_unchanged(fails, device):
    model = StatefulModel(fails=fails).to(device)
    float8lab.convert_to_float8(model, recipes.DelayedScaling(amax_history_len=4))
    if not fails:
        model(torch.randn(8, 32, device=device)).sum().backward()
    x = torch.randn(8, 32, device=device)
    before = snapshot(model)
    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            inspect.memory_report(model, x)
    else:
        inspect.memory_report(model, x)
    assert snapshot(model) == before


def test_a_batch_is_a_tuple_or_a_dict_of_arguments():
    class SumOfProducts(nn.Module):
        def forward(self, a, b):
            return (a * b).sum()

    a, b = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    sizes = [
        inspect.memory_report(SumOfProducts(), batch).total for batch in ((a, b), {"b": b, "a": a})
    ]
    assert sizes == [4, 4]  # only the output; a and b existed before the call


def test_report_as_text_and_json():
    report = inspect.memory_report(mlp(), torch.randn(ROWS, 64))
    assert_expected_inline(
        str(report),
        """\
308.4 kB on cpu

By layer
  layer     weights  activations     total
  0         66.6 kB            -   66.6 kB
  1               -      98.3 kB   98.3 kB
  2         32.9 kB      98.3 kB  131.2 kB
  (output)        -      12.3 kB   12.3 kB
  total     99.5 kB     208.9 kB  308.4 kB""",
    )
    data = json.loads(report.to_json())
    assert data["totals"]["activations"] == report.sum("activations")
    assert data["layers"][0]["weights"] == 4 * (64 * 256 + 256)
    with pytest.raises(ValueError, match="kind must be one of weights"):
        report.sum("weight")
    assert "pass an example batch" in repr(inspect.memory_report(mlp()))


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [False, True], ids=["high precision", "FP8 weights"])
@pytest.mark.parametrize(
    "recipe", [None, recipes.DelayedScaling(), recipes.Float8BlockScaling()], ids=str
)
def test_report_is_within_5_percent_of_the_cuda_allocator(recipe, stored):
    device = torch.device("cuda")

    def build_and_train(blocks: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
        options = {"device": device, "params_dtype": torch.bfloat16}
        init = recipe or recipes.Float8CurrentScaling()
        with float8lab.fp8_model_init(enabled=stored, recipe=init):
            layers = [
                module
                for _ in range(blocks)
                for module in (
                    nn.RMSNorm(1024, device=device, dtype=torch.bfloat16),
                    float8lab.Linear(1024, 4096, **options),
                    nn.GELU(),
                    float8lab.Linear(4096, 1024, **options),
                )
            ]
        model = nn.Sequential(*layers)
        if recipe is not None:
            float8lab.convert_to_float8(model, recipe)
        inner = torch.optim.AdamW
        optimizer = float8lab.optim.MasterWeights(model.parameters(), inner, lr=1e-3)
        x = torch.randn(4096, 1024, device=device, dtype=torch.bfloat16)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        return model, optimizer, x

    build_and_train(1)  # cuBLAS keeps a workspace that belongs to no model
    gc.collect()
    torch.cuda.synchronize()
    empty = torch.cuda.memory_allocated()
    model, optimizer, x = build_and_train(4)
    torch.cuda.synchronize()
    allocated_at_rest = torch.cuda.memory_allocated() - empty - x.nbytes
    report = inspect.memory_report(model, x, optimizer=optimizer)
    y = model(x)
    torch.cuda.synchronize()
    allocated_after_forward = torch.cuda.memory_allocated() - empty - x.nbytes
    del y
    reported = report.by_device["cuda:0"]
    message = f"{report}\nallocated: {allocated_at_rest} at rest, {allocated_after_forward} held"
    assert reported - report.sum("activations") == pytest.approx(allocated_at_rest, rel=0.05), (
        message
    )
    assert reported == pytest.approx(allocated_after_forward, rel=0.05), message
