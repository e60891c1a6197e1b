"""The FP8 state of one module: its recipe, delayed scales and recomputation records.

A module asks ``Precision.begin`` once, at the top of ``forward``. The answer is a ``Call``, which
says how to run in FP8, or None, which means high precision. The module hands the call down to the
autograd function, whose backward uses the same call as its forward.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from float8lab.arguments import check_flags
from float8lab.distributed.comm import ONE_GPU, OneGpu, Sharded, TensorParallel, misfit
from float8lab.distributed.fsdp.weight import WeightCast
from float8lab.distributed.shard_map import ShardMap
from float8lab.formats import HIGH_PRECISION_DTYPES
from float8lab.nn.in_graph import CallInGraph, new_handle
from float8lab.nn.scales import DY, DelayedScales, GraphScales, ScaleSource, W, X
from float8lab.ops import Groups, Prologue, as_matrix
from float8lab.ops.declare import is_traced
from float8lab.recipes.delayed import RECORDED, DelayedSlots, SlotFactors
from float8lab.recipes.recipe import DelayedScaling, LinearPlan, Recipe, recipe_numbered
from float8lab.recipes.recording import CHECKPOINTS, NO_BACKWARD, Recording
from float8lab.recipes.reduction import channel, group_named, name_of_group, reducing_group
from float8lab.recipes.region import (
    DEFAULT_RECIPE,
    PROCESS,
    STATE,
    Region,
    advance_in_graph,
    advance_scales,
    current_backward,
    in_backward,
    saved_tensors_hooks,
    set_clock,
)
from float8lab.tensor.differentiation import is_exporting

__all__ = [
    "DY", "NO_OPTIONS", "Call", "CallOptions", "Precision", "W", "X", "call_under",
    "named_precisions", "place_precisions", "precisions", "precisions_below", "without_wrappers",
]  # fmt: skip

_CREATED = itertools.count()  # counts the modules with FP8 state that this process has made


class CallOptions(NamedTuple):
    """The options of one call that the caller of a module gives."""

    first_microbatch: bool | None = None
    """The user's ``is_first_microbatch``."""
    fused_weights: tuple[Any, ...] = ()
    """The weights whose gradients go into their ``main_grad``."""
    tokens: ShardMap | None = None
    """The shard map of the module's tokens, under sequence parallelism."""
    parallel: TensorParallel | None = None
    """How ranks share this call, if they share it unlike the module's other calls."""
    experts: range | None = None
    """The experts of the module that this rank holds, if not all."""


NO_OPTIONS = CallOptions()


class Call:
    """How one forward call of a module, and its backward, run in FP8.

    Attributes:
        recipe: how to cast; ``plan`` holds its specs for the three GEMMs.
        precision: the state of the module.
        scales: the source of the scales of the casts.
        cast_parallel: how ranks share the matrices that are cast, if they do.
        comm: what the GEMMs send, unless the caller sends it.
        is_region: the call is outside all autocast regions, and the module must ``end`` it.
        in_graph: whether a compiled graph is being traced.
        watched: whether an observer watches the call; never in a compiled graph.
        casts_for_backward: a forward that saves nothing casts for backward too, to record amaxes.
        weight_is_alive: in a graph, whether the weight is a parameter in high precision, or a view
            of one, and so is alive until backward anyway.
    """

    __slots__ = (
        "cast_parallel", "casts_for_backward", "comm", "first_microbatch", "fused_weights",
        "in_graph", "is_region", "plan", "precision", "recipe", "scales", "watched",
        "weight_is_alive",
    )  # fmt: skip

    def __init__(
        self, recipe: Recipe, precision: Precision, scales: ScaleSource, comm: OneGpu,
        options: CallOptions, *, record: bool = False,
    ) -> None:  # fmt: skip
        self.recipe = recipe
        self.plan: LinearPlan = recipe.linear
        self.precision = precision
        self.scales = scales
        self.cast_parallel = scales.parallel
        self.comm = comm
        self.first_microbatch = options.first_microbatch
        self.fused_weights = options.fused_weights
        self.is_region = record and STATE.region is None
        saves_nothing = record and not torch.is_grad_enabled()
        self.casts_for_backward = saves_nothing and self.plan.fprop is None
        self.in_graph = self.weight_is_alive = False  # unless a graph sets them
        self.watched = PROCESS.observer is not None

    def repetition(self, options: CallOptions) -> Call:
        """Return the call by which activation checkpointing recomputes this call."""
        scales = self.scales.repetition() if isinstance(self.scales, DelayedScales) else self.scales
        return Call(self.recipe, self.precision, scales, self.comm, options)


class _CallInGraph(CallInGraph):
    """Makes a ``Call`` where a graph runs."""

    def unpacked(self) -> Call:
        """Return the call, which belongs to no module."""
        for weight, attributes in self.fused_weights:
            vars(weight).update(attributes)
        parallel = None
        if self.parallel is not None:
            group, *values, scale_groups = cast("Any", self.parallel)
            values.append(tuple(map(group_named, scale_groups)))
            parallel = TensorParallel(group_named(group), *values)
        weights = tuple(weight for weight, _ in self.fused_weights)
        options = CallOptions(self.first_microbatch, weights, self.tokens, parallel)
        delayed = None if self.handle is None else self
        call = call_under(recipe_numbered(self.recipe), delayed, options)
        call.in_graph, call.watched = True, False
        call.is_region, call.casts_for_backward = self.is_region, self.casts_for_backward
        call.weight_is_alive = self.weight_is_alive
        return call


_MAIN_GRAD_ATTRIBUTES = "main_grad", "grad_added_to_main_grad", "zero_out_wgrad"


def _with_attributes(weight: Tensor) -> tuple[Tensor, dict[str, object]]:
    """Return a fused weight, and the attributes that it has in eager mode only.

    ``grad_added_to_main_grad`` is set here, since a graph cannot set it in backward.
    """
    marked = getattr(weight, "grad_added_to_main_grad", True)
    if not marked and weight.requires_grad and torch.is_grad_enabled():
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    names = (name for name in _MAIN_GRAD_ATTRIBUTES if hasattr(weight, name))
    return weight, {name: getattr(weight, name) for name in names}


class Precision:
    """The FP8 state of one module: ``module._fp8``.

    Attributes:
        recipe: the module's own recipe, or None to follow the enclosing autocast.
        pinned: whether ``recipe`` wins over an enabled autocast; a pinned None is high precision.
        name: the qualified name, where it is known.
        fp8_all_gather: whether FSDP2 gathers the weight in FP8, by the specs of ``recipe``.
        experts: the number of the module's weights; each weight has its own delayed scale, and so
            have its rows of the input and of the gradient.
        parallel: how tensor-parallel ranks share the module; None if they do not.
    """

    experts = 1
    parallel: TensorParallel | None = None

    def __init__(self, recipe: Recipe | None = None, *, key: str | None = None) -> None:
        self.recipe = recipe
        self.pinned = self.fp8_all_gather = False
        self.name = ""
        # Ranks match their modules by this key. A copy keeps the key of its original, for one rank
        # alone may copy. A converted layer's key is its name, for ranks may build other modules.
        self.key = f"#{next(_CREATED)}" if key is None else key
        self.slots: dict[tuple[Recipe, Any], DelayedSlots] = {}
        self.handle = new_handle(self, torch.device("cpu"))  # stands for self in compiled graphs
        set_clock(torch.device("cpu"))
        self.warned_of_recast = self.warned_of_misfit = False
        self.weight_cast: Any = None  # kept over microbatches; belongs to casts.py
        self._last_call: Call | None = None
        self._shared_call: Call | None = None  # serves calls without options and delayed scales

    def _settings(self) -> dict[str, Any]:
        """Return what copies and pickles keep; ``parallel`` becomes ``NoGroup`` in a pickle."""
        names = "recipe", "pinned", "name", "fp8_all_gather", "key", "experts", "parallel"
        return {name: getattr(self, name) for name in names}

    def __getstate__(self) -> dict[str, Any]:
        slots = {recipe: slots for (recipe, _), slots in self.slots.items()}
        return {**self._settings(), "slots": slots}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(key=state["key"])  # type: ignore[misc]
        slots = {(recipe, None): slots for recipe, slots in state["slots"].items()}
        vars(self).update(state, slots=slots)

    def __deepcopy__(self, memo: dict[int, Any]) -> Precision:
        copy = memo[id(self)] = type(self)(key=self.key)
        slots = {key: slots.__deepcopy__(memo) for key, slots in self.slots.items()}
        vars(copy).update(self._settings(), slots=slots)
        copy._move_handle(self.handle.device)
        return copy

    def slot_formats(self, plan: LinearPlan) -> tuple[list[torch.dtype], list[bool]]:
        """Return the formats of the module's cast tensors, and whether forward casts each."""
        return [plan.x.fp8_dtype, plan.w.fp8_dtype, plan.dy.fp8_dtype], [True, True, False]

    def active_recipe(self) -> Recipe | None:
        """Return the recipe in force for a call made now, or None for high precision."""
        autocast, recipe = STATE.autocast, self.recipe
        if autocast.enabled is False:
            return None
        if not self.pinned and autocast.enabled is not None:
            recipe = autocast.recipe or recipe or DEFAULT_RECIPE
        return recipe if self.parallel is None else self._fitting(recipe)

    def _fitting(self, recipe: Recipe | None) -> Recipe | None:
        """Return the recipe; if its blocks of features cross shards, warn once and return None."""
        if recipe is None or not isinstance(self.parallel, TensorParallel):
            return recipe  # the group may be set later
        if (reason := misfit(self.parallel.features, recipe.linear)) is None:
            return recipe
        if STATE.region is not None and not is_traced():
            STATE.region.fp8_calls += 1  # or the region would warn that nothing ran in FP8
        if not self.warned_of_misfit:
            self.warned_of_misfit = not is_traced()
            _warn_of_misfit(self.name or "A layer", reason, repr(recipe))
        return None

    def weight_gather(self, *, shares_scales: bool = False) -> WeightCast | None:
        """Return the cast with which FSDP2 gathers the weight in FP8, or None.

        It is None where a GEMM takes the weight in high precision, and where tensor-parallel ranks
        have plain shards without ``shares_scales``.
        """
        recipe, parallel = self.recipe, self.parallel
        if not self.fp8_all_gather or recipe is None:
            return None
        plan = recipe.linear
        if not plan.fprop or not plan.dgrad:
            return None
        # A tensor's scale needs the amax of all tensor-parallel ranks; FSDP2 knows one rank's.
        if parallel is not None and (
            not shares_scales or plan.w.tensor_scale or misfit(parallel.features, plan) is not None
        ):
            return None
        headroom = 2.0**recipe.margin if isinstance(recipe, DelayedScaling) else 1.0
        return WeightCast(plan.w, plan.amax_epsilon, headroom)

    def begin(
        self, x: Tensor, weight: Tensor, *, training: bool, options: CallOptions = NO_OPTIONS
    ) -> Call | None:
        """Decide how a call runs (None: in high precision), and record it for a recomputation.

        Args:
            x: the module's input.
            weight: the weight of the GEMM, or another tensor that is cast if there is no weight.
            training: the module's attribute.
            options: the options that the caller gives for this call.
        """
        if x.dtype not in HIGH_PRECISION_DTYPES or weight.dtype not in HIGH_PRECISION_DTYPES:
            return None
        if options.first_microbatch is not None:
            check_flags(is_first_microbatch=options.first_microbatch)
        if torch.compiler.is_compiling() and is_traced():
            return self._begin_forward(x, weight, training, options, in_graph=True)
        recordings = CHECKPOINTS.recordings
        recording = CHECKPOINTS.replay
        if saved_tensors_hooks(True) is not None:
            started, followed = _torch_recordings()
            recordings += started
            recording = recording or followed
        if recording is not None or torch._C._current_graph_task_id() != NO_BACKWARD:
            call = self._begin_recomputation(recording, x.device, training, options)
        else:
            call = self._last_call = self._begin_forward(x, weight, training, options)
        if training and not torch.is_grad_enabled():
            recordings = (*recordings, *_reentrant_recordings())
        for checkpoint in recordings:
            checkpoint.add(self, call)
        return call

    def _begin_forward(
        self, x: Tensor, weight: Tensor, training: bool, options: CallOptions, *,
        in_graph: bool = False,
    ) -> Call | None:  # fmt: skip
        """Begin a forward that is no recomputation."""
        if (recipe := self.active_recipe()) is None:
            return None
        if (type(x), x.layout, x.device) != (Tensor, torch.strided, weight.device):
            _refuse_input(x, weight.device)
        record = training or STATE.autocast.calibrating
        if in_graph:
            return self._begin_in_graph(recipe, weight, options, record)
        if (region := STATE.region) is not None:
            region.fp8_calls += 1
        if not recipe.linear.delayed:
            if options is not NO_OPTIONS:
                return self._new_call(recipe, options)
            call, is_watched = self._shared_call, PROCESS.observer is not None
            if call is None or call.recipe is not recipe or call.watched != is_watched:
                call = self._shared_call = self._new_call(recipe, options)
            return call
        slots = self._slots(recipe, x.device, STATE.autocast.group)
        if record and region is not None:
            region.packs[slots.pack] = None
        return self._new_call(recipe, options, slots, record=record)

    def _new_call(
        self, recipe: Recipe, options: CallOptions,
        delayed: DelayedSlots | CallInGraph | None = None, *, record: bool = False,
    ) -> Call:  # fmt: skip
        """Return a call under current scales, or under the delayed scales of slots or of a graph.

        A call that is to ``record`` amaxes outside all regions is a region by itself.
        """
        plan, parallel, comm = recipe.linear, options.parallel or self.parallel, ONE_GPU
        if parallel is not None and not parallel.casts_only:
            comm = Sharded(parallel, options.tokens, plan)
        if delayed is None:
            scales = ScaleSource(plan.epsilon, parallel)
        elif isinstance(delayed, CallInGraph):
            scales = GraphScales(plan.epsilon, parallel, delayed)
        else:
            tokens = comm.tokens
            scales = DelayedScales(
                plan.epsilon, parallel, delayed, record=record, experts=options.experts,
                is_empty_everywhere=tokens is None or tokens.unsharded_rows == 0,
            )  # fmt: skip
        return Call(recipe, self, scales, comm, options, record=record)

    def _begin_in_graph(
        self, recipe: Recipe, weight: Tensor, options: CallOptions, record: bool
    ) -> Call:
        """Begin a call in a traced graph, which reads state only when it runs (``in_graph.py``)."""
        delayed = recipe.linear.delayed
        # Dynamo of torch 2.11 evaluates ``torch.compiler.is_exporting()`` to True.
        if delayed and torch.compiler._is_exporting_flag and not is_exporting():
            raise NotImplementedError(
                f"recipe must not be a delayed one inside torch.export; got {recipe}. The program "
                "would hold no scales: use a recipe of current scales, or float8lab.onnx_export."
            )
        handle, clock, group = None, None, ""
        if delayed:
            handle, clock, group = self.handle, PROCESS.clock, name_of_group(STATE.autocast.group)
        record, parallel = record and delayed, options.parallel or self.parallel
        is_own = (weight.ndim == 3) == (self.experts > 1)  # it is no stack of parameters
        in_graph = _CallInGraph(
            handle, recipe.number, group, record, clock, self.slot_formats(recipe.linear)[1],
            0 if options.experts is None else options.experts.start,
            record and STATE.region is None,
            record and recipe.linear.fprop is None and not torch.is_grad_enabled(),
            is_own and nn.Parameter in (type(weight), type(weight._base)),
            options.first_microbatch, tuple(map(_with_attributes, options.fused_weights)),
            options.tokens, None if parallel is None else parallel.settings,
        )  # fmt: skip
        if torch.compiler.is_dynamo_compiling():
            return in_graph  # type: ignore[return-value]  # it becomes one in the graph
        (call := in_graph.unpacked()).precision = self
        return call

    def params_in_graph(
        self, recipe: Recipe, group: Any, index: int, record: bool, x: Tensor | Prologue | Groups,
        experts: range | None, *, shares_launch: bool,
    ) -> SlotFactors:  # fmt: skip
        """Return ``DelayedSlots.params_in_graph`` when a compiled graph runs and casts ``x``."""
        slots = self._slots(recipe, (x if isinstance(x, Tensor) else x.inputs[0]).device, group)
        pack = slots.pack
        pack.keeps_previous = True
        if pack.is_recorded():
            RECORDED.packs.add(pack)
            shares_launch = False
        forward = slots.forward[index]
        recomputes = forward and (  # like ``in_backward``, but without its check for tracing
            torch._C._current_graph_task_id() != NO_BACKWARD or CHECKPOINTS.replay is not None
        )
        if forward and not recomputes:
            pack.advanced = False
            if (region := STATE.region or STATE.in_graph) is None:
                region = STATE.in_graph = Region()
            region.fp8_calls += 1
            if record:
                region.packs[pack] = None
        return slots.params_in_graph(
            index, x, record=record, experts=experts, recomputes=recomputes,
            shares_launch=shares_launch,
        )  # fmt: skip

    def _begin_recomputation(
        self, replay: Recording | None, device: torch.device, training: bool, options: CallOptions
    ) -> Call | None:
        """Begin a recomputation: with its original's recipe and scales, recording no forward amax.

        A compiled forward leaves no record of the original call, nor does a module in eval mode in
        torch's reentrant checkpoint: then the module's last forward takes its place.
        """
        if replay is None:
            node = torch._C._current_autograd_node()
            replay = CHECKPOINTS.of_torch.get(node) if isinstance(node, FunctionCtx) else None
            if replay is not None:
                replay.follow(current_backward())
        if replay is not None and (replay is CHECKPOINTS.replay or replay.has_next(self)):
            original: Call | None = replay.next(self)
            return original and original.repetition(options)
        original = self._last_call
        # The recomputation runs as the original did, even where backward is called inside another
        # autocast. An autocast that the checkpointed function itself enters applies, however.
        recipe = original.recipe if original is not None else None
        if STATE.autocast.enabled is not None and STATE.autocast.backward == current_backward():
            recipe = self.active_recipe()
        if recipe is None:
            return None
        if original is not None and original.recipe == recipe:
            return original.repetition(options)
        slots = self._slots(recipe, device, STATE.autocast.group) if recipe.linear.delayed else None
        return self._new_call(recipe, options, slots, record=training).repetition(options)

    def set_parallel(self, parallel: TensorParallel | None) -> None:
        """Set how tensor-parallel ranks share the module."""
        self.parallel = parallel
        self.weight_cast = self._shared_call = None
        for slots in self.slots.values():
            slots.set_parallel(parallel)

    def has_slots(self, recipe: Recipe) -> bool:
        """Whether the GEMM has delayed scales under a recipe."""
        return recipe.linear.delayed

    def calibrate(self, *operands: Tensor | Groups, experts: range | None = None) -> None:
        """Record amaxes of a call in high precision, if an autocast asks for calibration.

        ``operands`` are in the order of their slots; if x is ``Groups``, the weight is of experts.
        """
        if STATE.autocast.calibrating:
            self._calibrate(operands, experts)

    @torch._disable_dynamo  # a graph cannot hold it
    def _calibrate(self, operands: Sequence[Tensor | Groups], experts: range | None) -> None:
        if STATE.autocast.enabled or in_backward():
            return
        pinned = self.recipe if self.pinned else None
        recipe = pinned or STATE.autocast.recipe or self.recipe or DEFAULT_RECIPE
        x = operands[0]
        if not self.has_slots(recipe) or x.dtype not in HIGH_PRECISION_DTYPES:
            return
        device = (x if isinstance(x, Tensor) else x.inputs[0]).device
        slots = self._slots(recipe, device, STATE.autocast.group)
        for index, operand in enumerate(operands):
            if isinstance(operand, Tensor):
                operand = (as_matrix(operand) if isinstance(x, Tensor) else operand).detach()
            slots.observe(index, operand, experts)
        if STATE.region is not None:
            STATE.region.packs[slots.pack] = None

    def end(self, call: Call) -> None:
        """Advance the scales after a call that is a region by itself."""
        if is_traced():
            advance_in_graph(())
        elif isinstance(call.scales, DelayedScales):
            advance_scales([call.scales.slots.pack])

    def to(self, device: torch.device) -> None:
        """Move the state to the device of the module."""
        self.weight_cast = None
        for slots in self.slots.values():
            slots.to(device)
        self._move_handle(device)

    def _move_handle(self, device: torch.device) -> None:
        """Make a handle on the device, where a CUDA graph can take it as an input."""
        if device.type in ("cpu", "cuda") and self.handle.device != device:
            self.handle = new_handle(self, device)
        set_clock(device)

    def prepare(
        self, device: torch.device, recipe: Recipe | None = None, group: Any = None
    ) -> None:
        """Make the state of a delayed recipe, by default the module's own, before the first call.

        A module that this rank does not call for a while then still follows the amaxes of other
        ranks. ``group`` reduces the amaxes; None is the group of the enclosing autocast.
        """
        recipe = recipe or self.recipe
        if isinstance(recipe, DelayedScaling):
            group = STATE.autocast.group if group is None else group
            slots = self._slots(recipe, device, group)
            if recipe.reduce_amax and (ranks := reducing_group(group)) is not None:
                channel(ranks).add(slots)

    def _slots(self, recipe: Any, device: torch.device, group: Any) -> DelayedSlots:
        """Return the slots of a recipe, whose amaxes ``group`` reduces, on a device."""
        key = (recipe, group)
        if (slots := self.slots.get(key)) is None:
            fp8_dtypes, forward = self.slot_formats(recipe.linear)
            slots = self.slots[key] = DelayedSlots(
                recipe, group, fp8_dtypes=fp8_dtypes, forward=forward, device=device, key=self.key,
                widths=(self.experts,) * len(fp8_dtypes), parallel=self.parallel,
            )  # fmt: skip
        elif slots.pack.scale.device != device:
            slots.to(device)
        return slots


_WITHOUT_MODULE = Precision(key="")


def call_under(
    recipe: Recipe, delayed: DelayedSlots | CallInGraph | None = None,
    options: CallOptions = NO_OPTIONS,
) -> Call:  # fmt: skip
    """Return a call without a module: under current scales, or delayed scales, unrecorded."""
    return _WITHOUT_MODULE._new_call(recipe, options, delayed)


def place_precisions(module: nn.Module) -> None:
    """Move the FP8 state of a module's own GEMMs to its parameters' device.

    The handle is an input of compiled graphs. A handle on the CPU would prevent CUDA graphs, and
    the compiler would take results that depend on it for unaligned.
    """
    device = next((parameter.device for parameter in module.parameters()), None)
    if device is not None:
        for _, precision in precisions(module):
            precision.to(device)


def _warn_of_misfit(name: str, reason: str, recipe: str) -> None:
    warnings.warn(f"{name} runs in high precision: {reason}, under {recipe}.", stacklevel=2)


# The mark of torch.compiler.assume_constant_result: the warning comes while a graph is traced.
_warn_of_misfit._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _refuse_input(x: Tensor, device: torch.device) -> None:
    if x.device != device:  # delayed scales would follow x to its device
        raise ValueError(f"inp must be on {device}; got one on {x.device}. Move it.")
    if x.layout is not torch.strided:
        raise TypeError(
            f"inp must be dense where a module runs in FP8; got {x.layout}. Give it inp.to_dense()."
        )
    if (placements := getattr(x, "placements", None)) is not None:
        raise NotImplementedError(
            f"inp must not be a DTensor where the weight of a module in FP8 is none; got one with "
            f"placements {placements}. Give torch.nn.Linear a style of parallelize_module, or "
            "other modules inp.to_local()."
        )


_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module)(?=[./]|$)")
"""The names under which torch.compile and torch's checkpoint_wrapper hold a wrapped module."""


def without_wrappers(path: str) -> str:
    """Return the path of a module or of its attribute without the names of torch's wrappers."""
    return _WRAPPERS.sub("", path).strip(".")


def named_precisions(model: nn.Module) -> Iterator[tuple[str, nn.Module, Precision]]:
    """Yield each GEMM of a model: its path without wrappers, its module, and its FP8 state."""
    for path, module in model.named_modules():
        for name, precision in precisions(module):
            yield without_wrappers(f"{path}.{name}"), module, precision


def precisions_below(model: nn.Module) -> Iterator[Precision]:
    """Return the FP8 states of all GEMMs of a model."""
    return (precision for _, _, precision in named_precisions(model))


def precisions(module: nn.Module) -> Iterator[tuple[str, Precision]]:
    """Yield the name of each of a module's own GEMMs ("" for an only GEMM) and its FP8 state."""
    for name, value in vars(module).items():
        if isinstance(value, Precision):
            yield name.removeprefix("_fp8").lstrip("_"), value


def _torch_recordings() -> tuple[tuple[Recording, ...], Recording | None]:
    """Return the recordings that torch's non-reentrant checkpoints make now, and the one followed.

    ``torch.utils.checkpoint`` gives a recomputation no link to the forward call that it repeats.
    But its saved-tensor hooks hold the same frame in their closures in forward and recomputation.
    """
    if (hooks := saved_tensors_hooks(True)) is None:
        return (), None
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        started, followed = _torch_recordings()  # by the enclosing hooks
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
    pack = inspect.unwrap(hooks[0])
    if getattr(pack, "__module__", "") != "torch.utils.checkpoint":
        return started, followed
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=False))
    if "frame" in cells:
        frame = cells["frame"].cell_contents
        return (*started, CHECKPOINTS.of_torch.setdefault(frame, Recording())), followed
    if "target_frame_ref" in cells:
        started, frame = (), cells["target_frame_ref"].cell_contents()
        if (followed := CHECKPOINTS.of_torch.get(frame)) is not None:
            followed.follow(pack)
    return started, followed


def _reentrant_recordings() -> Iterator[Recording]:
    """Yield the recordings of the reentrant checkpoints whose forward is running.

    A reentrant checkpoint is an autograd function whose forward calls modules without gradients.
    Its ``ctx``, a local of that forward, is the graph node whose backward repeats the calls.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("ctx",) and isinstance(
            ctx := frame.f_locals["ctx"], FunctionCtx
        ):
            if frame.f_code.co_name != "forward":
                return  # a recomputation, which repeats the call of an outer recording
            yield CHECKPOINTS.of_torch.setdefault(ctx, Recording())
        frame = frame.f_back
