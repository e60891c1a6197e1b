"""TransformerLayer: attention and a feed-forward network, with their norms and residuals."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from float8lab.arguments import check_choice, check_flags, check_input, check_number, shown
from float8lab.distributed.comm import inherit_tokens
from float8lab.distributed.ranks import from_first_rank
from float8lab.nn import parallel
from float8lab.nn.attention import masks
from float8lab.nn.attention.arguments import Lengths
from float8lab.nn.attention.inference import InferenceParams
from float8lab.nn.attention.layout import QKV_FORMATS
from float8lab.nn.attention.multihead import MultiheadAttention, RotaryArgument
from float8lab.nn.gemm import output_dtype
from float8lab.nn.layernorm_mlp import LayerNormMLP
from float8lab.nn.norm import LayerNorm, RMSNorm
from float8lab.nn.parameters import GetRngStateTracker, InitMethod, reset_children

__all__ = ["TransformerLayer"]


class TransformerLayer(nn.Module, parallel.ContextParallelModule):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``; FP8 inside ``autocast``.

    Shape: input and output ``[S, B, hidden_size]`` (sbhd), ``[B, S, hidden_size]`` (bshd) or
    ``[T, hidden_size]`` (thd). With ``sequence_parallel`` they and ``encoder_output`` hold a
    rank's shard of the first dimension.

    Submodules: ``self_attention``, ``inter_attention`` in a decoder (``MultiheadAttention``),
    ``layernorm_mlp`` (``LayerNormMLP``), ``layernorm`` with ``output_layernorm``. TransformerEngine
    uses the same names for modules and parameters; its checkpoints load, without their FP8 state.

    Args:
        hidden_size: size of each token.
        ffn_hidden_size: features between the two layers of the MLP.
        layernorm_epsilon: the epsilon of all norms.
        hidden_dropout: dropout rate of each block's output, before the residual is added. It uses
            the default generator, which must draw the same on all tensor-parallel ranks. With
            ``sequence_parallel``, where each rank has its own tokens, run the layers under a stream
            that differs between ranks (``CudaRNGStatesTracker.fork``).
        init_method: init method of the query, key, value and fc1 weights; None is normal, standard
            deviation 0.023.
        output_layer_init_method: init method of the ``proj`` and fc2 weights.
        self_attn_mask_type: mask type of the self attention; as in ``DotProductAttention``.
        window_size: window of the self attention.
        enc_dec_attn_mask_type: mask type of the cross attention.
        enc_dec_window_size: window of the cross attention.
        fuse_wgrad_accumulation: as in ``Linear``; needs ``fuse_qkv_params``.
        sequence_parallel: shard the tokens over tensor-parallel ranks outside the blocks' GEMMs:
            each rank computes residuals, norms and dropout of its tokens. Gradients of norms and
            output biases are partial: ``float8lab.distributed.reduce_sequence_parallel_gradients``.
        apply_residual_connection_post_layernorm: residuals are the norms' outputs, not inputs.
        output_layernorm: the self attention has no input norm; the layer's output is normalized.
        parallel_attention_mlp: attention and MLP each normalize the same input, with one residual.
        layer_type: "encoder"; "decoder" adds cross attention to ``encoder_output``.
        drop_path_rate: in training, skip a block for each sample with this probability, and divide
            its output by ``1 - drop_path_rate`` otherwise. The cross attention is never skipped.
        set_parallel_mode: shard the heads and the features of the MLP over the tensor-parallel
            ranks, as in ``MultiheadAttention`` and ``LayerNormMLP``.
        bias: whether all linear layers have biases.
        activation: activation of the MLP, as in ``LayerNormMLP``.
        attn_input_format: sbhd, bshd or thd.
        ub: as in ``Linear``; ``ub_tp_comm_overlap=False`` switches all overlap off.

    The other arguments are those of ``MultiheadAttention`` and ``LayerNormMLP``.

    Raises:
        ValueError: sizes, names or flags do not fit together.

    >>> layer = float8lab.TransformerLayer(64, 256, 4, attn_input_format="bshd", device="cpu")
    >>> with float8lab.autocast(recipe=float8lab.recipes.Float8CurrentScaling()):
    ...     layer(torch.randn(2, 5, 64)).shape
    torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: GetRngStateTracker | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        *,
        rotary_pos_interleaved: bool = False,
        softmax_scale: float | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        fp8_activation_input: bool = False,
        **ub: Unpack[parallel.OverlapArguments],
    ) -> None:
        super().__init__()
        check_choice("attn_input_format", attn_input_format, QKV_FORMATS)
        check_choice("layer_type", layer_type, ("encoder", "decoder"))
        check_flags(
            apply_residual_connection_post_layernorm=apply_residual_connection_post_layernorm,
            output_layernorm=output_layernorm, parallel_attention_mlp=parallel_attention_mlp,
            set_parallel_mode=set_parallel_mode, sequence_parallel=sequence_parallel,
        )  # fmt: skip
        self.hidden_dropout = check_number("hidden_dropout", hidden_dropout, minimum=0, maximum=1)
        self.drop_path_rate = check_number("drop_path_rate", drop_path_rate, minimum=0, maximum=1)
        if parallel_attention_mlp and (
            layer_type == "decoder" or apply_residual_connection_post_layernorm or output_layernorm
        ):
            raise ValueError(
                "parallel_attention_mlp must be False with layer_type='decoder', "
                "apply_residual_connection_post_layernorm or output_layernorm; got True. Attention "
                "and MLP run on one input there: turn the others off."
            )
        if self.drop_path_rate and attn_input_format == "thd":
            raise NotImplementedError(
                f"drop_path_rate must be 0 for attn_input_format='thd'; got {self.drop_path_rate}. "
                "Use 'bshd', where each sample has a row."
            )
        self.overlap = parallel.overlap_of("TransformerLayer", ub)
        ranks = parallel.parallel_size(tp_size, tp_group, "column" if set_parallel_mode else None)
        self.tp_size, self.tp_group = ranks, tp_group
        self.sequence_parallel = sequence_parallel
        self.layer_type, self.layer_number = layer_type, layer_number
        self.attn_input_format = attn_input_format
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.output_layernorm = output_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        canonical = masks.canonical_mask_type
        self.self_attn_mask_type = canonical(self_attn_mask_type, "self_attn_mask_type")
        self.window_size = window_size
        self.enc_dec_attn_mask_type = canonical(enc_dec_attn_mask_type, "enc_dec_attn_mask_type")
        masks.window_of(self.enc_dec_attn_mask_type, enc_dec_window_size, "enc_dec_window_size")
        self.enc_dec_window_size = enc_dec_window_size
        shared: dict[str, Any] = {
            "init_method": init_method, "output_layer_init_method": output_layer_init_method,
            "tp_group": tp_group, "tp_size": tp_size, "params_dtype": params_dtype,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "sequence_parallel": sequence_parallel, "set_parallel_mode": set_parallel_mode,
            "zero_centered_gamma": zero_centered_gamma, "normalization": normalization,
            "bias": bias, "device": device, "return_bias": not parallel_attention_mlp,
            "return_layernorm_output": apply_residual_connection_post_layernorm, **ub,
        }  # fmt: skip
        attention: dict[str, Any] = {
            **shared, "kv_channels": kv_channels, "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon, "layer_number": layer_number,
            "num_gqa_groups": num_gqa_groups, "get_rng_state_tracker": get_rng_state_tracker,
            "fuse_qkv_params": fuse_qkv_params, "qkv_weight_interleaved": qkv_weight_interleaved,
            "qkv_format": attn_input_format, "rotary_pos_interleaved": rotary_pos_interleaved,
            "softmax_scale": softmax_scale, "qk_norm_type": qk_norm_type,
            "qk_norm_eps": qk_norm_eps, "qk_norm_before_rope": qk_norm_before_rope,
            "softmax_type": softmax_type,
        }  # fmt: skip
        returns_norm = apply_residual_connection_post_layernorm and not output_layernorm
        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads,
            **{**attention, "return_layernorm_output": returns_norm},
            attn_mask_type=self_attn_mask_type, window_size=window_size,
            input_layernorm=not output_layernorm,
        )  # fmt: skip
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size, num_attention_heads, **attention,
                attn_mask_type=enc_dec_attn_mask_type, window_size=enc_dec_window_size,
                input_layernorm=True, attention_type="cross",
            )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, eps=layernorm_epsilon, activation=activation,
            seq_length=seq_length, micro_batch_size=micro_batch_size,
            fp8_activation_input=fp8_activation_input, **shared,
        )  # fmt: skip
        if output_layernorm:
            norm: Any = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[normalization]
            self.layernorm = norm(
                hidden_size, eps=layernorm_epsilon, sequence_parallel=sequence_parallel,
                params_dtype=params_dtype, zero_centered_gamma=zero_centered_gamma, device=device,
            )  # fmt: skip
        self.register_load_state_dict_pre_hook(parallel.ignore_extra_state)

    def reset_parameters(self) -> None:
        """Initialise attention, MLP and norms, like ``Linear.reset_parameters``."""
        reset_children(self)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: masks.MaskArgument = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: masks.MaskArgument = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: RotaryArgument = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        *,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
    ) -> Tensor:
        """Apply the layer.

        Args:
            hidden_states: the tokens in ``attn_input_format``, ``hidden_size`` last.
            self_attn_mask_type: overrides the constructor's argument.
            encoder_output: in a decoder, the tokens that the cross attention attends to.
            enc_dec_attn_mask: mask of the cross attention; a pair for padding masks.
            is_first_microbatch: as in ``Linear.forward``.
            checkpoint_core_attention: recompute the core attention in backward.
            inference_params: key/value cache of the self attention.
            rotary_pos_emb: angles for the self attention, from position 0 on.
            enc_dec_attn_mask_type: overrides the constructor's argument.
            enc_dec_window_size: overrides the constructor's argument.
            cu_seqlens_q: offsets of the layer's sequences, for self and cross attention.
            cu_seqlens_kv: offsets of the encoder's sequences, for cross attention; self attention
                uses ``cu_seqlens_q`` instead, and in an encoder both must be equal.

        The other arguments are those of ``DotProductAttention.forward``, for the self attention.

        Returns:
            A tensor with the shape of ``hidden_states``, in its dtype, or in the dtype of
            torch.autocast if that is active, which the residual stream then also has.
        """
        size, thd = self.self_attention.hidden_size, self.attn_input_format == "thd"
        check_input("hidden_states", hidden_states, (size,), "hidden_size", ndim=2 if thd else 3)
        if self_attn_mask_type is not None:
            masks.canonical_mask_type(self_attn_mask_type, "self_attn_mask_type")
        hidden_states = hidden_states.to(output_dtype(hidden_states))
        is_decoder = self.layer_type == "decoder"
        self_lengths = cross_lengths = Lengths(
            cu_seqlens_q, cu_seqlens_kv, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv
        )
        cross_type = self.enc_dec_attn_mask_type
        if enc_dec_attn_mask_type is not None:
            cross_type = masks.canonical_mask_type(enc_dec_attn_mask_type, "enc_dec_attn_mask_type")
        masks.window_of(cross_type, enc_dec_window_size, "enc_dec_window_size")
        masks.check_mask_types("enc_dec_attn_mask", enc_dec_attn_mask)
        if is_decoder:
            self_lengths, cross_lengths = self._decoder_lengths(
                cross_lengths, self_attn_mask_type or self.self_attn_mask_type, cross_type
            )
            inter: Any = self.inter_attention
            inter.check_arguments(
                hidden_states, encoder_output,
                inter.core_attention.rules_of_call(None, cross_type, enc_dec_window_size),
                enc_dec_attn_mask, cross_lengths, mask_name="enc_dec_attn_mask",
            )  # fmt: skip
        elif encoder_output is not None:
            raise ValueError(
                f"encoder_output must be None in an encoder layer; got {shown(encoder_output)}. "
                "Set layer_type='decoder' to attend to it."
            )
        attended: Any = self.self_attention(
            hidden_states, attention_mask, attn_mask_type=self_attn_mask_type,
            window_size=window_size, is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention, inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb, core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes,
            fast_zero_fill=fast_zero_fill, cu_seqlens_q=self_lengths.cu_seqlens_q,
            cu_seqlens_kv=self_lengths.cu_seqlens_kv, max_seqlen_q=self_lengths.max_seqlen_q,
            max_seqlen_kv=self_lengths.max_seqlen_kv,
        )  # fmt: skip
        if self.parallel_attention_mlp:
            outputs = attended + self.layernorm_mlp(hidden_states, is_first_microbatch)
            return self._add(outputs, None, hidden_states, drop_path=True)
        output, bias, *normed = attended
        x = self._add(output, bias, normed[0] if normed else hidden_states, drop_path=True)
        if is_decoder:
            output, bias, *normed = self.inter_attention(
                x, enc_dec_attn_mask, encoder_output, attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size, is_first_microbatch=is_first_microbatch,
                checkpoint_core_attention=checkpoint_core_attention, fast_zero_fill=fast_zero_fill,
                cu_seqlens_q=cross_lengths.cu_seqlens_q, cu_seqlens_kv=cross_lengths.cu_seqlens_kv,
                max_seqlen_q=cross_lengths.max_seqlen_q, max_seqlen_kv=cross_lengths.max_seqlen_kv,
            )  # fmt: skip
            x = self._add(output, bias, normed[0] if normed else x, drop_path=False)
        output, bias, *normed = self.layernorm_mlp(x, is_first_microbatch)
        x = self._add(output, bias, normed[0] if normed else x, drop_path=True)
        return self.layernorm(x) if self.output_layernorm else x

    def _decoder_lengths(
        self, cross: Lengths, self_type: str, cross_type: str
    ) -> tuple[Lengths, Lengths]:
        """Return the lengths for a decoder's self and cross attention, each if it takes lengths."""
        # If neither takes lengths, both get them, so that they raise.
        lengths = cross._replace(cu_seqlens_kv=cross.cu_seqlens_q, max_seqlen_kv=cross.max_seqlen_q)
        takes = ["padding" in mask_type for mask_type in (self_type, cross_type)]
        if self.attn_input_format == "thd" or not any(takes):
            return lengths, cross
        return lengths if takes[0] else Lengths(), cross if takes[1] else Lengths()

    def _add(self, x: Tensor, bias: Tensor | None, residual: Tensor, *, drop_path: bool) -> Tensor:
        """Compute ``residual + drop_path(dropout(x + bias))``."""
        attended = x
        if bias is not None:
            x = x + bias.to(x.dtype)
        x = F.dropout(x, self.hidden_dropout, self.training)
        if drop_path and self.drop_path_rate and self.training:
            keep_rate = 1.0 - self.drop_path_rate
            batch = 1 if self.attn_input_format == "sbhd" else 0
            shape = [n if dim == batch else 1 for dim, n in enumerate(x.shape)]
            # With a drop rate of 1 no sample is kept, and the division is by 1 rather than 0.
            is_kept = torch.rand(shape, dtype=torch.float32, device=x.device) < keep_rate
            group = self.tp_group if self.sequence_parallel and self.tp_size > 1 else None
            if batch and group is not None:
                is_kept = from_first_rank(is_kept, group)  # all ranks have tokens of each sample
            x = x * is_kept / (keep_rate or 1.0)
        summed = residual + x
        return inherit_tokens(summed, attended, residual) if self.sequence_parallel else summed
