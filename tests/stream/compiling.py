"""What a test does to a rank that compiles: it fails where a step compiles what was not rehearsed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import counters

from slidedp import rank
from slidedp.stream.step import Engine
from tests.pool import replaced


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@contextmanager
def apply(index: int | None) -> Iterator[None]:
    """Traces every graph, and leaves out the compiler behind it, which takes minutes."""
    rehearsed = []

    def counting(rehearse: Callable) -> Callable:
        def call(*args: Any, **settings: Any) -> None:
            torch._dynamo.reset()
            counters.clear()
            rehearse(*args, **settings)
            assert graphs() > 0
            rehearsed.append(graphs())

        return call

    def checked(method: Callable) -> Callable:
        def call(*args: Any) -> Any:
            result = method(*args)
            assert graphs() == rehearsed[0], f"{graphs() - rehearsed[0]} graphs more than rehearsed"
            return result

        return call

    traced = partial(torch.compile, backend="aot_eager")
    with ExitStack() as stack:
        stack.enter_context(replaced(torch, "compile", traced))
        stack.enter_context(replaced(rank, "rehearse", counting(rank.rehearse)))
        stack.enter_context(replaced(Engine, "step", checked(Engine.step)))
        stack.enter_context(replaced(Engine, "evaluate", checked(Engine.evaluate)))
        yield
