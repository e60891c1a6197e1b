"""Quantizing many matrices at once on the GPU: the bits of each alone, and few launches."""

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


def alone(xs: Sequence[Tensor], fp8_dtype: torch.dtype, recipe: Recipe) -> list[Stored]:
    return [forms.quantize(ops.cast_op, x, fp8_dtype, *recipe, 1) for x in xs]


def blank(like: Sequence[Stored]) -> list[Stored]:
    """Tensors of the same strides that hold something else."""
    return [
        tuple(torch.empty_like(t).copy_(torch.full(t.shape, 0.0625)) for t in tensors)
        for tensors in like
    ]


def quantize_many_(xs: Sequence[Tensor], stored: Sequence[Stored], recipe: Recipe) -> None:
    q, scale, amax = map(list, zip(*stored, strict=True))
    ops.cast_many_op(list(xs), q, *recipe, scale, amax, [])


def all_same(got: Sequence[Stored], want: Sequence[Stored]) -> None:
    for (q, *factors), (q_wanted, *factors_wanted) in zip(got, want, strict=True):
        assert torch.equal(q.view(torch.uint8), q_wanted.view(torch.uint8))
        for one, other in zip(factors, factors_wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@each_recipe
@each_fp8_dtype
@each_dtype
def test_each_matrix_as_alone(dtype: torch.dtype, fp8_dtype: torch.dtype, recipe: Recipe) -> None:
    xs = [matrix(shape, dtype) for shape in SHAPES]
    xs += [matrix((130, 96), dtype).t(), matrix((70, 256), dtype)[:, 48:176]]
    want = alone(xs, fp8_dtype, recipe)
    got = blank(want)
    for _ in range(2):  # a new table, and the one that is kept
        quantize_many_(xs, got, recipe)
        all_same(got, want)
        for x in xs:
            x.mul_(-1.7)
        want = alone(xs, fp8_dtype, recipe)


@each_fused
def test_targets_of_other_layouts(recipe: Recipe) -> None:
    """Data between other data, off the alignment; scales by row where they were by column."""
    xs = [matrix(shape, torch.float32) for shape in ((64, 256), (48, 272), (130, 144), (64, 256))]
    want = alone(xs, E4M3, recipe)
    got = blank(want)
    pool = torch.full((64 * 256 + 33,), 0.25, device="cuda").to(E4M3)
    got[0] = (pool[3 : 3 + 64 * 256].view(64, 256), *got[0][1:])
    got[1] = (got[1][0], *(t.contiguous() for t in got[1][1:]))
    got[2] = (got[2][0].t().contiguous().t(), *got[2][1:])
    got[3] = (*got[3][:2], got[3][2].contiguous())
    quantize_many_(xs, got, recipe)
    all_same(got, want)
    assert bool((pool[:3].float() == 0.25).all() and (pool[3 + 64 * 256 :].float() == 0.25).all())


@each_fused
def test_special_values(recipe: Recipe) -> None:
    values = [
        [0.0, -0.0, 0.0, 0.0], [torch.inf, -torch.inf, 1.0, 500.0],
        [torch.nan, -torch.nan, 1.0, 0.0], [2.0**-149, -(2.0**-140), 0.0, 2.0**-127],
        [3.4028234663852886e38, -3.4e38, 1e38, 1.0], [448.0, 464.0, 463.9, -479.0],
        [57344.0, 61440.0, -61439.0, 65504.0],
    ]  # fmt: skip
    xs = [torch.tensor(row, device="cuda").repeat(3, 40) for row in values]
    for fp8_dtype in FP8_DTYPES:
        want = alone(xs, fp8_dtype, recipe)
        got = blank(want)
        quantize_many_(xs, got, recipe)
        all_same(got, want)


@each_fused
def test_many_matrices(recipe: Recipe) -> None:
    xs = [matrix((1 + i % 70, 16 + 16 * (i % 37)), torch.bfloat16) for i in range(700)]
    want = alone(xs, E5M2, recipe)
    got = blank(want)
    quantize_many_(xs, got, recipe)
    all_same(got, want)


def test_matrices_of_several_dtypes() -> None:
    xs = [matrix((64, 128), dtype) for dtype in HIGH_PRECISION_DTYPES]
    for recipe in FUSED.values():
        want = [*alone(xs, E4M3, recipe), *alone(xs, E5M2, recipe)]
        got = blank(want)
        quantize_many_(xs * 2, got, recipe)
        all_same(got, want)


@pytest.mark.filterwarnings("ignore")  # the profiler's own, which differ between versions
@each_fused
def test_launches_do_not_grow_with_the_number_of_matrices(recipe: Recipe) -> None:
    counts = []
    for number in (2, 300):
        xs = [matrix((40, 64 + 16 * (i % 5)), torch.float32) for i in range(number)]
        stored = blank(alone(xs, E4M3, recipe))
        quantize_many_(xs, stored, recipe)
        counts.append(launched(lambda xs=xs, stored=stored: quantize_many_(xs, stored, recipe)))
    few, many_more = counts
    assert few == many_more
    ours = [name for name in few if name.endswith("_kernel")]
    assert len(ours) == (2 if recipe[0] == (-1, -1) else 1)  # per tensor: the amaxes, the casts
    assert len(few) <= len(ours) + 2  # and their zeros, with what a profile may add to those


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@each_fused
def test_in_a_cuda_graph(recipe: Recipe, warm: bool) -> None:
    xs = [matrix(shape, torch.float32) for shape in SHAPES]
    want = alone(xs, E4M3, recipe)  # also compiles and loads what the fallback needs
    got, other = blank(want), blank(want)
    quantize_many_(xs, other, recipe)  # compiles and loads the kernels
    if warm:
        quantize_many_(xs, got, recipe)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize_many_(xs, got, recipe)
    assert bool(many._OF_GRAPHS) == warm
    for turn in range(3):
        for x in xs:
            x.normal_()
        want = alone(xs, E4M3, recipe)
        graph.replay()
        all_same(got, want)
        if turn == 0:  # the graph's tables stay, whatever comes after them
            for _ in range(many._MOST_TABLES + 1):
                y = [matrix((17, 64), torch.float32)]
                quantize_many_(y, blank(alone(y, E4M3, recipe)), recipe)
            torch.cuda.empty_cache()


@each_fused
def test_tables_on_several_streams(recipe: Recipe) -> None:
    xs = [matrix(shape, torch.float32) for shape in SHAPES]
    want = alone(xs, E4M3, recipe)
    got = blank(want)
    for stream in (torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()):
        for tensors in got:
            tensors[0].view(torch.uint8).zero_()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            quantize_many_(xs, got, recipe)
        torch.cuda.current_stream().wait_stream(stream)
        all_same(got, want)


CAST_BLOCKS = [(-1, -1), (1, -1), (1, 128), (128, 128), (4, 128), (5, -1)]


@pytest.mark.parametrize("block", CAST_BLOCKS, ids=lambda b: "x".join(map(str, b)))
@each_fp8_dtype
@each_dtype
def test_cast(dtype: torch.dtype, fp8_dtype: torch.dtype, block: tuple[int, int]) -> None:
    xs = [matrix(shape, dtype) for shape in SHAPES] + [matrix((130, 96), dtype).t()]
    encodes = [torch.rand(scale_shape(tuple(x.shape), block), device="cuda") + 0.1 for x in xs]
    encodes[3] = encodes[3].t().contiguous().t()
    want = [
        (forms.encode(ops.cast_op, x, encode, None, fp8_dtype, block, 1),)
        for x, encode in zip(xs, encodes, strict=True)
    ]
    got = blank(want)
    ops.cast_many_op(xs, [q for (q,) in got], block, "encode", 0.0, [], [], encodes)
    all_same(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 128)], ids=["tensor", "row", "1x128"])
def test_more_than_2_to_the_31_elements(block: tuple[int, int]) -> None:
    recipe = (block, "fp32", 0.0)
    large = torch.randn((41_088, 53_248), device="cuda", dtype=torch.bfloat16)
    large[-1, -1] = 100.0
    xs = [matrix((40, 64), torch.bfloat16), large, matrix((33, 272), torch.bfloat16)]
    want = alone(xs, E4M3, recipe)
    got = [tuple(torch.zeros_like(t) for t in tensors) for tensors in want]
    quantize_many_(xs, got, recipe)
    all_same(got, want)


@pytest.mark.multi_gpu
def test_on_a_gpu_that_is_not_current() -> None:
    for recipe in FUSED.values():
        xs = [matrix((40, 64), torch.float32), matrix((9, 33), torch.float32)]
        want = alone(xs, E4M3, recipe)
        there = [tuple(t.to("cuda:1") for t in tensors) for tensors in blank(want)]
        quantize_many_([x.to("cuda:1") for x in xs], there, recipe)
        all_same([tuple(t.to("cuda:0") for t in tensors) for tensors in there], want)
