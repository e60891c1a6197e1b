"""The Lightning example trains, and compares its runs."""

import re
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecation warnings of Lightning and its dependencies
    pytest.importorskip("lightning")
    import train_lightning


@pytest.mark.filterwarnings("ignore")
def test_example_trains_and_prints_the_savings(capsys: pytest.CaptureFixture[str]):
    assert train_lightning.main(["--steps", "3", "--batch", "1", "--recipe", "delayed"]) == 0
    output = capsys.readouterr().out
    assert "16 of 17 linear layers in FP8" in output
    losses = [float(loss) for loss in re.findall(r"(?:bf16-mixed|FP8) (\d\.\d+)", output)]
    assert len(losses) == 2
    assert abs(losses[0] - losses[1]) < 0.1 * losses[0]
    rows = {
        line.split("  ")[0]: re.findall(r"([\d.]+) [kM]B", line) for line in output.splitlines()
    }
    assert rows["weights"][0] == rows["weights"][1] == "3.3"
    assert rows["optimizer"][0] == rows["optimizer"][1] == "6.7"
    bf16, fp8 = map(float, rows["saved for backward"])
    assert fp8 < 0.95 * bf16
    assert "time a step" in rows
