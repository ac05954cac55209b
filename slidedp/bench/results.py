"""The JSON files of `slidedp bench --json` as one table."""

import json
from pathlib import Path

import pandas as pd

from slidedp.bench.shapes import title
from slidedp.bench.table import describe
from slidedp.errors import ConfigError

COLUMNS = [
    "model", "ranks", "length", "batch", "system", "how", "step_seconds", "tokens_per_second",
    "tflops_per_gpu", "gpu_peak_gib", "host_gib", "error", "gpu", "torch", "date", "file",
]  # fmt: skip


def load_results(folder: str | Path) -> pd.DataFrame:
    """One row per measurement of every JSON file in `folder`; none if there is no file or no folder.

    batch: sequences per rank; length: tokens per sequence; how: the layout, or a peer's mode;
    tokens_per_second over all ranks; tflops_per_gpu without recomputation; *_gib: GiB at most; error: why
    it was not measured, which has no other figures. Raises ConfigError for a file of another kind.
    """
    rows = []
    for path in sorted(Path(folder).glob("*.json")):
        try:
            content = json.loads(path.read_text())
            head = {name: content[name] for name in ("ranks", "length", "gpu", "torch", "date")}
            for measured in content["measured"]:
                found = {name: measured.get(name) for name in COLUMNS if name in measured}
                name = title(content["size"], content.get("layers"))
                rows.append({"model": name, "how": describe(measured), "file": path.name, **head, **found})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: not what `slidedp bench --json` writes: {error!r}") from error
    return pd.DataFrame(rows, columns=COLUMNS)
