"""Resources, waits and layouts in words."""

import dataclasses

from slidedp.layout import Layout

NAMES = {
    "compute": "the GPUs' compute",
    "threads": "the threads that enqueue work",
    "update": "the optimizer worker",
    "to_device": "copies to the GPUs",
    "to_host": "copies to the host",
    "collective": "collectives between GPUs",
    "host_memory": "the host's memory bandwidth",
}
"""Resources of a prediction in words."""
WAITS = {
    "delivery": "parameters on their way",
    "update": "updates",
    "reduction": "gradients to land",
    "offload": "offloaded layer inputs",
}
"""Causes of waits in words."""
CHANGES = {
    "compute": "the GPUs' compute",
    "links": "the links to the host",
    "collectives": "collectives between GPUs",
    "update": "the host's update",
}
"""What a machine may have faster, by groups of rates.GROUPS."""


def describe_modes(layout: Layout, layers: int) -> str:
    """Activation modes in words, such as `30 recompute, 6 keep`."""
    modes = layout.activation_modes(layers)
    parts = []
    for mode in sorted(set(modes), key=modes.index):
        budget = f" {layout.partial_budget:g}" if mode == "partial" else ""
        parts.append(f"{modes.count(mode)} {mode}{budget}")
    return ", ".join(parts)


def mostly(layout: Layout, layers: int) -> str:
    """The mode of most layers."""
    modes = layout.activation_modes(layers)
    return max(sorted(set(modes)), key=modes.count)


def describe(layout: Layout, reference: Layout) -> str:
    """What sets a layout apart from another one."""
    parts = []
    for field in dataclasses.fields(layout):
        value = getattr(layout, field.name)
        if value == getattr(reference, field.name):
            continue
        if field.name == "activations":
            parts.append(value if isinstance(value, str) else describe_modes(layout, len(value)))
        elif field.name == "chunk_bytes":
            parts.append(f"chunks of {value / 2**20:g} MiB")
        else:
            parts.append(f"{field.name} {value}")
    return ", ".join(parts) or "the same"
