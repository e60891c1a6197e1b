"""Make the modules that benchmarks compare: plain ``torch.nn``, and ours with equal weights.

B sequences, S positions, D width, H heads, G key-value heads, F features between the MLP's layers.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import float8lab
from benchmarks import common
from benchmarks.fsdp import Layer
from benchmarks.recipes import RECIPES
from benchmarks.report import Row, Setting, Target
from benchmarks.shapes import LinearShape
from float8lab.recipes import Auto, Recipe

__all__ = [
    "LLAMA",
    "Candidate",
    "InContext",
    "LayerSize",
    "PlainMlp",
    "PlainNormLinear",
    "Trial",
    "attention_flops",
    "converted",
    "copy_layer_weights",
    "fused_candidates",
    "our_context",
    "our_layer",
    "plain_layer",
    "train_step",
    "training_results",
]


def converted(plain: nn.Module, recipe: Recipe | Auto, **options: Any) -> nn.Module:
    """Return a copy of a model with linear layers in FP8; ``Auto`` may choose no layer."""
    model = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "convert_to_float8 converted none")
        float8lab.convert_to_float8(model, recipe, **options)
    return model


ROTARY_BASE = 500000.0
EPS = 1e-6
WARM_UP_STEPS = 2
"""The number of steps before the compared one, so that delayed scaling has a history."""

Context = Callable[[], AbstractContextManager[Any]]


class LayerSize(NamedTuple):
    """The sizes of a decoder layer and its input."""

    D: int
    H: int
    G: int
    F: int
    batch: int
    sequence: int

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def describe(self) -> str:
        """Return the name of this size in tables."""
        return f"{self.batch} x {self.sequence} tokens, width {self.D}, MLP {self.F}"

    def linears(self) -> list[LinearShape]:
        """Return the layer's linear layers; those that share an input count as one layer."""
        M, D, K = self.tokens, self.D, self.D // self.H * self.G
        return [
            LinearShape("qkv", M, D, D + 2 * K),
            LinearShape("attention out", M, D, D),
            LinearShape("gate and up", M, D, 2 * self.F),
            LinearShape("down", M, self.F, D),
        ]

    def flops(self) -> float:
        """Count the FLOPs of forward and backward."""
        causal = attention_flops(self.batch, self.H, self.sequence, self.D // self.H, causal=True)
        return sum(shape.flops() for shape in self.linears()) + 3.5 * causal

    def input(self, device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw an input that requires a gradient, and a gradient of the output."""
        shape = (self.batch, self.sequence, self.D)
        x, dy = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
        return x.bfloat16().requires_grad_(), dy.bfloat16()


LLAMA = LayerSize(D=4096, H=32, G=8, F=14336, batch=4, sequence=4096)


def attention_flops(B: int, H: int, S: int, D: int, *, causal: bool) -> float:
    """Count the FLOPs of the forward; the backward has two and a half times as many."""
    return 4.0 * B * H * S * S * D * (0.5 if causal else 1.0)


class InContext(nn.Module):
    """A module whose forward runs in a context, such as an autocast."""

    def __init__(self, module: nn.Module, context: Context, **arguments: Any) -> None:
        super().__init__()
        self.module, self.context, self.arguments = module, context, arguments

    def forward(self, *args: Tensor) -> Tensor:
        with self.context():
            y: Tensor = self.module(*args, **self.arguments)
        return y


def our_context(recipe: Recipe | None) -> Context:
    """Return the autocast of a recipe; without a recipe, a context that does nothing."""
    return nullcontext if recipe is None else partial(float8lab.autocast, recipe=recipe)


class Candidate(NamedTuple):
    """A module to measure, and how tables list it."""

    name: str
    make: Callable[[], nn.Module]
    parameters: Mapping[str, str] = {}
    """Maps the gate's names of compared gradients to the module's names of the parameters."""
    baseline: bool = False
    recipe: Recipe | None = None
    """None for bfloat16, and for other libraries."""
    compiled: bool = False
    fp8: bool = False
    has_floor: bool = True


# Training steps


def train_step(module: nn.Module, x: Tensor, dy: Tensor) -> None:
    """Run forward and backward, with gradients overwritten rather than accumulated.

    The tensors are marked as changed since the last step, as they are in training: otherwise a cast
    of an unchanged weight would be reused.
    """
    changed = [x, *module.parameters()]
    for tensor in changed:
        tensor.grad = None
    torch.autograd.graph.increment_version(changed)
    module(x).backward(dy)


def training_results(
    module: nn.Module,
    x: Tensor,
    dy: Tensor,
    parameters: Mapping[str, str],
    *,
    steps: int = WARM_UP_STEPS + 1,
) -> dict[str, Tensor]:
    """Return the output and the gradients of the last of ``steps`` equal training steps."""
    x = x.detach().clone().requires_grad_()
    found = dict(module.named_parameters())
    for _ in range(steps):
        x.grad = None
        module.zero_grad()
        y = module(x)
        y.backward(dy)
    grads = {"dX": x.grad, **{name: found[own].grad for name, own in parameters.items()}}
    return {"y": y.detach()} | {name: g for name, g in grads.items() if g is not None}


def fused_candidates(
    setting: Setting,
    plain: nn.Module,
    ours: Callable[..., nn.Module],
    name: str,
    plain_names: Mapping[str, str],
    our_names: Mapping[str, str],
) -> Iterator[Candidate]:
    """Iterate over the plain modules, and the fused module ``ours(plain, recipe)`` by recipe."""
    for mode in setting.modes:
        compiled = mode == "compile"
        same = partial(copy.deepcopy, plain)
        yield Candidate(
            f"plain bfloat16, {mode}", same, plain_names, baseline=not compiled, compiled=compiled
        )
        high = partial(ours, plain)
        yield Candidate(f"{name}, bfloat16, {mode}", high, our_names, compiled=compiled)
        for recipe_name in setting.recipes:
            recipe = RECIPES[recipe_name]()
            yield Candidate(
                f"{name}, {recipe_name}, {mode}",
                partial(ours, plain, recipe),
                our_names,
                recipe=recipe,
                compiled=compiled,
                fp8=True,
            )


@dataclass(frozen=True)
class Trial:
    """A problem on which modules are trained for a step, its right answers and its costs.

    Attributes:
        case: the case of the rows.
        data: the input and the gradient of the output.
        gate: the right answers and the least SQNR.
        flops: the FLOPs of a step.
        floor_ms: returns the floor of a recipe.
        less: tensors subtracted from output and input gradient before these are compared, such as
            the residual stream, which would hide a wrong layer.
        extra: measures further values of a module on its input.
    """

    case: str
    data: tuple[Tensor, Tensor]
    gate: common.Gate
    flops: float
    floor_ms: Callable[[Recipe | None], float | None]
    less: tuple[Tensor, Tensor] | None = None
    extra: Callable[[nn.Module, Tensor], dict[str, float]] = lambda module, x: {}

    @classmethod
    def of_normal(
        cls,
        setting: Setting,
        case: str,
        plain: nn.Module,
        sizes: tuple[int, int, int],
        names: Mapping[str, str],
        floor_db: float,
        flops: float,
        floor_ms: Callable[[Recipe | None], float | None],
    ) -> Trial:
        """Make a trial of normal numbers; ``sizes`` are tokens, input and output features."""
        generator, (M, *features) = setting.generator(), sizes
        x, dy = (
            torch.randn(M, n, generator=generator, device=setting.device).bfloat16()
            for n in features
        )
        exact = copy.deepcopy(plain).float()
        right = training_results(exact, x.float(), dy.float(), names, steps=1)
        return cls(case, (x, dy), common.Gate(right, floor_db), flops, floor_ms)

    def rows(
        self,
        setting: Setting,
        candidates: Iterable[Candidate],
        targets: Mapping[str, tuple[Target, ...]] = {},
    ) -> Iterator[Row]:
        """Check and time each candidate; ``targets`` are given by name."""
        steps: dict[str, Callable[[], object]] = {}
        found = (
            setting.attempt(
                self.case,
                candidate.name,
                partial(self._row, setting, candidate, targets.get(candidate.name, ()), steps),
            )
            for candidate in candidates
            if candidate.baseline or setting.measures(candidate.name)
        )
        if setting.sustained is None:
            yield from found
            return
        rows = []
        for row in found:
            print(f"{row.case} | {row.name}: {row.refusal or 'checked'}", file=sys.stderr)
            rows.append(row)
        sustained = setting.sustained(steps)
        for row in rows:
            if row.name in sustained and row.refusal is None:
                one = sustained[row.name]
                values = {"sustained ms": one.timing.median, "MHz": one.mhz, "W": one.watts}
                known = {name: value for name, value in values.items() if value is not None}
                row = replace(row, values={**row.values, **known})
            yield row

    def _row(
        self,
        setting: Setting,
        candidate: Candidate,
        targets: tuple[Target, ...],
        steps: dict[str, Callable[[], object]],
    ) -> Row:
        x, dy = self.data
        module = candidate.make()
        if candidate.compiled:
            module.compile()
        db = self._check(module, candidate.parameters)
        if refusal := self.gate.refusal(db):
            return setting.row(self.case, candidate.name, sqnr_db=db, refusal=refusal)
        leaf = x.detach().clone().requires_grad_()
        step = partial(train_step, module, leaf, dy)
        if setting.sustained is not None:
            steps[candidate.name] = step
        return setting.row(
            self.case,
            candidate.name,
            sqnr_db=db,
            ms=setting.time(step).samples,
            wall_ms=setting.wall(step).samples,
            floor_ms=self.floor_ms(candidate.recipe) if candidate.has_floor else None,
            flops=self.flops,
            fp8=candidate.fp8,
            baseline=candidate.baseline,
            # ``extra`` uses other sizes, for which a module would be compiled once more.
            values={} if candidate.compiled else self.extra(module, x),
            targets=targets,
        )

    def _check(self, module: nn.Module, parameters: Mapping[str, str]) -> dict[str, float]:
        results = training_results(module, *self.data, parameters)
        if self.less is not None:
            results["y"] = results["y"] - self.less[0]
            results["dX"] = results["dX"] - self.less[1]
        return self.gate.measure(results)


# Modules


class PlainNormLinear(nn.Module):
    """An RMSNorm, whose weight is not all ones, and a linear layer, in ``torch.nn``."""

    def __init__(self, K: int, N: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K, eps=EPS)
        nn.init.normal_(self.norm.weight, mean=1.0, std=0.1)
        self.linear = nn.Linear(K, N, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x))
        return y


class PlainMlp(nn.Module):
    """An RMSNorm, a linear layer, an activation and a linear layer, in ``torch.nn``."""

    def __init__(self, D: int, F_: int, activation: str) -> None:
        super().__init__()
        self.gated = activation == "swiglu"
        self.norm = nn.RMSNorm(D, eps=EPS)
        self.fc1 = nn.Linear(D, 2 * F_ if self.gated else F_, bias=False)
        self.fc2 = nn.Linear(F_, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(self.norm(x))
        if self.gated:
            gate, up = h.chunk(2, dim=-1)
            h = F.silu(gate) * up
        else:
            h = F.gelu(h, approximate="tanh")
        y: Tensor = self.fc2(h)
        return y


def plain_layer(size: LayerSize, device: torch.device, seed: int = 0) -> Any:
    """Make a Llama decoder layer of ``torch.nn`` in bfloat16."""
    torch.manual_seed(seed)
    with device:
        layer = Layer(size.D, size.H, size.G, size.F, nn.Linear)
    layer.attention_norm.eps = layer.mlp_norm.eps = EPS
    return layer.bfloat16()


def layer_arguments(size: LayerSize, device: torch.device) -> dict[str, Any]:
    """Return arguments with which our or TransformerEngine's ``TransformerLayer`` is that layer."""
    return {
        "hidden_size": size.D,
        "ffn_hidden_size": size.F,
        "num_attention_heads": size.H,
        "num_gqa_groups": size.G,
        "layernorm_epsilon": EPS,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "self_attn_mask_type": "causal",
        "bias": False,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "attn_input_format": "bshd",
        "params_dtype": torch.bfloat16,
        "device": device,
    }


def rotary_angles(size: LayerSize, device: torch.device) -> Tensor:
    """Compute the rotary angles of all positions of a sequence."""
    rotary: Any = float8lab.RotaryPositionEmbedding(
        size.D // size.H, rotary_base=ROTARY_BASE, device=device
    )
    angles: Tensor = rotary(size.sequence)
    return angles


def our_layer(
    plain: Any,
    size: LayerSize,
    recipe: Recipe | None = None,
    *,
    stored: bool = False,
    **arguments: Any,
) -> InContext:
    """Make a ``TransformerLayer`` with the weights of the plain layer.

    Args:
        plain: the layer that ``plain_layer`` returned.
        size: the size of that layer.
        recipe: the recipe of the FP8 GEMMs; None is bfloat16.
        stored: keep the weights in FP8 only.
        arguments: further arguments of ``TransformerLayer``.
    """
    device = plain.o.weight.device
    arguments = layer_arguments(size, device) | arguments
    with float8lab.fp8_model_init(recipe=recipe) if stored else nullcontext():
        layer: Any = float8lab.TransformerLayer(**arguments)
    copy_layer_weights(layer, plain, arguments.get("tp_group"))
    return InContext(layer, our_context(recipe), rotary_pos_emb=rotary_angles(size, device))


def copy_layer_weights(layer: Any, plain: Any, group: Any = None) -> None:
    """Copy the plain layer's weights, or this rank's shards, to a ``TransformerLayer``."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())

    def part(weight: Tensor, dim: int = 0) -> Tensor:
        return weight.chunk(ranks, dim)[rank]

    qkv, mlp = layer.self_attention.layernorm_qkv, layer.layernorm_mlp
    with torch.no_grad():
        for own, theirs in (
            (qkv.layer_norm_weight, plain.attention_norm.weight),
            (qkv.query_weight, part(plain.q.weight)),
            (qkv.key_weight, part(plain.k.weight)),
            (qkv.value_weight, part(plain.v.weight)),
            (layer.self_attention.proj.weight, part(plain.o.weight, 1)),
            (mlp.layer_norm_weight, plain.mlp_norm.weight),
            (mlp.fc1_weight, torch.cat((part(plain.gate.weight), part(plain.up.weight)))),
            (mlp.fc2_weight, part(plain.down.weight, 1)),
        ):
            own.copy_(theirs)
