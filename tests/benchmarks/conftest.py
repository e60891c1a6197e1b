"""Let tests import ``benchmarks`` from any working directory; a setting without a GPU."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch

from benchmarks import common, report
from benchmarks.floor import Floor
from benchmarks.recipes import RECIPES


def one_sample(fn):
    """A timer that calls the function once."""
    return common.time_wall(fn, warm_up=0, samples=1, calls=1)


@pytest.fixture
def setting():
    """All recipes on the CPU, a single sample of each time, and the floor of tiny tensors."""
    device = torch.device("cpu")
    floor = Floor(device, one_sample, copy_bytes=2**16, ceiling_size=64)
    return report.Setting(
        device, time=one_sample, wall=one_sample, floor=floor, recipes=list(RECIPES)
    )
