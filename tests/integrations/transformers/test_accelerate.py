"""Accelerate with converted models, and converting them: DDP, FSDP2, and its checkpoints."""

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
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
    from transformers import TrainerCallback

    from float8lab.integrations.accelerate import Float8RecipeKwargs, disable, enable
    from float8lab.integrations.transformers import SCALING_NAME, Float8Callback

from tests.integrations.transformers.models import build
from tests.integrations.transformers.training import DELAYED, losses, trainer

CONFIGS = Path(__file__).resolve().parents[3] / "examples" / "accelerate"


def launched(ranks: Ranks, config: str, precision: str = "no") -> AbstractContextManager[Any]:
    """Have these processes, which are connected, be as ``accelerate launch --config_file`` says."""
    # Of Accelerate, where it saves an optimizer.
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    # Of torch, where a resumed run writes its last checkpoint again.
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    command = ["--config_file", str(CONFIGS / config), "--mixed_precision", precision, "script.py"]
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
    """A model, its optimizer and its scales, prepared by an Accelerator, which may convert it."""

    def __init__(self, ranks: Ranks, recipe: Any, config: str, precision: str = "no") -> None:
        self.ranks = ranks
        with launched(ranks, config, precision):
            self.accelerator = accelerate.Accelerator(cpu=uses_cpu(ranks, config))
        model, _ = build("llama", tie_word_embeddings=False)
        if precision == "no":
            float8lab.convert_to_float8(model, recipe, exclude=["lm_head"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        unwrapped = self.accelerator.unwrap_model(self.model)
        self.report = float8lab.conversion_report(unwrapped)
        self.scales = float8lab.nn.ScalingState(unwrapped)
        if precision == "no":
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


def resumes(ranks: Ranks, config: str, precision: str = "no") -> Run:
    """Four steps, and two more from a checkpoint after two: the same bytes."""
    whole = Run(ranks, DELAYED, config, precision)
    losses = [whole.step(index) for index in range(2)]
    whole.accelerator.save_state(ranks.tmp_path / "half")
    losses += [whole.step(index) for index in range(2, 4)]
    expected = full_parameters(whole.model)

    rest = Run(ranks, DELAYED, config, precision)
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


def gathers_in_fp8(ranks: Ranks, run: Run) -> None:
    assert any(isinstance(parameter, DTensor) for parameter in run.model.parameters())
    with Collectives() as seen:
        run.step(9)
    in_fp8 = [size for dtype, size in seen.of("allgather") if dtype == torch.uint8]
    layers = sum(layer.parameters for layer in run.report.converted)
    assert sum(in_fp8) >= layers  # forward and backward, half of each on a rank


def check_fsdp2_resumes_and_gathers_in_fp8(ranks: Ranks) -> None:
    gathers_in_fp8(ranks, resumes(ranks, "fsdp2.yaml"))


def check_enabled_accelerators_convert_and_resume(ranks: Ranks) -> None:
    for config, kind in (
        ("ddp.yaml", torch.nn.parallel.DistributedDataParallel),
        ("fsdp2.yaml", FSDPModule),
    ):
        enable(DELAYED, exclude=["lm_head"])
        try:
            run = resumes(ranks, config, "fp8")
        finally:
            disable()
        assert isinstance(run.model, kind)
        assert run.accelerator.state.mixed_precision == "fp8"
        assert [layer.name for layer in run.report.skipped] == ["lm_head"]
    gathers_in_fp8(ranks, run)


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


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process without a launcher; what ``enable`` replaces is there again after the test."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    yield
    disable()
    AcceleratorState._reset_state(reset_partial_state=True)


def accelerator(*handlers: Any, precision: str = "fp8") -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(
        cpu=True, mixed_precision=precision, kwargs_handlers=[*handlers] or None
    )


def converted(made: Any) -> Any:
    """The report of a model that this Accelerator has prepared."""
    layers = [torch.nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(2)]
    return float8lab.conversion_report(made.prepare(torch.nn.Sequential(*layers)))


def runs_by(report: Any, recipe: Any) -> bool:
    return {layer.note for layer in report.converted} == {repr(recipe)}


def everything() -> list[Any]:
    """What ``enable`` may change: names of modules and of the class, in their order."""
    modules = accelerate.state, accelerate.utils.launch, accelerate.utils.dataclasses
    return [list(vars(owner).items()) for owner in (*modules, accelerate.Accelerator)]


@pytest.mark.usefixtures("alone")
def test_disable_gives_back_what_enable_replaced() -> None:
    before = everything()
    enable(recipes.Float8RowwiseScaling(), exclude=["0"])
    enable("auto")  # in place of the first
    with pytest.raises(TypeError, match=r"^recipe must be"):
        enable(3)  # type: ignore[arg-type]
    enable(recipes.Float8RowwiseScaling(), exclude=["0"])
    made = accelerator()
    report = converted(made)
    assert runs_by(report, recipes.Float8RowwiseScaling())
    assert len(report.skipped) == 1
    disable()
    disable()
    assert everything() == before
    assert made.prepare(torch.nn.Linear(16, 16)).__class__ is torch.nn.Linear
    with pytest.raises(ValueError, match="requires `transformer_engine`"):
        accelerator()


@pytest.mark.usefixtures("alone")
def test_handlers_say_how_an_accelerator_converts() -> None:
    enable()
    handler = Float8RecipeKwargs(recipe=recipes.Float8BlockScaling(), overrides={"1": None})
    made = accelerator(handler, accelerate.utils.AutocastKwargs())
    assert runs_by(converted(made), handler.recipe)
    assert runs_by(converted(accelerator()), recipes.Float8CurrentScaling())
    te = accelerate.utils.TERecipeKwargs(margin=1, amax_history_len=4)
    delayed = recipes.DelayedScaling(margin=1, amax_history_len=4)
    assert runs_by(converted(accelerator(te)), delayed)
    ours = float8lab.Linear(16, 16, device="cpu")
    assert "recipe=Float8BlockScaling()" in repr(made.prepare_model(ours))
    evaluated = made.prepare_model(torch.nn.Linear(16, 16), evaluation_mode=True)
    assert type(evaluated) is torch.nn.Linear
    with pytest.raises(ValueError, match=r'^mixed_precision must be "fp8" .* got "bf16"'):
        accelerator(handler, precision="bf16")
    with pytest.raises(ValueError, match=r"^kwargs_handlers must hold one .* got 2"):
        accelerator(handler, handler)
    with pytest.raises(TypeError, match=r"^exclude must be"):
        Float8RecipeKwargs(exclude=3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("fp8_config", "expected"),
    [
        (
            "{backend: TE, fp8_format: E4M3, amax_history_len: 16, amax_compute_algo: max,"
            " margin: 1, override_linear_precision: [false, false, true]}",
            recipes.DelayedScaling(
                fp8_format=recipes.Format.E4M3, amax_history_len=16, amax_compute_algo="max",
                margin=1, override_linear_precision=(False, False, True),
            ),
        ),
        ("{backend: TE, use_mxfp8_block_scaling: true}", recipes.MXFP8BlockScaling()),
        ("{backend: AO, enable_fsdp_float8_all_gather: false}", recipes.Float8CurrentScaling()),
        ("{}", recipes.Float8CurrentScaling()),
        ("{backend: MSAMP, opt_level: O1}", None),
    ],
)  # fmt: skip
def test_configuration_files_keep_their_meaning(
    fp8_config: str, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fp8.yaml"
    text = (CONFIGS / "ddp.yaml").read_text().replace("bf16", "fp8")
    file.write_text(f"{text}fp8_config: {fp8_config}\n")
    command = ["--config_file", str(file), "script.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(command))
    with pytest.raises(RuntimeError, match=r"^FP8 is not available"):
        prepare_multi_gpu_env(arguments)
    enable()
    for name, value in prepare_multi_gpu_env(arguments).items():
        if name.startswith("ACCELERATE_"):
            monkeypatch.setenv(name, value)
    if expected is None:
        with pytest.raises(NotImplementedError, match=r"^backend of fp8_config must be"):
            accelerator()
        enable(recipes.Float8CurrentScaling())  # which says it all
    made = accelerator()
    assert runs_by(converted(made), (expected or recipes.Float8CurrentScaling()))
    assert made.float8_recipe_handler.fp8_all_gather is ("AO" not in fp8_config)


@pytest.mark.usefixtures("alone")
def test_a_trainer_converts_by_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trainer(tmp_path, 2, Float8Callback(exclude=["lm_head"]), bf16=True)
    expected.train()
    enable(exclude=["lm_head"])
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")  # as the launcher does
    AcceleratorState._reset_state(reset_partial_state=True)
    runner = trainer(tmp_path, 2, TrainerCallback())
    runner.train()
    assert float8lab.conversion_report(runner.model).converted
    assert losses(runner) == losses(expected)
