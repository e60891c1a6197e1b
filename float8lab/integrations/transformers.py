"""Run Hugging Face Transformers' Conv1D in FP8, and train in FP8 with its Trainer.

This module needs the extra ``transformers``; ``import float8lab`` does not load it.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from torch import Tensor, nn

from float8lab.arguments import needs
from float8lab.inspect.watch.tracking import Destination
from float8lab.integrations.recipe_mapping import ConversionArguments, recipes_below
from float8lab.integrations.stats import StatsCallback
from float8lab.nn.convert.other_linear import OtherLinear
from float8lab.nn.convert.report import conversion_report
from float8lab.nn.layer import describe_fp8
from float8lab.nn.precision import precisions_below
from float8lab.nn.scaling_state import ScalingState

with needs("float8lab.integrations.transformers", "transformers", "transformers"):
    from safetensors import safe_open
    from safetensors.torch import save_file
    from transformers import TrainerCallback, TrainerState, TrainingArguments
    from transformers.pytorch_utils import Conv1D
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

__all__ = ["SCALING_NAME", "Float8Callback", "Float8Conv1D", "Float8StatsCallback"]

SCALING_NAME = "float8_scaling.safetensors"
"""The name of the file in a Trainer's checkpoint that holds the state of delayed scaling."""

_KEY = "float8lab"
"""The key of the callback's entry in a Trainer's state."""


class Float8Conv1D(OtherLinear, Conv1D):
    """GPT-2's Conv1D, a linear layer whose weight is stored transposed, run in FP8.

    ``convert_to_float8`` changes a Conv1D to this class: the weight stays ``[in, out]`` in the same
    parameter. Scales are those of the matrix ``[out, in]``, as for any linear layer. FSDP2 gathers
    the weight in its own dtype and not in FP8.
    """

    original = Conv1D

    @staticmethod
    def matrix(layer: nn.Module) -> Tensor:
        """Return the weight as ``[out, in]``."""
        return cast("Tensor", layer.weight).t()

    @staticmethod
    def from_matrix(matrix: Tensor) -> Tensor:
        """Return the layer's weight ``[in, out]`` for the matrix ``[out, in]``."""
        return matrix.t()

    def __repr__(self) -> str:
        return f"Conv1D(nf={self.nf}, nx={self.nx}{describe_fp8(self)})"


@dataclass(eq=False, repr=False)
class Float8Callback(ConversionArguments, TrainerCallback):
    """Train in FP8 with Transformers' ``Trainer(..., callbacks=[Float8Callback(recipe)])``.

    The callback converts the Trainer's model when the Trainer is created, before the model is
    sharded or compiled, and prints the ``conversion_report``. A callback added by ``add_callback``
    converts the model when training starts. A model with FP8 layers is left unchanged.

    With a delayed recipe every checkpoint has the state of the scales in a separate file, and
    ``trainer.train(resume_from_checkpoint=...)`` resumes bit for bit. The file is looked for in
    ``args.resume_from_checkpoint`` and in ``args.output_dir``.

    The arguments are those of ``convert_to_float8``; recipes may also be names or mappings of plain
    values, as in a configuration file.

    Raises:
        TypeError: an argument has another type.

    >>> from float8lab.integrations.transformers import Float8Callback
    >>> callback = Float8Callback(float8lab.recipes.DelayedScaling(), exclude=["lm_head"])
    """

    freeze_weights: bool = field(default=False, kw_only=True)
    _run: str = field(default="", init=False)

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, *_: object, **kwargs: nn.Module
    ) -> None:
        """Convert the Trainer's model."""
        self._convert(kwargs.get("model"), state)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: object, **kwargs: nn.Module
    ) -> None:
        """Convert a model not yet converted; load delayed scaling's state from the checkpoint."""
        model = kwargs["model"]
        self._convert(model, state)
        if not any(recipe.linear.delayed for recipe in recipes_below(model)):
            return
        if state.global_step:
            self._load(model, args, state)
        # The id distinguishes checkpoints of several runs with one folder and one step number.
        self._run = uuid.uuid4().hex
        state.stateful_callbacks[_KEY] = {"run": self._run}

    def on_save(
        self, args: TrainingArguments, state: TrainerState, *_: object, **kwargs: nn.Module
    ) -> None:
        """Write the state of delayed scaling; this is a collective, like ``ScalingState``."""
        scaling = ScalingState(kwargs["model"]).state_dict()
        folder = _folder(args, state)
        if scaling and args.should_save and folder.is_dir():  # hyperparameter search has others
            save_file(scaling, folder / SCALING_NAME, metadata={"run": self._run})

    def _convert(self, model: nn.Module | None, state: TrainerState) -> None:
        if model is None or any(precisions_below(model)):
            return
        self.convert(model)
        if state.is_world_process_zero:
            print(f"Float8Callback:\n{conversion_report(model)}")

    def _load(self, model: nn.Module, args: TrainingArguments, state: TrainerState) -> None:
        if (saved := state.stateful_callbacks.get(_KEY)) is None:
            if state.is_world_process_zero:
                print("Float8Callback: the checkpoint has no scales; they start from the tensors")
            return
        folders = [_folder(args, state)]
        if isinstance(args.resume_from_checkpoint, str):
            folders.insert(0, Path(args.resume_from_checkpoint))
        for file in filter(Path.exists, [folder / SCALING_NAME for folder in folders]):
            with safe_open(file, "pt") as opened:
                if opened.metadata() == saved:
                    scaling = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
                    ScalingState(model).load_state_dict(scaling)
                    return
        raise FileNotFoundError(
            f"resume_from_checkpoint must have {SCALING_NAME}, the state of delayed scaling; found "
            f"none of this checkpoint in {', '.join(map(str, folders))}. Say in "
            "TrainingArguments(resume_from_checkpoint=...), too, where the checkpoint is."
        )


class Float8StatsCallback(StatsCallback, TrainerCallback):
    """``StatsCallback`` for ``Trainer(..., callbacks=[Float8Callback(), Float8StatsCallback()])``.

    >>> from float8lab.integrations.transformers import Float8StatsCallback
    >>> callback = Float8StatsCallback(every=100, layers="*.mlp.*")
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: object, **kwargs: nn.Module
    ) -> None:
        """Begin to watch the FP8 layers."""
        runs = Path(args.output_dir) / "runs" / "float8"
        places: dict[str, Destination] = {"tensorboard": runs, "wandb": "wandb", "mlflow": "mlflow"}
        chosen = [place for name, place in places.items() if name in args.report_to]
        first = state.is_world_process_zero
        self.begin(kwargs["model"], state.global_step, chosen if first else None)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder of the checkpoint of the present step."""
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
