"""Bytes by layer against bytes counted by hand, by other hooks, and by the CUDA allocator."""

import gc
import json

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.utils.checkpoint import checkpoint

import float8lab
from float8lab import inspect, recipes
from tests.inspect.models import Noted, snapshot

ROWS = 96
each_recipe = pytest.mark.parametrize(
    "recipe",
    [
        recipes.DelayedScaling(), recipes.Float8CurrentScaling(), recipes.Float8RowwiseScaling(),
        recipes.Float8BlockScaling(), recipes.MXFP8BlockScaling(),
    ],
    ids=lambda recipe: type(recipe).__name__,
)  # fmt: skip


def mlp(**how) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256, **how), nn.GELU(), nn.Linear(256, 32, **how))


def by_name(report: inspect.MemoryReport) -> dict[str, inspect.LayerMemory]:
    return {layer.name: layer for layer in report.layers}


def saved_by_other_hooks(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of what autograd saves, by the addresses of its memory; parameters and x apart."""
    found = {}

    def addresses(t):
        if isinstance(t, float8lab.Float8Tensor):
            return addresses(t.qdata) | addresses(t.scale) | addresses(t.amax)
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}

    def note(t):
        found.update(addresses(t))
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = model(x)
    apart = [x, *model.parameters(), *model.buffers()]
    for t in apart:
        for address in addresses(t.detach()):
            found.pop(address, None)
    for address in addresses(y.detach()):
        found.pop(address, None)
    return sum(found.values())


def test_high_precision_by_hand():
    report = inspect.memory_report(mlp(), torch.randn(ROWS, 64))
    assert by_name(report) == {
        "0": inspect.LayerMemory("0", weights=4 * (64 * 256 + 256)),
        "1": inspect.LayerMemory("1", activations=4 * ROWS * 256),
        "2": inspect.LayerMemory("2", weights=4 * (256 * 32 + 32), activations=4 * ROWS * 256),
        "(output)": inspect.LayerMemory("(output)", activations=4 * ROWS * 32),
    }
    assert report.total == report.by_device["cpu"] == sum(layer.total for layer in report.layers)


def test_a_converted_model_by_hand():
    model = mlp()
    float8lab.convert_to_float8(model)  # one scale per tensor: x is saved in FP8
    found = by_name(inspect.memory_report(model, torch.randn(ROWS, 64)))
    scale = 4
    # Of the weight, backward casts it again; the input of the first layer needs no gradient.
    assert found["0"].activations == ROWS * 64 + scale
    assert found["1"].activations == 4 * ROWS * 256
    assert found["2"].activations == ROWS * 256 + scale + 2 * scale


@each_recipe
def test_saved_activations_are_those_that_other_hooks_see(recipe):
    model = nn.Sequential(mlp(), float8lab.LayerNormMLP(32, 64, device="cpu"))
    float8lab.convert_to_float8(model, recipe)
    x = torch.randn(ROWS, 64)
    report = inspect.memory_report(model, x)
    saved = sum(row.activations for row in report.layers if row.name != "(output)")
    assert saved == saved_by_other_hooks(model, x)


@each_recipe
def test_the_meta_device_gives_the_same_sizes(recipe):
    sizes = []
    for device in ("cpu", "meta"):
        model = float8lab.convert_to_float8(mlp(device=device), recipe)
        report = inspect.memory_report(model, torch.empty(ROWS, 64, device=device).fill_(1))
        sizes.append(report.layers)
    assert sizes[0] == sizes[1]


def test_tied_weights_count_once_and_for_the_first():
    model = nn.ModuleDict({"tokens": nn.Embedding(100, 16), "head": nn.Linear(16, 100, bias=False)})
    model["head"].weight = model["tokens"].weight
    found = by_name(inspect.memory_report(model))
    assert {name: row.total for name, row in found.items()} == {"tokens": 4 * 1600}


def test_activations_that_layers_share_count_once():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x)
            return self.a(x) + self.b(x)

    found = by_name(inspect.memory_report(Two(), torch.randn(ROWS, 8)))
    assert (found["a"].activations, found["b"].activations) == (4 * ROWS * 8, 0)


def test_weights_stored_in_fp8_their_masters_and_an_optimizers_state():
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
            optimizer=4 + 2 * 4 * elements,  # AdamW: steps, and two averages
        ),
    )


def test_main_grad_delayed_state_and_kept_casts():
    layer = float8lab.Linear(64, 32, bias=False, fuse_wgrad_accumulation=True, device="cpu")
    layer.weight.main_grad = torch.zeros(32, 64)
    recipe = recipes.DelayedScaling(amax_history_len=16)
    with float8lab.autocast(recipe=recipe):
        layer(torch.ones(16, 64), is_first_microbatch=True)
    (row,) = inspect.memory_report(layer).layers
    # x, w, dy: history; amax, steps, limit, and twice a scale and an encode factor; 2 flags
    state = 3 * (16 * 4 + 7 * 4 + 2)
    kept = 64 * 32 + 3 * 2 * 16  # the cast; a copy of the three pairs of factors, each aligned
    assert (row.scales, row.gradients) == (state + kept, 4 * 64 * 32)


def test_an_autocast_around_the_call_is_obeyed():
    layer = float8lab.Linear(64, 64, device="cpu")
    x = torch.randn(ROWS, 64, requires_grad=True)
    plain = inspect.memory_report(layer, x)
    with float8lab.autocast(recipe=recipes.Float8CurrentScaling()):
        fp8 = inspect.memory_report(layer, x)
    # x counts as the batch; in FP8 its cast is kept, and what casts the weight again.
    assert plain.sum("activations") == 4 * ROWS * 64
    assert fp8.sum("activations") == 4 * ROWS * 64 + ROWS * 64 + 3 * 4


def test_checkpointed_layers_keep_their_input_only():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(16, 64), mlp()

        def forward(self, x):
            return checkpoint(self.inner, self.first(x), use_reentrant=False)

    found = by_name(inspect.memory_report(Checkpointed(), torch.randn(ROWS, 16)))
    kept = sum(row.activations for name, row in found.items() if name != "(output)")
    assert kept == 4 * ROWS * 64


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails, device):
    model = Noted(fails=fails).to(device)
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


def test_batches_are_positional_or_by_keyword():
    class Add(nn.Module):
        def forward(self, a, b):
            return (a * b).sum()

    a, b = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    sizes = [inspect.memory_report(Add(), batch).total for batch in ((a, b), {"b": b, "a": a})]
    assert sizes == [4, 4]  # the output; a and b were there before


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
@pytest.mark.parametrize("stored", [False, True], ids=["plain", "stored"])
@pytest.mark.parametrize(
    "recipe", [None, recipes.DelayedScaling(), recipes.Float8BlockScaling()], ids=str
)
def test_within_5_percent_of_the_allocator(recipe, stored):
    device = torch.device("cuda")

    def made(blocks: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
        how = {"device": device, "params_dtype": torch.bfloat16}
        init = recipe or recipes.Float8CurrentScaling()
        with float8lab.fp8_model_init(enabled=stored, recipe=init):
            layers = [
                module
                for _ in range(blocks)
                for module in (
                    nn.RMSNorm(1024, device=device, dtype=torch.bfloat16),
                    float8lab.Linear(1024, 4096, **how),
                    nn.GELU(),
                    float8lab.Linear(4096, 1024, **how),
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

    made(1)  # what cuBLAS keeps for itself is no model's
    gc.collect()
    torch.cuda.synchronize()
    empty = torch.cuda.memory_allocated()
    model, optimizer, x = made(4)
    torch.cuda.synchronize()
    at_rest = torch.cuda.memory_allocated() - empty - x.nbytes
    report = inspect.memory_report(model, x, optimizer=optimizer)
    y = model(x)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - empty - x.nbytes
    del y
    found = report.by_device["cuda:0"]
    shown = f"{report}\nallocated: {at_rest} at rest, {held} held"
    assert found - report.sum("activations") == pytest.approx(at_rest, rel=0.05), shown
    assert found == pytest.approx(held, rel=0.05), shown
