"""Tensors that are equal in every byte, whether or not they are stored in FP8."""

from collections.abc import Mapping
from typing import Any

import torch

from float8lab import Float8Tensor


def assert_same_bytes(a: Any, b: Any, *, amax: bool = True) -> None:
    """Two FP8 tensors of one format and dtype have the same data and scales, and amaxes."""
    assert isinstance(a, Float8Tensor)
    assert isinstance(b, Float8Tensor)
    assert (a.spec, a.dtype, a.shape) == (b.spec, b.dtype, b.shape)
    assert torch.equal(a.qdata.cpu().view(torch.uint8), b.qdata.cpu().view(torch.uint8))
    assert torch.equal(a.scale.cpu(), b.scale.cpu())
    assert not amax or torch.equal(a.amax.cpu(), b.amax.cpu())


def assert_same(a: Any, b: Any) -> None:
    """Two tensors, both stored in FP8 or neither, have one dtype and shape and the same bytes."""
    if isinstance(a, Float8Tensor) or isinstance(b, Float8Tensor):
        assert_same_bytes(a, b)
        return
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    one, other = (x.detach().cpu().flatten().view(torch.uint8) for x in (a, b))
    assert torch.equal(one, other)


def assert_same_state(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Two state dicts have the same tensors under the same names."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert_same(value, b[name])
