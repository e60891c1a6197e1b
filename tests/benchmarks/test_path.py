"""A call enters no more functions, and the package has no more ops, than the limits here."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks import path

# Limits at today's numbers. Lower a limit when its number falls; raise it only with a reason. The
# goals are in ``benchmarks/path.py``. The numbers rose once, by 8 to 36, when cast, saved and sent
# data became values with functions of their own, and by 3 to 6 more when scales came from objects:
# a call takes some 0.1 us. Each cast of the reference asks once how the scales of blocks are
# stored, and is one function for matrices, batches and groups, whose last arguments have names. A
# weight that FSDP2 gathers goes through the one function that casts. The backward of a weight that
# is a parameter casts it again, by 9 functions of the reference more than a transpose takes. One
# function computes the factors of each delayed slot, in forward and in backward. A function reads
# the shape of a Float8Tensor, since torch.export watches attributes that are read by name.
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
# Experts have seven of these: casts of groups and their GEMMs, which read the offsets of the groups
# from the device; the rows of a permutation, both ways, and their map; and routing, both ways.
# Tensor parallelism has three: GEMMs overlapped with gathering and with scattering, and GEMMs into
# given memory.
OPS, CASTS = 25, 5


@pytest.fixture(scope="module")
def call_lengths():
    return dict(path.walks())


def test_calls_enter_no_more_functions_than_before(call_lengths):
    assert call_lengths.keys() == CALLS.keys()
    assert {n: length.calls for n, length in call_lengths.items() if length.calls > CALLS[n]} == {}
    assert max(length.files for length in call_lengths.values()) <= FILES
    assert all(
        length.calls >= length.functions >= length.files >= 1 for length in call_lengths.values()
    )


def _tables_of_the_page() -> dict[str, list[str]]:
    """The tables of "How a step runs": the functions of each call in order, as ``Length.order``."""
    page = Path(__file__).parents[2].joinpath("CONTRIBUTING.md").read_text(encoding="utf-8")
    tables: dict[str, list[str]] = {}
    for line in page.partition("\n## How a step runs\n")[2].partition("\n## ")[0].splitlines():
        if call := re.match(r"\| ([^`|]+) \| functions \|", line):
            rows = tables.setdefault(call[1], [])
        elif row := re.match(r"\| `(\S+\.py)` \| ([^|]+) \|", line):
            rows += [f"{row[1]}: {name}" for name in re.findall(r"`(\w+)`", row[2])]
    return tables


def test_contributing_lists_the_functions_that_run(call_lengths):
    tables = _tables_of_the_page()
    assert {"Linear, delayed, forward", "FSDP2, gathering a weight"} <= tables.keys()
    for call, functions in tables.items():
        assert tuple(functions) == call_lengths[call].order, call


def test_there_are_no_more_ops_than_before():
    ops, casts = path.ops()
    assert casts <= CASTS
    assert casts < ops <= OPS


def test_main_prints_each_goal(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["path.py"])
    monkeypatch.setattr(
        path, "walks", lambda: iter([(next(iter(path.GOALS)), path.Length(3, 2, 1))])
    )
    path.main()
    output = capsys.readouterr().out
    for name in ("Linear, delayed, forward", "registered ops", "lines of its core"):
        assert name in output


def test_count_counts_each_call_but_no_comprehensions(monkeypatch):
    monkeypatch.setattr(path, "PACKAGE", __file__)

    def call_twice() -> list[int]:
        return [called() for _ in range(2)]

    def called() -> int:
        return 1

    with path.count() as counted:
        call_twice()
    assert counted()[:3] == (3, 2, 1)
