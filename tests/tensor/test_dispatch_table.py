"""Ops on Float8Tensors agree with those on dequantized tensors, and the page says how they run."""

import functools

import pytest

from tests.tensor import dispatch_table
from tests.tensor.dispatch_table import DEQUANTIZE, ERROR, GRANULARITIES, NATIVE, OPS, REQUANTIZE


@functools.cache
def rows():
    return list(dispatch_table.outcomes())


@pytest.mark.filterwarnings("ignore")  # torch warns about some of the ops
def test_every_op_agrees_with_dequantized_tensors_and_the_page_is_up_to_date():
    page = dispatch_table.PAGE.read_text()
    text = dispatch_table.render(rows())  # raises for a result that differs
    if f"with torch {dispatch_table.TORCH} " in page:
        assert text == page, "run python -m tests.tensor.dispatch_table"


@pytest.mark.filterwarnings("ignore")
def test_common_ops_have_the_kind_that_users_expect():
    kinds = {(e, n): o.kind for _, e, row in rows() for n, o in row.items()}
    assert len(kinds) > 650 * len(GRANULARITIES)
    error_keys = [key for key, kind in kinds.items() if kind == ERROR]
    assert len({expression for expression, _ in error_keys}) < 12
    for name in GRANULARITIES:
        for expression in ("x.t()", "x[100:150]", "x.view(-1)", "torch.cat([x, y])", "x[i]"):
            assert kinds[expression, name] == NATIVE
        for expression in ("x.mul_(2)", "x[0].zero_()", "step(torch.optim.AdamW, x, p)"):
            assert kinds[expression, name] == REQUANTIZE
        assert kinds["x.sin()", name] == DEQUANTIZE
    assert all(kind != DEQUANTIZE for (e, _), kind in kinds.items() if e in OPS["Views"])
