"""The parameters of all experts of a module: one stack, or one parameter for each in one memory.

E experts, N out features, K in features. Parameters that follow each other in memory are one
tensor, ``[E, N, K]``, to a grouped GEMM: finding that out costs a look at each one's address.
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
    """Names of the parameters of a kind, "weight" or "bias".

    >>> expert_names("bias", 2, single=False)
    ('bias0', 'bias1')
    """
    return (kind,) if single else tuple(f"{kind}{index}" for index in range(experts))


def is_memory_of_parameter(weight: Tensor) -> bool:
    """Whether a weight is a parameter or a view of one: alive until backward, in any case."""
    return isinstance(weight, nn.Parameter) or isinstance(weight._base, nn.Parameter)


class ExpertMemory:
    """Finds the one tensor that parameters are, and remembers it. A copy remembers nothing."""

    def __init__(self) -> None:
        self._stack: Tensor | None = None
        self._version = -1

    def __reduce__(self) -> tuple[type[ExpertMemory], tuple[()]]:
        return ExpertMemory, ()

    def stack(self, parameters: Sequence[Tensor], *, keeps_cast: bool = False) -> Tensor | None:
        """The tensor that the parameters are in memory; None if they lie elsewhere.

        It is the same object as in the last call. A cast that the caller keeps is known by it: then
        there is a new one when a parameter was written, too.
        """
        version = sum(map(version_of, parameters)) if keeps_cast else -1
        stack = None if keeps_cast and version != self._version else self._stack
        if stack is None or not _is_stack(stack, parameters):
            with torch.inference_mode(False):  # training may use it next
                self._stack = stack = _as_stack(parameters)
            self._version = version
        return stack


def _as_stack(parameters: Sequence[Tensor]) -> Tensor | None:
    """Parameters of one shape that follow each other in memory, as one tensor; else None."""
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
    # Not a view of any of them, whose version counter would be its own.
    stack = parameter.detach().as_strided(shape, (parameter.numel(), *parameter.stride()))
    return stack if _is_stack(stack, parameters) else None


_BUFFERS = tuple(map(operator.attrgetter, ("qdata", "scale", "amax")))


def _is_stack(stack: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether parameters are the matrices of ``stack``, in their order."""
    if isinstance(stack, Float8Tensor):
        return {*map(type, parameters)} == {Float8Tensor} and all(
            _is_stack(buffer(stack), [*map(buffer, parameters)]) for buffer in _BUFFERS[:2]
        )
    begin, step = stack.data_ptr(), stack.stride(0) * stack.element_size()
    places = range(begin, begin + len(parameters) * step, step)
    addresses = [*map(Tensor.data_ptr, parameters)]
    return addresses == [*places] and all(map(Tensor.is_contiguous, parameters))


def lay_together(parameters: Sequence[Tensor]) -> None:
    """Have parameters of one shape follow each other in memory, where they can."""
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
    """Make the parameters of a state dict those that a module has: one, or one for each expert."""
    name = f"{prefix}{kind}"
    names = [f"{prefix}{of_expert}" for of_expert in expert_names(kind, experts, single=False)]
    if single:
        shapes = {getattr(state.get(key), "shape", None) for key in names}
        if name not in state and len(shapes) == 1 and None not in shapes:
            state[name] = torch.stack([cast("Tensor", state.pop(key)) for key in names])
    elif name in state and not any(key in state for key in names):
        value = state[name]
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == experts:
            del state[name]
            state.update(zip(names, value.unbind(), strict=True))
