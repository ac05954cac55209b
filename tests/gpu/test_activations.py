"""What each activation mode holds on a GPU is what preflight says, and all compute the same."""

import gc
from functools import partial

import pytest
import torch

from slidedp.bench.shapes import qwen3
from slidedp.model.families import layer_function, layer_halves, layer_kinds, position_tables, skeleton
from slidedp.model.footprint import kept_per_token
from slidedp.model.tiles import tiled
from slidedp.stream.activations import Keep, Recompute
from slidedp.stream.partition import attention_share, compile_partial

pytestmark = pytest.mark.gpu
TOKENS, DTYPE = 8192, torch.bfloat16


def kept_by(activation, layer, parameters, hidden):
    """Bytes that a layer leaves for its backward, its input among them, and its output."""
    gc.collect()  # what compiling has left would be freed at any time
    before = torch.cuda.memory_allocated()
    output = activation.forward(layer, parameters, hidden)
    return torch.cuda.memory_allocated() - before - output.nbytes + hidden.nbytes, output


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("size", ["0.6B", "1.7B", "4B"])
def test_a_layer_keeps_what_the_formula_says(size, compiled):
    config, device = qwen3(size), torch.device("cuda", 0)
    template = skeleton(config)
    build = partial(torch.compile, dynamic=False) if compiled else (lambda function: function)
    whole, halves = build(layer_function(template)), [build(half) for half in layer_halves(template)]
    parameters = {
        name: torch.randn(p.shape, device=device, dtype=DTYPE).mul_(0.02).requires_grad_()
        for name, p in template.model.layers[0].named_parameters()
    }
    tables = position_tables(config, template, TOKENS, device, DTYPE)[layer_kinds(config)[0]]
    hidden, gradient = (
        torch.randn(1, TOKENS, config.hidden_size, device=device, dtype=DTYPE) for _ in range(2)
    )
    wanted = None
    for function, tile in ((whole, False), (tiled(*halves, 2048), True)):

        def layer(parameters, hidden, function=function):
            return function(parameters, hidden, *tables)[0]

        for kind in (Keep, Keep, Recompute):  # the first one compiles
            activation = kind()
            kept, output = kept_by(activation, layer, parameters, hidden)
            found = [output, *activation.backward(layer, parameters, gradient)]
            wanted = wanted or found
            for a, b in zip(found, wanted, strict=True):
                assert (a.float() - b.float()).abs().max() <= 0.03 * b.float().abs().max()
        said = kept_per_token(config, DTYPE, compiled, tile) * TOKENS
        assert kept == hidden.nbytes  # recompute's
        activation = Keep()
        kept, _ = kept_by(activation, layer, parameters, hidden)
        assert kept == pytest.approx(said, rel=0.05)
        activation.backward(layer, parameters, gradient)


@pytest.mark.parametrize("size", ["1.7B", "4B"])
def test_partial_keeps_its_part_and_attention_first(size):
    config, device = qwen3(size), torch.device("cuda", 0)
    template = skeleton(config)
    share = attention_share(config, DTYPE, TOKENS, half=False)
    parameters = {
        name: torch.randn(p.shape, device=device, dtype=DTYPE).mul_(0.02).requires_grad_()
        for name, p in template.model.layers[0].named_parameters()
    }
    tables = position_tables(config, template, TOKENS, device, DTYPE)[layer_kinds(config)[0]]
    hidden = torch.randn(1, TOKENS, config.hidden_size, device=device, dtype=DTYPE)
    attended, gradients = [], []
    for attention in (0.0, share):
        function = compile_partial(layer_function(template), attention, 0.3)

        def layer(parameters, hidden, function=function):
            return function(parameters, hidden, *tables)[0]

        for _ in range(2):  # the first one compiles
            activation = Keep()
            with torch.profiler.profile() as recorded:
                kept, output = kept_by(activation, layer, parameters, hidden)
                found = activation.backward(layer, parameters, torch.ones_like(output))
        names = [event.name for event in recorded.events()]
        attended.append(sum("_attention" in name and "backward" not in name for name in names))
        gradients.append(found)
        rest = kept_per_token(config, DTYPE, True, False) * TOKENS - hidden.nbytes
        assert kept - hidden.nbytes <= 0.3 * rest * 1.05
    assert attended[1] < attended[0]
    for a, b in zip(*gradients, strict=True):
        assert (a.float() - b.float()).abs().max() <= 0.03 * b.float().abs().max()
