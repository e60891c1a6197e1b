"""What mkdocs calls while it builds the site: each page says when it was last changed."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@cache
def last_changes() -> dict[str, str]:
    """The date of the last commit that changed each file of docs/; empty outside of a checkout."""
    command = ["git", "log", "--format=date %cs", "--name-only", "--", "docs"]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return {}
    dates: dict[str, str] = {}
    date = ""
    for line in run.stdout.splitlines():
        if line.startswith("date "):
            date = line.removeprefix("date ")
        elif line:
            dates.setdefault(line, date)
    return dates


def on_page_context(context: dict[str, Any], page: Any, **others: Any) -> dict[str, Any]:
    """Set the field from which the theme makes the line "Last update"."""
    date = last_changes().get(f"docs/{page.file.src_uri}")
    if date is not None:
        page.meta["git_revision_date_localized"] = date
    return context
