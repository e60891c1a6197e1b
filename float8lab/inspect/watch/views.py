"""A log as a table and a DataFrame."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Any

from float8lab.arguments import needs
from float8lab.inspect.text import Grid
from float8lab.inspect.watch.records import Log, Record, Step

__all__ = ["table", "to_pandas"]


def table(log: Log, step: int | None = None) -> Grid:
    """``watch.table``."""
    watched = list(dict.fromkeys(record.step for record in log.records))
    step = step if step is not None else next(reversed(watched), None)
    if step not in watched:
        raise ValueError(
            f"step must be one that was watched, of {watched or 'none so far'}; got {step}. Name "
            "another one."
        )
    log_step = next((s for s in log.steps if s.step == step), Step(step or 0))
    title = f"step {step}" + ("" if log_step.loss is None else f", loss {log_step.loss:.6g}")
    records = [record for record in log.records if record.step == step]
    rows = []
    for layer, group in groupby(records, key=lambda record: record.layer):
        kinds = log_step.gemms.get(layer, {}).items()
        told = ", ".join(kind if count == 1 else f"{kind} x{count}" for kind, count in kinds)
        for record in group:
            rows.append((layer, record.operand, *_cells(record), told))
            layer = told = ""  # they stand beside the first of the layer's operands
    columns = ("layer", "", "amax", "scale", "sat%", "flush%", "sub%", "SQNR", "stale")
    alarming = [record.nan + record.inf > 0 or (record.staleness or 0) > 0 for record in records]
    return Grid(title, (*columns, "NaN", "inf", "GEMMs"), rows, alarming, log.recipe)


def _cells(record: Record) -> list[str]:
    low, top = record.scale_min, record.scale_max
    return [
        _short(record.amax),
        _short(low) if low == top else f"{_short(low)}..{_short(top)}",
        *(f"{100 * share:.3g}" for share in (record.saturated, record.flushed, record.subnormal)),
        "" if record.sqnr is None else f"{record.sqnr:.1f}",
        "" if record.staleness is None else f"{record.staleness:+.2f}",
        *(str(count or "") for count in (record.nan, record.inf)),
    ]


def _short(value: float) -> str:
    return f"{value:.3g}" if value == 0 or 0.01 <= value < 1000 else f"{value:.1e}"


def to_pandas(log: Log) -> Any:
    """``watch.to_pandas``: each row has its step's loss."""
    with needs("to_pandas", "pandas", otherwise="write to_jsonl(path)"):
        import pandas

    losses = {step.step: step.loss for step in log.steps}
    rows = [{**asdict(record), "loss": losses.get(record.step)} for record in log.records]
    return pandas.DataFrame(rows, columns=[*Record.__dataclass_fields__, "loss"])
