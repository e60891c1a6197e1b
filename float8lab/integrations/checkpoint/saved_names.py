"""Find the names under which Transformers saves and loads the tensors of its models.

Since release 5 its models have parameters that their checkpoints do not have: stacks of all experts
in place of each expert's matrices, and tensors of other names (Mixtral's ``block_sparse_moe``). The
names differ between models and releases, so we call the function of the installed release that
``save_pretrained`` calls, on stand-ins for the tensors. The elements of a stack's stand-in are
consecutive numbers, from which expert and rows can be told in the result.

Source: Transformers, ``core_model_loading.py``, ``revert_weight_conversion``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from float8lab.checkpoints.experts import STACKED, is_stack, matrix_name

__all__ = ["SavedNames", "saved_names"]

_LOADING = "transformers.core_model_loading"
"""The Transformers module that converts weights, which releases before 5 do not have."""


@dataclass(frozen=True)
class SavedNames:
    """The names of a model's tensors in its checkpoints, by their names in the model."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Tensors that are saved as they are, under another name."""
    matrices: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    """The matrices of each expert of a stack, in the order of the stack's rows."""
    stacks: Mapping[str, str] = field(default_factory=dict)
    """The saved name of each stack that is not saved matrix by matrix; empty if unknown."""

    def matrix(self, stack: str, expert: int, index: int) -> str:
        """Return the saved name of a stack's matrix; the usual name if Transformers gives none."""
        matrices = self.matrices.get(stack)
        return matrices[expert][index] if matrices else matrix_name(stack, expert, index)

    def matrices_per_expert(self, stack: str) -> int:
        """Return how many matrices each expert of a stack has."""
        matrices = self.matrices.get(stack)
        return len(matrices[0] if matrices else STACKED[stack.rpartition(".")[2]])

    def to_model(self) -> dict[str, str]:
        """Map names in checkpoints to names in the model; matrices have their usual names."""
        names_in_model = {saved: name for name, saved in self.renamed.items()}
        names_in_model |= {
            saved: matrix_name(stack, expert, i)
            for stack, experts in self.matrices.items()
            if stack.rpartition(".")[2] in STACKED
            for expert, names in enumerate(experts)
            for i, saved in enumerate(names)
        }
        return {saved: name for saved, name in names_in_model.items() if saved != name}


def saved_names(model: nn.Module) -> SavedNames:
    """Return the names under which Transformers saves a model's tensors; no names for a model that
    is not a Transformers model.

    >>> saved_names(torch.nn.Linear(8, 8)).renamed
    {}
    """
    theirs = any(
        (base.__module__, base.__qualname__) == ("transformers.modeling_utils", "PreTrainedModel")
        for base in type(model).__mro__
    )
    if not theirs or importlib.util.find_spec(_LOADING) is None:
        return SavedNames()
    revert_weight_conversion = importlib.import_module(_LOADING).revert_weight_conversion
    given: dict[str, Tensor] = {}
    stacks: dict[str, range] = {}
    start = 0
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        if is_stack(name, value):
            stacks[name] = range(start, start + _EACH * value.shape[0])
            given[name] = torch.tensor(stacks[name]).view(-1, *_STAND_IN)
            start = stacks[name].stop
        else:
            given[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    saved: dict[str, Tensor] = revert_weight_conversion(model, given)
    names = {id(value): name for name, value in saved.items()}
    renamed = {name: names[id(value)] for name, value in given.items() if id(value) in names}
    given_ids = {id(value) for value in given.values()}
    matrices = _matrices(stacks, {n: v for n, v in saved.items() if id(v) not in given_ids})
    return SavedNames(
        renamed={name: saved_name for name, saved_name in renamed.items() if name != saved_name},
        matrices=matrices,
        stacks={name: renamed.get(name, "") for name in stacks if name not in matrices},
    )


_STAND_IN = (4, 2)
"""Rows and columns of an expert's stand-in: four rows tell alternating rows from halves."""
_EACH = 8
"""The number of elements of an expert's stand-in."""


def _matrices(
    stacks: Mapping[str, range], saved: Mapping[str, Tensor]
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return the names of the matrices of stacks that are saved as one or two for each expert."""
    rows, columns = _STAND_IN
    by_first: dict[int, tuple[str, int]] = {}
    for name, value in saved.items():
        if value.ndim == 2 and value.shape[1] == columns and name.endswith(".weight"):
            first = int(value[0, 0])
            if torch.equal(value.flatten(), torch.arange(first, first + value.numel())):
                by_first[first] = name, value.shape[0]
    result = {}
    for stack, numbers_of in stacks.items():
        for count in (1, 2):
            names = [by_first.get(number) for number in numbers_of[:: _EACH // count]]
            fitting = [named[0] for named in names if named and named[1] == rows // count]
            if len(fitting) == len(names):
                pairs = zip(*(fitting[index::count] for index in range(count)), strict=True)
                result[stack] = tuple(pairs)
    return result
