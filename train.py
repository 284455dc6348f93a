"""Trains a language model: compose -> check -> build -> fit -> report, all of it on this page.

python train.py                                       SimpleGPT on dummy text, one device
python train.py experiment=quickstart                 a small GPT learns Python on a laptop's CPU
python train.py trainer.devices=4                     the same run on four GPUs
python train.py -m optimizer.lr=1e-3,3e-4 seed=1,2    four runs, one after another
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from gptrain import config

if TYPE_CHECKING:
    from gptrain.resilience.guard import Guard


def train(cfg: DictConfig, guard: Guard) -> dict[str, float]:
    """The run itself, in each of its ranks; returns its final metrics."""
    from gptrain.assemble import build  # here, so that a wrong option is answered without torch

    run = build(cfg, guard)
    run.report.start(run.trainer)
    parts = {"datamodule": run.datamodule, "ckpt_path": run.checkpoint}
    if cfg.task == "fit":
        run.trainer.fit(run.module, **parts)
    if cfg.task == "validate":
        run.trainer.validate(run.module, **parts, verbose=False)
    if cfg.task == "test" or cfg.trainer.fast_dev_run:
        run.trainer.test(run.module, **parts, verbose=False)
    return run.report.end(run.trainer)


def main(cfg: DictConfig) -> float | None:
    """One job: checked, then run in this process or in the ranks that it starts."""
    from gptrain import launch  # likewise

    metrics = launch.run(train, cfg)
    return metrics.get(cfg.objective)


if __name__ == "__main__":
    config.main(main)
