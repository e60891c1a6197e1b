"""Linear: torch.nn.Linear whose three GEMMs run in FP8."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from float8lab.arguments import PARAMETER_DTYPES, check_input
from float8lab.nn import parameters
from float8lab.nn.gemm import LinearFunction
from float8lab.nn.layer import GemmDef, GemmModule, describe_fp8, linear_in_high_precision
from float8lab.nn.main_grad import plain_weight
from float8lab.nn.parallel import OverlapArguments, parallel_size
from float8lab.nn.precision import Precision
from float8lab.tensor import Float8Tensor
from float8lab.tensor.dtensor import is_dtensor

if TYPE_CHECKING:  # DTensor takes as long to import as all of float8lab
    from torch.distributed.tensor import Placement

__all__ = ["Linear"]


class Linear(GemmModule, nn.Linear):
    """``y = x @ weight.T + bias`` with its GEMMs in FP8 inside ``autocast``.

    Shape: input ``[..., in_features]`` with any leading dimensions and any sizes, also zero and
    sizes that are multiples of nothing; output ``[..., out_features]``.

    Numerics: outside ``autocast``, and without its own recipe, this module is ``torch.nn.Linear``.
    Otherwise the recipe says how x, weight and dy are cast; GEMMs accumulate in float32; the bias
    is added before the output is rounded. x is saved for backward in FP8 where wgrad runs in FP8.

    Args:
        in_features: size of the last dimension of the input, on all ranks together.
        out_features: size of the last dimension of the output, on all ranks together.
        bias: whether the layer learns an additive bias, initialised to 0.
        init_method: ``init_method(weight)`` initialises in place; None is normal, mean 0, standard
            deviation 0.023.
        parameters_split: names, or a mapping from names to sizes along dimension 0, of several
            parameters that together form the weight (``<name>_weight``) and the bias
            (``<name>_bias``).
        device: None is the default device if one was set, else the current CUDA device if there is
            any, else the CPU. ``"meta"`` works.
        params_dtype: dtype of the parameters; None is the default dtype.
        return_bias: do not add the bias; return ``(output, bias)``.
        fuse_wgrad_accumulation: add the weight gradient to ``weight.main_grad``, which the caller
            allocates, instead of producing ``weight.grad``.
        sequence_parallel: each rank has a shard of the tokens, along the first dimension, where
            they enter a column-parallel layer or leave a row-parallel layer.
        tp_group: process group of the R ranks that share the layer (``docs/many_gpus.md``).
        tp_size: R, where ``tp_group`` is given later.
        parallel_mode: "column": each rank has ``[out_features / R, in_features]`` of the weight
            and outputs that many features; "row": each has ``[out_features, in_features / R]``,
            takes that many features, and gets the sum of all outputs; None: ranks share nothing.
        get_rng_state_tracker: returns a ``CudaRNGStatesTracker``; ``init_method`` draws from one
            of its streams. None is the default stream.
        rng_tracker_name: the name of that stream; None is ``"model-parallel-rng"``.
        ub: Transformer Engine's arguments ``ub_overlap_ag`` and the like. GEMMs overlap with
            communication where that was measured to pay, with the same results;
            ``ub_overlap_ag=False, ub_overlap_rs=False`` switches the overlap off.

    Raises:
        ValueError: ``parameters_split`` does not add up to ``out_features``, or is given with
            ``fuse_wgrad_accumulation``; or ranks cannot share the sizes equally.

    >>> layer = float8lab.Linear(64, 32, device="cpu")
    >>> with float8lab.autocast(recipe=float8lab.recipes.Float8CurrentScaling()):
    ...     layer(torch.ones(3, 64)).shape
    torch.Size([3, 32])
    """

    # Defaults for layers that convert_to_float8 converts to Linear without calling __init__.
    gemms = (GemmDef(("weight",), ("bias",), ()),)
    _fp8: Precision
    output_layout: Placement | None = None  # Float8RowwiseParallel asks for a DTensor with it

    def __init__(  # the signature is the interface that users' code is written for
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init_method: parameters.InitMethod | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        sequence_parallel: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        get_rng_state_tracker: parameters.GetRngStateTracker | None = None,
        rng_tracker_name: str | None = None,
        **ub: Unpack[OverlapArguments],
    ) -> None:
        nn.Module.__init__(self)
        self.tp_size = parallel_size(tp_size, tp_group, parallel_mode)
        self._set_flags(
            bias=bias, return_bias=return_bias, sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
        )  # fmt: skip
        init = parameters.draw_from_tracker(init_method, get_rng_state_tracker, rng_tracker_name)
        gemm = self._set_features(in_features, out_features, parallel_mode, parameters_split, init)
        self._build(gemm, device=device, params_dtype=params_dtype, tp_group=tp_group, ub=ub)

    def reset_parameters(self) -> None:
        """Initialise the weight by ``init_method``, and the bias to 0.

        Parameters on the meta device get memory on the default device, as in a new module.
        """
        if "gemms" in vars(self):
            super().reset_parameters()
            return
        parameters.materialize(self)  # a converted layer, which torch initialises
        nn.Linear.reset_parameters(self)

    def forward(  # type: ignore[override]  # nn.Linear's, with one more argument
        self, inp: Tensor = None,  # type: ignore[assignment]  # or ``input`` is given
        is_first_microbatch: bool | None = None, *, input: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:  # fmt: skip
        """Apply the layer.

        Args:
            inp: ``[..., in_features]``; may be a nested tensor of layout ``torch.jagged``.
            is_first_microbatch: True casts the weight and keeps the cast; False uses the kept
                cast, so pass it only if the weight did not change in between. True also makes
                ``fuse_wgrad_accumulation`` overwrite ``main_grad`` instead of adding to it. None
                casts the weight every time.
            input: ``inp``, by its name in ``torch.nn.Linear``.

        Returns:
            ``[..., out_features]``; with ``return_bias``, the output without bias, and the bias.
        """
        if input is not None:
            if inp is not None:
                raise TypeError("input must be None where inp is given; got both. Pass one.")
            inp = input
        if isinstance(inp, Tensor) and inp.is_nested:
            return self._apply_to_nested(inp, is_first_microbatch)
        if self._split is not None:
            weight, bias = self._weight_and_bias(self.gemms[0])
        else:
            weight, bias = self.weight, self.bias
        is_tensor = isinstance(inp, Tensor) and inp.dtype in PARAMETER_DTYPES
        if not is_tensor or inp.shape[-1:] != weight.shape[1:]:
            check_input("inp" if input is None else "input", inp, (weight.shape[1],), "in_features")
        added = None if self.return_bias else bias
        # In inference Transformers passes local shards to the layer, which are plain tensors.
        if self._placement is not None and is_dtensor(weight):
            y = self._placement.run(self, inp, weight, added, is_first_microbatch)
            return (y, self._returned(bias)) if self.return_bias else y
        x = inp.dequantize() if isinstance(inp, Float8Tensor) else inp
        parallel = self._fp8.parallel
        tokens = None if parallel is None else parallel.tokens_of(x)
        if (call := self._begin(self._fp8, x, weight, is_first_microbatch, tokens)) is None:
            plain = plain_weight(self, weight, is_first_microbatch)
            y = linear_in_high_precision(self._fp8, x, plain, added, tokens)
        else:
            y = LinearFunction.run(x, weight, added, call)
            if call.is_region:
                self._fp8.end(call)
        if parallel is not None and parallel.scatters:
            parallel.remember_tokens(y, tokens)
        return (y, self._returned(bias)) if self.return_bias else y

    def _apply_to_nested(
        self, inp: Any, first_microbatch: bool | None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Apply the layer to a nested tensor, all of whose components' values are one tensor."""
        if inp.layout != torch.jagged:
            raise TypeError(
                f"inp must have layout torch.jagged if it is nested; got {inp.layout}. Name the "
                "layout where the nested tensor is made."
            )
        y = self.forward(inp.values(), first_microbatch)
        values, bias = y if isinstance(y, tuple) else (y, None)
        nested = torch.nested.nested_tensor_from_jagged(
            values, inp.offsets(), inp.lengths(), jagged_dim=inp._ragged_idx
        )
        return (nested, bias) if self.return_bias else nested

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        old = self._parameters.get(name)
        super().register_parameter(name, param)
        if name == "weight":
            self._follow_placements(param, old)

    def _follow_placements(
        self, weight: Tensor | None, old: Tensor | None = None, *, sharded: bool = False
    ) -> None:
        """Set how ranks share the layer by the placements of its weight, if that is a DTensor.

        Args:
            old: the weight that this weight replaces.
            sharded: FSDP2 shards the weight over all dimensions of its mesh but the last.
        """
        if self._placement is None and not is_dtensor(weight):
            return
        self._placement = None
        if is_dtensor(weight):
            mesh, placements = weight.device_mesh, weight.placements
            if sharded:
                mesh, placements = mesh[(mesh.mesh_dim_names or ())[-1]], placements[-1:]
            # Imported here, for it imports DTensor, which takes as long as all of float8lab.
            dtensor = importlib.import_module("float8lab.nn.dtensor")
            self._placement = dtensor.WeightPlacement(mesh, placements, weight.shape)
            self._placement.share_scales(weight, old)
        self._fp8.set_parallel(self._placement and self._placement.parallel)

    def extra_repr(self) -> str:
        has_bias = getattr(self, self.gemms[0].biases[0]) is not None
        split = f", parameters_split={self._split}" if self._split else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={has_bias}{split}{describe_fp8(self)}"
        )
