"""SlideDP against FSDP2 from the same weights, on the same tokens in the same order: how far losses part.

python -m slidedp.bench.parity --size 1.7B --ranks 2 --batch 8 --steps 200 --json parity.json

The text is Python's standard library, the weights are random; both compute in BF16 and keep FP32 masters.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from slidedp import quickstart
from slidedp.bench.fsdp2 import Case, run_fsdp2
from slidedp.bench.shapes import QWEN3, qwen3
from slidedp.config import Config, Data, Optimizer
from slidedp.data.prepare import prepare
from slidedp.layout import Layout
from slidedp.session import launch


def losses(config: Config) -> dict[str, list[float]]:
    """Global loss of every step, by system. `config`: a folder of weights, prepared samples, no clipping;
    its layout is SlideDP's. Nothing of a row may be padding: FSDP2 averages over ranks."""
    config = config.resolved()
    assert isinstance(config.model, str)
    with launch(config) as run:
        run.wait()
        ours = [float(loss) for loss in run.metrics()["loss"]]
    print(f"SlideDP's loss after {len(ours)} steps: {ours[-1]:.4f}; now FSDP2", file=sys.stderr)
    ranks = int(config.ranks or 1)
    measured = next(
        run_fsdp2(
            AutoConfig.from_pretrained(config.model, trust_remote_code=False),
            config.data.path,
            [Case(config.batch_size // ranks, "none")],
            steps=config.steps,
            ranks=ranks,
            weights=config.model,
            device=str(config.device),
            dtype=str(config.compute_dtype),
            compiled=bool(config.compile),
            optimizer=config.optimizer,
        )
    )
    return {"SlideDP": ours, "FSDP2": measured["losses"]}


def summary(curves: dict[str, list[float]]) -> dict[str, Any]:
    """Where the curves begin and end, and how far they part at most."""
    ours, theirs = (np.array(curves[system]) for system in ("SlideDP", "FSDP2"))
    apart = np.abs(ours - theirs)
    return {
        "steps": len(ours),
        "first": {system: curve[0] for system, curve in curves.items()},
        "last": {system: curve[-1] for system, curve in curves.items()},
        "largest_difference": float(apart.max()),
        "at_step": int(apart.argmax()),
    }


def write_model(size: str, folder: Path) -> str:
    """A Hugging Face folder of Qwen3-<size> with random FP32 weights, the same on every machine."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(qwen3(size), dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=QWEN3, default="1.7B")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layout", type=json.loads, default={}, help="JSON of Layout fields")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, tokenizer = quickstart.prepare(folder)
        samples = folder / "samples"
        reader = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
        prepare(Data(path=str(corpus)), reader, asked.length, samples)
        curves = losses(
            Config(
                model=write_model(asked.size, folder / "model"),
                data=Data(path=str(samples)),
                sequence_length=asked.length,
                batch_size=asked.batch * asked.ranks,
                steps=asked.steps,
                ranks=asked.ranks,
                layout=Layout(**{"schedule": "in_backward", "activations": "keep"} | asked.layout),
                optimizer=Optimizer(lr=3e-4, warmup_steps=asked.steps // 10, clip_norm=None),
                run_folder=str(folder / "run"),
            )
        )
    found = summary(curves)
    print(json.dumps(found))
    if asked.json:
        settings = {name: value for name, value in vars(asked).items() if name != "json"}
        asked.json.write_text(json.dumps(settings | found | {"losses": curves}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
