"""MultiheadAttention and TransformerLayer in FP8: numbers against float64.

The error against float64 is compared with that of the same composition in which each cast is a
noise of the stated size (``tests/nn/float64.py``): for every tensor, from both sides, so that a
product that runs in high precision is as visible as one that is cast twice.
"""

import math

import pytest
import torch
from torch import nn

import float8lab
from tests.nn import float64
from tests.nn.composition import OF_ATTENTION as RECIPES
from tests.nn.float64 import EXACT, Rounding
from tests.pairwise import pairwise

HIDDEN, FFN, HEADS, GROUPS, B, S, SE = 64, 96, 4, 2, 4, 24, 20

NAMES = {name: name for name in RECIPES}
each_recipe = pytest.mark.parametrize("name", RECIPES)
# What test_linear.py and test_fused_function.py prove of each module under every recipe.
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
FEW = ["attention-layer-norm", "cross-attention", "encoder-RMSNorm-swiglu",
       "decoder-LayerNorm-gelu"]  # fmt: skip
SHAPES = {
    "1": (1, 1, 1), "odd": (3, 7, 5), "no-batch": (0, 5, 3), "no-tokens": (2, 0, 3),
    "no-keys": (2, 3, 0),
}  # fmt: skip


def build(variant, device="cpu", dtype=torch.float32, *, hidden=HIDDEN, ffn=FFN, **kwargs):
    """With grouped heads, weights that keep the variance of their inputs, and uneven vectors.

    The numbers are those of the CPU's generator on every device, as in ``data``.
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
    """Inputs, one or two, and the gradient of the output."""
    shapes = [(b, s, hidden)]
    if "cross" in variant or "decoder" in variant:
        shapes.append((b, se, hidden))
    tensors = [torch.randn(shape).to(device, dtype) for shape in (*shapes, (b, s, hidden))]
    return tensors[:-1], tensors[-1]


def step(module, inputs, dy, recipe):
    """Output and all gradients by name."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(leaves[0], encoder_output=leaves[1] if len(leaves) == 2 else None)
    y.backward(dy)
    return named(y, leaves, module.named_parameters())


def named(y, leaves, parameters):
    found = {"y": y.detach(), "dx": leaves[0].grad}
    if len(leaves) == 2:
        found["dencoder"] = leaves[1].grad
    return found | {name: p.grad.clone() for name, p in parameters}


def composed(variant, module, inputs, dy, rounding=EXACT):
    """The same of the composition in float64."""
    p = {n: v.detach().double().requires_grad_() for n, v in module.named_parameters()}
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    x, encoder = leaves[0], leaves[1] if len(leaves) == 2 else None
    if variant in ATTENTIONS:
        y = float64.attention(x, encoder, p, module.num_attention_heads, rounding)
    else:
        heads = module.self_attention.num_attention_heads
        y = float64.layer(x, encoder, p, heads, module.layernorm_mlp.activation, rounding)
    y.backward(dy.double())
    return named(y, leaves, p.items())


def power(db):
    return 10 ** (-db / 10)


# What docs/numerics.md states for one GEMM of two e4m3 operands, and of an e4m3 and an e5m2 one.
GEMM = {name: power({"mx": 27.5, "nvfp4": 16.0}.get(name, 28.0)) for name in RECIPES}
OF_GRADIENT = {
    name: power(24.0) if recipe.linear.dy.fp8_dtype == torch.float8_e5m2 else GEMM[name]
    for name, recipe in RECIPES.items()
}


def rounding_of(name):
    """The noise of one operand: half that of a GEMM of two e4m3 ones, or what they leave of it."""
    operand, gradient = GEMM[name] / 2, OF_GRADIENT[name] - GEMM[name] / 2
    return Rounding(*(-10 * math.log10(n) for n in (operand, gradient)), RECIPES[name].fp8_dpa)


def stated(name, module):
    """SQNR in dB of outputs and of gradients of inputs and weights; docs/numerics.md has them.

    Noises add up along a chain, for weights that keep the variance of their inputs. With g the
    noise of a forward GEMM and e that of one with a gradient, attention has:

    - probabilities 2g, from q and k in scores of variance 1; with v's g and that of proj, the
      output 4g. FP8 attention casts q, k, v and probabilities too: 2g more.
    - dout e; to it the gradient of the scores adds v's g and the probabilities' 2g, that of q adds
      k's g; dx and the weight's gradient add e: 2e + 4g. FP8 attention adds the noise of an e5m2
      operand and those of four e4m3 ones, 2g.

    A layer is a residual stream and two blocks. At equal powers, the MLP's input has half of
    attention's noise, its output the noise of two GEMMs more; the output has a third of the sum of
    both. Backward, the MLP's two GEMMs with a gradient, and the derivative of its activation, leave
    half of 2e + 2g in the stream, before attention.
    """
    g, e = GEMM[name], OF_GRADIENT[name]
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
    """The exact values by name, and the norms of the errors that the noise of each cast leaves."""
    exact = composed(variant, module, inputs, dy)
    draws = [composed(variant, module, inputs, dy, rounding_of(name)) for _ in range(DRAWS)]
    squares = {
        label: sum((draw[label] - wanted).square().sum() for draw in draws) / DRAWS
        for label, wanted in exact.items()
    }
    errors = {label: square.sqrt() for label, square in squares.items()}
    for label in errors:
        if label.endswith("key_bias"):
            # Softmax cancels it: the gradient is 0 but for the rounding of terms that sum to one of
            # the weight's columns. In FP8 attention the output, and so the sum that is to cancel
            # them, is of rounded probabilities.
            weight = exact[label.removesuffix("bias") + "weight"]
            noise = math.sqrt(GEMM[name] / 2) if RECIPES[name].fp8_dpa else 0.0
            errors[label] = noise * weight.norm() / math.sqrt(weight.shape[1])
    return exact, errors


@pytest.mark.parametrize(
    ("variant", "name", "dtype"), pairwise({v: v for v in VARIANTS}, NAMES, DTYPES)
)
def test_output_and_every_gradient(variant, name, dtype, device):
    module = build(variant, device, dtype)
    inputs, dy = data(variant, device, dtype)
    step(module, inputs, dy, RECIPES[name])  # delayed scaling: give the gradients a history
    module.zero_grad()
    actual = step(module, inputs, dy, RECIPES[name])
    exact, errors = expected_errors(name, variant, module, inputs, dy)
    of_output, of_gradient = stated(name, module)
    eps = torch.finfo(dtype).eps
    for label, wanted in exact.items():
        assert actual[label].dtype == dtype
        error = (actual[label].double() - wanted).norm()
        if wanted.ndim == 1:
            # Few numbers, that differ more from draw to draw; and biases may have no noise but that
            # of a sum over tokens in dtype, in any order. A key's bias has it of terms that cancel.
            like = label.replace("key_bias", "key_weight")
            summed = 0.5 * math.sqrt(dy.shape[0] * dy.shape[1]) * eps
            assert error <= 1.6 * errors[label] + summed * exact[like].norm(), label
        else:
            assert 0.7 * errors[label] <= error <= 1.2 * errors[label], label
            sqnr = 20 * math.log10(wanted.norm() / error)
            assert sqnr >= (of_output if label == "y" else of_gradient), label


# The table of docs/numerics.md.
STATED = {
    "delayed": ((21.5, 18.0), (23.5, 17.0)), "current": ((21.5, 18.0), (23.5, 17.0)),
    "rowwise": ((21.5, 20.0), (23.5, 18.5)), "block": ((21.5, 20.0), (23.5, 18.5)),
    "mx": ((21.0, 19.5), (23.0, 18.0)), "nvfp4": ((9.5, 8.0), (11.5, 6.5)),
    "delayed-dpa": ((20.0, 16.5), (22.0, 15.5)), "current-dpa": ((20.0, 16.5), (22.0, 15.5)),
}  # fmt: skip


@each_recipe
def test_stated_numbers(name):
    found = tuple(stated(name, build(v)) for v in ("attention", "encoder-LayerNorm-gelu"))
    assert found == STATED[name]


@pytest.mark.parametrize(("variant", "name", "sizes"), pairwise({v: v for v in FEW}, NAMES, SHAPES))
def test_any_shape_trains(variant, name, sizes, device):
    b, s, se = sizes
    module = build(variant, device, hidden=30, ffn=34, num_gqa_groups=1)
    inputs, dy = data(variant, device, hidden=30, b=b, s=s, se=se)
    step(module, inputs, dy, RECIPES[name])
    module.zero_grad()
    actual = step(module, inputs, dy, RECIPES[name])
    exact, errors = expected_errors(name, variant, module, inputs, dy)
    # Gradients that one key cancels are 0 but for the rounding of what is not.
    rounding = 1e-6 * max(wanted.norm() for wanted in exact.values())
    for label, wanted in exact.items():
        assert actual[label].shape == wanted.shape
        # A handful of numbers, whose noise may be thrice its root mean square.
        assert (actual[label].double() - wanted).norm() <= 3 * errors[label] + rounding, label
