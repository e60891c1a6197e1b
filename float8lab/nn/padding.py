"""Padding of experts' rows, for programs that pad them; ``GroupedLinear`` takes any number of rows.

T rows of all experts, H features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8lab.arguments import check_size
from float8lab.nn.grouped_linear import checked_sizes
from float8lab.ops import round_up
from float8lab.tensor.permute import check_tokens

__all__ = ["Fp8Padding", "Fp8Unpadding"]


class _AlignedRows(nn.Module):
    """Base of both modules: the numbers of experts' rows without padding and with it."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = check_size("num_gemms", num_gemms, minimum=1)
        align_size = 32 if align_size is None else align_size
        self.align_size = check_size("align_size", align_size, minimum=1)

    def _counts(self, inp: Tensor, m_splits: Sequence[int] | Tensor) -> tuple[list[int], list[int]]:
        """Return how many rows each expert has, first without padding and then with it."""
        check_tokens("inp", inp)
        if (counts := checked_sizes(m_splits, inp, self.num_gemms, "num_gemms")) is None:
            return self._counts(inp, torch.as_tensor(m_splits).tolist())  # waits for the GPU
        return counts, [round_up(count, self.align_size) for count in counts]


class Fp8Padding(_AlignedRows):
    """Append rows of zeros to each expert's rows, so that each has a multiple of ``align_size``.

    Rows after those of the last expert stay at the end.

    Args:
        num_gemms: the number of experts.
        align_size: None stands for 32, which suits every recipe of Transformer Engine.

    Raises:
        TypeError: an argument is no integer.
        ValueError: an argument is below 1.

    >>> rows, counts = float8lab.Fp8Padding(2, 4)(torch.ones(5, 1), [3, 2])
    >>> rows.flatten(), counts
    (tensor([1., 1., 1., 0., 1., 1., 0., 0.]), [4, 4])
    >>> float8lab.Fp8Unpadding(2, 4)(rows, [3, 2]).flatten()
    tensor([1., 1., 1., 1., 1.])
    """

    def forward(self, inp: Tensor, m_splits: Sequence[int] | Tensor) -> tuple[Tensor, list[int]]:
        """Return the padded rows, and their number for each expert.

        Args:
            inp: ``[T, H]``.
            m_splits: the number of rows of each expert in ``inp``; the host reads a tensor.

        Raises:
            TypeError: ``inp`` is no floating-point tensor, or ``m_splits`` holds no integers.
            ValueError: ``inp`` has another shape, or ``m_splits`` does not fit it.
        """
        counts, padded = self._counts(inp, m_splits)
        if padded != counts:
            *experts, unassigned = inp.split([*counts, inp.shape[0] - sum(counts)])
            sizes = zip(experts, counts, padded, strict=True)
            rows = (F.pad(x, (0, 0, 0, size - count)) for x, count, size in sizes)
            inp = torch.cat([*rows, unassigned])
        return inp, padded


class Fp8Unpadding(_AlignedRows):
    """Remove the rows that an ``Fp8Padding`` with the same arguments has appended."""

    def forward(self, inp: Tensor, m_splits: Sequence[int] | Tensor) -> Tensor:
        """Return the rows without padding; arguments and errors are those of ``Fp8Padding``.

        Args:
            m_splits: the number of rows of each expert without padding.
        """
        counts, padded = self._counts(inp, m_splits)
        if padded == counts:
            return inp
        checked_sizes(padded, inp, self.num_gemms, "these are with padding")
        *experts, unassigned = inp.split([*padded, inp.shape[0] - sum(padded)])
        rows = (x[:count] for x, count in zip(experts, counts, strict=True))
        return torch.cat([*rows, unassigned])
