"""Check routing and permutation in MoE layers.

T tokens, S places of a token, each for one row, R rows that tokens are copied to, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from float8lab import ops
from float8lab.formats import E5M2
from float8lab.inspect.selfcheck.grid import name_of
from float8lab.inspect.selfcheck.harness import BF16, FP16, FP32, REFERENCE, Cases, checks
from float8lab.ops.reference import permute, router

__all__: list[str] = []


def _row_map(cases: Cases, T: int, S: int, R: int, filled: int) -> Tensor:
    """Make a row map with rows below ``filled`` at random places, and invalid rows elsewhere."""
    row_ids = torch.where(cases.uniform(T * S) < 0.5, -1, R + 3).int()
    places = cases.uniform(T * S).argsort()[:filled]
    row_ids[places] = cases.uniform(filled).argsort().int()
    return torch.cat((row_ids.view(T, S), row_ids.new_full((T, 1), filled)), 1)


@checks("experts", f"{REFERENCE}; weighted sums: float64", "scatter_rows_op", "gather_rows_op")
def _check_permute(cases: Cases) -> None:
    for number, (T, S, R, filled, H) in enumerate(
        ((70, 5, 200, 190, 1040), (33, 1, 33, 33, 130), (9, 130, 40, 40, 64), (4, 2, 3, 0, 8),
         (0, 2, 5, 0, 8), (3, 4, 0, 0, 8))
    ):  # fmt: skip
        dtype = (BF16, FP32, FP16)[number % 3]
        row_map, probs = _row_map(cases, T, S, R, filled), cases.uniform(T, S)
        x, rows = cases.normal(T, H).to(dtype), cases.normal(R, H).to(dtype)
        scale, amax = cases.uniform(3, T).t(), cases.uniform(T, 3)
        name = f"{T} tokens {S} places {filled} of {R} rows {H} features {name_of(dtype)}"
        for label, op, arguments in (
            ("", "scatter", (x, row_map, R)),
            (" probabilities", "scatter", (x.t().contiguous().t(), row_map, R, probs)),
            (
                " FP8 data and scales", "scatter",
                (cases.bytes(T, H), row_map, R, probs, None, scale, amax),
            ),
            ("", "gather", (rows, row_map, dtype)),
            (" sums", "gather", (rows, row_map, dtype, probs, rows[:, 0])),
            (
                " FP8", "gather",
                (rows.to(E5M2), row_map, dtype, None, None, cases.uniform(9, R).t(), 128),
            ),
        ):  # fmt: skip
            cases.begin(name + label)
            cases.agree(f"{op}_rows_op", *arguments)
        cases.begin(f"{name} weighted sums")
        dots = cases.agree("scatter_rows_op", x, row_map, R, probs, rows, but=1)[1]
        exact, size = (
            permute.scatter_rows(a.double(), row_map, R, probs.double(), b.double())[1]
            for a, b in ((x, rows), (x.abs(), rows.abs()))
        )
        cases.within(dots, exact, size * (2.0**-24 * (H + 1)))  # H roundings of a term at most


def _allowed(z: Tensor) -> float:
    """Bound the relative error of a score and of the sum that it is divided by.

    ``ex2.approx`` has a relative error of 2**-22. Each of two roundings of its argument changes its
    result by eps times the argument. Sums round once for each expert, polynomials some times.
    """
    argument = 2 * z.abs().max().item() if z.numel() else 0.0
    return 2 * (2.0**-22 + argument * 2.0**-23) + (z.shape[1] + 32) * 2.0**-24


@checks("experts", REFERENCE, "row_map_op")
def _check_row_map(cases: Cases) -> None:
    for T, S in ((300, 128), (1000, 7), (33, 260), (1, 1), (0, 4)):
        for dtype in (torch.bool, torch.int32, torch.int64):
            cases.begin(f"{T} tokens {S} places {name_of(dtype)}")
            mask = (cases.uniform(S, T) < 0.1).to(dtype).t()
            cases.agree("row_map_op", mask if dtype == torch.int64 else mask.contiguous())
    for T, K, E in ((300, 8, 128), (33, 3, 5), (1, 1, 1), (0, 4, 2)):
        cases.begin(f"{T} tokens {K} of {E} experts")
        index = (cases.uniform(K, T) * (E + 2)).to(torch.int64).t() - 1
        cases.agree("row_map_op", index, E)


@checks("experts", "float64; choices: the reference on the CPU", "route_op", "route_backward_op")
def _check_route(cases: Cases) -> None:
    for T, E, topk, groups, best in ((40, 36, 4, 6, 2), (9, 128, 8, 1, 0), (70, 7, 1, 1, 0)):
        z = (cases.normal(T, E) * 48).round() / 16  # some are equal, but none nearly equal
        for name, before in (
            ("softmax", False), ("softmax", True), ("sigmoid", False), ("sqrtsoftplus", False),
        ):  # fmt: skip
            bias = None if name == "softmax" else (cases.uniform(E) * 16).round() / 8
            for dense in (False, True):
                cases.begin(f"{T} tokens {E} experts {name} {before} {dense}")
                options = (topk, name, before, groups, best, 2.5, dense)
                dense_or = (topk, name, before, 1.0 if dense else 2.5, dense)
                got, chosen = cases.agree("route_op", z, bias, *options, but=0)
                exact = router.route(z.double(), bias, *options)[0]
                allowed = _allowed(z)
                cases.within(got, exact, exact.abs() * allowed)
                grad, chosen = cases.normal(T, E), chosen.cpu()
                got = ops.route_backward_op(*cases.on_device((grad, z, chosen)), *dense_or)
                exact = router.route_backward(grad.double(), z.double(), chosen, *dense_or)
                cases.within(got, exact, _terms(grad, z, chosen, *dense_or) * (4 * allowed))


def _terms(
    grad: Tensor, z: Tensor, chosen: Tensor, topk: int, name: str, before: bool, scaling: float,
    dense: bool,
) -> Tensor:  # fmt: skip
    """Compute the gradient that the logits would have if all terms had the same sign."""
    if dense:
        chosen, topk, before = torch.ones_like(chosen), 2, True
    z = z.double()
    scores, total_score = router.shares(z, chosen, topk, name, before)
    size = torch.where(chosen, grad.double().abs() * scaling, 0)
    if name == "softmax":
        return scores * (size + (scores * size).sum(-1, keepdim=True))
    if topk > 1:
        size = (size + (scores / total_score * size).sum(-1, keepdim=True)) / total_score
    slope = z.sigmoid() * ((-z).sigmoid() if name == "sigmoid" else 1 / (2 * scores))
    return torch.where(chosen, size * slope, 0)
