"""The notebook runs from top to bottom and shows what it says."""

import ast
import contextlib
import copy
import io
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "inspect.ipynb"


@pytest.fixture(scope="module")
def notebook():
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    return nbformat.read(NOTEBOOK, as_version=4)


def run_in_a_kernel(notebook):
    """Another process, as a reader of the notebook has it; the checkout need not be installed."""
    nbclient = pytest.importorskip("nbclient")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
        patch.setenv("PYTHONWARNINGS", "ignore")  # of ipykernel; those of float8lab are shown below
        patch.setenv("OMP_NUM_THREADS", "1")  # its tensors are small, and other tests run beside it
        client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")
        client.execute(cwd=str(NOTEBOOK.parent))


def run_here(notebook):
    """What a kernel does but for its displays: the value of a cell's last line is its output."""
    v4, names = pytest.importorskip("nbformat").v4, {"__name__": "__main__"}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        lines = ast.parse(cell.source).body
        shows = isinstance(lines[-1], ast.Expr) and not cell.source.endswith(";")
        last = ast.Expression(lines.pop().value if shows else ast.Constant(None))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(ast.Module(lines, []), "cell", "exec"), names)
            value = eval(compile(ast.fix_missing_locations(last), "cell", "eval"), names)
        if printed.getvalue():
            cell.outputs.append(v4.new_output("stream", name="stdout", text=printed.getvalue()))
        if value is not None:
            html = value._repr_html_() if hasattr(value, "_repr_html_") else None
            data = {"text/plain": repr(value), "text/html": html}
            if hasattr(value, "_repr_mimebundle_"):
                data |= value._repr_mimebundle_([], [])
            data["image/png"] = "" if hasattr(value, "savefig") else None
            data = {kind: shown for kind, shown in data.items() if shown is not None}
            cell.outputs.append(v4.new_output("execute_result", data=data))


@pytest.fixture(
    scope="module",
    params=[run_here, pytest.param(run_in_a_kernel, marks=pytest.mark.slow)],
    ids=["here", "kernel"],
)
def executed(request, notebook):
    """A copy with outputs; a cell that raises is an error that names it."""
    for name in ("ipykernel", "matplotlib", "plotly", "rich"):
        pytest.importorskip(name)
    executed = copy.deepcopy(notebook)
    request.param(executed)
    return executed


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
    assert "data:image/png;base64," in text
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
    text = shown(executed, "float8lab.to_high_precision")[0]
    first = next(line for line in text.splitlines() if "fprop" in line or "wgrad" in line)
    assert first.split()[:2] == ["2", "fprop"]
    assert shown(executed, "overrides = ")[0].startswith("{'2': ")


def test_advice_and_memory(executed):
    assert "modelled for an H200" in shown(executed, "with torch.device")[0]
    assert shown(executed, "print(inspect.memory_report")[0].splitlines()[-1].split()[0] == "total"
