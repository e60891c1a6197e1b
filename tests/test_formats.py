"""Formats as data: the specs of packed 4-bit tensors."""

import pytest
import torch

from float8lab.formats import E2M1, E2M1_VALUES, E8M0, MXFP4, NVFP4, Float4Spec, Float8Spec, largest


def test_values_of_e2m1_follow_from_its_definition():
    """One bit of mantissa, and two of exponent with a bias of 1; exponent 0 is subnormal."""
    expected = [2.0 ** (max(e, 1) - 1) * ((e > 0) + m / 2) for e in range(4) for m in range(2)]
    assert list(E2M1_VALUES) == expected
    assert largest(E2M1) == expected[-1] == NVFP4.largest()


def test_specs_of_4_bits_are_compared_by_value():
    assert Float4Spec((1, 16)) == NVFP4 != MXFP4
    assert hash(Float4Spec((1, 32), E8M0, False)) == hash(MXFP4)
    assert Float8Spec() != NVFP4
    assert (NVFP4.element_dtype, Float8Spec().element_dtype) == (E2M1, torch.float8_e4m3fn)


def test_blocks_of_4_bits_set_scale_shape_and_packed_dimension():
    assert MXFP4.scale_shape((6, 96)) == (6, 3)
    inner_block_spec = Float4Spec((1, 32, 1), E8M0, False)
    assert (inner_block_spec.packed_dim, inner_block_spec.describe()) == (1, "e2m1 1x32x1 e8m0")


@pytest.mark.parametrize("block", [(), (1, 1), (16, 16), (1, 15), (1, -1), (1, 16.0), (2, True)])
def test_unsupported_blocks_raise(block):
    with pytest.raises(ValueError, match="block must have one even size"):
        Float4Spec(block)


def test_unsupported_scales_raise():
    with pytest.raises(ValueError, match=r"scale_dtype must be .*; got torch.float8_e5m2"):
        Float4Spec(scale_dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"tensor_scale must be a bool; got 2.0"):
        Float4Spec(tensor_scale=2.0)
