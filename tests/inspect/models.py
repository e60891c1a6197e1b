"""Models for tests of functions that run a model and must leave it unchanged."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from float8lab.nn.precision import precisions_below
from float8lab.recipes.region import STATE
from float8lab.tensor import Float8Tensor


class StatefulModel(nn.Module):
    """A model with state of every kind: buffers, random numbers, counters, a list and gradients."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.norm = nn.BatchNorm1d(64)
        self.second = nn.Linear(64, 32)
        self.calls, self.seen = 0, []
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.shape)
        y = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.2)
        if self.fails:
            raise RuntimeError("on purpose")
        return self.second(y)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Return all comparable state of a model, of its optimizer, of torch and of the library."""

    def values(x: Tensor | None) -> Any:
        if x is None:
            return None
        buffers = [x.qdata, x.scale, x.amax] if isinstance(x, Float8Tensor) else [x.detach()]
        return id(x), x.dtype, [t.flatten().tolist() for t in buffers]

    modules = []
    for name, module in model.named_modules():
        kinds = ("forward", "forward_pre", "backward")
        hooks = [list(getattr(module, f"_{kind}_hooks")) for kind in kinds]
        modules.append((name, type(module), sorted(vars(module)), module.training, hooks))
    state = [
        (
            id(precision), precision.recipe, precision.pinned, precision.name,
            precision.fp8_all_gather, id(precision.weight_cast),
            [
                (key, id(slots), {k: v.tolist() for k, v in slots.tensors().items()})
                for key, slots in precision.slots.items()
            ],
        )
        for precision in precisions_below(model)
    ]  # fmt: skip
    return {
        "modules": modules,
        "precisions": state,
        "parameters": [
            (values(p), values(p.grad), len(p._backward_hooks or ())) for p in model.parameters()
        ],
        "optimizer": tree_map_only(Tensor, Tensor.tolist, optimizer.state_dict())
        if optimizer
        else None,
        "buffers": [values(b) for b in model.buffers()],
        "plain": (getattr(model, "calls", 0), list(getattr(model, "seen", []))),
        "random": torch.get_rng_state().tolist(),
        "random on GPUs": [state.tolist() for state in torch.cuda.get_rng_state_all()],
        "autocast": STATE.autocast,
        "grad mode": torch.is_grad_enabled(),
    }
