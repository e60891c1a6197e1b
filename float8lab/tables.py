"""Format rows and columns of text as aligned lines or as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["aligned", "html_table"]


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Format rows of cells as lines: the first ``left`` columns aligned left, the others right.

    It does not use rich, because it must print without any extra installed.

    >>> print("\\n".join(aligned([("layer", "us"), ("0", "1200")])))
    layer    us
    0      1200
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def html_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[bool] = ()
) -> str:
    """Format rows of cells as an HTML table; ``marked`` rows have the class ``wrong``."""

    def line(kind: str, cells: Sequence[str], attribute: str = "") -> str:
        return f"<tr{attribute}>{''.join(f'<{kind}>{escape(c)}</{kind}>' for c in cells)}</tr>"

    body = [
        line("td", row, " class=wrong" * is_marked)
        for row, is_marked in zip(rows, marked or [False] * len(rows), strict=True)
    ]
    head = f"<thead>{line('th', columns)}</thead>"
    return "\n".join([f"<table>{head}<tbody>", *body, "</tbody></table>"])
