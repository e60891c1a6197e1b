"""LoRA of stock PEFT on an FP8 base: GEMMs, memory, gradients and other features of PEFT."""

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

# PEFT calls transformers by old names.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.(is_)?gradient_checkpointing(_enable)?. is deprecated:FutureWarning"
)

each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def input_gradient(model, x):
    """Run forward, and backward with a gradient that does not depend on the output; return dx."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y))
    return x.grad


@each_recipe
@pytest.mark.parametrize("freeze", [True, False], ids=["FP8 weights", "converted"])
def test_frozen_weights_take_two_gemms_and_save_no_input(device, recipe, freeze):
    model = with_lora(convert(mlp().to(device), recipe, freeze=freeze))
    x = torch.randn(40, 64, device=device)
    with float8lab.count_gemms() as counts:
        input_gradient(model, x)
    prefix = "base_model.model"
    assert counts.fp8_by_module == {f"{prefix}.{name}.base_layer": 2 for name in ("up", "down")}
    high_precision = counts.high_precision_by_module
    assert {name.removeprefix(f"{prefix}."): count for name, count in high_precision.items()} == {
        **{f"{name}.lora_{part}.default": 3 for name in ("up", "down") for part in "AB"},
        "head": 2,
    }
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    # Nothing as large as the input is saved for backward. A weight that is not stored in FP8 saves
    # the scales that cast it again to the same bytes.
    x.requires_grad_()
    report = memory_report(model, x)
    activations = {r.name: r.activations for r in report.layers if r.name.endswith("base_layer")}
    scales = 2048  # an upper bound: a scale per tensor, or the minimum of a CUDA allocation
    for name in base_layers(model):
        assert activations[f"{name}.base_layer"] <= (0 if freeze else scales)


@each_recipe
def test_a_frozen_weight_takes_one_byte_per_element(recipe):
    model = with_lora(convert(llama(dtype=torch.bfloat16), recipe))
    layers = [m for m in model.modules() if isinstance(m, float8lab.Linear)]
    assert len(layers) == 14
    for layer in layers:
        weight, block = layer.weight, recipe.linear.w.block
        assert weight.qdata.untyped_storage().nbytes() == weight.numel()
        blocks = [
            1 if b == -1 else -(-size // b) for size, b in zip(weight.shape, block, strict=True)
        ]
        # Each block also has a scale and an amax in float32.
        assert weight.scale.nbytes + weight.amax.nbytes == 8 * blocks[0] * blocks[1]
        assert not weight.requires_grad
    rows = memory_report(model).layers
    adapters = sum(row.weights for row in rows if ".lora_" in row.name)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    assert not any(isinstance(p, Float8Tensor) for p in trained)
    assert adapters == sum(p.nbytes for p in trained)
    base = sum(row.weights for row in rows if ".lora_" not in row.name)
    plain_bytes = sum(p.nbytes for p in llama(dtype=torch.bfloat16).parameters())
    saved_bytes = sum(layer.weight.numel() for layer in layers)
    assert base == plain_bytes - saved_bytes  # each element had two bytes


def squared_rounding_error(fp8_dtype):
    """The squared relative error of a cast: at most half a unit in the last place, uniform."""
    half_step = 2.0**-4 if fp8_dtype == E4M3 else 2.0**-3
    return half_step**2 / 3


@each_recipe
@pytest.mark.parametrize("freeze", [True, False], ids=["FP8 weights", "converted"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"use_rslora": True}, {"use_dora": True}, {"use_dora": True, "lora_dropout": 0.25}],
    ids=["lora", "rslora", "dora", "dora with dropout"],
)
def test_gradients_are_close_to_those_of_high_precision(device, recipe, freeze, fields):
    x = torch.randn(256, 64, device=device)

    def dx_and_gradients(recipe):
        model = with_lora(convert(mlp().to(device), recipe, freeze=freeze), **fields)
        torch.manual_seed(3)  # seeds dropout
        return input_gradient(model, x), gradients(model)

    # DoRA's norm of W + BA needs W in high precision, on any base.
    with float8lab.fallback("silent" if "use_dora" in fields else "error"):
        dx, adapters = dx_and_gradients(recipe)
    dx_high, adapters_high = dx_and_gradients(None)
    # In each of the two layers fprop casts x and w, and dgrad casts dy and w. Independent errors of
    # relative size e turn a vector by an angle of cosine 1 - e^2 / 2.
    plan = recipe.linear
    casts = [plan.x, plan.w, plan.dy, plan.w]
    error = 2 * sum(squared_rounding_error(spec.fp8_dtype) for spec in casts)
    assert cosine(dx, dx_high) > 1 - error / 2
    assert cosine(adapters, adapters_high) > 1 - error / 2
    assert not torch.equal(dx, dx_high)


@each_recipe
def test_gradients_of_a_llama_are_close_to_those_of_high_precision(recipe):
    """Measured: 0.9927, 0.9924, 0.9986, 0.9982; with adapters on a bfloat16 base, 0.9999."""

    def dx_and_gradients(recipe):
        model = with_lora(convert(llama(), recipe))
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        return gradients(model)

    assert cosine(dx_and_gradients(recipe), dx_and_gradients(None)) > 0.99


@pytest.mark.parametrize("freeze", [True, False], ids=["FP8 weights", "converted"])
@each_recipe
def test_converting_before_or_after_peft_gives_equal_models(recipe, freeze):
    converted_first = with_lora(convert(mlp(), recipe, freeze=freeze), modules_to_save=["head"])
    converted_last = convert(with_lora(mlp(), modules_to_save=["head"]), recipe, freeze=freeze)
    x = torch.randn(2, 24, 64)
    for _ in range(3):  # delayed scales advance equally
        assert torch.equal(
            input_gradient(converted_first, x[0]), input_gradient(converted_last, x[0])
        )
        assert torch.equal(gradients(converted_first), gradients(converted_last))
    for model in (converted_first, converted_last):
        for name, module in model.named_modules():
            if "lora_" in name or "head" in name:
                assert not isinstance(module, float8lab.Linear), name
        requires_grad = {n: p.requires_grad for n, p in model.named_parameters()}
        assert {n for n, trained in requires_grad.items() if trained} == {
            n for n in requires_grad if "lora_" in n or "modules_to_save" in n
        }


def test_adapters_run_in_fp8_if_overrides_name_them():
    model = with_lora(mlp())
    report = report_of(
        model, overrides={"lora_A": recipes.Float8BlockScaling()}, freeze_weights=False
    )
    assert "lora_B" in str([layer.name for layer in report.skipped])
    with float8lab.count_gemms() as counts:
        input_gradient(model, torch.randn(8, 64))
    assert counts.fp8_by_module["base_model.model.up.lora_A.default"] == 3


def test_modules_to_save_run_in_fp8_and_are_not_frozen():
    fields = {"target_modules": ["up"], "modules_to_save": ["down"]}
    model = convert(with_lora(mlp(), **fields), RECIPES["current"])
    trained = model.base_model.model.down.modules_to_save["default"]
    assert isinstance(trained, float8lab.Linear)
    assert not isinstance(trained.weight, Float8Tensor)
    original = model.base_model.model.down.original_module
    assert isinstance(original.weight, Float8Tensor)
    with float8lab.count_gemms() as counts:
        input_gradient(model, torch.randn(8, 64))
    name = "base_model.model.down.modules_to_save.default"
    assert counts.fp8_by_module == {name: 3, "base_model.model.up.base_layer": 2}
    assert trained.weight.grad.any()


@each_recipe
def test_gradient_checkpointing_changes_no_gradient(recipe):
    def dx_and_gradients(reentrant):
        model = with_lora(convert(llama(), recipe)).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with float8lab.count_gemms() as counts:
            for _ in range(2):
                model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        return gradients(model), counts

    expected, _ = dx_and_gradients(None)
    assert expected.any()
    for reentrant in (False, True):
        recomputed, counts = dx_and_gradients(reentrant)
        assert torch.equal(recomputed, expected)
        assert counts.fp8 == 2 * 14 * 3  # forward, recomputed forward and dx, twice


def test_a_compiled_model_has_the_eager_gradients():
    model = with_lora(convert(mlp(), RECIPES["delayed"]))
    copied = copy.deepcopy(model)
    compiled = torch.compile(copied, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(16, 64)
        assert torch.equal(input_gradient(compiled, x), input_gradient(model, x))
        assert torch.equal(gradients(copied), gradients(model))


def test_a_sharded_model_has_the_unsharded_gradients():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model, unsharded = (with_lora(convert(mlp(), RECIPES["current"])) for _ in range(2))
        for layer in (model.base_model.model.up, model.base_model.model.down, model):
            fully_shard(layer, mesh=mesh)
        x = torch.randn(40, 64)
        torch.testing.assert_close(input_gradient(model, x), input_gradient(unsharded, x))
        trained = [p.grad.full_tensor() for p in model.parameters() if p.requires_grad]
        expected = [p.grad for p in unsharded.parameters() if p.requires_grad]
        torch.testing.assert_close(trained, expected)
        for layer in base_layers(model).values():
            assert isinstance(layer.weight.to_local(), Float8Tensor)
        # Sharded weights cannot be stored in FP8 afterwards.
        sharded_layer = fully_shard(nn.Linear(64, 64), mesh=mesh)
        report = report_of(sharded_layer, freeze_weights=True)
        assert "it is sharded; convert before sharding" in str(report)
    finally:
        dist.destroy_process_group()


OTHER_METHODS = {
    "IA3": {"feedforward_modules": ["down"]}, "LoHa": {"r": 4}, "Vera": {"r": 4},
    "OFT": {"oft_block_size": 16},
}  # fmt: skip


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_other_peft_methods_train_on_an_fp8_base(method):
    kind = getattr(peft, f"{method}Config")
    targets = ["up"] if method == "Vera" else ["up", "down"]
    config = kind(target_modules=targets, **OTHER_METHODS[method])
    model = peft.get_peft_model(convert(mlp(), RECIPES["block"]), config)
    with float8lab.count_gemms() as counts:
        dx = input_gradient(model, torch.randn(8, 64))
    assert counts.fp8 == 4
    assert dx.any()
    assert gradients(model).any()


def test_lora_on_a_module_built_in_fp8():
    with float8lab.fp8_model_init(recipe=RECIPES["block"]):
        base = nn.Sequential(float8lab.Linear(64, 48, device="cpu"))
    model = with_lora(base, target_modules=["0"])
    x = torch.randn(16, 64)
    with float8lab.count_gemms() as counts, float8lab.autocast(recipe=RECIPES["block"]):
        dx = input_gradient(model, x)
    assert counts.fp8_by_module == {"base_model.model.0.base_layer": 2}
    assert dx.any()
    assert isinstance(base[0].base_layer.weight, Float8Tensor)
    assert base[0].base_layer.weight.grad is None
