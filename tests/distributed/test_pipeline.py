"""Pipelines of torch.distributed.pipelining: operands have the bytes of a plain loop."""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import float8lab
from float8lab.nn.precision import precisions
from float8lab.recipes import DelayedScaling, Recipe
from float8lab.recipes.region import in_backward
from tests.distributed.equality import Step, assert_row
from tests.distributed.ranks import Ranks, each_check, slow_check
from tests.recorder import observing

RECIPE = DelayedScaling(amax_history_len=4, amax_compute_algo="max", power_of_2_scale=False)
WIDTH, TOKENS, MICROBATCHES, STEPS = 32, 6, 4, 2
# Torch 2.11 cannot start a backward at a torch.autograd.Function, as these schedules do.
IS_AFTER_TORCH_2_11 = tuple(int(part) for part in torch.__version__.split(".")[:2]) > (2, 11)
ZERO_BUBBLE = ["InterleavedZeroBubble"] if IS_AFTER_TORCH_2_11 else []
CHECKPOINTS: list[Any] = [
    None, float8lab.checkpoint, partial(torch_checkpoint, use_reentrant=True),
    partial(torch_checkpoint, use_reentrant=False),
]  # fmt: skip


class Stage(nn.Module):
    """Three FP8 GEMMs; ``region`` makes each call a region of delayed scaling."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH, device=device))
        self.inner = nn.Sequential(
            float8lab.Linear(WIDTH, WIDTH, device=device),
            float8lab.LayerNormMLP(WIDTH, 2 * WIDTH, device=device),
        )
        self.checkpoint: Any = None
        self.region: Any = nullcontext

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain  # reentrant checkpoints need an argument that requires gradients
        with self.region():
            return self.inner(x) if self.checkpoint is None else self.checkpoint(self.inner, x)


class Gemms:
    """Observes the operand bytes of every GEMM, in order, by layer, kind and recomputation."""

    def __init__(self, stages: dict[int, Stage]) -> None:
        self.names = {
            precision: (index, name, part)
            for index, stage in stages.items()
            for name, module in stage.named_modules()
            for part, precision in precisions(module)
        }
        self.seen: dict[Any, list[bytes]] = defaultdict(list)

    def saw_cast(self, *_: Any) -> None:
        pass

    def saw_gemm(self, kind: str, call: Any, a: Any, b: Any) -> None:
        key = (*self.names[call.precision], kind, kind == "fprop" and in_backward())
        parts = [part.detach().cpu().contiguous().view(torch.uint8) for part in (*a, *b)]
        self.seen[key].append(b"".join(part.numpy().tobytes() for part in parts))


class Run:
    """A pipeline over all ranks and, on each rank, the plain loop over all stages."""

    def __init__(
        self, ranks: Ranks, schedule: str, checkpoint: Any, region: Any = nullcontext
    ) -> None:
        stages_per_rank = 2 if "Interleaved" in schedule else 1
        count = stages_per_rank * ranks.world
        torch.manual_seed(0)
        self.ranks = ranks
        self.all_stages = {index: Stage(ranks.device) for index in range(count)}
        local_indices = range(ranks.rank, count, ranks.world)
        self.local_stages = {
            index: copy.deepcopy(self.all_stages[index]) for index in local_indices
        }
        for stage in (*self.all_stages.values(), *self.local_stages.values()):
            stage.checkpoint, stage.region = checkpoint, region
        # Without these, torch runs a stage once on uninitialized memory to learn its shapes.
        example = torch.zeros(1, TOKENS, WIDTH, device=ranks.device)
        stages = [
            PipelineStage(
                stage, index, count, ranks.device,
                input_args=example.clone().requires_grad_(index > 0),
                output_args=example.clone().requires_grad_(),
            )
            for index, stage in self.local_stages.items()
        ]  # fmt: skip
        kind = get_schedule_class(schedule)
        self.schedule = kind(
            stages if stages_per_rank > 1 else stages[0], MICROBATCHES, loss_fn=F.mse_loss
        )

    def data(self, step: int) -> tuple[Tensor, Tensor]:
        """Microbatches of very different magnitudes, so that a wrong scale shows."""
        generator = torch.Generator().manual_seed(step)
        x, target = torch.randn(2, MICROBATCHES, TOKENS, WIDTH, generator=generator)
        sizes = torch.tensor([1.0, 0.01, 100.0, 3.0]).roll(step)
        return (x * sizes[:, None, None]).to(self.ranks.device), target.to(self.ranks.device)

    def step(self, index: int, region: AbstractContextManager[Any]) -> dict[Any, list[bytes]]:
        x, target = self.data(index)
        with observing(Gemms(self.local_stages)) as gemms, region:
            self.schedule.step(*([x] if self.ranks.rank == 0 else []), target=target)
        return gemms.seen

    def plain_step(self, index: int, region: AbstractContextManager[Any]) -> dict[Any, list[bytes]]:
        with observing(Gemms(self.all_stages)) as gemms, region:
            for x, target in zip(*(part.split(1) for part in self.data(index)), strict=True):
                for stage in self.all_stages.values():
                    x = stage(x)
                F.mse_loss(x, target).backward()
        return gemms.seen

    def gradients(self) -> list[Tensor]:
        return [p.grad for stage in self.local_stages.values() for p in stage.parameters()]

    def plain_gradients(self) -> list[Tensor]:
        """The gradients of this rank's stages, as a mean over microbatches like the schedule's."""
        parameters = (p for index in self.local_stages for p in self.all_stages[index].parameters())
        return [p.grad / MICROBATCHES for p in parameters]

    def zero_grad(self) -> None:
        for stage in (*self.all_stages.values(), *self.local_stages.values()):
            stage.zero_grad()


def group_of_one(ranks: Ranks) -> Any:
    """The ranks that have a stage in common: each rank alone, without data parallelism."""
    return [dist.new_group([rank]) for rank in range(ranks.world)][ranks.rank]


def compare_with_accumulation(ranks: Ranks, group: Any, schedule: str, checkpoint: Any) -> None:
    """Compare operands and gradients of a schedule in a region with those of the plain loop."""

    def region() -> float8lab.autocast:
        return float8lab.autocast(recipe=RECIPE, amax_reduction_group=group)

    # This schedule's backward has two halves. Both recompute, and both need the gradient between
    # layers.
    halves = schedule in ZERO_BUBBLE
    run = Run(ranks, schedule, checkpoint)
    for step in range(STEPS):
        got, expected = run.step(step, region()), run.plain_step(step, region())
        assert got
        for key, operands in got.items():
            *_, kind, is_recomputed = key
            if halves and (is_recomputed or kind == "dgrad"):
                assert set(operands) == set(expected[key]), (schedule, key)
            else:
                assert operands == expected[key], (schedule, checkpoint, key)
        torch.testing.assert_close(run.gradients(), run.plain_gradients(), rtol=0, atol=0)
        run.zero_grad()


def check_region_around_a_step_has_the_scales_of_accumulation(ranks: Ranks) -> None:
    """The order of microbatches does not matter."""
    group = group_of_one(ranks)
    schedules = ("1F1B", "1F1B", "Interleaved1F1B", *ZERO_BUBBLE)  # each with a checkpoint
    for schedule, checkpoint in zip(schedules, CHECKPOINTS, strict=False):
        compare_with_accumulation(ranks, group, schedule, checkpoint)


@slow_check
def check_all_schedules_and_checkpoints_have_the_scales_of_accumulation(ranks: Ranks) -> None:
    group = group_of_one(ranks)
    for schedule in ("1F1B", "Interleaved1F1B", *ZERO_BUBBLE):
        for checkpoint in CHECKPOINTS[::3] if schedule in ZERO_BUBBLE else CHECKPOINTS[:3]:
            compare_with_accumulation(ranks, group, schedule, checkpoint)


def check_table_row_of_pipelines(ranks: Ranks) -> None:
    """Compares a stage's output, and the gradients of its input and parameters."""
    group = group_of_one(ranks)

    def measure(recipe: Recipe) -> tuple[Step, Step]:
        run = Run(ranks, "1F1B", None)
        results: list[Step] = []
        for model, run_step in ((run.local_stages, run.step), (run.all_stages, run.plain_step)):
            outputs: list[Tensor] = []
            gradients: list[Tensor] = []
            hooks: list[Any] = []  # a schedule keeps the tensors into which it receives

            def note_gradient(_: Any, args: Any, seen: Any = gradients, hooks: Any = hooks) -> None:
                hooks.append(args[0].requires_grad_().register_hook(seen.append))

            def note(_: Any, args: Any, y: Tensor, seen: list[Tensor] = outputs) -> None:
                seen.append(y.detach())

            model[ranks.rank].register_forward_pre_hook(note_gradient)
            model[ranks.rank].register_forward_hook(note)
            for step in range(STEPS):
                run.zero_grad()
                while hooks:
                    hooks.pop().remove()
                outputs.clear()
                gradients.clear()
                run_step(step, float8lab.autocast(recipe=recipe, amax_reduction_group=group))
            parameter_gradients = (
                run.gradients() if model is run.local_stages else run.plain_gradients()
            )
            results.append(Step(torch.cat(outputs), torch.cat(gradients), parameter_gradients))
        got, want = results
        return got, want

    assert_row(ranks, "pipeline, against accumulation on one rank", measure)


def check_example_of_the_page_gives_gradients(ranks: Ranks) -> None:
    """The lines of docs/many_gpus.md, "Pipelines"."""
    index, count, device, pp_group = ranks.rank, ranks.world, ranks.device, dist.group.WORLD
    part, recipe, microbatches, loss = Stage(device), RECIPE, MICROBATCHES, F.mse_loss
    stage_group = group_of_one(ranks)
    x, y = (torch.zeros(1, TOKENS, WIDTH, device=device) for _ in range(2))
    target = torch.ones(microbatches, TOKENS, WIDTH, device=device)
    inputs = () if index else (target,)
    x.requires_grad_(index > 0)
    y.requires_grad_()
    stage = PipelineStage(part, index, count, device, input_args=x, output_args=y, group=pp_group)
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss)
    with float8lab.autocast(recipe=recipe, amax_reduction_group=stage_group):
        schedule.step(*inputs, target=target)
    assert all(p.grad is not None and p.grad.any() for p in part.parameters())


def check_recomputation_in_a_region_per_microbatch_has_the_scales_of_its_forward(
    ranks: Ranks,
) -> None:
    """The operands of forwards are those of a plain loop."""
    region = partial(float8lab.autocast, recipe=RECIPE, amax_reduction_group=group_of_one(ranks))
    uncheckpointed: list[Any] = []
    for checkpoint in CHECKPOINTS:
        run = Run(ranks, "1F1B", checkpoint, region)
        for step in range(STEPS):
            got, expected = run.step(step, nullcontext()), run.plain_step(step, nullcontext())
            gradients = run.gradients()
            if checkpoint is None:
                uncheckpointed.append((got, gradients))
            reference, reference_gradients = uncheckpointed[step]
            for (*layer, kind, is_recomputed), operands in got.items():
                if kind == "fprop" and not is_recomputed:
                    assert operands == expected[(*layer, kind, False)], (step, layer)
                if is_recomputed and checkpoint is not None:
                    assert set(operands) == set(got[(*layer, kind, False)]), (checkpoint, layer)
                elif not is_recomputed:
                    assert operands == reference[(*layer, kind, False)], (checkpoint, layer, kind)
            torch.testing.assert_close(gradients, reference_gradients, rtol=0, atol=0)
            run.zero_grad()


test_on_ranks = each_check(__name__, 2)
