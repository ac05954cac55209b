"""The layouts that each stage of AutoPolicy compares."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from slidedp.layout import DELIVERIES, REDUCTIONS, TURN, Layout
from slidedp.policy.candidates import Candidates
from slidedp.policy.words import describe_modes
from slidedp.preflight import frugal

CHUNKS = tuple(2**20 * mib for mib in (8, 16, 32, 64, 128, 256, 512))
WINDOWS = (3, 4, 6)
GRADIENT_SLOTS = (2, 3)
"""Fewer only where the config says so, or nothing else fits: what they save is little, and the model has
none of the small delays that a spare buffer hides."""
NEAR = 1.15
"""What is predicted to take longer than the best by more than this factor is not looked at further."""


def options(c: Candidates, stage: str, now: Layout) -> Iterator[tuple[Layout, str]]:
    """Layouts that a stage compares, starting from `now`, and what sets each apart."""
    if stage == "route":
        if c.plan.config.optimizer.clip_norm is None:  # the schedule that most runs end up with
            early = dataclasses.replace(now, schedule="in_backward", landing="full")
            now = early if c.fit(early) else now
        if c.workload.ranks == 1:
            yield _routed(c, now), "the only rank copies all itself"
            return
        for delivery in DELIVERIES:
            for reduction in REDUCTIONS:
                routed = _routed(c, now, delivery=delivery, reduction=reduction)
                yield routed, f"{delivery} + {reduction}"
    elif stage == "update":
        for pieces in _pieces(c, now):
            cut = (
                f", vocabulary in {pieces} pieces" if pieces != c.plan.config.layout.vocabulary_pieces else ""
            )
            for layout, note in _ways(c, dataclasses.replace(now, vocabulary_pieces=pieces)):
                yield layout, note + cut
    elif stage == "buffers":
        usual = {*GRADIENT_SLOTS, c.plan.config.layout.gradient_slots}
        found = [*_buffers(c, now, usual)]
        if not any(c.fit(layout) for layout, _ in found):
            found = [*_buffers(c, now, {now.gradient_slots})]
        yield from found
    elif stage == "activations":
        for layout in c.mixes(now):
            yield layout, describe_modes(layout, c.workload.layers)


def _suited(c: Candidates, layout: Layout) -> dict[int, Layout]:
    """A route, by the pieces of the vocabulary, with about the updates that suit it: one that updates on
    the GPUs would otherwise be judged by what the worker makes of it. Only what fits."""
    units, counts = c.workload.layers + 2, {0}
    if layout.reduction == "gpu":
        counts.add(c.lightest.gpu_updates)  # nothing less may fit
        if c.rates.gpu_update:
            counts |= {units // 2, units}
    found = {}
    for pieces in sorted({c.plan.config.layout.vocabulary_pieces, frugal(c.plan.model).vocabulary_pieces}):
        ways = [
            dataclasses.replace(
                layout, vocabulary_pieces=pieces, gpu_updates=count, resident_updates=resident
            )
            for count in sorted(counts)
            for resident in sorted({0, count})
        ]
        if best := c.best(map(c.filled, ways)):
            found[pieces] = best
    return found


def _routed(c: Candidates, layout: Layout, **route: str) -> Layout:
    """A layout on another route, as it suits the machine best; as it is if nothing fits."""
    fields: dict[str, Any] = route | {"gpu_updates": 0, "resident_updates": 0}
    layout = dataclasses.replace(layout, **fields)
    return c.best(_suited(c, layout).values()) or layout


def _pieces(c: Candidates, layout: Layout) -> list[int]:
    """Pieces of the vocabulary with which the route may be best once its updates are decided."""
    seconds = {n: c.expected(best) for n, best in _suited(c, layout).items()}
    near = (n for n in seconds if seconds[n] <= NEAR * min(seconds.values()))
    return sorted({layout.vocabulary_pieces, *near})


def _ways(c: Candidates, now: Layout) -> Iterator[tuple[Layout, str]]:
    """Schedules and places of updates, and what sets each apart."""
    schedules = [("in_forward", "full", "in_forward")]
    if c.plan.config.optimizer.clip_norm is None:
        schedules += [
            ("in_backward", "full", "in_backward"),
            ("in_backward", "ring", "in_backward, ring"),
        ]
    for schedule, landing, name in schedules:
        for count in _gpu_updates(c, now):
            if landing == "ring" and count == c.workload.layers + 2:
                continue  # nothing lands
            for resident in sorted({0, count}):
                layout = dataclasses.replace(
                    now,
                    schedule=schedule,
                    landing=landing,
                    gpu_updates=count,
                    resident_updates=resident,
                )
                # A way that is as fast as another behind deliveries may be the faster one without them.
                found = c.best(map(c.filled, (layout, dataclasses.replace(layout, window=c.workload.layers))))
                found = found or c.filled(layout)
                where = f", {count} on GPUs" if count else ""
                stay = ", all layers stay" * (found.window > now.window)
                yield found, name + where + ", resident" * bool(resident) + stay


def _buffers(c: Candidates, now: Layout, gradient_slots: set[int]) -> Iterator[tuple[Layout, str]]:
    """Chunk sizes and windows with so many gradient slots, and what sets each apart."""
    for chunk in _chunk_sizes(c, now):
        for window in sorted({*WINDOWS, now.window, c.workload.layers}):  # the last: all stay
            for slots in sorted(gradient_slots):
                layout = dataclasses.replace(now, chunk_bytes=chunk, window=window, gradient_slots=slots)
                yield c.filled(layout), f"{chunk / 2**20:g} MiB, window {window}, {slots} gradient slot(s)"


def _chunk_sizes(c: Candidates, layout: Layout) -> list[int]:
    """Chunk sizes that cut a layer differently; the layout's own among them."""
    layer = c.workload.layer_params * c.workload.itemsize
    by_count = {-(-layer // chunk): chunk for chunk in sorted(CHUNKS, reverse=True)}
    return sorted({*by_count.values(), layout.chunk_bytes})


def _gpu_updates(c: Candidates, layout: Layout) -> list[int]:
    """Numbers of units to update on the GPUs."""
    if layout.reduction != "gpu" or not c.rates.gpu_update:
        return [0]
    units = c.workload.layers + 2
    # The embedding; the units at the turn from backward to forward; then shares of all.
    turn = 1 + min(layout.window, c.workload.layers, TURN)
    return sorted({0, 1, turn, *(turn + (units - turn) * part // 6 for part in range(1, 7))})
