"""LayerNormMLP: a norm, a linear layer, an activation and a second linear layer as one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint as run_checkpointed
from typing_extensions import Unpack

from float8lab.arguments import check_callables, check_size
from float8lab.distributed.shard_map import ShardMap
from float8lab.nn.activation_function import activate, check_activation
from float8lab.nn.fused_function import MlpCall, NormFront, NormMlpFunction
from float8lab.nn.layer import GemmDef, NormGemmModule, linear_in_high_precision
from float8lab.nn.main_grad import plain_weight
from float8lab.nn.parallel import OverlapArguments, parallel_size, share_of
from float8lab.nn.parameters import GetRngStateTracker, InitMethod, draw_from_tracker
from float8lab.nn.precision import Precision

__all__ = ["LayerNormMLP"]


class LayerNormMLP(NormGemmModule):
    """``activation(norm(x) @ fc1_weight.T + fc1_bias) @ fc2_weight.T + fc2_bias``, GEMMs in FP8.

    Shape: input and output ``[..., hidden_size]`` with any leading dimensions and any sizes. A
    gated activation (geglu, reglu, sreglu, qgeglu, swiglu, glu) takes ``2 * ffn_hidden_size``
    features from fc1: the first half goes through the function, and the second half multiplies the
    result. GPT-OSS's clamped_swiglu_interleaved takes these features in pairs.

    Numerics: those of the separate modules, bit for bit. In FP8 the outputs of norm and activation
    and the gradient between activation and fc1 are never written. Forward saves the input, with two
    numbers for each row, and fc1's output.

    Args:
        hidden_size: size of the last dimension of input and output.
        ffn_hidden_size: number of features between activation and fc2.
        bias: whether fc1 and fc2 learn additive biases, initialised to 0.
        activation: gelu (its tanh approximation), relu, squared_relu (also srelu), qgelu, silu, or,
            gated, geglu, reglu, sreglu, qgeglu, swiglu, glu, clamped_swiglu_interleaved.
        init_method: ``init_method(fc1_weight)`` initialises in place; None is normal, mean 0,
            standard deviation 0.023.
        output_layer_init_method: the same for ``fc2_weight``.
        return_layernorm_output_gathered: that output has the tokens of all tensor-parallel ranks;
            no effect without ``sequence_parallel`` and ``return_layernorm_output``.
        set_parallel_mode: the R ranks of ``tp_group`` share fc1 by columns and fc2 by rows: each
            has ``ffn_hidden_size / R`` of the features in between (``docs/many_gpus.md``).
        sequence_parallel: each rank has a shard of the tokens, along the first dimension of input
            and output; the norm's parameters and ``fc2_bias`` are marked, so that a trainer sums
            their gradients over these ranks.
        tp_group: the process group of these ranks.
        tp_size: R, where ``tp_group`` is given later.
        return_bias: do not add fc2's bias; return it after the output.
        seq_length: no effect, like ``micro_batch_size``: this module needs no warm-up.
        checkpoint: do not save fc1's output, but recompute it in backward from the input: this
            saves memory and costs a GEMM, with the same results.
        fp8_activation_input: in FP8, save fc1's output in e4m3 with a scale for every 128 features,
            in half the memory. The output does not change; gradients use fc1's rounded output,
            which costs them up to 1.5 dB. No effect with ``checkpoint``, which does not save it.

    The other arguments are those of ``LayerNormLinear``.

    Raises:
        ValueError: normalization or activation is unknown, or the ranks cannot share a size.

    >>> mlp = float8lab.LayerNormMLP(64, 128, activation="swiglu", device="cpu")
    >>> with float8lab.autocast(recipe=float8lab.recipes.Float8CurrentScaling()):
    ...     mlp(torch.ones(3, 64)).shape
    torch.Size([3, 64])
    """

    fc1_weight: nn.Parameter
    fc1_bias: nn.Parameter | None
    fc2_weight: nn.Parameter
    fc2_bias: nn.Parameter | None
    checkpoint: bool
    fp8_activation_input: bool
    _fp8_fc1: Precision
    _fp8_fc2: Precision
    _shown = ("hidden_size", "ffn_hidden_size", "normalization", "activation", "eps")

    def __init__(  # the signature is the interface that users' code is written for
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        set_parallel_mode: bool = False,
        sequence_parallel: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        fuse_wgrad_accumulation: bool = False,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        checkpoint: bool = False,
        fp8_activation_input: bool = False,
        get_rng_state_tracker: GetRngStateTracker | None = None,
        rng_tracker_name: str | None = None,
        **ub: Unpack[OverlapArguments],
    ) -> None:
        super().__init__()
        gated = check_activation(activation)
        self._set_flags(
            bias=bias, return_layernorm_output=return_layernorm_output,
            return_layernorm_output_gathered=return_layernorm_output_gathered,
            set_parallel_mode=set_parallel_mode, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            return_bias=return_bias, checkpoint=checkpoint,
            fp8_activation_input=fp8_activation_input, sequence_parallel=sequence_parallel,
            zero_centered_gamma=zero_centered_gamma,
        )  # fmt: skip
        self.tp_size = parallel_size(tp_size, tp_group, "column" if set_parallel_mode else None)
        check_callables(("weight",), output_layer_init_method=output_layer_init_method)
        check_size("seq_length", seq_length, minimum=1, optional=True)
        check_size("micro_batch_size", micro_batch_size, minimum=1, optional=True)
        self.hidden_size = H = check_size("hidden_size", hidden_size)
        self.ffn_hidden_size = check_size("ffn_hidden_size", ffn_hidden_size)
        self.activation = activation
        self._set_norm(normalization, eps)
        F = share_of("ffn_hidden_size", self.ffn_hidden_size, self.tp_size)
        fc1, fc2 = (
            draw_from_tracker(init, get_rng_state_tracker, rng_tracker_name)
            for init in (init_method, output_layer_init_method)
        )
        pieces = (F, F) if gated else (F,)
        modes = ("column", "row") if set_parallel_mode else (None, None)
        self._build(
            GemmDef.named("fc1", (sum(pieces), H), bias, fc1, modes[0], features=pieces),
            GemmDef.named("fc2", (H, F), bias, fc2, modes[1], features=(F,)),
            device=device, params_dtype=params_dtype, tp_group=tp_group, ub=ub,
        )  # fmt: skip

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Apply the norm, then the MLP.

        Args:
            inp: ``[..., hidden_size]``.
            is_first_microbatch: as in ``Linear.forward``, for both weights.

        Returns:
            ``[..., hidden_size]``; or a tuple of this output, fc2's bias with ``return_bias``, and
            the norm's output with ``return_layernorm_output``.
        """
        weights = self.fc1_weight, self.fc2_weight  # read once: parametrizations compute them
        x = self._checked(inp, weights[0], "hidden_size")
        added = None if self.return_bias else self.fc2_bias
        parallel = self._fp8_fc1.parallel
        tokens = None if parallel is None else parallel.tokens_of(x)
        fc1 = self._begin(self._fp8_fc1, x, weights[0], is_first_microbatch, tokens)
        fc2 = fc1 and self._begin(self._fp8_fc2, x, weights[1], is_first_microbatch, tokens)
        if fc1 is not None and fc2 is not None:
            front = NormFront(self._norm, self.return_layernorm_output)
            saves = self.checkpoint, self.fp8_activation_input
            call = MlpCall(front, self.activation, fc1, fc2, *saves)
            y = NormMlpFunction.run(
                x, self.layer_norm_weight, self.layer_norm_bias, weights[0], self.fc1_bias,
                weights[1], added, call,
            )  # fmt: skip
            y, normed = y if front.return_norm else (y, None)
            for precision, gemm_call in ((self._fp8_fc1, fc1), (self._fp8_fc2, fc2)):
                if gemm_call.is_region:
                    precision.end(gemm_call)
        elif self.checkpoint and torch.is_grad_enabled() and not torch.compiler._is_exporting_flag:
            y, normed = run_checkpointed(
                self._forward_in_high_precision, x, weights, added, is_first_microbatch, tokens,
                use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
        else:
            y, normed = self._forward_in_high_precision(
                x, weights, added, is_first_microbatch, tokens
            )
        if parallel is not None:
            parallel.remember_tokens(y, tokens)
        return self._outputs(y, self.fc2_bias, normed, tokens)

    def _forward_in_high_precision(
        self, x: Tensor, weights: tuple[Tensor, Tensor], bias: Tensor | None,
        first_microbatch: bool | None, tokens: ShardMap | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        fc1, fc2 = (plain_weight(self, weight, first_microbatch) for weight in weights)
        normed = self._normed(x)
        h = linear_in_high_precision(self._fp8_fc1, normed, fc1, self.fc1_bias, tokens)
        activated = activate(h, self.activation)
        return linear_in_high_precision(self._fp8_fc2, activated, fc2, bias, tokens), normed
