"""``convert_to_float8`` on Transformers' MoE models, which store experts in different layouts."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import float8lab
from float8lab import recipes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecation warnings of its dependencies
    pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    from float8lab.integrations.transformers import Float8Callback

from tests.integrations.transformers.models import MOE_FAMILIES, build, run_step
from tests.integrations.transformers.training import DELAYED, losses, same_state, trainer

BLOCK = recipes.Float8BlockScaling()


def experts_of(model: Any) -> tuple[str, Any]:
    report = float8lab.conversion_report(model)
    name = next(layer.name for layer in report.converted if len(layer.shape) == 3)
    return name, model.get_submodule(name)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_all_layers_but_routers_are_in_fp8(family: str) -> None:
    """In high precision the results are the model's; ``to_high_precision`` restores it exactly."""
    model, batch = build(family)
    original = copy.deepcopy(model)
    expected = run_step(original, batch)
    float8lab.convert_to_float8(model, strict=True)
    report = float8lab.conversion_report(model)
    assert {layer.note.split(",")[0] for layer in report.skipped} == {"a router"}
    assert any(len(layer.shape) == 3 for layer in report.converted)
    with float8lab.autocast(enabled=False):
        torch.testing.assert_close(run_step(model, batch), expected, rtol=1e-4, atol=1e-6)
    with float8lab.count_gemms() as counts:
        output = run_step(model, batch)
    name, experts = experts_of(model)
    assert counts.fp8_by_module[name] == 6
    assert 0 < (output[0] - expected[0]).norm() < 0.5 * expected[0].norm()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run_step(copied, batch)[0], output[0])
        assert type(copied.get_submodule(name)) is type(experts)
    float8lab.to_high_precision(model)
    assert type(experts) is type(original.get_submodule(name))
    assert vars(experts).keys() == vars(original.get_submodule(name)).keys()
    torch.testing.assert_close(run_step(model, batch), expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4", "dbrx"])
def test_experts_equal_those_of_the_library(family: str) -> None:
    """The outputs are bit-identical to those of the library's modules with the same weights."""
    torch.manual_seed(1)
    model, _ = build(family)
    _, experts = experts_of(float8lab.convert_to_float8(model, BLOCK))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    x = torch.randn(12, 48)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(12)])
    weights = torch.rand(12, 2)
    parameters = dict(experts.named_parameters())
    if family == "dbrx":
        w1, v1, w2 = (parameters[f"mlp.{key}"].view(4, 40, 48) for key in ("w1", "v1", "w2"))
        fc1, fc2 = torch.cat((w1, v1), 1), w2.mT
    else:
        fc1, fc2 = parameters["gate_up_proj"], parameters["down_proj"]
        if family != "mixtral":
            fc1, fc2 = fc1.mT, fc2.mT
    activation = "clamped_swiglu_interleaved" if family == "gpt_oss" else "swiglu"
    expert_mlp = float8lab.ExpertMLP(
        4, 48, fc2.shape[2], bias=family == "gpt_oss", activation=activation, device="cpu"
    )
    values = {"fc1_weight": fc1, "fc2_weight": fc2}
    if family == "gpt_oss":
        for layer, name in (("fc1", "gate_up"), ("fc2", "down")):
            values[f"{layer}_bias"] = parameters[f"{name}_proj_bias"]
    expert_mlp.load_state_dict(values)
    with float8lab.autocast(recipe=BLOCK):
        if family == "llama4":
            output, expected = experts(x), expert_mlp.run_rows(x, [3, 3, 3, 3])
        else:
            output, expected = experts(x, index, weights), expert_mlp(x, weights, index)
    assert torch.equal(output.view_as(expected), expected)


def test_the_trainer_learns_and_resumes_bit_for_bit(tmp_path, capsys) -> None:
    # The Trainer of Transformers cannot resume Mixtral and other models that save each expert
    # separately, not in high precision either.
    uninterrupted = trainer(tmp_path, 8, Float8Callback(DELAYED), build("gpt_oss")[0])
    uninterrupted.train()
    step_losses = losses(uninterrupted)
    assert step_losses[-1] < 0.9 * step_losses[0]
    resumed = trainer(tmp_path, 8, Float8Callback(DELAYED), build("gpt_oss")[0])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert same_state(resumed.model, uninterrupted.model)
    assert "a router, which stays in high precision" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "dbrx"])
def test_frozen_fp8_weights_give_the_same_output(family: str) -> None:
    model, batch = build(family)
    recipe = recipes.Float8RowwiseScaling()  # rows of [out, in], whatever the stored layout
    stored = float8lab.convert_to_float8(copy.deepcopy(model), recipe, freeze_weights=True)
    float8lab.convert_to_float8(model, recipe)
    assert torch.equal(stored(**batch).logits, model(**batch).logits)
    _, experts = experts_of(stored)
    kinds = {type(p) is float8lab.Float8Tensor for n, p in experts.named_parameters() if p.ndim > 2}
    notes = float8lab.conversion_report(stored).notes
    if family == "dbrx":
        assert any("experts: weight not stored in FP8" in note for note in notes)
    else:
        assert kinds == {True}
        assert not any(
            type(p) is float8lab.Float8Tensor for p in experts.parameters() if p.ndim < 3
        )


def test_an_fp8_checkpoint_of_experts_is_loaded_bit_for_bit(tmp_path) -> None:
    model, batch = build("mixtral", hidden_size=128, intermediate_size=128, head_dim=32)
    float8lab.convert_to_float8(model, BLOCK, freeze_weights=True, exclude=["lm_head"])
    float8lab.integrations.export(model, tmp_path / "model", "block-fp8")
    loaded, _ = build("mixtral", hidden_size=128, intermediate_size=128, head_dim=32)
    float8lab.integrations.load_fp8(tmp_path / "model", loaded)
    name, experts = experts_of(loaded)
    assert torch.equal(
        experts.gate_up_proj.qdata.view(torch.uint8),
        model.get_submodule(name).gate_up_proj.qdata.view(torch.uint8),
    )
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


WIDE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
"""Sizes that are multiples of 128x128 blocks."""


def weights_in_file(path: Path) -> set[str]:
    """The weights in a file, without their scales."""
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'inspect'")
    tensors = safetensors.load_file(path / "model.safetensors")
    return {name for name in tensors if not name.endswith(("_scale_inv", "_scale"))}


@pytest.mark.parametrize(
    ("family", "format"),
    [("mixtral", "block-fp8"), ("mixtral", "compressed-tensors"), ("olmoe", "block-fp8")],
)
def test_transformers_loads_the_experts_of_an_export(tmp_path, family, format) -> None:
    """The export uses the names that Transformers saves, and ``load_fp8`` reads them, too."""
    if format == "compressed-tensors":
        pytest.importorskip("compressed_tensors", reason="needs the extra 'dev'")
    model, _ = build(family, **WIDE)
    float8lab.convert_to_float8(model, BLOCK)
    report = float8lab.integrations.export(model, tmp_path / "fp8", format)
    assert report.reasons == {"lm_head.weight": "excluded by 'lm_head'"}
    read_by_transformers, info = type(model).from_pretrained(
        tmp_path / "fp8", output_loading_info=True
    )
    assert not any(info.values())
    dequantized, _ = build(family, **WIDE)
    float8lab.integrations.load_fp8(tmp_path / "fp8", dequantized, dequantize=True)
    for name, value in dequantized.state_dict().items():
        parameter = read_by_transformers.get_parameter(name)
        if parameter.dtype == torch.float8_e4m3fn:  # linear layers stay compressed
            # One block.
            parameter = parameter.float() * read_by_transformers.get_parameter(f"{name}_scale")
        assert torch.equal(parameter, value), name
    model.save_pretrained(tmp_path / "plain")
    assert weights_in_file(tmp_path / "fp8") == weights_in_file(tmp_path / "plain")


def test_experts_that_transformers_cannot_load_are_refused(tmp_path) -> None:
    """Granite's experts are saved as stacks, which Transformers does not read in FP8."""
    model, _ = build("granite_hybrid", **WIDE)
    float8lab.convert_to_float8(model, BLOCK, exclude=["lm_head"])
    for format in ("block-fp8", "compressed-tensors"):
        message = r"input_linear.weight. .*exclude=\['model.layers.0.block_sparse_moe.experts'\]"
        with pytest.raises(ValueError, match=message):
            float8lab.integrations.export(model, tmp_path / "deep" / "out", format)
        assert list(tmp_path.iterdir()) == []
    float8lab.integrations.export(model, tmp_path / "out", exclude=["lm_head", "*.experts"])
    _, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())


@pytest.mark.parametrize("recipe", [BLOCK, recipes.Float8RowwiseScaling()], ids=str)
@pytest.mark.parametrize("family", ["gpt_oss", "llama4", "granite_hybrid", "gpt2"])
def test_the_float8lab_format_round_trip_is_exact(tmp_path, family, recipe) -> None:
    """Experts with biases and transposed weights, too; other formats give reasons why they stay."""
    model, batch = build(family)
    float8lab.convert_to_float8(model, recipe, exclude=["lm_head"])
    model.eval()
    report = float8lab.integrations.export(model, tmp_path / "out", "float8lab")
    assert report.reasons == {}
    loaded, _ = build(family)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    load_report = float8lab.integrations.load_fp8(tmp_path / "out", loaded.eval())
    assert load_report.fp8.keys() == report.fp8.keys()
    assert load_report.notes == ()
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    if family == "granite_hybrid":
        return
    format = "block-fp8" if recipe == BLOCK else "compressed-tensors"
    if family == "gpt2":
        with pytest.raises(ValueError, match="model must have a linear layer"):
            float8lab.integrations.export(model, tmp_path / "theirs", format)
        return
    other_report = float8lab.integrations.export(model, tmp_path / "theirs", format)
    name = next(name for name in report.fp8 if name.endswith("gate_up_proj"))
    assert other_report.reasons.keys() == report.fp8.keys() - other_report.fp8.keys()
    reason = "have no biases" if family == "gpt_oss" else "and these are transposed"
    assert reason in other_report.reasons[name]
    assert f"{name}, " in str(other_report)


@pytest.mark.parametrize("family", ["gpt_oss", "dbrx"])
def test_the_float8lab_format_keeps_the_weights_of_delayed_scaling(tmp_path, family) -> None:
    """The weights of the export, put into the trained model, give its output."""
    model, batch = build(family)
    float8lab.convert_to_float8(model, DELAYED, exclude=["lm_head"])
    run_step(model, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # delayed scales do not see this change yet
    model.eval()
    expected = model(**batch).logits
    report = float8lab.integrations.export(model, tmp_path / "out", "float8lab")
    assert sum("experts" in name for name in report.fp8) == (4 if family == "gpt_oss" else 6)
    assert report.reasons == {}
    loaded, _ = build(family)
    float8lab.integrations.load_fp8(tmp_path / "out", loaded, dequantize=True)
    assert not torch.equal(loaded.eval()(**batch).logits, expected)
    stored, _ = build(family)
    float8lab.integrations.load_fp8(tmp_path / "out", stored)
    for name in report.fp8:
        module, _, parameter_name = name.rpartition(".")
        value = stored.get_parameter(name) if family == "gpt_oss" else loaded.get_parameter(name)
        setattr(model.get_submodule(module), parameter_name, value)
    output = model(**batch).logits
    # The FP8 data is equal. GEMMs of transposed weights may sum in another order.
    rounding = torch.finfo(torch.float32).eps * float(expected.detach().abs().max())
    torch.testing.assert_close(output, expected, rtol=0, atol=16 * rounding)


def test_loading_notes_which_experts_have_no_recipe() -> None:
    """Gate and up have a scale each, and no recipe has the blocks of the two joined."""
    model, _ = build("olmoe")
    prefix = "model.layers.0.mlp.experts"
    state = {n: v for n, v in model.state_dict().items() if not n.startswith(prefix)}
    for name, value in model.get_submodule(prefix).named_parameters():
        for e, stacked in enumerate(value.detach().unbind()):
            kinds = ("gate", "up") if "gate" in name else ("down",)
            for kind, part in zip(kinds, stacked.chunk(len(kinds)), strict=True):
                stored = float8lab.quantize(part)
                state[f"{prefix}.{e}.{kind}_proj.weight"] = stored.qdata
                state[f"{prefix}.{e}.{kind}_proj.weight_scale"] = stored.scale
    report = float8lab.integrations.load_fp8(state, model)
    assert report.fp8[f"{prefix}.gate_up_proj"] == "e4m3 1x80xall fp32"
    (note,) = report.notes
    assert note == f"{prefix} runs without a recipe: none has the blocks of all its experts"


def test_the_report_after_loading_gives_reasons_for_skipped_layers(tmp_path) -> None:
    model, _ = build("mixtral", **WIDE)
    float8lab.convert_to_float8(model, BLOCK)
    float8lab.integrations.export(model, tmp_path / "out", exclude=["lm_head", "*.q_proj"])
    loaded, _ = build("mixtral", **WIDE)
    float8lab.integrations.load_fp8(tmp_path / "out", loaded)
    report = float8lab.conversion_report(loaded)
    notes = {layer.name.rpartition(".")[2]: layer.note for layer in report.skipped}
    router = "a router, which stays in high precision"
    in_checkpoint = "in high precision in the checkpoint"
    assert notes == {"gate": router, "q_proj": in_checkpoint, "lm_head": in_checkpoint}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_on_parameters_of_experts_trains_only_the_adapters() -> None:
    """PEFT adds the LoRA GEMM to the stacked weights while the experts run."""
    peft = pytest.importorskip("peft", reason="needs the extra 'peft'")
    model, batch = build("mixtral")
    config = peft.LoraConfig(
        r=2, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    adapted = float8lab.convert_to_float8(peft.get_peft_model(model, config))
    name, _ = experts_of(adapted)
    with float8lab.count_gemms() as counts:
        _, gradients = run_step(adapted, batch)
    assert counts.fp8_by_module[name] > 0
    trained = {n for n, p in adapted.named_parameters() if p.grad is not None}
    assert trained
    assert all("lora_" in n for n in trained)
    assert gradients.isfinite().all()
    assert gradients.any()
