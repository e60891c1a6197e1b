"""``diff``: compare two checkpoints, such as a quantized one and its source, by tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from float8lab.arguments import check_callables, check_names, check_path, printable
from float8lab.checkpoints.experts import stack_experts
from float8lab.checkpoints.item import Item, sizes, usual_name
from float8lab.checkpoints.layouts import recognize
from float8lab.checkpoints.opening import open_checkpoint
from float8lab.checkpoints.source import Box, boxes
from float8lab.inspect.checkpoint.report import Progress, counted, selected, stepping
from float8lab.inspect.text import Grid, Printed, finite, shown
from float8lab.tensor.statistics import decibels

__all__ = ["CheckpointDiff", "DiffRow", "diff"]

STATUSES = ("shape", "differs", "unread", "only in A", "only in B", "equal", "same")
"""The statuses of a tensor, the worst first. ``equal``: the values are equal but stored in another
way. ``same``: all bits are equal. ``unread``: torch cannot read the elements of one side."""


@dataclass(frozen=True)
class DiffRow:
    """The comparison of one tensor, which both checkpoints or only one of them have."""

    name: str
    status: str
    """One of ``STATUSES``."""
    a_format: str = ""
    b_format: str = ""
    a_shape: tuple[int, ...] | None = None
    b_shape: tuple[int, ...] | None = None
    numel: int = 0
    changed: int | None = None
    """FP8 data or other elements whose bits differ; None if the two formats differ."""
    changed_scales: int | None = None
    """Scales whose bits differ; None unless both are quantized weights with the same blocks."""
    unlike: int = 0
    """The number of elements that are finite on one side alone, or not finite and different. All
    errors leave them out."""
    signal: float = 0.0
    """Sum of the squares of the reference: B if B alone is not quantized, else A."""
    noise: float = 0.0
    max_error: float = 0.0
    element_noise: float = 0.0
    """Sum over the elements of the square of error / reference, where each square is at most 1."""
    nbytes: int = 0

    @property
    def sqnr(self) -> float:
        """Signal-to-noise ratio in dB; inf if the values are equal."""
        return decibels(self.signal, self.noise)

    @property
    def element_sqnr(self) -> float:
        """Signal-to-noise ratio in dB of the errors of all elements, each relative to its element.

        A single large element can make ``sqnr`` high even if all other elements are lost, but it
        cannot make this ratio high. It is about 32 dB if e4m3 has rounded all elements, and 0 dB if
        all are lost.
        """
        return decibels(self.numel, self.element_noise)

    def to_json(self) -> dict[str, object]:
        """Return a dict for ``json.dumps``, with None for numbers that are not finite."""
        return finite(asdict(self) | {"sqnr": self.sqnr, "element_sqnr": self.element_sqnr})


@dataclass(frozen=True, repr=False)
class CheckpointDiff(Printed):
    """The differences of two checkpoints, A and B; ``print`` it, or look at ``rows``."""

    a: str
    b: str
    rows: tuple[DiffRow, ...]
    """The tensors, the worst first: by status, then by ``unlike`` if they differ, and then by the
    lower of ``sqnr`` and ``element_sqnr``."""
    notes: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether all tensors have the same bits and the same format."""
        return all(row.status == "same" for row in self.rows)

    @property
    def equal(self) -> bool:
        """Whether all tensors have the same values; the two sides may differ in format."""
        return all(row.status in ("same", "equal") for row in self.rows)

    @property
    def counts(self) -> dict[str, int]:
        """The number of tensors with each status."""
        counter = Counter(row.status for row in self.rows)
        return {status: counter[status] for status in STATUSES}

    @property
    def sqnr(self) -> float:
        """Signal-to-noise ratio in dB of all tensors that both checkpoints have."""
        return decibels(sum(row.signal for row in self.rows), sum(row.noise for row in self.rows))

    def summary(self) -> str:
        """Return the result in a few lines."""
        counts = [f"{count} {status}" for status, count in self.counts.items() if count]
        lines = [f"A: {self.a}", f"B: {self.b}"]
        lines.append(f"{counted(len(self.rows), 'tensor')}: " + ", ".join(counts))
        if any(row.status in ("differs", "equal", "same") for row in self.rows):
            lines.append(f"SQNR of all: {_decibels(self.sqnr)}")
        if self.equal and not self.identical:
            lines.append("all values are equal; some are stored in another format")
        return "\n".join(map(printable, lines + [f"note: {note}" for note in self.notes]))

    def tables(self, limit: int | None = 20) -> list[Grid]:
        """Return tables of the tensors that differ, worst first, and of those one side lacks."""
        differing, alarming, missing = [], [], []
        for row in self.rows:
            if row.status.startswith("only"):
                kind, shape = row.a_format or row.b_format, row.a_shape or row.b_shape or ()
                missing.append((row.name, row.status, usual_name(kind), sizes(shape)))
            elif row.status != "same":
                differing.append((row.name, row.status, *_cells(row)))
                alarming.append(row.status == "shape" or row.unlike > 0)
        columns = ("tensor", "status", "SQNR", "by element", "max error", "A -> B", "changed")
        grids = (
            Grid("Different", columns, differing, alarming),
            Grid("Missing", ("tensor", "status", "format", "shape"), missing),
        )
        return shown(grids, limit)

    def to_json(self) -> dict[str, object]:
        """Return a dict for ``json.dumps``, with None for numbers that are not finite."""
        names = ("a", "b", "identical", "equal", "counts", "sqnr", "notes")
        result = {name: finite(getattr(self, name)) for name in names}
        return result | {"rows": [row.to_json() for row in self.rows]}


def diff(
    a: str | Path | Mapping[str, object],
    b: str | Path | Mapping[str, object],
    *,
    layer: str | Sequence[str] = (),
    progress: Progress | None = None,
) -> CheckpointDiff:
    """Compare two checkpoints tensor by tensor; both are read box by box.

    Tensors are matched by name, and a quantized weight is compared together with its scales. So the
    two checkpoints may differ in kind, and one may be the high-precision source of the other. If
    one stores each expert's matrix and the other a stack, the matrices are stacked. If they have no
    name in common, a prefix that one of them has before its names is left out.

    Args:
        a: a path as in ``checkpoint``, or a state dict.
        b: a path or a state dict, too.
        layer: as in ``checkpoint``.
        progress: as in ``checkpoint``.

    Raises:
        CheckpointError, OSError, ModuleNotFoundError: as in ``checkpoint``.
    """
    for argument, side in (("a", a), ("b", b)):
        if not isinstance(side, Mapping):
            check_path(argument, side)
    globs = check_names("layer", layer)
    check_callables(progress=progress)
    first, second = open_checkpoint(a), open_checkpoint(b)
    both_sides = [recognize(source) for source in (first, second)]
    left, right = (
        {item.name: item for item in stack_experts(items, {item.name for item in opposite})}
        for items, opposite in (both_sides, both_sides[::-1])
    )
    notes = []
    if not left.keys() & right.keys():
        for side, names, opposite in (("A", left, right), ("B", right, left)):
            if prefix := _prefix(names, opposite):
                shortened = {name.removeprefix(prefix): item for name, item in names.items()}
                left, right = (shortened, right) if side == "A" else (left, shortened)
                notes.append(f"names of {side} are compared without {prefix}")
                break
    order = selected([*{**left, **right}], globs, f"{first.path} or {second.path}")
    shared_names = [name for name in order if name in left and name in right]
    step = stepping(progress, sum(left[n].nbytes + right[n].nbytes for n in shared_names))
    rows = [_row(name, left.get(name), right.get(name), step) for name in order]
    rows.sort(
        key=lambda row: (
            STATUSES.index(row.status),
            -row.unlike if row.status == "differs" else 0,
            min(row.sqnr, row.element_sqnr),
        )
    )
    return CheckpointDiff(first.path, second.path, tuple(rows), tuple(notes))


def _prefix(names: dict[str, Item], targets: dict[str, Item]) -> str:
    """Return the prefix without which most ``names`` are in ``targets``, or an empty string."""
    prefixes: Counter[str] = Counter()
    for name in names:
        for index, letter in enumerate(name):
            if letter == "." and name[index + 1 :] in targets:
                prefixes[name[: index + 1]] += 1
    return prefixes.most_common(1)[0][0] if prefixes else ""


def _row(name: str, a: Item | None, b: Item | None, step: Callable[[str, float], None]) -> DiffRow:
    sides = [item for item in (a, b) if item is not None]
    formats = a.describe() if a else "", b.describe() if b else ""
    shapes = a.entry.shape if a else None, b.entry.shape if b else None
    numel, nbytes = math.prod(sides[0].entry.shape), sum(item.nbytes for item in sides)
    row = DiffRow(name, "shape", *formats, *shapes, numel, nbytes=nbytes)
    if a is None or b is None:
        return replace(row, status="only in A" if b is None else "only in B")
    if a.entry.shape != b.entry.shape:
        return row
    if a.entry.dtype is None or b.entry.dtype is None:
        return replace(row, status="unread")
    return _compare_tensors(row, a, b, step)


@dataclass
class _Deviation:
    """Sums over the boxes of two tensors; ``DiffRow`` explains these fields."""

    unlike: int = 0
    signal: float = 0.0
    noise: float = 0.0
    max_error: float = 0.0
    element_noise: float = 0.0

    def add(self, x: Tensor, y: Tensor, reference: Tensor) -> None:
        finite_both = x.isfinite() & y.isfinite()
        error = (y - x).abs().masked_fill_(~finite_both, 0.0)
        self.unlike += int((~finite_both & ~((x == y) | (x.isnan() & y.isnan()))).sum())
        if not error.numel():
            return
        self.max_error = max(self.max_error, float(error.max()))
        self.noise += _square(error)
        reference = reference.masked_fill(~finite_both, 0.0)
        self.signal += _square(reference)
        # An error of 0 / 0 counts as 0, and any other error / 0 as 1, the loss of the element.
        self.element_noise += _square((error / reference.abs()).nan_to_num_(0.0).clamp_(max=1.0))


def _compare_tensors(row: DiffRow, a: Item, b: Item, step: Callable[[str, float], None]) -> DiffRow:
    """Compare two tensors of one shape box by box, and return their row."""
    alike = _bits(a) == _bits(b)
    same_blocks = a.spec is not None and b.spec is not None and a.spec.block == b.spec.block
    reference_is_b = a.quantized and not b.quantized
    share = row.nbytes / max(row.numel, 1)
    changed, changed_scales, deviation = 0, 0, _Deviation()
    # A box starts where blocks of both tensors start; a block of -1 sets no constraint.
    blocks = [math.lcm(max(m, 1), max(n, 1)) for m, n in zip(a.block, b.block, strict=True)]
    for box in boxes(a.entry.shape, blocks):
        if alike:
            changed += _count_changed(_raw(a, box), _raw(b, box))
        if same_blocks:
            changed_scales += _count_changed(*(x.scales(box).view(torch.int32) for x in (a, b)))
        x, y = a.values(box), b.values(box)
        deviation.add(x, y, y if reference_is_b else x)
        step(row.name, share * x.numel())
    is_equal = deviation.noise == deviation.max_error == deviation.unlike == 0
    same_format = alike and (same_blocks or not a.quantized) and _same_levels(a, b)
    is_same = is_equal and not (changed or changed_scales) and same_format
    return replace(
        row,
        status="same" if is_same else "equal" if is_equal else "differs",
        changed=changed if alike else None,
        changed_scales=changed_scales if same_blocks else None,
        **asdict(deviation),
    )


def _bits(item: Item) -> torch.dtype | None:
    return item.entry.dtype if item.spec is None else item.spec.fp8_dtype


def _same_levels(a: Item, b: Item) -> bool:
    """Return whether both or neither have block scales, and their tensor scales are equal."""
    x, y = a.read_tensor_scale(), b.read_tensor_scale()
    same_tensor_scale = x is y if x is None or y is None else torch.equal(x, y)
    return same_tensor_scale and (a.scale is None) == (b.scale is None)


def _raw(item: Item, box: Box) -> Tensor:
    return item.qdata(box) if item.quantized else item.entry.read(box)


def _count_changed(x: Tensor, y: Tensor) -> int:
    """Count the elements whose bits differ."""
    if x.dtype.is_floating_point or x.dtype.is_complex:
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        if x.dtype.is_complex:
            x, y = torch.view_as_real(x), torch.view_as_real(y)
        x, y = (side.contiguous().view(integers[side.element_size()]) for side in (x, y))
    return int((x != y).sum())


def _square(x: Tensor) -> float:
    wide = torch.complex128 if x.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(x, dtype=wide)) ** 2


def _decibels(sqnr: float) -> str:
    return f"{sqnr:.4g} dB"


def _cells(row: DiffRow) -> tuple[str, str, str, str, str]:
    if row.status == "shape":
        shapes = (sizes(shape or ()) for shape in (row.a_shape, row.b_shape))
        return "", "", "", " -> ".join(shapes), ""
    formats = dict.fromkeys((usual_name(row.a_format), usual_name(row.b_format)))
    changed = "" if row.changed is None else f"{100 * row.changed / max(row.numel, 1):.3g}%"
    if row.changed_scales:
        changed += f", {counted(row.changed_scales, 'scale')}"
    if row.unlike:
        changed += f", {row.unlike} inf or NaN"
    errors = "", "", ""
    if row.status != "unread":
        errors = _decibels(row.sqnr), _decibels(row.element_sqnr), f"{row.max_error:.3g}"
    return *errors, " -> ".join(formats), changed.removeprefix(", ")
