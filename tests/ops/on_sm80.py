"""Run layers on a GPU that reports SM 8.0, and compare them with the CPU.

    python -m tests.ops.on_sm80 cuda

Triton compiles for the real GPU. A launch of a kernel with FP8 data raises, and so does each FP8
call of cuBLASLt, so only torch may read or write FP8 data.
"""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import float8lab
from float8lab import recipes
from float8lab.formats import FP8_DTYPES
from float8lab.ops import declare
from float8lab.ops.kernels import _launch, cublaslt
from float8lab.optim import MasterWeights

RECIPES = [
    recipes.Float8CurrentScaling(), recipes.DelayedScaling(), recipes.Float8RowwiseScaling(),
    recipes.Float8BlockScaling(), recipes.MXFP8BlockScaling(), recipes.NVFP4BlockScaling(),
]  # fmt: skip


def forbid_fp8_launches() -> None:
    """Make every launch with FP8 data raise."""
    launch = _launch.Launched._launch

    def checked_launch(self: Any, grid: Any, *args: Any, **constants: Any) -> None:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        assert not any(t.dtype in FP8_DTYPES for t in tensors), self.function.fn.__name__
        launch(self, grid, *args, **constants)

    def refused_gemm(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a GPU of SM 8.0 has no FP8 GEMM")

    _launch.Launched._launch = checked_launch
    torch._scaled_mm = cublaslt.multiply = refused_gemm


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)
    return nn.Sequential(*layers).bfloat16()


def assert_same_bytes(a: Tensor, b: Tensor) -> None:
    left, right = (t.cpu().contiguous().view(torch.uint8) for t in (a, b))
    assert torch.equal(left, right)


def error(a: Tensor, b: Tensor) -> float:
    """The norm of the difference, relative to that of the CPU tensor ``b``."""
    a, b = a.detach().cpu().float(), b.detach().float()
    return float((a - b).norm() / b.norm())


def assert_close(a: Tensor, b: Tensor, tolerance: float) -> None:
    """Asserts a small error; with another order of sums an FP8 value may round to its neighbour."""
    assert error(a, b) <= tolerance, error(a, b)


def train(layers: nn.Module, x: Tensor, recipe: Any) -> list[Tensor]:
    results = []
    for _ in range(3):
        x = x.detach().requires_grad_()
        with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
            y = layers(x)
        y.float().square().mean().backward()
        results += [y, x.grad]
    return [*results, *(p.grad for p in layers.parameters())]


def check_casts(device: str) -> None:
    """The bytes of both orientations, under every rule, for odd shapes and nonfinite values."""
    for shape in ((64, 128), (37, 130), (1, 1)):
        x = torch.randn(shape, dtype=torch.bfloat16)
        x[0, 0] = torch.inf
        for block, rule in (
            ((-1, -1), "fp32"), ((1, -1), "pow2"), ((1, 128), "fp32"), ((128, 128), "pow2"),
            ((1, 32), "e8m0"),
        ):  # fmt: skip
            for fp8_dtype in FP8_DTYPES:
                options = (x.dtype, fp8_dtype, block, rule, 0.0, 16, True, True, True)
                got = float8lab.ops.cast_op("", [x.to(device)], *options)
                want = float8lab.ops.cast_op("", [x], *options)
                # The column sums are not compared.
                for gpu_tensor, cpu_tensor in zip(got[:5], want[:5], strict=True):
                    assert (gpu_tensor is None) == (cpu_tensor is None)
                    if cpu_tensor is not None:
                        assert_same_bytes(gpu_tensor, cpu_tensor)


def check_layers(device: str) -> None:
    """The forward and backward of a converted model and of experts."""
    x = torch.randn(4, 32, 64, dtype=torch.bfloat16)
    exact = train(model().double(), x.double(), None)
    for recipe in RECIPES:
        cpu_model = float8lab.convert_to_float8(model(), recipe=recipe)
        gpu_module = copy.deepcopy(cpu_model).to(device)
        want = train(cpu_model, x, recipe)
        results = train(gpu_module, x.to(device), recipe)
        for got, expected, exact_tensor in zip(results, want, exact, strict=True):
            # Neighbours in FP4 differ by a quarter to a half, and backward rounds stochastically.
            assert_close(got, expected, 0.2 if recipe is RECIPES[-1] else 0.1)
            assert error(got, exact_tensor) <= 1.1 * error(expected, exact_tensor), (
                recipe,
                error(got, exact_tensor),
            )
    torch.manual_seed(0)
    experts = float8lab.GroupedLinear(2, 64, 96, device="cpu", params_dtype=torch.bfloat16)
    rows, splits = x.flatten(0, 1), [100, 28]
    for recipe in RECIPES[:4]:
        gpu_module = copy.deepcopy(experts).to(device)
        results = []
        for module, tokens in ((gpu_module, rows.to(device)), (experts, rows)):
            with float8lab.autocast(recipe=recipe):
                results.append(module(tokens, splits))
            results[-1].float().square().mean().backward()
        assert_close(results[0], results[1], 0.1)


def check_stored(device: str) -> None:
    """Weights stored in FP8 and trained with FP8 moments, from the same initial bytes."""
    results = []
    for module_device in ("cpu", device):
        torch.manual_seed(0)
        with float8lab.fp8_model_init(enabled=True, recipe=RECIPES[0]):
            layer = float8lab.Linear(64, 96, device="cpu", params_dtype=torch.bfloat16).to(
                module_device
            )
        assert layer.weight.qdata.element_size() == 1
        start = layer.weight.qdata.cpu().clone()  # the optimizer changes it in place
        options = {"fp8_moments": True, "lr": 0.01}
        optimizer = MasterWeights(layer.parameters(), torch.optim.AdamW, **options)
        for _ in range(2):
            with float8lab.autocast(recipe=RECIPES[0]):
                y = layer(torch.ones(32, 64, dtype=torch.bfloat16, device=module_device))
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((start, layer.weight.dequantize().cpu(), y))
    (start, weight, y), (gpu_start, gpu_weight, gpu_y) = results
    assert_same_bytes(gpu_start, start)
    assert_close(gpu_weight, weight, 0.05)
    assert_close(gpu_y, y, 0.05)


def check_graphs(device: str) -> None:
    """A compiled layer and a CUDA graph of its forward equal the layer."""
    torch.manual_seed(0)
    layer = float8lab.Linear(64, 64, device="cpu", params_dtype=torch.bfloat16).to(device)
    x = torch.randn(32, 64, dtype=torch.bfloat16).to(device).requires_grad_()

    def run(x: Tensor) -> Tensor:
        with float8lab.autocast(recipe=RECIPES[0]):
            return layer(x)

    y = run(x)
    compiled = torch.compile(
        run, fullgraph=True, backend="inductor" if device == "cuda" else "eager"
    )
    compiled_y = compiled(x)
    assert_close(compiled_y, y.cpu(), 1e-2)
    compiled_y.sum().backward()
    if device == "cuda":
        with torch.no_grad():
            for _ in range(3):
                run(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run(x)
            graph.replay()
            assert_close(out, y.cpu(), 1e-2)


def check_attention(device: str) -> None:
    """FP8 attention runs in high precision, with one warning."""
    attention = float8lab.DotProductAttention(2, 64, qkv_format="bshd", attn_mask_type="causal")
    tensors = [torch.randn(1, 128, 2, 64, dtype=torch.bfloat16, device=device) for _ in range(3)]
    want = attention(*tensors)
    with warnings.catch_warnings(record=True) as warnings_caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with float8lab.autocast(recipe=recipes.Float8CurrentScaling(fp8_dpa=True)):
                assert torch.equal(attention(*tensors), want)
    assert sum("needs a Hopper GPU" in str(warning.message) for warning in warnings_caught) == 1


def main(device: str) -> None:
    """Run all checks."""
    declare._capability_of = lambda _: (8, 0)  # type: ignore[assignment]
    forbid_fp8_launches()
    for check in (check_casts, check_layers, check_stored, check_graphs, check_attention):
        check(device)
        print(check.__name__)
    print("passed")


if __name__ == "__main__":
    main(sys.argv[1])
