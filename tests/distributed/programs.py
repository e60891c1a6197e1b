"""Run a program on several ranks as torchrun does: on forks of a process that has torch."""

import os
import runpy
import socket
import sys
from pathlib import Path

import torch

from tests.distributed.ranks import forks
from tests.processes import run_python

_ENDED: list[dict[str, object]] = []
"""The names of a program that has ended, alive until its process ends without destructors. DDP's
waits for Gloo's thread, which may need the interpreter's lock to drop the last collective's tensors
and waits for that in turn."""


def _run(rank: int, world: int, port: int, program: Path, args: tuple[str, ...], folder: Path):
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": world}
    for name, value in {**where, "RANK": rank, "LOCAL_RANK": rank}.items():
        os.environ[name] = str(value)
    for stream in (1, 2):
        os.dup2(os.open(folder / f"{stream}-{rank}", os.O_CREAT | os.O_WRONLY), stream)
    torch.set_num_threads(1)
    sys.argv = [str(program), *args]
    sys.path.insert(0, str(program.parent))
    _ENDED.append(runpy.run_path(str(program), run_name="__main__"))


def run_program(world: int, program: Path, *args: str, folder: Path) -> str:
    """What the ranks print, one after the other.

    Args:
        folder: an existing one, for what each rank prints.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    context = forks()
    ranks = [
        context.Process(target=_run, args=(rank, world, port, program, args, folder))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(300)
        ended = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    printed, errors = (
        [(folder / f"{stream}-{rank}").read_text() for rank in range(world)] for stream in (1, 2)
    )
    assert ended == [0] * world, (ended, *errors)
    return "".join(printed)


def run_torchrun(world: int, program: Path, *args: str) -> str:
    """What the ranks print under torchrun itself."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world))
    return run_python(*torchrun, program, *args, OMP_NUM_THREADS="1")
