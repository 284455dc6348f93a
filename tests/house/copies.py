"""A copy of this checkout, in which a test may add and delete, and commands that run in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

# Forks itself for each command, so that what does not lie in a copy is imported once. It has
# computed nothing, so it has no threads.
WARM = """
import contextlib, gc, importlib, json, os, runpy, sys
for name in sys.argv[1:]:
    with contextlib.suppress(ImportError):  # of an extra
        importlib.import_module(name)
gc.collect(), gc.freeze()
for line in sys.stdin:
    copy, output, compiled, arguments = json.loads(line)
    if (child := os.fork()) == 0:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 1)
        os.dup2(1, 2)
        os.chdir(copy)
        sys.path[:0] = [copy + "/src", copy]
        sys.pycache_prefix, sys.dont_write_bytecode = compiled, False
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
        os.environ["GPTRAIN_OUTPUT_DIR"] = copy + "/outputs"
        kind, *sys.argv = arguments if arguments[0] in ("-c", "-m") else ("", *arguments)
        if kind == "-c":
            exec(sys.argv[0], {"__name__": "__main__"})
        elif kind == "-m":
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
HEAVY = [
    "hydra", "hypothesis", "lightning.pytorch", "pydantic", "pytest", "torch._dynamo",
    "torch.utils.tensorboard", "torchmetrics.classification", "wandb",
    "transformers.models.gpt2.modeling_gpt2",
]  # fmt: skip


class Copy:
    """Files that git tracks, in a folder of their own."""

    def __init__(self, parent: Path):
        self.folder, self.output, self.compiled = parent / "copy", parent / "said", parent / "pyc"
        self.warm = subprocess.Popen(
            [sys.executable, "-c", WARM, *HEAVY], cwd=parent, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def restore(self) -> None:
        """As they are in the checkout."""
        shutil.rmtree(self.folder, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).exists():  # not deleted since the last commit
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)

    def python(self, *arguments: str) -> None:
        """`python <arguments>` with the copy's package in place of the installed one."""
        places = map(str, (self.folder, self.output, self.compiled))
        print(json.dumps([*places, arguments]), file=self.warm.stdin, flush=True)
        code = self.warm.stdout.readline().strip()
        assert code == "0", f"exit code {code}: {self.output.read_text(errors='replace')[-3000:]}"

    def end(self) -> None:
        """Ends the warm process."""
        self.warm.stdin.close()
        self.warm.wait()
