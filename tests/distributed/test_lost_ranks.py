"""Ranks of a group that die, skip a layer, or have other tokens or groups: errors, no hangs.

These processes are not those of other files' checks: a group that has lost a rank is of no use.
"""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import float8lab
from float8lab.distributed.comm import CallOrder
from float8lab.recipes import Float8CurrentScaling
from float8lab.recipes.region import PROCESS
from tests.distributed.ranks import forks

WORLD = 4
SHORT = timedelta(seconds=2)


class Killer:
    """An observer that kills its process when a GEMM of that kind has run."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def saw_cast(self, *args: Any) -> None:
        pass

    def saw_gemm(self, kind: str, *args: Any) -> None:
        """Between the collectives before and behind it."""
        if kind == self.kind:
            os.kill(os.getpid(), signal.SIGKILL)


def made(group: Any, *, sequence_parallel: bool = True) -> Any:
    torch.manual_seed(3)
    return float8lab.LayerNormMLP(
        16, 24, set_parallel_mode=True, sequence_parallel=sequence_parallel, tp_group=group,
        device="cpu",
    )  # fmt: skip


def step(*layers: Any) -> None:
    x = torch.ones(4, 2, 16, requires_grad=True)
    for layer in layers:
        with float8lab.autocast(recipe=Float8CurrentScaling()):
            x = layer(x)
    x.sum().backward()


def steps(*of_each: Any) -> None:
    for layers in of_each:
        step(*layers)


def call(layers: list[Any], x: torch.Tensor) -> None:
    for layer in layers:
        layer(x)


def group_of(ranks: int) -> Any:
    return dist.new_group([*range(ranks)], timeout=SHORT, use_local_synchronization=True)


def skip_a_layer(rank: int) -> None:
    """The ranks that wait for one that has not come get an error, and then that, which waits."""
    first, second = (made(group_of(WORLD)) for _ in range(2))
    step(first, second)
    with pytest.raises(RuntimeError):
        steps([first] if rank == 1 else [first, second], [first, second])


@torch.no_grad()
def skip_a_layer_whose_sums_are_as_large(rank: int) -> None:
    """Collectives fit, though they add up different layers: ranks compare what they have run."""
    group = group_of(WORLD)
    layers = [made(group, sequence_parallel=False) for _ in range(3)]
    x = torch.ones(4, 2, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallOrder, "EVERY", 4)
        call(4 * layers, x)
        with pytest.raises(RuntimeError, match="ranks must run the same layers in the same order"):
            call([layers[0], *layers] if rank == 1 else [*layers, layers[0]], x)


def have_another_group(rank: int) -> None:
    """Of the same ranks and size, so that nothing but their waiting tells."""
    groups = [group_of(WORLD), group_of(WORLD)]
    layer = made(groups[rank == 1])
    with pytest.raises(RuntimeError):
        step(layer)


def pass_other_tokens(rank: int) -> None:
    """Where the others' are known, a rank that asks for sizes is alone."""
    layer = made(group_of(WORLD))
    with float8lab.autocast(recipe=Float8CurrentScaling()):
        x = layer(torch.ones(4, 2, 16))
    x = x[:3].clone() if rank == 1 else x
    with pytest.raises(RuntimeError), float8lab.autocast(recipe=Float8CurrentScaling()):
        layer(x)


def lose_a_rank(rank: int, ranks: int, kind: str) -> None:
    """The last of so many ranks is killed within a step."""
    layer = made(group_of(ranks))
    step(layer)
    PROCESS.observer = Killer(kind) if rank == ranks - 1 else None
    with pytest.raises(RuntimeError):
        steps([layer], [layer])


def start(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=SHORT)
    skip_a_layer(rank)
    skip_a_layer_whose_sums_are_as_large(rank)
    have_another_group(rank)
    pass_other_tokens(rank)
    lose_a_rank(rank, WORLD, "fprop")
    lose_a_rank(rank, WORLD - 1, "dgrad")
    (folder / str(rank)).touch()
    os._exit(0)  # the groups are broken, and gloo may wait for them


def test_all_ranks_get_an_error(tmp_path):
    context = forks()
    ranks = [context.Process(target=start, args=(rank, tmp_path)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    try:
        for rank, process in enumerate(ranks):
            process.join(120)
            killed = rank >= WORLD - 2
            assert process.exitcode == (-signal.SIGKILL if killed else 0), rank
            assert (tmp_path / str(rank)).exists() != killed, rank
    finally:
        for process in ranks:
            process.kill()
