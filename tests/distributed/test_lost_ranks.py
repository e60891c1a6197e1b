"""Ranks that die, skip a layer, or have other tokens or groups cause errors, never hangs.

These processes serve no checks of other files: a group that has lost a rank is of no use.
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
from tests.distributed.ranks import fork_server_context

WORLD = 4
TIMEOUT = timedelta(seconds=2)


class Killer:
    """An observer that kills its process after a GEMM of a given kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def saw_cast(self, *args: Any) -> None:
        pass

    def saw_gemm(self, kind: str, *args: Any) -> None:
        """Kill the process between the collectives before and after the GEMM."""
        if kind == self.kind:
            os.kill(os.getpid(), signal.SIGKILL)


def make_layer(group: Any, *, sequence_parallel: bool = True) -> Any:
    torch.manual_seed(3)
    return float8lab.LayerNormMLP(
        16, 24, set_parallel_mode=True, sequence_parallel=sequence_parallel, tp_group=group,
        device="cpu",
    )  # fmt: skip


def run_step(*layers: Any) -> None:
    x = torch.ones(4, 2, 16, requires_grad=True)
    for layer in layers:
        with float8lab.autocast(recipe=Float8CurrentScaling()):
            x = layer(x)
    x.sum().backward()


def run_steps(*layers_of_steps: Any) -> None:
    for layers in layers_of_steps:
        run_step(*layers)


def run_layers(layers: list[Any], x: torch.Tensor) -> None:
    for layer in layers:
        layer(x)


def make_group(ranks: int) -> Any:
    return dist.new_group([*range(ranks)], timeout=TIMEOUT, use_local_synchronization=True)


def skip_a_layer(rank: int) -> None:
    """Ranks that wait for a missing rank get an error, and then so does that rank."""
    first, second = (make_layer(make_group(WORLD)) for _ in range(2))
    run_step(first, second)
    with pytest.raises(RuntimeError):
        run_steps([first] if rank == 1 else [first, second], [first, second])


@torch.no_grad()
def skip_a_layer_with_sums_of_the_same_size(rank: int) -> None:
    """The collectives of different layers match, so ranks compare the order of their calls."""
    group = make_group(WORLD)
    layers = [make_layer(group, sequence_parallel=False) for _ in range(3)]
    x = torch.ones(4, 2, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallOrder, "EVERY", 4)
        run_layers(4 * layers, x)
        with pytest.raises(RuntimeError, match="ranks must run the same layers in the same order"):
            run_layers([layers[0], *layers] if rank == 1 else [*layers, layers[0]], x)


def use_another_group(rank: int) -> None:
    """The other group has the same ranks and size, so only a timeout reveals it."""
    groups = [make_group(WORLD), make_group(WORLD)]
    layer = make_layer(groups[rank == 1])
    with pytest.raises(RuntimeError):
        run_step(layer)


def pass_other_tokens(rank: int) -> None:
    """Other ranks know the sizes of tokens already, so a rank that asks for sizes is alone."""
    layer = make_layer(make_group(WORLD))
    with float8lab.autocast(recipe=Float8CurrentScaling()):
        x = layer(torch.ones(4, 2, 16))
    x = x[:3].clone() if rank == 1 else x
    with pytest.raises(RuntimeError), float8lab.autocast(recipe=Float8CurrentScaling()):
        layer(x)


def lose_a_rank(rank: int, ranks: int, kind: str) -> None:
    """Kill the last of ``ranks`` ranks within a step."""
    layer = make_layer(make_group(ranks))
    run_step(layer)
    PROCESS.observer = Killer(kind) if rank == ranks - 1 else None
    with pytest.raises(RuntimeError):
        run_steps([layer], [layer])


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=TIMEOUT)
    skip_a_layer(rank)
    skip_a_layer_with_sums_of_the_same_size(rank)
    use_another_group(rank)
    pass_other_tokens(rank)
    lose_a_rank(rank, WORLD, "fprop")
    lose_a_rank(rank, WORLD - 1, "dgrad")
    (folder / str(rank)).touch()
    os._exit(0)  # the groups are broken, and gloo may wait for them


def test_all_ranks_get_an_error_when_one_is_lost_or_differs(tmp_path):
    context = fork_server_context()
    ranks = [context.Process(target=run_rank, args=(rank, tmp_path)) for rank in range(WORLD)]
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
