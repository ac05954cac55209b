"""Small HTML tables, which notebooks show for plans and runs."""

import html
from collections.abc import Iterable


def html_table(title: str, rows: Iterable[Iterable[str]]) -> str:
    """A titled table; everything is escaped."""
    lines = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<b>{html.escape(title)}</b><table>{lines}</table>"
