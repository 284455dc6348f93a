"""Train a language model. The whole run is on this page.

python train.py                                       SimpleGPT on dummy text, one device
python train.py experiment=quickstart                 a small Llama learns Python on a laptop's CPU
python train.py trainer.devices=4                     the same run on four GPUs
python train.py -m optimizer.lr=1e-3,3e-4 seed=1,2    four runs, one after another
"""

# Read this page from its last line upwards. `config.main` composes and checks the config of each
# job. `main` checks that the parts of a run fit, and starts its ranks. `train` builds the parts in
# each rank, fits, and reports the result.

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gptrain import config

if TYPE_CHECKING:
    from gptrain.core.schema import RunConfig
    from gptrain.runtime.watchdog import Guard


def train(cfg: RunConfig, guard: Guard) -> dict[str, float]:
    """Run the training in one rank and return its final metrics.

    Args:
        cfg: Checked config of the run.
        guard: Guard of this rank, which gets heartbeats and has the request to stop.
    """
    from gptrain.assemble.run import build  # imported late: config errors need no torch

    return build(cfg, guard).go()


def main(cfg: RunConfig) -> float | None:
    """Check one job, run it in this process or in ranks of its own, and return the objective.

    Args:
        cfg: Config of the job.

    Returns:
        Final value of the metric `objective`, by which a sweep compares its jobs, or None.
    """
    # Imported late: errors of the config need no torch.
    from gptrain.assemble.resume import find_checkpoint
    from gptrain.assemble.run import check
    from gptrain.runtime.launch import run

    check(cfg)
    # The runtime calls find_checkpoint once it holds the run folder, and again before a restart.
    metrics = run(train, cfg, find_checkpoint)
    return metrics.get(cfg.objective)


if __name__ == "__main__":
    config.main(main, conf=Path(__file__).parent / "conf", usage=__doc__)
