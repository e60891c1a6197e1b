"""Bring the arguments of an attention call to one form: heads first, one dtype, one mask.

B batch, H query heads, Sq queries, Sk keys.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from float8lab.arguments import PARAMETER_DTYPES, check_lengths, check_tensor, shown
from float8lab.nn.attention.backends import Problem
from float8lab.nn.attention.inference import InferenceParams
from float8lab.nn.attention.layout import Packed
from float8lab.nn.attention.masks import (
    AttentionMask,
    MaskArgument,
    check_arbitrary,
    diagonal_of,
    make_mask,
    padding_from_lengths,
    split_padding_mask,
)
from float8lab.tensor import Float8Tensor

__all__ = ["Request", "check_export", "lengths_of_packed", "mask_of", "tensors_of"]


class Request(NamedTuple):
    """A call of ``DotProductAttention``, its arguments resolved and heads first."""

    q: Tensor
    k: Tensor
    v: Tensor
    problem: Problem
    packed: Packed | None
    qkv_format: str
    tokens: int
    leave: Callable[[Tensor], Tensor] | None = None
    """From results for this rank's heads to those of its tokens, where ranks share sequences."""


def tensors_of(
    qkv: tuple[Tensor, Tensor, Tensor], sizes: list[tuple[int, int]], qkv_format: str
) -> list[Tensor]:
    """Ordinary tensors of one dtype, that of torch.autocast if it is active.

    Args:
        qkv: query, key and value.
        sizes: heads and channels that each must have.
        qkv_format: sbhd, bshd or thd.
    """
    ndim = 3 if qkv_format == "thd" else 4
    names = ("query_layer", "key_layer", "value_layer")
    for name, x, (heads, channels) in zip(names, qkv, sizes, strict=True):
        check_tensor(name, x)
        if x.dtype not in PARAMETER_DTYPES:
            raise TypeError(
                f"{name} must be a floating-point tensor; got {shown(x)}. Convert it first, for "
                "example with .float()."
            )
        if x.ndim != ndim or x.shape[-2:] != (heads, channels):
            raise ValueError(
                f"{name} must have {ndim} dimensions for {qkv_format}, the last two "
                f"[{heads}, {channels}]; got shape {tuple(x.shape)}. Reshape it, or build the "
                "module with those heads and channels."
            )
    q = qkv[0]
    dtype = q.dtype
    device_type = q.device.type
    if torch.is_autocast_enabled(device_type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    plain = [x.dequantize() if isinstance(x, Float8Tensor) else x for x in qkv]
    return [x.to(dtype) for x in plain]


def lengths_of_packed(
    mask_type: str,
    attention_type: str,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    inference_params: InferenceParams | None,
) -> tuple[Tensor, Tensor]:
    """The cumulative lengths of a thd call."""
    if "padding" not in mask_type:
        raise ValueError(
            "attn_mask_type must be padding, padding_causal or padding_causal_bottom_right for "
            f"qkv_format='thd'; got {mask_type!r}. Sequences of several lengths lie in it."
        )
    if inference_params is not None:
        raise NotImplementedError(
            "qkv_format must be 'sbhd' or 'bshd' with inference_params; got 'thd'. Pad the "
            "sequences and tell InferenceParams.pre_step their lengths."
        )
    if cu_seqlens_kv is None and attention_type == "self":
        cu_seqlens_kv = cu_seqlens_q
    for name, lengths in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        check_lengths(name, lengths, why="qkv_format='thd'")
    assert cu_seqlens_q is not None, "checked"
    assert cu_seqlens_kv is not None, "checked"
    return cu_seqlens_q, cu_seqlens_kv


def mask_of(
    q: Tensor,
    k: Tensor,
    mask_type: str,
    window: tuple[int, int],
    attention_type: str,
    attention_mask: MaskArgument,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    inference_params: InferenceParams | None,
) -> tuple[AttentionMask, int | Tensor]:
    """The mask of an sbhd or bshd call, and the ``Sk - Sq`` of each sequence."""
    Sq, Sk = q.shape[2], k.shape[2]
    step = None if inference_params is None else inference_params.step
    if step is not None:
        if mask_type == "arbitrary" or attention_mask is not None or cu_seqlens_q is not None:
            raise NotImplementedError(
                "attention_mask and cu_seqlens must be None, and attn_mask_type not "
                "'arbitrary', after InferenceParams.pre_step; its lengths are the mask. "
                f"Got attn_mask_type={mask_type!r}. Leave them out."
            )
        lengths = torch.tensor(step.lengths, device=q.device)
        totals = torch.tensor(step.totals, device=q.device)
        padding = (padding_from_lengths(lengths, Sq), padding_from_lengths(totals, Sk))
        before = totals - lengths
        return make_mask(mask_type, window, Sq, Sk, padding=padding, diagonal=before), before
    # With a cache, query 0 stands behind what was cached, whatever the rows' padding.
    diagonal = None if inference_params is None else Sk - Sq
    if "padding" in mask_type:
        if cu_seqlens_q is not None:
            padding = _padding_of_lengths(attention_type, cu_seqlens_q, cu_seqlens_kv, Sq, Sk)
        elif diagonal is not None and isinstance(attention_mask, Tensor):
            whole = split_padding_mask(attention_mask, "self", Sk, Sk)[0]
            padding = (whole[:, Sk - Sq :], whole)
        else:
            padding = split_padding_mask(attention_mask, attention_type, Sq, Sk)
        spans = diagonal_of(padding, Sq, Sk) if diagonal is None else diagonal
        return make_mask(mask_type, window, Sq, Sk, padding=padding, diagonal=diagonal), spans
    arbitrary = None
    if mask_type == "arbitrary":
        arbitrary = check_arbitrary("attention_mask", attention_mask)
    elif attention_mask is not None and not torch.compiler.is_compiling():
        warnings.warn(
            f"attention_mask is not used with attn_mask_type={mask_type!r}; got a mask. Set a "
            "padding mask type or 'arbitrary' to use it.",
            stacklevel=2,
        )
    mask = make_mask(mask_type, window, Sq, Sk, arbitrary=arbitrary, diagonal=diagonal)
    return mask, Sk - Sq


def _padding_of_lengths(
    attention_type: str, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor | None, Sq: int, Sk: int
) -> tuple[Tensor, Tensor]:
    check_lengths("cu_seqlens_q", cu_seqlens_q, why="this mask type")
    if cu_seqlens_kv is None:
        if attention_type == "cross":
            raise ValueError(
                "cu_seqlens_kv must be given with cu_seqlens_q in cross attention; got None. "
                "Pass the cumulative lengths of the other sequences."
            )
        cu_seqlens_kv = cu_seqlens_q
    check_lengths("cu_seqlens_kv", cu_seqlens_kv, why="this mask type")
    q, kv = (c[1:] - c[:-1] for c in (cu_seqlens_q, cu_seqlens_kv))
    return padding_from_lengths(q, Sq), padding_from_lengths(kv, Sk)


def check_export(inference_params: InferenceParams | None, qkv_format: str) -> None:
    """Raise for arguments that ONNX cannot express, since shapes would depend on values."""
    if inference_params is not None:
        raise NotImplementedError(
            "inference_params must be None inside onnx_export; got a cache. Pass whole sequences."
        )
    if qkv_format == "thd":
        raise NotImplementedError(
            "qkv_format must be 'sbhd' or 'bshd' inside onnx_export; got 'thd'. Pass padded "
            "sequences and a padding mask."
        )
