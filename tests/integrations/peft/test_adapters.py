"""LoRA of stock PEFT on an FP8 base: products, memory, gradients, and what PEFT does around it."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import float8lab
from float8lab import recipes
from float8lab.formats import E4M3
from float8lab.inspect import memory_report
from float8lab.tensor import Float8Tensor
from tests.integrations.peft.models import (
    RECIPES,
    TOKENS,
    base_layers,
    convert,
    cosine,
    gradients,
    llama,
    mlp,
    peft,
    with_lora,
)
from tests.nn.models import report_of

# Old names of transformers, by which PEFT asks.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.(is_)?gradient_checkpointing(_enable)?. is deprecated:FutureWarning"
)

each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def run(model, x):
    """Forward, and backward from a gradient that does not depend on the output; x's gradient."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y))
    return x.grad


@each_recipe
@pytest.mark.parametrize("freeze", [True, False], ids=["stored", "converted"])
def test_frozen_weights_take_two_products_and_keep_no_input(device, recipe, freeze):
    model = with_lora(convert(mlp().to(device), recipe, freeze=freeze))
    x = torch.randn(40, 64, device=device)
    with float8lab.count_gemms() as counts:
        run(model, x)
    prefix = "base_model.model"
    assert counts.fp8_by_module == {f"{prefix}.{name}.base_layer": 2 for name in ("up", "down")}
    high = counts.high_precision_by_module
    assert {name.removeprefix(f"{prefix}."): count for name, count in high.items()} == {
        **{f"{name}.lora_{part}.default": 3 for name in ("up", "down") for part in "AB"},
        "head": 2,
    }
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    # Between forward and backward there is nothing of the size of the input, and of the weight what
    # casts it again to the bytes of the forward.
    x.requires_grad_()
    report = memory_report(model, x)
    kept = {r.name: r.activations for r in report.layers if r.name.endswith("base_layer")}
    scales = 2048  # at most: a scale a tensor, or what a CUDA allocator makes of it
    for name in base_layers(model):
        assert kept[f"{name}.base_layer"] <= (0 if freeze else scales)


@each_recipe
def test_a_frozen_weight_takes_one_byte_an_element(recipe):
    model = with_lora(convert(llama(dtype=torch.bfloat16), recipe))
    layers = [m for m in model.modules() if isinstance(m, float8lab.Linear)]
    assert len(layers) == 14
    for layer in layers:
        weight, block = layer.weight, recipe.linear.w.block
        assert weight.qdata.untyped_storage().nbytes() == weight.numel()
        blocks = [
            1 if b == -1 else -(-size // b) for size, b in zip(weight.shape, block, strict=True)
        ]
        # Apart from it, a scale and an amax in float32 for each block.
        assert weight.scale.nbytes + weight.amax.nbytes == 8 * blocks[0] * blocks[1]
        assert not weight.requires_grad
    rows = memory_report(model).layers
    adapters = sum(row.weights for row in rows if ".lora_" in row.name)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    assert not any(isinstance(p, Float8Tensor) for p in trained)
    assert adapters == sum(p.nbytes for p in trained)
    base = sum(row.weights for row in rows if ".lora_" not in row.name)
    rest = sum(p.nbytes for p in llama(dtype=torch.bfloat16).parameters())
    stored = sum(layer.weight.numel() for layer in layers)
    assert base == rest - stored  # each was two bytes


def rounding(fp8_dtype):
    """Square of the relative error of a cast: at most half a unit in the last place, evenly."""
    half = 2.0**-4 if fp8_dtype == E4M3 else 2.0**-3
    return half**2 / 3


@each_recipe
@pytest.mark.parametrize("freeze", [True, False], ids=["stored", "converted"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"use_rslora": True}, {"use_dora": True}, {"use_dora": True, "lora_dropout": 0.25}],
    ids=["lora", "rslora", "dora", "dora with dropout"],
)
def test_gradients_are_those_of_high_precision(device, recipe, freeze, fields):
    x = torch.randn(256, 64, device=device)

    def tune(recipe):
        model = with_lora(convert(mlp().to(device), recipe, freeze=freeze), **fields)
        torch.manual_seed(3)  # of dropout
        return run(model, x), gradients(model)

    # DoRA's norm of W + BA needs W in high precision, on any base.
    with float8lab.fallback("silent" if "use_dora" in fields else "error"):
        dx, adapters = tune(recipe)
    dx_high, adapters_high = tune(None)
    # Of each of the two layers fprop casts x and w, dgrad dy and w; independent errors of relative
    # size e turn a vector by an angle of cosine 1 - e^2 / 2.
    plan = recipe.linear
    casts = [plan.x, plan.w, plan.dy, plan.w]
    error = 2 * sum(rounding(spec.fp8_dtype) for spec in casts)
    assert cosine(dx, dx_high) > 1 - error / 2
    assert cosine(adapters, adapters_high) > 1 - error / 2
    assert not torch.equal(dx, dx_high)


@each_recipe
def test_gradients_of_a_llama(recipe):
    """Measured: 0.9927, 0.9924, 0.9986, 0.9982; in bfloat16, on a base of its own, 0.9999."""

    def tune(recipe):
        model = with_lora(convert(llama(), recipe))
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        return gradients(model)

    assert cosine(tune(recipe), tune(None)) > 0.99


@pytest.mark.parametrize("freeze", [True, False], ids=["stored", "converted"])
@each_recipe
def test_the_order_makes_no_difference(recipe, freeze):
    first = with_lora(convert(mlp(), recipe, freeze=freeze), modules_to_save=["head"])
    last = convert(with_lora(mlp(), modules_to_save=["head"]), recipe, freeze=freeze)
    x = torch.randn(2, 24, 64)
    for _ in range(3):  # delayed scales advance alike
        assert torch.equal(run(first, x[0]), run(last, x[0]))
        assert torch.equal(gradients(first), gradients(last))
    for model in (first, last):
        for name, module in model.named_modules():
            if "lora_" in name or "head" in name:
                assert not isinstance(module, float8lab.Linear), name
        found = {n: p.requires_grad for n, p in model.named_parameters()}
        assert {n for n, trained in found.items() if trained} == {
            n for n in found if "lora_" in n or "modules_to_save" in n
        }


def test_adapters_in_fp8_if_they_are_named():
    model = with_lora(mlp())
    report = report_of(
        model, overrides={"lora_A": recipes.Float8BlockScaling()}, freeze_weights=False
    )
    assert "lora_B" in str([layer.name for layer in report.skipped])
    with float8lab.count_gemms() as counts:
        run(model, torch.randn(8, 64))
    assert counts.fp8_by_module["base_model.model.up.lora_A.default"] == 3


def test_layers_trained_whole_run_in_fp8_and_are_not_frozen():
    fields = {"target_modules": ["up"], "modules_to_save": ["down"]}
    model = convert(with_lora(mlp(), **fields), RECIPES["current"])
    trained = model.base_model.model.down.modules_to_save["default"]
    assert isinstance(trained, float8lab.Linear)
    assert not isinstance(trained.weight, Float8Tensor)
    original = model.base_model.model.down.original_module
    assert isinstance(original.weight, Float8Tensor)
    with float8lab.count_gemms() as counts:
        run(model, torch.randn(8, 64))
    name = "base_model.model.down.modules_to_save.default"
    assert counts.fp8_by_module == {name: 3, "base_model.model.up.base_layer": 2}
    assert trained.weight.grad.any()


@each_recipe
def test_gradient_checkpointing(recipe):
    def tune(reentrant):
        model = with_lora(convert(llama(), recipe)).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with float8lab.count_gemms() as counts:
            for _ in range(2):
                model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        return gradients(model), counts

    expected, _ = tune(None)
    assert expected.any()
    for reentrant in (False, True):
        found, counts = tune(reentrant)
        assert torch.equal(found, expected)
        assert counts.fp8 == 2 * 14 * 3  # forward, forward again, dx; twice


def test_compiled():
    model = with_lora(convert(mlp(), RECIPES["delayed"]))
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(16, 64)
        assert torch.equal(run(compiled, x), run(model, x))
        assert torch.equal(gradients(other), gradients(model))


def test_sharded():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model, whole = (with_lora(convert(mlp(), RECIPES["current"])) for _ in range(2))
        for layer in (model.base_model.model.up, model.base_model.model.down, model):
            fully_shard(layer, mesh=mesh)
        x = torch.randn(40, 64)
        torch.testing.assert_close(run(model, x), run(whole, x))
        trained = [p.grad.full_tensor() for p in model.parameters() if p.requires_grad]
        expected = [p.grad for p in whole.parameters() if p.requires_grad]
        torch.testing.assert_close(trained, expected)
        for layer in base_layers(model).values():
            assert isinstance(layer.weight.to_local(), Float8Tensor)
        # What is sharded cannot be stored anew.
        late = fully_shard(nn.Linear(64, 64), mesh=mesh)
        report = report_of(late, freeze_weights=True)
        assert "it is sharded; convert before sharding" in str(report)
    finally:
        dist.destroy_process_group()


OTHERS = {
    "IA3": {"feedforward_modules": ["down"]}, "LoHa": {"r": 4}, "Vera": {"r": 4},
    "OFT": {"oft_block_size": 16},
}  # fmt: skip


@pytest.mark.parametrize("method", OTHERS)
def test_other_methods(method):
    kind = getattr(peft, f"{method}Config")
    targets = ["up"] if method == "Vera" else ["up", "down"]
    config = kind(target_modules=targets, **OTHERS[method])
    model = peft.get_peft_model(convert(mlp(), RECIPES["block"]), config)
    with float8lab.count_gemms() as counts:
        dx = run(model, torch.randn(8, 64))
    assert counts.fp8 == 4
    assert dx.any()
    assert gradients(model).any()


def test_lora_of_a_module_built_in_fp8():
    with float8lab.fp8_model_init(recipe=RECIPES["block"]):
        base = nn.Sequential(float8lab.Linear(64, 48, device="cpu"))
    model = with_lora(base, target_modules=["0"])
    x = torch.randn(16, 64)
    with float8lab.count_gemms() as counts, float8lab.autocast(recipe=RECIPES["block"]):
        dx = run(model, x)
    assert counts.fp8_by_module == {"base_model.model.0.base_layer": 2}
    assert dx.any()
    assert isinstance(base[0].base_layer.weight, Float8Tensor)
    assert base[0].base_layer.weight.grad is None
