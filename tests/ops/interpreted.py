"""Compares every kernel with the reference; test_kernels_interpreter.py runs this script.

It runs under TRITON_INTERPRET=1. With the argument ``--all`` it tries all combinations, otherwise
each value of each axis.

The interpreter rounds FP8 casts wrongly: it loses the carry into the exponent, which halves values
that round up to a power of two. So FP8 data may differ by one step of the format, and powers of two
by half of their value; scales, amaxes and padding are compared exactly.
"""

import dataclasses
import functools
import itertools
import sys
import unittest.mock
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.language import core
from triton.runtime import interpreter

from float8lab import ops
from float8lab.formats import E4M3, E5M2, scale_shape
from float8lab.inspect.watch.measure import _numbers_by_torch
from float8lab.ops import Prologue, reference
from float8lab.ops.kernels import (
    attention,
    attention_backward,
    cast_many,
    cast_words,
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


def patch_interpreter() -> None:
    patch, patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor

    def patch_and_fix(tensor: Any, scope: Any) -> None:
        # Triton 3.6 calls int() on arrays of one element, which NumPy refuses since 2.4.
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def read_mask_as_bool(name: str, index: int) -> None:
        access = getattr(interpreter.InterpreterBuilder, name)

        def masked(*args: Any) -> Any:  # Triton 3.9 gives integers for a tensor and a bool
            args[index].data = args[index].data.astype(bool)
            return access(*args)

        setattr(interpreter.InterpreterBuilder, name, masked)

    read_mask_as_bool("create_masked_load", 2)
    read_mask_as_bool("create_masked_store", 3)
    interpreter._patch_lang_tensor = patch_and_fix
    # Without a cache, each call of a function in a kernel searches for functions to patch, which
    # takes two fifths of the time.
    interpreter._patch_lang = functools.cache(lambda function: type(patch(function))())
    # Triton computes whether a sum or product overflowed, but reports it only in debug mode.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def remember_types() -> None:
    """Make what Triton derives from a type once, which takes a third of the time otherwise.

    For each tensor, also inside of each operation, Triton makes a block type and tuples of its
    shape, and the interpreter a table of NumPy's types.
    """
    fill_type, fill_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[tuple[object, ...], dict[str, object]] = {}
    tensors: dict[str, dict[str, object]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(length, "value", length) for length in shape))
        if key not in types:
            fill_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            fill_tensor(self, handle, type)
            tensors[type.name] = {k: v for k, v in vars(self).items() if k != "handle"}
        vars(self).update(tensors[type.name], handle=handle, type=type)

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    numpy_types: dict[str, Any] = {}
    find = interpreter._get_np_dtype

    def numpy_type(type: Any) -> Any:
        if type.name not in numpy_types:
            numpy_types[type.name] = find(type)
        return numpy_types[type.name]

    interpreter._get_np_dtype = numpy_type


def matrix(rows: int, columns: int, dtype: torch.dtype = BF16) -> Tensor:
    """Values of many magnitudes; a matrix that is large enough has a row and a column of zeros."""
    x = torch.randn(rows, columns) * torch.logspace(-3, 3, columns)
    if rows > 4 and columns > 4:
        x[3], x[:, 2] = 0, 0
    return x.to(dtype)


def assert_same(got: Tensor | None, want: Tensor | None) -> None:
    if got is None or want is None:
        assert got is want
        return
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.dtype in (E4M3, E5M2):
        step, smallest = (2**-3, 2**-9) if got.dtype == E4M3 else (2**-2, 2**-16)
        expected = want.float().abs()
        power_of_2 = expected.frexp().mantissa == 0.5
        bound = torch.where(power_of_2, expected / 2, expected * step).clamp(min=smallest)
        assert bool(((got.float() - want.float()).abs() <= bound).all())
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def assert_all_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    assert len(got) == len(want)
    for actual, expected in zip(got, want, strict=True):
        assert_same(actual, expected)
        assert actual.stride() == expected.stride() or 1 in actual.shape


def assert_sums_close(got: Tensor, want: Tensor) -> None:
    largest = want.abs().max().item() if want.numel() else 0.0  # terms may cancel
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
        # Indices do not depend on the format, so formats alternate; other tests combine all.
        arguments = ((E4M3, E5M2)[index % 2], block, rule, eps, align)
        assert_all_same(forms.quantize(cast, x, *arguments), reference.quantize(x, *arguments))
        if x.shape[1] > 8192 and not ALL:  # it has many tiles, which are all alike
            continue
        *got, sums = forms.quantize_pair(cast, x, *arguments, True)
        *want, expected_sums = forms.quantize_pair(reference.cast, x, *arguments, True)
        assert_all_same(got, want)
        assert_sums_close(sums, expected_sums)
    known_amax = torch.full((1, 1), 7000.0)  # not the matrices' amax, to see which one is used
    for x in (matrix(70, 135), matrix(3, 5, FP32)):
        for align in (1, 16):
            arguments = (E4M3, (-1, -1), "fp32", 0.0, align)
            want = reference.quantize(x, *arguments, known_amax)
            assert_all_same(forms.quantize(cast, x, *arguments, known_amax)[:2], want[:2])
            *got, _ = forms.quantize_pair(cast, x, *arguments, False, known_amax)
            *want, _ = forms.quantize_pair(reference.cast, x, *arguments, False, known_amax)
            assert_all_same(got, want)
    for shape in ((0, 5), (5, 0), (0, 0)):
        for block in ((-1, -1), (1, -1), (1, 128)):
            arguments = (E4M3, block, "fp32", 0.0, 16)
            x = torch.zeros(shape)
            assert_all_same(forms.quantize(cast, x, *arguments), reference.quantize(x, *arguments))


def check_quantize_many() -> None:
    """Each matrix of a list equals its separate cast, and nothing around the outputs is written."""
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
        got = [tuple(buffer_with_border(tensor) for tensor in tensors) for tensors in want]
        q, scale, amax = map(list, zip(*got, strict=True))
        cast_many.cast_many_(xs, q, block, rule, eps, scale, amax, [])
        for tensors, expected in zip(got, want, strict=True):
            assert_all_same(tensors, expected)
            assert all(map(has_untouched_border, tensors))


def check_cast_many() -> None:
    shapes = [(70, 144), (3, 5), (0, 7), (130, 260), (9, 1), (66, 272)]
    for block, dtype in (((-1, -1), BF16), ((128, 128), FP32), ((4, 128), FP32), ((1, -1), BF16)):
        xs = [matrix(*shape, dtype) * 1e-2 for shape in shapes]
        factors = [torch.rand(scale_shape(tuple(x.shape), block)) / 3 for x in xs]
        want = [
            forms.encode(ops.cast_op, x, factor, None, E4M3, block, 1)
            for x, factor in zip(xs, factors, strict=True)
        ]
        got = [buffer_with_border(q) for q in want]
        cast_many.cast_many_(xs, got, block, "encode", 0.0, [], [], factors)
        assert_all_same(got, want)
        assert all(map(has_untouched_border, got))


def buffer_with_border(template: Tensor) -> Tensor:
    """A buffer of the same shape and strides, with 64 elements of 1 on both sides."""
    ones = torch.ones(template.numel() + 128, dtype=torch.float32).to(template.dtype)
    return ones.as_strided(template.shape, template.stride(), 64)


def has_untouched_border(x: Tensor) -> bool:
    buffer = x.as_strided((x.numel() + 128,), (1,), 0).float()
    return bool((buffer[:64] == 1).all() and (buffer[-64:] == 1).all())


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
            _, expected_scale, expected_amax = reference.quantize(x, E4M3, block, rule, 0.0, 1)
            assert_same(scale, expected_scale)
            assert_same(amax, expected_amax)
        for row in x:
            row_matrix = row[None]
            _, scale, amax = forms.quantize(cast, row_matrix, E5M2, (-1, -1), rule, 0.0, 1)
            _, expected_scale, expected_amax = reference.quantize(
                row_matrix, E5M2, (-1, -1), rule, 0.0, 1
            )
            assert_same(scale, expected_scale)
            assert_same(amax, expected_amax)


def check_amax() -> None:
    for x in (matrix(70, 135), matrix(9, 30).t(), matrix(66, 260)[:, ::2], torch.zeros(0, 3)):
        assert_same(forms.amax(amax_of, x), reference.block_amax(x, (-1, -1)))
    x = matrix(9, 9)
    assert_same(forms.amax(amax_of, x, (1, -1)).sign(), reference.block_amax(x, (1, -1)).sign())


def check_cast() -> None:
    x = matrix(70, 135)
    scales = [
        (torch.tensor(3.0), (-1, -1)), (torch.full((1,), 0.37), (1, -1)),
        (torch.rand(80, 1) * 4 + 3, (1, -1)), (torch.rand(80, 2) * 4 + 3, (1, 128)),
        (torch.rand(2, 80).t() * 4 + 3, (1, 128)), (torch.rand(1, 2) * 4 + 3, (128, 128)),
        (torch.rand(80, 2) * 4 + 3, (1, 96)), (torch.rand(16, 1) * 4 + 3, (5, -1)),
    ]  # fmt: skip
    for index, (scale, block) in enumerate(scales):
        for start_index, start in enumerate((None, -1.0, 2.0, 1e9), index):
            forms_of_factor = ((False, 1 / scale), (True, scale))
            for divide, factor in (
                forms_of_factor if ALL else forms_of_factor[start_index % 2 :][:1]
            ):
                got, want = (None if start is None else torch.full((1,), start) for _ in range(2))
                assert_same(
                    forms.encode(cast, x * 1e-2, factor, got, E4M3, block, 16, divide),
                    forms.encode(ops.cast_op, x * 1e-2, factor, want, E4M3, block, 16, divide),
                )
                assert_same(got, want)
    for y, align in ((x, 16), (x.t(), 1), (torch.zeros(0, 4), 16)):
        got, want = torch.full((1,), -1.0), torch.full((1,), -1.0)
        *data, sums = forms.encode_pair(cast, y, torch.tensor(0.05), got, E5M2, align, True)
        *expected, expected_sums = forms.encode_pair(
            ops.cast_op, y, torch.tensor(0.05), want, E5M2, align, True
        )
        assert_all_same(data, expected)
        assert_same(got, want)
        assert_sums_close(sums, expected_sums)


def check_cast_at_once() -> None:
    """A single program casts all tiles: the interpreter's programs do not run at the same time."""
    kinds = (((-1, -1), "fp32", E4M3), ((1, -1), "pow2", E4M3), ((1, -1), "fp32", E5M2))
    for rows, columns, align in ((300, 150, 16), (4, 65, 1), (1, 2, 16)):
        x = matrix(rows, columns)
        for block, rule, fp8_dtype in kinds:
            options, outputs = (fp8_dtype, block, rule, 1e-3, align), [(True, True, True)]
            if columns == 150:
                outputs += [(False, True, False)] + [(True, False, False)] * (block == (-1, -1))
            for rowwise, columnwise, sums in outputs:
                with (
                    unittest.mock.patch.object(cast_words, "_PROGRAMS_AT_ONCE", 1),
                    unittest.mock.patch.object(
                        cast_words._common, "multiprocessors", return_value=1
                    ),
                ):
                    got = cast_words.cast_words(
                        ("", [x], BF16), options, None, None, rowwise=rowwise,
                        columnwise=columnwise, column_sum=sums, at_once=True,
                    )  # fmt: skip
                want = ops.cast_op("", [x], BF16, *options, rowwise, columnwise, sums)
                assert_same_casts(got, want)


ORDER = torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
"""The order in which FP8 attention stores every 16 keys or queries of a transpose."""


def check_transposed_values() -> None:
    """The transpose holds the keys in ORDER, and then zeros."""
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
    """Each query has a scale; the FP8 data exist twice, with statistics of them and padding."""
    v_scale = torch.tensor([0.25])
    for B, H, S, D, ends in (
        (1, 4, 130, 128, None), (2, 1, 64, 40, None), (1, 2, 210, 9, [0, 70, 70, 200]),
    ):  # fmt: skip
        dout, out = (torch.randn(B, S, H, D).transpose(1, 2) for _ in range(2))
        dout[0, 0, 3] = 0.0
        lse, max_scores = torch.randn(2, B, H, S)
        lse[0, 0, 4] = max_scores[0, 0, 4] = -torch.inf  # a fully masked query
        cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32)
        token, tokens = None, (dout, out)
        if ends is not None:  # tokens of packed sequences come from other rows
            token = torch.randperm(S, dtype=torch.int32)
            token[ends[-1] :] = ~token[ends[-1] :]
            tokens = [attention.reference.unpack_tokens(x, token) for x in tokens]
        d, transposed, rows, weights, counters = attention_backward._prepare(
            *tokens, token, lse, max_scores, v_scale, cu_seqlens
        )
        assert counters.tolist() == [0, 0]
        expected_transpose = d.view(torch.uint8).mT.unflatten(3, (-1, 16))[..., ORDER].flatten(3)
        assert torch.equal(transposed.view(torch.uint8), expected_transpose)
        # Each sequence begins at a multiple of 128 after the end of the previous one.
        block_row = torch.arange(S) if ends is None else torch.full((S,), -1)
        for index, (start, stop) in enumerate(itertools.pairwise(ends or [])):
            block_row[start:stop] = start // 128 * 128 + index * 128 + torch.arange(stop - start)
        is_inside, rows_of_tokens = block_row >= 0, block_row[block_row >= 0]
        dout, out, lse, max_scores = (x[:, :, is_inside] for x in (dout, out, lse, max_scores))
        padding = torch.ones(d.shape[2], dtype=torch.bool).index_fill(0, rows_of_tokens, False)
        assert not d[:, :, padding].float().any()
        logarithm, delta, scale = rows.view(3, B, H, -1)
        logarithm[..., rows_of_tokens][lse == -torch.inf] = -torch.inf
        assert (logarithm[..., padding] > 1e30).all()
        logarithm, delta, scale = (x[..., rows_of_tokens] for x in (logarithm, delta, scale))
        fully_masked = lse == -torch.inf
        assert (logarithm[fully_masked] > 1e30).all()
        amax = dout.abs().amax(-1)
        want = (amax / 448).clamp(min=2.0**-100)
        assert torch.allclose(scale, want, rtol=1e-6)
        block_weights = torch.full((B, H, d.shape[2]), -torch.inf)
        block_weights[..., rows_of_tokens] = (
            ((max_scores - lse).exp() * scale).log2().masked_fill(fully_masked, -torch.inf)
        )
        expected_weights = block_weights.unflatten(2, (-1, 64)).amax(-1).flatten(0, 1)
        assert torch.equal(weights.isinf(), expected_weights.isinf())
        assert torch.allclose(weights, expected_weights, atol=1e-4)
        assert not d[..., D:].float().any()
        d = d[:, :, rows_of_tokens, :D].float()
        assert torch.allclose(delta * 2**18, (d * out).sum(-1) / v_scale, rtol=1e-4, atol=1e-2)
        exact = lse * 1.4426950408889634 - want.log2()
        assert torch.allclose(logarithm[~fully_masked], exact[~fully_masked], atol=1e-5)
        assert_values_close(d, dout / want.unsqueeze(-1))


def check_largest_weights() -> None:
    """The largest weight over the query blocks that see a tile, in all heads that share keys."""
    lengths = ([300, 0, 90, 0], [130, 7, 400, 163])  # the last entry has tokens of no sequence
    ends = [torch.tensor([0, *side[:3]], dtype=torch.int32).cumsum(0).int() for side in lengths]
    sequences = list(zip(*lengths, ends[0].tolist(), strict=False))
    for G, heads, is_packed in ((2, 3, False), (1, 1, True), (3, 2, True)):
        SQ, SK = 500, 700
        lengths_of_sides = ends[::-1] if is_packed else (None, None)
        key_tiles, plan = attention._plan(*lengths_of_sides, 1, SK, last_first=False)
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
            for index, (queries, keys, start) in enumerate(
                sequences if is_packed else [(SQ, SK, 0)]
            ):
                base = (start // 128 + index) * 2 if is_packed else 0
                i = torch.arange(queries).view(-1, 1) + keys - queries
                j = torch.arange(keys)
                visible = ((j - i <= right) | (right < 0)) & ((i - j <= left) | (left < 0))
                for tile in visible.split(128, 1):
                    blocks = [base + n for n, x in enumerate(tile.split(64)) if x.any()]
                    want.append(weights[:, blocks].view(G, heads * len(blocks)))
            if left >= 0 and not is_packed:
                want.reverse()  # the last tile comes first
            tiles = len(want)
            got = largest[: G * tiles].view(G, tiles)
            for tile, tile_weights in enumerate(want):
                if tile_weights.numel():  # otherwise nothing uses the value
                    assert torch.equal(got[:, tile], tile_weights.amax(1).ceil())
            assert largest[G * tiles :].isnan().all()


def assert_values_close(data: Tensor, exact: Tensor) -> None:
    """Asserts errors within a step of e4m3; powers of two may lose half of their value."""
    assert ((data - exact).abs() <= exact.abs() * 0.53 + 2.0**-9).all()
    assert (data - exact).norm() <= 0.1 * exact.norm()


def check_rotary() -> None:
    for A, B, H, D, R in ((2, 3, 5, 16, 16), (1, 4, 1, 20, 6), (3, 1, 40, 128, 2)):
        t = torch.randn(A, B, D, H).transpose(2, 3)
        for shape in ((A, B, 1, R), (1, B, 1, R), (A, 1, 1, R)):
            cos, sin = torch.randn(shape), torch.randn(shape)
            for flags in ((True, True), (True, False), (False, True), (False, False)):
                assert_same(
                    *(module.rotate(t, cos, sin, *flags) for module in (rotary, rotary.reference))
                )


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
    """Float32 queries, whose products the interpreter does not round; pages, parts, windows."""
    for B, H, G, S, D, DV, P in ((2, 4, 2, 3, 20, 8, 5), (1, 2, 2, 1, 16, 34, 64)):
        q = torch.randn(B, H, S, D)
        k, v = torch.randn(40, G, P, D), torch.randn(40, G, P, DV)
        table = torch.randperm(40)[: B * 16].view(B, 16).int()
        before = torch.tensor([16 * P - S, 7][:B])
        sequences = torch.stack((torch.arange(B).flip(0), before, torch.tensor([S, 1][:B]))).int()
        scales = (torch.rand(2, 40, G, P, 1) + 0.1) * torch.logspace(-3, 3, P)[:, None]
        for window, cache in (((-1, 0), FP32), ((9, 0), FP32), ((4, 2), E4M3), ((-1, 0), E5M2)):
            cache_scales = (None, None) if cache == FP32 else scales
            arguments = (q, k.to(cache), v.to(cache), *cache_scales, table, sequences, *window, 0.2)
            common = paged_attention._common
            with unittest.mock.patch.object(common, "multiprocessors", return_value=4):
                got = paged_attention.paged_attention(*arguments)
            want = ops.paged_attention(*arguments)
            # With an FP8 cache, queries and probabilities are rounded to float16.
            limit = 1e-5 if cache == FP32 else 2 * torch.finfo(torch.float16).eps
            assert (got - want).norm() <= limit * want.norm()


def check_writes_to_pages() -> None:
    """Writes some tokens of a call, in another order."""
    for B, G, S, D, P in ((2, 3, 4, 20, 5), (3, 8, 1, 128, 16), (1, 1, 3, 2, 2)):
        x = torch.randn(B, S, G, D).transpose(1, 2) * torch.logspace(-8, 8, G)[:, None, None]
        x[-1, -1, -1] = 0.0
        row, token = torch.arange(B * S).flip(0).unsqueeze(1).expand(-1, 2).T
        tokens = torch.stack((row // S, token % S, torch.randperm(B * S), row % P))[:, : B * S - 1]
        for dtype, cache in ((FP32, FP32), (BF16, BF16), (FP32, E4M3), (BF16, E5M2)):
            runs = []
            for module in (paged_attention, paged_attention.reference):
                data, scale = torch.zeros(B * S, G, P, D).to(cache), torch.zeros(B * S, G, P, 1)
                module.write_pages_(
                    x.to(dtype), data, scale if cache.itemsize == 1 else None, tokens.contiguous()
                )
                runs.append((data, scale))
            assert_all_same(*runs)


def check_merge_attention() -> None:
    """Merges ranges of queries in several layouts, with fully masked queries."""
    for B, H, S, D in ((2, 3, 21, 20), (1, 1, 64, 128), (2, 5, 1, 8)):
        out, other_out = torch.randn(B, S + 2, H, D).transpose(1, 2), torch.randn(B, H, S, D)
        lse, other_lse = torch.randn(B, H, S + 2), torch.randn(B, H, S) * 20
        lse[0, 0, 2], other_lse[-1, -1, -1] = -torch.inf, -torch.inf
        runs = []
        for module in (attention, attention.reference):
            merged, logarithm = out.clone(), lse.clone()
            module.merge_attention_(merged[:, :, 2:], logarithm[:, :, 2:], other_out, other_lse)
            runs.append((merged, logarithm))
        torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-5)


def expanded_scale(rows: int) -> Tensor:
    """A scale for each row, expanded from one scale in memory."""
    return torch.rand(1, 1).expand(rows, 1)


def random_row_map(tokens: int, slots: int, rows: int, filled: int) -> Tensor:
    """Rows below ``filled`` at random slots; the other slots hold numbers that mean no row.

    Some of these numbers are out of range.
    """
    no_row = torch.tensor([-1, -7, rows, 2**31 - 1], dtype=torch.int32)
    rows_of_slots = no_row[torch.randint(0, 4, (tokens * slots,))]
    rows_of_slots[torch.randperm(tokens * slots)[:filled]] = torch.randperm(filled).int()
    return torch.cat(
        [rows_of_slots.view(tokens, slots), rows_of_slots.new_full((tokens, 1), filled)], 1
    )


def check_permute() -> None:
    """The cases are tokens, slots, rows, filled rows, features, and blocks of a row."""
    for T, S, R, F, H, B in (
        (9, 4, 20, 13, 70, 3), (5, 1, 5, 5, 2100, 1), (1, 130, 8, 8, 5, 40), (3, 2, 0, 0, 8, 1),
        (0, 3, 4, 0, 8, 2), (4, 3, 40, 0, 8, 2), (6, 8, 4, 4, 0, 1),
    ):  # fmt: skip
        row_map, probs = random_row_map(T, S, R, F), torch.rand(T, S)
        x, merged = torch.randn(T, H), torch.randn(R, H)
        scale, amax = torch.rand(B, T).t(), torch.rand(T, B)
        fp8_bytes = torch.randint(0, 256, (H, T), dtype=torch.uint8).t()
        for arguments in (
            (x, row_map, R), (x.bfloat16(), row_map, R, probs), (x.double(), row_map, R, probs),
            (fp8_bytes, row_map, R, probs.bfloat16(), None, scale, amax),
        ):  # fmt: skip
            got, want = permute.scatter_rows(*arguments), permute.reference.scatter_rows(*arguments)
            assert_all_same_or_none(got, want)
        arguments = (x, row_map, R, probs, merged)
        y, dots, *_ = permute.scatter_rows(*arguments)
        expected_y, expected_dots, *_ = permute.reference.scatter_rows(*arguments)
        assert_same(y, expected_y)
        torch.testing.assert_close(dots, expected_dots)
        fp8, options = merged.to(E5M2), (FP32, probs, None)
        for arguments in (
            (merged, row_map, FP32), (merged, row_map, FP32, probs),
            (merged.double(), row_map, FP32),
            (torch.randn(H, R).t(), row_map, FP32, probs, torch.rand(R).half()),
            (fp8, row_map, *options, torch.rand(B, R).t(), max(-(-H // B), 1)),
            (fp8, row_map, *options, expanded_scale(R), H),
        ):  # fmt: skip
            got, want = permute.gather_rows(*arguments), permute.reference.gather_rows(*arguments)
            assert_all_same_or_none(got, want)

    for T, S in ((0, 3), (5, 0), (300, 130), (70, 3), (1, 1)):
        for mask in (torch.rand(T, S) < 0.4, (torch.rand(S, T) < 0.1).int().t() * 7):
            assert_all_same(permute.row_map_of(mask), permute.reference.row_map_of(mask))
    for T, K, E in ((0, 3, 4), (5, 0, 2), (300, 4, 130), (70, 3, 5), (1, 1, 1)):
        index = torch.randint(-1, E + 2, (K, T)).t()
        for experts in (index, index.short()):
            assert_all_same(
                permute.row_map_of(experts, E), permute.reference.row_map_of(experts, E)
            )


def assert_all_same_or_none(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> None:
    for actual, expected in zip(got, want, strict=True):
        assert_same(actual, expected)


def check_router() -> None:
    """The cases are tokens, experts, topk, groups, and selected groups.

    The logits have infinities, NaN and equal values.
    """
    for T, E, topk, groups_of_experts, selected in (
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
            for options in (
                (topk, name, pre, groups_of_experts, selected, 2.5, False),
                (topk, name, pre, 1, 0, 1.0, True),
            ):  # fmt: skip
                z = logits if options[-1] else z
                (got, routing_map), (want, expected_map) = (
                    module.route(z, bias, *options) for module in (router, router.reference)
                )
                torch.testing.assert_close(got, want, equal_nan=True)
                assert torch.equal(routing_map, expected_map)
                gradient = (
                    torch.randn(T, E), z.nan_to_num(neginf=-9.0), expected_map, *options[:3],
                    *options[5:],
                )  # fmt: skip
                got, want = (
                    module.route_backward(*gradient) for module in (router, router.reference)
                )
                torch.testing.assert_close(got, want)


def check_cross_entropy() -> None:
    """Rows of one block, several blocks or less than one; shards that are all -inf; strides."""
    cross_entropy.BLOCK = 64
    for M, V, dtype in ((5, 300, FP32), (3, 64, BF16), (1, 1, FP32), (4, 7, BF16), (0, 9, FP32)):
        logits = (torch.randn(M, 2 * V) * 4).to(dtype)[:, :V]
        logits[1:2], logits[2:3, V // 2 :] = -torch.inf, -torch.inf
        target = torch.randint(-2, V + 2, (M,))
        arguments = logits, target
        modules = cross_entropy, cross_entropy.reference
        got, want = (module.cross_entropy_statistics(*arguments) for module in modules)
        torch.testing.assert_close(got, want)
        factors = torch.stack([want[0] + want[1].log(), *torch.randn(3, M)])
        factors[1, 1:2] = 0.0
        got, want = (module.cross_entropy_backward(*arguments, factors) for module in modules)
        torch.testing.assert_close(got, want)


def check_moments() -> None:
    for M, K, is_square in ((70, 300, False), (9, 128, True), (9, 40, True), (0, 7, False)):
        x = matrix(K, M).float().t()
        x = x.abs() if is_square else x
        specials = [0.0, -0.0, 2.0**-98, 1e-38, 2.0**-140, 3e38, -3e38, torch.inf, torch.nan]
        for row, value in zip(x[:9], specials, strict=False):
            row[: len(row) // 2] = value
        results = []
        for module in (moments.moments, moments):
            data, scale = torch.zeros(M, K).byte(), torch.zeros(M, -(-K // 128)).byte()
            module.quantize_moment_(x, data, scale, 5, is_square)
            results.append((data, scale, module.dequantize_moment(data, scale, is_square)))
        want, got = ([a * ~c.isnan(), b, c.nan_to_num(9)] for a, b, c in results)
        assert_all_same(got, want)


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
        # The interpreter treats NaN as a number.
        q = (torch.randint(256, x.shape) & ~4).to(torch.uint8).view(fp8_dtype)
        scale = torch.rand(scale_shape(tuple(x.shape), block))
        for last_scale in (scale[-1, -1].clone(), torch.nan):
            scale[-1, -1] = last_scale
            got = measure.measure_cast(x, q, scale, block)
            want = _numbers_by_torch(x, q, scale, block)
            # The order of the sums of squares differs.
            torch.testing.assert_close(got[0][259:], want[0][259:], rtol=1e-14, atol=0)
            assert_all_same([got[0][:259], got[1]], [want[0][:259], want[1]])


def check_transpose_and_dequantize() -> None:
    q = torch.randint(0, 127, (70, 135), dtype=torch.uint8).clamp(max=120).view(E4M3)
    for matrix_ in (q, q.t(), q[:, ::2], q[:0]):
        for align in (1, 16):
            got, want = transpose(matrix_, align), reference.transpose(matrix_, align)
            assert_same(got.view(torch.uint8), want.view(torch.uint8))
    scales = [
        (torch.tensor(0.3), (-1, -1)), (torch.rand(70, 1), (1, -1)),
        (torch.rand(2, 70).t(), (1, 128)), (torch.rand(1, 2), (128, 128)),
        (torch.rand(70, 5), (1, 32)), (torch.rand(14, 1), (5, -1)), (torch.rand(70, 2), (1, 96)),
    ]  # fmt: skip
    for scale, block in scales:
        for dtype in (FP32, torch.float16):
            arguments = (scale, block, dtype)
            assert_same(dequantize(q, *arguments), reference.dequantize(q, *arguments))
    arguments = (torch.rand(1, 70), (-1, 1), FP32)
    assert_same(dequantize(q.t(), *arguments), reference.dequantize(q.t(), *arguments))
    # The interpreter truncates to bfloat16, so this compares only values that need no rounding.
    arguments = (torch.rand(70, 1).log2().round().exp2(), (1, -1), BF16)
    assert_same(dequantize(q, *arguments), reference.dequantize(q, *arguments))


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
            reference_state = tuple(tensor.clone() for tensor in state)
            arguments = (margin, interval, most_recent, power_of_2)
            for _ in range(2):
                got = scaling.update_scales_(*state, *arguments)
                want = reference.update_scales_(*reference_state, *arguments)
                assert_all_same((*state, got), (*reference_state, want))
                state[1].copy_(torch.rand(slots))
                reference_state[1].copy_(state[1])


def check_groups() -> None:
    """Casts of groups and of batches; padding rows hold NaN."""
    sizes = [0, 1, 130, 0, 15]
    for index, (block, w_block, rule) in enumerate(groups.CASTS.values()):
        fp8_dtype = (E4M3, E5M2)[index % 2]
        offs = groups.offsets(sizes, dtype=(torch.int32, torch.int64)[index % 2])
        columns = 70 if ALL or index < 2 else 50  # two tiles of columns, or one
        x = groups.rows(sizes, columns, dtype=BF16)
        batch = (torch.randn(2, 40, 140), torch.randn(2, 140, 40, dtype=BF16).mT)
        # A single orientation runs other code for rows, and the same code for all other blocks.
        single = ((True, False, False), (False, True, False))
        for outputs in ((True, True, True), *(single if ALL or block == (1, -1) else ())):
            # The interpreter rounds to bfloat16 wrongly, so prologues are float32.
            token = torch.randint(-1, sum(sizes), (len(x),), dtype=torch.int32)
            for kind, *inputs in (
                ("", x), ("reglu", x.float()), ("relu_backward", x.float(), x.float()),
                ("permute", x, token), ("multiply", x.float(), x.float()[:, :1].expand_as(x)),
            ):  # fmt: skip
                if kind and not (all(outputs) and rule == "pow2"):
                    continue
                first = inputs[0]
                arguments = (kind, inputs, first.dtype, offs, fp8_dtype, block, rule, 0.0, *outputs)
                assert_same_casts(
                    groups.cast_groups(cast, *arguments),
                    groups.cast_groups(ops.cast_op, *arguments),
                    groups.used_columns(sizes),
                )
            for w in batch if ALL and all(outputs) else batch[index % 2 :][:1]:
                arguments = ("", [w], w.dtype, None, fp8_dtype, w_block, rule, 0.0, *outputs[:2])
                assert_same_casts(
                    groups.cast_groups(cast, *arguments),
                    groups.cast_groups(ops.cast_op, *arguments),
                )
    assert_same(grouped_cast.plan_groups(offs, len(x)), reference.plan_groups(offs, len(x)))
    format_and_block = (E4M3, (-1, -1))
    factors = torch.rand(5, 8)[:, 0]
    given_scales = [
        (700 + torch.rand(5, 1, 1) * 700, "fp32"), (torch.full((1,), 0.3), "encode"),
        (torch.full((1, 1), 700.0), "fp32"), (factors, "encode"),
    ]  # fmt: skip
    # Without --all, only the batch below has a factor for each group.
    for given_scale, rule in given_scales if ALL else given_scales[:2]:
        slots = [torch.full((5,), -1.0) if rule == "encode" else None for _ in range(2)]
        options = (offs, *format_and_block, rule, 0.0, True, True, False, given_scale)
        assert_same_casts(
            groups.cast_groups(cast, "", [x], BF16, *options, slots[0]),
            groups.cast_groups(ops.cast_op, "", [x], BF16, *options, slots[1]),
            groups.used_columns(sizes),
        )
        assert_same(*slots)
    # There are more tiles than programs, so a program skips groups, or begins and ends within one.
    sizes, programs = [0, 300, 0, 0, 70, 200, 1, 0, 129, 0], 3
    x, offs = groups.rows(sizes, 150, dtype=BF16), groups.offsets(sizes)
    plan = grouped_cast.plan_groups(offs, len(x))
    with unittest.mock.patch.object(prologue, "AMAX_PROGRAMS", programs):
        for known_plan in (None, plan):
            arguments = (
                "", [x], BF16, offs, *format_and_block, "fp32", 0.0, False, False, False, None, None
            )  # fmt: skip
            got = groups.cast_groups(cast, *arguments, known_plan)
            assert_same(got[2], groups.cast_groups(ops.cast_op, *arguments)[2])
            assert got.count(None) == 5
    factors = torch.rand(2, 8)[:, 0]
    slots = [torch.full((2,), -1.0) for _ in range(2)]
    options = (None, *format_and_block, "encode", 0.0, True, True, False, factors)
    assert_same_casts(
        groups.cast_groups(cast, "", batch[:1], FP32, *options, slots[0]),
        groups.cast_groups(ops.cast_op, "", batch[:1], FP32, *options, slots[1]),
    )
    assert_same(*slots)


def assert_same_casts(got: Sequence[Any], want: Sequence[Any], used: int | None = None) -> None:
    """Compares the results of casts; of a transpose only the first ``used`` columns count."""
    *got, sums = got
    *want, expected_sums = want
    q_t = want[3]
    for index, (actual, expected) in enumerate(zip(got, want, strict=True)):
        width = None
        if used is not None and index >= 3 and expected is not None and expected.ndim == 2:
            width = used if index == 3 else -(-used * expected.shape[1] // q_t.shape[1])
            width = max(width, 1) if expected.shape[1] == 1 else width
        assert_same(
            actual if actual is None else actual[..., :width],
            expected if expected is None else expected[..., :width],
        )
        assert actual is None or actual.stride() == expected.stride() or 1 in actual.shape
    if expected_sums is not None:
        assert_sums_close(sums, expected_sums)


def check_norm() -> None:
    for rows, columns, dtype in ((5, 33, BF16), (3, 8200, FP32), (66, 1, FP32), (0, 4, FP32)):
        x, weight = matrix(rows, columns, dtype), torch.randn(columns)
        dy = matrix(columns, rows, FP32).t()
        for bias in (torch.randn(columns), None):
            center = bias is not None
            *got, _ = norm.norm(x, weight, bias, 1e-5, center, FP32)
            *expected, _ = reference.norm(x, weight, bias, 1e-5, center, FP32)
            for actual, want in zip(got, expected, strict=True):
                torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-5)
            arguments = (x, weight, bias, 1e-5, center, FP32, None, (), False, True)
            no_output, *stats, amax = norm.norm(*arguments)
            assert no_output is None
            for actual, expected_tensor in zip(stats, got[1:], strict=True):
                assert_same(actual, expected_tensor)
            assert_same(amax, reference.block_amax(got[0], (-1, -1)))
            arguments = (dy, x, weight, *stats, center, x.dtype)
            pairs = zip(
                norm.norm_backward(*arguments), reference.norm_backward(*arguments), strict=True
            )
            for actual, want in pairs:
                if actual is None or want is None:
                    assert actual is want
                    continue
                # The interpreter truncates to bfloat16, and terms of sums may cancel.
                rtol = 2.0**-7 if want.dtype == BF16 else 1e-5
                atol = 1e-5 * want.abs().max().item() if want.numel() else 0.0
                torch.testing.assert_close(actual, want, rtol=rtol, atol=atol)


def check_fp8_norm() -> None:
    blocks = ((-1, -1), (1, -1), (1, 128), (128, 128), (1, 32), (-1, 1), (3, 5))
    for rows, columns in ((5, 140), (67, 33), (3, 8200), (0, 4)):
        weight, dy = torch.randn(columns), matrix(rows, columns, FP32)
        some_blocks = {5: blocks, 67: blocks[1::2], 3: blocks[::3], 0: blocks[::2]}[rows]
        for index, block in enumerate(blocks if ALL else some_blocks):
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
                for index, (actual, expected) in enumerate(zip(got, want, strict=True)):
                    if actual is None or expected is None:
                        assert actual is expected
                        continue
                    atol = 1e-5 * expected.abs().max().item() if expected.numel() else 0.0
                    if index == 1 and center and rows:  # terms of the means may cancel
                        atol = 2.0**-19 * size.item()
                    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=atol)
    q, scale = torch.full((2, 8), 3.0).to(E4M3), torch.full((1, 1), 0.25)
    for dtype in (BF16, torch.float16):  # the value 0.75 needs no rounding
        quantized = (scale, (-1, -1))
        y, mean, rstd, _ = norm.norm(q, torch.ones(8), torch.ones(8), 0.5, True, dtype, *quantized)
        assert y.dtype == dtype
        assert bool((y == 1).all())
        assert bool((mean == 0.75).all())
        dx, *_ = norm.norm_backward(y, q, torch.ones(8), mean, rstd, True, dtype, *quantized)
        assert dx.dtype == dtype
        assert not dx.any()


def exact_prologues() -> list[tuple[str, list[Tensor]]]:
    """Prologues without an exponential, whose values the interpreter computes exactly."""
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


def check_prologues() -> None:
    for index_of_kind, (kind, inputs) in enumerate(exact_prologues()):
        computed = Prologue(kind, inputs, FP32)
        amax = forms.amax(reference.amax_of, computed)
        assert_same(prologue.value_of(kind, inputs, FP32), reference.value_of(kind, inputs, FP32))
        assert_same(forms.amax(amax_of, computed), amax)
        # The interpreter does not saturate.
        encode = (400 / amax).clamp(max=1e3).view(1)
        for columnwise in (False, True):
            got, want = torch.full((1,), -1.0), torch.full((1,), -1.0)
            options = (E4M3, (-1, -1), 16)
            assert_same(
                forms.encode(cast, computed, encode, got, *options, columnwise=columnwise),
                forms.encode(ops.cast_op, computed, encode, want, *options, columnwise=columnwise),
            )
            assert_same(got, want)
        arguments = (computed, encode, None, E5M2, 16, True)
        *got, sums = forms.encode_pair(cast, *arguments)
        *want, expected_sums = forms.encode_pair(ops.cast_op, *arguments)
        assert_all_same(got, want)
        assert_sums_close(sums, expected_sums)
        blocks = [((-1, -1), "pow2"), ((1, -1), "fp32"), ((1, 128), "fp32")]
        if kind == "layer_norm":
            blocks += [((1, 32), "e8m0"), ((1, 96), "fp32")]
        # The scaling of a tile does not depend on the kind, so each kind has only some blocks.
        block_index = index_of_kind % 3
        for index, (block, rule) in enumerate(blocks):
            if not ALL and kind != "layer_norm" and index != block_index:
                continue
            options = (computed, E4M3, block, rule, 0.0, 16)
            alternate = (index + len(kind)) % 2 == 1
            for columnwise in (False, True) if ALL else (alternate,):
                got = forms.quantize(cast, *options, columnwise=columnwise)
                want = forms.quantize(reference.cast, *options, columnwise=columnwise)
                assert_all_same(got[:2], want[:2])
                assert_same(got[2], want[2])
            arguments = (computed, E4M3, block, rule, 1e-3, 1, True)
            *got, sums = forms.quantize_pair(cast, *arguments)
            *want, expected_sums = forms.quantize_pair(reference.cast, *arguments)
            assert_all_same(got, want)
            assert_sums_close(sums, expected_sums)
        options = (computed, E4M3, (-1, -1), "fp32", 0.0, 16, amax * 1.5)
        got = forms.quantize(cast, *options, columnwise=True)
        assert_all_same(got[:2], forms.quantize(reference.cast, *options, columnwise=True)[:2])


def check_activations() -> None:
    for name, (_, gated) in reference.ACTIVATIONS.items():
        h = torch.randn(9, 20) * 4
        dy = torch.randn(9, 10 if gated else 20)
        for kind, inputs in ((name, [h]), (f"{name}_backward", [h, dy])):
            got, want = (module.value_of(kind, inputs, FP32) for module in (prologue, reference))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)
    patch_interpreter()
    remember_types()
    for name, check in [*globals().items()]:
        if name.startswith("check_"):
            torch.manual_seed(0)
            check()
