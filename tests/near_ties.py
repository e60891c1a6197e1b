"""Values by which one sees how a cast gets from a scale to bytes."""

import torch
from torch import Tensor

from float8lab.formats import E4M3


def near_ties(rows: int) -> Tensor:
    """Float32 ``[rows, 160]`` whose bytes differ if each row is scaled alone in another way.

    In every row ``x * encode``, ``x / scale`` and ``x * (1 / scale)`` are three different rows of
    E4M3. The first element of a row is its amax, the last ones are 0; the others are halfway
    between two values, but for a rounding, times the encode factor or over the scale.
    """
    amax = 1 + torch.arange(64 * rows, device="cpu").float() / (64 * rows)
    encode = torch.tensor(448.0, device="cpu") / amax
    scale = torch.tensor(1.0, device="cpu") / encode
    steps = torch.arange(8, 16, device="cpu") + 0.5
    ties = torch.cat([steps * 2.0**i for i in range(-3, 5)])
    parts = (amax[:, None], ties / encode[:, None], ties * scale[:, None])
    x = torch.cat((*parts, torch.zeros(len(amax), 31, device="cpu")), 1)
    found, given = by_multiplying(x), _bytes(x / scale[:, None])
    reciprocal = _bytes(x * (1 / scale)[:, None])
    tell = (found != given).any(1) & (found != reciprocal).any(1) & (given != reciprocal).any(1)
    assert int(tell.sum()) >= rows, "or there are too few"
    return x[tell][:rows].contiguous()


def by_multiplying(x: Tensor) -> Tensor:
    """E4M3 of each row times its encode factor, as uint8."""
    return _bytes(x * (torch.tensor(448.0, device="cpu") / x.abs().amax(1, keepdim=True)))


def _bytes(value: Tensor) -> Tensor:
    return value.clamp(-448, 448).to(E4M3).view(torch.uint8)
