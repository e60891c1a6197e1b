"""Run stacked experts of Transformers and torchtitan in FP8.  E experts, T tokens.

A module of experts is recognised without an import of its library: by the names and shapes of its
parameters, and by the arguments of its forward. A matrix that is stored transposed is read through
a transposed view.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from float8lab.nn.casts import plain
from float8lab.nn.convert.other_experts import ExpertWeight, OtherExperts
from float8lab.nn.expert_mlp import like, local_layers
from float8lab.nn.fused_function import Layer
from float8lab.nn.gemm import output_dtype
from float8lab.ops import as_matrix
from float8lab.tensor.permute import gather_rows, routed

__all__ = ["EXPERTS"]

_FUNCTIONS = {
    "SiLU": "silu", "SiLUActivation": "silu", "silu": "silu", "swish": "silu",
    "NewGELUActivation": "gelu", "GELUTanh": "gelu", "PytorchGELUTanh": "gelu",
    "QuickGELUActivation": "qgelu", "ReLU": "relu", "relu": "relu",
    "ReLUSquaredActivation": "srelu",
}  # fmt: skip
_GATED = {
    "silu": "swiglu", "gelu": "geglu", "qgelu": "qgeglu", "relu": "reglu", "srelu": "sreglu"
}  # fmt: skip


def _named(function: object, *, gated: bool) -> str | None:
    """Return the name in ``ACTIVATIONS`` of a library's function; None if it has none."""
    if isinstance(function, nn.GELU):
        activation = "gelu" if function.approximate == "tanh" else None
    else:
        activation = _FUNCTIONS.get(getattr(function, "__name__", type(function).__name__))
    return _GATED[activation] if activation and gated else activation


def _gated_by(function: Callable[[Tensor], Tensor]) -> str | Callable[[Tensor], Tensor]:
    """Return the activation ``function(gate) * up`` of ``[gate, up]``, by name if it has one."""

    def apply(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        return function(gate) * up

    return _named(function, gated=True) or apply


def _has(module: nn.Module, *names: str, ndim: int = 3) -> bool:
    """Whether a module has parameters, parametrized or not, with these names and ``ndim``."""
    return all(
        isinstance(p, Tensor) and not isinstance(p, UninitializedParameter) and p.ndim == ndim
        for p in (getattr(module, name, None) for name in names)
    )


def _takes(module: nn.Module, *names: str) -> bool:
    """Whether the first arguments of a module's forward have these names."""
    arguments = [n for n in inspect.signature(type(module).forward).parameters if n != "self"]
    return arguments[: len(names)] == list(names)


def _is_gate_of_gpt_oss(module: Any) -> bool:
    """Whether ``_apply_gate`` is that of GPT-OSS, with the constants of the GPT-OSS models."""
    gate = type(module)._apply_gate
    named = gate.__module__.startswith("transformers.") and gate.__qualname__.startswith("GptOss")
    numbers = getattr(module, "alpha", None), getattr(module, "limit", None)
    return named and numbers == (1.702, 7.0)


class TransformersExperts(OtherExperts):
    """Experts of Transformers 5, of every class decorated by ``use_experts_implementation``.

    The decorator tells the layout of the weights: ``gate_up_proj`` or ``up_proj``, and
    ``down_proj``, transposed or not, with biases or not. GPT-OSS's gate is fused with the casts;
    any other custom gate runs unfused between the two layers. ``config._experts_implementation``
    affects only experts that are not converted.
    """

    @staticmethod
    def fits(module: nn.Module) -> bool:
        return (
            all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))
            and hasattr(type(module), "_apply_gate")
            and _has(module, "gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        )

    @staticmethod
    def layers(module: Any) -> tuple[Layer, Layer]:
        names = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
        weights = [getattr(module, name) for name in names]
        biases = [getattr(module, f"{name}_bias") if module.has_bias else None for name in names]
        first, second = (w.mT if module.is_transposed else w for w in weights)
        return (first, biases[0]), (second, biases[1])

    @staticmethod
    def weights(module: nn.Module) -> dict[str, ExpertWeight]:
        names = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
        layers = (ExpertWeight(layer, bool(module.is_transposed)) for layer in ("fc1", "fc2"))
        return dict(zip(names, layers, strict=True))

    @staticmethod
    def obstacle(module: nn.Module) -> str | None:
        if not hasattr(type(module).forward, "__wrapped__"):
            return f"{type(module).__name__} has a forward of its own"
        return None

    def forward(
        self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Apply its K experts ``[T, K]`` to each token ``[..., H]``; return the weighted sums."""
        if not self.has_gate:
            activation = _named(self.act_fn, gated=False) or self.act_fn
        elif type(self)._apply_gate.__name__ == "_default_apply_gate":
            activation = _gated_by(self.act_fn)
        elif _is_gate_of_gpt_oss(self):
            activation = "clamped_swiglu_interleaved"
        else:
            activation = self._apply_gate
        after = self.post_expert_norm if getattr(self, "has_post_expert_norm", False) else None
        layers = TransformersExperts.layers(self)
        return _route(self, hidden_states, top_k_index, top_k_weights, layers, activation, after)


def _route(
    self: Any, hidden_states: Tensor, index: Tensor, weights: Tensor, layers: tuple[Layer, Layer],
    activation: str | Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Permute tokens, run the experts, and return the weighted sum of each token's outputs."""
    x = as_matrix(plain(hidden_states))
    x = x.to(output_dtype(x))  # cast before rows are copied to each expert
    layers = local_layers(layers)
    row_map, rows, offs = routed(index, x.shape[0], layers[0][0].shape[0])
    y = self._run_experts(x, offs, layers, activation, to_rows=(row_map, rows))
    y = y if after is None else after(y)
    y = gather_rows(y, row_map, weights)
    return like(y.to(hidden_states.dtype), hidden_states)


class LlamaExperts(OtherExperts):
    """Llama 4's experts, all of which get equal numbers of rows."""

    @staticmethod
    def fits(module: Any) -> bool:
        return (
            hasattr(module, "act_fn")
            and not hasattr(module, "is_transposed")
            and _has(module, "gate_up_proj", "down_proj")
            and module.gate_up_proj.shape[2] == 2 * module.down_proj.shape[1]
            and len(inspect.signature(type(module).forward).parameters) == 2
        )

    @staticmethod
    def layers(module: Any) -> tuple[Layer, Layer]:
        return (module.gate_up_proj.mT, None), (module.down_proj.mT, None)

    @staticmethod
    def weights(module: nn.Module) -> dict[str, ExpertWeight]:
        return {"gate_up_proj": ExpertWeight("fc1", True), "down_proj": ExpertWeight("fc2", True)}

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """Split the rows into E equal chunks and apply one expert to each chunk."""
        layers = local_layers(LlamaExperts.layers(self))
        experts, _, features = layers[0][0].shape
        x = plain(hidden_states).reshape(-1, features)
        offs = torch.arange(1, experts + 1, device=x.device) * (x.shape[0] // experts)
        return self._run_experts(x, offs, layers, _gated_by(self.act_fn))


class DbrxExperts(OtherExperts):
    """DBRX's experts, whose submodule ``mlp`` has one matrix for all experts of each layer."""

    @staticmethod
    def fits(module: nn.Module) -> bool:
        inner = getattr(module, "mlp", None)
        return (
            inner is not None
            and hasattr(inner, "moe_num_experts")
            and hasattr(inner, "activation_fn")
            and _has(inner, "w1", "v1", "w2", ndim=2)
            and _takes(module, "hidden_states", "top_k_index", "top_k_weights")
        )

    @staticmethod
    def layers(module: Any) -> tuple[Layer, Layer]:
        inner = module.mlp
        sizes = inner.moe_num_experts, inner.ffn_hidden_size, inner.hidden_size
        w1, v1, w2 = (w.view(sizes) for w in (inner.w1, inner.v1, inner.w2))
        return (torch.cat((w1, v1), 1), None), (w2.mT, None)

    @staticmethod
    def weights(module: nn.Module) -> dict[str, ExpertWeight]:
        first, second = ExpertWeight("fc1"), ExpertWeight("fc2", True)
        return {"mlp.w1": first, "mlp.v1": first, "mlp.w2": second}

    @staticmethod
    def shapes(module: Any) -> list[tuple[int, ...]]:
        inner = module.mlp
        E, F, H = inner.moe_num_experts, inner.ffn_hidden_size, inner.hidden_size
        return [(E, 2 * F, H), (E, H, F)]

    def forward(
        self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Apply its K experts ``[T, K]`` to each token ``[B, S, H]``; return the weighted sums."""
        layers = DbrxExperts.layers(self)
        activation = _gated_by(self.mlp.activation_fn)
        return _route(self, hidden_states, top_k_index, top_k_weights, layers, activation)


_W = ("w1", "w2", "w3")


class TitanExperts(OtherExperts):
    """torchtitan's ``GroupedExperts``, in versions without the method ``_grouped_mm``."""

    @staticmethod
    def fits(module: nn.Module) -> bool:
        is_titan = _names_of_titan(module) is not None and not hasattr(module, "_grouped_mm")
        return is_titan and _takes(module, "x", "num_tokens_per_expert")

    @staticmethod
    def layers(module: nn.Module) -> tuple[Layer, Layer]:
        w1, w2, w3 = (getattr(module, name) for name in _names_of_titan(module) or ())
        return (torch.cat((w1, w3), 1), None), (w2, None)

    @staticmethod
    def weights(module: nn.Module) -> dict[str, ExpertWeight]:
        layers = map(ExpertWeight, ("fc1", "fc2", "fc1"))
        return dict(zip(_names_of_titan(module) or _W, layers, strict=True))

    @staticmethod
    def shapes(module: nn.Module) -> list[tuple[int, ...]]:
        E, F, D = getattr(module, (_names_of_titan(module) or _W)[0]).shape
        return [(E, 2 * F, D), (E, D, F)]

    def forward(self: Any, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Apply to each row of ``[M, D]`` its expert; each expert has a given number of rows."""
        offs = num_tokens_per_expert.to(device=x.device, dtype=torch.int64).cumsum(0)
        layers = local_layers(TitanExperts.layers(self))
        y: Tensor = self._run_experts(plain(x), offs, layers, "swiglu")
        return y.to(x.dtype)


def _names_of_titan(module: nn.Module) -> tuple[str, ...] | None:
    choices = (("w1_EFD", "w2_EDF", "w3_EFD"), _W)
    return next((names for names in choices if _has(module, *names)), None)


class TitanGroupedMM(OtherExperts):
    """torchtitan's ``GroupedExperts``, in which only the method ``_grouped_mm`` is replaced.

    Its own code around and between the three GEMMs still runs. Their order is w1, w3, w2.
    """

    replaces = ("forward", "_grouped_mm")
    layer_names = ("w1", "w3", "w2")

    @staticmethod
    def fits(module: nn.Module) -> bool:
        return hasattr(module, "_grouped_mm") and _names_of_titan(module) is not None

    @staticmethod
    def weights(module: nn.Module) -> dict[str, ExpertWeight]:
        return dict(zip(_names_of_titan(module) or _W, map(ExpertWeight, _W), strict=True))

    shapes = TitanExperts.shapes

    @staticmethod
    def obstacle(module: nn.Module) -> str | None:
        if getattr(module, "use_grouped_mm", True) is False:
            return "use_grouped_mm is False, and it multiplies expert by expert; set it to True"
        return None

    def forward(self: Any, *args: object, **kwargs: object) -> Tensor:
        """Run the forward of the original class with the same arguments."""
        self._gemms_begun = 0
        return self.original.forward(self, *args, **kwargs)

    def _grouped_mm(
        self: Any, A: Tensor, B_t: Tensor | None = None, offs: Tensor | None = None, *,
        weight_EOI: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return ``A @ B_t[e]``, or ``A @ weight_EOI[e].T``, for the rows of each expert."""
        weight: Any = weight_EOI if B_t is None else B_t.mT
        precision = getattr(self, f"_fp8_{TitanGroupedMM.layer_names[self._gemms_begun % 3]}")
        self._gemms_begun += 1
        x = plain(A)
        call = self._begin_layer(precision, x, weight, None)
        y: Tensor = self._apply_experts(precision, x, offs, (weight, None), call, None)
        if call is not None and call.is_region:
            precision.end(call)
        return y


EXPERTS = (TransformersExperts, LlamaExperts, DbrxExperts, TitanGroupedMM, TitanExperts)
"""All classes of this file; ``TitanExperts`` is for experts that ``TitanGroupedMM`` cannot fit."""
