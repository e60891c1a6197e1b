"""Experts of a mixture whose matrices lie one by one in a checkpoint, as one weight ``[E, N, K]``.

Checkpoints name them ``P.<expert>.gate_proj.weight``, ``up_proj`` and ``down_proj`` (Qwen3-MoE,
DeepSeek-V3, OLMoE), or ``w1``, ``w3`` and ``w2``. Models of Transformers 5 have two parameters,
``P.gate_up_proj``, whose rows are those of the first two, or ``P.up_proj`` where there is no gate,
and ``P.down_proj``.

Source: Transformers, ``conversion_mapping.py`` (``qwen2_moe``, ``deepseek_v2``).
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from float8lab.checkpoints.item import Finding, Item, reach
from float8lab.checkpoints.source import Box, Entry, dtype_name
from float8lab.formats import Spec

__all__ = ["PARTS", "Incomplete", "Stack", "incomplete_stacks", "is_stack", "stack_experts"]

PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
"""Stacked parameters, and the matrices of an expert whose rows they join."""
_ALIASES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_NAME = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.weight")


def is_stack(name: str, tensor: Tensor) -> bool:
    """Whether a parameter holds the matrices of all experts, going by its name and shape."""
    path = name.split(".")
    return tensor.ndim == 3 and (path[-1] in PARTS or "experts" in path)


@dataclass(frozen=True)
class Stack(Item):
    """A weight ``[E, N, K]`` of the matrices of experts; ``entry`` and ``scale`` are not read."""

    parts: tuple[tuple[Item, ...], ...] = ()
    """For each expert, matrices whose rows are joined."""

    def codes(self, box: Box) -> Tensor:
        """The bytes of the codes of a box, uint8."""
        return _join(self.parts, lambda item, place: item.codes(place), box)

    def scales(self, box: Box | None = None) -> Tensor:
        """The scales of the blocks of a box, or of all, float32."""
        box = box or tuple(slice(0, n) for n in self.entry.shape)
        return _join(self.parts, lambda item, place: item.scales(place), box)

    def values(self, box: Box | None = None) -> Tensor:
        """The values of a box, or all, float32; also where the formats of the parts differ."""
        box = box or tuple(slice(0, n) for n in self.entry.shape)
        return _join(self.parts, lambda item, place: item.values(place), box)

    def whole_scale(self, box: Box | None = None) -> Tensor | None:
        """One scale for each expert, or for each row where those of its parts differ."""
        if self.tensor_scale is None:
            return None
        found = [[_whole(item) for item in group] for group in self.parts]
        if not all(torch.equal(whole, group[0]) for group in found for whole in group):
            sizes = [item.entry.shape[0] for item in self.parts[0]]
            found = [
                [torch.cat([w.expand(n, 1) for w, n in zip(group, sizes, strict=True)])]
                for group in found
            ]
        whole = torch.stack([group[0] for group in found])
        return whole if box is None else whole[reach(box, whole.shape)]

    @property
    def each(self) -> list[Item]:
        """All parts."""
        return [item for group in self.parts for item in group]

    @property
    def mixed(self) -> bool:
        """Whether parts are quantized whose formats or blocks do not make one weight."""
        return self.spec is None and any(item.quantized for item in self.each)


def _join(parts: Sequence[Sequence[Item]], read: Callable[[Item, Box], Tensor], box: Box) -> Tensor:
    """Read each part of a box, join the rows and stack the experts."""
    experts, rows, columns = box
    result = []
    for group in parts[experts]:
        start, found = 0, []
        for item in group:
            count = item.entry.shape[0]
            first, last = max(rows.start - start, 0), min(rows.stop - start, count)
            if first < last:
                found.append(read(item, (slice(first, last), columns)))
            start += count
        result.append(torch.cat(found))
    return torch.stack(result)


def _whole(item: Item) -> Tensor:
    found = item.whole_scale()
    assert found is not None, "all parts have the same spec"
    return found


def _by_matrix(items: Sequence[Item]) -> dict[tuple[str, str], dict[int, Item]]:
    """The matrices of experts, by the experts' name and the kind of the matrix, by expert."""
    by_matrix: dict[tuple[str, str], dict[int, Item]] = {}
    for item in items:
        named = _NAME.fullmatch(item.name)
        if named is not None and len(item.entry.shape) == 2:
            kind = _ALIASES.get(named[3], named[3])
            by_matrix.setdefault((named[1], kind), {})[int(named[2])] = item
    return by_matrix


class Incomplete(NamedTuple):
    """A stack some of whose matrices are not there, or do not fit the others."""

    problems: list[str]
    """Phrases, each about one matrix."""
    matrices: list[str]
    """Names of those that are there."""


def incomplete_stacks(items: Sequence[Item], experts: Mapping[str, int]) -> dict[str, Incomplete]:
    """The stacks that ``stack_experts`` cannot make, of those of which it has matrices.

    Args:
        items: as ``stack_experts`` returns them.
        experts: how many of them each stack that is wanted has.
    """
    by_matrix, names, result = _by_matrix(items), {item.name for item in items}, {}
    for prefix in dict.fromkeys(prefix for prefix, _ in by_matrix):
        for stacked, kinds in PARTS.items():
            name = f"{prefix}.{stacked}"
            columns = [by_matrix.get((prefix, kind), {}) for kind in kinds]
            if name in names or name not in experts or not any(columns):
                continue
            there = [item for column in columns for item in column.values()]
            short = any(item.name.rpartition(".")[0][-2:] in _ALIASES for item in there)
            spelled = {kind: alias for alias, kind in _ALIASES.items()} if short else {}
            problems = [
                f"{prefix}.{expert}.{spelled.get(kind, kind)}.weight is missing"
                for expert in range(experts[name])
                for kind, column in zip(kinds, columns, strict=True)
                if expert not in column
            ]
            for column in filter(None, columns):
                shapes = Counter(item.entry.shape for item in column.values())
                usual, _ = shapes.most_common(1)[0]
                problems += [
                    f"{item.name} is {list(item.entry.shape)} there and that of other experts "
                    f"{list(usual)}"
                    for item in column.values()
                    if item.entry.shape != usual
                ]
                problems += [
                    f"{item.name} is not in the model"
                    for expert, item in column.items()
                    if expert >= experts[name]
                ]
            result[name] = Incomplete(problems, [item.name for item in there])
    return result


def stack_experts(items: Sequence[Item], wanted: Container[str]) -> list[Item]:
    """Put stacks in the place of experts' matrices, where the stacked name is ``wanted``.

    Experts of which some are missing, or whose shapes differ, stay as they are.
    """
    found = _by_matrix(items)
    names = {item.name for item in items}
    made: dict[str, Stack] = {}
    for prefix in dict.fromkeys(prefix for prefix, _ in found):
        for stacked, kinds in PARTS.items():
            name = f"{prefix}.{stacked}"
            columns = [found.get((prefix, kind), {}) for kind in kinds]
            if name in names or name not in wanted or not all(columns):
                continue
            if any(sorted(column) != list(range(len(columns[0]))) for column in columns):
                continue
            groups = [[column[i] for column in columns] for i in range(len(columns[0]))]
            stack = _stack(name, groups)
            if stack is not None:
                made[groups[0][0].name] = stack
    taken = {item.name for stack in made.values() for item in stack.each}
    return [
        made.get(item.name) or item for item in items if item.name in made or item.name not in taken
    ]


def _stack(name: str, groups: list[list[Item]]) -> Stack | None:
    first, every = groups[0], [item for group in groups for item in group]
    shapes = [item.entry.shape for item in first]
    if any([item.entry.shape for item in group] != shapes for group in groups):
        return None
    if len({columns for _, columns in shapes}) > 1 or 0 in (n for s in shapes for n in s):
        return None
    spec = _joined_spec(every, [rows for rows, _ in shapes])
    dtypes = {item.entry.dtype for item in every}
    dtype: torch.dtype | None = torch.uint8
    if spec is None:
        dtype = dtypes.pop() if len(dtypes) == 1 and not every[0].quantized else torch.float32
    entry = Entry(
        name=name,
        dtype=dtype,
        dtype_name="a dtype that torch lacks" if dtype is None else dtype_name(dtype),
        shape=(len(groups), sum(rows for rows, _ in shapes), shapes[0][1]),
        nbytes=sum(item.nbytes for item in every),
        file=first[0].entry.file,
        reader=functools.partial(_join, groups, lambda item, place: item.entry.read(place)),
    )
    return Stack(
        name,
        entry,
        first[0].convention,
        None if spec is None else _unread(first[0].scale),
        spec,
        None if spec is None else _unread(first[0].tensor_scale),
        findings=tuple(
            Finding(finding.kind, f"{item.name}: {finding.text}", finding.wrong)
            for item in every
            for finding in item.findings
        ),
        parts=tuple(map(tuple, groups)),
    )


def _unread(entry: Entry | None) -> Entry | None:
    """An entry that says that there is such a tensor, whose bytes are counted already."""
    return None if entry is None else replace(entry, nbytes=0)


def _joined_spec(items: Sequence[Item], rows: list[int]) -> Spec | None:
    """How the joined matrices are stored as one weight; None if no blocks say it."""
    spec = items[0].spec
    if spec is None or any(item.spec != spec or item.scale is None for item in items):
        return None
    height, width = spec.block
    if len(rows) > 1:
        height = rows[0] if height == -1 else height
        whole = len(set(rows)) == 1 or spec.block[0] != -1
        if not whole or any(count % height for count in rows[:-1]):
            return None
    return replace(spec, block=(1, height, width))
