"""Views that share a block with elements outside them, and how to write through such views.

A view of a Float8Tensor shares its data and scales, so a write to the view reaches the *base*. But
a new scale must not change elements of the base that are outside the view. A view that shares no
block is requantized in place. Any other view carries a ``Window``: the base and the steps that make
the view from it. A write dequantizes the base, repeats the steps on the result, writes, and
requantizes the blocks of the base that the view touches; all other blocks keep their bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

from float8lab.formats import Float8Spec
from float8lab.tensor.blocks import block_amax, dequantize_blocks, expand_scale, quantize_blocks

__all__ = ["Step", "StoredInBlocks", "Window", "merge_into"]


class StoredInBlocks(Protocol):
    """The attributes of a Float8Tensor that a window uses."""

    qdata: Tensor
    scale: Tensor
    amax: Tensor
    spec: Float8Spec

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...


class Step(NamedTuple):
    """A view op, its arguments after the first, and its keyword arguments."""

    op: OpOverload
    args: tuple[object, ...]
    kwargs: dict[str, object]


@dataclass(frozen=True)
class Window:
    """The part of a base tensor that a view shows."""

    base: StoredInBlocks | None
    """The Float8Tensor that owns the blocks; None if it is no longer known."""
    steps: tuple[Step, ...] = ()
    """View ops and their further arguments, in order from the base."""
    copied: bool = False
    """Whether the view cuts blocks, so that its scales are a copy, updated before each use."""

    def then(self, step: Step, *, copied: bool) -> Window:
        """Return the window of a view of this view."""
        return replace(self, steps=(*self.steps, step), copied=self.copied or copied)

    def look(self, x: Tensor) -> Tensor:
        """Return the part of ``x``, a tensor of the base's shape, that the view shows."""
        for op, args, kwargs in self.steps:
            x = op(x, *args, **kwargs)
        return x

    def write(self, value: Tensor, scale: Tensor | None = None, amax: Tensor | None = None) -> None:
        """Write a plain tensor of the view's shape.

        Args:
            value: the new values of the view.
            scale: the scale of each element's block in ``value``. It is kept if all other elements
                of the base's block are zero; otherwise a new scale is computed.
            amax: the amax of each element's block, used where ``scale`` is.

        Raises:
            RuntimeError: the base is unknown.
        """
        if (base := self.base) is None:
            raise RuntimeError(
                "the tensor written to must own its blocks; got a view that shares a block with "
                "elements outside it and has lost its base (it was passed into or out of a "
                "compiled function). Write to the base, or clone() the view first."
            )
        # The new tensor has the layout of the data, so the steps are views of it, too.
        new = torch.empty_like(base.qdata, dtype=base.dtype)
        new.copy_(dequantize_blocks(base.qdata, base.scale, base.spec, base.dtype))
        self.look(new).copy_(value)
        mask = torch.zeros_like(base.qdata, dtype=torch.bool)
        self.look(mask).fill_(True)
        if scale is not None and amax is not None:
            scale, amax = (self._expand_to_base(t, base.spec, mask) for t in (scale, amax))
            outside = block_amax(new.masked_fill(mask, 0), base.spec.block)
            scale = torch.where(outside == 0, scale, 0.0)
        merge_into(base, new, mask, scale=scale, amax=amax)

    def _expand_to_base(self, elements: Tensor, spec: Float8Spec, mask: Tensor) -> Tensor:
        """Reduce one value for each element of the view to one for each block of the base."""
        full = torch.zeros_like(mask, dtype=torch.float32)
        self.look(full).copy_(elements)
        return block_amax(full, spec.block)


def merge_into(
    x: StoredInBlocks, new: Tensor, mask: Tensor, *, scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> None:  # fmt: skip
    """Requantize the blocks of ``x`` in which ``mask`` is True anywhere; leave the other blocks.

    Args:
        new: all new values of ``x``, plain.
        mask: bool, same shape: True for elements that were written.
        scale: the scale to use for each block, or 0 to compute one.
        amax: the amax of each block that belongs to ``scale``.
    """
    spec = x.spec
    touched = block_amax(mask.float(), spec.block) > 0
    q, new_scale, new_amax = quantize_blocks(new, spec)
    new_bytes, old_bytes = q.view(torch.uint8), x.qdata.view(torch.uint8)
    if scale is not None and amax is not None:
        is_given = scale > 0
        new_amax = torch.where(is_given, amax, new_amax)
        new_scale = torch.where(is_given, scale, new_scale)
        q, _, _ = quantize_blocks(new, spec, scale=new_scale)
        is_given = expand_scale(is_given, spec.block, new.shape)
        new_bytes = torch.where(is_given, q.view(torch.uint8), new_bytes)
    old_bytes.copy_(torch.where(expand_scale(touched, spec.block, new.shape), new_bytes, old_bytes))
    x.amax.copy_(torch.where(touched, new_amax, x.amax))
    x.scale.copy_(torch.where(touched, new_scale, x.scale))
