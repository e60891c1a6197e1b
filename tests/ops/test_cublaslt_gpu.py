"""GEMMs with a kernel chosen once have, on a GPU, the bytes of torch's, which chooses each time."""

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

TENSORWISE, ROWWISE, BLOCKWISE_1X128, BLOCKWISE_128X128 = (-1, -1), (1, -1), (1, 128), (128, 128)


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The launches of kernels that were chosen once."""
    recorded: list[object] = []
    original_launch = cublaslt._ChosenGemm.launch

    def recording_launch(self, *args) -> None:
        recorded.append(self)
        original_launch(self, *args)

    monkeypatch.setattr(cublaslt._ChosenGemm, "launch", recording_launch)
    monkeypatch.setattr(_launch, "ENABLED", True)
    return recorded


def operand(rows: int, columns: int, dtype=E4M3, block=TENSORWISE, seed=0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, device="cuda", generator=generator, dtype=torch.bfloat16)
    q, scale, *_ = forms.quantize(ops.cast_op, x, dtype, block, "fp32", 0.0, 16)
    return q, scale


def call(
    a, b, bias=None, dtype=torch.bfloat16, fast=True, blocks=(TENSORWISE, TENSORWISE)
) -> Tensor:
    return ops.scaled_mm_op(*a, blocks[0], *b, blocks[1], bias, dtype, fast)


def torch_result(monkeypatch, *args, **kwargs) -> Tensor:
    """The result of torch's GEMM."""
    with monkeypatch.context() as patch:
        patch.setattr(_launch, "ENABLED", False)
        patch.setattr(cublaslt, "multiply", lambda *args, **kwargs: False)
        return call(*args, **kwargs)


SHAPES = [(16, 16, 16), (32, 128, 128), (100, 272, 512), (1024, 512, 512), (1024, 512, 16384),
          (4096, 1536, 512), (8192, 4096, 4096), (64, 4096, 14336)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gemms_with_one_scale_have_the_bytes_of_torch(shape, dtypes, dtype, launches, monkeypatch):
    m, n, k = shape
    biases = [None] if dtype == torch.float32 else [None, torch.randn(n, device="cuda").to(dtype)]
    for bias in biases:
        for fast in (True, False):
            launches.clear()
            for seed in range(3):
                a, b = operand(m, k, dtypes[0], seed=seed), operand(n, k, dtypes[1], seed=9)
                y = call(a, b, bias, dtype, fast)
                assert torch.equal(y, torch_result(monkeypatch, a, b, bias, dtype, fast))
            assert len(launches) == 3, "two of which were no repetitions"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
def test_gemms_with_a_scale_for_each_row_have_the_bytes_of_torch(
    shape, dtypes, launches, monkeypatch
):
    m, n, k = shape
    for bias in (None, torch.randn(n, device="cuda", dtype=torch.bfloat16)):
        for fast in (True, False):
            launches.clear()
            for seed in range(3):
                a = operand(m, k, dtypes[0], ROWWISE, seed=seed)
                b = operand(n, k, dtypes[1], ROWWISE, seed=9)
                arguments = a, b, bias, torch.bfloat16, fast, (ROWWISE, ROWWISE)
                assert torch.equal(call(*arguments), torch_result(monkeypatch, *arguments))
            assert len(launches) == 3, "two of which were no repetitions"


@pytest.mark.parametrize("shape", [s for s in SHAPES if not any(n % 128 for n in s)], ids=str)
@pytest.mark.parametrize(
    "blocks",
    [
        (BLOCKWISE_1X128, BLOCKWISE_128X128),
        (BLOCKWISE_1X128,) * 2,
        (BLOCKWISE_128X128, BLOCKWISE_1X128),
    ],
)
def test_gemms_with_block_scales_have_the_bytes_of_torch(shape, blocks, launches, monkeypatch):
    m, n, k = shape
    for dtype in (torch.bfloat16, torch.float32):
        launches.clear()
        for seed in range(3):
            a, b = operand(m, k, block=blocks[0], seed=seed), operand(n, k, block=blocks[1], seed=9)
            y = call(a, b, None, dtype, blocks=blocks)
            assert torch.equal(y, torch_result(monkeypatch, a, b, None, dtype, blocks=blocks))
        assert len(launches) == 3, "two of which were no repetitions"


def test_concurrent_threads_launch_with_their_own_scales(launches, monkeypatch):
    a, b = operand(256, 512), operand(128, 512, seed=1)
    scales = [torch.full((1,), 2.0**i, device="cuda") for i in range(4)]
    expected = [torch_result(monkeypatch, (a[0], scale), b) for scale in scales]
    call((a[0], scales[0]), b)  # otherwise several threads would choose a kernel
    torch.cuda.synchronize()
    wrong_threads: list[int] = []

    def multiply(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            ys = [call((a[0], scales[i]), b) for _ in range(200)]
            torch.cuda.current_stream().synchronize()
        wrong_threads.extend(i for y in ys if not torch.equal(y, expected[i]))

    threads = [threading.Thread(target=multiply, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(launches) == 801
    assert len({*map(id, launches)}) == 1
    assert not wrong_threads


def test_a_cuda_graph_captures_the_chosen_kernel(launches, monkeypatch):
    a, b = operand(288, 512), operand(128, 512, seed=1)
    for _ in range(3):
        call(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(a, b)
    assert len(launches) == 4
    a[1].mul_(2)
    graph.replay()
    assert torch.equal(y, torch_result(monkeypatch, a, b))


def test_gemms_of_padded_sizes_repeat_the_chosen_kernel(launches):
    a, b = operand(30, 144), operand(50, 144, seed=1)
    ys = [call(a, b) for _ in range(4)]
    assert all(torch.equal(y, ys[0]) for y in ys)
    assert len(launches) == 4
