"""The benchmark of ``watch`` on a CPU with a tiny model."""

import pytest

from benchmarks.watch import RECIPES, main


@pytest.mark.parametrize("recipe", RECIPES)
def test_main_prints_the_time_of_each_kind_of_step(recipe, capsys):
    sizes = ["--layers", "1", "--dim", "32", "--context", "16", "--repeats", "1"]
    main(["--device", "cpu", "--recipe", recipe, *sizes])
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert f"{recipe}, cpu" in title
    assert [row.split()[0] for row in rows] == ["off", "between", "watched", "every=100"]
    assert all(float(row.split()[1]) > 0 for row in rows[:-1])
