"""Declare an op to torch.library: the reference on CPU, a Triton or cuBLASLt launcher on CUDA.

The CUDA launcher is named by a string, ``"module:function"`` inside ``float8lab.ops.kernels``, and
imported on its first call: importing float8lab must not import triton.

A call of an op takes torch's dispatcher some 10 us, as long as all that the launcher does. So where
only the implementation would see the call, it is called without the dispatcher.
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
from torch._ops import OpOverload
from torch.nn import Parameter

from float8lab.formats import CASTS, FP8_DTYPES, has_kernels
from float8lab.ops.sharding import Rule, takes_dtensors

__all__ = [
    "OPS", "RECORDING", "Declared", "DirectCall", "announce", "called_by_ops", "capability_of",
    "casts_by_kernel", "compute_intensive_ops", "declare", "filled", "is_profiled",
    "is_watched_by_a_mode", "load_launcher", "overload_named", "planned", "tell_when_imported",
    "tensors_of", "untraced",
]  # fmt: skip

_LIBRARY = torch.library.Library("float8lab", "DEF")

RECORDING = threading.local()
"""``launch``: who is told of this thread's launches, if anyone is (``kernels/_replay.py``)."""


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo from compiling a function, or what it calls, but as part of its callers.

    ``torch._disable_dynamo`` does so by a wrapper around every call. A mark on the code costs a
    call nothing; all functions of the same code have it.
    """
    dynamo = torch._C._dynamo.eval_frame
    try:
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
    except AttributeError:  # the names are private: another torch may not have them
        return torch._disable_dynamo(function)
    return function


@functools.cache
def load_launcher(path: str) -> Callable[..., Any]:
    """The function that ``path`` names, ``"module:function"`` in ``ops/kernels``."""
    module_name, function_name = path.split(":")
    return getattr(importlib.import_module(f"float8lab.ops.kernels.{module_name}"), function_name)


def capability_of(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability, a constant in compiled graphs. A CPU answers as Hopper would."""
    return _capability_of(device)


# As torch.compiler.assume_constant_result marks it, which would import the compiler here.
capability_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _capability_of(device: torch.device) -> tuple[int, int]:
    # It takes torch microseconds.
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def casts_by_kernel(device: torch.device) -> bool:
    """Whether kernels convert to FP8 and from it on this device, else the references do."""
    return CASTS.includes(capability_of(device))


_DEQUANTIZE = frozenset({"gemm:scaled_mm", "gemm:scaled_mm_into"})
"""Launchers that, on a GPU without FP8, multiply what torch has dequantized."""


def _for_gpus(path: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher that ``path`` names; in its place the reference, for what it has no kernel for.

    That is, of a cast, blocks and scale rules that no kernel knows, and on a GPU for which Triton
    has no FP8, all calls with FP8 arguments. The values of a prologue are those of its kernel, as
    where a norm or an activation writes them.
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
    """The tensors among arguments, and in the lists and tuples there."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (tuple, list)):
            yield from tensors_of(arg)


def _holds_fp8(args: Sequence[Any]) -> bool:
    """Whether an argument, or an element of one, is FP8 data, perhaps as bytes, or its dtype."""
    flat = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
    return any(getattr(x, "dtype", x) in (*FP8_DTYPES, torch.uint8) for x in flat)


_TYPES = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "Sequence[Tensor]": "Tensor[]",
    "Sequence[int]": "int[]", "Sequence[int | torch.SymInt]": "SymInt[]", "Sequence[str]": "str[]",
    "torch.dtype": "ScalarType", "int": "int", "int | torch.SymInt": "SymInt", "float": "float",
    "bool": "bool", "str": "str",
}  # fmt: skip
"""Types in a schema, by annotation. A result is a tensor, also where it may be None."""


class DirectCall(NamedTuple):
    """How an op is called past the dispatcher: in two parts, if it looks at Python's state."""

    prepare: Callable[..., tuple[object, ...]] | None
    """The look: it takes the arguments of the op, and gives those of ``run``; None: the same. It
    keeps no memory that it allocates ``in_cuda_graph``, which is the default."""
    run: Callable[..., object]
    """All else, which depends on its arguments alone."""
    launcher: Callable[[], Callable[..., object]] | None
    """What loads ``run`` for a GPU as a ``replayed`` function, if there is one."""


def declare(
    function: Callable[..., Any], *, outputs: Callable[[Any], Any], cuda: str | None = None,
    name: str | None = None, mutates: Sequence[str] = (), any_strides: bool = False,
    flops: Callable[..., int] | None = None, sharding: Rule | None = None,
    only_orders: bool = False, direct: DirectCall | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Make an op of ``float8lab``, and return what calls it with plain tensors, by position.

    The op itself, which graphs and modes see, is the result's ``overload``. Its schema is the
    signature of ``function``, whose annotations must be spelled as in ``_TYPES``. A result that
    ``function`` or a launcher gives as None is an empty tensor where the dispatcher returns it.

    Args:
        function: specifies the op, and is its CPU implementation. The op takes by position what it
            takes by keyword alone. Without ``cuda`` it is called on any device, through the
            dispatcher alone and with Python's state as it is then; the result is the overload, and
            what the function changes besides its arguments is hidden from a compiler.
        outputs: allocates the results, given the arguments as the attributes of one object.
        cuda: ``"module:function"`` of the launcher in ``float8lab.ops.kernels``.
        name: of the op, where it is not the function's; ``"name.overload"`` for a further form.
        mutates: names of the arguments that are written. No output aliases an input. If the last
            argument is one, and optional, graphs have a form of the op without it, ``pure``.
        any_strides: the op is as good on inputs of other strides than those it was traced with. A
            compiler that may not choose them copies an input that it has not written yet for each
            op that reads it.
        flops: floating-point operations of a call, from its arguments with a shape in place of each
            tensor. An op that has one is worth saving rather than recomputing.
        sharding: of DTensors, which placements of arguments give which placements of the results on
            one dimension of a device mesh: from the arguments with the shapes of whole tensors.
            Without it every rank computes the whole.
        only_orders: the op tells a compiler the order of others, and does nothing.
        direct: ``function`` in two parts, if it looks at Python's state.
    """
    name = name or function.__name__
    parameters = inspect.signature(function).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}

    def fake(*args: Any, **kwargs: Any) -> Any:
        announce()
        given = dict(zip(parameters, args, strict=False))
        return filled(outputs(SimpleNamespace(**{**defaults, **given, **kwargs})), args)

    function = _by_position(function)
    exact = function if cuda is None else _exact(function)
    # Marked, since torch 2.11 traces into kernels that a compiled graph calls.
    on_any_device = untraced(lambda *args: filled(exact(*args), args))
    implementations = {"CompositeExplicitAutograd": on_any_device}
    if cuda is not None:
        for_gpus = functools.cache(lambda: _exact(_for_gpus(cuda, function), "cuda"))
        implementations = {
            "CPU": on_any_device,
            "CUDA": untraced(lambda *args: filled(for_gpus()(*args), args)),
        }

    def define(name: str, schema: str) -> OpOverload:
        tags = [torch.Tag.pt2_compliant_tag, *[torch.Tag.flexible_layout] * any_strides]
        _LIBRARY.define(name + schema, tags=tags)
        for key, implementation in implementations.items():
            _LIBRARY.impl(name, implementation, key)
        torch.library.register_fake(f"float8lab::{name}", fake, lib=_LIBRARY)
        overload = overload_named(name)
        given = [argument.name for argument in overload._schema.arguments]
        arguments = {n: defaults.get(n) for n in given}
        OPS.declared[overload] = Declared(arguments, fake, mutates, sharding, only_orders, flops)
        return overload

    overload = define(name, _schema(function, mutates))
    through: Callable[..., Any] = overload
    forms = [overload]
    *_, last = parameters
    if last in mutates and defaults.get(last, last) is None:
        pure = define(f"{name}.pure", _schema(function, (), without=last))
        forms.append(pure)
        through = _either(overload, pure, len(parameters) - 1)
    call = function
    if cuda is not None:
        call = _direct(through, for_gpus, function)
        call.overload = overload
    if direct is None:
        launcher = None if cuda is None else functools.partial(load_launcher, cuda)
        direct = DirectCall(None, call, launcher)
    for form in forms:
        OPS.declared[form] = OPS.declared[form]._replace(direct=direct)
    return overload if cuda is None else call


def overload_named(name: str) -> OpOverload:
    """The form of an op of ``float8lab``, such as ``"cast.pure"``, that torch's modes see."""
    packet, _, form = name.partition(".")
    return getattr(getattr(torch.ops.float8lab, packet), form or "default")


def _by_position(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which may take arguments by keyword alone, with all of them by position."""
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
    """The signature in the dispatcher's words: ``"(Tensor q, int align=1) -> Tensor"``."""
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


def _either(
    overload: Callable[..., Any], pure: Callable[..., Any], arguments: int
) -> Callable[..., Any]:
    """``overload``; in a graph, where it would write nothing, ``pure`` with its ``arguments``.

    A compiler takes an op that may write for one that does, and wraps every call of it.
    """

    def through(*args: Any) -> Any:
        if torch.compiler.is_compiling() and not any(arg is not None for arg in args[arguments:]):
            return pure(*args[:arguments])
        return overload(*args)

    return through


def _exact(function: Callable[..., Any], device: str = "cpu") -> Callable[..., Any]:
    """An implementation without torch.autocast, which would multiply in a dtype of its own.

    GEMMs of FP8 data overflow float16, and torch.stack raises for FP8 on a CPU there.
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
    """The results of an op's call with ``args``, with an empty tensor in the place of each None."""
    if not isinstance(results, tuple):
        return results
    like: Any = next(tensors_of(args), None)
    return tuple(like.new_empty(0) if result is None else result for result in results)


class Declared(NamedTuple):
    """The answers to what others than the dispatcher ask about an op."""

    arguments: Mapping[str, Any]
    """Their defaults."""
    outputs: Callable[..., Any]
    mutates: Sequence[str]
    sharding: Rule | None
    only_orders: bool
    flops: Callable[..., int] | None
    direct: DirectCall = DirectCall(None, NotImplemented, None)


class _Ops:
    """The ops that exist, and who has yet to be told about them."""

    def __init__(self) -> None:
        self.declared: dict[Any, Declared] = {}
        """What is known of each overload."""
        self.untold: dict[str, Callable[[ModuleType], None]] = {}
        """Functions that tell a module of torch, which ``announce`` has not found imported yet."""


OPS = _Ops()


def compute_intensive_ops() -> list[torch._ops.OpOverload]:
    """The overloads of FP8 GEMMs and attention, for lists of ops that are worth saving.

    Selective activation checkpointing recomputes every op that is not in such a list, and knows
    only torch's own GEMMs.

    >>> torch.ops.float8lab.scaled_mm.default in float8lab.compute_intensive_ops()
    True
    """
    return [overload for overload, declared in OPS.declared.items() if declared.flops]


def announce() -> None:
    """Tell torch's FLOP counter and DTensor about the ops, as soon as these are imported.

    Both take long to import, and the counter imports triton, so nothing here imports them. Whoever
    has them imported calls an op where it can be seen: below a mode, with a DTensor, or in a trace.
    """
    for name in [name for name in OPS.untold if name in sys.modules]:
        OPS.untold.pop(name)(sys.modules[name])


def tell_when_imported(name: str, tell: Callable[[ModuleType], None]) -> None:
    """Have ``announce`` call ``tell`` with a module of torch, once that is imported."""
    OPS.untold[name] = tell


def _tell_counter(counter: ModuleType) -> None:
    formulas = {op.overloadpacket: OPS.declared[op].flops for op in compute_intensive_ops()}
    for packet, formula in formulas.items():
        counter.register_flop_formula(packet)(formula)
    # A counter that is active already has a copy of the registry.
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if registry is not None:
            registry.update((packet, counter.flop_registry[packet]) for packet in formulas)


def _tell_dtensor(module: ModuleType) -> None:
    for overload, op in OPS.declared.items():
        takes_dtensors(module, overload, op, _LIBRARY)


tell_when_imported("torch.utils.flop_counter", _tell_counter)
tell_when_imported("torch.distributed.tensor", _tell_dtensor)


_PLAIN = frozenset(
    {Tensor, Parameter, type(None), torch.dtype, torch.Size, tuple, list, int, float, bool, str}
)
"""Types whose values the dispatcher hands on as they are, also as elements of a list."""

is_watched_by_a_mode = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_trace = torch._C._get_tracing_state
is_profiled = torch._C._autograd._profiler_enabled


def _direct(
    overload: Callable[..., Any], for_gpus: Callable[[], Callable[..., Any]],
    reference: Callable[..., Any],
) -> Any:  # fmt: skip
    """``overload``, past the dispatcher where that would do nothing but find the implementation."""

    def dispatch(*args: Any) -> Any:
        if not torch.compiler.is_compiling() and OPS.untold:
            announce()
        return overload(*args)

    def call(*args: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or (is_watched_by_a_mode() and getattr(RECORDING, "launch", None) is None)
            or _transform() is not None
            or _trace() is not None
            or is_profiled()
            or not _PLAIN.issuperset(map(type, args))
        ):
            return dispatch(*args)
        x = args[0]
        if type(x) is str:  # a prologue, and its inputs
            x = args[1][0]
            if not _PLAIN.issuperset(map(type, args[1])):
                return dispatch(*args)
        elif type(x) is list or type(x) is tuple:
            return overload(*args)
        # Autograd's, unless below an autograd function. Negative: of the imaginary part of a
        # conjugate, which the dispatcher makes a tensor of its own first.
        requires_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_of(args))
        if requires_grad or x.is_neg():
            return overload(*args)
        if x.is_cuda:
            return for_gpus()(*args)
        if x.is_cpu and not torch.is_autocast_enabled("cpu"):
            return reference(*args)
        return overload(*args)

    return call


def called_by_ops(reference: Callable[..., Any], cuda: str) -> Callable[..., Any]:
    """Make a function that calls a launcher on a GPU; elsewhere, and in graphs, its reference."""
    exact = _exact(reference)
    for_gpus = functools.cache(lambda: _exact(_for_gpus(cuda, reference), "cuda"))

    def call(x: Tensor, *args: Any) -> Any:
        in_graph = torch.compiler.is_compiling()
        return (reference if in_graph else for_gpus() if x.is_cuda else exact)(x, *args)

    return call


def planned(body: Callable[..., Any]) -> Any:
    """``body`` for tensors on a GPU: what it does is found out once and then repeated as one list.

    What it does must depend on nothing but its arguments: tensors, constants that can be hashed,
    and lists and tuples of these. It may call ops of this package and some of torch's.
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
            return _exact(launcher(), "cuda")(*args)
        return launcher()(*args)

    call.launcher = launcher  # type: ignore[attr-defined]
    return call
