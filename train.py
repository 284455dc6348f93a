"""Trains a language model: compose -> check -> build -> fit -> report, all of it on this page.

python train.py                                       SimpleGPT on dummy text, one device
python train.py experiment=quickstart                 a small GPT learns Python on a laptop's CPU
python train.py trainer.devices=4                     the same run on four GPUs
python train.py -m optimizer.lr=1e-3,3e-4 seed=1,2    four runs, one after another
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gptrain import config

if TYPE_CHECKING:
    from gptrain.core.schema import RunConfig
    from gptrain.resilience.watchdog import Guard


def train(cfg: RunConfig, guard: Guard) -> dict[str, float]:
    """The run itself, in each of its ranks; returns its final metrics."""
    from gptrain import assemble  # here, so that a wrong option is answered without torch

    run = assemble.build(cfg, guard)
    return run.go()


def main(cfg: RunConfig) -> float | None:
    """One job: checked, then run in this process or in the ranks that it starts."""
    from gptrain import assemble, ranks  # likewise

    assemble.check(cfg)
    metrics = ranks.run(train, cfg, assemble.find_checkpoint)
    return metrics.get(cfg.objective)


if __name__ == "__main__":
    config.main(main, conf=Path(__file__).parent / "conf", usage=__doc__)
