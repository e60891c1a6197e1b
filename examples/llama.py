"""A Llama in plain ``torch.nn``: nothing here knows about FP8.

B sequences, T positions, D width, H query heads, G key/value heads, R head size, V vocabulary.
Pre-norm blocks with RMSNorm, rotary positions, grouped key/value heads, SwiGLU MLP, no biases;
output weights tied to the token embedding and initialised as in ``gpt.py``.

Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpt import cross_entropy, initialise
from torch import Tensor, nn

__all__ = ["PRESETS", "Llama", "LlamaConfig"]


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama."""

    context: int
    """Longest sequence the model is trained on."""
    n_layer: int
    n_head: int
    n_group: int
    """Key/value heads, each shared by ``n_head / n_group`` query heads."""
    dim: int
    ffn: int
    """Features inside the MLP."""
    vocab_size: int = 256

    def __post_init__(self) -> None:
        for name in ("context", "n_layer", "n_head", "n_group", "dim", "ffn", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}.")
        if self.dim % (2 * self.n_head):
            raise ValueError(f"dim must be a multiple of 2 * {self.n_head} heads; got {self.dim}.")
        if self.n_head % self.n_group:
            raise ValueError(f"n_group must divide n_head ({self.n_head}); got {self.n_group}.")


PRESETS = {
    "tiny": LlamaConfig(context=64, n_layer=4, n_head=4, n_group=2, dim=128, ffn=352),
    "small": LlamaConfig(context=256, n_layer=6, n_head=6, n_group=2, dim=384, ffn=1024),
    "124m": LlamaConfig(
        context=1024, n_layer=12, n_head=12, n_group=4, dim=768, ffn=2048, vocab_size=50304
    ),
    "1b": LlamaConfig(context=2048, n_layer=16, n_head=16, n_group=8, dim=2048, ffn=8192),
}


def rotary_angles(positions: int, head_size: int, device: torch.device) -> Tensor:
    """``[T, 1, 1, R]``: the angles by which positions rotate the pairs (i, i + R / 2) of a head."""
    rates = 10000.0 ** -(torch.arange(0, head_size, 2, device=device) / head_size)
    half_angles = torch.outer(torch.arange(positions, device=device).float(), rates)
    return torch.cat((half_angles, half_angles), dim=1)[:, None, None]


def rotate(x: Tensor, rotary_pos_emb: Tensor) -> Tensor:
    """Rotate ``[B, H, T, R]`` by the angles of the positions."""
    angles = rotary_pos_emb.flatten(1)
    first, second = x.chunk(2, dim=-1)
    rotated = x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
    return rotated.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped heads and rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size = config.dim // config.n_head
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, config.n_group * self.head_size, bias=False)
        self.value = nn.Linear(config.dim, config.n_group * self.head_size, bias=False)
        self.proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotary_pos_emb: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        q, k = rotate(q, rotary_pos_emb), rotate(k, rotary_pos_emb)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn, bias=False)
        self.up = nn.Linear(config.dim, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.norm_2 = nn.RMSNorm(config.dim, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary_pos_emb: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), rotary_pos_emb)
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class Llama(nn.Module):
    """Takes tokens; returns the mean cross-entropy of the next tokens, or the logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.lm_head.weight = self.tokens.weight
        initialise(self, config.dim, config.n_layer)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """``tokens`` and ``targets`` are ``[B, T]`` integers; without targets, ``[B, T, V]``."""
        x = self.tokens(tokens)
        angles = rotary_angles(
            tokens.shape[1], self.config.dim // self.config.n_head, tokens.device
        )
        for block in self.blocks:
            x = block(x, rotary_pos_emb=angles)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits if targets is None else cross_entropy(logits, targets)
