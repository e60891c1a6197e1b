"""GEMMs whose kernel is chosen once, on the GPU: the bytes of torch's, which asks each time."""

import threading

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from float8lab import ops
from float8lab.formats import E4M3, E5M2
from float8lab.ops.kernels import _launch, cublaslt
from tests.ops import forms

pytestmark = pytest.mark.gpu

BY_TENSOR, BY_ROW, BY_ROW_OF_128, BY_BLOCK = (-1, -1), (1, -1), (1, 128), (128, 128)


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The launches of chosen kernels."""
    noted: list[object] = []
    launch = cublaslt._ChosenGemm.launch

    def noting(self, *args) -> None:
        noted.append(self)
        launch(self, *args)

    monkeypatch.setattr(cublaslt._ChosenGemm, "launch", noting)
    monkeypatch.setattr(_launch, "ENABLED", True)
    return noted


def operand(rows: int, columns: int, dtype=E4M3, block=BY_TENSOR, seed=0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, device="cuda", generator=generator, dtype=torch.bfloat16)
    q, scale, *_ = forms.quantize(ops.cast_op, x, dtype, block, "fp32", 0.0, 16)
    return q, scale


def call(a, b, bias=None, dtype=torch.bfloat16, fast=True, blocks=(BY_TENSOR, BY_TENSOR)) -> Tensor:
    return ops.scaled_mm_op(*a, blocks[0], *b, blocks[1], bias, dtype, fast)


def expected(monkeypatch, *args, **kwargs) -> Tensor:
    """What torch gives."""
    with monkeypatch.context() as patch:
        patch.setattr(_launch, "ENABLED", False)
        patch.setattr(cublaslt, "multiply", lambda *args, **kwargs: False)
        return call(*args, **kwargs)


SHAPES = [(16, 16, 16), (32, 128, 128), (100, 272, 512), (1024, 512, 512), (1024, 512, 16384),
          (4096, 1536, 512), (8192, 4096, 4096), (64, 4096, 14336)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bytes_of_one_scale(shape, dtypes, dtype, launches, monkeypatch):
    m, n, k = shape
    biases = [None] if dtype == torch.float32 else [None, torch.randn(n, device="cuda").to(dtype)]
    for bias in biases:
        for fast in (True, False):
            launches.clear()
            for seed in range(3):
                a, b = operand(m, k, dtypes[0], seed=seed), operand(n, k, dtypes[1], seed=9)
                y = call(a, b, bias, dtype, fast)
                assert torch.equal(y, expected(monkeypatch, a, b, bias, dtype, fast))
            assert len(launches) == 3, "two of which were no repetitions"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
def test_bytes_of_a_scale_for_each_row(shape, dtypes, launches, monkeypatch):
    m, n, k = shape
    for bias in (None, torch.randn(n, device="cuda", dtype=torch.bfloat16)):
        for fast in (True, False):
            launches.clear()
            for seed in range(3):
                a = operand(m, k, dtypes[0], BY_ROW, seed=seed)
                b = operand(n, k, dtypes[1], BY_ROW, seed=9)
                given = a, b, bias, torch.bfloat16, fast, (BY_ROW, BY_ROW)
                assert torch.equal(call(*given), expected(monkeypatch, *given))
            assert len(launches) == 3, "two of which were no repetitions"


@pytest.mark.parametrize("shape", [s for s in SHAPES if not any(n % 128 for n in s)], ids=str)
@pytest.mark.parametrize(
    "blocks", [(BY_ROW_OF_128, BY_BLOCK), (BY_ROW_OF_128,) * 2, (BY_BLOCK, BY_ROW_OF_128)]
)
def test_bytes_of_blocks(shape, blocks, launches, monkeypatch):
    m, n, k = shape
    for dtype in (torch.bfloat16, torch.float32):
        launches.clear()
        for seed in range(3):
            a, b = operand(m, k, block=blocks[0], seed=seed), operand(n, k, block=blocks[1], seed=9)
            y = call(a, b, None, dtype, blocks=blocks)
            assert torch.equal(y, expected(monkeypatch, a, b, None, dtype, blocks=blocks))
        assert len(launches) == 3, "two of which were no repetitions"


def test_threads_launch_with_their_own_scales(launches, monkeypatch):
    a, b = operand(256, 512), operand(128, 512, seed=1)
    scales = [torch.full((1,), 2.0**i, device="cuda") for i in range(4)]
    right = [expected(monkeypatch, (a[0], scale), b) for scale in scales]
    call((a[0], scales[0]), b)  # threads that come first at the same time would choose twice
    torch.cuda.synchronize()
    wrong: list[int] = []

    def multiply(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            ys = [call((a[0], scales[i]), b) for _ in range(200)]
            torch.cuda.current_stream().synchronize()
        wrong.extend(i for y in ys if not torch.equal(y, right[i]))

    threads = [threading.Thread(target=multiply, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(launches) == 801
    assert len({*map(id, launches)}) == 1
    assert not wrong


def test_a_cuda_graph_captures_it(launches, monkeypatch):
    a, b = operand(288, 512), operand(128, 512, seed=1)
    for _ in range(3):
        call(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(a, b)
    assert len(launches) == 4
    a[1].mul_(2)
    graph.replay()
    assert torch.equal(y, expected(monkeypatch, a, b))


def test_padded_sizes_are_repeated_with_it(launches):
    a, b = operand(30, 144), operand(50, 144, seed=1)
    ys = [call(a, b) for _ in range(4)]
    assert all(torch.equal(y, ys[0]) for y in ys)
    assert len(launches) == 4
