"""Experts of an MoE layer whose matrices a checkpoint has one by one, as one weight ``[E, N, K]``.

Checkpoints name them ``P.<expert>.gate_proj.weight``, ``up_proj`` and ``down_proj`` (Qwen3-MoE,
DeepSeek-V3, OLMoE), or ``w1``, ``w3`` and ``w2``. Models of Transformers 5 have two parameters,
``P.gate_up_proj``, whose rows are those of the first two, or ``P.up_proj`` where there is no gate,
and ``P.down_proj``. ``STACKED`` says this for readers and writers alike.

Source: Transformers, ``conversion_mapping.py`` (``qwen2_moe``, ``deepseek_v2``).
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from float8lab.checkpoints.item import Item, broadcast_box
from float8lab.checkpoints.source import Box, Entry, dtype_name, whole_box
from float8lab.formats import Spec

__all__ = ["STACKED", "Stack", "incomplete_stacks", "is_stack", "matrix_name", "stack_experts"]

STACKED = {
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
    return tensor.ndim == 3 and (path[-1] in STACKED or "experts" in path)


def matrix_name(stack: str, expert: int, index: int) -> str:
    """The usual name of a matrix of a stacked parameter.

    >>> matrix_name("mlp.experts.gate_up_proj", 3, 1)
    'mlp.experts.3.up_proj.weight'
    """
    prefix, dot, local = stack.rpartition(".")
    return f"{prefix}{dot}{expert}.{STACKED[local][index]}.weight"


@dataclass(frozen=True)
class Stack(Item):
    """A weight ``[E, N, K]`` of the matrices of experts; ``entry`` and ``scale`` are not read."""

    experts: tuple[tuple[Item, ...], ...] = ()
    """For each expert, matrices whose rows are joined."""

    def qdata(self, box: Box) -> Tensor:
        """The bytes of the quantized weight in a box, uint8."""
        return _join(self.experts, Item.qdata, box)

    def scales(self, box: Box | None = None) -> Tensor:
        """The scales of the blocks of a box, or of all, float32."""
        return _join(self.experts, Item.scales, box or whole_box(self.entry.shape))

    def values(self, box: Box | None = None) -> Tensor:
        """The values of a box, or all, float32; also where the matrices' formats differ."""
        return _join(self.experts, Item.values, box or whole_box(self.entry.shape))

    def read_tensor_scale(self, box: Box | None = None) -> Tensor | None:
        """One scale for each expert, or for each row where those of its matrices differ."""
        if self.tensor_scale is None:
            return None
        scales = [
            [scale for item in matrices if (scale := item.read_tensor_scale()) is not None]
            for matrices in self.experts
        ]
        if not all(torch.equal(scale, first) for first, *later in scales for scale in later):
            rows = [item.entry.shape[0] for item in self.experts[0]]
            scales = [
                [torch.cat([s.expand(n, 1) for s, n in zip(of_expert, rows, strict=True)])]
                for of_expert in scales
            ]
        stacked = torch.stack([of_expert[0] for of_expert in scales])
        return stacked if box is None else stacked[broadcast_box(box, stacked.shape)]

    @property
    def matrices(self) -> list[Item]:
        """The matrices of all experts."""
        return [item for matrices in self.experts for item in matrices]


def _join(
    experts: Sequence[Sequence[Item]], read: Callable[[Item, Box], Tensor], box: Box
) -> Tensor:
    """Read each matrix of a box, join the rows and stack the experts."""
    numbers, rows, columns = box
    stacked = []
    for matrices in experts[numbers]:
        start, joined = 0, []
        for item in matrices:
            count = item.entry.shape[0]
            first, last = max(rows.start - start, 0), min(rows.stop - start, count)
            if first < last:
                joined.append(read(item, (slice(first, last), columns)))
            start += count
        stacked.append(torch.cat(joined))
    return torch.stack(stacked)


_ByKind = dict[str, dict[int, Item]]
"""For each kind of matrix whose rows a stack joins, the matrices by expert; some may be missing."""


def _matrices_of_stacks(
    items: Sequence[Item], names: Container[str]
) -> Iterator[tuple[str, _ByKind]]:
    """The matrices of the stacks of these names, unless the checkpoint has the stack itself."""
    by_prefix: dict[str, _ByKind] = {}
    for item in items:
        match = _NAME.fullmatch(item.name)
        if match is not None and len(item.entry.shape) == 2:
            kind = _ALIASES.get(match[3], match[3])
            by_prefix.setdefault(match[1], {}).setdefault(kind, {})[int(match[2])] = item
    there = {item.name for item in items}
    for prefix, by_kind in by_prefix.items():
        for local, kinds in STACKED.items():
            name = f"{prefix}.{local}"
            if name in names and name not in there and not by_kind.keys().isdisjoint(kinds):
                yield name, {kind: by_kind.get(kind, {}) for kind in kinds}


def incomplete_stacks(
    items: Sequence[Item], experts: Mapping[str, int]
) -> dict[str, tuple[list[str], list[str]]]:
    """The stacks of which ``stack_experts`` left matrices, given each one's number of experts.

    For each there are phrases about the matrices that are missing or do not fit the others, and
    the names of those that are there.
    """
    stacks = {}
    for stack, by_kind in _matrices_of_stacks(items, experts):
        names = [item.name for by_expert in by_kind.values() for item in by_expert.values()]
        stacks[stack] = _problems(stack, by_kind, names, experts[stack]), names
    return stacks


def _problems(stack: str, by_kind: _ByKind, names: Sequence[str], experts: int) -> list[str]:
    short = any(name.rpartition(".")[0][-2:] in _ALIASES for name in names)
    spelled = {kind: alias for alias, kind in _ALIASES.items()} if short else {}
    prefix = stack.rpartition(".")[0]
    problems = [
        f"{prefix}.{expert}.{spelled.get(kind, kind)}.weight is missing"
        for expert in range(experts)
        for kind, by_expert in by_kind.items()
        if expert not in by_expert
    ]
    for by_expert in filter(None, by_kind.values()):
        usual, _ = Counter(item.entry.shape for item in by_expert.values()).most_common(1)[0]
        problems += [
            f"{item.name} is {list(item.entry.shape)} there and that of other experts {list(usual)}"
            for item in by_expert.values()
            if item.entry.shape != usual
        ]
        beyond = (item for expert, item in by_expert.items() if expert >= experts)
        problems += [f"{item.name} is not in the model" for item in beyond]
    return problems


def stack_experts(items: Sequence[Item], names: Container[str]) -> list[Item]:
    """Put stacks in the place of experts' matrices, where ``names`` has the stacked name.
    Experts of which some are missing, or whose shapes differ, stay as they are."""
    made: dict[str, Stack] = {}
    for name, by_kind in _matrices_of_stacks(items, names):
        kinds = list(by_kind.values())
        numbers = range(len(kinds[0]))
        if all(sorted(by_expert) == list(numbers) for by_expert in kinds):
            experts = [[by_expert[number] for by_expert in kinds] for number in numbers]
            if (stack := _stack(name, experts)) is not None:
                made[experts[0][0].name] = stack
    taken = {item.name for stack in made.values() for item in stack.matrices} - made.keys()
    return [made.get(item.name) or item for item in items if item.name not in taken]


def _stack(name: str, experts: list[list[Item]]) -> Stack | None:
    """The stack of these matrices; None if their shapes do not make one."""
    first, items = experts[0], [item for matrices in experts for item in matrices]
    shapes = [item.entry.shape for item in first]
    if any([item.entry.shape for item in matrices] != shapes for matrices in experts):
        return None
    if len({columns for _, columns in shapes}) > 1 or 0 in (n for s in shapes for n in s):
        return None
    spec = _joined_spec(items, [rows for rows, _ in shapes])
    dtype: torch.dtype | None = torch.uint8
    if spec is None:
        dtypes = {item.entry.dtype for item in items}
        dtype = dtypes.pop() if len(dtypes) == 1 and not items[0].quantized else torch.float32
    entry = Entry(
        name=name,
        dtype=dtype,
        dtype_name="a dtype that torch lacks" if dtype is None else dtype_name(dtype),
        shape=(len(experts), sum(rows for rows, _ in shapes), shapes[0][1]),
        nbytes=sum(item.nbytes for item in items),
        file=first[0].entry.file,
        reader=functools.partial(_join, experts, lambda item, place: item.entry.read(place)),
    )
    # Entries that say that there are such tensors, whose bytes are counted already.
    scale, tensor_scale = (
        replace(scale, nbytes=0) if scale is not None and spec is not None else None
        for scale in (first[0].scale, first[0].tensor_scale)
    )
    findings = tuple(
        replace(finding, text=f"{item.name}: {finding.text}")
        for item in items
        for finding in item.findings
    )
    return Stack(
        name, entry, first[0].convention, scale, spec, tensor_scale, findings=findings,
        experts=tuple(map(tuple, experts)),
    )  # fmt: skip


def _joined_spec(items: Sequence[Item], rows: list[int]) -> Spec | None:
    """How the joined matrices are stored as one weight; None if no blocks say it."""
    spec = items[0].spec
    if spec is None or any(item.spec != spec or item.scale is None for item in items):
        return None
    height, width = spec.block
    if len(rows) > 1:
        height = rows[0] if height == -1 else height
        one_scale_fits = len(set(rows)) == 1 or spec.block[0] != -1
        if not one_scale_fits or any(count % height for count in rows[:-1]):
            return None
    return replace(spec, block=(1, height, width))
