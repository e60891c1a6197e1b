"""`float8lab selfcheck`: that it covers every op, finds what is wrong, and says so."""

import importlib
import json
import pkgutil
import re
import sys

import pytest
import torch
from expecttest import assert_expected_inline

import float8lab
from float8lab import __main__ as command
from float8lab import ops
from float8lab.formats import E4M3, E5M2
from float8lab.inspect.selfcheck import CHECKS, Cases, Check, casts, gemms, selfcheck
from float8lab.inspect.selfcheck import running as module
from tests.processes import run_python
from tests.recorder import Ops

CPU = torch.device("cpu")


def named(*names: str) -> list[Check]:
    """Those checks."""
    found = [check for check in CHECKS if check.name in names]
    assert len(found) == len(names)
    return found


@pytest.fixture
def only(monkeypatch):
    """Let ``selfcheck`` run these checks alone."""

    def select(*names):
        monkeypatch.setattr(module, "CHECKS", named(*names))

    return select


def test_every_op_is_in_a_check():
    """A new op, in ``ops.__all__`` or in the ``__all__`` of a file of ops alone, needs a check."""
    modules = [one.name for one in pkgutil.iter_modules(ops.__path__) if not one.ispkg]
    files = [importlib.import_module(f"float8lab.ops.{name}") for name in modules]
    defined = {name for file in (ops, *files) for name in file.__all__ if name.endswith("_op")}
    assert {name for check in CHECKS for name in check.ops} == {*defined, "scaled_mm_into"}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_calls_its_ops_and_passes(check):
    """On a GPU ``test_the_whole_command`` runs them all, so that each kernel is compiled once."""
    with Ops() as called, torch.no_grad():
        rows = module._rows_of(check, CPU)
    registered = [getattr(ops, name) for name in check.ops if name.endswith("_op")]
    assert {op.overload for op in registered} <= set(called.seen)
    assert [row.failures for row in rows if row.status == "failed"] == []
    assert sum(row.cases for row in rows) > 4


def wrong_byte(function, skips_matrices):
    """The last element of the first output is another, unless a matrix itself is cast."""

    def changed(*args, **kwargs):
        outputs = function(*args, **kwargs)
        if skips_matrices and args[0] == "":
            return outputs
        outputs = outputs if isinstance(outputs, torch.Tensor) else list(outputs)
        first = outputs
        if not isinstance(outputs, torch.Tensor):
            first = next(one for one in outputs if one is not None)
        first = first.clone() if isinstance(outputs, torch.Tensor) else first
        if first.numel():
            flat = first.view(torch.uint8) if first.element_size() == 1 else first
            flat[(-1,) * flat.ndim] = flat[(-1,) * flat.ndim] * 2 + 3
        return first if isinstance(outputs, torch.Tensor) else outputs

    return changed


RETURNING = [
    (check.name, name)
    for check in CHECKS
    for name in check.ops
    # scaled_mm_op leaves out a block in a test below, which fails the same check.
    if not name.endswith(("many_op", "update_scales_op", "_into", "scaled_mm_op"))
]


@pytest.mark.parametrize(("check", "op"), RETURNING, ids=lambda name: name)
def test_one_wrong_element_fails_the_check(check, op, monkeypatch):
    monkeypatch.setattr(ops, op, wrong_byte(getattr(ops, op), named(check)[0].group == "prologues"))
    rows = module._rows_of(named(check)[0], CPU)
    assert "failed" in {row.status for row in rows}


@pytest.mark.parametrize("op", ["cast_many_op", "update_scales_op", "scaled_mm_into"])
def test_an_op_that_writes_nothing_fails_the_check(op, monkeypatch):
    monkeypatch.setattr(ops, op, lambda *args: None)
    (check,) = [check for check in CHECKS if op in check.ops]
    assert {row.status for row in module._rows_of(check, CPU)} == {"failed"}


def test_a_product_that_leaves_out_the_last_of_1001_blocks_fails(monkeypatch):
    right = ops.scaled_mm_op

    def short(a, a_scale, a_block, b, *rest):
        if a.shape[1] == 1001 * 128:
            a = a.clone()
            a.view(torch.uint8)[:, 1000 * 128 :] = 0
        return right(a, a_scale, a_block, b, *rest)

    monkeypatch.setattr(ops, "scaled_mm_op", short)
    some = gemms._BLOCKS[::2]
    monkeypatch.setattr(gemms, "_BLOCKS", some)
    (row,) = module._rows_of(named("scaled_mm")[0], CPU)
    assert len(row.failures) == len(some) ** 2 * 2  # pairs of blocks, output dtypes
    assert all("1001 blocks" in failure for failure in row.failures)


def test_the_formats_are_defined_as_torch_has_them():
    """Torch's conversions and the definition, written twice, agree."""
    every = torch.arange(256, dtype=torch.uint8)
    for fp8_dtype in (E4M3, E5M2):
        values = every.view(fp8_dtype).double()
        torch.testing.assert_close(
            casts.values_of(fp8_dtype), values, rtol=0, atol=0, equal_nan=True
        )
        finite = values[values.isfinite()].float()
        assert torch.equal(casts._nearest(finite, finite, fp8_dtype).float(), finite)


def larger_amax(*args):
    """The op, whose results are wrong."""
    return ops.reference.amax_of(*args) + 1


def test_report_of_a_failure(only, monkeypatch):
    only("amax", "rotate")
    monkeypatch.setattr(ops, "amax_op", larger_amax)
    report = selfcheck("cpu")
    assert not report.passed
    text = re.sub(r"in \d+\.\d s", "in (masked) s", str(report))
    text = re.sub(r"got .* not .*", "got (masked)", text)
    assert_expected_inline(
        text,
        """\
float8lab selfcheck on cpu: FAILED, 78 cases in (masked) s
1 passed, 0 emulated, 0 unsupported, 1 failed

casts
  failed       amax      54 cases  bit for bit
               against the reference on the CPU, bit for bit
               - 272x1040 bfloat16 contiguous align 16 tensor: 1 of 1 elements differ; at (0, 0) got (masked)
               - 63x130 float32 transposed align 1 tensor: 1 of 1 elements differ; at (0, 0) got (masked)
               - 63x130 float16 every second align 16 tensor: 1 of 1 elements differ; at (0, 0) got (masked)
               - 63x130 bfloat16 misaligned align 16 tensor: 1 of 1 elements differ; at (0, 0) got (masked)
               - 1x1 float32 contiguous align 1 tensor: 1 of 1 elements differ; at (0, 0) got (masked)
               - 0x64 bfloat16 contiguous align 16 tensor: 1 of 1 elements differ; at (0, 0) got (masked)
               - 33x0 float32 contiguous align 1 tensor: 1 of 1 elements differ; at (0, 0) got (masked)
               - zeros tensor: 1 of 1 elements differ; at (0, 0) got (masked)
               - and 34 more

attention
  passed       rotate    24 cases  bit for bit""",  # noqa: E501
    )


def test_report_when_all_is_well(only):
    only("transpose", "fp8_attention")
    for verbose in (False, True):
        report = selfcheck("cpu", verbose=verbose)
        assert report.passed
    text = re.sub(r"in \d+\.\d s", "in (masked) s", str(report))
    text = re.sub(r"[\d.]+ of the bound", "(masked) of the bound", text)
    assert_expected_inline(
        text,
        """\
float8lab selfcheck on cpu: passed, 56 cases in (masked) s
1 passed, 1 emulated, 0 unsupported, 0 failed

casts
  passed       transpose        38 cases  bit for bit
               against the reference on the CPU, bit for bit

attention
  emulated     fp8_attention    18 cases  (masked) of the bound
               a CPU has no FP8 GEMM; it multiplies in float32
               against float64; error of probabilities rounded to e4m3, and of scores""",
    )


def test_an_exception_is_a_failure_of_its_check_alone(only, monkeypatch):
    only("amax", "rotate")

    def broken(*args):
        raise RuntimeError("no kernel\nimage")

    monkeypatch.setattr(ops, "amax_op", broken)
    rows = selfcheck("cpu").rows
    assert [(row.name, row.status) for row in rows] == [("amax", "failed"), ("rotate", "passed")]
    assert rows[0].failures[0].endswith("RuntimeError: no kernel image")


def test_an_exception_for_lack_of_hardware_is_no_failure(only, monkeypatch):
    only("amax")
    monkeypatch.setattr(ops, "amax_op", lambda *args: 1 / 0)
    monkeypatch.setattr(module, "why_casts_are_missing", lambda device: "this GPU is SM 8.0")
    report = selfcheck("cpu")
    assert report.passed
    assert [(row.status, row.reason) for row in report.rows] == [
        ("unsupported", "this GPU is SM 8.0")
    ]


def test_a_wrong_result_is_a_failure_whatever_is_missing(only, monkeypatch):
    only("amax")
    monkeypatch.setattr(ops, "amax_op", larger_amax)
    monkeypatch.setattr(module, "why_casts_are_missing", lambda device: "this GPU is SM 8.0")
    assert not selfcheck("cpu").passed


def test_comparisons():
    cases = Cases(CPU)
    cases.begin("one")
    nan = torch.tensor([torch.nan, torch.inf, 1.0])
    cases.same(nan, nan.clone())
    cases.within(nan, nan.double(), 0.0)
    assert cases.tallies[""].failures == []
    cases.same(nan, nan + 1)
    cases.same(nan, nan.double())
    cases.same(torch.zeros(2, 3), torch.zeros(3, 2).t())
    cases.within(torch.tensor([torch.nan]), torch.tensor([1.0]).double(), 9.0)
    cases.within(torch.tensor([1.0]), torch.tensor([torch.nan]).double(), 9.0)
    cases.within(torch.tensor([torch.inf]), torch.tensor([1.0]).double(), 9.0)
    cases.within(torch.tensor([1.5]), torch.tensor([1.0]).double(), 0.4)
    cases.within(torch.tensor([1.0, 1.0]), torch.tensor([1.0]).double(), 0.4)
    assert len(cases.tallies[""].failures) == 8


def test_it_leaves_random_numbers_and_defaults_alone(only):
    only("rotate")
    torch.manual_seed(3)
    want = torch.randn(2)
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        assert selfcheck("cpu").passed
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.randn(2), want)


def test_no_gpu_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch sees no CUDA GPU"):
        selfcheck("cuda")
    with pytest.raises(SystemExit) as stop:
        command.main(["selfcheck", "--device", "cuda"])
    assert stop.value.code == 2


def test_exit_status_and_json(only, monkeypatch, capsys):
    only("amax", "scaled_bmm")
    assert command.main(["selfcheck", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["device"]) == (True, "cpu")
    assert [(row["name"], row["status"]) for row in found["rows"]] == [
        ("amax", "passed"),
        ("scaled_bmm", "emulated"),
    ]
    monkeypatch.setattr(ops, "amax_op", larger_amax)
    assert command.main(["selfcheck", "--json", "--device", "cpu"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"]
    assert found["rows"][0]["failures"]
    assert command.main(["selfcheck", "--device", "cpu"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(("terminal", "no_color"), [(True, ""), (True, "1"), (False, "")])
def test_colours_are_for_terminals(terminal, no_color, only, monkeypatch, capsys):
    pytest.importorskip("rich")
    only("amax")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm-256color")
    command.main(["selfcheck", "--device", "cpu"])
    coloured = "\033[32mpassed\033[0m" in capsys.readouterr().out
    assert coloured == (terminal and not no_color)


def test_the_environment_in_json(capsys):
    assert command.main(["env", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("arguments", "status"), [([], 2), (["selfcheck", "--device", "tpu"], 2), (["--help"], 0)]
)
def test_arguments_of_the_command(arguments, status, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == status
    assert status or "selfcheck" in capsys.readouterr().out


@pytest.mark.slow
def test_the_whole_command(device):
    printed = run_python("-m", "float8lab", "selfcheck", "--json", "--device", device.type)
    report = json.loads(printed)
    assert report["passed"]
    assert {*report["seconds"]} == {check.name for check in CHECKS}


def test_it_is_reached_from_the_top():
    """That ``import float8lab`` does not load it ``test_structure.py`` asserts."""
    assert "selfcheck" in float8lab.__all__
    assert "selfcheck" in dir(float8lab)
    assert float8lab.selfcheck is selfcheck
    with pytest.raises(AttributeError, match="no attribute 'selfchek'"):
        float8lab.selfchek  # noqa: B018


# Several programs at once.


def test_programs_share_the_checks_and_one_that_dies_fails_its_own_alone(only, monkeypatch):
    only("transpose", "rotate", "amax")
    dies = "if name == 'rotate': sys.exit('out of luck')"
    code = module._CODE.replace("    rows, seconds", f"    {dies}\n    rows, seconds")
    monkeypatch.setattr(module, "_CODE", code)
    found = module._run_in_programs(CPU, 2)
    ((row,), _) = found.pop("rotate")
    assert row.status == "failed"
    assert "status 1: out of luck" in row.failures[0]
    assert {*found} == {"transpose", "amax"}
    expected = module.run_checks(CPU, [*found])
    assert {name: rows for name, (rows, _) in found.items()} == {
        name: rows for name, (rows, _) in expected.items()
    }
