"""A layer over tiles of tokens computes what the whole layer does, and holds a tile's intermediates."""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from slidedp.model.documents import Positions
from slidedp.model.families import (
    ARCHITECTURES,
    LayerFunction,
    LayerHalf,
    has_halves,
    layer_function,
    layer_halves,
    layer_kinds,
    load_config,
    position_tables,
    skeleton,
)
from slidedp.model.tiles import tiled
from tests.stream.cases import model

KINDS = (
    "gemma3_text", "granite", "llama", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip
MIXTURES = ("olmoe", "qwen3_moe")
SLIDING = ("gemma3_text", "mistral", "olmo3", "phi3", "smollm3")
BATCH, LENGTH, WIDTH = 3, 16, 20
SLOW = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("one_thread")


class Layer(NamedTuple):
    whole: LayerFunction
    attention: LayerHalf
    mlp: LayerHalf
    parameters: dict[str, torch.Tensor]
    tables: Positions


def layer_of(kind: str, length: int = LENGTH) -> Layer:
    config = load_config(model(kind), positions=length)
    template = skeleton(config, length)
    random = torch.Generator().manual_seed(0)
    parameters = {
        name: (torch.randn(p.shape, generator=random) * 0.2).requires_grad_()
        for name, p in template.model.layers[0].named_parameters()
    }
    tables = position_tables(config, template, length, torch.device("cpu"), torch.float32)
    own = tables[layer_kinds(config)[0]]
    return Layer(layer_function(template), *layer_halves(template), parameters, own)


cached_layer = cache(layer_of)


def results(layer: Layer, function: LayerFunction, trained: tuple[str, ...] | None = None):
    """Output, and gradients of the input and the trained parameters."""
    random = torch.Generator().manual_seed(1)
    hidden, upstream = (torch.randn(BATCH, LENGTH, WIDTH, generator=random) for _ in range(2))
    parameters = {
        name: p.detach().requires_grad_(trained is None or name in trained)
        for name, p in layer.parameters.items()
    }
    hidden.requires_grad_()
    output, _ = function(parameters, hidden, *layer.tables)
    wanted = [p for p in parameters.values() if p.requires_grad]
    return [output, *torch.autograd.grad(output, [hidden, *wanted], upstream)]


def assert_close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()


def test_every_architecture_has_halves_or_says_no():
    configs = [load_config(model(kind)) for kind in (*KINDS, *MIXTURES)]
    assert {type(skeleton(config)).__name__ for config in configs} == set(ARCHITECTURES)
    assert [has_halves(config) for config in configs] == [True] * len(KINDS) + [False] * len(MIXTURES)


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_the_whole_layer(kind):
    layer = layer_of(kind)
    wanted = results(layer, layer.whole)
    for tile in (1, 7, 16, BATCH * LENGTH, 1000):
        found = results(layer, tiled(layer.attention, layer.mlp, tile))
        assert_close(found, wanted)
        if tile >= BATCH * LENGTH:
            assert all(map(torch.equal, found, wanted))
        unread = results(layer, tiled(layer.attention, layer.mlp, tile, read=False))
        assert all(map(torch.equal, unread[1:], found[1:]))


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=SLOW)])
def test_compiled_tiles_are_the_whole_layer(backend):
    layer = cached_layer("qwen3")
    halves = (torch.compile(half, dynamic=False, backend=backend) for half in (layer.attention, layer.mlp))
    assert_close(results(layer, tiled(*halves, 16)), results(layer, layer.whole))


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_some_parameters_may_be_frozen(data):
    layer = cached_layer("qwen3")
    names = data.draw(st.sets(st.sampled_from(sorted(layer.parameters))))
    found = results(layer, tiled(layer.attention, layer.mlp, 7), tuple(names))
    assert_close(found, results(layer, layer.whole, tuple(names)))


def test_a_bf16_weight_gradient_loses_nothing_in_the_sum():
    """Of 256 equal tiles each adds 1/256 of the sum: a sum in BF16 stops growing on the way."""
    weight = torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.full((1, 512, 4), 1.0, dtype=torch.bfloat16)
    layer = tiled(lambda parameters, hidden, *_: hidden, lambda p, hidden: hidden * p["mlp.w"], 1)
    output, _ = layer({"mlp.w": weight}, hidden, *[torch.empty(0)] * 2)
    (gradient,) = torch.autograd.grad(output, weight, torch.ones_like(output))
    assert gradient.tolist() == [[512.0] * 4]


class _Largest(TorchDispatchMode):
    """The most elements that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_intermediates_grow_with_the_tile():
    layer, tokens, intermediate = layer_of("qwen3"), BATCH * LENGTH, 28
    with _Largest() as whole:
        results(layer, layer.whole)
    with _Largest() as tiles:
        results(layer, tiled(layer.attention, layer.mlp, 8))
    assert whole.numel == tokens * intermediate
    assert tiles.numel == tokens * WIDTH  # the stream of layer inputs and q, k, v, output: not the MLP


@pytest.mark.parametrize("kind", sorted({*KINDS} - {*SLIDING}))
def test_attention_over_one_document_makes_no_mask(kind):
    length = 512
    layer = layer_of(kind, length)
    hidden = torch.randn(1, length, WIDTH, requires_grad=True)
    with _Largest() as largest:
        output = layer.attention(layer.parameters, hidden, *layer.tables)
        torch.autograd.grad(output, hidden, torch.ones_like(output))
    assert largest.numel < length * length
