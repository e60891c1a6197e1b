"""Parameters of tensor-parallel modules: which part of the whole each rank has.

The whole is the parameter that one rank alone would have. A checkpoint of Transformer Engine or of
Megatron has a file for each tensor-parallel rank, with the same parts under the same names, so each
rank loads its own by ``load_state_dict``; the functions here go from there to one rank, and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from float8lab.arguments import check_instance, check_module
from float8lab.nn.parallel import Shard, TensorParallelGroup
from float8lab.tensor import Float8Tensor

__all__ = ["shard_state_dict", "shards_of", "whole_state_dict"]


def shards_of(model: nn.Module) -> dict[str, Shard]:
    """Which part of the whole each parameter is, by qualified name; replicas are left out."""
    found: dict[str, Shard] = {}
    for path, module in model.named_modules():
        if not isinstance(module, TensorParallelGroup) or module.tp_size == 1:
            continue
        for state, (mode, pieces) in module._parallel_modes().items():
            prefix = state.removeprefix("_fp8").removeprefix("_")
            own = [n for n, p in module._parameters.items() if p is not None]  # type: ignore[attr-defined]
            own = [n for n in own if n.startswith(prefix) and not n.startswith("layer_norm")]
            alone = sum("weight" in name for name in own) == 1
            for name in own:
                dim = _dimension(name, mode)
                if dim is None:
                    continue
                shard = module._shard(dim, pieces if alone else ())
                if shard is None:
                    raise RuntimeError(
                        f"model must have tensor-parallel groups; {path or 'it'} has none. Call "
                        "set_tensor_parallel_group(group)."
                    )
                found[f"{path}.{name}" if path else name] = shard
    return found


def _dimension(name: str, mode: str) -> int | None:
    """The dimension of a parameter, from its end, that ranks share."""
    if "weight" in name:
        return -2 if mode == "column" else -1
    return -1 if mode == "column" else None


def shard_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Take this rank's part of the state dict that the model has on one rank.

    Args:
        model: whose tensor-parallel modules have their groups.
        state_dict: of the same model on one rank, or one that ``whole_state_dict`` made. Names that
            are not in the model stay as they are.

    Returns:
        What ``model.load_state_dict`` takes; parts are views of the whole where they can be.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: a module has no group yet.
        NotImplementedError: a parameter that ranks share is stored in FP8, or sharded further.

    >>> layer = float8lab.Linear(8, 4, parallel_mode="column", device="cpu")  # one rank: all of it
    >>> state = float8lab.nn.shard_state_dict(layer, layer.state_dict())
    >>> state["weight"].shape
    torch.Size([4, 8])
    """
    check_module("model", model)
    check_instance("state_dict", state_dict, Mapping, "a mapping from names to tensors")
    shards = shards_of(model)
    for name in shards:
        _check_plain("state_dict", name, state_dict.get(name))
    return {n: shards[n].of(x) if n in shards else x for n, x in state_dict.items()}


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """Gather the state dict that the model has on one rank. All ranks call it, and all get it.

    Args:
        model: whose parameters are not sharded further (FSDP2), nor stored in FP8.

    Returns:
        The model's state dict with each parameter whole.

    Raises:
        TypeError: not a module.
        RuntimeError: a module has no group yet.
        NotImplementedError: a parameter that ranks share is stored in FP8, or sharded further.

    >>> layer = float8lab.Linear(8, 4, parallel_mode="column", device="cpu")
    >>> sorted(float8lab.nn.whole_state_dict(layer))
    ['bias', 'weight']
    """
    check_module("model", model)
    state, groups = dict(model.state_dict()), _groups(model)
    for name, shard in shards_of(model).items():
        _check_plain("model", name, state[name])
        state[name] = shard.gathered(state[name], groups[name.rpartition(".")[0]])
    return state


def _check_plain(argument: str, name: str, value: Any) -> None:
    if isinstance(value, Float8Tensor) or hasattr(value, "_local_tensor"):
        raise NotImplementedError(
            f"{argument} must have plain tensors where ranks share parameters; got {name}, a "
            f"{type(value).__name__}. Save each rank's state by itself, or high precision."
        )


def _groups(model: nn.Module) -> dict[str, Any]:
    modules = model.named_modules()
    return {name: m.tp_group for name, m in modules if isinstance(m, TensorParallelGroup)}
