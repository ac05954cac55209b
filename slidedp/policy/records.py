"""What the policy considered and decided, as plain data that widgets show and a run folder keeps."""

import dataclasses
import html
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
"""Version of the JSON form. It rises when a field changes its meaning or goes away."""
GIB = 2**30
SHOWN = 16
"""Candidates that a record's table has at most."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout that a stage looked at."""

    layout: dict[str, Any]
    """Fields of slidedp.Layout."""
    predicted_seconds: float
    """Steady step time by the model."""
    measured_seconds: float | None = None
    """Median of real steps, where it was tried."""
    bound_seconds: float
    """The longest demand on any one resource."""
    binding: str
    """The resource that decides the step."""
    exposed: dict[str, float]
    """Seconds that compute waits in a step, by cause."""
    gpu_bytes: int
    """Of one rank."""
    host_bytes: int
    """Of the whole machine; on a CPU the ranks' device memory is in it."""
    fits: bool
    """Whether it is within both budgets. One that does not fit is never chosen by the policy."""
    note: str = ""
    """What sets it apart from the other candidates."""

    @property
    def seconds(self) -> float:
        """Measured if it was tried, else predicted."""
        return self.predicted_seconds if self.measured_seconds is None else self.measured_seconds


@dataclass(frozen=True, kw_only=True)
class Record:
    """One decision: its question, what was considered, what was chosen and why."""

    stage: str
    """`route`, `update`, `buffers`, `activations`, `measure` or `final`."""
    question: str
    candidates: tuple[Candidate, ...] = field(repr=False)
    chosen: int
    """Index of the candidate that goes on."""
    why: str
    flip: str
    """What would have to change for another candidate to win."""
    overridden: bool = False
    """Whether a user chose instead of the policy."""
    cost_seconds: float = 0.0
    """Wall time of the decision; for tried layouts only what their steps took beyond the best one's."""

    @property
    def choice(self) -> Candidate:
        """The candidate that goes on."""
        return self.candidates[self.chosen]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"schema": SCHEMA, **dataclasses.asdict(self), "candidates": [*map(vars, self.candidates)]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Record":
        """A record from `to_dict`, of this version of the schema."""
        values = dict(values)
        schema = values.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(f"policy record of schema {schema!r}: expected {SCHEMA}")
        values["candidates"] = tuple(Candidate(**candidate) for candidate in values["candidates"])
        return cls(**values)

    def _rows(self) -> list[list[str]]:
        """Of the choice and of the fastest others, by their index, which is what `override` takes."""
        every = range(len(self.candidates))
        first = sorted(every, key=lambda i: (i != self.chosen, self.candidates[i].seconds))
        rows = []
        for i in sorted(first[:SHOWN]):
            c = self.candidates[i]
            measured = "" if c.measured_seconds is None else f"{c.measured_seconds:.3f}"
            rows.append(
                [
                    f"→ {i}" if i == self.chosen else f"  {i}",
                    c.note,
                    f"{c.predicted_seconds:.3f}",
                    measured,
                    f"{c.bound_seconds:.3f}",
                    c.binding,
                    f"{c.gpu_bytes / GIB:.2f}",
                    f"{c.host_bytes / GIB:.2f}",
                    "yes" if c.fits else "no",
                ]
            )
        return rows

    def __repr__(self) -> str:
        rows = [HEADINGS, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        by = " (overridden by the user)" if self.overridden else ""
        return "\n".join(
            [
                f"{self.stage}: {self.question}{by}",
                *lines,
                *self._rest(),
                f"why: {self.why}",
                f"flip: {self.flip}",
            ]
        )

    def _rest(self) -> list[str]:
        """How many candidates a table leaves out."""
        rest = len(self.candidates) - SHOWN
        return [f"and {rest} slower ones, which are in record.candidates"] if rest > 0 else []

    def _repr_html_(self) -> str:
        def row(cells: list[str], tag: str, bold: bool = False) -> str:
            weight = ";font-weight:bold" * bold  # in each cell: JupyterLab gives cells a weight of their own
            sides = ["left" if i == 1 else "right" for i in range(len(cells))]  # names left, figures right
            columns = [
                f"<{tag} style='text-align:{side}{weight}'>{html.escape(cell)}</{tag}>"
                for side, cell in zip(sides, cells, strict=True)
            ]
            return f"<tr>{''.join(columns)}</tr>"

        rows = [row(cells, "td", bold="→" in cells[0]) for cells in self._rows()]
        by = " <i>(overridden by the user)</i>" if self.overridden else ""
        return (
            f"<b>{html.escape(self.stage)}</b>: {html.escape(self.question)}{by}"
            f"<table>{row(HEADINGS, 'th')}{''.join(rows)}</table>"
            f"<p>{''.join(f'{line}<br>' for line in self._rest())}"
            f"Why: {html.escape(self.why)}<br>Flip: {html.escape(self.flip)}</p>"
        )


HEADINGS = ["", "candidate", "predicted s", "measured s", "bound s", "binding", "GPU GiB", "host GiB", "fits"]


def save_records(records: list[Record], path: str | Path) -> None:
    """Writes records as JSON."""
    Path(path).write_text(json.dumps([record.to_dict() for record in records], indent=1))


def load_records(path: str | Path) -> list[Record]:
    """Reads what `save_records` wrote."""
    return [Record.from_dict(values) for values in json.loads(Path(path).read_text())]
