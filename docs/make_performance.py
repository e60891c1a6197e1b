"""Make docs/performance.md, its plots, and the table of README.md from benchmarks/RESULTS.md.

    python -m docs.make_performance

Every number on the page, in the plots and in the table is a cell of a table in that file. This file
chooses the rows and columns, and has the text around them.
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
README = DOCS.parent / "README.md"
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
        elif fact := re.match(
            r"- (GPU|CPU|torch|triton|commit|command|clocks|driver|copy): (.*)", line
        ):
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
    part: str
    """The heading of the page below which the chart appears."""
    label: str
    """The column that names the rows."""
    value: str
    """The column that is drawn."""
    also: tuple[str, ...] = ()
    """Further columns of the page's table."""
    caption: str = ""
    """Draw only tables whose caption contains this text; by default all tables of the section."""
    baseline: str = ""
    """The start of the labels of the rows with which the other rows are compared."""

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


SUSTAINED, STEPS, ALONE, REST = PARTS = (
    "Sustained, as in training",
    "Training steps",
    "Alone, at full clocks",
    "Memory and loss",
)
WORDS = {
    SUSTAINED: "Each candidate runs its steps back to back for one second. The candidates take "
    "turns, three times. The GPU is at its power limit, so its clocks are lower. Training reaches "
    "these speeds, and the documentation claims only these.",
    STEPS: "Ten steps of forward, backward and optimizer in a row, for one candidate after the "
    "other.",
    ALONE: "One forward and backward at a time, from a cold cache and with pauses. The GPU keeps "
    "its full clocks, so ratios are higher than training sustains. Use these numbers to compare "
    "kernels, and libraries that were measured in the same run; they do not tell the speed of "
    "training.",
    REST: "",
}
PEERS = "Beside Transformer Engine and torchao"
LIBRARIES = ("float8lab", "Transformer Engine", "torchao")
ELSEWHERE = "another host"  # than that of the table's baseline
RATIOS = ("x bf16, sustained", "x bf16, held")

CHARTS = (
    Chart(
        "performance_sustained", "Compared with other libraries",
        "A library without a bar has not been measured here in this way.",
        PEERS, SUSTAINED, "implementation", "x bf16, sustained", ("from",), baseline="bfloat16",
    ),
    Chart(
        "performance_layer_sustained", "Transformer layer",
        "One layer of a Llama 8B, forward and backward. `converted` is the plain layer after "
        "`convert_to_float8`; `TransformerLayer` also fuses norms and activations with casts.",
        "layer", SUSTAINED, "implementation", "x bf16, sustained",
        ("sustained ms", "MHz", "W"), baseline="plain bfloat16",
    ),
    Chart(
        "performance_linear_sustained", "Linear layer",
        "Layers of a Llama 8B, with all casts, in eager mode and under `torch.compile`. torchao's "
        "`tensorwise` is the same scaling as `current`.",
        "linear", SUSTAINED, "implementation", "x bf16, sustained", ("sustained ms", "MHz", "W"),
        baseline="bfloat16",
    ),
    Chart(
        "performance_experts", "Layer of experts",
        "A layer of [experts](moe.md), from the router's choice to the weighted sums. The first "
        "row is the way in which Transformers runs experts in bfloat16.",
        "experts", SUSTAINED, "implementation", "x bf16, sustained", ("sustained ms", "MHz", "W"),
        baseline="bfloat16",
    ),
    Chart(
        "performance_grouped", "Grouped linear layer",
        "Only the GEMMs of experts and their casts. With small experts FP8 is slower than "
        "bfloat16, because the casts of weights take longer than the GEMMs.",
        "grouped", SUSTAINED, "implementation", "x bf16, sustained", ("sustained ms", "MHz", "W"),
        baseline="bfloat16",
    ),
    Chart(
        "performance_tensor_parallel", "Tensor parallel",
        "The same Llama layer, sharded over [two GPUs](many_gpus.md).",
        "tensor_parallel", SUSTAINED, "implementation", "x bf16, sustained",
        ("sustained ms", "gathered MB", "peak GB"), baseline="DTensor",
    ),
    Chart(
        "performance_steps", "One GPU", "Layers of a Llama 8B with their optimizer.",
        "model", STEPS, "implementation", "tokens/s", ("ms a step (quartiles)", "x bf16"),
        baseline="plain bfloat16",
    ),
    Chart(
        "performance_pretrain", "A billion parameters",
        "A Llama from scratch, 2000 steps of 16384 bytes of text; "
        "`benchmarks/pretrain.png` has the curves. Block ran on another GPU; its ratio is "
        "to bfloat16 there.",
        "A Llama of a billion parameters, from scratch", STEPS, "run", "tokens/s",
        ("x bfloat16", "peak GB", "validation loss at 2000"), baseline="bfloat16",
    ),
    Chart(
        "performance_fsdp", "FSDP2",
        "The Llama 8B layers with FSDP2 on two GPUs ([several processes](distributed.md)).",
        "fsdp", STEPS, "implementation", "tokens/s a GPU", ("x bf16", "peak GB", "gathered MB"),
        baseline="bf16",
    ),
    Chart(
        "performance_small", "A small model",
        "Here FP8 is slower than bfloat16, because the CPU cannot launch the casts as fast as the "
        'GPU runs them. The recipe `"auto"` leaves such layers in bfloat16, and '
        "[Does FP8 pay](advise.md) finds them.",
        "overhead", STEPS, "implementation", "x bf16", ("wall ms (quartiles)",), caption="GPT",
        baseline="bfloat16",
    ),
    Chart(
        "performance_layer", "Transformer layer, alone", "The same layer, one step at a time.",
        "layer", ALONE, "implementation", "x bf16", ("GPU ms (quartiles)",),
        baseline="plain bfloat16",
    ),
    Chart(
        "performance_linear", "Linear layer, alone",
        "The same layers, one step at a time. In a smaller layer, the casts take a larger part of "
        "the time.",
        "linear", ALONE, "implementation", "x bf16", ("GPU ms (quartiles)", "saved, of bf16"),
        baseline="bfloat16",
    ),
    Chart(
        "performance_mlp", "Norm and MLP",
        "`LayerNormMLP`, compared with the same modules of torch and of torchao.",
        "mlp", ALONE, "implementation", "x bf16", ("GPU ms (quartiles)",),
        baseline="plain bfloat16",
    ),
    Chart(
        "performance_attention", "FP8 attention",
        "The times include the casts. Measure before you turn `fp8_dpa` on: the gain depends on "
        "the mask and the length, and backward runs in high precision for heads above 128.",
        "attention", ALONE, "implementation", "TFLOP/s", ("forward ms", "x bf16"),
        baseline="cuDNN",
    ),
    Chart(
        "performance_memory", "Memory between forward and backward",
        "The memory that one layer holds for its backward, including its output. "
        "`fp8_activation_input` is an "
        "option of `LayerNormMLP` and `TransformerLayer`.",
        "memory", REST, "implementation", "held GB",
        ("held GB, of plain", "peak GB", "weights GB"), caption="1 layer",
        baseline="plain bfloat16",
    ),
    Chart(
        "performance_loss", "Validation loss",
        "The loss after training a GPT. Seeds of one recipe differ by more than the means of the "
        "recipes do.",
        "H200, the `124m` preset", REST, "run", "mean",
        ("seed 0", "seed 1", "seed 2", "mean, against high precision"), baseline="high precision",
    ),
)  # fmt: skip


def _number(cell: str) -> float | None:
    found = re.match(r"[-+]?\d+(\.\d+)?", cell)
    return float(found[0]) if found else None


_WIDTH, _BAR, _ROW, _LEFT, _VALUE = 400, 20, 24, 4, 62
"""Units of a picture, which are pixels on a phone that has its width; text is 12 units high."""
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2428; }
  .group { font-weight: 600; }
  .value { text-anchor: end; font-weight: 600; }
  .base { fill: #d3d9de; }
  .fp8 { fill: #80cbc4; }
  .peer { fill: #ffcc80; }
  .line { stroke: #5f6b76; stroke-dasharray: 3 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e8eaed; }
    .base { fill: #4b545c; }
    .fp8 { fill: #00695c; }
    .peer { fill: #8a5a12; }
    .line { stroke: #aab4bd; }
  }
"""


def draw(chart: Chart, groups: Sequence[Table]) -> str:
    """Horizontal bars from 0 with their labels on them, and their values in a column at the right.

    One group is below the other, each with a line at its baseline's value.
    """
    largest = max(_number(row[chart.value]) or 0.0 for group in groups for row in group.rows)
    longest = _WIDTH - _LEFT - _VALUE
    shapes: list[str] = []
    y = 4
    for group in groups:
        for line in textwrap.wrap(group.caption, 60) if len(groups) > 1 else []:
            shapes.append(f'<text class="group" x="{_LEFT}" y="{y + 13}">{escape(line)}</text>')
            y += 17
        bars: list[str] = []
        texts: list[str] = []
        base = ""
        top = y = y + 3
        for row in group.rows:
            label, cell = row[chart.label], row[chart.value]
            width = (_number(cell) or 0.0) / largest * longest
            is_base = label.startswith(chart.baseline)
            kind = "base" if is_base else "peer" if label.startswith(LIBRARIES[1:]) else "fp8"
            label += ", another host" if ELSEWHERE in row.get("from", "") else ""
            base = f"{_LEFT + width:.1f}" if is_base and not base else base
            bars.append(
                f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}"/>'
            )
            texts += [
                f'<text x="{_LEFT + 5}" y="{y + 14}">{escape(label)}</text>',
                f'<text class="value" x="{_WIDTH - 4}" y="{y + 14}">{escape(cell)}</text>',
            ]
            y += _ROW
        if base:
            bars.append(f'<line class="line" x1="{base}" y1="{top}" x2="{base}" y2="{y - 4}"/>')
        shapes += bars + texts
        y += 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{1.4 * _WIDTH:.0f}" '
        f'height="{1.4 * y:.0f}" viewBox="0 0 {_WIDTH} {y}" role="img">\n'
        f"<title>{escape(chart.title)}: {escape(chart.value)}</title>\n"
        f"<style>{_STYLE}</style>\n" + "\n".join(shapes) + "\n</svg>\n"
    )


def peers_table(all_tables: Sequence[Table]) -> str:
    """The table of README.md: each table of ``PEERS`` in one row, a column for each library.

    A star marks what was measured on another host than the table's baseline.
    """
    lines = [
        "| x bfloat16 | " + " | ".join(LIBRARIES) + " |",
        "| --- |" + " --- |" * len(LIBRARIES),
    ]
    for table in all_tables:
        if table.section != PEERS:
            continue
        cells: dict[str, list[str]] = {library: [] for library in LIBRARIES}
        for row in table.rows:
            library, _, recipe = row["implementation"].partition(", ")
            (ratio,) = (row[name] for name in RATIOS if name in row)
            if library in cells:
                mark = r"\*" if ELSEWHERE in row["from"] else ""
                cells[library].append(f"{ratio}{mark} {recipe}".strip())
        lines.append(f"| {table.caption} | " + " | ".join(map("; ".join, cells.values())) + " |")
    return "\n".join(lines)


def with_peers(text: str, table: str) -> str:
    """A page with the table between its two comments.

    Raises:
        ValueError: the page has no such comments.
    """
    begin, end = "<!-- begin peers -->\n", "\n<!-- end peers -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"README.md must have {begin.strip()} and {end.strip()}.")
    return f"{before}{begin}{table}{end}{after}"


def section(chart: Chart, groups: Sequence[Table]) -> str:
    """The part of the page that shows one chart."""
    alternative = f"Bars of {chart.value}, the numbers of the table below"
    lines = [
        f"### {chart.title}", "", *textwrap.wrap(chart.text, 100), "",
        f"![{chart.title}. {alternative}](images/{chart.name}.svg)", "",
    ]  # fmt: skip
    columns = (chart.label, chart.value, *chart.also)
    for group in groups:
        named = group.facts or group.section == PEERS
        lines += [f"{group.caption if named else group.section}:", ""]
        lines += ["| " + " | ".join(columns) + " |"]
        lines += ["| --- |" + "".join(f" ---{':' * (c != 'from')} |" for c in columns[1:])]
        lines += ["| " + " | ".join(row.get(c, "-") for c in columns) + " |" for row in group.rows]
        lines += [""]
    facts = groups[0].facts
    if "command" in facts:
        machine = f"{facts.get('GPU') or facts.get('CPU')}, torch {facts['torch']}"
        lines += [f"`{facts['command']}`, {machine}, commit {facts['commit']}.", ""]
    return "\n".join(lines)


HEAD = """# Performance

<!-- Made by `python -m docs.make_performance` from benchmarks/RESULTS.md; do not edit. -->

Every number on this page is a cell of `benchmarks/RESULTS.md`. That file also has quartiles, the
distance from a measured lower bound, the targets that were missed and why, and what was not
measured. In the pictures, grey bars are runs in high precision, and orange bars are other
libraries. The dashed line is at the first grey bar. `python -m benchmarks` repeats the measurements
on your GPU.

A GPU that works without a pause reaches its power limit and lowers its clocks, in FP8 more than in
bfloat16. The first part of this page has the speeds to expect in training, and the third part
compares kernels. [`inspect.advise`](advise.md) measures the layers of your own model on your GPU.

"""


def make() -> dict[Path, str]:
    """Every file that is made, with its text."""
    found = tables(RESULTS.read_text())
    chosen = [(chart, chart.groups(found)) for chart in CHARTS]
    files = {IMAGES / f"{chart.name}.svg": draw(chart, groups) for chart, groups in chosen}
    parts = []
    for part in PARTS:
        words = [*textwrap.wrap(WORDS[part], 100), ""] if WORDS[part] else []
        charts = [section(chart, groups) for chart, groups in chosen if chart.part == part]
        parts.append("\n".join([f"## {part}", "", *words, *charts]))
    files[PAGE] = HEAD + "\n".join(parts).rstrip() + "\n"
    files[README] = with_peers(README.read_text(), peers_table(found))
    return files


if __name__ == "__main__":
    for path, text in make().items():
        path.write_text(text)
        print(path.relative_to(DOCS.parent))
