"""The notebook runs from top to bottom and shows what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "inspect.ipynb"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def notebook():
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed(notebook):
    """A copy with outputs; a cell that raises is an error that names it."""
    for name in ("ipykernel", "matplotlib", "plotly", "rich"):
        pytest.importorskip(name)
    nbclient = pytest.importorskip("nbclient")
    with pytest.MonkeyPatch.context() as patch:
        # The kernel is another process, and the checkout need not be installed.
        patch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
        patch.setenv("PYTHONWARNINGS", "ignore")  # of ipykernel; those of float8lab are shown below
        patch.setenv("OMP_NUM_THREADS", "1")  # its tensors are small, and other tests run beside it
        copy = notebook.copy()
        client = nbclient.NotebookClient(copy, timeout=300, kernel_name="python3")
        client.execute(cwd=str(NOTEBOOK.parent))
    return copy


def shown(notebook, start):
    """What the cell that begins with ``start`` shows: text, and the kinds of pictures."""
    (cell,) = [c for c in notebook.cells if c.cell_type == "code" and c.source.startswith(start)]
    text, kinds = "", set()
    for output in cell.outputs:
        assert output.output_type != "error", output
        if output.output_type == "stream":
            assert output.name == "stdout", output.text
            text += output.text
        else:
            kinds |= set(output.data)
            text += output.data.get("text/html", output.data.get("text/plain", ""))
    return text, kinds


def test_notebook_is_stored_without_outputs(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 10
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


def test_no_cell_warns_or_fails(executed):
    for cell in executed.cells:
        if cell.cell_type == "code":
            shown(executed, cell.source)


def test_tensor(executed):
    text, kinds = shown(executed, "x = torch.randn")
    assert "Float8Tensor(" in text
    assert text.count("<svg") == 2
    assert "text/html" in kinds
    tensor, blocks = shown(executed, "blocks = ")[0].splitlines()
    error, smaller = (float(line.split()[-1].rstrip("%")) for line in (tensor, blocks))
    assert error > 3 * smaller
    assert "image/png" in shown(executed, "blocks.plot()")[1]


def test_watch(executed):
    assert "3 of 3 linear layers in FP8" in shown(executed, "model = ")[0]
    table = shown(executed, "optimizer = ")[0]
    assert "step 12, loss" in table
    assert "staleness +" in shown(executed, "worst = ")[0]
    assert shown(executed, "worst = ")[0].startswith("12 0 x ")
    assert "report.html in a browser" in shown(executed, "page = ")[0]


def test_find_nan(executed):
    assert "1 (Root), forward, step 0" in shown(executed, "class Root")[0]


def test_sensitivity_and_overrides(executed):
    lines = shown(executed, "float8lab.to_high_precision")[0].splitlines()
    assert lines[1].split()[:2] == ["2", "fprop"]
    assert shown(executed, "overrides = ")[0].startswith("{'2': ")


def test_advice_and_memory(executed):
    assert "modelled for an H200" in shown(executed, "with torch.device")[0]
    assert shown(executed, "print(inspect.memory_report")[0].splitlines()[-1].startswith("total")
