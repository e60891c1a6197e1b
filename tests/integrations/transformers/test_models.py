"""convert_to_float8 on Hugging Face models: numbers, generation, saving, recomputation, graphs."""

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
    warnings.simplefilter("ignore")  # what its dependencies are deprecated for
    transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    from transformers.pytorch_utils import Conv1D

    from float8lab.integrations.transformers import Float8Conv1D

from tests.integrations.transformers.models import FAMILIES, build, emulated, run
from tests.nn.models import report_of
from tests.same_bytes import assert_same_state

DELAYED = recipes.DelayedScaling(
    amax_history_len=8, amax_compute_algo="max", power_of_2_scale=False
)


def converted_names(report: Any) -> list[str]:
    return [layer.name for layer in report.converted]


def record_calls(model: Any, names: list[str]) -> dict[str, list[torch.Tensor]]:
    """Filled by a step: a layer's input, output and gradient of its output."""
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
def test_runs_as_rounding_to_fp8_says(family: str) -> None:
    """Against FP8 in plain PyTorch, by the error that FP8 makes in the original model.

    Both round the same numbers but for the order of float32 sums, by which now and then a number is
    rounded the other way: one of a thousand moves the error by a tenth. A layer left in high
    precision, or in another format, moves it more. Not on a GPU: noise of 1e-4 in each product,
    which is what FP8 tensor cores add, grows from rounding to rounding to 0.5 to 0.9 of the error.
    """
    model, batch = build(family)
    original = copy.deepcopy(model)
    report = report_of(model)
    twin = emulated(original, converted_names(report))
    with float8lab.count_gemms() as counts:
        found = run(model, batch)
    # Nothing asks for the gradient of pixels or a spectrum, so the first layers may have no dgrad.
    products = sum(2 if len(layer.shape) == 3 else 1 for layer in report.converted)
    assert 3 * products >= counts.fp8 >= 2 * products
    for got, wanted, high in zip(found, run(twin, batch), run(original, batch), strict=True):
        error = (wanted - high).norm()
        assert 0.01 * high.norm() < error < 0.25 * high.norm()
        assert (got - wanted).norm() < 0.05 * error


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_rounds_as_fp8_says(family: str, device: torch.device) -> None:
    """Within the model, against FP8 in plain PyTorch on the same input and output gradient.

    What rounds is the same to the bit, so what is left is the precision of the products' sums.
    """
    model, batch = build(family)
    model, batch = model.to(device), {name: value.to(device) for name, value in batch.items()}
    original = copy.deepcopy(model)
    report = report_of(model)
    names = [layer.name for layer in report.converted if len(layer.shape) == 2]
    calls = record_calls(model, names)
    model(**batch).loss.backward()
    assert sorted(calls) == sorted(names)  # each once
    uses = Counter(id(model.get_submodule(name).weight) for name in names)
    uses.update(id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding))
    twin = emulated(original, names)
    bound = 1e-5 if device.type == "cpu" else 1e-3
    for name, (x, y, dy) in calls.items():
        layer, reference = model.get_submodule(name), twin.get_submodule(name)
        x = x.detach().requires_grad_()
        wanted = reference(x)
        (dx,) = torch.autograd.grad(layer.forward(x), x, dy)  # past the hook
        wanted.backward(dy)
        pairs = {"y": (y, wanted), "dx": (dx, x.grad)}
        if layer.bias is not None:  # softmax makes that of keys 0, so by the size of what is summed
            db = layer.bias.grad - reference.bias.grad
            assert db.norm() < 1e-5 * dy.abs().flatten(0, -2).sum(0).norm(), f"db of {name}"
        if uses[id(layer.weight)] == 1:  # else the gradient is a sum over those who share it
            pairs["dw"] = (layer.weight.grad, reference.weight.grad)
        for what, (got, expected) in pairs.items():
            assert (got - expected).norm() < bound * expected.norm(), f"{what} of {name}"


def test_the_report_says_what_is_not_in_fp8() -> None:
    report = report_of(build("qwen3_moe")[0])
    assert {layer.name: layer.note for layer in report.skipped} == {
        "model.layers.0.mlp.gate": "a router, which stays in high precision"
    }
    report = report_of(build("qwen2_moe")[0], exclude=["gate", "experts"])
    assert {layer.name.split(".", 3)[-1] for layer in report.skipped} == {"mlp.gate", "mlp.experts"}
    assert all(layer.note.startswith("excluded") for layer in report.skipped)


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.endswith("moe")])
def test_all_of_other_models_is_in_fp8(family: str) -> None:
    """No weight of two dimensions or more is left, but of embeddings and convolutions."""
    model, _ = build(family)
    report = report_of(model, strict=True)
    assert not report.skipped
    in_fp8 = {id(model.get_submodule(name).weight) for name in converted_names(report)}
    left = {
        type(module)
        for module in model.modules()
        if (weight := getattr(module, "weight", None)) is not None
        and weight.ndim > 1
        and id(weight) not in in_fp8
    }
    assert all(issubclass(cls, (nn.Embedding, nn.Conv1d, nn.Conv2d)) for cls in left)


def test_conv1d_stays_what_it_is() -> None:
    model, batch = build("gpt2")
    before = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    float8lab.convert_to_float8(model)
    layer = model.transformer.h[0].mlp.c_fc
    assert type(layer) is Float8Conv1D
    assert isinstance(layer, Conv1D)  # which PEFT asks for
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
def test_conv1d_without_features(out_features: int, in_features: int) -> None:
    model = float8lab.convert_to_float8(nn.Sequential(Conv1D(out_features, in_features)))
    x = torch.ones(3, in_features, requires_grad=True)
    y = model(x)
    assert torch.equal(y, torch.zeros(3, out_features))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert all(p.grad.shape == p.shape for p in model.parameters())


def test_conv1d_stays_in_high_precision_in_an_export(tmp_path: Path) -> None:
    """Readers have no FP8 form of it: their block FP8 is that of torch.nn.Linear."""
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
    ("family", "how"),
    [("llama", "greedy"), ("llama", "beams"), ("llama", "sampling"), ("gpt2", "sampling"),
     ("t5", "beams"), ("whisper", "greedy"), ("qwen3_moe", "greedy")],
)  # fmt: skip
def test_generates_what_rounding_to_fp8_does(family: str, how: str) -> None:
    """With a cache of keys and values, token by token, as the emulation in plain PyTorch."""
    model, batch = build(family)
    with torch.no_grad():
        for parameter in model.parameters():  # random models hardly tell one token from another
            if parameter.ndim > 1:
                parameter.mul_(4)
    report = report_of(model.eval())
    plain = float8lab.to_high_precision(copy.deepcopy(model))
    twin = emulated(plain, converted_names(report))
    batch = {name: value for name, value in batch.items() if name != "labels"}
    found = []
    for each in (model, twin):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice about generation configs
            found.append(
                each.generate(**batch, max_new_tokens=8, min_new_tokens=8, **GENERATE[how])
            )
    assert found[0].shape[1] >= 8
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # since 5.24
def test_a_cache_changes_nothing_where_each_token_has_its_own_scale() -> None:
    model, batch = build("llama")
    float8lab.convert_to_float8(model.eval(), recipes.Float8RowwiseScaling())
    tokens = batch["input_ids"]
    with torch.no_grad():
        whole = model(tokens).logits
        first = model(tokens[:, :5], use_cache=True)
        rest = model(tokens[:, 5:], past_key_values=first.past_key_values).logits
    parts = torch.cat([first.logits, rest], dim=1)
    # What differs is the order of float32 sums, which FP8 may amplify to one rounding.
    assert (parts - whole).norm() < 1e-3 * whole.norm()


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "bert", "qwen3_moe"])
def test_saves_what_the_plain_model_saves(family: str, tmp_path: Path) -> None:
    model, batch = build(family)
    float8lab.convert_to_float8(model, DELAYED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(model, batch)
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

    float8lab.convert_to_float8(loaded)  # and is converted like any other
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
    """Over steps whose delayed scales depend on those before.

    Not T5, whose last bits recomputation changes in high precision, too.
    """
    found = []
    for recomputes in (False, True):
        model, batch = build(family)
        float8lab.convert_to_float8(model, DELAYED)
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        steps = []
        with float8lab.count_gemms() as counts:
            for _ in range(3):
                steps += run(model, batch)
                optimizer.step()
        found.append((steps, counts.fp8))
    (plain, gemms), (recomputed, more) = found
    assert more > gemms
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_compiles_without_a_break(family: str) -> None:
    model, batch = build(family, num_hidden_layers=1)
    float8lab.convert_to_float8(model, DELAYED)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(run(compiled, batch), run(eager, batch), rtol=0, atol=0)
