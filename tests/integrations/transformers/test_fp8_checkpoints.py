"""Models that Transformers loads from FP8 checkpoints, taken over by ``load_fp8`` and trained."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import float8lab
from float8lab import recipes
from float8lab.integrations import export, export_stream, load_fp8
from float8lab.optim import MasterWeights
from float8lab.tensor import Float8Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecation warnings of its dependencies
    transformers = pytest.importorskip("transformers", minversion="5.23")
    pytest.importorskip("accelerate", reason="needs the extra 'transformers'")
    peft = pytest.importorskip("peft", reason="needs the extra 'peft'")
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from tests.integrations.transformers.training import tokens
from tests.same_bytes import assert_same_state

pytestmark = pytest.mark.filterwarnings("default")
SIZES = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {"dense": "LlamaForCausalLM", "experts": "Qwen3MoeForCausalLM"}
CONVERSIONS = "_weight_conversions"  # a model's attribute on how it was loaded
FORMATS = {
    "block-fp8": recipes.Float8BlockScaling(),
    "compressed-tensors": recipes.Float8RowwiseScaling(),
}


def write_checkpoint(folder: Path, kind: str, format: str = "block-fp8") -> Path:
    """Write a checkpoint whose dense layers and experts are in FP8."""
    torch.manual_seed(0)
    model = getattr(transformers, MODELS[kind])
    model = model(model.config_class(**SIZES)).to(torch.bfloat16)
    float8lab.convert_to_float8(model, FORMATS[format], exclude=["lm_head"])
    export(model, folder / "checkpoint", format)
    return folder / "checkpoint"


def from_pretrained(folder: Path, *, quantized: bool = False) -> Any:
    """Load a model as Transformers does without a GPU, or, if ``quantized``, as with one."""
    with pytest.MonkeyPatch.context() as patch:
        if quantized:
            patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
        return transformers.AutoModelForCausalLM.from_pretrained(folder)


def fp8_parameters(model: Any) -> dict[str, Float8Tensor]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, Float8Tensor)}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", MODELS)
def test_load_fp8_takes_over_a_model_loaded_by_transformers(
    tmp_path: Path, kind: str, format: str
) -> None:
    if format == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    folder = write_checkpoint(tmp_path, kind, format)
    high_precision = from_pretrained(folder)
    load_fp8(folder, high_precision, dequantize=True)  # however the model was loaded
    expected = getattr(transformers, MODELS[kind])(high_precision.config).to(torch.bfloat16)
    load_fp8(folder, expected)
    for quantized in (False, True):
        model = from_pretrained(folder, quantized=quantized)
        layers, conversions = list(model.modules()), getattr(model, CONVERSIONS, None)
        if quantized or format == "compressed-tensors":
            float8lab.convert_to_float8(model, exclude=["lm_head", "*.experts"])
            notes = {layer.note for layer in float8lab.conversion_report(model).skipped}
            assert "its weight is FP8 data of another library; load_fp8 takes it over" in notes
        with pytest.raises(ValueError, match="must fit the model"):
            load_fp8({"lm_head.weight": torch.ones(1)}, model)
        assert list(model.modules()) == layers
        assert getattr(model, CONVERSIONS, None) is conversions
        load_fp8(folder, model)
        assert_same_state(model.state_dict(), expected.state_dict())
        assert not getattr(model, "is_quantized", False)
        assert getattr(model.config, "quantization_config", None) is None
        # Saved as by its own class, which every reader and the Trainer accept.
        with float8lab.fallback("silent"):
            model.save_pretrained(tmp_path / "saved")
        reloaded = from_pretrained(tmp_path / "saved")
        assert all(
            torch.equal(p, q)
            for p, q in zip(reloaded.parameters(), high_precision.parameters(), strict=True)
        )

        batch = {key: torch.stack([row[key] for row in tokens()[:4]]) for key in tokens()[0]}
        float32_model = float32_copy(high_precision)
        float32_model(**batch).loss.backward()
        model.requires_grad_(True)
        with float8lab.count_gemms() as counts:
            model(**batch).loss.backward()
        assert counts.fp8 == 3 * (7 if kind == "dense" else 4 + 2)
        for (name, p), q in zip(model.named_parameters(), float32_model.parameters(), strict=True):
            gradients = p.grad.float().flatten(), q.grad.flatten()
            assert torch.cosine_similarity(*gradients, dim=0) > 0.95, name


def float32_copy(model: Any) -> Any:
    """Return a copy in float32."""
    copied = type(model)(model.config).float()
    copied.load_state_dict({n: v.float() for n, v in model.state_dict().items()})
    return copied


def run_trainer(folder: Path, out: Path, *, lora: bool, resume: bool = False) -> Any:
    """Run four steps of the Trainer, or only the last two."""
    model: Any = from_pretrained(folder)
    load_fp8(folder, model)
    torch.manual_seed(0)
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    else:
        model.requires_grad_(True)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-2)
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=out, max_steps=4, save_steps=2, per_device_train_batch_size=4, use_cpu=True,
            report_to=[], disable_tqdm=True, logging_steps=1,
        ),
        train_dataset=tokens(),
        optimizers=(optimizer, None),
    )  # fmt: skip
    with float8lab.fallback("silent"):
        trainer.train(resume_from_checkpoint=str(out / "checkpoint-2") if resume else None)
    return trainer


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_trainer_trains_saves_and_resumes_bit_for_bit(
    tmp_path: Path, kind: str, lora: bool
) -> None:
    folder = write_checkpoint(tmp_path, kind)
    uninterrupted = run_trainer(folder, tmp_path / "out", lora=lora)
    resumed = run_trainer(folder, tmp_path / "out", lora=lora, resume=True)
    assert_same_state(uninterrupted.model.state_dict(), resumed.model.state_dict())
    losses = [entry["loss"] for entry in uninterrupted.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    if lora:  # the base keeps the checkpoint's bytes
        assert len(fp8_parameters(uninterrupted.model)) == (7 if kind == "dense" else 4 + 2)
        assert not any(p.requires_grad for p in fp8_parameters(uninterrupted.model).values())
        return
    export(uninterrupted.model, tmp_path / "trained")
    reloaded = from_pretrained(folder)
    load_fp8(tmp_path / "trained", reloaded)
    for name, tensor in export_stream(reloaded):
        assert torch.equal(tensor, dict(export_stream(uninterrupted.model))[name]), name
