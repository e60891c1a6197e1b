"""convert_to_float8 on Transformers' mixtures of experts, whose experts lie in different ways."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import float8lab
from float8lab import recipes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what its dependencies are deprecated for
    pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    from float8lab.integrations.transformers import Float8Callback

from tests.integrations.transformers.models import MIXTURES, build, flat_gradients
from tests.integrations.transformers.training import DELAYED, losses, same, trainer

BLOCK = recipes.Float8BlockScaling()


def experts_of(model: Any) -> tuple[str, Any]:
    report = float8lab.conversion_report(model)
    name = next(layer.name for layer in report.converted if len(layer.shape) == 3)
    return name, model.get_submodule(name)


def run(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and gradients of one step."""
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return output.logits.detach(), flat_gradients(model)


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
        for got, exact in zip(run(model, batch), want, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-6)
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
    for got, exact in zip(run(model, batch), want, strict=True):
        assert torch.equal(got, exact)


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


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_an_export_says_whose_experts_transformers_does_not_find(tmp_path, family) -> None:
    model, _ = build(family, hidden_size=128, intermediate_size=128, head_dim=32)
    float8lab.convert_to_float8(model, BLOCK)
    for name, exclude in {"all": ["lm_head"], "linear": ["lm_head", "experts"]}.items():
        path = tmp_path / name
        notes = float8lab.integrations.export(model, path, exclude=exclude).notes
        _, found = type(model).from_pretrained(path, output_loading_info=True)
        assert any("Transformers does not" in note for note in notes) == bool(found["missing_keys"])
        assert bool(found["missing_keys"]) == (family == "mixtral" and name == "all")


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


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_on_parameters_of_experts() -> None:
    """PEFT adds its product to the stacked weights while the experts run."""
    peft = pytest.importorskip("peft", reason="needs the extra 'peft'")
    model, batch = build("mixtral")
    config = peft.LoraConfig(
        r=2, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    adapted = peft.get_peft_model(model, config)
    float8lab.convert_to_float8(adapted)
    name, _ = experts_of(adapted)
    with float8lab.count_gemms() as counts:
        _, gradients = run(adapted, batch)
    assert counts.fp8_by_module[name] > 0
    trained = {n for n, p in adapted.named_parameters() if p.grad is not None}
    assert trained
    assert all("lora_" in n for n in trained)
    assert gradients.isfinite().all()
    assert gradients.any()
