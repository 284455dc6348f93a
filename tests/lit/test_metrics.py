"""Metrics from the config, and any logged name as monitor or objective."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torchmetrics.classification import MulticlassAccuracy

import gptrain
from gptrain.data import DummyTextDataset
from gptrain.lit import LanguageModel
from gptrain.models import SimpleGPT
from tests.lit.conftest import ACCURACY, OWN
from tests.lit.own.metrics import Nats


def test_a_metric_equals_torchmetrics_over_all_logits(fit):
    run = fit(
        ACCURACY, "trainer.val_check_interval=3", "optimizer.lr=0.01",
        "+data.test={_target_: gptrain.data.DummyTextDataset, num_samples: 64, seq_len: 17,"
        " vocab_size: 256, seed: 42}",  # the training data
    )  # fmt: skip
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
    assert "val/top5 " in next(line for line in run.out.splitlines() if "result" in line)
    tested = fit(f"from_run={run.folder}", "task=test", "ckpt_path=last", name="tested")
    assert tested.metrics["test/top5"] == pytest.approx(expected["test"], abs=1e-6)


def test_a_metric_sees_masked_documents_as_the_loss_does():
    """The documents of a sample do not see each other, neither in the loss nor in a metric."""
    net = SimpleGPT(61, 16, n_heads=4, n_layers=2, max_seq_len=16, dropout=0.0).double()
    tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1).where(tokens % 5 != 0, -100)
    documents = torch.tensor([[0] * 5 + [1] * 7, [4] * 9 + [5] * 3])
    metric, token_bytes = Nats(), torch.arange(61) + 2
    module = LanguageModel(net, torch.optim.AdamW, None, None, {"nats": metric}, token_bytes)
    module.evaluate(tokens, targets, None, documents)
    nats = 0.0
    for row, parts in enumerate((((0, 5), (5, 12)), ((0, 9), (9, 12)))):
        for start, end in parts:  # each document alone
            with torch.no_grad():
                logits = net(tokens[row : row + 1, start:end])[0]
            own = targets[row, start:end]
            nats += F.cross_entropy(logits, own, reduction="sum").item()
    logits = module(tokens, documents)
    assert F.cross_entropy(logits.mT, targets, reduction="sum").item() == pytest.approx(nats)
    counted = targets[targets != -100]
    n_bytes = int((counted + 2).sum())
    assert module.eval_sums[""].tolist() == pytest.approx([nats, len(counted), n_bytes])
    assert float(metric.compute()) == pytest.approx(nats)


def test_a_metric_may_be_objective_and_monitor_with_the_highest_value_as_the_best(fit):
    words = (
        ACCURACY, "objective=val/top5", "checkpoint.monitor=val/top5", "checkpoint.mode=max",
        "checkpoint.keep=2", "trainer.val_check_interval=1", "optimizer.lr=0.02",
    )  # fmt: skip
    run = fit(*words)
    assert "warning" not in run.out
    values = run.column("val/top5")
    best = max(range(6), key=values.__getitem__) + 1
    result = json.loads((run.folder / "result.json").read_text())
    assert result["checkpoint"].endswith(f"step-{best:08d}")
    assert run.steps() == sorted({best, 5, 6}) and best < 5
    state = run.state(best)["state_dict"]
    loaded = gptrain.load(run.folder).state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.items())
    again = fit(*words, "task=validate", f"ckpt_path={run.folder}/checkpoints/step-{best:08d}",
                name="again")  # fmt: skip
    assert again.metrics["val/top5"] == values[best - 1]


def test_a_name_that_is_never_logged_is_one_warning_that_lists_the_logged_names(fit):
    words = (
        "checkpoint.monitor=val/none",
        "objective=val/nil",
    )  # gptrain.lit.LanguageModel would refuse these
    run = fit(f"module._target_={OWN}.modules.Logs", *words, "trainer.val_check_interval=2")
    for key, name in (word.split("=") for word in words):
        (line,) = [line for line in run.out.splitlines() if name in line]
        assert line.startswith(f"warning: {key}={name}: not logged in the first validation")
        assert "val/loss" in line and "train/loss" in line


@pytest.mark.parametrize("name", ["EarlyStopping"])
def test_a_monitor_that_a_user_module_does_not_log_is_one_line_that_loses_no_step(fit, name):
    callback = f"{{_target_: lightning.pytorch.callbacks.{name}, monitor: val/acc}}"
    words = (f"module._target_={OWN}.modules.Logs", f"+callbacks.c={callback}")
    run = fit(*words, "trainer.val_check_interval=2", code=2, begun=True)
    line = run.errors[0]
    assert line.startswith("error: trainer: ") and "val/acc" in line
    assert "val/mine" in line and run.steps() == [2]


TARGET = "+module.metrics.%s={_target_: torchmetrics.classification.%s, num_classes: %d%s}"


def test_a_metric_with_several_values_is_logged_element_by_element(fit):
    words = (TARGET % ("f1", "MulticlassF1Score", 256, ", average: none"),)
    words += ("objective=val/f1/7", "trainer.num_sanity_val_steps=1")
    run = fit(*words, "trainer.max_steps=2")
    names = [name for name in run.metrics if name.startswith("val/f1/")]
    assert names == [f"val/f1/{i}" for i in range(256)]
    (line,) = [line for line in run.out.splitlines() if line.startswith("result ")]
    assert "val/f1/0 " in line and " more values in result.json · " in line


def test_each_value_of_a_metric_that_returns_a_dict_has_a_name_of_its_own(fit):
    run = fit(f"+module.metrics.own={{_target_: {OWN}.metrics.Counts}}", "trainer.max_steps=1")
    n_targets = 8 * 16
    assert run.rows[-1].items() >= {
        "val/own/counted": n_targets, "val/own/each/0": n_targets, "val/own/each/1": 256,
    }.items()  # fmt: skip
