"""Run under TRITON_INTERPRET=1 by test_kernels_interpreter.py: every kernel against the reference.

With the argument ``--all``, in all combinations; without, each value of each axis.

The interpreter rounds FP8 casts wrongly: it loses the carry into the exponent, which halves values
that round up to a power of two. So FP8 data is compared within one step of the format, powers of
two within their half; scales, amaxes and padding are compared exactly.
"""

import functools
import itertools
import sys
import unittest.mock
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter

from float8lab import ops
from float8lab.formats import E4M3, E5M2, scale_shape
from float8lab.inspect.watch.measure import _numbers_by_torch
from float8lab.ops import Prologue, reference
from float8lab.ops.kernels import (
    attention,
    attention_backward,
    cast_many,
    cross_entropy,
    few_rows_gemm,
    grouped_cast,
    measure,
    moments,
    norm,
    paged_attention,
    permute,
    prologue,
    rotary,
    router,
    scaling,
)
from float8lab.ops.kernels.cast import amax_of, cast
from float8lab.ops.kernels.dequantize import dequantize, transpose
from tests.ops import forms, groups

ALL = "--all" in sys.argv
BF16, FP32 = torch.bfloat16, torch.float32


def mend_interpreter() -> None:
    patch, patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor

    def patch_and_fix(tensor: Any, scope: Any) -> None:
        # Triton 3.6 calls int() on arrays of one element, which NumPy refuses since 2.4.
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def read_mask_as_bool(name: str, place: int) -> None:
        access = getattr(interpreter.InterpreterBuilder, name)

        def masked(*args: Any) -> Any:  # Triton 3.9: integers, of a tensor and a scalar's truth
            args[place].data = args[place].data.astype(bool)
            return access(*args)

        setattr(interpreter.InterpreterBuilder, name, masked)

    read_mask_as_bool("create_masked_load", 2)
    read_mask_as_bool("create_masked_store", 3)
    interpreter._patch_lang_tensor = patch_and_fix
    # Each call of a function in a kernel looks for what to patch: two fifths of the time.
    interpreter._patch_lang = functools.cache(lambda function: type(patch(function))())


def matrix(rows: int, columns: int, dtype: torch.dtype = BF16) -> Tensor:
    """Values of many magnitudes, a row and a column of zeros, where there is room for them."""
    x = torch.randn(rows, columns) * torch.logspace(-3, 3, columns)
    if rows > 4 and columns > 4:
        x[3], x[:, 2] = 0, 0
    return x.to(dtype)


def same(got: Tensor | None, want: Tensor | None) -> None:
    if got is None or want is None:
        assert got is want
        return
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.dtype in (E4M3, E5M2):
        step, smallest = (2**-3, 2**-9) if got.dtype == E4M3 else (2**-2, 2**-16)
        wanted = want.float().abs()
        power_of_2 = wanted.frexp().mantissa == 0.5
        bound = torch.where(power_of_2, wanted / 2, wanted * step).clamp(min=smallest)
        assert bool(((got.float() - want.float()).abs() <= bound).all())
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def all_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        same(one, other)
        assert one.stride() == other.stride() or 1 in one.shape


def sums_close(got: Tensor, want: Tensor) -> None:
    largest = want.abs().max().item() if want.numel() else 0.0  # terms of others may cancel
    torch.testing.assert_close(got, want, rtol=1e-5, atol=max(1e-2, 1e-7 * largest))


def check_quantize() -> None:
    cases = [
        ((-1, -1), "fp32", 0.0, 16, matrix(70, 135)),
        ((-1, -1), "pow2", 0.5, 1, matrix(3, 5, FP32)),
        ((-1, -1), "e8m0", 0.0, 16, matrix(40, 70).t()), ((1, -1), "fp32", 0.0, 16, matrix(7, 135)),
        ((1, -1), "pow2", 0.0, 1, matrix(70, 67).t()), ((1, -1), "fp32", 0.0, 16, matrix(1, 8200)),
        ((1, 128), "fp32", 0.0, 16, matrix(67, 140)),
        ((1, 128), "pow2", 1e-3, 1, matrix(5, 300)[:, ::2]),
        ((128, 128), "fp32", 0.0, 16, matrix(130, 50)), ((1, 32), "e8m0", 0.0, 16, matrix(5, 70)),
        ((32, 32), "pow2", 0.0, 16, matrix(70, 40)), ((1, 96), "fp32", 0.0, 16, matrix(5, 100)),
        ((5, -1), "fp32", 0.0, 1, matrix(7, 9)),
    ]  # fmt: skip
    for index, (block, rule, eps, align, x) in enumerate(cases):
        # Indices do not depend on the format: in turn, each with every block and rule elsewhere.
        arguments = ((E4M3, E5M2)[index % 2], block, rule, eps, align)
        all_same(forms.quantize(cast, x, *arguments), reference.quantize(x, *arguments))
        if x.shape[1] > 8192 and not ALL:  # many tiles of both orientations, each as any other
            continue
        *got, sums = forms.quantize_pair(cast, x, *arguments, True)
        *want, sums_wanted = forms.quantize_pair(reference.cast, x, *arguments, True)
        all_same(got, want)
        sums_close(sums, sums_wanted)
    known_amax = torch.full((1, 1), 7000.0)  # not theirs, to see which is taken
    for x in (matrix(70, 135), matrix(3, 5, FP32)):
        for align in (1, 16):
            arguments = (E4M3, (-1, -1), "fp32", 0.0, align)
            want = reference.quantize(x, *arguments, known_amax)
            all_same(forms.quantize(cast, x, *arguments, known_amax)[:2], want[:2])
            *got, _ = forms.quantize_pair(cast, x, *arguments, False, known_amax)
            *want, _ = forms.quantize_pair(reference.cast, x, *arguments, False, known_amax)
            all_same(got, want)
    for shape in ((0, 5), (5, 0), (0, 0)):
        for block in ((-1, -1), (1, -1), (1, 128)):
            arguments = (E4M3, block, "fp32", 0.0, 16)
            x = torch.zeros(shape)
            all_same(forms.quantize(cast, x, *arguments), reference.quantize(x, *arguments))


def check_quantize_many() -> None:
    """Every matrix of a list as it is quantized alone, and nothing beside it is written."""
    shapes = [(70, 144), (3, 5), (0, 7), (130, 260), (9, 1), (66, 272), (4, 32)]
    cases = [
        ((-1, -1), "fp32", 0.0, BF16, E4M3), ((-1, -1), "pow2", 0.5, FP32, E5M2),
        ((1, -1), "pow2", 1e-2, BF16, E5M2), ((1, -1), "fp32", 0.0, FP32, E4M3),
        ((1, 128), "fp32", 0.0, FP32, E4M3), ((128, 128), "fp32", 1e-2, FP32, E4M3),
        ((1, 32), "e8m0", 0.0, BF16, E4M3), ((1, 96), "fp32", 0.0, FP32, E4M3),
    ]  # fmt: skip
    for block, rule, eps, dtype, fp8_dtype in cases if ALL else [cases[0], cases[2], *cases[4:7]]:
        xs = [matrix(*shape, dtype) for shape in shapes]
        xs += [matrix(20, 64, dtype).t(), matrix(20, 64, dtype)[:, 16:48], matrix(6, 48).half()]
        if block == (1, -1) and (ALL or dtype == BF16):
            xs.append(matrix(1, 8208, dtype))
        want = [reference.quantize(x, fp8_dtype, block, rule, eps, 1) for x in xs]
        got = [tuple(surrounded(tensor) for tensor in tensors) for tensors in want]
        q, scale, amax = map(list, zip(*got, strict=True))
        cast_many.cast_many_(xs, q, block, rule, eps, scale, amax, [])
        for tensors, wanted in zip(got, want, strict=True):
            all_same(tensors, wanted)
            assert all(map(is_untouched_around, tensors))


def check_cast_many() -> None:
    shapes = [(70, 144), (3, 5), (0, 7), (130, 260), (9, 1), (66, 272)]
    for block, dtype in (((-1, -1), BF16), ((128, 128), FP32), ((4, 128), FP32), ((1, -1), BF16)):
        xs = [matrix(*shape, dtype) * 1e-2 for shape in shapes]
        factors = [torch.rand(scale_shape(tuple(x.shape), block)) / 3 for x in xs]
        want = [
            forms.encode(ops.cast_op, x, one, None, E4M3, block, 1)
            for x, one in zip(xs, factors, strict=True)
        ]
        got = [surrounded(q) for q in want]
        cast_many.cast_many_(xs, got, block, "encode", 0.0, [], [], factors)
        all_same(got, want)
        assert all(map(is_untouched_around, got))


def surrounded(like: Tensor) -> Tensor:
    """Room for a tensor, of the same strides, with 64 elements of 1 on both sides."""
    ones = torch.ones(like.numel() + 128, dtype=torch.float32).to(like.dtype)
    return ones.as_strided(like.shape, like.stride(), 64)


def is_untouched_around(x: Tensor) -> bool:
    whole = x.as_strided((x.numel() + 128,), (1,), 0).float()
    return bool((whole[:64] == 1).all() and (whole[-64:] == 1).all())


def check_special_values() -> None:
    rows = [
        [0.0] * 4, [torch.inf, 1.0, 0.0, -2.0], [torch.nan, 1.0, 0.0, -2.0],
        [2.0**-149, 0.0, 0.0, 0.0], [2.0**-120, 2.0**-127, 0.0, 0.0], [3e38, -1e38, 0.0, 1.0],
        [448.0, 1.0, 2.0, 3.0], [448.0 * 2**-130, 0.0, 0.0, 0.0], [1.0, -1.0, 0.5, 2.0**-20],
    ]  # fmt: skip
    x = torch.tensor(rows)
    for rule in ("fp32", "pow2", "e8m0"):
        for block in ((1, -1), (1, 4), (1, 1)):
            _, scale, amax = forms.quantize(cast, x, E4M3, block, rule, 0.0, 1)
            _, scale_wanted, amax_wanted = reference.quantize(x, E4M3, block, rule, 0.0, 1)
            same(scale, scale_wanted)
            same(amax, amax_wanted)
        for row in x:
            one = row[None]
            _, scale, amax = forms.quantize(cast, one, E5M2, (-1, -1), rule, 0.0, 1)
            _, scale_wanted, amax_wanted = reference.quantize(one, E5M2, (-1, -1), rule, 0.0, 1)
            same(scale, scale_wanted)
            same(amax, amax_wanted)


def check_amax() -> None:
    for x in (matrix(70, 135), matrix(9, 30).t(), matrix(66, 260)[:, ::2], torch.zeros(0, 3)):
        same(forms.amax(amax_of, x), reference.amax(x, (-1, -1)))
    x = matrix(9, 9)
    same(forms.amax(amax_of, x, (1, -1)).sign(), reference.amax(x, (1, -1)).sign())


def check_cast() -> None:
    x = matrix(70, 135)
    scales = [
        (torch.tensor(3.0), (-1, -1)), (torch.full((1,), 0.37), (1, -1)),
        (torch.rand(80, 1) * 4 + 3, (1, -1)), (torch.rand(80, 2) * 4 + 3, (1, 128)),
        (torch.rand(2, 80).t() * 4 + 3, (1, 128)), (torch.rand(1, 2) * 4 + 3, (128, 128)),
        (torch.rand(80, 2) * 4 + 3, (1, 96)), (torch.rand(16, 1) * 4 + 3, (5, -1)),
    ]  # fmt: skip
    for index, (scale, block) in enumerate(scales):
        for turn, start in enumerate((None, -1.0, 2.0, 1e9), index):
            ways = ((False, 1 / scale), (True, scale))
            for divide, factor in ways if ALL else ways[turn % 2 :][:1]:
                got, want = (None if start is None else torch.full((1,), start) for _ in range(2))
                same(
                    forms.encode(cast, x * 1e-2, factor, got, E4M3, block, 16, divide),
                    forms.encode(ops.cast_op, x * 1e-2, factor, want, E4M3, block, 16, divide),
                )
                same(got, want)
    for y, align in ((x, 16), (x.t(), 1), (torch.zeros(0, 4), 16)):
        got, want = torch.full((1,), -1.0), torch.full((1,), -1.0)
        *data, sums = forms.encode_pair(cast, y, torch.tensor(0.05), got, E5M2, align, True)
        *wanted, sums_wanted = forms.encode_pair(
            ops.cast_op, y, torch.tensor(0.05), want, E5M2, align, True
        )
        all_same(data, wanted)
        same(got, want)
        sums_close(sums, sums_wanted)


ORDER = torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
"""Of every 16 keys, or queries, that FP8 attention has transposed."""


def check_turned_values() -> None:
    """Keys in their order, then zeros."""
    for B, G, SK, DV in ((2, 3, 128, 64), (1, 2, 77, 20), (1, 1, 300, 1)):
        by_token = torch.randint(0, 120, (B, SK, G, DV), dtype=torch.uint8).view(E4M3)
        v = by_token.transpose(1, 2)
        padded = reference.round_up(SK, 128)
        want = torch.zeros(B, G, DV, padded, dtype=torch.uint8)
        want[..., :SK] = v.view(torch.uint8).mT
        want = want.unflatten(3, (-1, 16))[..., ORDER].flatten(3)
        counter = torch.tensor([7], dtype=torch.int32)
        got = attention._transpose_values(v, counter, None)
        assert torch.equal(got.view(torch.uint8), want)
        assert counter.item() == 0


def check_prepared_gradients() -> None:
    """A scale a query, the FP8 data twice, and numbers that are of these data; then padding."""
    v_scale = torch.tensor([0.25])
    for B, H, S, D, ends in (
        (1, 4, 130, 128, None), (2, 1, 64, 40, None), (1, 2, 210, 9, [0, 70, 70, 200]),
    ):  # fmt: skip
        dout, out = (torch.randn(B, S, H, D).transpose(1, 2) for _ in range(2))
        dout[0, 0, 3] = 0.0
        lse, max_scores = torch.randn(2, B, H, S)
        lse[0, 0, 4] = max_scores[0, 0, 4] = -torch.inf  # it sees no key
        cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32)
        token, tokens = None, (dout, out)
        if ends is not None:  # the tokens of packed sequences lay elsewhere
            token = torch.randperm(S, dtype=torch.int32)
            token[ends[-1] :] = ~token[ends[-1] :]
            tokens = [attention.reference.unpack_tokens(x, token) for x in tokens]
        d, transposed, rows, weights, counters = attention_backward._prepare(
            *tokens, token, lse, max_scores, v_scale, cu_seqlens
        )
        assert counters.tolist() == [0, 0]
        turned = d.view(torch.uint8).mT.unflatten(3, (-1, 16))[..., ORDER].flatten(3)
        assert torch.equal(transposed.view(torch.uint8), turned)
        # Each sequence begins at a multiple of 128 behind the one before it.
        of_token = torch.arange(S) if ends is None else torch.full((S,), -1)
        for number, (start, stop) in enumerate(itertools.pairwise(ends or [])):
            of_token[start:stop] = start // 128 * 128 + number * 128 + torch.arange(stop - start)
        inside, at = of_token >= 0, of_token[of_token >= 0]
        dout, out, lse, max_scores = (x[:, :, inside] for x in (dout, out, lse, max_scores))
        padding = torch.ones(d.shape[2], dtype=torch.bool).index_fill(0, at, False)
        assert not d[:, :, padding].float().any()
        logarithm, delta, scale = rows.view(3, B, H, -1)
        logarithm[..., at][lse == -torch.inf] = -torch.inf
        assert (logarithm[..., padding] > 1e30).all()
        logarithm, delta, scale = (x[..., at] for x in (logarithm, delta, scale))
        blind = lse == -torch.inf
        assert (logarithm[blind] > 1e30).all()
        amax = dout.abs().amax(-1)
        want = (amax / 448).clamp(min=2.0**-100)
        assert torch.allclose(scale, want, rtol=1e-6)
        of_blocks = torch.full((B, H, d.shape[2]), -torch.inf)
        of_blocks[..., at] = (
            ((max_scores - lse).exp() * scale).log2().masked_fill(blind, -torch.inf)
        )
        most = of_blocks.unflatten(2, (-1, 64)).amax(-1).flatten(0, 1)
        assert torch.equal(weights.isinf(), most.isinf())
        assert torch.allclose(weights, most, atol=1e-4)
        assert not d[..., D:].float().any()
        d = d[:, :, at, :D].float()
        assert torch.allclose(delta * 2**18, (d * out).sum(-1) / v_scale, rtol=1e-4, atol=1e-2)
        exact = lse * 1.4426950408889634 - want.log2()
        assert torch.allclose(logarithm[~blind], exact[~blind], atol=1e-5)
        values_close(d, dout / want.unsqueeze(-1))


def check_largest_weights() -> None:
    """Of the blocks of queries that see a tile's keys, in all heads that share the keys."""
    lengths = ([300, 0, 90, 0], [130, 7, 400, 163])  # the last: tokens of no sequence
    ends = [torch.tensor([0, *side[:3]], dtype=torch.int32).cumsum(0).int() for side in lengths]
    sequences = list(zip(*lengths, ends[0].tolist(), strict=False))
    for G, heads, is_packed in ((2, 3, False), (1, 1, True), (3, 2, True)):
        SQ, SK, key_tiles, plan = 500, 700, 6, None
        if is_packed:
            key_tiles += 3
            plan = attention._plan(*ends[::-1], SK, key_tiles, last_first=False)
        _, padded = attention._padded_size(SQ, ends[0] if is_packed else None)
        weights = torch.randn(G * heads, padded // 64) * 9
        for left, right in ((-1, -1), (-1, 0), (70, 30), (64, -1)):
            largest = torch.full((G * key_tiles,), torch.nan)
            diagonal = 0 if is_packed else SK - SQ
            attention_backward._largest_kernel[(G * key_tiles,)](
                weights, largest, plan, 1, G, heads, SK, SQ, -diagonal - right, left - diagonal,
                weights.shape[1], LEFT=right >= 0, RIGHT=left >= 0, WIDTH=16, num_warps=4,
            )  # fmt: skip
            want = []
            for number, (queries, keys, start) in enumerate(
                sequences if is_packed else [(SQ, SK, 0)]
            ):
                base = (start // 128 + number) * 2 if is_packed else 0
                i = torch.arange(queries).view(-1, 1) + keys - queries
                j = torch.arange(keys)
                seen = ((j - i <= right) | (right < 0)) & ((i - j <= left) | (left < 0))
                for tile in seen.split(128, 1):
                    blocks = [base + n for n, x in enumerate(tile.split(64)) if x.any()]
                    want.append(weights[:, blocks].view(G, heads * len(blocks)))
            if left >= 0 and not is_packed:
                want.reverse()  # the last tile comes first
            tiles = len(want)
            got = largest[: G * tiles].view(G, tiles)
            for tile, of_tile in enumerate(want):
                if of_tile.numel():  # else nothing is multiplied by it
                    assert torch.equal(got[:, tile], of_tile.amax(1).ceil())
            assert largest[G * tiles :].isnan().all()


def values_close(data: Tensor, exact: Tensor) -> None:
    """Within a step of e4m3, powers of two within their half."""
    assert ((data - exact).abs() <= exact.abs() * 0.53 + 2.0**-9).all()
    assert (data - exact).norm() <= 0.1 * exact.norm()


def check_rotary() -> None:
    for A, B, H, D, R in ((2, 3, 5, 16, 16), (1, 4, 1, 20, 6), (3, 1, 40, 128, 2)):
        t = torch.randn(A, B, D, H).transpose(2, 3)
        for shape in ((A, B, 1, R), (1, B, 1, R), (A, 1, 1, R)):
            cos, sin = torch.randn(shape), torch.randn(shape)
            for flags in ((True, True), (True, False), (False, True), (False, False)):
                same(*(of.rotate(t, cos, sin, *flags) for of in (rotary, rotary.reference)))


def check_gemm_of_few_rows() -> None:
    for M, N, K, has_bias in ((1, 64, 256, True), (17, 8224, 512, False)):
        a, b = torch.randn(M, K).to(E4M3), torch.randn(N, K).to(E4M3)
        scales, bias = (torch.rand(M, 1), torch.rand(N, 1)), torch.randn(N) if has_bias else None
        out = few_rows_gemm.multiply_few_rows(a, b, *scales, bias, BF16, None)
        want = (a.double() * scales[0]) @ (b.double() * scales[1]).t()
        want = want if bias is None else want + bias
        assert out is not None
        assert out.dtype == BF16
        assert (out - want).norm() <= 2.0**-8 * want.norm()
    assert few_rows_gemm.multiply_few_rows(b[:33], b, *scales, None, BF16, None) is None


def check_paged_attention() -> None:
    """Queries in float32, whose dot the interpreter computes as it is; pages, parts, windows."""
    for B, H, G, S, D, DV, P in ((2, 4, 2, 3, 20, 8, 5), (1, 2, 2, 1, 16, 34, 64)):
        q = torch.randn(B, H, S, D)
        k, v = torch.randn(40, G, P, D), torch.randn(40, G, P, DV)
        table = torch.randperm(40)[: B * 16].view(B, 16).int()
        before = torch.tensor([16 * P - S, 7][:B])
        sequences = torch.stack((torch.arange(B).flip(0), before, torch.tensor([S, 1][:B]))).int()
        scales = (torch.rand(2, 40, G, P, 1) + 0.1) * torch.logspace(-3, 3, P)[:, None]
        for window, cache in (((-1, 0), FP32), ((9, 0), FP32), ((4, 2), E4M3), ((-1, 0), E5M2)):
            of_cache = (None, None) if cache == FP32 else scales
            arguments = (q, k.to(cache), v.to(cache), *of_cache, table, sequences, *window, 0.2)
            common = paged_attention._common
            with unittest.mock.patch.object(common, "multiprocessors", return_value=4):
                got = paged_attention.paged_attention(*arguments)
            want = ops.paged_attention(*arguments)
            # Of an FP8 cache, queries and probabilities are rounded to float16.
            limit = 1e-5 if cache == FP32 else 2 * torch.finfo(torch.float16).eps
            assert (got - want).norm() <= limit * want.norm()


def check_writes_to_pages() -> None:
    """Of some of a call's tokens, in another order."""
    for B, G, S, D, P in ((2, 3, 4, 20, 5), (3, 8, 1, 128, 16), (1, 1, 3, 2, 2)):
        x = torch.randn(B, S, G, D).transpose(1, 2) * torch.logspace(-8, 8, G)[:, None, None]
        x[-1, -1, -1] = 0.0
        row, token = torch.arange(B * S).flip(0).unsqueeze(1).expand(-1, 2).T
        tokens = torch.stack((row // S, token % S, torch.randperm(B * S), row % P))[:, : B * S - 1]
        for dtype, cache in ((FP32, FP32), (BF16, BF16), (FP32, E4M3), (BF16, E5M2)):
            runs = []
            for of in (paged_attention, paged_attention.reference):
                data, scale = torch.zeros(B * S, G, P, D).to(cache), torch.zeros(B * S, G, P, 1)
                of.write_pages_(
                    x.to(dtype), data, scale if cache.itemsize == 1 else None, tokens.contiguous()
                )
                runs.append((data, scale))
            all_same(*runs)


def check_merge_attention() -> None:
    """Of ranges of queries, in several layouts, and with queries that have seen no key."""
    for B, H, S, D in ((2, 3, 21, 20), (1, 1, 64, 128), (2, 5, 1, 8)):
        out, seen = torch.randn(B, S + 2, H, D).transpose(1, 2), torch.randn(B, H, S, D)
        lse, seen_lse = torch.randn(B, H, S + 2), torch.randn(B, H, S) * 20
        lse[0, 0, 2], seen_lse[-1, -1, -1] = -torch.inf, -torch.inf
        runs = []
        for of in (attention, attention.reference):
            total, logarithm = out.clone(), lse.clone()
            of.merge_attention_(total[:, :, 2:], logarithm[:, :, 2:], seen, seen_lse)
            runs.append((total, logarithm))
        torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-5)


def one_for_all(rows: int) -> Tensor:
    """A scale for each row, of which there is one in memory."""
    return torch.rand(1, 1).expand(rows, 1)


def row_map(tokens: int, places: int, rows: int, filled: int) -> Tensor:
    """Rows below ``filled`` at random places; among the numbers for nowhere, some out of range."""
    nowhere = torch.tensor([-1, -7, rows, 2**31 - 1], dtype=torch.int32)
    to = nowhere[torch.randint(0, 4, (tokens * places,))]
    to[torch.randperm(tokens * places)[:filled]] = torch.randperm(filled).int()
    return torch.cat([to.view(tokens, places), to.new_full((tokens, 1), filled)], 1)


def check_permute() -> None:
    """Tokens, places, rows, filled rows, features, blocks of a row."""
    for T, S, R, F, H, B in (
        (9, 4, 20, 13, 70, 3), (5, 1, 5, 5, 2100, 1), (1, 130, 8, 8, 5, 40), (3, 2, 0, 0, 8, 1),
        (0, 3, 4, 0, 8, 2), (4, 3, 40, 0, 8, 2), (6, 8, 4, 4, 0, 1),
    ):  # fmt: skip
        places, probs = row_map(T, S, R, F), torch.rand(T, S)
        x, merged = torch.randn(T, H), torch.randn(R, H)
        scale, amax = torch.rand(B, T).t(), torch.rand(T, B)
        codes = torch.randint(0, 256, (H, T), dtype=torch.uint8).t()
        for arguments in (
            (x, places, R), (x.bfloat16(), places, R, probs), (x.double(), places, R, probs),
            (codes, places, R, probs.bfloat16(), None, scale, amax),
        ):  # fmt: skip
            got, want = permute.scatter_rows(*arguments), permute.reference.scatter_rows(*arguments)
            all_same_or_none(got, want)
        arguments = (x, places, R, probs, merged)
        y, dots, *_ = permute.scatter_rows(*arguments)
        y_wanted, dots_wanted, *_ = permute.reference.scatter_rows(*arguments)
        same(y, y_wanted)
        torch.testing.assert_close(dots, dots_wanted)
        fp8, kind = merged.to(E5M2), (FP32, probs, None)
        for arguments in (
            (merged, places, FP32), (merged, places, FP32, probs), (merged.double(), places, FP32),
            (torch.randn(H, R).t(), places, FP32, probs, torch.rand(R).half()),
            (fp8, places, *kind, torch.rand(B, R).t(), max(-(-H // B), 1)),
            (fp8, places, *kind, one_for_all(R), H),
        ):  # fmt: skip
            got, want = permute.gather_rows(*arguments), permute.reference.gather_rows(*arguments)
            all_same_or_none(got, want)

    for T, S in ((0, 3), (5, 0), (300, 130), (70, 3), (1, 1)):
        for mask in (torch.rand(T, S) < 0.4, (torch.rand(S, T) < 0.1).int().t() * 7):
            all_same(permute.row_map_of(mask), permute.reference.row_map_of(mask))
    for T, K, E in ((0, 3, 4), (5, 0, 2), (300, 4, 130), (70, 3, 5), (1, 1, 1)):
        index = torch.randint(-1, E + 2, (K, T)).t()
        for one in (index, index.short()):
            all_same(permute.row_map_of(one, E), permute.reference.row_map_of(one, E))


def all_same_or_none(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> None:
    for one, other in zip(got, want, strict=True):
        same(one, other)


def check_router() -> None:
    """Tokens, experts, topk, groups and how many of them; infinities, NaN, equal logits."""
    for T, E, topk, parts, best in (
        (7, 12, 3, 4, 2), (1, 1, 1, 1, 0), (5, 130, 8, 1, 0), (6, 36, 6, 9, 2), (0, 4, 2, 1, 0),
    ):  # fmt: skip
        logits = torch.randn(T, E) * 4
        logits[:1, :1], logits[-1:, -1:], logits[1:2, E // 2 :] = torch.nan, -40, -torch.inf
        equal = logits.round().div(4)
        for name, pre, z in (
            ("softmax", False, equal), ("softmax", True, logits), ("sigmoid", False, logits),
            ("sqrtsoftplus", False, logits),
        ):  # fmt: skip
            bias = None if name == "softmax" else torch.randn(E)
            for how in (
                (topk, name, pre, parts, best, 2.5, False), (topk, name, pre, 1, 0, 1.0, True),
            ):  # fmt: skip
                z = logits if how[-1] else z
                (got, chosen), (want, wanted) = (
                    of.route(z, bias, *how) for of in (router, router.reference)
                )
                torch.testing.assert_close(got, want, equal_nan=True)
                assert torch.equal(chosen, wanted)
                gradient = (
                    torch.randn(T, E), z.nan_to_num(neginf=-9.0), wanted, *how[:3], *how[5:],
                )  # fmt: skip
                got, want = (of.route_backward(*gradient) for of in (router, router.reference))
                torch.testing.assert_close(got, want)


def check_cross_entropy() -> None:
    """Rows of one block, of several and of a part of one; shards of nothing but -inf; strides."""
    cross_entropy.BLOCK = 64
    for M, V, dtype in ((5, 300, FP32), (3, 64, BF16), (1, 1, FP32), (4, 7, BF16), (0, 9, FP32)):
        logits = (torch.randn(M, 2 * V) * 4).to(dtype)[:, :V]
        logits[1:2], logits[2:3, V // 2 :] = -torch.inf, -torch.inf
        target = torch.randint(-2, V + 2, (M,))
        arguments = logits, target
        both = cross_entropy, cross_entropy.reference
        got, want = (of.cross_entropy_statistics(*arguments) for of in both)
        torch.testing.assert_close(got, want)
        factors = torch.stack([want[0] + want[1].log(), *torch.randn(3, M)])
        factors[1, 1:2] = 0.0
        got, want = (of.cross_entropy_backward(*arguments, factors) for of in both)
        torch.testing.assert_close(got, want)


def check_moments() -> None:
    for M, K, is_square in ((70, 300, False), (9, 128, True), (9, 40, True), (0, 7, False)):
        x = matrix(K, M).float().t()
        x = x.abs() if is_square else x
        specials = [0.0, -0.0, 2.0**-98, 1e-38, 2.0**-140, 3e38, -3e38, torch.inf, torch.nan]
        for row, value in zip(x[:9], specials, strict=False):
            row[: len(row) // 2] = value
        results = []
        for of in (moments.moments, moments):
            data, scale = torch.zeros(M, K).byte(), torch.zeros(M, -(-K // 128)).byte()
            of.quantize_moment_(x, data, scale, 5, is_square)
            results.append((data, scale, of.dequantize_moment(data, scale, is_square)))
        want, got = ([a * ~c.isnan(), b, c.nan_to_num(9)] for a, b, c in results)
        all_same(got, want)


def check_measure() -> None:
    cases = [
        ((-1, -1), E4M3, matrix(33, 135, torch.float16)),
        ((1, -1), E5M2, matrix(9, 17, FP32).t()),
        ((1, 128), E4M3, matrix(5, 300)[:, ::2]),
        ((20, 128), E4M3, matrix(33, 9, torch.float64)),
        ((3, 32), E5M2, matrix(1, 1)),
    ]
    for block, fp8_dtype, x in cases:
        x[0, :3] = torch.tensor([torch.inf, torch.nan, -torch.inf])[: x.shape[1]].to(x.dtype)
        # The interpreter takes NaN for a number.
        q = (torch.randint(256, x.shape) & ~4).to(torch.uint8).view(fp8_dtype)
        scale = torch.rand(scale_shape(tuple(x.shape), block))
        for last in (scale[-1, -1].clone(), torch.nan):
            scale[-1, -1] = last
            got = measure.measure_cast(x, q, scale, block)
            want = _numbers_by_torch(x, q, scale, block)
            # Squares are summed in another order.
            torch.testing.assert_close(got[0][259:], want[0][259:], rtol=1e-14, atol=0)
            all_same([got[0][:259], got[1]], [want[0][:259], want[1]])


def check_transpose_and_dequantize() -> None:
    q = torch.randint(0, 127, (70, 135), dtype=torch.uint8).clamp(max=120).view(E4M3)
    for one in (q, q.t(), q[:, ::2], q[:0]):
        for align in (1, 16):
            got, want = transpose(one, align), reference.transpose(one, align)
            same(got.view(torch.uint8), want.view(torch.uint8))
    scales = [
        (torch.tensor(0.3), (-1, -1)), (torch.rand(70, 1), (1, -1)),
        (torch.rand(2, 70).t(), (1, 128)), (torch.rand(1, 2), (128, 128)),
        (torch.rand(70, 5), (1, 32)), (torch.rand(14, 1), (5, -1)), (torch.rand(70, 2), (1, 96)),
    ]  # fmt: skip
    for scale, block in scales:
        for dtype in (FP32, torch.float16):
            arguments = (scale, block, dtype)
            same(dequantize(q, *arguments), reference.dequantize(q, *arguments))
    arguments = (torch.rand(1, 70), (-1, 1), FP32)
    same(dequantize(q.t(), *arguments), reference.dequantize(q.t(), *arguments))
    # The interpreter truncates to bfloat16, so only values that need no rounding can be compared.
    arguments = (torch.rand(70, 1).log2().round().exp2(), (1, -1), BF16)
    same(dequantize(q, *arguments), reference.dequantize(q, *arguments))


def check_update_scales() -> None:
    amax = torch.tensor([-1.0, 0.0, 3.0, torch.inf, torch.nan, 1e-40, 700.0])
    slots = amax.numel()
    for length in (1, 3, 40):
        for margin, interval, most_recent, power_of_2 in (
            (0, 1, False, True), (1, 2, True, False), (-2, 3, False, False),
        ):  # fmt: skip
            history = torch.rand(length, slots) * 5
            history[:, 1] = 0
            state = (
                history, amax.clone(), torch.rand(2, slots), torch.arange(slots, dtype=torch.int32),
                torch.tensor([448.0, 57344.0] * 4)[:slots],
            )  # fmt: skip
            other = tuple(tensor.clone() for tensor in state)
            arguments = (margin, interval, most_recent, power_of_2)
            for _ in range(2):
                got = scaling.update_scales_(*state, *arguments)
                want = reference.update_scales_(*other, *arguments)
                all_same((*state, got), (*other, want))
                state[1].copy_(torch.rand(slots))
                other[1].copy_(state[1])


def check_groups() -> None:
    """Casts of groups and of batches; rows that belong to nobody hold NaN."""
    sizes = [0, 1, 130, 0, 15]
    for index, (block, w_block, rule) in enumerate(groups.CASTS.values()):
        fp8_dtype = (E4M3, E5M2)[index % 2]
        offs = groups.ends(sizes, dtype=(torch.int32, torch.int64)[index % 2])
        columns = 70 if ALL or index < 2 else 50  # two tiles of columns, or one
        x = groups.rows(sizes, columns, dtype=BF16)
        batch = (torch.randn(2, 40, 140), torch.randn(2, 140, 40, dtype=BF16).mT)
        # One orientation alone is another way for rows, and the same in all other blocks.
        alone = ((True, False, False), (False, True, False))
        for wanted in ((True, True, True), *(alone if ALL or block == (1, -1) else ())):
            # Of values that the interpreter rounds to bfloat16 nothing could be told.
            token = torch.randint(-1, sum(sizes), (len(x),), dtype=torch.int32)
            for kind, *inputs in (
                ("", x), ("reglu", x.float()), ("relu_backward", x.float(), x.float()),
                ("permute", x, token), ("multiply", x.float(), x.float()[:, :1].expand_as(x)),
            ):  # fmt: skip
                if kind and not (all(wanted) and rule == "pow2"):
                    continue
                one = inputs[0]
                arguments = (kind, inputs, one.dtype, offs, fp8_dtype, block, rule, 0.0, *wanted)
                same_casts(
                    groups.cast_groups(cast, *arguments),
                    groups.cast_groups(ops.cast_op, *arguments),
                    groups.used_columns(sizes),
                )
            for w in batch if ALL and all(wanted) else batch[index % 2 :][:1]:
                arguments = ("", [w], w.dtype, None, fp8_dtype, w_block, rule, 0.0, *wanted[:2])
                same_casts(
                    groups.cast_groups(cast, *arguments),
                    groups.cast_groups(ops.cast_op, *arguments),
                )
    same(grouped_cast.plan_groups(offs, len(x)), reference.plan_groups(offs, len(x)))
    how = (E4M3, (-1, -1))
    factors = torch.rand(5, 8)[:, 0]
    every = [
        (700 + torch.rand(5, 1, 1) * 700, "fp32"), (torch.full((1,), 0.3), "encode"),
        (torch.full((1, 1), 700.0), "fp32"), (factors, "encode"),
    ]  # fmt: skip
    for given, rule in every if ALL else every[:2]:  # a factor of each group a batch has below
        slots = [torch.full((5,), -1.0) if rule == "encode" else None for _ in range(2)]
        rest = (offs, *how, rule, 0.0, True, True, False, given)
        same_casts(
            groups.cast_groups(cast, "", [x], BF16, *rest, slots[0]),
            groups.cast_groups(ops.cast_op, "", [x], BF16, *rest, slots[1]),
            groups.used_columns(sizes),
        )
        same(*slots)
    # More tiles than programs, whose groups a program skips, begins in and ends in.
    sizes, many = [0, 300, 0, 0, 70, 200, 1, 0, 129, 0], 3
    x, offs = groups.rows(sizes, 150, dtype=BF16), groups.ends(sizes)
    plan = grouped_cast.plan_groups(offs, len(x))
    with unittest.mock.patch.object(prologue, "AMAX_PROGRAMS", many):
        for known in (None, plan):
            arguments = ("", [x], BF16, offs, *how, "fp32", 0.0, False, False, False, None, None)
            got = groups.cast_groups(cast, *arguments, known)
            same(got[2], groups.cast_groups(ops.cast_op, *arguments)[2])
            assert got.count(None) == 5
    factors = torch.rand(2, 8)[:, 0]
    slots = [torch.full((2,), -1.0) for _ in range(2)]
    rest = (None, *how, "encode", 0.0, True, True, False, factors)
    same_casts(
        groups.cast_groups(cast, "", batch[:1], FP32, *rest, slots[0]),
        groups.cast_groups(ops.cast_op, "", batch[:1], FP32, *rest, slots[1]),
    )
    same(*slots)


def same_casts(got: Sequence[Any], want: Sequence[Any], used: int | None = None) -> None:
    """``used``: so many columns of a transpose mean something."""
    *got, sums = got
    *want, sums_wanted = want
    q_t = want[3]
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        width = None
        if used is not None and index >= 3 and other is not None and other.ndim == 2:
            width = used if index == 3 else -(-used * other.shape[1] // q_t.shape[1])
            width = max(width, 1) if other.shape[1] == 1 else width
        same(
            one if one is None else one[..., :width], other if other is None else other[..., :width]
        )
        assert one is None or one.stride() == other.stride() or 1 in one.shape
    if sums_wanted is not None:
        sums_close(sums, sums_wanted)


def check_norm() -> None:
    for rows, columns, dtype in ((5, 33, BF16), (3, 8200, FP32), (66, 1, FP32), (0, 4, FP32)):
        x, weight = matrix(rows, columns, dtype), torch.randn(columns)
        dy = matrix(columns, rows, FP32).t()
        for bias in (torch.randn(columns), None):
            center = bias is not None
            *got, _ = norm.norm(x, weight, bias, 1e-5, center, FP32)
            *wanted, _ = reference.norm(x, weight, bias, 1e-5, center, FP32)
            for one, want in zip(got, wanted, strict=True):
                torch.testing.assert_close(one, want, rtol=1e-5, atol=1e-5)
            arguments = (x, weight, bias, 1e-5, center, FP32, None, (), False, True)
            none, *stats, amax = norm.norm(*arguments)
            assert none is None
            for one, other in zip(stats, got[1:], strict=True):
                same(one, other)
            same(amax, reference.amax(got[0], (-1, -1)))
            arguments = (dy, x, weight, *stats, center, x.dtype)
            both = zip(
                norm.norm_backward(*arguments), reference.norm_backward(*arguments), strict=True
            )
            for one, want in both:
                if one is None or want is None:
                    assert one is want
                    continue
                # The interpreter truncates to bfloat16; sums may cancel.
                rtol = 2.0**-7 if want.dtype == BF16 else 1e-5
                atol = 1e-5 * want.abs().max().item() if want.numel() else 0.0
                torch.testing.assert_close(one, want, rtol=rtol, atol=atol)


def check_fp8_norm() -> None:
    blocks = ((-1, -1), (1, -1), (1, 128), (128, 128), (1, 32), (-1, 1), (3, 5))
    for rows, columns in ((5, 140), (67, 33), (3, 8200), (0, 4)):
        weight, dy = torch.randn(columns), matrix(rows, columns, FP32)
        some = {5: blocks, 67: blocks[1::2], 3: blocks[::3], 0: blocks[::2]}[rows]
        for index, block in enumerate(blocks if ALL else some):
            q = matrix(columns, rows, FP32).t().clamp(-400, 400).to(E5M2)
            scale = torch.rand(scale_shape((rows, columns), block)) + 0.5
            values = reference.dequantize(q, scale, block, FP32)
            size = values.abs().mean(1).max() if rows else torch.zeros(())
            biases = (torch.randn(columns), None)
            for bias in biases if ALL else biases[index % 2 :][:1]:
                center = bias is not None
                arguments = (q, weight, bias, 1e-5, center, FP32, scale, block)
                got, want = norm.norm(*arguments), reference.norm(*arguments)
                _, mean, rstd, _ = want
                arguments = (dy, q, weight, mean, rstd, center, FP32, scale, block)
                got += norm.norm_backward(*arguments)
                want += reference.norm_backward(*arguments)
                for index, (one, other) in enumerate(zip(got, want, strict=True)):
                    if one is None or other is None:
                        assert one is other
                        continue
                    atol = 1e-5 * other.abs().max().item() if other.numel() else 0.0
                    if index == 1 and center and rows:  # the means, whose terms may cancel
                        atol = 2.0**-19 * size.item()
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=atol)
    q, scale = torch.full((2, 8), 3.0).to(E4M3), torch.full((1, 1), 0.25)
    for dtype in (BF16, torch.float16):  # 0.75, which needs no rounding
        quantized = (scale, (-1, -1))
        y, mean, rstd, _ = norm.norm(q, torch.ones(8), torch.ones(8), 0.5, True, dtype, *quantized)
        assert y.dtype == dtype
        assert bool((y == 1).all())
        assert bool((mean == 0.75).all())
        dx, *_ = norm.norm_backward(y, q, torch.ones(8), mean, rstd, True, dtype, *quantized)
        assert dx.dtype == dtype
        assert not dx.any()


def sources() -> list[tuple[str, list[Tensor]]]:
    """Kinds whose values the interpreter computes exactly: no exponential."""
    x, wide, half = matrix(37, 140, FP32), matrix(37, 280, FP32), matrix(37, 70, FP32)
    vectors = [torch.rand(37) + 0.5, torch.randn(140), torch.randn(37), torch.randn(140)]
    return [
        ("layer_norm", [x, *vectors]),
        ("rms_norm", [x.t().contiguous().t(), *vectors[:2]]),
        ("srelu", [x]),
        ("reglu", [wide]),
        ("relu_backward", [x, matrix(37, 140, FP32)]),
        ("sreglu_backward", [x, half]),
        ("reglu_backward", [matrix(130, 256), matrix(130, 128)]),
        ("reglu_backward", [matrix(3, 512, FP32)[:, ::2], matrix(3, 128, FP32)]),
        ("srelu", [torch.zeros(0, 8)]),
        ("reglu", [torch.randn(5, 2)]),
    ]


def check_sources() -> None:
    for number, (kind, inputs) in enumerate(sources()):
        computed = Prologue(kind, inputs, FP32)
        known = forms.amax(reference.amax_of, computed)
        same(prologue.value_of(kind, inputs, FP32), reference.value_of(kind, inputs, FP32))
        same(forms.amax(amax_of, computed), known)
        # The interpreter does not saturate.
        encode = (400 / known).clamp(max=1e3).view(1)
        for transposed in (False, True):
            got, want = torch.full((1,), -1.0), torch.full((1,), -1.0)
            how = (E4M3, (-1, -1), 16)
            same(
                forms.encode(cast, computed, encode, got, *how, transposed=transposed),
                forms.encode(ops.cast_op, computed, encode, want, *how, transposed=transposed),
            )
            same(got, want)
        arguments = (computed, encode, None, E5M2, 16, True)
        *got, sums = forms.encode_pair(cast, *arguments)
        *want, sums_wanted = forms.encode_pair(ops.cast_op, *arguments)
        all_same(got, want)
        sums_close(sums, sums_wanted)
        blocks = [((-1, -1), "pow2"), ((1, -1), "fp32"), ((1, 128), "fp32")]
        if kind == "layer_norm":
            blocks += [((1, 32), "e8m0"), ((1, 96), "fp32")]
        # How a tile is scaled does not depend on the kind: in turn, each with some blocks.
        turn = number % 3
        for index, (block, rule) in enumerate(blocks):
            if not ALL and kind != "layer_norm" and index != turn:
                continue
            how = (computed, E4M3, block, rule, 0.0, 16)
            alternate = (index + len(kind)) % 2 == 1
            for transposed in (False, True) if ALL else (alternate,):
                got = forms.quantize(cast, *how, transposed=transposed)
                want = forms.quantize(reference.cast, *how, transposed=transposed)
                all_same(got[:2], want[:2])
                same(got[2], want[2])
            arguments = (computed, E4M3, block, rule, 1e-3, 1, True)
            *got, sums = forms.quantize_pair(cast, *arguments)
            *want, sums_wanted = forms.quantize_pair(reference.cast, *arguments)
            all_same(got, want)
            sums_close(sums, sums_wanted)
        how = (computed, E4M3, (-1, -1), "fp32", 0.0, 16, known * 1.5)
        got = forms.quantize(cast, *how, transposed=True)
        all_same(got[:2], forms.quantize(reference.cast, *how, transposed=True)[:2])


def check_activations() -> None:
    for name, (_, gated) in reference.ACTIVATIONS.items():
        h = torch.randn(9, 20) * 4
        dy = torch.randn(9, 10 if gated else 20)
        for kind, inputs in ((name, [h]), (f"{name}_backward", [h, dy])):
            got, want = (of.value_of(kind, inputs, FP32) for of in (prologue, reference))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)
    mend_interpreter()
    for name, check in [*globals().items()]:
        if name.startswith("check_"):
            torch.manual_seed(0)
            check()
