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
    assert Encoder(tokenizer).chat(chat(turns)) == [by_hand(tokenizer, turns)]


def test_turns_that_others_change_are_learnt_one_by_one(tokenizer, tmp_path):
    """As Qwen3's template does, which shows the reasoning of the last turn only."""
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>{% endif %}"
        "{{ m.content }}<|im_end|>{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
    )
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")]
    thought = [(role, f"<think>\n\n</think>{content}") for role, content in turns]
    wanted = []
    for end in (1, 3):  # only the last turn is learnt, with its reasoning
        before, _ = by_hand(tokenizer, turns[:end])
        ids, mask = by_hand(tokenizer, thought[end : end + 1])
        wanted.append((before + ids, [False] * len(before) + mask))
    assert Encoder(tokenizer).chat(chat(turns)) == wanted
    assert Encoder(tokenizer).chat(chat(turns[:2])) == wanted[:1]
    path = jsonl(tmp_path / "chats.jsonl", [{"messages": chat(turns).messages}] * 3)
    with pytest.warns(UserWarning, match="one answer at a time: 3 documents more"):
        prepare(Data(path=path), tokenizer, 64, tmp_path / "out")


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
