"""Encode a log for its page: small JSON, and columns of float32 that the page decodes on demand.

    {operand}-{field}                    [layers, cells] one field of every record; NaN: no record
    {operand}-exponents-{layer number}   [kept steps, exponents] counts of the histograms

A cell is one recorded step or, in a long run, several consecutive ones: then each field of the cell
is the worst value of that field in these steps.
"""

from __future__ import annotations

import math
import sys
import zlib
from array import array
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from float8lab.inspect.text import finite
from float8lab.inspect.watch.records import Log, Record, evenly_chosen

__all__ = ["FIELDS", "MOST_CELLS", "MOST_COUNTS", "MOST_LOSSES", "embed", "losses"]

MOST_CELLS = 1_000_000
"""Most layers x operands x cells on a page; a longer run has several steps in a cell."""
MOST_COUNTS = 1_000_000
"""Most counts in a page's histograms; a longer run keeps those of evenly spaced steps."""
MOST_LOSSES = 10_000
"""Most points of the loss curve; a longer run keeps those of evenly spaced steps."""

FIELDS: dict[str, Callable[[float, float], float]] = {
    name: min if name in ("scale_min", "sqnr") else max
    for name in (
        "amax", "scale_min", "scale_max", "saturated", "flushed", "subnormal", "nan", "inf", "sqnr",
        "staleness", "elements",
    )
}  # fmt: skip
"""The numeric fields of a record, with the function that picks the worse of two values."""


def embed(log: Log) -> tuple[dict[str, object], dict[str, str]]:
    """Collect the data that the page of a log needs.

    Returns:
        The small data, which is valid as JSON; and columns by name, which are little-endian
        float32, compressed by zlib, in base64.
    """
    layers = list(dict.fromkeys([*log.layers, *(record.layer for record in log.records)]))
    operand_names = {record.operand for record in log.records}
    usual = ("x", "w", "dy", "q", "k", "v")
    operands = [o for o in usual if o in operand_names] + sorted(operand_names.difference(usual))
    steps = sorted({record.step for record in log.records})
    # Each cell holds this many steps.
    stride = max(1, math.ceil(len(steps) * len(layers) * len(operands) / MOST_CELLS))
    firsts = steps[::stride]
    lasts = [steps[min(i + stride, len(steps)) - 1] for i in range(0, len(steps), stride)]

    columns, rows = _fields(log.records, layers, operands, firsts)
    histograms, counts = _histograms(log.records, rows, len(operands))
    columns |= counts

    meta: dict[str, object] = {
        "layers": layers,
        "operands": operands,
        "cells": {"first": firsts, "last": lasts, "stride": stride, "steps": len(steps)},
        "histograms": histograms,
        "summary": _summarize(log.records, rows, operands),
        "loss": losses(log),
        "gemms": _gemms(log, rows),
    }
    return meta, columns


def _encode(values: array[float]) -> str:
    if sys.byteorder == "big":
        values = array("f", values)
        values.byteswap()
    return b64encode(zlib.compress(values.tobytes(), 6)).decode("ascii")


def _fields(
    records: Iterable[Record], layers: Sequence[str], operands: Sequence[str], firsts: Sequence[int]
) -> tuple[dict[str, str], dict[str, int]]:
    """Return a column for each operand and field, and the row of each layer in the columns."""
    rows = {layer: row for row, layer in enumerate(layers)}
    empty = array("f", [math.nan]) * (len(layers) * len(firsts))
    arrays = {(o, f): empty[:] for o in operands for f in FIELDS}
    for record in records:
        index = rows[record.layer] * len(firsts) + bisect_right(firsts, record.step) - 1
        for name, worse in FIELDS.items():
            value, values = getattr(record, name), arrays[record.operand, name]
            if value is not None and not math.isnan(value):
                old = values[index]
                values[index] = value if math.isnan(old) else worse(old, value)
    return {f"{o}-{f}": _encode(values) for (o, f), values in arrays.items()}, rows


def _histograms(
    records: Iterable[Record], rows: dict[str, int], operands: int
) -> tuple[dict[str, object], dict[str, str]]:
    """Return the steps whose histograms are kept, with the range of exponents, and the columns.

    The range, ``low`` to ``high``, is the smallest and the largest exponent of the run.
    """
    filled = [record for record in records if record.exponents]
    if not filled:
        return {"steps": [], "low": 0, "high": 0}, {}
    used = {exponent for record in filled for exponent in record.exponents}
    exponents = range(min(used), max(used) + 1)
    width = len(exponents)
    most = max(2, MOST_COUNTS // (len(rows) * operands * width))
    steps = evenly_chosen(sorted({record.step for record in filled}), most)
    starts = {step: i * width for i, step in enumerate(steps)}
    columns: dict[str, array[float]] = {}
    for record in filled:
        if (start := starts.get(record.step)) is None:
            continue
        name = f"{record.operand}-exponents-{rows[record.layer]}"
        counts = columns.setdefault(name, array("f", [math.nan]) * (len(steps) * width))
        counts[start : start + width] = array("f", [record.exponents.get(e, 0) for e in exponents])
    summary = {"steps": steps, "low": exponents[0], "high": exponents[-1]}
    return summary, {name: _encode(counts) for name, counts in columns.items()}


def losses(log: Log) -> dict[str, list[object]]:
    """Return the loss of each step that has one, with None for a loss that is not finite."""
    known_losses = [(step.step, step.loss) for step in log.steps if step.loss is not None]
    points = evenly_chosen(known_losses, MOST_LOSSES)
    return {"steps": [s for s, _ in points], "values": finite([loss for _, loss in points])}


def _gemms(log: Log, rows: dict[str, int]) -> dict[str, object]:
    """Return texts that list GEMMs, and for each layer the steps at which its text changes."""
    texts: dict[str, int] = {}
    changes: dict[int, list[list[int]]] = {}
    for step in log.steps:
        for layer, kinds in step.gemms.items():
            if layer not in rows:
                continue
            text = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"
            number = texts.setdefault(text, len(texts))
            pairs = changes.setdefault(rows[layer], [])
            if not pairs or pairs[-1][1] != number:
                pairs.append([step.step, number])
    return {"texts": list(texts), "changes": {str(row): pairs for row, pairs in changes.items()}}


RANKED = ("flushed", "saturated", "subnormal", "sqnr", "staleness", "amax", "scale_max")
"""Fields by which operands of layers are ranked; NaNs and infinities are counted separately."""


def _summarize(
    records: Iterable[Record], rows: dict[str, int], operands: Sequence[str]
) -> list[dict[str, object]]:
    """Summarize the records of each operand of each layer in one row.

    Each field in ``RANKED`` is ``[mean, worst, step of the worst]``, or None if no record has a
    finite number; NaNs and infinities are ``[count, number of steps, first step]``.
    """
    groups: dict[tuple[int, int], list[Record]] = {}
    numbers = {operand: number for number, operand in enumerate(operands)}
    for record in records:
        groups.setdefault((rows[record.layer], numbers[record.operand]), []).append(record)
    summary = []
    for (layer, operand), group in sorted(groups.items()):
        row: dict[str, object] = {"layer": layer, "operand": operand}
        for name in RANKED:
            row[name] = _mean_and_worst(group, name)
        bad = [record for record in group if record.nan or record.inf]
        count = sum(record.nan + record.inf for record in bad)
        row["nonfinite"] = [count, len(bad), bad[0].step] if bad else None
        summary.append(row)
    return summary


def _mean_and_worst(group: Iterable[Record], name: str) -> list[float] | None:
    values = [(getattr(record, name), record.step) for record in group]
    finite_values = [(value, step) for value, step in values if finite(value) is not None]
    if not finite_values:
        return None
    worst, step = (min if FIELDS[name] is min else max)(finite_values, key=lambda pair: pair[0])
    return [sum(value for value, _ in finite_values) / len(finite_values), worst, step]
