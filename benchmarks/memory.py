"""Memory of one transformer layer of Llama-3-8B between its forward and its backward.

    python -m benchmarks.memory [--batch 4] [--sequence 4096]

``held`` is what the CUDA allocator has more between forward and backward than before the forward,
the output included; ``peak`` is the most it has more until the end of backward, gradients of the
parameters, which exist before, not included. Candidates are plain ``torch.nn`` in bfloat16, eager
and compiled, and ``float8lab.TransformerLayer`` in bfloat16 and under each recipe; each starts from
the same weights and must give the plain layer's output and input gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

import float8lab
from benchmarks import common
from benchmarks.accuracy import RECIPES
from benchmarks.fsdp import Layer

__all__ = ["Row", "main", "measure"]

FLOOR_DB = 15.0
"""Of the output's and the input gradient's difference to the residual stream's plain bfloat16: four
GEMMs in a row of 25 to 28 dB each, added up, and room for the gradient's e5m2."""
D, HEADS, GROUPS, FFN = 4096, 32, 8, 14336
EPS = 1e-6
GB = 1e9


@dataclass(frozen=True)
class Row:
    """What one candidate held."""

    name: str
    held: float
    """GB."""
    peak: float
    """GB."""
    output_db: float
    gradient_db: float


def plain_layer() -> nn.Module:
    """The layer in ``torch.nn``, bfloat16 on CUDA."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        layer = Layer(D, HEADS, GROUPS, FFN, nn.Linear)
    layer.attention_norm.eps = layer.mlp_norm.eps = EPS
    return layer.bfloat16()


def our_layer(plain: Any, *, stored: Any = None, fp8_activation_input: bool = False) -> Any:
    """A ``TransformerLayer`` with the weights of the plain one."""
    context = nullcontext() if stored is None else float8lab.fp8_model_init(recipe=stored)
    with context:
        layer: Any = float8lab.TransformerLayer(
            D, FFN, HEADS, GROUPS, layernorm_epsilon=EPS,
            hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="causal", bias=False,
            normalization="RMSNorm", activation="swiglu", attn_input_format="bshd",
            params_dtype=torch.bfloat16, device="cuda", fp8_activation_input=fp8_activation_input,
        )  # fmt: skip
    qkv, mlp = layer.self_attention.layernorm_qkv, layer.layernorm_mlp
    with torch.no_grad():
        for mine, theirs in (
            (qkv.layer_norm_weight, plain.attention_norm.weight),
            (qkv.query_weight, plain.q.weight),
            (qkv.key_weight, plain.k.weight),
            (qkv.value_weight, plain.v.weight),
            (layer.self_attention.proj.weight, plain.o.weight),
            (mlp.layer_norm_weight, plain.mlp_norm.weight),
            (mlp.fc1_weight, torch.cat((plain.gate.weight, plain.up.weight))),
            (mlp.fc2_weight, plain.down.weight),
        ):
            mine.copy_(theirs)
    return layer


class _Ours(nn.Module):
    """Our layer, with the plain one's rotary embedding."""

    def __init__(self, layer: Any, context: Callable[[], AbstractContextManager[Any]]):
        super().__init__()
        self.layer, self.context = layer, context
        self.angles: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.angles is None:
            with torch.device("cuda"):
                rotary: Any = float8lab.RotaryPositionEmbedding(D // HEADS, rotary_base=500000.0)
                self.angles = rotary(x.shape[1])
        with self.context():
            y: Tensor = self.layer(x, rotary_pos_emb=self.angles)
        return y


def _ours(plain: nn.Module, recipe: Any = None, **options: Any) -> nn.Module:
    context = nullcontext if recipe is None else partial(float8lab.autocast, recipe=recipe)
    return _Ours(our_layer(plain, **options), context)


def _compiled(plain: nn.Module) -> nn.Module:
    result: Any = torch.compile(plain)
    return cast(nn.Module, result)


def candidates() -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Each makes a module from the plain layer."""
    made: dict[str, Callable[[nn.Module], nn.Module]] = {
        "plain bfloat16, eager": lambda plain: plain,
        "plain bfloat16, compile": _compiled,
        "TransformerLayer, bfloat16": _ours,
    }
    for name, make in RECIPES.items():
        ours = partial(_ours, recipe=make())
        made[f"TransformerLayer, {name}"] = ours
        made[f"{name}, fp8_activation_input"] = partial(ours, fp8_activation_input=True)
        made[f"{name}, FP8 weights"] = partial(ours, stored=make())
    return made


def _allocated() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def measure(name: str, module: nn.Module, x: Tensor, dy: Tensor) -> tuple[Row, Tensor, Tensor]:
    """Held and peak bytes of the third step; its output and input gradient."""
    for _ in range(2):  # gradients exist, kernels are compiled, delayed scales have a history
        module(x).backward(dy)
        x.grad = None
    before = _allocated()
    torch.cuda.reset_peak_memory_stats()
    y = module(x)
    held = _allocated() - before
    y.backward(dy)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert x.grad is not None, "x requires a gradient"
    return Row(name, held / GB, peak / GB, 0.0, 0.0), y.detach(), x.grad


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all candidates and print a table."""
    parser = common.new_parser(__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    options = parser.parse_args(argv)
    common.require_cuda("benchmarks.memory")
    facts = common.header()
    print(common.describe_header(facts), f"\n\n{options.batch} x {options.sequence} tokens\n")
    torch.manual_seed(options.seed)
    shape = (options.batch, options.sequence, D)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    plain = plain_layer()
    _, y, dx = measure("", plain, x, dy)
    # On the branch alone: the residual stream would hide a wrong layer.
    gate = common.Gate({"y": (y - x).detach().cpu(), "dx": (dx - dy).cpu()}, FLOOR_DB)
    del y, dx
    rows, shown = [], []
    base: Row | None = None
    for name, make in candidates().items():
        x.grad = None
        plain.zero_grad()
        module = make(plain)
        row, y, dx = measure(name, module, x, dy)
        results = {"y": (y - x).detach().cpu(), "dx": (dx - dy).cpu()}
        del module, y, dx
        x.grad = None
        torch._dynamo.reset()
        found = gate.measure(results)
        row = Row(name, row.held, row.peak, found["y"], found["dx"])
        base = base or row
        refused = gate.refusal(found)
        numbers = [refused, "-", "-", "-"] if refused else [
            f"{row.held:.2f}", f"{row.held / base.held:.2f}x",
            f"{row.peak:.2f}", f"{row.peak / base.peak:.2f}x",
        ]  # fmt: skip
        shown.append([name, *numbers, f"{row.output_db:.1f}", f"{row.gradient_db:.1f}"])
        rows.append(asdict(row))
    columns = ["layer", "held GB", "of plain", "peak GB", "of plain", "output dB", "dx dB"]
    print(common.table(columns, shown))
    common.append_json(options.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
