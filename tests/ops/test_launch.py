"""Launches that bypass Triton: which ones do, their arguments, and that Triton's kernel is chosen.

Triton binds and specializes as on a GPU; stubs replace compilation and launch.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from float8lab.ops.kernels import _launch
from float8lab.ops.kernels._launch import Launched, launched

STREAM = 7
"""The stream of device 0; the stream of device 1 is one more."""


def _some_kernel(
    x_ptr, y_ptr, size, factor, flag, nothing_ptr, BLOCK: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    pass


class Compiled:
    """A compiled kernel that records its launches with the key that Triton gave it."""

    function = "handle"
    packed_metadata = (4, 1, 0)

    def __init__(self, host: Host, key: str) -> None:
        self.host, self.key = host, key
        self.metadata = types.SimpleNamespace(target=types.SimpleNamespace(backend=host.backend))

    def run(self, *args: Any) -> None:
        self.host.runs.append((self.key, args))

    def launch_metadata(self, *args: Any) -> None:
        return None


class Host:
    """A fake driver of a machine with GPUs."""

    def __init__(self) -> None:
        self.device = 0
        self.backend = "cuda"
        self.runs: list[tuple[str, tuple[Any, ...]]] = []
        self.through_triton = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return STREAM + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def bypasses_triton(self, call: Callable[[], Any]) -> bool:
        before, runs = self.through_triton, len(self.runs)
        call()
        assert len(self.runs) == runs + 1
        return self.through_triton == before


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(_launch, "ENABLED", True)
    host = Host()

    def compiled(self: JITFunction, key: str, *args: Any, **kwargs: Any) -> Compiled:
        kernel = self.device_caches[host.device][0][key] = Compiled(host, key)
        return kernel

    def run(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        host.through_triton += 1
        return original(self, *args, **kwargs)

    original = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    monkeypatch.setattr(_launch, "current_device", host.get_current_device)
    monkeypatch.setattr(_launch, "current_stream", host.get_current_stream)
    monkeypatch.setattr(triton.runtime.driver, "_active", host)
    return host


@pytest.fixture
def kernel() -> Launched:
    return launched(_some_kernel)


x, y = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)


def arguments(**changed: Any) -> tuple[list[Any], dict[str, Any]]:
    args = {"x": x, "y": y, "size": 48, "factor": 0.5, "flag": True, "nothing": None}
    options = {**_launch._OPTIONS, "num_warps": 4}
    constants = {**options, "BLOCK": 128, "KIND": "row"}
    for name, value in changed.items():
        (args if name in args else constants)[name] = value
    return list(args.values()), constants


def call(kernel: Launched, grid: tuple[int, ...] = (3,), **changed: Any) -> Callable[[], None]:
    args, constants = arguments(**changed)
    return lambda: kernel[grid](*args, **constants)


def test_a_second_launch_bypasses_triton(host, kernel):
    assert not host.bypasses_triton(call(kernel))
    assert host.bypasses_triton(call(kernel))
    (first, triton_args), (second, bypass_args) = host.runs
    assert first == second
    hooks = slice(6, 9)
    assert bypass_args[hooks] == (None, None, None)
    for triton_arg, bypass_arg in zip(
        triton_args[: hooks.start] + triton_args[hooks.stop :],
        bypass_args[: hooks.start] + bypass_args[hooks.stop :],
        strict=True,
    ):
        assert triton_arg is bypass_arg or triton_arg == bypass_arg


@pytest.mark.parametrize("grid", [(5,), (5, 6), (5, 6, 7)], ids=len)
def test_kernel_arguments_are_in_the_order_of_the_signature(host, kernel, grid):
    args, _ = arguments()
    for _ in range(2):
        kernel[grid](*args, num_warps=4, KIND="row", BLOCK=128)
    assert host.through_triton == 1
    _, (*launch, _, _, _, x_ptr, y_ptr, size, factor, flag, nothing, block, kind) = host.runs[-1]
    assert launch == [*grid, *(1,) * (3 - len(grid)), STREAM, "handle", (4, 1, 0)]
    assert x_ptr is x
    assert y_ptr is y
    assert (size, factor, flag, nothing, block, kind) == (48, 0.5, True, None, 128, "row")


def test_run_time_arguments_come_from_the_current_call(host, kernel):
    other = torch.ones(64)
    for args in ({}, {"x": other, "factor": 2.0, "flag": False}):
        call(kernel, **args)()
    assert host.through_triton == 1
    *_, got, _, _, factor, flag, _, _, _ = host.runs[-1][1]
    assert got is other
    assert (factor, flag) == (2.0, False)


def descriptor_of(x: torch.Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, 64])


NEEDS_OTHER_KERNEL = {
    "dtype": {"x": x.int()},
    "alignment": {"y": torch.zeros(64, dtype=torch.bfloat16)[1:]},
    "no-tensor": {"y": None},
    "a-tensor": {"nothing": x},
    "size-1": {"size": 1},
    "size-odd": {"size": 49},
    "size-long": {"size": 2**40},
    "size-unsigned": {"size": 2**63 + 16},
    "size-float": {"size": 48.0},
    "size-bool": {"size": True},
    "factor-int": {"factor": 1},
    "flag-int": {"flag": 1},
    "constant": {"BLOCK": 64},
    "constant-bool": {"BLOCK": False},
    "constant-name": {"KIND": "tensor"},
    "constant-dtype": {"KIND": tl.float32},
    "descriptor": {"y": descriptor_of(torch.zeros(64, 64), 16)},
    "descriptor-rows": {"y": descriptor_of(torch.zeros(64, 64), 32)},
    "descriptor-dtype": {"y": descriptor_of(torch.zeros(64, 64, dtype=torch.bfloat16), 16)},
    "option": {"num_warps": 8},
    "other-option": {"num_stages": 4},
}
"""Changes of one argument for which Triton compiles another kernel."""
NEEDS_SAME_KERNEL = {
    "other-tensor": {"x": torch.zeros(3)}, "parameter": {"x": torch.nn.Parameter(torch.zeros(8))},
    "empty": {"x": torch.zeros(0)}, "factor": {"factor": -1.0}, "flag": {"flag": False},
}  # fmt: skip
"""Changes that need no other kernel and no launch through Triton."""


@pytest.mark.parametrize("changed", NEEDS_OTHER_KERNEL.values(), ids=NEEDS_OTHER_KERNEL)
def test_a_change_that_needs_another_kernel_gets_one(host, kernel, changed):
    for _ in range(2):
        call(kernel)()
        call(kernel, **changed)()
    assert host.through_triton == 2
    first_key, other_key, first_again, other_again = (key for key, _ in host.runs)
    assert first_key != other_key
    assert (first_key, other_key) == (first_again, other_again)


@pytest.mark.parametrize("changed", NEEDS_SAME_KERNEL.values(), ids=NEEDS_SAME_KERNEL)
def test_a_change_that_needs_no_other_kernel_bypasses_triton(host, kernel, changed):
    call(kernel)()
    assert host.bypasses_triton(call(kernel, **changed))
    kernel.function[(3,)](*arguments(**changed)[0], **arguments()[1])
    assert len({key for key, _ in host.runs}) == 1


def test_the_launched_kernel_is_the_one_that_triton_would_choose(host, kernel):
    """All pairs of the changes above run in turn, so a launch could find a wrong kernel."""
    changes = [*NEEDS_OTHER_KERNEL.values(), *NEEDS_SAME_KERNEL.values()]
    pairs = [change | other_change for change in changes for other_change in changes]
    for changed in pairs:
        call(kernel, **changed)()
    for changed in pairs:
        args, constants = arguments(**changed)
        assert host.bypasses_triton(call(kernel, **changed))
        kernel.function[(3,)](*args, **constants)
        (chosen, _), (expected, _) = host.runs[-2:]
        assert chosen == expected


def test_descriptors_of_other_sizes_need_no_other_kernel(host, kernel):
    call(kernel, y=descriptor_of(torch.zeros(64, 64), 16))()
    for x in (torch.zeros(5, 64), torch.zeros(64, 256)[:, :128]):
        assert host.bypasses_triton(call(kernel, y=descriptor_of(x, 16)))
        kernel.function[(3,)](*arguments(y=descriptor_of(x, 16))[0], **arguments()[1])
    assert len({key for key, _ in host.runs}) == 1


def test_each_device_has_its_own_kernels_and_stream(host, kernel):
    call(kernel)()
    host.device = 1
    assert not host.bypasses_triton(call(kernel))
    assert host.bypasses_triton(call(kernel))
    assert host.runs[-1][1][3] == STREAM + 1
    host.device = 0
    assert host.bypasses_triton(call(kernel))
    assert host.runs[-1][1][3] == STREAM


def _add_to_chain(hook: Callable[..., None]) -> Callable[[], None]:
    chain = triton.knobs.runtime.launch_enter_hook
    chain.add(hook)
    return lambda: chain.remove(hook)


def _set(hook: Callable[..., None]) -> Callable[[], None]:
    runtime = triton.knobs.runtime
    before, runtime.launch_exit_hook = runtime.launch_exit_hook, hook
    return lambda: setattr(runtime, "launch_exit_hook", before)


@pytest.mark.parametrize("install", [_add_to_chain, _set])
def test_launch_hooks_send_launches_through_triton(host, kernel, install):
    call(kernel)()
    remove = install(lambda metadata: None)
    try:
        assert not host.bypasses_triton(call(kernel))
    finally:
        remove()
    assert host.bypasses_triton(call(kernel))


def test_hooks_set_to_none_let_launches_bypass_triton(host, kernel, monkeypatch):
    call(kernel)()
    for name in ("launch_enter_hook", "launch_exit_hook"):
        monkeypatch.setattr(triton.knobs.runtime, name, None)
    assert host.bypasses_triton(call(kernel))


def test_pre_run_hooks_send_launches_through_triton(host, kernel):
    call(kernel)()
    sizes: list[Any] = []
    kernel.function.add_pre_run_hook(lambda *args, **kwargs: sizes.append(args[2]))
    assert not host.bypasses_triton(call(kernel))
    assert sizes == [48]


def _by_name(kernel: Launched) -> None:
    kernel[(1,)](x, y, 48, 0.5, True, nothing_ptr=None, BLOCK=128, KIND="row")


def _constant_by_position(kernel: Launched) -> None:
    kernel[(1,)](x, y, 48, 0.5, True, None, 128, KIND="row")


def _tuple(kernel: Launched) -> None:
    call(kernel, nothing=(1, 2))()


CALLS_THROUGH_TRITON = [_by_name, _constant_by_position, _tuple]


@pytest.mark.parametrize(
    "launch", CALLS_THROUGH_TRITON, ids=[function.__name__ for function in CALLS_THROUGH_TRITON]
)
def test_unusual_calls_go_through_triton(host, kernel, launch):
    for _ in range(2):
        call(kernel)()
        assert not host.bypasses_triton(lambda: launch(kernel))
    assert host.through_triton == 3


def test_launches_of_other_backends_go_through_triton(host, kernel):
    host.backend = "hip"
    for _ in range(3):
        assert not host.bypasses_triton(call(kernel))


def test_a_compilation_that_a_hook_prevented_launches_nothing(host, kernel, monkeypatch):
    monkeypatch.setattr(JITFunction, "_do_compile", lambda *args, **kwargs: None)
    for _ in range(2):
        call(kernel)()
    assert not host.runs
    assert host.through_triton == 2


def test_the_number_of_kept_kernels_is_bounded(host, kernel, monkeypatch):
    monkeypatch.setattr(_launch, "_MOST_KERNELS", 4)
    for size in range(2, 30):
        call(kernel, size=size)()
        assert len(kernel._compiled) <= 4
        assert host.bypasses_triton(call(kernel, size=size))


def test_do_not_specialize_options_reduce_the_number_of_kernels(host):
    def sizes(kernel: Launched) -> set[str]:
        start = len(host.runs)
        for size in (1, 48, 49):
            call(kernel, size=size)()
        call(kernel, x=torch.zeros(64)[1:], size=48)()
        return {key for key, _ in host.runs[start:]}

    assert len(sizes(launched(_some_kernel))) == 4
    assert len(sizes(launched(do_not_specialize=["size"])(_some_kernel))) == 2
    assert len(sizes(launched(do_not_specialize_on_alignment=["x_ptr"])(_some_kernel))) == 3


def test_interpreted_kernels_are_returned_unchanged(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert isinstance(launched(_some_kernel), InterpretedFunction)
