"""A GPT in plain ``torch.nn``: nothing here knows about FP8.

B sequences, T positions, D width, H heads, V vocabulary. Pre-norm blocks, learned positions,
causal attention through ``scaled_dot_product_attention``, GELU MLP, output weights tied to the
token embedding; initialised as GPT-2, except that the positions start as sinusoids. With random
positions the model needs hundreds of steps to learn which tokens are neighbours, and their number
depends on chance.

Sources: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019;
Vaswani et al., "Attention Is All You Need", 2017 (the sinusoids).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "PRESETS", "GPTConfig", "cross_entropy", "initialise"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT; any positive sizes work, multiples of 16 or not."""

    context: int
    """Longest sequence the model takes."""
    n_layer: int
    n_head: int
    dim: int
    vocab_size: int = 256
    """Rows of the embedding; more than the tokens in use can give the GEMMs a better size."""
    bias: bool = True

    def __post_init__(self) -> None:
        for name in ("context", "n_layer", "n_head", "dim", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}.")
        if self.dim % self.n_head:
            raise ValueError(f"dim must be a multiple of n_head ({self.n_head}); got {self.dim}.")


PRESETS = {
    "tiny": GPTConfig(context=64, n_layer=4, n_head=4, dim=128),
    "small": GPTConfig(context=256, n_layer=6, n_head=6, dim=384),
    "124m": GPTConfig(context=1024, n_layer=12, n_head=12, dim=768, vocab_size=50304),
}


GPT2_DIM = 768
"""The width of GPT-2's standard deviation of 0.02; ours is proportional to 1 / sqrt(width)."""


def sinusoids(positions: int, dim: int) -> Tensor:
    """``[positions, dim]``: sines, then cosines, of wavelengths from 2 pi to 20000 pi."""
    rates = 10000.0 ** -(torch.arange(0, dim, 2) / dim)
    angles = torch.outer(torch.arange(positions).float(), rates)
    return torch.cat((angles.sin(), angles.cos()), dim=1)[:, :dim]


def initialise(model: nn.Module, dim: int, n_layer: int) -> float:
    """Draw normal matrices, smaller into the residual stream; return the standard deviation."""
    std = 0.02 * math.sqrt(GPT2_DIM / dim)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 2:
            into_residual = name.endswith(("proj.weight", "down.weight"))
            layers = 2 * n_layer if into_residual else 1
            nn.init.normal_(parameter, std=std / math.sqrt(layers))
    return std


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of ``[B, T, V]`` logits and ``[B, T]`` targets, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Attention(nn.Module):
    """Causal self-attention, with one linear layer for queries, keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.bias)
        self.proj = nn.Linear(config.dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_head, D // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(B, T, D))
        return out


class MLP(nn.Module):
    """Two linear layers, four times as wide in between."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=config.bias)
        self.down = nn.Linear(4 * config.dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.dim, bias=config.bias)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.dim, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class GPT(nn.Module):
    """Takes tokens; returns the mean cross-entropy of the next tokens, or the logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.dim, bias=config.bias)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.lm_head.weight = self.tokens.weight
        std = initialise(self, config.dim, config.n_layer)
        with torch.no_grad():
            self.positions.weight.copy_(math.sqrt(2) * std * sinusoids(config.context, config.dim))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """``tokens`` and ``targets`` are ``[B, T]`` integers; without targets, ``[B, T, V]``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits if targets is None else cross_entropy(logits, targets)
