"""FP8 tensors that are equal in every byte."""

from typing import Any

import torch

from float8lab import Float8Tensor


def assert_same_bytes(a: Any, b: Any, *, amax: bool = True) -> None:
    """Two FP8 tensors of one format and dtype have the same data and scales, and amaxes."""
    assert isinstance(a, Float8Tensor)
    assert isinstance(b, Float8Tensor)
    assert (a.spec, a.dtype, a.shape) == (b.spec, b.dtype, b.shape)
    assert torch.equal(a.qdata.view(torch.uint8), b.qdata.view(torch.uint8))
    assert torch.equal(a.scale, b.scale)
    assert not amax or torch.equal(a.amax, b.amax)
