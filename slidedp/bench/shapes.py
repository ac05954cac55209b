"""Published model shapes, for runs that need no download."""

from transformers import OlmoeConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

QWEN3 = {
    # hidden, intermediate, heads, key/value heads, layers, tied embeddings
    "0.6B": (1024, 3072, 16, 8, 28, True),
    "1.7B": (2048, 6144, 16, 8, 28, True),
    "4B": (2560, 9728, 32, 8, 36, True),
    "8B": (4096, 12288, 32, 8, 36, False),
    "14B": (5120, 17408, 40, 8, 40, False),
    "32B": (5120, 25600, 64, 8, 64, False),
}
OLMOE = "OLMoE-1B-7B"
SIZES = (*QWEN3, "30B-A3B", OLMOE)
"""What `shape` knows: Qwen3 by its size, and one of another family by its name."""


def title(size: str, layers: int | None = None) -> str:
    """The name of one of SIZES, as tables show it."""
    name = size if size == OLMOE else f"Qwen3-{size}"
    return name if layers is None else f"{name}, {layers} layers"


def shape(size: str, layers: int | None = None) -> PretrainedConfig:
    """The config of one of SIZES, with as many layers as it has or fewer."""
    if size == OLMOE:
        config: PretrainedConfig = OlmoeConfig(
            vocab_size=50304,
            hidden_size=2048,
            intermediate_size=1024,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=16,
            num_experts=64,
            num_experts_per_tok=8,
        )
    elif size == "30B-A3B":
        config = Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=2048,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,  # type: ignore[call-arg]  # not among its fields, and read by its attention
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            max_position_embeddings=40960,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
    else:
        config = qwen3(size)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return config


def qwen3(size: str) -> Qwen3Config:
    """The config of Qwen3-<size>, one of QWEN3."""
    hidden, intermediate, heads, key_value_heads, layers, tied = QWEN3[size]
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=128,
        num_hidden_layers=layers,
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
