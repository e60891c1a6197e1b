"""Check the cross entropy over a sharded vocabulary.  M tokens, V words of this rank."""

from __future__ import annotations

import torch

from float8lab import ops
from float8lab.inspect.selfcheck.grid import name_of
from float8lab.inspect.selfcheck.harness import BF16, FP16, FP32, Cases, checks
from float8lab.ops.reference import cross_entropy

__all__: list[str] = []

_SHAPES = ((70, 1037), (5, 9000), (3, 33), (1, 1), (0, 8), (4, 0))
_EPS = 2.0**-24


@checks(
    "loss",
    "float64; the largest and the target's logit: bit for bit",
    "cross_entropy_statistics_op",
    "cross_entropy_backward_op",
)
def _check_cross_entropy(cases: Cases) -> None:
    for number, (M, V) in enumerate(_SHAPES):
        dtype = (BF16, FP32, FP16)[number % 3]
        cases.begin(f"{M} tokens {V} words {name_of(dtype)}")
        logits = (cases.normal(M, V + 1) * 4).to(dtype)[:, :V]
        if V > 8:
            logits[0, : V // 2] = -torch.inf
        target = (cases.uniform(M) * (V + 2)).to(torch.int64) - 1  # also -1 and V, out of range
        exact = cross_entropy.cross_entropy_statistics(logits.double(), target)
        got = ops.cross_entropy_statistics_op(*cases.on_device((logits, target)))
        # ex2.approx has a relative error of 2**-22. Each of two roundings of its argument changes
        # its result by eps times the argument. Sums and their rescaling round once for each term.
        logit_range = 2 * max([0.0, *logits.float().clamp(min=-100).abs().flatten().tolist()])
        allowed = 2 * (4 * _EPS + logit_range * 2 * _EPS) + (V + 32) * _EPS
        cases.same(got[[0, 2]], exact[[0, 2]].float())
        cases.within(got[1], exact[1], exact[1] * allowed)
        finite = logits.double().nan_to_num(neginf=0.0)
        rows = finite.sum(1) == exact[3]  # the other rows sum to -inf
        cases.same(got[3].cpu()[~rows], exact[3][~rows].float())
        cases.within(got[3].cpu()[rows], exact[3][rows], (finite.abs().sum(1) * V * _EPS)[rows])

        factors = torch.stack(
            [exact[0] + exact[1].log(), cases.normal(M).double(), cases.normal(M).double(),
             cases.normal(M).double() / max(V, 1)]
        ).float()  # fmt: skip
        factors[1, ::3] = 0.0
        got = ops.cross_entropy_backward_op(*cases.on_device((logits, target, factors)))
        exact = cross_entropy.cross_entropy_backward(logits.double(), target, factors.double())
        terms = exact.abs() + 2 * factors[2:].double().abs().sum(0)[:, None]
        rounding = torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).tiny
        cases.within(got, exact, terms * (allowed + 4 * _EPS) + rounding)
