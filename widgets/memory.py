"""Memory as bars: the parts of a plan, what is free, and what was measured."""

import html
from itertools import cycle
from typing import Any

from slidedp.memory_plan import GIB

PARTS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999",
    "#332288", "#882255", "#44AA99", "#DDCC77",
)  # fmt: skip
"""Okabe and Ito's colours and grey; then some of Tol's, for a plan of many parts."""


def memory_bars(memory: dict[str, Any], ranks: int, measured: dict[str, float] | None = None) -> str:
    """HTML: one bar per budget, its parts, and what is free; `memory` is that of `Plan.memory()`.

    `measured` has bytes beside the plan's: of `host` (all processes of the run) and `device` (the rank
    with the most), where they are known.
    """
    measured = measured or {}
    host, device = dict(memory["host"]), dict(memory["device"])
    if memory["device_available"] is None:  # on a CPU, the ranks' device memory is host memory
        host |= {f"{name}, {ranks} ranks": ranks * size for name, size in device.items()}
        return _bar("host memory", host, memory["host_available"], measured.get("host"))
    return _bar("host memory", host, memory["host_available"], measured.get("host")) + _bar(
        "GPU memory, each rank", device, memory["device_available"], measured.get("device")
    )


def size(nbytes: float) -> str:
    """Bytes for reading."""
    for unit, scale in (("GiB", GIB), ("MiB", 2**20)):
        if nbytes >= scale / 2:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes / 2**10:.0f} KiB"


def _bar(what: str, parts: dict[str, int], budget: int, measured: float | None) -> str:
    used = sum(parts.values())
    # A small model beside a large machine would be a bar without width: then the bar is the plan's own.
    longest = max(used, measured or 0.0)
    full = max(longest, budget) if longest > budget / 20 else 1.2 * longest
    cells, keys = [], []
    for (name, nbytes), color in zip(parts.items(), cycle(PARTS), strict=False):
        label = f"{html.escape(name)}: {size(nbytes)}"
        width = 100 * nbytes / full
        cells.append(f"<div title='{label}' style='width:{width:.3f}%;background:{color};height:18px'></div>")
        keys.append(f"<span style='white-space:nowrap'><span style='color:{color}'>■</span> {label}</span>")
    text = f"plan {size(used)} of {size(budget)} free"
    if used > budget:
        text = f"<b style='color:#B03A00'>{text}: does not fit, {size(used - budget)} too much</b>"
    marks = _mark(budget, full, "2px solid #000", "free") if budget <= full else ""
    if measured:
        text += f", measured {size(measured)} (dashed)"
        marks += _mark(measured, full, "2px dashed #000", "measured")
    return (
        f"<div style='margin:6px 0 2px 0'>{what}: {text}</div>"
        "<div style='position:relative;width:560px;background:#eee'>"
        f"<div style='display:flex'>{''.join(cells)}</div>{marks}</div>"
        f"<div style='width:560px;font-size:11px;line-height:1.5'>{' &nbsp; '.join(keys)}</div>"
    )


def _mark(at: float, full: float, line: str, title: str) -> str:
    return (
        f"<div style='position:absolute;left:{100 * at / full:.3f}%;top:-3px;height:24px;border-left:{line}' "
        f"title='{title}'></div>"
    )
