"""The documentation is true: its examples run, and its links lead to files.

The pages are README.md and docs/**/*.md. The ```python blocks of a page run in order and share one
namespace, in an empty working directory. On the line above a block, ``<!-- no-run: reason -->``
skips the block (tests/docs/test_blocks.py reads it), and ``<!-- needs: pandas -->`` skips it where
the library is absent. ``<!-- raises: ValueError -->`` says that the block must raise that error,
with the message that the heading above it quotes. Docstring examples find ``torch`` and
``float8lab`` imported.
"""

import builtins
import doctest
import functools
import importlib
import importlib.util
import re
import warnings
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

import float8lab

ROOT = Path(__file__).resolve().parents[1]
PAGES = [path for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))] if path.exists()]
MODULES = sorted((ROOT / "float8lab").rglob("*.py"))

# Pages and modules that need another library, which may be absent. Its warnings are no errors.
NEEDS = {
    "docs/finetune_fp8.md": "peft", "docs/lightning.md": "lightning", "docs/peft.md": "peft",
    "docs/quickstart/training.md": "transformers", "docs/rl_weight_sync.md": "accelerate",
    "docs/transformers.md": "accelerate", "float8lab/integrations/accelerate.py": "accelerate",
    "float8lab/integrations/lightning.py": "lightning",
    "float8lab/integrations/torchtitan.py": "torchtitan",
    "float8lab/integrations/transformers.py": "transformers",
}  # fmt: skip

BLOCK = re.compile(
    r"^#+ (?P<heading>[^\n]*)$|"
    r"(?:^<!-- (?:no-run(?P<why>.*?)|raises: (?P<raises>\w+) |needs: (?P<needs>[\w, ]+) )-->\n+)?"
    r"^```python\n(?P<code>.*?)^```$",
    re.M | re.S,
)
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _require_library(path: Path) -> None:
    """Skip the test where a library is absent; ignore warnings, which other tests check."""
    if (library := NEEDS.get(page_name(path))) is not None:
        warnings.simplefilter("ignore")  # pytest restores the filters after the test
        pytest.importorskip(library)


@pytest.mark.parametrize(
    "page",
    [
        # This page runs the whole self-check, and a quick test runs each of its checks.
        pytest.param(page, marks=[pytest.mark.slow] * (page_name(page) == "docs/selfcheck.md"))
        for page in PAGES
    ],
    ids=page_name,
)
def test_page_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _require_library(page)
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": "__main__"}
    heading = ""
    for block in BLOCK.finditer(text):
        if block["heading"] is not None:
            heading = block["heading"]
            continue
        line = text.count("\n", 0, block.start("code"))
        if block["why"] is not None:
            assert block["why"].strip(" :"), f"{page}:{line}: say why: <!-- no-run: reason -->"
            continue
        if not all(map(importlib.util.find_spec, re.findall(r"\w+", block["needs"] or ""))):
            continue  # a library is absent
        code = compile("\n" * line + block["code"], str(page), "exec")  # the page's line numbers
        if block["raises"] is None:
            exec(code, namespace)
        else:
            kind = getattr(builtins, block["raises"])
            with pytest.raises(kind, match=_quoted(heading)) as raised:
                exec(code, namespace)
            assert raised.type is kind, f"{page}:{line}: {raised.type}"


def _quoted(heading: str) -> str:
    """Return a pattern of the message in a heading, where ``...`` is any text."""
    fragments = (
        r"\s+".join(map(re.escape, fragment.split()))
        for fragment in heading.strip("`").split("...")
    )
    return r"^\s*" + r"\s*(?s:.*?)\s*".join(fragments)


def test_troubleshooting_quotes_only_messages_that_are_raised():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^### `", text, re.M)
    raised = re.findall(r"^### `[^\n]*\n(?:(?!^#).*\n)*?<!-- raises: ", text, re.M)
    assert len(quoted) == len(raised) > 30


def test_page_links_lead_to_files():
    for page, link in [(source, link) for source in PAGES for link in _links(source)]:
        target, _, anchor = link["target"].partition("#")
        if re.match(r"[a-z]+:", target):  # another site: no test uses the network
            assert re.match(r"https://[\w.-]+\.[a-z]+(/|$)", target), f"{page}: {target}"
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page}: no file {target}"
        if anchor:
            assert anchor in _anchors(file), f"{page}: {file.name} has no heading #{anchor}"


def _links(page: Path) -> list[re.Match[str]]:
    return [*LINK.finditer(FENCED.sub("", page.read_text()))]


@functools.cache
def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings as on GitHub; mkdocs.yml makes the site use the same."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        assert slug not in anchors, f"{page}: two headings #{slug}, which links cannot tell apart"
        anchors.add(slug)
    return anchors


def _run_docstring_examples(path: Path) -> str:
    """Run the examples of a module; return doctest's report of those that fail."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    finder = doctest.DocTestFinder()
    torch.manual_seed(0)
    for example in finder.find(module, name, extraglobs={"float8lab": float8lab, "torch": torch}):
        runner.run(example, out=report.append)
    return "".join(report) if runner.failures else ""


@pytest.mark.parametrize(
    "path", [path for path in MODULES if page_name(path) in NEEDS], ids=page_name
)
def test_docstring_examples_of_integrations_run(path: Path):
    _require_library(path)
    assert _run_docstring_examples(path) == ""


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES}), ids=page_name)
def test_docstring_examples_run(folder: Path):
    if folder.name == "kernels":
        pytest.importorskip("triton")
    paths = [path for path in MODULES if path.parent == folder and page_name(path) not in NEEDS]
    assert "".join(map(_run_docstring_examples, paths)) == ""


def test_every_picture_is_shown_and_made_by_a_script():
    """A script in docs/ makes each picture; each has an alternative text; none is too large."""
    script = "".join(path.read_text() for path in ROOT.glob("docs/make_*.py"))
    shown = set()
    for page in PAGES:
        for picture in re.finditer(r"!\[(?P<text>[^\]]*)\]\((?P<path>[^)]+)\)", page.read_text()):
            assert len(picture["text"]) > 20, f"{page}: {picture['path']} needs a text"
            shown.add((page.parent / picture["path"]).resolve())
    files = set((ROOT / "docs" / "images").iterdir())
    assert shown == files
    for path in files:
        assert re.search(rf'"{path.stem}["(.]', script), f"{path.name} is made by nothing"
        assert path.stat().st_size < (250_000 if path.suffix == ".png" else 100_000), path.name
    assert sum(path.stat().st_size for path in files) < 1_500_000


def test_pictures_of_terminals_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("rich", "matplotlib", "safetensors", "fcntl"):
        pytest.importorskip(name)
    pictures = importlib.import_module("docs.make_pictures")
    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    pictures.watch(tmp_path)
    pictures.command("env", "env", "--device", "cpu", cwd=tmp_path)
    for name, text in (
        ("watch_table", "layernorm_mlp.fc1"),
        ("watch_find_nan", "(Broken),"),
        ("env", "Float8CurrentScaling"),
    ):
        svg = (tmp_path / f"{name}.svg").read_text()
        assert text in svg
        ElementTree.fromstring(svg)
        assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
