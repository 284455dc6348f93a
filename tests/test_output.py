"""What a command prints if it cannot begin."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = (
    "train.py model=gpt_nano trainer=cpu trainer.max_steps=1 data.seq_len=16 data.batch_size=2"
    " trainer.limit_val_batches=1 logger=none"
)


def shell(command: str, **variables: str) -> tuple[int, str]:
    """Code of the first process of a pipe, and what it says on stderr."""
    done = subprocess.run(
        ["bash", "-c", f'"$0" {command}; exit ${{PIPESTATUS[0]}}', sys.executable],
        cwd=ROOT, env=os.environ | variables, stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_ctrl_c_in_the_imports_is_one_line(tmp_path):
    (tmp_path / "hydra.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert shell(RUN, PYTHONPATH=path) == (130, "interrupted\n")
