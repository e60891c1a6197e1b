"""Blocks replaced by ``TransformerLayer`` compute the same model, for the GPT and the Llama."""

import copy

import gpt
import layers
import llama
import pytest
import torch
from layers import use_transformer_layers

MODELS = {
    "gpt": lambda: gpt.GPT(gpt.GPTConfig(context=12, n_layer=2, n_head=4, dim=32)),
    "llama": lambda: llama.Llama(
        llama.LlamaConfig(context=12, n_layer=2, n_head=4, n_group=2, dim=32, ffn=48)
    ),
}


def with_random_vectors(model):
    """The model in float64, with random vectors in place of the initial zeros and ones."""
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_transformer_layers_have_the_gradients_of_plain_blocks(name):
    """Compare logits and all gradients, from the same weights; rotary angles are float32 there."""
    plain = with_random_vectors(MODELS[name]())
    fused = copy.deepcopy(plain)
    use_transformer_layers(fused)
    tokens, targets = torch.randint(256, (2, 2, 12))
    tolerance = 1e-12 if name == "gpt" else 1e-5
    assert torch.allclose(fused(tokens), plain(tokens), atol=tolerance, rtol=tolerance)
    for model in (plain, fused):
        model(tokens, targets).backward()
    for fused_block, plain_block in zip(fused.blocks, plain.blocks, strict=True):
        for parameter in plain_block.parameters():
            parameter.data = parameter.grad  # so that _weights returns the gradients
        expected = layers._weights(plain_block)
        assert set(expected) == {name for name, _ in fused_block.named_parameters()}
        for label, parameter in fused_block.named_parameters():
            scale = tolerance * expected[label].norm()
            # The gradient of a key bias is 0, because softmax cancels it.
            if not label.endswith("key_bias"):
                assert (parameter.grad - expected[label]).norm() <= scale, label
    for label, parameter in plain.named_parameters():
        if not label.startswith("blocks."):
            grad = fused.get_parameter(label).grad
            assert (grad - parameter.grad).norm() <= tolerance * parameter.grad.norm(), label


@pytest.mark.parametrize("name", MODELS)
def test_a_later_token_changes_no_earlier_logits(name):
    model = MODELS[name]().eval()
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % 256
    torch.testing.assert_close(model(tokens)[:, :-1], model(changed)[:, :-1])
    assert not torch.allclose(model(tokens)[:, -1], model(changed)[:, -1])


def test_rotary_scores_depend_only_on_distances():
    """Rotating queries and keys by one more angle changes no score."""
    q, k = torch.randn(2, 1, 1, 9, 8, dtype=torch.float64)
    rotary_angles = llama.rotary_angles(10, 8, torch.device("cpu")).double()
    scores = [
        llama.rotate(q, rotary_angles[n : n + 9])
        @ llama.rotate(k, rotary_angles[n : n + 9]).transpose(2, 3)
        for n in (0, 1)
    ]
    assert torch.allclose(*scores, atol=1e-5)
    assert not torch.allclose(scores[0], q @ k.transpose(2, 3), atol=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"n_group": 3}, "n_group must divide"), ({"dim": 36}, "dim must be a multiple of 2")],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    sizes = {"context": 8, "n_layer": 1, "n_head": 4, "n_group": 2, "dim": 32, "ffn": 8}
    with pytest.raises(ValueError, match=message):
        llama.LlamaConfig(**sizes | change)


def test_a_gpt_without_biases_is_refused():
    config = gpt.GPTConfig(context=8, n_layer=1, n_head=2, dim=16, bias=False)
    with pytest.raises(ValueError, match="bias must be True"):
        use_transformer_layers(gpt.GPT(config))
