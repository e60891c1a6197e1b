"""The API reference shows doctests as code: they stand in docstrings without a heading."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.M)


class Doctests(griffe.Extension):
    """Puts a fence around each doctest before the docstring is read as Markdown."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            fenced = r"```pycon\n\g<0>\n```"
            obj.docstring.value = DOCTEST.sub(fenced, obj.docstring.value)
