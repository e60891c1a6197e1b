"""Declare an op to torch.library: the reference on CPU, a Triton or cuBLASLt launcher on CUDA.

A string ``"module:function"`` names the CUDA launcher inside ``float8lab.ops.kernels``. It is
imported on the op's first call, since importing float8lab must not import triton.

Torch's dispatcher takes some 10 us per call, as long as everything the launcher does. So if only
the implementation would see the call, the implementation is called without the dispatcher.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch.nn import Parameter

from float8lab.formats import CASTS, FP8_DTYPES, has_kernels
from float8lab.ops.sharding import Rule, takes_dtensors

__all__ = [
    "OPS", "RECORDING", "Declared", "DirectCall", "announce", "called_by_ops", "capability_of",
    "casts_by_kernel", "compute_intensive_ops", "declare", "filled", "is_profiled", "is_traced",
    "is_watched_by_a_mode", "load_launcher", "overload_named", "planned", "tensors_of", "untraced",
]  # fmt: skip

_LIBRARY = torch.library.Library("float8lab", "DEF")

RECORDING = threading.local()
"""``launch``: observer of this thread's launches, if there is one (``kernels/_replay.py``)."""


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo from compiling a function, or its callees, except as part of its callers.

    ``torch._disable_dynamo`` does so by a wrapper around each call. A mark on the code costs
    nothing per call; it applies to all functions with the same code.
    """
    dynamo = torch._C._dynamo.eval_frame
    try:
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
    except AttributeError:  # these names are private: another version of torch may lack them
        return torch._disable_dynamo(function)
    return function


def is_traced() -> bool:
    """Whether a compiler traces this call.

    Since torch 2.13 ``torch.compiler.is_compiling`` is also true in other threads than the one that
    compiles. Where a call is frequent, ask it first: it is a function of torch and mostly false.
    """
    return (
        torch.compiler.is_dynamo_compiling()
        or torch.compiler.is_exporting()
        or TracingContext.try_get() is not None
    )


@functools.cache
def load_launcher(path: str) -> Callable[..., Any]:
    """Import the function that ``path`` names as ``"module:function"`` in ``ops/kernels``."""
    module_name, function_name = path.split(":")
    return getattr(importlib.import_module(f"float8lab.ops.kernels.{module_name}"), function_name)


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability, a constant in compiled graphs. A CPU counts as Hopper."""
    return _capability_of(device)


# ``torch.compiler.assume_constant_result`` sets this, but would import the compiler.
capability_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _capability_of(device: torch.device) -> tuple[int, int]:
    # The result is cached, since torch takes microseconds to find it.
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def casts_by_kernel(device: torch.device) -> bool:
    """Whether kernels convert to and from FP8 on this device; otherwise the references do."""
    return CASTS.includes(capability_of(device))


_DEQUANTIZE = frozenset({"gemm:scaled_mm", "gemm:scaled_mm_into"})
"""Launchers that run on GPUs without FP8, too: they multiply tensors dequantized by torch."""


def _gpu_launcher(path: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return the launcher named ``path``, or a function that calls the reference where it cannot.

    A launcher cannot run casts with blocks and scale rules that no kernel knows, nor any call with
    FP8 arguments on a GPU for which Triton has no FP8. A prologue's values still come from its
    kernel, so that they equal the values that a norm or an activation writes.
    """
    launch = load_launcher(path)
    names = list(inspect.get_annotations(reference))
    is_cast = "rule" in names
    block, rule = (names.index(name) if is_cast else 0 for name in ("block", "rule"))
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    has_fp8 = path in _DEQUANTIZE or all(map(casts_by_kernel, gpus))
    if has_fp8 and not is_cast:
        return launch

    def call(*args: Any) -> Any:
        knows_blocks = not is_cast or has_kernels(tuple(args[block]), args[rule])
        if knows_blocks and (
            has_fp8 or not _holds_fp8(args) or casts_by_kernel(next(tensors_of(args)).device)
        ):
            return launch(*args)
        if is_cast and names[0] == "prologue" and args[0]:
            args = ("", [load_launcher("prologue:value_of")(*args[:3])], *args[2:])
        return reference(*args)

    return call


def tensors_of(args: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments and in their lists and tuples."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (tuple, list)):
            yield from tensors_of(arg)


def _holds_fp8(args: Sequence[Any]) -> bool:
    """Whether any argument, or element of an argument, may be FP8 data (or bytes) or its dtype."""
    flat = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
    return any(getattr(x, "dtype", x) in (*FP8_DTYPES, torch.uint8) for x in flat)


_TYPES = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "Sequence[Tensor]": "Tensor[]",
    "Sequence[int]": "int[]", "Sequence[int | torch.SymInt]": "SymInt[]", "Sequence[str]": "str[]",
    "torch.dtype": "ScalarType", "int": "int", "int | torch.SymInt": "SymInt", "float": "float",
    "bool": "bool", "str": "str",
}  # fmt: skip
"""Schema types by annotation. A result is a tensor in the schema even where it may be None."""


class DirectCall(NamedTuple):
    """The way to call an op without the dispatcher: in two parts, if it depends on Python state."""

    prepare: Callable[..., tuple[object, ...]] | None
    """Reads Python state: it maps the arguments of the op to those of ``run``; None: they are the
    same. With ``in_cuda_graph`` (the default) it keeps no memory that it allocates."""
    run: Callable[..., object]
    """Does everything else, which depends only on its arguments."""
    launcher: Callable[[], Callable[..., object]] | None
    """Loads ``run`` for a GPU as a ``replayed`` function, if there is one."""


def declare(
    function: Callable[..., Any], *, outputs: Callable[[Any], Any], cuda: str | None = None,
    name: str | None = None, mutates: Sequence[str] = (), any_strides: bool = False,
    flops: Callable[..., int] | None = None, sharding: Rule | None = None,
    only_orders: bool = False, direct: DirectCall | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Make an op of ``float8lab``, and return a function that calls it with positional arguments.

    The op itself, which graphs and modes see, is the ``overload`` of the returned function. Its
    schema is the signature of ``function``, with annotations from ``_TYPES``. Where ``function`` or
    a launcher returns None, the dispatcher returns an empty tensor.

    Args:
        function: specifies the op, and implements it on the CPU. The op takes its keyword-only
            arguments by position. Without ``cuda`` the function runs on any device, always through
            the dispatcher and with the current Python state; the returned function is then the
            overload, and a compiler does not see effects besides those on the arguments.
        outputs: allocates the results, given an object whose attributes are the arguments.
        cuda: ``"module:function"`` of the launcher in ``float8lab.ops.kernels``.
        name: the name of the op, if not the function's; ``"name.overload"`` for a second form.
        mutates: names of the arguments that are written. No output aliases an input. If the last
            argument is among them, and optional, graphs get a form of the op without it, ``pure``.
        any_strides: the op runs equally well on inputs with other strides than those traced. If a
            compiler may not change the strides, it copies each input that it has not written yet,
            once for each op that reads the input.
        flops: returns the floating-point operations of a call, from its arguments with a shape in
            place of each tensor. It marks an op that is worth saving rather than recomputing.
        sharding: yields the placements of DTensor arguments, and the resulting placements of the
            results, that work on one dimension of a device mesh, from the arguments with unsharded
            shapes. Without it, each rank computes the unsharded result.
        only_orders: the op only tells a compiler the order of other ops, and computes nothing.
        direct: ``function`` in two parts, if it depends on Python state.
    """
    name = name or function.__name__
    parameters = inspect.signature(function).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}

    def fake(*args: Any, **kwargs: Any) -> Any:
        announce()
        given = dict(zip(parameters, args, strict=False))
        return filled(outputs(SimpleNamespace(**{**defaults, **given, **kwargs})), args)

    function = _make_positional(function)
    body = function if cuda is None else _without_autocast(function)
    # ``untraced``, since torch 2.11 traces into kernels that a compiled graph calls.
    on_any_device = untraced(lambda *args: filled(body(*args), args))
    implementations = {"CompositeExplicitAutograd": on_any_device}
    if cuda is not None:
        on_gpu = functools.cache(lambda: _without_autocast(_gpu_launcher(cuda, function), "cuda"))
        implementations = {
            "CPU": on_any_device,
            "CUDA": untraced(lambda *args: filled(on_gpu()(*args), args)),
        }

    def define(name: str, schema: str) -> OpOverload:
        tags = [torch.Tag.pt2_compliant_tag, *[torch.Tag.flexible_layout] * any_strides]
        _LIBRARY.define(name + schema, tags=tags)
        for key, implementation in implementations.items():
            _LIBRARY.impl(name, implementation, key)
        torch.library.register_fake(f"float8lab::{name}", fake, lib=_LIBRARY)
        return overload_named(name)

    overload = define(name, _schema(function, mutates))
    call_form: Callable[..., Any] = overload
    forms = [overload]
    *_, last = parameters
    if last in mutates and defaults.get(last, last) is None:
        pure = define(f"{name}.pure", _schema(function, (), without=last))
        forms.append(pure)
        call_form = _choose_form(overload, pure, len(parameters) - 1)
    call = function
    if cuda is not None:
        call = _call_directly(call_form, on_gpu, function)
        call.overload = overload
    if direct is None:
        launcher = None if cuda is None else functools.partial(load_launcher, cuda)
        direct = DirectCall(None, call, launcher)
    for op in forms:
        arguments = {x.name: defaults.get(x.name) for x in op._schema.arguments}
        OPS.declared[op] = Declared(arguments, fake, mutates, sharding, only_orders, flops, direct)
    return overload if cuda is None else call


def overload_named(name: str) -> OpOverload:
    """Return the form of an op, such as ``"cast.pure"``, that torch's modes see."""
    packet, _, form = name.partition(".")
    return getattr(getattr(torch.ops.float8lab, packet), form or "default")


def _make_positional(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with its keyword-only arguments taken by position."""
    parameters = inspect.signature(function).parameters
    names = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    if not names:
        return function
    count = len(parameters) - len(names)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args[:count], **dict(zip(names, args[count:], strict=False)))

    return call


def _schema(
    function: Callable[..., Any], mutates: Sequence[str], without: str | None = None
) -> str:
    """Return the signature as a dispatcher schema: ``"(Tensor q, int align=1) -> Tensor"``."""
    signature = inspect.signature(function)
    written = []
    for name, parameter in signature.parameters.items():
        kind = _TYPES[parameter.annotation]
        if name in mutates:
            kind = kind.replace("Tensor", f"Tensor({chr(97 + mutates.index(name))}!)")
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        default = default.replace("(", "[").replace(")", "]")
        if name != without:
            written.append(f"{kind} {name}{default}")
    results = signature.return_annotation
    returned = ", ".join(["Tensor"] * results.count("Tensor"))
    return f"({', '.join(written)}) -> {returned if results == 'Tensor' else f'({returned})'}"


def _choose_form(
    overload: Callable[..., Any], pure: Callable[..., Any], arguments: int
) -> Callable[..., Any]:
    """Call ``overload``; in a graph, call ``pure`` with ``arguments`` arguments if none is written.

    A compiler assumes that an op which may write does write, and wraps every call of the op.
    """

    def call_form(*args: Any) -> Any:
        if torch.compiler.is_compiling() and (len(args) <= arguments or args[-1] is None):
            return pure(*args[:arguments])
        return overload(*args)

    return call_form


def _without_autocast(function: Callable[..., Any], device: str = "cpu") -> Callable[..., Any]:
    """Disable torch.autocast inside an implementation, where it would change the GEMMs' dtype.

    With autocast, GEMMs of FP8 data overflow float16, and torch.stack of FP8 raises on a CPU.
    """

    def call(*args: Any) -> Any:
        if not torch.is_autocast_enabled(device):
            return function(*args)
        torch.set_autocast_enabled(device, False)
        try:
            return function(*args)
        finally:
            torch.set_autocast_enabled(device, True)

    return call


def filled(results: Any, args: Sequence[Any]) -> Any:
    """Replace each None in the results of an op by an empty tensor like a tensor of ``args``."""
    if not isinstance(results, tuple):
        return results
    like: Any = next(tensors_of(args), None)
    return tuple(like.new_empty(0) if result is None else result for result in results)


class Declared(NamedTuple):
    """Facts about an op for parties other than the dispatcher."""

    arguments: Mapping[str, Any]
    """The arguments of the op with their defaults."""
    outputs: Callable[..., Any]
    mutates: Sequence[str]
    sharding: Rule | None
    only_orders: bool
    flops: Callable[..., int] | None
    direct: DirectCall


class _Ops:
    """The declared ops, and the modules of torch that have yet to be told about them."""

    def __init__(self) -> None:
        self.declared: dict[Any, Declared] = {}
        """The facts about each overload."""
        self.untold: dict[str, Callable[[ModuleType], None]] = {}
        """By name of a module, the function that ``announce`` calls with it once it is imported."""


OPS = _Ops()


def compute_intensive_ops() -> list[torch._ops.OpOverload]:
    """Return the overloads of FP8 GEMMs and attention, for lists of ops that are worth saving.

    Selective activation checkpointing recomputes every op that is not in such a list; torch's own
    lists have only torch's GEMMs.

    >>> torch.ops.float8lab.scaled_mm.default in float8lab.compute_intensive_ops()
    True
    """
    return [overload for overload, declared in OPS.declared.items() if declared.flops]


def announce() -> None:
    """Tell torch's FLOP counter, DTensor and compiler about the ops, once these are imported.

    They take long to import, and the counter imports triton, so nothing here imports them. Code
    that has imported them calls ops below a mode, with a DTensor, or in a trace, and is seen.
    """
    for name in [name for name in OPS.untold if name in sys.modules]:
        OPS.untold.pop(name)(sys.modules[name])


def _tell_counter(counter: ModuleType) -> None:
    formulas = {op.overloadpacket: OPS.declared[op].flops for op in compute_intensive_ops()}
    for packet, formula in formulas.items():
        counter.register_flop_formula(packet)(formula)
    # A counter that is already active has a copy of the registry.
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if registry is not None:
            registry.update((packet, counter.flop_registry[packet]) for packet in formulas)


def _tell_dtensor(module: ModuleType) -> None:
    for overload, op in OPS.declared.items():
        takes_dtensors(module, overload, op, _LIBRARY)


OPS.untold["torch.utils.flop_counter"] = _tell_counter
OPS.untold["torch.distributed.tensor"] = _tell_dtensor


_PLAIN = frozenset(
    {Tensor, Parameter, type(None), torch.dtype, torch.Size, tuple, list, int, float, bool, str}
)
"""Types of values that the dispatcher passes on unchanged, also as elements of a list."""

is_watched_by_a_mode = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_trace = torch._C._get_tracing_state
is_profiled = torch._C._autograd._profiler_enabled


def _call_directly(
    overload: Callable[..., Any], on_gpu: Callable[[], Callable[..., Any]],
    reference: Callable[..., Any],
) -> Any:  # fmt: skip
    """Call ``overload``, or its implementation if the dispatcher would only look that up."""

    def dispatch(*args: Any) -> Any:
        if OPS.untold:
            announce()
        return overload(*args)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return overload(*args)
        if (
            (is_watched_by_a_mode() and getattr(RECORDING, "launch", None) is None)
            or _transform() is not None
            or _trace() is not None
            or is_profiled()
            or not _PLAIN.issuperset(map(type, args))
        ):
            return dispatch(*args)
        x = args[0]
        if type(x) is str:  # the name of a prologue, followed by its inputs
            x = args[1][0]
            if not _PLAIN.issuperset(map(type, args[1])):
                return dispatch(*args)
        elif type(x) is list or type(x) is tuple:
            return overload(*args)
        # Autograd must see the call, unless it runs below an autograd function. The dispatcher must
        # materialize a tensor with a negative bit, such as the imaginary part of a conjugate.
        requires_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_of(args))
        if requires_grad or x.is_neg():
            return overload(*args)
        if x.is_cuda:
            return on_gpu()(*args)
        if x.is_cpu and not torch.is_autocast_enabled("cpu"):
            return reference(*args)
        return overload(*args)

    return call


def called_by_ops(reference: Callable[..., Any], cuda: str) -> Callable[..., Any]:
    """Make a function that calls a launcher on a GPU, and its reference on a CPU or in a graph."""
    body = _without_autocast(reference)
    on_gpu = functools.cache(lambda: _without_autocast(_gpu_launcher(cuda, reference), "cuda"))

    def call(x: Tensor, *args: Any) -> Any:
        return (reference if is_traced() else on_gpu() if x.is_cuda else body)(x, *args)

    return call


def planned(body: Callable[..., Any]) -> Any:
    """Record the launches of ``body`` for tensors on a GPU once, and then repeat them as a list.

    The effect of ``body`` must depend only on its arguments: tensors, hashable constants, and lists
    and tuples of these. It may call ops of this package and some of torch's.
    """
    launcher = functools.cache(lambda: load_launcher("_replay:replayed")(body))

    def call(*args: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or torch.is_grad_enabled()
            or is_watched_by_a_mode()
            or _transform() is not None
            or _trace() is not None
            or is_profiled()
        ):
            return body(*args)
        if torch.is_autocast_enabled("cuda"):
            return _without_autocast(launcher(), "cuda")(*args)
        return launcher()(*args)

    call.launcher = launcher  # type: ignore[attr-defined]
    return call
