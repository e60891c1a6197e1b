"""``export`` and ``export_stream`` write the tensors of a model as a checkpoint in FP8."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from float8lab import arguments
from float8lab.checkpoints import safetensors
from float8lab.checkpoints.layouts import FORMATS, Format, Weight
from float8lab.checkpoints.source import dtype_name, listed
from float8lab.distributed.fsdp.shards import reshard
from float8lab.inspect.nonfinite import local_values
from float8lab.inspect.text import Printed
from float8lab.integrations.checkpoint.saved_names import SavedNames, saved_names
from float8lab.integrations.checkpoint.weights import find_weights, gemm_weights, is_stored
from float8lab.recipes.recipe import Recipe, check_recipe
from float8lab.tensor import Float4Tensor
from float8lab.tensor.dtensor import is_dtensor

__all__ = ["ExportReport", "export", "export_stream"]


@dataclass(frozen=True, repr=False)
class ExportReport(Printed):
    """The result of ``export``; ``print`` it."""

    path: str
    format: str
    files: tuple[str, ...]
    nbytes: int
    """The number of bytes of all tensors."""
    fp8: Mapping[str, str]
    """The format of each parameter that is written in FP8, by name."""
    high_precision: tuple[str, ...]
    """Linear layers, routers, and modules with weights of three or more dimensions, not in FP8."""
    nonfinite: Mapping[str, int]
    """The number of NaN or infinite elements of each tensor of the model that has any."""
    notes: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    """The reasons why parameters whose layers run in FP8 are in high precision."""

    def summary(self) -> str:
        """Say what was written, and what is in high precision."""
        files = f"{len(self.files)} file{'s' if len(self.files) > 1 else ''}"
        lines = [f"{self.path}: {self.format}, {files}, {self.nbytes:,} bytes"]
        lines += [f"{n} weights in {kind}" for kind, n in Counter(self.fp8.values()).items()]
        if self.high_precision:
            lines.append(f"in high precision: {listed(self.high_precision, 5)}")
        for reason in dict.fromkeys(self.reasons.values()):
            names = [name for name, why in self.reasons.items() if why == reason]
            lines.append(f"{listed(names, 5)}: in high precision, for {reason}")
        if self.nonfinite:
            lines.append(_counts(self.nonfinite))
        return "\n".join([*lines, *self.notes])


def export(  # noqa: PLR0913  # each is a keyword that users set on its own
    model: nn.Module,
    path: str | Path,
    format: str = "block-fp8",
    *,
    recipe: Recipe | None = None,
    exclude: Sequence[str] = ("lm_head",),
    share_scales: Sequence[Sequence[str]] = (),
    max_shard_size: int = 5_000_000_000,
    overwrite: bool = False,
    unseen: bool = False,
) -> ExportReport:
    """Write a model as a directory of safetensors files with its linear weights in FP8.

    The bytes are those that training uses. For a layer that runs in FP8 they are the bytes to which
    a forward in evaluation would cast its weight now, delayed scales included. A weight stored in
    FP8 keeps its bytes. If no layer of the model runs in FP8, this function quantizes the
    ``torch.nn.Linear`` layers. A weight whose bytes ``format`` cannot hold raises an error; nothing
    is quantized twice. Tensors of a Transformers model get the names that its own checkpoints use,
    except in format ``"float8lab"``, which uses the names of the model.

    The directory appears complete, by a rename, or not at all; one weight is in memory at a time.
    ``config.json`` is ``model.config`` (a mapping, or an object with ``to_dict``) and the
    ``quantization_config`` of the format.

    Args:
        model: on any device, not sharded.
        path: the directory to write.
        format: ``"block-fp8"``, used by DeepSeek and Transformers; ``"compressed-tensors"``, used
            by vLLM; or ``"float8lab"``, which restores every bit, amaxes included.
        recipe: for layers without a recipe of their own; None is the recipe whose delayed scales a
            layer has, or the format's default: 128x128 blocks, output channels, per tensor.
        exclude: layers to leave in high precision, by patterns as in ``convert_to_float8``.
        share_scales: groups of layers of one parent that get the largest of their scales, such as
            ``[("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]``, for readers that fuse
            them. Only scales per tensor can be shared; the weights are then cast with that scale.
        max_shard_size: the most bytes of a file; a single weight may be larger.
        overwrite: replace a checkpoint at ``path``; its files that are not weights are kept.
        unseen: also quantize the weights of converted layers whose forward did not run in the
            model's first call (``conversion_report`` marks them). The model runs the GEMMs of these
            in high precision, so by default they are written in high precision.

    Raises:
        ValueError: an unknown format, a weight that the format cannot hold, experts that
            Transformers could not read in FP8, no weight for FP8, or siblings that cannot share a
            scale.
        FileExistsError: ``path`` exists already.

    Warns:
        UserWarning: tensors of the model hold NaN or infinities; the message counts them.

    >>> import tempfile
    >>> layer = torch.nn.Linear(256, 128, bias=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = float8lab.integrations.export(layer, f"{folder}/out")
    >>> report.fp8
    {'weight': 'e4m3 128x128 fp32'}
    """
    arguments.check_path("path", path)
    arguments.check_size("max_shard_size", max_shard_size, minimum=1)
    arguments.check_flags(overwrite=overwrite)
    safetensors.check_target(Path(path), overwrite=overwrite)
    contents = _contents(model, format, recipe, exclude, share_scales, unseen)
    state, weights, layout = contents.state, contents.weights, FORMATS[format]
    if sharded := [name for name, value in state.items() if is_dtensor(value)]:
        raise ValueError(
            f"model must not be sharded; {sharded[0]} is a DTensor. Gather the model first, for "
            "example by a full state dict, or take its tensors from export_stream."
        )
    quantization = layout.quantization_config(weights, contents.not_converted)
    config = {**_config_of(model, state), "quantization_config": quantization}
    if nonfinite := _nonfinite(state):
        warnings.warn(
            f"model must be finite; {_counts(nonfinite)}. They are written as the formats have "
            "them: an infinity that FP8 cannot hold as the largest value.",
            stacklevel=2,
        )
    groups = contents.groups
    files = safetensors.write_checkpoint(Path(path), groups, config, max_shard_size=max_shard_size)
    fp8 = {name: weight.spec.describe() for weight in weights for name in weight.parameters}
    nbytes, notes = sum(group.nbytes for group in groups), tuple(_notes(state, weights, layout))
    results = fp8, contents.high_precision, nonfinite, notes, contents.reasons
    return ExportReport(str(path), format, tuple(files), nbytes, *results)


def export_stream(
    model: nn.Module,
    format: str = "block-fp8",
    *,
    recipe: Recipe | None = None,
    exclude: Sequence[str] = ("lm_head",),
    share_scales: Sequence[Sequence[str]] = (),
    unseen: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors that ``export`` writes, of a model that FSDP2 may have sharded.

    Shards are gathered one weight at a time on every rank. The iterator is a collective: all ranks
    must take all tensors from it, in step. A tensor is on the model's device and may be a tensor of
    the model itself: use it before training continues. Arguments and errors are those of
    ``export``; errors are raised before anything is gathered.

    Returns:
        An iterator over ``(name, tensor)``; for a weight, its FP8 data precede its float32 scales.

    >>> layer = torch.nn.Linear(256, 128, bias=False)
    >>> for name, tensor in float8lab.integrations.export_stream(layer):
    ...     print(name, tuple(tensor.shape), tensor.dtype)
    weight (128, 256) torch.float8_e4m3fn
    weight_scale_inv (1, 2) torch.float32
    """
    contents = _contents(model, format, recipe, exclude, share_scales, unseen)
    return (
        (tensor.name, value.detach())
        for group in contents.groups
        for tensor, value in zip(group.tensors, group.make(), strict=True)
    )


@dataclass(frozen=True)
class _Contents:
    """The tensors that a format writes for a model, before anything is cast or gathered."""

    state: Mapping[str, Tensor]
    weights: Sequence[Weight]
    """The weights in FP8."""
    groups: Sequence[safetensors.Group]
    """All tensors to write, in the order of the model."""
    high_precision: tuple[str, ...]
    """Modules without scales for whose scales readers would look."""
    not_converted: Sequence[str]
    """The modules of ``high_precision``, by their names in the model and in the checkpoint."""
    reasons: Mapping[str, str]


def _contents(
    model: nn.Module, format: str, recipe: Recipe | None, exclude: Sequence[str],
    share_scales: Sequence[Sequence[str]], unseen: bool,
) -> _Contents:  # fmt: skip
    """Check the arguments that ``export`` and ``export_stream`` share, and choose the weights."""
    arguments.check_module("model", model)
    arguments.check_choice("format", format, FORMATS)
    check_recipe("recipe", recipe)
    exclude = arguments.check_names("exclude", exclude)
    noun = "a list of lists of names"
    arguments.check_instance("share_scales", share_scales, (list, tuple), noun)
    for group in share_scales:
        arguments.check_instance("share_scales", group, (list, tuple), noun)
        arguments.check_names("share_scales", group)
    arguments.check_flags(unseen=unseen)
    layout = FORMATS[format]
    reshard(model.modules())
    state = _state(model)
    names = saved_names(model) if layout.blocks else SavedNames()
    quantizable, reasons = find_weights(
        model, recipe=recipe, default=layout.recipe, exclude=exclude, share_scales=share_scales,
        unseen=unseen, names=names,
    )  # fmt: skip
    candidates = [w for w in quantizable if all(name in state for name in w.parameters)]
    unnamed = [weight for weight in candidates if layout.lacks_names(weight)]
    named = [weight for weight in candidates if weight not in unnamed]
    if not named:
        raise ValueError(
            "model must have a linear layer to store in FP8; got none that is not excluded. "
            "Correct exclude, or save the model as it is."
        )
    weights = [matrix for weight in named for matrix in layout.split_experts(weight)]
    for weight in weights:
        layout.check(weight)
    in_fp8 = {name for weight in weights for name in weight.parameters}
    if stray := [n for n, value in state.items() if is_stored(value) and n not in in_fp8]:
        raise ValueError(
            f"parameters stored in FP8 must be weights of linear layers that are not excluded; got "
            f"{listed(stray, 5)}. Dequantize them, or do not exclude them."
        )
    reasons |= {name: w.obstacle for w in unnamed for name in w.parameters}
    high_precision = _not_in_fp8(model, in_fp8)
    # Transformers finds modules by either name, other readers by the name in the checkpoint.
    saved = [names.renamed.get(f"{module}.weight", "") for module in high_precision]
    return _Contents(
        state=state, weights=weights, groups=_groups(state, weights, layout, names),
        high_precision=tuple(high_precision),
        not_converted=[*high_precision, *(name.removesuffix(".weight") for name in saved if name)],
        reasons={name: reason for name, reason in reasons.items() if name in state},
    )  # fmt: skip


def _not_in_fp8(model: nn.Module, in_fp8: Collection[str]) -> list[str]:
    """Return the modules whose scales a reader would look for, but the checkpoint does not have."""
    # These are linear layers, experts whose weights are one tensor in high precision, and routers
    # beside experts in FP8.
    linear = [weight for weight in gemm_weights(model) if not weight.is_stack]
    modules = [gemm.name for gemm in linear if not set(gemm.paths) & set(in_fp8)]
    named = {path for gemm in linear for path in gemm.paths} | set(in_fp8)
    parents_of_experts, routers = set(), []
    for name, module in model.named_modules():
        parameters = {local: p for local, p in module._parameters.items() if p is not None}
        inside = any((f"{name}.{local}" if name else local) in named for local in parameters)
        if any(p.ndim > 2 for p in parameters.values()):
            modules += [] if inside else [name]
            parents_of_experts |= {name.rpartition(".")[0]} if inside else set()
        elif not inside and "weight" in parameters and parameters["weight"].ndim == 2:
            routers.append(name)
    return modules + [name for name in routers if name.rpartition(".")[0] in parents_of_experts]


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors to write; a parameter with several names has its first name."""
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or id(value) in seen:
            continue
        if value.is_meta:
            raise ValueError(
                f"model must have values; {name} is on the meta device. Load it first."
            )
        if not is_stored(value) and value.dtype not in safetensors.DTYPES.values():
            raise ValueError(f"safetensors has no {value.dtype}, which {name} is. Convert it.")
        seen.add(id(value))
        state[name] = value
    return state


def _nonfinite(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Count the NaN and infinite elements of each tensor that has any, by name."""
    counts = {}
    for name, value in state.items():
        if value.dtype.is_floating_point or value.dtype.is_complex:
            values = local_values(value.detach())
            if count := values.numel() - int(values.isfinite().sum()):
                counts[name] = count
    return counts


def _counts(nonfinite: Mapping[str, int]) -> str:
    places = listed([f"{count} in {name}" for name, count in nonfinite.items()], 3)
    return f"{sum(nonfinite.values())} elements are NaN or infinite: {places}"


def _groups(
    state: Mapping[str, Tensor], weights: Sequence[Weight], format: Format, names: SavedNames
) -> list[safetensors.Group]:
    """Return all tensors in the order of the model, under their names in the checkpoint."""
    by_name: dict[str, list[Weight]] = {n: [] for weight in weights for n in weight.parameters}
    for weight in weights:
        by_name[weight.parameters[0]].append(weight)
    groups: list[safetensors.Group] = []
    for name, value in state.items():
        for weight in by_name.get(name, ()):  # matrices of experts have their saved names already
            saved = tuple(names.renamed.get(name, name) for name in weight.names)
            groups.append(format.group(replace(weight, names=saved)))
        if name not in by_name:
            saved_name = names.renamed.get(name, name)
            tensor = safetensors.NewTensor(saved_name, value.dtype, tuple(value.shape))
            groups.append(safetensors.Group((tensor,), functools.partial(_values, value)))
    counts = Counter(tensor.name for group in groups for tensor in group.tensors)
    twice, count = counts.most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"names of tensors in format {format.name!r} must differ; the model has a {twice} of "
            "its own. Rename it."
        )
    return groups


def _values(value: Tensor) -> list[Tensor]:
    value = value.full_tensor() if is_dtensor(value) else value
    return [value.dequantize() if isinstance(value, Float4Tensor) else value]


def _config_of(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, object]:
    """Return the contents of ``config.json`` without the ``quantization_config``."""
    config: object = getattr(model, "config", None)
    config = getattr(config, "to_dict", lambda: config)()
    fields: dict[str, object] = dict(config) if isinstance(config, Mapping) else {}
    dtypes = [value.dtype for value in state.values() if value.dtype.is_floating_point]
    if not fields.get("architectures"):
        fields["architectures"] = [type(model).__name__]
    if not fields.get("dtype") and not fields.get("torch_dtype") and dtypes:
        fields["dtype"] = max(dict.fromkeys(dtypes), key=dtypes.count)
    return fields | {k: dtype_name(v) for k, v in fields.items() if isinstance(v, torch.dtype)}


def _notes(state: Mapping[str, Tensor], weights: Sequence[Weight], format: Format) -> Iterator[str]:
    """Iterate over notes about weights in 4 bits and weights that some readers misread."""
    if packed := [name for name, value in state.items() if isinstance(value, Float4Tensor)]:
        yield f"{listed(packed, 1)}: stored in 4 bits, written in high precision"
    cut = [
        name
        for weight in weights
        for name, shape in zip(weight.names, weight.shapes, strict=True)
        if any(size > 128 and size % 128 for size in shape)
    ]
    if cut and format.name == "block-fp8":
        yield (
            f"{listed(cut, 1)}: sizes that are no multiple of 128; Transformers does not "
            "dequantize them correctly, as it takes all blocks to be of one size"
        )
