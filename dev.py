"""Set up .venv and run the project in it, with Python's standard library alone.

    python3 dev.py train [args]   the main job: examples/train_gpt.py [args]
    python3 dev.py test [args]    every check: ruff, mypy, wheel, pytest [args]
    python3 dev.py setup          only the environment that `test` needs

Where the interpreter that runs this file already has torch >= 2.11 (a GPU machine with the CUDA
build its driver wants), .venv inherits that interpreter's packages and leaves its torch alone.
Elsewhere .venv gets its own torch. What pip downloads from is pip's own configuration.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "float8lab-stamp"  # what was installed last: a hash of the inputs, and words
ENVIRONMENT = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # or each import compiles all anew
PACKAGE_DATA = ["py.typed", *(f"inspect/report/page.{kind}" for kind in ("html", "css", "js"))]
EXTRAS = {"examples": ["examples"], "dev": ["examples", "dev"]}  # an extra and all it brings


def say(text: str) -> None:
    print(f"[dev] {text}", flush=True)


def step(name: str, *command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command, and end the program with its exit status if it fails."""
    say(name)
    words = [str(part) for part in command]
    code = subprocess.run(words, cwd=cwd, env=ENVIRONMENT, check=False).returncode
    if code:
        say(f"{name}: failed with exit status {code}")
        sys.exit(code if code > 0 else 128 - code)


def succeeds(code: str) -> bool:
    """Whether .venv's Python runs a line of code without an error."""
    command: list[str | Path] = [PYTHON, "-c", code]
    run = subprocess.run(command, stderr=subprocess.DEVNULL, env=ENVIRONMENT, check=False)
    return run.returncode == 0


def inside_venv() -> bool:
    return Path(sys.prefix).resolve() == VENV


def has_torch() -> bool:
    """Whether the interpreter running this file has a torch that the project can use."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= (2, 11)


def create_venv() -> None:
    if any(importlib.util.find_spec(module) is None for module in ("venv", "ensurepip")):
        say(f"{sys.executable} cannot create virtual environments: it lacks the venv module.")
        say("On Debian and Ubuntu: apt install python3-venv. Then run this command again.")
        sys.exit(1)
    step("create .venv", sys.executable, "-m", "venv", VENV)


def inherit_packages() -> None:
    """Let .venv import the packages of the interpreter running this file, and float8lab.

    By a .pth file, since `--system-site-packages` means those of the base interpreter, and the
    interpreter running this file may be a virtual environment itself.
    """
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = subprocess.run([PYTHON, "-c", ask], capture_output=True, text=True, check=True).stdout
    paths = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    Path(purelib.strip(), "inherited.pth").write_text("\n".join([*paths, str(ROOT)]) + "\n")


def setup(extra: str) -> None:
    """Make .venv hold the project and one of its extras; do nothing if it already does."""
    inputs = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    wanted = hashlib.sha256(b"\0".join([*inputs, str(ROOT).encode()])).hexdigest()
    stamp = STAMP.read_text().split() if STAMP.exists() and PYTHON.exists() else []
    if stamp and stamp[0] == wanted and extra in stamp[1:]:
        return
    inherited = "inherited" in stamp if stamp else has_torch() and not inside_venv()
    if not stamp and not inside_venv():
        create_venv()
    if not stamp and inherited:
        say(f"use the torch {importlib.metadata.version('torch')} of {sys.executable}")
        inherit_packages()
    if inherited and extra == "examples" and succeeds("import torch, tqdm, matplotlib"):
        say("nothing to install")  # GPU machines often have no network
    else:
        pip: list[str | Path] = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check"]
        pip += ["--no-compile"]  # a minute or two; imports compile what they use, see ENVIRONMENT
        if not sys.stdout.isatty():
            pip += ["--quiet"]
        if not inherited and not shutil.which("nvidia-smi"):
            pip += ["-c", "constraints.txt"]
        step(f"install float8lab[{extra}] and what it needs", *pip, "-e", f".[{extra}]")
    words = [wanted, *EXTRAS[extra], *(["inherited"] if inherited else [])]
    STAMP.write_text(" ".join(words) + "\n")


def check_wheel() -> None:
    """Build the wheel and import float8lab from what it holds."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
        step("build the wheel", PYTHON, *build)
        (wheel,) = out.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            archive.extractall(out / "unpacked")
        strangers = [name for name in names if not name.startswith(("float8lab/", "float8lab-"))]
        if not wheel.name.endswith("-py3-none-any.whl") or strangers:
            sys.exit(f"{wheel.name} must be py3-none-any and hold only float8lab; got {strangers}")
        for name in PACKAGE_DATA:
            if f"float8lab/{name}" not in names:
                sys.exit(f"{wheel.name} must hold float8lab/{name}")
        where = str(out / "unpacked")
        code = (
            f"import sys; sys.path.insert(0, {where!r}); import float8lab; "
            f"assert float8lab.__file__.startswith({where!r}), float8lab.__file__"
        )
        step(f"import float8lab from {wheel.name}", PYTHON, "-I", "-c", code, cwd=out)


def train(args: list[str]) -> None:
    setup("examples")
    chosen = any(arg == "--device" or arg.startswith("--device=") for arg in args)
    if not chosen and succeeds("import torch; assert torch.cuda.is_available()"):
        args = ["--device", "cuda", *args]
    step(" ".join(["train_gpt.py", *args]), PYTHON, ROOT / "examples" / "train_gpt.py", *args)


def test(args: list[str]) -> None:
    setup("dev")
    step("ruff check", PYTHON, "-m", "ruff", "check")
    step("ruff format", PYTHON, "-m", "ruff", "format", "--check")
    step("mypy", PYTHON, "-m", "mypy")
    check_wheel()
    # Also runs the examples in docstrings, README.md and docs/ (tests/test_docs.py).
    step("pytest", PYTHON, "-m", "pytest", "-n", "2", *args)


def main(argv: list[str]) -> None:
    command, args = (argv[0], argv[1:]) if argv else ("", [])
    if command == "train":
        train(args)
    elif command == "test":
        test(args)
    elif command == "setup" and not args:
        setup("dev")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
