"""Rules of the source tree that no linter knows: layers, imports, names, versions."""

import ast
import collections
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
    "arguments", "tables", "formats", "ops", "recipes", "tensor", "router", "distributed", "nn",
    "optim", "checkpoints", "inspect", "integrations", "commands", "__main__",
)  # fmt: skip

# Module-level names whose value changes, see CONTRIBUTING.md. Lower the number, never raise it.
MOST_TABLES = 4
MUTABLE = re.compile(r"Weak|^(dict|list|set)$|[dD]ict$|_State$|Table$|Counter|deque")

# Files that may read environment variables, and which.
ENVIRONMENT: dict[str, str] = {}

# Files that may import inside a function, and why.
LOCAL_IMPORTS = {
    "float8lab/ops/declare.py": "loads a kernel file, and so triton, on an op's first CUDA call",
    "float8lab/commands/completion.py": "shtab is optional",
    "float8lab/commands/terminal.py": "rich is optional, and loaded by the first terminal",
    "float8lab/nn/attention/backends.py": "FlexAttention loads sympy, on the first call of it",
    "float8lab/checkpoints/opening.py": "huggingface_hub is optional",
    "float8lab/checkpoints/safetensors.py": "safetensors is optional",
    "float8lab/inspect/html.py": "plotly is optional, and loaded by the first page",
    "float8lab/inspect/plot.py": "matplotlib is optional, and loaded by the first plot",
    "float8lab/inspect/text.py": "rich is optional, and loaded by the first table",
    "float8lab/inspect/watch/watching.py": "pandas is optional, and loaded by its view",
}

# Files that call collectives; other files call their functions. Tensor parallelism has two.
COLLECTIVES = {
    "distributed/broadcast.py", "distributed/comm.py", "distributed/ranks.py",
    "recipes/reduction.py", "tensor/collectives.py", "inspect/statistics.py",
}  # fmt: skip

# Never imported by `import float8lab`.
OPTIONAL = (
    "triton", "matplotlib", "plotly", "rich", "pandas", "tensorboard", "wandb", "mlflow", "tqdm",
    "lightning", "pytorch_lightning", "transformers", "torchtitan", "accelerate", "peft",
    "compressed_tensors", "safetensors", "huggingface_hub", "shtab", "onnx", "onnxscript",
    "onnxruntime", "IPython",
)  # fmt: skip


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
    """Return the files of the package that each file imports, at its top or in a function.

    A name that is in a package's ``__init__`` counts as that file, a module as its own file.
    """
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in MODULES}
    names = {name.removesuffix(".__init__"): path for name, path in files.items()}
    edges: dict[str, set[str]] = {}
    for name, path in names.items():
        imported_names = (imported for _, imported in _imports(path))
        heads = (
            imported if imported in names else imported.rpartition(".")[0]
            for imported in imported_names
        )
        edges[name] = {head for head in heads if head in names and head != name}
    return edges


def test_no_import_circle():
    edges = _edges()
    while True:  # remove files that import no remaining file; a circle always remains
        leaves = {name for name, imported in edges.items() if not imported & edges.keys()}
        if not leaves:
            break
        edges = {name: imported for name, imported in edges.items() if name not in leaves}
    assert edges == {}, "files that import each other, or what does"


def test_one_function_calls_the_cast_op():
    """Only ``quantize`` calls it, outside of the ops and the code that checks them."""
    files = [
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES
        if _layer(path) not in ("ops", "inspect") and re.search(r"\bcast_op\(", path.read_text())
    ]
    assert files == ["tensor/operands.py"]
    assert (PACKAGE / files[0]).read_text().count("cast_op(") == 1


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


def test_no_file_is_named_utils():
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


def test_names_that_other_modules_import_are_in_all():
    listed = {
        path: ast.literal_eval(node.value)
        for path in MODULES
        for node in _parse(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    }
    missing = set()
    for path in MODULES:
        for _, name in _imports(path):
            module, _, imported_name = name.rpartition(".")
            source = ROOT.joinpath(*module.split(".")).with_suffix(".py")
            if not imported_name.startswith("_") and imported_name not in listed.get(
                source, [imported_name]
            ):
                missing.add(name)
    assert missing == set()


def _mutable_names(path: Path) -> Iterator[str]:
    """Yield the names at the top of a file whose value is a table that gets entries later."""
    for node in _parse(path).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        value, constructor = node.value, ""
        if isinstance(value, ast.Call):
            constructor = getattr(value.func, "id", getattr(value.func, "attr", ""))
        empty = isinstance(value, (ast.Dict, ast.List, ast.Set)) and not ast.unparse(value)[1:-1]
        if empty or MUTABLE.search(constructor):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_tables_of_modules_are_few_and_named_in_contributing():
    tables = {
        f"{path.relative_to(PACKAGE)}:{name}"
        for path in MODULES
        for name in _mutable_names(path)
        if name != "__all__"
    }
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert {name for name in tables if f"`{name}`" not in text} == set()
    assert len(tables) <= MOST_TABLES


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


def test_version_is_the_same_in_all_files():
    files = {
        "pyproject.toml": r'^version = "(.*)"$',
        "CITATION.cff": r"^version: (.*)$",
        "float8lab/__init__.py": r'^__version__ = "(.*)"$',
    }
    versions = {
        re.findall(line, (ROOT / name).read_text(), re.M)[0] for name, line in files.items()
    }
    assert len(versions) == 1


# The package in numbers: decisions of functions, unnamed and untyped values, and its words.

APPLICATIONS = {"inspect", "integrations", "commands", "checkpoints", "__main__.py", "__init__.py"}
CORE = [path for path in MODULES if path.relative_to(PACKAGE).parts[0] not in APPLICATIONS]

PRONOUN = re.compile(
    r"found|parts?|whole|one|total|how|known|high|own|wanted|here|mine|kept|others?|rest|by|some"
    r"|both|same|each|every|two|three|again|once|turns?|turned|ways?|what|where|which|this|that"
    r"|these|those|it|them|ones|such|none|nobody|somebody|further|beside|apart|anew"
)
"""Names that do not say what they hold."""
WORDS = {
    "product (GEMM)": r"\bproducts?\b",
    "copy engine (TMA)": r"copy[ _]engine",
    "mixture (MoE)": r"\bmixtures?\b",
    "spread (tensor parallel, sharded, expanded)": r"\bspread\w*",
    "nobody, somebody": r"\b(nobod|somebod)\w*",
    "anew (recompute, requantize)": r"\banew\b",
    "turned (transposed)": r"\b(turns|turned|in_turn)\b",
    "sow, reap (set and keep the first scale)": r"\b_?(sow|sown|reap)\b",
    "lives on, lies on (outlives the step, crosses)": r"\bli(ves|e|es)[ _]on\b",
    "by what": r"\bby what\b",
    "apart (separately)": r"\bapart\b",
    "codes (FP8 data)": r"\bcodes\b",
    "straight (rowwise)": r"\bstraight\b",
    "ends (offsets)": r"\bends\b",
    "again (recompute, requantize, repeat)": r"\bagain\b",
}
"""Words for which the field has another word, in brackets, and their patterns."""

# What the package has today. A limit only falls: lower it when its count falls.
LIMITS = {
    "functions of more than 20 decisions": 0,
    "functions of more than 12 decisions": 25,
    "returns of more than 3 unnamed values": 3,
    "assert ... is not None": 3,
    "annotations with Any": 436,
    "functions of more than 12 positional parameters": 0,
    "ops": 20,
    "fields of shared state": 6,
}
MOST_PRONOUNS = 1  # of 1,000 names that are assigned, or that functions take
MOST_DECISIONS = 20  # in one function outside kernels
MOST_LINES, MOST_LINES_OF_THE_CORE = 54_040, 38_068
MOST_WORDS = {
    "product (GEMM)": 6,
    "apart (separately)": 1,
    "codes (FP8 data)": 13,
    "ends (offsets)": 3,
    "again (recompute, requantize, repeat)": 10,
}


def _functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in MODULES:
        for node in _nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield path, node


def _decisions(function: ast.AST) -> int:
    """Count the decisions of a function, without those of functions that are defined in it."""
    count, todo = 0, [*ast.iter_child_nodes(function)]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += len(node.ifs)
        elif isinstance(node, (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler)):
            count += 1
    return count


def _annotations(path: Path) -> Iterator[tuple[int, ast.expr]]:
    for node in _nodes(path):
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            yield node.lineno, node.annotation
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield node.lineno, node.returns


def _bound_names(path: Path) -> Iterator[str]:
    """The names that are assigned in a file, and the arguments of its functions."""
    for node in _nodes(path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id.strip("_")
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg.strip("_")


def _declared_ops() -> set[str]:
    """The ops: functions that ``declare`` decorates, and first arguments of its calls."""
    names = set()
    for path in MODULES:
        if _layer(path) != "ops":
            continue
        for node in _nodes(path):
            if isinstance(node, ast.FunctionDef):
                decorators = map(ast.unparse, node.decorator_list)
                names |= {node.name for decorator in decorators if "declare" in decorator}
            elif isinstance(node, ast.Call) and re.fullmatch(
                r"(\w+\.)*declare", ast.unparse(node.func)
            ):
                names |= {ast.unparse(argument) for argument in node.args[:1]}
    return names


def _fields_of_shared_state() -> list[str]:
    """The fields of state that belongs to a thread or to the process."""
    fields = []
    for node in _parse(PACKAGE / "recipes" / "region.py").body:
        if not isinstance(node, ast.ClassDef) or not re.search("State|Process", node.name):
            continue
        fields += [ast.unparse(x.target) for x in node.body if isinstance(x, ast.AnnAssign)]
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                targets = [
                    target
                    for x in ast.walk(method)
                    if isinstance(x, (ast.Assign, ast.AnnAssign))
                    for target in (x.targets if isinstance(x, ast.Assign) else [x.target])
                ]
                fields += [x for x in map(ast.unparse, targets) if x.startswith("self.")]
    return fields


@functools.cache
def _figures() -> dict[str, list[str]]:
    """Return the places that each of ``LIMITS`` counts."""
    plain = [(path, f) for path, f in _functions() if KERNELS not in path.parents]
    decisions = [(_decisions(f), _place(path, f.lineno)) for path, f in plain]
    core = [
        (node, f"{_place(path, getattr(node, 'lineno', 1))}")
        for path in CORE
        if KERNELS not in path.parents
        for node in _nodes(path)
    ]
    return {
        "functions of more than 20 decisions": [place for n, place in decisions if n > 20],
        "functions of more than 12 decisions": [place for n, place in decisions if n > 12],
        "returns of more than 3 unnamed values": sorted(
            {
                place
                for node, place in core
                if isinstance(node, ast.Return)
                and isinstance(node.value, ast.Tuple)
                and len(node.value.elts) > 3
            }
        ),
        "assert ... is not None": [
            place
            for node, place in core
            if isinstance(node, ast.Assert) and "is not None" in ast.unparse(node.test)
        ],
        "annotations with Any": [
            _place(path, line)
            for path in MODULES
            for line, annotation in _annotations(path)
            if re.search(r"\bAny\b", ast.unparse(annotation))
        ],
        "functions of more than 12 positional parameters": [
            _place(path, f.lineno)
            for path, f in plain
            if len(f.args.posonlyargs + f.args.args) > 12
            and not (_layer(path) == "nn" and f.name in ("__init__", "forward"))
        ],
        "ops": sorted(_declared_ops()),
        "fields of shared state": _fields_of_shared_state(),
    }


@pytest.mark.parametrize("figure", LIMITS)
def test_counts_are_within_their_limits(figure: str):
    places = _figures()[figure]
    assert len(places) <= LIMITS[figure], places[:100]


def test_no_function_has_more_decisions_than_the_limit():
    most, place = max(
        (_decisions(f), _place(path, f.lineno))
        for path, f in _functions()
        if KERNELS not in path.parents
    )
    assert most <= MOST_DECISIONS, place


def test_number_of_lines_is_within_its_limits():
    lines = {path: path.read_text().count("\n") for path in MODULES}
    assert sum(lines.values()) <= MOST_LINES
    assert sum(lines[path] for path in CORE) <= MOST_LINES_OF_THE_CORE


def test_few_names_are_pronouns():
    names = [name for path in MODULES for name in _bound_names(path)]
    pronouns = collections.Counter(name for name in names if PRONOUN.fullmatch(name))
    share = 1000 * pronouns.total() / len(names)
    assert share <= MOST_PRONOUNS, pronouns.most_common(20)


@pytest.mark.parametrize("word", WORDS)
def test_words_outside_the_vocabulary_are_rare(word: str):
    places = [
        _place(path, text.count("\n", 0, match.start()) + 1)
        for path in MODULES
        for text in [path.read_text()]
        for match in re.finditer(WORDS[word], text, re.I)
    ]
    assert len(places) <= MOST_WORDS.get(word, 0), places[:100]


@pytest.mark.parametrize("blocked", [(), OPTIONAL], ids=["installed", "missing"])
def test_import_loads_nothing_optional_and_adds_less_than_300_ms_to_torch(blocked: tuple[str, ...]):
    code = f"""
import sys, time
start = time.process_time()
import torch
torch_seconds = time.process_time() - start
before = set(sys.modules)
sys.modules.update(dict.fromkeys({blocked!r}))  # None: importing it raises
start = time.process_time()
import float8lab
print(time.process_time() - start, torch_seconds)
assert not [name for name in sys.modules if name.startswith("float8lab.inspect.selfcheck")]
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(*sorted(new & set({OPTIONAL!r}) - set({blocked!r})))
"""
    # With bytecode, as in an installed package; the first run writes what is missing. The limit is
    # in CPU time, and is 300 ms where torch takes 1.5 s, since machines and their load differ.
    for _ in range(4):
        seconds, loaded = _run_python(code, PYTHONDONTWRITEBYTECODE="").split("\n", 1)
        assert not loaded.strip()
        float8lab_seconds, torch_seconds = map(float, seconds.split())
        limit = max(0.3, 0.2 * torch_seconds)
        if float8lab_seconds < limit:
            break
    assert float8lab_seconds < limit
