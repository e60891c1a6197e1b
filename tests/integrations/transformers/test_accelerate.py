"""Accelerate with converted models, and converting models itself: DDP, FSDP2 and checkpoints."""

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
    warnings.simplefilter("ignore")  # deprecation warnings of its dependencies
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


def launch_environment(
    ranks: Ranks, config: str, precision: str = "no"
) -> AbstractContextManager[Any]:
    """Set up these connected processes as ``accelerate launch --config_file`` would."""
    # A warning from Accelerate when it saves an optimizer.
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    # A warning from torch when a resumed run writes its last checkpoint a second time.
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
        # Accelerate applies FSDP on accelerators only, so the CPU is declared one during the
        # set-up.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        kind = ("gloo", DistributedType.MULTI_GPU)
        return patch.object(PartialState, "_prepare_backend", lambda *_, **__: kind)
    return nullcontext()


def uses_cpu(ranks: Ranks, config: str) -> bool:
    """Whether a script asks for the CPU; under FSDP ``launch_environment`` declares it instead."""
    return ranks.device.type == "cpu" and config == "ddp.yaml"


class PreparedModel:
    """A model, its optimizer and its scales, prepared by an Accelerator, which may convert it."""

    def __init__(self, ranks: Ranks, recipe: Any, config: str, precision: str = "no") -> None:
        self.ranks = ranks
        with launch_environment(ranks, config, precision):
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
    """Return copies of the parameters, unsharded where they are sharded."""
    values = (parameter.detach() for parameter in model.parameters())
    return [v.full_tensor() if isinstance(v, DTensor) else v.clone() for v in values]


def assert_resumes(ranks: Ranks, config: str, precision: str = "no") -> PreparedModel:
    """Assert that two steps resumed from a checkpoint equal steps three and four without it."""
    uninterrupted = PreparedModel(ranks, DELAYED, config, precision)
    losses = [uninterrupted.step(index) for index in range(2)]
    uninterrupted.accelerator.save_state(ranks.tmp_path / "half")
    losses += [uninterrupted.step(index) for index in range(2, 4)]
    expected = full_parameters(uninterrupted.model)

    resumed = PreparedModel(ranks, DELAYED, config, precision)
    resumed.step(7)  # loading the checkpoint must undo this step
    resumed.accelerator.load_state(ranks.tmp_path / "half")
    assert [resumed.step(index) for index in range(2, 4)] == losses[2:]
    for parameter, expected_parameter in zip(full_parameters(resumed.model), expected, strict=True):
        assert torch.equal(parameter, expected_parameter)
        ranks.assert_same(parameter)
    for value in resumed.scales.state_dict().values():
        ranks.assert_same(value)
    return resumed


def check_ddp_resumes(ranks: Ranks) -> None:
    run = assert_resumes(ranks, "ddp.yaml")
    assert isinstance(run.model, torch.nn.parallel.DistributedDataParallel)


def assert_gathers_in_fp8(ranks: Ranks, run: PreparedModel) -> None:
    assert any(isinstance(parameter, DTensor) for parameter in run.model.parameters())
    with Collectives() as collectives:
        run.step(9)
    in_fp8 = [size for dtype, size in collectives.of("allgather") if dtype == torch.uint8]
    layers = sum(layer.parameters for layer in run.report.converted)
    assert sum(in_fp8) >= layers  # forward and backward, half of each on a rank


def check_fsdp2_resumes_and_gathers_in_fp8(ranks: Ranks) -> None:
    assert_gathers_in_fp8(ranks, assert_resumes(ranks, "fsdp2.yaml"))


def check_enabled_accelerators_convert_and_resume(ranks: Ranks) -> None:
    for config, kind in (
        ("ddp.yaml", torch.nn.parallel.DistributedDataParallel),
        ("fsdp2.yaml", FSDPModule),
    ):
        enable(DELAYED, exclude=["lm_head"])
        try:
            run = assert_resumes(ranks, config, "fp8")
        finally:
            disable()
        assert isinstance(run.model, kind)
        assert run.accelerator.state.mixed_precision == "fp8"
        assert [layer.name for layer in run.report.skipped] == ["lm_head"]
    assert_gathers_in_fp8(ranks, run)


def check_fsdp2_and_ddp_train_to_equal_parameters(ranks: Ranks) -> None:
    """FSDP2 gathers the bytes that one process casts, and sums over ranks have one order."""
    results = []
    for config in ("ddp.yaml", "fsdp2.yaml"):
        run = PreparedModel(ranks, recipes.Float8CurrentScaling(), config)
        losses = [run.step(index) for index in range(2)]
        results.append((losses, full_parameters(run.model)))
    (losses, ddp_parameters), (fsdp_losses, fsdp_parameters) = results
    assert fsdp_losses == losses
    torch.testing.assert_close(fsdp_parameters, ddp_parameters, rtol=0, atol=0)


def assert_trainer_resumes(ranks: Ranks, config: str) -> Any:
    """Assert that a Trainer on ranks resumes exactly; one rank writes the checkpoint.

    Amaxes are reduced over ranks, also when a checkpoint is written.
    """

    def fit(folder: Any, **train_options: Any) -> Any:
        model = build("llama", tie_word_embeddings=False)[0]
        with launch_environment(ranks, config):
            runner = trainer(
                folder, 4, Float8Callback(DELAYED), model, save_steps=2,
                per_device_train_batch_size=2, use_cpu=uses_cpu(ranks, config),
                dataloader_pin_memory=False,
                ddp_backend="gloo" if ranks.device.type == "cpu" else "nccl",
            )  # fmt: skip
        runner.train(**train_options)
        return runner

    uninterrupted = fit(ranks.tmp_path)
    half_way = ranks.tmp_path / "checkpoint-2"
    assert (half_way / SCALING_NAME).exists()
    torch.distributed.barrier()
    resumed = fit(ranks.tmp_path, resume_from_checkpoint=str(half_way))
    assert losses(resumed) == losses(uninterrupted)
    for parameter, expected_parameter in zip(
        *map(full_parameters, (resumed.model, uninterrupted.model)), strict=True
    ):
        assert torch.equal(parameter, expected_parameter)
        ranks.assert_same(parameter)
    return resumed


@slow_check  # the quick checks cover the Trainer under FSDP2, and DDP without it
def check_trainer_under_ddp_resumes(ranks: Ranks) -> None:
    runner = assert_trainer_resumes(ranks, "ddp.yaml")
    assert isinstance(runner.model_wrapped, torch.nn.parallel.DistributedDataParallel)


def check_trainer_under_fsdp2_resumes_and_gathers_in_fp8(ranks: Ranks) -> None:
    runner = assert_trainer_resumes(ranks, "fsdp2.yaml")
    with Collectives() as collectives:
        runner.model(input_ids=torch.ones(1, 4, dtype=torch.int64, device=ranks.device))
    assert torch.uint8 in {dtype for dtype, _ in collectives.of("allgather")}


test_on_two_processes = each_check(__name__, 2)


@pytest.fixture
def single_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process without a launcher; after the test ``disable`` undoes ``enable``."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    yield
    disable()
    AcceleratorState._reset_state(reset_partial_state=True)


def new_accelerator(*handlers: Any, precision: str = "fp8") -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(
        cpu=True, mixed_precision=precision, kwargs_handlers=[*handlers] or None
    )


def report_of_prepared(prepared_by: Any) -> Any:
    """Return the report on a model that this Accelerator has prepared."""
    layers = [torch.nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(2)]
    return float8lab.conversion_report(prepared_by.prepare(torch.nn.Sequential(*layers)))


def has_recipe(report: Any, recipe: Any) -> bool:
    return {layer.note for layer in report.converted} == {repr(recipe)}


def accelerate_names() -> list[Any]:
    """All that ``enable`` may change: the names in the modules and in the class, in their order."""
    modules = accelerate.state, accelerate.utils.launch, accelerate.utils.dataclasses
    return [list(vars(owner).items()) for owner in (*modules, accelerate.Accelerator)]


@pytest.mark.usefixtures("single_process")
def test_disable_restores_accelerate() -> None:
    before = accelerate_names()
    enable(recipes.Float8RowwiseScaling(), exclude=["0"])
    enable("auto")  # replaces the first call
    with pytest.raises(TypeError, match=r"^recipe must be"):
        enable(3)  # type: ignore[arg-type]
    enable(recipes.Float8RowwiseScaling(), exclude=["0"])
    prepared_by = new_accelerator()
    report = report_of_prepared(prepared_by)
    assert has_recipe(report, recipes.Float8RowwiseScaling())
    assert len(report.skipped) == 1
    disable()
    disable()
    assert accelerate_names() == before
    assert prepared_by.prepare(torch.nn.Linear(16, 16)).__class__ is torch.nn.Linear
    with pytest.raises(ValueError, match="requires `transformer_engine`"):
        new_accelerator()


@pytest.mark.usefixtures("single_process")
def test_handlers_set_the_conversion_of_an_accelerator() -> None:
    enable()
    handler = Float8RecipeKwargs(recipe=recipes.Float8BlockScaling(), overrides={"1": None})
    prepared_by = new_accelerator(handler, accelerate.utils.AutocastKwargs())
    assert has_recipe(report_of_prepared(prepared_by), handler.recipe)
    assert has_recipe(report_of_prepared(new_accelerator()), recipes.Float8CurrentScaling())
    te = accelerate.utils.TERecipeKwargs(margin=1, amax_history_len=4)
    delayed = recipes.DelayedScaling(margin=1, amax_history_len=4)
    assert has_recipe(report_of_prepared(new_accelerator(te)), delayed)
    fp8_layer = float8lab.Linear(16, 16, device="cpu")
    assert "recipe=Float8BlockScaling()" in repr(prepared_by.prepare_model(fp8_layer))
    evaluated = prepared_by.prepare_model(torch.nn.Linear(16, 16), evaluation_mode=True)
    assert type(evaluated) is torch.nn.Linear
    with pytest.raises(ValueError, match=r'^mixed_precision must be "fp8" .* got "bf16"'):
        new_accelerator(handler, precision="bf16")
    with pytest.raises(ValueError, match=r"^kwargs_handlers must hold one .* got 2"):
        new_accelerator(handler, handler)
    with pytest.raises(TypeError, match=r"^exclude must be"):
        Float8RecipeKwargs(exclude=3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("single_process")
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
def test_fp8_config_of_accelerate_gives_the_recipe(
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
            new_accelerator()
        enable(recipes.Float8CurrentScaling())  # an explicit recipe replaces the configuration
    prepared_by = new_accelerator()
    assert has_recipe(report_of_prepared(prepared_by), (expected or recipes.Float8CurrentScaling()))
    assert prepared_by.float8_recipe_handler.fp8_all_gather is ("AO" not in fp8_config)


@pytest.mark.usefixtures("single_process")
def test_a_trainer_converts_its_model_through_accelerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trainer(tmp_path, 2, Float8Callback(exclude=["lm_head"]), bf16=True)
    expected.train()
    enable(exclude=["lm_head"])
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")  # as the launcher sets it
    AcceleratorState._reset_state(reset_partial_state=True)
    runner = trainer(tmp_path, 2, TrainerCallback())
    runner.train()
    assert float8lab.conversion_report(runner.model).converted
    assert losses(runner) == losses(expected)
