"""Cross entropy of logits whose vocabulary is sharded over ranks.  M tokens, V words, R ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from float8lab import arguments
from float8lab.distributed.ranks import all_reduced, rank_and_size
from float8lab.ops import cross_entropy_backward_op, cross_entropy_statistics_op
from float8lab.recipes.reduction import group_named, name_of_group
from float8lab.tensor import Float8Tensor
from float8lab.tensor.differentiation import AutogradContext, Float8Function, once_differentiable

__all__ = ["parallel_cross_entropy"]


def parallel_cross_entropy(  # noqa: PLR0913  # the parameters are Transformer Engine's
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: dist.ProcessGroup | None = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    z_loss_weight: float = 0.0,
    *,
    return_log_sum_exp: bool = False,
) -> Any:
    """Compute the cross entropy of each token, from logits of which each rank has a shard.

    The numbers are those of ``torch.nn.functional.cross_entropy`` of the unsharded logits in
    float32, up to the order of sums, on every rank. Two all-reduces send four numbers per token.
    Backward saves the logits themselves; the only other tensor of their size is their gradient.

    Args:
        inp: ``[..., V / R]``: the columns of this rank, equally many on each, in the order of the
            ranks. float32, bfloat16, float16 or float64.
        target: ``[...]`` integers: the words, from 0 to V - 1, the same on all ranks. Any other
            number except ``ignore_idx`` makes the token's loss NaN.
        label_smoothing: the share of the target's probability that is distributed over all words,
            from 0 to 1.
        reduce_loss: return the mean over the tokens that are not ignored.
        dist_process_group: the ranks that share the vocabulary; None: this rank has all of it.
        ignore_idx: the target of tokens whose loss and gradient are 0.
        is_cg_capturable: has no effect, since a CUDA graph can always capture the call.
        z_loss_weight: factor of a term added to each loss: the square of the logarithm of the sum
            of the token's exponentials.
        return_log_sum_exp: return these logarithms, too.

    Returns:
        ``[...]`` in float32 (float64 for float64); a scalar with ``reduce_loss``, which is NaN if
        all tokens are ignored. With ``return_log_sum_exp`` a tuple of the loss and ``[...]``, which
        has no gradient and is 0 for ignored tokens.

    Raises:
        ValueError: shapes do not fit together, or a number is out of range.

    Source: label smoothing, arXiv:1512.00567; the term with the square, arXiv:2202.08906.

    >>> logits, target = torch.tensor([[0.0, 0.0], [2.0, 1.0]]), torch.tensor([1, -100])
    >>> float8lab.parallel_cross_entropy(logits, target)
    tensor([0.6931, 0.0000])
    """
    arguments.check_floating("inp", inp, "Convert it.")
    if not inp.ndim:
        raise ValueError("inp must have words as its last dimension; got a scalar. Reshape it.")
    arguments.check_tensor("target", target)
    if target.dtype not in arguments.INTEGER_DTYPES:
        raise TypeError(
            f"target must hold integers; got {arguments.shown(target)}. Pass each token's word."
        )
    advice = "Give it all dimensions of inp but the last."
    arguments.check_shape("target", target, inp.shape[:-1], advice)
    smoothing = arguments.check_number("label_smoothing", label_smoothing, minimum=0, maximum=1)
    z_loss = arguments.check_number("z_loss_weight", z_loss_weight, minimum=0)
    arguments.check_flags(
        reduce_loss=reduce_loss,
        is_cg_capturable=is_cg_capturable,
        return_log_sum_exp=return_log_sum_exp,
    )
    arguments.check_group("dist_process_group", dist_process_group)
    arguments.check_size("ignore_idx", ignore_idx, minimum=-(2**63))
    group = dist_process_group
    if group is not None and rank_and_size(group)[0] < 0:
        raise ValueError(
            "dist_process_group must have this process among its ranks; got another group. "
            "Pass the group that this rank's part of the vocabulary belongs to."
        )
    x = inp.dequantize() if isinstance(inp, Float8Tensor) else inp
    loss, log_sum = _CrossEntropy.run(
        x.reshape(-1, x.shape[-1]), target.reshape(-1), name_of_group(group), ignore_idx, smoothing,
        z_loss,
    )  # fmt: skip
    loss = loss.sum() / (target != ignore_idx).sum() if reduce_loss else loss.view(target.shape)
    return (loss, log_sum.view(target.shape)) if return_log_sum_exp else loss


class _CrossEntropy(Float8Function):
    """Compute losses and logarithms of the sums of exponentials, ``[M]`` each."""

    @staticmethod
    def forward(
        ctx: AutogradContext, logits: Tensor, target: Tensor, group: str, ignored: int,
        smoothing: float, z_loss: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rank, ranks = rank_and_size(group_named(group)) if group else (0, 1)
        words = logits.shape[1]
        V = words * ranks
        column = target.long() - rank * words
        largest, exp_sum, target_logit, logit_sum = cross_entropy_statistics_op(logits, column)
        if ranks > 1:
            local = largest
            largest = all_reduced(local, "max", group)
            # A shard whose logits are all -inf adds 0, even if this is so for all shards.
            exp_sum = torch.where(exp_sum == 0, 0.0, exp_sum * (local - largest).exp())
            sums = torch.stack([exp_sum, target_logit, logit_sum])
            exp_sum, target_logit, logit_sum = all_reduced(sums, "sum", group)
        log_sum = largest + exp_sum.log()
        loss = log_sum - target_logit
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (log_sum - logit_sum / V)
        if z_loss:
            loss = loss + z_loss * log_sum.square()
        is_word = (target >= 0) & (target < V)
        used = target != ignored
        loss = torch.where(used, torch.where(is_word, loss, torch.nan), 0.0)
        log_sum = torch.where(used, log_sum, 0.0)
        ctx.save_for_backward(logits, column, log_sum, is_word, used)
        ctx.mark_non_differentiable(log_sum)
        ctx.smoothing, ctx.z_loss, ctx.words = smoothing, z_loss, V
        return loss, log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, dloss: Tensor, _: None) -> tuple[Tensor | None, ...]:
        logits, column, log_sum, is_word, used = ctx.saved_tensors
        grad = torch.where(used, torch.where(is_word, dloss.to(log_sum.dtype), torch.nan), 0.0)
        factor = grad * (1 + 2 * ctx.z_loss * log_sum) if ctx.z_loss else grad
        smoothed = grad * ctx.smoothing
        factors = torch.stack([log_sum, factor, grad - smoothed, smoothed / ctx.words])
        return cross_entropy_backward_op(logits, column, factors), *[None] * 5
