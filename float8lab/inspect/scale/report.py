"""Make the report of ``python -m float8lab scale``: text, JSON and a picture."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass, replace

from float8lab.inspect.plot import new_figure
from float8lab.inspect.scale.mesh import Mesh
from float8lab.inspect.scale.predict import KINDS, RING, Job, Step, predict
from float8lab.inspect.scale.published import PUBLISHED
from float8lab.inspect.scale.search import Gemm, best, by_tokens, fastest, gemms_of_rank
from float8lab.inspect.scale.sizes import ModelSize
from float8lab.inspect.text import Grid, Printed
from float8lab.recipes import Recipe

__all__ = ["Scale", "scale"]

HIGH = "bfloat16"
_LOOKS = {
    "gemm": ("#", "#3572a5"),
    "quantize": ("Q", "#e4572e"),
    "attention": ("A", "#76b041"),
    "elementwise": ("E", "#9c89b8"),
    "sharding": ("S", "#b08968"),
    "optimizer": ("O", "#6c757d"),
    "tp": ("t", "#f2a541"),
    "cp": ("c", "#f7d488"),
    "ep": ("x", "#d1a3a4"),
    "dp": ("d", "#8a5a44"),
    "bubble": (".", "#dddddd"),
}
"""The letter and the colour of each kind of work."""
_WIDE = 60
_PAYS = 1.02
"""The smallest ratio that counts as a gain: times that differ by less count as equal."""


@dataclass(frozen=True, repr=False)
class Scale(Printed):
    """Predicted steps of a model on a number of GPUs."""

    size: ModelSize
    job: Job
    gpus: int
    chosen: bool
    """Whether the mesh was found by the search, and not given."""
    steps: dict[str, Step]
    """Steps on one mesh, by recipe, ``"bfloat16"`` first."""
    layouts: tuple[Step, ...]
    """The best step on each mesh with the fastest recipe, the fastest first."""
    high_layout: Step | None
    """The fastest step in bfloat16 on any mesh; None if none fits in memory."""
    gemms: tuple[Gemm, ...]
    tokens: dict[int, dict[str, float]]

    @property
    def recipe(self) -> str:
        """The fastest recipe on the mesh."""
        return min((name for name in self.steps if name != HIGH), key=self._seconds)

    def _seconds(self, name: str) -> float:
        return self.steps[name].seconds

    @property
    def mesh(self) -> Mesh:
        """The mesh of ``steps``."""
        return self.steps[HIGH].mesh

    def gain(self, name: str) -> float:
        """Return how many times faster a recipe is than bfloat16 on the mesh."""
        return self._seconds(HIGH) / self._seconds(name)

    def pays(self) -> str:
        """Say in a sentence where FP8 stops paying."""
        stops: dict[str, list[str]] = {}
        for name in self.steps:
            if name != HIGH:
                small = [n for n, gains in self.tokens.items() if gains[name] < _PAYS]
                limit = (
                    f"down to {min(self.tokens)} tokens a micro-batch on each rank" if not small
                    else "never" if len(small) == len(self.tokens)
                    else f"above {max(small)} tokens"
                )  # fmt: skip
                stops.setdefault(limit, []).append(name)
        verdict = "; ".join(f"{', '.join(names)} {limit}" for limit, names in stops.items())
        if slow := [p.name for p in self.gemms if p.gains[self.recipe] < _PAYS]:
            verdict += f". By {self.recipe} scaling these GEMMs are no faster: {', '.join(slow)}"
        return f"FP8 pays: {verdict}."

    def summary(self) -> str:
        """Return the result in a few lines, with bars of letters."""
        fits = any(step.fits for step in self.steps.values())
        searched = "fastest mesh" if fits else "mesh of the least memory"
        first, size, job = self.steps[self.recipe], self.size, self.steps[HIGH].job
        lines = [
            f"{size.name}: {size.parameters / 1e9:.1f} billion parameters, {size.layers} layers; "
            f"{job.batch} sequences of {job.sequence} tokens a step, {self.gpus} GPUs",
            f"{searched if self.chosen else 'mesh'} {self.mesh}: {_show(first.seconds)} a step by "
            f"{self.recipe} scaling, {self.gain(self.recipe):.2f}x of bfloat16",
        ]
        if self.layouts and not self.chosen:
            step = self.layouts[0]
            lines.append(f"fastest mesh of all for it: {step.mesh}, {_show(step.seconds)}")
        if self.high_layout is not None and self.layouts and self.layouts[0].fits:
            gain = self.high_layout.seconds / self.layouts[0].seconds
            lines.append(
                f"fastest mesh for bfloat16: {self.high_layout.mesh}, "
                f"{_show(self.high_layout.seconds)}; so FP8 gains {gain:.2f}x"
            )
        if not fits:
            lines.append(f"does not fit in {job.memory / 1e9:.0f} GB by any recipe")
        return "\n".join([*lines, self.pays(), "", *self._draw_bars()])

    def _draw_bars(self) -> list[str]:
        """Return the lines of a bar of letters for each recipe."""
        most = max(map(self._seconds, self.steps))
        lines = []
        for name, step in self.steps.items():
            bar, end = "", 0.0
            for kind in KINDS:
                end += step.gpu[kind]
                bar += _LOOKS[kind][0] * (round(_WIDE * end / most) - len(bar))
            lines.append(f"{name:9} {bar} {_show(step.seconds)}")
        return [*lines, ", ".join(f"{_LOOKS[kind][0]} {kind}" for kind in self._kinds())]

    def _kinds(self, least: float = 0.0) -> list[str]:
        """Return the kinds of work that take more than ``least`` seconds with some recipe."""
        return [k for k in KINDS if any(step.gpu[k] > least for step in self.steps.values())]

    def tables(self, limit: int | None = None) -> list[Grid]:
        """Return tables of steps, meshes, gains of FP8, published gains, and assumptions."""
        names = [name for name in self.steps if name != HIGH]
        used = self._kinds(5e-5)
        steps = Grid(
            f"On mesh {self.mesh}",
            ("recipe", "ms", "tokens/s a GPU", "x", "GB", "CPU", *used),
            [
                (
                    name, f"{1e3 * step.seconds:.1f}", f"{step.tokens:.0f}",
                    f"{self.gain(name):.2f}", _gigabytes(step), f"{1e3 * step.cpu:.1f}",
                    *(f"{1e3 * step.gpu[kind]:.1f}" for kind in used),
                )
                for name, step in self.steps.items()
            ],
        )  # fmt: skip
        layouts = Grid(
            f"Fastest meshes ({self.recipe})",
            ("mesh", "micro-batch", "recomputed", "ms", "tokens/s a GPU", "GB"),
            [
                (
                    str(step.mesh), str(step.job.micro), "yes" if step.job.recompute else "no",
                    f"{1e3 * step.seconds:.1f}", f"{step.tokens:.0f}", _gigabytes(step),
                )
                for step in self.layouts
            ],
        )  # fmt: skip
        tokens = Grid(
            "x of bfloat16 by tokens of a micro-batch on each rank",
            ("tokens", *names),
            [(str(n), *(f"{g[name]:.2f}" for name in names)) for n, g in self.tokens.items()],
        )
        gains = [[f"{gemm.gains[name]:.2f}" for name in names] for gemm in self.gemms]
        gemms = Grid(
            "x of bfloat16 by linear layer of a rank",
            ("layer", "N", "K", *names),
            [(p.name, str(p.N), str(p.K), *g) for p, g in zip(self.gemms, gains, strict=True)],
        )
        published = Grid(
            "Published gains of FP8 on other machines and kernels, and predicted for the same work",
            ("what", "published", "predicted", "not told, assumed", "source"),
            [
                (
                    gain.label,
                    f"{gain.least:.2f}" + (f"-{gain.most:.2f}" if gain.most > gain.least else ""),
                    f"{gain.predicted():.2f}", gain.assumed, gain.source,
                )
                for gain in PUBLISHED
            ],
        )  # fmt: skip
        assumed = Grid("Assumed", ("of", "what"), self.assumptions())
        grids = [steps, layouts, tokens, gemms, published]
        return [*(grid.first(limit) for grid in grids if grid.rows), assumed.first(None)]

    def assumptions(self) -> list[tuple[str, str]]:
        """Return the assumptions of the predictions, each with its subject."""
        job, links = self.steps[HIGH].job, self.job.links
        kind = "TransformerLayer" if job.fused else "converted"
        rows = {
            "rates": "an H200 under sustained load, measured: benchmarks/RESULTS.md",
            "links": f"{links.nvlink / 1e9:.0f} GB/s within {links.node} GPUs, "
            f"{links.network / 1e9:.0f} GB/s between machines for each GPU; not measured here",
            "layers": f"{kind}, {job.mode}; bfloat16: plain layers",
            "parameters": f"{job.weight_bytes} bytes each, as gradients and Adam's moments; "
            f"sharded among {job.shard or 'all'} data and context parallel ranks",
            "tensor parallel": "sequence parallel too; FP8 gathers one byte for two; "
            f"{100 * job.tp_overlap:.0f} % of it hidden",
            "data parallel": "hidden by the passes, but for what takes longer than these",
            "context parallel": f"attention at {100 * RING:.0f} % of its speed, as published",
            "pipeline": "one forward, one backward; parameters stay gathered; equal stages",
            "output layer": "in bfloat16",
        }
        if self.size.experts:
            rows["experts"] = "balanced; each a GEMM of its own; exchanges are not hidden"
        return list(rows.items())

    def to_json(self) -> dict[str, object]:
        """Return the report as dicts, lists and numbers, in seconds and bytes."""
        return {
            "model": asdict(self.size),
            "gpus": self.gpus,
            "mesh": asdict(self.mesh),
            "searched": self.chosen,
            "recipe": self.recipe,
            "steps": {name: _step_to_json(step) for name, step in self.steps.items()},
            "layouts": [_step_to_json(step) for step in self.layouts],
            "bfloat16": None if self.high_layout is None else _step_to_json(self.high_layout),
            "pays": self.pays(),
            "tokens": self.tokens,
            "gemms": [asdict(gemm) for gemm in self.gemms],
            "published": [
                {
                    "what": gain.label, "source": gain.source, "assumed": gain.assumed,
                    "published": [gain.least, gain.most], "predicted": gain.predicted(),
                }
                for gain in PUBLISHED
            ],
            "assumed": dict(self.assumptions()),
        }  # fmt: skip

    def picture(self) -> str:
        """Draw the time of a step by recipe and kind of work, as SVG.

        Raises:
            ModuleNotFoundError: matplotlib, of the extra ``plot``, is not installed.
        """
        figure = new_figure(figsize=(9, 0.6 + 0.4 * len(self.steps)))
        axes = figure.subplots()
        names = [*reversed(self.steps)]
        lefts = [0.0] * len(names)
        for kind in self._kinds():
            widths = [1e3 * self.steps[name].gpu[kind] for name in names]
            axes.barh(names, widths, left=lefts, color=_LOOKS[kind][1], label=kind)
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
        axes.set(xlabel="ms", title=f"{self.size.name}, {self.gpus} GPUs, {self.mesh}: a step")
        axes.legend(bbox_to_anchor=(1, 1))
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        return text.getvalue()


def scale(
    size: ModelSize,
    gpus: int,
    recipes: dict[str, Recipe],
    job: Job,
    *,
    mesh: Mesh | None = None,
    micro: int | None = None,
    recompute: bool | None = None,
) -> Scale:
    """Predict steps of a model on this many GPUs with recipes of ``search.RECIPES``.

    The mesh is by default the fastest. ``micro`` and ``recompute`` replace those of the job; by
    default they are the fastest that fit in memory.

    Raises:
        ValueError: these GPUs, or the mesh, cannot share the model or the batch.
    """
    steps_by_recipe = {
        name: fastest(size, recipe, job, gpus, micro, recompute) for name, recipe in recipes.items()
    }
    chosen = mesh is None
    if mesh is None:
        firsts = [steps[0] for steps in steps_by_recipe.values() if steps]
        if not firsts:
            raise ValueError(
                f"gpus must share {job.batch} sequences of {size.name}"
                f"{f' in micro-batches of {micro}' if micro else ''}; got {gpus}. "
                "Pass a batch that they divide, in powers of two."
            )
        mesh = min(firsts, key=lambda step: (not step.fits, step.seconds)).mesh
    else:
        predict(size, None, replace(job, micro=micro or 1), mesh)  # raises if it is unsuitable
    bests = {
        name: best(size, recipe, job, mesh, micro, recompute)
        for name, recipe in {HIGH: None, **recipes}.items()
    }
    steps = {name: step for name, step in bests.items() if step is not None}  # none is None
    name = min(recipes, key=lambda name: steps[name].seconds)
    high_precision = fastest(size, None, job, gpus, micro, recompute)
    job_of_recipe = steps[name].job
    return Scale(
        size=size, job=job, gpus=gpus, chosen=chosen, steps=steps,
        layouts=tuple(steps_by_recipe[name]),
        high_layout=high_precision[0] if high_precision and high_precision[0].fits else None,
        gemms=tuple(gemms_of_rank(size, job_of_recipe, mesh, recipes)),
        tokens=by_tokens(size, job_of_recipe, mesh, recipes),
    )  # fmt: skip


def _step_to_json(step: Step) -> dict[str, object]:
    layout = {"micro_batch": step.job.micro, "recompute": step.job.recompute}
    times = {"seconds": step.seconds, "tokens_per_second_per_gpu": step.tokens}
    results = {name: getattr(step, name) for name in ("gpu", "cpu", "memory", "fits")}
    return {"mesh": asdict(step.mesh), **layout, **times, **results}


def _show(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _gigabytes(step: Step) -> str:
    return f"{step.bytes / 1e9:.1f}" + ("" if step.fits else " (too much)")
