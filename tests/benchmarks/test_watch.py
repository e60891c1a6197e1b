"""The benchmark of watch on a CPU and a tiny model."""

import pytest

from benchmarks.watch import RECIPES, main


@pytest.mark.parametrize("recipe", RECIPES)
def test_watch(recipe, capsys):
    sizes = ["--layers", "1", "--dim", "32", "--context", "16", "--repeats", "1"]
    main(["--device", "cpu", "--recipe", recipe, *sizes])
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert f"{recipe}, cpu" in head
    assert [row.split()[0] for row in rows] == ["off", "between", "watched", "every=100"]
    assert all(float(row.split()[1]) > 0 for row in rows[:-1])
