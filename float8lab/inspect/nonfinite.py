"""find_nan: find where the first NaN or infinity of a training step arises.

Hooks look at the inputs and outputs of every module, in forward and in backward; the first value
that is not finite decides, and after it nothing is looked at. In forward the module to name
is one whose input was finite and whose output is not: a child is left before its parent, so the
first such is the innermost. A value that is first seen as the *input* of a child arose in the code
of its parent. Backward is the same with gradients, which enter at the outputs.

Attention masks hold -inf, which is no error. So a tensor with -inf but neither NaN nor +inf is
passed over if it requires no gradient. Otherwise it is a suspect: it is the tensor to name if a NaN
or +inf follows, and it is cleared when the module that takes it, or in which it arose, gives finite
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from float8lab.arguments import check_callables, check_instance, check_module, check_size
from float8lab.distributed.ranks import rank_and_size
from float8lab.inspect.trial import as_before, call, hooked, own_loss
from float8lab.recipes.region import in_backward
from float8lab.tensor import Float8Tensor
from float8lab.tensor.dtensor import local_of

__all__ = ["NonFinite", "find_nan"]


@dataclass(frozen=True)
class NonFinite:
    """Where the first value that is not finite arose; false in a condition if there is none."""

    module: str | None = None
    """Qualified name; ``""`` is the model itself, ``"(loss)"`` the loss; None: all is finite."""
    tensor: str = ""
    """The tensor, such as ``"input 0"``, ``"output 1"``, ``"output ['logits']"``, ``"parameter
    weight"``, ``"gradient of input 0"``, ``"gradient of weight"``; or an input that the module gave
    to a child."""
    phase: str = ""
    """``"before"`` the step, ``"forward"``, ``"backward"`` or ``"optimizer"``."""
    step: int = 0
    """The step, from 0; where all is finite, the number of steps."""
    nan: int = 0
    inf: int = 0
    shape: tuple[int, ...] = ()
    kind: str = ""
    """The module's class."""

    def __bool__(self) -> bool:
        return self.module is not None

    def __repr__(self) -> str:
        if self.module is None:
            return f"NonFinite(none in {self.step} step{'s' if self.step != 1 else ''})"
        counts = [f"{n} {name}" for n, name in ((self.nan, "NaN"), (self.inf, "inf")) if n]
        module = f"{self.module or '(model)'}" + (f" ({self.kind})" if self.kind else "")
        return (
            f"NonFinite({' and '.join(counts)} in {self.tensor} {list(self.shape)} of {module}, "
            f"{self.phase}, step {self.step})"
        )


def find_nan(
    model: nn.Module,
    batch: object,
    *,
    loss_fn: Callable[[object], Tensor] | None = None,
    steps: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
) -> NonFinite:
    """Find the module and the tensor in which the first NaN or infinity arises.

    Runs forward and backward with a look at every tensor that a module takes or gives, and waits
    for the GPU at each. Afterwards parameters, buffers, gradients, the optimizer, scaling state and
    random numbers are as before. Compiled code runs uncompiled. Modules that run in FP8 under
    ``autocast`` need one around this call.

    Args:
        model: in the mode, ``train`` or ``eval``, in which it is to run.
        batch: the model's argument; a tuple or list is its arguments, a dict its keyword arguments.
        loss_fn: makes the loss of the model's output. None: the output's ``loss`` if it has one,
            else the sum of all floating-point outputs.
        steps: how often to run the batch.
        optimizer: steps after each backward; without it only random numbers and delayed scales
            differ from step to step.

    Returns:
        What was found; false in a condition if all is finite.

    Raises:
        ValueError: ``steps`` is below 1.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LogSoftmax(-1))
    >>> float8lab.inspect.find_nan(model, torch.ones(3, 2))
    NonFinite(none in 1 step)
    >>> float8lab.inspect.find_nan(model, torch.tensor([[1e38, 1e38]]), loss_fn=lambda y: 1e38 * y)
    NonFinite(1 inf in loss [1, 2] of (loss), forward, step 0)
    """
    check_module("model", model)
    check_callables(("output",), loss_fn=loss_fn)
    check_size("steps", steps, minimum=1)
    noun = "a torch.optim.Optimizer"
    check_instance("optimizer", optimizer, torch.optim.Optimizer, noun, optional=True)
    model = getattr(model, "_orig_mod", model)
    look = _Look(model)
    others_wait = rank_and_size()[1] > 1  # in collectives: this process cannot stop early
    with as_before(model, optimizer), torch.compiler.set_stance("force_eager"):
        for step in range(steps):
            look.step = step
            look.at_parameters("before" if step == 0 else "optimizer")
            if look.found is None:
                _run(model, batch, loss_fn, look, to_the_end=others_wait)
            if look.found is not None and not others_wait:
                break
            if optimizer is not None:
                optimizer.step()
        else:
            if optimizer is not None:
                look.at_parameters("optimizer")
    return look.found or NonFinite(step=steps)


def _run(
    model: nn.Module, batch: object, loss_fn: Callable[[object], Tensor] | None, look: _Look, *,
    to_the_end: bool,
) -> None:  # fmt: skip
    for parameter in model.parameters():
        parameter.grad = None
    with torch.enable_grad(), hooked(look.attach()):
        output = call(model, batch)
        loss = _default_loss(output) if loss_fn is None else loss_fn(output)
        look.at(loss, "(loss)", "loss")
        look.suspect = None
        if loss.requires_grad and (look.found is None or to_the_end):
            loss.sum().backward()
            look.at_gradients()


def _default_loss(output: object) -> Tensor:
    output_loss = own_loss(output)
    if isinstance(output_loss, Tensor):
        return output_loss
    leaves = [leaf for leaf in tree_leaves(output) if _is_number(leaf)]
    if not leaves:
        raise TypeError(
            "loss_fn must be given where the model's output has no floating-point tensor; got "
            f"{type(output).__name__}. Pass a function of the output."
        )
    return sum((leaf.float().sum() for leaf in leaves), leaves[0].new_zeros(()).float())


def _is_number(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and (x.is_floating_point() or isinstance(x, Float8Tensor))


def _named_tensors(values: object) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in nested containers, with its index or a path such as ``['logits']``."""
    pairs, _ = tree_flatten_with_path(values)
    for path, leaf in pairs:
        if _is_number(leaf):
            name = keystr(path)
            yield (name[1:-1] if name[1:-1].isdigit() else name), leaf


class _Look:
    """Hooks on all modules of a model, and the first thing found."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.found: NonFinite | None = None
        self.suspect: NonFinite | None = None
        self.step = 0
        # The modules that run, and whether finite outputs of each clear the suspect, which is one
        # of its inputs or arose inside of it.
        self._stack: list[tuple[nn.Module, bool]] = []
        # The node and the changeable label of the hook of an output.
        self._labels: MutableMapping[Tensor, tuple[object, list[str]]] = WeakIdKeyDictionary()
        self._callers: dict[nn.Module, nn.Module | None] = {}

    def attach(self) -> Iterator[RemovableHandle]:
        """Register hooks on the modules and parameters."""
        for module, name in self.names.items():
            # The first to see the outputs, the last to see the inputs: as the module itself.
            yield module.register_forward_pre_hook(self._enter, with_kwargs=True)
            yield module.register_forward_hook(self._leave, prepend=True, always_call=True)
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    label = name, f"gradient of {parameter_name}"
                    yield parameter.register_hook(partial(self._at_gradient, label))

    def at(
        self, x: Any, module: str, tensor: str, *, phase: str = "forward", may_mask: bool = False
    ) -> bool:
        """Look at a tensor unless something was found already; return whether it is all finite."""
        if self.found is not None or not _is_number(x):
            return True
        with torch.no_grad():
            value = _local(x.detach())
            if bool(value.isfinite().all()):
                return True
            nan, inf = int(value.isnan().sum()), int(value.isinf().sum())
            masks = may_mask and not nan and not bool((value == torch.inf).any())
        if masks and not x.requires_grad:
            return True
        is_named = module in self.names.values()
        kind = type(self.model.get_submodule(module)).__name__ if is_named else ""
        nonfinite = NonFinite(module, tensor, phase, self.step, nan, inf, tuple(x.shape), kind)
        self.suspect = self.suspect or nonfinite
        if not masks:
            self.found = self.suspect
        return False

    def at_parameters(self, phase: str) -> None:
        """Look at parameters and buffers, in the model's order."""
        for module, name in self.names.items():
            for tensor_name, parameter in module.named_parameters(recurse=False):
                self.at(parameter, name, f"parameter {tensor_name}", phase=phase)
            for tensor_name, buffer in module.named_buffers(recurse=False):
                self.at(buffer, name, f"buffer {tensor_name}", phase=phase, may_mask=True)

    def at_gradients(self) -> None:
        """Look at the gradients that the parameters have, which autograd may have summed up."""
        for module, name in self.names.items():
            for parameter_name, parameter in module.named_parameters(recurse=False):
                for attribute in ("grad", "main_grad"):
                    value = getattr(parameter, attribute, None)
                    self.at(value, name, f"gradient of {parameter_name}", phase="backward")

    def _enter(self, module: nn.Module, args: object, kwargs: object) -> object:
        caller = self._stack[-1][0] if self._stack else self._callers.get(module)
        self._callers[module] = caller
        name, clears = self.names[module], self.suspect is None
        inputs = [*_named_tensors(args), *_named_tensors(kwargs)]
        if not in_backward():  # a recomputation gives what the forward gave
            for index, x in inputs:
                place = name, f"input {index}"
                if caller is not None:
                    given = f"what it gives {name or '(model)'} as input {index}"
                    place = self.names[caller], given
                clears |= not self.at(x, *place, may_mask=True)
        self._stack.append((module, clears))
        if not torch.is_grad_enabled():
            return None
        # Gradients of the module's own use of its inputs, which others may use as well.
        indices = iter([index for index, _ in inputs])

        def own(x: object) -> object:
            if not _is_number(x):
                return x
            index = next(indices)
            if not x.requires_grad or type(x) is not Tensor:
                return x
            alias = x.view_as(x)
            alias.register_hook(partial(self._at_gradient, (name, f"gradient of input {index}")))
            return alias

        return tree_map(own, args), tree_map(own, kwargs)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        # Activation checkpointing leaves a recomputation by an exception, inside of modules.
        if all(running is not module for running, _ in self._stack):
            return  # what ended it came before _enter
        running, clears = self._stack.pop()
        while running is not module:
            running, clears = self._stack.pop()
        name = self.names[module]
        caller = self._callers.get(module)
        finite = True
        for index, x in _named_tensors(output if isinstance(output, tuple | dict) else (output,)):
            if not in_backward():
                finite &= self.at(x, name, f"output {index}", may_mask=True)
            if x.requires_grad and torch.is_grad_enabled():
                place = "(loss)", f"gradient of the model's output {index}"
                if caller is not None:
                    gradient = f"gradient of output {index} of {name or '(model)'}"
                    place = self.names[caller], gradient
                self._hook_output(x, place)
        if finite and clears:
            self.suspect = None

    def _hook_output(self, x: Tensor, place: tuple[str, str]) -> None:
        """Look at the gradient of a module's output, which its caller may return in its turn."""
        node, label = self._labels.get(x, (None, []))
        if node is x.grad_fn:
            label[:] = place
            return
        label = list(place)
        self._labels[x] = x.grad_fn, label
        x.register_hook(partial(self._at_gradient, label))

    def _at_gradient(self, label: Sequence[str], gradient: Tensor) -> None:
        """Look at a gradient by the names of a module and a tensor that the label has by then."""
        self.at(gradient, *label, phase="backward")


def _local(x: Tensor) -> Tensor:
    """This rank's part of a tensor, in high precision."""
    x = local_of(x)
    value: Tensor = x.dequantize() if isinstance(x, Float8Tensor) else x
    # Float8Tensors, and FP8 dtypes without a scale.
    return value.float() if value.element_size() == 1 else value
