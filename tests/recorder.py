"""Which ops run."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Ops"]


class Ops(TorchDispatchMode):
    """Records the ops that run inside, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(op)
        return op(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        """Such as ``"aten.mm.default"``."""
        return [str(op) for op in self.seen]
