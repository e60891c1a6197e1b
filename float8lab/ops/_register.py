"""Register an op with torch.library: the reference on CPU, a Triton or cuBLASLt launcher on CUDA.

The CUDA launcher is named by a string, ``"module:function"`` inside ``float8lab.ops.kernels``, and
imported on its first call: importing float8lab must not import triton.

A call of an op takes torch's dispatcher some 10 us, as long as all that the launcher does. So where
nobody but the implementation would see the call, it is called without the dispatcher.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["announce_flops", "compute_intensive_ops", "register", "register_stateful"]

_LIBRARY = torch.library.Library("float8lab", "DEF")


_HAS_MARKS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)
"""Whether torch is one whose marks on code were seen to work."""


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo from tracing an implementation, or what it calls, when a compiled graph calls it.

    ``torch._disable_dynamo`` does so by a wrapper around every call. A mark on the code costs a
    call nothing; all functions of the same code have it.
    """
    if not _HAS_MARKS:
        return torch._disable_dynamo(function)
    dynamo = torch._C._dynamo.eval_frame
    try:
        skip = dynamo._FrameAction.SKIP
        strategy = dynamo._FrameExecStrategy(skip, skip)
        dynamo.set_code_exec_strategy(function.__code__, strategy)
    except AttributeError:  # the names are private: another torch may not have them
        return torch._disable_dynamo(function)
    return function


def _lazy(path: str) -> Callable[..., Any]:
    module_name, function_name = path.split(":")
    launcher: Callable[..., Any] | None = None

    def call(*args: Any) -> Any:
        nonlocal launcher
        if launcher is None:
            module = importlib.import_module(f"float8lab.ops.kernels.{module_name}")
            launcher = getattr(module, function_name)
        return launcher(*args)

    return call


def register(
    schema: str,
    *,
    cuda: str | Callable[..., Any],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    any_strides: bool = False,
    flops: Callable[..., int] | None = None,
) -> Callable[..., Any]:
    """Define ``float8lab::<schema>``, and return what calls it with plain tensors, by position.

    The op itself, which graphs and modes see, is the result's ``overload``.

    Args:
        schema: the op's signature; it never has an output that aliases an input.
        cuda: ``"module:function"`` of the launcher in ``float8lab.ops.kernels``, or a function
            where plain PyTorch is the CUDA implementation too.
        reference: the CPU implementation, which also specifies the op.
        fake: allocates the outputs, for fake tensors and for the CUDA launcher alike.
        any_strides: the op is as good on inputs of other strides than those it was traced with. A
            compiler that may not choose them copies an input that it has not written yet for each
            op that reads it.
        flops: floating-point operations of a call, from its arguments with a shape in place of each
            tensor. An op that has one is worth saving rather than computing again.
    """
    launcher = _lazy(cuda) if isinstance(cuda, str) else cuda
    # Marked, since torch 2.11 traces into kernels that a compiled graph calls.
    in_graph = _untraced(launcher) if isinstance(cuda, str) else cuda
    overload = _define(schema, {"CPU": reference, "CUDA": in_graph}, fake, any_strides)
    if flops is not None:
        _FLOPS[overload] = flops
    return _direct(overload, launcher, reference)


def register_stateful(
    schema: str,
    *,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    any_strides: bool = False,
) -> Callable[..., Any]:
    """Define an op for compiled graphs that does what eager mode does in plain Python.

    Args:
        schema: the op's signature. What it changes besides is hidden from the compiler.
        implementation: called on any device, with Python's state as it is when the graph runs.
        fake: allocates the outputs, for fake tensors.
        any_strides: as in ``register``.
    """
    implementations = {"CompositeExplicitAutograd": _untraced(implementation)}
    return _define(schema, implementations, fake, any_strides)


def _define(
    schema: str,
    implementations: dict[str, Callable[..., Any]],
    fake: Callable[..., Any],
    any_strides: bool,
) -> Callable[..., Any]:
    name = schema.split("(", 1)[0]
    tags = [torch.Tag.pt2_compliant_tag]
    if any_strides:
        tags.append(torch.Tag.flexible_layout)
    _LIBRARY.define(schema, tags=tags)
    for key, implementation in implementations.items():
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"float8lab::{name}", fake, lib=_LIBRARY)
    overload: Callable[..., Any] = getattr(torch.ops.float8lab, name).default
    return overload


_FLOPS: dict[Any, Callable[..., int]] = {}
"""FLOP formulas by overload."""


def compute_intensive_ops() -> list[torch._ops.OpOverload]:
    """The overloads of FP8 matrix products and attention, for lists of what is worth saving.

    Selective activation checkpointing recomputes every op that is not in such a list, and knows
    only torch's own products.

    >>> torch.ops.float8lab.scaled_mm.default in float8lab.compute_intensive_ops()
    True
    """
    return list(_FLOPS)


_COUNTER = "torch.utils.flop_counter"


class _CounterLoader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Tells torch's FLOP counter the formulas when it is imported.

    Not before: it imports triton, which ``import float8lab`` must not.
    """

    def __init__(self) -> None:
        self.loader: Any = None

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        _tell(module)


def _tell(counter: Any) -> None:
    for overload, formula in _FLOPS.items():
        counter.register_flop_formula(overload.overloadpacket)(formula)


def announce_flops() -> None:
    """Make the formulas known to torch's FLOP counter, now or when it is imported."""
    if _COUNTER in sys.modules:
        _tell(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _CounterLoader())


_PLAIN = frozenset(
    {Tensor, Parameter, type(None), torch.dtype, torch.Size, tuple, list, int, float, bool, str}
)
"""Types whose values the dispatcher hands on as they are. A list's elements are asked for anew."""

_is_watched_by_a_mode = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_trace = torch._C._get_tracing_state
_is_profiled = torch._C._autograd._profiler_enabled


def _direct(
    overload: Callable[..., Any], launcher: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    """``overload``, past the dispatcher where that would do nothing but find the implementation."""

    def call(*args: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or _is_watched_by_a_mode()
            or _transform() is not None
            or _trace() is not None
            or _is_profiled()
            or not _PLAIN.issuperset(map(type, args))
        ):
            return overload(*args)
        x = args[0]
        if type(x) is str:  # a source: its kind, and its tensors
            x = args[1][0]
            if not _PLAIN.issuperset(map(type, args[1])):
                return overload(*args)
        elif type(x) is list or type(x) is tuple:
            return overload(*args)
        # Autograd's, unless below an autograd function. Negative: of the imaginary part of a
        # conjugate, which the dispatcher makes a tensor of its own first.
        if (torch.is_grad_enabled() and _requires_grad(args)) or x.is_neg():
            return overload(*args)
        if x.is_cuda:
            return launcher(*args)
        return reference(*args) if x.is_cpu else overload(*args)

    call.overload = overload  # type: ignore[attr-defined]
    return call


def _requires_grad(args: Sequence[Any]) -> bool:
    """Of a tensor among the arguments, or in a list there."""
    for arg in args:
        if isinstance(arg, Tensor):
            if arg.requires_grad:
                return True
        elif (type(arg) is list or type(arg) is tuple) and _requires_grad(arg):
            return True
    return False
