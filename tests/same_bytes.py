"""Assertions that tensors are equal in every byte, whether or not they are stored in FP8."""

from collections.abc import Mapping
from typing import Any

import torch

from float8lab import Float8Tensor


def assert_same_bytes(a: Any, b: Any, *, amax: bool = True) -> None:
    """Assert that two FP8 tensors have equal format, dtype, data and scales, and equal amaxes."""
    assert isinstance(a, Float8Tensor)
    assert isinstance(b, Float8Tensor)
    assert (a.spec, a.dtype, a.shape) == (b.spec, b.dtype, b.shape)
    assert torch.equal(a.qdata.cpu().view(torch.uint8), b.qdata.cpu().view(torch.uint8))
    assert torch.equal(a.scale.cpu(), b.scale.cpu())
    assert not amax or torch.equal(a.amax.cpu(), b.amax.cpu())


def assert_same(a: Any, b: Any) -> None:
    """Assert that two tensors, both or neither in FP8, have equal dtype, shape and bytes."""
    if isinstance(a, Float8Tensor) or isinstance(b, Float8Tensor):
        assert_same_bytes(a, b)
        return
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    bytes_a, bytes_b = (x.detach().cpu().flatten().view(torch.uint8) for x in (a, b))
    assert torch.equal(bytes_a, bytes_b)


def assert_same_state(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Assert that two state dicts have equal tensors under equal names."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert_same(value, b[name])
