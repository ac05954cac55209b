"""The three invariants, and every buffer that is used again: delays anywhere change nothing.

Each gate has two tests with the same delay. With the gate, the result is the undelayed one bit for
bit. Without it, the delay makes the violation certain, and the same comparison must notice. So no
gate here could be left out, and no test here could pass without it.
"""

from functools import cache

import pytest

from slidedp.layout import Layout
from tests.pool import Outcome, pool
from tests.stream.cases import LAYERS, config

STEPS = 3


def layout(delivery="replicated", reduction="gpu", **settings) -> Layout:
    return Layout(delivery=delivery, reduction=reduction, **{"chunk_bytes": 9000, "window": 2, **settings})


def run(wanted: Layout, names: tuple[str, ...] = (), *, record: bool = False, dtype="float32") -> Outcome:
    clip = 0.5 if wanted.schedule == "in_forward" else None
    # Pieces of an untied embedding's gradient follow one another at once.
    tied = wanted.vocabulary_pieces == 1
    case = config(wanted, tied=tied, steps=STEPS, clip_norm=clip, compute_dtype=dtype)
    arguments = {"names": names, "record": record}
    return pool(2).run(case, patch="tests.stream.patches.apply", patch_arguments=arguments)


def result(outcome: Outcome) -> tuple:
    """All that a run computes, to the bit."""
    updates = [(e["step"], repr(e["gradient_norm"]), e["skipped"]) for e in outcome.updates]
    return sorted(outcome.rank_losses().items()), updates, [m.numpy().tobytes() for m in outcome.masters]


@cache
def undelayed(wanted: Layout) -> tuple:
    return result(run(wanted))


OFFLOADED = ("offload",) * LAYERS
# gate -> (layout under which it is the only protection, delay that makes a violation certain)
GATES = {
    "published": (layout("sharded"), "slow update"),
    "consumed": (
        layout(reduction="cpu", schedule="in_backward", landing="ring", gradient_slots=3, window=5),
        "slow update",
    ),
    "all ranks": (layout(reduction="cpu"), "slow reductions of rank 1"),
    "slot": (layout(window=1), "slow visits"),
    "gradient buffer": (layout(gradient_slots=1, window=5), "slow reductions"),
    "delivered": (layout("broadcast"), "slow deliveries"),
    "gradient": (layout(reduction="gpu_root"), "slow visits"),
    "piece slot": (layout(vocabulary_pieces=4, window=5), "slow visits"),
    "piece buffer": (layout(vocabulary_pieces=4, window=5, gradient_slots=3), "slow reductions"),
    "outgoing ring": (layout(activations=OFFLOADED, window=5), "slow stash"),
    "stashed": (layout(activations=OFFLOADED, window=5), "stash on a thread"),
}
# Among several chunks, each waits for the other rank's offer of the one before.
WHOLE_UNITS = {"transport": "copy", "chunk_bytes": 2**20}
MORE = [
    ("stashed", layout(activations=("spill",) * LAYERS, window=5), "spill on a thread"),
    ("others' offers", layout("sharded", "cpu", transport="copy"), "slow deliveries of rank 0"),
    ("others' offers", layout(transport="copy"), "slow reductions of rank 1"),
    ("others' offers", layout(transport="copy", gpu_updates=3), "slow updates of rank 1"),
    ("others' reading", layout("sharded", "cpu", window=1, **WHOLE_UNITS), "slow pulls of rank 1"),
    ("others' reading", layout(gradient_slots=1, window=5, **WHOLE_UNITS), "slow pulls of rank 1"),
    ("all writes", layout(gpu_updates=LAYERS + 2), "writes of rank 1 on a thread"),
    ("consumed", layout(reduction="cpu", gradient_slots=3, window=5), "slow worker"),
    ("all ranks", layout("sharded", "gpu"), "slow landing of rank 1"),
    ("all ranks", layout("sharded", "gpu", schedule="in_backward"), "slow landing of rank 1"),
    ("all ranks", layout(reduction="cpu", schedule="in_backward"), "slow reductions of rank 1"),
]
CASES = [*((gate, *case) for gate, case in GATES.items()), *MORE]
IDS = [f"{gate}-{at.delivery}-{at.reduction}-{at.schedule}-{delay}" for gate, at, delay in CASES]


@pytest.mark.parametrize(("gate", "wanted", "delay"), CASES, ids=IDS)
def test_a_delay_changes_nothing(gate, wanted, delay):
    assert result(run(wanted, (delay,))) == undelayed(wanted)


@pytest.mark.parametrize(("gate", "wanted", "delay"), CASES, ids=IDS)
def test_without_its_gate_the_delay_shows(gate, wanted, delay):
    # The worker's own check would end the run before there is a result to compare.
    names = (delay, f"no wait for {gate}", "no check of landings")
    assert result(run(wanted, names)) != undelayed(wanted)


def test_a_mean_of_the_ranks_means_shows():
    wanted = layout()
    assert result(run(wanted, ("mean of means",))) != undelayed(wanted)


# --- state that stays on the GPUs -------------------------------------------------------------------


def switched(*names: str) -> list[bytes]:
    """The masters after a switch between layouts whose chunks, and so the ranks' shares, differ."""
    here = {"schedule": "in_backward", "gpu_updates": LAYERS + 2, "resident_updates": LAYERS + 2}
    case = config(layout(**here), steps=6, clip_norm=None)
    arguments = {"names": names, "record": False}
    there = layout(**here | {"chunk_bytes": 2**20})
    outcome = pool(2).run(
        case, layouts={1: there}, patch="tests.stream.patches.apply", patch_arguments=arguments
    )
    assert [wanted for _, wanted in outcome.layouts] == [case.layout, there]
    return [master.numpy().tobytes() for master in outcome.masters]


def test_a_new_layout_waits_for_what_other_ranks_write_back():
    assert switched() == switched("slow write-back of rank 1")
    # Building an engine takes longer than any pause that a test can afford, so the order is forced.
    late = "write-back of rank 1 after a reading", "reading of rank 0 before a write-back"
    assert switched() != switched(*late, "no wait for write-backs")


# --- one version ----------------------------------------------------------------------------------


def wrong_versions(outcome: Outcome) -> list[tuple]:
    """Reads whose content was not the version of their step. Digests of what compute found in its
    slot, when a visit began and when it ended, against those of what the worker published."""
    *ranks, published = outcome.recorded
    digests = {(unit, version): digest for unit, version, digest, _ in published}
    return [
        (rank, step, visit, unit)
        for rank, seen in enumerate(ranks)
        for step, visit, unit, digest, _ in seen
        if digest != digests[unit, step]
    ]


DELAYS = ["slow update", "slow visits of rank 1", "slow deliveries of rank 0", "slow reductions of rank 1"]


@pytest.mark.parametrize("schedule", ["in_forward", "in_backward"])
@pytest.mark.parametrize("delay", DELAYS)
def test_every_rank_reads_version_t_in_step_t(schedule, delay):
    wanted = layout("sharded", "cpu", schedule=schedule)
    outcome = run(wanted, (delay,), record=True)
    assert wrong_versions(outcome) == []
    versions = {digest for _, _, digest, _ in outcome.recorded[-1]}
    assert len(versions) == len(outcome.units) * (STEPS + 1)  # so a wrong one would have shown
    # embed once, tied head twice over (norm and matrix), layers twice; each looked at twice
    assert [len(seen) for seen in outcome.recorded[:-1]] == [STEPS * 2 * (1 + 2 + 2 * LAYERS)] * 2
    assert result(outcome) == undelayed(wanted)


def test_every_rank_reads_version_t_of_a_bf16_working_copy():
    assert wrong_versions(run(layout("broadcast"), ("slow update",), record=True, dtype="bfloat16")) == []


@pytest.mark.parametrize(
    ("delay", "gate", "window"),
    [("slow update", "published", 2), ("slow visits", "slot", 1), ("slow deliveries", "delivered", 2)],
)
def test_an_open_gate_is_a_wrong_version(delay, gate, window):
    names = (delay, f"no wait for {gate}", "no check of landings")
    outcome = run(layout(window=window), names, record=True)
    assert wrong_versions(outcome)


@pytest.mark.parametrize(
    ("there", "delay"), [(0, "slow update"), (LAYERS + 2, "slow updates of rank 1")], ids=["worker", "GPUs"]
)
def test_a_step_starts_on_early_units_while_late_ones_still_update(there, delay):
    """The gate is per unit, not a barrier, wherever units are updated."""
    outcome = run(layout(gpu_updates=there), (delay,), record=True)
    *ranks, published = outcome.recorded
    for step in range(1, STEPS):
        last_layer = next(time for unit, version, _, time in published if (unit, version) == (LAYERS, step))
        for seen in ranks:
            first = min(time for number, visit, _, _, time in seen if (number, visit) == (step, 0))
            assert first < last_layer
