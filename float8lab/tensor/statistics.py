"""Statistics of FP8 data: the results of ``float8lab.inspect.stats`` and related functions.

These kinds of elements are counted, only in the tensor itself (not in padding, nor in the hidden
part of a block that a view cuts):

========== ========================================================================================
saturated  the code is the largest finite one, of either sign. An element that exactly equals the
           largest value counts, so with scales computed from amaxes (rule fp32) each block has one.
zero       the code is 0 or -0
subnormal  the code is nonzero with an exponent field of 0
nan, inf   the code is NaN, or an infinity (e5m2 only)
clipped    needs an original: it exceeded the largest value by more than rounding; a format with one
           more step would have stored a larger value. An infinity counts where a finite code
           replaced it.
flushed    needs an original: the code is 0 or -0 and the original is not
========== ========================================================================================

Errors are those of ``qdata.float() * scale``, before rounding to the tensor's dtype. Elements whose
original or stored value is not finite are left out.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from float8lab import arguments
from float8lab.formats import E2M1, E2M1_VALUES, E4M3, Spec
from float8lab.tables import aligned

__all__ = [
    "KINDS", "BlockStats", "Comparison", "Histogram", "TensorStats", "code_values", "decibels",
    "health", "kinds_of", "span",
]  # fmt: skip

KINDS = ("saturated", "zero", "subnormal", "nan", "inf")
"""The kinds of elements that are counted; an element may belong to none of them."""

_on_cpu = functools.partial(torch.tensor, device="cpu")


@dataclass(frozen=True, repr=False)
class Comparison:
    """The error of a tensor against its original: floats and counts over all elements."""

    numel: int
    clipped_count: int
    flushed_count: int
    signal: float
    """Sum of squares of the original."""
    noise: float
    """Sum of squares of the error."""
    max_error: float
    """Largest absolute error."""
    mean_error: float
    """Mean of stored minus original: 0 if rounding has no bias."""

    @property
    def clipped(self) -> float:
        """Share of the elements that exceeded the largest value."""
        return _share(self.clipped_count, self.numel)

    @property
    def flushed(self) -> float:
        """Share of the elements that became zero and were not zero before."""
        return _share(self.flushed_count, self.numel)

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise in dB, ``10 log10(signal / noise)``; inf if exact."""
        return decibels(self.signal, self.noise)

    @property
    def effective_bits(self) -> float:
        """Bits of the ideal uniform quantizer with this SQNR for a full-scale sine.

        ``(SQNR - 1.76) / 6.02``. Source: IEEE Std 1241, "effective number of bits".
        """
        return _bits(self.sqnr)

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values as text, for tables."""
        return [
            ("clipped", f"{100 * self.clipped:.3g}% ({self.clipped_count})"),
            ("flushed to zero", f"{100 * self.flushed:.3g}% ({self.flushed_count})"),
            ("SQNR", f"{self.sqnr:.4g} dB"),
            ("effective bits", f"{self.effective_bits:.3g}"),
            ("max error", f"{self.max_error:.4g}"),
            ("mean error", f"{self.mean_error:.3g}"),
        ]

    def __repr__(self) -> str:
        return ", ".join(map(" ".join, self.rows()))


_Share = TypeVar("_Share", float, Tensor)


class _Shares(Generic[_Share]):
    """The shares of the kinds of elements by name, for the whole tensor or for each block."""

    def share(self, kind: str) -> _Share:
        """Return the elements of a kind as a share of all elements."""
        raise NotImplementedError

    @property
    def saturated(self) -> _Share:
        """Share of the elements at the largest finite code."""
        return self.share("saturated")

    @property
    def zero(self) -> _Share:
        """Share of zeros."""
        return self.share("zero")

    @property
    def subnormal(self) -> _Share:
        """Share of subnormal numbers."""
        return self.share("subnormal")

    @property
    def nan(self) -> _Share:
        """Share of NaNs."""
        return self.share("nan")

    @property
    def inf(self) -> _Share:
        """Share of infinities."""
        return self.share("inf")


@dataclass(frozen=True, repr=False)
class TensorStats(_Shares[float]):
    """Statistics of a tensor as Python numbers; shares are between 0 and 1."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec
    amax: float
    """Largest amax of any block, before quantization."""
    scale_min: float
    """Smallest scale; NaN if there are no blocks."""
    scale_max: float
    codes: tuple[int, ...]
    """Number of elements with each code: 256 counts, or 16 for packed 4 bits."""
    comparison: Comparison | None = None
    """The comparison with the original, if one was given."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(self.codes)

    def count(self, kind: str) -> int:
        """Return the number of elements of a kind.

        ``kind`` is ``"saturated"``, ``"zero"``, ``"subnormal"``, ``"nan"`` or ``"inf"``.
        """
        arguments.check_choice("kind", kind, KINDS)
        return sum(self.codes[code] for code in _codes_of_kinds(self.spec.fp8_dtype)[kind])

    def share(self, kind: str) -> float:
        """Return ``count`` as a share of all elements, 0 if there are none."""
        return _share(self.count(kind), self.numel)

    @property
    def exponents(self) -> tuple[int, int] | None:
        """Smallest and largest ``floor(log2(|code|))`` of nonzero finite elements; None if none."""
        used = [e for e, n in self.count_exponents().items() if n]
        return (used[0], used[-1]) if used else None

    def count_exponents(self) -> dict[int, int]:
        """Return the number of elements with each exponent of the format, in ascending order."""
        counts: dict[int, int] = {}
        for code, exponent in _exponents_of_codes(self.spec.fp8_dtype).items():
            counts[exponent] = counts.get(exponent, 0) + self.codes[code]
        return counts

    @property
    def flushed(self) -> float | None:
        """Share of the elements that became zero and were not before; None without an original."""
        return None if self.comparison is None else self.comparison.flushed

    @property
    def clipped(self) -> float | None:
        """Share of the elements beyond the largest value; None without an original."""
        return None if self.comparison is None else self.comparison.clipped

    @property
    def sqnr(self) -> float | None:
        """Signal to quantization noise in dB; None without an original."""
        return None if self.comparison is None else self.comparison.sqnr

    @property
    def effective_bits(self) -> float | None:
        """See ``Comparison.effective_bits``; None without an original."""
        return None if self.comparison is None else self.comparison.effective_bits

    def histogram(self, by: str = "code") -> Histogram:
        """Count elements by code or exponent; ``by`` as in the function ``histogram``."""
        arguments.check_choice("by", by, ("code", "exponent"))
        if by == "code":
            return Histogram(by, code_values(self.spec.fp8_dtype), _on_cpu(self.codes))
        values, counts = map(_on_cpu, zip(*self.count_exponents().items(), strict=True))
        return Histogram(by, values, counts, self.count("zero"))

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values as text, for tables."""
        rows = [
            ("shape", str(self.shape)),
            ("dtype", str(self.dtype)),
            ("spec", self.spec.describe()),
            ("amax", f"{self.amax:.6g}"),
            ("scale", span(self.scale_min, self.scale_max)),
        ]
        names = ("saturated", "zero", "subnormal", *(k for k in ("nan", "inf") if self.count(k)))
        rows += [(k, f"{100 * self.share(k):.3g}% ({self.count(k)})") for k in names]
        used = self.exponents
        rows.append(("exponents", "none" if used is None else f"{used[0]}..{used[1]}"))
        return rows + ([] if self.comparison is None else self.comparison.rows())

    def __repr__(self) -> str:
        return "\n".join([*aligned(self.rows(), left=2), "", str(self.histogram("exponent"))])


@dataclass(frozen=True, eq=False, repr=False)
class BlockStats(_Shares[Tensor]):
    """Statistics of each block: tensors with the shape of the scales, on the tensor's device."""

    spec: Spec
    numel: Tensor
    """int64: number of elements of each block; smaller at an edge."""
    amax: Tensor
    scale: Tensor
    counts: Mapping[str, Tensor]
    """int64 counts by name: those of ``KINDS``, and with an original "clipped" and "flushed"."""
    exponent_min: Tensor
    """float32: smallest ``floor(log2(|code|))`` of nonzero finite elements; NaN if none."""
    exponent_max: Tensor
    sqnr: Tensor | None = None
    """float64, dB; None without an original."""

    def __repr__(self) -> str:
        return f"<BlockStats of {tuple(self.scale.shape)} blocks, {self.spec.describe()}>"

    def share(self, kind: str) -> Tensor:
        """Return ``counts[kind]`` as a float64 share of the block's elements, 0 if it has none."""
        if not isinstance(kind, str) or kind not in self.counts:
            raise ValueError(
                f"kind must be one of {', '.join(self.counts)}; got {arguments.shown(kind)}. "
                "Shares clipped and flushed need an original: stats(original, per_block=True)."
            )
        return self.counts[kind].double() / self.numel.clamp(min=1)

    @property
    def flushed(self) -> Tensor:
        """Share of elements that became zero and were not. ValueError without an original."""
        return self.share("flushed")

    @property
    def clipped(self) -> Tensor:
        """Share of elements beyond the largest value. ValueError without an original."""
        return self.share("clipped")

    @property
    def effective_bits(self) -> Tensor | None:
        """See ``Comparison.effective_bits``; None without an original."""
        return None if self.sqnr is None else _bits(self.sqnr)


@dataclass(frozen=True, eq=False, repr=False)
class Histogram:
    """Number of elements with each code or exponent, as CPU tensors."""

    by: str
    """``"code"`` or ``"exponent"``."""
    values: Tensor
    """The values of the codes (float32, without scale), or the exponents (int64), ascending."""
    counts: Tensor
    """int64 counts, one for each of ``values``."""
    zero: int = 0
    """Number of elements that are 0 or -0, if ``values`` are exponents, which zeros lack."""

    def __repr__(self) -> str:
        """Draw a small picture: zeros and a bar per exponent, or a bar per 1/32 of the values."""
        if self.by == "exponent":
            bins, low, top = [self.zero, 0, *self.counts.tolist()], "0   2^", "2^"
        else:
            low = top = ""
            ordered = self.counts[self.values.argsort(stable=True)]  # NaNs are last
            bins = [int(chunk.sum()) for chunk in ordered.tensor_split(32)]
        most, values = max(*bins, 1), self.values[self.values.isfinite()]
        lines = ["".join(" #"[4 * n > level * most] * 2 for n in bins) for level in (3, 2, 1, 0)]
        low, top = f"{low}{values.min():g}", f"{top}{values.max():g}"
        return "\n".join([*map(str.rstrip, lines), low + top.rjust(2 * len(bins) - len(low))])


def health(found: TensorStats) -> str:
    """Describe in one line the shares of elements that lost range or are not finite.

    >>> t = float8lab.quantize(torch.tensor([448.0, 0.01, 0.0, 1.0]))
    >>> float8lab.inspect.health(t.stats())
    '25% saturated, 25% subnormal, 25% zero'
    """
    arguments.check_instance("found", found, TensorStats, "a TensorStats")
    if not found.numel:
        return "empty"
    labels = {kind: label for kind, label in (("nan", "NaN"), ("inf", "inf")) if found.count(kind)}
    labels |= {kind: kind for kind in ("saturated", "subnormal", "zero")}
    return ", ".join(f"{100 * found.share(kind):.3g}% {label}" for kind, label in labels.items())


def code_values(dtype: torch.dtype) -> Tensor:
    """Return the value of each code (256 of FP8, 16 of ``E2M1``) in float32, on the CPU."""
    if dtype == E2M1:
        return _on_cpu((*E2M1_VALUES, *(-v for v in E2M1_VALUES)))
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()


def span(low: float, top: float, form: str = ".6g") -> str:
    """Format a range as text; equal bounds give one number."""
    return f"{low:{form}}" if low == top or math.isnan(low) else f"{low:{form}}..{top:{form}}"


def decibels(signal: float, noise: float) -> float:
    """Return ``10 log10(signal / noise)``; inf without noise."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _bits(sqnr: _Share) -> _Share:
    return (sqnr - 1.76) / 6.02


def _share(count: int, numel: int) -> float:
    return count / numel if numel else 0.0


def kinds_of(data: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a mask over FP8 data (uint8) for each of ``KINDS``."""
    body = data & (0x07 if dtype == E2M1 else 0x7F)  # without the sign
    if dtype == E2M1:  # neither NaN nor infinity; one bit of mantissa
        top, nan, inf, low = body == 7, body > 7, body > 7, 0x02
    elif dtype == E4M3:  # seven ones are NaN, there is no infinity; three bits of mantissa
        top, nan, inf, low = body == 0x7E, body == 0x7F, body > 0x7F, 0x08
    else:  # as in IEEE 754, the largest exponent is infinity or NaN; two bits of mantissa
        top, nan, inf, low = body == 0x7B, body > 0x7C, body == 0x7C, 0x04
    return dict(zip(KINDS, (top, body == 0, (body > 0) & (body < low), nan, inf), strict=True))


@functools.cache
def _codes_of_kinds(dtype: torch.dtype) -> dict[str, list[int]]:
    data = torch.arange(16 if dtype == E2M1 else 256, dtype=torch.uint8, device="cpu")
    return {kind: data[mask].tolist() for kind, mask in kinds_of(data, dtype).items()}


@functools.cache
def _exponents_of_codes(dtype: torch.dtype) -> dict[int, int]:
    """Return ``floor(log2(|code|))`` of each finite nonzero code, in ascending order."""
    values = enumerate(code_values(dtype).tolist())
    exponents = {c: math.frexp(v)[1] - 1 for c, v in values if v and math.isfinite(v)}
    return dict(sorted(exponents.items(), key=operator.itemgetter(1)))
