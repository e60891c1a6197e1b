"""Checkpoints of Megatron-LM, read as the state dict that one rank would have.

Each rank writes a file, ``mp_rank_TT[_PPP]/model_optim_rng.pt`` of tensor-parallel rank T and
pipeline rank P, with the part that it has of each parameter, and layers counted from 0 on each
pipeline rank. In a checkpoint by ``torch.distributed.checkpoint`` (Megatron's ``torch_dist``)
parameters are whole, but those of all layers, which are alike, lie in one tensor,
``decoder.layers.<name>``.

Ranks share output features of ``linear_qkv`` (whole groups of query heads with their key and value
head), of ``linear_fc1`` (of a gated one each rank has its part of both halves), and the padded
vocabulary; and input features of ``linear_proj`` and ``linear_fc2``.

Sources: Megatron-LM's documentation of its checkpoint formats; the names and shapes in them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab.checkpoints.pickles import Opaque, entries_of, leaves, load_opaquely
from float8lab.checkpoints.source import Box, CheckpointError, Entry, Source

__all__ = [
    "FOLDER",
    "LATEST",
    "arguments_of",
    "is_megatron",
    "iteration_of",
    "layer_by_layer",
    "open_megatron",
    "open_rank",
]

LATEST = "latest_checkpointed_iteration.txt"
"""A file beside the folders of iterations: the number of the last one, or "release"."""
FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_LONGEST = 10_000  # bytes of metadata.json to look at
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_COLUMN = re.compile(
    r"(.*\.)?(linear_qkv|linear_q|linear_kv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj"
    r"|linear_fc1|word_embeddings|output_layer)\.(weight|bias)\d*"
)
_ROW = re.compile(r"(.*\.)?(linear_proj|linear_fc2)\.weight\d*")
_REPLICATED = re.compile(
    r".*norm[._](weight|bias)|(.*\.)?(linear_proj|linear_fc2)\.bias\d*"
    r"|(.*\.)?(position_embeddings|linear_q_down_proj|linear_kv_down_proj)\.weight"
    r"|.*\.router\.\w+|(.*\.)?_extra_state"
)
_STORED = ("Float8Tensor", "Float8BlockwiseQTensor")
"""Transformer Engine's classes of weights in FP8."""
_LAYER = re.compile(r"((?:.*\.)?layers\.)(\d+)(\..+)")
_STACKED = re.compile(r"((?:.*\.)?decoder\.layers\.)(?!\d)(.+)")
_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias))_([wv])")
"""Halves of a gated layer that newer versions write apart."""


def iteration_of(path: Path) -> Path:
    """The folder of the last iteration, where ``path`` holds several."""
    said = (path / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    name = f"iter_{int(said):07d}" if said.isdecimal() else said
    if not (said.isdecimal() or said == "release") or not (path / name).is_dir():
        raise CheckpointError(
            f"{path / LATEST} must say which iteration is the last, and its folder must exist; it "
            f"says {said[:40]!r}. Name the folder to read."
        )
    return path / name


def is_megatron(path: Path) -> bool:
    """Whether a folder by ``torch.distributed.checkpoint`` is Megatron's."""
    own = path / "metadata.json"
    return own.is_file() and b"sharded_backend" in own.read_bytes()[:_LONGEST]


def arguments_of(path: Path) -> Mapping[str, Any]:
    """The arguments of the program that wrote a checkpoint, as far as they are plain values."""
    path = iteration_of(path) if (path / LATEST).is_file() else path
    common = path / "common.pt"
    if common.is_file():
        return _arguments(load_opaquely(common))
    return _arguments(load_opaquely(next(iter(_files(path).values()))))


def _arguments(content: Any) -> dict[str, Any]:
    found = content.get("args") if isinstance(content, Mapping) else None
    values = found.__dict__ if isinstance(found, Opaque) else {}
    return {name: v for name, v in values.items() if not isinstance(v, Opaque) and name != "values"}


# A file for each rank.


class _Segment(NamedTuple):
    """Some rows, or columns, of a whole, and the part in which they are."""

    start: int
    stop: int
    part: Entry
    offset: int


def open_megatron(path: Path) -> Source:
    """The tensors of the model in a folder of ``mp_rank_*``.

    Raises:
        CheckpointError: a rank's file is missing or damaged, or it is of a kind that is not read.
    """
    files = _files(path)
    contents = {rank: load_opaquely(file) for rank, file in files.items()}
    arguments = _arguments(next(iter(contents.values())))
    tp, pp = (1 + max(rank[i] for rank in files) for i in (0, 1))
    _check_arguments(path, arguments, tp, pp)
    stages: dict[int, list[list[dict[str, Entry]]]] = {}
    for stage in range(pp):
        for rank in range(tp):
            chunks = _chunks(files[rank, stage], contents[rank, stage])
            for number, chunk in enumerate(chunks):
                stages.setdefault(number, [[] for _ in range(pp)])[stage].append(chunk)
    entries: dict[str, Entry] = {}
    apart: list[str] = []
    first: dict[str, int] = {}  # of a stage's layers; an encoder's and a decoder's by themselves
    for part in (part for chunk in stages.values() for part in chunk):
        counts: dict[str, int] = {}
        for name, entry in _joined(path, part, apart).items():
            layer = _LAYER.fullmatch(name)
            if layer is not None:
                stack, number = layer[1], int(layer[2])
                counts[stack] = max(counts.get(stack, 0), number + 1)
                name = f"{stack}{first.get(stack, 0) + number}{layer[3]}"
            entries.setdefault(name, replace(entry, name=name))
        first = {stack: first.get(stack, 0) + counts.get(stack, 0) for stack in first | counts}
    if pp > 1 and arguments.get("untie_embeddings_and_output_weights") is False:
        entries.pop("output_layer.weight", None)  # the last stage's copy of the embedding
    notes = [
        f"{len(apart)} tensors are listed rank by rank, since it is not known which part ranks "
        f"have of them: {', '.join(apart[:3])}"
    ]
    kind = f"Megatron-LM, {tp} tensor-parallel by {pp} pipeline ranks"
    return Source(str(path), kind, list(entries.values()), notes=notes if apart else ())


def open_rank(file: Path) -> Source:
    """The tensors of one rank's model, as they are."""
    chunks = _chunks(file, load_opaquely(file))
    entries = [
        replace(entry, name=f"model{number}.{name}" if len(chunks) > 1 else name)
        for number, chunk in enumerate(chunks)
        for name, entry in chunk.items()
    ]
    note = f"this is the part of one rank; open {file.parent.parent} for those of all, joined"
    return Source(str(file), "Megatron-LM, a file of one rank", entries, notes=[note])


def _files(path: Path) -> dict[tuple[int, int], Path]:
    """The file of each tensor-parallel and pipeline rank."""
    found: dict[tuple[int, int], Path] = {}
    for folder in sorted(path.iterdir()):
        match = FOLDER.fullmatch(folder.name)
        if match is None:
            continue
        if match[3] is not None:
            raise CheckpointError(
                f"{path} must have no expert-parallel ranks; {folder.name} is one. Save it with "
                "--ckpt-format torch_dist, where experts are whole."
            )
        file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
        if file is None:
            raise CheckpointError(f"{folder} must have {_FILES[0]}; it has none. Copy it again.")
        found[int(match[1]), int(match[2] or 0)] = file
    tp, pp = (1 + max((rank[i] for rank in found), default=0) for i in (0, 1))
    missing = [(t, p) for t in range(tp) for p in range(pp) if (t, p) not in found]
    if missing:
        raise CheckpointError(
            f"{path} must have the files of all {tp} tensor-parallel and {pp} pipeline ranks; "
            f"that of rank {missing[0][0]} and {missing[0][1]} is missing. Copy it again."
        )
    return found


def _check_arguments(path: Path, arguments: Mapping[str, Any], tp: int, pp: int) -> None:
    """Raise if the program was run on other ranks, or ranks have parts of another kind."""
    said = [arguments.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline")]
    if (arguments.get("expert_model_parallel_size") or 1) > 1:
        raise CheckpointError(
            f"{path} must have no expert-parallel ranks; its arguments say "
            f"{arguments['expert_model_parallel_size']}. Save it with --ckpt-format torch_dist, "
            "where experts are whole."
        )
    if any(isinstance(n, int) and n != found for n, found in zip(said, (tp, pp), strict=True)):
        raise CheckpointError(
            f"{path} must have the folders of {said[0]} tensor-parallel and {said[1]} pipeline "
            f"ranks, as its arguments say; it has those of {tp} and {pp}. Copy it again."
        )
    groups = arguments.get("num_query_groups")
    if arguments.get("group_query_attention") and isinstance(groups, int) and groups < tp:
        raise CheckpointError(
            f"{path} must have at least as many query groups as tensor-parallel ranks; it has "
            f"{groups} and {tp}, and ranks have copies of keys and values. Save it with "
            "--ckpt-format torch_dist."
        )


def _chunks(file: Path, content: Any) -> list[dict[str, Entry]]:
    """The tensors of a rank: of its model, or of each of its models in an interleaved pipeline."""
    content = content if isinstance(content, Mapping) else {}
    names = ["model"] if "model" in content else []
    while f"model{len(names)}" in content:
        names.append(f"model{len(names)}")
    if not names:
        raise CheckpointError(f"{file} must have a model; it has {', '.join(map(str, content))}.")
    result = []
    for name in names:
        chunk: dict[str, Entry] = {}
        for key, value in leaves(file, content[name], ""):
            if key.endswith("_extra_state") and hasattr(value, "getvalue"):  # as older releases do
                value = torch.tensor(list(value.getvalue()), dtype=torch.uint8)
            if isinstance(value, Opaque):
                value = _dequantized(value)
            if isinstance(value, Tensor):
                for entry in entries_of(key, value, f"{file.parent.name}/{file.name}"):
                    chunk[entry.name] = entry
            elif isinstance(value, Opaque) and not key.endswith("_extra_state"):
                raise CheckpointError(
                    f"{file} must have tensors in high precision, or in FP8 with scales of tensors "
                    f"or 128x128 blocks; {key} is a {type(value).__module__}."
                    f"{type(value).__name__}. Save it in the format torch_dist."
                )
        result.append(chunk)
    return result


def _dequantized(value: Opaque) -> Any:
    """A weight that Transformer Engine stored in FP8, in the dtype it stands for; others as is.

    Weights are e4m3 there. The arguments that it pickles begin with the bytes and their scales, or
    with a shape and these; scales of blocks are padded.
    """
    tensors = [part for part in value.values if isinstance(part, Tensor)]
    dtype = next((part for part in value.values if isinstance(part, torch.dtype)), torch.float32)
    if type(value).__name__ not in _STORED or len(tensors) < 2 or tensors[0].dtype != torch.uint8:
        return value
    codes, scale = tensors[0].view(torch.float8_e4m3fn).float(), tensors[1]
    if type(value).__name__ == "Float8Tensor" and scale.numel() == 1:
        return (codes * scale.reshape(())).to(dtype)
    rows, columns = (-(-n // 128) for n in codes.shape) if codes.ndim == 2 else (0, 0)
    two = scale.ndim == 2 and len(scale) == rows and columns <= scale.shape[1] <= columns + 3
    if not two or scale.dtype != torch.float32 or type(value).__name__ == "Float8Tensor":
        return value
    each = scale[:, :columns].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (codes * each[: codes.shape[0], : codes.shape[1]]).to(dtype)


def _joined(path: Path, ranks: Sequence[Mapping[str, Entry]], apart: list[str]) -> dict[str, Entry]:
    """The tensors of a pipeline rank, whole; ``apart`` gets the names of those that are not."""
    result: dict[str, Entry] = {}
    for name, entry in ranks[0].items():
        parts = [rank.get(name) for rank in ranks]
        if any(part is None or part.shape != entry.shape for part in parts) and not _is_replica(
            name
        ):
            raise CheckpointError(
                f"{path} must have {name} of one shape on all ranks; it has "
                f"{', '.join('none' if p is None else str(list(p.shape)) for p in parts)}."
            )
        if len(ranks) == 1 or _is_replica(name):
            result[name] = entry
        elif _COLUMN.fullmatch(name) or _ROW.fullmatch(name):
            dim = 1 if _ROW.fullmatch(name) else 0
            result[name] = _whole(parts, dim, 2 if _is_gated(name, ranks[0]) else 1)  # type: ignore[arg-type]
        else:
            apart.append(name)
            for part in parts:
                folder = part.file.partition("/")[0]  # type: ignore[union-attr]
                result[f"{folder}/{name}"] = part  # type: ignore[assignment]
    return result


def _is_replica(name: str) -> bool:
    return _REPLICATED.fullmatch(name) is not None


def _is_gated(name: str, rank: Mapping[str, Entry]) -> bool:
    """Whether it is of a gated fc1, which has two output features for each input of fc2."""
    if "linear_fc1." not in name:
        return False
    up = rank.get(name.replace(".bias", ".weight"))
    down = rank.get(name.replace("linear_fc1.", "linear_fc2.").replace(".bias", ".weight"))
    return up is not None and down is not None and up.shape[0] == 2 * down.shape[-1]


def _whole(parts: Sequence[Entry], dim: int, pieces: int) -> Entry:
    """Each of ``pieces`` of the whole has a part on each rank."""
    first = parts[0]
    each = first.shape[dim] // pieces
    segments = [
        _Segment((i * len(parts) + rank) * each, (i * len(parts) + rank + 1) * each, part, i * each)
        for i in range(pieces)
        for rank, part in enumerate(parts)
    ]
    shape = tuple(n * len(parts) if i == dim else n for i, n in enumerate(first.shape))
    return replace(
        first,
        shape=shape,
        nbytes=first.nbytes * len(parts),
        file=f"{first.file} and others",
        reader=functools.partial(_read, segments, dim),
    )


def _read(segments: Sequence[_Segment], dim: int, box: Box) -> Tensor:
    wanted, found = box[dim], []
    for start, stop, part, offset in segments:
        low, high = max(wanted.start, start), min(wanted.stop, stop)
        if low < high:
            here = slice(low - start + offset, high - start + offset)
            found.append(part.read((*box[:dim], here, *box[dim + 1 :])))
    return torch.cat(found, dim) if found else segments[0].part.read(_empty(box))


def _empty(box: Box) -> Box:
    return tuple(slice(0, 0) for _ in box)


# Distributed checkpoints.


def layer_by_layer(source: Source) -> Source:
    """The same tensors under the names that one rank has for them."""
    entries: list[Entry] = []
    halves: dict[str, dict[str, Entry]] = {}
    for entry in source.entries:
        match = _HALF.fullmatch(entry.name)
        if match is None:
            entries.append(entry)
        else:
            halves.setdefault(match[1], {})[match[2]] = entry
    for name, pair in halves.items():
        if len(pair) < 2:
            raise CheckpointError(f"{source.path} must have both halves of {name}; it has one.")
        features = len(pair["w"].shape) - (1 if name.endswith("bias") else 2)
        whole = _whole([pair["w"], pair["v"]], features, 1)
        entries.append(replace(whole, name=name))
    each = [part for entry in entries for part in _layers_of(entry)]
    return replace(source, container=f"Megatron-LM, {source.container}", entries=each)


def _layers_of(entry: Entry) -> list[Entry]:
    match = _STACKED.fullmatch(entry.name)
    if match is None or not entry.shape or entry.name.startswith("optimizer."):
        return [entry]
    return [
        replace(
            entry,
            name=f"{match[1]}{layer}.{match[2]}",
            shape=entry.shape[1:],
            nbytes=entry.nbytes // entry.shape[0],
            reader=functools.partial(_read_layer, entry, layer),
        )
        for layer in range(entry.shape[0])
    ]


def _read_layer(entry: Entry, layer: int, box: Box) -> Tensor:
    return entry.read((slice(layer, layer + 1), *box))[0]
