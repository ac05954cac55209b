"""Better rates from a real step: what a run's timeline says where a probe could only estimate."""

import dataclasses
from statistics import median
from typing import Any

import pandas as pd

from slidedp.layout import NOTHING, Layout
from slidedp.policy.demands import demands
from slidedp.policy.rates import GROUPS, Rates, Workload
from slidedp.policy.step_time import predict
from slidedp.stream.timeline import Span
from slidedp.telemetry import RunLog

WIDEST = 20.0
"""A span that is off by more than this factor was disturbed, by a compilation for one: no correction."""
CLOSE = 0.02
"""Relative difference of spans that needs no further correction."""
THREADS = ("enqueue_forward", "enqueue_backward", "enqueue_operation")
ROUNDS = 6
"""Corrections at most."""


def calibrated(rates: Rates, workload: Workload, layout: Layout, log: RunLog, step: int) -> Rates:
    """`rates`, corrected by the timeline of `step`, which ran under `layout`.

    Compute is taken as measured, and modes that the step did not use change in proportion; where the model
    says that the GPU waits for the threads that enqueue, these are corrected instead. Links,
    collectives and the worker are scaled until the model's spans are as long as the measured ones. Without
    a timeline of that step the rates come back as they are.
    """
    measured = log.timeline(step)
    if measured.empty:
        return rates
    rates = _with_compute(rates, workload, layout, measured, log, step)
    there = {workload.unit_name(unit) for unit in workload.updated_on_gpu(layout)}
    # Rates of what runs at the same time depend on each other, so one correction shifts the next.
    for _ in range(ROUNDS):
        spans = predict(workload, rates, layout, timeline=True).timeline
        predicted = pd.DataFrame(spans, columns=Span._fields)
        delivery = _ratio(measured, predicted, "deliver")
        reduction = _ratio(measured, predicted, "reduce")
        by_worker = [table[~table["unit"].isin(there)] for table in (measured, predicted)]
        update = _ratio(by_worker[0], by_worker[1], "update")
        between = (delivery * reduction) ** 0.5
        factors = {"up": delivery, "up_all": delivery, "down": reduction, "down_all": reduction}
        factors |= {"both": between, "both_all": between} | dict.fromkeys(GROUPS["collectives"], between)
        factors |= dict.fromkeys(GROUPS["update"], update)
        rates = dataclasses.replace(rates, **{name: getattr(rates, name) / f for name, f in factors.items()})
        if max(abs(f - 1) for f in factors.values()) < CLOSE:
            break
    return rates


def _ratio(measured: pd.DataFrame, predicted: pd.DataFrame, phase: str) -> float:
    """How much longer a layer's spans of one phase are than the model says."""
    lengths = []
    for table in (measured, predicted):
        rows = table[(table["phase"] == phase) & table["unit"].str.startswith("layers.")]
        # The worker may serve a layer in several pieces.
        per_unit = (rows["end"] - rows["start"]).groupby(rows["unit"]).sum() if phase == "update" else None
        seconds = rows["end"] - rows["start"] if per_unit is None else per_unit
        if seconds.empty or median(seconds) <= 0:
            return 1.0
        lengths.append(median(seconds))
    return _sound(lengths[0] / lengths[1])


def _sound(ratio: float) -> float:
    return ratio if 1 / WIDEST < ratio < WIDEST else 1.0


def _with_compute(
    rates: Rates, workload: Workload, layout: Layout, measured: pd.DataFrame, log: RunLog, step: int
) -> Rates:
    """The rates of compute as the step's own spans show them."""
    ranks = measured[measured["rank"] >= 0]
    seconds = (ranks["end"] - ranks["start"]) / 1e3
    layers = ranks["unit"].str.startswith("layers.")
    modes = workload.modes(layout)

    def typical(phase: str, units: list[str] | None = None, embed: bool = False) -> float | None:
        rows = (ranks["phase"] == phase) & (layers != embed if phase == "forward" else True)
        if units is not None:
            rows &= ranks["unit"].isin(units)
        found = seconds[rows]
        return None if found.empty else float(median(found))

    tasks = demands(workload, rates, layout)
    beside = tasks.forward - rates.forward  # of updates on the GPU, which the rates leave out
    forward = max(1e-9, (typical("forward") or tasks.forward) - beside)
    changes: dict[str, Any] = {}
    ratios, of_threads = [1.0], []
    if tasks.enqueue_forward > rates.forward:
        of_threads.append(forward / tasks.enqueue_forward)
    else:
        changes["forward"] = forward
        ratios = [forward / rates.forward]
    for mode in {*modes} - {NOTHING}:
        names = [f"layers.{i}" for i, m in enumerate(modes) if m == mode]
        found = typical("backward", names)
        layer = modes.index(mode)
        enqueue, probed = tasks.enqueue_backward[layer], rates.backward(mode, workload.kept_part(layout))
        if found is not None:
            found = max(1e-9, found - (tasks.backward[layer] - probed))
        if found is not None and enqueue > probed:
            of_threads.append(found / enqueue)
        elif found is not None:
            ratios.append(found / probed)
            keeps = mode in ("keep", "partial", "spill")
            if mode == "keep" or (keeps and workload.kept_part(layout) == 1):
                changes["backward_keep"] = found
            elif not keeps:
                changes["backward_recompute"] = found
    ratio = _sound(median(ratios[1:] or ratios))  # backwards stand for backwards
    for name in ("backward_keep", "backward_recompute"):
        changes.setdefault(name, getattr(rates, name) * ratio)
    partial = tuple((budget, s * ratio) for budget, s in rates.backward_partial)
    changes["head"] = typical("head") or rates.head
    changes["embed_forward"] = typical("forward", embed=True) or rates.embed_forward
    if of_threads:
        factor = _sound(median(of_threads))
        changes |= {name: getattr(rates, name) * factor for name in THREADS}
    if not rates.synchronous:  # a GPU's gaps between spans are its threads'
        return dataclasses.replace(rates, backward_partial=partial, **changes)
    # What no span covers: gradients copied into their buffers, and the embedding's backward.
    whole = [e["compute_seconds"] for e in log.events("step") if e["step"] == step]
    covered = seconds[ranks["track"] == "compute"].sum() / len(whole)
    copied = workload.trained_params * (workload.itemsize + workload.gradient_itemsize) / rates.device_copy
    rest = max(0.0, float(sum(whole) / len(whole) - covered - copied))
    if rest < 0.2 * covered:  # else it is the first steps' own work, which later ones do not repeat
        changes["embed_backward"] = rest
    return dataclasses.replace(rates, backward_partial=partial, **changes)
