"""What a run reports, as DataFrames of its events; of a live run and of a finished one (`open_run`)."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from slidedp.config import Config
from slidedp.events import EventLog
from slidedp.hold import is_held
from slidedp.tables import html_table

PEAK_TFLOPS = {
    "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "A800": 312, "L40S": 362,
    "RTX 5090": 209, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip
"""Dense BF16 matrix products as data sheets state them, by a part of the GPU's name; the first one counts."""
ROUTED = ("router_loss", "expert_load")
"""Metrics of a mixture of experts; rank 0 reports them for all."""
TRACES = "traces"
"""Folder of the run folder that `Run.profile` writes to."""


class RunLog(EventLog):
    """The events of one run, as tables of what is there so far."""

    def _summary(self) -> list[tuple[str, str]]:
        rows = [
            ("status", self.status),
            ("step", f"{self.steps_done} of {self.description['config']['steps']}"),
        ]
        metrics = self.metrics()
        if len(metrics):
            rows.append(("loss", f"{metrics['loss'].iloc[-1]:.4f} nats per target token"))
            rows.append(("speed", f"{metrics['tokens_per_second'].median():,.0f} target tokens/s (median)"))
        machine = self.description["gpu"] or "CPU"
        parameters = f"{self.description['parameters'] / 1e6:,.1f} M parameters"
        rows.append(("ranks", f"{self.description['ranks']} on {machine}, {parameters}"))
        return [*rows, ("folder", str(self.folder))]

    def __repr__(self) -> str:
        return "RunLog(" + ", ".join(f"{name} {text}" for name, text in self._summary()) + ")"

    def _repr_html_(self) -> str:
        return html_table("Run folder", self._summary())

    @property
    def status(self) -> str:
        """`running`, `finished`, `stopped`, `failed`, or `broken off`: its launcher was killed."""
        ends = self.events("end")
        return ends[-1]["status"] if ends else "running" if is_held(self.folder) else "broken off"

    @property
    def steps_done(self) -> int:
        """Steps whose compute has been reported by every rank, those before a resume included."""
        last: dict[int, int] = {}
        for event in reversed(self.events("step")):
            last.setdefault(event["rank"], event["step"])
            if len(last) == int(self.description["ranks"]):
                return min(last.values()) + 1
        return int(self.description.get("first_step", 0))

    @property
    def peak_tflops(self) -> float | None:
        """Of one GPU with 16-bit inputs; None where it is not known."""
        name = self.description.get("gpu") or ""
        return next((float(peak) for part, peak in PEAK_TFLOPS.items() if part in name), None)

    def ranks(self) -> pd.DataFrame:
        """One row per step and rank, in that order.

        loss: mean over the rank's targets; gpu_peak_gib, allocator_retries: the most and the number so far
        (each retry stalls the GPU: the layout takes too much memory); wait_<cause>: seconds of its compute.
        """
        rows = []
        for e in sorted(self.events("step"), key=lambda e: (e["step"], e["rank"])):
            waits = {f"wait_{cause.replace(' ', '_')}": s for cause, s in e["wait_seconds"].items()}
            rows.append(
                {
                    "step": e["step"],
                    "rank": e["rank"],
                    "loss": e["loss_sum"] / max(1, e["targets"]),
                    "loss_sum": e["loss_sum"],
                    "targets": e["targets"],
                    "compute_seconds": e["compute_seconds"],
                    "step_seconds": math.nan if e["step_seconds"] is None else e["step_seconds"],
                    "gpu_peak_gib": e["gpu_peak_bytes"] / 2**30,
                    "allocator_retries": e["allocator_retries"],
                    **waits,
                }
            )
        columns = ["step", "rank", "loss", "targets", "compute_seconds", "step_seconds"]
        columns += ["gpu_peak_gib", "allocator_retries"]
        return pd.DataFrame(rows, columns=None if rows else columns)

    def metrics(self) -> pd.DataFrame:
        """One row per step, over all ranks.

        loss: mean over all targets; tokens_per_second: target tokens only; tflops_per_gpu: model FLOPs
        without recomputation; mfu: their share of the GPU's peak, NaN where that is not known; busy:
        fraction of the step in which compute did not wait; lr, gradient_norm (before clipping),
        update_seconds: of the worker. If the run evaluates, eval_loss and perplexity are of the weights
        that the step started from, as loss is; see `evaluations`. Of a mixture of experts, router_loss is
        the load-balancing loss, unweighted and no part of loss, and expert_load what the fullest expert of
        any layer takes, in multiples of an even share; see `experts`.
        """
        ranks = self.ranks()
        names = ["loss", "targets", "step_seconds", "tokens_per_second", "tflops_per_gpu", "mfu", "busy"]
        if ranks.empty:
            return pd.DataFrame(columns=["step", *names]).set_index("step")
        waits = [c for c in ranks if c.startswith("wait_")]
        ranks["waiting"] = ranks[waits].fillna(0).sum(axis=1) if waits else 0.0
        groups = ranks.groupby("step")
        complete = groups["rank"].count() == int(self.description["ranks"])
        table = pd.DataFrame(
            {
                "loss": groups["loss_sum"].sum() / groups["targets"].sum(),
                "targets": groups["targets"].sum(),
                "step_seconds": groups["step_seconds"].max(),
                "busy": 1 - groups["waiting"].mean() / groups["compute_seconds"].mean(),
            }
        )
        table["tokens_per_second"] = table["targets"] / table["step_seconds"]
        flops = float(self.description["flops_per_token"])
        per_rank = table["tokens_per_second"] / int(self.description["ranks"])
        table["tflops_per_gpu"] = per_rank * flops / 1e12
        table["mfu"] = table["tflops_per_gpu"] / (self.peak_tflops or math.nan)
        table = table[complete][names]
        routed = [event for event in self.events("step") if "router_loss" in event]
        if routed:
            table = table.join(pd.DataFrame(routed).set_index("step")[list(ROUTED)])
        updates = pd.DataFrame(self.events("update"))
        if not updates.empty:
            table = table.join(
                updates.drop(columns=["kind", "spans", "anonymous_bytes"], errors="ignore").set_index("step")
            )
        evaluations = self.evaluations()
        if not evaluations.empty:
            table = table.join(evaluations[["eval_loss", "perplexity"]])
        return table

    def evaluations(self) -> pd.DataFrame:
        """One row per evaluation on held-out data, by the number of steps done before it.

        eval_loss: mean over all held-out targets; perplexity: its exponential; seconds: of the slowest rank.
        """
        columns = ["eval_loss", "perplexity", "targets", "seconds"]
        events = pd.DataFrame(self.events("eval"), columns=["step", "loss_sum", "targets", "seconds"])
        groups = events.groupby("step")
        complete = groups.size() == int(self.description["ranks"])
        table = groups.agg({"loss_sum": "sum", "targets": "sum", "seconds": "max"})[complete]
        table["eval_loss"] = table["loss_sum"] / table["targets"]
        table["perplexity"] = np.exp(table["eval_loss"])
        return table[columns]

    def experts(self) -> pd.DataFrame:
        """One row per expert and layer of a mixture, once in EXPERTS_EVERY steps: step, layer, expert and
        the tokens of all ranks that went there (padding left out)."""
        rows = [
            (event["step"], layer, expert, tokens)
            for event in self.events("step")
            for layer, experts in enumerate(event.get("expert_tokens", ()))
            for expert, tokens in enumerate(experts)
        ]
        return pd.DataFrame(rows, columns=["step", "layer", "expert", "tokens"])

    def timeline(self, step: int) -> pd.DataFrame:
        """Spans of a sampled step: rank, track, unit, phase, start and end in ms since the rank's compute
        began the step. The worker's spans (rank -1, track `update`) count from when rank 0's did."""
        columns = ["rank", "track", "unit", "phase", "start", "end"]
        events = [e for e in self.events("step") if e["step"] == step]
        rows = [(e["rank"], *span) for e in events for span in self._details(e, "timeline")]
        issued = next((e["began"] for e in events if e["rank"] == 0), 0.0)
        rows += [
            (-1, "update", unit, "update", (start - issued) * 1e3, (end - issued) * 1e3)
            for unit, start, end in self.worker_spans(step)
        ]
        return pd.DataFrame(rows, columns=columns)

    def worker_spans(self, step: int) -> list[tuple[str, float, float]]:
        """(unit, start, end) of what the worker updated in a sampled step, in seconds since the epoch."""
        return [
            span for e in self.events("update") if e["step"] == step for span in self._details(e, "spans")
        ]

    def sampled_steps(self) -> list[int]:
        """Steps that have a full timeline."""
        return sorted({e["step"] for e in self.events("step") if "timeline" in e})


def open_run(folder: str | Path) -> RunLog:
    """The metrics and timelines of a run folder, whether the run goes on or not."""
    return RunLog.read(Path(folder))


def describe(
    config: Config,
    flops_per_token: float,
    parameters: int,
    gpu: str | None,
    memory: dict[str, Any],
    first_step: int = 0,
) -> dict[str, Any]:
    """What the run folder records about a run besides its events; plain JSON. `memory` is the plan's."""
    plain = dataclasses.asdict(dataclasses.replace(config, model=""))
    plain["model"] = config.model if isinstance(config.model, str) else config.model.to_dict()
    return {
        "config": plain,
        "ranks": config.ranks,
        "flops_per_token": flops_per_token,
        "parameters": parameters,
        "gpu": gpu,
        "memory": memory,
        "first_step": first_step,
    }
