"""Linear: torch.nn.Linear whose three GEMMs run in FP8."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from float8lab.arguments import (
    PARAMETER_DTYPES,
    check_callables,
    check_device,
    check_dtype,
    check_flags,
    check_input,
    check_instance,
    check_size,
    shown,
)
from float8lab.distributed.comm import SharedScales
from float8lab.distributed.fsdp.shards import Shardable
from float8lab.distributed.fsdp.weight import WeightCast
from float8lab.distributed.shard_map import ShardMap
from float8lab.formats import HIGH_PRECISION_DTYPES
from float8lab.nn.casts import plain
from float8lab.nn.describe import describe_fp8
from float8lab.nn.gemm import LinearFunction
from float8lab.nn.main_grad import fused_weight, plain_weight
from float8lab.nn.parallel import (
    ParameterShard,
    TensorParallelGroup,
    ignore_extra_state,
    overlap_of,
    parallel_size,
    share_of,
)
from float8lab.nn.precision import Precision, place_precisions
from float8lab.recipes.recipe import Recipe
from float8lab.recipes.region import STATE
from float8lab.tensor import Float8Tensor, quantize
from float8lab.tensor.blocks import quantize_blocks
from float8lab.tensor.dtensor import is_dtensor

__all__ = [
    "Linear",
    "default_device",
    "drawn_from",
    "initialise",
    "keep_initial_value",
    "linear_in_high_precision",
    "materialize",
    "moved_in_place",
    "normal_init",
    "reset_children",
    "sizes_of_split",
    "store_in_fp8",
    "stored_for",
]


def default_device() -> torch.device:
    """Where modules put their parameters: the default device if the user set one, else CUDA."""
    chosen = torch.get_default_device()
    if chosen.type == "cpu" and torch.cuda.is_available() and not _default_device_was_set():
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def _default_device_was_set() -> bool:
    mode = torch.utils._device.CURRENT_DEVICE
    return mode is not None or any(
        isinstance(m, torch.utils._device.DeviceContext)
        for m in torch.overrides._get_current_function_mode_stack()
    )


def stored_for(weight: Tensor, recipe: Recipe, sharing: SharedScales | None = None) -> Float8Tensor:
    """Quantize a weight, or each of a batch, as the forward of a recipe takes it; no gradient.

    ``sharing`` says how ranks share it, if they do.
    """
    spec, epsilon = recipe.linear.w, recipe.linear.amax_epsilon
    block = (1,) * (weight.ndim - 2) + spec.block
    if sharing is not None:
        spec = replace(spec, block=block)
        known = sharing.amaxes(weight.detach(), spec)
        q = quantize_blocks(weight.detach(), spec, amax_epsilon=epsilon, known_amax=known)
        return Float8Tensor._make(*q, spec, weight.dtype)
    return quantize(
        weight.detach(), spec.fp8_dtype, block=block, scale_rule=spec.scale_rule,
        amax_epsilon=epsilon,
    )  # fmt: skip


def store_in_fp8(
    module: nn.Module, names: Sequence[str], sharing: SharedScales | None = None
) -> bool:
    """Replace parameters by FP8-stored ones if a ``fp8_model_init`` block is active.

    ``sharing`` says how ranks share them, if they do. Returns whether they are to keep their
    initial values in high precision.
    """
    init = STATE.init
    if init is None:
        return False
    for name in names:
        value = getattr(module, name).detach()
        if sharing is not None:
            sharing.check(name, value.shape, init.recipe.linear.w)
        parameter = nn.Parameter(stored_for(value, init.recipe, sharing))
        parameter._shared_scales = sharing  # type: ignore[attr-defined]  # of a Float8Tensor
        if init.preserve_high_precision_init_val:
            keep_initial_value(parameter, value)
        setattr(module, name, parameter)
    return init.preserve_high_precision_init_val


def initialise(
    module: nn.Module,
    prefixes: Sequence[str],
    init_method: Callable[[Tensor], Any] | None,
    *,
    keep: bool,
    shard: ParameterShard | None = None,
) -> None:
    """Initialise the weight that ``<prefix>weight`` form, by one call, and the biases to 0.

    With ``keep``, parameters that are stored in FP8 keep these initial values in high precision.
    Shards are those of the unsharded weight that one rank alone would initialise.
    """
    init = init_method or normal_init
    weights = [getattr(module, f"{prefix}weight") for prefix in prefixes]
    with torch.no_grad():
        if len(weights) == 1 and not keep and shard is None:
            init(weights[0])
        else:
            first, own = weights[0], ParameterShard() if shard is None else shard
            shapes = [own.unsharded_shape(weight.shape) for weight in weights]
            sizes = [shape[0] for shape in shapes]
            shape = (sum(sizes), shapes[0][1])
            whole = torch.empty(shape, device=first.device, dtype=first.dtype)
            init(whole)
            parts = [own.shard(part) for part in whole.split(sizes)]
            for weight, part in zip(weights, parts, strict=True):
                weight.copy_(part)
                if keep:
                    keep_initial_value(weight, part.clone())
        for prefix in prefixes:
            if getattr(module, f"{prefix}bias") is not None:
                nn.init.zeros_(getattr(module, f"{prefix}bias"))


def keep_initial_value(parameter: Any, value: Tensor) -> None:
    """Keep ``value`` for ``get_high_precision_init_val``; nothing yet on the meta device."""
    if isinstance(parameter, Float8Tensor):
        parameter._high_precision_init_val = None if value.is_meta else value.detach().cpu()


@contextmanager
def moved_in_place(module: nn.Module, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Surrounds torch's ``module._apply(function)``, so that FP8 parameters stay the same objects.

    They keep their attributes and hooks, and references to them, as ordinary parameters do; torch
    would swap a new tensor in. Parameters that go to the meta device, or come from there, are left
    to torch.
    """
    parameters: dict[str, Any] = module._parameters
    stored = {n: p for n, p in parameters.items() if isinstance(p, Float8Tensor)}
    moved: dict[str, Any] = {}
    try:
        with torch.no_grad():
            for name, parameter in stored.items():
                value = function(parameter)
                if not torch._has_compatible_shallow_copy_type(parameter, value):
                    continue
                parameters[name] = None  # torch skips it
                moved[name] = parameter
                if value is not parameter:
                    parameter.data = value
                if parameter.grad is not None:
                    parameter.grad.data = function(parameter.grad)
        yield
    finally:
        parameters.update(moved)
    place_precisions(module)


def materialize(module: nn.Module) -> None:
    """Give those parameters of a module that are on the meta device memory on the default one."""
    if any(p is not None and p.is_meta for p in module._parameters.values()):
        device = default_device()
        module._apply(
            lambda t: torch.empty_like(t, device=device) if t.is_meta else t, recurse=False
        )


def reset_children(module: nn.Module) -> None:
    """Call ``reset_parameters`` of the modules that one consists of."""
    for child in module.children():
        reset: Any = getattr(child, "reset_parameters", None)
        if reset is not None:
            reset()


def normal_init(weight: Tensor) -> None:
    """Initialise a weight by the default: normal, mean 0, standard deviation 0.023."""
    nn.init.normal_(weight, mean=0.0, std=0.023)


def drawn_from(
    init_method: Callable[[Tensor], Any] | None,
    get_rng_state_tracker: Callable[[], Any] | None,
    rng_tracker_name: str | None,
) -> Callable[[Tensor], Any] | None:
    """The init method, or one that draws from a stream of the tracker if there is one."""
    check_callables(("weight",), init_method=init_method)
    check_callables((), get_rng_state_tracker=get_rng_state_tracker)
    check_instance("rng_tracker_name", rng_tracker_name, str, "a name", optional=True)
    if get_rng_state_tracker is None:
        return init_method
    names = () if rng_tracker_name is None else (rng_tracker_name,)
    return partial(_draw_from, init_method or normal_init, get_rng_state_tracker, names)


def _draw_from(init: Any, get_rng_state_tracker: Any, names: tuple[str, ...], x: Tensor) -> None:
    with get_rng_state_tracker().fork(*names):
        init(x)


def _load_dtensor() -> Any:
    """``nn/dtensor.py``, which imports DTensor: that takes as long as all of float8lab."""
    return importlib.import_module("float8lab.nn.dtensor")


class Linear(Shardable, nn.Linear, TensorParallelGroup):
    """``y = x @ weight.T + bias`` with its GEMMs in FP8 inside ``autocast``.

    Shape: input ``[..., in_features]`` of any leading dimensions and any size, zero and multiples
    of nothing included; output ``[..., out_features]``.

    Numerics: outside ``autocast`` this is ``torch.nn.Linear``. Inside, the recipe says how x,
    weight and dy are cast; products accumulate in float32; the bias is added before the output is
    rounded. x is saved for backward in FP8.

    Args:
        in_features: size of the last dimension of the input, on all ranks together.
        out_features: size of the last dimension of the output, on all ranks together.
        bias: learn an additive bias, initialised to 0.
        init_method: ``init_method(weight)`` initialises in place; None is normal, mean 0, standard
            deviation 0.023.
        parameters_split: names, or a mapping from names to sizes along dimension 0, of several
            parameters that together form the weight (``<name>_weight``) and the bias
            (``<name>_bias``).
        device: None is the default device if one was set, else the current CUDA device if there is
            one, else the CPU. ``"meta"`` works.
        params_dtype: dtype of the parameters; None is the default dtype.
        return_bias: do not add the bias; return ``(output, bias)``.
        fuse_wgrad_accumulation: add the weight gradient to ``weight.main_grad``, which the caller
            allocates, instead of producing ``weight.grad``.
        sequence_parallel: each rank has its share of the tokens, along the first dimension, where
            they enter a column-parallel layer or leave a row-parallel one.
        tp_group: process group of the R ranks that share the layer (``docs/many_gpus.md``).
        tp_size: R, where ``tp_group`` is given later.
        parallel_mode: "column": each rank has ``[out_features / R, in_features]`` of the weight
            and gives as many features; "row": ``[out_features, in_features / R]``, takes as many
            features, and all have the sum of their products; None: no rank shares anything.
        get_rng_state_tracker: returns a ``CudaRNGStatesTracker``, from one of whose streams
            ``init_method`` draws; None is the default stream.
        rng_tracker_name: the stream; None is ``"model-parallel-rng"``.
        ub: Transformer Engine's arguments ``ub_overlap_ag`` and the like. Products run beside what
            is sent where that was measured to pay; ``ub_overlap_ag=False, ub_overlap_rs=False``
            turns that off. Numbers are the same.

    Raises:
        ValueError: ``parameters_split`` does not add up to ``out_features``; sizes that the ranks
            cannot share equally.

    >>> layer = float8lab.Linear(64, 32, device="cpu")
    >>> with float8lab.autocast(recipe=float8lab.recipes.Float8CurrentScaling()):
    ...     layer(torch.ones(3, 64)).shape
    torch.Size([3, 32])
    """

    # Defaults for layers that convert_to_float8 turned into a Linear without calling __init__.
    _fp8: Precision
    return_bias = False
    fuse_wgrad_accumulation = False
    _split: dict[str, int] | None = None
    parallel_mode: str | None = None
    output_layout: Any = None  # the placement of a DTensor that Float8RowwiseParallel asks for
    _keeps_initial_values = False
    _init_method: Callable[[Tensor], Any] | None = None

    def __init__(  # the signature is the interface that users' code is written for
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init_method: Callable[[Tensor], Any] | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        **ub: Any,
    ) -> None:
        ranks = parallel_size(tp_size, tp_group, parallel_mode)
        check_flags(
            bias=bias,
            return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            sequence_parallel=sequence_parallel,
        )
        init_method = drawn_from(init_method, get_rng_state_tracker, rng_tracker_name)
        check_dtype("params_dtype", params_dtype)
        nn.Module.__init__(self)
        self.register_load_state_dict_pre_hook(ignore_extra_state)
        self.in_features = in_features = check_size("in_features", in_features)
        self.out_features = out_features = check_size("out_features", out_features)
        self.use_bias = bool(bias)
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.sequence_parallel = sequence_parallel
        self.parallel_mode = parallel_mode and parallel_mode.lower()
        self.tp_size = ranks
        self._init_method = init_method
        self._split = sizes_of_split(parameters_split, out_features)
        self._fp8 = Precision()
        where = check_device("device", device) or default_device()
        dtype = params_dtype or torch.get_default_dtype()
        sizes = {"": out_features} if self._split is None else self._split
        self._names = [f"{name}_" if name else "" for name in sizes]
        column, row = self.parallel_mode == "column", self.parallel_mode == "row"
        features = share_of("in_features", in_features, ranks) if row else in_features
        for prefix, size in zip(self._names, sizes.values(), strict=True):
            name = f"parameters_split[{prefix[:-1]!r}]" if prefix else "out_features"
            mine = share_of(name, size, ranks) if column else size
            weight = nn.Parameter(torch.empty(mine, features, device=where, dtype=dtype))
            self.register_parameter(f"{prefix}weight", weight)
            value = torch.zeros(mine, device=where, dtype=dtype) if bias else None
            parameter = None if value is None else nn.Parameter(value)
            self.register_parameter(f"{prefix}bias", parameter)
        if ranks > 1:
            self.in_features = features
            self.out_features = sum(len(getattr(self, f"{name}weight")) for name in self._names)
        self.overlap = overlap_of("Linear", ub)
        self.set_tensor_parallel_group(tp_group)
        if where.type != "meta":
            self.reset_parameters()
        names = [f"{prefix}weight" for prefix in self._names]
        stored = self._sharing_of("_fp8", int(self.parallel_mode == "row"))
        self._keeps_initial_values = store_in_fp8(self, names, stored)
        self._mark_shards(self._names, int(self.parallel_mode == "row"))
        place_precisions(self)

    def _parallel_modes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        if self.parallel_mode is None:
            return {}
        if self.parallel_mode == "row":
            return {"_fp8": ("row", (self.in_features,))}
        sizes = tuple(len(getattr(self, f"{prefix}weight")) for prefix in self._names)
        return {"_fp8": ("column", sizes if len(sizes) > 1 else self._joined or sizes)}

    def reset_parameters(self) -> None:
        """Initialise the weight by ``init_method``, and the bias to 0.

        Parameters on the meta device get memory on the default one, as in a new module.
        """
        materialize(self)
        if "_names" not in vars(self):  # set by __init__, which a converted layer was not through
            super().reset_parameters()
            return
        shard = self._shard(int(self.parallel_mode == "row"))
        initialise(
            self, self._names, self._init_method, keep=self._keeps_initial_values, shard=shard
        )

    def _weight_cast(self, name: str) -> WeightCast | None:
        if name != "weight" or self._split is not None:
            return None
        return self._fp8.weight_gather(shares_scales=self._placement is not None)

    def forward(  # type: ignore[override]  # nn.Linear's, with one more argument
        self, inp: Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Apply the layer.

        Args:
            inp: ``[..., in_features]``.
            is_first_microbatch: True casts the weight and keeps the cast, False uses the kept one:
                say so only if the weight did not change in between. True also makes
                ``fuse_wgrad_accumulation`` overwrite ``main_grad`` instead of adding to it. None
                casts the weight every time.

        Returns:
            ``[..., out_features]``; with ``return_bias``, a tuple of the output without bias, and
            the bias.
        """
        whole, placement = self._split is None, self._placement
        weight, bias = (self.weight, self.bias) if whole else self._whole_parameters()
        if not isinstance(inp, Tensor) or inp.shape[-1:] != weight.shape[1:]:
            check_input("inp", inp, (weight.shape[1],), "in_features")
        added = None if self.return_bias else bias
        # In inference Transformers gives the layer its local shards: plain tensors.
        if placement is not None and is_dtensor(weight):
            y = placement.run(self, inp, weight, added, is_first_microbatch)
            return (y, bias) if self.return_bias else y
        x = inp.dequantize() if isinstance(inp, Float8Tensor) else inp
        parallel = self._fp8.parallel
        tokens = None if parallel is None else parallel.tokens_of(x)
        call = self._fp8.begin(
            x, training=self.training, first_microbatch=is_first_microbatch,
            fused_weight=fused_weight(self, weight) if self.fuse_wgrad_accumulation else None,
            tokens=tokens,
        )  # fmt: skip
        if call is None or weight.dtype not in HIGH_PRECISION_DTYPES:
            if x.dtype not in PARAMETER_DTYPES:
                check_input("inp", x, (self.in_features,), "in_features")
            high = plain_weight(self, weight, is_first_microbatch)
            y = linear_in_high_precision(self._fp8, x, high, added, tokens)
        else:
            y = LinearFunction.run(x, weight, added, call)
            if call.is_region:
                self._fp8.end(call)
        if parallel is not None and parallel.scatters:
            parallel.set_layout(y, tokens)
        return (y, bias) if self.return_bias else y

    def _whole_parameters(self) -> tuple[Tensor, Tensor | None]:
        if self._split is None:
            return self.weight, self.bias
        weights = [getattr(self, f"{prefix}weight") for prefix in self._names]
        biases = [getattr(self, f"{prefix}bias") for prefix in self._names]
        whole = torch.cat([plain(weight) for weight in weights])
        return whole, None if biases[0] is None else torch.cat(biases)

    def register_parameter(self, name: str, param: Any) -> None:
        old = self._parameters.get(name)
        super().register_parameter(name, param)
        if name == "weight":
            self._follow_placements(param, old)

    def _follow_placements(self, weight: Any, old: Any = None, *, sharded: bool = False) -> None:
        """Have ranks share the layer as the placements of a weight that is a DTensor say.

        Args:
            weight: the layer's.
            old: the one in whose place it comes.
            sharded: FSDP2 shards it over all dimensions of its mesh but the last.
        """
        placements = getattr(weight, "placements", None)
        if placements is None and self._placement is None:
            return
        self._placement = None
        if placements is not None:
            mesh = weight.device_mesh
            if sharded:
                mesh, placements = mesh[mesh.mesh_dim_names[-1]], placements[-1:]
            self._placement = _load_dtensor().WeightPlacement(mesh, placements, weight.shape)
            self._placement.share_scales(weight, old)
        self._fp8.set_parallel(self._placement and self._placement.parallel)

    def extra_repr(self) -> str:
        first = getattr(self, f"{self._names[0]}bias") if self._split else self.bias
        parts = f", parameters_split={self._split}" if self._split else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={first is not None}{parts}{describe_fp8(self)}"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with moved_in_place(self, fn):
            return super()._apply(fn, recurse)


def linear_in_high_precision(
    precision: Precision, x: Tensor, weight: Tensor, bias: Tensor | None, tokens: ShardMap | None
) -> Tensor:
    """``x @ weight.T + bias`` without FP8, on one rank or several, and its amaxes if asked for."""
    parallel = precision.parallel
    if parallel is None:
        precision.calibrate(x, weight)
        return nn.functional.linear(x, weight, bias)
    x = parallel.enter(x, tokens)
    precision.calibrate(x, weight)
    return parallel.linear(x, weight, bias, tokens)


def sizes_of_split(
    split: Sequence[str] | Mapping[str, int] | None, out_features: int
) -> dict[str, int] | None:
    """``parameters_split`` as a mapping from names to sizes."""
    if split is None:
        return None
    known = isinstance(split, (Mapping, Sequence)) and not isinstance(split, (str, bytes))
    if not known or not all(isinstance(name, str) for name in split):
        raise TypeError(
            "parameters_split must be None, a sequence of names or a mapping from names to sizes; "
            f"got {shown(split)}. Pass one, such as ('query', 'key', 'value')."
        )
    # A name that already ends in _weight or _bias stands for the pair.
    names = [name.rstrip("_").removesuffix("_weight").removesuffix("_bias") for name in split]
    if not all(names) or "." in "".join(names) or len(set(names)) != len(names) or not names:
        raise ValueError(
            "parameters_split must have at least one name, each another one and without a dot; got "
            f"{shown(split)}. Each name_weight and name_bias becomes a parameter."
        )
    if isinstance(split, Mapping):
        sizes = [check_size(f"parameters_split[{n!r}]", size) for n, size in split.items()]
    elif out_features % len(split):
        raise ValueError(
            f"parameters_split must name a number of parameters that divides out_features "
            f"{out_features}; got {len(split)} names. Pass a mapping from names to sizes instead."
        )
    else:
        sizes = [out_features // len(names)] * len(names)
    if sum(sizes) != out_features:
        raise ValueError(
            f"parameters_split must add up to out_features {out_features}; got {shown(split)}. "
            "Correct the sizes."
        )
    return dict(zip(names, sizes, strict=True))
