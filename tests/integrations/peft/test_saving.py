"""Adapters and FP8 bases on disk: adapters of PEFT, state dicts, and the checkpoints of others."""

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
    codes,
    convert,
    cosine,
    llama,
    peft,
    transformers,
    with_lora,
)

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'inspect'")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"  # PEFT asks by an old name
)


def trained(model, steps=1, lr=1e-2):
    """Train the adapters; the losses."""
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
def test_adapters_come_back_bit_for_bit(tmp_path, name):
    model = with_lora(convert(llama(), RECIPES[name]), modules_to_save=["lm_head"])
    trained(model)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(convert(llama(), RECIPES[name]), tmp_path)
    found = peft.get_peft_model_state_dict(again)
    for key, value in peft.get_peft_model_state_dict(model).items():
        assert not isinstance(value, Float8Tensor), key
        assert torch.equal(found.pop(key), value), key
    assert not found
    # Scales of activations, which delayed scaling has learned, are not an adapter's.
    scales = float8lab.nn.ScalingState(model).state_dict()
    assert bool(scales) == (name == "delayed")
    float8lab.nn.ScalingState(again).load_state_dict(scales)
    assert torch.equal(again.eval()(TOKENS).logits, model.eval()(TOKENS).logits)
    # Adapters are of no base in particular: on one in high precision they are the same.
    plain = peft.PeftModel.from_pretrained(llama(), tmp_path).eval()
    y, expected = again(TOKENS).logits, plain(TOKENS).logits
    assert 0.99 < cosine(y, expected) < 1


def test_state_dicts_with_the_base(tmp_path):
    model = with_lora(convert(llama(), RECIPES["rowwise"]))
    trained(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert sum(isinstance(value, Float8Tensor) for value in state.values()) == 14
    other = with_lora(convert(llama(2), RECIPES["rowwise"]), seed=3)
    assert not any(other.load_state_dict(state))
    assert torch.equal(other.eval()(TOKENS).logits, model.eval()(TOKENS).logits)
    frozen = [p for p in other.parameters() if isinstance(p, Float8Tensor)]
    assert len(frozen) == 14
    assert not any(p.requires_grad for p in frozen)


def deepseek(seed=0):
    """As DeepSeek-V3: latent attention, a dense layer, and one of experts."""
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
def test_a_checkpoint_is_a_frozen_base(tmp_path, case):
    build, format, name, targets = CHECKPOINTS[case]
    source = convert(build(), RECIPES[name], freeze=False)
    if case == "static":
        source(input_ids=TOKENS)  # scales of activations
    export(source, tmp_path / "out", format)
    base, high = build(1), build(1)
    report = load_fp8(tmp_path / "out", base)
    assert len(report.fp8) == (18 if case == "deepseek" else 14)
    before = {name: codes(base.get_parameter(name)) for name in report.fp8}
    bytes_before = sum(row.weights for row in memory_report(base).layers)
    model = with_lora(base, target_modules=targets, init_lora_weights=True)
    with float8lab.count_gemms() as counts:
        losses = trained(model, steps=6)
    assert counts.fp8 > 0
    # As on the same base dequantized, for training in high precision.
    assert len(load_fp8(tmp_path / "out", high, dequantize=True).dequantized) == len(report.fp8)
    tuned = with_lora(high, target_modules=targets, init_lora_weights=True)
    expected = trained(tuned, steps=6)
    fall = expected[0] - expected[-1]
    assert fall > 0.2
    assert abs((losses[0] - losses[-1]) - fall) < 0.1 * fall
    model = model.unload()
    for name, found in before.items():
        weight = model.get_parameter(name)
        assert weight.grad is None
        assert all(torch.equal(a, b) for a, b in zip(codes(weight), found, strict=True))
    assert sum(row.weights for row in memory_report(model).layers) == bytes_before


@pytest.fixture
def said_anew(monkeypatch):
    """Warnings that are said once are said again."""
    monkeypatch.setattr(dispatch, "_POLICY", dispatch._Policy())


def trainer(model, folder):
    arguments = transformers.TrainingArguments(output_dir=str(folder), report_to=[], use_cpu=True)
    return transformers.Trainer(model=model, args=arguments)


def in_4_bits(weight):
    """A frozen weight of random MXFP4."""
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


@pytest.mark.usefixtures("said_anew")
@pytest.mark.filterwarnings("ignore:.*pin_memory.* argument is set as true but no accelerator")
@pytest.mark.parametrize(
    ("write", "bits"), [*((name, 8) for name in WRITERS), ("transformers", 4), ("model", 4)]
)
def test_what_writes_safetensors_writes_high_precision_and_says_so_once(tmp_path, write, bits):
    if bits == 8:
        model = convert(llama(dtype=torch.bfloat16), RECIPES["rowwise"])
        stored, keeper = Float8Tensor, r"integrations\.export"
    else:
        model = llama(dtype=torch.bfloat16)
        for name, weight in list(model.named_parameters()):
            if "_proj" in name:
                module, _, last = name.rpartition(".")
                setattr(model.get_submodule(module), last, in_4_bits(weight))
        stored, keeper = Float4Tensor, r"torch\.save"
    # Shares FP8 data with another weight; both are written.
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.warns(UserWarning, match=f"in torch.bfloat16.*{keeper}") as told:
        WRITERS[write](model, tmp_path)
    assert sum("dequantized copies" in str(warning.message) for warning in told) == 1
    assert sum(isinstance(p, stored) for p in model.state_dict().values()) == 14
    found = safetensors.load_file(tmp_path / "model.safetensors")
    expected = {name: plain(value) for name, value in model.state_dict().items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
