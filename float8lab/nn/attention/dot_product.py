"""DotProductAttention: softmax(q @ k.T) @ v in all the variants transformers use."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from float8lab import ops
from float8lab.arguments import (
    check_callables,
    check_choice,
    check_flags,
    check_instance,
    check_lengths,
    check_names,
    check_number,
    check_size,
    shown,
)
from float8lab.distributed.comm import NoGroup, TensorParallel
from float8lab.distributed.context_parallel import (
    DUAL_CHUNK_SWAP,
    ContextParallel,
    CPAttentionLoadBalancingStrategy,
)
from float8lab.distributed.recompute import checkpoint
from float8lab.nn import parallel
from float8lab.nn.attention import arguments, layout, masks
from float8lab.nn.attention.backends import (
    BACKENDS,
    MOST_SCORES,
    Attended,
    Explanation,
    Problem,
    attend,
    explain,
)
from float8lab.nn.attention.bias import (
    Alibi,
    alibi_slopes,
    check_bias,
    check_bias_shape,
    check_softcap,
)
from float8lab.nn.attention.fp8 import AttentionPrecision, fp8_attention, why_not_fp8
from float8lab.nn.attention.inference import InferenceParams
from float8lab.nn.attention.ring import ring_attention, takes_ring
from float8lab.nn.parameters import GetRngStateTracker, default_device, materialize
from float8lab.tensor.differentiation import is_exporting

__all__ = ["SOFTMAX_TYPES", "DotProductAttention", "check_groups"]

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


def check_groups(heads: int, num_gqa_groups: int | None) -> int:
    """Return the number of key/value heads, checked; None stands for as many as query heads."""
    groups: int = check_size(
        "num_gqa_groups", heads if num_gqa_groups is None else num_gqa_groups, minimum=1
    )
    if heads % groups:
        raise ValueError(
            f"num_gqa_groups must divide num_attention_heads {heads}; got {groups}. Choose a "
            "divisor."
        )
    return groups


class DotProductAttention(nn.Module, parallel.ContextParallelModule):
    """``dropout(softmax(q @ k.T * scale + bias)) @ v`` with masks, grouped heads and FP8.

    Shape: query ``[S, B, H, D]`` (sbhd), ``[B, S, H, D]`` (bshd) or ``[T, H, D]`` (thd); key and
    value the same with G heads and their own sequence length; output ``[S, B, H * Dv]``,
    ``[B, S, H * Dv]`` or ``[T, H * Dv]``. Query head h uses key/value head ``h // (H / G)``. With
    R tensor-parallel ranks, each rank has H / R query heads and G / R key/value heads of the full
    sequence, in the order of the ranks; ranks send only amaxes, in FP8.

    Numerics: softmax in float32. A query that is padding or sees no key gives 0. Inside
    ``autocast`` with a recipe that has ``fp8_dpa=True`` or ``fp8_mha=True``, the GEMMs
    run on FP8 operands (docs/modules/attention.md); float64 inputs stay in high precision.

    Args:
        num_attention_heads: H.
        kv_channels: D; a pair is D of query and key, and Dv of value.
        num_gqa_groups: G, which divides H; None is H.
        attention_dropout: dropout rate of the probabilities, in training mode.
        qkv_format: sbhd, bshd or thd.
        attn_mask_type: ``no_mask``, ``padding``, ``causal``, ``padding_causal`` (also spelled
            ``padding,causal`` and ``causal,padding``), ``causal_bottom_right``,
            ``padding_causal_bottom_right`` or ``arbitrary``. ``causal`` aligns query 0 to key 0; a
            bottom-right mask aligns the last query to the last key.
        window_size: ``(left, right)``: query i sees the keys from ``i + d - left`` to
            ``i + d + right``, with ``d = Sk - Sq`` (0 for ``causal`` and ``padding_causal``; with
            padding, Sk and Sq count without it); -1 is no limit. A causal mask ignores ``right``.
        sequence_parallel: tokens are shards, and the model runs its layers under a stream that
            differs between ranks: dropout uses the default generator, not the tracker.
        tp_size: R, which divides G.
        get_rng_state_tracker: returns a tracker under whose ``fork()`` dropout runs, so that it
            differs on tensor-parallel ranks.
        tp_group: the R ranks; needed for ALiBi and FP8 attention, and may come later.
        layer_number: the layer's number in ``inference_params``.
        attention_type: "self" or "cross": a padding ``attention_mask`` is a tensor or a pair.
        cp_group: the ranks that share each sequence's tokens, as ``shard_sequence`` gives them;
            tensors hold a rank's tokens, but masks, biases and cumulative lengths are those of
            unsharded sequences. Results are those of a single rank.
        cp_global_ranks: no effect, like ``cp_stream``.
        cp_comm_type: see ``set_context_parallel_group``, also for ``load_balancing_strategy``.
        softmax_scale: the scale of the scores; None is ``D ** -0.5``.
        softmax_type: ``vanilla``; ``off-by-one``: ``exp(scores) / (1 + sum(exp(scores)))``;
            ``learnable``: the 1 is ``exp`` of the head's number in the parameter
            ``softmax_offset``, ``[H / R]`` float32, which starts at 0.
        return_max_logit: after the output, return the largest score of each head, ``[H / R]``
            float32, after scale, softcap, bias and mask; -inf where no query sees a key. It has
            no gradient if context-parallel ranks share the heads.
        backends: names from ``float8lab.nn.attention.BACKENDS``, which are tried in this order.

    Raises:
        ValueError: sizes, names or arguments do not fit together.

    >>> attention = float8lab.DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="bshd")
    >>> q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 16)
    >>> attention(q, k, v).shape
    torch.Size([2, 5, 64])
    """

    _casts_only = True
    softmax_offset: nn.Parameter | None

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: GetRngStateTracker | None = None,
        tp_group: ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: ProcessGroup | None = None,
        cp_global_ranks: Sequence[int] | None = None,
        cp_stream: object = None,
        cp_comm_type: str | None = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        *,
        load_balancing_strategy: CPAttentionLoadBalancingStrategy | str = DUAL_CHUNK_SWAP,
        backends: Sequence[str] = BACKENDS,
    ) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(parallel.ignore_extra_state)
        check_choice("qkv_format", qkv_format, layout.QKV_FORMATS)
        check_flags(sequence_parallel=sequence_parallel, return_max_logit=return_max_logit)
        check_choice("softmax_type", softmax_type, SOFTMAX_TYPES)
        check_callables((), get_rng_state_tracker=get_rng_state_tracker)
        check_choice("attention_type", attention_type, ("self", "cross"))
        self.num_attention_heads = check_size("num_attention_heads", num_attention_heads, minimum=1)
        self.num_gqa_groups = check_groups(self.num_attention_heads, num_gqa_groups)
        self.tp_size = parallel.parallel_size(tp_size, tp_group, "column")
        # A rank has complete groups: a key/value head with all its query heads. If several ranks
        # shared a head, each would compute it, and have a partial gradient of it.
        local_groups = parallel.share_of("num_gqa_groups", self.num_gqa_groups, self.tp_size)
        local_heads = self.num_attention_heads // self.tp_size
        attention_dropout = check_number("attention_dropout", attention_dropout, minimum=0, below=1)
        names = check_names("backends", backends)
        if isinstance(backends, str) or not names or not set(names) <= set(BACKENDS):
            kind = TypeError if isinstance(backends, str) else ValueError
            raise kind(
                f"backends must be names from {BACKENDS}; got {shown(backends)}. "
                "Pass a tuple of at least one."
            )
        is_pair = isinstance(kv_channels, (list, tuple)) and len(kv_channels) == 2
        channels: Any = kv_channels if is_pair else (kv_channels, kv_channels)
        pair = tuple(check_size("kv_channels", size, minimum=1) for size in channels)
        self.num_attention_heads_per_partition = local_heads
        self.num_gqa_groups_per_partition = local_groups
        self.qk_channels, self.v_channels = pair
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = masks.canonical_mask_type(attn_mask_type)
        self.window_size = window_size
        masks.window_of(self.attn_mask_type, window_size)
        self.sequence_parallel = sequence_parallel
        self.get_rng_state_tracker = get_rng_state_tracker
        self.layer_number = check_size("layer_number", layer_number, minimum=1, optional=True)
        self.attention_type = attention_type
        scale = check_number("softmax_scale", softmax_scale, above=0, optional=True)
        self.softmax_scale = pair[0] ** -0.5 if scale is None else scale
        self.softmax_type = softmax_type
        self.return_max_logit = return_max_logit
        self.register_parameter("softmax_offset", None)
        if softmax_type == "learnable":
            offset = torch.zeros(local_heads, dtype=torch.float32, device=default_device())
            self.softmax_offset = nn.Parameter(offset)
            if self.tp_size > 1:
                parallel.mark_shard(self.softmax_offset, 0)
        self.backends = names
        self._fp8 = AttentionPrecision()
        self._warned: set[str] = set()
        self.set_tensor_parallel_group(tp_group)
        self.set_context_parallel_group(
            cp_group, cp_global_ranks, cp_stream, cp_comm_type, load_balancing_strategy
        )

    def reset_parameters(self) -> None:
        """Set ``softmax_offset`` to 0, if there is one."""
        if self.softmax_offset is not None:
            materialize(self)
            nn.init.zeros_(self.softmax_offset)

    def _check_context(self, context: ContextParallel | None) -> None:
        if context is not None:
            heads = self.num_attention_heads_per_partition
            context.check_heads(heads, self.num_gqa_groups_per_partition)

    def _set_context(self) -> None:
        self._fp8.set_parallel(self._make_parallel("heads", (), False))  # type: ignore[arg-type]  # or NoGroup

    def _make_parallel(
        self, mode: str, sizes: Sequence[int], keep_gathered: bool
    ) -> TensorParallel | NoGroup | None:
        """Return how ranks of tensor and of context parallelism share the scales."""
        sharing = super()._make_parallel(mode, sizes, keep_gathered)
        groups = () if self.context_parallel is None else self.context_parallel.groups
        if isinstance(sharing, TensorParallel):
            return replace(sharing, scale_groups=groups)
        if sharing is None and groups:
            return TensorParallel(groups[0], mode, casts_only=True, scale_groups=groups[1:])
        return sharing

    def _parallel_modes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {"_fp8": ("heads", ())} if self.tp_size > 1 else {}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        # The module may have no parameter, so an extra tensor tells to which device it moves.
        self._fp8.to(fn(torch.empty(0, device=self._fp8.handle.device)).device)
        return result

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: masks.MaskArgument = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        *,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        pad_between_seqs: bool | None = None,
        softcap: float = 0.0,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute attention.

        Args:
            query_layer: the query in ``qkv_format``, like key_layer and value_layer.
            key_layer: the key, with G heads.
            value_layer: the value, with G heads.
            attention_mask: bool, True where masked out. For padding masks ``[B, 1, 1, S]``, a pair
                of them for cross attention; for ``arbitrary``, a tensor that broadcasts to
                ``[B, H, Sq, Sk]``. Other mask types do not use it, and warn.
            qkv_format: overrides the constructor's argument.
            cu_seqlens_q: ``[B + 1]`` cumulative lengths of the query sequences: for thd, and for
                padding masks instead of ``attention_mask``.
            cu_seqlens_kv: the same for key and value; None is ``cu_seqlens_q`` in self attention.
            max_seqlen_q: for thd, the longest sequence, computed if None; unused otherwise.
            max_seqlen_kv: the same for key and value.
            attn_mask_type: overrides the constructor's argument.
            window_size: overrides the constructor's argument.
            checkpoint_core_attention: recompute the attention in backward, to save memory.
            core_attention_bias_type: ``no_bias``; ``pre_scale_bias``: the bias is added before the
                scores are scaled; ``post_scale_bias``: it is added afterwards; ``alibi``.
            core_attention_bias: broadcasts to ``[B, H, Sq, Sk]``; may require a gradient. Each
                tensor-parallel rank passes the bias of its own heads.
            alibi_slopes: ``[H]`` or ``[B, H]``; ``-slope * abs(i + Sk - Sq - j)`` is added to the
                scaled score of query i and key j. None is the usual geometric sequence. Each
                tensor-parallel rank passes the slopes of its own heads.
            fast_zero_fill: no effect: values that are not computed are always 0.
            inference_params: key/value cache: keys and values are added to it, and queries attend
                to everything in it. After ``pre_step``, ``cu_seqlens_q`` may repeat its lengths.
            cu_seqlens_q_padded: ``[B + 1]``, the starts of sequences, for thd with gaps after them.
            cu_seqlens_kv_padded: the same for key and value; if it and ``cu_seqlens_kv`` are None,
                ``cu_seqlens_q_padded``.
            pad_between_seqs: whether there are unused tokens between the sequences of thd; None
                and False use ``cu_seqlens_*_padded`` if given, and True requires them.
            softcap: scaled scores become ``softcap * tanh(scores / softcap)``, before a bias is
                added; 0 leaves them unchanged.
            qkv_layer: query, key and value in one tensor, instead of these three arguments.
            kv_layer: key and value in one tensor, instead of these two arguments.
            qkv_interleave_dim: the dimension along which a packed tensor stacks query, key and
                value: -3, ``[..., 3, H, D]``, or -2, ``[..., H, 3, D]`` (2 for ``kv_layer``).

        Returns:
            ``[S, B, H * Dv]``, ``[B, S, H * Dv]`` or ``[T, H * Dv]``; with ``return_max_logit`` a
            pair of this output and the largest score of each head.
        """
        if is_exporting():
            arguments.check_export(inference_params, qkv_format or self.qkv_format)
        check_flags(
            checkpoint_core_attention=checkpoint_core_attention, fast_zero_fill=fast_zero_fill,
            pad_between_seqs=pad_between_seqs is not None and pad_between_seqs,
        )  # fmt: skip
        rules = self.rules_of_call(qkv_format, attn_mask_type, window_size)
        qkv = arguments.unpacked(
            (query_layer, key_layer, value_layer), qkv_layer, kv_layer, qkv_interleave_dim
        )
        lengths = arguments.Lengths(
            cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q,
            max_seqlen_kv,
        ).beside(inference_params)  # fmt: skip
        if pad_between_seqs:
            why = "pad_between_seqs=True"
            check_lengths("cu_seqlens_q_padded", cu_seqlens_q_padded, why=why)
            check_lengths("cu_seqlens_kv_padded", lengths.padded_of_keys, why=why)
        bias = core_attention_bias_type, core_attention_bias, alibi_slopes
        given = arguments.Given(rules, attention_mask, lengths, bias, inference_params)
        request = self._resolve(qkv, given, softcap)
        q, k, v, problem = request[:4]
        if request.attend is not None:
            out, largest = request.attend(q), None
        elif checkpoint_core_attention and torch.is_grad_enabled():
            core, tracker = partial(self._core, problem=problem), self._tracker(problem.dropout)
            out, largest = checkpoint(
                core, q, k, v, get_rng_state_tracker=tracker, use_reentrant=False
            )
        else:
            out, largest = self._core(q, k, v, problem)
        out = out if request.repack is None else request.repack(out)
        out = layout.from_heads_first(out, rules.qkv_format)
        out = out if request.leave is None else request.leave(out)
        if largest is None:
            return out
        return out, largest if problem.context is None else problem.context.all_heads(largest)

    def explain(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        *,
        attention_mask: masks.MaskArgument = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        softcap: float = 0.0,
    ) -> Explanation:
        """Return which backend a call with these arguments gets, and why not the other backends.

        The arguments are those of ``forward`` that matter for this choice. Instead of a cache, pass
        the keys and values that it holds.

        >>> attention = float8lab.DotProductAttention(2, 8, window_size=(3, 0))
        >>> attention.explain(*torch.randn(3, 5, 1, 2, 8))
        backend: sdpa_masked
          not fp8: no autocast is active with a recipe that has fp8_dpa or fp8_mha
          not sdpa: the sliding window (3, 0) must be a matrix to it
          not flex: it is fused on CUDA only
        """
        lengths = arguments.Lengths(
            cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q,
            max_seqlen_kv,
        )  # fmt: skip
        rules = self.rules_of_call(qkv_format, attn_mask_type, window_size)
        bias = core_attention_bias_type, core_attention_bias, alibi_slopes
        given = arguments.Given(rules, attention_mask, lengths, bias)
        request = self._resolve((query_layer, key_layer, value_layer), given, softcap, asks=True)
        q, k, v, problem = request[:4]
        why: str | None = "no autocast is active with a recipe that has fp8_dpa or fp8_mha"
        if self._fp8.active_recipe() is not None:
            why = why_not_fp8(q, k, v, problem, self._fp8)
        if why is None:
            return Explanation("fp8", dict.fromkeys(self.backends, "the recipe asks for FP8"))
        reasons = explain(q, k, v, problem, self.backends)
        return reasons._replace(rejected={"fp8": why, **reasons.rejected})

    def _core(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Attended:
        why = why_not_fp8(q, k, v, problem, self._fp8)
        call = self._fp8.begin(q, k, training=self.training) if why is None else None
        if why is not None and self._fp8.active_recipe() is not None:
            self._warn_once(
                "high precision",
                "the recipe asks for FP8 attention, and this DotProductAttention runs in high "
                f"precision, where a call is not for the FP8 kernel: {why}. A recipe with "
                "fp8_dpa=False is silent.",
            )
        tracker = self._tracker(problem.dropout)
        with contextlib.nullcontext() if tracker is None else tracker().fork():
            if call is None and why is None:
                self._fp8.calibrate(q, k, v)
            if problem.context is not None and problem.context.share_tokens.size > 1:
                out, largest = ring_attention(q, k, v, problem, problem.context, call), None
            elif call is None:
                return self._attend(q, k, v, problem)
            else:
                out, largest = fp8_attention(q, k, v, problem, call)
        if call is not None and call.is_region:
            self._fp8.end(call)
        return out, largest

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Attended:
        """Compute attention in high precision, by the first backend that takes the call."""
        chosen = explain(q, k, v, problem, self.backends)
        if chosen.block is not None:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in chosen.rejected.items())
            self._warn_once(
                "blocks",
                f"this DotProductAttention runs by the backend {chosen.backend!r}, {chosen.block} "
                f"queries at a time: for all of them it would hold more than {MOST_SCORES} scores. "
                f"A fused kernel is faster ({reasons}).",
            )
        return attend(q, k, v, problem, chosen)

    def _warn_once(self, subject: str, text: str) -> None:
        if not torch.compiler.is_compiling() and subject not in self._warned:
            self._warned.add(subject)
            text += " explain() says what a call gets (said once per module)."
            warnings.warn(text, stacklevel=3)

    def _tracker(self, dropout: float) -> Any:
        """Return the function that returns the tracker of a call's dropout, or None."""
        return self.get_rng_state_tracker if dropout and not self.sequence_parallel else None

    def _resolve(
        self, qkv: tuple[Tensor, Tensor, Tensor], given: arguments.Given, softcap: float,
        *, asks: bool = False,
    ) -> arguments.Request:  # fmt: skip
        """Check the arguments of a call and resolve them to a request.

        With a cache, keys and values are added to it; the request attends to all its contents.
        """
        # With ``asks``, tensors of other context-parallel ranks have shapes but no values.
        rules, cache = given.rules, given.inference_params
        softcap = check_softcap(softcap, given.bias[0])
        heads, groups = self.num_attention_heads_per_partition, self.num_gqa_groups_per_partition
        D, Dv = self.qk_channels, self.v_channels
        arguments.check_tensors(qkv, [(heads, D), (groups, D), (groups, Dv)], rules.qkv_format)
        ranks = 1 if self.context_parallel is None else self.context_parallel.ranks.size
        sizes = layout.sizes_of(*qkv[:2], rules.qkv_format, ranks)
        self.check_arguments(given, sizes)
        qkv, packed, leave, repack = arguments.tensors_of(qkv), None, None, None
        if (context := self._context_of_call(qkv, given, sizes, softcap)) is not None:
            qkv, leave = self._exchange(context, qkv, given, asks)
            bias_type, bias, alibi_slopes = given.bias
            local = context.local_heads(bias, -3), context.local_heads(alibi_slopes, -1)
            given = given._replace(bias=(bias_type, *local))
            if rules.mask_type == "arbitrary":
                given = given._replace(attention_mask=context.local_heads(given.attention_mask, -3))
        q, k, v = (layout.to_heads_first(x, rules.qkv_format) for x in qkv)
        if cache is not None:
            if rules.qkv_format == "thd":
                rows = cache.packed(q.device)
                repack = partial(rows.pack, tokens=q.shape[2])
                q, k, v = (rows.unpack(x) for x in (q, k, v))
            cached = cache.write(self._required_layer_number(), k, v)
            if self._reads_pages(q, k, given, softcap):
                plain = Problem(masks.NO_MASK, self.softmax_scale)
                attend = partial(cached.attend, window=rules.window, scale=self.softmax_scale)
                return arguments.Request(q, k, v, plain, None, attend, repack)
            k, v = cached.read(k.dtype)
        elif rules.qkv_format == "thd":
            packed = given.lengths.packed()
        mask, spans = arguments.mask_of(q, k.shape[2], given, self.attention_type, packed)
        bias_type, bias, alibi_slopes = given.bias
        if bias_type == "pre_scale_bias" and bias is not None:
            bias = bias * self.softmax_scale
        alibi = None
        if bias_type == "alibi":
            alibi = Alibi(self._slopes(alibi_slopes, context, q.device), spans)
        problem = Problem(
            mask, self.softmax_scale, bias, alibi, self._dropout, softcap,
            self._sink(context, q.device), self.return_max_logit, packed, context,
        )  # fmt: skip
        return arguments.Request(q, k, v, problem, leave, repack=repack)

    @property
    def _dropout(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def _reads_pages(self, q: Tensor, k: Tensor, given: arguments.Given, softcap: float) -> bool:
        """Whether a call attends to the cache's pages, rather than to tensors read from them."""
        asks_more = given.attention_mask, given.lengths.cu_seqlens_q, *given.bias[1:]
        if given.bias[0] != "no_bias" or softcap or any(x is not None for x in asks_more):
            return False
        has_gradient = torch.is_grad_enabled() and q.requires_grad
        rows = q.shape[1] // k.shape[1] * q.shape[2]
        fits = ops.has_paged_attention(rows, q.shape[3], self.v_channels)
        fits = fits and q.dtype != torch.float64 and self.backends == BACKENDS
        fits = fits and self.softmax_type == "vanilla" and not self.return_max_logit
        return fits and not (has_gradient or self._dropout or torch.compiler.is_compiling())

    def rules_of_call(
        self, qkv_format: str | None, mask_type: str | None, window_size: tuple[int, int] | None
    ) -> arguments.Rules:
        """Return the format, mask type and window of a call, or raise if they are invalid."""
        qkv_format = self.qkv_format if qkv_format is None else qkv_format
        check_choice("qkv_format", qkv_format, layout.QKV_FORMATS)
        default = self.attn_mask_type
        mask_type = default if mask_type is None else masks.canonical_mask_type(mask_type)
        window_size = self.window_size if window_size is None else window_size
        return arguments.Rules(qkv_format, mask_type, masks.window_of(mask_type, window_size))

    def check_arguments(
        self, given: arguments.Given, sizes: layout.Sizes | None, mask_name: str = "attention_mask"
    ) -> None:
        """Raise for arguments that a call does not take, before any state changes.
        ``sizes`` are those of the sequences of all ranks, or None if they are unknown yet;
        ``mask_name`` is the name of ``attention_mask`` in the caller's signature.
        """
        rules, attention_mask, lengths, bias, inference_params = given
        if bias[0] == "no_bias" and arguments.is_plain(
            rules, attention_mask, inference_params, *lengths, *bias[1:]
        ):
            return
        kind, noun = InferenceParams, "an InferenceParams"
        check_instance("inference_params", inference_params, kind, noun, optional=True)
        check_size("max_seqlen_q", lengths.max_seqlen_q, optional=True)
        check_size("max_seqlen_kv", lengths.max_seqlen_kv, optional=True)
        heads = self.num_attention_heads_per_partition
        check_bias(*bias)
        if inference_params is not None and self.context_parallel is not None:
            raise NotImplementedError(
                "inference_params must be None with a context-parallel group; got a cache. Call "
                "set_context_parallel_group(None) for inference."
            )
        if inference_params is not None and rules.qkv_format != "thd":
            self._required_layer_number()
            if sizes is not None:
                sizes = sizes._replace(Sk=inference_params.check_room(sizes.B, sizes.Sk))
        shares_tokens = self.context_parallel is not None
        any_shape = shares_tokens or inference_params is not None or torch.compiler.is_compiling()
        arguments.check_masking(
            given, self.attention_type, sizes, heads=heads, uses_every_mask=any_shape,
            name=mask_name,
        )  # fmt: skip
        if sizes is not None and rules.qkv_format != "thd":
            check_bias_shape(*bias[1:], (sizes.B, heads, sizes.Sq, sizes.Sk))

    def _exchange(
        self, context: ContextParallel, qkv: tuple[Tensor, Tensor, Tensor], given: arguments.Given,
        asks: bool,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Callable[[Tensor], Tensor] | None]:  # fmt: skip
        """Gather the tokens of the ranks that exchange heads, for this rank's heads; also return
        the function that exchanges results back to this rank's tokens."""
        dim, (query, key, value) = int(given.rules.qkv_format == "bshd"), qkv
        context.check_heads(query.shape[-2], key.shape[-2])
        starts = given.lengths.starts() if given.rules.qkv_format == "thd" else (None, None)
        queries, keys = (
            context.places(name, its, x.shape[dim], x.device)
            for name, x, its in zip(("query_layer", "key_layer"), (query, key), starts, strict=True)
        )
        if queries is None or keys is None:
            return qkv, None
        pairs = zip(qkv, (None,) * 3 if asks else (queries, keys, keys), strict=True)
        query, key, value = (context.full_sequence(x, dim, places) for x, places in pairs)

        def leave(out: Tensor) -> Tensor:
            heads = out.unflatten(-1, (-1, self.v_channels))
            return context.local_tokens(heads, dim, queries).flatten(-2)

        return (query, key, value), leave

    def _context_of_call(
        self, qkv: tuple[Tensor, Tensor, Tensor], given: arguments.Given, sizes: layout.Sizes,
        softcap: float,
    ) -> ContextParallel | None:  # fmt: skip
        """Return how ranks share a call: like the module, or by full sequences if needed."""
        if (context := self.context_parallel) is None:
            return None
        is_plain = given.bias[0] == "no_bias" and self.softmax_type == "vanilla"
        is_plain = is_plain and not (softcap or self._dropout or self.return_max_logit)
        if is_plain and takes_ring(qkv[0], qkv[2], given.rules, sizes, context.ranks.size):
            return context
        return context.with_whole_sequences()

    def _slopes(
        self, given: Tensor | None, context: ContextParallel | None, device: torch.device
    ) -> Tensor:
        """Return the slopes of ALiBi for this rank's heads; by default the usual slopes."""
        if given is not None:
            return given.to(device, torch.float32)
        sharing: Any = self._fp8.parallel
        slopes = alibi_slopes(self.num_attention_heads, device)
        slopes = slopes.chunk(self.tp_size)[sharing.rank if self.tp_size > 1 else 0]
        return slopes if context is None else context.local_heads(slopes, -1)

    def _sink(self, context: ContextParallel | None, device: torch.device) -> Tensor | None:
        """Return the score of the softmax's extra key without a value, for this rank's heads."""
        if self.softmax_type == "vanilla":
            return None
        offset, heads = self.softmax_offset, self.num_attention_heads_per_partition
        sink = torch.zeros(heads, device=device) if offset is None else offset.float()
        return sink if context is None else context.local_heads(sink, -1)

    def _required_layer_number(self) -> int:
        if self.layer_number is None:
            raise ValueError(
                "layer_number must be set for inference_params; got None. Give each layer its own "
                "number in the constructor."
            )
        return self.layer_number
