"""convert_to_float8 on Transformers' mixtures of experts, whose experts lie in different ways."""

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
    warnings.simplefilter("ignore")  # what its dependencies are deprecated for
    pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    from float8lab.integrations.transformers import Float8Callback

from tests.integrations.transformers.models import MIXTURES, build, run
from tests.integrations.transformers.training import DELAYED, losses, same, trainer

BLOCK = recipes.Float8BlockScaling()


def experts_of(model: Any) -> tuple[str, Any]:
    report = float8lab.conversion_report(model)
    name = next(layer.name for layer in report.converted if len(layer.shape) == 3)
    return name, model.get_submodule(name)


@pytest.mark.parametrize("family", MIXTURES)
def test_all_but_routers_is_in_fp8(family: str) -> None:
    """In high precision the numbers are the model's own; undone, to the bit."""
    model, batch = build(family)
    original = copy.deepcopy(model)
    want = run(original, batch)
    float8lab.convert_to_float8(model, strict=True)
    report = float8lab.conversion_report(model)
    assert {layer.note.split(",")[0] for layer in report.skipped} == {"a router"}
    assert any(len(layer.shape) == 3 for layer in report.converted)
    with float8lab.autocast(enabled=False):
        torch.testing.assert_close(run(model, batch), want, rtol=1e-4, atol=1e-6)
    with float8lab.count_gemms() as counts:
        got = run(model, batch)
    name, experts = experts_of(model)
    assert counts.fp8_by_module[name] == 6
    assert 0 < (got[0] - want[0]).norm() < 0.5 * want[0].norm()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other, batch)[0], got[0])
        assert type(other.get_submodule(name)) is type(experts)
    float8lab.to_high_precision(model)
    assert type(experts) is type(original.get_submodule(name))
    assert vars(experts).keys() == vars(original.get_submodule(name)).keys()
    torch.testing.assert_close(run(model, batch), want, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4", "dbrx"])
def test_experts_are_grouped_layers(family: str) -> None:
    """To the bit those of the library's own modules with the same weights."""
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
    own = float8lab.ExpertMLP(
        4, 48, fc2.shape[2], bias=family == "gpt_oss", activation=activation, device="cpu"
    )
    values = {"fc1_weight": fc1, "fc2_weight": fc2}
    if family == "gpt_oss":
        for layer, name in (("fc1", "gate_up"), ("fc2", "down")):
            values[f"{layer}_bias"] = parameters[f"{name}_proj_bias"]
    own.load_state_dict(values)
    with float8lab.autocast(recipe=BLOCK):
        if family == "llama4":
            got, want = experts(x), own.run_rows(x, [3, 3, 3, 3])
        else:
            got, want = experts(x, index, weights), own(x, weights, index)
    assert torch.equal(got.view_as(want), want)


def test_the_trainer_learns_and_resumes_to_the_bit(tmp_path, capsys) -> None:
    # Of Mixtral and others, which are saved expert by expert, Transformers' Trainer does not find
    # the experts again when it resumes, in high precision either.
    through = trainer(tmp_path, 8, Float8Callback(DELAYED), build("gpt_oss")[0])
    through.train()
    found = losses(through)
    assert found[-1] < 0.9 * found[0]
    resumed = trainer(tmp_path, 8, Float8Callback(DELAYED), build("gpt_oss")[0])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert same(resumed.model, through.model)
    assert "a router, which stays in high precision" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "dbrx"])
def test_weights_at_one_byte_give_the_same_output(family: str) -> None:
    model, batch = build(family)
    recipe = recipes.Float8RowwiseScaling()  # rows are those of [out, in], however it lies
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


def test_a_checkpoint_in_fp8_runs_with_its_bytes(tmp_path) -> None:
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
"""Sizes that 128x128 blocks divide."""


def names_in(path: Path) -> set[str]:
    """The weights in a file, without their scales."""
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'inspect'")
    found = safetensors.load_file(path / "model.safetensors")
    return {name for name in found if not name.endswith(("_scale_inv", "_scale"))}


@pytest.mark.parametrize(
    ("family", "format"),
    [("mixtral", "block-fp8"), ("mixtral", "compressed-tensors"), ("olmoe", "block-fp8")],
)
def test_transformers_finds_the_experts_of_an_export(tmp_path, family, format) -> None:
    """They are under the names that it saves, and load_fp8 finds them there, too."""
    if format == "compressed-tensors":
        pytest.importorskip("compressed_tensors", reason="needs the extra 'dev'")
    model, _ = build(family, **WIDE)
    float8lab.convert_to_float8(model, BLOCK)
    report = float8lab.integrations.export(model, tmp_path / "fp8", format)
    assert report.reasons == {"lm_head.weight": "excluded by 'lm_head'"}
    found, info = type(model).from_pretrained(tmp_path / "fp8", output_loading_info=True)
    assert not any(info.values())
    own, _ = build(family, **WIDE)
    float8lab.integrations.load_fp8(tmp_path / "fp8", own, dequantize=True)
    for name, value in own.state_dict().items():
        got = found.get_parameter(name)
        if got.dtype == torch.float8_e4m3fn:  # linear layers stay compressed
            got = got.float() * found.get_parameter(f"{name}_scale")  # one block
        assert torch.equal(got, value), name
    model.save_pretrained(tmp_path / "plain")
    assert names_in(tmp_path / "fp8") == names_in(tmp_path / "plain")


def test_experts_that_transformers_does_not_find_are_refused(tmp_path) -> None:
    """Granite's are saved as stacks, which Transformers does not read in FP8."""
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
def test_our_format_holds_every_byte_that_was_trained(tmp_path, family, recipe) -> None:
    """Of experts with biases and of transposed weights, too; others say why theirs stay."""
    model, batch = build(family)
    float8lab.convert_to_float8(model, recipe, exclude=["lm_head"])
    model.eval()
    report = float8lab.integrations.export(model, tmp_path / "out", "float8lab")
    assert report.reasons == {}
    loaded, _ = build(family)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    read = float8lab.integrations.load_fp8(tmp_path / "out", loaded.eval())
    assert read.fp8.keys() == report.fp8.keys()
    assert read.notes == ()
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    if family == "granite_hybrid":
        return
    format = "block-fp8" if recipe == BLOCK else "compressed-tensors"
    if family == "gpt2":
        with pytest.raises(ValueError, match="model must have a linear layer"):
            float8lab.integrations.export(model, tmp_path / "theirs", format)
        return
    theirs = float8lab.integrations.export(model, tmp_path / "theirs", format)
    name = next(name for name in report.fp8 if name.endswith("gate_up_proj"))
    assert theirs.reasons.keys() == report.fp8.keys() - theirs.fp8.keys()
    words = "have no biases" if family == "gpt_oss" else "and these are transposed"
    assert words in theirs.reasons[name]
    assert f"{name}, " in str(theirs)


@pytest.mark.parametrize("family", ["gpt_oss", "dbrx"])
def test_our_format_holds_bytes_of_delayed_scales(tmp_path, family) -> None:
    """Stored in the very model that was trained, they give its output."""
    model, batch = build(family)
    float8lab.convert_to_float8(model, DELAYED, exclude=["lm_head"])
    run(model, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # delayed scales do not know it yet
    model.eval()
    want = model(**batch).logits
    report = float8lab.integrations.export(model, tmp_path / "out", "float8lab")
    assert sum("experts" in name for name in report.fp8) == (4 if family == "gpt_oss" else 6)
    assert report.reasons == {}
    loaded, _ = build(family)
    float8lab.integrations.load_fp8(tmp_path / "out", loaded, dequantize=True)
    assert not torch.equal(loaded.eval()(**batch).logits, want)
    stored, _ = build(family)
    float8lab.integrations.load_fp8(tmp_path / "out", stored)
    for name in report.fp8:
        module, _, last = name.rpartition(".")
        value = stored.get_parameter(name) if family == "gpt_oss" else loaded.get_parameter(name)
        setattr(model.get_submodule(module), last, value)
    got = model(**batch).logits
    # The same bytes; stored as transposes, they may be multiplied in another order of sums.
    rounding = torch.finfo(torch.float32).eps * float(want.detach().abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=16 * rounding)


def test_loading_says_which_experts_keep_their_own_forward() -> None:
    """With one scale each for gate and up, no recipe has the blocks of the two joined."""
    model, _ = build("olmoe")
    prefix = "model.layers.0.mlp.experts"
    state = {n: v for n, v in model.state_dict().items() if not n.startswith(prefix)}
    for name, value in model.get_submodule(prefix).named_parameters():
        for e, parts in enumerate(value.detach().unbind()):
            kinds = ("gate", "up") if "gate" in name else ("down",)
            for kind, part in zip(kinds, parts.chunk(len(kinds)), strict=True):
                stored = float8lab.quantize(part)
                state[f"{prefix}.{e}.{kind}_proj.weight"] = stored.qdata
                state[f"{prefix}.{e}.{kind}_proj.weight_scale"] = stored.scale
    report = float8lab.integrations.load_fp8(state, model)
    assert report.fp8[f"{prefix}.gate_up_proj"] == "e4m3 1x80xall fp32"
    (note,) = report.notes
    assert note == f"{prefix} runs without a recipe: none has the blocks of all its experts"


def test_the_report_after_loading_says_why_layers_stay(tmp_path) -> None:
    model, _ = build("mixtral", **WIDE)
    float8lab.convert_to_float8(model, BLOCK)
    float8lab.integrations.export(model, tmp_path / "out", exclude=["lm_head", "*.q_proj"])
    loaded, _ = build("mixtral", **WIDE)
    float8lab.integrations.load_fp8(tmp_path / "out", loaded)
    report = float8lab.conversion_report(loaded)
    why = {layer.name.rpartition(".")[2]: layer.note for layer in report.skipped}
    router = "a router, which stays in high precision"
    here = "in high precision in the checkpoint"
    assert why == {"gate": router, "q_proj": here, "lm_head": here}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_on_parameters_of_experts() -> None:
    """PEFT adds its product to the stacked weights while the experts run."""
    peft = pytest.importorskip("peft", reason="needs the extra 'peft'")
    model, batch = build("mixtral")
    config = peft.LoraConfig(
        r=2, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    adapted = float8lab.convert_to_float8(peft.get_peft_model(model, config))
    name, _ = experts_of(adapted)
    with float8lab.count_gemms() as counts:
        _, gradients = run(adapted, batch)
    assert counts.fp8_by_module[name] > 0
    trained = {n for n, p in adapted.named_parameters() if p.grad is not None}
    assert trained
    assert all("lora_" in n for n in trained)
    assert gradients.isfinite().all()
    assert gradients.any()
