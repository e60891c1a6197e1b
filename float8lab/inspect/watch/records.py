"""What was seen of a model while it trained: plain data, which views and reports read.

It knows no model and no tensor, so that a log written by one process can be read by another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Log", "Record", "Step"]


@dataclass(frozen=True)
class Record:
    """One operand of one layer in one step. Shares are parts of the elements."""

    step: int
    layer: str
    """The module's qualified name in the model."""
    operand: str
    """``"x"``, ``"w"`` or ``"dy"``."""
    amax: float
    """Largest magnitude before the cast."""
    scale_min: float
    scale_max: float
    """Range of the decode scales; one scale has min == max."""
    saturated: float
    """Share at the largest finite code."""
    flushed: float
    """Share that became zero and was not."""
    subnormal: float
    """Share of subnormal codes."""
    nan: int
    inf: int
    """NaNs and infinities before the cast."""
    sqnr: float | None
    """In dB, against the values before the cast; None where all are exact or none is finite."""
    staleness: float | None
    """log2 of amax over the amax that the scale was made for: above 0 the cast clipped. None where
    the scale is that of the values themselves."""
    elements: int
    exponents: dict[int, int] = field(default_factory=dict)
    """How many nonzero finite codes have each exponent, floor(log2(|code|))."""


@dataclass(frozen=True)
class Step:
    """One training step."""

    step: int
    loss: float | None = None
    gemms: dict[str, dict[str, int]] = field(default_factory=dict)
    """By layer: how many GEMMs ran, by kind, such as ``{"fprop": 1, "dgrad": 1, "wgrad": 1}``."""


@dataclass
class Log:
    """All that was seen, in the order of the steps."""

    recipe: str = ""
    """The recipe, as it prints."""
    conversion: str = ""
    """The report of ``convert_to_float8``, where the model has one."""
    about: dict[str, str] = field(default_factory=dict)
    """Versions, the device, the number of parameters and the like, to be shown as they are."""
    layers: list[str] = field(default_factory=list)
    """In the model's order."""
    steps: list[Step] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
