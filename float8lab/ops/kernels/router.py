"""Choose the experts of each token, and their probabilities, on the GPU.  T tokens, E experts.

A program has some tokens and all their experts. To find the best experts one by one, it makes keys
of scores: integers in the scores' order. Among equal scores, the first expert has the larger key.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.ops.kernels._common import ceil_div, next_power_of_2
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.reference import router as reference

_MOST_EXPERTS = 4096
_ELEMENTS = 1024
"""How many scores a program has, unless a single token has more."""

_LOWEST = tl.constexpr(-(2**63))
_NAN = tl.constexpr(0x7FC00000)
LEAST_SUM = tl.constexpr(reference.LEAST_SUM)


@triton.jit
def _keys(values, places, valid):
    """Return the keys of float32 ``values`` along the last dimension; NaN has the largest key."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    bits = tl.where(values != values, _NAN, bits)
    ordered = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)
    return tl.where(valid, keys, _LOWEST)


@triton.jit
def _value_of(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered >= 0, ordered, ordered ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _sigmoid(z):
    """Compute 1 / (1 + exp(-z)) from exp(-abs(z)), which is at most 1."""
    small = tl.exp(-tl.abs(z))
    return tl.div_rn(tl.where(z >= 0, 1.0, small), 1.0 + small)


@triton.jit
def _softplus(z):
    """Compute max(z, 0) + log1p(u), u = exp(-abs(z)), by a short series of 2 atanh(u / (2 + u))."""
    u = tl.exp(-tl.abs(z))
    s = tl.div_rn(u, 2.0 + u)
    q = s * s
    series = 1 / 15
    for odd in tl.static_range(13, 1, -2):
        series = series * q + 1 / odd
    return tl.maximum(z, 0.0) + 2.0 * (s * q * series + s)


@triton.jit
def _softmax(z, valid):
    z = tl.where(valid, z, -float("inf"))
    powers = tl.where(valid, tl.exp(z - tl.max(z, 1, keep_dims=True)), 0.0)
    return tl.div_rn(powers, tl.sum(powers, 1, keep_dims=True))


@triton.jit
def _scores(z, FUNCTION: tl.constexpr):
    """Compute scores by a function of one logit, which softmax is not."""
    return _sigmoid(z) if FUNCTION == "sigmoid" else tl.sqrt_rn(_softplus(z))


@triton.jit
def _in_best_groups(
    keys, group_of, groups, group_topk, best_of_group, TOKENS: tl.constexpr, BLOCK_G: tl.constexpr
):  # fmt: skip
    """Return which experts are in the groups whose best scores have the largest sums."""
    numbers = tl.arange(0, BLOCK_G)[None, :]
    group_sums = tl.zeros((TOKENS, BLOCK_G), dtype=tl.float32)
    for group in range(groups):
        remaining = tl.where(group_of == group, keys, _LOWEST)
        best = tl.max(remaining, 1, keep_dims=True)
        score_sum = _value_of(best)
        for _ in range(1, best_of_group):
            remaining = tl.where(remaining == best, _LOWEST, remaining)
            best = tl.max(remaining, 1, keep_dims=True)
            score_sum += _value_of(best)
        group_sums = tl.where(numbers == group, score_sum, group_sums)
    group_keys = _keys(group_sums, numbers, numbers < groups)
    inside = (group_of < 0) & (keys < 0)
    for _ in range(group_topk):
        best = tl.max(group_keys, 1, keep_dims=True)
        inside = inside | (group_of == 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32))  # its place
        group_keys = tl.where(group_keys == best, _LOWEST, group_keys)
    return inside


@launched
def _route_kernel(
    logits_ptr,  # [T, E] any float
    bias_ptr,  # None or [E] any float
    probs_ptr,  # [T, E]
    map_ptr,  # [T, E] uint8
    T, E, topk, groups, group_size, group_topk, best_of_group, scaling,
    FUNCTION: tl.constexpr, OVER_ALL: tl.constexpr, GROUPED: tl.constexpr,
    NORMALIZED: tl.constexpr, DENSE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    valid = (experts < E) & (tokens >= 0)
    inside = (tokens < T) & valid
    z = tl.load(logits_ptr + tokens * E + experts, mask=inside, other=0.0).to(tl.float32)
    scores = z
    if FUNCTION != "softmax":
        scores = _scores(z, FUNCTION)
    elif OVER_ALL:
        scores = _softmax(z, valid)
    ranked = scores
    if bias_ptr is not None:
        ranked += tl.load(bias_ptr + experts, mask=experts < E, other=0.0).to(tl.float32)
    keys = _keys(ranked, experts, valid)

    if GROUPED:
        best = _in_best_groups(
            keys, experts // group_size, groups, group_topk, best_of_group, TOKENS, BLOCK_G
        )
        keys = _keys(tl.where(best, ranked, -float("inf")), experts, valid)

    remaining = keys
    for _ in range(topk):
        remaining = tl.where(remaining == tl.max(remaining, 1, keep_dims=True), _LOWEST, remaining)
    chosen = remaining != keys

    if FUNCTION == "softmax" and not OVER_ALL:
        scores = _softmax(z, chosen)
    probs = scores
    if NORMALIZED:
        counted = tl.where(valid if DENSE else chosen, scores, 0.0)
        probs = tl.div_rn(scores, tl.sum(counted, 1, keep_dims=True) + LEAST_SUM)
    if not DENSE:
        probs = tl.where(chosen, probs * scaling, 0.0)
    tl.store(probs_ptr + tokens * E + experts, probs.to(probs_ptr.dtype.element_ty), mask=inside)
    tl.store(map_ptr + tokens * E + experts, chosen.to(tl.uint8), mask=inside)


def _tile(E: int) -> dict[str, int]:
    """Return how many tokens and experts a program has."""
    block = next_power_of_2(E)
    return {"BLOCK_E": block, "TOKENS": max(_ELEMENTS // block, 1), "num_warps": 4}


@replayed
def route(
    logits: Tensor, expert_bias: Tensor | None, topk: int, score_function: str, pre_softmax: bool,
    num_groups: int, group_topk: int, scaling: float, dense: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    T, E = logits.shape
    if logits.dtype == torch.float64 or E > _MOST_EXPERTS or not logits.numel():
        options = (score_function, pre_softmax, num_groups, group_topk, scaling, dense)
        return reference.route(logits, expert_bias, topk, *options)
    probs, routing_map = reference.route_outputs(SimpleNamespace(logits=logits, dense=dense))
    groups = num_groups if group_topk else 1
    tile = _tile(E)
    _route_kernel[(ceil_div(T, tile["TOKENS"]),)](
        logits.contiguous(), expert_bias if expert_bias is None else expert_bias.contiguous(),
        probs, routing_map.view(torch.uint8), T, E, topk,
        groups, E // groups, group_topk, topk // max(group_topk, 1), scaling,
        FUNCTION=score_function, OVER_ALL=pre_softmax or dense, GROUPED=group_topk > 0, DENSE=dense,
        NORMALIZED=(topk > 1 or dense) and score_function != "softmax",
        BLOCK_G=next_power_of_2(groups), **tile, enable_fp_fusion=False,
    )  # fmt: skip
    return probs, routing_map


@launched
def _route_backward_kernel(
    dprobs_ptr,  # [T, E] any float
    logits_ptr,  # [T, E] any float
    map_ptr,  # [T, E] uint8
    dlogits_ptr,  # [T, E]
    T, E, scaling,
    FUNCTION: tl.constexpr, OVER_ALL: tl.constexpr, NORMALIZED: tl.constexpr, DENSE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    offsets, valid = tokens * E + experts, (experts < E) & (tokens >= 0)
    inside = (tokens < T) & valid
    z = tl.load(logits_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    chosen = valid
    if not DENSE:  # past the last token every expert is chosen, so that no sum is 0
        chosen = chosen & (tl.load(map_ptr + offsets, mask=inside, other=1) != 0)
    grad = tl.load(dprobs_ptr + offsets, mask=inside & chosen, other=0.0).to(tl.float32) * scaling
    if FUNCTION == "softmax":
        scores = _softmax(z, valid if OVER_ALL else chosen)
        dz = scores * (grad - tl.sum(scores * grad, 1, keep_dims=True))
    else:
        scores = _scores(z, FUNCTION)
        if NORMALIZED:
            score_sum = tl.sum(tl.where(chosen, scores, 0.0), 1, keep_dims=True) + LEAST_SUM
            shared = tl.sum(tl.div_rn(scores, score_sum) * grad, 1, keep_dims=True)
            grad = tl.div_rn(grad - shared, score_sum)
        if FUNCTION == "sigmoid":
            slope = scores * _sigmoid(-z)
        else:
            slope = tl.where(scores > 0, tl.div_rn(_sigmoid(z), 2.0 * scores), 0.0)
        dz = tl.where(chosen, grad * slope, 0.0)
    tl.store(dlogits_ptr + offsets, dz.to(dlogits_ptr.dtype.element_ty), mask=inside)


@replayed
def route_backward(
    dprobs: Tensor, logits: Tensor, routing_map: Tensor, topk: int, score_function: str,
    pre_softmax: bool, scaling: float, dense: bool,
) -> Tensor:  # fmt: skip
    T, E = logits.shape
    if logits.dtype == torch.float64 or E > _MOST_EXPERTS or not logits.numel():
        options = (topk, score_function, pre_softmax, scaling, dense)
        return reference.route_backward(dprobs, logits, routing_map, *options)
    dlogits = logits.new_empty(logits.shape)
    tile = _tile(E)
    _route_backward_kernel[(ceil_div(T, tile["TOKENS"]),)](
        dprobs.contiguous(), logits.contiguous(), routing_map.contiguous().view(torch.uint8),
        dlogits, T, E, 1.0 if dense else scaling, FUNCTION=score_function,
        OVER_ALL=pre_softmax or dense, NORMALIZED=topk > 1 or dense, DENSE=dense,
        **tile, enable_fp_fusion=False,
    )  # fmt: skip
    return dlogits
