"""GroupedLinear: the linear layers of all experts of an MoE layer as one module."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from float8lab import arguments
from float8lab.distributed.expert_parallel import held_experts, local_experts
from float8lab.nn.casts import plain
from float8lab.nn.expert_parameters import ExpertMemory, expert_names, fit_state_dict, lay_together
from float8lab.nn.grouped_function import GroupedFunction, calibrate_experts
from float8lab.nn.layer import GemmModule
from float8lab.nn.main_grad import fused_weights, plain_weight
from float8lab.nn.parallel import OverlapArguments, parallel_size
from float8lab.nn.parameters import GetRngStateTracker, InitMethod, draw_from_tracker
from float8lab.nn.precision import NO_OPTIONS, Call, CallOptions, Precision
from float8lab.ops import as_matrix
from float8lab.ops.declare import is_traced
from float8lab.recipes.region import capturing
from float8lab.tensor import Float8Tensor
from float8lab.tensor.differentiation import GradientMap, is_exporting
from float8lab.tensor.dtensor import is_dtensor
from float8lab.tensor.permute import are_sizes

__all__ = ["GroupedLinear", "checked_sizes", "offsets_of"]

_PLAIN = nn.Parameter, Float8Tensor
"""The types of parameters that are unsharded on this rank."""


class GroupedLinear(GemmModule):
    """``y = x @ weight[e].T + bias[e]`` for the rows of each expert e, in FP8 inside ``autocast``.

    The experts' rows are in the order of the experts. The device reads how many rows each expert
    has, so the host does not wait for these numbers, and a CUDA graph may hold the call.

    Shape: input ``[..., in_features]`` with any leading dimensions, which holds the rows of all
    experts; output ``[..., out_features]``. An expert may have any number of rows, also 0. Rows
    after those of the last expert give zeros, whatever they hold, and have no gradient.

    Numerics: each weight and each expert's rows are cast separately; under a recipe with one scale
    per tensor, each expert's weight, rows of the input and rows of the gradient have their own
    scales. Everything else is as in ``Linear``.

    Tensor parallelism shards each expert's features over the ranks (``parallel_mode``). The layer
    sends only amaxes, in FP8. If it is column parallel, the input is the same on all ranks and its
    gradient is a partial sum; if it is row parallel, the output is a partial sum. The modules that
    send tokens to experts and back also send tokens between these ranks, and add the sums up.

    Parameters: ``weight0``, ``[out_features, in_features]``, ``bias0``, ``[out_features]``,
    ``weight1`` and so on, in this order, to ``bias<num_gemms - 1>``; or, with less work for the
    host, ``weight``, ``[num_gemms, out_features, in_features]``, and ``bias``. A state dict of
    either kind loads into the other.

    Args:
        num_gemms: number of experts.
        bias: whether the experts learn additive biases, initialised to 0.
        init_method: ``init_method(weight)`` initialises each expert's weight in place; None is
            normal, mean 0, standard deviation 0.023.
        return_bias: do not add the biases; return ``(output, biases)``.
        single_grouped_weight: hold all weights in one parameter.
        single_grouped_bias: hold all biases in one parameter.
        sequence_parallel: no effect: the layer sends no tokens.
        parallel_mode: "column": a rank has ``out_features / tp_size`` rows of each weight and these
            features of the output; "row": it has ``in_features / tp_size`` columns and takes these
            features of the input, and the first rank adds the biases; None: nothing is sharded.
        ub: Transformer Engine's ``ub_overlap_ag``, ``ub_overlap_rs`` and ``ub_name``; no effect.

    The other arguments are those of ``Linear``.

    Raises:
        ValueError: the ranks cannot share the features equally.

    >>> experts = float8lab.GroupedLinear(2, 64, 32, device="cpu")
    >>> with float8lab.autocast(recipe=float8lab.recipes.Float8CurrentScaling()):
    ...     experts(torch.ones(5, 64), [3, 2]).shape
    torch.Size([5, 32])
    """

    weight: Tensor
    bias: Tensor
    single_grouped_weight: bool
    single_grouped_bias: bool
    _fp8: Precision
    _casts_only = True
    _shown = ("num_gemms", "in_features", "out_features", "use_bias")

    def __init__(  # the signature is the interface that users' code is written for
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_method: InitMethod | None = None,
        device: torch.device | str | None = None,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        sequence_parallel: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        get_rng_state_tracker: GetRngStateTracker | None = None,
        rng_tracker_name: str | None = None,
        **ub: Unpack[OverlapArguments],
    ) -> None:
        super().__init__()
        self.tp_size = parallel_size(tp_size, tp_group, parallel_mode)
        arguments.check_flags(sequence_parallel=sequence_parallel)
        self._set_flags(
            bias=bias, return_bias=return_bias, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            single_grouped_weight=single_grouped_weight, single_grouped_bias=single_grouped_bias,
        )  # fmt: skip
        init = draw_from_tracker(init_method, get_rng_state_tracker, rng_tracker_name)
        self.num_gemms = E = arguments.check_size("num_gemms", num_gemms, minimum=1)
        gemm = self._set_features(in_features, out_features, parallel_mode, None, init)
        (matrix,) = gemm.shapes
        biases = ((E, *matrix[:1]),) if self.single_grouped_bias else (matrix[:1],) * E
        gemm = gemm._replace(
            weights=expert_names("weight", E, single=self.single_grouped_weight),
            biases=expert_names("bias", E, single=self.single_grouped_bias) if bias else (),
            shapes=((E, *matrix),) if self.single_grouped_weight else (matrix,) * E,
            bias_shapes=biases if bias else (), experts=E,
        )  # fmt: skip
        self._build(gemm, device=device, params_dtype=params_dtype, tp_group=tp_group, ub=ub)
        self._make_contiguous()

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
                input's device, whose values the host reads only on a CPU, to check them. A CUDA
                graph that is captured with numbers from the host keeps these numbers.
            is_first_microbatch: as in ``Linear.forward``, for all weights.
            out: a buffer that the output is written to, and that is returned.
            dgrad_out: a buffer that the gradient of the input is written to, and that becomes it.

        Returns:
            ``[..., out_features]``; with ``return_bias``, a tuple of the output without biases, and
            a list of the biases, or their single parameter.

        Raises:
            TypeError: ``m_splits`` holds something other than integers.
            ValueError: ``m_splits`` does not hold ``num_gemms`` numbers, a number is negative, or
                their sum is too large.
        """
        is_tensor = isinstance(inp, Tensor) and inp.dtype in arguments.PARAMETER_DTYPES
        if not is_tensor or inp.shape[-1:] != (self.in_features,):
            arguments.check_input("inp", inp, (self.in_features,), "in_features")
        x = as_matrix(inp.dequantize() if isinstance(inp, Float8Tensor) else inp)
        weights, biases = self._expert_parameters()
        experts, held = self.num_gemms, None
        if type(weights[0]) not in _PLAIN and is_dtensor(weights[0]):
            held = held_experts(weights[0])
            weights, biases = self._local_experts(weights, biases)
            experts = weights[0].shape[0]
        offs = offsets_of(m_splits, x, experts, "num_gemms")
        if out is not None or dgrad_out is not None:
            x = self._with_buffers(inp, x, out, dgrad_out)
        call, weights = self._begin_experts(x, weights, is_first_microbatch, held)
        parameters: Sequence[Tensor] = ()
        weight = weights[0]
        if not self.single_grouped_weight:
            keeps_cast = is_first_microbatch is not None
            weight, parameters = self._stacked("weight", weights, keeps_cast=keeps_cast)
        if call is None:
            weight = plain(weight)
            calibrate_experts(self._fp8, x, weight, offs, held)
        bias, bias_parameters = self._added_bias(biases)
        y: Tensor = GroupedFunction.run(
            x, weight, bias, offs, call, False, len(parameters), *parameters, *bias_parameters
        )
        if call is not None and call.is_region:
            self._fp8.end(call)
        if inp.ndim != 2:
            y = torch.ops.aten._unsafe_view.default(y, (*inp.shape[:-1], self.out_features))
        y = y if out is None else out.copy_(y)
        if not self.return_bias:
            return y
        biases = [cast("Tensor", self._returned(bias)) for bias in biases]
        return y, (biases[0] if self.single_grouped_bias else biases) if biases else None

    def _expert_parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weights, and the biases if there are any."""
        kinds, stored = (self.gemms[0].weights, self.gemms[0].biases), self._parameters
        try:
            weights, biases = ([cast("Tensor", stored[name]) for name in names] for names in kinds)
        except KeyError:  # torch.nn.utils.parametrize has replaced a parameter, and computes it
            weights, biases = ([getattr(self, name) for name in names] for names in kinds)
        return weights, biases

    def _local_experts(
        self, weights: list[Tensor], biases: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weights and the biases of the experts that this rank has."""
        if not self.single_grouped_weight or (biases and not self.single_grouped_bias):
            raise NotImplementedError(
                "single_grouped_weight and single_grouped_bias must be True where parameters are "
                "DTensors; got False. Shard(0) of one parameter gives each rank whole experts."
            )
        return [local_experts(weight) for weight in weights], [local_experts(b) for b in biases]

    def _with_buffers(
        self, inp: Tensor, x: Tensor, out: Tensor | None, dgrad_out: Tensor | None
    ) -> Tensor:
        """Check the buffers of a call; return ``x``, whose gradient goes into ``dgrad_out``."""
        if out is not None:
            _check_buffer("out", out, (*inp.shape[:-1], self.out_features))
        if dgrad_out is None:
            return x
        _check_buffer("dgrad_out", dgrad_out, (*inp.shape[:-1], self.in_features))
        buffer = dgrad_out.view_as(x)
        return GradientMap.run(x, lambda x: x.view_as(x), lambda dx: buffer.copy_(dx))

    def _begin_experts(
        self, x: Tensor, weights: list[Tensor], first_microbatch: bool | None, held: range | None
    ) -> tuple[Call | None, list[Tensor]]:
        """Decide how the GEMM runs (None: in high precision), and which weights autograd sees."""
        # If autograd sees the weights themselves, their gradients go into ``main_grad`` at once.
        # If it sees a copy, it does not tell which weights have gradients: each passes its own on.
        fused: tuple[Tensor, ...] = ()
        if self.fuse_wgrad_accumulation:
            trained = (w for w in weights if w.requires_grad)
            fused = tuple(w for w in trained if fused_weights(self, w))
        at_once = bool(fused) and len(fused) == len(weights)
        if at_once and not (self.single_grouped_weight or is_traced()):
            at_once = bool(self._stacked("weight", weights)[1])
        options = NO_OPTIONS
        if at_once or first_microbatch is not None or held is not None:
            options = CallOptions(first_microbatch, fused if at_once else (), experts=held)
        call = self._fp8.begin(x, weights[0], training=self.training, options=options)
        if call is None and (self.fuse_wgrad_accumulation or type(weights[0]) not in _PLAIN):
            weights = [plain_weight(self, w, first_microbatch) for w in weights]
        elif fused and not at_once:
            weights = [plain_weight(self, w, first_microbatch, as_main=True) for w in weights]
        return call, weights

    def _stacked(
        self, kind: str, parameters: Sequence[Tensor], *, keeps_cast: bool = False
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the experts' parameters as one tensor, and the parameters that get its gradient.
        The tensor is a view of their common memory if they have any, or else a copy by autograd."""
        if is_traced():
            # Dynamo cannot read the spec of a Float8Tensor that a graph makes.
            return torch.stack([plain(parameter) for parameter in parameters]), ()
        stack = None
        if not (is_exporting() or torch._C._are_functorch_transforms_active()):
            stack = self._memories[kind].stack(parameters, keeps_cast=keeps_cast)
        return (torch.stack(list(parameters)), ()) if stack is None else (stack, parameters)

    def _added_bias(self, biases: list[Tensor]) -> tuple[Tensor | None, Sequence[Tensor]]:
        """Return the biases to add, as one tensor, and the parameters that get its gradient."""
        if self.return_bias or not biases:
            return None, ()
        single, parallel = self.single_grouped_bias, self._fp8.parallel
        bias, parameters = (biases[0], ()) if single else self._stacked("bias", biases)
        if parallel is not None and self.parallel_mode == "row":
            # Only the first rank adds the bias to the sum, and all ranks have its gradient.
            bias = GradientMap.run(
                bias, lambda b: torch.zeros_like(b) if parallel.rank else b.view_as(b), lambda d: d
            )
        return bias, parameters

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        result = super()._apply(fn, recurse)
        self._make_contiguous()
        return result

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._make_contiguous()

    def _make_contiguous(self) -> None:
        """Make the parameters of all experts contiguous in memory, also after they were moved."""
        self._memories = {kind: ExpertMemory() for kind in ("weight", "bias")}
        for parameters in filter(None, self._expert_parameters()):
            lay_together(parameters)

    def _load_from_state_dict(
        self, state_dict: dict[str, object], prefix: str, *args: object, **kwargs: object
    ) -> None:
        experts = self.num_gemms
        fit_state_dict(state_dict, prefix, "weight", experts, single=self.single_grouped_weight)
        fit_state_dict(state_dict, prefix, "bias", experts, single=self.single_grouped_bias)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _check_buffer(name: str, buffer: Tensor, shape: tuple[int, ...]) -> None:
    arguments.check_tensor(name, buffer, optional=True)
    if buffer.shape != shape or buffer.dtype not in arguments.PARAMETER_DTYPES:
        raise ValueError(
            f"{name} must be a floating-point tensor of shape {shape}; got "
            f"{arguments.shown(buffer)}. Allocate it so, or leave it out."
        )


def offsets_of(m_splits: Sequence[int] | Tensor, x: Tensor, experts: int, argument: str) -> Tensor:
    """Return the offsets of the experts' rows on the device of ``x``; see ``checked_sizes``."""
    sizes = checked_sizes(m_splits, x, experts, argument)
    if sizes and x.is_cuda and not is_traced() and capturing():
        # A copy would read the host's memory in each replay, but a graph keeps kernels' arguments.
        offsets = torch.zeros(experts, dtype=torch.int32, device=x.device)
        torch._foreach_add_(offsets.unbind(), [*itertools.accumulate(sizes)])
        return offsets
    if isinstance(m_splits, Tensor):
        # Keep int32: by default torch would first convert the numbers to int64.
        dtype = torch.int32 if m_splits.dtype == torch.int32 else torch.int64
        return m_splits.to(x.device).cumsum(0, dtype=dtype)
    return torch.tensor([*itertools.accumulate(sizes or ())], dtype=torch.int32, device=x.device)


def checked_sizes(
    m_splits: Sequence[int] | Tensor, x: Tensor, experts: int, argument: str
) -> list[int] | None:
    """Check how many rows of ``x`` each expert has, and return the numbers.

    Return None for a tensor that the host cannot read without waiting: only its shape and dtype are
    checked. ``argument`` is the caller's name for the number of experts.
    """
    sizes = _sizes_on_host(m_splits)
    shape = m_splits.shape if isinstance(m_splits, Tensor) else (len(sizes or ()),)
    if shape != (experts,) or not are_sizes(sizes or [], x.shape[0]):
        raise ValueError(
            f"m_splits must be {experts} numbers ({argument}), none negative, of at most "
            f"{x.shape[0]} rows; got {arguments.shown(sizes or m_splits)}. Pass the number of rows "
            "of each expert."
        )
    return sizes


def _sizes_on_host(m_splits: Sequence[int] | Tensor) -> list[int] | None:
    """Return the sizes; None for a tensor that the host cannot read without waiting."""
    try:
        if not isinstance(m_splits, Tensor):
            return [operator.index(size) for size in m_splits]
        torch.iinfo(m_splits.dtype)  # raises unless the dtype is of integers
    except TypeError as error:
        raise TypeError(
            f"m_splits must be integers; got {arguments.shown(m_splits)}. Pass the number of rows "
            "of each expert, as a list or a tensor."
        ) from error
    is_readable = type(m_splits) is Tensor and m_splits.ndim == 1
    return m_splits.tolist() if is_readable and arguments.has_values(m_splits) else None
