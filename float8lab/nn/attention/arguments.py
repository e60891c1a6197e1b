"""Resolve the arguments of an attention call: heads first, a common dtype, a single mask.

B batch, H query heads, Sq queries, Sk keys.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from float8lab.arguments import check_floating, check_lengths, check_tensor, has_values, shown
from float8lab.nn.attention import masks
from float8lab.nn.attention.backends import Problem
from float8lab.nn.attention.bias import BiasArguments, check_bias_shape
from float8lab.nn.attention.inference import InferenceParams
from float8lab.nn.attention.layout import Packed, Sizes, padding_from_lengths
from float8lab.nn.gemm import output_dtype
from float8lab.tensor import Float8Tensor

__all__ = [
    "Given", "Lengths", "Request", "Rules", "check_export", "check_masking", "check_tensors",
    "is_plain", "mask_of", "tensors_of", "unpacked",
]  # fmt: skip

_PARTS = ("query_layer", "key_layer", "value_layer")


class Rules(NamedTuple):
    """The rules of a call: its own arguments, or by default the arguments of its module."""

    qkv_format: str
    mask_type: str
    """The canonical name of the mask type."""
    window: tuple[int, int]


class Lengths(NamedTuple):
    """The arguments of a call that give the lengths of its sequences."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None

    @property
    def cu_seqlens_of_keys(self) -> Tensor | None:
        """The cumulative lengths of the keys' sequences, by default those of the queries."""
        return self.cu_seqlens_q if self.cu_seqlens_kv is None else self.cu_seqlens_kv

    @property
    def padded_of_keys(self) -> Tensor | None:
        """The starts of the keys' sequences, if there are unused tokens between sequences."""
        follow_queries = self.cu_seqlens_kv is None and self.cu_seqlens_kv_padded is None
        return self.cu_seqlens_q_padded if follow_queries else self.cu_seqlens_kv_padded

    def beside(self, cache: InferenceParams | None) -> Lengths:
        """Leave out lengths that only repeat those of the cache's ``pre_step``."""
        step, starts = getattr(cache, "step", None), self.cu_seqlens_q
        if step is None or not isinstance(starts, Tensor) or starts.ndim != 1:
            return self
        if has_values(starts) and starts.diff().tolist() != list(step.lengths):
            return self
        return self._replace(cu_seqlens_q=None, cu_seqlens_kv=None)

    def starts(self) -> tuple[Tensor | None, Tensor | None]:
        """Return where the sequences of queries and of keys start in a thd call."""
        lengths = self.cu_seqlens_q, self.cu_seqlens_of_keys
        pairs = zip(lengths, (self.cu_seqlens_q_padded, self.padded_of_keys), strict=True)
        queries, keys = (n if padded is None else padded for n, padded in pairs)
        return queries, keys

    def packed(self) -> tuple[Packed, Packed]:
        """Return the positions of the sequences of queries and of keys in a thd call."""
        queries, keys = (cast(Tensor, x) for x in (self.cu_seqlens_q, self.cu_seqlens_of_keys))
        packed = Packed.of(queries, self.cu_seqlens_q_padded, self.max_seqlen_q)
        padded, longest = self.padded_of_keys, self.max_seqlen_kv
        if keys is not queries or padded is not self.cu_seqlens_q_padded:
            return packed, Packed.of(keys, padded, longest)
        return packed, packed if longest is None else packed._replace(longest=longest)


class Given(NamedTuple):
    """The arguments of a call besides its tensors."""

    rules: Rules
    attention_mask: masks.MaskArgument
    lengths: Lengths
    bias: BiasArguments
    inference_params: InferenceParams | None = None


class Request(NamedTuple):
    """A call of ``DotProductAttention`` with resolved arguments and heads first."""

    q: Tensor
    k: Tensor
    v: Tensor
    problem: Problem
    leave: Callable[[Tensor], Tensor] | None = None
    """Converts results of this rank's heads to its tokens' results, if ranks share sequences."""
    attend: Callable[[Tensor], Tensor] | None = None
    """Computes the attention of queries to the pages of a cache, which replaces k and v."""
    repack: Callable[[Tensor], Tensor] | None = None
    """Converts results of padded sequences to packed sequences, if a cache has padded them."""


def unpacked(
    qkv: tuple[Tensor | None, Tensor | None, Tensor | None], qkv_layer: Tensor | None,
    kv_layer: Tensor | None, dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return query, key and value of a call, as views if the call packs them into a tensor."""
    if not isinstance(dim, int) or dim not in (-3, -2):
        raise ValueError(
            f"qkv_interleave_dim must be -3 or -2; got {shown(dim)}. Count from the last dimension."
        )
    tensors = {**dict(zip(_PARTS, qkv, strict=True)), "kv_layer": kv_layer, "qkv_layer": qkv_layer}
    names = tuple(name for name, x in tensors.items() if x is not None)
    if names == _PARTS:
        return qkv  # type: ignore[return-value]  # none of them is None
    if names not in (("query_layer", "kv_layer"), ("qkv_layer",)):
        raise ValueError(
            "query_layer, key_layer and value_layer must be given, or query_layer and kv_layer, or "
            f"qkv_layer alone; got {', '.join(names) or 'none'}. Pass each part once."
        )
    name, count = names[-1], 2 if qkv_layer is None else 3
    packed = cast(Tensor, tensors[name])
    check_tensor(name, packed)
    if packed.ndim not in (4, 5) or packed.shape[dim] != count:
        raise ValueError(
            f"{name} must have size {count} in dimension {dim}, qkv_interleave_dim, one of 4 or 5; "
            f"got shape {tuple(packed.shape)}. Stack its parts there."
        )
    return (*qkv[: 3 - count], *packed.unbind(dim))  # type: ignore[return-value]  # three tensors


def check_tensors(
    qkv: tuple[Tensor, Tensor, Tensor], heads_and_channels: list[tuple[int, int]], qkv_format: str
) -> None:
    """Raise unless query, key and value fit together and have these heads and channels last."""
    ndim = 3 if qkv_format == "thd" else 4
    for name, x, (heads, channels) in zip(_PARTS, qkv, heads_and_channels, strict=True):
        check_floating(name, x)
        if x.ndim != ndim or x.shape[-2:] != (heads, channels):
            raise ValueError(
                f"{name} must have {ndim} dimensions for {qkv_format}, the last two "
                f"[{heads}, {channels}]; got shape {tuple(x.shape)}. Reshape it, or build the "
                "module with those heads and channels."
            )
    query, key, value = qkv
    for name, x in zip(_PARTS[1:], qkv[1:], strict=True):
        if x.device != query.device:
            raise ValueError(
                f"{name} must be on {query.device}, as query_layer is; got {x.device}. Move it by "
                ".to(device)."
            )
        if x.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
            raise TypeError(
                f"{name} must have the dtype of query_layer, {query.dtype}, outside "
                f"torch.autocast; got {x.dtype}. Convert it by .to(dtype)."
            )
    if key.shape[:-2] != value.shape[:-2]:
        raise ValueError(
            f"value_layer must have the sequences of key_layer, {tuple(key.shape[:-2])}; got shape "
            f"{tuple(value.shape)}. Each key has a value."
        )
    if qkv_format != "thd":
        batch = 1 if qkv_format == "sbhd" else 0
        if query.shape[batch] != key.shape[batch]:
            raise ValueError(
                f"key_layer must have the {query.shape[batch]} sequences of query_layer for "
                f"{qkv_format}; got shape {tuple(key.shape)}. Check the format."
            )


def tensors_of(qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Convert query, key and value to ordinary tensors of the dtype in which attention runs."""
    dtype = output_dtype(qkv[0])
    q, k, v = ((x.dequantize() if isinstance(x, Float8Tensor) else x).to(dtype) for x in qkv)
    return q, k, v


def is_plain(rules: Rules, *given: object) -> bool:
    """Whether mask, lengths and the like are all None, and the rules of the call allow that."""
    if any(x is not None for x in given) or rules.qkv_format == "thd":
        return False
    return rules.mask_type != "arbitrary" and "padding" not in rules.mask_type


def check_masking(
    given: Given, attention_type: str, sizes: Sizes | None, *, heads: int, uses_every_mask: bool,
    name: str = "attention_mask",
) -> None:  # fmt: skip
    """Raise for a mask or lengths that the mask type or the format does not take.

    ``sizes`` and ``name`` are as in ``DotProductAttention.check_arguments``, but ``sizes`` include
    the keys in the cache. With ``uses_every_mask`` a mask that is not used may have any shape.
    """
    rules, attention_mask, lengths, _, inference_params = given
    masks.check_mask_types(name, attention_mask)
    mask_type, has_lengths = rules.mask_type, any(x is not None for x in lengths[:4])
    step = None if inference_params is None else inference_params.step
    if step is not None and (mask_type == "arbitrary" or attention_mask is not None or has_lengths):
        raise NotImplementedError(
            f"{name} and other cu_seqlens must be None, and attn_mask_type not 'arbitrary', after "
            f"InferenceParams.pre_step; its lengths are the mask. Got attn_mask_type={mask_type!r}."
            " Leave them out."
        )
    if rules.qkv_format == "thd":
        if inference_params is None:
            _check_packed(mask_type, attention_type, lengths, sizes)
        elif step is None or (sizes is not None and min(sizes[1:]) < sum(step.lengths)):
            raise ValueError(
                "inference_params must be told the lengths of sequences by pre_step for "
                f"qkv_format='thd', as many tokens as there are; got {step}. Call pre_step first."
            )
        return
    if has_lengths:
        _check_lengths_beside_shapes(rules, attention_type, sizes, lengths)
    if sizes is None or step is not None or has_lengths:  # lengths imply a padding mask type
        return
    if "padding" in mask_type:
        if inference_params is not None and isinstance(attention_mask, Tensor):
            attention_type, sizes = "self", sizes._replace(Sq=sizes.Sk)
        masks.split_padding_mask(attention_mask, attention_type, sizes, name)
    elif mask_type == "arbitrary":
        masks.check_arbitrary(name, attention_mask, (sizes.B, heads, sizes.Sq, sizes.Sk))
    elif attention_mask is not None and not uses_every_mask:
        masks.check_unused_mask(name, attention_mask, heads, sizes)


def _check_packed(
    mask_type: str, attention_type: str, lengths: Lengths, sizes: Sizes | None
) -> None:
    """Raise unless the lengths of a thd call fit its tokens."""
    if "padding" not in mask_type:
        raise ValueError(
            "attn_mask_type must be padding, padding_causal or padding_causal_bottom_right for "
            f"qkv_format='thd'; got {mask_type!r}. Sequences of several lengths lie in it."
        )
    keys = lengths.cu_seqlens_of_keys if attention_type == "self" else lengths.cu_seqlens_kv
    counts, sides = [], (lengths.cu_seqlens_q, keys)
    columns = zip(("q", "kv"), sides, lengths[2:4], lengths[4:], strict=True)
    for i, (side, cu_seqlens, padded, longest) in enumerate(columns, start=1):
        name, tokens = f"cu_seqlens_{side}", None if sizes is None else sizes[i]
        offsets = check_lengths(name, cu_seqlens, why="qkv_format='thd'", tokens=tokens)
        counts.append(offsets.shape[0])
        if padded is not None:
            check_lengths(f"{name}_padded", padded, why="padding", tokens=tokens)
            counts.append(padded.shape[0])
            _check_room(name, offsets, padded)
        most = max((0, *offsets.diff().tolist())) if has_values(offsets) else 0
        if longest is not None and most > longest:
            raise ValueError(
                f"max_seqlen_{side} must be the longest of the sequences in {name}, {most} at "
                f"least; got {longest}. Leave it out to have it computed."
            )
    if len(set(counts)) > 1:
        raise ValueError(
            "cu_seqlens_q, cu_seqlens_kv and those of padding must be of the same number of "
            f"sequences; got {', '.join(str(count - 1) for count in counts)}. Each sequence of "
            "queries attends to one of keys."
        )


def _check_room(name: str, offsets: Tensor, padded: Tensor) -> None:
    """Raise if a sequence is longer than the distance from its start to the next start."""
    if padded.shape != offsets.shape or not (has_values(padded) and has_values(offsets)):
        return
    lengths, rooms = offsets.diff(), padded.diff()
    if bool((lengths > rooms).any()):
        raise ValueError(
            f"{name}_padded must leave room for sequences of {shown(lengths.tolist())} tokens, as "
            f"in {name}; got {shown(rooms.tolist())} from start to start. Add up padded lengths."
        )


def _check_lengths_beside_shapes(
    rules: Rules, attention_type: str, sizes: Sizes | None, lengths: Lengths
) -> None:
    """Raise for lengths that an sbhd or bshd call, whose shapes have lengths too, does not take."""
    for name, cu_seqlens in zip(Lengths._fields[:4], lengths[:4], strict=True):
        is_padded, takes_lengths = name.endswith("_padded"), "padding" in rules.mask_type
        check_tensor(name, cu_seqlens, optional=True)
        if cu_seqlens is not None and (is_padded or not takes_lengths):
            raise ValueError(
                f"{name} must be None for qkv_format={rules.qkv_format!r} and the mask type "
                f"{rules.mask_type!r}; got {shown(cu_seqlens)}. "
                f"{'Leave it out' if is_padded else 'Set a padding mask type to use it'}."
            )
    keys = lengths.cu_seqlens_of_keys if attention_type == "self" else lengths.cu_seqlens_kv
    sides = zip(Lengths._fields[:2], (lengths.cu_seqlens_q, keys), strict=True)
    for dim, (name, cu_seqlens) in enumerate(sides, start=1):
        offsets = check_lengths(name, cu_seqlens, why="the lengths of both sides, queries and keys")
        if sizes is None:
            continue
        if offsets.shape[0] != sizes.B + 1:
            raise ValueError(
                f"{name} must be [B + 1], {sizes.B + 1} cumulative lengths; got {shown(offsets)}. "
                "Give one for each sequence of the batch."
            )
        if has_values(offsets) and max(offsets.diff().tolist(), default=0) > sizes[dim]:
            raise ValueError(
                f"{name} must be of sequences of at most {sizes[dim]} tokens, as the tensors have; "
                f"got {shown(offsets.tolist())}. Begin with 0, and add up the lengths."
            )


def mask_of(
    q: Tensor, Sk: int, given: Given, attention_type: str, packed: tuple[Packed, Packed] | None
) -> tuple[masks.AttentionMask, int | Tensor]:
    """Return the mask of a call and each sequence's ``Sk - Sq``; ``packed`` is for thd."""
    (mask_type, window), attention_mask = given.rules[1:], given.attention_mask
    cache, (B, heads, Sq, _) = given.inference_params, q.shape
    sequences = None if cache is None else cache.sequences(q.device)
    # With a cache, query 0 comes after the cached keys, regardless of the rows' padding.
    diagonal: int | Tensor | None = None if cache is None else Sk - Sq
    padding = arbitrary = None
    if packed is not None:
        padding = (packed[0].padding(), packed[1].padding())
        (B, Sq), Sk = padding[0].shape, padding[1].shape[1]
    elif sequences is not None:
        _, diagonal, added = sequences
        padding = (padding_from_lengths(added, Sq), padding_from_lengths(diagonal + added, Sk))
    elif "padding" in mask_type:
        padding = _padding_of(given, attention_type, Sizes(B, Sq, Sk))
    elif mask_type == "arbitrary":
        arbitrary = masks.check_arbitrary("attention_mask", attention_mask, (B, heads, Sq, Sk))
    elif attention_mask is not None and not torch.compiler.is_compiling():
        warnings.warn(
            f"attention_mask is not used with attn_mask_type={mask_type!r}; got a mask. Set a "
            "padding mask type or 'arbitrary' to use it.",
            stacklevel=2,
        )
    if given.rules.qkv_format == "thd":  # the number of its sequences is known by now
        check_bias_shape(*given.bias[1:], (B, heads, Sq, Sk))
    mask = masks.make_mask(
        mask_type, window, Sq, Sk, padding=padding, arbitrary=arbitrary, diagonal=diagonal,
        pads_ends=sequences is not None or given.lengths.cu_seqlens_q is not None,
    )  # fmt: skip
    if diagonal is None:
        diagonal = Sk - Sq if padding is None else masks.diagonal_of(padding)
    return mask, diagonal


def _padding_of(given: Given, attention_type: str, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Return which queries and keys are padding, by the lengths or the mask of an sbhd call."""
    queries, keys = given.lengths.cu_seqlens_q, given.lengths.cu_seqlens_of_keys
    B, Sq, Sk = sizes
    if queries is not None and keys is not None:
        padding = padding_from_lengths(queries.diff(), Sq)
        is_shared = queries is keys and Sq == Sk
        return padding, padding if is_shared else padding_from_lengths(keys.diff(), Sk)
    if given.inference_params is not None and isinstance(given.attention_mask, Tensor):
        mask, _ = masks.split_padding_mask(given.attention_mask, "self", Sizes(B, Sk, Sk))
        return mask[:, Sk - Sq :], mask
    return masks.split_padding_mask(given.attention_mask, attention_type, sizes)


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
