"""What leaves a run while it goes on: rows for loggers, TensorBoard files, evaluations."""

import math
import sys

import numpy as np
import pandas as pd
import pytest

from slidedp import ConfigError, Data, TensorBoard, launch, open_run
from slidedp.data.samples import write_samples
from slidedp.steps import RowReader
from tests.launching import DEADLINE, LENGTH, VOCABULARY, small_config
from tests.pool import small_model

STEPS, EVERY = 9, 4


def test_rows_evaluations_and_event_files_tell_what_metrics_do(tmp_path, capfd):
    small_config(tmp_path)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (7, LENGTH + 1)).astype(np.int32)
    write_samples(tmp_path / "held-out", tokens[:, :-1].copy(), tokens[:, 1:].copy())
    data = Data(path=tmp_path / "data", eval_path=tmp_path / "held-out")
    board, rows = TensorBoard(tmp_path / "board"), []

    def on_step(row):
        rows.append(row)
        board(row)
        if row["step"] == STEPS - 1 and "loss" in row:
            raise ValueError("full")

    mixture = small_model(tmp_path / "mixture", kind="olmoe")
    config = small_config(
        tmp_path,
        model=mixture,
        data=data,
        steps=STEPS,
        eval_every=EVERY,
        router_aux_loss_coef=0.1,
        run_folder=str(tmp_path / "run"),
    )
    with launch(config, on_step=on_step) as run:
        run.wait(DEADLINE)
        metrics, evaluations, experts = run.metrics(), run.evaluations(), run.experts()
    assert (run.status, len(metrics)) == ("finished", STEPS)
    told = f"held-out loss {evaluations['eval_loss'].iloc[-1]:.4f}, perplexity"
    assert told in repr(run) and f"after {STEPS} steps" in repr(run) and "held-out loss" in run._repr_html_()
    assert capfd.readouterr().err.count("ValueError: full") == 1

    # Evaluations: before the first step, between steps, after the last; and beside the steps' own losses.
    assert evaluations.index.tolist() == [0, 4, 8, 9]
    assert (evaluations["targets"] == 7 * LENGTH).all()
    np.testing.assert_allclose(np.log(evaluations["perplexity"]), evaluations["eval_loss"])
    assert evaluations["eval_loss"].nunique() == 4
    pd.testing.assert_frame_equal(open_run(tmp_path / "run").evaluations(), evaluations)
    beside = metrics["eval_loss"].dropna()
    assert beside.to_dict() == evaluations["eval_loss"].drop(9).to_dict()
    # A step after an evaluation does not follow at once, so it is not timed.
    assert metrics.index[metrics["step_seconds"].isna()].tolist() == [0, 4, 8]

    # Experts: every token goes to two of the six in each layer, in the steps that are sampled.
    assert (metrics["router_loss"] > 0).all() and (metrics["expert_load"].between(1, 3)).all()
    assert experts["step"].unique().tolist() == [1]
    assert (experts.groupby("layer")["tokens"].sum() == 2 * config.batch_size * LENGTH).all()
    assert experts["tokens"].max() * 6 / (2 * config.batch_size * LENGTH) == metrics["expert_load"][1]
    pd.testing.assert_frame_equal(open_run(tmp_path / "run").experts(), experts)

    # Rows: all of them in order, but the one after the fault of the logger.
    order = [(row["step"], "loss" in row) for row in rows]
    assert order == sorted([*((s, True) for s in range(STEPS)), (0, False), (4, False), (8, False)])
    steps = pd.DataFrame([row for row in rows if "loss" in row]).set_index("step")
    pd.testing.assert_frame_equal(steps, metrics[steps.columns], check_dtype=False, check_names=False)
    evals = pd.DataFrame([row for row in rows if "loss" not in row]).set_index("step")
    pd.testing.assert_frame_equal(evals, evaluations.loc[:8, evals.columns], check_names=False)

    # TensorBoard: a scalar for each finite number of the rows.
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    for name in ("loss", "eval_loss", "perplexity", "step_seconds", "lr"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        wanted = [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_rows_wait_for_every_process_and_keep_their_order():
    step = {"compute_seconds": 1.0, "step_seconds": 1.0, "wait_seconds": {}, "loss_sum": 2.0, "targets": 1}
    update = {"kind": "update", "lr": 0.1, "gradient_norm": 1.0, "skipped": False, "update_seconds": 0.1}
    reader = RowReader(2, 1e9)

    def add(kind, number, **more):
        return [row["step"] for row in reader.add({"kind": kind, "step": number, **more})]

    assert reader.add({"kind": "mark"}) == []
    assert add("step", 5, rank=0, **step) == []  # a resumed run does not begin at 0
    assert add(**update | {"number": 5}) == []
    assert add("step", 6, rank=1, **step) == []
    assert add("step", 5, rank=1, **step) == [5]
    assert add("eval", 7, rank=0, loss_sum=1.0, targets=1) == []
    assert add("eval", 7, rank=1, loss_sum=1.0, targets=1) == []
    assert add(**update | {"number": 6}) == []
    assert add("step", 6, rank=0, **step) == [6, 7]


def test_no_tensorboard_is_said(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        TensorBoard(tmp_path)
