"""Histogram and scales of an FP8 tensor by matplotlib, which is imported by the first plot."""

from __future__ import annotations

import io
from typing import Any

from torch import Tensor

from float8lab.arguments import check_flags, needs
from float8lab.tensor import Float8Tensor
from float8lab.tensor.statistics import blocks, stats

__all__ = ["plot"]


@Float8Tensor._add_view
def plot(x: Tensor, *, local: bool = True) -> Any:
    """Draw the histogram of exponents and log2 of the scales.

    Args:
        x: as in ``stats``.
        local: for a DTensor, draw the histogram of this rank's shard; if False, of the whole
            tensor, and all ranks must call. The scales are this rank's.

    Returns:
        A ``matplotlib.figure.Figure``, which notebooks show; elsewhere call its ``savefig``.

    Raises:
        ModuleNotFoundError: matplotlib, of the extra ``plot``, is not installed.
    """
    check_flags(local=local)
    # Figure, not pyplot: no window, no backend, no state.
    with needs("plot", "matplotlib", "plot"):
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

    class Shown(Figure):
        """A figure that a notebook draws, whether or not pyplot has been imported there."""

        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png")
            return png.getvalue()

    statistics, scales = stats(x, local=local), blocks(x)
    counts = statistics.histogram("exponent")
    figure = Shown(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.bar(counts.values.tolist(), counts.counts.tolist())
    left.set(xlabel="exponent of the code", ylabel="elements")
    left.set_title(statistics.spec.describe())
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_title(f"log2(scale), {tuple(scales.shape)} blocks")
    right.set(xlabel="column of blocks", ylabel="row of blocks")
    for axis in (right.xaxis, right.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    if scales.numel():
        # nearest: a block is a cell, whatever the number of pixels.
        drawn = right.imshow(scales.log2().cpu().numpy(), aspect="auto", interpolation="nearest")
        figure.colorbar(drawn, ax=right)
    return figure
