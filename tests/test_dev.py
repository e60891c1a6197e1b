"""dev.py: which environment a command runs in, and what `test` runs."""

import sys

import pytest

import dev


@pytest.fixture
def steps(monkeypatch):
    """The commands that `test` would run, by name; none of them is run."""
    steps = {}

    def step(name, *command, **options):
        steps[name] = command[1:]

    monkeypatch.setattr(dev, "setup", lambda venv, extra: None)
    monkeypatch.setattr(dev, "check_wheel", lambda venv: step("wheel"))
    monkeypatch.setattr(dev, "step", step)
    return steps


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ([], ["-m", "not slow"]), (["-k", "quantize"], ["-m", "not slow", "-k", "quantize"]),
        (["--all"], []), (["--torch", "2.15", "--all", "-x"], ["-x"]),
    ],
    ids=str,
)  # fmt: skip
def test_only_the_option_all_runs_slow_tests(arguments, passed, steps):
    dev.test(arguments)
    assert {*steps} == {"ruff check", "ruff format", "mypy", "wheel", "pytest"}
    assert steps["pytest"] == ("-m", "pytest", *dev.WORKERS, *passed)


def test_option_latest_installs_and_tests_the_newest_libraries(steps, monkeypatch):
    monkeypatch.setattr(dev, "pip_install", lambda venv, inherited: ["python", "install"])
    monkeypatch.setattr(dev.Path, "read_text", lambda path: "stamp")
    for arguments, names in ((["-x"], ["-x", *dev.OF_LIBRARIES]), (["tests"], ["tests"])):
        dev.test(["--latest", *arguments])
        assert steps["install the newest releases"] == ("install", "--upgrade", *dev.LIBRARIES)
        assert steps["pytest"] == ("-m", "pytest", *dev.WORKERS, "-m", "not slow", *names)


@pytest.mark.parametrize("failing", ["ruff check", "mypy", "wheel", "pytest"])
def test_each_failing_check_fails_the_command(failing, steps, monkeypatch):
    def step(name, *command, **options):
        if name == failing:
            dev.fail(f"{name} failed", 3)

    monkeypatch.setattr(dev, "step", step)
    monkeypatch.setattr(dev, "check_wheel", lambda venv: step("wheel"))
    with pytest.raises(SystemExit) as stop:
        dev.test([])
    assert stop.value.code == 3


@pytest.mark.parametrize("status", [0, 5])
def test_concurrent_step_prints_all_its_output_when_it_ends(status, capfd):
    code = f"import sys; print('out'); print('err', file=sys.stderr); sys.exit({status})"
    try:
        dev.step("name", sys.executable, "-u", "-c", code, beside=True)
        exit_status = 0
    except SystemExit as stop:
        exit_status = stop.code
    lines = ["[dev] name", "out", "err"]
    lines += [f"[dev] name: failed with exit status {status}"] if status else []
    assert (exit_status, capfd.readouterr().out.splitlines()) == (status, lines)


@pytest.mark.parametrize(
    ("arguments", "release", "remaining"),
    [
        ([], "", []), (["-k", "quantize"], "", ["-k", "quantize"]),
        (["--torch", "2.15", "-x"], "2.15", ["-x"]), (["--torch=2.11.0"], "2.11.0", []),
        (["-k", "--torch"], "", ["-k", "--torch"]),
    ],
    ids=str,
)  # fmt: skip
def test_option_torch_selects_a_release(arguments, release, remaining):
    assert dev.asked_torch(arguments) == (release, remaining)


@pytest.mark.parametrize("arguments", [["--torch"], ["--torch", "-x"], ["--torch=../2.15"]])
def test_missing_or_wrong_release_raises(arguments):
    with pytest.raises(SystemExit, match=r"--torch must be a release, such as 2\.15; got"):
        dev.asked_torch(arguments)


def test_environments_have_folders_and_requirements():
    venvs = dev.Venv(), dev.Venv("2.15"), dev.Venv(latest=True)
    assert [venv.path.name for venv in venvs] == [".venv", ".venv-torch-2.15", ".venv-latest"]
    requirements = [dev.Venv(release).requirements for release in ("", "2.15", "2.15.1")]
    assert requirements == [[], ["torch==2.15.*"], ["torch==2.15.1"]]
