"""The base of modules with GEMMs: it builds parameters and FP8 state from GEMM definitions.

Note: this file uses these nouns.

- *GEMM definition*: a ``GemmDef``, which names the parameters that form the weight of one GEMM, and
  gives their sizes on this rank and how ranks share them. ``module.gemms`` lists the definitions.
- *state*: the ``Precision`` of a GEMM: ``module._fp8``, or ``module._fp8_fc1`` for a GEMM ``fc1``.
- *storage*: parameters are stored in FP8 where ``fp8_model_init`` is active (``parameters.py``).
- *shard marks*: attributes of parameters that say to trainers which dimension ranks share.

A constructor checks its arguments, sets attributes, and calls ``_build`` with its definitions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from float8lab import arguments
from float8lab.distributed.comm import SharedScales, mark_sequence_parallel
from float8lab.distributed.fsdp.shards import Shardable
from float8lab.distributed.fsdp.weight import WeightCast
from float8lab.distributed.shard_map import ShardMap
from float8lab.nn import parallel, parameters
from float8lab.nn.casts import joined, spec_of_experts
from float8lab.nn.gemm import output_dtype
from float8lab.nn.main_grad import fused_weights
from float8lab.nn.norm import check_norm
from float8lab.nn.norm_function import NormKind, normalize
from float8lab.nn.parameters import InitMethod, MovedInPlace
from float8lab.nn.precision import (
    NO_OPTIONS,
    Call,
    CallOptions,
    Precision,
    place_precisions,
    precisions,
)
from float8lab.recipes.region import STATE
from float8lab.tensor import Float8Tensor
from float8lab.tensor.dtensor import local_of

__all__ = ["GemmDef", "GemmModule", "NormGemmModule", "describe_fp8", "linear_in_high_precision"]


class GemmDef(NamedTuple):
    """The definition of a GEMM, ``y = x @ weight.T + bias``; sizes are those of this rank."""

    weights: tuple[str, ...]
    """Names of the parameters whose rows together form the weight; or a name for each expert."""
    biases: tuple[str, ...]
    """Names of their biases."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of these weights: ``[N, K]``, or ``[E, N, K]`` of all experts together."""
    bias_shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes of the biases; empty if they are None."""
    name: str = ""
    """The name of the GEMM in its module; "" for an only GEMM."""
    init_method: InitMethod | None = None
    mode: str | None = None
    """How ranks share the weight: "column", "row" or None."""
    features: tuple[int, ...] = ()
    """How many of the sharded features this rank has: one number, or a number for each of several
    matrices that form the weight."""
    experts: int = 0
    """How many experts' matrices the weight consists of; 0 for a single matrix."""

    @classmethod
    def named(
        cls, name: str, shape: tuple[int, ...], bias: bool, init_method: InitMethod | None,
        mode: str | None = None, *, features: tuple[int, ...] = (),
    ) -> GemmDef:  # fmt: skip
        """Return the definition of one of several GEMMs, with one weight of ``shape``."""
        return cls(
            (f"{name}_weight",), (f"{name}_bias",), (shape,), (shape[:-1],) if bias else (), name,
            init_method, mode, features, shape[0] if len(shape) == 3 else 0,
        )  # fmt: skip

    @property
    def state(self) -> str:
        """The name of the module's attribute that holds the GEMM's FP8 state."""
        return f"_fp8_{self.name}" if self.name else "_fp8"

    @property
    def shard_dim(self) -> int:
        """The sharded dimension of a matrix."""
        return int(self.mode == "row")

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape on this rank: ``[N, K]``, or ``[E, N, K]`` for experts."""
        *_, rows, columns = self.shapes[0]
        if self.experts:
            return self.experts, rows, columns
        return sum(shape[0] for shape in self.shapes), columns

    def parameters(
        self, device: torch.device, dtype: torch.dtype
    ) -> Iterator[tuple[str, nn.Parameter | None]]:
        """Yield new, uninitialised parameters and their names, each bias after its weight."""
        weights = self._empty(self.shapes, device, dtype)
        biases = self._empty(self.bias_shapes, device, dtype) or (None,) * len(self.biases)
        for items in itertools.zip_longest(
            zip(self.weights, weights, strict=True), zip(self.biases, biases, strict=True)
        ):
            for name, tensor in filter(None, items):
                yield name, None if tensor is None else nn.Parameter(tensor)

    def _empty(
        self, shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype
    ) -> Sequence[Tensor | None]:
        """Allocate tensors; the matrices of experts share one allocation."""
        if self.experts and len(shapes) > 1:
            shape = (len(shapes), *shapes[0])
            return torch.empty(shape, device=device, dtype=dtype).unbind()
        return [torch.empty(shape, device=device, dtype=dtype) for shape in shapes]


class GemmModule(MovedInPlace, Shardable, parallel.TensorParallelModule):
    """A module whose parameters, FP8 state, shard marks and repr follow from GEMM definitions."""

    gemms: tuple[GemmDef, ...] = ()
    """The definitions of the module's GEMMs, in the order of its parameters."""
    use_bias: bool
    return_bias = False
    _is_fsdp_managed_module = False  # FSDP sets it on the modules whose parameters it shards
    fuse_wgrad_accumulation = False
    parallel_mode: str | None = None
    _split: dict[str, int] | None = None
    """The rows of each parameter, by name, if the weight is split into several parameters."""

    _shown: ClassVar[tuple[str, ...]] = ()
    """The attributes that the module's repr shows."""
    gathers_fp8: ClassVar[bool] = True
    """Whether FSDP2 may gather the weights in FP8."""
    _keeps_initial_values = False

    def _set_flags(self, *, bias: bool, **flags: bool) -> None:
        """Check flags and set each as an attribute of its name, but ``bias`` as ``use_bias``."""
        arguments.check_flags(bias=bias, **flags)
        self.use_bias = bool(bias)
        for name, flag in flags.items():
            setattr(self, name, bool(flag))

    def _set_features(
        self, in_features: int, out_features: int, parallel_mode: str | None,
        parameters_split: Sequence[str] | Mapping[str, int] | None, init_method: InitMethod | None,
    ) -> GemmDef:  # fmt: skip
        """Set the number of features of this rank, and return the module's only GEMM definition.

        The arguments are those of the constructor: the features of all ranks together.
        """
        in_features = arguments.check_size("in_features", in_features)
        out_features = arguments.check_size("out_features", out_features)
        sizes = parameters.sizes_of_split(parameters_split, out_features)
        self._split = None if isinstance(parameters_split, parameters.JoinedSplit) else sizes
        if self.fuse_wgrad_accumulation and len(self._split or ()) > 1:
            raise ValueError(
                "fuse_wgrad_accumulation must be False where parameters_split has several names; "
                "got True. The weight gradient is of one parameter: leave parameters_split out."
            )
        self.parallel_mode = mode = parallel_mode and parallel_mode.lower()
        named = {"out_features": out_features}
        if sizes is not None:
            named = {f"parameters_split[{name!r}]": size for name, size in sizes.items()}
        out_ranks, in_ranks = (self.tp_size if mode == kind else 1 for kind in ("column", "row"))
        rows = tuple(parallel.share_of(name, size, out_ranks) for name, size in named.items())
        K = parallel.share_of("in_features", in_features, in_ranks)
        self.out_features, self.in_features = sum(rows), K
        prefixes = [""] if self._split is None else [f"{name}_" for name in self._split]
        weights, biases = (tuple(f"{p}{kind}" for p in prefixes) for kind in ("weight", "bias"))
        shapes = tuple((N, K) for N in (rows if self._split else [sum(rows)]))
        bias_shapes = tuple(shape[:1] for shape in shapes) if self.use_bias else ()
        return GemmDef(
            weights, biases, shapes, bias_shapes, init_method=init_method, mode=mode,
            features=(K,) if mode == "row" else rows,
        )  # fmt: skip

    def _build(
        self, *gemms: GemmDef, device: torch.device | str | None, params_dtype: torch.dtype | None,
        tp_group: ProcessGroup | None = None, ub: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        """Build parameters and FP8 state from the definitions, as a constructor's last step."""
        arguments.check_dtype("params_dtype", params_dtype)
        device = arguments.check_device("device", device) or parameters.default_device()
        self.register_load_state_dict_pre_hook(parallel.ignore_extra_state)
        self.gemms = gemms
        for gemm in gemms:
            precision = Precision()
            precision.experts = gemm.experts or 1
            setattr(self, gemm.state, precision)
        self._register_parameters(device, params_dtype or torch.get_default_dtype())
        self.overlap = parallel.overlap_of(type(self).__name__, ub or {})
        self.set_tensor_parallel_group(tp_group)
        if device.type != "meta":
            self.reset_parameters()
        for gemm in gemms:
            sharing = self._shared_scales(gemm)
            self._keeps_initial_values = parameters.store_in_fp8(self, gemm.weights, sharing)
            self._mark_shards(gemm)
        place_precisions(self)

    def _register_parameters(self, device: torch.device, dtype: torch.dtype) -> None:
        for gemm in self.gemms:
            for name, parameter in gemm.parameters(device, dtype):
                self.register_parameter(name, parameter)

    def reset_parameters(self) -> None:
        """Initialise weights by the init methods, and biases to 0, like ``Linear``."""
        parameters.materialize(self)
        keep = self._keeps_initial_values
        for gemm in self.gemms:
            weights = [getattr(self, name) for name in gemm.weights]
            shard = self._shard(gemm.shard_dim - 2, gemm.features if len(weights) == 1 else ())
            for together in [[w] for w in weights] if gemm.experts else [weights]:
                parameters.initialise(together, gemm.init_method, keep=keep, shard=shard)
            for name in gemm.biases:
                if (bias := getattr(self, name)) is not None:
                    nn.init.zeros_(bias)

    def _parallel_modes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {
            gemm.state: (gemm.mode, gemm.features) for gemm in self.gemms if gemm.mode is not None
        }

    def _shared_scales(self, gemm: GemmDef) -> SharedScales | None:
        """Return how ranks share the scales of a weight that will be stored in FP8."""
        if (sharing := getattr(self, gemm.state).parallel) is None or STATE.init is None:
            return None
        if self.tp_group is None:
            raise ValueError(
                f"tp_group must be given where the weights of {self.tp_size} tensor-parallel ranks "
                "are stored in FP8, which share scales; got None. Pass the group to the module."
            )
        return SharedScales(sharing, gemm.shard_dim)

    def _mark_shards(self, gemm: GemmDef) -> None:
        """Mark parameters for trainers that sum gradients or load checkpoints of several ranks."""
        if self.tp_size == 1:
            return
        for name in gemm.weights:
            parallel.mark_shard(getattr(self, name), gemm.shard_dim - 2 * bool(gemm.experts))
        if gemm.experts or not gemm.bias_shapes:
            return
        if gemm.mode == "row":
            mark_sequence_parallel(self, self.sequence_parallel, *gemm.biases)
        else:
            for name in gemm.biases:
                parallel.mark_shard(getattr(self, name), 0)

    def _weight_cast(self, name: str) -> WeightCast | None:
        gemm = next((gemm for gemm in self.gemms if gemm.weights == (name,)), None)
        if gemm is None or not self.gathers_fp8:
            return None
        precision: Precision = getattr(self, gemm.state)
        cast = precision.weight_gather(shares_scales=self._placement is not None)
        if cast is None or not gemm.experts:
            return cast
        return cast._replace(spec=spec_of_experts(cast.spec)) if len(gemm.shapes[0]) == 3 else None

    def _weight_and_bias(self, gemm: GemmDef) -> tuple[Tensor, Tensor | None]:
        """Return the weight and the bias that the parameters of a GEMM form."""
        weights = [getattr(self, name) for name in gemm.weights]
        biases = [getattr(self, name) for name in gemm.biases]
        if len(weights) == 1:
            return weights[0], biases[0]
        return joined(weights), None if biases[0] is None else torch.cat(biases)

    def _returned(self, bias: Tensor | None) -> Tensor | None:
        """Return the bias that forward returns; a copy if FSDP frees the parameter afterwards."""
        return bias.clone() if self._is_fsdp_managed_module and bias is not None else bias

    def _begin(
        self, precision: Precision, x: Tensor, weight: Tensor, first_microbatch: bool | None,
        tokens: ShardMap | None,
    ) -> Call | None:  # fmt: skip
        """Decide how a GEMM on a weight runs for the module's input; None is high precision."""
        options = NO_OPTIONS
        if self.fuse_wgrad_accumulation or first_microbatch is not None or tokens is not None:
            options = CallOptions(first_microbatch, fused_weights(self, weight), tokens)
        return precision.begin(x, weight, training=self.training, options=options)

    def extra_repr(self) -> str:
        shown = [f"{name.removeprefix('use_')}={getattr(self, name)}" for name in self._shown]
        return f"{', '.join(shown)}{describe_fp8(self)}"


class NormGemmModule(GemmModule):
    """GEMMs after a norm with parameters ``layer_norm_weight`` and ``layer_norm_bias``."""

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None
    normalization: str
    eps: float
    zero_centered_gamma: bool
    return_layernorm_output: bool
    return_layernorm_output_gathered: bool
    _norm: NormKind
    gathers_fp8 = False

    def _set_norm(self, normalization: str, eps: float) -> None:
        """Set the kind of norm, after the flags."""
        self.eps = check_norm(normalization, "eps", eps)
        self.normalization = normalization
        self._norm = NormKind(normalization == "LayerNorm", self.eps, self.zero_centered_gamma)

    def _register_parameters(self, device: torch.device, dtype: torch.dtype) -> None:
        # Under row parallelism ranks share the features of the norm's input, and gather them.
        gathered = self.gemms[0].mode == "row" and self.tp_size > 1
        size = self.gemms[0].shape[-1] * (self.tp_size if gathered else 1)
        self.layer_norm_weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        bias = torch.empty(size, device=device, dtype=dtype) if self._norm.center else None
        self.register_parameter("layer_norm_bias", None if bias is None else nn.Parameter(bias))
        # Under sequence parallelism each rank has the gradients of its own tokens.
        marked = self.sequence_parallel and not gathered
        mark_sequence_parallel(self, marked, "layer_norm_weight", "layer_norm_bias")
        super()._register_parameters(device, dtype)

    def reset_parameters(self) -> None:
        """Initialise the norm, and the parameters of GEMMs like ``Linear``."""
        parameters.materialize(self)
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)
        super().reset_parameters()

    def _checked(self, inp: Tensor, weight: Tensor, argument: str, ranks: int = 1) -> Tensor:
        """Return the input in high precision, or raise if norm or weight do not fit its features.

        ``ranks`` is the number of ranks that share the features of the norm.
        """
        features, normed = weight.shape[1], weight.shape[1] * ranks
        dtype = inp.dtype if isinstance(inp, Tensor) else None
        if dtype not in arguments.PARAMETER_DTYPES or inp.shape[-1:] != weight.shape[1:]:
            arguments.check_input("inp", inp, (features,), argument)
        if self.layer_norm_weight.shape != (normed,):
            advice = f"Give it and the weight the same features ({argument})."
            arguments.check_shape("layer_norm_weight", self.layer_norm_weight, (normed,), advice)
        return inp.dequantize() if isinstance(inp, Float8Tensor) else inp

    def _normed(self, x: Tensor) -> Tensor:
        """Compute the norm in high precision."""
        norm = self.layer_norm_weight, self.layer_norm_bias
        return normalize(x, *norm, self._norm, output_dtype(x))

    def _outputs(
        self, y: Tensor, bias: Tensor | None, normed: Tensor | None, tokens: ShardMap | None
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Return the output, or a tuple of all outputs that were asked for.
        ``normed`` is the norm's output for ``tokens``, which are gathered if they are shared."""
        outputs: list[Tensor | None] = [y, self._returned(bias)] if self.return_bias else [y]
        if self.return_layernorm_output:
            if self.return_layernorm_output_gathered and tokens is not None:
                parallel = getattr(self, self.gemms[0].state).parallel
                normed = parallel.gather_tokens(normed, tokens)
            outputs.append(normed)
        return tuple(outputs) if len(outputs) > 1 else y


def linear_in_high_precision(
    precision: Precision, x: Tensor, weight: Tensor, bias: Tensor | None, tokens: ShardMap | None
) -> Tensor:
    """Compute ``x @ weight.T + bias`` without FP8 on any ranks; record amaxes for calibration."""
    if (sharing := precision.parallel) is None:
        precision.calibrate(x, weight)
        return nn.functional.linear(x, weight, bias)
    x = sharing.gather_tokens(x, tokens)
    precision.calibrate(x, weight)
    return sharing.linear(x, weight, bias, tokens)


def describe_fp8(module: nn.Module) -> str:
    """Return the end of a module's ``extra_repr``; empty if the module only follows autocast.

    >>> from float8lab.recipes import Float8BlockScaling
    >>> layer = float8lab.convert_to_float8(torch.nn.Linear(8, 8), Float8BlockScaling())
    >>> describe_fp8(layer)
    ', recipe=Float8BlockScaling()'
    """
    facts = []
    # All GEMMs of a module have one recipe. A pinned None, from overrides, is high precision.
    precision = next((precision for _, precision in precisions(module)), None)
    if precision is not None and (precision.recipe is not None or precision.pinned):
        facts.append(f"recipe={precision.recipe!r}")
    parameters = module._parameters.items()
    weights = {name: local_of(p) for name, p in parameters if p is not None and p.ndim > 1}
    stored = {name: w.spec.storage for name, w in weights.items() if isinstance(w, Float8Tensor)}
    if len(stored) == len(weights) and len(set(stored.values())) == 1:
        stored = {"weight": next(iter(stored.values()))}
    facts += [f"{name}={storage}" for name, storage in stored.items()]
    return "".join(f", {fact}" for fact in facts)
