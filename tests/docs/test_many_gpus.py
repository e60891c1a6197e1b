"""docs/many_gpus.md: the fastest predicted meshes, and the table of what equals one GPU."""

import re
from pathlib import Path

import pytest

from float8lab.inspect.scale.mesh import parse
from float8lab.inspect.scale.predict import Job
from float8lab.inspect.scale.search import RECIPES, fastest
from float8lab.inspect.scale.sizes import model_size
from tests.distributed import equality

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "many_gpus.md"
ROWS = re.findall(r"^\| `([\w-]+)` \| (\d+) \| `([\w=,]+)` \|$", PAGE.read_text(), re.M)


@pytest.mark.parametrize(("model", "gpus", "mesh"), ROWS, ids=lambda value: value)
def test_each_mesh_of_the_page_is_the_fastest(model: str, gpus: str, mesh: str) -> None:
    steps = fastest(model_size(model), RECIPES["current"], Job(batch=int(gpus)), int(gpus))
    assert next(step.mesh for step in steps if step.mesh.cp == 1) == parse(mesh, int(gpus))


def test_the_page_has_five_meshes() -> None:
    assert len(ROWS) == 5


def test_every_row_of_the_equality_table_is_measured() -> None:
    """The tests of ranks compare each row with a measurement, once each."""
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "distributed").glob("test_*.py"))
    measured = re.findall(r'assert_row\(ranks, "([^"]+)"|^ +name = "(data, [^"]+)"', tests, re.M)
    rows = equality.page_rows()
    assert sorted("".join(pair) for pair in measured) == sorted(rows)
    assert all(len(cells) == len(equality.RECIPES) for cells in rows.values())
