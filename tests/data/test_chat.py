"""Which tokens of a chat are learnt, token by token."""

import pytest

from slidedp.config import Data
from slidedp.data.encode import Encoder
from slidedp.data.prepare import prepare
from slidedp.data.sources import Chat
from slidedp.data.stdlib import stdlib_files, train_tokenizer
from tests.data.test_sources import TEMPLATE, jsonl

MARKED = TEMPLATE.replace(
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n",
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}",
)
CONVERSATIONS = [
    [("system", "Be short."), ("user", "import os?"), ("assistant", "Yes.")],
    [("user", "a"), ("assistant", "b\n"), ("user", "  c"), ("assistant", " d e f"), ("user", "g")],
    [("user", "x"), ("assistant", "one"), ("assistant", "two")],
    [("user", "<|im_end|>"), ("assistant", "assistant\nuser")],
]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = train_tokenizer(stdlib_files(50_000), 400)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    return tokenizer


def chat(turns):
    return Chat("here", [{"role": role, "content": content} for role, content in turns])


def by_hand(tokenizer, turns):
    """Tokens of each turn, one after another, and whether the model has to write them."""
    ids, mask = [], []

    def write(text, learnt):
        new = tokenizer(text, add_special_tokens=False).input_ids
        ids.extend(new)
        mask.extend([learnt] * len(new))

    for role, content in turns:
        write(f"<|im_start|>{role}\n", False)
        write(f"{content}<|im_end|>", role == "assistant")
        write("\n", False)
    return ids, mask


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["prefixes", "markers"])
@pytest.mark.parametrize("turns", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_the_assistants_tokens_and_no_others_are_learnt(tokenizer, template, turns):
    tokenizer.chat_template = template
    assert Encoder(tokenizer).chat(chat(turns)) == by_hand(tokenizer, turns)


@pytest.mark.parametrize("packing", ["bounded", "padded", "wrapped"])
def test_samples_hold_the_mask(tokenizer, tmp_path, packing):
    tokenizer.chat_template = TEMPLATE
    rows = [{"messages": chat(turns).messages} for turns in CONVERSATIONS]
    path = jsonl(tmp_path / "chats.jsonl", rows)
    samples = prepare(Data(path=path, packing=packing), tokenizer, 64, tmp_path / packing)
    found = [i for row in samples.labels for i in row.tolist() if i != -100]
    wanted = [
        i for turns in CONVERSATIONS for i, learnt in zip(*by_hand(tokenizer, turns), strict=True) if learnt
    ]
    if packing == "wrapped":  # what is left of the stream is less than a sequence
        assert found == wanted[: len(found)] and len(wanted) - len(found) < 64
    else:
        assert sorted(found) == sorted(wanted)
