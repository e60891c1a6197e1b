"""The errors of MultiheadAttention and TransformerLayer in FP8 against float64.

The expected error is that of the same composition in float64, with noise of the stated size in
place of each cast (``tests/nn/float64.py``). Every tensor's error has an upper and a lower bound,
which catch an operand that is cast twice and a GEMM that runs in high precision.
"""

import math

import pytest
import torch
from torch import nn

import float8lab
from tests.nn import float64
from tests.nn.composition import ATTENTION_RECIPES as RECIPES
from tests.nn.composition import documented_sqnr
from tests.nn.float64 import EXACT, Rounding
from tests.pairwise import pairwise

HIDDEN, FFN, HEADS, GROUPS, B, S, SE = 64, 96, 4, 2, 4, 24, 20

NAMES = {name: name for name in RECIPES}
# test_linear.py and test_fused_function.py try each of these dtypes under every recipe.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

CROSS = {"attention_type": "cross", "attn_mask_type": "no_mask"}
ATTENTIONS = {
    "attention": {},
    "attention-layer-norm": {"input_layernorm": True},
    "attention-rms-norm-no-bias": {
        "input_layernorm": True, "normalization": "RMSNorm", "bias": False
    },
    "cross-attention": CROSS,
    "cross-attention-rms-norm": {
        "input_layernorm": True, "normalization": "RMSNorm", **CROSS
    },
}  # fmt: skip
LAYERS = {
    f"{layer_type}-{normalization}-{activation}": {
        "layer_type": layer_type, "normalization": normalization, "activation": activation
    }
    for layer_type in ("encoder", "decoder")
    for normalization in ("LayerNorm", "RMSNorm")
    for activation in ("gelu", "swiglu")
}  # fmt: skip
VARIANTS = {**ATTENTIONS, **LAYERS}
QUICK_VARIANTS = ["attention-layer-norm", "cross-attention", "encoder-RMSNorm-swiglu",
       "decoder-LayerNorm-gelu"]  # fmt: skip
SHAPES = {
    "1": (1, 1, 1), "odd": (3, 7, 5), "no-batch": (0, 5, 3), "no-tokens": (2, 0, 3),
    "no-keys": (2, 3, 0),
}  # fmt: skip


def build(variant, device="cpu", dtype=torch.float32, *, hidden=HIDDEN, ffn=FFN, **kwargs):
    """A module with grouped heads, weights that keep their inputs' variance, and uneven vectors.

    The CPU's generator draws the numbers for every device, as in ``data``.
    """
    kwargs = {
        "num_gqa_groups": GROUPS, "attention_dropout": 0.0, "device": "cpu",
        "params_dtype": dtype, "init_method": nn.init.xavier_normal_,
        "output_layer_init_method": nn.init.xavier_normal_, **VARIANTS[variant], **kwargs,
    }  # fmt: skip
    heads = 2 * kwargs["num_gqa_groups"]
    if variant in ATTENTIONS:
        module = float8lab.MultiheadAttention(hidden, heads, qkv_format="bshd", **kwargs)
    else:
        kwargs |= {"attn_input_format": "bshd", "hidden_dropout": 0.0}
        module = float8lab.TransformerLayer(hidden, ffn, heads, **kwargs)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return module.to(device)


def data(variant, device="cpu", dtype=torch.float32, *, hidden=HIDDEN, b=B, s=S, se=SE):
    """One or two inputs, and the gradient of the output."""
    shapes = [(b, s, hidden)]
    if "cross" in variant or "decoder" in variant:
        shapes.append((b, se, hidden))
    tensors = [torch.randn(shape).to(device, dtype) for shape in (*shapes, (b, s, hidden))]
    return tensors[:-1], tensors[-1]


def step(module, inputs, dy, recipe):
    """The output and all gradients, by name."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(leaves[0], encoder_output=leaves[1] if len(leaves) == 2 else None)
    y.backward(dy)
    return tensors_by_name(y, leaves, module.named_parameters())


def tensors_by_name(y, leaves, parameters):
    tensors = {"y": y.detach(), "dx": leaves[0].grad}
    if len(leaves) == 2:
        tensors["dencoder"] = leaves[1].grad
    return tensors | {name: p.grad.clone() for name, p in parameters}


def float64_step(variant, module, inputs, dy, rounding=EXACT):
    """The output and all gradients of the composition in float64, by name."""
    p = {n: v.detach().double().requires_grad_() for n, v in module.named_parameters()}
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    x, encoder = leaves[0], leaves[1] if len(leaves) == 2 else None
    if variant in ATTENTIONS:
        y = float64.attention(x, encoder, p, module.num_attention_heads, rounding)
    else:
        heads = module.self_attention.num_attention_heads
        y = float64.layer(x, encoder, p, heads, module.layernorm_mlp.activation, rounding)
    y.backward(dy.double())
    return tensors_by_name(y, leaves, p.items())


def noise_power(db):
    return 10 ** (-db / 10)


# The noise that docs/numerics.md states for a GEMM of two e4m3 operands (GEMM_NOISE), and for a
# GEMM with an output's gradient, which is e5m2 under some recipes (GRADIENT_NOISE).
GEMM_NOISE = {name: noise_power({"mx": 27.5, "nvfp4": 16.0}.get(name, 28.0)) for name in RECIPES}
GRADIENT_NOISE = {
    name: noise_power(24.0) if recipe.linear.dy.fp8_dtype == torch.float8_e5m2 else GEMM_NOISE[name]
    for name, recipe in RECIPES.items()
}


def operand_noise(name):
    """The noise of each operand.

    A forward operand has half of the noise of its GEMM. A gradient has the noise of its GEMM less
    that of the forward operand.
    """
    operand, gradient = GEMM_NOISE[name] / 2, GRADIENT_NOISE[name] - GEMM_NOISE[name] / 2
    return Rounding(*(-10 * math.log10(n) for n in (operand, gradient)), RECIPES[name].fp8_dpa)


def stated_sqnr(name, module):
    """SQNR in dB of the output, and of the gradients of inputs and weights, as in numerics.md.

    Noises add up along a chain if the weights keep the variance of their inputs. Let g be the noise
    of a forward GEMM and e that of a GEMM with a gradient. The noise in attention is:

    - 2g in the probabilities, from q and k in scores of variance 1. The output adds v's g and
      proj's g: 4g. FP8 attention also casts q, k, v and the probabilities: 2g more.
    - e in dout. The gradient of the scores adds v's g and the probabilities' 2g, the gradient of q
      adds k's g, and dx and the weight's gradient add e: 2e + 4g. FP8 attention adds the noise of
      an e5m2 operand and that of four e4m3 operands, 2g.

    A layer is a residual stream and two blocks of equal power. The MLP's input has half of
    attention's noise, and its output has the noise of two GEMMs more; the layer's output has a
    third of the sum of both. In backward, the MLP's two GEMMs with a gradient and the derivative of
    its activation leave half of 2e + 2g in the stream, before attention.
    """
    g, e = GEMM_NOISE[name], GRADIENT_NOISE[name]
    in_fp8 = RECIPES[name].fp8_dpa
    output = (6 if in_fp8 else 4) * g
    gradient = 2 * e + 4 * g
    if in_fp8:
        gradient += (e - g / 2) + 2 * g
    if isinstance(module, float8lab.TransformerLayer):
        output = (output + (output / 2 + 2 * g)) / 3
        gradient += e + g
    # Rounded down to half a dB.
    return tuple(math.floor(-20 * math.log10(n)) / 2 for n in (output, gradient))


DRAWS = 4


def expected_errors(name, variant, module, inputs, dy):
    """The exact values by name, and the norms of the errors that the noise of the casts causes."""
    exact = float64_step(variant, module, inputs, dy)
    draws = [float64_step(variant, module, inputs, dy, operand_noise(name)) for _ in range(DRAWS)]
    squares = {
        label: sum((draw[label] - expected).square().sum() for draw in draws) / DRAWS
        for label, expected in exact.items()
    }
    errors = {label: square.sqrt() for label, square in squares.items()}
    for label in errors:
        if label.endswith("key_bias"):
            # Softmax cancels a key's bias, so its gradient is 0 except for the rounding of the
            # terms, which sum to a column of the weight. In FP8 attention the output, and thus the
            # sum that should cancel these terms, is computed of rounded probabilities.
            weight = exact[label.removesuffix("bias") + "weight"]
            noise = math.sqrt(GEMM_NOISE[name] / 2) if RECIPES[name].fp8_dpa else 0.0
            errors[label] = noise * weight.norm() / math.sqrt(weight.shape[1])
    return exact, errors


@pytest.mark.parametrize(
    ("variant", "name", "dtype"), pairwise({v: v for v in VARIANTS}, NAMES, DTYPES)
)
def test_errors_of_output_and_every_gradient_match_the_stated_noise(variant, name, dtype, device):
    module = build(variant, device, dtype)
    inputs, dy = data(variant, device, dtype)
    step(module, inputs, dy, RECIPES[name])  # delayed scaling: give the gradients a history
    module.zero_grad()
    actual = step(module, inputs, dy, RECIPES[name])
    exact, errors = expected_errors(name, variant, module, inputs, dy)
    output_sqnr, gradient_sqnr = stated_sqnr(name, module)
    eps = torch.finfo(dtype).eps
    for label, expected in exact.items():
        assert actual[label].dtype == dtype
        error = (actual[label].double() - expected).norm()
        if expected.ndim == 1:
            # A vector has few numbers, so its error differs more from draw to draw. A bias may have
            # no noise but that of a sum over tokens in dtype, in any order; the terms of this sum
            # cancel for a key's bias, so the size of the key's weight stands for theirs.
            magnitude_label = label.replace("key_bias", "key_weight")
            sum_noise = 0.5 * math.sqrt(dy.shape[0] * dy.shape[1]) * eps
            assert error <= 1.6 * errors[label] + sum_noise * exact[magnitude_label].norm(), label
        else:
            assert 0.7 * errors[label] <= error <= 1.2 * errors[label], label
            sqnr = 20 * math.log10(expected.norm() / error)
            assert sqnr >= (output_sqnr if label == "y" else gradient_sqnr), label


def test_derived_sqnr_equals_the_table_of_the_documentation():
    rows = {
        "`DelayedScaling`, `Float8CurrentScaling`": ("delayed", "current"),
        "the same with `fp8_dpa=True`": ("delayed-dpa", "current-dpa"),
        "`Float8RowwiseScaling`, `Float8BlockScaling`": ("rowwise", "block"),
        "`MXFP8BlockScaling`": ("mx",), "`NVFP4BlockScaling`": ("nvfp4",),
    }  # fmt: skip
    table = documented_sqnr("Accuracy of attention and transformer layers")
    assert table.keys() == rows.keys()
    modules = build("attention"), build("encoder-LayerNorm-gelu")
    derived = {name: sum((stated_sqnr(name, m) for m in modules), ()) for name in RECIPES}
    assert {name: table[row] for row, names in rows.items() for name in names} == derived


@pytest.mark.parametrize(
    ("variant", "name", "sizes"), pairwise({v: v for v in QUICK_VARIANTS}, NAMES, SHAPES)
)
def test_small_odd_and_empty_shapes_keep_the_error_bound(variant, name, sizes, device):
    b, s, se = sizes
    module = build(variant, device, hidden=30, ffn=34, num_gqa_groups=1)
    inputs, dy = data(variant, device, hidden=30, b=b, s=s, se=se)
    step(module, inputs, dy, RECIPES[name])
    module.zero_grad()
    actual = step(module, inputs, dy, RECIPES[name])
    exact, errors = expected_errors(name, variant, module, inputs, dy)
    # A softmax over one key has gradients 0; the rounding error scales with the other tensors.
    rounding = 1e-6 * max(expected.norm() for expected in exact.values())
    for label, expected in exact.items():
        assert actual[label].shape == expected.shape
        # The tensors have few numbers, so the noise may reach three times its root mean square.
        assert (actual[label].double() - expected).norm() <= 3 * errors[label] + rounding, label
