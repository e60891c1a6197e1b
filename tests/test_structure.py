"""The rules of the source tree that no linter knows: layers, imports, names, versions."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "float8lab"
KERNELS = PACKAGE / "ops" / "kernels"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A module imports only from its own layer and from layers before it.
LAYERS = (
    "arguments",
    "formats",
    "ops",
    "recipes",
    "tensor",
    "router",
    "distributed",
    "nn",
    "optim",
    "checkpoints",
    "inspect",
    "integrations",
    "commands",
    "__main__",
)

# Names at the top of a file whose value changes, see CONTRIBUTING.md. Lower it, never raise it.
MOST_TABLES = 5
MUTABLE = re.compile(r"Weak|^(dict|list|set)$|[dD]ict$|_State$|Table$|Counter|deque")

# Files that may read environment variables, and which.
ENVIRONMENT = {
    "float8lab/__main__.py": "NO_COLOR (no-color.org): how text looks on a terminal, nothing else",
}

# Files that may import inside a function, and why.
LOCAL_IMPORTS = {
    "float8lab/ops/declare.py": "loads a kernel file, and so triton, on an op's first CUDA call",
    "float8lab/commands/terminal.py": "rich is optional, and loaded by the first terminal",
    "float8lab/nn/attention/backends.py": "FlexAttention loads sympy, on the first call of it",
    "float8lab/checkpoints/safetensors.py": "safetensors is optional",
    "float8lab/inspect/plot.py": "matplotlib is optional, and loaded by the first plot",
    "float8lab/inspect/report/page.py": "plotly is optional, and loaded by the first report",
    "float8lab/inspect/text.py": "rich is optional, and loaded by the first table",
    "float8lab/inspect/watch/views.py": "pandas is optional, and loaded by its view",
}

# Files that call collectives; everything else calls functions of these. Tensor parallelism has two.
COLLECTIVES = {
    "distributed/broadcast.py",
    "distributed/comm.py",
    "distributed/overlap.py",
    "distributed/ranks.py",
    "recipes/reduction.py",
    "tensor/collectives.py",
    "tensor/statistics.py",
}

# Never imported by `import float8lab`.
OPTIONAL = (
    "triton",
    "matplotlib",
    "plotly",
    "rich",
    "pandas",
    "tensorboard",
    "tqdm",
    "lightning",
    "pytorch_lightning",
    "transformers",
    "torchtitan",
    "accelerate",
    "peft",
    "compressed_tensors",
    "safetensors",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "IPython",
)


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(_parse(path)))


def _place(path: Path, line: int = 1) -> str:
    return f"{path.relative_to(ROOT).as_posix()}:{line}"


def _layer(path: Path) -> str:
    """``float8lab/formats.py`` -> ``formats``, ``float8lab/ops/gemm.py`` -> ``ops``."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def _imports(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement of a file, with the absolute dotted name of what it imports."""
    package = path.relative_to(ROOT).parent.parts
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            for alias in node.names:
                yield node, ".".join(filter(None, [*base, node.module, alias.name]))


def _versions(text: str) -> dict[str, str]:
    """The tools that a file pins: ``ruff==0.1`` -> ``{"ruff": "0.1"}``."""
    return dict(re.findall(r"\b(ruff|mypy)==([\w.]+)", text))


def _run_python(code: str, **variables: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **variables},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_imports_only_from_layers_below():
    wrong = []
    for path in MODULES:
        if path == PACKAGE / "__init__.py":
            continue  # the public names come from every layer
        layer = _layer(path)
        assert layer in LAYERS, f"float8lab/{layer} has no place in LAYERS"
        allowed = LAYERS[: LAYERS.index(layer) + 1]
        for node, name in _imports(path):
            imported = name.split(".")[1] if "." in name else "__init__"
            if name.split(".")[0] == "float8lab" and imported not in allowed:
                wrong.append(f"{_place(path, node.lineno)}: {layer} must not import {name}")
    assert wrong == []


def _edges() -> dict[str, set[str]]:
    """Which files of the package each file imports, anywhere in it: at its top, in a function.

    A name that a package's ``__init__`` has is looked for there, a file of its own in the file.
    """
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in MODULES}
    names = {name.removesuffix(".__init__"): path for name, path in files.items()}
    edges: dict[str, set[str]] = {}
    for name, path in names.items():
        found = (wanted for _, wanted in _imports(path))
        heads = (wanted if wanted in names else wanted.rpartition(".")[0] for wanted in found)
        edges[name] = {head for head in heads if head in names and head != name}
    return edges


def test_no_import_circle():
    edges = _edges()
    while True:  # take away what imports nothing that is left; a circle is never taken
        leaves = {name for name, wanted in edges.items() if not wanted & edges.keys()}
        if not leaves:
            break
        edges = {name: wanted for name, wanted in edges.items() if name not in leaves}
    assert edges == {}, "files that import each other, or what does"


def test_only_kernel_files_import_triton_and_at_their_top():
    wrong = [
        _place(path, node.lineno)
        for path in MODULES
        for node, name in _imports(path)
        if name.split(".")[0] == "triton"
        and not (KERNELS in path.parents and node in _parse(path).body)
    ]
    assert wrong == []


def test_no_import_inside_a_function():
    wrong = [
        _place(path, node.lineno)
        for path in MODULES
        if path.relative_to(ROOT).as_posix() not in LOCAL_IMPORTS
        for function in _nodes(path)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert wrong == [], "import at the top of the file"


def test_collectives_are_called_in_few_files():
    name = re.compile(r"(all_gather|all_reduce|all_to_all|broadcast|reduce_scatter)(_\w+)?")
    owners = ("dist", "ops", "torch.distributed")
    callers = {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES
        for node in _nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if name.fullmatch(node.func.attr) and ast.unparse(node.func.value) in owners
    }
    assert callers == COLLECTIVES


def test_no_environment_variable_is_read():
    wrong = [
        _place(path, getattr(node, "lineno", 0))
        for path in MODULES
        if path.relative_to(ROOT).as_posix() not in ENVIRONMENT
        for node in _nodes(path)
        if (getattr(node, "attr", None) or getattr(node, "name", None))
        in ("environ", "environb", "getenv", "getenvb")
    ]
    assert wrong == [], "behaviour is an argument"


def test_no_utils():
    wrong = [_place(path) for path in MODULES if path.stem in ("util", "utils")]
    assert wrong == [], "name the file after what it holds"


def _defines_all(tree: ast.Module) -> bool:
    """Whether a file has ``__all__``, or nothing but a docstring."""
    targets = [
        target
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return "__all__" in names or all(isinstance(node, ast.Expr) for node in tree.body)


def test_public_modules_define_all():
    wrong = [
        _place(path)
        for path in MODULES
        if not (path.stem.startswith("_") and path.stem != "__init__")
        and KERNELS not in path.parents
        and not _defines_all(_parse(path))
    ]
    assert wrong == []


def test_what_other_modules_import_is_in_all():
    listed = {
        path: ast.literal_eval(node.value)
        for path in MODULES
        for node in _parse(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    }
    missing = set()
    for path in MODULES:
        for _, name in _imports(path):
            module, _, what = name.rpartition(".")
            source = ROOT.joinpath(*module.split(".")).with_suffix(".py")
            if not what.startswith("_") and what not in listed.get(source, [what]):
                missing.add(name)
    assert missing == set()


def _mutable_names(path: Path) -> Iterator[str]:
    """The names at the top of a file whose value is a table that something will be entered in."""
    for node in _parse(path).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        value, made = node.value, ""
        if isinstance(value, ast.Call):
            made = getattr(value.func, "id", getattr(value.func, "attr", ""))
        empty = isinstance(value, (ast.Dict, ast.List, ast.Set)) and not ast.unparse(value)[1:-1]
        if empty or MUTABLE.search(made):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_tables_of_modules_are_few_and_named_in_contributing():
    found = {
        f"{path.relative_to(PACKAGE)}:{name}"
        for path in MODULES
        for name in _mutable_names(path)
        if name != "__all__"
    }
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert {name for name in found if f"`{name}`" not in text} == set()
    assert len(found) <= MOST_TABLES


def test_text_files_are_ascii():
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    for path in [ROOT / name for name in run.stdout.split("\0") if name]:
        content = path.read_bytes() if path.is_file() else b""
        if b"\0" in content:
            continue  # not text
        for number, line in enumerate(content.splitlines(), start=1):
            assert line.isascii(), f"{path}:{number}: not ASCII: {line.decode(errors='replace')}"


def test_pre_commit_pins_the_versions_of_pyproject():
    pyproject = _versions((ROOT / "pyproject.toml").read_text())
    assert set(pyproject) == {"ruff", "mypy"}
    assert _versions((ROOT / ".pre-commit-config.yaml").read_text()) == pyproject


@pytest.mark.parametrize("blocked", [(), OPTIONAL], ids=["installed", "missing"])
def test_import_loads_nothing_optional_and_adds_less_than_300_ms_to_torch(blocked: tuple[str, ...]):
    code = f"""
import sys, time, torch
before = set(sys.modules)
sys.modules.update(dict.fromkeys({blocked!r}))  # None: importing it raises
start = time.process_time()
import float8lab
print(time.process_time() - start)
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(*sorted(new & set({OPTIONAL!r}) - set({blocked!r})))
"""
    # With bytecode, as an installed package has it; the first run writes what is missing. In CPU
    # time, which hardly depends on what else the machine does.
    for _ in range(4):
        seconds, *loaded = _run_python(code, PYTHONDONTWRITEBYTECODE="").split()
        assert loaded == []
        if float(seconds) < 0.3:
            break
    assert float(seconds) < 0.3
