"""Attention within documents by the flash kernel is that of the mask."""

from functools import partial

import pytest
import torch

from slidedp.model.documents import VARLEN, has_varlen, within_documents
from slidedp.model.families import FULL, layer_function, load_config, position_tables, skeleton
from slidedp.model.varlen import register_varlen
from tests.pool import small_model

BATCH, LENGTH = 3, 32


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_outputs_and_gradients_agree(tmp_path, kind, compiled):
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    config = load_config(small_model(tmp_path, kind=kind))
    assert has_varlen(config, device, dtype)
    register_varlen()
    random = torch.Generator().manual_seed(0)
    starts = torch.rand(BATCH, LENGTH, generator=random) < 0.2
    starts[:, 0] = True
    position_ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    for i in range(1, LENGTH):
        position_ids[:, i] = torch.where(starts[:, i], 0, position_ids[:, i - 1] + 1)
    template = skeleton(config).model.layers[0]
    parameters = {
        name: (torch.randn(p.shape, generator=random) / p.shape[-1] ** 0.5).to(device, dtype).requires_grad_()
        for name, p in template.named_parameters()
    }
    hidden = torch.randn(BATCH, LENGTH, config.hidden_size, generator=random).to(device, dtype)
    results, bring = [], partial(torch.Tensor.to, device=device)
    for varlen in (False, True):
        model = skeleton(config)
        layer = layer_function(model, VARLEN if varlen else "sdpa")
        if compiled:
            layer = torch.compile(layer, dynamic=False)
        tables = position_tables(config, model, LENGTH, device, dtype)
        entry = hidden.detach().requires_grad_()
        out, _ = layer(parameters, entry, *within_documents(tables, varlen, bring, position_ids)[FULL])
        results.append([out, *torch.autograd.grad(out.float().square().sum(), [entry, *parameters.values()])])
    for mask, flash in zip(*results, strict=True):
        error = (mask.float() - flash.float()).abs().max() / mask.float().abs().max()
        assert error < 0.03
