"""Calls of our ops in the code that Inductor generates.

Our ops are opaque to Inductor. By default it writes a call through torch's dispatcher, and on a GPU
each run looks up the launches for the arguments; together this takes some 50 us. But sizes are
constants of a graph. So the generated code calls a ``call_site`` instead, which has no dispatcher
before it and repeats the launches of an earlier run. No call is written for an op that only orders
other ops, since the code already has their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload

from float8lab.ops import declare

__all__ = ["call_site"]

_RUNS = 8
"""Runs in which a call looks for its recorded launches; a call not recorded by then never is."""


def call_site(
    name: str, used_results: Sequence[int], *, repeats: bool, in_cuda_graph: bool = False
) -> Callable[..., object]:
    """Return the function that generated code calls, at one position, instead of an op.

    Args:
        name: the name of the op's overload, such as ``"cast.pure"``.
        used_results: indices of the results that the graph reads. If the op does not compute such a
            result, it is an empty tensor, as the op itself returns it; unused ones may be None.
        repeats: the graph runs on a GPU, and all sizes of the arguments are constant.
        in_cuda_graph: torch makes, or tries to make, a CUDA graph of the code. It then assumes that
            results are in the memory of the CUDA graph, even in the runs before the capture.
    """
    overload = declare.overload_named(name)
    prepare, run, launcher = declare.OPS.declared[overload].direct
    if prepare is not None:
        prepare = functools.partial(prepare, in_cuda_graph=in_cuda_graph)
    runs = _RUNS if repeats and launcher is not None else 0
    repeat = lacks = None

    def call(*args: object) -> object:
        nonlocal lacks, repeat, runs
        if declare.is_watched_by_a_mode() or declare.is_profiled():
            declare.announce()
            return overload(*args)
        run_args = args if prepare is None else prepare(*args)
        results: Any = NotImplemented if repeat is None else repeat(run_args)
        if results is NotImplemented:
            if runs:
                runs -= 1
                repeat = declare.load_launcher("_replay:repeated")(launcher(), run_args)  # type: ignore[misc]
            results = run(*run_args)
        if lacks is None:
            lacks = any(results[i] is None for i in used_results)
        return declare.filled(results, args) if lacks else results

    return declare.untraced(call)


def _register(lowering: ModuleType) -> None:
    """Make Inductor write call sites; if its private names have changed, it writes ops."""
    with suppress(AttributeError, TypeError):  # these names are private
        kind = _operation_class(lowering.ir)
        for overload in declare.OPS.declared:
            if overload not in lowering.lowerings:
                tag = torch._library.utils.get_layout_constraint_tag(overload, with_default=True)
                constraint = lowering.tag_to_layout_constraint(tag)
                lowering.make_fallback(overload, layout_constraint=constraint, warn=False)
            lowering.lowerings[overload] = _with_call_site(lowering, overload, kind)


def _with_call_site(
    lowering: ModuleType, overload: OpOverload, kind: type
) -> Callable[..., object]:
    """Return a lowering whose operation has the class ``kind``."""
    lower = lowering.lowerings[overload]

    def lower_to_site(*args: object, **kwargs: object) -> object:
        operations = lowering.V.graph.operations
        count = len(operations)
        results = lower(*args, **kwargs)
        for operation in operations[count:]:
            if type(operation) is lowering.ir.FallbackKernel and operation.op_overload is overload:
                operation.__class__ = kind
                for output in operation.outputs:  # asserting sizes would take time in each run
                    output.skip_size_stride_alignment_checks = True
        return results

    return lower_to_site


def _operation_class(ir: Any) -> type:
    """Make a subclass of Inductor's operation for opaque ops; it is written as a call site."""

    class CallSite(ir.FallbackKernel):
        is_call_site = False

        def codegen(self, wrapper: Any) -> None:
            try:
                if self.needs_no_call():
                    wrapper.writeline(f"{self.get_name()} = None")
                    return
                name = self.write_site(wrapper)
            except AttributeError:  # names differ in this version of torch, which writes the op
                name = None
            if name is not None:
                self.python_kernel_name, self.is_call_site = name, True
            super().codegen(wrapper)

        def needs_no_call(self) -> bool:
            """Whether the op only orders other ops, and no Python code reads its results."""
            graph, declared = ir.V.graph, declare.OPS.declared[self.op_overload]
            if not declared.only_orders or graph.cpp_wrapper:
                return False
            return all(x.get_name() in graph.removed_buffers for x in self.outputs)

        def write_site(self, wrapper: Any) -> str | None:
            """Write a call site to the code and return its name; None if there can be none."""
            graph, outputs, op = ir.V.graph, self.outputs, self.op_overload
            names = [text.partition("=")[0] for text in super().codegen_kwargs()]
            unwritten = [x.name for x in op._schema.arguments][len(super().codegen_args()) :]
            if graph.cpp_wrapper or graph.name is not None or unwritten[: len(names)] != names:
                return None
            is_read = [output.get_name() not in graph.removed_buffers for output in outputs]
            used_results = [i for i, read in enumerate(is_read) if read and len(outputs) > 1]
            sizes = [n for x in self.inputs for n in (*x.get_size(), *x.get_stride())]
            varies = any(getattr(n, "free_symbols", ()) for n in (*sizes, *self.constant_args))
            repeats = self.get_device().type == "cuda" and not varies
            form = op.name().removeprefix("float8lab::")
            name = f"{form.replace('.', '_')}_{self.get_name()}"
            wrapper.add_import_once("from float8lab.ops.inductor import call_site")
            in_cuda_graph = ir.config.triton.cudagraphs
            arguments = f"{form!r}, {used_results}, {repeats=}, {in_cuda_graph=}"
            wrapper.header.writeline(f"{name} = call_site({arguments})")
            return name

        def codegen_kwargs(self, skip_out: bool = False) -> list[str]:
            written: list[str] = super().codegen_kwargs(skip_out)
            return [x.partition("=")[2] for x in written] if self.is_call_site else written

    return CallSite


declare.OPS.untold["torch._inductor.lowering"] = _register
