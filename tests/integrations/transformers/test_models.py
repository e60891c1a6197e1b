"""``convert_to_float8`` on Hugging Face models: steps, generation, files, recompute and graphs."""

import copy
import pickle
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import float8lab
from float8lab import recipes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecation warnings of its dependencies
    transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    from transformers.pytorch_utils import Conv1D

    from float8lab.integrations.transformers import Float8Conv1D

from tests.integrations.transformers.models import FAMILIES, build, emulate_fp8, run_step
from tests.nn.models import report_of
from tests.same_bytes import assert_same_state

DELAYED = recipes.DelayedScaling(
    amax_history_len=8, amax_compute_algo="max", power_of_2_scale=False
)


def converted_names(report: Any) -> list[str]:
    return [layer.name for layer in report.converted]


def record_calls(model: Any, names: list[str]) -> dict[str, list[torch.Tensor]]:
    """Return a dict which a step fills with the input, output and output gradient of each layer."""
    calls: dict[str, list[torch.Tensor]] = {}

    def record(name: str, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        assert name not in calls
        calls[name] = [inputs[0].detach(), output.detach()]
        output.register_hook(calls[name].append)

    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: record(name, inputs, output)
        )
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_matches_emulated_fp8(family: str) -> None:
    """Compare with FP8 in plain PyTorch, relative to the error of FP8 against the original model.

    Both round the same values except for the order of float32 sums, by which some values are
    rounded the other way: one in a thousand changes the error by a tenth. A layer left in high
    precision, or in another format, changes it more. This test is not for GPUs: FP8 tensor cores
    add noise of 1e-4 to each GEMM, which grows with each rounding to 0.5 to 0.9 of the error.
    """
    model, batch = build(family)
    original = copy.deepcopy(model)
    report = report_of(model)
    emulated = emulate_fp8(original, converted_names(report))
    with float8lab.count_gemms() as counts:
        results = run_step(model, batch)
    # The gradient of pixels or a spectrum is not needed, so the first layers may have no dgrad.
    weights = sum(2 if len(layer.shape) == 3 else 1 for layer in report.converted)
    assert 3 * weights >= counts.fp8 >= 2 * weights
    for value, expected, high_precision in zip(
        results, run_step(emulated, batch), run_step(original, batch), strict=True
    ):
        error = (expected - high_precision).norm()
        assert 0.01 * high_precision.norm() < error < 0.25 * high_precision.norm()
        assert (value - expected).norm() < 0.05 * error


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_matches_emulated_fp8(family: str, device: torch.device) -> None:
    """Compare each layer with FP8 in plain PyTorch on the same input and output gradient.

    The rounded operands are bit-identical, so the remaining difference is the precision of the
    sums.
    """
    model, batch = build(family)
    model, batch = model.to(device), {name: value.to(device) for name, value in batch.items()}
    original = copy.deepcopy(model)
    report = report_of(model)
    names = [layer.name for layer in report.converted if len(layer.shape) == 2]
    calls = record_calls(model, names)
    model(**batch).loss.backward()
    assert sorted(calls) == sorted(names)  # each layer is called once
    uses = Counter(id(model.get_submodule(name).weight) for name in names)
    uses.update(id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding))
    emulated = emulate_fp8(original, names)
    bound = 1e-5 if device.type == "cpu" else 1e-3
    for name, (x, y, dy) in calls.items():
        layer, reference = model.get_submodule(name), emulated.get_submodule(name)
        x = x.detach().requires_grad_()
        reference_y = reference(x)
        (dx,) = torch.autograd.grad(layer.forward(x), x, dy)  # without the hook
        reference_y.backward(dy)
        pairs = {"y": (y, reference_y), "dx": (dx, x.grad)}
        # softmax makes the bias gradient of keys 0, so the bound is by the size of the summands.
        if layer.bias is not None:
            db = layer.bias.grad - reference.bias.grad
            assert db.norm() < 1e-5 * dy.abs().flatten(0, -2).sum(0).norm(), f"db of {name}"
        # Else the gradient is a sum over the layers that share the weight.
        if uses[id(layer.weight)] == 1:
            pairs["dw"] = (layer.weight.grad, reference.weight.grad)
        for quantity, (value, expected) in pairs.items():
            assert (value - expected).norm() < bound * expected.norm(), f"{quantity} of {name}"


def test_the_report_gives_reasons_for_skipped_layers() -> None:
    report = report_of(build("qwen3_moe")[0])
    assert {layer.name: layer.note for layer in report.skipped} == {
        "model.layers.0.mlp.gate": "a router, which stays in high precision"
    }
    report = report_of(build("qwen2_moe")[0], exclude=["gate", "experts"])
    assert {layer.name.split(".", 3)[-1] for layer in report.skipped} == {"mlp.gate", "mlp.experts"}
    assert all(layer.note.startswith("excluded") for layer in report.skipped)


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.endswith("moe")])
def test_all_linear_layers_of_other_models_are_in_fp8(family: str) -> None:
    """Only embeddings and convolutions keep weights of two dimensions or more in high precision."""
    model, _ = build(family)
    report = report_of(model, strict=True)
    assert not report.skipped
    in_fp8 = {id(model.get_submodule(name).weight) for name in converted_names(report)}
    other_types = {
        type(module)
        for module in model.modules()
        if (weight := getattr(module, "weight", None)) is not None
        and weight.ndim > 1
        and id(weight) not in in_fp8
    }
    assert all(issubclass(cls, (nn.Embedding, nn.Conv1d, nn.Conv2d)) for cls in other_types)


def test_a_converted_conv1d_stays_a_conv1d() -> None:
    model, batch = build("gpt2")
    before = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    float8lab.convert_to_float8(model)
    layer = model.transformer.h[0].mlp.c_fc
    assert type(layer) is Float8Conv1D
    assert isinstance(layer, Conv1D)  # PEFT checks for this class
    assert layer.weight.shape == (48, 192)
    assert (layer.in_features, layer.out_features) == (48, 192)
    assert repr(layer) == "Conv1D(nf=192, nx=48, recipe=Float8CurrentScaling())"
    assert all(p is parameters[n] for n, p in model.named_parameters())
    y = model.eval()(**batch).logits
    assert torch.equal(pickle.loads(pickle.dumps(model))(**batch).logits, y)
    with float8lab.autocast(enabled=False):
        assert torch.equal(model(**batch).logits, before(**batch).logits)
    float8lab.to_high_precision(model)
    assert type(layer) is Conv1D
    assert torch.equal(model(**batch).logits, before(**batch).logits)


@pytest.mark.parametrize(("out_features", "in_features"), [(0, 16), (16, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")
def test_conv1d_without_features_has_zero_outputs_and_gradients(
    out_features: int, in_features: int
) -> None:
    model = float8lab.convert_to_float8(nn.Sequential(Conv1D(out_features, in_features)))
    x = torch.ones(3, in_features, requires_grad=True)
    y = model(x)
    assert torch.equal(y, torch.zeros(3, out_features))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert all(p.grad.shape == p.shape for p in model.parameters())


def test_conv1d_stays_in_high_precision_in_an_export(tmp_path: Path) -> None:
    """Readers have no FP8 form of Conv1D: their block FP8 is for torch.nn.Linear."""
    model, _ = build("gpt2")
    model.lm_head = nn.Linear(48, 64, bias=False)
    float8lab.convert_to_float8(model)
    report = float8lab.integrations.export(model, tmp_path / "out", exclude=[])
    assert list(report.fp8) == ["lm_head.weight"]
    float8lab.to_high_precision(model)
    report = float8lab.integrations.export(model, tmp_path / "plain", exclude=[])
    assert list(report.fp8) == ["lm_head.weight"]


GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
}


@pytest.mark.parametrize(
    ("family", "strategy"),
    [("llama", "greedy"), ("llama", "beams"), ("llama", "sampling"), ("gpt2", "sampling"),
     ("t5", "beams"), ("whisper", "greedy"), ("qwen3_moe", "greedy")],
)  # fmt: skip
def test_generation_matches_emulated_fp8(family: str, strategy: str) -> None:
    """Generation with a key/value cache gives the tokens of the emulation in plain PyTorch."""
    model, batch = build(family)
    with torch.no_grad():
        # The logits of random models are nearly equal for all tokens.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    report = report_of(model.eval())
    plain = float8lab.to_high_precision(copy.deepcopy(model))
    emulated = emulate_fp8(plain, converted_names(report))
    batch = {name: value for name, value in batch.items() if name != "labels"}
    generated = []
    for generator in (model, emulated):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice about generation configs
            generated.append(
                generator.generate(
                    **batch, max_new_tokens=8, min_new_tokens=8, **GENERATE[strategy]
                )
            )
    assert generated[0].shape[1] >= 8
    assert torch.equal(*generated)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # since 5.24
def test_a_cache_changes_nothing_if_each_token_has_its_own_scale() -> None:
    model, batch = build("llama")
    float8lab.convert_to_float8(model.eval(), recipes.Float8RowwiseScaling())
    tokens = batch["input_ids"]
    with torch.no_grad():
        uncached = model(tokens).logits
        first = model(tokens[:, :5], use_cache=True)
        last_logits = model(tokens[:, 5:], past_key_values=first.past_key_values).logits
    cached = torch.cat([first.logits, last_logits], dim=1)
    # The order of float32 sums differs, which FP8 may amplify to a step of one rounding.
    assert (cached - uncached).norm() < 1e-3 * uncached.norm()


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "bert", "qwen3_moe"])
def test_a_converted_model_saves_the_files_of_the_plain_model(family: str, tmp_path: Path) -> None:
    model, batch = build(family)
    float8lab.convert_to_float8(model, DELAYED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run_step(model, batch)
    optimizer.step()
    model.eval()
    model.save_pretrained(tmp_path / "fp8")
    loaded, info = type(model).from_pretrained(tmp_path / "fp8", output_loading_info=True)
    assert not any(info.values())
    assert not any(isinstance(m, (float8lab.Linear, Float8Conv1D)) for m in loaded.modules())
    assert_same_state(loaded.state_dict(), model.state_dict())
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight)
    assert tied == (family != "qwen3_moe")

    plain = float8lab.to_high_precision(copy.deepcopy(model))
    plain.save_pretrained(tmp_path / "plain")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "fp8" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()

    float8lab.convert_to_float8(loaded)  # a loaded model can be converted as any other
    float8lab.convert_to_float8(model)
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("family", "reentrant"),
    [
        ("llama", False), ("llama", True), ("gpt2", False), ("bert", False), ("vit", False),
        ("qwen3_moe", False),
    ],
)  # fmt: skip
def test_gradient_checkpointing_changes_no_bit(family: str, reentrant: bool) -> None:
    """Several steps, whose delayed scales depend on earlier steps.

    Without T5: recompute changes its last bits in high precision, too.
    """
    runs = []
    for checkpointing in (False, True):
        model, batch = build(family)
        float8lab.convert_to_float8(model, DELAYED)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        steps = []
        with float8lab.count_gemms() as counts:
            for _ in range(3):
                steps += run_step(model, batch)
                optimizer.step()
        runs.append((steps, counts.fp8))
    (plain, gemms), (recomputed, gemms_with_recompute) = runs
    assert gemms_with_recompute > gemms
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


# Qwen3-MoE has the layers of Llama, except its MLP, so Llama is slow.
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "qwen3_moe"])
def test_models_compile_without_a_graph_break(family: str) -> None:
    model, batch = build(family, num_hidden_layers=1)
    float8lab.convert_to_float8(model, DELAYED)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(
            run_step(compiled, batch), run_step(eager, batch), rtol=0, atol=0
        )
