"""Rotary position embedding.  S sequence, B batch, H heads, D head size, R rotated part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8lab import arguments
from float8lab.distributed.context_parallel import ONE_RANK, TokenRanks, places_of
from float8lab.formats import HIGH_PRECISION_DTYPES
from float8lab.nn.attention.layout import QKV_FORMATS
from float8lab.nn.parameters import default_device
from float8lab.ops import rotate_op
from float8lab.ops.reference.rotary import rotate
from float8lab.tensor.differentiation import AutogradContext

__all__ = [
    "RotaryPositionEmbedding", "Waves", "apply_rotary_pos_emb", "check_angles", "check_positions",
    "rotate_heads", "waves_of",
]  # fmt: skip


class RotaryPositionEmbedding(nn.Module):
    """The angles by which ``apply_rotary_pos_emb`` rotates queries and keys.

    Args:
        dim: head size.
        rotary_percent: part of the head size that is rotated.
        seq_len_interpolation_factor: a factor that divides positions (position interpolation).
        pretrained_max_position_embeddings: the length in training. A sequence longer than the
            factor times this length has its positions divided so as to end at this length.
        rotary_base: base of the frequencies.
        interleaved: rotate neighbours ``(0, 1), (2, 3) ...`` instead of halves
            ``(0, R / 2), (1, R / 2 + 1) ...``.
        device: device of the frequencies, as in ``Linear``; these stay float32 in any model.

    Source: RoFormer, arXiv:2104.09864; position interpolation, arXiv:2306.15595.

    >>> float8lab.nn.RotaryPositionEmbedding(64, device="cpu")(128).shape
    torch.Size([128, 1, 1, 64])
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        dim = arguments.check_size("dim", dim, minimum=2)
        percent = arguments.check_number("rotary_percent", rotary_percent, above=0, maximum=1)
        self.seq_len_interpolation_factor = arguments.check_number(
            "seq_len_interpolation_factor", seq_len_interpolation_factor, above=0, optional=True
        )
        self.pretrained_max_position_embeddings = arguments.check_size(
            "pretrained_max_position_embeddings", pretrained_max_position_embeddings, minimum=1,
            optional=True,
        )  # fmt: skip
        rotary_base = arguments.check_number("rotary_base", rotary_base, above=0)
        arguments.check_flags(interleaved=interleaved)
        target = arguments.check_device("device", device) or default_device()
        self.rotary_base, self.rotated = rotary_base, int(dim * percent)
        if self.rotated < 2 or self.rotated % 2:
            raise ValueError(
                f"dim * rotary_percent must be even and at least 2; got {dim * percent}. "
                "Change rotary_percent."
            )
        self.interleaved = interleaved
        self.register_buffer("inv_freq", self._frequencies(target), persistent=False)

    def _frequencies(self, device: torch.device) -> Tensor:
        powers = torch.arange(0, self.rotated, 2, dtype=torch.float32, device=device)
        return self.rotary_base ** -(powers / self.rotated)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        exact = self.inv_freq
        super()._apply(fn, recurse)
        # bfloat16 would round the frequencies, and be radians off after 1000 positions.
        device = self.inv_freq.device
        self.inv_freq = self._frequencies(device) if exact.is_meta else exact.to(device)
        return self

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles of positions from ``offset`` on, ``[max_seq_len, 1, 1, R]`` float32."""
        max_seq_len = arguments.check_size("max_seq_len", max_seq_len)
        offset = arguments.check_size("offset", offset)
        device = self.inv_freq.device
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=device) + offset
        factor, trained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None:
            positions = positions / max(factor, max_seq_len / trained if trained else 0)
        angles = torch.outer(positions, self.inv_freq)
        angles = angles.repeat_interleave(2, 1) if self.interleaved else angles.repeat(1, 2)
        return angles[:, None, None, :]


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    *,
    interleaved: bool = False,
    start_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    fused: bool = True,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotate queries or keys by their positions.

    Args:
        t: ``[S, B, H, D]``, ``[B, S, H, D]`` or ``[T, H, D]``, by ``tensor_format``.
        freqs: angles, ``[S', 1, 1, R]``, for at least the positions of ``t``; R is at most D, and
            other elements of a head stay unchanged.
        tensor_format: sbhd, bshd or thd.
        interleaved: whether the angles are interleaved.
        start_positions: ``[B]``, position of each sequence's first token; 0 if None.
        cu_seqlens: ``[B + 1]`` cumulative lengths, for thd: positions restart in each sequence.
        fused: no effect: a GPU always runs a single kernel.
        cp_size: number of context-parallel ranks; ``t`` has a rank's tokens of each sequence (see
            ``float8lab.distributed.shard_sequence``), but ``freqs`` and ``cu_seqlens`` are those of
            unsharded sequences.
        cp_rank: the rank.

    Returns:
        A tensor with the shape and dtype of ``t``, rotated in float32.

    Raises:
        TypeError: an argument is not a tensor of the right kind.
        ValueError: shapes or sizes do not fit together.

    >>> angles = float8lab.nn.RotaryPositionEmbedding(4, device="cpu")(2)
    >>> q = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(2, 1, 1, 4)
    >>> float8lab.nn.apply_rotary_pos_emb(q, angles)[1].flatten()
    tensor([0.5403, 0.0000, 0.8415, 0.0000])
    """
    arguments.check_choice("tensor_format", tensor_format, QKV_FORMATS)
    arguments.check_flags(interleaved=interleaved, fused=fused)
    arguments.check_size("cp_rank", cp_rank)
    if cp_rank >= arguments.check_size("cp_size", cp_size, minimum=1) > 1:
        raise ValueError(
            f"cp_rank must be below cp_size {cp_size}; got {cp_rank}. Pass the rank in cp_group."
        )
    arguments.check_tensor("t", t)
    ndim = 3 if tensor_format == "thd" else 4
    if t.ndim != ndim or not t.is_floating_point():
        raise ValueError(
            f"t must be a floating-point tensor of {ndim} dimensions for tensor_format="
            f"{tensor_format!r}; got {arguments.shown(t)}. Give the heads a dimension."
        )
    check_angles("freqs", freqs, t.shape[-1])
    is_packed, sequence = tensor_format == "thd", int(tensor_format == "bshd")
    rows, tokens = t.shape[1 - sequence], t.shape[sequence] * cp_size
    if is_packed or cu_seqlens is not None:
        # TransformerEngine's modules pass lengths with every format.
        why, most = f"tensor_format={tensor_format!r}", tokens if is_packed else None
        cu_seqlens = arguments.check_lengths("cu_seqlens", cu_seqlens, why=why, tokens=most)
        rows, tokens = (cu_seqlens.shape[0] - 1, 0) if is_packed else (rows, tokens)
    if start_positions is not None:
        _check_starts(start_positions, rows, tokens, freqs)
    waves = waves_of(
        t, freqs, tensor_format, start_positions=start_positions,
        cu_seqlens=cu_seqlens if is_packed else None, ranks=TokenRanks(cp_size, cp_rank),
    )  # fmt: skip
    return rotate_heads(t, waves, tensor_format, interleaved=interleaved)


def _check_starts(starts: Tensor, rows: int, tokens: int, freqs: Tensor) -> None:
    """Raise unless ``rows`` sequences of at least ``tokens`` tokens can start at ``starts``."""
    arguments.check_tensor("start_positions", starts)
    if starts.shape != (rows,) or starts.dtype not in arguments.INTEGER_DTYPES:
        raise ValueError(
            f"start_positions must be [{rows}] integers, one for each sequence; got "
            f"{arguments.shown(starts)}. Give the position of each one's first token."
        )
    last, values = freqs.shape[0] - tokens, starts.tolist() if arguments.has_values(starts) else []
    if any(not 0 <= start <= last for start in values):
        raise ValueError(
            f"start_positions must be in [0, {last}], for {tokens} tokens or more and "
            f"{freqs.shape[0]} angles in freqs; got {arguments.shown(values)}. Make freqs for the "
            "longest sequence."
        )


def check_angles(name: str, freqs: Tensor, head_size: int) -> None:
    """Raise unless ``freqs`` are angles for heads of this size."""
    arguments.check_tensor(name, freqs)
    are_angles = freqs.ndim > 1 and all(n == 1 for n in freqs.shape[1:-1])
    rotated = freqs.shape[-1] if are_angles and freqs.is_floating_point() else 1
    if rotated > head_size or rotated % 2:
        raise ValueError(
            f"{name} must be angles, [positions, 1, 1, R], R even and at most the head size "
            f"{head_size}; got {arguments.shown(freqs)}. Make them by RotaryPositionEmbedding of "
            "that head size."
        )


def check_positions(name: str, freqs: Tensor, count: int) -> None:
    """Raise unless ``freqs`` are angles of at least ``count`` positions."""
    if freqs.shape[0] < count:
        raise ValueError(
            f"{name} must have at least {count} positions; got {freqs.shape[0]}. Make them for the "
            "longest sequence, with the tokens of all context-parallel ranks."
        )


Waves: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of the angles by which heads are rotated; they broadcast to the heads."""


def waves_of(
    t: Tensor, freqs: Tensor, tensor_format: str, *, start_positions: Tensor | None,
    cu_seqlens: Tensor | None, name: str = "freqs", ranks: TokenRanks = ONE_RANK,
) -> Waves:  # fmt: skip
    """Look up the angles of tokens ``t``; padding may have positions after the last angle.

    Args:
        cu_seqlens: ``[B + 1]``, only for thd.
        name: the name of ``freqs`` in messages.
        ranks: which tokens of each sequence ``t`` has.
    """
    table = freqs.reshape(freqs.shape[0], freqs.shape[-1])
    if cu_seqlens is not None:
        token = _tokens_of_rank(cu_seqlens, t.shape[0], ranks, cu_seqlens.device)
        sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
        starts = cu_seqlens
        if start_positions is not None:
            starts = cu_seqlens - F.pad(start_positions, (0, 1))
        # Tokens after the last sequence may have no angle; no caller reads them.
        index = (token - starts[sequence]).masked_fill(sequence == cu_seqlens.shape[0] - 1, 0)
        if arguments.has_values(index) and index.numel():
            check_positions(name, freqs, int(index.max()) + 1)
        angles = table[index][:, None]
    else:
        S = t.shape[0] if tensor_format == "sbhd" else t.shape[1]
        if start_positions is None:
            check_positions(name, freqs, S * ranks.size)
            several = ranks.size > 1
            table = table[_tokens_of_rank(None, S, ranks, t.device)] if several else table[:S]
            angles = table[None, :, None]
        else:
            index = start_positions.view(-1, 1)
            if S > 1 or ranks.size > 1:  # a step of generation has a single token
                index = index + _tokens_of_rank(None, S, ranks, t.device)
            angles = table[index.clamp(max=table.shape[0] - 1)][:, :, None]
        angles = angles.transpose(0, 1) if tensor_format == "sbhd" else angles
    return angles.cos(), angles.sin()


def rotate_heads(t: Tensor, waves: Waves, tensor_format: str, *, interleaved: bool) -> Tensor:
    """Run ``apply_rotary_pos_emb`` on checked arguments."""
    cos, sin = waves
    if not _takes_op(t, cos):
        return rotate(t, cos, sin, interleaved, False)
    if tensor_format == "thd":
        t, cos, sin = (x.unsqueeze(1) for x in (t, cos, sin))
    rotated: Tensor = _Rotate.apply(t, cos, sin, interleaved, False)
    return rotated.squeeze(1) if tensor_format == "thd" else rotated


def _takes_op(t: Tensor, cos: Tensor) -> bool:
    """Whether the op rotates ``t``: on CUDA, if only ``t`` is differentiated."""
    # The op also runs in compiled graphs: Inductor would fuse sines and cosines into the rotation,
    # and recompute them for every head.
    plain = type(t) in (Tensor, nn.Parameter) and not cos.requires_grad
    plain = plain and not torch._C._are_functorch_transforms_active()
    return plain and t.is_cuda and t.dtype in HIGH_PRECISION_DTYPES


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.back = interleaved, back
        return rotate_op(t, cos, sin, interleaved, back)

    @staticmethod
    def backward(ctx: AutogradContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        # A compiled graph has no backward of backward.
        rotate = rotate_op if torch.compiler.is_compiling() else _Rotate.apply
        return rotate(dy, *ctx.saved_tensors, ctx.interleaved, not ctx.back), *[None] * 4


def _tokens_of_rank(
    starts: Tensor | None, tokens: int, ranks: TokenRanks, device: torch.device
) -> Tensor:
    """Return the unsharded indices of a rank's tokens."""
    if ranks.size == 1:
        return torch.arange(tokens, device=device)
    return places_of("t", starts, tokens, ranks, device)[ranks.rank]
