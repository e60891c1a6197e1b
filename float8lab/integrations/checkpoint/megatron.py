"""Read a Megatron-LM checkpoint, written by any number of ranks, as one rank would have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from torch import Tensor

from float8lab.arguments import check_names, check_path, check_size
from float8lab.checkpoints.megatron import arguments_of
from float8lab.checkpoints.opening import open_checkpoint
from float8lab.checkpoints.source import CheckpointError
from float8lab.inspect.checkpoint.report import selected

__all__ = ["MegatronCheckpoint", "read_megatron"]

_NOT_OF_MODEL = ("optimizer.", "rng_state", "rerun_state_machine_state")
"""The prefixes of tensor names that are not part of the model."""
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


@dataclass(frozen=True)
class MegatronCheckpoint:
    """The result of ``read_megatron``."""

    path: str
    kind: str
    """The format, and the number of ranks that wrote the checkpoint."""
    state: dict[str, Tensor] = field(repr=False)
    """The state dict of the model, unsharded, under Megatron's names."""
    args: SimpleNamespace = field(repr=False)
    """The arguments of the program that wrote the checkpoint, without those not plain values."""


def read_megatron(
    path: str | Path, *, layer: str | Sequence[str] = (), vocab_size: int | None = None
) -> MegatronCheckpoint:
    """Read the model of a Megatron-LM checkpoint as the state dict that one rank would have.

    Tensor-parallel shards are joined, and layers are numbered across pipeline ranks. No code from
    the files is run: objects of Megatron's classes are left out.

    Args:
        path: a checkpoint in the format ``torch`` (folders ``mp_rank_*``) or ``torch_dist``, or a
            folder of several iterations, of which the last one is read.
        layer: globs of the names of the tensors or modules to read, such as ``"decoder.layers.0"``,
            for models that are loaded layer by layer. By default all are read.
        vocab_size: the tokenizer's; Megatron pads the embedding and the output layer for a number
            of ranks, and the rows beyond ``vocab_size`` are cut off. None keeps them.

    Returns:
        The state dict, on the CPU, and the arguments. ``to_transformer_layers(state, "megatron")``
        gives its layers the names of ``TransformerLayer``.

    Raises:
        CheckpointError: a file is missing or damaged, or of an unsupported kind:
            expert-parallel ranks in the format ``torch``, or copies of keys and values.
        OSError: the checkpoint does not exist, or may not be read.
    """
    check_path("path", path)
    globs = check_names("layer", layer)
    vocab_size = check_size("vocab_size", vocab_size, minimum=1, optional=True)
    source = open_checkpoint(path)
    if not source.container.startswith("Megatron-LM"):
        raise CheckpointError(
            f"{path} must be a checkpoint of Megatron-LM; it is {source.container}. Other "
            "libraries' checkpoints are read by load_fp8 or torch.load."
        )
    if source.notes:
        raise CheckpointError(f"{path} must be a whole checkpoint; {source.notes[0]}.")
    entries = [entry for entry in source.entries if not entry.name.startswith(_NOT_OF_MODEL)]
    if not entries:
        raise CheckpointError(f"{path} must have tensors of a model; it has none.")
    chosen = set(selected([entry.name for entry in entries], globs, str(path)))
    state = {
        entry.name: entry.read()[:vocab_size] if entry.name in _VOCABULARY else entry.read()
        for entry in entries
        if entry.name in chosen
    }
    args = SimpleNamespace(**arguments_of(Path(path)))
    return MegatronCheckpoint(str(path), source.container, state, args)
