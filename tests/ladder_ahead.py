"""python -m tests.ladder_ahead [SEEDS]: predict a loss by a scaling-law sweep, then train.

The sweep trains five nets of 11 to 184 thousand parameters on Python's standard library, at 10, 20
and 40 tokens per parameter, and fits a scaling law. Then a net of 754 thousand parameters is
trained on 7.5 million tokens. On two cores, the sweep takes ten minutes for each of SEEDS (default
1), and the net seven minutes. An interrupted command can be repeated: finished runs are kept.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "outputs" / "ladder_ahead"
SIZES = "d_model={} n_heads={} n_kv_heads={} d_ff={} n_layers={}"
SMALLER = (
    (16, 2, 2, 43, 1), (24, 2, 2, 64, 1), (32, 2, 2, 88, 1), (48, 3, 3, 128, 2),
    (64, 4, 4, 176, 3),
)  # fmt: skip


def words(sizes: tuple[int, ...]) -> list[str]:
    """Return the overrides that select a net of these sizes."""
    return [f"model.{word}" for word in SIZES.format(*sizes).split()]


def main(seeds: int = 1) -> None:
    """Run the sweep and the target, and print the predicted and the trained loss."""
    nets = ",".join(f"'{' '.join(words(sizes))}'" for sizes in SMALLER)
    ladder = ["-m", "gptrain.ladder", "experiment=quickstart", "trainer.max_steps=-1",
              "max_tokens=7.5e6", *words((120, 6, 6, 320, 4)), f"ladder.sizes=[{nets}]",
              "ladder.tokens_per_parameter=[10,20,40]", "ladder.lr_width=128",
              f"ladder.seeds={[*range(1, seeds + 1)]}", f"output_dir={OUT}"]  # fmt: skip
    subprocess.run([sys.executable, *ladder], cwd=ROOT, check=True)
    ladder_result = json.loads((OUT / "ladder" / "ladder.json").read_text())
    folder = OUT / "target"
    if not (folder / "result.json").exists():
        command = [*shlex.split(ladder_result["target"]["command"])[1:], f"run_dir={folder}"]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    loss = json.loads((folder / "result.json").read_text())["metrics"]["val/loss"]
    predicted = ladder_result["target"]["loss"]
    print(f"predicted {predicted:.4f}, trained {loss:.4f}: {predicted / loss - 1:+.2%}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
