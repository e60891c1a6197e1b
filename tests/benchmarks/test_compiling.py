"""The benchmark of the time to compile, on one block."""

import pytest

from benchmarks import compiling


@pytest.mark.usefixtures("fresh_dynamo")
def test_main_prints_a_row_for_plain_layers_and_for_each_recipe(capsys):
    options = ["--blocks", "1", "--backend", "eager", "--recipes", "current"]
    assert compiling.main(options) == 0
    output = capsys.readouterr().out
    assert "| layers  | whole model, s | block by block, s |" in output
    assert "| plain   |" in output
    assert "| current |" in output
