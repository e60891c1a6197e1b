"""Quantizing many matrices at once on a GPU: the bits of separate casts, and few launches."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from float8lab import ops
from float8lab.formats import E4M3, E5M2, FP8_DTYPES, HIGH_PRECISION_DTYPES, scale_shape
from float8lab.ops.kernels import cast_many as many
from tests.ops import forms
from tests.ops.test_kernels_gpu import each_dtype, each_fp8_dtype, matrix
from tests.recorder import launched

pytestmark = pytest.mark.gpu

SHAPES = [
    (63, 1500), (128, 128), (0, 64), (272, 1040), (33, 0), (1, 1), (1030, 131), (9, 1), (5, 9001),
    (3, 16384), (256, 512),
]  # fmt: skip
RECIPES = {
    "tensor": ((-1, -1), "fp32", 0.0), "tensor-pow2-eps": ((-1, -1), "pow2", 0.1),
    "row": ((1, -1), "fp32", 0.0), "row-pow2": ((1, -1), "pow2", 1e-12),
    "1x128": ((1, 128), "fp32", 0.0), "1x128-pow2": ((1, 128), "pow2", 0.0),
    "128x128": ((128, 128), "fp32", 0.0), "mx": ((1, 32), "e8m0", 0.0),
    "16x64": ((16, 64), "fp32", 0.0), "fallback-1x96": ((1, 96), "fp32", 0.0),
    "fallback-column": ((-1, 1), "fp32", 0.0),
}  # fmt: skip
FUSED = {name: recipe for name, recipe in RECIPES.items() if "fallback" not in name}

each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
each_fused = pytest.mark.parametrize("recipe", FUSED.values(), ids=FUSED)

Recipe = tuple[tuple[int, int], str, float]
Stored = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def _no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "_RECENT", type(many._RECENT)())
    monkeypatch.setattr(many, "_OF_GRAPHS", {})


def quantize_separately(
    xs: Sequence[Tensor], fp8_dtype: torch.dtype, recipe: Recipe
) -> list[Stored]:
    return [forms.quantize(ops.cast_op, x, fp8_dtype, *recipe, 1) for x in xs]


def blank(templates: Sequence[Stored]) -> list[Stored]:
    """Tensors of the same strides that hold other values."""
    return [
        tuple(torch.empty_like(t).copy_(torch.full(t.shape, 0.0625)) for t in tensors)
        for tensors in templates
    ]


def quantize_many_(xs: Sequence[Tensor], stored: Sequence[Stored], recipe: Recipe) -> None:
    q, scale, amax = map(list, zip(*stored, strict=True))
    ops.cast_many_op(list(xs), q, *recipe, scale, amax, [])


def assert_all_same(got: Sequence[Stored], want: Sequence[Stored]) -> None:
    for (q, *factors), (expected_q, *expected_factors) in zip(got, want, strict=True):
        assert torch.equal(q.view(torch.uint8), expected_q.view(torch.uint8))
        for actual, expected in zip(factors, expected_factors, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@each_recipe
@each_fp8_dtype
@each_dtype
def test_each_matrix_has_the_bits_of_a_separate_cast(
    dtype: torch.dtype, fp8_dtype: torch.dtype, recipe: Recipe
) -> None:
    xs = [matrix(shape, dtype) for shape in SHAPES]
    xs += [matrix((130, 96), dtype).t(), matrix((70, 256), dtype)[:, 48:176]]
    want = quantize_separately(xs, fp8_dtype, recipe)
    got = blank(want)
    for _ in range(2):  # a new table, and the one that is kept
        quantize_many_(xs, got, recipe)
        assert_all_same(got, want)
        for x in xs:
            x.mul_(-1.7)
        want = quantize_separately(xs, fp8_dtype, recipe)


@each_fused
def test_outputs_may_have_other_layouts_and_alignments(recipe: Recipe) -> None:
    """FP8 data unaligned within a larger buffer, and scales in row order, not in column order."""
    xs = [matrix(shape, torch.float32) for shape in ((64, 256), (48, 272), (130, 144), (64, 256))]
    want = quantize_separately(xs, E4M3, recipe)
    got = blank(want)
    pool = torch.full((64 * 256 + 33,), 0.25, device="cuda").to(E4M3)
    got[0] = (pool[3 : 3 + 64 * 256].view(64, 256), *got[0][1:])
    got[1] = (got[1][0], *(t.contiguous() for t in got[1][1:]))
    got[2] = (got[2][0].t().contiguous().t(), *got[2][1:])
    got[3] = (*got[3][:2], got[3][2].contiguous())
    quantize_many_(xs, got, recipe)
    assert_all_same(got, want)
    assert bool((pool[:3].float() == 0.25).all() and (pool[3 + 64 * 256 :].float() == 0.25).all())


@each_fused
def test_special_values_have_the_bits_of_separate_casts(recipe: Recipe) -> None:
    values = [
        [0.0, -0.0, 0.0, 0.0], [torch.inf, -torch.inf, 1.0, 500.0],
        [torch.nan, -torch.nan, 1.0, 0.0], [2.0**-149, -(2.0**-140), 0.0, 2.0**-127],
        [3.4028234663852886e38, -3.4e38, 1e38, 1.0], [448.0, 464.0, 463.9, -479.0],
        [57344.0, 61440.0, -61439.0, 65504.0],
    ]  # fmt: skip
    xs = [torch.tensor(row, device="cuda").repeat(3, 40) for row in values]
    for fp8_dtype in FP8_DTYPES:
        want = quantize_separately(xs, fp8_dtype, recipe)
        got = blank(want)
        quantize_many_(xs, got, recipe)
        assert_all_same(got, want)


@each_fused
def test_700_matrices_have_the_bits_of_separate_casts(recipe: Recipe) -> None:
    xs = [matrix((1 + i % 70, 16 + 16 * (i % 37)), torch.bfloat16) for i in range(700)]
    want = quantize_separately(xs, E5M2, recipe)
    got = blank(want)
    quantize_many_(xs, got, recipe)
    assert_all_same(got, want)


def test_matrices_of_several_dtypes_have_the_bits_of_separate_casts() -> None:
    xs = [matrix((64, 128), dtype) for dtype in HIGH_PRECISION_DTYPES]
    for recipe in FUSED.values():
        want = [*quantize_separately(xs, E4M3, recipe), *quantize_separately(xs, E5M2, recipe)]
        got = blank(want)
        quantize_many_(xs * 2, got, recipe)
        assert_all_same(got, want)


@pytest.mark.filterwarnings("ignore")  # warnings of the profiler, which differ between versions
@each_fused
def test_number_of_launches_is_independent_of_the_number_of_matrices(recipe: Recipe) -> None:
    counts = []
    for count in (2, 300):
        xs = [matrix((40, 64 + 16 * (i % 5)), torch.float32) for i in range(count)]
        stored = blank(quantize_separately(xs, E4M3, recipe))
        quantize_many_(xs, stored, recipe)
        counts.append(launched(lambda xs=xs, stored=stored: quantize_many_(xs, stored, recipe)))
    few_launches, many_launches = counts
    assert few_launches == many_launches
    our_kernels = [name for name in few_launches if name.endswith("_kernel")]
    # Per-tensor recipes have one launch for amaxes and one for casts.
    assert len(our_kernels) == (2 if recipe[0] == (-1, -1) else 1)
    # Two more launches may set zeros, or come from the profiler.
    assert len(few_launches) <= len(our_kernels) + 2


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@each_fused
def test_a_cuda_graph_replays_the_casts(recipe: Recipe, warm: bool) -> None:
    xs = [matrix(shape, torch.float32) for shape in SHAPES]
    want = quantize_separately(xs, E4M3, recipe)  # also compiles the kernels of the fallback
    got, warmup_outputs = blank(want), blank(want)
    quantize_many_(xs, warmup_outputs, recipe)  # compiles and loads the kernels
    if warm:
        quantize_many_(xs, got, recipe)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize_many_(xs, got, recipe)
    assert bool(many._OF_GRAPHS) == warm
    for replay in range(3):
        for x in xs:
            x.normal_()
        want = quantize_separately(xs, E4M3, recipe)
        graph.replay()
        assert_all_same(got, want)
        if replay == 0:  # the graph's tables stay, even if other tables follow
            for _ in range(many._MOST_TABLES + 1):
                y = [matrix((17, 64), torch.float32)]
                quantize_many_(y, blank(quantize_separately(y, E4M3, recipe)), recipe)
            torch.cuda.empty_cache()


@each_fused
def test_tables_serve_several_streams(recipe: Recipe) -> None:
    xs = [matrix(shape, torch.float32) for shape in SHAPES]
    want = quantize_separately(xs, E4M3, recipe)
    got = blank(want)
    for stream in (torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()):
        for tensors in got:
            tensors[0].view(torch.uint8).zero_()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            quantize_many_(xs, got, recipe)
        torch.cuda.current_stream().wait_stream(stream)
        assert_all_same(got, want)


CAST_BLOCKS = [(-1, -1), (1, -1), (1, 128), (128, 128), (4, 128), (5, -1)]


@pytest.mark.parametrize("block", CAST_BLOCKS, ids=lambda b: "x".join(map(str, b)))
@each_fp8_dtype
@each_dtype
def test_casts_with_given_factors_have_the_bits_of_separate_casts(
    dtype: torch.dtype, fp8_dtype: torch.dtype, block: tuple[int, int]
) -> None:
    xs = [matrix(shape, dtype) for shape in SHAPES] + [matrix((130, 96), dtype).t()]
    encodes = [torch.rand(scale_shape(tuple(x.shape), block), device="cuda") + 0.1 for x in xs]
    encodes[3] = encodes[3].t().contiguous().t()
    want = [
        (forms.encode(ops.cast_op, x, encode, None, fp8_dtype, block, 1),)
        for x, encode in zip(xs, encodes, strict=True)
    ]
    got = blank(want)
    ops.cast_many_op(xs, [q for (q,) in got], block, "encode", 0.0, [], [], encodes)
    assert_all_same(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 128)], ids=["tensor", "row", "1x128"])
def test_a_matrix_of_more_than_2_to_the_31_elements_has_the_bits_of_a_separate_cast(
    block: tuple[int, int],
) -> None:
    recipe = (block, "fp32", 0.0)
    large = torch.randn((41_088, 53_248), device="cuda", dtype=torch.bfloat16)
    large[-1, -1] = 100.0
    xs = [matrix((40, 64), torch.bfloat16), large, matrix((33, 272), torch.bfloat16)]
    want = quantize_separately(xs, E4M3, recipe)
    got = [tuple(torch.zeros_like(t) for t in tensors) for tensors in want]
    quantize_many_(xs, got, recipe)
    assert_all_same(got, want)


@pytest.mark.multi_gpu
def test_matrices_on_a_gpu_that_is_not_current() -> None:
    for recipe in FUSED.values():
        xs = [matrix((40, 64), torch.float32), matrix((9, 33), torch.float32)]
        want = quantize_separately(xs, E4M3, recipe)
        other_gpu_outputs = [tuple(t.to("cuda:1") for t in tensors) for tensors in blank(want)]
        quantize_many_([x.to("cuda:1") for x in xs], other_gpu_outputs, recipe)
        assert_all_same(
            [tuple(t.to("cuda:0") for t in tensors) for tensors in other_gpu_outputs], want
        )
