"""What Dynamo sees of an op's implementation when the op runs inside a compiled function."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from float8lab.ops import _register

SEEN: list[bool] = []
"""Of every call of an implementation below, whether Dynamo was tracing it."""


def _shift(x: Tensor) -> Tensor:
    SEEN.append(torch.compiler.is_compiling())
    return _add_one(x)


def _add_one(x: Tensor) -> Tensor:
    SEEN.append(torch.compiler.is_compiling())
    return x + 1


def _copied(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """With code of its own, since a mark is on the code."""
    return types.FunctionType(function.__code__.replace(), function.__globals__)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    torch._dynamo.reset()
    SEEN.clear()
    with torch.library._scoped_library("float8lab_test", "DEF") as library:
        library.define("shift(Tensor x) -> Tensor")
        yield library
    torch._dynamo.reset()


def _call_in_compiled() -> Tensor:
    """Run the op where Dynamo looks at every frame: below one that it was told to skip alone."""

    @torch._dynamo.disable(recursive=False)
    def skipped(x: Tensor) -> Tensor:
        return torch.ops.float8lab_test.shift(x)

    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Tensor:
        return skipped(x) * 2

    return compiled(torch.zeros(3))


def test_dynamo_traces_an_implementation_that_is_not_marked(library):
    """Else the tests below would show nothing."""
    library.impl("shift", _copied(_shift), "CPU")
    assert _call_in_compiled().eq(2).all()
    assert True in SEEN


def test_dynamo_does_not_trace_a_marked_implementation(library):
    library.impl("shift", _register._untraced(_copied(_shift)), "CPU")
    for _ in range(2):
        assert _call_in_compiled().eq(2).all()
        torch._dynamo.reset()
    assert SEEN == [False] * 4


def test_dynamo_does_not_trace_a_launcher(library, monkeypatch):
    module = types.ModuleType("float8lab.ops.kernels.of_test")
    module.shift = _copied(_shift)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    library.impl("shift", _register._lazy("of_test:shift"), "CPU")
    for _ in range(2):
        assert _call_in_compiled().eq(2).all()
    assert SEEN == [False] * 4


def test_dynamo_does_not_trace_without_the_private_names(library, monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy")
    function = _copied(_shift)
    marked = _register._untraced(function)
    assert marked is not function
    library.impl("shift", marked, "CPU")
    assert _call_in_compiled().eq(2).all()
    assert SEEN == [False] * 2


def test_marking_does_not_import_dynamo():
    source = "import sys, float8lab; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0
