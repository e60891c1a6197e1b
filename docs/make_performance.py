"""Make docs/performance.md and its plots from the tables of benchmarks/RESULTS.md.

    python -m docs.make_performance

Every number on the page and in the plots is a cell of a table there; which rows and columns are
shown, and the words around them, are written here.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "RESULTS.md"
PAGE = DOCS / "performance.md"
IMAGES = DOCS / "images"


@dataclass(frozen=True)
class Table:
    """One table of RESULTS.md."""

    section: str
    """Name of the subject between whose comments it stands, or else the heading above it."""
    caption: str
    """The last line of text above it."""
    facts: dict[str, str]
    """What the section says of the machine and the run."""
    rows: list[dict[str, str]]


def tables(text: str) -> list[Table]:
    """All tables of RESULTS.md."""
    found: list[Table] = []
    section = caption = ""
    facts: dict[str, str] = {}
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if heading := re.match(r"#+ (.*)", line):
            section, facts = heading[1], {}
        elif begin := re.match(r"<!-- begin benchmarks\.(\w+)", line):
            section, facts = begin[1], {}
        elif fact := re.match(r"- (GPU|CPU|torch|triton|commit|command|clocks|driver): (.*)", line):
            facts[fact[1]] = fact[2]
        elif not line.startswith("|"):
            header = []
            caption = line.strip() or caption
        elif not header:
            header = cells
            found.append(Table(section, caption, facts, []))
        elif set(line) - set("|:- "):
            found[-1].rows.append(dict(zip(header, cells, strict=True)))
    return found


@dataclass(frozen=True)
class Chart:
    """One column of the tables of a section, as horizontal bars."""

    name: str
    title: str
    text: str
    section: str
    label: str
    """The column that names the rows."""
    value: str
    """The column that is drawn."""
    also: tuple[str, ...] = ()
    """Columns that the page's table shows beside it."""
    caption: str = ""
    """Draw only tables whose caption has this in it; by default all of the section."""
    baseline: str = ""
    """Rows whose label starts so are what the others are compared with."""

    def groups(self, all_tables: Sequence[Table]) -> list[Table]:
        """The tables with the rows that are shown."""
        chosen = []
        for table in all_tables:
            if table.section == self.section and self.caption in table.caption:
                has = [row for row in table.rows if self.label in row and self.value in row]
                rows = [row for row in has if _number(row[self.value]) is not None]
                if rows:
                    chosen.append(Table(table.section, table.caption, table.facts, rows))
        if not chosen:
            raise ValueError(f"{RESULTS.name} must have a table for {self.name}; it has none.")
        return chosen


CHARTS = (
    Chart(
        "performance_linear",
        "Linear layer",
        "Forward and backward of layers of a Llama 8B, with all casts, in eager mode. Of a smaller "
        "layer the casts are a larger part. Hopper has no tensor cores for MX.",
        "linear", "implementation", "x bf16", ("GPU ms (quartiles)", "saved, of bf16"),
        baseline="bfloat16",
    ),
    Chart(
        "performance_peers",
        "Beside torchao",
        "The same layers, also under `torch.compile`, and torchao 0.18 in the same run; its "
        "`tensorwise` is what `current` is. torchao is meant to be compiled.",
        "Compiled, and torchao", "implementation", "x bf16", ("GPU ms (quartiles)",),
        baseline="bfloat16",
    ),
    Chart(
        "performance_layer",
        "Transformer layer",
        "One layer of a Llama 8B, forward and backward. `converted` is the plain layer after "
        "`convert_to_float8`; `TransformerLayer` also fuses norms and activations with casts.",
        "layer", "implementation", "x bf16", ("GPU ms (quartiles)",), baseline="plain bfloat16",
    ),
    Chart(
        "performance_layer_compiled",
        "Compiled transformer layer",
        "The same layer, also under `torch.compile`.",
        "Compiled layers", "implementation", "x bf16", ("GPU ms (quartiles)",),
        baseline="plain bfloat16",
    ),
    Chart(
        "performance_layer_torchao",
        "Transformer layer beside torchao",
        "The plain layer after `convert_to_float8`, and after torchao 0.18's conversion, in the "
        "same run.",
        "Beside torchao, compiled", "implementation", "x bf16", ("GPU ms (quartiles)",),
        baseline="plain bfloat16",
    ),
    Chart(
        "performance_mlp",
        "Norm and MLP",
        "`LayerNormMLP`, forward and backward, beside the same modules of torch, and torchao 0.18.",
        "mlp", "implementation", "x bf16", ("GPU ms (quartiles)",), baseline="plain bfloat16",
    ),
    Chart(
        "performance_steps",
        "Training steps",
        "Layers of a Llama 8B with their optimizer on one GPU.",
        "model", "implementation", "tokens/s", ("ms a step (quartiles)", "x bf16"),
        baseline="plain bfloat16",
    ),
    Chart(
        "performance_fsdp",
        "FSDP2",
        "The same layers, sharded ([several processes](distributed.md)).",
        "fsdp", "implementation", "tokens/s a GPU", ("x bf16", "peak GB", "gathered MB"),
        baseline="bf16",
    ),
    Chart(
        "performance_memory",
        "Memory between forward and backward",
        "What one layer holds for its backward, output included. `fp8_activation_input` is an "
        "option of `LayerNormMLP` and `TransformerLayer`.",
        "memory", "implementation", "held GB", ("held GB, of plain", "peak GB", "weights GB"),
        caption="1 layer", baseline="plain bfloat16",
    ),
    Chart(
        "performance_attention",
        "FP8 attention",
        "Forward and backward with casts; backward is in high precision. Measure before you turn "
        "`fp8_dpa` on: what it gains depends on the mask and on the length.",
        "attention", "implementation", "TFLOP/s", ("forward ms", "x bf16"), baseline="cuDNN",
    ),
    Chart(
        "performance_small",
        "A small model",
        "Here FP8 loses: the CPU cannot issue the casts as fast as the GPU runs them. "
        '`"auto"` leaves such layers in bfloat16, and [Does FP8 pay](advise.md) finds them.',
        "overhead", "implementation", "x bf16", ("wall ms (quartiles)",),
        caption="GPT", baseline="bfloat16",
    ),
    Chart(
        "performance_loss",
        "Validation loss",
        "After training a GPT. Seeds of one recipe differ by more than the means of the recipes.",
        "H200, the `124m` preset", "run", "mean",
        ("seed 0", "seed 1", "seed 2", "mean, against high precision"), baseline="high precision",
    ),
)  # fmt: skip


def _number(cell: str) -> float | None:
    found = re.match(r"[-+]?\d+(\.\d+)?", cell)
    return float(found[0]) if found else None


_BAR, _GAP, _LEFT, _WIDTH, _RIGHT = 20, 6, 350, 380, 70
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #222; }
  .value { paint-order: stroke; stroke: #fff; stroke-width: 4px; }
  .group { font-weight: 600; }
  .base { fill: #9aa5b1; }
  .fp8 { fill: #00796b; }
  .line { stroke: #222; stroke-dasharray: 3 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e0e0e0; }
    .line { stroke: #e0e0e0; }
    .value { stroke: #1e2129; }
    .fp8 { fill: #26a69a; }
    .base { fill: #78828c; }
  }
"""


def draw(chart: Chart, groups: Sequence[Table]) -> str:
    """Horizontal bars from 0, one group below the other, with a line at the baseline's value."""
    largest = max(_number(row[chart.value]) or 0.0 for group in groups for row in group.rows)
    shapes: list[str] = []
    y = 8
    for group in groups:
        if len(groups) > 1:
            shapes.append(f'<text class="group" x="8" y="{y + 15}">{escape(group.caption)}</text>')
            y += _BAR + _GAP
        bars: list[str] = []
        texts: list[str] = []
        base = ""
        top = y
        for row in group.rows:
            label, cell = row[chart.label], row[chart.value]
            width = (_number(cell) or 0.0) / largest * _WIDTH
            right = f"{_LEFT + width:.1f}"
            is_base = label.startswith(chart.baseline)
            base = right if is_base and not base else base
            bars.append(
                f'<rect class="{"base" if is_base else "fp8"}" x="{_LEFT}" y="{y}" '
                f'width="{width:.1f}" height="{_BAR}"/>'
            )
            texts += [
                f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>',
                f'<text class="value" x="{right}" dx="6" y="{y + 15}">{escape(cell)}</text>',
            ]
            y += _BAR + _GAP
        if base:
            bars.append(f'<line class="line" x1="{base}" y1="{top}" x2="{base}" y2="{y - _GAP}"/>')
        shapes += bars + texts
        y += _GAP
    size = f"{_LEFT + _WIDTH + _RIGHT} {y}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img">\n'
        f"<title>{escape(chart.title)}: {escape(chart.value)}</title>\n"
        f"<style>{_STYLE}</style>\n" + "\n".join(shapes) + "\n</svg>\n"
    )


def section(chart: Chart, groups: Sequence[Table]) -> str:
    """The part of the page that shows one chart."""
    alternative = f"Bars of {chart.value}, the numbers of the table below"
    lines = [
        f"## {chart.title}", "", *textwrap.wrap(chart.text, 100), "",
        f"![{chart.title}. {alternative}](images/{chart.name}.svg)", "",
    ]  # fmt: skip
    columns = (chart.label, chart.value, *chart.also)
    for group in groups:
        lines += [f"{group.caption if group.facts else group.section}:", ""]
        lines += ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
        lines += ["| " + " | ".join(row.get(c, "-") for c in columns) + " |" for row in group.rows]
        lines += [""]
    facts = groups[0].facts
    if "command" in facts:
        machine = f"{facts.get('GPU') or facts.get('CPU')}, torch {facts['torch']}"
        lines += [f"`{facts['command']}`, {machine}, commit {facts['commit']}.", ""]
    return "\n".join(lines)


HEAD = """# Performance

<!-- Made by `python -m docs.make_performance` from benchmarks/RESULTS.md; do not edit. -->

Every number here is a cell of `benchmarks/RESULTS.md`, which has more: quartiles, the distance from
a measured floor, the targets that were missed and why, what was not measured. Grey bars are in high
precision, and the dashed line is the first of them. `python -m benchmarks` repeats it on your GPU.

For your own model ask [`inspect.advise`](advise.md), which measures its layers on your GPU.

"""


def make() -> dict[Path, str]:
    """Every file that is made, with its text."""
    found = tables(RESULTS.read_text())
    chosen = [(chart, chart.groups(found)) for chart in CHARTS]
    files = {IMAGES / f"{chart.name}.svg": draw(chart, groups) for chart, groups in chosen}
    files[PAGE] = (
        HEAD + "\n".join(section(chart, groups) for chart, groups in chosen).rstrip() + "\n"
    )
    return files


if __name__ == "__main__":
    for path, text in make().items():
        path.write_text(text)
        print(path.relative_to(DOCS.parent))
