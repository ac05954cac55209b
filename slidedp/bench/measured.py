"""The file of `slidedp.bench.predicted`: what layouts took on real machines, beside the rates of these.

It holds nothing that the step-time model says. That is computed when the file is read, by the model as it is.
"""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from slidedp.errors import ConfigError
from slidedp.layout import Layout
from slidedp.policy.rates import Rates, Workload
from slidedp.policy.step_time import predict

CHOICE = "the policy's choice"
"""The note of a row that was measured under the policy's layout."""


class Measured(NamedTuple):
    """One workload on one machine."""

    model: str
    batch: int
    """Sequences per rank."""
    length: int
    """Tokens per sequence."""
    gpu: str
    date: str
    workload: dict[str, Any]
    """Fields of Workload."""
    probed: dict[str, Any]
    """Rates.to_dict of a probe."""
    corrected: dict[str, Any] | None
    """The same after the run's first timeline; None where that corrected nothing."""
    rows: list[dict[str, Any]]
    """Each a `layout`, as a dict of its fields, a `note`, `measured_seconds` and, in newer files, `busy`, the
    part of the step in which compute did not wait, and `update_seconds` of the worker: layouts that give it
    the same work tell whether the host was disturbed."""
    tuning_seconds: float | None = None
    """What probe, decisions and trials have cost, as the policy's last record says."""
    remark: str = ""


def write(path: Path, found: list[Measured]) -> None:
    """Replaces the file."""
    path.write_text(json.dumps([workload._asdict() for workload in found], indent=1) + "\n")


def read(path: Path) -> list[Measured]:
    """What `write` wrote. ConfigError for another file."""
    try:
        return [Measured(**fields) for fields in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not what slidedp.bench.predicted writes: {error}") from error


def predictions(found: Measured) -> Iterator[dict[str, Any]]:
    """The rows of a workload with what the model says of each, in seconds: `probed_seconds` from the probe's
    rates, `predicted_seconds` from the corrected ones, where there are any."""
    workload, probed = Workload(**found.workload), Rates.from_dict(found.probed)
    corrected = probed if found.corrected is None else Rates.from_dict(found.corrected)
    for row in found.rows:
        layout = Layout(**row["layout"])
        p = predict(workload, corrected, layout)
        yield {
            "model": found.model,
            "ranks": workload.ranks,
            "batch": found.batch,
            **row,
            "probed_seconds": predict(workload, probed, layout).step_seconds,
            "predicted_seconds": p.step_seconds,
            "bound_seconds": p.bound_seconds,
            "binding": p.binding,
        }


def accuracy(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Errors of the predictions as fractions, the rank correlation, and how much slower the policy's choice
    was than the fastest row."""
    table = pd.DataFrame(rows)
    errors = [abs(row["predicted_seconds"] / row["measured_seconds"] - 1) for row in rows]
    fastest = min(row["measured_seconds"] for row in rows)
    choice = [row["measured_seconds"] for row in rows if row["note"] == CHOICE]
    return {
        "layouts": len(rows),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "rank_correlation": float(table["measured_seconds"].rank().corr(table["predicted_seconds"].rank())),
        "choice_behind_best": min(choice) / fastest - 1 if choice else float("nan"),
    }
