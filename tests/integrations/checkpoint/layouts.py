"""A decoder in plain PyTorch, and its weights in the layouts of Transformer Engine and Megatron-LM.

Written from the facts about the checkpoints of these libraries, without any of their code.
"""

import argparse
import enum
import io
import json
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, GROUPS, HEAD, FFN, LAYERS, WORDS = 32, 8, 4, 4, 48, 4, 50


class Layer(nn.Module):
    """Causal attention and an MLP, of a Llama or of a GPT with biases."""

    def __init__(self, llama: bool) -> None:
        super().__init__()
        self.llama = llama
        options = {"bias": not llama}
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.first, self.second = norm(HIDDEN, eps=1e-5), norm(HIDDEN, eps=1e-5)
        self.q = nn.Linear(HIDDEN, HEADS * HEAD, **options)
        self.k, self.v = (nn.Linear(HIDDEN, GROUPS * HEAD, **options) for _ in "kv")
        self.proj = nn.Linear(HEADS * HEAD, HIDDEN, **options)
        self.up, self.down = nn.Linear(HIDDEN, FFN, **options), nn.Linear(FFN, HIDDEN, **options)
        if llama:
            self.gate = nn.Linear(HIDDEN, FFN, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[S, B, HIDDEN]`` to ``[S, B, HIDDEN]``."""
        y = self.first(x)
        q, k, v = (tensor(y).unflatten(-1, (-1, HEAD)) for tensor in (self.q, self.k, self.v))
        k, v = (tensor.repeat_interleave(HEADS // GROUPS, 2) for tensor in (k, v))
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
        scores = (q @ k.mT) / HEAD**0.5
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + self.proj(y.permute(2, 0, 1, 3).flatten(2))
        y = self.second(x)
        y = (
            F.silu(self.gate(y)) * self.up(y)
            if self.llama
            else F.gelu(self.up(y), approximate="tanh")
        )
        return x + self.down(y)


def shard(x: Tensor, tp: int, rank: int, dim: int = 0) -> Tensor:
    return x.chunk(tp, dim)[rank].clone()


def parameter_kinds(layer: Layer) -> list[str]:
    return ["weight"] if layer.llama else ["weight", "bias"]


def local_heads(layer: Layer, kind: str, tp: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's query, key and value heads: ``[groups, heads in a group or 1, HEAD, ...]``."""
    q, k, v = (getattr(getattr(layer, name), kind).detach() for name in "qkv")
    local_shards = [shard(x.unflatten(0, (GROUPS, -1, HEAD)), tp, rank) for x in (q, k, v)]
    return local_shards[0], local_shards[1], local_shards[2]


def grouped_qkv(layer: Layer, kind: str, tp: int, rank: int) -> Tensor:
    """For each group its query heads, then its key head, then its value head."""
    return torch.cat(local_heads(layer, kind, tp, rank), 1).flatten(0, 2)


def local_fc1(layer: Layer, kind: str, tp: int, rank: int) -> Tensor:
    """This rank's features of the gate, followed by this rank's features of the up layer."""
    names = ["gate", "up"] if layer.llama else ["up"]
    return torch.cat([shard(getattr(getattr(layer, n), kind).detach(), tp, rank) for n in names])


def row_parallel(layer: nn.Linear, kind: str, tp: int, rank: int) -> Tensor:
    """This rank's input features of a weight, or the unsharded bias."""
    x = getattr(layer, kind).detach()
    return x.clone() if kind == "bias" else shard(x, tp, rank, 1)


def of_transformer_engine(layer: Layer, layout: str, tp: int = 1, rank: int = 0) -> dict[str, Any]:
    """The state dict of a TransformerLayer there; layout of qkv: "split", "grouped" or "apart"."""
    name = "self_attention.layernorm_qkv"
    state: dict[str, Any] = {}
    for kind in parameter_kinds(layer):
        state[f"{name}.layer_norm_{kind}"] = getattr(layer.first, kind).detach().clone()
        state[f"layernorm_mlp.layer_norm_{kind}"] = getattr(layer.second, kind).detach().clone()
        local_shards = [x.flatten(0, 2) for x in local_heads(layer, kind, tp, rank)]
        if layout == "split":
            for n, x in zip(("query", "key", "value"), local_shards, strict=True):
                state[f"{name}.{n}_{kind}"] = x
        elif layout == "apart":
            state[f"{name}.{kind}"] = torch.cat(local_shards)
        else:
            state[f"{name}.{kind}"] = grouped_qkv(layer, kind, tp, rank)
        state[f"self_attention.proj.{kind}"] = row_parallel(layer.proj, kind, tp, rank)
        state[f"layernorm_mlp.fc1_{kind}"] = local_fc1(layer, kind, tp, rank)
        state[f"layernorm_mlp.fc2_{kind}"] = row_parallel(layer.down, kind, tp, rank)
    state[f"{name}._extra_state"] = pickled(scales(1))
    state["self_attention.proj._extra_state"] = torch.empty(0, dtype=torch.uint8)
    state["self_attention.core_attention._extra_state"] = saved_file(None)
    state["layernorm_mlp._extra_state"] = pickled(scales(2))
    return state


def of_megatron(layer: Layer, tp: int = 1, rank: int = 0) -> dict[str, Any]:
    """The state dict of a decoder layer of Megatron-LM."""
    attention, mlp = "self_attention", "mlp"
    state: dict[str, Any] = {}
    for kind in parameter_kinds(layer):
        norms = [getattr(norm, kind).detach().clone() for norm in (layer.first, layer.second)]
        state |= {
            f"{attention}.linear_proj.{kind}": row_parallel(layer.proj, kind, tp, rank),
            f"{attention}.linear_qkv.layer_norm_{kind}": norms[0],
            f"{attention}.linear_qkv.{kind}": grouped_qkv(layer, kind, tp, rank),
            f"{mlp}.linear_fc1.layer_norm_{kind}": norms[1],
            f"{mlp}.linear_fc1.{kind}": local_fc1(layer, kind, tp, rank),
            f"{mlp}.linear_fc2.{kind}": row_parallel(layer.down, kind, tp, rank),
        }
    state[f"{attention}.linear_proj._extra_state"] = saved_file(scales(1))
    for seed, name in enumerate((f"{attention}.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")):
        state[f"{name}._extra_state"] = pickled(scales(1, seed))
    return state


def scales(gemms: int, seed: int = 0) -> dict[str, Any]:
    """The delayed scaling state of a module with so many GEMMs; its scales are encode factors."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "scale_fwd": torch.rand(3 * gemms, generator=generator) + 1,
        "amax_history_fwd": torch.rand(4, 3 * gemms, generator=generator),
        "scale_bwd": torch.rand(2 * gemms, generator=generator) + 1,
        "amax_history_bwd": torch.rand(4, 2 * gemms, generator=generator),
        "extra_fp8_variables": {"num_gemms": gemms},
    }


class CallOnUnpickling:
    """An object that calls a function when it is unpickled."""

    def __init__(self, function: Any, *values: Any) -> None:
        self.call = function, values

    def __reduce__(self) -> Any:
        return self.call


def pickled(state: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def saved_file(state: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    return file


class Decoder(nn.Module):
    """An embedding, layers, a norm and an output layer."""

    def __init__(self, llama: bool, words: int = WORDS) -> None:
        super().__init__()
        self.llama = llama
        self.words = nn.Parameter(torch.randn(words, HIDDEN))
        self.layers = nn.ModuleList(Layer(llama) for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.randn(HIDDEN))
        self.out = nn.Parameter(torch.randn(words, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def pad_vocabulary(words: Tensor, tp: int) -> Tensor:
    """A vocabulary with rows added up to a multiple of 16 times the number of ranks."""
    added_rows = -len(words) % (16 * tp)
    return torch.cat([words, words.new_full((added_rows, words.shape[1]), 7.0)]).detach()


def megatron_arguments(model: Decoder, tp: int, pp: int) -> dict[str, Any]:
    llama = model.llama
    return {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "ffn_hidden_size": FFN,
        "num_attention_heads": HEADS, "num_query_groups": GROUPS, "group_query_attention": True,
        "kv_channels": HEAD, "norm_epsilon": 1e-5,
        "normalization": "RMSNorm" if llama else "LayerNorm", "swiglu": llama,
        "add_bias_linear": not llama, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "untie_embeddings_and_output_weights": True, "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
    }  # fmt: skip


def stage_states(model: Decoder, tp: int, rank: int, pp: int, virtual: int) -> Iterator[Any]:
    """The models of each pipeline stage: ``(stage, number, state)``; layers are counted from 0."""
    layers_per_stage = LAYERS // (pp * virtual)
    for number in range(virtual):
        for stage in range(pp):
            first = (number * pp + stage) * layers_per_stage
            state: dict[str, Any] = {}
            if first == 0:
                words = shard(pad_vocabulary(model.words, tp), tp, rank)
                state["embedding.word_embeddings.weight"] = words
            for i in range(layers_per_stage):
                layer = of_megatron(model.layers[first + i], tp, rank)  # type: ignore[arg-type]
                state |= {f"decoder.layers.{i}.{n}": x for n, x in layer.items()}
            if first + layers_per_stage == LAYERS:
                state["decoder.final_layernorm.weight"] = model.norm.detach()
                state["output_layer.weight"] = shard(pad_vocabulary(model.out, tp), tp, rank)
                state["output_layer._extra_state"] = None
            yield stage, number, state


def write_ranks(
    path: Path, model: Decoder, tp: int, pp: int = 1, virtual: int = 1, **changes: Any
) -> Path:
    """Write a file for each rank, in Megatron's format "torch"; return the iteration's folder."""
    path.mkdir(exist_ok=True)
    (path / "latest_checkpointed_iteration.txt").write_text("7")
    args = argparse.Namespace(**{**megatron_arguments(model, tp, pp), **changes})
    module = types.ModuleType("megatron.core.enums")
    backend = enum.Enum("AttnBackend", ["auto"], module=module.__name__)
    backend.__qualname__ = "AttnBackend"
    module.AttnBackend = backend  # type: ignore[attr-defined]
    args.attention_backend = backend["auto"]
    names = {"megatron": types.ModuleType("megatron"), "megatron.core.enums": module}
    names["megatron.core"] = types.ModuleType("megatron.core")
    sys.modules.update(names)
    try:
        for rank in range(tp):
            models: dict[int, dict[str, Any]] = {}
            for stage, number, state in stage_states(model, tp, rank, pp, virtual):
                name = "model" if virtual == 1 else f"model{number}"
                models.setdefault(stage, {})[name] = state
            for stage, states in models.items():
                suffix = f"_{stage:03d}" if pp > 1 else ""
                folder = path / "iter_0000007" / f"mp_rank_{rank:02d}{suffix}"
                folder.mkdir(parents=True)
                content = {"args": args, "checkpoint_version": 3.0, "iteration": 7, **states}
                content["rng_state"] = [{"np_rng_state": np.random.get_state()}]
                content["optimizer"] = {"state": {0: torch.ones(3)}}
                torch.save(content, folder / "model_optim_rng.pt")
    finally:
        for name in names:
            del sys.modules[name]
    return path / "iter_0000007"


def write_distributed(path: Path, model: Decoder, *, halves: bool, save: Any) -> Path:
    """Write unsharded tensors, each with all layers stacked, in Megatron's format "torch_dist"."""
    layers = [of_megatron(layer) for layer in model.layers]  # type: ignore[arg-type]
    state: dict[str, Any] = {
        "embedding.word_embeddings.weight": pad_vocabulary(model.words, 4),
        "decoder.final_layernorm.weight": model.norm.detach(),
        "output_layer.weight": pad_vocabulary(model.out, 4),
    }
    for name in layers[0]:
        if not name.endswith("_extra_state"):
            state[f"decoder.layers.{name}"] = torch.stack([layer[name] for layer in layers])
    name = "decoder.layers.mlp.linear_fc1.weight"
    if halves:
        fc1_weight = state.pop(name)
        state[f"{name}_w"], state[f"{name}_v"] = (x.contiguous() for x in fc1_weight.chunk(2, 1))
    state["optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"] = torch.ones(4, 2, 2)
    save(state, path)
    metadata = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (path / "metadata.json").write_text(json.dumps(metadata))
    args = argparse.Namespace(**megatron_arguments(model, 4, 1))
    torch.save({"args": args, "iteration": 7}, path / "common.pt")
    return path
