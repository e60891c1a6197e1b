"""ExpertMLP: the MLPs of all experts, from a router's choice to each token's weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from float8lab import arguments
from float8lab.distributed.expert_parallel import held_experts, local_experts
from float8lab.nn.activation_function import activate, check_activation
from float8lab.nn.casts import plain
from float8lab.nn.fused_function import ExpertFront, ExpertMlpFunction, Layer, MlpCall
from float8lab.nn.gemm import output_dtype
from float8lab.nn.grouped_function import GroupedFunction, calibrate_experts
from float8lab.nn.grouped_linear import offsets_of
from float8lab.nn.layer import GemmDef, GemmModule
from float8lab.nn.main_grad import fused_weights, plain_weight
from float8lab.nn.parameters import InitMethod, MovedInPlace
from float8lab.nn.precision import NO_OPTIONS, Call, CallOptions, Precision
from float8lab.ops import as_matrix
from float8lab.recipes.state import autocast
from float8lab.tensor import Float8Tensor
from float8lab.tensor.dtensor import is_dtensor
from float8lab.tensor.permute import check_probs, gather_rows, routed, scatter_rows

__all__ = ["ExpertMLP", "ExpertsBase", "like", "local_layers"]


def local_layers(layers: tuple[Layer, Layer]) -> tuple[Layer, Layer]:
    """Return the layers of the experts that this rank has, if parameters are DTensors."""
    (w1, b1), (w2, b2) = layers
    return (local_experts(w1), local_experts(b1)), (local_experts(w2), local_experts(b2))


def like(y: Tensor, x: Tensor) -> Tensor:
    """Give a matrix the shape of ``x``, not as a view: FSDP2 refuses in-place ops on views."""
    return y if x.ndim == 2 else torch.ops.aten._unsafe_view.default(y, x.shape)


class ExpertsBase(MovedInPlace):
    """A module that holds the MLPs of all experts and the FP8 state of their two layers."""

    fuse_wgrad_accumulation = False
    _fp8_fc1: Precision
    _fp8_fc2: Precision

    layer_names: ClassVar[tuple[str, ...]] = ("fc1", "fc2")
    """The names of the layers, each of which has its own FP8 state."""

    def _run_experts(
        self, x: Tensor, offs: Tensor, layers: tuple[Layer, Layer],
        activation: str | Callable[[Tensor], Tensor], first_microbatch: bool | None = None,
        to_rows: tuple[Tensor, int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute ``activation(x @ w1[e].T + b1[e]) @ w2[e].T + b2[e]`` for each expert's rows.
        An activation of ``ACTIVATIONS`` is fused with casts; a function is not. With ``to_rows``, a
        row map and the number of rows, ``x`` holds tokens, which are copied to these rows."""
        fc1 = self._begin_layer(self._fp8_fc1, x, layers[0][0], first_microbatch)
        fc2 = self._begin_layer(self._fp8_fc2, x, layers[1][0], first_microbatch)
        if isinstance(activation, str) and fc1 is not None and fc2 is not None:
            row_map, rows = to_rows or (None, x.shape[0])
            options = MlpCall(ExpertFront(rows), activation, fc1, fc2)
            y = ExpertMlpFunction.run(x, offs, row_map, *layers[0], *layers[1], options)
        else:
            x = x if to_rows is None else scatter_rows(x, *to_rows)[0]
            h = self._apply_experts(self._fp8_fc1, x, offs, layers[0], fc1, first_microbatch)
            a = activate(h, activation) if isinstance(activation, str) else activation(h)
            y = self._apply_experts(self._fp8_fc2, a, offs, layers[1], fc2, first_microbatch)
        for precision, call in ((self._fp8_fc1, fc1), (self._fp8_fc2, fc2)):
            if call is not None and call.is_region:
                precision.end(call)
        return y

    def _held_experts(self) -> range | None:
        """Return which experts this rank holds; None if it holds all."""
        return held_experts(next((p for p in self.parameters() if p.ndim == 3), None))

    def _begin_layer(
        self, precision: Precision, x: Tensor, weight: Tensor, first_microbatch: bool | None
    ) -> Call | None:
        fused, held = fused_weights(self, weight), self._held_experts()
        options = NO_OPTIONS
        if fused or first_microbatch is not None or held is not None:
            options = CallOptions(first_microbatch, fused, experts=held)
        call = precision.begin(x, weight, training=self.training, options=options)
        count, expected = weight.shape[0], precision.experts if held is None else len(held)
        recipe = None if count == expected else precision.active_recipe()
        if recipe is not None and recipe.linear.delayed:
            raise NotImplementedError(
                f"weights must be those of all {precision.experts} experts under DelayedScaling, "
                f"or DTensors with Shard(0); got plain ones of {count}, and nothing says which "
                "slots are theirs. Place them so, or choose another recipe."
            )
        return call

    def _apply_experts(
        self, precision: Precision, x: Tensor, offs: Tensor, layer: Layer, call: Call | None,
        first_microbatch: bool | None,
    ) -> Tensor:  # fmt: skip
        weight, bias = layer
        if call is None:
            weight = plain_weight(self, weight, first_microbatch)
            calibrate_experts(precision, x, weight, offs, self._held_experts())
        return GroupedFunction.run(x, weight, bias, offs, call, True)


class ExpertMLP(ExpertsBase, GemmModule):
    """The MLPs of all experts of an MoE layer, with their GEMMs in FP8 inside ``autocast``.

    ``y[t] = sum over e of probs[t, e] * (activation(x[t] @ fc1_weight[e].T + fc1_bias[e]) @
    fc2_weight[e].T + fc2_bias[e])``, over the experts e that the router chose for token t.

    Shape: input and output ``[..., hidden_size]`` with any leading dimensions. An expert may have
    any number of tokens, also 0; nothing is padded, and the host waits for nothing. A gated
    activation takes ``2 * ffn_hidden_size`` features from the first layer: the first half goes
    through the function, and the second half multiplies the result.

    Numerics: those of ``moe_permute``, ``GroupedLinear``, the activation, ``GroupedLinear`` and
    ``moe_unpermute`` in sequence, bit for bit. In FP8 the permuted tokens, the activation's output
    and the gradient between activation and first layer are never written, but computed while they
    are cast. Forward saves the tokens and the first layer's output.

    Args:
        num_experts: number of experts.
        hidden_size: size of the last dimension of input and output.
        ffn_hidden_size: number of features between activation and second layer.
        bias: whether the experts learn additive biases, initialised to 0.
        init_method: ``init_method(weight)`` initialises each expert's first weight in place; None
            is normal, mean 0, standard deviation 0.023.
        output_layer_init_method: the same for the second weight.

    The other arguments are those of ``LayerNormMLP``.

    Raises:
        ValueError: the activation is unknown.

    >>> experts = float8lab.ExpertMLP(4, 64, 32, device="cpu")
    >>> x, logits = torch.randn(10, 64), torch.randn(10, 4)
    >>> probs, routing_map = float8lab.router.fused_topk_with_score_function(logits, 2)
    >>> with float8lab.autocast(recipe=float8lab.recipes.Float8CurrentScaling()):
    ...     experts(x, probs, routing_map, 20).shape
    torch.Size([10, 64])
    """

    fc1_weight: nn.Parameter
    fc1_bias: nn.Parameter | None
    fc2_weight: nn.Parameter
    fc2_bias: nn.Parameter | None
    _shown = ("num_experts", "hidden_size", "ffn_hidden_size", "activation")

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        bias: bool = False,
        activation: str = "swiglu",
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        device: torch.device | str | None = None,
        params_dtype: torch.dtype | None = None,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        super().__init__()
        gated = check_activation(activation)
        self._set_flags(bias=bias, fuse_wgrad_accumulation=fuse_wgrad_accumulation)
        arguments.check_callables(
            ("weight",), init_method=init_method, output_layer_init_method=output_layer_init_method
        )
        self.num_experts = E = arguments.check_size("num_experts", num_experts, minimum=1)
        self.hidden_size = H = arguments.check_size("hidden_size", hidden_size)
        self.ffn_hidden_size = F = arguments.check_size("ffn_hidden_size", ffn_hidden_size)
        self.activation = activation
        self._build(
            GemmDef.named("fc1", (E, 2 * F if gated else F, H), bias, init_method),
            GemmDef.named("fc2", (E, H, F), bias, output_layer_init_method),
            device=device, params_dtype=params_dtype,
        )  # fmt: skip

    @classmethod
    def from_experts(
        cls,
        experts: Iterable[nn.Module],
        names: Sequence[str] | None = None,
        activation: str = "swiglu",
    ) -> ExpertMLP:
        """Make an ``ExpertMLP`` with copies of the weights of MLPs that a model has in a list.

        Call it instead of the loop that runs the MLPs. Each must compute ``down(function(gate(x)) *
        up(x))``, or ``down(function(up(x)))`` if ``activation`` does not gate, which this method
        checks on random tokens. Parameters of frozen layers are frozen.

        Args:
            names: the names of the linear layers: gate, up and down; or up and down, where up may
                join gate and up, in this order. None looks for gate_proj, up_proj and down_proj,
                or w1, w3 and w2.
            activation: as in ``ExpertMLP``.

        Raises:
            TypeError: a layer is not a ``torch.nn.Linear``.
            ValueError: experts have different shapes, or compute something else.

        >>> class Expert(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w1, self.w2, self.w3 = (
        ...             torch.nn.Linear(*size) for size in ((64, 32), (32, 64), (64, 32))
        ...         )
        ...     def forward(self, x):
        ...         return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))
        >>> float8lab.ExpertMLP.from_experts(torch.nn.ModuleList(Expert() for _ in range(4)))
        ExpertMLP(num_experts=4, hidden_size=64, ffn_hidden_size=32, activation=swiglu)
        """
        listed = None if isinstance(experts, Tensor) else experts
        arguments.check_instance("experts", listed, Iterable, "modules, such as a ModuleList")
        modules = list(experts)
        for module in modules:
            arguments.check_module("experts", module)
        if names is not None:
            names = arguments.check_names("names", names)
        gated = check_activation(activation)
        layers = [_layers_of(module, names) for module in modules]
        kinds = {tuple((x.weight.shape, x.bias is None) for x in expert) for expert in layers}
        if len(kinds) != 1:
            raise ValueError(
                f"experts must have layers of the same shapes; got {len(modules)} experts of "
                f"{len(kinds)} kinds. Convert each kind by itself."
            )
        *up, down = layers[0]
        H, F = down.weight.shape
        rows = sum(layer.weight.shape[0] for layer in up)
        if rows != (2 * F if gated else F) or len({layer.bias is None for layer in layers[0]}) > 1:
            raise ValueError(
                f"experts must give {'twice ' * gated}the {F} features of the last layer to "
                f"{activation!r}, with biases in all layers or none; got {rows} features. Name "
                "the layers by names, and the activation."
            )
        with torch.no_grad():
            values = [_weights_and_biases(expert) for expert in layers]
            _check_experts(modules, values, activation)
        fc1_weights = iter([weight for (weight, _), _ in values])
        fc2_weights = iter([weight for _, (weight, _) in values])
        mlp = cls(
            len(modules), H, F, bias=down.bias is not None, activation=activation,
            device=down.weight.device, params_dtype=down.weight.dtype,
            init_method=lambda weight: weight.copy_(next(fc1_weights)),
            output_layer_init_method=lambda weight: weight.copy_(next(fc2_weights)),
        )  # fmt: skip
        mlp.gemms = tuple(gemm._replace(init_method=None) for gemm in mlp.gemms)
        for index, (weight, bias) in enumerate(mlp._layers()):
            original = layers[0][-1 if index else 0]
            weight.requires_grad_(original.weight.requires_grad)
            if bias is not None:
                with torch.no_grad():
                    bias.copy_(torch.stack([e[index][1] for e in values]))  # type: ignore[misc]
                bias.requires_grad_(original.bias.requires_grad)
        return mlp.train(modules[0].training)

    def forward(
        self,
        inp: Tensor,
        probs: Tensor,
        routing_map: Tensor,
        num_out_tokens: int | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Tensor:
        """Send each token through its experts, and sum their outputs times ``probs``.

        Args:
            inp: ``[..., hidden_size]``, T tokens.
            probs: ``[T, num_experts]``, or ``[T, K]`` if ``routing_map`` has indices; any float.
            routing_map: bools ``[T, num_experts]``, True where an expert gets the token; or
                integers ``[T, K]``, the experts of each token, where a number outside
                ``range(num_experts)`` stands for no expert.
            num_out_tokens: with a mask, the number of rows of all experts together, one for each
                token of each expert; further rows are dropped. None counts the rows, for which the
                CPU waits if the mask is on a GPU.
            is_first_microbatch: as in ``GroupedLinear.forward``, for both weights.
        """
        if is_dtensor(self._parameters.get("fc1_weight")):  # getattr would run parametrizations
            raise NotImplementedError(
                "ExpertMLP must be given the rows of its experts where ranks share them; got a "
                "call with tokens. Call moe_dispatch, run_rows and moe_combine."
            )
        arguments.check_size("num_out_tokens", num_out_tokens, optional=True)
        arguments.check_input("inp", inp, (self.hidden_size,), "hidden_size")
        x = as_matrix(inp.dequantize() if isinstance(inp, Float8Tensor) else inp)
        x = x.to(output_dtype(x))  # before the tokens are copied to each expert
        is_mask = not isinstance(routing_map, Tensor) or routing_map.dtype == torch.bool
        experts = None if is_mask else self.num_experts
        row_map, rows, offs = routed(routing_map, x.shape[0], experts, num_out_tokens)
        check_probs("probs", probs, tuple(routing_map.shape))
        y = self._run_experts(
            x, offs, self._layers(), self.activation, is_first_microbatch, (row_map, rows)
        )
        return like(gather_rows(y, row_map, probs), inp)

    def run_rows(
        self,
        rows: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
    ) -> Tensor:
        """Apply each expert to its rows, between ``moe_dispatch`` and ``moe_combine``.

        Args:
            rows: ``[M, hidden_size]``, in the order of the experts.
            m_splits: as in ``GroupedLinear.forward``.
            is_first_microbatch: as in ``GroupedLinear.forward``, for both weights.

        Returns:
            ``[M, hidden_size]``, with zeros in rows after those of the last expert.
        """
        arguments.check_input("rows", rows, (self.hidden_size,), "hidden_size")
        x = as_matrix(rows.dequantize() if isinstance(rows, Float8Tensor) else rows)
        layers = local_layers(self._layers())
        offs = offsets_of(m_splits, x, layers[0][0].shape[0], "num_experts")
        return like(self._run_experts(x, offs, layers, self.activation, is_first_microbatch), rows)

    def _layers(self) -> tuple[Layer, Layer]:
        return (self.fc1_weight, self.fc1_bias), (self.fc2_weight, self.fc2_bias)


_NAMES = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
"""Usual names of the linear layers of experts: gate, up and down."""


def _layers_of(module: nn.Module, names: Sequence[str] | None) -> list[nn.Linear]:
    """Return the linear layers of an expert, the down projection last."""
    if names is None:
        names = next((n for n in _NAMES if all(hasattr(module, local) for local in n)), ())
    layers: list[Any] = [getattr(module, name, None) for name in names]
    if len(layers) not in (2, 3) or not all(isinstance(layer, nn.Linear) for layer in layers):
        raise TypeError(
            "experts must consist of two or three layers of type torch.nn.Linear; got "
            f"{type(module).__name__}. Pass their names: gate, up and down, or up and down."
        )
    return layers


def _weights_and_biases(layers: Sequence[nn.Linear]) -> tuple[Layer, Layer]:
    """Return the weights and biases of an expert, with gate and up joined by rows."""
    *up, down = layers
    weight = torch.cat([plain(layer.weight) for layer in up])
    bias = None if down.bias is None else torch.cat([layer.bias for layer in up])
    return (weight, bias), (plain(down.weight), down.bias)


def _check_experts(
    experts: Sequence[nn.Module], values: Sequence[tuple[Layer, Layer]], activation: str
) -> None:
    """Check on random tokens that experts compute the MLP of their weights and an activation."""
    weight = values[0][1][0]
    if weight.is_meta:
        return
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(4, weight.shape[0], generator=generator, device=weight.device).to(weight)
    for index, (expert, (fc1, fc2)) in enumerate(zip(experts, values, strict=True)):
        with torch.autocast(x.device.type, enabled=False), autocast(enabled=False):
            expected = functional.linear(activate(functional.linear(x, *fc1), activation), *fc2)
            y = expert(x)
        fits = isinstance(y, Tensor) and y.shape == expected.shape
        error = float((y - expected).float().norm()) if fits else torch.inf
        if not error <= torch.finfo(x.dtype).eps ** 0.5 * float(expected.float().norm()):
            raise ValueError(
                f"experts must compute the activation {activation!r} of their first layers, and "
                f"their last layer of that; got other numbers from expert {index}. Pass names in "
                "the order gate, up, down, and the activation."
            )
