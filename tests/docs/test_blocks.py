"""Python blocks of the documentation that cannot run in a test still name what exists.

Such a block has ``<!-- no-run: reason -->`` above it. Its names are builtins, or bound by it or by
an earlier block of its page, or listed in the reason: ``given model, mesh``. What it takes from
modules and classes exists there, with the keyword arguments that it passes. Where the reason says
that a file *runs* it, the file has its statements, or reads the page.
"""

import ast
import builtins
import importlib
import importlib.util
import inspect
import re
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.test_docs import BLOCK, NEEDS, PAGES, ROOT, page_name

REASON = re.compile(
    r"\A needs (?:several processes|(?:a|an)? ?(?:CUDA )?GPUs?|torchtitan, and a GPU|"
    r"a checkpoint of \S+)(?=;|$)"
)
OWN = ("float8lab", "torch")
LIBRARIES = {name.removesuffix(".py").replace("/", "."): needed for name, needed in NEEDS.items()}
"""Libraries that modules of the package load."""

UNKNOWN = object()
"""Stands for a value that only running the block would show."""

Names = dict[str, Any]


def imported(node: ast.Import | ast.ImportFrom) -> Names:
    """What an import statement binds; raises for a name that a library here does not have."""
    found: Names = {}
    for alias in node.names:
        name = alias.asname or alias.name.split(".")[0]
        source = node.module if isinstance(node, ast.ImportFrom) else alias.name
        assert source is not None
        library = LIBRARIES.get(source, source.split(".")[0])
        if library not in OWN and library not in sys.modules:
            found[name] = UNKNOWN  # loading it would take seconds; blocks that do run, load it
            continue
        try:
            module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            if error.name == source:
                raise
            found[name] = UNKNOWN  # it needs an optional library
            continue
        if isinstance(node, ast.ImportFrom):
            import_submodule(module, alias.name)
            found[name] = getattr(module, alias.name)
        else:
            found[name] = module if alias.asname else importlib.import_module(name)
    return found


def import_submodule(module: ModuleType, name: str) -> None:
    """Import a part of a package that is no attribute of it yet."""
    missing = not hasattr(module, name) and hasattr(module, "__path__")
    if missing and importlib.util.find_spec(f"{module.__name__}.{name}") is not None:
        importlib.import_module(f"{module.__name__}.{name}")


def bound(tree: ast.Module) -> Names:
    """What a block binds at its top level."""
    table = symtable.symtable(ast.unparse(tree), "block", "exec")
    names: Names = {
        symbol.get_name(): UNKNOWN
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(imported(node))
    return names


def read(table: symtable.SymbolTable) -> set[str]:
    """Names that a block, or a function in it, takes from outside."""
    top = table.get_type() == "module"
    names = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_referenced()
        and (symbol.is_global() if not top else not symbol.is_assigned())
        and not symbol.is_imported()
    }
    return names.union(*map(read, table.get_children()))


def resolved(node: ast.expr, known: Names) -> Any:
    """The module, class or function that a dotted name means; raises if there is none."""
    if isinstance(node, ast.Name):
        return known.get(node.id, UNKNOWN)
    if isinstance(node, ast.Attribute):
        owner = resolved(node.value, known)
        if isinstance(owner, (ModuleType, type)):
            if isinstance(owner, ModuleType):
                import_submodule(owner, node.attr)
            return getattr(owner, node.attr)
    return UNKNOWN


def check_names_of(tree: ast.Module, known: Names) -> None:
    free = read(symtable.symtable(ast.unparse(tree), "block", "exec"))
    unknown = {name for name in free if name not in known and not hasattr(builtins, name)}
    assert not unknown, f"names that nothing binds: {sorted(unknown)}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            resolved(node, known)
        if isinstance(node, ast.Call):
            function = resolved(node.func, known)
            made_by = function.__init__ if isinstance(function, type) else function
            if not inspect.isfunction(made_by):
                continue
            parameters = inspect.signature(function).parameters
            if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
                passed = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                assert passed <= set(parameters), (ast.unparse(node.func), passed - set(parameters))


def statements(tree: ast.AST) -> Iterator[str]:
    """Each statement in one spelling, a function by its name, another with a body by its start."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.Import, ast.ImportFrom)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            else:
                yield (
                    ast.unparse(node).split("\n")[0] if hasattr(node, "body") else ast.unparse(node)
                )


def missing_in(file: Path, tree: ast.Module, page: Path) -> set[str]:
    """The statements of a block that a file said to run it does not have."""
    source = file.read_text()
    if page.name in source:
        return set()  # it takes the block from the page
    return set(statements(tree)) - set(statements(ast.parse(source)))


def check_page(page: Path, text: str) -> None:
    """Check the blocks that do not run."""
    known: Names = {"__name__": "__main__"}
    if "<!-- no-run" not in text:
        return
    for block in BLOCK.finditer(text):
        if block["code"] is None:
            continue
        where = f"{page_name(page)}:{text.count(chr(10), 0, block.start('code'))}"
        tree = ast.parse(block["code"])
        if block["why"] is None:
            known.update(bound(tree))
            continue
        why = " ".join(block["why"].split()).removeprefix(":")
        assert REASON.match(why), f"{where}: a block that needs {why!r} can run in a test"
        given = re.search(r"; given ([\w, ]+)", why)
        known.update(dict.fromkeys(given[1].split(", ") if given else [], UNKNOWN))
        said = re.search(r"(\S+\.py) runs it", why)
        assert "run" not in why or said, f"{where}: {why}"
        if said:
            missing = missing_in(ROOT / said[1], tree, page)
            assert not missing, f"{where}: {said[1]} does not have {sorted(missing)}"
        try:
            known.update(bound(tree))
            check_names_of(tree, known)
        except (AssertionError, AttributeError, ImportError) as error:
            raise AssertionError(f"{where}: {error}") from error


def test_blocks_that_cannot_run_name_what_exists():
    for page in PAGES:
        check_page(page, page.read_text())


BROKEN = {
    "no such name": ("several processes", "OptimizerState()", "nothing binds: ..OptimizerState"),
    "no such import": ("a CUDA GPU", "from torch import Tensors", "Tensors"),
    "no such attribute": ("GPUs", "import torch\ntorch.nn.Linears(1, 2)", "Linears"),
    "no such argument": ("a GPU", "import torch\ntorch.nn.Linear(1, 2, biased=True)", "biased"),
    "in a function": ("a GPU", "def f(x):\n    return x + y", "nothing binds: ..y"),
    "could run": ("matplotlib", "print()", "can run in a test"),
    "runs nowhere": ("a GPU; dev.py runs it", "print('nowhere')", "dev.py does not have"),
}


@pytest.mark.parametrize(("why", "code", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_what_is_wrong_with_a_block_is_said(why: str, code: str, message: str):
    text = f"# Page\n\n<!-- no-run: needs {why} -->\n```python\n{code}\n```\n"
    with pytest.raises(AssertionError, match=message):
        check_page(ROOT / "docs" / "index.md", text)
