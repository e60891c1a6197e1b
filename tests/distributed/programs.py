"""Run a program on several ranks, as torchrun does, on forks of a process that has torch."""

import os
import runpy
import socket
import sys
from pathlib import Path

import torch

from tests.distributed.ranks import fork_server_context
from tests.processes import run_python

_FINAL_GLOBALS: list[dict[str, object]] = []
"""The globals of a program that has ended. They stay alive until the process ends without
destructors. The destructor of DDP waits for Gloo's thread, and that thread may wait for the
interpreter's lock, which it needs to drop the tensors of the last collective."""


def _run(rank: int, world: int, port: int, program: Path, args: tuple[str, ...], folder: Path):
    rendezvous = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": world}
    for name, value in {**rendezvous, "RANK": rank, "LOCAL_RANK": rank}.items():
        os.environ[name] = str(value)
    for stream in (1, 2):
        os.dup2(os.open(folder / f"{stream}-{rank}", os.O_CREAT | os.O_WRONLY), stream)
    torch.set_num_threads(1)
    sys.argv = [str(program), *args]
    sys.path.insert(0, str(program.parent))
    _FINAL_GLOBALS.append(runpy.run_path(str(program), run_name="__main__"))


def run_program(world: int, program: Path, *args: str, folder: Path) -> str:
    """Return what the ranks print, in the order of ranks.

    Args:
        folder: an existing folder, for the output of each rank.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    context = fork_server_context()
    ranks = [
        context.Process(target=_run, args=(rank, world, port, program, args, folder))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(300)
        exit_codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    printed, errors = (
        [(folder / f"{stream}-{rank}").read_text() for rank in range(world)] for stream in (1, 2)
    )
    assert exit_codes == [0] * world, (exit_codes, *errors)
    return "".join(printed)


def run_torchrun(world: int, program: Path, *args: str) -> str:
    """Return what the ranks print under torchrun itself."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world))
    return run_python(*torchrun, program, *args, OMP_NUM_THREADS="1")
