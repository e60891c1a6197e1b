"""Additions to the attention scores: a given bias, or ALiBi.  H heads, Sq queries, Sk keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from float8lab.arguments import check_choice, check_floating, check_number
from float8lab.nn.attention.masks import broadcasts, distances

__all__ = [
    "BIAS_TYPES", "Alibi", "BiasArguments", "alibi_slopes", "check_bias", "check_bias_shape",
    "check_softcap",
]  # fmt: skip

BiasArguments = tuple[str, Tensor | None, Tensor | None]
"""``core_attention_bias_type``, ``core_attention_bias`` and ``alibi_slopes`` of a call."""

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


def alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """Return the default slopes of ALiBi, ``[H]`` float32.

    The first ``n`` heads, a power of two, get a geometric sequence from ``2 ** (-8 / n)``; further
    heads get every second slope of the sequence for ``2 * n`` heads.

    Source: Train Short, Test Long, arXiv:2108.12409, and its published code.

    >>> alibi_slopes(4).tolist(), alibi_slopes(3).tolist()
    ([0.25, 0.0625, 0.015625, 0.00390625], [0.0625, 0.00390625, 0.25])
    """
    n = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / n) for h in range(n)]
    slopes += [2.0 ** (-4.0 * (2 * h + 1) / n) for h in range(heads - n)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


class Alibi(NamedTuple):
    """ALiBi of one call: ``-slope * abs(i + diagonal - j)`` is added to the scaled scores."""

    slopes: Tensor
    """``[H]`` or ``[B, H]``, float32."""
    diagonal: int | Tensor
    """``Sk - Sq``, per sequence if there is padding."""

    def dense(self, Sq: int, Sk: int) -> Tensor:
        """Return the bias as a matrix, ``[1 or B, H, Sq, Sk]`` float32."""
        slopes = self.slopes.view(-1, self.slopes.shape[-1], 1, 1)
        return -slopes * distances(self.diagonal, Sq, Sk, slopes.device).abs()


def check_bias(bias_type: str, bias: Tensor | None, slopes: Tensor | None) -> None:
    """Raise unless the three arguments of a bias fit together."""
    check_choice("core_attention_bias_type", bias_type, BIAS_TYPES)
    for name, tensor in (("core_attention_bias", bias), ("alibi_slopes", slopes)):
        if tensor is not None:
            check_floating(name, tensor)
    wants_bias = bias_type in ("pre_scale_bias", "post_scale_bias")
    if wants_bias != (bias is not None):
        raise ValueError(
            f"core_attention_bias must {'be a tensor' if wants_bias else 'be None'} for "
            f"core_attention_bias_type={bias_type!r}; got "
            f"{'None' if bias is None else tuple(bias.shape)}. Change one of the two."
        )
    if slopes is not None and bias_type != "alibi":
        raise ValueError(
            f"alibi_slopes must be None for core_attention_bias_type={bias_type!r}; got shape "
            f"{tuple(slopes.shape)}. Set core_attention_bias_type='alibi' to use them."
        )


def check_softcap(softcap: float, bias_type: str) -> float:
    """Return the softcap, or raise if scores cannot have it together with this type of bias."""
    if not torch.compiler.is_compiling():  # a graph may have a symbol for the softcap
        softcap = check_number("softcap", softcap, minimum=0)
    if softcap and bias_type == "pre_scale_bias":
        raise NotImplementedError(
            f"softcap must be 0 with core_attention_bias_type={bias_type!r}; got {softcap}. Scores "
            "are scaled, capped, then biased: multiply the bias by the scale and pass it as "
            "'post_scale_bias'."
        )
    return softcap


def check_bias_shape(bias: Tensor | None, slopes: Tensor | None, scores: Sequence[int]) -> None:
    """Raise unless a bias, or the slopes of ALiBi, fit scores ``[B, H, Sq, Sk]``."""
    if bias is not None and not broadcasts(bias.shape, scores):
        raise ValueError(
            f"core_attention_bias must broadcast to [B, H, Sq, Sk], {list(scores)}; got shape "
            f"{tuple(bias.shape)}. Reshape it."
        )
    B, H = scores[:2]
    if slopes is not None and slopes.shape not in ((H,), (1, H), (B, H)):
        raise ValueError(
            f"alibi_slopes must be [{H}] or [{B}, {H}], a slope for each head, or for those of "
            f"each sequence; got shape {tuple(slopes.shape)}. Reshape them."
        )
