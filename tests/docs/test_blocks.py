"""Python blocks of the documentation that no test can run use only existing names.

Such a block has ``<!-- no-run: reason -->`` above it. Each of its names is a builtin, or bound by
the block or by an earlier block of its page, or listed in the reason: ``given model, mesh``. Every
attribute of a module or class exists, and functions accept the keyword arguments that the block
passes. If the reason says that a file *runs* it, the file has its statements, or reads the page.
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
ALWAYS_IMPORTED = ("float8lab", "torch")
LIBRARIES = {name.removesuffix(".py").replace("/", "."): needed for name, needed in NEEDS.items()}
"""Libraries that modules of the package load."""

UNKNOWN = object()
"""Stands for a value that only running the block would show."""

Names = dict[str, Any]


def names_of_import(node: ast.Import | ast.ImportFrom) -> Names:
    """Return the names that an import statement binds; raise for a name that its library lacks."""
    names: Names = {}
    for alias in node.names:
        name = alias.asname or alias.name.split(".")[0]
        source = node.module if isinstance(node, ast.ImportFrom) else alias.name
        assert source is not None
        library = LIBRARIES.get(source, source.split(".")[0])
        if library not in ALWAYS_IMPORTED and library not in sys.modules:
            names[name] = UNKNOWN  # loading it would take seconds; the blocks that run load it
            continue
        try:
            module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            if error.name == source:
                raise
            names[name] = UNKNOWN  # it needs an optional library
            continue
        if isinstance(node, ast.ImportFrom):
            import_submodule(module, alias.name)
            names[name] = getattr(module, alias.name)
        else:
            names[name] = module if alias.asname else importlib.import_module(name)
    return names


def import_submodule(module: ModuleType, name: str) -> None:
    """Import a submodule of a package that is not an attribute of it yet."""
    missing = not hasattr(module, name) and hasattr(module, "__path__")
    if missing and importlib.util.find_spec(f"{module.__name__}.{name}") is not None:
        importlib.import_module(f"{module.__name__}.{name}")


def bound_names(tree: ast.Module) -> Names:
    """Return the names that a block binds at its top level."""
    table = symtable.symtable(ast.unparse(tree), "block", "exec")
    names: Names = {
        symbol.get_name(): UNKNOWN
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(names_of_import(node))
    return names


def free_names(table: symtable.SymbolTable) -> set[str]:
    """Return the names that a block, or a function in it, takes from outside."""
    is_module = table.get_type() == "module"
    names = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_referenced()
        and (symbol.is_global() if not is_module else not symbol.is_assigned())
        and not symbol.is_imported()
    }
    return names.union(*map(free_names, table.get_children()))


def resolve(node: ast.expr, known_names: Names) -> Any:
    """Return the module, class or function of a dotted name; raise if there is none."""
    if isinstance(node, ast.Name):
        return known_names.get(node.id, UNKNOWN)
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value, known_names)
        if isinstance(owner, (ModuleType, type)):
            if isinstance(owner, ModuleType):
                import_submodule(owner, node.attr)
            return getattr(owner, node.attr)
    return UNKNOWN


def assert_names_exist(tree: ast.Module, known_names: Names) -> None:
    free = free_names(symtable.symtable(ast.unparse(tree), "block", "exec"))
    unknown = {name for name in free if name not in known_names and not hasattr(builtins, name)}
    assert not unknown, f"names that nothing binds: {sorted(unknown)}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            resolve(node, known_names)
        if isinstance(node, ast.Call):
            function = resolve(node.func, known_names)
            constructor = function.__init__ if isinstance(function, type) else function
            if not inspect.isfunction(constructor):
                continue
            parameters = inspect.signature(function).parameters
            if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
                keywords = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                assert keywords <= set(parameters), (
                    ast.unparse(node.func),
                    keywords - set(parameters),
                )


def statements(tree: ast.AST) -> Iterator[str]:
    """Yield statements in a normal form: definitions by name, compound statements by first line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.Import, ast.ImportFrom)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            else:
                yield (
                    ast.unparse(node).split("\n")[0] if hasattr(node, "body") else ast.unparse(node)
                )


def missing_statements(file: Path, tree: ast.Module, page: Path) -> set[str]:
    """Return the statements of a block that are missing in the file said to run it."""
    source = file.read_text()
    if page.name in source:
        return set()  # the file takes the block from the page
    return set(statements(tree)) - set(statements(ast.parse(source)))


def assert_blocks_are_valid(page: Path, text: str) -> None:
    """Check the blocks that do not run."""
    known_names: Names = {"__name__": "__main__"}
    if "<!-- no-run" not in text:
        return
    for block in BLOCK.finditer(text):
        if block["code"] is None:
            continue
        location = f"{page_name(page)}:{text.count(chr(10), 0, block.start('code'))}"
        tree = ast.parse(block["code"])
        if block["why"] is None:
            known_names.update(bound_names(tree))
            continue
        reason = " ".join(block["why"].split()).removeprefix(":")
        assert REASON.match(reason), f"{location}: a block that needs {reason!r} can run in a test"
        given_names = re.search(r"; given ([\w, ]+)", reason)
        known_names.update(
            dict.fromkeys(given_names[1].split(", ") if given_names else [], UNKNOWN)
        )
        file_match = re.search(r"(\S+\.py) runs it", reason)
        assert "run" not in reason or file_match, f"{location}: {reason}"
        if file_match:
            missing = missing_statements(ROOT / file_match[1], tree, page)
            assert not missing, f"{location}: {file_match[1]} does not have {sorted(missing)}"
        try:
            known_names.update(bound_names(tree))
            assert_names_exist(tree, known_names)
        except (AssertionError, AttributeError, ImportError) as error:
            raise AssertionError(f"{location}: {error}") from error


def test_blocks_that_cannot_run_use_existing_names():
    for page in PAGES:
        assert_blocks_are_valid(page, page.read_text())


INVALID_BLOCKS = {
    "no such name": ("several processes", "OptimizerState()", "nothing binds: ..OptimizerState"),
    "no such import": ("a CUDA GPU", "from torch import Tensors", "Tensors"),
    "no such attribute": ("GPUs", "import torch\ntorch.nn.Linears(1, 2)", "Linears"),
    "no such argument": ("a GPU", "import torch\ntorch.nn.Linear(1, 2, biased=True)", "biased"),
    "in a function": ("a GPU", "def f(x):\n    return x + y", "nothing binds: ..y"),
    "could run": ("matplotlib", "print()", "can run in a test"),
    "runs nowhere": ("a GPU; dev.py runs it", "print('nowhere')", "dev.py does not have"),
}


@pytest.mark.parametrize(
    ("reason", "code", "message"), INVALID_BLOCKS.values(), ids=INVALID_BLOCKS.keys()
)
def test_errors_of_invalid_blocks_name_the_fault(reason: str, code: str, message: str):
    text = f"# Page\n\n<!-- no-run: needs {reason} -->\n```python\n{code}\n```\n"
    with pytest.raises(AssertionError, match=message):
        assert_blocks_are_valid(ROOT / "docs" / "index.md", text)
