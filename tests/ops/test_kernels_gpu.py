"""The CUDA implementations, compared with the reference, which runs on CPU copies of the inputs.

FP8 data, scales and amaxes are equal bit for bit; GEMMs are compared with float64.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from float8lab import ops
from float8lab.formats import E4M3, E5M2, FP8_DTYPES, HIGH_PRECISION_DTYPES, scale_shape
from float8lab.ops import gemm, reference
from float8lab.ops.gemm import may_multiply
from tests.near_ties import by_multiplying, near_ties
from tests.ops import forms
from tests.ops.groups import cast_groups, grouped_mm

pytestmark = pytest.mark.gpu

SHAPES = {
    "M1-K1": (1, 1), "M0-K64": (0, 64), "M33-K0": (33, 0), "M63-K1500": (63, 1500),
    "M128-K128": (128, 128), "M272-K1040": (272, 1040), "M1030-K131": (1030, 131),
    "M5-K9001": (5, 9001),
}  # fmt: skip
RECIPES = {
    "tensor": ((-1, -1), "fp32", 0.0), "tensor-pow2-eps": ((-1, -1), "pow2", 0.1),
    "row": ((1, -1), "fp32", 0.0), "row-pow2": ((1, -1), "pow2", 1e-12),
    "1x128": ((1, 128), "fp32", 0.0), "1x128-pow2": ((1, 128), "pow2", 0.0),
    "128x128": ((128, 128), "fp32", 0.0), "mx": ((1, 32), "e8m0", 0.0),
    "32x32": ((32, 32), "pow2", 0.0), "16x64": ((16, 64), "fp32", 0.0),
    "fallback-1x96": ((1, 96), "fp32", 0.0), "fallback-5-rows": ((5, -1), "pow2", 0.0),
}  # fmt: skip
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "every-second": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "sliced": lambda x: torch.cat((x, x), dim=1)[:, : x.shape[1]],
}

each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
each_dtype = pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
each_fp8_dtype = pytest.mark.parametrize("fp8_dtype", FP8_DTYPES, ids=["e4m3", "e5m2"])
each_align = pytest.mark.parametrize("align", [1, 16], ids=["align1", "align16"])


def matrix(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Columns of many magnitudes, and a row and a column of zeros, on the GPU."""
    x = torch.randn(shape, device="cuda")
    if x.numel() > 1:
        x *= torch.logspace(-3, 3, shape[1], device="cuda")
        x[shape[0] // 2], x[:, shape[1] // 2] = 0, 0
    return x.to(dtype)


def assert_same(got: Tensor | None, want: Tensor | None) -> None:
    """Asserts equal bits, but treats all NaN of a format as equal."""
    if got is None or want is None:
        assert got is want
        return
    assert got.is_cuda
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.stride() == want.stride() or 1 in got.shape or got.numel() == 0
    got = got.cpu()
    if got.dtype in FP8_DTYPES:
        nan = want.float().isnan()
        assert bool((got.float().isnan() == nan).all())
        assert bool((nan | (got.view(torch.uint8) == want.view(torch.uint8))).all())
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def assert_all_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for actual, expected in zip(got, want, strict=True):
        assert_same(actual, expected)


def assert_sums_close(got: Tensor, x: Tensor) -> None:
    """Asserts that ``got`` are the column sums of ``x``, added in float32 in any order."""
    bound = x.double().abs().sum(0) * 2.0**-24 * max(x.shape[0], 1)
    assert bool(((got - x.double().sum(0)).abs() <= bound).all())


@each_layout
@each_recipe
@each_fp8_dtype
@each_dtype
def test_quantize_equals_the_reference(
    dtype: torch.dtype, fp8_dtype: torch.dtype, recipe: tuple[Any, ...], layout: Any
) -> None:
    block, rule, eps = recipe
    for shape in SHAPES.values():
        for align in (1, 16):
            x = layout(matrix(shape, dtype))
            arguments = (fp8_dtype, block, rule, eps, align)
            got = forms.quantize(ops.cast_op, x, *arguments)
            assert_all_same(got, reference.quantize(x.cpu(), *arguments))
            *got, sums = forms.quantize_pair(ops.cast_op, x, *arguments, align == 16)
            assert_all_same(
                got, forms.quantize_pair(reference.cast, x.cpu(), *arguments, False)[:4]
            )
            assert_sums_close(sums, x if align == 16 else x[:, :0])


@each_layout
@each_dtype
@each_shape
def test_quantize_with_a_given_amax_equals_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, layout: Any
) -> None:
    x = layout(matrix(shape, dtype))
    for value in (3.0, 0.0, torch.inf, torch.nan, float(x.abs().max()) if x.numel() else 1.0):
        amax = torch.full((1, 1), value, device="cuda")
        for align in (1, 16):
            arguments = (E4M3, (-1, -1), "fp32", 0.0, align)
            want = reference.quantize(x.cpu(), *arguments, amax.cpu())
            assert_all_same(forms.quantize(ops.cast_op, x, *arguments, amax)[:2], want[:2])
            got = forms.quantize_pair(ops.cast_op, x, *arguments, False, amax)
            arguments = (*arguments, False, amax.cpu())
            assert_all_same(got[:4], forms.quantize_pair(reference.cast, x.cpu(), *arguments)[:4])


@each_layout
@each_dtype
@each_shape
def test_quantize_with_given_amaxes_of_blocks_equals_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, layout: Any
) -> None:
    x = layout(matrix(shape, dtype))
    for block, rule in forms.GRIDS:
        for columnwise in (False, True):
            got = forms.quantize_by_amaxes(ops.cast_op, x, block, rule, columnwise=columnwise)
            want = forms.quantize_by_amaxes(
                reference.cast, x.cpu(), block, rule, columnwise=columnwise
            )
            assert_all_same(got, want)


@each_layout
@each_dtype
@each_shape
def test_amax_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype, layout: Any) -> None:
    x = layout(matrix(shape, dtype))
    for block in ((-1, -1), (1, -1), (-1, 1), (1, 128)):
        assert_same(forms.amax(ops.amax_op, x, block), reference.block_amax(x.cpu(), block))


SPECIAL = {
    "zeros": [0.0, -0.0, 0.0, 0.0],
    "inf": [torch.inf, -torch.inf, 1.0, 500.0],
    "nan": [torch.nan, -torch.nan, 1.0, 0.0],
    "subnormal": [2.0**-149, -(2.0**-140), 0.0, 2.0**-127],
    "small": [2.0**-120, 2.0**-126, 2.0**-121, -(2.0**-130)],
    "overflow-of-encode": [2.0**-128, 2.0**-129, 2.0**-149, 0.0],
    "e8m0-at-its-least": [448 * 2.0**-126, 448 * 2.0**-127, 1e-44, 0.0],
    "largest": [3.4028234663852886e38, -3.4e38, 1e38, 1.0],
    "e4m3-edge": [448.0, 464.0, 463.9, -479.0],
    "e5m2-edge": [57344.0, 61440.0, -61439.0, 65504.0],
    "halfway": [448.0, 1.0625, 1.1875, 17.0],
}


@pytest.mark.parametrize("values", SPECIAL.values(), ids=SPECIAL)
@each_fp8_dtype
@each_dtype
def test_special_values_equal_the_reference(
    dtype: torch.dtype, fp8_dtype: torch.dtype, values: list[float]
) -> None:
    x = torch.tensor(values, device="cuda").to(dtype).repeat(3, 40)
    for block, rule, eps in RECIPES.values():
        arguments = (fp8_dtype, block, rule, eps, 16)
        assert_all_same(
            forms.quantize(ops.cast_op, x, *arguments), reference.quantize(x.cpu(), *arguments)
        )
        got = forms.quantize_pair(ops.cast_op, x, *arguments, False)
        assert_all_same(
            got[:4], forms.quantize_pair(reference.cast, x.cpu(), *arguments, False)[:4]
        )
    for scale in (1.0, 0.0, 2.0**-149, 2.0**-127, torch.inf, torch.nan, 3e38):
        factor = torch.tensor(scale)
        for divide in (False, True):
            got = forms.encode(ops.cast_op, x, factor.cuda(), None, fp8_dtype, (-1, -1), 1, divide)
            assert_same(
                got,
                forms.encode(ops.cast_op, x.cpu(), factor, None, fp8_dtype, (-1, -1), 1, divide),
            )


def with_infinities(x: Tensor) -> Tensor:
    """``x`` with nonfinite and the largest values in random places, some of them adjacent."""
    x = x.clone()
    if x.numel() > 1:
        positions = torch.randperm(x.numel(), device=x.device)[: max(x.numel() // 50, 1)]
        positions = torch.cat((positions, positions[: len(positions) // 2] + 1)) % x.numel()
        largest_value = torch.finfo(x.dtype).max
        values = x.new_tensor([torch.inf, -torch.inf, torch.nan, largest_value, -largest_value])
        x.view(-1)[positions] = values[torch.arange(len(positions), device=x.device) % 5]
    return x


@each_layout
@each_fp8_dtype
@each_dtype
def test_nonfinite_values_anywhere_equal_the_reference(
    dtype: torch.dtype, fp8_dtype: torch.dtype, layout: Any
) -> None:
    """Every kernel of a matrix: computed scales of each recipe, given scales, slots, transposes."""
    for index, shape in enumerate(SHAPES.values()):
        x = layout(with_infinities(matrix(shape, dtype)))
        align = (1, 16)[index % 2]
        for block, rule, eps in RECIPES.values():
            options = (fp8_dtype, block, rule, eps, align)
            got = forms.quantize(ops.cast_op, x, *options, columnwise=index % 3 == 0)
            want = forms.quantize(reference.cast, x.cpu(), *options, columnwise=index % 3 == 0)
            assert_all_same(got[:2], want[:2])
            *got, _ = forms.quantize_pair(ops.cast_op, x, *options, False)
            assert_all_same(got, forms.quantize_pair(reference.cast, x.cpu(), *options, False)[:4])
        for factor in (torch.tensor([0.73]), torch.tensor([3e38])):
            slot, expected_slot = torch.zeros(1, device="cuda"), torch.zeros(1)
            options = (fp8_dtype, align, False)
            *got, _ = forms.encode_pair(ops.cast_op, x, factor.cuda(), slot, *options)
            want = forms.encode_pair(ops.cast_op, x.cpu(), factor, expected_slot, *options)
            assert_all_same(got, want[:2])
            assert_same(slot, expected_slot)
            for divide in (False, True):
                options = (fp8_dtype, (-1, -1), align, divide)
                got = forms.encode(ops.cast_op, x, factor.cuda(), None, *options)
                assert_same(got, forms.encode(ops.cast_op, x.cpu(), factor, None, *options))


@pytest.mark.parametrize("prologue", ["", "relu", "reglu"])
@each_fp8_dtype
@each_dtype
def test_nonfinite_values_in_groups_equal_the_reference(
    dtype: torch.dtype, fp8_dtype: torch.dtype, prologue: str
) -> None:
    offs = torch.tensor([0, 17, 145, 300], dtype=torch.int32)
    x = with_infinities(matrix((320, 528), dtype))
    batch = with_infinities(matrix((3 * 48, 272), dtype)).view(3, 48, 272)
    factor, slot = torch.tensor([0.73]), torch.zeros(len(offs))
    used = 128 + 128 + 256  # columns of the transpose for groups of 17, 128 and 155 rows
    cases = [((-1, -1), "fp32"), ((1, -1), "pow2"), ((1, 128), "fp32"), ((1, 32), "e8m0")]
    for block, rule in cases:
        for outputs in ((True, True, False), (True, False, False), (False, True, False)):
            options = (fp8_dtype, block, rule, 0.0, *outputs)
            got = cast_groups(ops.cast_op, prologue, [x], dtype, offs.cuda(), *options)
            want = cast_groups(ops.cast_op, prologue, [x.cpu()], dtype, offs, *options)
            assert_same_groups(got, want, used)
            if not prologue:
                got = cast_groups(ops.cast_op, "", [batch], dtype, None, *options)
                assert_same_groups(
                    got, cast_groups(ops.cast_op, "", [batch.cpu()], dtype, None, *options)
                )
    options = (fp8_dtype, (-1, -1), "encode", 0.0, True, True, False)
    gpu_slot = slot.cuda()
    got = cast_groups(
        ops.cast_op, prologue, [x], dtype, offs.cuda(), *options, factor.cuda(), gpu_slot
    )
    want = cast_groups(ops.cast_op, prologue, [x.cpu()], dtype, offs, *options, factor, slot)
    assert_same_groups(got, want, used)
    assert_same(gpu_slot, slot)


def assert_same_groups(
    got: Sequence[Tensor | None], want: Sequence[Tensor | None], used: int = 0
) -> None:
    """Asserts equal data, scales and amaxes; of a transpose only ``used`` columns count."""
    for index, (actual, expected) in enumerate(zip(got[:5], want[:5], strict=True)):
        if (
            used
            and actual is not None
            and expected is not None
            and index in (3, 4)
            and expected.ndim == 2
        ):
            q_t = want[3]
            assert q_t is not None
            columns = -(-used * expected.shape[1] // q_t.shape[1])
            actual, expected = actual[:, :columns].contiguous(), expected[:, :columns].contiguous()
        assert_same(actual, expected)


@each_fp8_dtype
def test_every_float16_casts_as_the_reference_does(fp8_dtype: torch.dtype) -> None:
    x = torch.arange(2**16, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x.view(256, 256)
    for scale in (1.0, 0.37, 2.0**-7):
        factor = torch.tensor(scale)
        got = forms.encode_pair(ops.cast_op, x, factor.cuda(), None, fp8_dtype, 1, False)
        want = forms.encode_pair(ops.cast_op, x.cpu(), factor, None, fp8_dtype, 1, False)
        assert_all_same(got[:2], want[:2])
        got = forms.encode(ops.cast_op, x, factor.cuda(), None, fp8_dtype, (-1, -1), 1, True)
        assert_same(
            got, forms.encode(ops.cast_op, x.cpu(), factor, None, fp8_dtype, (-1, -1), 1, True)
        )


@pytest.mark.parametrize("block", [(1, -1), (1, 128), (128, 128), (-1, -1)], ids=str)
@each_dtype
def test_casts_multiply_by_the_encode_factor(dtype: torch.dtype, block: tuple[int, int]) -> None:
    """Some of many random values distinguish the encode factor from 1 / (1 / encode factor)."""
    x = matrix((1024, 4096), dtype)
    for align in (1, 16):
        options = (E4M3, block, "fp32", 0.0, align)
        q, scale, amax = reference.quantize(x.cpu(), *options)
        assert_all_same(forms.quantize(ops.cast_op, x, *options), (q, scale, amax))
        *got, _ = forms.quantize_pair(ops.cast_op, x, *options, False)
        assert_all_same(got, forms.quantize_pair(reference.cast, x.cpu(), *options, False)[:4])
        for divide, factor in (
            (False, reference.factors_from_amax(amax, E4M3, "fp32")[1]),
            (False, 1 / scale),
            (True, scale),
        ):
            got = forms.encode(ops.cast_op, x, factor.cuda(), None, E4M3, block, align, divide)
            assert_same(
                got, forms.encode(ops.cast_op, x.cpu(), factor, None, E4M3, block, align, divide)
            )


def test_near_ties_round_as_in_the_reference() -> None:
    x = near_ties(64)
    expected_bytes = by_multiplying(x)
    for block in ((1, -1), (1, 256)):  # a kernel, and the reference on the GPU
        q, scale, _ = forms.quantize(ops.cast_op, x.cuda(), E4M3, block, "fp32", 0.0, 1)
        assert torch.equal(q.view(torch.uint8).cpu(), expected_bytes)
        got = forms.encode(ops.cast_op, x.cuda(), scale, None, E4M3, block, 1, True)
        assert_same(got, forms.encode(ops.cast_op, x, scale.cpu(), None, E4M3, block, 1, True))
    _, _, q_t, _, _ = forms.quantize_pair(
        ops.cast_op, x.t().cuda(), E4M3, (1, -1), "fp32", 0.0, 16, False
    )
    assert torch.equal(q_t.view(torch.uint8).cpu()[:64], expected_bytes)
    for row, expected_row in zip(x[:, None], expected_bytes, strict=True):
        for align in (1, 16):
            q, _, _ = forms.quantize(ops.cast_op, row.cuda(), E4M3, (-1, -1), "fp32", 0.0, align)
            assert torch.equal(q.view(torch.uint8).cpu()[0], expected_row)
            q, *_ = forms.quantize_pair(
                ops.cast_op, row.cuda(), E4M3, (-1, -1), "fp32", 0.0, align, False
            )
            assert torch.equal(q.view(torch.uint8).cpu()[0], expected_row)
            prologue = ops.Prologue("relu", [row.cuda()], torch.float32)
            for format_and_block in ((E4M3, (-1, -1)), (E4M3, (1, -1)), (E4M3, (1, 128))):
                arguments = (*format_and_block, "fp32", 0.0, align)
                q, _, _ = forms.quantize(ops.cast_op, prologue, *arguments)
                want, _, _ = reference.quantize(row, *arguments)
                assert_same(q, want)


@pytest.mark.parametrize("start", [None, ops.NO_DATA, 0.5, 1e6, torch.nan])
@each_align
@each_layout
@each_shape
def test_cast_with_a_given_scale_and_its_amax_equal_the_reference(
    shape: tuple[int, int], layout: Any, align: int, start: float | None
) -> None:
    x = layout(matrix(shape, torch.bfloat16))
    scale = torch.tensor([0.73])
    for pair in (False, True):
        expected_slot = None if start is None else torch.tensor([start])
        slot = None if start is None else torch.tensor([start], device="cuda")
        if pair:
            *got, sums = forms.encode_pair(ops.cast_op, x, scale.cuda(), slot, E4M3, align, True)
            want = forms.encode_pair(ops.cast_op, x.cpu(), scale, expected_slot, E4M3, align, True)[
                :2
            ]
            assert_all_same(got, want)
            assert_sums_close(sums, x)
        else:
            got = forms.encode(ops.cast_op, x, scale.cuda(), slot, E4M3, (-1, -1), align)
            assert_same(
                got, forms.encode(ops.cast_op, x.cpu(), scale, expected_slot, E4M3, (-1, -1), align)
            )
        assert_same(slot, expected_slot)


BLOCKS = [(1, -1), (1, 128), (128, 128), (1, 32), (1, 96), (5, -1), (-1, 1)]
each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda b: "x".join(map(str, b)))


@each_align
@each_layout
@each_block
def test_cast_with_given_block_scales_equals_the_reference(
    block: tuple[int, int], layout: Any, align: int
) -> None:
    x = layout(matrix((300, 520), torch.bfloat16))
    shape = tuple(reference.round_up(size, align) for size in x.shape)
    scale = torch.rand(scale_shape(shape, block)) + 0.1
    for scale_layout in (scale, scale.t().contiguous().t()):
        got = forms.encode(ops.cast_op, x, scale_layout.cuda(), None, E5M2, block, align)
        assert_same(got, forms.encode(ops.cast_op, x.cpu(), scale_layout, None, E5M2, block, align))


@each_dtype
@each_layout
@pytest.mark.parametrize("block", [*BLOCKS, (-1, -1)], ids=lambda b: "x".join(map(str, b)))
def test_dequantize_equals_the_reference(
    block: tuple[int, int], layout: Any, dtype: torch.dtype
) -> None:
    for fp8_dtype in FP8_DTYPES:
        q = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(300, 2)
        q = layout(q[:, :500]).view(fp8_dtype)
        scale = torch.randn(scale_shape(tuple(q.shape), block)).exp()
        got = ops.value_of_op("dequantize", (q, scale.cuda()), dtype, block)
        assert_same(got, reference.dequantize(q.cpu(), scale, block, dtype))


@each_align
@each_layout
@each_shape
def test_transpose_equals_the_reference(shape: tuple[int, int], layout: Any, align: int) -> None:
    q = layout(torch.randint(256, shape, dtype=torch.uint8, device="cuda"))
    for fp8_dtype in FP8_DTYPES:
        got = ops.transpose_op(q.view(fp8_dtype), align)
        want = reference.transpose(q.cpu().view(fp8_dtype), align)
        assert_same(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 128)], ids=["tensor", "row", "1x128"])
def test_a_matrix_of_more_than_2_to_the_31_elements_equals_the_reference(
    block: tuple[int, int],
) -> None:
    rows, columns = 41_088, 53_248  # 2.19e9 elements, 4 GiB of bfloat16; full blocks
    x = torch.randn((rows, columns), device="cuda", dtype=torch.bfloat16)
    x[-1, -1] = 100.0
    q, scale, q_t, scale_t, _ = forms.quantize_pair(
        ops.cast_op, x, E4M3, block, "fp32", 0.0, 16, False
    )
    q_only, scale_only, amax = forms.quantize(ops.cast_op, x, E4M3, block, "fp32", 0.0, 16)
    assert torch.equal(q.view(torch.uint8), q_only.view(torch.uint8))
    assert torch.equal(scale, scale_only)
    assert amax.max() == 100
    dequantized = ops.value_of_op(
        "dequantize", (q[-128:], scale if block[0] == -1 else scale[-128:]), x.dtype, block
    )
    for chunk in (slice(0, 128), slice(20_480, 20_608), slice(rows - 128, rows)):
        chunk_scale = scale if block[0] == -1 else scale[chunk]
        amax_of_chunk = (amax if block[0] == -1 else amax[chunk]).cpu()
        encode = reference.factors_from_amax(amax_of_chunk, E4M3, "fp32")[1]
        want = forms.encode(ops.cast_op, x[chunk].cpu(), encode, None, E4M3, block, 1)
        assert_same(q[chunk], want)
        if block == (-1, -1):
            assert_same(q_t[:, chunk].t().contiguous(), want)
        if block == (1, 128):
            want_t, want_scale_t, _ = reference.quantize(
                x[chunk].t().cpu(), E4M3, block, "fp32", 0.0, 1
            )
            assert_same(q_t[:, chunk].contiguous(), want_t)
            assert_same(
                scale_t[:, chunk.start // 128, None].contiguous(), want_scale_t.contiguous()
            )
    assert_same(
        dequantized, reference.dequantize(q[-128:].cpu(), chunk_scale.cpu(), block, x.dtype)
    )
    if block == (1, -1):
        columns_amax = x.abs().amax(0).float().cpu()
        want_scale_t, _ = reference.factors_from_amax(columns_amax, E4M3, "fp32")
        assert_same(scale_t[:, 0].contiguous(), want_scale_t)


GEMM_BLOCKS = {
    "tensor": ((-1, -1), (-1, -1)), "row": ((1, -1), (1, -1)), "row-tensor": ((1, -1), (-1, -1)),
    "tensor-row": ((-1, -1), (1, -1)), "rows5-tensor": ((5, -1), (-1, -1)),
    "1x128-1x128": ((1, 128), (1, 128)), "1x128-128x128": ((1, 128), (128, 128)),
    "128x128-1x128": ((128, 128), (1, 128)), "128x128-128x128": ((128, 128), (128, 128)),
    "mx": ((1, 32), (1, 32)),
}  # fmt: skip
GEMM_SHAPES = {
    "M128-N256-K512": (128, 256, 512),
    "M1-N64-K16": (1, 64, 16),
    "M37-N48-K144": (37, 48, 144),
    "M17-N96-K768": (17, 96, 768),
    "M3-N8224-K512": (3, 8224, 512),
    "M100-N33-K250": (100, 33, 250),
    "M256-N384-K1152": (256, 384, 1152),  # 9 blocks of K: not a multiple of 4
    "M0-N32-K64": (0, 32, 64),
    "M32-N0-K64": (32, 0, 64),
    "M32-N32-K0": (32, 32, 0),
}
GEMM_FORMATS = {"e4m3-e4m3": (E4M3, E4M3), "e5m2-e4m3": (E5M2, E4M3), "e5m2-e5m2": (E5M2, E5M2)}


@pytest.mark.parametrize("fast_accum", [False, True], ids=["", "fast"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("formats", GEMM_FORMATS.values(), ids=GEMM_FORMATS)
@pytest.mark.parametrize("blocks", GEMM_BLOCKS.values(), ids=GEMM_BLOCKS)
@pytest.mark.parametrize("shape", GEMM_SHAPES.values(), ids=GEMM_SHAPES)
def test_scaled_mm_is_near_float64(
    shape: tuple[int, int, int], blocks: tuple[tuple[int, int], tuple[int, int]],
    formats: tuple[torch.dtype, torch.dtype], with_bias: bool, fast_accum: bool,
) -> None:  # fmt: skip
    M, N, K = shape
    operands: list[Any] = []
    dequantized = []
    for rows, block, fp8_dtype in zip((M, N), blocks, formats, strict=True):
        x = torch.randn(rows, K, device="cuda")
        q, scale, _ = forms.quantize(ops.cast_op, x, fp8_dtype, block, "fp32", 0.0, 1)
        operands += [q, scale, block]
        dequantized.append(reference.dequantize(q.cpu(), scale.cpu(), block, torch.float64).cuda())
    left, right = dequantized
    bias = torch.randn(N, device="cuda") if with_bias else None
    exact = left @ right.t() + (0 if bias is None else bias.double())
    in_bf16 = left.bfloat16() @ right.bfloat16().t()
    if bias is not None:
        in_bf16 += bias.bfloat16()
    for out_dtype in HIGH_PRECISION_DTYPES:
        got = ops.scaled_mm_op(*operands, bias, out_dtype, fast_accum)
        assert (got.dtype, got.shape, got.is_contiguous()) == (out_dtype, (M, N), True)
        if not got.numel():
            continue
        rounding = exact.abs().max() * torch.finfo(out_dtype).eps / 2
        budget = 2 * ((in_bf16 - exact).abs().max() + rounding)
        assert (got - exact).abs().max() <= budget
        out = torch.zeros_like(got)
        ops.scaled_mm_into(out, *operands, bias, fast_accum)
        assert torch.equal(out, got)


OUR_SHAPES = [(16, 16, 16), (336, 208, 400), (640, 768, 1536), (3000, 4112, 272)]
"""Partial tiles, and more tiles than programs."""


@pytest.mark.parametrize("shape", OUR_SHAPES, ids=str)
@pytest.mark.parametrize("b_block", [(1, 128), (128, 128)], ids=["1x128", "128x128"])
def test_the_kernel_for_block_scaled_gemms_equals_cublas(
    b_block: tuple[int, int], shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our kernel serves CUDA versions whose cuBLASLt has no block-scaled GEMM.

    With 128x128 blocks every bit is equal. With 1x128 blocks the order differs in which a partial
    sum is multiplied by two scales.
    """
    if torch.cuda.get_device_capability()[0] != 9 or gemm._cuda_version() < (12, 9):
        pytest.skip("cuBLASLt has no such product here")
    M, N, K = shape
    operands: list[Any] = []
    magnitudes = []
    for rows, block in ((M, (1, 128)), (N, b_block)):
        x = torch.randn(rows, K, device="cuda")
        x *= torch.logspace(-1, 1, rows, device="cuda")[:, None]
        q, scale, _ = forms.quantize(ops.cast_op, x, E4M3, block, "fp32", 0.0, 1)
        operands += [q, scale, block]
        magnitudes.append(x.abs())
    magnitude = magnitudes[0] @ magnitudes[1].t()
    for out_dtype in HIGH_PRECISION_DTYPES:
        for bias in (None, torch.randn(N, device="cuda")):
            cublas_y = ops.scaled_mm_op(*operands, bias, out_dtype, False)
            with monkeypatch.context() as patch:
                patch.setattr(gemm, "_cuda_version", lambda: (12, 8))
                kernel_y = ops.scaled_mm_op(*operands, bias, out_dtype, False)
            if b_block == (128, 128):
                torch.testing.assert_close(kernel_y, cublas_y, rtol=0, atol=0)
            else:
                # One unit in the last place of the GEMM, and another of its sum with the bias.
                magnitude_of_y = cublas_y.float().abs() + (0 if bias is None else bias.abs())
                rounding = 2 * torch.finfo(out_dtype).eps * magnitude_of_y
                error = (kernel_y.float() - cublas_y.float()).abs()
                assert float((error - rounding - 2.0**-20 * magnitude).max()) <= 0


@pytest.mark.parametrize("blocks", GEMM_BLOCKS.values(), ids=GEMM_BLOCKS)
def test_scaled_mm_of_a_batch_equals_each_matrix(
    blocks: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    """Each matrix of the batch equals its ``scaled_mm``, whatever the strides."""
    for B, M, N, K in ((3, 37, 48, 144), (2, 128, 256, 512), (0, 4, 8, 16), (2, 3, 0, 16)):
        operands: list[Any] = []
        for rows, block in zip((M, N), blocks, strict=True):
            parts = [
                forms.quantize(
                    ops.cast_op, torch.randn(rows, K, device="cuda"), E4M3, block, "fp32", 0.0, 1
                )
                for _ in range(max(B, 1))
            ]
            q, scale = (torch.stack([part[i] for part in parts])[:B] for i in (0, 1))
            operands += [q, scale, block]
        a, a_scale, a_block, b, b_scale, b_block = operands
        by_column = b.view(torch.uint8).mT.contiguous().mT.view(E4M3)
        for out_dtype in HIGH_PRECISION_DTYPES:
            got = ops.scaled_mm_op(*operands, None, out_dtype, False)
            assert (got.dtype, got.shape) == (out_dtype, (B, M, N))
            by_column_y = ops.scaled_mm_op(
                a, a_scale, a_block, by_column, b_scale, b_block, None, out_dtype, False
            )
            torch.testing.assert_close(by_column_y, got, rtol=0, atol=0)
            for y, left, s, right, t in zip(got, a, a_scale, b, b_scale, strict=True):
                want = ops.scaled_mm_op(left, s, a_block, right, t, b_block, None, out_dtype, False)
                torch.testing.assert_close(y, want, rtol=0, atol=0)


def test_scaled_mm_of_views_equals_contiguous_operands() -> None:
    """Operands may be unaligned or strided slices, and scales those of a transposed matrix."""
    x = torch.randn(64, 257, device="cuda")
    w = torch.randn(48, 257, device="cuda")
    for block in ((-1, -1), (1, -1), (1, 128)):
        q, scale, _ = forms.quantize(ops.cast_op, x[:, 1:], E4M3, block, "fp32", 0.0, 1)
        v, v_scale, _ = forms.quantize(ops.cast_op, w[:, 1:], E4M3, block, "fp32", 0.0, 1)
        expected = ops.scaled_mm_op(q, scale, block, v, v_scale, block, None, torch.bfloat16, False)
        unaligned = torch.zeros(64 * 256 + 1, dtype=torch.uint8, device="cuda")[1:].view(E4M3)
        unaligned = unaligned.view(64, 256)
        unaligned.copy_(q)
        strided = torch.zeros(48, 300, dtype=torch.uint8, device="cuda").view(E4M3)[:, 7:263]
        strided.copy_(v)
        strided_scale = scale.repeat(1, 2)[:, scale.shape[1] :]
        got = ops.scaled_mm_op(
            unaligned, strided_scale, block, strided, v_scale, block, None, torch.bfloat16, False
        )
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("a_block", "b_block"), [pair for name, pair in GEMM_BLOCKS.items() if "mx" not in name]
)
def test_may_multiply_knows_the_gemms_of_hopper(
    a_block: tuple[int, int], b_block: tuple[int, int]
) -> None:
    device = torch.device("cuda")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the table is Hopper's")
    assert may_multiply(a_block, b_block, device)
    assert may_multiply(a_block, b_block, device, a_dtype=E5M2)
    assert not may_multiply(a_block, b_block, device, a_dtype=E5M2, b_dtype=E5M2)


@pytest.mark.parametrize("power_of_2", [False, True], ids=["", "pow2"])
@pytest.mark.parametrize("most_recent", [False, True], ids=["max", "newest"])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("margin", [0, 2, -1])
@pytest.mark.parametrize("length", [1, 2, 16, 1000, 4096])
def test_update_scales_equals_the_reference(
    length: int, margin: int, interval: int, most_recent: bool, power_of_2: bool
) -> None:
    amax = torch.cat((torch.tensor([ops.NO_DATA, 0.0, torch.inf, torch.nan, 1e-40]), torch.rand(9)))
    slots = amax.numel()
    state = [
        torch.rand(length, slots) * 3, amax, torch.rand(2, slots),
        torch.arange(slots, dtype=torch.int32), torch.tensor([448.0, 57344.0] * slots)[:slots],
    ]  # fmt: skip
    on_gpu = [tensor.cuda() for tensor in state]
    for _ in range(3):
        got = ops.update_scales_op(*on_gpu, margin, interval, most_recent, power_of_2)
        want = reference.update_scales_(*state, margin, interval, most_recent, power_of_2)
        assert_all_same([*on_gpu, got], [*state, want])
        state[1].uniform_()
        on_gpu[1].copy_(state[1])


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 128)], ids=["tensor", "row", "1x128"])
@pytest.mark.parametrize(
    "sizes", [[300, 0, 1500, 130, 1400, 7], [256] * 6], ids=["jagged", "balanced"]
)
def test_contractions_of_groups_equal_separate_gemms(
    sizes: list[int], block: tuple[int, int]
) -> None:
    """All multiprocessors have more than four rounds of tiles, the largest group's first."""
    columns = (2048 + 16, 1536)
    x, dy = (torch.randn(sum(sizes), n, device="cuda").bfloat16() for n in columns)
    x *= torch.arange(1, len(x) + 1, device="cuda")[:, None]  # each group has another magnitude

    def multiply(x: Tensor, dy: Tensor, sizes: list[int]) -> Tensor:
        offs = torch.tensor(sizes, device="cuda").cumsum(0).int()
        options = (offs, E4M3, block, "fp32", 0.0, False, True, False)
        casts = [cast_groups(ops.cast_op, "", [t], t.dtype, *options)[3:5] for t in (x, dy)]
        return grouped_mm(
            ops.scaled_mm_op, *casts[0], block, *casts[1], block, None, offs, torch.float32, False
        )

    product = multiply(x, dy, sizes)
    for group, (x_group, dy_group) in enumerate(zip(x.split(sizes), dy.split(sizes), strict=True)):
        assert torch.equal(product[group], multiply(x_group, dy_group, [len(x_group)])[0]), group


JAGGED = [300, 0, 1500, 130, 0, 0, 1400, 7, 1, 2600, 0]
"""The rows of groups; with 2064 columns they have more tiles than programs compute amaxes."""


@pytest.mark.parametrize("kind", ["", "swiglu", "swiglu_backward", "permute"])
def test_each_group_of_rows_has_a_separate_scale(kind: str) -> None:
    """With a scale for each group, the bytes equal those of separate casts; padding rows follow."""
    M, K, E = sum(JAGGED) + 200, 2064, len(JAGGED)
    offs = torch.tensor(JAGGED, device="cuda").cumsum(0).int()
    magnitude = 10.0 ** torch.randint(-4, 4, (M, 1), device="cuda")
    x = (torch.randn(M, 2 * K if "swiglu" in kind else K, device="cuda") * magnitude).bfloat16()
    inputs = [x]
    if kind == "swiglu_backward":
        inputs.append(torch.randn(M, K, device="cuda").bfloat16())
    if kind == "permute":
        inputs.append(torch.randperm(M, device="cuda").int())
        value = x[inputs[1].long()]
    else:
        value = ops.value_of_op(kind, inputs, x.dtype) if kind else x
    if not kind:
        x[sum(JAGGED) :] = torch.nan
    for rule, plan in (("fp32", None), ("pow2", ops.plan_groups_op(offs, M))):
        options = (x.dtype, offs, E4M3, (-1, -1), rule, 0.0)
        got = cast_groups(ops.cast_op, kind, inputs, *options, True, True, False, None, None, plan)
        want = cast_groups(
            ops.cast_op, "", [value.cpu()], x.dtype, offs.cpu(), *options[2:], True, True, False
        )
        used = sum(-(-rows // 128) * 128 for rows in JAGGED)
        assert_all_same(
            [*got[:3], got[3][:, :used], got[4]], [*want[:3], want[3][:, :used], want[4]]
        )
        (amax,) = [
            t
            for t in cast_groups(ops.cast_op, kind, inputs, *options, False, False)
            if t is not None
        ]
        assert_all_same([amax], [want[2]])
    factors = torch.rand(E, 8, device="cuda")[:, 0]
    slots = [torch.full((E,), ops.NO_DATA, device=device) for device in ("cuda", "cpu")]
    options = (E5M2, (-1, -1), "encode", 0.0, True, True, False)
    got = cast_groups(ops.cast_op, kind, inputs, x.dtype, offs, *options, factors, slots[0])
    want = cast_groups(
        ops.cast_op, "", [value.cpu()], x.dtype, offs.cpu(), *options, factors.cpu(), slots[1]
    )
    assert_all_same([got[0], got[3][:, :used], slots[0]], [want[0], want[3][:, :used], slots[1]])


def test_gemms_of_groups_equal_separate_gemms() -> None:
    """With per-tensor scales, each group's GEMM does not depend on the other groups."""
    M, E, block = sum(JAGGED) + 200, len(JAGGED), (-1, -1)
    offs = torch.tensor(JAGGED, device="cuda").cumsum(0).int()
    x = (
        torch.randn(M, 512, device="cuda").bfloat16()
        * torch.arange(1, M + 1, device="cuda")[:, None]
    )
    w, bias = torch.randn(E, 384, 512, device="cuda").bfloat16(), torch.randn(E, 384, device="cuda")

    def multiply(x: Tensor, w: Tensor, bias: Tensor, offs: Tensor, *, fast: bool) -> Tensor:
        left = cast_groups(ops.cast_op, "", [x], x.dtype, offs, E4M3, block, "fp32")[:2]
        right = cast_groups(ops.cast_op, "", [w], w.dtype, None, E4M3, block, "fp32")[:2]
        return grouped_mm(ops.scaled_mm_op, *left, block, *right, block, bias, offs, x.dtype, fast)

    for fast in (False, True):
        y = multiply(x, w, bias, offs, fast=fast)
        assert not y[sum(JAGGED) :].any()
        for group, part in enumerate(y[: sum(JAGGED)].split(JAGGED)):
            end = sum(JAGGED[: group + 1])
            rows = x[end - len(part) : end]
            ends = torch.tensor([len(part)], device="cuda", dtype=torch.int32)
            expected = multiply(
                rows, w[group : group + 1], bias[group : group + 1], ends, fast=fast
            )
            assert torch.equal(part, expected), group
