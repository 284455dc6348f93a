"""A step that is not logged has almost no overhead, counted on a real run."""

from __future__ import annotations

import gc
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptrain.lit import LanguageModel
from gptrain.lit.loggers import JsonLinesLogger

N_STEPS, LOGGED_EVERY = 9, 4
LOGGED = (1, 4, 8, 9)  # the first and the last step, too
ACCUMULATED = 2
TOKENS, V = 32 * 16, 256  # tokens of a micro-batch, which are two chunks of the loss


class Watch(TorchDispatchMode):
    """Count the costs of each optimizer step.

    They are the reads of a tensor on the host (item(), float(), bool()), the number of elements
    of the largest tensor that was made, and the rows given to a logger.
    """

    def __init__(self):
        super().__init__()
        self.steps: list[Counter] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if self.steps:
            now = self.steps[-1]
            now["reads"] += op is torch.ops.aten._local_scalar_dense.default
            sizes = [leaf.numel() for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
            now["largest"] = max([now["largest"], *sizes])
        return result


def test_a_step_reads_norm_and_targets_by_one_copy_and_no_logger_is_called(train, monkeypatch):
    """The number of targets of each micro-batch is counted while the batch is on the CPU."""
    watch, training_step, log = Watch(), LanguageModel.training_step, JsonLinesLogger.log_metrics

    def step(self, batch, batch_idx):
        if batch_idx % ACCUMULATED == 0:
            watch.steps.append(Counter())
        return training_step(self, batch, batch_idx)

    def log_metrics(self, metrics, *args, **kwargs):
        watch.steps[-1]["rows"] += bool(metrics)
        return log(self, metrics, *args, **kwargs)

    monkeypatch.setattr(LanguageModel, "training_step", step)
    monkeypatch.setattr(JsonLinesLogger, "log_metrics", log_metrics)
    with watch:
        run = train(
            f"trainer.max_steps={N_STEPS}", f"trainer.log_every_n_steps={LOGGED_EVERY}",
            f"trainer.accumulate_grad_batches={ACCUMULATED}", "data.batch_size=32",
            "trainer.limit_val_batches=0", "logger=none", "checkpoint=none", "optimizer=muon",
            # No step is a spike, whatever the losses are: the report of a spike reads tensors.
            "on_spike=skip", "spike.window=4", "spike.sigma=1000",
        )  # fmt: skip
    assert run.code == 0, run.err
    assert gc.get_freeze_count()  # the objects that the suite has frozen are still frozen
    assert not (run.folder / "checkpoints").exists()
    assert len(watch.steps) == N_STEPS
    assert max(seen["largest"] for seen in watch.steps) < TOKENS * V  # logits never exist at once
    for number, seen in enumerate(watch.steps, start=1):
        if number not in LOGGED:
            # The norm and the number of targets are read by one copy (tolist), not by item().
            assert (seen["reads"], seen["rows"]) == (ACCUMULATED, 0)
