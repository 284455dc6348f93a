"""A copy of this checkout, in which a test may add and delete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def copy_checkout(folder: Path) -> Path:
    """The files that git tracks, in a new folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():  # not deleted since the last commit
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def python(copy: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`python <arguments>` in a copy, with its package in place of the installed one."""
    environment = os.environ | {"PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}"}
    environment["GPTRAIN_OUTPUT_DIR"] = str(copy / "outputs")
    return subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
