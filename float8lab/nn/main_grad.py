"""Gradients that are added into ``weight.main_grad`` instead of becoming ``weight.grad``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from float8lab.arguments import shown
from float8lab.nn.casts import plain
from float8lab.tensor.differentiation import GradientMap

__all__ = ["accumulate", "fused_weights", "plain_weight"]


def accumulate(
    weights: tuple[Any, ...], dw: Tensor, *, overwrite: bool, has_gradient: Sequence[bool] = ()
) -> Tensor | None:
    """Add (or, in a first microbatch, write) the gradient into ``main_grad`` of the weights.

    There is one weight, or that of each expert, of which those whose ``has_gradient`` is False stay
    unchanged.

    The result is the gradient for autograd, usually None. A weight with ``grad_added_to_main_grad``
    gets a tensor of arbitrary values, or of zeros with ``weight.zero_out_wgrad``: the hooks of
    Megatron's data parallelism set that attribute to False, and expect a tensor to throw away.
    """
    grads = [dw] if weights[0].ndim == dw.ndim else list(dw.unbind())
    if not all(has_gradient):
        grads = [*itertools.compress(grads, has_gradient)]
        weights = tuple(itertools.compress(weights, has_gradient))
    main_grads = [w.main_grad.view_as(grad) for w, grad in zip(weights, grads, strict=True)]
    if overwrite:
        torch._foreach_copy_(main_grads, grads)
    else:
        torch._foreach_add_(main_grads, grads)
    marked = [w for w in weights if hasattr(w, "grad_added_to_main_grad")]
    if not marked:
        return None
    for w in marked:
        if not w.grad_added_to_main_grad:  # a graph of torch.compile could not set it
            w.grad_added_to_main_grad = True
    make = torch.zeros if any(getattr(w, "zero_out_wgrad", False) for w in marked) else torch.empty
    return make(dw.shape, dtype=marked[0].dtype, device=dw.device)


def fused_weights(module: nn.Module, weight: Tensor) -> tuple[Tensor, ...]:
    """Return the weight in a tuple, which is empty unless the gradient goes into ``main_grad``."""
    grad: object = getattr(weight, "main_grad", None) if module.fuse_wgrad_accumulation else None
    if grad is None:
        return ()
    shapes = weight.shape, (weight.numel(),)
    if not (isinstance(grad, Tensor) and grad.is_floating_point() and grad.shape in shapes):
        raise TypeError(
            f"main_grad of the weight must be a floating-point tensor of its shape, "
            f"{tuple(weight.shape)}, or flat, to which fuse_wgrad_accumulation adds the gradient; "
            f"got {shown(grad)}. Set None to have the gradient in weight.grad."
        )
    return (weight,)


def plain_weight(
    module: nn.Module, weight: Tensor, first_microbatch: bool | None, *, as_main: bool = False
) -> Tensor:
    """Return ``plain(weight)``, whose gradient goes into ``main_grad`` if the module asks for it.

    With ``as_main`` it has the dtype of ``main_grad``, in which a GEMM then gives the gradient.
    """
    fused: Any = fused_weights(module, weight)
    if not (fused and weight.requires_grad and torch.is_grad_enabled()):
        return plain(weight)
    value = plain(weight).to(fused[0].main_grad.dtype) if as_main else plain(weight)
    into_main = partial(accumulate, fused, overwrite=first_microbatch is True)
    return GradientMap.run(value, lambda value: value.view_as(value), into_main)
