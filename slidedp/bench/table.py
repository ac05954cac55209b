"""What a measurement holds, and how it is printed. All systems are counted alike."""

from typing import Any

WARM_UP = 4
"""Steps left out of the medians: compilation, first collectives, caches."""


def speed(step_seconds: float, tokens: int, flops_per_token: float, ranks: int) -> dict[str, float]:
    """`tokens` are target tokens of a step over all ranks; FLOPs without recomputation."""
    return {
        "step_seconds": step_seconds,
        "tokens_per_second": tokens / step_seconds,
        "tflops_per_gpu": tokens / step_seconds * flops_per_token / ranks / 1e12,
    }


def row(model: str, ranks: int, measured: dict[str, Any]) -> str:
    """One line of the table."""
    head = f"{model:<11} {ranks} x batch {measured['batch']:<4}{measured['system']:<14}"
    if "error" in measured:
        return f"{head} {measured['activations']:<22} {measured['error']}"
    text = (
        f"{head} {describe(measured):<58} {measured['step_seconds']:7.3f} s "
        f"{measured['tokens_per_second']:9,.0f} tokens/s {measured['tflops_per_gpu']:5.0f} TFLOPS/GPU "
        f"{measured['gpu_peak_gib']:6.1f} GiB/GPU"
    )
    if "tuning_seconds" in measured:
        text += f"  chosen in {measured['tuning_seconds']:.0f} s"
    if "wait_seconds" in measured:
        text += f"  waits {sum(measured['wait_seconds'].values()):.3f} s"
    return text


def describe(measured: dict[str, Any]) -> str:
    """How the step was carried out, in a few words."""
    layout = measured.get("layout")
    if layout is None:
        kept = measured.get("activations")
        return {None: "", "none": "all kept", "full": "inputs kept"}.get(kept, f"{kept} of activations kept")
    modes = layout["activations"]
    if not isinstance(modes, str):
        modes = "+".join(f"{list(modes).count(m)} {m}" for m in dict.fromkeys(modes))
    if "partial" in modes:
        modes += f" {layout['partial_budget']:g}"
    route = f"{layout['delivery']}+{layout['reduction']}"
    there = f"{layout['gpu_updates']} on GPU, {layout['resident_updates']} resident"
    return f"{route} {layout['schedule']} {modes}, {there}"
