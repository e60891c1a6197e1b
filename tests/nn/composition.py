"""Separate norm, linear and activation modules, whose results the fused modules must equal."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import float8lab
from float8lab import recipes
from float8lab.nn.activation_function import activate
from tests.nn.models import UNDELAYED

RECIPES = {
    "delayed": recipes.DelayedScaling(amax_history_len=3, amax_compute_algo="max"),
    **UNDELAYED,
    "nvfp4": recipes.NVFP4BlockScaling(),
}
"""One recipe of each class."""
ATTENTION_RECIPES = {
    **RECIPES,
    "delayed-dpa": recipes.DelayedScaling(
        fp8_dpa=True, amax_history_len=3, amax_compute_algo="max"
    ),
    "current-dpa": recipes.Float8CurrentScaling(fp8_dpa=True),
}
"""The same recipes, and two that cast in attention."""


class Composition(nn.Module):
    """The parts of a LayerNormLinear or LayerNormMLP as separate modules that share nothing."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        norms = {"LayerNorm": float8lab.LayerNorm, "RMSNorm": float8lab.RMSNorm}
        gamma = fused.layer_norm_weight
        self.norm = norms[fused.normalization](
            len(gamma), eps=fused.eps, zero_centered_gamma=fused.zero_centered_gamma,
            params_dtype=gamma.dtype, device=gamma.device,
        )  # fmt: skip
        self.activation = getattr(fused, "activation", None)
        state = dict(fused.state_dict())
        self.names = {name: f"norm.{name.removeprefix('layer_norm_')}" for name in state}
        parts = ["fc1", "fc2"] if self.activation else [""]
        for part in parts:
            prefix, layer_name = f"{part}_" if part else "", part or "linear"
            weight = state[f"{prefix}weight"]
            layer = float8lab.Linear(
                weight.shape[1], weight.shape[0], bias=f"{prefix}bias" in state,
                params_dtype=weight.dtype, device=weight.device,
            )  # fmt: skip
            self.add_module(layer_name, layer)
            for kind in ("weight", "bias"):
                self.names[f"{prefix}{kind}"] = f"{layer_name}.{kind}"
        self.names = {name: self.names[name] for name in state}
        self.load_state_dict({self.names[name]: value for name, value in state.items()})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(x)
        if self.activation is None:
            return self.linear(normed), normed
        return self.fc2(activate(self.fc1(normed), self.activation)), normed


def step(
    module: nn.Module, x: Tensor, dy: list[Tensor], recipe: Any = None
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs for which ``dy`` holds gradients, and the gradients of x and the parameters."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    outputs = list(y if isinstance(y, tuple) else (y,))[: len(dy)]
    torch.autograd.backward(outputs, dy)
    gradients = [x.grad, *(p.grad for p in module.parameters())]
    return [output.detach() for output in outputs], gradients


def float64_step(fused: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and the gradients, by parameter and "x", of torch's functions in float64."""
    p = {n: v.detach().double().requires_grad_() for n, v in fused.named_parameters()}
    x = x.detach().double().requires_grad_()
    gamma = p["layer_norm_weight"] + (1.0 if fused.zero_centered_gamma else 0.0)
    if fused.normalization == "LayerNorm":
        h = F.layer_norm(x, gamma.shape, gamma, p["layer_norm_bias"], fused.eps)
    else:
        h = F.rms_norm(x, gamma.shape, gamma, fused.eps)
    if hasattr(fused, "activation"):
        h = F.linear(h, p["fc1_weight"], p.get("fc1_bias"))
        a, b = h.chunk(2, -1)
        h = {
            "gelu": lambda: F.gelu(h, approximate="tanh"),
            "relu": lambda: F.relu(h),
            "squared_relu": lambda: F.relu(h) ** 2,
            "srelu": lambda: F.relu(h) ** 2,
            "qgelu": lambda: h * torch.sigmoid(1.702 * h),
            "silu": lambda: F.silu(h),
            "geglu": lambda: F.gelu(a, approximate="tanh") * b,
            "reglu": lambda: F.relu(a) * b,
            "sreglu": lambda: F.relu(a) ** 2 * b,
            "qgeglu": lambda: a * torch.sigmoid(1.702 * a) * b,
            "swiglu": lambda: F.silu(a) * b,
            "glu": lambda: torch.sigmoid(a) * b,
            "clamped_swiglu_interleaved": lambda: _clamped(h[..., ::2], h[..., 1::2]),
        }[fused.activation]()
        y = F.linear(h, p["fc2_weight"], p.get("fc2_bias"))
    else:
        y = F.linear(h, p["weight"], p.get("bias"))
    y.backward(dy.double())
    return y.detach(), {"x": x.grad, **{n: v.grad for n, v in p.items()}}


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)


def sqnr(actual: Tensor, expected: Tensor) -> float:
    """Signal-to-noise ratio in dB."""
    expected = expected.double()
    noise = (actual.double() - expected).square().sum()
    return (10 * torch.log10(expected.square().sum() / noise)).item()


def documented_sqnr(heading: str) -> dict[str, tuple[float, ...]]:
    """The signal-to-noise ratios of each row in the table below a heading of docs/numerics.md."""
    page = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \|((?: [\d.]+ dB \|)+)$", section, re.MULTILINE)
    return {name: tuple(map(float, re.findall(r"[\d.]+", cells))) for name, cells in rows}


def perturb(module: nn.Module) -> None:
    """Adds noise to every parameter, so that no two hold the same values."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
