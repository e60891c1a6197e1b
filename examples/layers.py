"""The blocks of ``gpt.py`` and ``llama.py`` as ``float8lab.TransformerLayer``, with their weights.

A ``TransformerLayer`` fuses the norms and the activation with the casts to FP8, and its attention
can run in FP8 too. In high precision its output is that of the plain block.
"""

from __future__ import annotations

import torch
from gpt import GPT, GPTConfig
from llama import Llama, LlamaConfig
from torch import Tensor, nn

import float8lab
from float8lab import TransformerLayer
from float8lab.recipes import Recipe

__all__ = ["store_in_fp8", "use_transformer_layers"]


def _layer(config: GPTConfig | LlamaConfig, number: int, dtype: torch.dtype) -> TransformerLayer:
    if isinstance(config, LlamaConfig):
        return TransformerLayer(
            config.dim, config.ffn, config.n_head, config.n_group,
            hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd",
            normalization="RMSNorm", activation="swiglu", bias=False, layer_number=number,
            fuse_qkv_params=True, qkv_weight_interleaved=False, params_dtype=dtype,
        )  # fmt: skip
    if not config.bias:
        raise ValueError("bias must be True; got False. The LayerNorm of a layer has one.")
    return TransformerLayer(
        config.dim, 4 * config.dim, config.n_head,
        hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd", layer_number=number,
        fuse_qkv_params=True, qkv_weight_interleaved=False, params_dtype=dtype,
    )  # fmt: skip


def _weights(block: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a plain block under their names in a ``TransformerLayer``."""
    weights: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        parameters = {
            n.removesuffix(f".{kind}"): p for n, p in block.named_parameters() if kind in n
        }
        if "attention.qkv" in parameters:
            qkv: Tensor = parameters["attention.qkv"]
        elif "attention.query" in parameters:
            qkv = torch.cat([parameters[f"attention.{n}"] for n in ("query", "key", "value")])
        else:
            continue
        gate = [parameters["mlp.gate"]] if "mlp.gate" in parameters else []
        weights |= {
            f"self_attention.layernorm_qkv.layer_norm_{kind}": parameters["norm_1"],
            f"self_attention.layernorm_qkv.{kind}": qkv,
            f"self_attention.proj.{kind}": parameters["attention.proj"],
            f"layernorm_mlp.layer_norm_{kind}": parameters["norm_2"],
            f"layernorm_mlp.fc1_{kind}": torch.cat([*gate, parameters["mlp.up"]]),
            f"layernorm_mlp.fc2_{kind}": parameters["mlp.down"],
        }
    return weights


def use_transformer_layers(model: GPT | Llama) -> None:
    """Replace the blocks of a model; its outputs in high precision stay the same.

    The last norm is converted, too: under ``torch.autocast`` it then reads bfloat16, for which
    torch's norm has no fused kernel.
    """
    float8lab.nn.convert_norms(model)
    weight = model.lm_head.weight
    for i, block in enumerate(model.blocks):
        with torch.device(weight.device):
            layer = _layer(model.config, i + 1, weight.dtype)
        layer.load_state_dict(_weights(block), strict=True)
        model.blocks[i] = layer.train(block.training)


def store_in_fp8(model: GPT | Llama, recipe: Recipe) -> None:
    """Store the matrices of ``TransformerLayer`` blocks in FP8 only, with the recipe's blocks."""
    weight = model.lm_head.weight
    for i, block in enumerate(model.blocks):
        with torch.device(weight.device), float8lab.fp8_model_init(recipe=recipe):
            layer = _layer(model.config, i + 1, weight.dtype)
        layer.load_state_dict(block.state_dict(), strict=True)
        model.blocks[i] = layer.train(block.training)
