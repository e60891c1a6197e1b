"""Generation with a cache: its logits are those of the whole context, and the example runs."""

import generate
import llama
import pytest
import savings
import text
import torch
import train_gpt
from layers import store_in_fp8, use_transformer_layers

import float8lab

CONFIG = llama.LlamaConfig(context=16, n_layer=2, n_head=2, n_group=1, dim=32, ffn=48)


def small_text():
    data = torch.arange(4000) * 7 % 256
    return text.Text(data, data[:1000], "made up")


def test_cached_logits_equal_those_of_the_whole_context():
    model = llama.Llama(CONFIG).double().eval()
    use_transformer_layers(model)
    tokens = torch.randint(256, (2, 12))
    cache = float8lab.InferenceParams(2, 12)
    meter = savings.Meter("cpu")
    generated = generate.generate(model, tokens[:, :6], 6, cache, meter, forced=tokens[:, 6:])
    expected_logits = model(tokens)[:, 5:11]
    assert torch.allclose(generated[1].double(), expected_logits, atol=1e-5)
    assert torch.equal(generated[0], expected_logits.argmax(-1))
    assert len(meter.seconds) == 5


def test_generated_tokens_have_the_largest_logits():
    model = llama.Llama(CONFIG).eval()
    use_transformer_layers(model)
    prompt = torch.randint(256, (3, 4))
    cache = float8lab.InferenceParams(3, 9)
    tokens, _ = generate.generate(model, prompt, 5, cache, savings.Meter("cpu"))
    expected_logits = model(torch.cat((prompt, tokens), dim=1))
    assert torch.equal(expected_logits[:, 3:-1].argmax(-1), tokens)


def test_served_prompts_get_the_tokens_of_separate_generation():
    model = llama.Llama(CONFIG).eval()
    use_transformer_layers(model)
    prompts, counts = [torch.randint(256, (n,)) for n in (3, 6, 2, 5)], [5, 2, 4, 3]
    pages = 2 * 4 + 1  # not enough for two sequences of 10 tokens
    cache = float8lab.InferenceParams(2, 10, is_paged=True, page_size=2, total_num_pages=pages)
    served = generate.serve(model, prompts, counts, cache)
    for prompt, count, tokens in zip(prompts, counts, served, strict=True):
        cache_of_one = float8lab.InferenceParams(1, 10)
        meter = savings.Meter("cpu")
        expected, _ = generate.generate(model, prompt[None], count, cache_of_one, meter)
        assert tokens == expected[0].tolist()


@pytest.mark.parametrize("name", generate.RECIPES)
def test_fp8_layers_hold_the_rounded_weights(name):
    recipe = generate.RECIPES[name]
    model = llama.Llama(CONFIG).eval()
    use_transformer_layers(model)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    store_in_fp8(model, recipe)
    stored = {n: p for n, p in model.named_parameters() if isinstance(p, float8lab.Float8Tensor)}
    assert len(stored) == 4 * CONFIG.n_layer
    for n, p in stored.items():
        # e4m3 is within 1/16 of each value, or within 2^-18 of the largest value with the same
        # scale.
        bound = torch.maximum(weights[n].abs() / 16, weights[n].abs().max() * 2.0**-18)
        assert ((p.dequantize() - weights[n]).abs() <= bound * (1 + 1e-6)).all()
    assert not any(block.training for block in model.blocks)


def test_example_generates_and_prints_the_savings(monkeypatch, capsys):
    monkeypatch.setitem(generate.SIZES, "tiny", CONFIG)
    monkeypatch.setattr(generate, "load_text", small_text)
    monkeypatch.setattr(train_gpt, "tqdm", None)
    sizes = ["--batch", "2", "--prompt", "5", "--new", "4"]
    with float8lab.count_gemms() as counts:
        runs = generate.main(["--train-steps", "2", *sizes])
    # Each layer has four GEMMs: qkv, proj and two of the MLP. The last run takes 4 steps twice: it
    # reads its own tokens, then those of the first run. Serving one prompt after the other takes 4
    # and 2 steps.
    assert counts.fp8 == 4 * CONFIG.n_layer * (4 * 2 + 4 + 2)
    output = capsys.readouterr().out
    assert "trained for 2 steps" in output
    assert "2 prompts of 5 tokens, 4 new ones each" in output
    assert "paged: 2 prompts of 2 to 5 tokens in 1 rows" in output
    assert "On a CPU, FP8 is emulated and" in output
    vectors = 2 * CONFIG.n_layer * CONFIG.n_group * 2 * (5 + 4)
    assert [run.cost.sizes["cache"] for run in runs] == [vectors * n for n in (32, 20, 20)]
    matrices = CONFIG.n_layer * (3 * 32 * 32 + 3 * 32 * 48)
    # Each row of a matrix has a scale and an amax.
    scales = CONFIG.n_layer * 8 * (32 + 16 + 16 + 32 + 2 * 48 + 32)
    bf16, cache_only, fp8 = (run.cost.sizes["weights"] for run in runs)
    assert cache_only == bf16
    assert bf16 - fp8 == matrices - scales
    # Rounding errors of 5 bits on few terms are far from 1, and not 0.
    for run in runs[1:]:
        assert 0 < (run.logits - runs[0].logits).norm() < 0.1 * runs[0].logits.norm()


def test_a_single_new_token_is_refused(capsys):
    with pytest.raises(SystemExit):
        generate.main(["--new", "1"])
    assert "--new must be 2 or more" in capsys.readouterr().err


@pytest.mark.gpu
def test_example_generates_on_a_gpu(monkeypatch, capsys):
    monkeypatch.setitem(generate.SIZES, "8b", CONFIG)
    sizes = ["--batch", "2", "--prompt", "5", "--new", "4"]
    generate.main(["--device", "cuda", "--preset", "8b", *sizes])
    assert "peak of GPU memory" in capsys.readouterr().out
