"""Programs of docs/launchers.md and docs/transformers.md, started by the commands on the pages."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from tests.distributed.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
PAGE = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("launchers", "transformers"))
PROGRAMS = re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
    for line in block.splitlines()
    if "HOST" not in block and "train_" in block
]
MODULES = {"accelerate": "accelerate.commands.accelerate_cli", "torchrun": "torch.distributed.run"}


def step_lines(command: str, folder: Path) -> list[str]:
    """Return the lines that rank 0 printed for each step."""
    program, *words = command.replace("examples/", f"{ROOT}/examples/").split()
    module = ["-m", MODULES[program]] if program in MODULES else []
    process = subprocess.run(
        [sys.executable, *module, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    # Gloo's thread may release the tensor of the last collective only after the interpreter has
    # ended, and asks for its lock. Python then aborts the process, which has done all its work.
    succeeded = (
        process.returncode == 0 or "terminate called without an active exception" in process.stderr
    )
    assert succeeded, process.stdout + process.stderr
    return [line for line in process.stdout.splitlines() if line.startswith("step")]


def commands_of(name: str) -> list[str]:
    return [command for command in COMMANDS if f"{name}.py" in command]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in PROGRAMS])
def test_programs_of_the_page_resume_on_two_processes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning" if name == "train_lightning" else "accelerate")
    (tmp_path / f"{name}.py").write_text(dict(PROGRAMS)[name])
    start, resume = commands_of(name)
    uninterrupted = step_lines(start, tmp_path)
    assert len(uninterrupted) == 6  # 12 batches, of which each process had every other one
    assert step_lines(resume, tmp_path) == uninterrupted[3:]


@pytest.mark.parametrize("name", ["train_accelerate", "train_fp8"])
def test_accelerate_programs_resume_on_forked_processes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs without the launcher; its configuration file is read as the launcher reads it."""
    config = pytest.importorskip("accelerate.commands.config.config_args")
    program = tmp_path / f"{name}.py"
    program.write_text(dict(PROGRAMS)[program.stem])
    monkeypatch.chdir(tmp_path)
    lines_of_runs = []
    for number, command in enumerate(commands_of(program.stem)):
        _, launch, _, path, _, *words = command.split()
        assert launch == "launch"
        world = config.load_config_from_file(str(ROOT / path)).num_processes
        folder = tmp_path / f"printed-{number}"
        folder.mkdir()
        lines = run_program(world, program, *words, folder=folder).splitlines()
        lines_of_runs.append([line for line in lines if line.startswith("step")])
    uninterrupted, resumed = lines_of_runs
    assert len(uninterrupted) == 6  # 12 batches, of which each process had every other one
    assert resumed == uninterrupted[3:]


START_COMMANDS = re.findall(
    r"^(?:python -m float8lab\S+|ACCELERATE_\S+ torchrun) .*program.py$", PAGE, re.M
)
PROGRAM = """
import accelerate, torch
from float8lab.integrations.accelerate import enable
enable()
accelerator = accelerate.Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(32, 32))
print(accelerator.mixed_precision, type(accelerator.unwrap_model(model)).__module__)
accelerator.end_training()
"""


@pytest.fixture
def fp8_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``fp8.yaml`` in the current folder, which is otherwise empty."""
    config = (ROOT / "examples/accelerate/ddp.yaml").read_text()
    path = tmp_path / "fp8.yaml"
    path.write_text(config.replace("precision: bf16", "precision: fp8"))
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    return path


def launched_environment(module: str, *words: str) -> dict[str, str]:
    """The environment in which a launcher, run as a module, would start the program."""
    environments: list[dict[str, str]] = []

    def start(*args: object, env: dict[str, str] | None = None) -> SimpleNamespace:
        environments.append(dict(env or os.environ))
        return SimpleNamespace(wait=lambda: None, returncode=0)

    with (
        patch.object(sys, "argv", [module, *words]),
        patch("accelerate.commands.launch.subprocess.Popen", start),
        patch("torch.distributed.run.run", start),
    ):
        runpy.run_module(module, run_name="__main__")
    (environment,) = environments
    return environment


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", START_COMMANDS)
def test_fp8_set_only_by_the_launcher_converts_the_model(command: str, fp8_config: Path) -> None:
    integration = pytest.importorskip("float8lab.integrations.accelerate")
    program = fp8_config.with_name("program.py")
    program.write_text(PROGRAM)
    first, *words = command.split()
    if first == "python":
        try:
            environment = launched_environment(*words[1:])
        finally:
            integration.disable()
        assert environment["ACCELERATE_MIXED_PRECISION"] == "fp8"
        return
    setting = "import os; os.environ[{!r}] = {!r}".format(*first.split("="))
    program.write_text(setting + PROGRAM)  # the forks do not have this process's environment
    output = run_program(int(words[2]), program, folder=fp8_config.parent)
    assert output.splitlines()[0] == "fp8 float8lab.nn.linear"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", [c for c in START_COMMANDS if c.startswith("python")])
def test_the_error_of_accelerates_launcher_is_quoted_by_the_page(
    command: str, fp8_config: Path
) -> None:
    utils = pytest.importorskip("accelerate.utils")
    if utils.is_fp8_available():
        pytest.skip("Transformer Engine, MS-AMP or torchao is installed")
    with pytest.raises(RuntimeError) as error:
        launched_environment(MODULES["accelerate"], *command.split()[3:])
    assert f"`{error.value}`" in " ".join(PAGE.split())
