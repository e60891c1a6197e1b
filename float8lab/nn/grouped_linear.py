"""GroupedLinear: the linear layers of all experts of a mixture as one module."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from float8lab.arguments import (
    PARAMETER_DTYPES,
    check_device,
    check_dtype,
    check_flags,
    check_input,
    check_size,
    check_tensor,
    has_values,
    shown,
)
from float8lab.distributed.expert_parallel import (
    check_held_experts,
    held_experts,
    local_experts,
)
from float8lab.distributed.fsdp.shards import Shardable
from float8lab.distributed.fsdp.weight import WeightCast
from float8lab.formats import HIGH_PRECISION_DTYPES
from float8lab.nn.casts import plain, spec_of_experts
from float8lab.nn.describe import describe_fp8
from float8lab.nn.grouped_function import (
    GroupedFunction,
    as_one,
    in_first_rank,
    into_buffer,
    is_of,
)
from float8lab.nn.linear import (
    default_device,
    drawn_from,
    keep_initial_value,
    materialize,
    moved_in_place,
    normal_init,
    store_in_fp8,
)
from float8lab.nn.main_grad import fused_weight, plain_weight
from float8lab.nn.parallel import (
    TensorParallelGroup,
    ignore_extra_state,
    mark_shard,
    overlap_of,
    parallel_size,
    share_of,
)
from float8lab.nn.precision import Precision, place_precisions
from float8lab.ops import Groups, Offsets, as_matrix
from float8lab.recipes.region import capturing
from float8lab.tensor import Float8Tensor
from float8lab.tensor.differentiation import is_exporting, version_of
from float8lab.tensor.dtensor import is_dtensor
from float8lab.tensor.permute import are_sizes

__all__ = ["GroupedLinear", "offsets_of"]


class GroupedLinear(Shardable, TensorParallelGroup):
    """``y = x @ weight[e].T + bias[e]`` for the rows of each expert e, in FP8 inside ``autocast``.

    The rows of an expert follow those of the expert before. How many each has is read on the
    device, so nothing waits for it, and a CUDA graph may hold the call.

    Shape: input ``[..., in_features]`` of any leading dimensions, whose rows are those of all
    experts; output ``[..., out_features]``. An expert may have any number of rows, 0 included.
    Rows beyond those of the last expert give zeros, whatever they hold, and have no gradient.

    Numerics: each expert's rows are cast as if they were alone, and so is each weight; under a
    recipe of one scale per tensor each expert's rows of the input, its weight and its rows of the
    gradient have a scale each. Otherwise as ``Linear``.

    Tensor parallelism shards each expert's features over the ranks (``parallel_mode``), and sends
    nothing but, in FP8, the largest values: column parallel, the input is the same on all ranks and
    its gradient a part of a sum; row parallel, the output is a part of a sum. Tokens are sent, and
    sums made, where tokens are sent to experts and back.

    Parameters: ``weight0``, ``[out_features, in_features]``, ``bias0``, ``[out_features]``,
    ``weight1`` and so on, in this order, to ``bias<num_gemms - 1>``; or, for less work for the
    host, ``weight``, ``[num_gemms, out_features, in_features]``, and ``bias``. A state dict of
    either kind loads into the other.

    Args:
        num_gemms: number of experts.
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: learn additive biases, initialised to 0.
        init_method: ``init_method(weight)`` initialises each expert's weight in place; None is
            normal, mean 0, standard deviation 0.023.
        device: None is the default device if one was set, else the current CUDA device if there is
            one, else the CPU. ``"meta"`` works.
        params_dtype: dtype of the parameters; None is the default dtype.
        return_bias: do not add the biases; return ``(output, biases)``.
        fuse_wgrad_accumulation: add the weight gradients to the weights' ``main_grad``, which the
            caller allocates, instead of producing their ``grad``.
        single_grouped_weight: one parameter for all weights.
        single_grouped_bias: one parameter for all biases.
        sequence_parallel: no effect: the layer sends no tokens.
        tp_group: the tensor-parallel ranks; None: ``set_tensor_parallel_group`` comes later.
        tp_size: how many they are, if ``tp_group`` is None.
        parallel_mode: "column": a rank has ``out_features / tp_size`` rows of each weight and that
            part of the output; "row": ``in_features / tp_size`` columns, and takes that part of the
            input; the biases are in the first rank's part of the sum. None: each rank has all.
        get_rng_state_tracker: returns a ``CudaRNGStatesTracker``, from one of whose streams
            ``init_method`` draws; None is the default stream.
        rng_tracker_name: the stream; None is ``"model-parallel-rng"``.
        ub: Transformer Engine's ``ub_overlap_ag``, ``ub_overlap_rs`` and ``ub_name``; no effect.

    Raises:
        ValueError: features that the ranks cannot share equally.

    >>> experts = float8lab.GroupedLinear(2, 64, 32, device="cpu")
    >>> with float8lab.autocast(recipe=float8lab.recipes.Float8CurrentScaling()):
    ...     experts(torch.ones(5, 64), [3, 2]).shape
    torch.Size([5, 32])
    """

    weight: Tensor
    bias: Tensor
    _casts_only = True

    def __init__(  # the signature is the interface that users' code is written for
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_method: Callable[[Tensor], Any] | None = None,
        device: torch.device | str | None = None,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
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
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            sequence_parallel=sequence_parallel,
        )
        init_method = drawn_from(init_method, get_rng_state_tracker, rng_tracker_name)
        check_dtype("params_dtype", params_dtype)
        super().__init__()
        self.register_load_state_dict_pre_hook(ignore_extra_state)
        self.num_gemms = E = check_size("num_gemms", num_gemms, minimum=1)
        in_features = check_size("in_features", in_features)
        out_features = check_size("out_features", out_features)
        self.use_bias = bool(bias)
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.single_grouped_weight = bool(single_grouped_weight)
        self.single_grouped_bias = bool(single_grouped_bias)
        self.parallel_mode = parallel_mode and parallel_mode.lower()
        self.tp_size = ranks
        self._init_method = init_method
        self._names = {
            kind: (kind,) if single else tuple(f"{kind}{index}" for index in range(E))
            for kind, single in (
                ("weight", self.single_grouped_weight),
                ("bias", self.single_grouped_bias),
            )
        }
        self._wholes: dict[str, tuple[Tensor, int]] = {}  # see _whole
        self._fp8 = Precision()
        self._fp8.experts = E
        where = check_device("device", device) or default_device()
        dtype = params_dtype or torch.get_default_dtype()
        if self.parallel_mode == "column":
            out_features = share_of("out_features", out_features, ranks)
        elif self.parallel_mode == "row":
            in_features = share_of("in_features", in_features, ranks)
        self.in_features, self.out_features = in_features, out_features
        sizes: dict[str, tuple[int, ...]] = {"weight": (out_features, in_features)}
        if bias:
            sizes["bias"] = (out_features,)
        parts: list[dict[str, Tensor]] = []
        for kind, size in sizes.items():
            whole = torch.zeros(E, *size, device=where, dtype=dtype)
            each = [whole] if self._names[kind] == (kind,) else whole.unbind()
            parts.append(dict(zip(self._names[kind], each, strict=True)))
        # An expert's bias after its weight, as Transformer Engine has them: states of optimizers
        # are known by position.
        for of_expert in itertools.zip_longest(*(of_kind.items() for of_kind in parts)):
            for name, part in filter(None, of_expert):
                self.register_parameter(name, nn.Parameter(part))
        self.overlap = overlap_of("GroupedLinear", ub)
        self.set_tensor_parallel_group(tp_group)
        if where.type != "meta":
            self.reset_parameters()
        stored = self._sharing_of("_fp8", int(self.parallel_mode == "row"))
        self._keeps_initial_values = store_in_fp8(self, self._names["weight"], stored)
        self._lie_together()
        if ranks > 1:
            for parameter in self._parameters_of("weight"):
                mark_shard(parameter, -2 if self.parallel_mode == "column" else -1)
        place_precisions(self)

    def _parallel_modes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        mode = self.parallel_mode
        if mode is None:
            return {}
        return {"_fp8": (mode, (self.out_features if mode == "column" else self.in_features,))}

    def _weight_cast(self, name: str) -> WeightCast | None:
        cast = self._fp8.weight_gather() if name == "weight" else None
        return cast and cast._replace(spec=spec_of_experts(cast.spec))

    def _parameters_of(self, kind: str) -> list[Tensor]:
        found: dict[str, Any] = self._parameters
        names = self._names[kind]
        try:
            return [found[name] for name in names]
        except KeyError:  # torch.nn.utils.parametrize has taken one, and computes it
            return [getattr(self, name) for name in names]

    def reset_parameters(self) -> None:
        """Initialise each weight by ``init_method``, and the biases to 0.

        Parameters on the meta device get memory on the default one, as in a new module.
        """
        materialize(self)
        init = self._init_method or normal_init
        keep = getattr(self, "_keeps_initial_values", False)
        with torch.no_grad():
            shard = self._shard(-2 if self.parallel_mode == "column" else -1)
            for weight in self._parameters_of("weight"):
                shape = weight.shape if shard is None else shard.unsharded_shape(weight.shape)
                value = torch.empty(shape, device=weight.device, dtype=weight.dtype)
                for one in value if self.single_grouped_weight else (value,):
                    init(one)
                value = value if shard is None else shard.shard(value)
                weight.copy_(value)
                if keep:
                    keep_initial_value(weight, value)
            for one in self._parameters_of("bias") if self.use_bias else ():
                nn.init.zeros_(one)

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor] | Tensor | None]:
        """Apply each expert to its rows.

        Args:
            inp: ``[..., in_features]``.
            m_splits: the number of rows of each expert; a list, or a tensor of integers on the
                input's device, whose values the host does not read, and checks only on a CPU. A
                CUDA graph that is captured with numbers of the host keeps these.
            is_first_microbatch: True casts the weights and keeps the casts, False uses the kept
                ones: say so only if the weights did not change in between. True also makes
                ``fuse_wgrad_accumulation`` overwrite ``main_grad`` instead of adding to it. None
                casts the weights every time.
            out: what the output is written to, and returned as.
            dgrad_out: what the gradient of the input is written to, and given as.

        Returns:
            ``[..., out_features]``; with ``return_bias``, a tuple of the output without biases, and
            a list of the biases, or the one parameter of all.

        Raises:
            TypeError: ``m_splits`` are no integers.
            ValueError: ``m_splits`` are not ``num_gemms`` numbers, one is negative, or their sum is
                too large.
        """
        check_input("inp", inp, (self.in_features,), "in_features")
        x = as_matrix(inp.dequantize() if isinstance(inp, Float8Tensor) else inp)
        weights = self._parameters_of("weight")
        biases = self._parameters_of("bias") if self.use_bias else None
        experts, held = self.num_gemms, held_experts(weights[0])
        if is_dtensor(weights[0]):
            weights, biases = self._local_experts(weights, biases)
            experts = weights[0].shape[0]
        offs = offsets_of(m_splits, x, experts, "num_gemms")
        if out is not None:
            self._check_buffer("out", out, (*inp.shape[:-1], self.out_features))
        if dgrad_out is not None:
            self._check_buffer("dgrad_out", dgrad_out, (*inp.shape[:-1], self.in_features))
            x = into_buffer(x, dgrad_out.view_as(x))
        fused, from_one = self._fused(weights)
        call = self._fp8.begin(
            x, training=self.training, first_microbatch=is_first_microbatch,
            fused_weight=fused if from_one else None, experts=held,
        )  # fmt: skip
        if call is not None and weights[0].dtype not in HIGH_PRECISION_DTYPES:
            call = None
        if call is not None and call.plan.delayed:
            check_held_experts(experts, self.num_gemms, held)
        as_it_is = type(weights[0]) in (nn.Parameter, Float8Tensor)
        if call is None and (self.fuse_wgrad_accumulation or not as_it_is):
            weights = [plain_weight(self, w, is_first_microbatch) for w in weights]
        elif fused and not from_one:
            weights = [plain_weight(self, w, is_first_microbatch, as_main=True) for w in weights]
        weight, parts = self._whole("weight", weights, kept=is_first_microbatch is not None)
        count = len(parts)
        if call is None:
            weight = plain(weight)
            self._fp8.calibrate(
                Groups.of(x.detach(), Offsets(offs, None)),
                weight.detach(),
                held,
            )
        bias = None
        if biases is not None and not self.return_bias:
            bias, more = self._whole("bias", biases)
            parts = [*parts, *more]
            if self.tp_size > 1 and self.parallel_mode == "row":
                bias = in_first_rank(bias, self._fp8.parallel.rank)  # type: ignore[union-attr]
        y: Tensor = GroupedFunction.run(x, weight, bias, offs, call, False, count, *parts)
        if call is not None and call.is_region:
            self._fp8.end(call)
        if inp.ndim != 2:
            y = torch.ops.aten._unsafe_view.default(y, (*inp.shape[:-1], self.out_features))
        if out is not None:
            y = out.copy_(y)
        if not self.return_bias:
            return y
        return y, biases[0] if biases and self.single_grouped_bias else biases

    def _local_experts(
        self, weights: list[Tensor], biases: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """The one parameter of each kind, of the experts that this rank has."""
        single = self.single_grouped_weight and (biases is None or self.single_grouped_bias)
        if not single:
            raise NotImplementedError(
                "single_grouped_weight and single_grouped_bias must be True where parameters are "
                "DTensors; got False. Shard(0) of one parameter gives each rank whole experts."
            )
        return [local_experts(weights[0])], biases and [local_experts(biases[0])]

    def _whole(
        self, kind: str, parts: Sequence[Tensor], *, kept: bool = False
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The parameters of all experts as one tensor, and whether gradients are theirs.

        They are the matrices of one tensor, which costs a look at where each lies. It is the same
        one in the next call, or a copy that autograd knows if they lie elsewhere. A cast that is
        ``kept`` is known by it: then there is a new one when a parameter was written, too.
        """
        if self._names[kind] == (kind,):
            return parts[0], ()
        if torch.compiler.is_compiling():
            # Dynamo cannot read the spec of a Float8Tensor that a graph makes.
            return torch.stack([plain(part) for part in parts]), ()
        if is_exporting() or torch._C._are_functorch_transforms_active():
            return torch.stack(list(parts)), ()
        version = sum(map(version_of, parts)) if kept else -1
        whole, known = self._wholes.get(kind, (None, -1))
        if whole is None or (kept and version != known) or not is_of(parts, whole):
            whole = as_one(parts)
            if whole is None:
                return torch.stack(list(parts)), ()
            self._wholes[kind] = whole, version
        return whole, parts

    def _fused(self, weights: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], bool]:
        """The weights whose gradients are to go into their ``main_grad``, and whether from one.

        That is the gradient of all. Where autograd has it of a copy of the weights, it does not
        tell which of them have it.
        """
        if not self.fuse_wgrad_accumulation:
            return (), False
        fused = tuple(w for w in weights if w.requires_grad and fused_weight(self, w) is not None)
        from_one = len(fused) == len(weights) and (
            self.single_grouped_weight
            or torch.compiler.is_compiling()
            or bool(self._whole("weight", weights)[1])
        )
        return fused, from_one

    def _check_buffer(self, name: str, buffer: Any, shape: tuple[int, ...]) -> None:
        check_tensor(name, buffer, optional=True)
        if buffer.shape != shape or buffer.dtype not in PARAMETER_DTYPES:
            raise ValueError(
                f"{name} must be a floating-point tensor of shape {shape}; got {shown(buffer)}. "
                "Allocate it so, or leave it out."
            )

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.use_bias}{describe_fp8(self)}"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with moved_in_place(self, fn):
            result = super()._apply(fn, recurse)
        self._lie_together()
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_wholes": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lie_together()

    def _lie_together(self) -> None:
        """Have each expert's parameters follow each other in memory, wherever they were moved."""
        self._wholes = {}
        for kind in ("weight", "bias") if self.use_bias else ("weight",):
            parts: Any = self._parameters_of(kind)
            first = parts[0]
            data = first.qdata if isinstance(first, Float8Tensor) else first
            like = {(type(p), p.shape, p.dtype, p.device, getattr(p, "spec", None)) for p in parts}
            is_plain = type(first) in (nn.Parameter, Float8Tensor) and len(like) == 1
            is_there = not first.is_meta and data.untyped_storage().size()
            if not is_plain or not is_there or as_one(parts) is not None:
                continue
            with torch.no_grad():
                whole = torch.stack([p.data for p in parts])
            for parameter, part in zip(parts, whole, strict=True):
                parameter.data = part

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for kind in ("weight", "bias"):
            self._rename(state_dict, prefix, kind)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _rename(self, state: dict[str, Any], prefix: str, kind: str) -> None:
        """Make the parameters of a state dict those that the module has: one, or one an expert."""
        whole = f"{prefix}{kind}"
        each = [f"{whole}{index}" for index in range(self.num_gemms)]
        if self._names[kind] == (kind,):
            shapes = {getattr(state.get(key), "shape", None) for key in each}
            if whole not in state and len(shapes) == 1 and None not in shapes:
                state[whole] = torch.stack([state.pop(key) for key in each])
        elif whole in state and not any(key in state for key in each):
            value = state[whole]
            if isinstance(value, Tensor) and value.ndim and value.shape[0] == self.num_gemms:
                del state[whole]
                state.update(zip(each, value.unbind(), strict=True))


def offsets_of(m_splits: Any, x: Tensor, experts: int, argument: str) -> Tensor:
    """Offsets of the rows of so many experts, on the device of ``x``, which has the rows.

    ``argument`` is what the caller has called the number of experts.
    """
    E, rows = experts, x.shape[0]
    if isinstance(m_splits, Tensor):
        if m_splits.is_floating_point() or m_splits.is_complex() or m_splits.dtype == torch.bool:
            raise TypeError(
                f"m_splits must be integers; got {shown(m_splits)}. Pass the number of rows of "
                "each expert."
            )
        if m_splits.shape != (E,):
            raise ValueError(
                f"m_splits must be {E} numbers ({argument}); got {shown(m_splits)}. Pass the "
                "number of rows of each expert."
            )
        if type(m_splits) is Tensor and has_values(m_splits):
            sizes = m_splits.tolist()
            _check_sizes(sizes, rows, E, argument)
            if _is_captured(x):
                return _filled([*itertools.accumulate(sizes)], x.device)
        # int32 stays so: torch's default would convert the numbers first.
        dtype = torch.int32 if m_splits.dtype == torch.int32 else torch.int64
        return m_splits.to(x.device).cumsum(0, dtype=dtype)
    try:
        sizes = [operator.index(size) for size in m_splits]
    except TypeError:
        raise TypeError(
            f"m_splits must be integers; got {shown(m_splits)}. Pass the number of rows of "
            "each expert, as a list or a tensor."
        ) from None
    _check_sizes(sizes, rows, E, argument)
    offsets = [*itertools.accumulate(sizes)]
    if _is_captured(x):
        return _filled(offsets, x.device)
    return torch.tensor(offsets, dtype=torch.int32, device=x.device)


def _is_captured(x: Tensor) -> bool:
    """Whether a CUDA graph is recording what is done with ``x``."""
    return x.is_cuda and not torch.compiler.is_compiling() and capturing()


def _filled(offsets: Sequence[int], device: torch.device) -> Tensor:
    """Numbers of the host on a device, by the arguments of kernels: a CUDA graph keeps these.

    A copy would read the host's memory again in each replay.
    """
    filled = torch.zeros(len(offsets), dtype=torch.int32, device=device)
    torch._foreach_add_(filled.unbind(), offsets)
    return filled


def _check_sizes(sizes: list[int], rows: int, experts: int, argument: str) -> None:
    if len(sizes) != experts or not are_sizes(sizes, rows):
        raise ValueError(
            f"m_splits must be {experts} numbers ({argument}), none negative, of at most {rows} "
            f"rows; got {shown(sizes)}. Pass the number of rows of each expert."
        )
