"""The way of a call through the package, and the package, grow no longer than they are."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks import path

# What is there today. Lower a number with what it counts, never raise it without a reason; the
# goals are in ``benchmarks/path.py``. They rose once, by 8 to 36, when what is cast, saved and sent
# became values with functions of their own, and by 3 to 6 more when scales came from objects:
# a call takes some 0.1 us. Each cast of the reference asks once how scales of blocks are stored,
# and is one function for matrices, batches and groups, whose last arguments have names. A
# weight that FSDP2 gathers goes through the one function that casts. The backward of a weight that
# is a parameter casts it again, by 9 functions of the reference more than a transpose takes. One
# function makes the factors of each delayed slot, in forward and in backward. The shape of a
# Float8Tensor is read by a function, since torch.export watches attributes that are read by name.
CALLS = {
    "Linear, delayed, forward": 48,
    "Linear, delayed, backward": 44,
    "Linear, current, forward": 42,
    "Linear, current, backward": 43,
    "Linear, rowwise, forward": 46,
    "Linear, rowwise, backward": 47,
    "Linear, block, forward": 48,
    "Linear, block, backward": 51,
    "Linear, mx, forward": 45,
    "Linear, mx, backward": 48,
    "converted nn.Linear, delayed, forward": 62,
    "convert_to_float8 of two layers": 111,
    "LayerNormMLP, forward": 107,
    "LayerNormMLP, backward": 130,
    "F.linear of Float8Tensors": 21,
    "FSDP2 of two layers, forward": 134,
    "FSDP2, gathering a weight": 31,
}
FILES = 19  # with nn/layer.py, the base of all modules of GEMMs
# Experts have seven of these: casts of groups and their products, which take the ends of the groups
# from the device; the rows of a permutation, both ways, and their map; routing, both ways. Tensor
# parallelism has three: products beside what they gather and scatter, and those into given memory.
OPS, CASTS = 25, 5


@pytest.fixture(scope="module")
def walks():
    return dict(path.walks())


def test_ways_are_no_longer_than_they_were(walks):
    assert walks.keys() == CALLS.keys()
    assert {n: way.calls for n, way in walks.items() if way.calls > CALLS[n]} == {}
    assert max(way.files for way in walks.values()) <= FILES
    assert all(way.calls >= way.functions >= way.files >= 1 for way in walks.values())


def _tables() -> dict[str, list[str]]:
    """The tables of "How a step runs": a way, and its functions in order, as ``Length.order``."""
    page = Path(__file__).parents[2].joinpath("CONTRIBUTING.md").read_text(encoding="utf-8")
    tables: dict[str, list[str]] = {}
    for line in page.partition("\n## How a step runs\n")[2].partition("\n## ")[0].splitlines():
        if way := re.match(r"\| ([^`|]+) \| functions \|", line):
            rows = tables.setdefault(way[1], [])
        elif row := re.match(r"\| `(\S+\.py)` \| ([^|]+) \|", line):
            rows += [f"{row[1]}: {name}" for name in re.findall(r"`(\w+)`", row[2])]
    return tables


def test_the_page_names_the_functions_that_run(walks):
    tables = _tables()
    assert {"Linear, delayed, forward", "FSDP2, gathering a weight"} <= tables.keys()
    for way, functions in tables.items():
        assert tuple(functions) == walks[way].order, way


def test_ops_are_no_more_than_they_were():
    ops, casts = path.ops()
    assert casts <= CASTS
    assert casts < ops <= OPS


def test_main_prints_each_goal(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["path.py"])
    monkeypatch.setattr(
        path, "walks", lambda: iter([(next(iter(path.GOALS)), path.Length(3, 2, 1))])
    )
    path.main()
    printed = capsys.readouterr().out
    for name in ("Linear, delayed, forward", "registered ops", "lines of its core"):
        assert name in printed


def test_a_function_counts_once_a_call_and_comprehensions_do_not(monkeypatch):
    monkeypatch.setattr(path, "PACKAGE", __file__)

    def twice() -> list[int]:
        return [one() for _ in range(2)]

    def one() -> int:
        return 1

    with path.count() as counted:
        twice()
    assert counted()[:3] == (3, 2, 1)
