"""Check attention, rotary embedding and the update of scales.

B batch, H heads, G key/value heads, S sequence, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from float8lab import ops
from float8lab.formats import FP8_DTYPES, HIGH_PRECISION_DTYPES
from float8lab.inspect.environment import why_attention_is_emulated
from float8lab.inspect.selfcheck.casts import values_of
from float8lab.inspect.selfcheck.grid import format_of, name_of
from float8lab.inspect.selfcheck.harness import FP32, REFERENCE, Cases, checks
from float8lab.ops import reference
from float8lab.ops.attention import has_fp8_backward
from float8lab.ops.reference.attention import P_SCALE

__all__: list[str] = []

_ATTENTION_SHAPES = (
    (2, 4, 2, 5, 7, 8, 6),
    (1, 2, 2, 200, 333, 64, 64),
    (2, 4, 2, 128, 128, 128, 128),
    (1, 2, 1, 70, 130, 23, 9),
    (1, 2, 2, 1, 77, 128, 128),
    (1, 2, 1, 150, 200, 192, 128),
)


@dataclass(frozen=True)
class _Attention:
    """One case of attention: its FP8 operands and their scales, on the device."""

    tensors: list[Tensor]
    scales: list[Tensor]
    settings: tuple[tuple[int, int, int], float]
    why: str

    def wide(self) -> list[Tensor]:
        """Compute the exact values of q, k and v in float64."""
        pairs = zip(self.tensors, self.scales, strict=True)
        return [values_of(x.dtype).to(x.device)[x.view(torch.uint8).long()] * s for x, s in pairs]


def _attentions(cases: Cases) -> Iterator[_Attention]:
    for index, (B, H, G, SQ, SK, D, DV) in enumerate(_ATTENTION_SHAPES):
        for mask in ((-1, -1, 0), (-1, 0, SQ - SK), (30, 0, 0)):
            fp8_dtype = FP8_DTYPES[index % 2]
            tensors, scales = [], []
            for size in ((B, H, SQ, D), (B, G, SK, D), (B, G, SK, DV)):
                x = cases.normal(*size).view(-1, size[-1])
                q, scale, _ = reference.quantize(x, fp8_dtype, (-1, -1), "fp32", 0.0, 1)
                tensors.append(q.view(size).to(cases.device))
                scales.append(scale.to(cases.device))
            why = why_attention_is_emulated(cases.device, D, DV)
            cases.begin(f"{B}x{H}({G})x{SQ}x{SK}x{D}x{DV} {format_of(fp8_dtype)} {mask}", why)
            yield _Attention(tensors, scales, (mask, D**-0.5), why)


def _exact_attention(
    q: Tensor, k: Tensor, v: Tensor, case: _Attention
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute output, probabilities and scores in float64."""
    (left, right, diagonal), scale = case.settings
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT * scale
    i = torch.arange(q.shape[2], device=q.device).view(-1, 1) + k.shape[2] - q.shape[2] + diagonal
    distance = torch.arange(k.shape[2], device=q.device) - i
    hidden = (distance > right) & (right >= 0) | (distance < -left) & (left >= 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    p = scores.softmax(-1)
    return p @ v.repeat_interleave(groups, 1), p, scores


_ROUNDED = "float64; error of probabilities rounded to e4m3, and of scores"


@checks("attention", _ROUNDED, "fp8_attention_op")
def _check_attention(cases: Cases) -> None:
    """Compare with float64, within the rounding of probabilities, of scores and of sums."""
    # The rounding error of a probability is at most 1/16 of it or, where e4m3 is subnormal, half of
    # its least step 2**-9 times ``P_SCALE``. The tensor cores keep about 13 bits of the sums of
    # scores and outputs. The error of a score is an error of the logarithm of a probability.
    for number, case in enumerate(_attentions(cases)):
        dtype = HIGH_PRECISION_DTYPES[number % 3]
        q, k, v = case.wide()
        expected, p, scores = _exact_attention(q, k, v, case)
        scale = case.settings[1]
        out, lse, max_scores = ops.fp8_attention_op(
            *case.tensors, *case.scales, *case.settings, dtype
        )
        groups = q.shape[1] // k.shape[1]
        size = q.abs() @ k.abs().repeat_interleave(groups, 1).mT * scale
        off = size.amax(-1) * (0.0 if case.why else 2.0**-12)
        # Errors in float32: sums of up to 2**7 terms, and a logarithm.
        off = off + (size.amax(-1) + 2) * 2.0**-17
        cases.within(lse, scores.logsumexp(-1), off)
        cases.within(max_scores, scores.amax(-1), 4 * off)  # errors do not average out
        added = 0.0 if case.why else 2.0**-9
        rounding = p * (1 / 16 + 2 * off.unsqueeze(-1) + added) + 2.0**-10 * P_SCALE
        bound = rounding @ v.abs().repeat_interleave(groups, 1)
        cases.within(out, expected, bound + expected.abs() * torch.finfo(dtype).eps)


@checks("attention", "autograd in float64, in the norm", "fp8_attention_backward_op")
def _check_attention_backward(cases: Cases) -> None:
    """Compare with autograd in float64, within the rounding of the terms of each gradient."""
    # In float32 the terms, before they cancel, have errors of less than 2**-16: their roundings,
    # and the effect on probabilities of errors of scores of 2**-17 (see above). The kernel also
    # rounds operands, probabilities and the gradient of the scores to 8 bits, each of which costs
    # 2**-9 of the result. In FP8 it rounds them to 4 bits, and the result keeps 24 dB.
    for case in _attentions(cases):
        with torch.enable_grad():
            q, k, v = leaves = [x.requires_grad_() for x in case.wide()]
            expected, _, scores = _exact_attention(q, k, v, case)
            dout = cases.normal(*expected.shape).to(cases.device)
            exact = torch.autograd.grad(expected, leaves, dout.double())
        saved = [x.detach().float() for x in (expected, scores.logsumexp(-1), scores.amax(-1))]
        got = ops.fp8_attention_backward_op(
            dout, *case.tensors, *case.scales, *saved, *case.settings
        )
        q8, k8, v8 = case.tensors
        is_fp8 = has_fp8_backward(q8, k8, v8)
        rounded = 10 ** (-24 / 20) if is_fp8 else 2.0**-7
        terms = _gradient_terms(case, expected.detach(), scores.detach(), dout.double())
        for result, want, term in zip(got, exact, terms, strict=True):
            bound = 2.0**-16 * term.norm() + (0.0 if case.why else rounded) * want.norm()
            off = (result.double() - want).norm()
            cases.within(off, torch.zeros_like(off), bound.cpu())


def _gradient_terms(
    case: _Attention, out: Tensor, scores: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients that q, k and v would have if all terms had the same sign."""
    q, k, v = (x.detach().abs() for x in case.wide())
    scale, G, p = case.settings[1], k.shape[1], scores.softmax(-1)
    k, v = (x.repeat_interleave(q.shape[1] // G, 1) for x in (k, v))
    dout = dout.abs()
    ds = p * (dout @ v.mT + (out.abs() * dout).sum(-1, keepdim=True))
    dk, dv = (x.unflatten(1, (G, -1)).sum(2) for x in (ds.mT @ q * scale, p.mT @ dout))
    return ds @ k * scale, dk, dv


@checks("attention", REFERENCE, "rotate_op")
def _check_rotate(cases: Cases) -> None:
    for number, (A, B, H, D, R) in enumerate(((5, 3, 7, 128, 128), (1, 33, 1, 80, 32))):
        for interleaved in (False, True):
            for back in (False, True):
                dtype = HIGH_PRECISION_DTYPES[(number + interleaved + back) % 3]
                t = cases.normal(A, B, H, D).to(dtype)
                for shape in ((A, B, 1, R), (1, B, 1, R), (A, 1, 1, R)):
                    cases.begin(f"{A}x{B}x{H}x{D} {name_of(dtype)} {shape} {interleaved} {back}")
                    angles = cases.normal(*shape), cases.normal(*shape)
                    cases.agree("rotate_op", t, *angles, interleaved, back)


@checks("delayed scaling", REFERENCE, "update_scales_op")
def _check_update_scales(cases: Cases) -> None:
    special = torch.tensor([ops.NO_DATA, 0.0, torch.inf, torch.nan, 1e-40], device="cpu")
    for length, margin, interval in ((1, 0, 1), (2, 2, 3), (16, -1, 1), (1000, 0, 3)):
        for most_recent in (False, True):
            for power_of_2 in (False, True):
                cases.begin(
                    f"history {length} margin {margin} interval {interval} "
                    f"{'newest' if most_recent else 'max'}{' pow2' * power_of_2}"
                )
                amax = torch.cat((special, cases.uniform(9)))
                slots = amax.numel()
                history, factors = cases.uniform(length, slots) * 3, cases.uniform(2, slots)
                steps = torch.arange(slots, dtype=torch.int32, device="cpu")
                limits = torch.tensor([448.0, 57344.0] * slots, dtype=FP32, device="cpu")[:slots]
                state = history, amax, factors, steps, limits
                options = margin, interval, most_recent, power_of_2
                for _ in range(3):
                    cases.agree("update_scales_op", *state, *options)
                    amax.copy_(cases.uniform(slots))
