"""Repeat launches of a kernel without the Python code that Triton runs before every launch.

At each launch Triton finds the compiled kernel for the arguments, and calls its hooks even if there
are none. That takes some 20 us, longer than a small kernel runs. This file remembers the kernel
that Triton chose, under a key of all that the choice depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton.runtime.jit import JITFunction

from float8lab.ops.declare import RECORDING

ENABLED = True
"""Whether repeated launches bypass Triton."""

_MOST_KERNELS = 4096
"""The most kernels that are remembered of a function. Sizes are part of a key, so there is no bound
on the number of keys where shapes vary."""

_OPTIONS = {"enable_fp_fusion": True}
"""Options of a launch that sets none: the defaults of Triton up to version 3.9."""

STREAM = object()
"""This object stands for the current stream among the arguments of a recorded launch."""

_RUNTIME = triton.knobs.runtime

# torch.cuda wraps these functions, and its wrappers cost several times as much. A CPU build has
# neither function and never calls them, since it has no compiled kernels.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def is_on_current_device(x: Tensor) -> bool:
    """Whether Triton, which launches on the current GPU, can launch on this tensor now."""
    return not x.is_cuda or x.get_device() == current_device()


def launched(
    function: Callable[..., Any] | None = None, *, language: Any = triton, **options: Sequence[str]
) -> Any:
    """Do ``jit`` for a kernel that the host launches: ``kernel[grid](*args, **constants)``.

    ``language`` is Triton, or its Gluon; ``options`` are those of its ``jit``.
    """
    if function is None:
        return partial(launched, language=language, **options)  # type: ignore[arg-type]
    compiled = language.jit(function, **options)
    return Launched(compiled) if isinstance(compiled, JITFunction) else compiled  # interpreted


class Launched:
    """A Triton function that remembers its compiled kernels.

    A call takes its run-time arguments by position and its constants, and Triton's options, by
    name. Any other call, and any call under hooks (such as a profiler's), goes through Triton. So
    does the first call with a key; its Triton settings (``triton.knobs``) hold for later calls.
    """

    def __init__(self, function: JITFunction) -> None:
        self.function = function
        self._compiled: dict[tuple[Any, ...] | None, tuple[Any, ...]] = {}
        run_time = [not parameter.is_constexpr for parameter in function.params]
        self._arguments = sum(run_time)
        self._constants = function.arg_names[self._arguments :]
        self._constants_come_last = all(run_time[: self._arguments])

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        memo = None
        if ENABLED and self._compiled and not (has_hooks() or self.function.pre_run_hooks):
            device = current_device()
            memo = self._compiled.get(_key_of(device, args, constants))
        if memo is None:
            kernel = self.function[grid](*args, **{**_OPTIONS, **constants})
            if ENABLED:
                memo = self._remember(kernel, args, constants)
        else:
            run, first, values, _ = memo
            x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
            run(x, y, z, current_stream(device), *first, *args, *values)
        record = getattr(RECORDING, "launch", None)
        if record is None:
            return
        if memo is None:
            record(None, ())
        else:
            run, first, values, _ = memo
            launch = (*(*grid, 1, 1)[:3], STREAM, *first, *args, *values)
            record(run, launch, constants.get("launch_pdl", False))

    def _remember(
        self, kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        # Kernels of other vendors' GPUs also depend on tensor sizes; a future has no metadata yet.
        metadata = getattr(kernel, "metadata", None)
        if metadata is None or metadata.target.backend != "cuda":
            return None
        by_name = constants.keys() & self.function.arg_names
        has_all = len(args) == self._arguments and by_name == set(self._constants)
        if not self._constants_come_last or not has_all:
            return None
        key = _key_of(current_device(), args, constants)
        if key is None:
            return None
        if len(self._compiled) >= _MOST_KERNELS:
            self._compiled.clear()
        # The memo holds the kernel itself: the compiled function may be unloaded with it.
        memo = (*_launcher_of(kernel), tuple(constants[name] for name in self._constants), kernel)
        self._compiled[key] = memo
        return memo


def _launcher_of(kernel: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the function that launches a kernel, and its arguments after the stream.

    This function calls no hooks. In Triton 3.6 it is a C function, which a Python object wraps to
    allocate scratch memory for the kernels that need it.
    """
    run, handle = kernel.run, kernel.function
    after = kernel.packed_metadata, None, None, None
    below = getattr(run, "launch", None)
    is_other_version = not triton.__version__.startswith("3.6.")
    if below is None or is_other_version or run.global_scratch_size or run.profile_scratch_size:
        return run, (handle, *after)
    return below, (handle, run.launch_cooperative_grid, run.launch_pdl, None, None, *after)


def has_hooks() -> bool:
    """Whether Triton has to call a hook, such as a profiler's, around launches."""
    # A hook is a function, or a chain of functions that were added.
    enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _key_of(
    device: int, args: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Return all that Triton's choice of a kernel depends on, or more; None for unknown arguments.

    Kernels differ for an integer that is 1, divisible by 16, or above 32 bits: a key has its value.
    For a tensor, a key has the dtype and whether the address is divisible by 16; for a TMA
    descriptor, the dtype and the box that is copied; for other arguments, the type.
    """
    key = [device, len(constants), *constants, *constants.values()]
    for arg in args:
        kind = type(arg)
        if kind is int:
            key.append(arg)
        elif kind is Tensor or kind is Parameter:
            key.append(arg.dtype)
            if arg.data_ptr() & 15:
                key.append("unaligned")
        elif kind is float or kind is bool or arg is None:
            key.append(kind)
        elif hasattr(arg, "block_shape"):  # a descriptor: Triton knows neither sizes nor strides
            layout = getattr(arg, "layout", None)
            key.append((kind, arg.base.dtype, *arg.block_shape, layout, arg.padding))
        else:
            return None
    return tuple(key)
