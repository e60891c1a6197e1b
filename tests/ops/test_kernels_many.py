"""Tables of matrices: when one is kept, found and dropped; no GPU is needed."""

from collections import OrderedDict
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from float8lab.ops.kernels import cast_many as many

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ROWS = ((4096, 8192, 512, 1024, 5, 7, 7, 1, 1, 0), (64, 128, 192, 256, 2, 3, 3, 1, 1, 9))


@pytest.fixture(autouse=True)
def _no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "_RECENT", OrderedDict())
    monkeypatch.setattr(many, "_OF_GRAPHS", {})


def key_of_size(i: int) -> Any:
    return CPU, ((i, *ROWS[0][1:]),)


def test_every_entry_is_part_of_the_key_of_a_table() -> None:
    table = many._table_of((CPU, ROWS))
    assert table is not None
    assert tuple(map(tuple, table.tolist())) == ROWS
    assert many._table_of((CPU, tuple(tuple(row) for row in table.tolist()))) is table
    for row in range(len(ROWS)):
        for column in range(len(ROWS[0])):
            changed = [list(entries) for entries in ROWS]
            changed[row][column] += 1
            changed_table = many._table_of((CPU, tuple(map(tuple, changed))))
            assert changed_table is not None
            assert changed_table.tolist() == changed


def test_the_least_recently_used_table_is_dropped_first() -> None:
    first, second = many._table_of(key_of_size(0)), many._table_of(key_of_size(1))
    for i in range(2, many._MOST_TABLES):
        many._table_of(key_of_size(i))
    assert many._table_of(key_of_size(0)) is first
    many._table_of(key_of_size(many._MOST_TABLES))
    assert len(many._RECENT) == many._MOST_TABLES
    assert many._table_of(key_of_size(0)) is first
    assert many._table_of(key_of_size(1)) is not second


def test_a_graph_capture_creates_no_table_and_keeps_the_tables_it_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = (GPU, ROWS)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert many._table_of(key) is None
    table = many._RECENT[key] = torch.tensor(ROWS)
    assert many._table_of(key) is table
    for i in range(many._MOST_TABLES + 1):
        many._table_of(key_of_size(i))
    assert many._table_of(key) is table
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert many._table_of(key) is table
