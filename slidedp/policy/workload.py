"""The workload of a planned run, as the step-time model wants it."""

from slidedp.config import DTYPES
from slidedp.memory_plan import intermediates_per_token
from slidedp.model.families import active_parameters
from slidedp.model.units import frozen_units
from slidedp.policy.rates import Workload
from slidedp.preflight import Plan
from slidedp.stream.buffers import is_tied, output_matrix


def workload_of(plan: Plan) -> Workload:
    """Sizes and FLOPs of one step of `plan`; each rank holds an equal share of the batch."""
    config, units, model = plan.config, plan.units, plan.model
    ranks = int(config.ranks or 1)
    tokens = config.batch_size // ranks * config.sequence_length
    size = DTYPES[str(config.compute_dtype)].itemsize
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    # 2 FLOPs per parameter and token, and half of the attention matrix, as it is causal.
    attention = 2.0 * model.num_attention_heads * head_dim * config.sequence_length
    active = active_parameters(model, {p.name: p.numel for p in units[1].parameters})
    mlp = {p.name: p.numel for p in units[1].parameters if p.local.startswith("mlp.")}
    return Workload(
        layers=len(units) - 2,
        layer_params=max(unit.numel for unit in units[1:-1]),
        embed_params=units[0].numel,
        head_params=units[-1].numel,
        tied=is_tied(units),
        ranks=ranks,
        tokens=tokens,
        itemsize=size,
        wide_gradients=config.gradient_dtype.itemsize > size,
        input_bytes=tokens * model.hidden_size * size,
        kept_bytes=tokens * intermediates_per_token(config, model),
        layer_flops=tokens * (2.0 * active + attention),
        mlp_flops=tokens * 2.0 * active_parameters(model, mlp),
        head_flops=(4.0 if output_matrix(units).frozen else 6.0)
        * tokens
        * model.vocab_size
        * model.hidden_size,
        compiled=bool(config.compile),
        frozen=tuple(sorted(frozen_units(units))),
    )
