"""Adapters and FP8 bases on disk: adapters of PEFT, state dicts and checkpoints of others."""

import pytest
import torch

import float8lab
from float8lab import Float4Tensor
from float8lab.formats import E8M0, MXFP4
from float8lab.inspect import memory_report
from float8lab.integrations import export, load_fp8
from float8lab.nn.casts import plain
from float8lab.tensor import Float8Tensor, dispatch
from tests.integrations.peft.models import (
    RECIPES,
    TOKENS,
    convert,
    cosine,
    llama,
    peft,
    transformers,
    weight_bytes,
    with_lora,
)

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'inspect'")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"  # PEFT calls it by an old name
)


def train_adapters(model, steps=1, lr=1e-2):
    """Train the adapters; return the losses."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", RECIPES)
def test_saved_adapters_load_bit_for_bit(tmp_path, name):
    model = with_lora(convert(llama(), RECIPES[name]), modules_to_save=["lm_head"])
    train_adapters(model)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(convert(llama(), RECIPES[name]), tmp_path)
    loaded_adapters = peft.get_peft_model_state_dict(loaded)
    for key, value in peft.get_peft_model_state_dict(model).items():
        assert not isinstance(value, Float8Tensor), key
        assert torch.equal(loaded_adapters.pop(key), value), key
    assert not loaded_adapters
    # The activation scales of delayed scaling are not part of an adapter.
    scales = float8lab.nn.ScalingState(model).state_dict()
    assert bool(scales) == (name == "delayed")
    float8lab.nn.ScalingState(loaded).load_state_dict(scales)
    assert torch.equal(loaded.eval()(TOKENS).logits, model.eval()(TOKENS).logits)
    # Adapters do not depend on their base: they also load on one in high precision.
    on_high_precision = peft.PeftModel.from_pretrained(llama(), tmp_path).eval()
    y, expected = loaded(TOKENS).logits, on_high_precision(TOKENS).logits
    assert 0.99 < cosine(y, expected) < 1


def test_state_dicts_hold_the_fp8_base(tmp_path):
    model = with_lora(convert(llama(), RECIPES["rowwise"]))
    train_adapters(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert sum(isinstance(value, Float8Tensor) for value in state.values()) == 14
    loaded = with_lora(convert(llama(2), RECIPES["rowwise"]), seed=3)
    assert not any(loaded.load_state_dict(state))
    assert torch.equal(loaded.eval()(TOKENS).logits, model.eval()(TOKENS).logits)
    frozen = [p for p in loaded.parameters() if isinstance(p, Float8Tensor)]
    assert len(frozen) == 14
    assert not any(p.requires_grad for p in frozen)


def deepseek(seed=0):
    """A small DeepSeek-V3: latent attention, a dense layer, and one with experts."""
    config = transformers.DeepseekV3Config(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=128, num_hidden_layers=2,
        first_k_dense_replace=1, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1, vocab_size=64,
        q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(seed)
    return transformers.DeepseekV3ForCausalLM(config)


CHECKPOINTS = {
    "deepseek": (deepseek, "block-fp8", "block", ["q_a_proj", "q_b_proj", "o_proj", "down_proj"]),
    "tensor": (llama, "compressed-tensors", "current", "all-linear"),
    "static": (llama, "compressed-tensors", "delayed", "all-linear"),
    "channel": (llama, "compressed-tensors", "rowwise", "all-linear"),
}


@pytest.mark.filterwarnings("ignore:aten.baddbmm.default has no FP8")  # PEFT's sum with experts
@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_loaded_checkpoint_is_a_frozen_base_for_adapters(tmp_path, case):
    build, format, name, targets = CHECKPOINTS[case]
    source = convert(build(), RECIPES[name], freeze=False)
    if case == "static":
        source(input_ids=TOKENS)  # gives the activation scales
    export(source, tmp_path / "out", format)
    base, dequantized = build(1), build(1)
    report = load_fp8(tmp_path / "out", base)
    assert len(report.fp8) == (18 if case == "deepseek" else 14)
    before = {name: weight_bytes(base.get_parameter(name)) for name in report.fp8}
    bytes_before = sum(row.weights for row in memory_report(base).layers)
    model = with_lora(base, target_modules=targets, init_lora_weights=True)
    with float8lab.count_gemms() as counts:
        losses = train_adapters(model, steps=6)
    assert counts.fp8 > 0
    # As well as on the same base dequantized, trained in high precision.
    assert len(load_fp8(tmp_path / "out", dequantized, dequantize=True).dequantized) == len(
        report.fp8
    )
    reference = with_lora(dequantized, target_modules=targets, init_lora_weights=True)
    expected = train_adapters(reference, steps=6)
    expected_decrease = expected[0] - expected[-1]
    assert expected_decrease > 0.2
    assert abs((losses[0] - losses[-1]) - expected_decrease) < 0.1 * expected_decrease
    model = model.unload()
    for name, expected_bytes in before.items():
        weight = model.get_parameter(name)
        assert weight.grad is None
        assert all(
            torch.equal(a, b) for a, b in zip(weight_bytes(weight), expected_bytes, strict=True)
        )
    assert sum(row.weights for row in memory_report(model).layers) == bytes_before


@pytest.fixture
def repeated_warnings(monkeypatch):
    """Warnings that are given once per process are given again."""
    monkeypatch.setattr(dispatch, "_POLICY", dispatch._Policy())


def trainer(model, folder):
    arguments = transformers.TrainingArguments(output_dir=str(folder), report_to=[], use_cpu=True)
    return transformers.Trainer(model=model, args=arguments)


def random_mxfp4(weight):
    """A frozen weight of random MXFP4 values."""
    N, K = weight.shape
    packed = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
    scale = torch.randint(120, 124, (N, K // 32), dtype=torch.uint8).view(E8M0)
    stored = Float4Tensor(packed, scale, None, MXFP4, weight.dtype)
    return torch.nn.Parameter(stored, requires_grad=False)


WRITERS = {
    "transformers": lambda model, folder: model.save_pretrained(folder),
    "merged": lambda model, folder: with_lora(model).merge_and_unload().save_pretrained(folder),
    "trainer": lambda model, folder: trainer(model, folder).save_model(),
    "model": lambda model, folder: safetensors.save_model(model, folder / "model.safetensors"),
    "file": lambda model, folder: safetensors.save_file(
        model.state_dict(), folder / "model.safetensors"
    ),
}


@pytest.mark.usefixtures("repeated_warnings")
@pytest.mark.filterwarnings("ignore:.*pin_memory.* argument is set as true but no accelerator")
@pytest.mark.parametrize(
    ("write", "bits"), [*((name, 8) for name in WRITERS), ("transformers", 4), ("model", 4)]
)
def test_safetensors_files_are_in_high_precision_with_one_warning(tmp_path, write, bits):
    if bits == 8:
        model = convert(llama(dtype=torch.bfloat16), RECIPES["rowwise"])
        stored, advised_function = Float8Tensor, r"integrations\.export"
    else:
        model = llama(dtype=torch.bfloat16)
        for name, weight in list(model.named_parameters()):
            if "_proj" in name:
                module, _, parameter_name = name.rpartition(".")
                setattr(model.get_submodule(module), parameter_name, random_mxfp4(weight))
        stored, advised_function = Float4Tensor, r"torch\.save"
    # This weight shares FP8 data with another; both are written.
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.warns(
        UserWarning, match=f"in torch.bfloat16.*{advised_function}"
    ) as caught_warnings:
        WRITERS[write](model, tmp_path)
    assert sum("dequantized copies" in str(warning.message) for warning in caught_warnings) == 1
    assert sum(isinstance(p, stored) for p in model.state_dict().values()) == 14
    written = safetensors.load_file(tmp_path / "model.safetensors")
    expected = {name: plain(value) for name, value in model.state_dict().items()}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], value) for name, value in expected.items())
