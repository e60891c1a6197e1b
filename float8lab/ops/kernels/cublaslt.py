"""Call GEMMs of cuBLASLt, choosing a kernel once.  M rows of a, N rows of b, K contraction.

Torch asks cuBLASLt at every GEMM of FP8 data which of its kernels suits the sizes. The answer is
always the same, and takes the CPU longer than the launch. This file asks the same question once
for sizes and dtypes, so that the kernel, and with it the bytes, are those of torch.

cuBLASLt has column-major matrices. It sees ``out``, whose rows are contiguous, as the N x M matrix
``b @ a.T``, so our b is its matrix A, and our a is its matrix B.

Source: cuBLAS documentation, "Using the cuBLASLt API"; numbers as in ``cublasLt.h``.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from float8lab.ops.declare import RECORDING
from float8lab.ops.kernels._launch import STREAM, current_stream

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14,
          torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}  # fmt: skip
"""``cudaDataType`` by dtype."""
_COMPUTE_FLOAT32 = 68
_TRANSPOSED_A, _EPILOGUE, _BIAS, _SCALE_A, _SCALE_B, _FAST, _BIAS_TYPE, _MODE_A, _MODE_B = (
    3, 7, 8, 17, 18, 25, 26, 31, 32,
)  # fmt: skip
"""Attributes of a GEMM."""
_ADDS_BIAS = 4
_MODES = {
    ScalingType.TensorWise: 0, ScalingType.RowWise: 3, ScalingType.BlockWise1x128: 4,
    ScalingType.BlockWise128x128: 5,
}  # fmt: skip
"""The layouts of scales, by torch's names."""
_pointer = c_void_p.from_param
"""Convert an address, or None, to an argument that ctypes passes on as it is."""
_MAX_WORKSPACE = 1
_WORKSPACE_BYTES = 1024**2
"""The largest workspace of a kernel, which is torch's limit, too."""


class _Sizes(NamedTuple):
    """All that the choice of a kernel depends on."""

    device: int
    M: int
    N: int
    K: int
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    bias_alignment: int
    """The largest power of 2, up to 256, that divides the address of the bias."""
    fast_accum: bool
    a_scaling: ScalingType
    b_scaling: ScalingType


class _Answer(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def multiply(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor, *,
    scalings: tuple[ScalingType, ScalingType], fast_accum: bool,
) -> bool:  # fmt: skip
    """Compute ``out = a @ b.T + bias`` for contiguous rows, or return False: torch has to do it.

    Torch has to where it decides by more than sizes, or where this file knows no cuBLASLt.

    Args:
        a: ``[M, K]`` in FP8.
        b: ``[N, K]`` in FP8.
        a_scale: the decode scales of a, as torch's ``scaled_mm`` wants them.
        b_scale: the decode scales of b, in the same form.
        bias: ``[N]`` in the dtype of ``out``.
        out: ``[M, N]``, which is written.
        scalings: which blocks of a and of b share a scale.
        fast_accum: whether sums may stay in the tensor cores' own precision.
    """
    if torch._C._get_sm_carveout_experimental() is not None or torch.cuda.tunable.is_enabled():
        return False
    (M, K), device = a.shape, a.get_device()
    address = 0 if bias is None else bias.data_ptr()
    gemm = _choose_gemm(_Sizes(
        device, M, b.shape[0], K, a.dtype, b.dtype, out.dtype, None if bias is None else bias.dtype,
        min(address & -address, 256), fast_accum, *scalings,
    ))  # fmt: skip
    if gemm is None:
        return False
    workspace = None
    if gemm.workspace_bytes:
        workspace = out.new_empty(gemm.workspace_bytes, dtype=torch.uint8)
    tensors = a, b, a_scale, b_scale, bias, out, workspace
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    gemm.launch(current_stream(device), *addresses)
    record = getattr(RECORDING, "launch", None)
    if record is not None:
        record(gemm.launch, (STREAM, *tensors))
    return True


@functools.lru_cache(maxsize=4096)
def _choose_gemm(sizes: _Sizes) -> _ChosenGemm | None:
    try:
        return _ChosenGemm(sizes)
    except (KeyError, OSError, RuntimeError):  # unknown dtype, no library, or other constants
        return None


class _ChosenGemm:
    """A kernel of cuBLASLt for operands of certain sizes. Several threads may launch it."""

    def __init__(self, sizes: _Sizes) -> None:
        M, N, K = sizes[1:4]
        b, a = _new_layout(sizes.b_dtype, K, N), _new_layout(sizes.a_dtype, K, M)
        out = _new_layout(sizes.out_dtype, N, M)
        self._objects = objects = _handle(sizes.device), _new_operation(sizes), b, a, out
        answer = _ask(*objects)
        self.workspace_bytes = int(answer.workspace_bytes)
        # ctypes takes longer to convert arguments than to call, so it converts constants only once.
        handle, operation, *layouts = [_pointer(created.value) for created in objects]
        numbers = byref(c_float(1.0)), byref(c_float(0.0)), byref(answer)
        size = c_size_t.from_param(self.workspace_bytes)
        self._constants = handle, operation, *layouts, *numbers, size
        self._multiply = _library().cublasLtMatmul
        self._set = _library().cublasLtMatmulDescSetAttribute
        self._addresses = c_void_p(), c_void_p(), c_void_p()
        self._attributes = tuple(
            (operation, attribute, byref(address), c_size_t.from_param(8))
            for attribute, address in zip((_SCALE_A, _SCALE_B, _BIAS), self._addresses, strict=True)
        )
        is_used = threading.Lock()
        self._acquire, self._release = is_used.acquire, is_used.release  # ``with`` takes longer

    def launch(
        self, stream: int, a: int, b: int, a_scale: int, b_scale: int, bias: int | None, out: int,
        workspace: int | None,
    ) -> None:  # fmt: skip
        """Multiply the tensors at these addresses on a stream; 0 and None stand for no tensor."""
        handle, operation, b_layout, a_layout, layout, factor, zero, answer, size = self._constants
        (scale_a, scale_b, bias_address), attributes = self._addresses, self._attributes
        call, out_ptr = self._set, _pointer(out)
        self._acquire()
        try:
            scale_a.value, scale_b.value = b_scale, a_scale
            status = call(*attributes[0]) or call(*attributes[1])
            if bias:
                bias_address.value = bias
                status = status or call(*attributes[2])
            if not status:
                call = self._multiply
                status = call(
                    handle, operation, factor, _pointer(b), b_layout, _pointer(a), a_layout, zero,
                    out_ptr, layout, out_ptr, layout, answer, _pointer(workspace), size,
                    _pointer(stream),
                )  # fmt: skip
        finally:
            self._release()
        if status:
            raise RuntimeError(f"{call.__name__} failed with status {status}")


def _new_operation(sizes: _Sizes) -> c_void_p:
    operation = _created("MatmulDesc", _COMPUTE_FLOAT32, _TYPES[torch.float32])
    _set(operation, _TRANSPOSED_A, c_int32(1))
    _set(operation, _FAST, c_int8(sizes.fast_accum))
    for attribute in (_SCALE_A, _SCALE_B):  # the choice depends on whether there are scales
        _set(operation, attribute, c_void_p(256))
    modes = _MODES[sizes.b_scaling], _MODES[sizes.a_scaling]
    if any(modes):  # CUDA 12.6 has mode 0 only, and lacks the attribute
        _set(operation, _MODE_A, c_int32(modes[0]))
        _set(operation, _MODE_B, c_int32(modes[1]))
    if sizes.bias_dtype is not None:
        _set(operation, _EPILOGUE, c_int32(_ADDS_BIAS))
        _set(operation, _BIAS_TYPE, c_int32(_TYPES[sizes.bias_dtype]))
        _set(operation, _BIAS, c_void_p(sizes.bias_alignment))  # the choice sees only the alignment
    return operation


def _new_layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    return _created("MatrixLayout", _TYPES[dtype], c_uint64(rows), c_uint64(columns), c_int64(rows))


def _created(kind: str, *args: object) -> c_void_p:
    """Create an object of cuBLASLt, and destroy it when its last Python reference is gone."""
    created = c_void_p()
    _call(f"cublasLt{kind}Create", byref(created), *args)
    destroy = getattr(_library(), f"cublasLt{kind}Destroy")
    weakref.finalize(created, destroy, c_void_p(created.value)).atexit = False
    return created


def _ask(handle: c_void_p, operation: c_void_p, b: c_void_p, a: c_void_p, out: c_void_p) -> _Answer:
    """Ask cuBLASLt's heuristic which kernel it prefers."""
    preference, count, answer = _created("MatmulPreference"), c_int(), _Answer()
    limit = byref(c_uint64(_WORKSPACE_BYTES)), c_size_t(8)
    _call("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, *limit)
    _call(
        "cublasLtMatmulAlgoGetHeuristic", handle, operation, b, a, out, out, preference, 1,
        byref(answer), byref(count),
    )  # fmt: skip
    if count.value != 1 or answer.state:
        raise RuntimeError(f"cuBLASLt has no kernel for this GEMM (status {answer.state})")
    return answer


def _set(operation: c_void_p, attribute: int, value: c_void_p | c_int8 | c_int32) -> None:
    size = c_size_t(ctypes.sizeof(value))
    _call("cublasLtMatmulDescSetAttribute", operation, attribute, byref(value), size)


def _call(name: str, *args: object) -> None:
    status = getattr(_library(), name)(*args)
    if status:
        raise RuntimeError(f"{name} failed with status {status}")


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the library cuBLASLt that torch has loaded."""
    major = (torch.version.cuda or "").partition(".")[0]
    return ctypes.CDLL(f"libcublasLt.so.{major}")


@functools.cache
def _handle(device: int) -> c_void_p:
    """Create cuBLASLt's state for a GPU, which must be the current GPU."""
    handle = c_void_p()
    _call("cublasLtCreate", byref(handle))
    return handle
