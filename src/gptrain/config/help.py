"""The one screen that --help prints."""

from __future__ import annotations

from gptrain.config.schema import PROJECT


def help_text() -> str:
    """What to type, every choice of every group, and where the keys are."""
    conf = PROJECT / "conf"
    groups = sorted(folder for folder in conf.iterdir() if list(folder.glob("*.yaml")))
    choices = "\n".join(
        f"  {group.name:17}{' '.join(sorted(file.stem for file in group.glob('*.yaml')))}"
        for group in groups
    )
    return f"""python train.py [group=choice ...] [key=value ...]     trains a language model

{choices}
  hydra/launcher   basic submitit_local submitit_slurm

  python train.py experiment=quickstart                 a small GPT on real text, a minute on a CPU
  python train.py trainer.devices=4                     four devices (strategy=auto takes ddp)
  python train.py strategy=fsdp trainer.devices=8       weights and optimizer cut over eight
  python train.py -m optimizer.lr=1e-3,3e-4 seed=1,2    a sweep: every combination, one by one
  python train.py trainer.fast_dev_run=true             one batch through every part, nothing kept
  python train.py run_dir=outputs/a ckpt_path=last      go on with the run in outputs/a

  --cfg job        shows the composed config         -m           runs a sweep
  --info defaults  shows how it was composed         debug=true   shows tracebacks"""
