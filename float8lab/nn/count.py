"""count_gemms: count the GEMMs that really ran in FP8 and in high precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from float8lab.formats import E4M3, E5M2
from float8lab.nn.convert.walk import is_unseen
from float8lab.ops.gemm import may_multiply
from float8lab.tensor import Float8Tensor
from float8lab.tensor.dispatch import overloads

__all__ = ["GEMM_OPS", "GemmCounts", "count_gemms"]


_SCALED = overloads("_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
_FP8 = frozenset((torch.ops.float8lab.scaled_mm.default,))
GEMM_OPS = _SCALED | _FP8 | overloads(
    "mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "matmul", "linear",
    "_grouped_mm",
)  # fmt: skip
"""The overloads that count as a GEMM."""


class GemmCounts:
    """Numbers of GEMMs by module name; ``print`` it for a table.

    Attributes:
        fp8_by_module: FP8 GEMMs by qualified module name.
        high_precision_by_module: all other GEMMs, also of FP8 formats that are emulated.
        unseen: converted layers whose forward does not run; their parents run their GEMMs.
    """

    def __init__(self) -> None:
        self.fp8_by_module: Counter[str] = Counter()
        self.high_precision_by_module: Counter[str] = Counter()
        self.unseen: list[str] = []

    @property
    def fp8(self) -> int:
        """The number of all FP8 GEMMs."""
        return sum(self.fp8_by_module.values())

    @property
    def high_precision(self) -> int:
        """The number of all other GEMMs."""
        return sum(self.high_precision_by_module.values())

    def __repr__(self) -> str:
        names = list(dict.fromkeys([*self.fp8_by_module, *self.high_precision_by_module]))
        fp8_counts, wide_counts = self.fp8_by_module, self.high_precision_by_module
        rows = [(n or "(outside any module)", fp8_counts[n], wide_counts[n]) for n in names]
        rows.append(("total", self.fp8, self.high_precision))
        width = max(len(name) for name, *_ in rows)
        lines = [f"{'module':<{width}}  {'FP8':>6}  {'high precision':>14}"]
        lines += [f"{name:<{width}}  {fp8:>6}  {wide:>14}" for name, fp8, wide in rows]
        lines += [f"{n}: not called; its parent multiplies by its weight" for n in self.unseen]
        return "\n".join(lines)


@contextmanager
def count_gemms() -> Iterator[GemmCounts]:
    """Count the GEMMs that run inside the ``with`` block, forward and backward.

    Every GEMM that reaches torch's dispatcher counts: linear layers, matmul, grouped GEMMs,
    attention written with matmul. GEMMs inside a fused attention kernel or a compiled graph do not
    count. A grouped GEMM counts as a single GEMM. An FP8 format that this device multiplies in high
    precision counts as high precision. Module names are qualified from the first module called.

    >>> layer = float8lab.Linear(32, 32, device="cpu")
    >>> with float8lab.count_gemms() as counts, float8lab.autocast():
    ...     layer(torch.ones(4, 32)).sum().backward()
    >>> counts.fp8, counts.high_precision
    (2, 0)
    """
    counts, names, hooks = GemmCounts(), _ModuleNames(), nn.modules.module
    try:
        with (
            hooks.register_module_forward_pre_hook(names.enter),
            hooks.register_module_forward_hook(names.leave, always_call=True),
            _CountingMode(counts, names),
        ):
            yield counts
    finally:
        modules = [item for model in names.called for item in model.named_modules()]
        counts.unseen = [name for name, module in modules if is_unseen(module)]


class _ModuleNames:
    """Knows which module an op belongs to, in forward and in backward.

    In forward, global module hooks keep a stack of modules. In backward, an autograd node has the
    sequence number of its creation, by which the module that ran at that time is looked up.
    """

    def __init__(self) -> None:
        self._stack: list[tuple[nn.Module, str]] = []
        self._by_sequence: dict[int, str] = {}
        self.called: dict[nn.Module, None] = {}  # modules that no other module has called

    def enter(self, module: nn.Module, args: object) -> None:
        """Note that a module begins its forward; a hook of all modules."""
        name = ""
        if self._stack:
            parent, parent_name = self._stack[-1]
            path = next((n for n, m in parent.named_modules() if m is module), None)
            name = ".".join(p for p in (parent_name, path or type(module).__name__) if p)
        else:
            self.called[module] = None
        self._stack.append((module, name))

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        """Note that a module has ended its forward; a hook of all modules."""
        if self._stack and self._stack[-1][0] is module:
            self._stack.pop()

    def current(self) -> str:
        """Return the name of the module that the running op belongs to."""
        if (node := torch._C._current_autograd_node()) is not None and not self._stack:
            return self._by_sequence.get(node._sequence_nr(), "")
        name = self._stack[-1][1] if self._stack else ""
        if self._stack and not name:
            name = type(self._stack[-1][0]).__name__
        self._by_sequence[torch.autograd._get_sequence_nr() - 1] = name
        return name


class _CountingMode(TorchDispatchMode):
    def __init__(self, counts: GemmCounts, names: _ModuleNames) -> None:
        super().__init__()
        self._counts = counts
        self._names = names

    def __torch_dispatch__(
        self, op: OpOverload, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if types and all(t is Float8Tensor for t in types):
            with self:  # so that the GEMMs that the handler runs count
                return Float8Tensor.__torch_dispatch__(op, types, args, kwargs)
        if op in GEMM_OPS:
            in_fp8 = self._counts.fp8_by_module
            target = in_fp8 if _runs_in_fp8(op, args) else self._counts.high_precision_by_module
            target[self._names.current()] += 1
        return op(*args, **(kwargs or {}))


def _runs_in_fp8(op: OpOverload, args: Any) -> bool:
    if op in _FP8:
        a, b = args[0], args[3]
        grouped = len(args) > 9 and args[9] is not None
        return args[1] is not None and may_multiply(
            args[2], args[5], a.device, a_dtype=a.dtype, b_dtype=b.dtype, grouped=grouped
        )
    return op in _SCALED and all(x.dtype in (E4M3, E5M2) for x in args[:2])
