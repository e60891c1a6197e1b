"""The meshes that docs/many_gpus.md recommends are those that the prediction finds fastest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from float8lab.inspect.scale.mesh import parse
from float8lab.inspect.scale.predict import Job
from float8lab.inspect.scale.search import RECIPES, fastest
from float8lab.inspect.scale.sizes import model_size

PAGE = Path(__file__).resolve().parents[2] / "docs" / "many_gpus.md"
ROWS = re.findall(r"^\| `([\w-]+)` \| (\d+) \| `([\w=,]+)` \|$", PAGE.read_text(), re.M)


@pytest.mark.parametrize(("model", "gpus", "mesh"), ROWS, ids=lambda value: value)
def test_mesh_is_the_fastest(model: str, gpus: str, mesh: str) -> None:
    steps = fastest(model_size(model), RECIPES["current"], Job(batch=int(gpus)), int(gpus))
    assert next(step.mesh for step in steps if step.mesh.cp == 1) == parse(mesh, int(gpus))


def test_there_are_meshes() -> None:
    assert len(ROWS) == 5
