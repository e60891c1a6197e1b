"""Routers: the formulas of their scores, their gradients, and the kernels against float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from float8lab import ops, router
from float8lab.ops.reference import router as reference
from tests.recorder import check_capture

# Arguments: topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function.
KINDS: dict[str, tuple[Any, ...]] = {
    "softmax": (3, False, None, None, None, "softmax"),
    "softmax-before": (3, True, None, None, 2.5, "softmax"),
    "softmax-groups": (4, False, 4, 2, None, "softmax"),
    "softmax-before-groups": (4, True, 4, 3, 1.5, "softmax"),
    "sigmoid": (3, False, None, None, None, "sigmoid"),
    "sigmoid-one": (1, False, None, None, 2.5, "sigmoid"),
    "sigmoid-groups": (4, False, 4, 2, 2.5, "sigmoid"),
    "sqrtsoftplus": (3, False, None, None, None, "sqrtsoftplus"),
    "sqrtsoftplus-groups": (6, False, 6, 3, 2.5, "sqrtsoftplus"),
}
FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def scored(z: Tensor, function: str) -> Tensor:
    scores: dict[str, Any] = {
        "softmax": lambda: z.softmax(-1),
        "sigmoid": z.sigmoid,
        "sqrtsoftplus": lambda: F.softplus(z).sqrt(),
    }
    return scores[function]()


def plain(z: Tensor, kind: tuple[Any, ...], bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities by the definition, expert by expert."""
    topk, before, groups, best, scaling, function = kind
    scores = scored(z, function)
    ranked = z if function == "softmax" and not before else scores
    ranked = (ranked if bias is None else ranked + bias).detach()
    chosen = torch.zeros_like(z, dtype=torch.bool)
    for t, row in enumerate(ranked.tolist()):
        allowed = set(range(len(row)))
        if groups:
            size = len(row) // groups
            parts = [
                sorted(row[g * size : (g + 1) * size])[-(topk // best) :] for g in range(groups)
            ]
            first = sorted(range(groups), key=lambda g: -sum(parts[g]))[:best]
            allowed = {e for e in allowed if e // size in first}
        chosen[t, sorted(allowed, key=lambda e: -row[e])[:topk]] = True
    if function == "softmax" and not before:
        probs = z.masked_fill(~chosen, -torch.inf).softmax(-1)
    else:
        probs = scores * chosen
        if function != "softmax" and topk > 1:
            probs = probs / probs.sum(-1, keepdim=True)
    return probs * (scaling or 1), chosen


@each_kind
def test_probabilities(kind: tuple[Any, ...]) -> None:
    z = torch.randn(40, 12, dtype=torch.float64, requires_grad=True)
    for bias in (None, torch.randn(12, dtype=torch.float64)):
        if bias is not None and kind[-1] == "softmax":
            with pytest.raises(ValueError, match=r"^expert_bias must be None with"):
                router.fused_topk_with_score_function(z, *kind, bias)
            continue
        probs, routing_map = router.fused_topk_with_score_function(z, *kind, bias)
        want, chosen = plain(z, kind, bias)
        assert torch.equal(routing_map, chosen)
        torch.testing.assert_close(probs, want)
        weight = torch.randn_like(want)
        (grad,), (wanted,) = (torch.autograd.grad((p * weight).sum(), z) for p in (probs, want))
        torch.testing.assert_close(grad, wanted)
    shaped, flat = router.fused_topk_with_score_function(z.view(4, 10, 12), *kind)
    want, chosen = router.fused_topk_with_score_function(z, *kind)
    assert torch.equal(shaped.view(40, 12), want)
    assert torch.equal(flat, chosen)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_scores_for_the_auxiliary_loss(function: str) -> None:
    z = torch.randn(30, 7, dtype=torch.float64, requires_grad=True)
    routing_map, scores = router.fused_compute_score_for_moe_aux_loss(z, 2, function)
    want = scored(z, function)
    want = want / want.sum(-1, keepdim=True)
    torch.testing.assert_close(scores, want)
    assert torch.equal(
        routing_map, torch.zeros_like(routing_map).scatter_(1, want.topk(2).indices, True)
    )
    weight = torch.randn_like(want)
    (grad,), (wanted,) = (torch.autograd.grad((p * weight).sum(), z) for p in (scores, want))
    torch.testing.assert_close(grad, wanted)
    low = z.detach().bfloat16()
    _, scores = router.fused_compute_score_for_moe_aux_loss(low, 2, function)
    assert scores.dtype == torch.float32


def test_auxiliary_loss() -> None:
    scores = torch.rand(30, 7, dtype=torch.float64, requires_grad=True)
    counts = torch.randint(0, 9, (7,))
    arguments = (counts, 60, 7, 2, 0.1)
    loss = router.fused_moe_aux_loss(scores, *arguments)
    want = (scores.sum(0) * counts).sum() * 7 * 0.1 / (2 * 60 * 60)
    torch.testing.assert_close(loss, want)
    for tokens in (torch.tensor(60), torch.tensor([60.0])):
        torch.testing.assert_close(
            router.fused_moe_aux_loss(scores, counts, tokens, 7, 2, 0.1), want
        )
    assert torch.autograd.gradcheck(router.fused_moe_aux_loss, (scores, *arguments))
    assert router.fused_moe_aux_loss(scores.bfloat16(), *arguments).dtype == torch.bfloat16


def test_of_equal_scores_the_first_is_taken(device: torch.device) -> None:
    z = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, -0.0]], device=device)
    for function in FUNCTIONS:
        _, routing_map = router.fused_topk_with_score_function(z, 2, score_function=function)
        assert routing_map.int().tolist() == [[0, 1, 1, 0, 0, 0]]
    _, routing_map = router.fused_topk_with_score_function(z, 5)
    assert routing_map.int().tolist() == [[1, 1, 1, 1, 1, 0]]
    assert router.fused_topk_with_score_function(z[:0], 2)[0].shape == (0, 6)


def test_compiled(device: torch.device) -> None:
    logits, bias = torch.randn(9, 12, device=device), torch.randn(12, device=device)

    def routed(z: Tensor) -> Tensor:
        probs, _ = router.fused_topk_with_score_function(z, *KINDS["sigmoid-groups"], bias)
        routing_map, scores = router.fused_compute_score_for_moe_aux_loss(z, 3, "sigmoid")
        counts = routing_map.sum(0)
        return probs.square().sum() + router.fused_moe_aux_loss(scores, counts, 9, 12, 3, 0.1)

    results = []
    for run in (routed, torch.compile(routed, backend="aot_eager", fullgraph=True)):
        z = logits.clone().requires_grad_()
        loss = run(z)
        results.append((loss, *torch.autograd.grad(loss, z)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_groups_that_leave_too_few_experts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^group_topk must "):
        router.fused_topk_with_score_function(torch.ones(4, 8), 5, False, 4, 2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "experts", "dtype"),
    [
        ("softmax", 36, torch.float32), ("softmax", 252, torch.bfloat16),
        ("softmax-before-groups", 252, torch.bfloat16), ("sigmoid-one", 36, torch.bfloat16),
        ("sigmoid-groups", 252, torch.float32), ("sqrtsoftplus", 12, torch.float32),
        ("sqrtsoftplus-groups", 1026, torch.bfloat16),
    ],
)  # fmt: skip
def test_kernels_are_as_good_as_torch(name: str, experts: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(300, experts, device="cuda") * 3).to(dtype)
    topk, before, groups, best, scaling, function = KINDS[name]
    for dense in (False, True):
        how = (topk, function, before, groups or 1, best or 0, scaling or 1.0, dense)
        probs, chosen = ops.route_op(logits, None, *how)
        exact, wanted = reference.route(logits.double(), None, *how)
        usual, _ = reference.route(logits.float(), None, *how)
        same = (chosen == wanted).all(1)  # scores that float32 cannot tell apart, a few
        assert same.sum() >= 297
        assert bool((chosen.sum(1) == topk).all())
        good, gradient = torch.randn(300, experts, device="cuda"), (how[0], *how[1:3], *how[5:])
        arguments = (wanted, *gradient)
        dlogits = ops.route_backward_op(good, logits, *arguments)
        dexact, dusual = (
            reference.route_backward(good, logits.to(t), *arguments)
            for t in (torch.float64, torch.float32)
        )
        for got, right, other in ((probs, exact, usual), (dlogits, dexact, dusual)):
            # The instruction for exp is right to two units; the products round as torch's do.
            error = (other.double() - right)[same].abs().max() + right.abs().max() * 2.0**-21
            error += right.abs().max() * torch.finfo(got.dtype).eps
            assert (got.double() - right)[same].abs().max() <= 2 * error


@pytest.mark.gpu
def test_nothing_waits_and_graphs_capture(uncollected: None) -> None:
    logits = torch.randn(64, 12, device="cuda")

    def run() -> tuple[Tensor, Tensor]:
        z = logits.clone().requires_grad_()
        probs, routing_map = router.fused_topk_with_score_function(z, *KINDS["sigmoid-groups"])
        loss = router.fused_moe_aux_loss(probs, routing_map.sum(0), 64, 12, 4, 0.1)
        return loss.detach(), torch.autograd.grad(loss, z)[0]

    check_capture(run)
