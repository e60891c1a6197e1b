"""Run layers on a GPU that answers as one of SM 8.0, and compare with the CPU.

    python -m tests.ops.on_sm80 cuda

Triton compiles for the GPU that there is. So that nothing but torch touches FP8, a launch of a
kernel with FP8 data raises, and so does each call of cuBLASLt in FP8.
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


def watch_launches() -> None:
    """Have a launch with FP8 data raise."""
    launch = _launch.Launched._launch

    def watched(self: Any, grid: Any, *args: Any, **constants: Any) -> None:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        assert not any(t.dtype in FP8_DTYPES for t in tensors), self.function.fn.__name__
        launch(self, grid, *args, **constants)

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a GPU of SM 8.0 has no FP8 GEMM")

    _launch.Launched._launch = watched
    torch._scaled_mm = cublaslt.multiply = refused


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)
    return nn.Sequential(*layers).bfloat16()


def same_bytes(a: Tensor, b: Tensor) -> None:
    left, right = (t.cpu().contiguous().view(torch.uint8) for t in (a, b))
    assert torch.equal(left, right)


def error(a: Tensor, b: Tensor) -> float:
    """The distance from a tensor of any device to one of the CPU, of the norm of the latter."""
    a, b = a.detach().cpu().float(), b.detach().float()
    return float((a - b).norm() / b.norm())


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    """Sums are in another order: an FP8 value may round to its neighbour."""
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
    """Bytes of both orientations, by every rule, of odd shapes and values that are not finite."""
    for shape in ((64, 128), (37, 130), (1, 1)):
        x = torch.randn(shape, dtype=torch.bfloat16)
        x[0, 0] = torch.inf
        for block, rule in (
            ((-1, -1), "fp32"), ((1, -1), "pow2"), ((1, 128), "fp32"), ((128, 128), "pow2"),
            ((1, 32), "e8m0"),
        ):  # fmt: skip
            for fp8_dtype in FP8_DTYPES:
                how = (x.dtype, fp8_dtype, block, rule, 0.0, 16, True, True, True)
                got = float8lab.ops.cast_op("", [x.to(device)], *how)
                want = float8lab.ops.cast_op("", [x], *how)
                for here, there in zip(got[:5], want[:5], strict=True):  # not sums
                    assert (here is None) == (there is None)
                    if there is not None:
                        same_bytes(here, there)


def check_layers(device: str) -> None:
    """A converted model, forward and backward, and experts."""
    x = torch.randn(4, 32, 64, dtype=torch.bfloat16)
    exact = train(model().double(), x.double(), None)
    for recipe in RECIPES:
        plain = float8lab.convert_to_float8(model(), recipe=recipe)
        here = copy.deepcopy(plain).to(device)
        want = train(plain, x, recipe)
        results = train(here, x.to(device), recipe)
        for got, expected, truth in zip(results, want, exact, strict=True):
            # A neighbour in FP4 is a quarter to a half away, and is drawn at random in backward.
            close(got, expected, 0.2 if recipe is RECIPES[-1] else 0.1)
            assert error(got, truth) <= 1.1 * error(expected, truth), (recipe, error(got, truth))
    torch.manual_seed(0)
    experts = float8lab.GroupedLinear(2, 64, 96, device="cpu", params_dtype=torch.bfloat16)
    rows, splits = x.flatten(0, 1), [100, 28]
    for recipe in RECIPES[:4]:
        here = copy.deepcopy(experts).to(device)
        results = []
        for module, tokens in ((here, rows.to(device)), (experts, rows)):
            with float8lab.autocast(recipe=recipe):
                results.append(module(tokens, splits))
            results[-1].float().square().mean().backward()
        close(results[0], results[1], 0.1)


def check_stored(device: str) -> None:
    """Weights of one byte, trained with moments in FP8; they begin with the same bytes."""
    results = []
    for place in ("cpu", device):
        torch.manual_seed(0)
        with float8lab.fp8_model_init(enabled=True, recipe=RECIPES[0]):
            layer = float8lab.Linear(64, 96, device="cpu", params_dtype=torch.bfloat16).to(place)
        assert layer.weight.qdata.element_size() == 1
        start = layer.weight.qdata.cpu().clone()  # the optimizer changes it in place
        options = {"fp8_moments": True, "lr": 0.01}
        optimizer = MasterWeights(layer.parameters(), torch.optim.AdamW, **options)
        for _ in range(2):
            with float8lab.autocast(recipe=RECIPES[0]):
                y = layer(torch.ones(32, 64, dtype=torch.bfloat16, device=place))
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((start, layer.weight.dequantize().cpu(), y))
    (start, weight, y), (start_there, weight_there, y_there) = results
    same_bytes(start_there, start)
    close(weight_there, weight, 0.05)
    close(y_there, y, 0.05)


def check_graphs(device: str) -> None:
    """A compiled layer, and a CUDA graph of a forward pass, give what the layer gives."""
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
    again = compiled(x)
    close(again, y.cpu(), 1e-2)
    again.sum().backward()
    if device == "cuda":
        with torch.no_grad():
            for _ in range(3):
                run(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run(x)
            graph.replay()
            close(out, y.cpu(), 1e-2)


def check_attention(device: str) -> None:
    """In high precision, with one warning."""
    attention = float8lab.DotProductAttention(2, 64, qkv_format="bshd", attn_mask_type="causal")
    tensors = [torch.randn(1, 128, 2, 64, dtype=torch.bfloat16, device=device) for _ in range(3)]
    want = attention(*tensors)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            with float8lab.autocast(recipe=recipes.Float8CurrentScaling(fp8_dpa=True)):
                assert torch.equal(attention(*tensors), want)
    assert sum("needs a Hopper GPU" in str(warning.message) for warning in said) == 1


def main(device: str) -> None:
    """Run all checks."""
    declare._capability_of = lambda _: (8, 0)  # type: ignore[assignment]
    watch_launches()
    for check in (check_casts, check_layers, check_stored, check_graphs, check_attention):
        check(device)
        print(check.__name__)
    print("passed")


if __name__ == "__main__":
    main(sys.argv[1])
