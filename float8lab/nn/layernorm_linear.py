"""LayerNormLinear: a norm and a linear layer as one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from float8lab.nn import parameters
from float8lab.nn.fused_function import NormFront, NormLinearFunction
from float8lab.nn.gemm import LinearFunction
from float8lab.nn.layer import NormGemmModule, linear_in_high_precision
from float8lab.nn.main_grad import plain_weight
from float8lab.nn.parallel import OverlapArguments, parallel_size
from float8lab.nn.precision import Precision

__all__ = ["LayerNormLinear"]


class LayerNormLinear(NormGemmModule):
    """``norm(x) @ weight.T + bias`` with its GEMMs in FP8 inside ``autocast``.

    Shape: input ``[..., in_features]`` with any leading dimensions and any sizes; output
    ``[..., out_features]``.

    Numerics: those of ``LayerNorm`` or ``RMSNorm`` followed by ``Linear``, bit for bit. In FP8 the
    norm's output is cast while it is computed and never written; forward saves the input and two
    numbers for each row.

    Args:
        eps: a number added to the variance, or to the mean square.
        normalization: ``"LayerNorm"``, or ``"RMSNorm"``, which has no ``layer_norm_bias``.
        return_layernorm_output: return the norm's output as the last output.
        return_layernorm_output_gathered: that output has the tokens of all tensor-parallel ranks
            under ``sequence_parallel``, and all features if ``parallel_mode`` is "row".
        zero_centered_gamma: multiply by ``1 + layer_norm_weight``; that weight then starts from 0.
        sequence_parallel: each tensor-parallel rank has a shard of the input's tokens, along the
            first dimension; the norm's parameters are marked, so that a trainer sums their
            gradients over these ranks.
        parallel_mode: "column": each rank has ``[out_features / R, in_features]`` of the weight and
            outputs that many features of all tokens; None: ranks share nothing; "row": each has
            ``[out_features, in_features / R]`` and that many features of all input tokens. The norm
            and its gradient need all features of a token, so they are gathered in high precision;
            all ranks have the norm's unsharded parameters and their full gradients.

    The other arguments are those of ``Linear``.

    Raises:
        ValueError: the normalization is unknown, ``parameters_split`` does not add up, or the ranks
            cannot share the sizes equally.

    >>> layer = float8lab.LayerNormLinear(64, 96, normalization="RMSNorm", device="cpu")
    >>> with float8lab.autocast(recipe=float8lab.recipes.Float8CurrentScaling()):
    ...     layer(torch.ones(3, 64)).shape
    torch.Size([3, 96])
    """

    _fp8: Precision
    _shown = ("in_features", "out_features", "normalization", "eps")

    def __init__(  # the signature is the interface that users' code is written for
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        init_method: parameters.InitMethod | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        sequence_parallel: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: parameters.GetRngStateTracker | None = None,
        rng_tracker_name: str | None = None,
        **ub: Unpack[OverlapArguments],
    ) -> None:
        super().__init__()
        self.tp_size = parallel_size(tp_size, tp_group, parallel_mode)
        self._set_flags(
            bias=bias, return_layernorm_output=return_layernorm_output,
            return_layernorm_output_gathered=return_layernorm_output_gathered,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, return_bias=return_bias,
            sequence_parallel=sequence_parallel, zero_centered_gamma=zero_centered_gamma,
        )  # fmt: skip
        self._set_norm(normalization, eps)
        init = parameters.draw_from_tracker(init_method, get_rng_state_tracker, rng_tracker_name)
        gemm = self._set_features(in_features, out_features, parallel_mode, parameters_split, init)
        self._build(gemm, device=device, params_dtype=params_dtype, tp_group=tp_group, ub=ub)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Apply the norm, then the linear layer.

        Args:
            inp: ``[..., in_features]``.
            is_first_microbatch: as in ``Linear.forward``.

        Returns:
            ``[..., out_features]``; or a tuple of this output, the bias with ``return_bias``, and
            the norm's output with ``return_layernorm_output``.
        """
        weight, bias = self._weight_and_bias(self.gemms[0])
        parallel: Any = self._fp8.parallel
        added = None if self.return_bias else bias
        by_features = parallel is not None and parallel.mode == "row"
        x = self._checked(inp, weight, "in_features", self.tp_size if by_features else 1)
        gathered = None
        if by_features:  # a norm needs all features of a token
            gathered = self._normed(parallel.gather_features(x, gather=True))
            x = parallel.gather_features(gathered, gather=False)
        tokens = None if parallel is None else parallel.tokens_of(x)
        call = self._begin(self._fp8, x, weight, is_first_microbatch, tokens)
        normed: Tensor | None = x
        if call is None:
            plain = plain_weight(self, weight, is_first_microbatch)
            normed = x if by_features else self._normed(x)
            y = linear_in_high_precision(self._fp8, normed, plain, added, tokens)
        elif by_features:
            y = LinearFunction.run(x, weight, added, call)
        else:
            front = NormFront(self._norm, self.return_layernorm_output)
            norm = self.layer_norm_weight, self.layer_norm_bias
            y = NormLinearFunction.run(x, *norm, weight, added, front, call)
            y, normed = y if self.return_layernorm_output else (y, None)
        if call is not None and call.is_region:
            self._fp8.end(call)
        if by_features:
            parallel.remember_tokens(y, tokens)
            normed = gathered if self.return_layernorm_output_gathered else normed
        return self._outputs(y, bias, normed, None if by_features else tokens)
