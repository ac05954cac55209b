"""The long parts of the notebooks: text, configs for this machine, samples of a model."""

import dataclasses
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, Qwen3Config

from slidedp.config import Config, Data, Optimizer
from slidedp.data.stdlib import train_tokenizer, write_corpus
from slidedp.layout import Layout


def prepare(folder: str | Path) -> tuple[Path, Path]:
    """Writes Python's standard library and a tokenizer trained on it to `folder`, unless they are
    there. Returns the folders of both; needs no network."""
    corpus, tokenizer = Path(folder) / "text", Path(folder) / f"tokenizer-{_vocabulary()}"
    if not tokenizer.exists():  # which is renamed into place last, so it vouches for the text
        write_corpus(corpus)
        partial = tokenizer.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        train_tokenizer(sorted(corpus.rglob("*.py")), _vocabulary()).save_pretrained(partial)
        partial.rename(tokenizer)
    return corpus, tokenizer


def config(
    corpus: str | Path, tokenizer: str | Path, model: str | Path | None = None, steps: int | None = None
) -> Config:
    """A run of about a minute on this machine: every GPU, or two ranks on the CPU.

    Without `model` it trains a new Qwen3 with `tokenizer`: 0.46 B parameters on GPUs, 2 M on a CPU.
    A `model` (folder or hub id) is fine-tuned with its own tokenizer.
    """
    gpus = torch.cuda.device_count()
    steps = steps or (100 if gpus else 240)
    if model is None:
        data = Data(path=str(corpus), tokenizer=str(tokenizer))
        rate = 6e-4 if gpus else 5e-3
    else:
        data, rate = Data(path=str(corpus)), 1e-5
    return Config(
        model=_new_model() if model is None else str(model),
        data=data,
        sequence_length=1024 if gpus else 128,
        batch_size=16 * gpus or 8,
        steps=steps,
        optimizer=Optimizer(lr=rate, warmup_steps=steps // 10, lr_schedule="cosine"),
    )


def short_config(folder: str | Path = "runs/quickstart", steps: int = 10_000) -> Config:
    """A small batch of the quickstart's model for the other notebooks: tens of milliseconds a step on a CPU.
    They look at some dozens of steps and close the run. Makes the text and tokenizer if they are not there.
    """
    corpus, tokenizer = prepare(folder)
    gpus = torch.cuda.device_count()
    return dataclasses.replace(
        config(corpus / "json", tokenizer, steps=steps),
        sequence_length=512 if gpus else 64,
        batch_size=8 * gpus or 4,
    )


def fine_tuning(
    model: str | Path | None = None, folder: str | Path = "runs/quickstart", steps: int = 30
) -> Config:
    """A short fine-tuning of `model` (folder or hub id) on some of the text, a tenth of it held out.

    None stands for a tiny Hugging Face folder of random weights, which is made in `folder`. The layout suits
    a CPU where there is no GPU: sending bytes between ranks takes cores that should compute, so each rank
    reads all parameters from the shared state, and nothing is computed twice.
    """
    if model is None:
        corpus, tokenizer = prepare(folder)
        base = config(corpus / "json", tokenizer, _untrained(Path(folder), tokenizer), steps)
    else:  # which has a tokenizer of its own
        base = config(write_corpus(Path(folder) / "text") / "json", model, model, steps)
    gpus = torch.cuda.device_count()
    return dataclasses.replace(
        base,
        sequence_length=512 if gpus else 64,
        batch_size=4 * gpus or 4,
        layout=Layout() if gpus else Layout(delivery="replicated", reduction="cpu", activations="keep"),
        data=dataclasses.replace(base.data, eval_fraction=0.1),
        eval_every=steps // 2,
        optimizer=base.optimizer if model else dataclasses.replace(base.optimizer, lr=5e-3),
    )


def sample(
    model: Config | str | Path, prompt: str = "import os\n\ndef ", tokens: int = 48, seed: int = 0
) -> str:
    """Text that a model writes after `prompt`: the model a config starts from, or that of a folder. Takes a
    GPU if there is one, so no run may be on it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(model, Config):
        source, tokenizer = model.model, model.data.tokenizer or model.model
    else:
        source = tokenizer = str(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(source, PretrainedConfig):
            network = AutoModelForCausalLM.from_config(source)  # random, as the run's own start is
        else:
            # A CPU takes twice as long for a token in BF16.
            dtype = torch.float32 if device.type == "cpu" else "auto"
            network = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        reader = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
        ids = reader(prompt, return_tensors="pt", add_special_tokens=False)
        written = (
            network.to(device)
            .eval()
            .generate(
                **ids.to(device),
                max_new_tokens=tokens,
                do_sample=True,
                temperature=0.7,
                top_k=20,
                pad_token_id=reader.pad_token_id or reader.eos_token_id,
            )
        )
    text = str(reader.decode(written[0], skip_special_tokens=True))
    del network
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the next run may want all of it
    return text


def _untrained(folder: Path, tokenizer: Path) -> Path:
    """A Hugging Face folder of the new model with random weights."""
    target = folder / "untrained"
    if not target.exists():
        partial = folder / "untrained.partial"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(_new_model()).save_pretrained(partial)
        AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False).save_pretrained(partial)
        partial.rename(target)
    return target


def _vocabulary() -> int:
    """Tokens. On a CPU the head is the dearest part of a small model, so its vocabulary is small."""
    return 16384 if torch.cuda.is_available() else 2048


def _new_model() -> Qwen3Config:
    if torch.cuda.is_available():  # Qwen3-0.6B with a smaller vocabulary
        width, layers, heads, head_dim = 1024, 28, 16, 128
    else:
        width, layers, heads, head_dim = 192, 4, 4, 48
    return Qwen3Config(
        vocab_size=_vocabulary(),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head_dim,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,  # the special token is the first that train_tokenizer adds
        pad_token_id=None,
    )
