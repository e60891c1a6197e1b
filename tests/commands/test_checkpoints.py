"""Tests of ``python -m float8lab inspect`` and ``diff``: exit statuses, output and terminals."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

import float8lab
from float8lab import __main__ as command
from float8lab.inspect import checkpoint

ROOT = Path(__file__).parents[2]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A checkpoint with a suspicious tensor, in the working directory."""
    monkeypatch.chdir(tmp_path)
    intact = float8lab.quantize(
        torch.linspace(-1, 1, 256 * 128).reshape(256, 128), block=(128, 128)
    )
    damaged = intact.detach().clone()
    damaged.scale[1, 0] = 0
    state = {"layers.0.mlp.weight": intact, "layers.1.mlp.weight": damaged, "norm": torch.ones(4)}
    torch.save(state, "a.pt")
    return "a.pt"


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that simulates a terminal of some width as standard output."""

    def set_width(width):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)

    return set_width


def test_output_of_inspect(path, capsys):
    assert command.main(["inspect", path]) == 0
    assert_expected_inline(
        capsys.readouterr().out,
        """\
a.pt: torch.save
3 tensors, 65.6 kB
2 in FP8, 65.6 kB, as by float8lab
1 suspicious

Suspicious
  tensor               why
  layers.1.mlp.weight  1 of 2 scales are zero over codes that are not

In FP8
  tensor               shape    format     sat%  zero%  scale      amax  sub%
  layers.1.mlp.weight  256x128  block-fp8  3.6   0      0..0.0022  1     0.0061
  layers.0.mlp.weight  256x128  block-fp8  3.6   0      0.0022     1     0.0061

Others
  tensor  shape  dtype    amax  rms  zero%
  norm    4      float32  1     1    0
""",
    )


def test_exit_statuses(path, capsys):
    assert command.main(["inspect", path]) == 0
    assert command.main(["inspect", path, "--strict"]) == 1
    assert command.main(["inspect", path, "--strict", "--layer", "layers.0"]) == 0
    assert command.main(["inspect", path, "--layer", "layers.7"]) == 2
    assert command.main(["diff", path, path]) == 0
    torch.save({"norm": torch.ones(4)}, "b.pt")
    assert command.main(["diff", path, "b.pt"]) == 1
    assert command.main(["diff", path, "b.pt", "--layer", "norm"]) == 0
    torch.save({"norm": torch.ones(4, dtype=torch.bfloat16)}, "e.pt")  # equal values
    assert command.main(["diff", path, "e.pt", "--layer", "norm"]) == 0
    assert command.main(["diff", path, "c.pt"]) == 2
    assert "error: c.pt: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"], ["diff", "a"], ["inspect", "a", "--limit", "0"],
        ["inspect", "a", "--limit", "x"],
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments_exit_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        command.main(arguments)
    assert exit_info.value.code == 2


@pytest.mark.parametrize("name", ["inspect", "diff"])
def test_help_lists_the_exit_statuses(name, capsys):
    with pytest.raises(SystemExit) as exit_info:
        command.main([name, "--help"])
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Exit status: 0" in text
    assert "--layer GLOB" in text


def test_json_is_that_of_the_report(path, capsys):
    assert command.main(["inspect", path, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads(json.dumps(checkpoint(path).to_json(), allow_nan=False))
    row = content["rows"][0]
    assert row["name"] == "layers.1.mlp.weight"
    assert (row["format"], row["format_name"]) == ("e4m3 128x128 fp32", "block-fp8")
    assert content["rows"][0]["findings"][0]["kind"] == "zero-scale"
    assert command.main(["diff", path, path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is True


def test_limit_and_all_set_the_number_of_rows(tmp_path, capsys):
    torch.save({f"w{i}": torch.ones(1) for i in range(30)}, tmp_path / "a.pt")
    for options, count in (([], 20), (["--limit", "3"], 3), (["--all"], 30)):
        command.main(["inspect", str(tmp_path / "a.pt"), *options])
        output = capsys.readouterr().out
        assert len(re.findall(r"^  w\d", output, re.M)) == count
        assert (f"... and {30 - count} more" in output) == (count < 30)


def test_html_page_has_the_report_and_is_self_contained(path, capsys):
    pytest.importorskip("plotly")
    torch.save({**torch.load(path), "<script>&": torch.ones(1)}, "b.pt")
    assert command.main(["inspect", "b.pt", "--html", "out.html"]) == 0
    page = Path("out.html").read_text()
    body = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)
    assert "&lt;script&gt;&amp;" in body
    assert "1 of 2 scales are zero over codes that are not" in body
    assert not re.search(r"(?:src|href)=(?!\"data:)|url\(|@import|https?://", body)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    stats = [row.measured.stats for row in float8lab.inspect.checkpoint("b.pt").rows]
    histograms = [s.histogram("exponent") for s in stats if s is not None]
    assert data["counts"] == [[h.zero, *h.counts.tolist()] for h in histograms]
    assert command.main(["inspect", "b.pt", "--html", "none/out.html"]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    assert command.main(["inspect", "b.pt", "--html", "b.pt/out.html"]) == 2
    assert capsys.readouterr().err.endswith("b.pt/out.html: Not a directory\n")


def test_a_page_replaces_a_page_but_no_checkpoint(path, capsys):
    pytest.importorskip("plotly")
    Path("out.html").touch()
    for _ in range(2):
        assert command.main(["inspect", path, "--html", "out.html"]) == 0
    before = Path(path).read_bytes()
    capsys.readouterr()
    assert command.main(["inspect", path, "--html", path]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "path must be free or a file that begins with '<!DOC'" in output.err
    assert output.err.count("\n") == 1
    assert Path(path).read_bytes() == before


@pytest.mark.parametrize("width", [60, 80, 120])
def test_output_fits_the_width_of_a_terminal(path, capsys, terminal, width):
    pytest.importorskip("rich")
    torch.save({f"model.{'x' * 40}.{k}": v for k, v in torch.load(path).items()}, "b.pt")
    terminal(width)
    command.main(["inspect", "b.pt"])
    output = capsys.readouterr().out
    assert "\x1b[31m" in output
    lines = ESCAPE.sub("", output).splitlines()
    assert max(map(len, lines)) <= width
    assert ("in a wider terminal also" in output) == (width < 120)


def test_no_color_removes_colours(path, capsys, terminal, monkeypatch):
    pytest.importorskip("rich")
    terminal(80)
    monkeypatch.setenv("NO_COLOR", "1")
    command.main(["inspect", path])
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", capsys.readouterr().out)


def test_output_without_rich_is_plain(path, capsys, terminal, monkeypatch):
    command.main(["inspect", path])
    plain_output = capsys.readouterr().out
    terminal(80)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    command.main(["inspect", path])
    assert capsys.readouterr() == (plain_output, "")


def test_without_safetensors_the_extra_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert command.main(["inspect", str(tmp_path / "a.safetensors")]) == 2
    assert 'needs the extra "inspect"' in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_scripts_know_the_commands_and_options(shell, capsys, monkeypatch):
    """The script has the commands and options, and completes file names."""
    shtab = pytest.importorskip("shtab")
    assert command.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    words = ("float8lab", "selfcheck", "micro-batch", shtab.FILE[shell])
    assert [word for word in words if word not in script] == []
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert command.main(["completion", shell]) == 2
    assert 'completion needs the extra "completion": shtab' in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes_options_and_files(path):
    pytest.importorskip("shtab")
    script = (
        f'eval "$({sys.executable} -m float8lab completion bash)"; COMP_CWORD=2; '
        'COMP_WORDS=(float8lab inspect --str); _shtab_float8lab 2>/dev/null; echo "$COMPREPLY"; '
        'COMP_WORDS=(float8lab inspect a); _shtab_float8lab 2>/dev/null; echo "$COMPREPLY"'
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=environment
    )
    assert process.stdout.split() == ["--strict", "a.pt"]


def test_a_damaged_file_gives_no_traceback(path, capsys, monkeypatch):
    Path("bad.pt").write_bytes(Path(path).read_bytes()[:1000])
    monkeypatch.setattr(sys, "argv", ["float8lab", "inspect", "bad.pt"])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(command.__file__, run_name="__main__")
    output = capsys.readouterr()
    assert (exit_info.value.code, output.out, output.err.count("\n")) == (2, "", 1)


def test_no_progress_and_no_colours_into_a_file(path, tmp_path, capsys, monkeypatch):
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert command.main(["inspect", path]) == 0
    assert "\x1b" not in (tmp_path / "out").read_text()
    assert capsys.readouterr().err == ""


def test_a_closed_pipe_gives_no_error(path, tmp_path):
    torch.save({f"w{i}": torch.ones(1) for i in range(3000)}, "many.pt")
    process = subprocess.run(
        f"{sys.executable} -m float8lab inspect many.pt --all | head -1",
        shell=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (process.stdout, process.stderr) == ("many.pt: torch.save\n", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["inspect", "a.pt"], ["diff", "a.pt", "a.pt"], ["env"]])
def test_a_full_disk_is_an_error_in_one_line(path, capsys, monkeypatch, arguments):
    with Path("/dev/full").open("w") as full_device:
        monkeypatch.setattr(sys, "stdout", full_device)
        assert command.main(arguments) == 2
    name = f"python -m float8lab {arguments[0]}"
    message = "standard output: No space left on device"
    assert capsys.readouterr().err == f"{name}: error: {message}\n"


def test_closed_standard_output_is_an_error(path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert command.main(["inspect", path]) == 2
    assert "standard output must be open" in capsys.readouterr().err


HOSTILE_NAME = "\x1b[31mred\x1b[0m\nnext\u202e"
ESCAPED_NAME = r"\x1b[31mred\x1b[0m\nnext\u202e"


@pytest.mark.parametrize("width", [None, 80])
def test_control_characters_in_names_are_escaped(tmp_path, capsys, terminal, monkeypatch, width):
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    for file in ("a.pt", "b.pt"):
        state = {
            HOSTILE_NAME: torch.zeros(4, 4).to(torch.float8_e4m3fn),
            f"only in {file}{HOSTILE_NAME}": None,
        }
        state |= {name: torch.ones(2) for name in state if state[name] is None}
        torch.save(state, file)
    if width:
        pytest.importorskip("rich")
        terminal(width)
    for arguments in (["inspect", "a.pt", "--html", "out.html"], ["diff", "a.pt", "b.pt"]):
        assert command.main(arguments) in (0, 1)
        output = ESCAPE.sub("", capsys.readouterr().out) if width else capsys.readouterr().out
        assert "".join(ESCAPED_NAME.split()) in "".join(output.split())
        assert all(line.isprintable() for line in output.splitlines())
    assert Path("out.html").read_text().count(ESCAPED_NAME) >= 3
    for arguments in (["inspect", HOSTILE_NAME], ["inspect", "a.pt", "--layer", HOSTILE_NAME * 2]):
        assert command.main(arguments) == 2
        error = capsys.readouterr().err
        assert error[:-1].isprintable()
        assert r"\x1b[31mred\x1b[0m" in error


def test_output_to_an_ascii_stream_is_escaped(tmp_path, capsys, monkeypatch):
    torch.save({"\xe9": torch.ones(2)}, tmp_path / "a.pt")
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert command.main(["inspect", str(tmp_path / "a.pt")]) == 0
    assert r"  \xe9 " in (tmp_path / "out").read_text()


def test_an_interrupt_exits_with_status_130(path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("float8lab.commands.checkpoints.checkpoint", interrupt)
    assert command.main(["inspect", path]) == 130
