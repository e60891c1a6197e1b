"""MultiheadAttention: the projections around DotProductAttention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from float8lab import arguments
from float8lab.distributed.context_parallel import ONE_RANK
from float8lab.nn import parallel
from float8lab.nn.attention import rotary
from float8lab.nn.attention.arguments import Given, Lengths, Rules
from float8lab.nn.attention.bias import BiasArguments
from float8lab.nn.attention.dot_product import DotProductAttention, check_groups
from float8lab.nn.attention.inference import InferenceParams, positions_reached
from float8lab.nn.attention.layout import QKV_FORMATS, sizes_of
from float8lab.nn.attention.masks import MaskArgument, canonical_mask_type
from float8lab.nn.gemm import output_dtype
from float8lab.nn.layernorm_linear import LayerNormLinear
from float8lab.nn.linear import Linear
from float8lab.nn.norm import LayerNorm, RMSNorm, check_norm
from float8lab.nn.norm_function import NormKind, normalize
from float8lab.nn.parameters import GetRngStateTracker, InitMethod, JoinedSplit, reset_children

__all__ = ["MultiheadAttention", "RotaryArgument"]

RotaryArgument = Tensor | tuple[Tensor, Tensor] | None
"""Angles of ``RotaryPositionEmbedding`` for queries and keys together, or a pair of angles."""


class L2Normalization(nn.Module):
    """Computes ``x / sqrt(sum(x ** 2) + eps)`` over the last dimension; arguments as in RMSNorm."""

    def __init__(self, hidden_size: int, eps: float, **unused: object) -> None:
        super().__init__()
        self.size = hidden_size
        # The mean of squares is their sum divided by the size.
        self._kind = NormKind(center=False, eps=eps / hidden_size, zero_centered=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``, ``[..., hidden_size]``."""
        weight = x.new_full((self.size,), self.size**-0.5, dtype=torch.float32)
        return normalize(x, weight, None, self._kind, output_dtype(x))


QK_NORMS: dict[str, Callable[..., nn.Module]] = {
    norm.__name__: norm for norm in (L2Normalization, RMSNorm, LayerNorm)
}


def _angles_of(rotary_pos_emb: RotaryArgument) -> tuple[Tensor, Tensor] | None:
    if rotary_pos_emb is None:
        return None
    pair = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
    if len(pair) != 2:
        raise ValueError(
            "rotary_pos_emb must be angles, or those of queries and of keys; got "
            f"{len(pair)} values. Pass a tensor or a pair of them."
        )
    return pair


def _check_sizes(
    hidden_size: int, heads: int, groups: int | None, channels: int | None
) -> tuple[int, int, int]:
    """Return heads, groups and channels of attention, checked and with their defaults."""
    heads = arguments.check_size("num_attention_heads", heads, minimum=1)
    channels = arguments.check_size("kv_channels", channels, minimum=1, optional=True)
    if channels is None:
        if hidden_size % heads:
            raise ValueError(
                f"num_attention_heads must divide hidden_size {hidden_size}; got {heads}. Choose a "
                "divisor, or give kv_channels."
            )
        channels = hidden_size // heads
    return heads, check_groups(heads, groups), channels


class MultiheadAttention(nn.Module, parallel.ContextParallelModule):
    """Query, key and value projections, attention, output projection; FP8 inside ``autocast``.

    Shape: input and output ``[S, B, hidden_size]`` (sbhd), ``[B, S, hidden_size]`` (bshd) or
    ``[T, hidden_size]`` (thd). With ``sequence_parallel`` they and ``encoder_output`` hold a
    rank's shard of the first dimension; attention takes all tokens, for the heads of the rank.

    Submodules and parameters: ``qkv`` (``layernorm_qkv`` with ``input_layernorm``), in cross
    attention ``query_layer`` (``layernorm_query``) and ``key_value``; ``q_norm`` and ``k_norm``
    with ``qk_norm_type``; ``core_attention``, a ``DotProductAttention``; ``proj``. Weights of the
    projections are ``query_weight``, ``key_weight`` and ``value_weight``, or one ``weight`` with
    ``fuse_qkv_params``.

    Args:
        hidden_size: size of each token.
        num_attention_heads: query heads.
        kv_channels: size of a head; None is ``hidden_size / num_attention_heads``.
        init_method: init method of q, k and v weights; None is normal, standard deviation 0.023.
        output_layer_init_method: init method of the weight of ``proj``.
        layer_number: the number of the layer in its model, from 1, for ``inference_params``.
        tp_group: the tensor-parallel ranks; None: ``set_tensor_parallel_group`` comes later.
        tp_size: the number of these ranks, if ``tp_group`` is None; it divides ``num_gqa_groups``.
        num_gqa_groups: key/value heads; None is ``num_attention_heads``.
        fuse_wgrad_accumulation: as in ``Linear``; for the projections of query, key and value it
            needs ``fuse_qkv_params``.
        sequence_parallel: as in ``DotProductAttention``, ``Linear`` and ``LayerNorm``.
        return_bias: do not add the bias of ``proj``; return it after the output.
        return_layernorm_output: return the input norm's output last.
        input_layernorm: normalize the input first.
        attention_type: "self", or "cross" for keys and values from ``encoder_output``.
        set_parallel_mode: shard the heads over the tensor-parallel ranks: the projections of
            query, key and value are column parallel, ``proj`` is row parallel. Without it every
            rank has all of the module.
        fuse_qkv_params: one parameter for query, key and value (in cross attention: key and value).
        qkv_weight_interleaved: with ``fuse_qkv_params``, order the rows of the weight by groups,
            with each group's query heads, key head and value head together. False: all queries, all
            keys, all values (on a rank: its queries, its keys, its values). Without
            ``fuse_qkv_params`` it is always False.
        bias: whether all projections have biases.
        rotary_pos_interleaved: whether the rotary angles are interleaved.
        qk_norm_type: norm of each query and key head: ``L2Normalization``, ``RMSNorm``,
            ``LayerNorm`` or None. Its parameters have partial gradients if ranks have different
            heads, as with ``sequence_parallel``.
        qk_norm_eps: the epsilon of that norm.
        qk_norm_before_rope: normalize before the rotary embedding, not after it.

    The other arguments are those of ``DotProductAttention``, and of ``LayerNormLinear`` with
    ``layernorm_epsilon`` for ``eps``.

    Raises:
        ValueError: sizes or names do not fit together.

    >>> attention = float8lab.MultiheadAttention(64, 4, qkv_format="bshd", device="cpu")
    >>> attention(torch.randn(2, 5, 64)).shape
    torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: GetRngStateTracker | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        *,
        rotary_pos_interleaved: bool = False,
        softmax_scale: float | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        **ub: Unpack[parallel.OverlapArguments],
    ) -> None:
        super().__init__()
        arguments.check_choice("qkv_format", qkv_format, QKV_FORMATS)
        arguments.check_flags(
            return_bias=return_bias, return_layernorm_output=return_layernorm_output,
            input_layernorm=input_layernorm, set_parallel_mode=set_parallel_mode,
            fuse_qkv_params=fuse_qkv_params, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            zero_centered_gamma=zero_centered_gamma, qkv_weight_interleaved=qkv_weight_interleaved,
            bias=bias, rotary_pos_interleaved=rotary_pos_interleaved,
            qk_norm_before_rope=qk_norm_before_rope,
        )  # fmt: skip
        arguments.check_callables(
            ("weight",), init_method=init_method, output_layer_init_method=output_layer_init_method
        )
        check_norm(normalization, "layernorm_epsilon", layernorm_epsilon)
        arguments.check_choice("qk_norm_type", qk_norm_type, (*QK_NORMS, None))
        qk_norm_eps = arguments.check_number("qk_norm_eps", qk_norm_eps, minimum=0)
        self.hidden_size = hidden_size = arguments.check_size("hidden_size", hidden_size, minimum=1)
        self.num_attention_heads, self.num_gqa_groups, self.kv_channels = _check_sizes(
            hidden_size, num_attention_heads, num_gqa_groups, kv_channels
        )
        heads, channels = self.num_attention_heads, self.kv_channels
        if return_layernorm_output and not input_layernorm:
            raise ValueError(
                "return_layernorm_output must be False without input_layernorm; got True. There "
                "is no norm: set input_layernorm=True."
            )
        if fuse_wgrad_accumulation and not fuse_qkv_params:
            raise ValueError(
                "fuse_wgrad_accumulation must be False without fuse_qkv_params; got True. The "
                "weight gradient is of one parameter: set fuse_qkv_params=True."
            )
        self.overlap = parallel.overlap_of("MultiheadAttention", ub)
        ranks = parallel.parallel_size(tp_size, tp_group, "column" if set_parallel_mode else None)
        self.tp_size, self.tp_group = ranks, tp_group
        self.qkv_format = qkv_format
        self.attn_mask_type = canonical_mask_type(attn_mask_type)
        self.attention_type = attention_type
        self.input_layernorm = input_layernorm
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.layer_number = layer_number
        self.fuse_qkv_params = fuse_qkv_params
        self.qkv_weight_interleaved = fuse_qkv_params and qkv_weight_interleaved
        self.set_parallel_mode = set_parallel_mode
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.core_attention = DotProductAttention(
            heads, channels, num_gqa_groups=num_gqa_groups,
            attention_dropout=attention_dropout, qkv_format=qkv_format,
            attn_mask_type=attn_mask_type, window_size=window_size,
            sequence_parallel=sequence_parallel, tp_size=ranks,
            get_rng_state_tracker=get_rng_state_tracker,
            tp_group=tp_group if set_parallel_mode else None, layer_number=layer_number,
            attention_type=attention_type, softmax_scale=softmax_scale, softmax_type=softmax_type,
        )  # fmt: skip
        common: dict[str, Any] = {
            "bias": bias, "device": device, "params_dtype": params_dtype, "tp_group": tp_group,
            "tp_size": tp_size, "sequence_parallel": sequence_parallel,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation, **ub,
        }  # fmt: skip
        norm: dict[str, Any] = {
            "eps": layernorm_epsilon, "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
        }  # fmt: skip
        column, row = ("column", "row") if set_parallel_mode else (None, None)
        columns = {**common, "init_method": init_method, "parallel_mode": column}
        self._add_projections(columns, {**columns, **norm} if input_layernorm else columns)
        self.proj = Linear(
            heads * channels, hidden_size, return_bias=return_bias,
            init_method=output_layer_init_method, parallel_mode=row, **common,
        )  # fmt: skip
        self.core_attention.to(self.proj.weight.device)
        self.qk_norm_before_rope = qk_norm_before_rope
        self.q_norm = self.k_norm = None
        if qk_norm_type is not None:
            self.q_norm, self.k_norm = (
                QK_NORMS[qk_norm_type](
                    channels, eps=qk_norm_eps, sequence_parallel=set_parallel_mode and ranks > 1,
                    params_dtype=params_dtype, device=device,
                )
                for _ in range(2)
            )  # fmt: skip
        self.register_load_state_dict_pre_hook(parallel.ignore_extra_state)

    def _add_projections(self, options: dict[str, Any], with_norm: dict[str, Any]) -> None:
        """Add the projections; the first one has the options ``with_norm``."""
        q_size = self.num_attention_heads * self.kv_channels
        keys_and_values = dict.fromkeys(("key", "value"), self.num_gqa_groups * self.kv_channels)
        if self.attention_type == "self":
            name = "layernorm_qkv" if self.input_layernorm else "qkv"
            self.add_module(name, self._projection(with_norm, query=q_size, **keys_and_values))
            return
        name = "layernorm_query" if self.input_layernorm else "query_layer"
        self.add_module(name, self._projection(with_norm, query=q_size))
        self.key_value = self._projection(options, **keys_and_values)

    def _projection(self, options: dict[str, Any], **sizes: int) -> Linear | LayerNormLinear:
        """Make the layer with these options whose output has pieces of these sizes, by name."""
        kind: type[Linear | LayerNormLinear] = (
            LayerNormLinear if "normalization" in options else Linear
        )
        split: dict[str, int] | None = sizes
        if self.fuse_qkv_params:
            split = None if self.qkv_weight_interleaved else JoinedSplit(sizes)
        return kind(self.hidden_size, sum(sizes.values()), parameters_split=split, **options)

    def reset_parameters(self) -> None:
        """Initialise the projections, like ``Linear.reset_parameters``."""
        reset_children(self)
        self.core_attention.to(self.proj.weight.device)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: MaskArgument = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: RotaryArgument = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
    ) -> Any:
        """Compute attention with its projections.

        Args:
            hidden_states: the tokens in ``qkv_format``, ``hidden_size`` last.
            encoder_output: in cross attention, the source of keys and values.
            is_first_microbatch: as in ``Linear.forward``.
            inference_params: key/value cache, in self attention only.
            rotary_pos_emb: angles from position 0 on, for all positions that the call reaches.

        The other arguments are those of ``DotProductAttention.forward``.

        Returns:
            The output; or a tuple of the output, the bias of ``proj`` with ``return_bias``, and the
            input norm's output with ``return_layernorm_output``.
        """
        arguments.check_flags(
            checkpoint_core_attention=checkpoint_core_attention, fast_zero_fill=fast_zero_fill
        )
        lengths = Lengths(
            cu_seqlens_q, cu_seqlens_kv, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv
        ).beside(inference_params)
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        rules = self.core_attention.rules_of_call(None, mask_type, window_size)
        angles = _angles_of(rotary_pos_emb)
        bias = core_attention_bias_type, core_attention_bias, alibi_slopes
        self.check_arguments(
            hidden_states, encoder_output, rules, attention_mask, lengths, inference_params,
            angles=angles, bias=bias,
        )  # fmt: skip
        (query, key, value), normed = self._project(
            hidden_states, encoder_output, is_first_microbatch
        )
        if self.qk_norm_before_rope:
            query, key = self._normalized(query, key)
        if angles is not None:
            cu_seqlens_q, cu_seqlens_k = lengths.cu_seqlens_q, lengths.cu_seqlens_of_keys
            waves = self._waves_of(query, angles[0], inference_params, cu_seqlens_q)
            interleaved = self.rotary_pos_interleaved
            query = rotary.rotate_heads(query, waves, self.qkv_format, interleaved=interleaved)
            are_same = angles[0] is angles[1] and cu_seqlens_k is cu_seqlens_q
            if not are_same or self.attention_type == "cross":
                waves = self._waves_of(key, angles[1], inference_params, cu_seqlens_k)
            key = rotary.rotate_heads(key, waves, self.qkv_format, interleaved=interleaved)
            # A view would keep the memory of the unrotated query and key until backward.
            value = value.contiguous() if torch.is_grad_enabled() else value
        if not self.qk_norm_before_rope:
            query, key = self._normalized(query, key)
        context = self.core_attention(
            query, key, value, attention_mask, attn_mask_type=mask_type, window_size=window_size,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes,
            fast_zero_fill=fast_zero_fill, inference_params=inference_params,
            **lengths._asdict(),
        )  # fmt: skip
        projected: Any = self.proj(context, is_first_microbatch)
        outputs = list(projected) if self.return_bias else [projected]
        if self.return_layernorm_output:
            outputs.append(normed)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def check_arguments(
        self, hidden_states: Tensor, encoder_output: Tensor | None, rules: Rules,
        attention_mask: MaskArgument, lengths: Lengths,
        inference_params: InferenceParams | None = None,
        angles: tuple[Tensor, Tensor] | None = None,
        bias: BiasArguments = ("no_bias", None, None), mask_name: str = "attention_mask",
    ) -> None:  # fmt: skip
        """Raise for arguments that a call does not take, before any state changes.
        ``angles`` are ``rotary_pos_emb`` for queries and keys; the others are those of
        ``DotProductAttention.check_arguments``.
        """
        if self.attention_type == "cross" and inference_params is not None:
            raise NotImplementedError(
                "inference_params must be None in cross attention; got a cache. Keys and values "
                "of the encoder are computed from encoder_output in each call."
            )
        ndim = 2 if self.qkv_format == "thd" else 3
        size = (self.hidden_size,)
        arguments.check_input("hidden_states", hidden_states, size, "hidden_size", ndim=ndim)
        key_source = self._check_encoder_output(hidden_states, encoder_output)
        ranks = 1 if self.context_parallel is None else self.context_parallel.ranks.size
        sizes = sizes_of(hidden_states, key_source, self.qkv_format, ranks)
        if self.qkv_format != "thd" and key_source.shape[int(self.qkv_format == "sbhd")] != sizes.B:
            raise ValueError(
                f"encoder_output must have the {sizes.B} sequences of hidden_states; got shape "
                f"{tuple(key_source.shape)}. Check the format, {self.qkv_format}."
            )
        known_sizes = None if self.core_attention.sequence_parallel and self.tp_size > 1 else sizes
        given = Given(rules, attention_mask, lengths, bias, inference_params)
        self.core_attention.check_arguments(given, known_sizes, mask_name)
        for freqs, tokens in zip(angles or (), sizes[1:], strict=False):
            rotary.check_angles("rotary_pos_emb", freqs, self.kv_channels)
            if known_sizes is not None and (self.qkv_format, inference_params) != ("thd", None):
                reached = positions_reached(tokens, inference_params)
                rotary.check_positions("rotary_pos_emb", freqs, reached)

    def _check_encoder_output(self, hidden_states: Tensor, encoder_output: Tensor | None) -> Tensor:
        """Return the tensor that keys and values are computed from, or raise."""
        if self.attention_type == "self":
            if encoder_output is not None:
                got = arguments.shown(encoder_output)
                raise ValueError(
                    f"encoder_output must be None in self attention; got {got}. Set "
                    "attention_type='cross' to attend to it."
                )
            return hidden_states
        if encoder_output is None:
            raise ValueError(
                "encoder_output must be given in cross attention; got None. Pass what keys and "
                "values are made of."
            )
        size, ndim = (self.hidden_size,), hidden_states.ndim
        arguments.check_input("encoder_output", encoder_output, size, "hidden_size", ndim=ndim)
        return encoder_output

    def _project(
        self, x: Tensor, encoder_output: Tensor | None, is_first_microbatch: bool | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """Return query, key and value by heads, and the norm's output if the call returns it."""
        core, is_self = self.core_attention, self.attention_type == "self"
        H, G = core.num_attention_heads_per_partition, core.num_gqa_groups_per_partition
        if self.input_layernorm:
            layer: Any = self.layernorm_qkv if is_self else self.layernorm_query
        else:
            layer = self.qkv if is_self else self.query_layer
        mixed: Any = layer(x, is_first_microbatch)
        mixed, normed = mixed if self.return_layernorm_output else (mixed, None)
        if is_self:
            queries, keys, values = self._split(mixed, H, G, G)
            return (queries, keys, values), normed
        key_value = self.key_value(encoder_output, is_first_microbatch).to(mixed.dtype)
        keys, values = self._split(key_value, G, G)
        return (mixed.unflatten(-1, (H, self.kv_channels)), keys, values), normed

    def _split(self, mixed: Tensor, *heads: int) -> Sequence[Tensor]:
        """Split a projection's output into views, each with the given number of heads."""
        heads_last = mixed.unflatten(-1, (sum(heads), self.kv_channels))
        if not self.qkv_weight_interleaved:
            return heads_last.split(heads, dim=-2)
        groups = heads[-1]
        grouped = heads_last.unflatten(-2, (groups, -1)).split([n // groups for n in heads], dim=-2)
        return [x.flatten(-3, -2) for x in grouped]

    def _normalized(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)

    def _waves_of(
        self, x: Tensor, angles: Tensor, inference_params: InferenceParams | None,
        cu_seqlens: Tensor | None,
    ) -> rotary.Waves:  # fmt: skip
        start, context = None, self.context_parallel
        is_packed = self.qkv_format == "thd"
        if inference_params is not None:
            if (sequences := inference_params.sequences(x.device)) is None:
                angles = angles[inference_params.sequence_len_offset :]
            else:
                start = sequences[1]
                cu_seqlens = F.pad(sequences[2].cumsum(0), (1, 0)).int() if is_packed else None
        return rotary.waves_of(
            x, angles, self.qkv_format, start_positions=start, name="rotary_pos_emb",
            cu_seqlens=cu_seqlens if is_packed else None,
            ranks=ONE_RANK if context is None else context.ranks,
        )  # fmt: skip
