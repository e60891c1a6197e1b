"""The calls of cuBLASLt and their arguments, recorded by a fake library."""

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_size_t, c_void_p
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType

pytest.importorskip("triton")

from float8lab.formats import E4M3, E5M2
from float8lab.ops.kernels import cublaslt
from float8lab.ops.kernels._launch import STREAM

TENSORWISE, ROWWISE = ScalingType.TensorWise, ScalingType.RowWise
BLOCKWISE_1X128, BLOCKWISE_128X128 = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128


def c_function(name: str, call: Callable[..., int], *types: Any) -> Any:
    """Return a C function, like those of a library, that calls a Python function."""
    function = ctypes.CFUNCTYPE(c_int, *types)(call)
    unchecked = ctypes.CFUNCTYPE(c_int)(ctypes.cast(function, c_void_p).value)
    unchecked.__name__, unchecked.callback = name, function
    return unchecked


class FakeLibrary:
    """A fake cuBLASLt that records its calls and computes nothing."""

    def __init__(self) -> None:
        self.layouts: list[tuple[int, ...]] = []
        self.attributes: dict[int, int] = {}
        self.heuristic_calls, self.destroyed, self.status, self.attribute_status = 0, 0, 0, 0
        self.launches: list[SimpleNamespace] = []
        # These two get arguments that ctypes has converted, so only a C function can read them.
        name, types = "cublasLtMatmul", [*[c_void_p] * 14, c_size_t, c_void_p]
        self.cublasLtMatmul = c_function(name, self._multiply, *types)
        name, types = "cublasLtMatmulDescSetAttribute", [c_void_p, c_int, c_void_p, c_size_t]
        self.cublasLtMatmulDescSetAttribute = c_function(name, self._set_attribute, *types)

    def cublasLtCreate(self, handle) -> int:
        return 0

    def cublasLtMatmulDescCreate(self, created, compute, scale) -> int:
        assert (compute, scale) == (68, 0)
        created._obj.value = 1
        return 0

    def cublasLtMatrixLayoutCreate(self, created, dtype, rows, columns, stride) -> int:
        self.layouts.append((dtype, rows.value, columns.value, stride.value))
        created._obj.value = 100 + len(self.layouts)
        return 0

    def _set_attribute(self, operation, attribute, value, size) -> int:
        assert operation == 1
        number = {1: ctypes.c_int8, 4: c_int, 8: c_int64}[size].from_address(value)
        self.attributes[attribute] = number.value
        return self.attribute_status

    def cublasLtMatmulPreferenceCreate(self, created) -> int:
        return 0

    def cublasLtMatmulPreferenceSetAttribute(self, _, attribute, value, size) -> int:
        assert (attribute, value._obj.value, size.value) == (1, 1 << 20, 8)
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *args) -> int:
        self.heuristic_calls += 1
        *_, count, answer, count_found = args
        assert count == 1
        answer._obj.workspace_bytes, count_found._obj.value = 4096, 1
        return self.status

    def cublasLtMatmulPreferenceDestroy(self, _) -> int:
        return 0

    def _multiply(self, *args) -> int:
        (handle, operation, one, b, b_layout, a, a_layout, zero, c, c_layout, out, out_layout,
         answer, workspace, size, stream) = args  # fmt: skip
        assert (handle, operation, c, c_layout) == (9, 1, out, out_layout)
        assert [c_float.from_address(number).value for number in (one, zero)] == [1.0, 0.0]
        assert cublaslt._Answer.from_address(answer).workspace_bytes == size
        layouts = [self.layouts[layout - 101] for layout in (b_layout, a_layout, out_layout)]
        self.launches.append(
            SimpleNamespace(
                addresses=(a, b, out, workspace), layouts=layouts, size=size, stream=stream,
                attributes=dict(self.attributes),
            )
        )  # fmt: skip
        return self.status

    def cublasLtMatmulDescDestroy(self, _) -> None:
        self.destroyed += 1

    cublasLtMatrixLayoutDestroy = cublasLtMatmulDescDestroy


@pytest.fixture
def library(monkeypatch):
    fake = FakeLibrary()
    cublaslt._choose_gemm.cache_clear()
    monkeypatch.setattr(cublaslt, "_library", lambda: fake)
    monkeypatch.setattr(cublaslt, "_handle", lambda device: ctypes.c_void_p(9))
    monkeypatch.setattr(cublaslt, "current_stream", lambda device: 7)
    monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: False)
    yield fake
    cublaslt._choose_gemm.cache_clear()


def operands(m=32, n=48, k=64, a_dtype=E4M3) -> list[Tensor]:
    a, b = torch.ones(m, k).to(a_dtype), torch.ones(n, k).to(E4M3)
    return [a, b, torch.ones(1), torch.ones(1)]


def multiply(operands, bias=None, **options) -> tuple[bool, Tensor]:
    m, n = operands[0].shape[0], operands[1].shape[0]
    out = torch.empty(m, n, dtype=torch.bfloat16)
    return cublaslt.multiply(
        *operands, bias, out, **{"fast_accum": True, "scalings": (TENSORWISE,) * 2, **options}
    ), out


@pytest.mark.parametrize("bias", [None, torch.ones(48, dtype=torch.bfloat16)])
def test_the_heuristic_runs_once_and_launches_have_the_addresses_of_their_tensors(library, bias):
    for launches in (1, 2):
        a, b, a_scale, b_scale = arguments = operands(a_dtype=E5M2)
        served, out = multiply(arguments, bias)
        assert served
        launch = library.launches[-1]
        assert launch.addresses[:3] == (a.data_ptr(), b.data_ptr(), out.data_ptr())
        # For cuBLASLt, b is the column-major K x N matrix A, and a is the K x M matrix B.
        assert launch.layouts == [(28, 64, 48, 64), (29, 64, 32, 64), (14, 48, 32, 48)]
        assert (launch.size, launch.stream) == (4096, 7)
        attributes = {3: 1, 25: 1, 17: b_scale.data_ptr(), 18: a_scale.data_ptr()}
        if bias is not None:
            attributes |= {7: 4, 26: 14, 8: bias.data_ptr()}
        assert launch.attributes == attributes
        assert library.heuristic_calls == 1, launches
    multiply(operands(), bias)
    assert library.heuristic_calls == 2, "another dtype"
    cublaslt._choose_gemm.cache_clear()
    assert library.destroyed == 8


def test_a_recorded_launch_can_be_repeated_on_another_stream(library, monkeypatch):
    recorded = []
    monkeypatch.setattr(
        cublaslt.RECORDING, "launch", lambda *launch: recorded.append(launch), False
    )
    multiply(operands())
    [(run, (stream, *tensors))] = recorded
    assert stream is STREAM
    run(9, *[x if x is None else x.data_ptr() for x in tensors])
    first, second = library.launches
    assert (first.addresses, first.stream, second.stream) == (second.addresses, 7, 9)


@pytest.mark.parametrize(
    ("scalings", "modes"),
    [((ROWWISE, ROWWISE), (3, 3)), ((BLOCKWISE_1X128, BLOCKWISE_128X128), (4, 5))],
)
def test_scaling_modes_are_passed_to_cublaslt(scalings, modes, library):
    a, b, *_ = operands(m=128, n=256, k=256)
    scales = torch.ones(128, 2), torch.ones(2, 4)
    assert multiply([a, b, *scales], fast_accum=False, scalings=scalings)[0]
    assert (library.attributes[32], library.attributes[31], library.attributes[25]) == (*modes, 0)


def test_multiply_declines_calls_that_torch_must_decide(library, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.tunable, "is_enabled", lambda: True)
        assert not multiply(operands())[0]
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: 8)
        assert not multiply(operands())[0]
    assert not multiply(operands(a_dtype=torch.float8_e5m2fnuz))[0]
    library.status = 15  # the library has no kernel, or has other constants
    assert not multiply(operands())[0]
    cublaslt._choose_gemm.cache_clear()
    library.status = 0
    assert multiply(operands())[0]


def test_a_failed_launch_raises_with_its_status(library):
    multiply(operands())
    library.status = 13
    with pytest.raises(RuntimeError, match="cublasLtMatmul failed with status 13"):
        multiply(operands())
    library.attribute_status, launches = 7, len(library.launches)
    for _ in range(2):  # the first leaves no lock behind
        with pytest.raises(RuntimeError, match="SetAttribute failed with status 7"):
            multiply(operands())
    assert len(library.launches) == launches
