"""Metrics from the config, and any logged name as monitor or objective."""

from __future__ import annotations

import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy

import gptrain
from gptrain.data import DummyTextDataset
from tests.lit.fit import ACCURACY, MODULES, OWN, fit


def test_a_metric_equals_torchmetrics_over_all_logits_and_may_choose_the_best_checkpoint():
    words = (
        ACCURACY, "objective=val/top5", "checkpoint.monitor=val/top5", "checkpoint.mode=max",
        "checkpoint.keep=2", "trainer.val_check_interval=1", "optimizer.lr=0.02",
        "+data.test={_target_: gptrain.data.DummyTextDataset, num_samples: 64, seq_len: 17,"
        " vocab_size: 256, seed: 42}",  # the training data
    )  # fmt: skip
    run = fit(*words)
    net, expected = gptrain.load(run.folder, "last"), {}
    for part, data in (
        ("val", DummyTextDataset(8, 17, 256, 43)),
        ("test", DummyTextDataset(64, 17, 256, 42)),
    ):
        metric = MulticlassAccuracy(256, top_k=5, average="micro")
        for tokens, targets in data:
            with torch.no_grad():
                metric.update(net(tokens[None])[0], targets)
        expected[part] = float(metric.compute())
    assert expected["val"] != expected["test"]
    assert run.metrics["val/top5"] == pytest.approx(expected["val"], abs=1e-6)
    assert run.column("val/top5")[-1] == run.metrics["val/top5"]
    assert "val/top5 " in run.line("result") and "warning" not in run.out
    tested = fit(f"from_run={run.folder}", "task=test", "ckpt_path=last")
    assert tested.metrics["test/top5"] == pytest.approx(expected["test"], abs=1e-6)
    values = run.column("val/top5")
    best = max(range(6), key=values.__getitem__) + 1
    assert run.result["checkpoint"].endswith(f"step-{best:08d}")
    assert run.steps == sorted({best, 5, 6}) and best < 5
    state = run.state(best)["weights"]
    loaded = gptrain.load(run.folder).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in state.items())
    checkpoint = f"ckpt_path={run.folder}/checkpoints/step-{best:08d}"
    again = fit(*words, "task=validate", checkpoint)
    assert again.metrics["val/top5"] == values[best - 1]


def test_a_name_that_is_never_logged_is_one_warning_that_lists_the_logged_names():
    words = ("checkpoint.monitor=val/none", "objective=val/nil")  # LanguageModel refuses these
    run = fit(f"{MODULES}.Logs", *words, "trainer.val_check_interval=2")
    for word in words:
        (line,) = [line for line in run.out.splitlines() if word.split("=")[1] in line]
        assert line.startswith(f"warning: {word}: ")
        assert "val/loss" in line and "train/loss" in line


def test_each_value_of_a_metric_with_several_values_has_a_name_of_its_own():
    f1 = "torchmetrics.classification.MulticlassF1Score, num_classes: 256, average: none"
    words = (f"+module.metrics.f1={{_target_: {f1}}}", "objective=val/f1/7")
    own = f"+module.metrics.own={{_target_: {OWN}.metrics.Counts}}"
    run = fit(*words, own, "trainer.num_sanity_val_steps=1", "trainer.max_steps=1")
    names = [name for name in run.metrics if name.startswith("val/f1/")]
    assert names == [f"val/f1/{i}" for i in range(256)]
    n_targets = 8 * 16
    counts = {"val/own/counted": n_targets, "val/own/each/0": n_targets, "val/own/each/1": 256}
    assert run.rows[-1].items() >= counts.items()
    assert "val/f1/0 " in run.line("result")
