"""What `partial` keeps: in long sequences attention's output first."""

import pytest
import torch
from torch.profiler import profile
from transformers import Qwen3Config

from slidedp.model.families import layer_function, layer_kinds, position_tables, skeleton
from slidedp.stream.activations import Keep
from slidedp.stream.partition import attention_share, compile_partial

LENGTH = 96
CONFIG = Qwen3Config(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
)


def kept_and_attended(budget: float, attention: float) -> tuple[int, int, list[torch.Tensor]]:
    """Bytes that a compiled layer keeps besides weights, tables and input, how often it computes attention
    in forward and backward, and its gradients."""
    model = skeleton(CONFIG)
    layer = compile_partial(layer_function(model), attention, budget)
    tables = position_tables(CONFIG, model, LENGTH, torch.device("cpu"), torch.float32)
    random = torch.Generator().manual_seed(0)
    parameters = {
        name: torch.randn(p.shape, generator=random).mul_(0.1).requires_grad_()
        for name, p in model.model.layers[0].named_parameters()
    }
    hidden = torch.randn(1, LENGTH, CONFIG.hidden_size, generator=random)
    positions = tables[layer_kinds(CONFIG)[0]]
    others = {t.untyped_storage().data_ptr() for t in [*parameters.values(), hidden, *positions[:2]]}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in others:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def once() -> list[torch.Tensor]:
        way = Keep()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = way.forward(lambda p, h: layer(p, h, *positions)[0], parameters, hidden)
        return list(way.backward(lambda p, h: h, parameters, torch.ones_like(output)))

    once()  # compiles
    saved.clear()
    with profile() as recorded:
        gradients = once()
    names = [event.name for event in recorded.events()]
    attended = sum("attention" in name and "backward" not in name for name in names)
    return sum(saved.values()), attended, gradients


@pytest.mark.slow
def test_attention_is_kept_first_within_the_same_bytes():
    share = attention_share(CONFIG, torch.float32, LENGTH, half=False)
    assert 0.05 < share < 0.2
    plain, again, gradients = kept_and_attended(0.4, 0.0)
    kept, attended, others = kept_and_attended(0.4, share)
    assert again == 2 * attended
    assert kept <= 1.05 * plain
    for a, b in zip(gradients, others, strict=True):
        torch.testing.assert_close(a, b)


def test_short_sequences_have_dearer_things_to_keep():
    assert attention_share(CONFIG, torch.float32, CONFIG.hidden_size, half=False) == 0
    of_half = attention_share(CONFIG, torch.float32, LENGTH, half=True)
    assert of_half > attention_share(CONFIG, torch.float32, LENGTH, half=False)
