"""The rules of the source tree that no linter knows: layers, imports, names, versions."""

from __future__ import annotations

import ast
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

each_module = pytest.mark.parametrize(
    "path", MODULES, ids=[path.relative_to(ROOT).as_posix() for path in MODULES]
)


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _layer(path: Path) -> str:
    """``float8lab/formats.py`` -> ``formats``, ``float8lab/ops/gemm.py`` -> ``ops``."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def _imports(path: Path, tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement of a file, with the absolute dotted name of what it imports."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
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


@each_module
def test_imports_only_from_layers_below(path: Path):
    if path == PACKAGE / "__init__.py":
        return  # the public names come from every layer
    layer = _layer(path)
    assert layer in LAYERS, f"float8lab/{layer} has no place in LAYERS"
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    for node, name in _imports(path, _parse(path)):
        if name.split(".")[0] == "float8lab":
            imported = name.split(".")[1] if "." in name else "__init__"
            assert imported in allowed, f"{path}:{node.lineno}: {layer} must not import {name}"


def _edges() -> dict[str, set[str]]:
    """Which files of the package each file imports, anywhere in it: at its top, in a function.

    A name that a package's ``__init__`` has is looked for there, a file of its own in the file.
    """
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in MODULES}
    names = {name.removesuffix(".__init__"): path for name, path in files.items()}
    edges: dict[str, set[str]] = {}
    for name, path in names.items():
        found = (wanted for _, wanted in _imports(path, _parse(path)))
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


@each_module
def test_only_kernel_files_import_triton_and_at_their_top(path: Path):
    tree = _parse(path)
    for node, name in _imports(path, tree):
        if name.split(".")[0] == "triton":
            assert KERNELS in path.parents, f"{path}:{node.lineno}: only ops/kernels has triton"
            assert node in tree.body, f"{path}:{node.lineno}: import triton at the top"


@each_module
def test_no_import_inside_a_function(path: Path):
    if path.relative_to(ROOT).as_posix() in LOCAL_IMPORTS:
        return
    for function in ast.walk(_parse(path)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                local = isinstance(node, ast.Import | ast.ImportFrom)
                assert not local, f"{path}:{node.lineno}: import at the top of the file"


def test_collectives_are_called_in_few_files():
    name = re.compile(r"(all_gather|all_reduce|all_to_all|broadcast|reduce_scatter)(_\w+)?")
    callers = set()
    for path in MODULES:
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if name.fullmatch(node.func.attr) and owner in ("dist", "ops", "torch.distributed"):
                    callers.add(path.relative_to(PACKAGE).as_posix())
    assert callers == COLLECTIVES


@each_module
def test_no_environment_variable_is_read(path: Path):
    if path.relative_to(ROOT).as_posix() in ENVIRONMENT:
        return
    for node in ast.walk(_parse(path)):
        name = getattr(node, "attr", None) or getattr(node, "name", None)
        reads = name in ("environ", "environb", "getenv", "getenvb")
        assert not reads, f"{path}:{getattr(node, 'lineno', 0)}: behaviour is an argument"


@each_module
def test_no_utils(path: Path):
    assert path.stem not in ("util", "utils"), f"{path}: name the file after what it holds"


@each_module
def test_public_module_defines_all(path: Path):
    if KERNELS in path.parents or (path.stem.startswith("_") and path.stem != "__init__"):
        return
    tree = _parse(path)
    targets = [
        target
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    empty = all(isinstance(node, ast.Expr) for node in tree.body)  # at most a docstring
    assert empty or "__all__" in names, f"{path}: define __all__"


def test_what_other_modules_import_is_in_all():
    trees = {path: _parse(path) for path in MODULES}
    listed = {
        path: ast.literal_eval(node.value)
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    }
    missing = set()
    for path, tree in trees.items():
        for _, name in _imports(path, tree):
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
def test_import_needs_and_loads_nothing_optional(blocked: tuple[str, ...]):
    code = f"""
import sys, torch
before = set(sys.modules)
sys.modules.update(dict.fromkeys({blocked!r}))  # None: importing it raises
import float8lab
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(*sorted(new & set({OPTIONAL!r}) - set({blocked!r})))
"""
    assert _run_python(code).split() == []


def test_import_adds_less_than_300_ms_to_torch(tmp_path: Path):
    code = """
import time, torch
start = time.process_time()
import float8lab
print(time.process_time() - start)
"""
    # With bytecode, as an installed package has it; the first run writes it. In CPU time, which
    # hardly depends on what else the machine does.
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    _run_python(code, **bytecode)
    assert any(float(_run_python(code, **bytecode)) < 0.3 for _ in range(3))
