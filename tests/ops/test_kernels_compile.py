"""Every Triton kernel compiles to machine code, without a GPU, with its launcher's arguments.

The launchers run on CPU tensors, and a recorder replaces the launch. The recorded launches are
compiled for several GPUs. Register spills are read from the machine code.
"""

import importlib
import pkgutil
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.backends.nvidia as nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import target_info
from triton.runtime.jit import JITFunction

from float8lab.formats import CASTS, E4M3, E5M2, scale_shape
from float8lab.ops import Prologue, kernels, reference
from float8lab.ops.kernels import (
    _launch,
    attention,
    attention_backward,
    cast_hopper,
    cast_many,
    cast_words,
    cross_entropy,
    few_rows_gemm,
    grouped_cast,
    grouped_gemm,
    hopper_gemm,
    measure,
    moments,
    norm,
    paged_attention,
    permute,
    prologue,
    rotary,
    router,
    scaling,
)
from float8lab.ops.kernels._launch import Launched
from float8lab.ops.kernels.cast import cast
from float8lab.ops.kernels.dequantize import dequantize, transpose
from tests.ops import forms
from tests.ops.groups import cast_groups
from tests.pairwise import with_slow

CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"

POINTER = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16",
    torch.float16: "*fp16", torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
    torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip

x = torch.zeros((256, 512), dtype=torch.bfloat16)
unit_scale = torch.ones(1)
slots, factors = torch.zeros(8), torch.zeros(2, 8)


def quantized(
    block: tuple[int, int], rule: str = "fp32", fp8_dtype: torch.dtype = E4M3,
    matrix: torch.Tensor = x,
) -> Any:  # fmt: skip
    return lambda: forms.quantize(cast, matrix, fp8_dtype, block, rule, 0.0, 16)


def many_quantized(
    block: tuple[int, int], rule: str = "fp32", fp8_dtype: torch.dtype = E4M3,
    dtype: torch.dtype = torch.float32, columns: int = 512,
) -> Any:  # fmt: skip
    def call() -> None:
        xs = [torch.zeros(256, columns, dtype=dtype), torch.zeros(64, columns, dtype=dtype)]
        outputs = [reference.quantize(y, fp8_dtype, block, rule) for y in xs]
        q, scale, amax = map(list, zip(*outputs, strict=True))
        cast_many.cast_many_(xs, q, block, rule, 0.0, scale, amax, [])

    return call


def many_cast(block: tuple[int, int], columns: int = 512) -> Any:
    def call() -> None:
        xs = [torch.zeros(256, columns), torch.zeros(64, columns)]
        scales = [torch.ones(scale_shape(tuple(y.shape), block)) for y in xs]
        cast_many.cast_many_(xs, [y.to(E4M3) for y in xs], block, "encode", 0.0, [], [], scales)

    return call


def quantized_pair(
    block: tuple[int, int], rule: str = "fp32", column_sum: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:  # fmt: skip
    return lambda: forms.quantize_pair(cast, x.to(dtype), E4M3, block, rule, 0.0, 16, column_sum)


def cast_at_once(
    block: tuple[int, int], rule: str = "fp32", fp8_dtype: torch.dtype = E4M3,
    matrix: torch.Tensor = x, **outputs: bool,
) -> Any:  # fmt: skip
    outputs = {"rowwise": True, "columnwise": True, "column_sum": False, **outputs}
    options = (fp8_dtype, block, rule, 0.0, 16)
    arguments = (("", [matrix], matrix.dtype), options, None, None)
    return lambda: cast_words.cast_words(*arguments, **outputs, at_once=True)


def tiles(
    matrix: Prologue, rule: str = "fp32", size: int = 128, fp8_dtype: torch.dtype = E4M3,
    rowwise: bool = True, column_sum: bool = False,
) -> Any:  # fmt: skip
    rows, columns = reference.prologue_shape(*matrix[:2])
    options = (matrix[:3], (fp8_dtype, (1, size), rule, 0.0), (rows, columns, rows))
    return lambda: cast_hopper.cast_tiles(*options, rowwise=rowwise, column_sum=column_sum)


def tiles_of_groups(matrix: Prologue, rule: str = "fp32", column_sum: bool = True) -> Any:
    offsets, options = torch.tensor([100, 256], dtype=torch.int32), (E4M3, (1, 128), rule, 0.0)
    return lambda: grouped_cast.cast_tiles_of_groups(
        matrix[:3], offsets, options, rowwise=True, column_sum=column_sum,
        plan=grouped_cast.plan_groups(offsets, reference.prologue_shape(*matrix[:2])[0]),
    )  # fmt: skip


def encoded(
    factor: torch.Tensor, block: tuple[int, int], slot: torch.Tensor | None = None,
    divide: bool = False,
) -> Any:  # fmt: skip
    return lambda: forms.encode(cast, x, factor, slot, E4M3, block, 16, divide)


def encoded_pair(column_sum: bool, fp8_dtype: torch.dtype = E4M3) -> Any:
    return lambda: forms.encode_pair(cast, x, unit_scale, unit_scale, fp8_dtype, 16, column_sum)


def dequantized(scale: torch.Tensor, block: tuple[int, int]) -> Any:
    return lambda: dequantize(x.to(E4M3), scale, block, torch.bfloat16)


vector, row_vector = torch.ones(512), torch.ones(256)
INPUTS: dict[str, list[torch.Tensor]] = {
    "layer_norm": [x, row_vector, vector, row_vector, vector],
    "rms_norm": [x, row_vector, vector],
    "multiply": [x, x],
    "swiglu": [x],
    "gelu_backward": [x, x],
    "swiglu_backward": [x, x[:, :256].contiguous()],
    "geglu_backward": [x, x[:, :256].contiguous()],
    "clamped_swiglu_interleaved_backward": [x, x[:, :256].contiguous()],
}
PROLOGUES = {name: Prologue(name, inputs, torch.bfloat16) for name, inputs in INPUTS.items()}
PLAIN, HALF = Prologue("", [x], x.dtype), Prologue("", [x.half()], torch.float16)
WIDE = Prologue("geglu_backward", [x.float(), x[:, :256].float()], torch.float32)


def encoded_of(name: str, columnwise: bool = False, slot: torch.Tensor | None = None) -> Any:
    options = (unit_scale, slot, E4M3, (-1, -1), 16)
    return lambda: forms.encode(cast, PROLOGUES[name], *options, columnwise=columnwise)


def encoded_pair_of(name: str, slot: torch.Tensor | None = None) -> Any:
    return lambda: forms.encode_pair(cast, PROLOGUES[name], unit_scale, slot, E5M2, 16, True)


def quantized_of(
    name: str, block: tuple[int, int], columnwise: bool = False, rule: str = "fp32"
) -> Any:
    options = (E4M3, block, rule, 0.0, 16)
    return lambda: forms.quantize(cast, PROLOGUES[name], *options, columnwise=columnwise)


def quantized_pair_of(name: str, block: tuple[int, int], rule: str = "fp32") -> Any:
    return lambda: forms.quantize_pair(cast, PROLOGUES[name], E4M3, block, rule, 0.0, 16, True)


def normed(center: bool, columns: int) -> Any:
    y = x.view(-1, columns)
    return lambda: norm.norm(
        y, torch.ones(columns), torch.ones(columns) if center else None, 1e-5, center,
        torch.bfloat16,
    )  # fmt: skip


def norm_stats(center: bool) -> Any:
    bias = vector if center else None
    options = (1e-5, center, torch.bfloat16, None, (), False, True)
    return lambda: norm.norm(x, vector, bias, *options)


def norm_backward(center: bool, columns: int) -> Any:
    y = x.view(-1, columns)
    stats = torch.ones(y.shape[0])
    return lambda: norm.norm_backward(
        y, y, torch.ones(columns), stats, stats, center, torch.bfloat16
    )


def fp8_normed(center: bool, columns: int, scale: torch.Tensor, block: tuple[int, int]) -> Any:
    q = x.view(-1, columns).to(E4M3)
    return lambda: norm.norm(
        q, torch.ones(columns), torch.ones(columns) if center else None, 1e-5, center,
        torch.bfloat16, scale, block,
    )  # fmt: skip


def fp8_norm_backward(
    center: bool, columns: int, scale: torch.Tensor, block: tuple[int, int]
) -> Any:
    y = x.view(-1, columns)
    stats = torch.ones(y.shape[0])
    return lambda: norm.norm_backward(
        y, y.to(E5M2), torch.ones(columns), stats, stats, center, torch.bfloat16, scale, block
    )


def rotated(R: int, interleaved: bool, backward: bool) -> Any:
    t, angles = x.view(2, 32, 16, 128), torch.ones(1, 32, 1, R)
    return lambda: rotary.rotate(t, angles, angles, interleaved, backward)


def scattered(with_probs: bool = False, scales: int = 0, merged: bool = False) -> Any:
    """32 tokens of 4096 features to 64 rows; FP8 bytes if a row has ``scales`` blocks."""
    row_map = torch.zeros((32, 9), dtype=torch.int32)
    probs = torch.zeros(32, 8) if with_probs else None
    scale = torch.zeros(scales, 32).t() if scales else None
    rows = x.view(32, -1).to(E4M3).view(torch.uint8) if scales else x.view(32, -1)
    y = x.view(64, -1).repeat(1, 2) if merged else None
    return lambda: permute.scatter_rows(rows, row_map, 64, probs, y, scale, scale)


def gathered(with_probs: bool, in_fp8: bool = False) -> Any:
    row_map, probs = torch.zeros((32, 129), dtype=torch.int32), torch.zeros(32, 128)
    row_probs = None if with_probs else torch.zeros(64)
    y = x.view(64, -1)
    options = (y.dtype, probs if with_probs else None, row_probs)
    if in_fp8:
        return lambda: permute.gather_rows(
            y.to(E5M2), row_map, *options, torch.ones(16, 64).t(), 128
        )
    return lambda: permute.gather_rows(y, row_map, *options)


def routed(name: str, experts: int, *options: Any, backward: bool = False) -> Any:
    logits, bias = torch.zeros(64, experts), None if name == "softmax" else torch.zeros(experts)
    if backward:
        arguments = (logits, logits, logits.bool(), 8, name, *options)
        return lambda: router.route_backward(*arguments)
    return lambda: router.route(logits, bias, 8, name, *options)


def entropy(*, backward: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    logits, target = torch.zeros(8, 64128, dtype=dtype), torch.zeros(8, dtype=torch.int64)
    if backward:
        return lambda: cross_entropy.cross_entropy_backward(logits, target, torch.zeros(4, 8))
    return lambda: cross_entropy.cross_entropy_statistics(logits, target)


def moments_of(*, is_square: bool) -> Any:
    data, scale = torch.zeros(256, 512, dtype=torch.uint8), torch.zeros(256, 4, dtype=torch.uint8)

    def launch() -> None:
        moments.quantize_moment_(x.float(), data, scale, 3, is_square)
        moments.dequantize_moment(data, scale, is_square)

    return launch


def measured(block: tuple[int, int]) -> Any:
    return lambda: measure.measure_cast(
        x.float(), x.to(E4M3), torch.ones(scale_shape(tuple(x.shape), block)), block
    )


def grouped_casts(
    block: tuple[int, int], rule: str = "fp32",
    outputs: tuple[bool, bool, bool] = (True, True, True), prologue: str = "", batch: bool = False,
    given_scale: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    offsets = None if batch else torch.tensor([100, 256], dtype=torch.int32)
    y = torch.zeros((2, 256, 512), dtype=torch.bfloat16) if batch else x
    inputs = [y[:, :256].contiguous(), y] if prologue.endswith("_backward") else [y]
    inputs = inputs[::-1] if prologue.endswith("_backward") else inputs
    inputs = [y, torch.zeros(256, dtype=torch.int32)] if prologue == "permute" else inputs
    slot = None if given_scale is None else slots[: given_scale.numel()]
    rest = (y.dtype, offsets, E4M3, block, rule, 0.0, *outputs[: 2 + (not batch)])
    rest = (*rest, *[False] * batch, given_scale, slot)
    return lambda: cast_groups(cast, prologue, inputs, *rest)


def few_rows(M: int, N: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    a, b = torch.zeros(M, 4096).to(E4M3), torch.zeros(N, 4096).to(E4M3)
    bias, scales = None if M == 16 else torch.zeros(N), (torch.zeros(M, 1), torch.zeros(N, 1))
    return lambda: few_rows_gemm.multiply_few_rows(a, b, *scales, bias, dtype, None)


LAUNCHES: dict[str, Callable[[], Any]] = {
    "groups-tensor": grouped_casts((-1, -1)),
    "groups-row": grouped_casts((1, -1)),
    "groups-1x128": grouped_casts((1, 128)),
    "groups-1x32-e8m0": grouped_casts((1, 32), "e8m0", (True, True, False)),
    "groups-of-swiglu": grouped_casts((1, 128), prologue="swiglu"),
    "groups-of-swiglu-backward": grouped_casts((-1, -1), prologue="swiglu_backward"),
    "groups-of-clamped-swiglu": grouped_casts((1, 128), prologue="clamped_swiglu_interleaved"),
    "groups-of-clamped-swiglu-backward": grouped_casts(
        (1, 128), prologue="clamped_swiglu_interleaved_backward"
    ),
    "groups-of-tokens": grouped_casts((1, 128), prologue="permute"),
    "groups-of-tokens-row": grouped_casts((1, -1), prologue="permute"),
    "groups-given": grouped_casts((-1, -1), "encode", given_scale=slots[:2]),
    "batch-128x128": grouped_casts((128, 128), outputs=(True, False, False), batch=True),
    "batch-tensor": grouped_casts((-1, -1), batch=True),
    "batch-given": grouped_casts((-1, -1), "encode", given_scale=slots[:2], batch=True),
    "batch-row": grouped_casts((1, -1), batch=True),
    "clear-rows": lambda: grouped_gemm.zero_padding_rows(x, torch.tensor([3, 7])),
    "clear-batch": lambda: grouped_gemm.zero_padding_rows(
        x.view(2, 128, 512), torch.tensor([3, 7])
    ),
    "route-softmax": routed("softmax", 128, False, 1, 0, 1.0, False),
    "route-sigmoid-groups": routed("sigmoid", 256, False, 8, 4, 2.5, False),
    "route-sqrtsoftplus-dense": routed("sqrtsoftplus", 512, False, 1, 0, 1.0, True),
    "route-softmax-backward": routed("softmax", 128, False, 1.0, False, backward=True),
    "route-sqrtsoftplus-backward": routed("sqrtsoftplus", 256, False, 2.5, False, backward=True),
    "cross-entropy": entropy(),
    "cross-entropy-float32": entropy(dtype=torch.float32),
    "cross-entropy-backward": entropy(backward=True),
    "measured-tensor": measured((-1, -1)),
    "measured-1x32": measured((1, 32)),
    "moments": moments_of(is_square=False),
    "moments-of-squares": moments_of(is_square=True),
    "row-map": lambda: permute.row_map_of(torch.zeros(512, 128, dtype=torch.bool)),
    "row-map-256": lambda: permute.row_map_of(torch.zeros(512, 256, dtype=torch.int32)),
    "row-map-index": lambda: permute.row_map_of(torch.zeros(512, 8, dtype=torch.int64), 128),
    "permute": scattered(),
    "permute-1x128-with-probs": scattered(True, scales=32),
    "permute-backward": gathered(with_probs=False),
    "unpermute-fp8": gathered(with_probs=False, in_fp8=True),
    "unpermute-with-probs": gathered(with_probs=True),
    "unpermute-with-probs-backward": scattered(True, merged=True),
    "rotary": rotated(128, interleaved=False, backward=False),
    "rotary-part-interleaved-back": rotated(48, interleaved=True, backward=True),
    "tensor": quantized((-1, -1)),
    "tensor-e5m2-pow2": quantized((-1, -1), "pow2", E5M2),
    "tensor-both": quantized_pair((-1, -1)),
    "tensor-both-sum": quantized_pair((-1, -1), column_sum=True),
    "tensor-column-major": quantized((-1, -1), matrix=x.t()),
    "row": quantized((1, -1)),
    "row-long": quantized((1, -1), matrix=x.view(8, -1)),
    "row-column-major": quantized((1, -1), matrix=x.t()),
    "row-both": quantized_pair((1, -1)),
    "row-both-sum": quantized_pair((1, -1), column_sum=True),
    "at-once-tensor": cast_at_once((-1, -1), column_sum=True),
    "at-once-tensor-by-rows": cast_at_once((-1, -1), "pow2", E5M2, columnwise=False),
    "at-once-row": cast_at_once((1, -1), column_sum=True),
    "at-once-row-float16": cast_at_once((1, -1), "pow2", E5M2, x.half()),
    "at-once-row-transposed": cast_at_once((1, -1), rowwise=False),
    "1x128": quantized((1, 128)),
    "1x128-both": quantized_pair((1, 128)),
    "1x128-both-float32": quantized_pair((1, 128), dtype=torch.float32),
    "tiles": tiles(PLAIN),
    "tiles-pow2-sum": tiles(PLAIN, "pow2", column_sum=True),
    "tiles-float16": tiles(HALF, fp8_dtype=E5M2, column_sum=True),
    "tiles-1x32-e8m0": tiles(PLAIN, "e8m0", size=32),
    "tiles-1x8-sum": tiles(PLAIN, size=8, column_sum=True),
    "row-both-float32": quantized_pair((1, -1), dtype=torch.float32),
    "128x128": quantized((128, 128)),
    "128x128-both": quantized_pair((128, 128)),
    "1x32-e8m0": quantized((1, 32), "e8m0"),
    "32x32-both": quantized_pair((32, 32)),
    "few-rows": few_rows(16, 4096),
    "few-rows-wide-float32": few_rows(32, 28672, torch.float32),
    "many-tensors": many_quantized((-1, -1)),
    "many-tensors-e5m2-pow2": many_quantized((-1, -1), "pow2", E5M2, torch.bfloat16),
    "many-tensors-odd": many_quantized((-1, -1), columns=500),
    "many-row": many_quantized((1, -1)),
    "many-row-long": many_quantized((1, -1), columns=14336),
    "many-row-odd": many_quantized((1, -1), columns=9001),
    "many-1x128": many_quantized((1, 128)),
    "many-1x128-odd": many_quantized((1, 128), dtype=torch.bfloat16, columns=500),
    "many-128x128": many_quantized((128, 128)),
    "many-128x128-odd": many_quantized((128, 128), dtype=torch.bfloat16, columns=500),
    "many-1x32-e8m0": many_quantized((1, 32), "e8m0"),
    "many-cast": many_cast((-1, -1)),
    "many-cast-128x128": many_cast((128, 128)),
    "many-cast-4x128": many_cast((4, 128)),
    "many-cast-odd": many_cast((128, 128), columns=500),
    "cast": encoded(unit_scale, (-1, -1)),
    "cast-amax": encoded(unit_scale, (-1, -1), unit_scale),
    "cast-divides": encoded(unit_scale, (-1, -1), divide=True),
    "cast-1x128-divides": encoded(torch.ones(256, 4), (1, 128), divide=True),
    "cast-row": encoded(torch.ones(256, 1), (1, -1)),
    "cast-1x128": encoded(torch.ones(256, 4), (1, 128)),
    "cast-128x128": encoded(torch.ones(2, 4), (128, 128)),
    "cast-both": encoded_pair(column_sum=False),
    "cast-both-sum": encoded_pair(column_sum=True),
    "cast-both-e5m2": encoded_pair(column_sum=False, fp8_dtype=E5M2),
    "transpose": lambda: transpose(x.to(E4M3), 16),
    "dequantize": dequantized(unit_scale, (-1, -1)),
    "dequantize-row": dequantized(torch.ones(256, 1), (1, -1)),
    "dequantize-1x32": dequantized(torch.ones(256, 16), (1, 32)),
    "layer-norm": normed(True, 512),
    "rms-norm-long": normed(False, 16384),
    "rms-norm-stats": norm_stats(False),
    "layer-norm-backward": norm_backward(True, 4096),
    "layer-norm-backward-long": norm_backward(True, 8192),
    "rms-norm-backward": norm_backward(False, 512),
    "layer-norm-of-tensor": fp8_normed(True, 4096, unit_scale, (-1, -1)),
    "layer-norm-of-1x128": fp8_normed(True, 8192, torch.ones(16, 64), (1, 128)),
    "rms-norm-of-row-long": fp8_normed(False, 16384, torch.ones(8, 1), (1, -1)),
    "rms-norm-of-128x128": fp8_normed(False, 512, torch.ones(2, 4), (128, 128)),
    "layer-norm-backward-of-tensor": fp8_norm_backward(True, 4096, unit_scale, (-1, -1)),
    "layer-norm-backward-of-1x128": fp8_norm_backward(True, 8192, torch.ones(16, 64), (1, 128)),
    "rms-norm-backward-of-row": fp8_norm_backward(False, 512, torch.ones(256, 1), (1, -1)),
    "value-of-swiglu": lambda: prologue.value_of(*PROLOGUES["swiglu"][:3]),
    "value-of-geglu-backward": lambda: prologue.value_of(
        *PROLOGUES["geglu_backward"][:2], torch.float32
    ),
    "cast-of-layer-norm": encoded_of("layer_norm", slot=unit_scale),
    "cast-of-rms-norm-transposed": encoded_of("rms_norm", columnwise=True),
    "cast-of-multiply-transposed": encoded_of("multiply", columnwise=True),
    "cast-of-swiglu": encoded_of("swiglu", slot=unit_scale),
    "cast-both-of-gelu-backward": encoded_pair_of("gelu_backward", slot=unit_scale),
    "cast-both-of-geglu-backward": encoded_pair_of("geglu_backward", slot=unit_scale),
    "cast-both-of-float32": lambda: forms.encode_pair(
        cast, WIDE, unit_scale, unit_scale, E5M2, 16, True
    ),
    "tensor-of-rms-norm": quantized_of("rms_norm", (-1, -1)),
    "tensor-both-of-swiglu-backward": quantized_pair_of("swiglu_backward", (-1, -1)),
    "row-of-layer-norm": quantized_of("layer_norm", (1, -1)),
    "row-of-swiglu-transposed": quantized_of("swiglu", (1, -1), columnwise=True),
    "row-both-of-geglu-backward": quantized_pair_of("geglu_backward", (1, -1)),
    **{
        f"tiles-of-{name.replace('_', '-')}": tiles(computed)
        for name, computed in PROLOGUES.items()
    },
    "tiles-of-layer-norm-transposed": tiles(PROLOGUES["layer_norm"], rowwise=False),
    "tiles-of-clamped-swiglu-backward": tiles(PROLOGUES["clamped_swiglu_interleaved_backward"]),
    "groups-by-tiles": tiles_of_groups(PLAIN),
    "groups-by-tiles-of-swiglu": tiles_of_groups(PROLOGUES["swiglu"], column_sum=False),
    "groups-by-tiles-of-swiglu-backward": tiles_of_groups(PROLOGUES["swiglu_backward"]),
    "groups-by-tiles-of-tokens": tiles_of_groups(
        Prologue("permute", [x, torch.zeros(256, dtype=torch.int32)], x.dtype), "pow2"
    ),
    "tiles-of-swiglu-backward-sum": tiles(PROLOGUES["swiglu_backward"], column_sum=True),
    "update-scales": lambda: scaling.update_scales_(
        torch.zeros(1024, 8), slots, factors, slots.int(), slots, 0, 1, False, True
    ),
    "update-scales-newest": lambda: scaling.update_scales_(
        torch.zeros(4096, 8), slots, factors, slots.int(), slots, 0, 1, True, False
    ),
}
"""Calls whose kernels must not spill; the tables below have the calls of all other kernels."""


def attended(
    D: int, DV: int, mask: tuple[int, int, int] = (-1, -1, 0), fp8_dtype: torch.dtype = E4M3,
    SQ: int = 256, SK: int = 256, packed: bool = False, dtype: torch.dtype = torch.bfloat16,
    padded: bool = False,
) -> Any:  # fmt: skip
    sizes = (SQ, D), (SK, D), (SK, DV)
    q, k, v = (torch.zeros(1, 2, *size).to(fp8_dtype) for size in sizes)
    offsets = [torch.tensor([0, 100, 256], dtype=torch.int32)] * 2 if packed or padded else []
    offsets += [torch.arange(256, dtype=torch.int32)] * padded
    return lambda: attention.fp8_attention(
        q, k, v, unit_scale, unit_scale, unit_scale, mask, 0.1, dtype, *offsets
    )


CAUSAL, WINDOW = (-1, 0, 0), (100, 0, 0)
ATTENTION: dict[str, Callable[[], Any]] = {
    "attention": attended(128, 128),
    "attention-causal": attended(128, 128, CAUSAL),
    "attention-64": attended(64, 64, CAUSAL),
    "attention-24-80-e5m2": attended(24, 80, fp8_dtype=E5M2),
    "attention-one-key": attended(32, 32, SK=1),
    "attention-one-query": attended(128, 128, CAUSAL, SQ=1),
    "attention-bottom-right": attended(128, 128, CAUSAL, SK=512),
    "attention-window": attended(128, 128, WINDOW),
    "attention-window-float32": attended(128, 128, (64, 64, 0), dtype=torch.float32),
    "attention-packed": attended(128, 128, CAUSAL, packed=True),
    "attention-packed-window": attended(128, 128, WINDOW, packed=True),
    "attention-padded-causal": attended(128, 128, CAUSAL, padded=True),
    "attention-192-128": attended(192, 128, CAUSAL),
    "attention-192-128-window-packed-float32": attended(
        192, 128, WINDOW, packed=True, dtype=torch.float32
    ),
    "attention-256": attended(256, 256, CAUSAL),
    "attention-64-256": attended(64, 256, WINDOW),
    "attention-256-window-packed-float32": attended(
        256, 256, WINDOW, packed=True, dtype=torch.float32
    ),
}
"""FP8 attention runs only on Hopper's tensor cores; its softmax is approximate."""


def attended_backward(
    mask: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16, G: int = 2, SK: int = 256,
    packed: bool = False, heads: tuple[int, int] = (128, 128), padded: bool = False,
) -> Any:  # fmt: skip
    D, DV = heads
    q, out = torch.zeros(1, 2, 256, D).to(E4M3), torch.zeros(1, 2, 256, DV, dtype=dtype)
    k, v = (torch.zeros(1, G, SK, size).to(E4M3) for size in heads)
    lse = torch.zeros(1, 2, 256)
    offsets = [torch.tensor([0, 100, 256], dtype=torch.int32)] * 2 if packed or padded else []
    tokens = [0, 0, *[torch.arange(256, dtype=torch.int32)] * 2] if padded else []
    return lambda: attention_backward.fp8_attention_backward(
        out, q, k, v, unit_scale, unit_scale, unit_scale, out, lse, lse, mask, 0.1, *offsets,
        *tokens,
    )  # fmt: skip


ATTENTION_BACKWARD: dict[str, Callable[[], Any]] = {
    "attention-backward": attended_backward((-1, -1, 0)),
    "attention-backward-causal": attended_backward(CAUSAL),
    "attention-backward-grouped-two-keys-float32": attended_backward(
        (-1, -1, 0), torch.float32, G=1, SK=2
    ),
    "attention-backward-window": attended_backward((64, 64, 0)),
    "attention-backward-window-left": attended_backward((64, -1, 0)),
    "attention-backward-packed": attended_backward((-1, -1, 0), packed=True),
    "attention-backward-packed-causal": attended_backward(CAUSAL, packed=True),
    "attention-backward-padded-causal": attended_backward(CAUSAL, padded=True),
    "attention-backward-packed-window-float32": attended_backward(
        WINDOW, torch.float32, packed=True
    ),
    "attention-backward-64-causal": attended_backward(CAUSAL, heads=(64, 64)),
    "attention-backward-24-100-packed": attended_backward(
        (-1, -1, 0), packed=True, heads=(24, 100)
    ),
}

ALLOWED_SPILLS = {
    "attention-window-float32": 32,
    "attention-packed-window": 24,
    "attention-192-128": 24,
    "attention-192-128-window-packed-float32": 64,
    "attention-256-window-packed-float32": 8,
    "attention-backward": 48,
    "attention-backward-causal": 72,
    "attention-backward-grouped-two-keys-float32": 56,
    "attention-backward-window": 112,
    "attention-backward-window-left": 80,
    "attention-backward-packed": 72,
    "attention-backward-packed-causal": 88,
    "attention-backward-padded-causal": 96,
    "attention-backward-packed-window-float32": 112,
    "attention-backward-64-causal": 8,
    "attention-backward-24-100-packed": 8,
    "pages-fp8": 64,  # 128 keys in FP8 are faster than 64, which spill nothing
}
"""The spilled bytes of a thread; nearly all are written and read once per tile."""


def gemm_of_blocks(out_dtype: torch.dtype, b_block: int, a_dtype: torch.dtype = E4M3) -> Any:
    a, b = torch.zeros(384, 512).to(a_dtype), torch.zeros(512, 512).to(E4M3)
    scales = torch.ones(4, 384).t(), torch.ones(4, 512 // b_block).t()
    y, mode = torch.empty(384, 512, dtype=out_dtype), "rows" if b_block == 1 else "block"
    return lambda: hopper_gemm.multiply_tiles(mode, a, scales[0], b, scales[1], None, y)


def gemm_of_groups(
    mode: str, out_dtype: torch.dtype = torch.bfloat16, contracts: bool = False, bias: bool = False,
    a_dtype: torch.dtype = E4M3,
) -> Any:  # fmt: skip
    """A GEMM of 2 experts with weights of 512 by 384, or a contraction in 2 groups."""
    E, M, N, K = 2, 256, 512, 384
    a = torch.zeros(M, K).to(a_dtype)
    b = torch.zeros((N, K) if contracts else (E, N, K)).to(E4M3)
    scale = {"fast": (E, 1, 1), "precise": (E, M, 1) if contracts else (M, 1)}
    a_scale = torch.ones(scale.get(mode, (3, M)))
    a_scale = a_scale if mode in scale else a_scale.t()
    b_scale = torch.ones(
        {"fast": (E, 1, 1), "precise": (E, N, 1), "block": (E, 4, 3)}.get(mode, (N, 3))
    )
    group_bias = torch.zeros(E, N, dtype=torch.bfloat16) if bias else None
    offs = torch.tensor([100, 200], dtype=torch.int32)
    return lambda: grouped_gemm.multiply_groups(
        mode, a, a_scale, b, b_scale, group_bias, offs, out_dtype
    )


GEMMS: dict[str, Callable[[], Any]] = {
    "groups-fast-bias": gemm_of_groups("fast", bias=True),
    "groups-precise": gemm_of_groups("precise"),
    "groups-precise-bias": gemm_of_groups("precise", bias=True, a_dtype=E5M2),
    "groups-precise-contraction-float32": gemm_of_groups("precise", torch.float32, contracts=True),
    "groups-block": gemm_of_groups("block"),
    "groups-block-bias-float32": gemm_of_groups("block", torch.float32, bias=True),
    "groups-rows-contraction": gemm_of_groups("rows", contracts=True),
    "1x128-by-1x128": gemm_of_blocks(torch.bfloat16, 1),
    "1x128-by-1x128-e5m2": gemm_of_blocks(torch.float16, 1, E5M2),
    "1x128-by-1x128-float32": gemm_of_blocks(torch.float32, 1),
    "1x128-by-128x128": gemm_of_blocks(torch.bfloat16, 128),
}


def attended_in_pages(cache: torch.dtype, D: int = 128, S: int = 1) -> Any:
    q, k = torch.zeros(2, 32, S, D, dtype=torch.bfloat16), torch.zeros(20, 8, 128, D).to(cache)
    scale = torch.ones(20, 8, 128, 1) if cache.itemsize == 1 else None
    table, sequences = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)
    return lambda: paged_attention.paged_attention(
        q, k, k, scale, scale, table, sequences, -1, 0, 0.1
    )


def written_to_pages(cache: torch.dtype) -> Any:
    x, data = torch.zeros(4, 8, 1, 128, dtype=torch.bfloat16), torch.zeros(20, 8, 128, 128)
    scale = torch.ones(20, 8, 128, 1) if cache.itemsize == 1 else None
    tokens = torch.zeros(4, 4, dtype=torch.int64)
    return lambda: paged_attention.write_pages_(x, data.to(cache), scale, tokens)


def merged() -> Any:
    x, lse = torch.zeros(1, 64, 32, 128, dtype=torch.bfloat16), torch.zeros(1, 32, 64)
    return attention.merge_attention_(x.transpose(1, 2), lse, x.transpose(1, 2), lse)


PAGED: dict[str, Callable[[], Any]] = {
    "outputs-merged": merged,
    "pages": attended_in_pages(torch.bfloat16),
    "pages-fp8": attended_in_pages(E4M3),
    "pages-e5m2-192": attended_in_pages(E5M2, D=192, S=4),
    "pages-written": written_to_pages(torch.bfloat16),
    "pages-written-fp8": written_to_pages(E4M3),
    "pages-written-e5m2": written_to_pages(E5M2),
}

ON_ALL_FP8_GPUS = (
    *("tensor-both", "row-both", "1x128-both", "many-tensors", "many-1x128"),
    *("cast-amax", "transpose", "dequantize", "1x32-e8m0"),
)
WITHOUT_FP8 = (
    *("layer-norm", "rms-norm-backward", "route-softmax", "route-softmax-backward", "row-map"),
    *("permute", "permute-backward", "rotary", "cross-entropy", "cross-entropy-backward"),
    *("value-of-swiglu", "value-of-geglu-backward", "transpose", "clear-rows", "update-scales"),
    *("moments", "moments-of-squares"),
)
"""Kernels without casts, which also run on GPUs for which Triton has no e4m3."""
SINCE_HOPPER = ("tiles", "tiles-1x32-e8m0", "tiles-of-swiglu-backward")

Launch = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]


def launches(call: Callable[[], Any]) -> list[Launch]:
    """The kernels that a launcher launches, with their arguments."""
    recorded: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        recorded.append((self, args, kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        for module in (attention._common, hopper_gemm):
            patch.setattr(module, "multiprocessors", lambda device: 132)
        call()
    return recorded


def compile_launch(launch: Launch, capability: int) -> Any:
    """Compile as the launch would, with the same types, constants and divisibility by 16."""
    kernel, args, kwargs = launch
    names = [parameter.name for parameter in kernel.params]
    values = dict(zip(names, args, strict=False))
    values |= {name: value for name, value in kwargs.items() if name in names}
    options = {name: value for name, value in kwargs.items() if name not in names}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTER[value.dtype]
        elif isinstance(value, TensorDescriptor):
            tile = f"{POINTER[value.base.dtype][1:]}{value.block_shape}"
            signature[parameter.name] = f"tensordesc<{tile},{value.layout!r}>"
        elif (
            parameter.is_constexpr
            or value is None
            or (type(value) is int and value == 1 and not parameter.do_not_specialize)
        ):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, int):
            signature[parameter.name] = "i32"
        else:
            signature[parameter.name] = "fp32"
        aligned = isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)
        if aligned and not parameter.do_not_specialize and signature[parameter.name] != "constexpr":
            attributes[(index,)] = [["tt.divisibility", 16]]
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    with pytest.MonkeyPatch.context() as patch:
        # Kernels ask the driver for the capability of the GPU; there is no driver here.
        current_target = Mock(return_value=target, __triton_builtin__=True)
        patch.setattr(target_info, "current_target", current_target)
        return triton.compile(source, target=target, options=options)


def resources(compiled: Any, folder: Path) -> dict[str, int]:
    """The registers and local memory of a kernel; spilled registers are on the stack."""
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run(
        [CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True
    ).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}


def all_kernels() -> Iterator[str]:
    for module in pkgutil.iter_modules(kernels.__path__):
        names = vars(importlib.import_module(f"{kernels.__name__}.{module.name}"))
        for name, value in names.items():
            if isinstance(value, (JITFunction, Launched)) and name.endswith("_kernel"):
                yield f"{module.name}.{name}"


def test_the_tables_launch_every_kernel() -> None:
    compiled = set()
    for call in (LAUNCHES | ATTENTION | ATTENTION_BACKWARD | GEMMS | PAGED).values():
        for kernel, _, _ in launches(call):
            compiled.add(f"{kernel.fn.__module__.rsplit('.', 1)[1]}.{kernel.fn.__name__}")
    assert compiled == set(all_kernels())


RECORDABLE = {
    **LAUNCHES,
    **PAGED,
    **{n: call for n, call in GEMMS.items() if n.startswith("groups")},
}


def test_launches_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher passes arguments that ``Launched`` would have to leave to Triton."""
    monkeypatch.setattr(_launch, "current_device", lambda: 0)
    target = SimpleNamespace(backend="cuda")
    compiled = SimpleNamespace(
        metadata=SimpleNamespace(target=target), run=None, function=None, packed_metadata=None
    )
    unrecordable = []
    for name, call in RECORDABLE.items():
        for kernel, args, constants in launches(call):
            recorded_kernel = Launched(kernel)
            recorded_kernel._remember(compiled, args, constants)
            unrecordable += [] if recorded_kernel._compiled else [f"{name}: {kernel.fn.__name__}"]
    assert unrecordable == []


COUNTS_REGISTERS = triton.__version__.startswith("3.6.")
"""The Triton of the GPU machines. Kernels of other versions are as correct, but may spill."""
counts_registers = pytest.mark.skipif(
    not COUNTS_REGISTERS,
    reason=f"registers are counted as Triton 3.6 gives them; this is {triton.__version__}",
)


@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_compile_for_hopper_without_spills(name: str, tmp_path: Path) -> None:
    for launch in launches(LAUNCHES[name]):
        compiled = compile_launch(launch, 90)
        check_infinities(name, compiled.asm["ptx"])
        check_arithmetic(compiled.asm["ptx"])
        if name.startswith("many-"):
            check_wide_accesses(compiled.asm["ptx"], odd=name.endswith("-odd"))
        if "permute" in name:
            check_rows_move_by_16_bytes(compiled.asm["ptx"])
        if COUNTS_REGISTERS:
            used = resources(compiled, tmp_path)
            assert used["STACK"] == used["LOCAL"] == 0, f"{launch[0].fn.__name__} spills: {used}"
            assert used["REG"] <= 168, f"{launch[0].fn.__name__} leaves no room for others: {used}"
            if name.startswith("at-once"):
                assert used["REG"] <= 128, "four programs of 128 threads must fit together"
            if name.startswith("tiles"):
                check_three_tiles_share_a_multiprocessor(name, compiled, used["REG"])


def without_infinity_marks(ptx: str) -> tuple[str, int]:
    """PTX without the exact operations that turn infinities into NaN, and the number of values."""
    remaining, float32_marks = re.subn(r"fma\.rn\.f32\s+%r\d+, (%r\d+), 0f00000000, \1;", "", ptx)
    remaining, pairs = re.subn(r"fma\.rn\.b?f16x2\s+%r\d+, (%r\d+), zero, \1;", "", remaining)
    return remaining, float32_marks + 2 * pairs


MARKED_ONCE_FOR_BOTH = {
    *("row-both-float32", "groups-tensor", "groups-row", "groups-given", "groups-of-tokens-row"),
    *("groups-of-swiglu-backward", "batch-tensor", "batch-row", "batch-given"),
}
"""Kernels that mark values once for both orientations."""


def check_infinities(name: str, ptx: str) -> None:
    """Every cast distinguishes infinities from large numbers; the instruction saturates both."""
    marks = without_infinity_marks(ptx)[1]
    if name in MARKED_ONCE_FOR_BOTH:
        marks *= 2
    assert 2 * ptx.count("cvt.rn.satfinite.e4m3x2.f32") <= marks
    compared = ptx.count("set.eq.f32.f32") + 2 * ptx.count("set.eq.bf16x2.bf16x2")
    assert 2 * ptx.count("cvt.rn.satfinite.e5m2x2.f32") == compared


def check_arithmetic(ptx: str) -> None:
    """No flushed denormals, no approximate division, no NaN-propagating minimum (triton 11111)."""
    ptx = ptx.replace("rcp.approx.ftz", "")  # in a sigmoid, with an argument of at least 1
    ptx, _ = without_infinity_marks(ptx)
    assert ".ftz" not in ptx
    assert "div.full" not in ptx
    assert "div.approx" not in ptx
    assert ".NaN" not in ptx
    assert "fma" not in ptx


def check_wide_accesses(ptx: str, *, odd: bool) -> None:
    """Kernels of tables load aligned matrices by wide words; table entries carry no alignment."""
    assert bool(re.search(r"ld\.global\S*\.v4\.b32", ptx)) != odd
    if not odd:
        assert not re.search(r"(ld|st)\.global\S*\.b(8|16)\b", ptx)


def check_rows_move_by_16_bytes(ptx: str) -> None:
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx)
    assert re.search(r"st\.global\S*\.v4\.b32", ptx)


def check_three_tiles_share_a_multiprocessor(name: str, compiled: Any, registers: int) -> None:
    """The tiles also load and store words of 8 or 16 bytes."""
    assert registers * 256 * 3 <= 2**16
    assert compiled.metadata.shared * 3 <= 227 * 1024
    assert re.search(r"ld\.global\S*\.v4\.b32", compiled.asm["ptx"]) or "-of-" in name
    assert re.search(r"st\.global\S*\.v2\.b32", compiled.asm["ptx"]) or "transp" in name
    assert re.search(r"st\.global\S*\.v4\.b32", compiled.asm["ptx"])


@counts_registers
@pytest.mark.parametrize("name", PAGED)
def test_paged_attention_compiles_for_hopper_with_wide_loads(name: str, tmp_path: Path) -> None:
    for launch in launches(PAGED[name]):
        compiled = compile_launch(launch, 90)
        used = resources(compiled, tmp_path)
        assert used["STACK"] <= ALLOWED_SPILLS.get(name, 0)
        assert used["LOCAL"] == 0
        assert re.search(r"ld\.global\S*\.v4\.b32|cp\.async\S* .*, 0?x?10;", compiled.asm["ptx"])


QUICK_ATTENTION = {
    "attention", "attention-causal", "attention-24-80-e5m2", "attention-one-key",
    "attention-packed-window", "attention-padded-causal", "attention-192-128-window-packed-float32",
    "attention-256-window-packed-float32", "attention-backward-causal",
    "attention-backward-grouped-two-keys-float32", "attention-backward-packed-window-float32",
    "attention-backward-24-100-packed",
}  # fmt: skip
"""The others are the same kernels with other combinations of mask, packing, heads and formats."""


@counts_registers
@with_slow(QUICK_ATTENTION, *ATTENTION)
def test_attention_compiles_for_hopper_with_few_spills(name: str, tmp_path: Path) -> None:
    *_, launch = launches(ATTENTION[name])
    compiled = compile_launch(launch, 90)
    used = resources(compiled, tmp_path)
    # Some kernels spill a few registers of a tile, because masks and sizes need more registers.
    assert used["STACK"] <= ALLOWED_SPILLS.get(name, 0)
    assert used["LOCAL"] == 0
    # ptxas would wait for each GEMM separately if it saw its result read early.
    assembly = subprocess.run(
        [CUOBJDUMP, "-sass", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    assert assembly.count("QGMMA") >= 2 * assembly.count("WARPGROUP.DEPBAR")
    check_pairs_of_e4m3(assembly)


def check_pairs_of_e4m3(assembly: str) -> None:
    """If a value is twice in a word, ptxas reads the second from a register that nothing wrote."""
    pairs = re.findall(r"F2FP\S*E4M3\S* R\d+, (R\d+)(?:\.reuse)?, (R\d+)", assembly)
    assert pairs
    assert all(first != second for first, second in pairs)


@counts_registers
@pytest.mark.parametrize("name", ["", "relu", "swiglu"])
def test_a_padded_row_cast_reads_only_written_registers(name: str, tmp_path: Path) -> None:
    x = torch.zeros(1, 320)
    (launch,) = launches(lambda: cast(name, [x], x.dtype, E4M3, (1, -1), "fp32", 0.0, 16))
    resources(compile_launch(launch, 90), tmp_path)
    check_pairs_of_e4m3(check_conversions_read_what_was_written(tmp_path))


def check_conversions_read_what_was_written(folder: Path) -> str:
    """ptxas of CUDA 12.8 read converted FP8 data from registers that nothing had written."""
    assembly = subprocess.run(
        [CUOBJDUMP, "-sass", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    written: set[int] = set()
    for operation, operands in re.findall(r"\*/ +(?:@!?U?P\d+ )?([A-Z]\S*) ([^;]*);", assembly):
        target_operand, *sources = operands.split(",")
        if operation.startswith(("F2FP", "LOP3")):
            read = {int(number) for number in re.findall(r"\bR(\d+)", ",".join(sources))}
            assert read <= written, f"{operation} {operands}"
        if target := re.match(r"R(\d+)", target_operand):
            columns = re.search(r"GMMA\.64x(\d+)", operation)
            width = 4 if ".128" in operation else 2 if re.search(r"\.64|WIDE", operation) else 1
            start = int(target[1])
            written.update(range(start, start + (int(columns[1]) // 2 if columns else width)))
    return assembly


@counts_registers
@with_slow(QUICK_ATTENTION, *ATTENTION_BACKWARD)
def test_attention_backward_compiles_for_hopper_with_few_spills(name: str, tmp_path: Path) -> None:
    """Few registers spill, and ptxas does not wait for each GEMM separately."""
    prepare, *_, largest, keys, queries = launches(ATTENTION_BACKWARD[name])
    for launch in (largest, prepare):
        assert resources(compile_launch(launch, 90), tmp_path)["STACK"] == 0
    check_conversions_read_what_was_written(tmp_path)
    for launch in (queries, keys):
        used = resources(compile_launch(launch, 90), tmp_path)
        assert used["STACK"] <= ALLOWED_SPILLS.get(name, 0)
        assert used["LOCAL"] == 0
        assembly = check_conversions_read_what_was_written(tmp_path)
        products = assembly.count("QGMMA") + assembly.count("HGMMA")
        assert products >= 3 * assembly.count("WARPGROUP.DEPBAR")
        if launch is keys:
            check_pairs_of_e4m3(assembly)


@counts_registers
@pytest.mark.parametrize("name", GEMMS)
def test_gemms_compile_for_hopper_with_one_wait_each(name: str, tmp_path: Path) -> None:
    """The kernel waits once for each GEMM, and spills only a few constants of the loop."""
    *_, launch = launches(GEMMS[name])  # kernels of groups come after the plan
    compiled = compile_launch(launch, 90)
    used = resources(compiled, tmp_path)
    assert used["STACK"] <= 32
    assert used["LOCAL"] == 0
    assert compiled.metadata.shared <= 227 * 1024
    assembly = subprocess.run(
        [CUOBJDUMP, "-sass", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    # A step of 128 has four instructions. If the tensor cores accumulate, there is a second wait,
    # after the last step.
    products = 2 if "fast" in name else 4
    assert assembly.count("QGMMA") == products * assembly.count("WARPGROUP.DEPBAR")
    assert len(steps_of_tiles(compiled.asm["ttgir"], of_each="groups" in name)) == 3


def steps_of_tiles(program: str, *, of_each: bool) -> list[str]:
    """The bounds of the loops over steps inside loops over tiles, in the three roles of warps.

    In GEMMs of groups each tile must have its own bound. Triton 3.6 drops a value that a loop
    carries if it is only the bound of an inner loop: then all tiles had as many steps as the first,
    and the loading warp waited forever.
    """
    loop = r"scf\.for %\w+ = %\w+ to (%\w+) step %\w+ iter_args\(([^)]*)\)"
    bounds = []
    for tiles in re.finditer(loop, program):
        steps = re.compile(loop).search(program, tiles.end())
        if steps is None or "scf.yield" in program[tiles.end() : steps.start()]:
            continue  # the loops are not nested
        bound = steps[1]
        carried = re.findall(r"(%\w+) =", tiles[2])
        inside = f"{bound} = " in program[tiles.end() : steps.start()]
        assert not of_each or bound in carried or inside, f"{bound} is that of the first tile"
        bounds.append(bound)
    return bounds


BOTH_ORIENTATIONS: dict[str, Callable[[], Any]] = {
    "cast": encoded_pair(column_sum=True), "row": quantized_pair((1, -1)),
    "layer-norm": encoded_pair_of("layer_norm"),
    "float32-geglu-backward": LAUNCHES["cast-both-of-float32"],
}  # fmt: skip


@pytest.mark.parametrize("name", BOTH_ORIENTATIONS)
def test_transposes_move_words_and_not_bytes(name: str) -> None:
    """Triton 3.6 transposes the bytes of some tiles wrongly, and words are faster."""
    *_, launch = launches(BOTH_ORIENTATIONS[name])
    ir = compile_launch(launch, 90).asm["ttgir"]
    transposed = set(re.findall(r"tt\.trans .*: tensor<\w+x(\w+),", ir))
    assert "i32" in transposed
    assert transposed <= {"i32", "f32"}  # f32 are the scales
    assert not re.search(r"convert_layout .*xf8", ir)


@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_casts_saturate_in_hardware(fp8_dtype: torch.dtype) -> None:
    short = "e4m3" if fp8_dtype == E4M3 else "e5m2"
    (launch,) = launches(encoded_pair(column_sum=False, fp8_dtype=fp8_dtype))
    ptx = compile_launch(launch, 90).asm["ptx"]
    casts = re.findall(rf"cvt\S*{short}\S*", ptx)
    assert set(casts) == {f"cvt.rn.satfinite.{short}x2.f32"}


def other_gpus(names: tuple[str, ...], *capabilities: int) -> list[Any]:
    """``names`` with GPUs other than Hopper; only the first name is quick, the rest is slow."""
    return [
        pytest.param(name, capability, marks=[pytest.mark.slow] if name != names[0] else [])
        for name in names
        for capability in capabilities
    ]


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        *other_gpus(ON_ALL_FP8_GPUS, 89, 100, 120),
        *other_gpus(SINCE_HOPPER, 100, 120),
        *other_gpus(WITHOUT_FP8, 70, 75, 80, 86),
    ],
)
def test_kernels_compile_for_other_gpus(name: str, capability: int) -> None:
    for launch in launches(LAUNCHES[name]):
        assert compile_launch(launch, capability).asm["cubin"]


@pytest.mark.parametrize("name", ["tensor-both", "row", "1x128", "dequantize"])
def test_casts_do_not_compile_where_the_reference_replaces_them(name: str) -> None:
    """If this fails because Triton compiles them, ``formats.CASTS`` may include the GPUs."""
    *_, launch = launches(LAUNCHES[name])
    with pytest.raises(CompilationError, match="fp8e4nv not supported"):
        compile_launch(launch, 80)
    assert CASTS.includes((8, 9))
    assert not CASTS.includes((8, 0))
