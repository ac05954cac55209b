"""Published model shapes, for runs that need no download."""

from transformers import Qwen3Config

QWEN3 = {
    # hidden, intermediate, heads, key/value heads, layers, tied embeddings
    "0.6B": (1024, 3072, 16, 8, 28, True),
    "1.7B": (2048, 6144, 16, 8, 28, True),
    "4B": (2560, 9728, 32, 8, 36, True),
    "8B": (4096, 12288, 32, 8, 36, False),
    "14B": (5120, 17408, 40, 8, 40, False),
    "32B": (5120, 25600, 64, 8, 64, False),
}


def qwen3(size: str) -> Qwen3Config:
    """The config of Qwen3-<size>."""
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
