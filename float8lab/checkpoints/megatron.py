"""Checkpoints of Megatron-LM, read as the state dict that one rank would have.

Each rank writes a file, ``mp_rank_TT[_PPP]/model_optim_rng.pt`` of tensor-parallel rank T and
pipeline rank P, with its shard of each parameter, and layers counted from 0 on each pipeline rank.
In a checkpoint by ``torch.distributed.checkpoint`` (Megatron's ``torch_dist``) parameters are
unsharded, but all layers have one tensor together for each parameter, ``decoder.layers.<name>``.

Ranks shard the output features of ``linear_qkv`` (by groups of query heads with their key and value
head), of ``linear_fc1`` (of a gated one each rank has a shard of both halves), and the padded
vocabulary; and the input features of ``linear_proj`` and ``linear_fc2``.

Sources: Megatron-LM's documentation of its checkpoint formats; the names and shapes in them.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from float8lab.checkpoints import source
from float8lab.checkpoints.pickles import entries_of, leaves, load_megatron_file
from float8lab.checkpoints.source import Box, CheckpointError, CheckpointSource, Entry
from float8lab.checkpoints.unpickling import Opaque
from float8lab.tensor.blocks import expand_scale

__all__ = [
    "FOLDER", "LATEST", "arguments_of", "is_megatron", "iteration_of", "layer_by_layer",
    "open_megatron", "open_rank",
]  # fmt: skip

LATEST = "latest_checkpointed_iteration.txt"
"""A file beside the folders of iterations: the number of the last one, or "release"."""
FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_LONGEST = 10_000  # bytes of metadata.json to look at
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_COLUMN = re.compile(
    r"(.*\.)?(linear_qkv|linear_q|linear_kv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj"
    r"|linear_fc1|word_embeddings|output_layer)\.(weight|bias)\d*|(.*\.)?softmax_offset"
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
"""Halves of a gated layer that newer versions write separately."""


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
    metadata = path / "metadata.json"
    return metadata.is_file() and b"sharded_backend" in metadata.read_bytes()[:_LONGEST]


def arguments_of(path: Path) -> Mapping[str, object]:
    """The arguments of the program that wrote a checkpoint, as far as they are plain values."""
    path = iteration_of(path) if (path / LATEST).is_file() else path
    common = path / "common.pt"
    file = common if common.is_file() else next(iter(_files(path).values()))
    return _arguments(load_megatron_file(file))


def _arguments(content: object) -> dict[str, object]:
    arguments = content.get("args") if isinstance(content, Mapping) else None
    values = arguments.__dict__ if isinstance(arguments, Opaque) else {}
    return {name: v for name, v in values.items() if not isinstance(v, Opaque) and name != "values"}


# A file for each rank.


def open_megatron(path: Path) -> CheckpointSource:
    """The tensors of the model in a folder of ``mp_rank_*``, the shards of all ranks joined."""
    files = _files(path)
    contents = {rank: load_megatron_file(file) for rank, file in files.items()}
    arguments = _arguments(next(iter(contents.values())))
    tp, pp = (1 + max(rank[i] for rank in files) for i in (0, 1))
    _check_arguments(path, arguments, tp, pp)
    # By number of the chunk of an interleaved pipeline, then by stage, then by rank.
    chunks: dict[int, list[list[dict[str, Entry]]]] = {}
    for stage in range(pp):
        for rank in range(tp):
            for number, model in enumerate(_models(files[rank, stage], contents[rank, stage])):
                chunks.setdefault(number, [[] for _ in range(pp)])[stage].append(model)
    unjoined: list[str] = []
    stages = [_joined(path, ranks, unjoined) for chunk in chunks.values() for ranks in chunk]
    entries = _count_layers_through(stages)
    if pp > 1 and arguments.get("untie_embeddings_and_output_weights") is False:
        entries.pop("output_layer.weight", None)  # the last stage's copy of the embedding
    note = (
        f"{len(unjoined)} tensors are listed rank by rank, since it is not known which part ranks "
        f"have of them: {', '.join(unjoined[:3])}"
    )
    kind = f"Megatron-LM, {tp} tensor-parallel by {pp} pipeline ranks"
    return CheckpointSource(str(path), kind, [*entries.values()], notes=[note] if unjoined else ())


def _count_layers_through(stages: Sequence[Mapping[str, Entry]]) -> dict[str, Entry]:
    """The entries of all stages, each of which counts its layers from 0."""
    entries: dict[str, Entry] = {}
    first: dict[str, int] = {}  # layer of a stage; an encoder and a decoder count separately
    for stage in stages:
        counts: dict[str, int] = {}
        for name, entry in stage.items():
            if (layer := _LAYER.fullmatch(name)) is not None:
                stack, number = layer[1], int(layer[2])
                counts[stack] = max(counts.get(stack, 0), number + 1)
                name = f"{stack}{first.get(stack, 0) + number}{layer[3]}"
            entries.setdefault(name, replace(entry, name=name))
        first = {stack: first.get(stack, 0) + counts.get(stack, 0) for stack in first | counts}
    return entries


def open_rank(file: Path) -> CheckpointSource:
    """The tensors of one rank's model, as they are."""
    models = _models(file, load_megatron_file(file))
    entries = [
        replace(entry, name=f"model{number}.{name}" if len(models) > 1 else name)
        for number, model in enumerate(models)
        for name, entry in model.items()
    ]
    note = f"this is the part of one rank; open {file.parent.parent} for those of all, joined"
    return CheckpointSource(str(file), "Megatron-LM, a file of one rank", entries, notes=[note])


def _files(path: Path) -> dict[tuple[int, int], Path]:
    """The file of each tensor-parallel and pipeline rank."""
    files: dict[tuple[int, int], Path] = {}
    for folder in sorted(path.iterdir()):
        if (match := FOLDER.fullmatch(folder.name)) is None:
            continue
        if match[3] is not None:
            raise CheckpointError(
                f"{path} must have no expert-parallel ranks; {folder.name} is one. Save it with "
                "--ckpt-format torch_dist, where experts are whole."
            )
        file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
        if file is None:
            raise CheckpointError(
                f"{folder} must have {_FILES[0]}; it has none. Copy it once more."
            )
        files[int(match[1]), int(match[2] or 0)] = file
    tp, pp = (1 + max((rank[i] for rank in files), default=0) for i in (0, 1))
    if missing := [(t, p) for t in range(tp) for p in range(pp) if (t, p) not in files]:
        raise CheckpointError(
            f"{path} must have the files of all {tp} tensor-parallel and {pp} pipeline ranks; "
            f"that of rank {missing[0][0]} and {missing[0][1]} is missing. Copy it once more."
        )
    return files


def _check_arguments(path: Path, arguments: Mapping[str, object], tp: int, pp: int) -> None:
    """Raise if the program was run on other ranks, or ranks have parts of another kind."""
    said = [arguments.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline")]
    expert_ranks = arguments.get("expert_model_parallel_size")
    if isinstance(expert_ranks, int) and expert_ranks > 1:
        raise CheckpointError(
            f"{path} must have no expert-parallel ranks; its arguments say {expert_ranks}. Save it "
            "with --ckpt-format torch_dist, where experts are whole."
        )
    if any(isinstance(n, int) and n != size for n, size in zip(said, (tp, pp), strict=True)):
        raise CheckpointError(
            f"{path} must have the folders of {said[0]} tensor-parallel and {said[1]} pipeline "
            f"ranks, as its arguments say; it has those of {tp} and {pp}. Copy it once more."
        )
    groups = arguments.get("num_query_groups")
    if arguments.get("group_query_attention") and isinstance(groups, int) and groups < tp:
        raise CheckpointError(
            f"{path} must have at least as many query groups as tensor-parallel ranks; it has "
            f"{groups} and {tp}, and ranks have copies of keys and values. Save it with "
            "--ckpt-format torch_dist."
        )


def _models(file: Path, content: object) -> list[dict[str, Entry]]:
    """The tensors of a rank's model, or of each of its models in an interleaved pipeline."""
    content = content if isinstance(content, Mapping) else {}
    names = ["model"] if "model" in content else []
    while f"model{len(names)}" in content:
        names.append(f"model{len(names)}")
    if not names:
        raise CheckpointError(f"{file} must have a model; it has {', '.join(map(str, content))}.")
    return [_entries(file, content[name]) for name in names]


def _entries(file: Path, model: object) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for key, value in leaves(file, model, ""):
        is_state = key.endswith("_extra_state")
        if is_state and isinstance(value, io.BytesIO):  # as older releases have it
            value = torch.tensor(list(value.getvalue()), dtype=torch.uint8, device="cpu")
        tensor = _dequantized(value) if isinstance(value, Opaque) else value
        if isinstance(tensor, Tensor):
            name = f"{file.parent.name}/{file.name}"
            entries |= {entry.name: entry for entry in entries_of(key, tensor, name)}
        elif isinstance(value, Opaque) and not is_state:
            raise CheckpointError(
                f"{file} must have tensors in high precision, or in FP8 with scales of tensors or "
                f"128x128 blocks; {key} is a {type(value).__module__}.{type(value).__name__}. Save "
                "it in the format torch_dist."
            )
    return entries


def _dequantized(value: Opaque) -> Tensor | None:
    """A weight that Transformer Engine stored in FP8, in its nominal dtype; None for other objects.

    Weights are e4m3 there. The arguments that it pickles begin with the bytes and their scales, or
    with a shape and these; scales of blocks are padded.
    """
    tensors = [argument for argument in value.values if isinstance(argument, Tensor)]
    dtypes = (argument for argument in value.values if isinstance(argument, torch.dtype))
    dtype = next(dtypes, torch.float32)
    kind = type(value).__name__
    if kind not in _STORED or len(tensors) < 2 or tensors[0].dtype != torch.uint8:
        return None
    data, scale = tensors[0].view(torch.float8_e4m3fn).float(), tensors[1]
    if kind == "Float8Tensor":
        return (data * scale.reshape(())).to(dtype) if scale.numel() == 1 else None
    if data.ndim != 2 or scale.ndim != 2 or scale.dtype != torch.float32:
        return None
    rows, columns = (-(-n // 128) for n in data.shape)
    if len(scale) != rows or not columns <= scale.shape[1] <= columns + 3:
        return None
    return (data * expand_scale(scale[:, :columns], (128, 128), data.shape)).to(dtype)


def _joined(
    path: Path, ranks: Sequence[Mapping[str, Entry]], unjoined: list[str]
) -> dict[str, Entry]:
    """The tensors of a pipeline rank, unsharded; ``unjoined`` gets the names of the others."""
    result: dict[str, Entry] = {}
    for name, entry in ranks[0].items():
        if len(ranks) == 1 or _REPLICATED.fullmatch(name):
            result[name] = entry
            continue
        shards = [rank[name] for rank in ranks if name in rank]
        if len(shards) < len(ranks) or any(shard.shape != entry.shape for shard in shards):
            shapes = (str(list(rank[name].shape)) if name in rank else "none" for rank in ranks)
            raise CheckpointError(
                f"{path} must have {name} of one shape on all ranks; it has {', '.join(shapes)}."
            )
        if _COLUMN.fullmatch(name):
            result[name] = _unsharded(shards, 0, 2 if _is_gated(name, ranks[0]) else 1)
        elif _ROW.fullmatch(name):
            result[name] = _unsharded(shards, 1, 1)
        else:
            unjoined.append(name)
            result |= {f"{shard.file.partition('/')[0]}/{name}": shard for shard in shards}
    return result


def _is_gated(name: str, rank: Mapping[str, Entry]) -> bool:
    """Whether it is of a gated fc1, which has two output features for each input of fc2."""
    if "linear_fc1." not in name:
        return False
    up = rank.get(name.replace(".bias", ".weight"))
    down = rank.get(name.replace("linear_fc1.", "linear_fc2.").replace(".bias", ".weight"))
    return up is not None and down is not None and up.shape[0] == 2 * down.shape[-1]


def _unsharded(shards: Sequence[Entry], dim: int, sections: int) -> Entry:
    """The tensor of which each rank has a shard of each of ``sections`` equal sections."""
    first = shards[0]
    size, shape = first.shape[dim] // sections, list(first.shape)
    shape[dim] *= len(shards)
    piece_sizes = (*shape[:dim], size, *shape[dim + 1 :])
    pieces = []
    for section in range(sections):
        for rank, shard in enumerate(shards):
            starts = [0] * len(shape)
            starts[dim] = (section * len(shards) + rank) * size
            read = functools.partial(_read_from, shard, dim, section * size)
            pieces.append(source.Piece(tuple(starts), piece_sizes, read))
    return replace(
        first,
        shape=tuple(shape),
        nbytes=first.nbytes * len(shards),
        file=f"{first.file} and others",
        reader=functools.partial(source.read_pieces, pieces, first.dtype or torch.uint8),
    )


def _read_from(shard: Entry, dim: int, offset: int, box: Box) -> Tensor:
    """A box of the elements of a shard that begin at an offset along one dimension."""
    place = list(box)
    place[dim] = slice(box[dim].start + offset, box[dim].stop + offset)
    return shard.read(tuple(place))


# Distributed checkpoints.


def layer_by_layer(opened: CheckpointSource) -> CheckpointSource:
    """The same tensors under the names that one rank has for them."""
    entries: list[Entry] = []
    halves: dict[str, dict[str, Entry]] = {}
    for entry in opened.entries:
        if (match := _HALF.fullmatch(entry.name)) is None:
            entries.append(entry)
        else:
            halves.setdefault(match[1], {})[match[2]] = entry
    for name, pair in halves.items():
        if len(pair) < 2:
            raise CheckpointError(f"{opened.path} must have both halves of {name}; it has one.")
        features = len(pair["w"].shape) - (1 if name.endswith("bias") else 2)
        entries.append(replace(_unsharded([pair["w"], pair["v"]], features, 1), name=name))
    layers = [layer for entry in entries for layer in _layers_of(entry)]
    return replace(opened, container=f"Megatron-LM, {opened.container}", entries=layers)


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
