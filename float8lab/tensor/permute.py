"""Permute tokens so that those of an expert are neighbours, and back; plain and FP8 tensors.

T tokens, E experts, K experts of a token, R rows of permuted tokens, H features. Names, arguments
and meaning are those of Transformer Engine.
The row map that ``moe_permute`` returns gives the row of each token; ``reference/permute.py``
describes its layout. Permuting copies rows, unpermuting adds them up; each is the other's gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from float8lab import arguments
from float8lab.ops import gather_rows_op, row_map_op, scatter_rows_op
from float8lab.tensor.differentiation import AutogradContext, Float8Function, once_differentiable
from float8lab.tensor.float8_tensor import Float8Tensor, decoded
from float8lab.tensor.views import cut

__all__ = [
    "are_sizes", "check_integers", "check_probs", "check_tokens", "gather_rows", "map_of_chunks",
    "moe_permute", "moe_permute_and_pad_with_probs", "moe_permute_with_probs",
    "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs", "moe_unpermute", "routed",
    "scatter_rows",
]  # fmt: skip


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int | None = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[Tensor, Tensor]:
    """Copy each token to the rows of its experts, ordered by expert and then by token.

    With ``num_out_tokens`` the CPU does not wait for the GPU, and a CUDA graph can capture the op.

    Args:
        inp: ``[T, H]``, float32, bfloat16, float16 or float64, or a Float8Tensor, whose bytes move
            with their scales. A scale for the whole tensor is shared; a block of several rows is
            cut into rows.
        routing_map: with ``map_type="mask"``, ``[T, E]`` of bools or integers: nonzero where an
            expert gets the token. With ``"index"``, ``[T, K]`` of integers: the experts of each
            token; a negative number means no expert.
        num_out_tokens: R. Rows beyond are dropped, and rows that no token fills are zero. With -1
            or None, R is the number that ``routing_map`` asks for; for a mask on a GPU the CPU then
            waits.
        max_token_num: ignored; no workspace is kept between calls.
        map_type: ``"mask"`` or ``"index"``.

    Returns:
        ``[R, H]``: the rows, plain or in FP8 like ``inp``; and the row map for ``moe_unpermute``,
        ``[T, E + 1]`` or ``[T, K + 1]`` int32.

    Raises:
        ValueError: shapes that do not fit together.

    >>> x = torch.tensor([[1.0], [2.0], [3.0]])
    >>> rows, row_map = moe_permute(x, torch.tensor([[0, 1], [1, 1], [1, 0]]))
    >>> rows.flatten()
    tensor([2., 3., 1., 2.])
    >>> moe_unpermute(rows, row_map).flatten()
    tensor([1., 4., 3.])
    """
    check_tokens("inp", inp)
    arguments.check_size("max_token_num", max_token_num, minimum=-1)
    arguments.check_choice("map_type", map_type, ("mask", "index"))
    row_map, rows = _row_map(routing_map, inp.shape[0], num_out_tokens, map_type)
    return scatter_rows(inp, row_map, rows)[0], row_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | None = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token, and its probability for each expert, to the rows of its experts.

    Args:
        probs: ``[T, E]``, any float.

    Returns:
        ``[R, H]``: the rows; ``[R]``: their probabilities, 0 for empty rows; and the row map.

    The other arguments, with a mask, and the errors are those of ``moe_permute``.

    >>> mask = torch.tensor([[True, True], [False, True]])
    >>> rows, probs, _ = moe_permute_with_probs(torch.eye(2), torch.rand(2, 2) * mask, mask, 3)
    >>> rows.shape, probs.shape
    (torch.Size([3, 2]), torch.Size([3]))
    """
    check_tokens("inp", inp)
    row_map, rows = _row_map(routing_map, inp.shape[0], num_out_tokens, "mask")
    check_probs("probs", probs, tuple(routing_map.shape))
    return *scatter_rows(inp, row_map, rows, probs), row_map


class PaddedRows(NamedTuple):
    """The result of ``moe_permute_and_pad_with_probs``."""

    rows: Tensor
    """``[R, H]``."""
    probs: Tensor
    """``[R]``: the probabilities of the rows, 0 for empty rows."""
    row_map: Tensor
    """The row map for ``moe_unpermute``, along with ``restore_shape`` and ``pad_offsets``."""
    pad_offsets: Tensor | None
    """``[E]`` int64: the number of padding rows before each expert, or None if there are none."""
    sizes: Tensor
    """``[E]`` int64: the number of rows of each expert."""


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> PaddedRows:
    """Copy each token to the rows of its experts, and pad the rows of each expert with zeros.

    Each expert then has a multiple of ``align_size`` rows, for code that needs that;
    ``GroupedLinear`` takes any number. The CPU waits for the GPU to learn the number of rows.

    Args:
        probs: ``[T, E]``, any float.
        tokens_per_expert: ``[E]`` integers, the tokens that ``routing_map`` gives each expert.
        align_size: the divisor of the number of rows of each expert.

    The other arguments, with a mask, and the errors are those of ``moe_permute``.

    >>> mask, probs = torch.tensor([[1, 1], [0, 1]]), torch.ones(2, 2)
    >>> rows, _, row_map, pads, sizes = moe_permute_and_pad_with_probs(
    ...     torch.eye(2), probs, mask, mask.sum(0), 4
    ... )
    >>> rows.shape, pads, sizes
    (torch.Size([8, 2]), tensor([0, 3]), tensor([4, 4]))
    >>> moe_unpermute(rows, row_map, restore_shape=(2, 2), pad_offsets=pads)
    tensor([[2., 0.],
            [0., 1.]])
    """
    check_tokens("inp", inp)
    _check_routing_map(routing_map, inp.shape[0], "mask")
    check_probs("probs", probs, tuple(routing_map.shape))
    check_integers("tokens_per_expert", tokens_per_expert, 1)
    arguments.check_size("align_size", align_size, minimum=1)
    counts = tokens_per_expert.to(inp.device, torch.int64)
    fits = counts.shape == routing_map.shape[1:]
    if not fits or (arguments.has_values(counts) and not counts.equal((routing_map != 0).sum(0))):
        raise ValueError(
            "tokens_per_expert must be the number of tokens that routing_map gives each expert; "
            f"got {arguments.shown(tokens_per_expert)}. Pass (routing_map != 0).sum(0)."
        )
    pads = -counts % align_size
    sizes = counts + pads
    rows, padded = torch.stack([sizes.sum(), pads.sum()]).tolist()
    if not padded:
        y, permuted, row_map = moe_permute_with_probs(inp, probs, routing_map, rows)
        return PaddedRows(y, permuted, row_map, None, sizes)
    # Extra tokens of zeros fill the padding rows; there are enough for the largest padding.
    is_padding = torch.arange(align_size - 1, device=inp.device)[:, None] < pads
    routing_map = torch.cat([routing_map != 0, is_padding])
    row_map, _ = row_map_op(routing_map)
    y, permuted = scatter_rows(inp, row_map, rows, _pad_tokens(probs, len(row_map)))
    return PaddedRows(y, permuted, row_map, pads.cumsum(0) - pads, sizes)


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | tuple[int, ...] | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Add up the rows of each token, in float32 and in the order of its experts.

    Args:
        inp: ``[R, H]``, the rows in the order of ``moe_permute``; plain or a Float8Tensor.
        row_id_map: the row map that ``moe_permute`` returned.
        merging_probs: ``[T, E]``, or ``[T, K]`` if the map is of indices; any float. Each row is
            multiplied by its probability.
        restore_shape: ``(T, H)``; may be omitted, since the row map implies it.
        map_type: ``"mask"`` or ``"index"``; ignored, since the row map implies it.
        probs: an older name of ``merging_probs``.
        pad_offsets: the ``pad_offsets`` that ``moe_permute_and_pad_with_probs`` returned with the
            row map; ``restore_shape`` then gives T.

    Returns:
        ``[T, H]`` in the dtype of ``inp``; 0 for a token without experts.

    Raises:
        ValueError: shapes do not fit together, or both names of the probabilities are used.

    >>> rows, row_map = moe_permute(torch.ones(1, 2), torch.tensor([[1, 0, 1]]), 2)
    >>> moe_unpermute(rows, row_map, torch.tensor([[0.25, 0.0, 0.5]]))
    tensor([[0.7500, 0.7500]])
    """
    check_tokens("inp", inp)
    arguments.check_choice("map_type", map_type, ("mask", "index"))
    arguments.check_tensor("row_id_map", row_id_map)
    if row_id_map.dtype != torch.int32 or row_id_map.ndim != 2 or not row_id_map.shape[1]:
        raise ValueError(
            f"row_id_map must be the row map of moe_permute, int32 of 2 dimensions; got "
            f"{arguments.shown(row_id_map)}. Pass what moe_permute returned last."
        )
    entries, slots = row_id_map.shape[0], row_id_map.shape[1] - 1
    if probs is not None and merging_probs is not None:
        raise ValueError(
            f"probs must be None with merging_probs; got {arguments.shown(probs)}. It is an older "
            "name: pass merging_probs alone."
        )
    merging_probs = probs if merging_probs is None else merging_probs
    if pad_offsets is not None:
        check_integers("pad_offsets", pad_offsets, 1)
    tokens = _tokens_to_restore(restore_shape, entries, inp.shape[1], pad_offsets is not None)
    if merging_probs is not None:
        check_probs("merging_probs", merging_probs, (tokens, slots))
        if tokens != entries:
            merging_probs = _pad_tokens(merging_probs, entries)
    merged = gather_rows(inp, row_id_map, merging_probs)
    return merged if tokens == entries else merged[:tokens]


def _tokens_to_restore(
    restore_shape: torch.Size | tuple[int, ...] | None, entries: int, features: int, padded: bool
) -> int:
    """Return how many entries of the row map are tokens; the other entries are padding."""
    shape = tuple(restore_shape) if isinstance(restore_shape, (tuple, list)) else ()
    if padded and len(shape) != 2:
        raise ValueError(
            f"restore_shape must be the shape of the tokens with pad_offsets; got "
            f"{arguments.shown(restore_shape)}. Pass tokens.shape."
        )
    tokens = min(entries, arguments.check_size("restore_shape[0]", shape[0])) if padded else entries
    expected = (tokens, features)
    if restore_shape is not None and shape != expected:
        raise ValueError(
            f"restore_shape must be None or {expected}, the tokens of the row map and the features "
            f"of inp; got {arguments.shown(restore_shape)}. Leave it out."
        )
    return tokens


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Cut tokens into chunks, and put the chunks in another order.

    The CPU does not wait for the GPU, and a CUDA graph can capture the op.

    Args:
        inp: ``[T, H]``, as ``moe_permute`` takes it.
        split_sizes: integers, the sizes of the chunks. Tokens beyond their sum are dropped, and the
            remaining rows are zero.
        sorted_index: integers, the numbers of the chunks in their new order.

    Returns:
        ``[T, H]``, plain or in FP8 like ``inp``.

    Errors are those of ``moe_permute``.

    >>> x = torch.arange(4.0)[:, None]
    >>> moe_sort_chunks_by_index(x, torch.tensor([1, 2, 1]), torch.tensor([2, 0, 1])).flatten()
    tensor([3., 0., 1., 2.])
    """
    return _sort_chunks(inp, None, split_sizes, sorted_index)[0]


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Cut tokens and their probabilities into chunks, and put the chunks in another order.

    Args:
        probs: ``[T]``, any float.

    The other arguments and the errors are those of ``moe_sort_chunks_by_index``.

    >>> sizes, order = torch.tensor([1, 1]), torch.tensor([1, 0])
    >>> moe_sort_chunks_by_index_with_probs(torch.eye(2), torch.tensor([0.1, 0.2]), sizes, order)[1]
    tensor([0.2000, 0.1000])
    """
    arguments.check_tensor("probs", probs)
    return _sort_chunks(inp, probs, split_sizes, sorted_index)


def _sort_chunks(
    inp: Tensor, probs: Tensor | None, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Any, Any]:
    check_tokens("inp", inp)
    for name, value in (("split_sizes", split_sizes), ("sorted_index", sorted_index)):
        check_integers(name, value, 1)
    if split_sizes.shape != sorted_index.shape:
        raise ValueError(
            f"sorted_index must have one number for each of the {len(split_sizes)} chunks of "
            f"split_sizes; got {arguments.shown(sorted_index)}. Pass each chunk's number once."
        )
    numbers = [*range(len(split_sizes))]
    if arguments.has_values(sorted_index) and sorted_index.sort()[0].tolist() != numbers:
        raise ValueError(
            f"sorted_index must hold each number below {len(split_sizes)} once; got "
            f"{sorted_index.tolist()}. Number the chunks from 0."
        )
    if arguments.has_values(split_sizes) and not are_sizes(split_sizes.tolist(), inp.shape[0]):
        raise ValueError(
            f"split_sizes must hold sizes, none negative, of at most the {inp.shape[0]} tokens of "
            f"inp; got {split_sizes.tolist()}. Pass the number of tokens of each chunk."
        )
    if probs is not None:
        check_probs("probs", probs, (inp.shape[0],))
        probs = probs[:, None]
    row_map = map_of_chunks(inp.shape[0], split_sizes.to(inp.device), sorted_index.to(inp.device))
    return scatter_rows(inp, row_map, inp.shape[0], probs)


def are_sizes(sizes: list[int], tokens: int) -> bool:
    """Whether this number of tokens can be cut into chunks of these sizes."""
    return min(sizes, default=0) >= 0 and sum(sizes) <= tokens


def check_tokens(name: str, x: Tensor) -> None:
    """Raise unless ``x`` holds tokens by features, plain or in FP8."""
    advice = "Convert it first; FP8 data moves with its scales as a Float8Tensor."
    arguments.check_floating(name, x, advice)
    arguments.check_shape(name, x, (None, None), "Reshape it to tokens and features.")


def check_integers(name: str, x: Tensor, ndim: int) -> None:
    """Raise unless ``x`` is a tensor of integers or bools."""
    arguments.check_tensor(name, x)
    if x.is_floating_point() or x.is_complex():
        got = arguments.shown(x)
        raise TypeError(f"{name} must hold integers; got {got}. Convert it, by .int().")
    arguments.check_shape(name, x, (None,) * ndim)


def check_probs(name: str, probs: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless ``probs`` is a floating-point tensor of this shape."""
    arguments.check_floating(name, probs, "Convert it.")
    advice = "Reshape it, as inp and routing_map or row_id_map say."
    arguments.check_shape(name, probs, shape, advice)


def _row_map(
    routing_map: Tensor, tokens: int, num_out_tokens: int | None, map_type: str
) -> tuple[Tensor, int]:
    """Return the row map of a routing map, and R."""
    _check_routing_map(routing_map, tokens, map_type)
    row_map = row_map_op(routing_map)[0] if map_type == "mask" else _map_of_index(routing_map)
    return row_map, _rows_of(row_map, num_out_tokens)


def _rows_of(row_map: Tensor, num_out_tokens: int | None) -> int:
    rows = arguments.check_size("num_out_tokens", num_out_tokens, minimum=-1, optional=True)
    if rows is None or rows == -1:
        rows = int(row_map[0, -1]) if row_map.shape[0] else 0
    return rows


def _check_routing_map(routing_map: Tensor, tokens: int, map_type: str) -> None:
    check_integers("routing_map", routing_map, 2)
    if routing_map.dtype == torch.bool and map_type == "index":
        raise TypeError(
            "routing_map must hold numbers of experts with map_type='index'; got bools. Pass "
            "map_type='mask'."
        )
    advice = "Pass the map of the tokens of inp."
    arguments.check_shape("routing_map", routing_map, (tokens, None), advice)


def routed(
    routing_map: Tensor, tokens: int, experts: int | None = None, num_out_tokens: int | None = None
) -> tuple[Tensor, int, Tensor]:
    """Compute the row of each token such that the rows of an expert are neighbours.

    Args:
        routing_map: ``[T, E]``, a mask; or with ``experts`` (E), ``[T, K]`` of integers, the
            experts of each token. A number outside ``range(experts)`` means no expert.
        num_out_tokens: R if ``routing_map`` is a mask, as in ``moe_permute``.

    Returns:
        The row map; R, which is ``T * K`` with ``experts``; and ``[E]`` int32: the offset after the
        last row of each expert.
    """
    _check_routing_map(routing_map, tokens, "index" if experts else "mask")
    row_map, offs = row_map_op(_widen_dtype(routing_map) if experts else routing_map, experts or 0)
    if experts:
        return row_map, routing_map.numel(), offs
    rows = _rows_of(row_map, num_out_tokens)
    return row_map, rows, offs.clamp(max=rows)


def _widen_dtype(index: Tensor) -> Tensor:
    """Convert numbers of experts to a dtype with room for larger numbers, which int8 may lack."""
    return index.to(torch.promote_types(index.dtype, torch.int32))


def _map_of_index(index: Tensor) -> Tensor:
    T, K = index.shape
    experts = _widen_dtype(index).reshape(-1)
    is_expert = experts >= 0
    order = torch.where(is_expert, experts, torch.iinfo(experts.dtype).max).argsort(stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(T * K, device=index.device))
    row_map = index.new_empty((T, K + 1), dtype=torch.int32)
    row_map[:, :-1] = torch.where(is_expert, rows, -1).view(T, K)
    row_map[:, -1] = is_expert.sum()
    return row_map


def map_of_chunks(tokens: int, sizes: Tensor, order: Tensor) -> Tensor:
    """Return the row map that reorders chunks of tokens; see ``moe_sort_chunks_by_index``."""
    sizes, order = sizes.long(), order.long()
    offs = sizes.cumsum(0)
    new_sizes = sizes[order]
    starts = torch.zeros_like(offs).scatter_(0, order, new_sizes.cumsum(0) - new_sizes)
    shift = torch.cat([starts - offs + sizes, starts.new_zeros(1)])  # 0 for tokens in no chunk
    token = torch.arange(tokens, device=sizes.device)
    chunk = torch.searchsorted(offs, token, right=True)
    row_map = sizes.new_empty((tokens, 2), dtype=torch.int32)
    row_map[:, 0] = torch.where(chunk < len(sizes), token + shift[chunk], -1)
    row_map[:, 1] = sizes.sum()
    return row_map


def scatter_rows(
    x: Tensor, row_map: Tensor, rows: int, probs: Tensor | None = None
) -> tuple[Any, Any]:
    """Copy tokens (plain or FP8) and ``[T, S]`` probabilities to their rows; differentiable.
    If the row map has more tokens than ``x``, the additional tokens are zero."""
    return _Scatter.run(x, row_map, rows, probs)


def gather_rows(y: Tensor, row_map: Tensor, probs: Tensor | None = None) -> Tensor:
    """Add up each token's rows (plain or FP8) times ``[T, S]`` probabilities; differentiable."""
    return _Gather.run(y, row_map, probs)


def _cut_to_rows(x: Float8Tensor) -> Float8Tensor:
    """Cut blocks of several rows into rows; a block of all rows stays."""
    x._refresh()
    return x if x.spec.block[0] == -1 else cut(x, (1, x.spec.block[1]))


def _pad_tokens(x: Tensor, tokens: int) -> Tensor:
    """Append rows of zeros to a tensor up to ``tokens`` rows."""
    x = _cut_to_rows(x) if isinstance(x, Float8Tensor) else x
    return F.pad(x, (0, 0, 0, tokens - x.shape[0]))


def _scatter_rows(
    x: Tensor, row_map: Tensor, rows: int, probs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Copy tokens to rows without autograd; return the rows, and their probabilities if given."""
    if isinstance(x, Float8Tensor):
        x = _cut_to_rows(x)
        shared = x.spec.block[0] == -1
        scales = (None, None) if shared else (x.scale, x.amax)
        data = x.qdata.view(torch.uint8)
        data, row_probs, *new_scales = scatter_rows_op(data, row_map, rows, probs, None, *scales)
        scale, amax = (x.scale.clone(), x.amax.clone()) if shared else new_scales
        y: Tensor = x.replace(qdata=data.view(x.qdata.dtype), scale=scale, amax=amax)
    else:
        y, row_probs, *_ = scatter_rows_op(x, row_map, rows, probs)
    return y, None if probs is None else row_probs


def _gather_rows(
    y: Tensor, row_map: Tensor, probs: Tensor | None = None, row_probs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return sums of rows, and of the probabilities of rows if given, without autograd."""
    data: Tensor = y
    blocks: tuple[Tensor, int] | tuple[()] = ()
    if isinstance(y, Float8Tensor):
        y = _cut_to_rows(y)
        data, columns = y.qdata, y.spec.block[1]
        scale = y.scale.expand(y.shape[0], y.scale.shape[1])
        blocks = scale, max(y.shape[1], 1) if columns == -1 else columns
    return gather_rows_op(data, row_map, y.dtype, probs, row_probs, *blocks)


class _Scatter(Float8Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, row_map: Tensor, rows: int, probs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(row_map)
        ctx.tokens = x.shape[0]
        if ctx.tokens != row_map.shape[0]:
            x = _pad_tokens(x, row_map.shape[0])
        return _scatter_rows(x, row_map, rows, probs)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: AutogradContext, dy: Tensor, dprobs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        (row_map,) = ctx.saved_tensors
        dx, dprobs_in = _gather_rows(dy, row_map, None, dprobs)
        return dx[: ctx.tokens], *(None, None), None if dprobs is None else dprobs_in


class _Gather(Float8Function):
    @staticmethod
    def forward(ctx: AutogradContext, y: Tensor, row_map: Tensor, probs: Tensor | None) -> Tensor:
        ctx.rows = y.shape[0]
        # Only the gradient of the probabilities needs the rows.
        rows = y if ctx.needs_input_grad[2] else None
        ctx.save_for_backward(row_map, *(() if probs is None else (probs, rows)))
        return _gather_rows(y, row_map, probs)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, dx: Tensor) -> tuple[Tensor | None, ...]:
        row_map, *merged = ctx.saved_tensors
        if not merged:
            return _scatter_rows(dx, row_map, ctx.rows)[0], None, None
        dx, probs, y = map(decoded, (dx, *merged))
        needs_dprobs = y is not None  # if not, the op reads an uninitialized tensor in place of y
        y = y if needs_dprobs else dx.new_empty((ctx.rows, dx.shape[1]))
        dy, dprobs, *_ = scatter_rows_op(dx, row_map, ctx.rows, probs, y)
        return dy, None, dprobs if needs_dprobs else None
