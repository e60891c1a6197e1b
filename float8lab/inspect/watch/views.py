"""A log as a table and a DataFrame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from float8lab.arguments import needs
from float8lab.inspect.text import rich_table
from float8lab.inspect.watch.records import Log, Record, Step

__all__ = ["table", "to_pandas"]


def table(log: Log, step: int | None = None) -> Any:
    """``watch.table``."""
    watched = list(dict.fromkeys(record.step for record in log.records))
    if step is None and watched:
        step = watched[-1]
    if step not in watched:
        raise ValueError(
            f"step must be one that was watched, of {watched or 'none so far'}; got {step}. Name "
            "another one."
        )
    log_step = next((s for s in log.steps if s.step == step), Step(step or 0))
    title = f"step {step}" + ("" if log_step.loss is None else f", loss {log_step.loss:.6g}")
    rows: list[Sequence[str | tuple[str, str]]] = []
    records_of_step = [record for record in log.records if record.step == step]
    for layer, group in groupby(records_of_step, key=lambda record: record.layer):
        rows += _rows_of_layer(layer, list(group), log_step.gemms.get(layer, {}))
    options: dict[str, Any] = {"title": title, "caption": log.recipe, "padding": (0, 1, 0, 0)}
    right = {name: {"justify": "right"} for name in _COLUMNS}
    columns = {"layer": {}, "": {}, **right, "GEMMs": {}}
    return rich_table(rows, columns, otherwise="look at log.records", **options)


def _rows_of_layer(
    layer: str, records: Sequence[Record], gemms: Mapping[str, int]
) -> Iterator[Sequence[str | tuple[str, str]]]:
    """One kind of GEMM stands beside each operand, and the remaining kinds beside the last one."""
    kinds = [kind if n == 1 else f"{kind} x{n}" for kind, n in gemms.items()]
    for i, record in enumerate(records):
        shown = kinds[i:] if i == len(records) - 1 else kinds[i : i + 1]
        yield (layer if i == 0 else "", record.operand, *_cells(record), "\n".join(shown))


_COLUMNS = ("amax", "scale", "sat%", "flush%", "sub%", "SQNR", "stale", "NaN", "inf")


def _cells(record: Record) -> list[tuple[str, str]]:
    """The text and style of each of ``_COLUMNS``."""
    low, top = record.scale_min, record.scale_max
    shares = (record.saturated, record.flushed, record.subnormal)
    scale = _short(low) if low == top else f"{_short(low)}..{_short(top)}"
    clipped = record.staleness is not None and record.staleness > 0
    return [
        (_short(record.amax), ""),
        (scale, ""),
        *((f"{100 * share:.3g}", "") for share in shares),
        ("" if record.sqnr is None else f"{record.sqnr:.1f}", ""),
        ("" if record.staleness is None else f"{record.staleness:+.2f}", "red" if clipped else ""),
        (str(record.nan), "bold red" if record.nan else ""),
        (str(record.inf), "bold red" if record.inf else ""),
    ]


def _short(value: float) -> str:
    return f"{value:.3g}" if value == 0 or 0.01 <= value < 1000 else f"{value:.1e}"


def to_pandas(log: Log) -> Any:
    """``watch.to_pandas``: each row has its step's loss."""
    with needs("to_pandas", "pandas", "pandas", "write to_jsonl(path)"):
        import pandas

    losses = {step.step: step.loss for step in log.steps}
    rows = [{**asdict(record), "loss": losses.get(record.step)} for record in log.records]
    names = [*Record.__dataclass_fields__, "loss"]
    return pandas.DataFrame(rows, columns=names)
