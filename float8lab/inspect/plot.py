"""Plot the histogram and the scales of an FP8 tensor; matplotlib is imported by the first plot."""

from __future__ import annotations

import io
import math
from typing import Any

import torch
from torch import Tensor

from float8lab.arguments import check_flags, needs
from float8lab.inspect.statistics import blocks, stats, stored
from float8lab.ops import as_matrix
from float8lab.tensor import Float8Tensor

__all__ = ["heat_cells", "new_figure", "plot"]


@Float8Tensor._add_view
def plot(x: Tensor, *, local: bool = True) -> Any:
    """Draw a histogram of zeros and exponents, and a heat map of the scales' log2.
    For a tensor with a single scale, the heat map shows log2 of the FP8 data instead.

    Args:
        x: as in ``stats``.
        local: for a DTensor, draw the histogram of this rank's shard; if False, of the unsharded
            tensor, and all ranks must call. The scales are always those of this rank's shard.

    Returns:
        A ``matplotlib.figure.Figure``, which notebooks show; outside of them call its ``savefig``.

    Raises:
        ModuleNotFoundError: matplotlib, of the extra ``plot``, is not installed.
    """
    check_flags(local=local)
    figure = new_figure(figsize=(9, 3.5))
    statistics, (title, cells) = stats(x, local=local), heat_cells(x)
    counts = statistics.histogram("exponent")
    exponents = counts.values.tolist()
    left, right = figure.subplots(1, 2)
    left.bar([exponents[0] - 2, *exponents], [counts.zero, *counts.counts.tolist()])
    left.set(xlabel="exponent of the FP8 data, zeros first", ylabel="elements")
    left.axvline(exponents[0] - 1, color="gray", linewidth=0.5)
    left.set_title(statistics.spec.describe())
    right.set(xlabel="column of cells", ylabel="row of cells", title=title)
    for axis in (left.xaxis, right.xaxis, right.yaxis):
        axis.get_major_locator().set_params(integer=True)
    if cells.numel():
        # "nearest" keeps each block one cell, whatever the number of pixels.
        drawn = right.imshow(cells.numpy(), aspect="auto", interpolation="nearest")
        figure.colorbar(drawn, ax=right)
    return figure


def new_figure(figsize: tuple[float, float]) -> Any:
    """Create a matplotlib figure that a notebook shows whether or not it has imported pyplot."""
    # A Figure, unlike pyplot, opens no window and has no backend and no global state.
    with needs("plot", "matplotlib", "plot"):
        from matplotlib.figure import Figure

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png")
            return png.getvalue()

    return Shown(figsize=figsize, layout="constrained")


def heat_cells(x: Tensor, most: int = 256) -> tuple[str, Tensor]:
    """Return a title, and log2 of the scales as a matrix of at most ``most`` rows and columns.

    If there is a single scale, the matrix has log2 of the magnitudes of the FP8 data instead. A
    cell that stands for several values shows the largest; it is NaN if no value has a finite log2.
    """
    values = blocks(x)
    title = f"log2 of the scales, {tuple(values.shape)}"
    if values.numel() == 1:
        data = stored(x).qdata.detach()
        values, title = as_matrix(data), f"log2 of the FP8 data, {tuple(data.shape)}"
    for dim in (0, 1) if values.numel() else ():
        chunks = values.tensor_split(min(values.shape[dim], most), dim)
        sizes = (chunk.float().abs().nan_to_num(0.0, 0.0) for chunk in chunks)
        values = torch.stack([size.amax(dim) for size in sizes], dim)
    logs = values.float().log2()
    return title, logs.masked_fill(~logs.isfinite(), math.nan).cpu()
