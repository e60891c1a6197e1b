"""Cross entropy of unsharded logits; test_sequence_parallel.py tests that of sharded logits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import float8lab
from float8lab import ops
from float8lab.ops.reference import cross_entropy as reference
from tests.recorder import check_capture


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logits, torch.ones_like(loss) * 1.5)[0]


@pytest.mark.parametrize("smoothing", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("mean", [False, True])
def test_loss_and_gradient_are_those_of_torch(
    smoothing: float, mean: bool, device: torch.device
) -> None:
    logits = (torch.randn(3, 5, 50, device=device) * 5).requires_grad_()
    target = torch.randint(0, 50, (3, 5), device=device)
    target[1, :3] = 7
    if not smoothing:
        logits.data[0, 0, :20] = -torch.inf
        target[0, 0] = 30
        logits.data[1, 0] = torch.nan  # has no effect, since its target is ignored
    for dtype in (torch.int64, torch.int32):
        got = float8lab.parallel_cross_entropy(
            logits, target.to(dtype), smoothing, mean, ignore_idx=7
        )
        want = F.cross_entropy(
            logits.nan_to_num(nan=0.0, neginf=-torch.inf).flatten(0, 1), target.flatten(),
            ignore_index=7, label_smoothing=smoothing, reduction="mean" if mean else "none",
        )  # fmt: skip
        torch.testing.assert_close(got, want if mean else want.view(3, 5))
        torch.testing.assert_close(gradient(got, logits), gradient(want, logits))


def test_z_loss_adds_the_squared_log_sum_exp() -> None:
    logits = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, 8, -100, 0])

    def run(x: Tensor) -> Any:
        return float8lab.parallel_cross_entropy(
            x, target, 0.2, z_loss_weight=0.5, return_log_sum_exp=True
        )

    loss, log_sum = run(logits)
    assert not log_sum.requires_grad
    used = target >= 0
    torch.testing.assert_close(log_sum, torch.where(used, logits.logsumexp(1), 0.0).detach())
    plain = F.cross_entropy(logits, target, label_smoothing=0.2, reduction="none")
    torch.testing.assert_close(loss, plain + 0.5 * log_sum.square())
    assert torch.autograd.gradcheck(lambda x: run(x)[0], logits)


def test_compiled_loss_and_gradient_equal_eager_ones(device: torch.device) -> None:
    def run(x: Tensor, target: Tensor) -> Tensor:
        return float8lab.parallel_cross_entropy(x, target, 0.1, True, z_loss_weight=0.1)

    logits = torch.randn(4, 9, device=device, requires_grad=True)
    target = torch.tensor([1, 2, -100, 0], device=device)
    eager_loss, compiled = (
        run(logits, target),
        torch.compile(run, backend="aot_eager", fullgraph=True),
    )
    compiled_loss = compiled(logits, target)
    assert torch.equal(eager_loss, compiled_loss)
    assert torch.equal(gradient(eager_loss, logits), gradient(compiled_loss, logits))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_are_as_accurate_as_torch(dtype: torch.dtype) -> None:
    logits = (torch.randn(300, 32065, device="cuda") * 4).to(dtype)[:, :32064]
    target = torch.randint(-100, 32164, (300,), device="cuda")
    stats = ops.cross_entropy_statistics_op(logits, target)
    exact_stats, float32_stats = (
        reference.cross_entropy_statistics(logits.to(t), target)
        for t in (torch.float64, torch.float32)
    )
    factors = torch.stack(
        [exact_stats[0] + exact_stats[1].log(), *torch.rand(3, 300, device="cuda")]
    ).float()
    factors[3] /= 32064
    logits_grad = ops.cross_entropy_backward_op(logits, target, factors)
    exact_grad, float32_grad = (
        reference.cross_entropy_backward(logits.to(t), target, factors.to(t))
        for t in (torch.float64, torch.float32)
    )
    for got, want, plain in (
        *zip(stats, exact_stats, float32_stats, strict=True),
        (logits_grad, exact_grad, float32_grad),
    ):
        # The exp instruction is accurate to two units; multiplications round as torch's do.
        error = (plain.double() - want).abs().max() + want.abs().max() * 2.0**-21
        error += want.abs().max() * torch.finfo(got.dtype).eps
        assert (got.double() - want).abs().max() <= 2 * error


@pytest.mark.gpu
def test_loss_and_gradient_run_without_waiting_and_in_a_cuda_graph(uncollected: None) -> None:
    logits = torch.randn(64, 1000, device="cuda")
    target = torch.randint(0, 1000, (64,), device="cuda")

    def run() -> tuple[Tensor, Tensor]:
        x = logits.clone().requires_grad_()
        loss = float8lab.parallel_cross_entropy(x, target, 0.1, True, z_loss_weight=1e-3)
        return loss.detach(), gradient(loss, x)

    check_capture(run)
