"""The parameters of all experts: one stack, or a parameter for each expert in a common memory.

E experts, N out features, K in features. If parameters are contiguous in memory, a grouped GEMM
takes them as one tensor, ``[E, N, K]``. To find this out, it compares their addresses.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from float8lab.nn.casts import spec_of_experts
from float8lab.tensor import Float8Tensor
from float8lab.tensor.differentiation import version_of

__all__ = [
    "ExpertMemory", "expert_names", "fit_state_dict", "is_memory_of_parameter", "lay_together",
]  # fmt: skip


def expert_names(kind: str, experts: int, *, single: bool) -> tuple[str, ...]:
    """Return the names of the parameters of a kind, "weight" or "bias".

    >>> expert_names("bias", 2, single=False)
    ('bias0', 'bias1')
    """
    return (kind,) if single else tuple(f"{kind}{index}" for index in range(experts))


def is_memory_of_parameter(weight: Tensor) -> bool:
    """Whether a weight is a parameter or a view of one, and so is alive until backward anyway."""
    return isinstance(weight, nn.Parameter) or isinstance(weight._base, nn.Parameter)


class ExpertMemory:
    """Finds and remembers the tensor that parameters form in memory. A copy remembers nothing."""

    def __init__(self) -> None:
        self._stack: Tensor | None = None
        self._version = -1

    def __reduce__(self) -> tuple[type[ExpertMemory], tuple[()]]:
        return ExpertMemory, ()

    def stack(self, parameters: Sequence[Tensor], *, keeps_cast: bool = False) -> Tensor | None:
        """Return the tensor that the parameters form in memory; None if they are not contiguous.

        It is the same object as in the last call. A caller that keeps its cast identifies the cast
        by this object, so with ``keeps_cast`` it is a new object after a parameter was written.
        """
        version = sum(map(version_of, parameters)) if keeps_cast else -1
        stack = None if keeps_cast and version != self._version else self._stack
        if stack is None or not _is_stack(stack, parameters):
            with torch.inference_mode(False):  # the next to use it may be training
                self._stack = stack = _as_stack(parameters)
            self._version = version
        return stack


def _as_stack(parameters: Sequence[Tensor]) -> Tensor | None:
    """Return parameters of the same shape as one tensor if they are contiguous in memory."""
    parameter = parameters[0]
    if isinstance(parameter, Float8Tensor):
        spec = parameter.spec
        if any(type(p) is not type(parameter) or p.spec != spec for p in parameters):
            return None
        buffers = [_as_stack([*map(buffer, parameters)]) for buffer in _BUFFERS]
        if any(buffer is None for buffer in buffers):
            return None
        qdata, scale, amax = cast("list[Tensor]", buffers)
        return Float8Tensor(qdata, scale, amax, spec_of_experts(spec), parameter.dtype)
    has_address = parameter.numel() and not isinstance(parameter, FakeTensor)
    if not has_address or len({p.untyped_storage().data_ptr() for p in parameters}) > 1:
        return None
    shape = len(parameters), *parameter.shape
    # Autograd sees no view of a parameter, but the version counter is that of the first one.
    stack = parameter.detach().as_strided(shape, (parameter.numel(), *parameter.stride()))
    return stack if _is_stack(stack, parameters) else None


_BUFFERS = tuple(map(operator.attrgetter, ("qdata", "scale", "amax")))


def _is_stack(stack: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether the parameters are the matrices of ``stack``, in this order."""
    if isinstance(stack, Float8Tensor):
        return {*map(type, parameters)} == {Float8Tensor} and all(
            _is_stack(buffer(stack), [*map(buffer, parameters)]) for buffer in _BUFFERS[:2]
        )
    begin, step = stack.data_ptr(), stack.stride(0) * stack.element_size()
    expected = range(begin, begin + len(parameters) * step, step)
    addresses = [*map(Tensor.data_ptr, parameters)]
    return addresses == [*expected] and all(map(Tensor.is_contiguous, parameters))


def lay_together(parameters: Sequence[Tensor]) -> None:
    """Move parameters of the same shape to a common memory, one after the other, if they allow."""
    parameter = parameters[0]
    data = parameter.qdata if isinstance(parameter, Float8Tensor) else parameter
    kinds = {(type(p), p.shape, p.dtype, p.device, getattr(p, "spec", None)) for p in parameters}
    if type(parameter) not in (nn.Parameter, Float8Tensor) or len(kinds) > 1:
        return
    if parameter.is_meta or not data.untyped_storage().size() or _as_stack(parameters) is not None:
        return
    with torch.no_grad():
        stack = torch.stack([p.data for p in parameters])
    for parameter, matrix in zip(parameters, stack, strict=True):
        parameter.data = matrix


def fit_state_dict(
    state: dict[str, object], prefix: str, kind: str, experts: int, *, single: bool
) -> None:
    """Convert a state dict to a module's parameters: a single one, or one for each expert."""
    name = f"{prefix}{kind}"
    names = [f"{prefix}{local}" for local in expert_names(kind, experts, single=False)]
    if single:
        shapes = {getattr(state.get(key), "shape", None) for key in names}
        if name not in state and len(shapes) == 1 and None not in shapes:
            state[name] = torch.stack([cast("Tensor", state.pop(key)) for key in names])
    elif name in state and not any(key in state for key in names):
        value = state[name]
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == experts:
            del state[name]
            state.update(zip(names, value.unbind(), strict=True))
