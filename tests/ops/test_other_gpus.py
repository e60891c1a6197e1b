"""GPUs other than Hopper: table of capabilities, route of calls, layout of MX scales."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

import float8lab
from float8lab import ops
from float8lab.formats import CASTS, E4M3, E5M2, E8M0
from float8lab.ops import declare, reference
from float8lab.ops.gemm import may_multiply
from float8lab.ops.reference import moments, permute
from tests.processes import run_python

GPU = torch.device("cuda")
ROW, TOKENS, WEIGHT, MX = (1, -1), (1, 128), (128, 128), (1, 32)

# k: casts by a kernel; r: GEMMs of rows; b: GEMMs of 1x128 by 128x128; m: MX GEMMs; a: attention.
TABLE = {
    (7, 0): "-----", (7, 5): "-----", (8, 0): "-----", (8, 6): "-----", (8, 9): "kr---",
    (9, 0): "krb-a", (10, 0): "kr-m-", (10, 3): "kr-m-", (12, 0): "kr---",
}  # fmt: skip


def imitate_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], count: int = 1
) -> None:
    """Make every device, also this CPU, report the capability of a GPU."""
    monkeypatch.setattr(declare, "_capability_of", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize("capability", TABLE)
def test_native_fp8_of_each_capability_is_as_in_the_table(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_capability(monkeypatch, capability)
    runs = {
        "k": CASTS.includes(capability), "r": may_multiply(ROW, ROW, GPU, a_dtype=E5M2),
        "b": may_multiply(TOKENS, WEIGHT, GPU), "m": may_multiply(MX, MX, GPU),
        "a": ops.has_fp8_attention(GPU, 128, 128),
    }  # fmt: skip
    assert "".join(key if native else "-" for key, native in runs.items()) == TABLE[capability]
    assert not may_multiply(ROW, ROW, GPU, a_dtype=E5M2, b_dtype=E5M2)
    assert not may_multiply(MX, MX, GPU, a_dtype=E5M2)
    assert may_multiply(ROW, ROW, GPU, grouped=True) == (capability == (9, 0))
    assert not may_multiply(MX, MX, GPU, grouped=True)


def test_a_cpu_has_the_capability_of_hopper() -> None:
    assert declare.capability_of(torch.device("cpu")) == (9, 0)


x = torch.randn(16, 128)
q, scale, _ = reference.quantize(x, E4M3, ROW, "fp32")
stored, exponents = torch.zeros(16, 128, dtype=torch.uint8), torch.zeros(16, 1, dtype=torch.uint8)
row_map = torch.zeros(16, 2, dtype=torch.int32)

# The launcher, the reference, the arguments, and whether a GPU without FP8 calls the launcher.
CALLS: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...], bool]] = {
    "cast": ("cast:cast", reference.cast, ("", [x], x.dtype, E4M3, ROW, "fp32"), False),
    "cast of a prologue": (
        "cast:cast", reference.cast, ("swiglu", [x], x.dtype, E5M2, (-1, -1), "pow2"), False
    ),
    "casts": (
        "cast_many:cast_many_", reference.cast_many_,
        ([x], [q.clone()], ROW, "encode", 0.0, [], [], [1 / scale]), False,
    ),
    "amax": ("cast:amax_of", reference.amax_of, ("", [x], x.dtype), True),
    "value of FP8": (
        "prologue:value_of", reference.value_of, ("dequantize", [q, scale], x.dtype, ROW), False
    ),
    "value": ("prologue:value_of", reference.value_of, ("gelu", [x], x.dtype), True),
    "transpose": ("dequantize:transpose", reference.transpose, (q,), False),
    "norm": ("norm:norm", reference.norm, (x, x[0], None, 1e-5, False, x.dtype), True),
    "norm of FP8": (
        "norm:norm", reference.norm, (q, x[0], None, 1e-5, False, x.dtype, scale, ROW), False
    ),
    "permutation of FP8": (
        "permute:gather_rows", permute.gather_rows,
        (q, row_map, x.dtype, None, None, scale, 128), False,
    ),
    "moments": (
        "moments:dequantize_moment", moments.dequantize_moment, (stored, exponents, False), False
    ),
    "GEMM": (
        "gemm:scaled_mm", reference.scaled_mm,
        (q, scale, ROW, q, scale, ROW, None, torch.bfloat16, False), True,
    ),
}  # fmt: skip


def all_same_bytes(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return all(map(all_same_bytes, a, b))
    return a is b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", CALLS)
def test_calls_go_to_the_launcher_or_the_reference_by_capability(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The route on a GPU without FP8 in Triton, beside a GPU with it, and on one with it."""
    path, function, args, by_kernel = CALLS[name]
    launched: list[str] = []

    def load(path: str) -> Callable[..., Any]:
        if path == "prologue:value_of" and name == "cast of a prologue":
            return reference.value_of
        return lambda *args: launched.append(path)

    monkeypatch.setattr(declare, "load_launcher", load)
    imitate_capability(monkeypatch, (8, 0))
    run = declare._gpu_launcher(path, function)
    result = run(*args)
    assert launched == [path] * by_kernel
    if not by_kernel:
        assert all_same_bytes(result, function(*args))
    monkeypatch.setattr(declare, "_capability_of", lambda device: (9, 0))
    run(*args)
    assert launched == [path] * (1 + by_kernel)
    declare._gpu_launcher(path, function)(*args)
    assert launched == [path] * (2 + by_kernel)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gemm_without_fp8_multiplies_dequantized_operands(
    out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pytest.importorskip("float8lab.ops.kernels.gemm")
    imitate_capability(monkeypatch, (8, 0))
    for block in (ROW, (-1, -1), TOKENS, (128, 128)):
        data, scales, _ = reference.quantize(x, E4M3, block, "fp32")
        got = kernels.scaled_mm(
            data, scales, block, data, scales, block, x[0, :16], out_dtype, True
        )
        values = reference.dequantize(data, scales, block, torch.float64)
        exact = values @ values.T + x[0, :16].double()
        assert got.dtype == out_dtype
        eps = max(
            torch.finfo(torch.bfloat16 if out_dtype == torch.bfloat16 else out_dtype).eps, 1e-6
        )
        assert ((got.double() - exact).abs() <= 4 * eps * (values.abs() @ values.abs().T + 9)).all()


# The tests below are about MX on SM 10.


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (300, 7), (257, 9), (0, 3), (5, 0)], ids=str)
def test_scale_in_tiles_has_the_layout_of_cublas(shape: tuple[int, int]) -> None:
    """Each scale is where cuBLAS documents it, element by element; powers of two stay exact."""
    rows, columns = shape
    scales = torch.exp2(torch.randint(-127, 128, shape).float())
    tiles = reference.scale_in_tiles(scales.t().contiguous().t())
    across = -(-columns // 4)
    assert tiles.shape == (-(-rows // 128) * across * 512,)
    assert tiles.dtype == E8M0
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tile = (row // 128) * across + column // 4
    offset = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
    assert torch.equal(tiles.float()[offset], scales)
    assert tiles.isfinite().all() if tiles.numel() else True


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(256, 128, 512), (37, 48, 80), (130, 17, 24)])
def test_torch_accepts_the_operands_of_mx_gemms(
    M: int, N: int, K: int, out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's meta implementation accepts the operands of all three GEMMs of a layer as on SM 10.

    It checks sizes, dtypes and order. The operands and decoded scales give the results.
    """
    kernels = pytest.importorskip("float8lab.ops.kernels.gemm")
    imitate_capability(monkeypatch, (10, 0))
    calls: list[torch.Size] = []

    def scaled_mm(
        a: Tensor, b: Tensor, a_scale: Tensor, a_kind: Any, b_scale: Tensor, b_kind: Any,
        *orders: Any, output_dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        assert a_kind == b_kind == ScalingType.BlockWise1x32
        assert orders == (SwizzleType.SWIZZLE_32_4_4,) * 2
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert a.shape[1] % 32 == 0
        meta = [t.to("meta") for t in (a, a_scale, b_scale)]
        y = F.scaled_mm(
            meta[0], b.t().to("meta").t(), meta[1], a_kind, meta[2], b_kind, *orders,
            output_dtype=output_dtype,
        )  # fmt: skip
        calls.append(y.shape)
        left, right = dequantized_tiles(a, a_scale), dequantized_tiles(b.t(), b_scale)
        assert y.shape == (left.shape[0], right.shape[0])
        return (left @ right.T).to(output_dtype)

    monkeypatch.setattr(kernels, "torch_scaled_mm", scaled_mm)
    tensors = {"x": torch.randn(M, K), "w": torch.randn(N, K), "dy": torch.randn(M, N)}
    tensors["x"][0, :32] = 0.0
    casts = {
        key: reference.cast("", [t], t.dtype, E4M3, MX, "e8m0", 0.0, 16, True, True)
        for key, t in tensors.items()
    }
    rows = {key: (cast.q, cast.scale, MX) for key, cast in casts.items()}
    columns = {key: (cast.q_t, cast.scale_t, MX) for key, cast in casts.items()}
    for left, right in (
        (rows["x"], rows["w"]), (rows["dy"], columns["w"]), (columns["dy"], columns["x"])
    ):  # fmt: skip
        got = kernels.scaled_mm(*left, *right, None, out_dtype, False)
        exact = reference.scaled_mm(*left, *right, None, torch.float32, False)
        eps = torch.finfo(out_dtype).eps if out_dtype != torch.float32 else 1e-6
        assert got.dtype == out_dtype
        assert ((got.float() - exact).abs() <= eps * exact.abs() + 1e-4).all()
    assert len(calls) == 3


def dequantized_tiles(data: Tensor, tiles: Tensor) -> Tensor:
    """The values of rows, with a scale for 32 elements in the documented layout."""
    rows, blocks = data.shape[0], -(-data.shape[1] // 32)
    across = -(-blocks // 4)
    row, block = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
    offset = ((row // 128) * across + block // 4) * 512
    offset = offset + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    factors = tiles.float()[offset].repeat_interleave(32, 1)
    return data.float() * factors[:, : data.shape[1]]


def test_1x32_blocks_without_e8m0_scales_have_no_gemm() -> None:
    """No GPU multiplies 1x32 blocks by scales that e8m0 cannot hold."""
    with float8lab.fallback("error"):
        a = float8lab.quantize(torch.randn(32, 64), block=MX, scale_rule="e8m0")
        assert torch.equal(a @ a.t(), (a.t().t() @ a.t()))
        b = float8lab.quantize(torch.randn(32, 64), block=MX)
        with pytest.raises(NotImplementedError, match="mm"):
            b @ b.t()


@pytest.mark.gpu
def test_layers_on_a_gpu_that_imitates_sm_80_equal_the_cpu() -> None:
    """The script runs in a new process, because an op chooses its kernel once."""
    assert run_python("-m", "tests.ops.on_sm80", "cuda").strip().endswith("passed")
