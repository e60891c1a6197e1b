"""On a GPU, launches that bypass Triton and repeated calls equal launches through Triton."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from float8lab import ops
from float8lab.formats import E4M3, E5M2, FP8_DTYPES, HIGH_PRECISION_DTYPES
from float8lab.ops.kernels import _launch, _replay
from tests.ops import forms

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "ENABLED", True)


SHAPES = [(272, 1040), (63, 1500), (1030, 131), (5, 9001), (2, 16)]

OPS: dict[str, Callable[[Tensor], Any]] = {
    "quantize-tensor": lambda x: forms.quantize(ops.cast_op, x, E4M3, (-1, -1), "fp32", 0.0, 16),
    "quantize-row": lambda x: forms.quantize(ops.cast_op, x, E5M2, (1, -1), "pow2", 0.0, 1),
    "quantize-1x128": lambda x: forms.quantize(ops.cast_op, x, E4M3, (1, 128), "fp32", 0.0, 16),
    "quantize-pair": lambda x: forms.quantize_pair(
        ops.cast_op, x, E4M3, (1, 128), "fp32", 0.0, 16, False
    ),
    "cast": lambda x: forms.encode(
        ops.cast_op, x, _scale(x), x.new_full((1,), -1.0).float(), E4M3, (-1, -1), 16
    ),
    "cast-pair": lambda x: forms.encode_pair(ops.cast_op, x, _scale(x), None, E5M2, 16, True),
    "quantize-pair-tensor": lambda x: forms.quantize_pair(
        ops.cast_op, x, E4M3, (-1, -1), "fp32", 0.0, 16, False
    ),
    "quantize-pair-rows": lambda x: forms.quantize_pair(
        ops.cast_op, x, E5M2, (1, -1), "fp32", 0.0, 16, False
    ),
    "cast-pair-no-sum": lambda x: forms.encode_pair(
        ops.cast_op, x, _scale(x), None, E4M3, 16, False
    ),
    "cast-of": lambda x: forms.encode(
        ops.cast_op, _gelu(x), _scale(x), x.new_full((1,), -1.0).float(), E4M3, (-1, -1), 16
    ),
    "cast-pair-of": lambda x: forms.encode_pair(
        ops.cast_op, _gelu(x), _scale(x), None, E4M3, 16, False
    ),
    "quantize-pair-of": lambda x: forms.quantize_pair(
        ops.cast_op, _gelu(x), E4M3, (1, 128), "fp32", 0.0, 16, False
    ),
    "dequantize": lambda x: ops.value_of_op(
        "dequantize", (x.to(E4M3), _scale(x)), torch.bfloat16, (-1, -1)
    ),
    "transpose": lambda x: ops.transpose_op(x.to(E4M3), 16),
    "norm": lambda x: ops.norm_op(
        x, x.new_ones(x.shape[1]), x.new_zeros(x.shape[1]), 1e-5, True, torch.bfloat16
    ),
}


def _gelu(x: Tensor) -> ops.Prologue:
    return ops.Prologue("gelu", [x], x.dtype)


def _scale(x: Tensor) -> Tensor:
    return torch.full((1,), 0.25, device=x.device)


def matrix(shape: tuple[int, int], dtype: torch.dtype, offset: int, device: str) -> Tensor:
    """A matrix at an address ``offset`` elements after a multiple of 16."""
    rows, columns = shape
    storage = torch.randn(rows * columns + offset, device=device).to(dtype)
    return storage[offset:].view(shape)


def inputs(device: str = "cuda") -> list[Tensor]:
    return [
        matrix(shape, dtype, offset, device)
        for shape in SHAPES
        for dtype in HIGH_PRECISION_DTYPES
        for offset in (0, 1)
    ]


def nonempty_outputs(outputs: Any) -> list[Tensor]:
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    return [output for output in outputs if output is not None and output.numel()]


def through_triton(op: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_launch, "ENABLED", False)
        return nonempty_outputs(op(x))


def record_call(op: Callable[[Tensor], Any], x: Tensor) -> None:
    """Call the op until its kernels and the call itself are recorded."""
    for _ in range(2):
        op(x)


def without_triton(op: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    """The outputs of a call, whose kernels must be recorded."""
    replays = []

    def run(self: JITFunction, *args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"{self} went through Triton")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(_replay, "has_hooks", lambda: replays.append(1))  # asked before a replay
        outputs = nonempty_outputs(op(x))
    # A matrix without full words of four rows needs more kernels, some of them torch's.
    if x.shape[0] % 16 == 0 and x.data_ptr() % 16 == 0:
        assert replays
    return outputs


def assert_all_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for actual, expected in zip(got, want, strict=True):
        assert (actual.dtype, actual.shape, actual.stride()) == (
            expected.dtype,
            expected.shape,
            expected.stride(),
        )
        if actual.dtype in FP8_DTYPES:
            actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
        assert torch.equal(actual, expected)


each_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


@each_op
def test_recorded_launches_have_the_bits_of_launches_through_triton(op) -> None:
    xs = inputs()
    for x in xs:
        record_call(op, x)
    for x in xs:
        assert_all_same(without_triton(op, x), through_triton(op, x))


@pytest.fixture(params=[True, False], ids=["filled", "not-filled"])
def _filled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether torch fills new memory; then another function allocates it."""
    torch.use_deterministic_algorithms(request.param, warn_only=True)
    yield
    torch.use_deterministic_algorithms(True, warn_only=True)


@each_op
@pytest.mark.usefixtures("_filled")
def test_a_recorded_call_reads_new_values_in_new_memory(op) -> None:
    """A recorded call holds no values of the tensors that it was recorded with."""
    record_call(op, matrix((272, 1040), torch.bfloat16, 0, "cuda"))
    for _ in range(3):
        x = matrix((272, 1040), torch.bfloat16, 0, "cuda")
        assert_all_same(without_triton(op, x), through_triton(op, x))


@pytest.mark.usefixtures("uncollected")
@each_op
def test_a_cuda_graph_captures_recorded_launches(op) -> None:
    x = matrix((272, 1040), torch.bfloat16, 0, "cuda")
    record_call(op, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = without_triton(op, x)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_all_same(got, through_triton(op, x))


@each_op
def test_a_recorded_call_launches_on_the_current_stream(op) -> None:
    x = matrix((1030, 131), torch.float32, 0, "cuda")
    record_call(op, x)
    y = torch.empty_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # a launch on the first stream would read too early
        y.copy_(x)
        got = without_triton(op, y)
    torch.cuda.synchronize()
    assert_all_same(got, through_triton(op, x))


@pytest.mark.multi_gpu
@each_op
def test_calls_are_recorded_for_each_gpu(op) -> None:
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        x = matrix((272, 1040), torch.bfloat16, 0, device)
        record_call(op, x)
        got = without_triton(op, x)
        assert all(output.device == x.device for output in got)
        assert_all_same(got, through_triton(op, x))
