"""Base of modules that begin with a norm: the norm's parameters, FP8 state, weights in parts."""

from __future__ import annotations

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
)
from float8lab.distributed.comm import mark_sequence_parallel
from float8lab.distributed.fsdp.shards import Shardable
from float8lab.distributed.shard_map import ShardMap
from float8lab.formats import HIGH_PRECISION_DTYPES
from float8lab.nn.casts import plain
from float8lab.nn.linear import default_device, initialise, materialize, moved_in_place
from float8lab.nn.main_grad import fused_weight
from float8lab.nn.norm import check_norm
from float8lab.nn.norm_function import NormKind
from float8lab.nn.parallel import ParameterShard, TensorParallelGroup, ignore_extra_state
from float8lab.nn.precision import Call, Precision
from float8lab.tensor import Float8Tensor

__all__ = ["FusedModule"]

_Init = Callable[[Tensor], Any]


class FusedModule(Shardable, TensorParallelGroup):
    """A norm with parameters ``layer_norm_weight`` and ``layer_norm_bias``, and GEMMs."""

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None
    fuse_wgrad_accumulation: bool
    _norm: NormKind
    _keeps_initial_values = False

    def _set_up_norm(
        self,
        size: int,
        normalization: str,
        *,
        eps: float,
        zero_centered_gamma: bool,
        sequence_parallel: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        partial: bool = True,
    ) -> tuple[torch.device, torch.dtype]:
        """Register the norm's parameters; returns where parameters go and their dtype.

        ``partial``: under sequence parallelism, each rank has the gradients of its own tokens.
        """
        check_flags(sequence_parallel=sequence_parallel, zero_centered_gamma=zero_centered_gamma)
        check_dtype("params_dtype", dtype)
        eps = check_norm(normalization, "eps", eps)
        where = check_device("device", device) or default_device()
        dtype = dtype or torch.get_default_dtype()
        self.eps = eps
        self.register_load_state_dict_pre_hook(ignore_extra_state)
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        center = normalization == "LayerNorm"
        self._norm = NormKind(center=center, eps=eps, zero_centered=zero_centered_gamma)
        self.layer_norm_weight = nn.Parameter(torch.empty(size, device=where, dtype=dtype))
        bias = torch.empty(size, device=where, dtype=dtype) if center else None
        self.register_parameter("layer_norm_bias", None if bias is None else nn.Parameter(bias))
        marked = sequence_parallel and partial
        mark_sequence_parallel(self, marked, "layer_norm_weight", "layer_norm_bias")
        return where, dtype

    def _reset_norm(self) -> None:
        materialize(self)
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)

    def _register(
        self,
        prefix: str,
        shape: tuple[int, int],
        *,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Register ``<prefix>weight`` and ``<prefix>bias``, not initialised."""
        weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.register_parameter(f"{prefix}weight", weight)
        added = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self.register_parameter(f"{prefix}bias", added)

    def _initialise(
        self, prefixes: Sequence[str], init_method: _Init | None, shard: ParameterShard | None
    ) -> None:
        initialise(self, prefixes, init_method, keep=self._keeps_initial_values, shard=shard)

    def _whole(self, prefixes: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias that these parts form."""
        weights = [getattr(self, f"{prefix}weight") for prefix in prefixes]
        biases = [getattr(self, f"{prefix}bias") for prefix in prefixes]
        if len(weights) == 1:
            return weights[0], biases[0]
        whole = torch.cat([plain(weight) for weight in weights])
        return whole, None if biases[0] is None else torch.cat(biases)

    def _checked(self, inp: Tensor, weight: Tensor, argument: str, ranks: int = 1) -> Tensor:
        """The input in high precision; raises if norm and weight are of another size.

        ``ranks``: how many share the features of the norm.
        """
        features, normed = weight.shape[1], weight.shape[1] * ranks
        dtype = inp.dtype if isinstance(inp, Tensor) else None
        if dtype not in PARAMETER_DTYPES or inp.shape[-1:] != weight.shape[1:]:
            check_input("inp", inp, (features,), argument)
        if self.layer_norm_weight.shape != (normed,):
            raise ValueError(
                f"layer_norm_weight must have the {normed} features of the weight ({argument}); "
                f"got shape {tuple(self.layer_norm_weight.shape)}. Replace both by parameters of "
                "one size."
            )
        return inp.dequantize() if isinstance(inp, Float8Tensor) else inp

    def _begin(
        self,
        precision: Precision,
        x: Tensor,
        weight: Tensor,
        first_microbatch: bool | None,
        tokens: ShardMap | None,
    ) -> Call | None:
        """How a GEMM on a weight runs, by the module's input; None stands for high precision."""
        call = precision.begin(
            x, training=self.training, first_microbatch=first_microbatch,
            fused_weight=fused_weight(self, weight) if self.fuse_wgrad_accumulation else None,
            tokens=tokens,
        )  # fmt: skip
        return call if weight.dtype in HIGH_PRECISION_DTYPES else None

    def _outputs(
        self, y: Tensor, bias: Tensor | None, normed: Tensor | None, *, return_bias: bool
    ) -> Any:
        """One output, or a tuple of as many as were asked for."""
        outputs = [y]
        if return_bias:
            outputs.append(bias)  # type: ignore[arg-type]  # None without a bias
        if normed is not None:
            outputs.append(normed)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with moved_in_place(self, fn):
            return super()._apply(fn, recurse)
