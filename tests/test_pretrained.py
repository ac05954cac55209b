"""Fine-tuning a real model on real text."""

import dataclasses
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from slidedp import Checkpoint, Config, Data, Layout, Optimizer, RunFailed, launch
from slidedp.checkpoint.export import export_checkpoint
from slidedp.data.order import Order
from slidedp.data.samples import Samples
from slidedp.data.stdlib import write_corpus
from slidedp.host.memory import pss_bytes
from tests import smollm2
from tests.launching import nothing_left, until

pytestmark = [pytest.mark.pretrained, pytest.mark.timeout(600)]
STEPS = 20


def loss_of(folder, samples):
    """Mean loss of a model folder on a few samples, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, labels = samples.rows(range(0, samples.count, samples.count // 8)[:8])
    with torch.no_grad():
        logits = model(ids).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()


def test_smollm2_learns_the_standard_library(tmp_path, record_property):
    folder = smollm2.folder()
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert config.num_hidden_layers == 30 and len(tokenizer) == config.vocab_size == 49152
    assert tokenizer.bos_token_id == 1 and tokenizer.eos_token_id == 2
    with (
        nothing_left(),
        launch(
            Config(
                model=folder,
                data=Data(path=write_corpus(tmp_path / "text", megabytes=0.3)),
                sequence_length=128,
                batch_size=2,
                steps=STEPS,
                optimizer=Optimizer(lr=5e-5, warmup_steps=2),
                ranks=2,
                device="cpu",
                # What is fastest on a CPU: nothing is gathered, nothing is computed twice.
                layout=Layout(delivery="replicated", reduction="cpu", activations="keep"),
                compute_dtype="bfloat16",
                run_folder=str(tmp_path / "run"),
            )
        ) as run,
    ):
        until(lambda: run.log.steps_done >= 3 or not run.running, "a few steps", 300)
        used = pss_bytes() + sum(pss_bytes(process.pid) for process in run._processes)
        run.wait()
        assert run.status == "finished"
        out = run.export(tmp_path / "tuned")
        samples = Samples(run.folder / "samples")
        losses = run.metrics()["loss"]
    before, after = loss_of(folder, samples), loss_of(out, samples)
    for name, value in (("loss_before", before), ("loss_after", after), ("host_gib", used / 2**30)):
        record_property(name, value)
    print(f"loss {before:.3f} before, {after:.3f} after; {used / 2**30:.2f} GiB")
    print("step losses", [round(loss, 3) for loss in losses])
    assert used < 8e9
    assert losses.notna().all()
    assert 1.0 < losses.iloc[0] < 4.0  # that of a model which knows English and some Python
    assert after < before - 0.1

    # One document after another, each with the end that the tokenizer has for it.
    assert (samples.labels == tokenizer.eos_token_id).sum() > 1
    tuned, reader = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert tuned.dtype == torch.bfloat16
    assert (tuned.config.bos_token_id, tuned.config.eos_token_id) == (1, 2)
    assert (tuned.generation_config.bos_token_id, tuned.generation_config.eos_token_id) == (1, 2)
    prompt = reader("import os\n\ndef ", return_tensors="pt")
    written = tuned.float().generate(**prompt, max_new_tokens=24, do_sample=False, pad_token_id=2)
    text = reader.decode(written[0])
    print(text)
    assert text.startswith("import os\n\ndef ") and len(text) > len("import os\n\ndef ") + 10


@pytest.mark.slow
def test_smollm2_goes_on_after_a_kill_and_exports_what_it_trained(tmp_path, record_property):
    """In FP32, so that transformers can be held to what a checkpoint says."""
    config = Config(
        model=smollm2.folder(),
        data=Data(path=write_corpus(tmp_path / "text", megabytes=0.1)),
        sequence_length=64,
        batch_size=2,
        steps=6,
        optimizer=Optimizer(lr=5e-5, lr_schedule="cosine"),
        ranks=2,
        device="cpu",
        run_folder=str(tmp_path / "run"),
        checkpoint=Checkpoint(every_steps=3),
    )
    with launch(dataclasses.replace(config, run_folder=str(tmp_path / "whole"))) as run:
        whole = run.wait().metrics()["loss"]
        order = Order(Samples(run.folder / "samples").count, config.batch_size, config.seed)
    with nothing_left():
        run = launch(config)
        until(lambda: run.log.steps_done >= 4 or not run.running, "a few steps", 500)
        (saved,) = (Path(event["path"]) for event in run.log.events("checkpoint"))
        os.kill(list(run._processes)[-1].pid, signal.SIGKILL)
        with pytest.raises(RunFailed, match="the optimizer worker was ended by SIGKILL"):
            run.wait()
        run.close()
        with launch(config, resume="latest") as resumed:
            losses = resumed.wait().metrics()["loss"]
    assert saved.name == "step-00000003"
    assert len(losses) == 6 and (losses == whole).all()
    # The loss of step 3 is that of the weights after 3 steps, on its batch.
    out = export_checkpoint(saved, tmp_path / "out", "float32")
    ids, labels = Samples(resumed.folder / "samples").rows(order.step(3))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(out).eval()(ids).logits
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    print(f"ours {losses[3]:.6f}, transformers {theirs:.6f}; losses {[round(x, 4) for x in losses]}")
    record_property("difference", abs(theirs - losses[3]))
    assert abs(theirs - losses[3]) < 1e-3
    assert AutoTokenizer.from_pretrained(out).eos_token_id == 2
