"""Casts of small matrices in one launch, whose programs wait for each other."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.common import gpu_events
from float8lab.formats import E4M3, E5M2, HOPPER
from float8lab.ops import reference
from float8lab.ops.declare import capability_of
from float8lab.ops.kernels import cast_words
from float8lab.ops.kernels.cast import cast

pytestmark = pytest.mark.gpu

TENSOR, ROW = (-1, -1), (1, -1)
SHAPES = (1, 48), (4, 16), (300, 144), (2048, 512), (16384, 1536), (16, 100000)
each_block = pytest.mark.parametrize("block", [TENSOR, ROW], ids=["tensor", "row"])


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    if not HOPPER.includes(capability_of(torch.device("cuda", 0))):
        pytest.skip("other GPUs cast by several launches")


def cast_of(x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype = E4M3) -> Any:
    arguments = (fp8_dtype, block, "fp32", 0.0, 16, True, True, True)
    *results, sums = cast("", [x], x.dtype, *arguments)
    return results, sums


def several_launches(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """Call a function as if no matrix were small, and without what casts remember."""
    with monkeypatch.context() as patch:
        patch.setattr(cast_words, "is_cast_at_once", lambda x: False)
        cast.calls.clear()
        result = run()
    cast.calls.clear()
    return result


def assert_equal(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> None:
    for actual, expected in zip(got, want, strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None and expected is not None:
            assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@each_block
@pytest.mark.parametrize(
    "shape", [(1, 48), (4, 16), (300, 144), (2048, 512), (16384, 1536), (16, 100000)]
)
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_one_launch_gives_the_bytes_of_several(monkeypatch, block, shape, fp8_dtype):
    x = torch.randn(shape, device="cuda") * torch.logspace(-3, 3, shape[1], device="cuda")
    x = x.to(torch.bfloat16 if fp8_dtype == E4M3 else torch.float16)
    want, expected_sums = several_launches(monkeypatch, lambda: cast_of(x, block, fp8_dtype))
    for _ in range(3):  # the third call repeats the recorded launch
        got, sums = cast_of(x, block, fp8_dtype)
        assert_equal(got, want)
        torch.testing.assert_close(sums, expected_sums)


@each_block
def test_it_is_one_launch(block):
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    options = (E4M3, block, "fp32", 0.0, 16, True, True)
    for _ in range(3):
        events = gpu_events(lambda: cast("", [x], x.dtype, *options), cpu=True)
    names = [event.name for event in events if "FillFunctor" not in event.name]
    assert names == ["_cast_words_kernel"]  # the tests let torch fill new memory, too


@each_block
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e-30])
def test_special_values(block, value):
    x = torch.randn(64, 48, dtype=torch.bfloat16)
    x[3, 5] = value
    if value == 0.0:
        x.fill_(value)
    got, _ = cast_of(x.cuda(), block)
    options = (E4M3, block, "fp32", 0.0, 16, True, True)
    want = reference.cast("", [x], x.dtype, *options)[:-1]
    for actual, expected in zip(got, want, strict=True):
        if actual is not None and expected is not None:
            both = actual.cpu().float(), expected.float()
            torch.testing.assert_close(*both, rtol=0, atol=0, equal_nan=True)


@each_block
def test_streams_at_the_same_time(monkeypatch, block):
    xs = [torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    want = [several_launches(monkeypatch, lambda x=x: cast_of(x, block)[0]) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    for _ in range(30):
        got = []
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                got.append(cast_of(x, block)[0])
        torch.cuda.synchronize()
        for results, expected in zip(got, want, strict=True):
            assert_equal(results, expected)


@each_block
def test_cuda_graphs_at_the_same_time(monkeypatch, block):
    """Two graphs, replayed on two streams while a third stream casts without a graph."""
    xs = [torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    for x in xs:
        for _ in range(3):
            cast_of(x, block)
    graphs, outputs = [torch.cuda.CUDAGraph() for _ in xs], []
    for graph, x in zip(graphs, xs, strict=True):
        with torch.cuda.graph(graph):
            outputs.append([cast_of(x, block)[0] for _ in range(4)])
    streams = [torch.cuda.Stream() for _ in xs]
    for _ in range(10):
        for x in xs:
            x.normal_()
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = [cast_of(x, block)[0] for x in xs]
        torch.cuda.synchronize()
        for x, results, own in zip(xs, outputs, eager, strict=True):
            want = several_launches(monkeypatch, lambda x=x: cast_of(x, block)[0])
            for result in (*results, own):
                assert_equal(result, want)


def test_it_does_not_wait_for_a_kernel_of_another_stream():
    x = torch.randn(16384, 512, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        cast_of(x, TENSOR)
    torch.cuda.synchronize()
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)  # one thread, about a second
    cast_of(x, TENSOR)
    done.record()
    done.synchronize()
    assert not side.query(), "the cast waited for the other kernel"
