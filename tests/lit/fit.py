"""`fit` runs train.py with a tiny net; a run without a folder is shared by tests of equal words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.run import Run, train

OWN = "tests.lit.own"
MODULES, CALLBACKS, DATA = f"module._target_={OWN}.modules", f"{OWN}.callbacks", f"{OWN}.data"
LIGHTNING = "lightning.pytorch.callbacks"
TINY = (
    "model=gpt_nano", "model.d_model=16", "model.n_heads=2", "model.n_layers=1",
    "data.num_samples=64", "data.seq_len=17", "data.val.num_samples=8", "data.batch_size=4",
    "trainer.max_steps=6", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false",
    "trainer.log_every_n_steps=1", "logger=none", "callbacks=none",
)  # fmt: skip
TWO = ("trainer.devices=2", "strategy.timeout_s=60")
ACCURACY = (
    "+module.metrics.top5={_target_: torchmetrics.classification.MulticlassAccuracy,"
    " num_classes: 256, top_k: 5, average: micro}"
)


class Fitted(Run):
    """A finished run, which must not be changed if it is shared."""

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]

    @property
    def seen(self) -> list[dict[str, Any]]:
        """Records of the callbacks of own/callbacks.py."""
        return [json.loads(line) for line in (self.folder / "seen.jsonl").read_text().splitlines()]

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints."""
        return [int(path.name[5:]) for path in self.checkpoints]

    def line(self, label: str) -> str:
        """Return one of the lines that a run prints at its start and end."""
        return next(line for line in self.out.splitlines() if line.startswith(f"{label} "))

    def copy_until(self, step: int, copy: Path) -> Path:
        """Copy this run as if it was killed after the checkpoint of `step`; return the copy."""
        shutil.copytree(self.folder, copy)
        Run(copy, 0, "", "").cut_back(step)
        return copy


def fit(*words: str, folder: Path | None = None, code: int = 0) -> Fitted:
    """Run `python train.py` with TINY and the given overrides, and check the exit code.

    A refused command prints one error line.
    """
    tiny = () if any(word.startswith("from_run=") for word in words) else TINY
    if any(word.startswith("data=") for word in words):
        tiny = [word for word in tiny if "num_samples" not in word]
    if "~data" in words:  # a LightningDataModule has keys of its own
        tiny = [word for word in tiny if not word.startswith("data.")]
    in_folder = [f"run_dir={folder}"] if folder else []
    ranks = 2 if "trainer.devices=2" in words else 1
    run = Fitted(**vars(train(*tiny, *words, *in_folder, ranks=ranks)))
    assert run.code == code, run.out + run.err
    if code == 2:
        assert len(run.errors) == 1 and "Traceback" not in run.err, run.err
    return run
