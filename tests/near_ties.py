"""Values that reveal how a cast computes bytes from a scale."""

import torch
from torch import Tensor

from float8lab.formats import E4M3


def near_ties(rows: int) -> Tensor:
    """Return float32 ``[rows, 160]`` whose bytes reveal how each row was scaled.

    In every row ``x * encode``, ``x / scale`` and ``x * (1 / scale)`` are three different rows of
    E4M3. The first element of a row is its amax, and the last ones are 0. The other elements are,
    up to a rounding, halfway between two E4M3 values when they are multiplied by the encode factor
    or divided by the scale.
    """
    amax = 1 + torch.arange(64 * rows, device="cpu").float() / (64 * rows)
    encode = torch.tensor(448.0, device="cpu") / amax
    scale = torch.tensor(1.0, device="cpu") / encode
    steps = torch.arange(8, 16, device="cpu") + 0.5
    ties = torch.cat([steps * 2.0**i for i in range(-3, 5)])
    columns = (amax[:, None], ties / encode[:, None], ties * scale[:, None])
    x = torch.cat((*columns, torch.zeros(len(amax), 31, device="cpu")), 1)
    multiplied, divided = by_multiplying(x), _bytes(x / scale[:, None])
    reciprocal = _bytes(x * (1 / scale)[:, None])
    is_distinct = (
        (multiplied != divided).any(1)
        & (multiplied != reciprocal).any(1)
        & (divided != reciprocal).any(1)
    )
    assert int(is_distinct.sum()) >= rows, "or there are too few"
    return x[is_distinct][:rows].contiguous()


def by_multiplying(x: Tensor) -> Tensor:
    """Return each row times its encode factor in E4M3, as uint8."""
    return _bytes(x * (torch.tensor(448.0, device="cpu") / x.abs().amax(1, keepdim=True)))


def _bytes(value: Tensor) -> Tensor:
    return value.clamp(-448, 448).to(E4M3).view(torch.uint8)
