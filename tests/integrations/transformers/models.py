"""Tiny Hugging Face models with random weights, built from configs, and FP8 in plain PyTorch."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

TEXT = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    **TEXT, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {
    **DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "decoder_sparse_step": 1, "mlp_only_layers": [1],
}  # fmt: skip
SPEECH = {
    **TEXT, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32,
    "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip


def _tokens() -> dict[str, Tensor]:
    tokens = torch.randint(3, 64, (2, 9))
    return {"input_ids": tokens, "labels": tokens}


def _image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 3, 8, 8), "labels": torch.tensor([0, 1, 2])}


def _speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 20), "labels": torch.randint(3, 64, (2, 7))}


FAMILIES: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Tensor]]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**DECODER, "tie_word_embeddings": True}, _tokens),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", DECODER, _tokens),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS, _tokens),
    "qwen2_moe": (
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 40},
        _tokens,
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            **TEXT, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
        _tokens,
    ),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        {
            **TEXT, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 64,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        },
        _tokens,
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            **TEXT, "d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 2, "num_heads": 4,
            "dropout_rate": 0.0, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu",
        },
        _tokens,
    ),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {
            "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
            "num_attention_heads": 4, "image_size": 8, "patch_size": 4, "num_labels": 3,
        },
        _image,
    ),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", SPEECH, _speech),
}  # fmt: skip
"""By family: config class, model class, arguments of the config, and a function making a batch."""

_LOCAL_EXPERTS = {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}
MOE_FAMILIES: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Tensor]]]] = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _LOCAL_EXPERTS, _tokens),
    "olmoe": (
        "OlmoeConfig", "OlmoeForCausalLM", {**DECODER, "num_experts": 4, "num_experts_per_tok": 2},
        _tokens,
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **DECODER, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
            "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
            "v_head_dim": 12, "head_dim": 8, "num_key_value_heads": 4,
        },
        _tokens,
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **_LOCAL_EXPERTS, "layer_types": ["full_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        _tokens,
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            **_LOCAL_EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 40,
            "interleave_moe_layer_step": 1,
        },
        _tokens,
    ),
    "dbrx": (
        "DbrxConfig",
        "DbrxForCausalLM",
        {
            **TEXT, "d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {
                "ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 48,
            },
        },
        _tokens,
    ),
}  # fmt: skip
"""The same for MoE models, which store their experts in different layouts."""


OTHER_MOE_FAMILIES: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Tensor]]]] = {
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **_LOCAL_EXPERTS, "shared_intermediate_size": 32, "layer_types": ["attention"] * 2,
            "mamba_n_heads": 4, "mamba_d_head": "auto",
        },
        _tokens,
    ),
}  # fmt: skip
"""The same for MoE models that save their experts in yet another layout."""


def build(family: str, **config_fields: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a model in training mode, without dropout, and a batch with labels."""
    config, model, arguments, batch = {**FAMILIES, **MOE_FAMILIES, **OTHER_MOE_FAMILIES}[family]
    torch.manual_seed(0)
    built = getattr(transformers, model)(
        getattr(transformers, config)(**{**arguments, **config_fields})
    )
    return built.train(), batch()


def flat_gradients(model: nn.Module) -> Tensor:
    """Return all gradients as one vector; parameters without a gradient have none in any run."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def run_step(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits and gradients of one step."""
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return output.logits.detach(), flat_gradients(model)


# Float8CurrentScaling in plain PyTorch: operands are rounded to FP8, and GEMMs multiply the rounded
# values.


def _round_to_fp8(x: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    amax = x.abs().amax().float() if x.numel() else torch.zeros(())
    scale = 1 / (torch.finfo(fp8_dtype).max / amax) if amax > 0 else torch.ones(())
    return (x.float() * (1 / scale)).to(fp8_dtype).float() * scale


def _round_by_expert(x: Tensor, expert: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Round rows, sorted by expert, to FP8 with a scale for the rows of each expert."""
    _, sizes = expert.unique_consecutive(return_counts=True)
    return torch.cat([_round_to_fp8(rows, fp8_dtype) for rows in x.split(sizes.tolist())])


class _EmulatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        x_q, w_q = (_round_to_fp8(t, torch.float8_e4m3fn) for t in (flat, weight))
        ctx.save_for_backward(x_q, w_q)
        ctx.x_shape = x.shape
        y = x_q @ w_q.t()
        return (y if bias is None else y + bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_q, w_q = ctx.saved_tensors
        flat = dy.reshape(-1, dy.shape[-1])
        dy_q = _round_to_fp8(flat, torch.float8_e5m2)
        db = flat.sum(0) if ctx.needs_input_grad[2] else None
        return (dy_q @ w_q).view(ctx.x_shape), dy_q.t() @ x_q, db


class _EmulatedGroups(torch.autograd.Function):
    """The rows and the weight of each expert have their own scales."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
        x_q = _round_by_expert(x, expert, torch.float8_e4m3fn)
        w_q = torch.stack([_round_to_fp8(w, torch.float8_e4m3fn) for w in weight])
        ctx.save_for_backward(x_q, w_q, expert)
        return (x_q[:, None] @ w_q[expert].mT)[:, 0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_q, w_q, expert = ctx.saved_tensors
        dy_q = _round_by_expert(dy, expert, torch.float8_e5m2)
        expert_mask = expert == torch.arange(len(w_q))[:, None]
        dw = (dy_q.t() * expert_mask[:, None]) @ x_q
        return (dy_q[:, None] @ w_q[expert])[:, 0], dw, None


def _emulated_experts(layer: Any) -> Callable[..., Tensor]:
    def forward(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        expert, order = index.flatten().sort(stable=True)
        rows = x[order // index.shape[1]]
        h = layer._apply_gate(_EmulatedGroups.apply(rows, layer.gate_up_proj, expert))
        y = _EmulatedGroups.apply(h, layer.down_proj, expert)
        y = y.new_zeros(y.shape).index_copy(0, order, y).view(*index.shape, -1)
        return (y * weights[..., None]).sum(1)

    return forward


def emulate_fp8(model: Any, names: list[str]) -> Any:
    """Return a copy of a model whose named layers compute on operands rounded to FP8."""
    copied = copy.deepcopy(model)
    for name in names:
        layer = copied.get_submodule(name)
        if hasattr(layer, "gate_up_proj"):
            layer.forward = _emulated_experts(layer)
            continue
        assert isinstance(layer, (nn.Linear, Conv1D))

        def forward(x: Tensor, layer: Any = layer) -> Tensor:
            weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
            return _EmulatedLinear.apply(x, weight, layer.bias)

        layer.forward = forward
    return copied
