"""Accelerate with converted models on two processes: DDP and FSDP2, and its checkpoints."""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor

import float8lab
from float8lab import recipes
from tests.distributed.ranks import Collectives, Ranks, each_check, slow_check

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what its dependencies are deprecated for
    pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    accelerate = pytest.importorskip("accelerate", reason="needs the extra 'transformers'")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType
    from accelerate.utils.launch import prepare_multi_gpu_env

    from float8lab.integrations.transformers import SCALING_NAME, Float8Callback

from tests.integrations.transformers.models import build
from tests.integrations.transformers.training import DELAYED, losses, trainer

CONFIGS = Path(__file__).resolve().parents[3] / "examples" / "accelerate"


def launched(ranks: Ranks, config: str) -> AbstractContextManager[Any]:
    """Have these processes, which are connected, be as ``accelerate launch --config_file`` says."""
    # Of Accelerate, where it saves an optimizer.
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    # Of torch, where a resumed run writes its last checkpoint again.
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    command = ["--config_file", str(CONFIGS / config), "--mixed_precision", "no", "script.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(command))
    arguments.main_process_port = 0
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    os.environ.update(
        prepare_multi_gpu_env(arguments), RANK=str(ranks.rank), LOCAL_RANK=str(ranks.rank),
        WORLD_SIZE=str(ranks.world), MASTER_ADDR="localhost", MASTER_PORT="0", OMP_NUM_THREADS="1",
    )  # fmt: skip
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
    if ranks.device.type == "cpu" and config == "fsdp2.yaml":
        # Accelerate heeds FSDP on accelerators only: the CPU passes for one while it looks.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        kind = ("gloo", DistributedType.MULTI_GPU)
        return patch.object(PartialState, "_prepare_backend", lambda *_, **__: kind)
    return nullcontext()


def uses_cpu(ranks: Ranks, config: str) -> bool:
    """What a script says that is to run on a CPU; under FSDP it would get none, see above."""
    return ranks.device.type == "cpu" and config == "ddp.yaml"


class Run:
    """A model, its optimizer and its scales, prepared by an Accelerator."""

    def __init__(self, ranks: Ranks, recipe: Any, config: str) -> None:
        self.ranks = ranks
        with launched(ranks, config):
            self.accelerator = accelerate.Accelerator(cpu=uses_cpu(ranks, config))
        model, _ = build("llama", tie_word_embeddings=False)
        self.report = float8lab.conversion_report(
            float8lab.convert_to_float8(model, recipe, exclude=["lm_head"])
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.scales = float8lab.nn.ScalingState(self.accelerator.unwrap_model(self.model))
        self.accelerator.register_for_checkpointing(self.scales)

    def step(self, index: int) -> float:
        generator = torch.Generator().manual_seed(2 * index + self.ranks.rank)
        tokens = torch.randint(3, 64, (2, 9), generator=generator).to(self.ranks.device)
        self.optimizer.zero_grad()
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        return loss.item()


def full_parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies, of whole parameters where they are sharded."""
    values = (parameter.detach() for parameter in model.parameters())
    return [v.full_tensor() if isinstance(v, DTensor) else v.clone() for v in values]


def resumes(ranks: Ranks, config: str) -> Run:
    """Four steps, and two more from a checkpoint after two: the same bytes."""
    whole = Run(ranks, DELAYED, config)
    losses = [whole.step(index) for index in range(2)]
    whole.accelerator.save_state(ranks.tmp_path / "half")
    losses += [whole.step(index) for index in range(2, 4)]
    expected = full_parameters(whole.model)

    rest = Run(ranks, DELAYED, config)
    rest.step(7)  # of which nothing may remain
    rest.accelerator.load_state(ranks.tmp_path / "half")
    assert [rest.step(index) for index in range(2, 4)] == losses[2:]
    for got, wanted in zip(full_parameters(rest.model), expected, strict=True):
        assert torch.equal(got, wanted)
        ranks.assert_same(got)
    for value in rest.scales.state_dict().values():
        ranks.assert_same(value)
    return rest


def check_ddp_resumes(ranks: Ranks) -> None:
    run = resumes(ranks, "ddp.yaml")
    assert isinstance(run.model, torch.nn.parallel.DistributedDataParallel)


def check_fsdp2_resumes_and_gathers_in_fp8(ranks: Ranks) -> None:
    run = resumes(ranks, "fsdp2.yaml")
    assert any(isinstance(parameter, DTensor) for parameter in run.model.parameters())
    with Collectives() as seen:
        run.step(9)
    in_fp8 = [size for dtype, size in seen.of("allgather") if dtype == torch.uint8]
    layers = sum(layer.parameters for layer in run.report.converted)
    assert sum(in_fp8) >= layers  # forward and backward, half of each on a rank


def check_fsdp2_trains_as_ddp(ranks: Ranks) -> None:
    """The gathered bytes are those that one process casts; sums over ranks have one order."""
    found = []
    for config in ("ddp.yaml", "fsdp2.yaml"):
        run = Run(ranks, recipes.Float8CurrentScaling(), config)
        losses = [run.step(index) for index in range(2)]
        found.append((losses, full_parameters(run.model)))
    (losses, expected), (others, got) = found
    assert others == losses
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def trainer_resumes(ranks: Ranks, config: str) -> Any:
    """Amaxes are reduced over ranks, also where a checkpoint is written; one rank writes it."""

    def fit(folder: Any, **how: Any) -> Any:
        model = build("llama", tie_word_embeddings=False)[0]
        with launched(ranks, config):
            runner = trainer(
                folder, 4, Float8Callback(DELAYED), model, save_steps=2,
                per_device_train_batch_size=2, use_cpu=uses_cpu(ranks, config),
                dataloader_pin_memory=False,
                ddp_backend="gloo" if ranks.device.type == "cpu" else "nccl",
            )  # fmt: skip
        runner.train(**how)
        return runner

    whole = fit(ranks.tmp_path)
    half = ranks.tmp_path / "checkpoint-2"
    assert (half / SCALING_NAME).exists()
    torch.distributed.barrier()
    rest = fit(ranks.tmp_path, resume_from_checkpoint=str(half))
    assert losses(rest) == losses(whole)
    for got, wanted in zip(*map(full_parameters, (rest.model, whole.model)), strict=True):
        assert torch.equal(got, wanted)
        ranks.assert_same(got)
    return rest


@slow_check  # quick: the Trainer under FSDP2, and DDP without it
def check_trainer_under_ddp_resumes(ranks: Ranks) -> None:
    runner = trainer_resumes(ranks, "ddp.yaml")
    assert isinstance(runner.model_wrapped, torch.nn.parallel.DistributedDataParallel)


def check_trainer_under_fsdp2_resumes_and_gathers_in_fp8(ranks: Ranks) -> None:
    runner = trainer_resumes(ranks, "fsdp2.yaml")
    with Collectives() as seen:
        runner.model(input_ids=torch.ones(1, 4, dtype=torch.int64, device=ranks.device))
    assert torch.uint8 in {dtype for dtype, _ in seen.of("allgather")}


test_on_two_processes = each_check(__name__, 2)
