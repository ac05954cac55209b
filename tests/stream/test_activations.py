"""Every activation mode, and any mix of them, has the same output and gradients; none holds weights."""

from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slidedp.layout import ACTIVATIONS
from slidedp.model.families import load_config, skeleton
from slidedp.model.tiles import tiled
from slidedp.model.units import units_of
from slidedp.stream.activations import Keep, Offload, Recompute, Spill
from slidedp.stream.device import Abort, Device, Signal
from slidedp.stream.partition import compile_partial
from slidedp.stream.signals import Step
from slidedp.stream.spill import SpillStore
from slidedp.stream.stash import OUTGOING
from slidedp.stream.timeline import Timeline
from tests.model.test_tiles import LENGTH, WIDTH, cached_layer
from tests.stream.cases import LAYERS, model

BATCH, SLOW = 2, pytest.mark.slow
pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def units():
    return units_of(skeleton(load_config(model())))[1:-1]


@cache
def functions(backend: str | None, tile: int):
    """mode -> (forward's, backward's) layer function, compiled by a backend."""
    layer = cached_layer("qwen3")

    def build(function, mode):
        if backend is None:
            return function
        if mode in ("partial", "spill") and backend == "inductor":
            return compile_partial(function, 0.0, 0.3)
        return torch.compile(function, dynamic=False, backend=backend)

    if not tile:
        return {mode: (build(layer.whole, mode),) * 2 for mode in ACTIVATIONS}
    found = {}
    for mode in ACTIVATIONS:
        attention, mlp = build(layer.attention, mode), build(layer.mlp, "keep")
        found[mode] = tuple(tiled(attention, mlp, tile, read) for read in (True, False))
    return found


class Rank:
    """The calls of an engine, one after another, on weights that leave their slot in between."""

    def __init__(self, modes, backend=None, tile=0, frozen=frozenset()):
        layer = cached_layer("qwen3")
        self.modes, self.tile, self.functions = modes, tile, functions(backend, tile)
        self.partial = backend == "inductor"  # of which `spill` takes what `partial` would keep
        self.device = Device("cpu", 0)
        self.step = Step(0, Abort(), Timeline(self.device))
        self.store = SpillStore(self.device)
        self.inputs: dict[int, torch.Tensor] = {}
        self.tables = layer.tables[:2]
        random = torch.Generator().manual_seed(2)
        self.weights = [
            {name: torch.randn(p.shape, generator=random) * 0.2 for name, p in layer.parameters.items()}
            for _ in modes
        ]
        # One slot for all layers: what a mode kept of another layer's weights would be wrong.
        self.slot = {
            name: torch.empty_like(p).requires_grad_(i not in frozen)
            for i, (name, p) in enumerate(self.weights[0].items())
        }

    def fill(self, i):
        for name, weight in self.weights[i].items():
            self.slot[name].data.copy_(weight)
        return self.slot

    def activation(self, i, unit):
        mode = self.modes[i]
        if mode in ("keep", "partial"):
            return Keep()
        if mode == "recompute":
            return Recompute()
        if mode == "offload":
            return Offload(lambda hidden: self.inputs.update({i: hidden.clone()}), lambda: self.inputs.pop(i))
        return Spill(
            self.store.room,
            lambda storages: self.hold(unit, storages),
            lambda: self.fetch(unit),
            self.tables,
        )

    def hold(self, unit, storages):
        assert len(self.store._leaving) < OUTGOING
        self.store.hold(self.step, unit, storages)
        slots = {p.untyped_storage().data_ptr() for p in (*self.slot.values(), *self.tables)}
        assert not slots & {s.untyped_storage().data_ptr() for s in storages}
        least = 5 if self.tile else 10  # nothing is recomputed, but for the MLP over tiles
        inputs = sum(s.numel() for s in storages) / (BATCH * LENGTH * WIDTH * 4)
        assert 1 < inputs < least if self.partial else inputs > least
        self.store.to_host(self.step, unit)
        for storage in storages:  # whoever holds one still would compute with this
            storage.fill_(255)

    def fetch(self, unit):
        release = Signal(Abort())
        release.fire(None)
        self.store.to_device(self.step, unit, release)
        return self.store.returned(self.step, unit)

    def run(self):
        """[output, gradient of the input, gradients of each layer's weights]"""
        random = torch.Generator().manual_seed(3)
        hidden, gradient = (torch.randn(BATCH, LENGTH, WIDTH, generator=random) for _ in range(2))
        activations = [self.activation(i, unit) for i, unit in enumerate(units())]
        results = []

        def call(function, parameters, hidden):
            return function(parameters, hidden, *self.tables, None)[0]

        with torch.no_grad():
            for i, activation in enumerate(activations):
                layer = partial(call, self.functions[self.modes[i]][0])
                hidden = activation.forward(layer, self.fill(i), hidden).clone()
            for i in reversed(range(len(activations))):
                layer = partial(call, self.functions[self.modes[i]][1])
                gradient, *rest = activations[i].backward(layer, self.fill(i), gradient)
                results += rest
        self.store.close()
        return [hidden, gradient, *results]


@cache
def plain(frozen=frozenset()):
    """The same by autograd alone."""
    rank = Rank(("keep",) * LAYERS)
    random = torch.Generator().manual_seed(3)
    entry, upstream = (torch.randn(BATCH, LENGTH, WIDTH, generator=random) for _ in range(2))
    entry.requires_grad_()
    hidden, leaves = entry, []
    for weights in rank.weights:
        own = {name: w.clone().requires_grad_(i not in frozen) for i, (name, w) in enumerate(weights.items())}
        leaves.insert(0, [w for w in own.values() if w.requires_grad])
        hidden = cached_layer("qwen3").whole(own, hidden, *rank.tables, None)[0]
    trained = [w for some in leaves for w in some]
    return [hidden, *torch.autograd.grad(hidden, [entry, *trained], upstream)]


def assert_equal(found, wanted, exact=True):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b) if exact else (a - b).abs().max() <= 2e-6 * b.abs().max()


@pytest.mark.parametrize("mode", ACTIVATIONS)
def test_each_mode_is_autograd_to_the_bit(mode):
    assert_equal(Rank((mode,) * LAYERS).run(), plain())


mixes = st.tuples(*[st.sampled_from(ACTIVATIONS)] * LAYERS)


@settings(max_examples=12, deadline=None)
@given(mixes, st.frozensets(st.integers(0, 12)))
def test_any_mix_is_autograd_to_the_bit(modes, frozen):
    assert_equal(Rank(modes, frozen=frozen).run(), plain(frozen))


@settings(max_examples=5, deadline=None)
@given(mixes, st.sampled_from([1, 7, 16, 40]))
def test_any_mix_over_tiles_is_autograd(modes, tile):
    found = Rank(modes, tile=tile).run()
    assert_equal(found, plain(), exact=False)
    assert_equal(found, Rank(("keep",) * LAYERS, tile=tile).run())


# The first has inductor's decompositions and partitioner, and compiles nothing.
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=SLOW)])
@pytest.mark.parametrize("tile", [0, 16])
def test_compiled_modes_are_autograd(tile, backend):
    assert len(ACTIVATIONS) == LAYERS
    assert_equal(Rank(ACTIVATIONS, backend=backend, tile=tile).run(), plain(), exact=False)
