"""Files exchanged with transformers and compressed-tensors, which read and write the formats.

Neither is among the tools that are pinned for development; without them these tests are skipped.
"""

import json
import warnings

import pytest
import torch
from torch import nn

import float8lab
from float8lab import recipes
from float8lab.integrations import export, load_fp8
from float8lab.nn.expert_mlp import ExpertsBase
from float8lab.tensor import Float4Tensor, Float8Tensor
from tests.integrations.checkpoint.test_experts import block_fp8, checkpoint_of, nvfp4
from tests.same_bytes import assert_same_bytes, assert_same_state

# Other releases of these libraries warn about their own code on import and use.
pytestmark = pytest.mark.filterwarnings("default")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    pytest.importorskip("accelerate", reason="transformers loads FP8 with it")

TIES = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]


def llama(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=64,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def trained_llama(recipe, steps=2):
    model = float8lab.convert_to_float8(llama(), recipe, exclude=["lm_head"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(64, (2, 32))
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model.eval(), tokens


def dequantized(path, model=None):
    model = llama(1) if model is None else model
    load_fp8(path, model, dequantize=True)
    return model.state_dict()


def read_by_transformers(path, **load_options):
    """Load a folder with Transformers; every tensor must be there and fit."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True, **load_options
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    return model, info


@pytest.mark.parametrize(
    "recipe", [recipes.Float8BlockScaling(), recipes.DelayedScaling()], ids=str
)
@pytest.mark.parametrize("max_shard_size", [5_000_000_000, 300_000])
def test_transformers_loads_block_fp8(tmp_path, recipe, max_shard_size):
    model, tokens = trained_llama(recipe)
    report = export(model, tmp_path / "out", "block-fp8", max_shard_size=max_shard_size)
    assert len(report.fp8) == 14
    assert (len(report.files) > 1) == (max_shard_size == 300_000)
    transformers_model, info = read_by_transformers(tmp_path / "out")
    assert not info["unexpected_keys"]
    dequantized_state = dequantized(tmp_path / "out")
    assert_same_state(transformers_model.state_dict(), dequantized_state)
    # Near the FP8 model: both have its weights, but this one has other activations.
    with torch.no_grad():
        y, expected = transformers_model(tokens).logits, model(tokens).logits
    assert (y - expected).norm() < 0.1 * expected.norm()


def test_block_fp8_files_of_transformers_are_loaded(tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    model = llama()
    config = transformers.FineGrainedFP8Config(modules_to_not_convert=["lm_head"])
    quantizer = transformers.quantizers.AutoHfQuantizer.from_config(config)
    quantize = Fp8Quantize(quantizer)
    state = {}
    for name, value in model.state_dict().items():
        linear = name.endswith("_proj.weight")
        state |= quantize.convert({name: value}) if linear else {name: value}
    model.config.quantization_config = config
    model.config.save_pretrained(tmp_path / "theirs")
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(state, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    transformers_model, _ = read_by_transformers(tmp_path / "theirs")
    assert_same_state(transformers_model.state_dict(), dequantized(tmp_path / "theirs"))
    # Loaded in FP8, the weights have the same bytes.
    fp8_model = llama(1)
    report = load_fp8(tmp_path / "theirs", fp8_model)
    assert len(report.fp8) == 14
    for name, value in fp8_model.state_dict().items():
        if name in report.fp8:
            assert isinstance(value, Float8Tensor)
            assert torch.equal(value.qdata.view(torch.uint8), state[name].view(torch.uint8))
            assert torch.equal(value.scale, state[f"{name}_scale_inv"])
    tokens = torch.randint(64, (2, 32))
    with torch.no_grad(), float8lab.count_gemms() as counts:
        y, expected = fp8_model.eval()(tokens).logits, transformers_model(tokens).logits
    assert (y - expected).norm() < 0.1 * expected.norm()
    assert counts.fp8 == 14


SCHEMES = {
    "tensor": recipes.Float8CurrentScaling(), "static": recipes.DelayedScaling(),
    "channel": recipes.Float8RowwiseScaling(), "block": recipes.Float8BlockScaling(),
}  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_decompresses_an_export(tmp_path, scheme):
    ct = pytest.importorskip("compressed_tensors")
    safetensors = pytest.importorskip("safetensors.torch")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model, _ = trained_llama(SCHEMES[scheme])
    shared_scales = TIES if scheme == "tensor" else ()
    export(model, tmp_path / "out", "compressed-tensors", share_scales=shared_scales)
    content = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert content.pop("quant_method") == "compressed-tensors"
    config = QuantizationConfig.model_validate(content)
    assert ct.__version__
    (group,) = config.config_groups.values()
    state = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    dequantized_state = dequantized(tmp_path / "out")
    compressor = BaseCompressor.get_value_from_registry(config.format)
    decompressed_weights = 0
    for name in dequantized_state:
        if f"{name}_scale" in state:
            compressed = {"weight": state[name], "weight_scale": state[f"{name}_scale"]}
            assert torch.equal(
                compressor.decompress(compressed, group)["weight"], dequantized_state[name]
            )
            decompressed_weights += 1
    assert decompressed_weights == 14
    static = [name for name in state if name.endswith("input_scale")]
    assert len(static) == (14 if scheme == "static" else 0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_loads_compressed_tensors(tmp_path, scheme):
    pytest.importorskip("compressed_tensors")
    model, _ = trained_llama(SCHEMES[scheme])
    export(model, tmp_path / "out", "compressed-tensors")
    load_options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    transformers_model, _ = read_by_transformers(tmp_path / "out", **load_options)
    dequantized_state = dequantized(tmp_path / "out")
    state = transformers_model.state_dict()
    assert_same_state({name: state[name] for name in dequantized_state}, dequantized_state)


@pytest.mark.parametrize("scheme", ["tensor", "channel", "block"])
def test_files_of_compressed_tensors_are_loaded(tmp_path, scheme):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
    )

    model = llama()
    blocks = {"block_structure": [128, 128]} if scheme == "block" else {}
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": scheme} | blocks
    inputs = {
        "num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor",
    }  # fmt: skip
    if scheme != "tensor":
        inputs |= {"dynamic": True, "strategy": "token"}
    config = QuantizationConfig(
        config_groups={
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
        ignore=["lm_head"],
        format="float-quantized",
    )
    apply_quantization_config(model, config)
    spec = {"tensor": (-1, -1), "channel": (1, -1), "block": (128, 128)}[scheme]
    for module in model.modules():
        if hasattr(module, "quantization_scheme") and isinstance(module, nn.Linear):
            scale = float8lab.quantize(module.weight.detach(), block=spec).scale
            module.weight_scale.data.copy_(scale.view_as(module.weight_scale))
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.01)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "theirs")
    compressor.update_config(tmp_path / "theirs")
    dequantized_state = dequantized(tmp_path / "theirs")
    fp8_model = llama(1)
    report = load_fp8(tmp_path / "theirs", fp8_model)
    compressor.decompress_model(model)
    decompressed = model.state_dict()
    assert_same_state({name: decompressed[name] for name in dequantized_state}, dequantized_state)
    assert len(report.fp8) == 14
    for name in report.fp8:
        assert torch.equal(fp8_model.get_parameter(name).dequantize(), decompressed[name])
    if scheme == "tensor":  # static activation scales
        layer = fp8_model.model.layers[0].mlp.up_proj
        state = float8lab.nn.ScalingState(layer).state_dict()
        (scale,) = (value for name, value in state.items() if name.endswith("/scale"))
        assert scale[0] == torch.tensor(0.01)


def test_a_deepseek_export_is_read_by_transformers_and_as_a_frozen_base(tmp_path):
    config = transformers.DeepseekV3Config(
        hidden_size=256, intermediate_size=384, moe_intermediate_size=128, num_hidden_layers=2,
        first_k_dense_replace=1, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1, vocab_size=64,
        q_lora_rank=128, kv_lora_rank=64, qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64,
        max_position_embeddings=64,
    )  # fmt: skip
    model, base, plain = (transformers.DeepseekV3ForCausalLM(config).eval() for _ in range(3))
    report = export(model, tmp_path / "out", "block-fp8")
    content = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    # In transformers its experts are one tensor each; on a GPU it would look for their scales.
    assert content["modules_to_not_convert"] == ["lm_head", "model.layers.1.mlp.experts"]
    transformers_model, _ = read_by_transformers(tmp_path / "out")
    assert_same_state(transformers_model.state_dict(), dequantized(tmp_path / "out", plain))
    loaded = load_fp8(tmp_path / "out", base)
    assert loaded.fp8.keys() == report.fp8.keys()
    assert len(loaded.fp8) == 16
    # In a frozen base gradients reach the inputs but no weight.
    embedded = torch.randn(1, 32, 256, requires_grad=True)
    base(inputs_embeds=embedded).logits.square().mean().backward()
    assert embedded.grad.isfinite().all()
    assert embedded.grad.any()
    assert all(base.get_parameter(name).grad is None for name in loaded.fp8)


MOE = {
    "hidden_size": 256, "intermediate_size": 128, "moe_intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 64, "max_position_embeddings": 64, "num_experts_per_tok": 2,
}  # fmt: skip


def moe_model(name, seed=0, **config_fields):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**MOE, **config_fields)
    return getattr(transformers, f"{name}ForCausalLM")(config)


MOE_FAMILIES = {
    "qwen3": ("Qwen3Moe", {"num_experts": 3}),
    "deepseek": (
        "DeepseekV3",
        {
            "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
            "q_lora_rank": 128, "kv_lora_rank": 96, "qk_rope_head_dim": 32, "v_head_dim": 64,
            "qk_nope_head_dim": 32, "n_shared_experts": 1,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MOE_FAMILIES)
def test_moe_exports_are_read_by_transformers_and_load_fp8(tmp_path, name):
    family, config_fields = MOE_FAMILIES[name]
    model, loaded_model = (moe_model(family, seed, **config_fields) for seed in range(2))
    recipe = recipes.Float8BlockScaling()
    for module in model.modules():
        for local in ("gate_up_proj", "down_proj"):
            parameter = module._parameters.get(local)
            if parameter is not None and parameter.ndim == 3:
                stored = float8lab.quantize(parameter.detach(), block=(128, 128))
                module.register_parameter(local, nn.Parameter(stored, requires_grad=False))
    float8lab.convert_to_float8(model, recipe, exclude=["lm_head", "*.gate"])
    report = export(model, tmp_path / "out", "block-fp8")
    assert {name for name in report.high_precision if "gate" in name} == {
        name for name, module in model.named_modules() if name.endswith("mlp.gate")
    }
    transformers_model, info = read_by_transformers(tmp_path / "out")
    assert not info["unexpected_keys"]
    assert_same_state(
        transformers_model.state_dict(),
        dequantized(tmp_path / "out", moe_model(family, 2, **config_fields)),
    )
    loaded = load_fp8(tmp_path / "out", loaded_model)
    assert loaded.fp8.keys() == report.fp8.keys()
    for path in loaded.fp8:
        stored = model.get_parameter(path)
        if isinstance(stored, Float8Tensor):
            assert_same_bytes(loaded_model.get_parameter(path), stored, amax=False)


def test_gpt_oss_weights_are_decoded_as_by_transformers(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    arguments = MOE | {"num_local_experts": 3, "layer_types": ["full_attention"] * 2}
    del arguments["moe_intermediate_size"]
    config = transformers.GptOssConfig(**arguments)
    torch.manual_seed(0)
    model, packed = (transformers.GptOssForCausalLM(config) for _ in range(2))
    state = {}
    for name, value in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            state[name] = value
            continue
        experts, columns, rows = value.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 123, blocks.shape[:-1], dtype=torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_parameter(name).data.copy_(expected)
    report = load_fp8(state, packed)
    assert len(report.fp4) == 4
    assert float8lab.inspect.diff(state, model.state_dict()).equal
    assert float8lab.inspect.diff(state, packed.state_dict()).identical
    tokens = torch.randint(64, (2, 16))
    for implementation in ("eager", "grouped_mm"):
        losses, gradients = [], []
        for either in (model, packed):
            either.set_experts_implementation(implementation)
            either.requires_grad_(False)
            either.model.embed_tokens.weight.requires_grad_(True)
            either.zero_grad()
            loss = either(input_ids=tokens, labels=tokens).loss
            loss.backward()
            losses.append(loss)
            gradients.append(either.model.embed_tokens.weight.grad)
        assert torch.equal(*losses)
        assert torch.equal(*gradients)


@pytest.mark.parametrize("kind", ["NVFP4", "MXFP4"])
def test_4_bit_files_of_compressed_tensors_are_loaded(kind):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    scheme: QuantizationScheme = preset_name_to_scheme(kind, ["Linear"])
    compressor = NVFP4PackedCompressor if kind == "NVFP4" else MXFP4PackedCompressor
    torch.manual_seed(0)
    weight, size = torch.randn(64, 128), 16 if kind == "NVFP4" else 32
    amax = weight.unflatten(1, (-1, size)).abs().amax(-1)
    state = {"weight": weight, "weight_scale": (amax.log2().floor() - 2).exp2()}
    if kind == "NVFP4":
        # A power of two, so that every order of multiplication gives the same.
        state["weight_global_scale"] = torch.tensor([256.0])
        state["weight_scale"] = (amax / 6 * 256).to(torch.float8_e4m3fn).float()
    packed = compressor.compress(state, scheme)
    expected = compressor.decompress(packed, scheme)["weight"]
    layer = nn.Linear(128, 64, bias=False)
    assert load_fp8(packed, layer).fp4
    assert torch.equal(layer.weight.dequantize(), expected.float())


@pytest.mark.parametrize("store", [nvfp4, block_fp8])
def test_peft_adapters_on_parameters_of_stacked_experts(store):
    peft = pytest.importorskip("peft", minversion="0.17")
    state = checkpoint_of(moe_model("Qwen3Moe", num_experts=3), store)
    stored, plain = (moe_model("Qwen3Moe", 1, num_experts=3) for _ in range(2))
    load_fp8(state, stored)
    load_fp8(state, plain, dequantize=True)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(
        r=4, target_modules=[], target_parameters=experts, init_lora_weights=False
    )
    tokens = torch.randint(64, (2, 16))
    losses, gradients = [], []
    for model in (stored, plain):
        torch.manual_seed(2)
        tuned = peft.get_peft_model(model, config)
        loss = tuned(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss)
        grads = [p.grad for p in tuned.parameters() if p.grad is not None]
        assert len(grads) == 8
        gradients.append(torch.cat([grad.flatten() for grad in grads]))
    # PEFT adds an adapter to the values of the weight; FP8 experts requantize the sum.
    if store is nvfp4:
        assert torch.equal(*losses)
        assert torch.equal(*gradients)
    else:
        assert (gradients[0] - gradients[1]).norm() < 0.2 * gradients[1].norm()


@pytest.mark.parametrize(
    ("recipe", "format"),
    [
        (recipes.Float8BlockScaling(), "block-fp8"),
        (recipes.Float8BlockScaling(), "compressed-tensors"),
        (recipes.Float8RowwiseScaling(), "compressed-tensors"),
        (recipes.Float8CurrentScaling(), "float8lab"),
    ],
    ids=str,
)
def test_exported_experts_are_those_that_forwards_cast(tmp_path, recipe, format):
    model, loaded_model = (moe_model("Qwen3Moe", seed, num_experts=3) for seed in range(2))
    float8lab.convert_to_float8(model, recipe, exclude=["lm_head"])
    tokens = torch.randint(64, (2, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    report = export(model, tmp_path / "out", format)
    assert sum(path.endswith(("gate_up_proj", "down_proj")) for path in report.fp8) == 4
    assert "model.layers.0.mlp.gate" in report.high_precision
    loaded = load_fp8(tmp_path / "out", loaded_model)
    assert len(loaded.fp8) == len(report.fp8) == 12
    # The expert modules, like the linear layers, run in FP8 by the recipe that uses these bytes.
    with float8lab.count_gemms() as counts, torch.no_grad():
        y, expected = loaded_model.eval()(tokens).logits, model.eval()(tokens).logits
    assert torch.equal(y, expected)
    assert counts.fp8 == 2 * 12
    assert all(isinstance(layer.mlp.experts, ExpertsBase) for layer in loaded_model.model.layers)


def test_experts_with_delayed_scaling_are_exported(tmp_path):
    model, loaded_model = (moe_model("Qwen3Moe", seed, num_experts=3) for seed in range(2))
    float8lab.convert_to_float8(model, recipes.DelayedScaling(), exclude=["lm_head"])
    report = export(model, tmp_path / "out", "compressed-tensors")
    assert len(report.fp8) == 12
    load_fp8(tmp_path / "out", loaded_model)
    for name in ("gate_up_proj", "down_proj"):
        path = f"model.layers.1.mlp.experts.{name}"
        loaded, weight = loaded_model.get_parameter(path).dequantize(), model.get_parameter(path)
        # The step below the normal numbers.
        subnormal_step = 2.0**-9 * weight.abs().amax((1, 2), keepdim=True)
        assert ((loaded - weight).abs() <= 2.0**-4 * weight.abs() + subnormal_step).all()


@pytest.mark.parametrize("converted", ["before", "after"])
def test_4_bit_experts_run_in_fp8_only_if_converted_before_loading(converted):
    """A conversion after loading leaves 4-bit experts in high precision, and reports it."""
    state = checkpoint_of(moe_model("Qwen3Moe", num_experts=3), nvfp4)
    model = moe_model("Qwen3Moe", 1, num_experts=3)
    if converted == "before":
        float8lab.convert_to_float8(model, exclude=["lm_head"])
    load_fp8(state, model)
    if converted == "after":
        float8lab.convert_to_float8(model, exclude=["lm_head"])
        skipped = {layer.name: layer.note for layer in float8lab.conversion_report(model).skipped}
        note = "its gate_up_proj is in 4 bits, dequantized and multiplied in high precision"
        assert skipped["model.layers.0.mlp.experts"] == note
    tokens = torch.randint(64, (2, 16))
    with float8lab.count_gemms() as counts:
        model(input_ids=tokens, labels=tokens).loss.backward()
    fp8_gemms = counts.fp8_by_module["model.layers.0.mlp.experts"]
    assert fp8_gemms == (4 if converted == "before" else 0)
    assert isinstance(model.model.layers[0].mlp.experts.gate_up_proj, Float4Tensor)
