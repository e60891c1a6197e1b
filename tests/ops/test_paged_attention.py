"""Attention to a paged cache: each sequence against float64; calls without sequences or pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from float8lab import ops
from float8lab.formats import E4M3, E5M2, Spec
from float8lab.tensor.operands import quantize

CACHES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp8": (torch.bfloat16, E4M3),
    "fp16-e5m2": (torch.float16, E5M2),
    "float32": (torch.float32, torch.float32),
}
WINDOWS = {"causal": (-1, 0), "window": (3, 0), "both-sides": (2, 1), "all": (-1, -1)}
SHAPES = {
    # H, G, S, D, Dv, P, keys of the longest sequence
    "decode": (8, 2, 1, 16, 16, 4, 30),
    "several": (4, 4, 5, 24, 40, 3, 30),
    "one-head": (16, 1, 4, 130, 8, 7, 30),
    "odd": (2, 1, 1, 9, 7, 2, 30),
    "long": (8, 2, 1, 64, 128, 64, 600),
}


def problem(
    shape: tuple[int, ...], dtype: torch.dtype, cache: torch.dtype, device: Any
) -> tuple[Tensor, ...]:
    """Sequences of many keys, of 1 key and of 9 keys; one has fewer queries than the others."""
    H, G, S, D, DV, P, longest = shape
    before, lengths = torch.tensor([longest - S, 0, 9 - S]).clamp(min=0), torch.tensor([S, 1, S])
    n = -(-longest // P)
    pages = 3 * n + 2
    q = torch.randn(3, S, H, D, device=device, dtype=dtype).transpose(1, 2)
    data_and_scales: list[Tensor | None] = []
    for size in (D, DV):
        x = torch.randn(pages, G, P, size, device=device) * torch.rand(
            pages, G, P, 1, device=device
        )
        x[-1] = torch.nan  # a page of no sequence
        scale = None
        if cache.itemsize == 1:
            scale = torch.rand(pages, G, P, 1, device=device) + 0.1
            x = (x / scale).clamp(-400, 400)
        data_and_scales += [x.to(cache), scale]
    k, k_scale, v, v_scale = data_and_scales
    table = torch.full((4, n), pages - 1, dtype=torch.int32, device=device)
    rows = torch.tensor([2, 0, 3])
    order = torch.randperm(pages - 1)[: 3 * n].view(3, n)
    for row, pages_of_row, length in zip(rows, order, before + lengths, strict=True):
        used = -(-int(length) // P)
        table[row, :used] = pages_of_row[:used].to(table)
    sequences = torch.stack((rows, before, lengths)).int().to(device)
    return q, k, v, k_scale, v_scale, table, sequences


def float64_attention(
    arguments: tuple[Any, ...], left: int, right: int, scale: float
) -> tuple[Tensor, float]:
    """Each sequence's output in float64, and the largest sum of magnitudes of a score's terms."""
    largest_terms = 0.0
    q, k, v, k_scale, v_scale, table, sequences = arguments
    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b, (row, before, count) in enumerate(sequences.T.tolist()):
        j = torch.arange(before + count, device=q.device)
        page, position = table[row, j // k.shape[2]].long(), j % k.shape[2]
        keys, values = (
            (x.double() * (1.0 if s is None else s.double()))[page, :, position].transpose(0, 1)
            for x, s in ((k, k_scale), (v, v_scale))
        )
        groups = q.shape[1] // keys.shape[0]
        keys, values = (x.repeat_interleave(groups, 0) for x in (keys, values))
        distance = before + torch.arange(count, device=q.device)[:, None] - j
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden |= distance > left
        if right >= 0:
            hidden |= -distance > right
        scores = (q[b, :, :count].double() @ keys.mT * scale).masked_fill(hidden, -torch.inf)
        out[b, :, :count] = scores.softmax(-1) @ values
        largest_terms = max(
            largest_terms, float((q[b].double().abs() @ keys.abs().mT).amax() * scale)
        )
    return out, largest_terms


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_paged_attention_is_near_float64(shape, window, cache, device):
    dtype, cache_dtype = cache
    arguments = problem(shape, dtype, cache_dtype, device)
    out = ops.paged_attention(*arguments, *window, 0.3)
    expected, size = float64_attention(arguments, *window, 0.3)
    assert out.dtype == dtype
    assert out.transpose(1, 2).is_contiguous()
    # The result is rounded once; on a GPU the probabilities are also rounded, to 16 bits. A score
    # is a sum in float32 with an error below 8 roundings of its terms, in the logarithm of the
    # probability.
    eps = torch.finfo(torch.bfloat16 if cache_dtype.itemsize == 1 else dtype).eps + size * 2.0**-21
    assert (out.double() - expected).norm() <= eps * expected.norm()
    assert torch.equal(out[1, :, 1:], torch.zeros_like(out[1, :, 1:]))


def test_calls_without_sequences_or_keys_give_empty_or_zero_outputs(device):
    q, k, v, k_scale, v_scale, table, sequences = problem(SHAPES["decode"], *CACHES["fp8"], device)
    for end in (0, 1):
        part = sequences[:, :end].contiguous()
        out = ops.paged_attention(q[:end], k, v, k_scale, v_scale, table, part, -1, 0, 1.0)
        assert out.shape == (end, 8, 1, 16)
    part[1:] = 0  # no key at all
    out = ops.paged_attention(q[:1], k, v, k_scale, v_scale, table, part, -1, 0, 1.0)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("shape", [(2, 3, 4, 20, 5), (3, 8, 1, 128, 16), (1, 40, 3, 256, 2)])
def test_write_pages_stores_the_rowwise_casts_of_tokens(shape, cache, device):
    """Pages hold, bit for bit, the casts of the given tokens with special values, and no others."""
    (B, G, S, D, P), (dtype, cache_dtype) = shape, cache
    x = torch.randn(B, S, G, D) * torch.logspace(-9, 9, G)[:, None]
    x[0, 0, 0, :2], x[-1, -1, -1] = torch.tensor([torch.inf, torch.nan]), 0.0
    x, index = x.to(dtype), torch.arange(B * S - 1).flip(0)
    tokens = torch.stack((index // S, index % S, torch.randperm(B * S)[1:], index % P))
    data = torch.full((B * S, G, P, D), -1.0).to(cache_dtype)
    scale = torch.full((B * S, G, P, 1), -1.0) if cache_dtype.itemsize == 1 else None
    written = [None if t is None else t.to(device, copy=True) for t in (data, scale)]
    ops.write_pages_(x.to(device).transpose(1, 2), *written, tokens.to(device))
    for row, token, page, position in tokens.T.tolist():
        vectors = x[row, token].to(device)
        if scale is not None:
            vectors, row_scales = quantize(vectors, Spec(cache_dtype, (1, -1)), align=1).rowwise
            scale[page, :, position] = row_scales.cpu()
        data[page, :, position] = vectors.to(cache_dtype).cpu()
    for got, want in zip(written, (data, scale), strict=True):
        if got is not None:
            got, want = got.float().cpu(), want.float()
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
