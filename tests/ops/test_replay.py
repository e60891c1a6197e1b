"""Recording launchers: which calls are recorded, and that a repeated call has the same results.

The tests run on the CPU: a launch is a Python function, and tensors report that they are on GPU 0.
"""

import ctypes
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from float8lab.ops import declare
from float8lab.ops.kernels import _launch, _replay
from float8lab.ops.kernels._replay import repeated, replayed


class FakeKernel:
    """A fake kernel; a launch calls ``function``, which writes to its tensor arguments."""

    def __init__(self, function: Callable[..., None], *, known: bool = True) -> None:
        self.function, self.is_known, self.launches = function, known, 0

    def run(self, x, y, z, stream, handle, metadata, _1, _2, _3, *args: Any) -> None:
        assert (x, y, z, stream, handle, metadata) == (5, 1, 1, 7, "handle", "metadata")
        self.launches += 1
        with _disable_current_modes():  # torch does not see the work of a kernel
            self.function(*args)

    def __call__(self, *args: Any, overlaps: bool = False) -> None:
        self.run(5, 1, 1, 7, "handle", "metadata", None, None, None, *args)
        report_launch = getattr(_launch.RECORDING, "launch", None)
        if report_launch is not None:
            launch_arguments = 5, 1, 1, _launch.STREAM, "handle", "metadata", None, None, None
            forms = [isinstance(x, Tensor) and torch.empty_like(x, device="meta") for x in args]
            run = functools.partial(self.run_on_addresses, forms) if self.is_known else None
            report_launch(run, (*launch_arguments, *args), overlaps)

    def run_on_addresses(self, forms: list[Any], *args: Any) -> None:
        """Run on tensors like ``forms``, of which a repeated launch gets the addresses."""
        count = len(args) - len(forms)
        tensors = [
            _tensor_at(arg, form) if isinstance(form, Tensor) else arg
            for arg, form in zip(args[count:], forms, strict=True)
        ]
        self.run(*args[:count], *tensors)


def _tensor_at(address: int, form: Tensor) -> Tensor:
    assert type(address) is int
    memory = (ctypes.c_byte * form.nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=form.dtype).as_strided(form.shape, form.stride())


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    monkeypatch.setattr(_launch, "ENABLED", True)
    monkeypatch.setattr(_replay, "current_device", lambda: 0)
    monkeypatch.setattr(_replay, "current_stream", lambda device: 7)
    monkeypatch.setattr(_replay, "_new_tensor", None)
    monkeypatch.setattr(Tensor, "get_device", lambda self: 0)


def scale_into(x: Tensor, y: Tensor, factor: float) -> None:
    y.copy_(x * factor)


class CountedLauncher:
    """A launcher that counts how often its Python code runs."""

    def __init__(self, body: Callable[..., Any]) -> None:
        def counted(*args: Any) -> Any:
            self.calls += 1
            return body(*args)

        self.calls, self.launcher = 0, replayed(counted)

    def __call__(self, *args: Any) -> Any:
        return self.launcher(*args)


class ScaleLauncher(CountedLauncher):
    """A launcher that computes ``x * factor``."""

    def __init__(self, **options: Any) -> None:
        self.kernel = FakeKernel(scale_into, **options)
        super().__init__(self._scale)

    def _scale(self, x: Tensor, factor: float) -> Tensor:
        y = x.new_empty(x.shape)
        self.kernel(x, y, factor)
        return y

    def __call__(self, x: Tensor, factor: float = 2.0) -> Tensor:
        y = super().__call__(x, factor)
        assert torch.equal(y, x * factor)
        return y


def test_the_third_call_repeats_the_launch_without_the_launcher():
    scaled = ScaleLauncher()
    outputs = [scaled(torch.randn(3, 4)) for _ in range(6)]
    assert scaled.calls == 2
    assert scaled.kernel.launches == 6
    assert len({y.data_ptr() for y in outputs}) == 6, "each call has an output of its own"


@pytest.mark.parametrize(
    "changed",
    [
        lambda x: x.new_ones(4, 3), lambda x: torch.ones(4, 3).t(),
        lambda x: torch.ones(13)[1:].view(3, 4), lambda x: x.double(),
        lambda x: torch.nn.Parameter(torch.ones(5, 4)),
    ],
    ids=["shape", "strides", "alignment", "dtype", "parameter"],
)  # fmt: skip
def test_inputs_that_a_launcher_can_distinguish_are_recorded_separately(changed):
    scaled = ScaleLauncher()
    x = torch.randn(3, 4)
    for _ in range(3):
        with torch.no_grad():
            scaled(x)
            scaled(changed(x))
    assert scaled.calls == 4


def test_calls_with_other_arguments_are_recorded_separately():
    scaled = ScaleLauncher()
    for _ in range(4):
        for factor in (2.0, 3.0):
            scaled(torch.randn(3, 4), factor)
    assert scaled.calls == 4


def test_a_recorded_call_is_repeated_without_its_key(monkeypatch):
    @replayed
    def launcher(factor: float, pair: tuple[Tensor, list[Tensor]], x: Tensor) -> Tensor:
        y = x.new_empty(x.shape)
        kernel(pair[0], pair[1][0], x, y, factor)
        return y

    def sum_into(a: Tensor, b: Tensor, c: Tensor, y: Tensor, factor: float) -> None:
        y.copy_((a - b) * factor + c)

    kernel, shape = FakeKernel(sum_into), (3, 4)
    for _ in range(2):
        arguments = (2.0, (torch.randn(shape), [torch.randn(shape)]), torch.randn(shape))
        assert repeated(launcher, arguments) is None, "not recorded so far"
        launcher(*arguments)
    repeat = repeated(launcher, arguments)
    a, b, c = torch.randn(3, *shape)
    assert torch.equal(repeat((2.0, (a, [b]), c)), (a - b) * 2.0 + c)
    unaligned = torch.randn(13)[1:].view(shape)
    arguments = (2.0, (a, [unaligned]), c)
    assert repeat(arguments) is NotImplemented
    for _ in range(2):
        launcher(*arguments)
    unaligned_repeat = repeated(launcher, arguments)
    assert torch.equal(unaligned_repeat(arguments), (a - unaligned) * 2.0 + c)
    assert unaligned_repeat((2.0, (a, [b]), c)) is NotImplemented
    monkeypatch.setattr(_replay, "_key_of", None)
    assert torch.equal(repeat((2.0, (a, [b]), c)), (a - b) * 2.0 + c), "it needs no key"
    monkeypatch.setattr(_launch._RUNTIME, "launch_enter_hook", print)
    assert repeat((2.0, (a, [b]), c)) is NotImplemented


def test_a_record_with_functions_of_torch_is_not_repeated_under_autocast():
    kernel, x = FakeKernel(scale_into), torch.randn(4, 4)

    def scale_to_gemm(x: Tensor, has_gemm: bool) -> Tensor:
        y = x.new_empty(x.shape)
        kernel(x, y, 2.0)
        return torch.mm(y, y) if has_gemm else y

    launcher = replayed(scale_to_gemm)
    for has_gemm in (False, True):
        for _ in range(2):
            expected = launcher(x, has_gemm)
        repeat = repeated(launcher, (x, has_gemm))
        assert torch.equal(repeat((x, has_gemm)), expected)
        torch.set_autocast_enabled("cuda", True)
        try:
            assert (repeat((x, has_gemm)) is NotImplemented) == has_gemm
        finally:
            torch.set_autocast_enabled("cuda", False)


def test_calls_with_empty_tensors_or_on_other_devices_are_not_recorded(monkeypatch):
    scaled = ScaleLauncher()
    for _ in range(4):
        scaled(torch.randn(0, 4))
    assert scaled.calls == 4
    monkeypatch.setattr(_replay, "current_device", lambda: 1)
    for _ in range(4):
        scaled(torch.randn(3, 4))
    assert scaled.calls == 8


def test_calls_with_tensor_subclasses_are_not_recorded():
    class Other(Tensor):
        pass

    classes = []

    @replayed
    def launcher(x: Tensor) -> Tensor:
        classes.append(type(x))
        return x

    for _ in range(4):
        x = torch.ones(3).as_subclass(Other)
        launcher(x)
        assert sys.getrefcount(x) == 2
    assert classes == [Other] * 4


def test_views_buffers_and_zeros_are_repeated():
    """Outputs keep their strides, and buffers that accumulate start from zero in every call."""

    def add(x: Tensor, total: Tensor, y_t: Tensor, buffer: Tensor) -> None:
        total += x.flatten().sum()
        buffer.fill_(3)
        y_t.as_strided((x.numel(),), (1,)).copy_(x.t().flatten())  # a kernel gets only the address

    kernel = FakeKernel(add)

    @CountedLauncher
    def launcher(x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(1)
        y = x.new_empty((x.shape[1], x.shape[0]))
        kernel(x.view(1, -1).view(x.shape), total, y, torch.empty_like(x))
        return y.t(), total.view(())

    for _ in range(4):
        x = torch.randn(3, 4)
        y, total = launcher(x)
        assert torch.equal(y, x)
        assert y.stride() == (1, 3)
        assert total.shape == ()
        assert torch.equal(total, x.sum())
    assert launcher.calls == 2


def test_a_written_argument_that_is_no_output_is_repeated():
    kernel = FakeKernel(lambda x, slot: slot.copy_(x.amax()))

    @CountedLauncher
    def launcher(x: Tensor, slot: Tensor) -> None:
        kernel(x, slot)

    slots = [torch.zeros(()) for _ in range(4)]
    for slot in slots:
        x = torch.randn(9)
        assert launcher(x, slot) is None
        assert slot == x.amax()
    assert launcher.calls == 2


def test_launchers_inside_a_launcher_are_part_of_its_recording():
    scaled = ScaleLauncher()

    @CountedLauncher
    def launcher(x: Tensor) -> Tensor:
        return scaled.launcher(scaled.launcher(x, 2.0), 3.0)

    for _ in range(5):
        x = torch.randn(3, 4)
        assert torch.equal(launcher(x), x * 2 * 3)
    assert launcher.calls == 2


def test_reductions_of_torch_between_launches_are_repeated():
    kernel = FakeKernel(scale_into)

    @CountedLauncher
    def launcher(x: Tensor) -> tuple[Tensor, ...]:
        y = x.new_empty(x.shape)
        kernel(x, y, 2.0)
        z = x.new_empty(x.shape[1:])
        total = y.sum(0)
        kernel(total, z, 3.0)
        return z, total, y.view(-1).cumsum(0, dtype=torch.float64), y.amax()

    for _ in range(5):
        x = torch.randn(3, 4)
        z, total, running, amax = launcher(x)
        assert torch.equal(running, (2 * x).view(-1).cumsum(0, dtype=torch.float64))
        assert amax == 2 * x.max()
        assert torch.equal(total, (2 * x).sum(0))
        assert torch.equal(z, 3 * total)
    assert launcher.calls == 2


def _cosine(x: Tensor, kernel: FakeKernel) -> Tensor:
    y = x.new_empty(x.shape)
    kernel(x, y, 2.0)
    return y.cos()


def _nothing(x: Tensor, kernel: FakeKernel) -> Tensor:
    return x.new_empty(x.shape)


def _hidden(x: Tensor, kernel: FakeKernel) -> Tensor:
    y = x.new_empty(x.shape)
    kernel(HIDDEN, y, 2.0)
    return y


HIDDEN = torch.ones(3, 4)


@pytest.mark.parametrize("launcher", [_cosine, _nothing, _hidden])
def test_a_launcher_that_does_more_than_allocate_and_launch_is_not_recorded(launcher):
    kernel = FakeKernel(scale_into)

    @CountedLauncher
    def call(x: Tensor) -> Any:
        return launcher(x, kernel)

    for _ in range(5):
        call(torch.randn(3, 4))
    assert call.calls == 5


def test_a_kernel_that_triton_must_launch_is_not_recorded():
    scaled = ScaleLauncher(known=False)
    for _ in range(5):
        scaled(torch.randn(3, 4))
    assert scaled.calls == 5


def test_a_call_with_one_tensor_as_two_arguments_is_not_recorded():
    """The next call may have two different tensors."""
    kernel = FakeKernel(lambda a, b, y: y.copy_(a + b))

    @CountedLauncher
    def launcher(a: Tensor, b: Tensor) -> Tensor:
        y = a.new_empty(a.shape)
        kernel(a, b, y)
        return y

    for _ in range(3):
        x, y = torch.randn(4), torch.randn(4)
        assert torch.equal(launcher(x, x), x + x)
        assert torch.equal(launcher(x, y), x + y)


def test_a_launcher_that_raises_leaves_no_recording():
    fail = [False, True, False, False, False]

    @replayed
    def launcher(x: Tensor) -> Tensor:
        if fail.pop(0):
            raise RuntimeError("out of memory")
        return x.new_empty(x.shape)

    launcher(torch.ones(3))
    with pytest.raises(RuntimeError, match="out of memory"):
        launcher(torch.ones(3))
    assert getattr(_launch.RECORDING, "launch", None) is None
    launcher(torch.ones(3))


def test_calls_with_launch_hooks_are_not_recorded(monkeypatch):
    scaled = ScaleLauncher()
    monkeypatch.setattr(_replay, "has_hooks", lambda: True)
    for _ in range(4):
        scaled(torch.randn(3, 4))
    assert scaled.calls == 4


def test_repeated_calls_fill_new_memory_in_deterministic_mode():
    kernel = FakeKernel(lambda x, y: None)

    @CountedLauncher
    def launcher(x: Tensor) -> Tensor:
        y = x.new_empty(x.shape)
        kernel(x, y)
        return y

    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(4):
            assert launcher(torch.ones(3)).isnan().all()
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)  # as in conftest.py
    assert launcher.calls == 2


def test_launches_of_another_thread_are_not_recorded():
    inner, thread_results = ScaleLauncher(), []
    kernel = FakeKernel(scale_into)

    @replayed
    def launcher(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: thread_results.append(inner(torch.ones(2))))
        thread.start()
        thread.join()
        y = x.new_empty(x.shape)
        kernel(x, y, 2.0)
        return y

    for _ in range(4):
        x = torch.randn(3, 4)
        assert torch.equal(launcher(x), 2 * x)
    assert kernel.launches == 4
    assert inner.kernel.launches == len(thread_results)
    assert 2 <= len(thread_results) <= 4


def test_the_number_of_recorded_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(_replay, "_MOST_CALLS", 3)
    scaled = ScaleLauncher()
    for size in [*range(1, 9), *range(1, 9)]:
        scaled(torch.randn(size))
    assert scaled.calls == 16


def test_views_of_allocations_are_created_in_every_call():
    """For example, the result of a padded GEMM is cropped by a view."""
    kernel = FakeKernel(scale_into)

    @CountedLauncher
    def launcher(x: Tensor) -> tuple[Tensor, ...]:
        y = x.new_empty(x.shape)
        kernel(x, y, 2.0)
        gemm = torch.mm(y, y.t())
        return gemm[:2, :2], gemm.sum(0).view(2, 2), y[1], x[1:], F.pad(y, (0, 2))

    for _ in range(4):
        x = torch.randn(4, 4)
        cropped, sums, row, input_view, padded = launcher(x)
        assert torch.equal(padded, F.pad(2 * x, (0, 2)))
        gemm = 2 * x @ (2 * x).t()
        assert torch.equal(cropped, gemm[:2, :2])
        assert torch.equal(sums, gemm.sum(0).view(2, 2))
        assert torch.equal(row, 2 * x[1])
        assert input_view.data_ptr() == x[1:].data_ptr()
        assert cropped.stride() == (4, 1)
    assert launcher.calls == 2


@pytest.fixture
def alive(monkeypatch) -> list[list[bool]]:
    """For each allocation of a repeated call, which earlier allocations are still alive."""
    alive: list[list[bool]] = []
    storages: list[StorageWeakRef] = []
    original_empty = _replay._empty_strided

    def recording_empty(*args: Any) -> Tensor:
        alive.append([not storage.expired() for storage in storages])
        y = original_empty(*args)
        storages.append(StorageWeakRef(y.untyped_storage()))
        return y

    monkeypatch.setattr(_replay, "_empty_strided", recording_empty)
    return alive


def test_buffers_are_freed_before_the_next_gemm(alive):
    kernel = FakeKernel(scale_into)

    @replayed
    def launcher(x: Tensor) -> tuple[Tensor, Tensor]:
        buffer, output = x.new_empty(x.shape), x.new_zeros(x.shape)
        kernel(x, buffer, 2.0)
        kernel(buffer, output, 3.0)
        gemm = torch.mm(buffer, buffer)
        del buffer
        last_buffer = x.new_empty(x.shape)
        kernel(gemm, last_buffer, 1.0)
        return output, torch.mm(last_buffer, last_buffer)

    for _ in range(3):
        x = torch.randn(4, 4)
        output, gemm = launcher(x)
        square = 2 * x @ (2 * x)
        assert torch.equal(output, 6 * x)
        assert torch.equal(gemm, square @ square)
    assert alive == [[], [True], [False, True]], "the room is gone when the last is allocated"


@pytest.mark.parametrize("overlaps", [False, True])
def test_buffers_of_a_launch_outlive_a_launch_that_overlaps_it(alive, overlaps):
    """An output of the second launch may not have the memory that the first one still reads."""
    kernel = FakeKernel(scale_into)

    @replayed
    def launcher(x: Tensor) -> tuple[Tensor, Tensor]:
        buffer, first, second = (x.new_empty(x.shape) for _ in range(3))
        kernel(x, buffer, 2.0)
        kernel(buffer, first, 3.0)
        kernel(x, second, 5.0, overlaps=overlaps)
        return first, second

    for _ in range(3):
        x = torch.randn(4, 4)
        first, second = launcher(x)
        assert torch.equal(first, 6 * x)
        assert torch.equal(second, 5 * x)
    assert alive == [[], [True], [overlaps, True]], "the buffer is freed before the last output"


def test_functions_of_torch_get_views_with_their_strides():
    """A kernel reads a view from its first element; torch's GEMM also needs its strides."""
    kernel = FakeKernel(scale_into)

    @replayed
    def launcher(x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        y = x.new_empty(x.shape)
        kernel(x, y, 2.0)
        gemm = torch.mm(y, w.t())
        if bias is not None:
            gemm.add_(bias)
        padded = torch.mm(y[:, :2], w[:, :2].t()).to(torch.float64)
        return gemm, padded

    for bias in (None, torch.randn(5)):
        for _ in range(4):
            x, w = torch.randn(3, 4), torch.randn(5, 4)
            gemm, padded = launcher(x, w, bias)
            expected = 2 * x @ w.t()
            assert torch.equal(gemm, expected if bias is None else expected + bias)
            assert torch.equal(padded, (2 * x[:, :2] @ w[:, :2].t()).double())
            assert padded.dtype == torch.float64


def test_an_argument_may_be_returned_and_a_result_twice():
    kernel = FakeKernel(scale_into)

    @replayed
    def launcher(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        y = x.new_empty(x.shape)
        kernel(x, y, 2.0)
        return y, scale, y

    for _ in range(4):
        x, scale = torch.randn(3, 4), torch.randn(1)
        y, returned_scale, second_y = launcher(x, scale)
        assert torch.equal(y, x * 2)
        assert returned_scale is scale
        assert second_y is y


def test_a_copy_into_part_of_an_allocation_is_repeated():
    @replayed
    def launcher(x: Tensor) -> Tensor:
        y = x.new_zeros((4, 4))
        y[:3, :2] = x
        return y

    for _ in range(4):
        x = torch.randn(3, 2)
        expected = torch.zeros(4, 4)
        expected[:3, :2] = x
        assert torch.equal(launcher(x), expected)


def test_a_planned_function_runs_its_body_under_autograd_and_profilers(monkeypatch):
    kernel, grad_enabled = FakeKernel(scale_into), []

    @declare.planned
    def body(inputs: list[Tensor], factor: float) -> Tensor:
        grad_enabled.append(torch.is_grad_enabled())
        y = inputs[0].new_empty(inputs[0].shape)
        kernel(inputs[0], y, factor)
        return y

    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3)
            assert torch.equal(body([x], 2.0), x * 2)
    assert grad_enabled == [False] * 2
    for _ in range(4):
        body([x], 2.0)
    assert grad_enabled == [False] * 2 + [True] * 4, "autograd would not see a plan's steps"
    with torch.no_grad(), torch.profiler.profile(activities=[ProfilerActivity.CPU]):
        body([x], 2.0)
    assert len(grad_enabled) == 7


def test_a_launcher_with_a_tensor_as_keyword_argument_is_not_recorded():
    @CountedLauncher
    def launcher(x: Tensor, other: Tensor) -> Tensor:
        return torch.sum(x, 0, out=other.new_empty(x.shape[1]))

    for _ in range(4):
        x = torch.randn(3, 4)
        assert torch.equal(launcher(x, torch.randn(4)), x.sum(0))
    assert launcher.calls == 4


def test_tensor_descriptors_are_created_from_the_tensors_of_each_call():
    kernel = FakeKernel(lambda x, y: y.base.copy_(x.base * 3))
    references = []

    @replayed
    def launcher(x: Tensor) -> Tensor:
        references.append(weakref.ref(x))
        y = x.new_empty(x.shape)
        rows = y.view(-1, 16)
        kernel(
            TensorDescriptor.from_tensor(x, [2, 16]), TensorDescriptor.from_tensor(rows, [2, 16])
        )
        return y

    for _ in range(5):
        x = torch.randn(3, 2, 16).view(6, 16)
        assert torch.equal(launcher(x), x * 3)
    assert kernel.launches == 5
    assert len(references) == 2
    del x
    assert references[1]() is None, "a plan keeps no tensor"
