"""``checkpoint``: measure the tensors of a checkpoint, and list the suspicious ones first."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from float8lab.arguments import check_callables, check_names, check_path, printable
from float8lab.checkpoints.item import Finding, Item, sizes, usual_name
from float8lab.checkpoints.layouts import recognize
from float8lab.checkpoints.opening import open_checkpoint
from float8lab.checkpoints.source import CheckpointError
from float8lab.inspect.checkpoint.measure import Measured, measure
from float8lab.inspect.text import Grid, Printed, bytes_text, finite, shown
from float8lab.tensor.statistics import KINDS, span

__all__ = [
    "CheckpointReport", "CheckpointRow", "Progress", "checkpoint", "counted", "selected",
    "stepping",
]  # fmt: skip

Progress = Callable[[int, int, str], None]
"""A function that is called with the bytes read so far, the bytes to read in all, and the name of
the tensor that is being read."""

ROWS = 20
"""Default limit of the rows of a table."""

_KEYS = ("name", "fp8", "fp4", "convention", "format", "shape", "nbytes", "file", "severity")
_STATS_KEYS = ("numel", "amax", "scale_min", "scale_max", "exponents")
_BLOCK_KEYS = ("blocks", "saturated_blocks", "idle_blocks")
_SHOWN_SHARES = ("saturated", "zero", "subnormal")


@dataclass(frozen=True)
class CheckpointRow:
    """One tensor of a checkpoint; the scales of a quantized weight are in its row."""

    name: str
    fp8: bool
    convention: str
    """The convention by which a quantized weight is stored, such as ``"DeepSeek"`` or
    ``"compressed-tensors"``; empty for other tensors."""
    format: str
    """``"e4m3 128x128 fp32"``, ``"e4m3, no scale"``, ``"e2m1 1x32 e8m0"``, or a dtype."""
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of the tensor and its scales."""
    file: str
    measured: Measured
    findings: tuple[Finding, ...]
    """Why the tensor is suspicious; empty if it is not."""

    @property
    def format_name(self) -> str:
        """The usual name, such as ``"block-fp8"``, ``"nvfp4"`` or ``"mxfp8"``, or ``format``."""
        return usual_name(self.format)

    @property
    def fp4(self) -> bool:
        """Whether the tensor is a weight in packed 4 bits."""
        return not self.fp8 and self.measured.stats is not None

    @property
    def severity(self) -> int:
        """2 if a finding is an error, 1 if findings are only odd and perhaps intended, else 0."""
        return max((2 if finding.wrong else 1 for finding in self.findings), default=0)

    @property
    def why(self) -> str:
        """The findings as one phrase."""
        return "; ".join(finding.text for finding in self.findings)

    def to_json(self) -> dict[str, object]:
        """Return a dict for ``json.dumps``, with None for numbers that are not finite."""
        measured, stats = self.measured, self.measured.stats
        result: dict[str, object] = {name: getattr(self, name) for name in (*_KEYS, "format_name")}
        result["findings"] = [asdict(finding) for finding in self.findings]
        if stats is not None:
            result["stats"] = {
                **{name: getattr(stats, name) for name in _STATS_KEYS},
                **{kind: stats.count(kind) for kind in KINDS},
                **{name: getattr(measured, name) for name in _BLOCK_KEYS},
            }
        if measured.scale is not None:
            result["scale"] = asdict(measured.scale)
        if measured.plain is not None:
            result["stats"] = asdict(measured.plain)
        return finite(result)


@dataclass(frozen=True, repr=False)
class CheckpointReport(Printed):
    """The content of a checkpoint; ``print`` it, or look at ``rows``."""

    path: str
    container: str
    rows: tuple[CheckpointRow, ...]
    """The tensors, the most suspicious first, and otherwise in the checkpoint's order."""
    notes: tuple[str, ...] = ()
    """Remarks on the checkpoint that concern no single tensor."""
    left_out: int = 0
    """The number of tensors that the argument ``layer`` left out."""

    @property
    def suspicious(self) -> tuple[CheckpointRow, ...]:
        """The rows that have findings."""
        return tuple(row for row in self.rows if row.severity)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(row.nbytes for row in self.rows)

    def summary(self) -> str:
        """Return the result in a few lines."""
        packed = [row for row in self.rows if row.fp4]
        lines = [
            f"{self.path}: {self.container}",
            f"{counted(len(self.rows), 'tensor')}, {bytes_text(self.nbytes)}"
            + (f"; {self.left_out} left out" if self.left_out else ""),
            _stored_in("FP8", [row for row in self.rows if row.fp8]),
            *([_stored_in("4 bits", packed)] if packed else []),
            f"{len(self.suspicious) or 'none'} suspicious",
        ]
        return "\n".join(map(printable, lines + [f"note: {note}" for note in self.notes]))

    def tables(self, limit: int | None = ROWS) -> list[Grid]:
        """Return tables of the suspicious tensors, of the quantized ones, and of all others."""
        suspicious = [(row.name, row.why) for row in self.suspicious]
        weights: dict[bool, list[tuple[str, ...]]] = {True: [], False: []}
        plain_rows = []
        for row in self.rows:
            stats, plain = row.measured.stats, row.measured.plain
            shape = sizes(row.shape)
            if stats is not None:
                saturated, zero, sub = (_percent(stats.share(k)) for k in _SHOWN_SHARES)
                scale = span(stats.scale_min, stats.scale_max, ".2g") if row.measured.scale else "-"
                cells = (row.format_name, saturated, zero, scale, f"{stats.amax:.3g}", sub)
                weights[row.fp8].append((row.name, shape, *cells))
            else:
                numbers = (f"{plain.amax:.3g}", f"{plain.rms:.3g}") if plain else ("-", "-")
                zero = _percent(plain.zero_count / plain.numel if plain and plain.numel else 0.0)
                plain_rows.append((row.name, shape, row.format, *numbers, zero))
        wrong = [row.severity == 2 for row in self.suspicious]
        names = ("tensor", "shape", "format", "sat%", "zero%", "scale", "amax", "sub%")
        grids = (
            Grid("Suspicious", ("tensor", "why"), suspicious, wrong),
            Grid("In FP8", names, weights[True]),
            Grid("In 4 bits", names, weights[False]),
            Grid("Others", ("tensor", "shape", "dtype", "amax", "rms", "zero%"), plain_rows),
        )
        return shown(grids, limit)

    def to_json(self) -> dict[str, object]:
        """Return a dict for ``json.dumps``, with None for numbers that are not finite."""
        return {
            "path": self.path,
            "container": self.container,
            "tensors": len(self.rows),
            "left_out": self.left_out,
            "nbytes": self.nbytes,
            "suspicious": len(self.suspicious),
            "notes": list(self.notes),
            "rows": [row.to_json() for row in self.rows],
        }


def checkpoint(
    path: str | Path, *, layer: str | Sequence[str] = (), progress: Progress | None = None
) -> CheckpointReport:
    """Measure every tensor of a checkpoint, box by box, and list the suspicious ones first.

    Args:
        path: a safetensors file, its index, or a directory of them; a file by ``torch.save``; a
            directory by ``torch.distributed.checkpoint`` or by Megatron-LM. No code in these files
            is run.
        layer: globs of names of tensors or modules, such as ``"model.layers.0"`` or ``"*.mlp.*"``;
            other tensors are not read.
        progress: a function that is called after each box.

    Raises:
        CheckpointError: ``path`` is none of these or damaged, or ``layer`` matches nothing.
        OSError: ``path`` does not exist, or may not be read.
        ModuleNotFoundError: safetensors, of the extra ``inspect``, is needed and not installed.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile(suffix=".pt") as file:
    ...     torch.save({"w": float8lab.quantize(torch.ones(4, 4))}, file)
    ...     _ = file.seek(0)
    ...     report = float8lab.inspect.checkpoint(file.name)
    >>> [(row.name, row.format, row.why) for row in report.rows]
    [('w', 'e4m3 tensor fp32', '1 of 1 blocks saturated')]
    """
    check_path("path", path)
    layer = check_names("layer", layer)
    check_callables(progress=progress)
    source = open_checkpoint(path)
    items = recognize(source)
    names = set(selected([item.name for item in items], layer, source.path))
    chosen = [item for item in items if item.name in names]
    step = stepping(progress, sum(item.nbytes for item in chosen))
    rows = [_row(item, measure(item, functools.partial(step, item.name))) for item in chosen]
    rows.sort(key=lambda row: (-row.severity, -sum(finding.wrong for finding in row.findings)))
    notes = list(source.notes)
    if source.config.get("quant_method") == "fp8" and not any(item.fp8 for item in items):
        notes.append("config.json says that the weights are in FP8; none is")
    left_out = len(items) - len(chosen)
    return CheckpointReport(source.path, source.container, tuple(rows), tuple(notes), left_out)


def stepping(progress: Progress | None, size: int) -> Callable[[str, float], None]:
    """Return a function of a tensor and newly read bytes, which calls ``progress`` with the sum."""
    done = 0

    def step(name: str, nbytes: float) -> None:
        nonlocal done
        done = min(round(done + nbytes), size)
        if progress is not None:
            progress(done, size, name)

    return step


def _row(item: Item, measured: Measured) -> CheckpointRow:
    entry, spec = item.entry, None if measured.stats is None else measured.stats.spec
    identity = item.name, item.fp8, item.convention, item.describe(spec), entry.shape, item.nbytes
    return CheckpointRow(*identity, entry.file, measured, item.findings + measured.findings)


def selected(names: Sequence[str], globs: Sequence[str], place: str) -> list[str]:
    """Return the names that match a glob, or whose module's name does; without globs all names.

    Raises:
        CheckpointError: no name matches. ``place`` is the path that the message shows.
    """
    patterns = [pattern for glob in globs or ["*"] for pattern in (glob, f"{glob}.*")]
    chosen = [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
    if not chosen:
        range_of_names = f", from {names[0]} to {names[-1]}" if names else ""
        raise CheckpointError(
            f"layer must match a tensor of {place}; {' and '.join(globs)} matches none of its "
            f"{len(names)}{range_of_names}."
        )
    return chosen


def counted(count: int, noun: str) -> str:
    """Format a count and a noun, such as ``1 tensor`` and ``2 tensors``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _stored_in(kind: str, rows: Sequence[CheckpointRow]) -> str:
    conventions = " and ".join(dict.fromkeys(row.convention for row in rows if row.convention))
    text = f"{len(rows)} in {kind}, {bytes_text(sum(row.nbytes for row in rows))}"
    return f"{text}, as by {conventions}" if conventions else text


def _percent(share: float) -> str:
    return f"{100 * share:.3g}" if share > 0.0995 else f"{100 * share:.2g}"
