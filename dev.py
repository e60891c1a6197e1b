"""Set up .venv and run the project in it, with Python's standard library alone.

    python3 dev.py train [args]   the main job: examples/train_gpt.py [args]
    python3 dev.py test [args]    every check: ruff, mypy, wheel, pytest [args]
                                  --torch 2.15, given first: with that release of torch
                                  --latest, given first: the tests of other libraries, or
                                  those that are named, with these libraries' newest releases
                                  --all, given first or next: with the tests marked `slow`
    python3 dev.py setup          only the environment that `test` needs

Where the interpreter that runs this file already has torch >= 2.11 (a GPU machine with the CUDA
build its driver wants), .venv inherits that interpreter's packages and leaves its torch alone.
Elsewhere .venv gets its own torch. With --torch there is a .venv-torch-VERSION of its own beside
.venv, with the newest build of that release that pip finds: on a machine without a GPU perhaps one
for CUDA, which is large and runs there, too. What pip downloads from is pip's own configuration.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # or each import compiles all anew
PACKAGE_DATA = [
    path.relative_to(ROOT / "float8lab").as_posix()
    for path in sorted((ROOT / "float8lab").rglob("*"))
    if path.suffix in (".css", ".html", ".js", ".typed")
]
WORKERS = ["-n", "2", "--dist", "worksteal"]
"""Each worker has half of the tests in their order, so that both seldom set up the same fixture."""
LIBRARIES = [
    "accelerate", "compressed-tensors", "lightning", "mlflow", "onnx", "onnxruntime", "onnxscript",
    "peft", "safetensors", "tensorboard", "transformers", "trl", "wandb",
]  # fmt: skip
"""What the project works with, of which ``test --latest`` takes the newest releases."""
OF_LIBRARIES = [
    *(f"tests/{name}" for name in ("integrations", "examples", "docs")),
    "tests/inspect/test_tracking.py",
]
EXTRAS = {"examples": ["examples"], "dev": ["examples", "dev"]}  # an extra and all it brings


@dataclass(frozen=True)
class Venv:
    """An environment: .venv, that of a release of torch, or that of the newest libraries."""

    torch: str = ""
    """The release, such as ``2.15``; empty for .venv."""
    latest: bool = False
    """It has the newest releases of ``LIBRARIES``."""

    @property
    def path(self) -> Path:
        name = f".venv-torch-{self.torch}" if self.torch else ".venv"
        return ROOT / (name + "-latest" * self.latest)

    @property
    def python(self) -> Path:
        return self.path / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    @property
    def stamp(self) -> Path:
        """What was installed last: a hash of the inputs, and words."""
        return self.path / "float8lab-stamp"

    @property
    def requirements(self) -> list[str]:
        """What pip is asked for beside the project: the newest patch of the release."""
        patch = "" if self.torch.count(".") > 1 else ".*"
        return [f"torch=={self.torch}{patch}"] if self.torch else []


def say(text: str) -> None:
    print(f"[dev] {text}", flush=True)


def fail(text: str, status: int = 1) -> NoReturn:
    """End the command; also said by what runs beside another command that fails."""
    say(text)
    sys.exit(status)


def step(name: str, *command: str | Path, cwd: Path = ROOT, beside: bool = False) -> None:
    """Run a command, and raise SystemExit with its exit status if it fails.

    Beside another command, whose output comes meanwhile, its own comes when it has ended.
    """
    if not beside:
        say(name)
    words = [str(part) for part in command]
    run = subprocess.run(
        words, cwd=cwd, env=ENVIRONMENT, check=False,
        stdout=subprocess.PIPE if beside else None, stderr=subprocess.STDOUT if beside else None,
    )  # fmt: skip
    if beside:
        output = run.stdout.decode(errors="replace").strip()
        say("\n".join(filter(None, [name, output])))
    if run.returncode:
        status = run.returncode if run.returncode > 0 else 128 - run.returncode
        fail(f"{name}: failed with exit status {run.returncode}", status)


def succeeds(venv: Venv, code: str) -> bool:
    """Whether an environment's Python runs a line of code without an error."""
    command: list[str | Path] = [venv.python, "-c", code]
    run = subprocess.run(command, stderr=subprocess.DEVNULL, env=ENVIRONMENT, check=False)
    return run.returncode == 0


def inside(venv: Venv) -> bool:
    return Path(sys.prefix).resolve() == venv.path


def has_torch() -> bool:
    """Whether the interpreter running this file has a torch that the project can use."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= (2, 11)


def create(venv: Venv) -> None:
    if any(importlib.util.find_spec(module) is None for module in ("venv", "ensurepip")):
        say(f"{sys.executable} cannot create virtual environments: it lacks the venv module.")
        say("On Debian and Ubuntu: apt install python3-venv. Then run this command again.")
        sys.exit(1)
    step(f"create {venv.path.name}", sys.executable, "-m", "venv", venv.path)


def inherit_packages(venv: Venv) -> None:
    """Let it import the packages of the interpreter running this file, and float8lab.

    By a .pth file, since `--system-site-packages` means those of the base interpreter, and the
    interpreter running this file may be a virtual environment itself.
    """
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    command: list[str | Path] = [venv.python, "-c", ask]
    purelib = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    paths = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    Path(purelib.strip(), "inherited.pth").write_text("\n".join([*paths, str(ROOT)]) + "\n")


def setup(venv: Venv, extra: str) -> None:
    """Make it hold the project and one of its extras; do nothing if it already does."""
    inputs = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    wanted = hashlib.sha256(b"\0".join([*inputs, str(ROOT).encode()])).hexdigest()
    there = venv.stamp.exists() and venv.python.exists()
    stamp = venv.stamp.read_text().split() if there else []
    if stamp and stamp[0] == wanted and extra in stamp[1:]:
        return
    inherits = has_torch() and not inside(venv) and not venv.torch
    inherited = "inherited" in stamp if stamp else inherits
    if not stamp and not inside(venv):
        create(venv)
    if not stamp and inherited:
        say(f"use the torch {importlib.metadata.version('torch')} of {sys.executable}")
        inherit_packages(venv)
    if inherited and extra == "examples" and succeeds(venv, "import torch, tqdm, matplotlib"):
        say("nothing to install")  # GPU machines often have no network
    else:
        pip = pip_install(venv, inherited)
        if not stamp:  # some versions that come with Python take a minute longer
            step("install the newest pip", *pip, "--upgrade", "pip")
        what = [*venv.requirements, "-e", f".[{extra}]"]
        step(f"install float8lab[{extra}] and what it needs", *pip, *what)
    words = [wanted, *EXTRAS[extra], *(["inherited"] if inherited else [])]
    venv.stamp.write_text(" ".join(words) + "\n")


def pip_install(venv: Venv, inherited: bool) -> list[str | Path]:
    """The command that installs in an environment, to which the requirements come."""
    pip: list[str | Path] = [venv.python, "-m", "pip", "install", "--disable-pip-version-check"]
    pip += ["--no-compile"]  # a minute or two; imports compile what they use, see ENVIRONMENT
    if not sys.stdout.isatty():
        pip += ["--quiet"]
    if not inherited and not venv.torch and not shutil.which("nvidia-smi"):
        pip += ["-c", "constraints.txt"]
    return pip


def check_wheel(venv: Venv) -> None:
    """Build the source distribution, the wheel from it, and import float8lab from the wheel."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        build = ["-m", "build", "--no-isolation", "--outdir", str(out)]
        step("build the source distribution and the wheel", venv.python, *build, beside=True)
        (wheel,) = out.glob("*.whl")
        check = ["-m", "twine", "check", "--strict", *map(str, out.iterdir())]
        step("check what an index would show of them", venv.python, *check, beside=True)
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            archive.extractall(out / "unpacked")
        strangers = [name for name in names if not name.startswith(("float8lab/", "float8lab-"))]
        if not wheel.name.endswith("-py3-none-any.whl") or strangers:
            fail(f"{wheel.name} must be py3-none-any and hold only float8lab; got {strangers}")
        for name in PACKAGE_DATA:
            if f"float8lab/{name}" not in names:
                fail(f"{wheel.name} must hold float8lab/{name}")
        where = str(out / "unpacked")
        code = (
            f"import sys; sys.path.insert(0, {where!r}); import float8lab; "
            f"assert float8lab.__file__.startswith({where!r}), float8lab.__file__"
        )
        name = f"import float8lab from {wheel.name}"
        step(name, venv.python, "-I", "-c", code, cwd=out, beside=True)


def train(args: list[str]) -> None:
    venv = Venv()
    setup(venv, "examples")
    chosen = any(arg == "--device" or arg.startswith("--device=") for arg in args)
    if not chosen and succeeds(venv, "import torch; assert torch.cuda.is_available()"):
        args = ["--device", "cuda", *args]
    name = " ".join(["train_gpt.py", *args])
    step(name, venv.python, ROOT / "examples" / "train_gpt.py", *args)


def asked_torch(args: list[str]) -> tuple[str, list[str]]:
    """The release that a first --torch names, empty without one, and the other arguments.

    Raises:
        SystemExit: it is no release, such as 2.15 or 2.15.1.
    """
    if not args or args[0].partition("=")[0] != "--torch":
        return "", args
    _, given, release = args[0].partition("=")
    rest = args[1:] if given else args[2:]
    release = release if given else "".join(args[1:2])
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", release):
        sys.exit(f"--torch must be a release, such as 2.15; got {release!r}.")
    return release, rest


def check_types_and_wheel(venv: Venv) -> None:
    step("mypy", venv.python, "-m", "mypy", beside=True)
    check_wheel(venv)


def test_latest(args: list[str]) -> None:
    """Run tests with the newest releases of ``LIBRARIES``, and say which these are."""
    venv = Venv(latest=True)
    setup(venv, "dev")
    pip = pip_install(venv, "inherited" in venv.stamp.read_text().split())
    step("install the newest releases", *pip, "--upgrade", *LIBRARIES)
    ask = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in %r), sep=', ')"
    step("the releases are", venv.python, "-c", ask % LIBRARIES)
    names = [] if any(not arg.startswith("-") for arg in args) else OF_LIBRARIES
    step("pytest", venv.python, "-m", "pytest", *WORKERS, "-m", "not slow", *args, *names)


def test(args: list[str]) -> None:
    if args[:1] == ["--latest"]:
        test_latest(args[1:])
        return
    release, args = asked_torch(args)
    tier = ["-m", "not slow"]  # a -m among the arguments comes later, and counts
    if args[:1] == ["--all"]:
        tier, args = [], args[1:]
    venv = Venv(release)
    setup(venv, "dev")
    step("ruff check", venv.python, "-m", "ruff", "check")
    step("ruff format", venv.python, "-m", "ruff", "format", "--check")
    with ThreadPoolExecutor(1) as executor:
        beside = executor.submit(check_types_and_wheel, venv)
        # Also runs the examples in docstrings, README.md and docs/ (tests/test_docs.py).
        step("pytest", venv.python, "-m", "pytest", *WORKERS, *tier, *args)
        beside.result()


def main(argv: list[str]) -> None:
    command, args = (argv[0], argv[1:]) if argv else ("", [])
    if command == "train":
        train(args)
    elif command == "test":
        test(args)
    elif command == "setup" and not args:
        setup(Venv(), "dev")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
