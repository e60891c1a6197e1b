"""Find converted layers whose forward never runs, since their parent reads the weight itself.

A module may write ``F.linear(x, self.qkv.weight)`` instead of calling ``self.qkv``: that GEMM runs
in high precision, whatever class the layer has. Hooks on the model alone watch its first call in
eager mode. They stay and return at once in later calls, for a model that was compiled with hooks
would be recompiled without them. They see nothing of a compiled call.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from float8lab.nn.convert.names import TRAINED_COPIES
from float8lab.nn.convert.other_linear import OtherLinear
from float8lab.nn.convert.walk import UNSEEN, users_of
from float8lab.nn.linear import Linear
from float8lab.nn.precision import Precision, precisions_below
from float8lab.ops.declare import is_traced, untraced
from float8lab.recipes.recording import CHECKPOINTS, Recording, has_ended
from float8lab.recipes.region import in_backward
from float8lab.tensor.dtensor import is_dtensor

__all__ = ["CallHooks", "FirstCall", "remove_hooks"]


class CallHooks:
    """Base of objects whose methods are hooks of a model; a copy of the model has a new object."""

    def __init_subclass__(cls) -> None:
        # Hooks compile as a part of their caller or run in Python, never as a graph of their own.
        for hook in (cls.before, cls.finished, cls.after):
            untraced(hook)

    def register(self, model: nn.Module, *, prepend: bool = False) -> None:
        """Hook ``before``, ``finished`` (if forward returns) and ``after`` to a model's forward."""
        model.register_forward_pre_hook(self.before, prepend=prepend)
        # A hook that is always called could not tell an exception from a None result.
        model.register_forward_hook(self.finished)
        model.register_forward_hook(self.after, always_call=True)

    def before(self, model: nn.Module, args: object) -> None: ...
    def finished(self, model: nn.Module, args: object, output: object) -> None: ...
    def after(self, model: nn.Module, args: object, output: object) -> None: ...

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        kind, arguments = self.__reduce__()
        return memo.setdefault(id(self), kind(*arguments))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), ()


class FirstCall(CallHooks):
    """Hooks that watch the first call of a model that finishes in eager mode."""

    def __init__(self) -> None:
        self._done = False
        self._recording: Recording | None = None  # None outside a call

    def before(self, model: nn.Module, args: object) -> None:
        # is_traced() comes first: a graph gets guards on all state that is read during tracing.
        if is_traced() or self._done or in_backward():
            return
        frame = None if self._recording is None else self._recording.frame
        if frame is None or has_ended(frame):
            self._recording = Recording(sys._getframe(1))
            CHECKPOINTS.recordings = (*CHECKPOINTS.recordings, self._recording)

    def finished(self, model: nn.Module, args: object, output: object) -> None:
        if not is_traced() and self._recording is not None:
            self._done = True
            _find_unseen(model, set(self._recording.calls), output)

    def after(self, model: nn.Module, args: object, output: object) -> None:
        if not is_traced() and (ended := self._recording) is not None:
            CHECKPOINTS.recordings = tuple(r for r in CHECKPOINTS.recordings if r is not ended)
            self._recording = None


@torch._disable_dynamo
def _find_unseen(model: nn.Module, ran: set[Precision], output: object) -> None:
    """Mark the layers that did not run in a call, and warn of them."""
    outputs = [y for y in tree_leaves(output) if isinstance(y, Tensor)]
    if unseen := _unseen(model, ran, outputs):
        for layer in unseen.values():
            vars(layer)[UNSEEN] = True
        warnings.warn(
            f"{len(unseen)} converted layers did not run in the model's first call, though layers "
            f"beside them did or their weights were used: {', '.join(unseen)}. If the module above "
            "one reads its weight instead of calling it, that GEMM is in high precision; "
            "conversion_report(model) marks these layers. Exclude them to leave them as they are.",
            stacklevel=3,
        )


def _unseen(model: nn.Module, ran: set[Precision], outputs: list[Tensor]) -> dict[str, nn.Module]:
    """Return converted layers that did not run though layers near them did or outputs use them."""
    # If autograd recorded the call, layers whose weight it does not know do not count, such as
    # skipped blocks, or a projection of images when the batch has no images.
    users = users_of(model.modules())
    reached = _reached(outputs)
    unseen: dict[str, nn.Module] = {}
    for prefix, parent in model.named_modules():
        if not _runs_its_layers(parent):
            continue
        parent_ran = not ran.isdisjoint(precisions_below(parent))
        for name, layer in parent.named_children():
            if not isinstance(layer, (Linear, OtherLinear)) or layer._fp8.recipe is None:
                continue
            weight = layer._parameters.get("weight")
            states = [getattr(user, "_fp8", None) for user, _ in users.get(id(weight), [])]
            # A layer that ran before this call, such as in a CUDA graph, may run unseen.
            is_only_user = states == [layer._fp8] and layer._fp8._last_call is None
            if not ran.isdisjoint([layer._fp8, *states]) or not (parent_ran or is_only_user):
                continue
            if _is_read(weight, reached, parent_ran):
                unseen[f"{prefix}.{name}" if prefix else name] = layer
    return unseen


def _runs_its_layers(parent: nn.Module) -> bool:
    """Whether a module has a forward that should run all of its layers.

    Containers such as ModuleList have no forward: their owners choose among the layers. In PEFT, a
    trained copy of a layer runs, but the layer itself does not. Torch's attention reads the weight
    of its output projection in a call in high precision.
    """
    if isinstance(parent, nn.MultiheadAttention):
        return False
    return type(parent).forward is not nn.Module.forward and TRAINED_COPIES not in parent._modules


def _is_read(weight: Any, reached: set[int] | None, parent_ran: bool) -> bool:
    """Whether outputs seem to depend on a weight; ``reached`` are ids of weights that they use."""
    # FSDP2 has replaced the parameter that autograd knows by a sharded parameter.
    if reached is None or weight is None or is_dtensor(weight) or not weight.requires_grad:
        return parent_ran
    return id(weight) in reached


def _reached(outputs: list[Tensor]) -> set[int] | None:
    """Return ids of the leaves that gradients reach through eager mode; None without autograd."""
    nodes = [y.grad_fn for y in outputs if y.grad_fn is not None]
    if not nodes:
        return None
    leaves, seen = set(), set(nodes)
    while nodes:
        node: Any = nodes.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        if "CheckpointFunction" in node.name():  # autograd did not see the ops inside
            return None
        # The leaves of compiled calls, with AOTAutograd or without, are weights of layers that ran.
        is_compiled = any(name in node.name() for name in ("CompiledFunction", "LinearFunction"))
        successors = {n for n, _ in node.next_functions if n is not None} - seen
        next_nodes = [n for n in successors if not is_compiled or not hasattr(n, "variable")]
        nodes += next_nodes
        seen.update(next_nodes)
    return leaves


def remove_hooks(module: nn.Module, kind: type[CallHooks] = CallHooks) -> None:
    """Remove the forward hooks of a module that are methods of an object of this ``kind``."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), kind):
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
