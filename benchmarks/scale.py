"""Compare predictions of ``python -m float8lab scale`` with the measured rows of RESULTS.md.

    python -m benchmarks.scale

No GPU is needed, since measurements are read from the file. For each row with the time or memory of
a training step, a layer, or an op of a layer on one or two GPUs, the functions that predict entire
meshes predict the number; for a row that cannot be predicted, the reason is given.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.fsdp import VARIANTS
from benchmarks.models import LLAMA
from benchmarks.recipes import RECIPES
from docs.make_performance import RESULTS, Table, tables
from float8lab.inspect.scale.mesh import Links, Mesh
from float8lab.inspect.scale.predict import (
    Job,
    Seconds,
    activation,
    gemms,
    kept,
    layer,
    norm,
    passing_bytes,
    predict,
    total,
)
from float8lab.inspect.scale.sizes import ModelSize
from float8lab.recipes import Recipe, cost
from float8lab.tables import aligned

__all__ = ["Compared", "compared", "main"]

SIZE = ModelSize(
    name="Llama-3-8B layers", layers=8, width=LLAMA.D, heads=LLAMA.H, groups=LLAMA.G, ffn=LLAMA.F,
    vocabulary=1,
)  # fmt: skip
ROTARY = 2.4e-3 / 16384
"""Seconds for each token that the plain layer of the benchmarks takes to compute the angles of its
rotary embedding for every element; models keep them (RESULTS.md, "Transformer layer")."""
LINKS = Links(nvlink=205e9)
"""NCCL's rate for the 64 MB that tensor parallel ranks gather (RESULTS.md, "Links between
two GPUs")."""
BY_MEMORY = ("quantize", "elementwise", "optimizer")
"""The kinds of work whose time is that of reading and writing memory."""
OTHERS = "another library's"
NO_GEMM = "Hopper has no GEMM for it"


@dataclass(frozen=True)
class Compared:
    """A measured number, and its prediction or the reason why there is none."""

    table: str
    row: str
    measured: float
    """The measured number, in ms or GB."""
    predicted: float | None
    why_not: str = ""

    @property
    def error(self) -> float:
        """The error of the prediction, relative to the measured number."""
        return 0.0 if self.predicted is None else self.predicted / self.measured - 1


def _recipe(name: str) -> Recipe | str | None:
    """Return the recipe in a row's name; a text if the row cannot be predicted."""
    if name.startswith(("torchao", "TE ", "Transformer Engine")):
        return OTHERS
    if "mx" in name.lower():
        return NO_GEMM
    if "auto" in name:
        name = "delayed"  # ``auto`` chose this recipe for every layer
    found = next((make() for key, make in RECIPES.items() if re.search(rf"\b{key}\b", name)), None)
    if found is not None and "FP8 attention" in name:
        found = replace(found, fp8_dpa=True)
    return found


def _ms(table: Table, found: Seconds) -> float:
    """Return ms on a table's GPU, whose memory may differ from that of the rates' GPU."""
    slower = _slower(table)
    parts = (
        seconds * (slower if kind in BY_MEMORY else 1.0)
        for kind, seconds in found.items()
        if kind != "cpu"
    )
    return 1e3 * sum(parts)


def _slower(table: Table) -> float:
    """Return how many times longer a copy takes on a table's GPU than on the rates' GPU."""
    copy = re.match(r"([\d.]+) TB/s", table.facts.get("copy", ""))
    return 1 / cost.moved(1e12 * float(copy[1])) if copy else 1.0


def _job(name: str, **how: Any) -> Job:
    fused = name.startswith(("TransformerLayer", "LayerNorm"))
    return Job(mode="compile" if "compile" in name else "eager", fused=fused, **how)


def _numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"\d+", text)]


def _linear(table: Table, name: str, recipe: Recipe | None, *, sustained: bool = False) -> float:
    M, K, N = _numbers(table.caption)[:3]
    return _ms(table, gemms(recipe, M, [(N, K)], _job(name, sustained=sustained)))


def _norm_linear(
    table: Table, name: str, recipe: Recipe | None, *, sustained: bool = False
) -> float:
    M, K, N = _numbers(table.caption)[:3]
    job = _job(name, sustained=sustained)
    fused = job.fused and recipe is not None
    parts = [gemms(recipe, M, [(N, K)], job), norm(recipe, M * K, fused=fused)]
    return _ms(table, total(parts))


def _mlp(table: Table, name: str, recipe: Recipe | None, *, sustained: bool = False) -> float:
    M, D, F = _numbers(table.caption)[:3]
    job = _job(name, sustained=sustained)
    eager = job.mode == "eager" and not job.fused
    gated, fused = "swiglu" in table.caption, job.fused and recipe is not None
    parts = [
        gemms(recipe, M, [((2 if gated else 1) * F, D), (D, F)], job),
        norm(recipe, M * D, fused=fused),
        activation(recipe, M * F, gated=gated, fused=fused, eager=eager),
    ]
    chunks = 0.0
    if gated and eager:  # one GEMM computes gate and up, and backward joins the gradients
        chunks = 1e3 * cost.moved(8 * M * F)
    return _ms(table, total(parts)) + chunks * _slower(table)


def _layer(table: Table, name: str, recipe: Recipe | None, *, sustained: bool = False) -> float:
    batch, sequence = _numbers(table.caption)[:2]
    job = _job(name, sustained=sustained, micro=batch, sequence=sequence)
    rotary = 0.0 if job.fused else 1e3 * ROTARY * batch * sequence
    return _ms(table, layer(SIZE, recipe, job, Mesh())) + rotary


def _attention(table: Table, name: str, recipe: Recipe | None) -> float | str:
    if "window" in table.caption or "packed" in table.caption:
        return "attention is predicted for whole sequences, under a causal mask or none"
    if name.startswith("flash"):
        return "cuDNN is faster, and is what torch takes"
    if "FP8" in name:
        assert recipe is not None
        recipe = replace(recipe, fp8_dpa=True)
    batch, length, heads, head = _numbers(table.caption)
    elements = batch * length * heads * head
    return 1e3 * cost.attention(recipe, elements, length, causal="causal" in table.caption)


def _step(table: Table, name: str, recipe: Recipe | None) -> float:
    layers, batch, sequence = _numbers(table.caption)[:3]
    job = _job(name, micro=batch, batch=batch, sequence=sequence, weight_bytes=2)
    rotary = 0.0 if job.fused else ROTARY * layers * batch * sequence
    return 1e3 * (predict(SIZE, recipe, job, Mesh()).seconds + rotary)


def _fsdp(table: Table, name: str, what: str) -> float | str:
    variant = next(key for key, value in VARIANTS.items() if value == name)
    ranks = _numbers(table.caption)[0]
    recipe = None if variant == "bf16" else RECIPES["current"]()
    job = Job(
        mode="compile" if "compile" in table.caption else "eager", batch=ranks, micro=1,
        sequence=8192, fp8_gather=variant in ("gather", "stored"),
    )  # fmt: skip
    step = predict(SIZE, recipe, job, Mesh(dp=ranks))
    rotary = ROTARY * SIZE.layers * job.sequence
    return 1e3 * (step.seconds + rotary) if what == "ms a step" else step.bytes / 1e9


def _tensor_parallel(table: Table, row: dict[str, str]) -> float | str:
    name = row["implementation"]
    recipe = _recipe(name)
    if isinstance(recipe, str):
        return recipe
    ranks, batch, sequence = _numbers(table.caption)[:3]
    # The time that GEMMs would hide is spent waiting for the CPUs of other ranks.
    job = _job(name, sustained=True, micro=batch, sequence=sequence, links=LINKS)
    rotary = 0.0 if name.startswith("TransformerLayer") else 1e3 * ROTARY * batch * sequence / ranks
    return _ms(table, layer(SIZE, recipe, job, Mesh(tp=ranks))) + rotary


def _gemm(table: Table, name: str, recipe: Recipe | None) -> float | str:
    if "e5m2" in name:
        return "the recipes' rates are of e4m3"
    gemm = re.findall("fprop|dgrad|wgrad", table.caption)[0]
    granularity, _, accumulation = name.partition(", ")
    if accumulation and (accumulation == "fast") != (gemm == "fprop"):
        return "only fprop adds products fast"
    kinds = {"tensor": "current", "row": "rowwise", "bfloat16": ""}
    kind = kinds.get(granularity, "block")
    recipe = RECIPES[kind]() if kind else None
    return 1e3 * cost.gemm(recipe, gemm, *_numbers(table.caption)[:3])


def _cast(table: Table, name: str, recipe: Recipe | None) -> float | str:
    recipes = {
        "cast pair": "delayed",
        "quantize pair tensor": "current",
        "quantize pair row": "rowwise",
        "quantize pair 1x128": "block",
    }
    rows, columns = (int(n) for n in re.findall(r"(\d+) x (\d+)", table.caption)[0])
    kinds = {"RMSNorm,": "norm", "SwiGLU,": "activation", "SwiGLU's": "gradient"}
    kind = kinds.get(table.caption.split()[0])
    slower = _slower(table)
    if name == "values" and kind is not None:
        return slower * 1e3 * rows * columns * getattr(cost.prologues(None), kind)
    if name not in recipes:
        return "no training step has it alone"
    recipe = RECIPES[recipes[name]]()
    seconds = cost.cast(recipe, rows * columns)
    if kind is not None:
        seconds += rows * columns * getattr(cost.prologues(recipe), kind)
    return slower * 1e3 * seconds


def _memory(table: Table, name: str, what: str) -> float | str:
    if "200 steps" in table.caption:
        return "growth, which is nil"
    layers, batch, sequence = _numbers(table.caption)[:3]
    plain, half = name.startswith("plain"), "fp8_activation_input" in name
    high = "bfloat16" in name
    recipe = None if high else RECIPES["current"]()  # all recipes save one byte in place of two
    job = Job(mode="compile" if "compile" in name else "eager", fused=not plain)
    bytes_kept = layers * kept(SIZE, recipe, job, half_input=half)
    if what == "peak GB":
        bytes_kept += passing_bytes(SIZE, recipe, job, half_input=half)
    return batch * sequence * bytes_kept / 1e9


def _offload(table: Table, row: dict[str, str]) -> float | str:
    if row["layers offloaded"] != "0":
        return "offload is no part of a mesh"
    recipe = None if row["recipe"] == "bf16" else RECIPES["current"]()
    job = Job(mode="eager")
    layers = SIZE.layers * kept(SIZE, recipe, job)
    return 8192 * (layers + passing_bytes(SIZE, recipe, job)) / 1e9


ROWS: dict[str, tuple[str, Callable[..., float | str]]] = {
    "linear": ("GPU ms (quartiles)", _linear),
    "quantize": ("GPU ms (quartiles)", _cast),
    "layer": ("GPU ms (quartiles)", _layer),
    "gemm": ("GPU ms (quartiles)", _gemm),
    "attention": ("both GPU ms (quartiles)", _attention),
    "mlp": ("GPU ms (quartiles)", _mlp),
    "norm_linear": ("GPU ms (quartiles)", _norm_linear),
    "model": ("ms a step (quartiles)", _step),
}
"""The measured column of a section, and the function that predicts the column."""
UNPREDICTED = {
    "Beside Transformer Engine and torchao": "repeats rows of other sections",
    "accuracy": "no time or memory",
    "A kernel of our own": "ratios of kernels that no recipe uses",
    "CPU, the `tiny` preset": "a CPU's",
    "CPU, blocks of `TransformerLayer`, a GPT and a Llama": "a CPU's",
    "H200, the `124m` preset": "no time or memory",
    "grouped": "GEMMs of experts, whose rates the model does not have",
    "experts": "experts with their permutation, whose rates the model does not have",
    "permute": "what a mixture of experts adds, which the model does not have",
    "overhead": "CPU time, which differs by tens of per cent between hosts",
    "GEMMs beside communication": "single GEMMs beside copies",
    "overlap": "single GEMMs, with what the CPU needs to queue them",
    "Context parallelism": "attention alone, beside communication",
    "context_parallel": "attention alone, beside communication",
    "Links between two GPUs": "the rate of links is taken from it",
    "A Llama of a billion parameters, from scratch": "tokens of layers of another width",
    "In turns with the peers": "other libraries; ours is in the sections of layers and experts",
    "Energy of a layer": "energy; its times are those of the section on transformer layers",
    "Report page in a browser": "a browser's",
    "decode": "a step of generation; the model is of training",
    "Inspection on a GPU": "small layers, which wait for the CPU",
}
"""Sections without predictions, and the reasons."""
JOBS = {
    "train_gpt.py": "small layers, which wait for the CPU",
    "train_lightning.py": "autocast, under which norms and sums are in float32",
    "finetune_llama.py": "another library's layers, which wait for the CPU",
    "finetune_lora.py": "frozen weights have no wgrad",
    "generate.py": "no training",
    "export_vllm.py": "no training",
}
"""Programs without predictions, and the reasons."""


def compared(text: str) -> Iterator[Compared]:
    """Iterate over every measured row of RESULTS.md."""
    for table in tables(text):
        place = f"{table.section}: {table.caption}"
        for row in table.rows:
            name = next(iter(row.values()))
            for measured, found in _predictions(table, name, row):
                yield _compared(place, name, measured, found)
    yield from _jobs(text)


def _compared(table: str, row: str, measured: float, found: float | str) -> Compared:
    if isinstance(found, str):
        return Compared(table, row, measured, None, found)
    return Compared(table, row, measured, found)


def _predictions(
    table: Table, name: str, row: dict[str, str]
) -> Iterator[tuple[float, float | str]]:
    if table.section in ROWS:
        column, predicts = ROWS[table.section]
        if column not in row:  # this is a table of tile sizes
            yield 0.0, "no training step has it alone"
        elif (measured := _first(row[column])) is not None:
            recipe = _recipe(name)
            parts = table.section in ("quantize", "gemm")
            if isinstance(recipe, str) and not parts:
                predicts = partial(_refused, recipe)
            chosen = None if isinstance(recipe, str) else recipe
            yield measured, predicts(table, name, chosen)
            if (load := _first(row.get("sustained ms", ""))) is not None:
                yield load, predicts(table, name, chosen, sustained=True)
    elif table.section == "fsdp":
        for column in ("ms a step", "peak GB"):
            yield float(row[column]), _fsdp(table, name, column)
    elif table.section == "tensor_parallel":
        if (sustained := _first(row["sustained ms"])) is not None:
            yield sustained, _tensor_parallel(table, row)
    elif table.section == "memory":
        for column in ("held GB", "peak GB"):
            yield _first(row.get(column, "")) or 0.0, _memory(table, name, column)
    elif table.section == "CPU offload of activations":
        yield float(row["peak GB"]), _offload(table, row)
    else:
        yield 0.0, UNPREDICTED.get(table.section, "")


def _refused(why: str, *args: Any, **how: Any) -> str:
    return why


def _first(cell: str) -> float | None:
    found = re.match(r"[\d.]+", cell)
    return float(found[0]) if found else None


def _jobs(text: str) -> Iterator[Compared]:
    """Iterate over the programs whose output RESULTS.md quotes."""
    program = ""
    for line in text[text.index("## Jobs on a GPU") :].splitlines():
        if found := re.search(r"examples/(\w+\.py)", line):
            program = found[1]
        if found := re.match(r"(time a|peak of)[a-zA-Z ]+?  +([\d.]+) \w+ +([\d.]+) \w+", line):
            for i, run in enumerate(("bf16", "FP8")):
                told: float | str = JOBS.get(program, "")
                if program == "train_fsdp.py":
                    told = _wide(RECIPES["current"]() if i else None, found[1])
                yield _compared(program, f"{run}: {found[1]}", float(found[2 + i]), told)


def _wide(recipe: Recipe | None, what: str) -> float:
    size = ModelSize(layers=8, width=4096, heads=32, ffn=16384, vocabulary=256, gated=False)
    job = Job(mode="eager", sequence=2048, batch=8, micro=4)
    step = predict(size, recipe, job, Mesh(dp=2))
    return 1e3 * step.seconds if what == "time a" else step.bytes / 1e9


def main() -> int:
    """Print all predicted rows, and the numbers of unpredicted rows with the reasons."""
    found = list(compared(RESULTS.read_text()))
    predicted = [one for one in found if one.predicted is not None]
    rows: list[tuple[str, ...]] = [("table", "row", "measured", "predicted", "error %")]
    for one in predicted:
        numbers = one.measured, one.predicted or 0.0
        told = (*(f"{number:.3f}" for number in numbers), f"{100 * one.error:+.1f}")
        rows.append((one.table[:60], one.row, *told))
    print("\n".join(aligned(rows, left=2)))
    errors = sorted(abs(one.error) for one in predicted)
    median, largest = 100 * errors[len(errors) // 2], 100 * errors[-1]
    print(
        f"{len(errors)} of {len(found)} rows: median error {median:.1f} %, largest {largest:.1f} %"
    )
    for why, count in Counter(one.why_not for one in found if one.why_not).items():
        print(f"{count} rows are not predicted: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
