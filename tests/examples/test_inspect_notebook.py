"""The notebook runs from top to bottom and shows what its text says."""

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
    """Run in another process, as a reader does; float8lab need not be installed."""
    nbclient = pytest.importorskip("nbclient")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
        # For warnings of ipykernel; those of float8lab are shown by cells.
        patch.setenv("PYTHONWARNINGS", "ignore")
        # Its tensors are small, and other tests run at the same time.
        patch.setenv("OMP_NUM_THREADS", "1")
        client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")
        client.execute(cwd=str(NOTEBOOK.parent))


def run_in_this_process(notebook):
    """Run as a kernel does, except for displays: the value of a cell's last line is its output."""
    v4, variables = pytest.importorskip("nbformat").v4, {"__name__": "__main__"}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        lines = ast.parse(cell.source).body
        has_value = isinstance(lines[-1], ast.Expr) and not cell.source.endswith(";")
        last_expression = ast.Expression(lines.pop().value if has_value else ast.Constant(None))
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(ast.Module(lines, []), "cell", "exec"), variables)
            value = eval(
                compile(ast.fix_missing_locations(last_expression), "cell", "eval"), variables
            )
        if output.getvalue():
            cell.outputs.append(v4.new_output("stream", name="stdout", text=output.getvalue()))
        if value is not None:
            html = value._repr_html_() if hasattr(value, "_repr_html_") else None
            data = {"text/plain": repr(value), "text/html": html}
            if hasattr(value, "_repr_mimebundle_"):
                data |= value._repr_mimebundle_([], [])
            data["image/png"] = "" if hasattr(value, "savefig") else None
            data = {kind: content for kind, content in data.items() if content is not None}
            cell.outputs.append(v4.new_output("execute_result", data=data))


@pytest.fixture(
    scope="module",
    params=[run_in_this_process, pytest.param(run_in_a_kernel, marks=pytest.mark.slow)],
    ids=["this process", "kernel"],
)
def executed(request, notebook):
    """A copy with outputs; the error of a cell that raises names the cell."""
    for name in ("ipykernel", "matplotlib", "plotly", "rich"):
        pytest.importorskip(name)
    executed = copy.deepcopy(notebook)
    request.param(executed)
    return executed


def shown_by_cell(notebook, start):
    """What the cell that begins with ``start`` shows: its text, and the kinds of its outputs."""
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
            shown_by_cell(executed, cell.source)


def test_tensor_cells_show_text_pictures_and_errors(executed):
    text, kinds = shown_by_cell(executed, "x = torch.randn")
    assert "Float8Tensor(" in text
    assert "data:image/png;base64," in text
    assert "text/html" in kinds
    tensor, blocks = shown_by_cell(executed, "blocks = ")[0].splitlines()
    error, blockwise_error = (float(line.split()[-1].rstrip("%")) for line in (tensor, blocks))
    assert error > 3 * blockwise_error
    assert "image/png" in shown_by_cell(executed, "blocks.plot()")[1]


def test_watch_cells_show_the_table_and_the_worst_operand(executed):
    assert "3 of 3 linear layers in FP8" in shown_by_cell(executed, "model = ")[0]
    table = shown_by_cell(executed, "optimizer = ")[0]
    assert "step 12, loss" in table
    assert "staleness +" in shown_by_cell(executed, "worst = ")[0]
    assert shown_by_cell(executed, "worst = ")[0].startswith("12 0 x ")
    assert "report.html in a browser" in shown_by_cell(executed, "page = ")[0]


def test_the_find_nan_cell_names_the_module(executed):
    assert "1 (Root), forward, step 0" in shown_by_cell(executed, "class Root")[0]


def test_the_sensitivity_cells_show_the_worst_gemm_and_overrides(executed):
    text = shown_by_cell(executed, "float8lab.to_high_precision")[0]
    worst_row = next(line for line in text.splitlines() if "fprop" in line or "wgrad" in line)
    assert worst_row.split()[:2] == ["2", "fprop"]
    assert shown_by_cell(executed, "overrides = ")[0].startswith("{'2': ")


def test_advice_and_memory_cells_show_their_reports(executed):
    assert "modelled for an H200" in shown_by_cell(executed, "with torch.device")[0]
    assert (
        shown_by_cell(executed, "print(inspect.memory_report")[0].splitlines()[-1].split()[0]
        == "total"
    )
