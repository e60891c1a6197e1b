"""Wrong calls of public functions: one valid call of each, and one argument replaced at a time."""

from __future__ import annotations

import copy
import inspect
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

import float8lab
from float8lab import distributed, integrations, optim, recipes
from float8lab import nn as fnn
from float8lab.inspect import CheckpointError, memory_report
from float8lab.inspect.advice import advise
from float8lab.inspect.damage import sensitivity

__all__ = ["CALLS", "Case", "cases", "complaint"]

RECIPE = recipes.Float8CurrentScaling()
H = 32  # features
S, B = 3, 2


class Opaque:
    """A value of a type that nothing knows."""

    def __repr__(self) -> str:
        return "Opaque()"


WRONG: tuple[Any, ...] = (
    None,
    "x",
    "",
    b"x",
    -1,
    0,
    1,
    3,
    1.5,
    -0.5,
    1e30,
    float("nan"),
    float("inf"),
    True,
    [],
    (),
    {},
    (1, 2, 3),
    ["x"],
    {"x": -1},
    Opaque(),
    torch.int8,
    torch.float8_e4m3fn,
    torch.tensor(1.0),
    torch.ones(2, 2),
    torch.ones(2, 2, dtype=torch.bool),
    torch.tensor([7, 7]),
    torch.ones(3, 2, 32, dtype=torch.int64),
    torch.ones(3, 2, 32, dtype=torch.complex64),
)


class Call(NamedTuple):
    """A public callable, the arguments of a valid call, and what its result is used for."""

    function: Callable[..., Any]
    arguments: Callable[[Path], dict[str, Any]]
    use: Callable[[Any], Any] = lambda result: None
    skip: tuple[str, ...] = ()
    """Parameters that take anything."""
    refusal: str = "(it works)"
    """What the valid call is refused with where there is no GPU, or no group of processes."""


def _x(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, steps=torch.Size(shape).numel()).view(shape)


def _train(*inputs: Any) -> Callable[[Any], None]:
    """Forward and backward of a module, in high precision and in FP8, with finite results."""

    def use(module: Any) -> None:
        for enabled in (False, True):
            with float8lab.autocast(enabled, recipe=RECIPE):
                y = module(*inputs)
            outputs = [t for t in (y if isinstance(y, tuple) else (y,)) if t is not None]
            assert all(t.isfinite().all() for t in outputs)
            sum(t.float().sum() for t in outputs).backward()
        repr(module)

    return use


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(H, H), nn.GELU(), nn.Linear(H, H))


def _converted() -> nn.Sequential:
    model = _model()
    float8lab.convert_to_float8(model)
    return model


def _constant(**arguments: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: arguments


def _loss_of_model(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return _loss(model(batch))


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def _linear_step(context: Any) -> None:
    with context:
        layer = float8lab.Linear(H, H)
        layer(_x(B, H)).sum().backward()


def _use_norm(norm: Any) -> None:
    _train(_x(*([B] if len(norm.normalized_shape) < 3 else []), *norm.normalized_shape))(norm)


def _use_linear(layer: Any) -> None:
    _train(_x(B, layer.in_features))(layer)


def _use_mlp(layer: Any) -> None:
    _train(_x(B, layer.hidden_size))(layer)


def _use_attention(module: Any) -> None:
    q, k, v = (
        _x(S, B, heads, size)
        for heads, size in (
            (module.num_attention_heads, module.qk_channels),
            (module.num_gqa_groups, module.qk_channels),
            (module.num_gqa_groups, module.v_channels),
        )
    )
    if module.qkv_format == "thd" or module.attn_mask_type not in ("no_mask", "causal"):
        return
    assert module(*(x.requires_grad_() for x in (q, k, v))).isfinite().all()


def _use_layer(module: Any) -> None:
    size = getattr(module, "hidden_size", H)
    inner = getattr(module, "self_attention", module)
    if inner.qkv_format == "thd" or inner.attn_mask_type not in ("no_mask", "causal"):
        return
    _train(_x(S, B, size))(module)


def _use_angles(module: Any) -> None:
    angles = module(S)
    assert angles.isfinite().all()
    assert angles.shape[0] == S


def _use_cache(params: Any) -> None:
    attention = float8lab.DotProductAttention(2, 8, layer_number=1)
    q, k, v = torch.ones(3, 1, 1, 2, 8)
    torch.testing.assert_close(attention(q, k, v, inference_params=params), torch.ones(1, 1, 16))


def _export(model: nn.Module, folder: Path) -> Path:
    integrations.export(model, folder / "model", overwrite=True)
    return folder / "model"


def _of_megatron(folder: Path) -> Path:
    path = folder / "run" / "mp_rank_00"
    path.mkdir(parents=True, exist_ok=True)
    state = {"model": {"embedding.word_embeddings.weight": _x(8, H)}}
    torch.save(state, path / "model_optim_rng.pt")
    return path.parent


def _assert(truth: bool) -> None:
    assert truth


def _log() -> Any:
    model = _converted()
    with float8lab.inspect.watch(model) as watch:
        model(_x(B, H)).sum().backward()
    return watch.log


_GPT2 = SimpleNamespace(
    n_embd=H, n_inner=None, n_head=2, n_layer=1, resid_pdrop=0.0, attn_pdrop=0.0,
    layer_norm_epsilon=1e-5, activation_function="gelu_new",
)  # fmt: skip


def _forward_calls() -> dict[str, Call]:
    """Calls of modules. A use is a finite output, or several."""
    q, x, angles = _x(S, B, 2, 8), _x(S, B, H), _x(8, 1, 1, 8)
    padding = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    layer: dict[str, Any] = {"ffn_hidden_size": H, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    packed = {"cu_seqlens_q": torch.tensor([0, 1, 3]), "cu_seqlens_kv": torch.tensor([0, 1, 3])}
    thd = {"query_layer": q[:, 0], "key_layer": q[:, 0], "value_layer": q[:, 0], **packed}
    modules: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "Linear": (float8lab.Linear(H, H), {"inp": x}),
        "GroupedLinear": (
            float8lab.GroupedLinear(2, H, H), {"inp": x, "m_splits": [S * B, 0]}
        ),
        "ExpertMLP": (
            float8lab.ExpertMLP(2, H, H),
            {"inp": x, "probs": torch.ones(S * B, 1), "routing_map": torch.ones(S * B, 1).long()},
        ),
        "LayerNorm": (float8lab.LayerNorm(H), {"inp": x}),
        "RMSNorm": (float8lab.RMSNorm(H), {"inp": x}),
        "LayerNormLinear": (float8lab.LayerNormLinear(H, H), {"inp": x}),
        "LayerNormMLP": (float8lab.LayerNormMLP(H, H), {"inp": x}),
        "RotaryPositionEmbedding": (float8lab.RotaryPositionEmbedding(8), {"max_seq_len": S}),
        "DotProductAttention": (
            float8lab.DotProductAttention(2, 8, layer_number=1),
            {"query_layer": q, "key_layer": q, "value_layer": q},
        ),
        "DotProductAttention(padding)": (
            float8lab.DotProductAttention(2, 8, attn_mask_type="padding"),
            {"query_layer": q, "key_layer": q, "value_layer": q, "attention_mask": padding},
        ),
        "DotProductAttention(thd)": (
            float8lab.DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding"), thd
        ),
        "MultiheadAttention": (
            float8lab.MultiheadAttention(H, 4, layer_number=1, attention_dropout=0.0),
            {"hidden_states": x, "rotary_pos_emb": angles},
        ),
        "TransformerLayer": (
            float8lab.TransformerLayer(
                H, num_attention_heads=4, layer_number=1, layer_type="decoder", **layer
            ),
            {"hidden_states": x, "encoder_output": x},
        ),
        "TransformerLayer(padding)": (
            float8lab.TransformerLayer(
                H, num_attention_heads=4, layer_type="decoder", self_attn_mask_type="padding",
                enc_dec_attn_mask_type="padding", **layer,
            ),
            {
                "hidden_states": x, "encoder_output": x, "attention_mask": padding,
                "enc_dec_attn_mask": (padding, padding),
            },
        ),
    }  # fmt: skip
    return {
        name: Call(
            module.forward,
            _constant(**arguments),
            lambda y: _assert(
                all(t.isfinite().all() for t in (y if isinstance(y, tuple) else [y]))
            ),
            skip=("is_first_microbatch", "fast_zero_fill", "checkpoint_core_attention"),
        )
        for name, (module, arguments) in modules.items()
    }


_LINEAR: dict[str, Any] = {"in_features": H, "out_features": H, "device": "cpu"}

CALLS: dict[str, Call] = {
    "Linear": Call(float8lab.Linear, _constant(**_LINEAR), _use_linear),
    "LayerNorm": Call(float8lab.LayerNorm, _constant(hidden_size=H), _use_norm),
    "RMSNorm": Call(float8lab.RMSNorm, _constant(hidden_size=H), _use_norm),
    "GroupedLinear": Call(
        float8lab.GroupedLinear,
        _constant(num_gemms=2, **_LINEAR),
        lambda layer: _train(_x(B, layer.in_features), [B] + [0] * (layer.num_gemms - 1))(layer),
    ),
    "ExpertMLP": Call(
        float8lab.ExpertMLP,
        _constant(num_experts=2, hidden_size=H, ffn_hidden_size=H, device="cpu"),
        lambda layer: _train(
            _x(B, layer.hidden_size), torch.ones(B, 1), torch.zeros(B, 1, dtype=torch.long)
        )(layer),
    ),
    "LayerNormLinear": Call(float8lab.LayerNormLinear, _constant(**_LINEAR), _use_linear),
    "LayerNormMLP": Call(
        float8lab.LayerNormMLP, _constant(hidden_size=H, ffn_hidden_size=H), _use_mlp
    ),
    "DotProductAttention": Call(
        float8lab.DotProductAttention,
        _constant(num_attention_heads=2, kv_channels=8),
        _use_attention,
        skip=("cp_global_ranks", "cp_stream", "cp_comm_type"),
    ),
    "MultiheadAttention": Call(
        float8lab.MultiheadAttention, _constant(hidden_size=H, num_attention_heads=2), _use_layer
    ),
    "TransformerLayer": Call(
        float8lab.TransformerLayer,
        _constant(hidden_size=H, ffn_hidden_size=H, num_attention_heads=2),
        _use_layer,
    ),
    "RotaryPositionEmbedding": Call(
        float8lab.RotaryPositionEmbedding, _constant(dim=8, device="cpu"), _use_angles
    ),
    "apply_rotary_pos_emb": Call(
        float8lab.apply_rotary_pos_emb,
        _constant(t=_x(S, B, 2, 8), freqs=_x(8, 1, 1, 8)),
        lambda y: _assert(y.shape == (S, B, 2, 8)),
    ),
    "moe_dispatch": Call(
        float8lab.moe_dispatch,
        _constant(
            inp=_x(S, H), probs=_x(S, S), routing_map=torch.eye(S, dtype=torch.bool), gradient=None
        ),
        lambda found: float8lab.moe_combine(found[0], found[-1]),
    ),
    "moe_combine": Call(
        float8lab.moe_combine,
        lambda folder: {
            "out": _x(S, B),
            "handle": float8lab.moe_dispatch(_x(S, H), _x(S, S), torch.eye(S, dtype=torch.bool))[3],
        },
    ),
    "moe_permute": Call(
        float8lab.moe_permute,
        _constant(inp=_x(S, H), routing_map=torch.eye(S, dtype=torch.bool)),
        lambda found: float8lab.moe_unpermute(*found),
    ),
    "moe_permute_with_probs": Call(
        float8lab.moe_permute_with_probs,
        _constant(inp=_x(S, H), probs=_x(S, S), routing_map=torch.eye(S, dtype=torch.bool)),
        lambda found: float8lab.moe_unpermute(found[0], found[2]),
    ),
    "moe_permute_and_pad_with_probs": Call(
        float8lab.moe_permute_and_pad_with_probs,
        _constant(
            inp=_x(S, H),
            probs=_x(S, S),
            routing_map=torch.eye(S, dtype=torch.bool),
            tokens_per_expert=torch.ones(S, dtype=torch.int64),
            align_size=2,
        ),
        lambda found: float8lab.moe_unpermute(
            found[0], found[2], restore_shape=(S, H), pad_offsets=found[3]
        ),
    ),
    "moe_unpermute": Call(
        float8lab.moe_unpermute,
        lambda folder: dict(
            zip(
                ("inp", "row_id_map"),
                float8lab.moe_permute(_x(S, H), torch.eye(S, dtype=torch.bool)),
                strict=True,
            ),
            merging_probs=_x(S, S),
        ),
    ),
    "moe_sort_chunks_by_index": Call(
        float8lab.moe_sort_chunks_by_index,
        _constant(
            inp=_x(S, H), split_sizes=torch.tensor([1, 2]), sorted_index=torch.tensor([1, 0])
        ),
    ),
    "moe_sort_chunks_by_index_with_probs": Call(
        float8lab.moe_sort_chunks_by_index_with_probs,
        _constant(
            inp=_x(S, H),
            probs=_x(S),
            split_sizes=torch.tensor([1, 2]),
            sorted_index=torch.tensor([1, 0]),
        ),
    ),
    "parallel_cross_entropy": Call(
        float8lab.parallel_cross_entropy,
        _constant(inp=_x(S, H), target=torch.arange(S)),
    ),
    "distributed.shard_sequence": Call(
        distributed.shard_sequence, lambda folder: {"x": _x(B, H), "cp_group": None}
    ),
    "distributed.join_sequence": Call(
        distributed.join_sequence, lambda folder: {"x": _x(B, H), "cp_group": None}
    ),
    "distributed.reduce_sequence_parallel_gradients": Call(
        distributed.reduce_sequence_parallel_gradients,
        lambda folder: {"model": nn.LayerNorm(H)},
    ),
    "nn.shard_state_dict": Call(
        fnn.shard_state_dict,
        lambda folder: {"model": _model(), "state_dict": _model().state_dict()},
    ),
    "nn.whole_state_dict": Call(fnn.whole_state_dict, lambda folder: {"model": _model()}),
    "router.fused_topk_with_score_function": Call(
        float8lab.router.fused_topk_with_score_function,
        _constant(logits=_x(S, 8), topk=2, num_groups=4, group_topk=2, score_function="sigmoid"),
        lambda found: _assert(found[0].isfinite().all()),
    ),
    "router.fused_compute_score_for_moe_aux_loss": Call(
        float8lab.router.fused_compute_score_for_moe_aux_loss,
        _constant(logits=_x(S, 8), topk=2, score_function="softmax"),
    ),
    "router.fused_moe_aux_loss": Call(
        float8lab.router.fused_moe_aux_loss,
        _constant(
            probs=_x(S, B),
            tokens_per_expert=torch.ones(B),
            total_num_tokens=S,
            num_experts=B,
            topk=1,
            coeff=0.1,
        ),
    ),
    **{f"{name}.forward": call for name, call in _forward_calls().items()},
    "InferenceParams": Call(
        float8lab.InferenceParams, _constant(max_batch_size=2, max_sequence_length=4), _use_cache
    ),
    "CudaRNGStatesTracker": Call(
        float8lab.CudaRNGStatesTracker, _constant(), lambda t: t.add("a", 1)
    ),
    "autocast": Call(float8lab.autocast, _constant(), _linear_step),
    "fp8_autocast": Call(float8lab.fp8_autocast, _constant(), _linear_step),
    "fp8_model_init": Call(float8lab.fp8_model_init, _constant(), _linear_step),
    "quantized_model_init": Call(float8lab.quantized_model_init, _constant(), _linear_step),
    "checkpoint": Call(
        lambda **kwargs: float8lab.checkpoint(
            kwargs.pop("function"), _x(B, H).requires_grad_(), **kwargs
        ),
        lambda folder: {"function": nn.Linear(H, H)},
        lambda y: y.sum().backward(),
    ),
    "convert_to_float8": Call(
        float8lab.convert_to_float8, lambda folder: {"model": _model()}, repr
    ),
    "to_high_precision": Call(
        float8lab.to_high_precision, lambda folder: {"model": _converted()}, lambda m: m(_x(B, H))
    ),
    "conversion_report": Call(
        float8lab.conversion_report, lambda folder: {"model": _converted()}, repr
    ),
    "fallback": Call(
        float8lab.fallback, _constant(policy="warn"), lambda found: float8lab.fallback("warn")
    ),
    "get_cpu_offload_context": Call(
        float8lab.get_cpu_offload_context, _constant(enabled=True, model_layers=2)
    ),
    "backward_on_this_core": Call(float8lab.backward_on_this_core, _constant(), _linear_step),
    "graphed": Call(
        float8lab.graphed,
        lambda folder: {"module": nn.Linear(H, H)},
        lambda layer: layer(_x(B, H)).sum().backward(),
    ),
    "make_graphed_callables": Call(
        float8lab.make_graphed_callables,
        lambda folder: {"modules": nn.Linear(H, H), "sample_args": (_x(B, H),)},
        skip=("sample_kwargs", "pool"),
        refusal="must have a CUDA GPU",
    ),
    "onnx_export": Call(float8lab.onnx_export, _constant(), _linear_step),
    "quantize": Call(
        float8lab.quantize, _constant(x=_x(B, H)), lambda q: _assert(q.isfinite().all())
    ),
    "nn.ScalingState": Call(
        fnn.ScalingState, lambda folder: {"model": _converted()}, lambda s: s.state_dict()
    ),
    "nn.convert_norms": Call(fnn.convert_norms, lambda folder: {"model": nn.LayerNorm(H)}),
    **{
        f"recipes.{kind.__name__}": Call(
            kind, _constant(), lambda recipe: _train(_x(B, H))(float8lab.Linear(H, H))
        )
        for kind in (
            recipes.DelayedScaling,
            recipes.Float8BlockScaling,
            recipes.Float8CurrentScaling,
            recipes.Float8RowwiseScaling,
            recipes.MXFP8BlockScaling,
            recipes.Auto,
        )
    },
    "optim.MasterWeights": Call(
        optim.MasterWeights,
        lambda folder: {"params": _model().parameters(), "optimizer_class": torch.optim.SGD},
        lambda optimizer: optimizer.step(),
        skip=("params",),
    ),
    "inspect.advise": Call(
        advise, lambda folder: {"model": _model(), "batch": _x(B, H)}, repr, skip=("batch",)
    ),
    "inspect.sensitivity": Call(
        sensitivity,
        lambda folder: {"model": _model(), "batch": _x(B, H), "loss_fn": _loss_of_model, "runs": 1},
        repr,
        skip=("batch",),
    ),
    "inspect.memory_report": Call(
        memory_report, lambda folder: {"model": _model(), "batch": _x(B, H)}, repr, skip=("batch",)
    ),
    "inspect.find_nan": Call(
        float8lab.inspect.find_nan,
        lambda folder: {"model": _model(), "batch": _x(B, H), "loss_fn": _loss},
        repr,
        skip=("batch",),
    ),
    "inspect.watch": Call(float8lab.inspect.watch, lambda folder: {"model": _converted()}),
    "inspect.report": Call(
        float8lab.inspect.report, lambda folder: {"log": _log(), "path": folder / "report.html"}
    ),
    **{
        f"inspect.{function.__name__}": Call(
            function, lambda folder: {"x": float8lab.quantize(_x(B, H))}, repr
        )
        for function in (
            float8lab.inspect.stats,
            float8lab.inspect.blocks,
            float8lab.inspect.histogram,
            float8lab.inspect.html,
            float8lab.inspect.summary,
            float8lab.inspect.table,
            float8lab.inspect.plot,
        )
    },
    "inspect.compare": Call(
        float8lab.inspect.compare,
        lambda folder: {"x": float8lab.quantize(_x(B, H)), "original": _x(B, H)},
    ),
    "inspect.health": Call(
        float8lab.inspect.health,
        lambda folder: {"found": float8lab.inspect.stats(float8lab.quantize(_x(B, H)))},
    ),
    "inspect.bars": Call(
        float8lab.inspect.bars,
        lambda folder: {"found": float8lab.inspect.histogram(float8lab.quantize(_x(B, H)))},
    ),
    "inspect.checkpoint": Call(
        float8lab.inspect.checkpoint, lambda folder: {"path": _export(_model(), folder)}, repr
    ),
    "inspect.diff": Call(
        float8lab.inspect.diff,
        lambda folder: {"a": _export(_model(), folder), "b": _model().state_dict()},
        repr,
    ),
    "integrations.export": Call(
        integrations.export,
        lambda folder: {"model": _model(), "path": folder / "model", "overwrite": True},
        repr,
    ),
    "integrations.load_fp8": Call(
        integrations.load_fp8,
        lambda folder: {"source": _export(_model(), folder), "model": _model()},
        repr,
    ),
    "integrations.load_te_scaling": Call(
        integrations.load_te_scaling,
        lambda folder: {"source": {}, "model": float8lab.Linear(H, H)},
        skip=("source",),
        refusal="must have delayed scales",
    ),
    "integrations.read_megatron": Call(
        integrations.read_megatron,
        lambda folder: {"path": _of_megatron(folder), "vocab_size": 5},
        lambda found: _assert(found.state["embedding.word_embeddings.weight"].shape == (5, H)),
    ),
    "integrations.to_transformer_layers": Call(
        integrations.to_transformer_layers,
        lambda folder: {
            "state": {"model.layers.0.input_layernorm.weight": _x(H)},
            "style": "llama",
        },
    ),
    "integrations.from_transformer_layers": Call(
        integrations.from_transformer_layers,
        lambda folder: {
            "state": {"0.self_attention.layernorm_qkv.layer_norm_weight": _x(H)},
            "style": "llama",
        },
    ),
    "integrations.transformer_layers": Call(
        integrations.transformer_layers,
        lambda folder: {"config": _GPT2, "style": "gpt2"},
        skip=("config", "overrides"),
    ),
    "distributed.ModelState": Call(
        distributed.ModelState, lambda folder: {"model": _model()}, lambda s: s.state_dict()
    ),
    "distributed.broadcast_parameters": Call(
        distributed.broadcast_parameters,
        lambda folder: {"module": _model()},
        refusal="process group has not been initialized",
    ),
}


class Case(NamedTuple):
    """A call with one argument replaced."""

    call: str
    argument: str
    value: Any

    def __str__(self) -> str:
        return " ".join(f"{self.call}({self.argument}={self.value!r})".split())


def cases(count: int) -> list[Case]:
    """That many cases, or all there are; the same ones for the same count."""
    found = [
        Case(name, parameter, value)
        for name, call in CALLS.items()
        for parameter in _parameters(call)
        for value in WRONG
    ]
    return found if count >= len(found) else random.Random(0).sample(found, count)


def _parameters(call: Call) -> list[str]:
    named = inspect.signature(call.function).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in named if p.kind not in kinds and p.name not in call.skip]


def complaint(case: Case, folder: Path) -> str | None:
    """What is wrong with how a case ended: None if the call and its use work, or are refused well.

    A good refusal is a TypeError, ValueError or NotImplementedError that begins with the argument's
    name or speaks of it, and says what it must be.
    """
    call = CALLS[case.call]
    torch.manual_seed(0)
    arguments = {**call.arguments(folder), case.argument: copy.deepcopy(case.value)}
    used = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call.function(**arguments)
            used = True
            call.use(result)
    except Exception as error:  # whatever it is, it is the subject
        text = str(error)
        if call.refusal in text or isinstance(error, (OSError, CheckpointError)):
            return None  # a file that is not there, or is none
        when = "in use: " if used else ""
        named = re.search(rf"\b{case.argument}\b", text) and " must " in text
        good = isinstance(error, (TypeError, ValueError, NotImplementedError))
        if good and named and not used:
            return None
        return f"{case}: {when}{type(error).__name__}: {text.splitlines()[0] if text else ''}"
    return None
