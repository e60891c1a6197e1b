"""Register an op with torch.library: the reference on CPU, a Triton or cuBLASLt launcher on CUDA.

The CUDA launcher is named by a string, ``"module:function"`` inside ``float8lab.ops.kernels``, and
imported on its first call: importing float8lab must not import triton.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["register", "register_stateful"]

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

    return _untraced(call)  # torch 2.11 traces into kernels that a compiled graph calls


def register(
    schema: str,
    *,
    cuda: str | Callable[..., Any],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """Define ``float8lab::<schema>`` and return its overload, to be called with plain tensors.

    Args:
        schema: the op's signature; it never has an output that aliases an input.
        cuda: ``"module:function"`` of the launcher in ``float8lab.ops.kernels``, or a function
            where plain PyTorch is the CUDA implementation too.
        reference: the CPU implementation, which also specifies the op.
        fake: allocates the outputs, for fake tensors and for the CUDA launcher alike.
    """
    launcher = _lazy(cuda) if isinstance(cuda, str) else cuda
    return _define(schema, {"CPU": reference, "CUDA": launcher}, fake)


def register_stateful(
    schema: str, *, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Define an op for compiled graphs that does what eager mode does in plain Python.

    Args:
        schema: the op's signature. What it changes besides is hidden from the compiler.
        implementation: called on any device, with Python's state as it is when the graph runs.
        fake: allocates the outputs, for fake tensors.
    """
    return _define(schema, {"CompositeExplicitAutograd": _untraced(implementation)}, fake)


def _define(
    schema: str, implementations: dict[str, Callable[..., Any]], fake: Callable[..., Any]
) -> Callable[..., Any]:
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key, implementation in implementations.items():
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"float8lab::{name}", fake, lib=_LIBRARY)
    overload: Callable[..., Any] = getattr(torch.ops.float8lab, name).default
    return overload
