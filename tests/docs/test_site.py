"""The documentation as a site: complete, built without a warning, and usable without a network."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(ROOT.glob("docs/api/*.md"))
DIRECTIVES = {
    name: page for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)
}
SLOW_MODULES = re.compile("accelerate|lightning|torchtitan|transformers")
"""These modules take seconds to import, or cannot be imported; they have their own tests."""
MODULES = (
    "float8lab", "float8lab.recipes", "float8lab.nn", "float8lab.router", "float8lab.inspect",
    "float8lab.optim", "float8lab.integrations", "float8lab.distributed",
)  # fmt: skip


def resolve(dotted: str):
    """Return an object by its dotted name."""
    value = importlib.import_module("float8lab")
    for part in dotted.split(".")[1:]:
        if inspect.ismodule(value) and not hasattr(value, part):
            importlib.import_module(f"{value.__name__}.{part}")  # float8lab does not import it
        value = getattr(value, part)
    return value


def test_every_public_name_is_in_the_reference():
    documented = {id(resolve(name)) for name in DIRECTIVES if not SLOW_MODULES.search(name)}
    for module, name in [(owner, name) for owner in MODULES for name in resolve(owner).__all__]:
        value = resolve(f"{module}.{name}")
        if inspect.ismodule(value):
            assert (ROOT / "docs" / "api" / f"{name}.md").exists()
        else:
            assert id(value) in documented, f"docs/api/ must have a line '::: {module}.{name}'"


def test_every_name_in_the_reference_exists_and_has_a_docstring():
    names = [name for name in DIRECTIVES if not SLOW_MODULES.search(name)]
    assert [name for name in names if not inspect.getdoc(resolve(name))] == []


class References(HTMLParser):
    """The files that a browser loads to show a page, and the anchors of the page."""

    def __init__(self, page: Path):
        super().__init__()
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if "id" in values:
            self.anchors.add(values["id"])
        if tag in ("script", "img", "iframe", "source") and values.get("src"):
            self.loaded.append(values["src"])
        if tag == "link" and values.get("rel") not in ("next", "prev", "canonical"):
            self.loaded.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for library in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(library, reason="needs the extra 'dev'")
    folder = tmp_path_factory.mktemp("site")
    process = subprocess.run(  # without --quiet, which also hides warnings from --strict
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return folder


def test_built_pages_load_nothing_from_elsewhere(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        for target in References(page).loaded:
            file = page.parent / unquote(re.sub(r"[?#].*", "", target))
            # The 404 page has absolute links, since it is served for any address.
            is_error_page = page.name == "404.html" and target.startswith("/")
            assert is_error_page or file.is_file(), f"{page.relative_to(site)} loads {target}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text()), style


def test_built_pages_have_a_dark_theme_and_a_date(site: Path):
    page = (site / "moe.html").read_text()
    assert {"default", "slate"} <= set(re.findall(r'data-md-color-scheme="(\w+)"', page))
    if (ROOT / ".git").exists():
        assert re.search(r'title="Last update">.*?\d{4}-\d\d-\d\d', page, re.S)


def test_the_built_reference_has_an_anchor_for_every_name(site: Path):
    anchors = {page: References(site / "api" / f"{page.stem}.html").anchors for page in PAGES}
    for name, page in DIRECTIVES.items():
        assert name in anchors[page], f"{page.name} lacks {name}"
    assert '<span class="gp">&gt;&gt;&gt; </span>' in (site / "api" / "float8lab.html").read_text()
