"""Routers: the formulas of scores and gradients, and the kernels against float64."""

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


def compute_scores(z: Tensor, function: str) -> Tensor:
    scores: dict[str, Any] = {
        "softmax": lambda: z.softmax(-1),
        "sigmoid": z.sigmoid,
        "sqrtsoftplus": lambda: F.softplus(z).sqrt(),
    }
    return scores[function]()


def route_by_definition(
    z: Tensor, kind: tuple[Any, ...], bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the probabilities and the chosen experts by definition, token by token."""
    topk, use_pre_softmax, groups, group_topk, scaling, function = kind
    scores = compute_scores(z, function)
    ranked = z if function == "softmax" and not use_pre_softmax else scores
    ranked = (ranked if bias is None else ranked + bias).detach()
    chosen = torch.zeros_like(z, dtype=torch.bool)
    for t, row in enumerate(ranked.tolist()):
        allowed = set(range(len(row)))
        if groups:
            size = len(row) // groups
            group_tops = [
                sorted(row[g * size : (g + 1) * size])[-(topk // group_topk) :]
                for g in range(groups)
            ]
            best_groups = sorted(range(groups), key=lambda g: -sum(group_tops[g]))[:group_topk]
            allowed = {e for e in allowed if e // size in best_groups}
        chosen[t, sorted(allowed, key=lambda e: -row[e])[:topk]] = True
    if function == "softmax" and not use_pre_softmax:
        probs = z.masked_fill(~chosen, -torch.inf).softmax(-1)
    else:
        probs = scores * chosen
        if function != "softmax" and topk > 1:
            probs = probs / probs.sum(-1, keepdim=True)
    return probs * (scaling or 1), chosen


@each_kind
def test_probabilities_and_gradients_follow_the_definition(kind: tuple[Any, ...]) -> None:
    z = torch.randn(40, 12, dtype=torch.float64, requires_grad=True)
    for bias in (None, torch.randn(12, dtype=torch.float64)):
        if bias is not None and kind[-1] == "softmax":
            with pytest.raises(ValueError, match=r"^expert_bias must be None with"):
                router.fused_topk_with_score_function(z, *kind, bias)
            continue
        probs, routing_map = router.fused_topk_with_score_function(z, *kind, bias)
        want, chosen = route_by_definition(z, kind, bias)
        assert torch.equal(routing_map, chosen)
        torch.testing.assert_close(probs, want)
        weight = torch.randn_like(want)
        (grad,), (want_grad,) = (torch.autograd.grad((p * weight).sum(), z) for p in (probs, want))
        torch.testing.assert_close(grad, want_grad)
    shaped, flat = router.fused_topk_with_score_function(z.view(4, 10, 12), *kind)
    want, chosen = router.fused_topk_with_score_function(z, *kind)
    assert torch.equal(shaped.view(40, 12), want)
    assert torch.equal(flat, chosen)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_scores_for_the_auxiliary_loss_follow_the_definition(function: str) -> None:
    z = torch.randn(30, 7, dtype=torch.float64, requires_grad=True)
    routing_map, scores = router.fused_compute_score_for_moe_aux_loss(z, 2, function)
    want = compute_scores(z, function)
    want = want / want.sum(-1, keepdim=True)
    torch.testing.assert_close(scores, want)
    assert torch.equal(
        routing_map, torch.zeros_like(routing_map).scatter_(1, want.topk(2).indices, True)
    )
    weight = torch.randn_like(want)
    (grad,), (want_grad,) = (torch.autograd.grad((p * weight).sum(), z) for p in (scores, want))
    torch.testing.assert_close(grad, want_grad)
    bfloat16_logits = z.detach().bfloat16()
    _, scores = router.fused_compute_score_for_moe_aux_loss(bfloat16_logits, 2, function)
    assert scores.dtype == torch.float32


def test_auxiliary_loss_follows_the_definition() -> None:
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


def test_first_of_equal_scores_is_chosen(device: torch.device) -> None:
    z = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, -0.0]], device=device)
    for function in FUNCTIONS:
        _, routing_map = router.fused_topk_with_score_function(z, 2, score_function=function)
        assert routing_map.int().tolist() == [[0, 1, 1, 0, 0, 0]]
    _, routing_map = router.fused_topk_with_score_function(z, 5)
    assert routing_map.int().tolist() == [[1, 1, 1, 1, 1, 0]]
    assert router.fused_topk_with_score_function(z[:0], 2)[0].shape == (0, 6)


def test_compiled_router_equals_eager_router(device: torch.device) -> None:
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


def test_groups_that_leave_too_few_experts_raise() -> None:
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
def test_kernels_are_as_accurate_as_torch(name: str, experts: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(300, experts, device="cuda") * 3).to(dtype)
    topk, use_pre_softmax, groups, group_topk, scaling, function = KINDS[name]
    for dense in (False, True):
        options = (
            topk,
            function,
            use_pre_softmax,
            groups or 1,
            group_topk or 0,
            scaling or 1.0,
            dense,
        )
        probs, chosen = ops.route_op(logits, None, *options)
        exact_probs, exact_chosen = reference.route(logits.double(), None, *options)
        float32_probs, _ = reference.route(logits.float(), None, *options)
        is_same_choice = (chosen == exact_chosen).all(1)  # float32 cannot tell a few scores apart
        assert is_same_choice.sum() >= 297
        assert bool((chosen.sum(1) == topk).all())
        dprobs, gradient = (
            torch.randn(300, experts, device="cuda"),
            (options[0], *options[1:3], *options[5:]),
        )
        arguments = (exact_chosen, *gradient)
        dlogits = ops.route_backward_op(dprobs, logits, *arguments)
        dexact, dusual = (
            reference.route_backward(dprobs, logits.to(t), *arguments)
            for t in (torch.float64, torch.float32)
        )
        for got, exact, float32_result in (
            (probs, exact_probs, float32_probs),
            (dlogits, dexact, dusual),
        ):
            # The exp instruction is accurate to two units; multiplications round as torch's do.
            error = (float32_result.double() - exact)[
                is_same_choice
            ].abs().max() + exact.abs().max() * 2.0**-21
            error += exact.abs().max() * torch.finfo(got.dtype).eps
            assert (got.double() - exact)[is_same_choice].abs().max() <= 2 * error


@pytest.mark.gpu
def test_router_runs_without_waiting_and_in_a_cuda_graph(uncollected: None) -> None:
    logits = torch.randn(64, 12, device="cuda")

    def run() -> tuple[Tensor, Tensor]:
        z = logits.clone().requires_grad_()
        probs, routing_map = router.fused_topk_with_score_function(z, *KINDS["sigmoid-groups"])
        loss = router.fused_moe_aux_loss(probs, routing_map.sum(0), 64, 12, 4, 0.1)
        return loss.detach(), torch.autograd.grad(loss, z)[0]

    check_capture(run)
