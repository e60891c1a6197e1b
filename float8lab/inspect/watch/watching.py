"""watch: record every operand that a model's FP8 layers cast, while the model trains.

The functions of ``float8lab/nn`` show each cast and each GEMM to ``PROCESS.observer``, which is
None unless a step is being watched. Nothing is attached to the model and no op is wrapped. A
compiled graph shows no casts, so compiled code runs uncompiled in watched steps.
"""

from __future__ import annotations

import contextlib
import platform
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from float8lab import arguments
from float8lab.distributed.fsdp.shards import MasterShard
from float8lab.distributed.fsdp.weight import ShardedWeight
from float8lab.distributed.ranks import rank_and_size
from float8lab.formats import Float8Spec
from float8lab.inspect.environment import package_version
from float8lab.inspect.statistics import stored
from float8lab.inspect.text import Grid
from float8lab.inspect.watch import measure
from float8lab.inspect.watch.findings import Finding, findings_of
from float8lab.inspect.watch.records import Log, Record, Step
from float8lab.nn.attention.fp8 import AttentionPrecision, K, Q, V
from float8lab.nn.casts import plain, stored_as
from float8lab.nn.convert import matches
from float8lab.nn.convert.report import conversion_report, was_converted
from float8lab.nn.precision import DY, Call, Precision, W, X, named_precisions
from float8lab.ops import Prologue
from float8lab.ops.declare import is_traced
from float8lab.ops.gemm import may_multiply
from float8lab.ops.operand import Operand
from float8lab.recipes import Recipe
from float8lab.recipes.region import PROCESS, capturing, in_backward
from float8lab.tensor import Float8Tensor
from float8lab.tensor.blocks import expand_scale
from float8lab.tensor.dtensor import local_of

__all__ = ["Layers", "watch"]

_OPERANDS = {X: "x", W: "w", DY: "dy"}
_ATTENTION_OPERANDS = {Q: "q", K: "k", V: "v"}

Layers = str | Sequence[str] | Callable[[str], bool]


class watch:
    """Record the operands that each FP8 layer of a model casts inside the ``with`` block.

    For x, w and dy of each layer, and for q, k and v of attention in FP8, the log has the following
    for each watched step: amax, scales, shares of elements that saturated, became subnormal or
    zero, SQNR, staleness of a delayed scale, NaNs and infinities. It also counts the GEMMs of
    linear layers. Several casts of one operand in a step, as in gradient accumulation, make one
    record. A recomputation by activation checkpointing does not count as a cast. A layer is not
    watched while its mode (``train`` or ``eval``) differs from that of the model.

    A step is over when ``w.step(loss)`` is called. Until the first such call, it is over after each
    ``step`` of the optimizer that has parameters of the model. Casts after the last end of a step
    make a step as well.

    Code that ``torch.compile`` has compiled runs uncompiled in watched steps, and compiled in other
    steps. Code that ``torch.cuda.graph`` has captured cannot be seen.

    Args:
        model: any module; it may be compiled.
        every: watch every so many steps, beginning with the first. Nothing is measured in the
            steps between them.
        layers: which layers to watch: one or several patterns, each one or more components of the
            qualified name or a glob, as in ``convert_to_float8``; or a function of the name. None
            means all. The GEMMs of a ``LayerNormMLP`` are separate layers, ``fc1`` and ``fc2``.
        jsonl: file that each finished step is appended to. An existing file is emptied first. In a
            job of several ranks the name must have ``{rank}`` in it.
        masters: ``masters`` of a ``MasterWeights``: weights stored in FP8 are compared with these.
        warn: warn of those ``alerts`` of a step that are new.
        start: number of the first step, for a run that is resumed.

    Attributes:
        log: the records so far, with the model's ``conversion_report`` if it was converted.
        alerts: the findings so far, by the rules of ``float8lab.inspect.diagnose``, each with its
            step, layer, operand, kind, value and advice.

    Raises:
        ValueError: ``every`` is below 1; ``layers`` selects no layer that can run in FP8; ``jsonl``
            is one file for several ranks.
        RuntimeError: another watch is active.

    >>> layer = float8lab.convert_to_float8(torch.nn.Linear(32, 32))
    >>> with float8lab.inspect.watch(layer) as w:
    ...     layer(torch.ones(16, 32)).sum().backward()
    >>> [(r.operand, r.amax) for r in w.log.records if r.operand != "w"]
    [('x', 1.0), ('dy', 1.0)]
    >>> w.log.steps[0].gemms
    {'(model)': {'fprop': 1, 'wgrad': 1}}
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 1,
        layers: Layers | None = None,
        jsonl: str | PathLike[str] | None = None,
        masters: Mapping[Tensor, Tensor] | None = None,
        warn: bool = False,
        start: int = 0,
    ) -> None:
        arguments.check_module("model", model)
        arguments.check_size("every", every, minimum=1)
        if layers is not None and not callable(layers):
            arguments.check_names("layers", layers)
        arguments.check_path("jsonl", jsonl, optional=True)
        arguments.check_instance(
            "masters", masters, Mapping, "the masters of a MasterWeights", optional=True
        )
        self._model: nn.Module = getattr(model, "_orig_mod", model)
        arguments.check_flags(warn=warn)
        self._every, self._warns, self._layers = every, bool(warn), layers
        self._masters = {} if masters is None else masters
        self._path = None if jsonl is None else _path_of_rank(fspath(jsonl))
        self._file: TextIO | None = None
        self._written = [0, 0]  # the numbers of written steps and records
        self._names: dict[Precision, str] = {}
        self._recorded: set[Precision] = set()
        self._modules: dict[Precision, nn.Module] = {}
        self._gathers: dict[Precision, ShardedWeight] = {}
        self._find_layers()
        if not self._names:
            raise ValueError(
                f"layers must mean a layer that can run in FP8; got {layers!r} for a "
                f"{type(self._model).__name__}. Convert the model with "
                "float8lab.convert_to_float8(model) first, or name other layers."
            )
        self.log = Log(
            conversion=str(conversion_report(model)) if was_converted(model) else "",
            about=_about(self._model), layers=self._listed_layers(),
        )  # fmt: skip
        self.alerts: list[Finding] = []
        self._recipes: dict[Recipe, None] = {}
        self._seen: dict[tuple[Precision, int, torch.dtype, bool], measure.Measurement] = {}
        self._gemms: dict[str, dict[str, int]] = {}
        self._losses: list[tuple[int, Tensor]] = []
        self._step = arguments.check_size("start", start)
        self._ended: int | None = None  # the last step that a step of the optimizer ended
        self._counts_by_optimizer = True
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._active = contextlib.ExitStack()  # closes at the end of a watched step
        self._handle: RemovableHandle | None = None

    # The block and its steps.

    def __enter__(self) -> watch:
        if self._handle is not None:
            raise RuntimeError(
                "watch must not be entered again while it is active; got the same instance. Make a "
                "second watch(...) afterwards."
            )
        self._training = self._model.training
        self._begin_step()
        if self._path is not None:
            self._file = self._path.open("w", encoding="ascii")
        self._handle = register_optimizer_step_post_hook(self._after_optimizer)
        return self

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        self._active.close()
        # After an error of the GPU nothing can be fetched from it; let that error propagate.
        unless_failed = contextlib.suppress(RuntimeError) if exc_type else contextlib.nullcontext()
        with unless_failed:
            if self._seen or self._gemms or self._losses:
                self._collect(None)
        if self._file is not None:
            self._file.close()
            self._file = None

    def step(self, loss: float | Tensor | None = None) -> None:
        """End a training step; call this once in each step, at any point after ``backward``.

        From the first call on, a step of the optimizer no longer finishes a step of the watch.

        Args:
            loss: a number or a tensor of one element; the log keeps it even if the step is not
                watched.

        Raises:
            RuntimeError: the call is outside of the ``with`` block.
            TypeError: ``loss`` is no number.
        """
        if self._handle is None:
            raise RuntimeError(
                "watch must be active for step(); got a call outside of its with block. Call it "
                "inside."
            )
        # Any value is accepted, also NaN: a log shows a loss that has diverged.
        single = not isinstance(loss, Tensor) or (loss.numel() == 1 and not loss.is_complex())
        is_number = hasattr(type(loss), "__float__") and single and not isinstance(loss, bool)
        if loss is not None and not is_number:
            raise TypeError(
                "loss must be None, a number or a tensor of one element; got "
                f"{arguments.shown(loss)}. Pass its mean."
            )
        if self._counts_by_optimizer:
            self._counts_by_optimizer = False
            if self._ended is not None:  # the optimizer has already ended this step
                self._keep_loss(self._ended, loss)
                return
        self._end_step(loss)

    def _after_optimizer(
        self, optimizer: torch.optim.Optimizer, args: object, kwargs: object
    ) -> None:
        if not self._counts_by_optimizer or is_traced():
            return
        if self._optimizer is None or self._optimizer() is None:
            changed = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if not changed.isdisjoint(map(id, self._model.parameters())):
                self._optimizer = weakref.ref(optimizer)
        if self._optimizer is not None and self._optimizer() is optimizer:
            self._ended = self._step
            self._end_step(None)

    def _begin_step(self) -> None:
        if self._step % self._every:
            return
        if PROCESS.observer is not None:
            raise RuntimeError(
                "watch must be the only one at a time; got a second one inside another. Watch more "
                "layers with one."
            )
        self._find_layers()
        self._active.callback(setattr, PROCESS, "observer", None)
        PROCESS.observer = self
        self._active.enter_context(torch.compiler.set_stance("force_eager"))

    def _end_step(self, loss: float | Tensor | None) -> None:
        if PROCESS.observer is self:
            self._active.close()
            self._collect(loss)
        else:
            self._keep_loss(self._step, loss)
        self._step += 1
        self._begin_step()

    def _find_layers(self) -> None:
        """Find the layers' current precision states, and the current addresses of the masters."""
        self._masters_by_address = {
            parameter.qdata.data_ptr(): master
            for parameter, master in self._masters.items()
            if isinstance(parameter, Float8Tensor)
        }
        meant = [self._layers] if isinstance(self._layers, str) else self._layers
        for path, module, precision in named_precisions(self._model):
            name = path or "(model)"
            if meant is not None and not (
                meant(name) if callable(meant) else any(matches(name, p) for p in meant)
            ):
                continue
            self._names[precision], self._modules[precision] = name, module
            local = local_of(module._parameters.get("weight"))
            if isinstance(local, MasterShard):
                self._gathers[precision] = local.weight

    def _listed_layers(self) -> list[str]:
        """Return the layers' names; attention is listed only after it was seen in FP8."""
        return [
            name
            for precision, name in self._names.items()
            if not isinstance(precision, AttentionPrecision) or precision in self._recorded
        ]

    # Callbacks of the layers.

    def saw_cast(
        self, x: Tensor | Prologue, operand: Operand, spec: Float8Spec, index: int, call: Call
    ) -> None:
        """Record that ``x``, whose sizes are those before padding, was cast to ``operand``."""
        owner = self._owner_of(call)
        if owner is None or (operand[0].is_cuda and capturing()):
            return
        # Selective checkpointing, which is a mode, must not see these ops as ops of the forward.
        with torch.no_grad(), _disable_current_modes():
            if (measurement := self._measure(x, operand, spec, call)) is None:
                return
            self._recipes[call.recipe] = None
            key = (owner, index, spec.fp8_dtype, measurement.stored)
            if key in self._seen:
                self._seen[key].add(measurement)
            else:
                self._seen[key] = measurement

    def saw_gemm(self, kind: str, call: Call, a: Operand | None, b: Operand | None) -> None:
        """Record that a GEMM of ``kind`` ran, on these operands or in high precision."""
        if (owner := self._owner_of(call)) is None:
            return
        if kind == "fprop" and in_backward():
            kind = "fprop, recomputed"
        if not _in_fp8(kind, call, a, b):
            kind = f"{kind}, high precision"
        counts = self._gemms.setdefault(self._names[owner], {})
        counts[kind] = counts.get(kind, 0) + 1

    def _owner_of(self, call: Call) -> Precision | None:
        """Return the precision state of the layer that made a call; None if it is not watched."""
        owner = call.precision
        watched = owner in self._names and self._modules[owner].training == self._training
        return owner if watched else None

    def _measure(
        self, x: Tensor | Prologue, operand: Operand, spec: Float8Spec, call: Call
    ) -> measure.Measurement | None:
        if isinstance(x, Prologue):
            x = x.value()
        q, scale = operand
        if isinstance(x, Float8Tensor):
            if not stored_as(x, spec):
                x = plain(x)
            elif call.precision in self._gathers:
                return _measure_gathered(x, self._gathers[call.precision])
            elif x.numel():
                current: Float8Tensor = stored(x)
                master = self._masters_by_address.get(current.qdata.data_ptr())
                if master is not None:
                    master = master.detach() if master.shape == current.shape else None
                return measure.measure_stored(current, master)
        if x.numel() == 0:
            return None
        M, K = x.shape
        scale = scale.view(1, 1) if scale.ndim < 2 else scale  # a delayed scale
        rows, columns = spec.scale_shape((M, K))
        return measure.measure_cast(
            x.detach(), q[:M, :K], scale[:rows, :columns], spec, delayed=call.plan.delayed
        )

    # From measurements to the log.

    def _collect(self, loss: float | Tensor | None) -> None:
        """Log the measurements of the ended step, with one transfer from each device."""
        seen, self._seen = self._seen, {}
        gemms, self._gemms = self._gemms, {}
        order = {precision: i for i, precision in enumerate(self._names)}
        keys = sorted(seen, key=lambda key: (order[key[0]], key[1]))
        measurements = [seen[key] for key in keys]
        first = len(self.log.records)
        for (precision, index, *_), measurement, numbers in zip(
            keys, measurements, measure.numbers_of(measurements), strict=True
        ):
            is_attention = isinstance(precision, AttentionPrecision)
            name = self._names[precision]
            operand = (_ATTENTION_OPERANDS if is_attention else _OPERANDS)[index]
            record = measure.record_of(
                measurement, numbers, step=self._step, layer=name, operand=operand
            )
            self.log.records.append(record)
        losses, self._losses = self._losses, []
        for step, value in losses:
            self._log_loss(step, value)
        if keys or gemms or loss is not None:
            in_order = {name: gemms[name] for name in self._names.values() if name in gemms}
            self.log.steps.append(Step(self._step, _number(loss), in_order))
        self.log.recipe = "; ".join(map(repr, self._recipes))
        self._recorded.update(key[0] for key in keys)
        self.log.layers = self._listed_layers()
        self._write()
        records, steps = self.log.records[first:], [s for s in self.log.steps[-1:] if gemms]
        self._alert(findings_of(records, steps))
        for follow in self.log.followers:
            follow(records, steps)

    def _alert(self, findings: Sequence[Finding]) -> None:
        """Add findings to the alerts; warn of those that are new if ``warn`` is set."""
        old = {(f.layer, f.operand, f.kind) for f in self.alerts}
        self.alerts += findings
        new = [f for f in findings if (f.layer, f.operand, f.kind) not in old]
        if new and self._warns:
            more = f" {len(new) - 1} more are in the watch's alerts." if len(new) > 1 else ""
            warnings.warn(f"step {new[0].step}: {new[0]}{more}", UserWarning, stacklevel=4)

    def _keep_loss(self, step: int, loss: float | Tensor | None) -> None:
        """Log the loss of a step; a loss on a GPU is fetched when a step is collected."""
        if isinstance(loss, Tensor) and loss.is_cuda:
            # The loss may be the output of a CUDA graph, which the next replay overwrites.
            self._losses.append((step, loss.detach().clone()))
        elif loss is not None:
            self._log_loss(step, loss)
            self._write()

    def _log_loss(self, step: int, loss: float | Tensor) -> None:
        steps = self.log.steps
        if steps and steps[-1].step == step:
            steps[-1] = replace(steps[-1], loss=_number(loss))
            self._written[0] = min(self._written[0], len(steps) - 1)
        else:
            steps.append(Step(step, _number(loss)))

    def _write(self) -> None:
        if self._file is None:
            return
        self._file.writelines(self.log.lines(*self._written))
        self._file.flush()
        self._written = [len(self.log.steps), len(self.log.records)]

    # Views.

    def table(self, step: int | None = None) -> Grid:
        """Return a table of one step, by default the last watched; ``rich.print`` colors it.

        Raises:
            ValueError: the step was not watched.
        """
        arguments.check_size("step", step, optional=True)
        watched = list(dict.fromkeys(record.step for record in self.log.records))
        step = step if step is not None else next(reversed(watched), None)
        if step not in watched:
            raise ValueError(
                f"step must be one that was watched, of {watched or 'none so far'}; got {step}. "
                "Name another one."
            )
        log_step = next((s for s in self.log.steps if s.step == step), Step(step or 0))
        title = f"step {step}" + ("" if log_step.loss is None else f", loss {log_step.loss:.6g}")
        records = [record for record in self.log.records if record.step == step]
        rows = _rows_of(records, log_step.gemms)
        columns = ("layer", "", "amax", "scale", "sat%", "flush%", "sub%", "SQNR", "stale")
        alarming = [r.nan + r.inf > 0 or (r.staleness or 0) > 0 for r in records]
        return Grid(title, (*columns, "NaN", "inf", "GEMMs"), rows, alarming, self.log.recipe)

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row for each record and its step's loss.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        with arguments.needs("to_pandas", "pandas", otherwise="write to_jsonl(path)"):
            import pandas

        losses = {step.step: step.loss for step in self.log.steps}
        rows = [{**asdict(record), "loss": losses.get(record.step)} for record in self.log.records]
        return pandas.DataFrame(rows, columns=[*Record.__dataclass_fields__, "loss"])

    def to_jsonl(self, path: str | PathLike[str]) -> None:
        """Write the log to a file, which ``Log.from_jsonl`` reads."""
        self.log.to_jsonl(path)


def _rows_of(
    records: Sequence[Record], gemms: Mapping[str, Mapping[str, int]]
) -> list[tuple[str, ...]]:
    """Return a row for each operand; the first row of a layer has its name and its GEMMs."""
    rows = []
    for layer, group in groupby(records, key=lambda record: record.layer):
        kinds = gemms.get(layer, {}).items()
        gemm_list = ", ".join(kind if count == 1 else f"{kind} x{count}" for kind, count in kinds)
        for record in group:
            rows.append((layer, record.operand, *_cells(record), gemm_list))
            layer = gemm_list = ""
    return rows


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


def _number(loss: float | Tensor | None) -> float | None:
    if isinstance(loss, Tensor):
        loss = loss.detach()
    return None if loss is None else float(loss)


def _measure_gathered(x: Float8Tensor, weight: ShardedWeight) -> measure.Measurement | None:
    """Measure this rank's rows of a weight that FSDP2 gathered in FP8, against its shard."""
    shard = weight.shard()
    if shard is None or shard.numel() == 0:
        return None
    x = stored(x)
    shards = weight.row_shard.rows
    rows = slice(shards.start, shards.start + shards.length)
    tall, wide = x.spec.block
    scale = expand_scale(x.scale, (tall, 1), x.shape)
    scale = scale if tall == -1 else scale[rows]
    spec = replace(x.spec, block=(-1 if tall == -1 else 1, wide))
    values = shard.detach().to(x.device)
    return measure.measure_cast(values, x.qdata[rows], scale, spec, delayed=False)


def _in_fp8(kind: str, call: Call, a: Operand | None, b: Operand | None) -> bool:
    """Return whether a GEMM ran in FP8, and not on dequantized operands."""
    if a is None or b is None:
        return False
    gemm = call.plan.gemms().get(kind, call.plan.fprop)
    assert gemm is not None, "it has operands"
    left, right, _ = gemm
    return may_multiply(
        left.block, right.block, a[0].device, a_dtype=left.fp8_dtype, b_dtype=right.fp8_dtype
    )


def _path_of_rank(path: str) -> Path:
    rank, world = rank_and_size()
    if world > 1 and "{rank}" not in path:
        raise ValueError(
            f"jsonl must have {{rank}} in it in a job of {world} ranks; got {path!r}. Write for "
            "example 'log.{rank}.jsonl', a file for each."
        )
    return Path(path.replace("{rank}", str(rank)))


def _about(model: nn.Module) -> dict[str, str]:
    """Collect facts about a run for the head of its report."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    rank, world = rank_and_size()
    return {
        "model": type(model).__name__,
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "float8lab": package_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **({"rank": f"{rank} of {world}"} if world > 1 else {}),
    }
