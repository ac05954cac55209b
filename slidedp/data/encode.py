"""Documents to tokens, and which of the tokens are to be learnt: here, or in processes of their own."""

import os
import re
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from slidedp.data.sources import Chat, Completion, Document, Text
from slidedp.errors import ConfigError, reason
from slidedp.host.process import die_with_parent
from slidedp.host.start import import_ahead

BATCH = 2**22
"""Characters that are tokenised at once."""
ALONE = 2**25
"""Characters after which the rest is tokenised in processes of its own, which take seconds to start."""
PROCESSES = 16
"""At most, one for each core."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What a chat template has around the assistant's turns if it says itself which they are."""


class Encoded(NamedTuple):
    """A document's tokens, or those of a piece of a long text."""

    where: str
    ids: np.ndarray
    """int32 [tokens]."""
    targets: np.ndarray
    """bool [tokens]: whether a model is to learn to predict the token."""
    last: bool
    """Whether the document ends here."""
    whole: bool
    """Whether the document loses its sense when it is cut: all but text."""


class Encoder:
    """Makes tokens of documents with one tokenizer.

    Text begins with BOS if the tokenizer itself begins so, and ends with EOS; all of it is to be learnt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._bos = [i for i in tokenizer("").input_ids if i == tokenizer.bos_token_id]

    def __call__(self, documents: list[Document]) -> list[Encoded]:
        texts = [document.text for document in documents if isinstance(document, Text)]
        tokens = iter(self._tokens(texts))
        encoded = []
        for document in documents:
            if isinstance(document, Text):
                ids = (self._bos if document.first else []) + next(tokens)
                ids += self._eos(document.where) if document.last else []
                encoded.append(_encoded(document.where, ids, None, document.last, whole=False))
            elif isinstance(document, Completion):
                prompt, answer = self._tokens([document.prompt, document.completion])
                prompt, answer = self._bos + prompt, answer + self._eos(document.where)
                mask = [False] * len(prompt) + [True] * len(answer)
                encoded.append(_encoded(document.where, prompt + answer, mask, True, whole=True))
            else:
                for ids, mask in self.chat(document):
                    encoded.append(_encoded(document.where, ids, mask, True, whole=True))
        return encoded

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        plain = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        return self._tokenizer(texts, **plain).input_ids

    def _eos(self, where: str) -> list[int]:
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                f"{where}: the tokenizer has no EOS token, which ends a document: set data.tokenizer to one "
                "that has, or name its eos_token in tokenizer_config.json"
            )
        return [self._tokenizer.eos_token_id]

    # --- chats --------------------------------------------------------------------------------------

    def chat(self, chat: Chat) -> list[tuple[list[int], list[bool]]]:
        """Tokens of a conversation as the template writes it, and which of them the assistant's are.

        The template says so itself if it marks them. Else an assistant's turn is what comes after the
        prompt that the model would answer to, up to its EOS token: exactly what it would have to write.
        Some templates write a turn differently once others follow, without its reasoning for one. Then
        there is a document for each turn, which ends with it: what the model would have had to write.
        """
        try:
            template = self._tokenizer.get_chat_template()
        except ValueError as error:
            raise ConfigError(
                f"{chat.where}: a chat, and the tokenizer has no chat template: set data.tokenizer to that "
                "of a chat model, or give columns prompt and completion"
            ) from error
        if GENERATION.search(template):
            marked = {"return_dict": True, "return_assistant_tokens_mask": True}
            rendered = self._rendered(chat, chat.messages, **marked)
            written = [(rendered["input_ids"], [bool(m) for m in rendered["assistant_masks"]])]
        else:
            written = self._by_prefixes(chat)
        if not any(any(mask) for _, mask in written):
            raise ConfigError(f"{chat.where}: the assistant says nothing: take the row out")
        return written

    def _rendered(self, chat: Chat, messages: list[dict[str, Any]], **options: Any) -> Any:
        options = {"return_dict": False} | options
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=True, **options)
        except Exception as error:  # whatever a template raises, or a message that it does not expect
            raise ConfigError(
                f"{chat.where}: the chat template refuses the conversation ({reason(error)}): change the "
                "messages, or give a tokenizer with another template"
            ) from error

    def _by_prefixes(self, chat: Chat) -> list[tuple[list[int], list[bool]]]:
        """The conversation once with all turns of the assistant, or up to each of them if it must be."""
        turns = [self._turn(chat, i) for i, m in enumerate(chat.messages) if m["role"] == "assistant"]
        ids, mask = self._rendered(chat, chat.messages), list[bool]()
        for answered, learnt in turns:
            if ids[: len(answered)] != answered:
                return turns
            mask += learnt[len(mask) :]
        return [(ids, mask + [False] * (len(ids) - len(mask)))]

    def _turn(self, chat: Chat, i: int) -> tuple[list[int], list[bool]]:
        """The conversation up to message i, the assistant's, of which alone the tokens are learnt."""
        if i == 0:
            raise ConfigError(f"{chat.where}: the assistant speaks first: begin with the user or the system")
        prompt = self._rendered(chat, chat.messages[:i], add_generation_prompt=True)
        answered = self._rendered(chat, chat.messages[: i + 1])
        turn = answered[len(prompt) :]
        if answered[: len(prompt)] != prompt:
            raise ConfigError(
                f"{chat.where}: the chat template writes an answer (message {i + 1}) that does not begin "
                "with the prompt for it, so the assistant's tokens cannot be told: mark them in the template "
                "with {% generation %} and {% endgeneration %}"
            )
        eos = self._tokenizer.eos_token_id
        # What a template writes behind EOS, a line feed as a rule, no model is asked to write.
        length = len(turn) - turn[::-1].index(eos) if eos in turn else len(turn)
        return answered, [False] * len(prompt) + [True] * length + [False] * (len(turn) - length)


def _encoded(where: str, ids: list[int], mask: list[bool] | None, last: bool, whole: bool) -> Encoded:
    targets = np.ones(len(ids), bool) if mask is None else np.array(mask, bool)
    return Encoded(where, np.array(ids, np.int32), targets, last, whole)


# --- batches ----------------------------------------------------------------------------------------


def encode(
    documents: Iterator[tuple[Document, int]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[Encoded], int]]:
    """Batches of encoded documents in their order, each with its share of the source."""
    encoder, done = Encoder(tokenizer), 0
    batches = _batches(documents)
    for batch, size, share in batches:
        yield encoder(batch), share
        done += size
        if done >= ALONE:
            break
    first = next(batches, None)
    if first is not None:
        yield from _in_processes(first, batches, tokenizer)


Batch = tuple[list[Document], int, int]
"""Documents, their characters, and their share of the source."""


def _batches(documents: Iterator[tuple[Document, int]]) -> Iterator[Batch]:
    batch: list[Document] = []
    size = share = 0
    for document, part in documents:
        batch.append(document)
        size += _characters(document)
        share += part
        if size >= BATCH:
            yield batch, size, share
            batch, size, share = [], 0, 0
    if batch:
        yield batch, size, share


def _characters(document: Document) -> int:
    if isinstance(document, Text):
        return len(document.text)
    if isinstance(document, Completion):
        return len(document.prompt) + len(document.completion)
    return sum(len(message.get("content") or "") for message in document.messages)


def _in_processes(
    first: Batch, batches: Iterator[Batch], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[Encoded], int]]:
    """Encodes the batches in processes. At most two for each process are on their way."""
    processes = min(PROCESSES, len(os.sched_getaffinity(0)))
    waiting: deque[tuple[Future[list[Encoded]], int]] = deque()
    pool = ProcessPoolExecutor(processes, import_ahead(), initializer=_start, initargs=(tokenizer,))
    try:
        waiting.append((pool.submit(_work, first[0]), first[2]))
        for batch, _, share in batches:
            waiting.append((pool.submit(_work, batch), share))
            if len(waiting) >= 2 * processes:
                future, share = waiting.popleft()
                yield future.result(), share
        while waiting:
            future, share = waiting.popleft()
            yield future.result(), share
    except BrokenProcessPool as error:
        raise ConfigError(
            "a process that tokenises has ended (in a script, launch() must stand under "
            'if __name__ == "__main__":; else the machine may be short of memory)'
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder
"""The one of a process that tokenises."""


def _start(tokenizer: PreTrainedTokenizerBase) -> None:
    global _encoder
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which the pool ends the others when one is lost
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    _encoder = Encoder(tokenizer)


def _work(documents: list[Document]) -> list[Encoded]:
    return _encoder(documents)
