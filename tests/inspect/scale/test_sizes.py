"""Tests of model sizes: known models, sizes given as text, and configuration files."""

import json

import pytest

from float8lab.inspect.scale.sizes import KNOWN, model_size

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
MOE = {
    **LLAMA,
    "model_type": "qwen2_moe",
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}


@pytest.fixture
def write(tmp_path):
    def write(config):
        path = tmp_path / "config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return path

    return write


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt2-124m", 0.124), ("llama-3-1b", 1.24), ("llama-3-8b", 8.03), ("llama-3-70b", 70.6),
     ("llama-3-405b", 405.9), ("mixtral-8x7b", 46.7), ("qwen3-30b-a3b", 30.5)],
)  # fmt: skip
def test_known_models_have_the_published_number_of_parameters(name, billions):
    assert model_size(name).parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_configuration_has_the_sizes_of_the_known_model(write):
    size = model_size(str(write(LLAMA).parent))
    assert size.parameters == KNOWN["llama-3-8b"].parameters
    assert size.attention_weights(2) == KNOWN["llama-3-8b"].attention_weights(2)
    nested = model_size(str(write({"text_config": LLAMA})))
    assert nested.parameters == size.parameters


def test_a_configuration_of_a_model_without_a_gate(write):
    size = model_size(str(write({**GPT2, "n_inner": None, "tie_word_embeddings": True})))
    assert not size.gated
    assert size.parameters == KNOWN["gpt2-124m"].parameters


def test_a_configuration_with_routed_and_shared_experts(write):
    size = model_size(str(write(MOE)))
    assert (size.experts, size.active, size.ffn, size.shared) == (60, 4, 1408, 5632)
    assert size.expert_parameters == 60 * 3 * 1408 * 4096
    assert size.dense_parameters == 3 * 5632 * 4096 + 60 * 4096


def test_sizes_given_as_text():
    size = model_size("layers=2,width=64,heads=4,groups=2,ffn=128,vocabulary=10,gated=0,tied=1")
    assert size.parameters == 2 * (128 * 64 + 64**2 + 2 * 128 * 64) + 640
    assert not size.gated


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama", "model must be one of 'gpt2-124m', .*; got 'llama'"),
        ("layers=2,wide=4", "model must be one of 'layers', .*; got 'wide'"),
        ("layers=two", "model must have a whole number for layers; got 'two'"),
        ("layers=2,width=64,ffn=64,vocabulary=9", "model must tell heads; got "),
        (
            "layers=2,width=64,heads=3,ffn=64,vocabulary=9",
            r"width must be a multiple of heads \(3\); got 64",
        ),
        (
            "layers=2,width=64,heads=4,groups=3,ffn=64,vocabulary=9",
            r"groups must divide heads \(4\); got 3",
        ),
        (
            "layers=2,width=64,heads=4,ffn=64,vocabulary=9,experts=2,active=3",
            r"active must be from 1 to experts \(2\); got 3",
        ),
    ],
)
def test_wrong_sizes_raise(text, message):
    with pytest.raises(ValueError, match=message):
        model_size(text)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "model must be a JSON object; got "),
        ("{", "model must be a JSON file; got "),
        ({**LLAMA, "kv_lora_rank": 512}, "with kv_lora_rank, multi-head latent attention"),
        ({**LLAMA, "vocab_size": None}, "model must have vocab_size in its configuration"),
        ({**LLAMA, "hidden_size": 4096.5}, "must have a whole number for hidden_size; got 4096.5"),
    ],
)
def test_wrong_configurations_raise(write, config, message):
    path = str(write(config))
    with pytest.raises(ValueError, match=message):
        model_size(path)
