"""find_nan: find where the first NaN or infinity of a training step arises.

Hooks look at the inputs and outputs of every module, in forward and in backward, until the first
value that is not finite; nothing is looked at after that. In forward, the module to report is the
first whose input was finite and whose output is not. A child returns before its parent, so this is
the innermost such module. A value that is first seen as the *input* of a child arose in the code of
its parent. Backward works in the same way with gradients, which enter a module at its outputs.

Attention masks hold -inf, which is no error. So a tensor with -inf but neither NaN nor +inf is
ignored if it requires no gradient. Otherwise it becomes the *suspect*: it is reported if a NaN or
+inf follows. It is cleared when the module that takes it, or in which it arose, returns finite
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
from float8lab.nn.casts import plain
from float8lab.recipes.region import in_backward
from float8lab.tensor.dtensor import local_of

__all__ = ["NonFinite", "find_nan", "local_values"]


@dataclass(frozen=True)
class NonFinite:
    """Where the first value that is not finite arose; it is false if there is no such value."""

    module: str | None = None
    """Qualified name: ``""`` is the model itself, ``"(loss)"`` the loss; None if all is finite."""
    tensor: str = ""
    """The tensor, such as ``"input 0"``, ``"output 1"``, ``"output ['logits']"``, ``"parameter
    weight"``, ``"gradient of input 0"``, ``"gradient of weight"``; or an input that the module
    passed to a child."""
    phase: str = ""
    """``"before"`` (the first step), ``"forward"``, ``"backward"`` or ``"optimizer"``."""
    step: int = 0
    """The step, counted from 0; if all is finite, the number of steps that ran."""
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

    It runs forward and backward, checks every tensor that a module takes or returns, and waits for
    the GPU at each. Afterwards parameters, buffers, gradients, the optimizer, scaling state and
    random numbers are as before. Compiled code runs uncompiled. If modules run in FP8 under
    ``autocast``, call this function inside an ``autocast``.

    Args:
        model: a model in the mode, ``train`` or ``eval``, in which it shall run.
        batch: the model's argument; a tuple or list is its arguments, a dict its keyword arguments.
        loss_fn: computes the loss from the model's output. None takes the output's ``loss`` if it
            has one, else the sum of all floating-point outputs.
        steps: how often to run the batch.
        optimizer: steps after each backward; without an optimizer only random numbers and delayed
            scales differ from step to step.

    Returns:
        Where the first such value arose; the result is false in a condition if all is finite.

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
            look.check_parameters("before" if step == 0 else "optimizer")
            if look.first_nonfinite is None:
                _run(model, batch, loss_fn, look, to_the_end=others_wait)
            if look.first_nonfinite is not None and not others_wait:
                break
            if optimizer is not None:
                optimizer.step()
        else:
            if optimizer is not None:
                look.check_parameters("optimizer")
    return look.first_nonfinite or NonFinite(step=steps)


def _run(
    model: nn.Module, batch: object, loss_fn: Callable[[object], Tensor] | None, look: _Look, *,
    to_the_end: bool,
) -> None:  # fmt: skip
    for parameter in model.parameters():
        parameter.grad = None
    with torch.enable_grad(), hooked(look.attach()):
        output = call(model, batch)
        loss = _default_loss(output) if loss_fn is None else loss_fn(output)
        look.check(loss, "(loss)", "loss")
        look.suspect = None
        if loss.requires_grad and (look.first_nonfinite is None or to_the_end):
            loss.sum().backward()
            look.check_gradients()


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
    return isinstance(x, Tensor) and x.is_floating_point()


def _named_tensors(values: object) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in nested containers, with its index or a path such as ``['logits']``."""
    pairs, _ = tree_flatten_with_path(values)
    for path, leaf in pairs:
        if _is_number(leaf):
            name = keystr(path)
            yield (name[1:-1] if name[1:-1].isdigit() else name), leaf


class _Look:
    """Hooks on all modules of a model, and the first value that is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.first_nonfinite: NonFinite | None = None
        self.suspect: NonFinite | None = None
        self.step = 0
        # The running modules, and whether finite outputs of each clear the suspect: they do if the
        # suspect is an input of the module or arose inside it.
        self._stack: list[tuple[nn.Module, bool]] = []
        # For each hooked output, its autograd node and the label of its hook, changed in place.
        self._labels: MutableMapping[Tensor, tuple[object, list[str]]] = WeakIdKeyDictionary()
        self._callers: dict[nn.Module, nn.Module | None] = {}

    def attach(self) -> Iterator[RemovableHandle]:
        """Register hooks on the modules and parameters."""
        for module, name in self.names.items():
            # Run directly before and after forward, to see the tensors that forward itself sees.
            yield module.register_forward_pre_hook(self._enter, with_kwargs=True)
            yield module.register_forward_hook(self._leave, prepend=True, always_call=True)
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    label = name, f"gradient of {parameter_name}"
                    yield parameter.register_hook(partial(self._check_gradient, label))

    def check(
        self, x: Any, module: str, tensor: str, *, phase: str = "forward", may_mask: bool = False
    ) -> bool:
        """Look at a tensor; return True if it is finite or something was found before."""
        if self.first_nonfinite is not None or not _is_number(x):
            return True
        with torch.no_grad():
            value = local_values(x.detach())
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
            self.first_nonfinite = self.suspect
        return False

    def check_parameters(self, phase: str) -> None:
        """Look at parameters and buffers, in the model's order."""
        for module, name in self.names.items():
            for tensor_name, parameter in module.named_parameters(recurse=False):
                self.check(parameter, name, f"parameter {tensor_name}", phase=phase)
            for tensor_name, buffer in module.named_buffers(recurse=False):
                self.check(buffer, name, f"buffer {tensor_name}", phase=phase, may_mask=True)

    def check_gradients(self) -> None:
        """Look at the accumulated gradients of the parameters, whose sum may have overflowed."""
        for module, name in self.names.items():
            for parameter_name, parameter in module.named_parameters(recurse=False):
                for attribute in ("grad", "main_grad"):
                    value = getattr(parameter, attribute, None)
                    self.check(value, name, f"gradient of {parameter_name}", phase="backward")

    def _enter(self, module: nn.Module, args: object, kwargs: object) -> object:
        caller = self._stack[-1][0] if self._stack else self._callers.get(module)
        self._callers[module] = caller
        name, clears = self.names[module], self.suspect is None
        inputs = [*_named_tensors(args), *_named_tensors(kwargs)]
        if not in_backward():  # a recomputation repeats values that were checked
            for index, x in inputs:
                label = name, f"input {index}"
                if caller is not None:
                    given = f"what it gives {name or '(model)'} as input {index}"
                    label = self.names[caller], given
                clears |= not self.check(x, *label, may_mask=True)
        self._stack.append((module, clears))
        if not torch.is_grad_enabled():
            return None
        # An alias sees only the gradient of this module: others may use the same input.
        indices = iter([index for index, _ in inputs])

        def alias_of(x: object) -> object:
            if not _is_number(x):
                return x
            index = next(indices)
            if not x.requires_grad or type(x) is not Tensor:
                return x
            alias = x.view_as(x)
            alias.register_hook(partial(self._check_gradient, (name, f"gradient of input {index}")))
            return alias

        return tree_map(alias_of, args), tree_map(alias_of, kwargs)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        # Activation checkpointing stops a recomputation by an exception, while modules still run.
        if all(running is not module for running, _ in self._stack):
            return  # the exception came before _enter
        running, clears = self._stack.pop()
        while running is not module:
            running, clears = self._stack.pop()
        name = self.names[module]
        caller = self._callers.get(module)
        finite = True
        for index, x in _named_tensors(output if isinstance(output, tuple | dict) else (output,)):
            if not in_backward():
                finite &= self.check(x, name, f"output {index}", may_mask=True)
            if x.requires_grad and torch.is_grad_enabled():
                label = "(loss)", f"gradient of the model's output {index}"
                if caller is not None:
                    gradient = f"gradient of output {index} of {name or '(model)'}"
                    label = self.names[caller], gradient
                self._hook_output(x, label)
        if finite and clears:
            self.suspect = None

    def _hook_output(self, x: Tensor, new_label: tuple[str, str]) -> None:
        """Hook the gradient of a module's output; relabel the hook if its caller returns it too."""
        node, label = self._labels.get(x, (None, []))
        if node is x.grad_fn:
            label[:] = new_label
            return
        label = list(new_label)
        self._labels[x] = x.grad_fn, label
        x.register_hook(partial(self._check_gradient, label))

    def _check_gradient(self, label: Sequence[str], gradient: Tensor) -> None:
        """Look at a gradient, named by the module and tensor that its label now has."""
        self.check(gradient, *label, phase="backward")


def local_values(x: Tensor) -> Tensor:
    """Return this rank's shard of a tensor in high precision."""
    value = plain(local_of(x))
    # An FP8 dtype without a scale has no isfinite.
    return value.float() if value.element_size() == 1 else value
