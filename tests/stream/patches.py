"""What tests do to the processes of a pool: inject delays, remove a gate, record what compute reads.

`apply` is the context manager that a pool enters in every process of a case.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from slidedp.checkpoint import save
from slidedp.host.worker import OptimizerWorker
from slidedp.stream import reduction, step, transport, update
from slidedp.stream.arena import HostPeers
from slidedp.stream.gates import Gates
from slidedp.stream.signals import Step
from slidedp.stream.spill import SpillStore
from slidedp.stream.stash import ActivationStash
from slidedp.stream.step import Engine
from slidedp.stream.transfers import Transfers
from slidedp.stream.update import ShardUpdate
from slidedp.stream.vocabulary import Vocabulary
from tests.pool import replaced
from tests.stream.delays import (
    PAUSE,
    Wrap,
    on_a_thread,
    pausing,
    pausing_inside,
    read_before_a_write_back,
    spilling_on_a_thread,
    writing_on_a_thread,
    written_back_after_a_reading,
)
from tests.stream.recording import recording_rank, recording_worker
from tests.stream.removals import (
    at_once,
    first_arrival_is_enough,
    first_write_is_enough,
    mean_of_means,
    never_waiting,
    spoiled,
    taking_all_offers,
    without_free,
    without_free_pieces,
    without_free_ring,
)


@contextmanager
def apply(index: int | None, names: tuple[str, ...] = (), record: bool = False) -> Iterator[Any]:
    """Applies the named delays and removals to the process of rank `index` (None is the worker).

    With `record`, yields a list that fills with what this process saw.
    """
    with ExitStack() as stack:
        for name in names:
            where, owner, attribute, wrap = PATCHES[name]
            if where == "all" or where == index:
                stack.enter_context(replaced(owner, attribute, wrap(getattr(owner, attribute))))
        if not record:
            yield None
        elif index is None:
            yield stack.enter_context(recording_worker())
        else:
            yield stack.enter_context(recording_rank())


PATCHES: dict[str, tuple[Any, Any, str, Wrap]] = {
    "slow update": (None, OptimizerWorker, "_update", pausing()),
    "slow worker": (None, OptimizerWorker, "_landed", pausing(PAUSE / 10)),
    "slow visits": ("all", step._Visit, "__enter__", pausing_inside),
    "slow visits of rank 1": (1, step._Visit, "__enter__", pausing_inside),
    "slow deliveries": ("all", Transfers, "_deliver", pausing(PAUSE / 5)),
    "slow deliveries of rank 0": (0, Transfers, "_deliver", pausing(PAUSE / 5)),
    "slow reductions": ("all", Transfers, "_reduce", pausing()),
    "slow reductions of rank 1": (1, Transfers, "_reduce", pausing()),
    "slow updates of rank 1": (1, ShardUpdate, "update", pausing()),
    "slow landing of rank 1": (1, reduction._Land, "__call__", pausing(PAUSE / 10)),
    "slow pulls of rank 1": (1, HostPeers, "pull", pausing()),
    "writes of rank 1 on a thread": (1, ShardUpdate, "update", writing_on_a_thread),
    "no wait for all writes": (None, OptimizerWorker, "handle", first_write_is_enough),
    "slow write-back of rank 1": (1, ShardUpdate, "close", pausing()),
    "write-back of rank 1 after a reading": (1, ShardUpdate, "close", written_back_after_a_reading),
    "reading of rank 0 before a write-back": (0, ShardUpdate, "_bring", read_before_a_write_back),
    "no wait for write-backs": ("all", update.dist, "barrier", at_once),
    "slow stash": ("all", ActivationStash, "to_host", pausing()),
    "stash on a thread": ("all", ActivationStash, "to_host", on_a_thread),
    "spill on a thread": ("all", SpillStore, "to_host", spilling_on_a_thread),
    "no wait for published": ("all", Gates, "wait_published", at_once),
    "no wait for consumed": ("all", Gates, "wait_consumed", at_once),
    "no wait for all ranks": (None, OptimizerWorker, "_landed", first_arrival_is_enough),
    "no check of landings": (None, OptimizerWorker, "_expect", at_once),
    "no wait for slot": ("all", Transfers, "_deliver", without_free("slot")),
    "no wait for others' reading": ("all", transport._Read, "wait", at_once),
    "no wait for others' offers": ("all", transport.Copies, "_wait", taking_all_offers),
    "no wait for gradient buffer": ("all", Engine, "_submit", without_free("gradient")),
    "no wait for piece slot": ("all", Transfers, "_deliver", without_free_pieces("_slots")),
    "no wait for piece buffer": ("all", Vocabulary, "_submit", without_free_pieces("_gradients")),
    "no wait for delivered": ("all", Step, "signal", never_waiting("delivered", "MainThread")),
    "no wait for gradient": ("all", Step, "signal", never_waiting("gradient", "slidedp-transfer")),
    "no wait for outgoing ring": ("all", ActivationStash, "hold", without_free_ring),
    "no wait for stashed": ("all", Step, "signal", never_waiting("stashed", "slidedp-transfer")),
    "slow checkpoint": (None, save, "write_shard", pausing()),
    "no wait for checkpoint": (None, save.Snapshot, "wait", at_once),
    "nan in rank 1": (1, Engine, "_submit", spoiled),
    "mean of means": (None, OptimizerWorker, "_denominator_scale", mean_of_means),
}
