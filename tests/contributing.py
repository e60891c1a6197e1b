"""The examples of CONTRIBUTING.md, which tests define and run."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def example(section: str, name: str) -> Any:
    """Return what the only Python block of a section defines under a name."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {section}\n", 1)[1]
    (block,) = re.findall(r"```python\n(.*?)```", text.split("\n## ", 1)[0], re.S)
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    return names[name]
