"""Run the project's train.py from Python: `gptrain.fit(["experiment=quickstart"])`.

The run is a process of its own. It makes the checks, ranks, run folder and signal handlers that it
makes on the command line, and it prints to the same terminal. The calling process keeps its own
Hydra, its log, its random numbers and its GPU memory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gptrain.checkpoints.status import RESULT_NAME, read_status
from gptrain.core import locations
from gptrain.core.errors import BAD_CONFIG, ConfigError, ConfigIssue
from gptrain.core.small_files import read_facts, read_values

if TYPE_CHECKING:
    from torch import nn

    from gptrain.data.tokenizers import Tokenizer


class RunFailed(Exception):
    """Raised by `fit` if a run started and did not finish.

    Attributes:
        lines: Lines of the message with which the run ended. `str` joins them.
        code: Exit code of the run. 75 means that the run was asked to stop and can be resumed.
        folder: Run folder. `fit([..., f"run_dir={folder}", "ckpt_path=last"])` resumes the run.
    """

    def __init__(self, lines: list[str], code: int, folder: Path):
        super().__init__(lines, code, folder)
        self.lines, self.code, self.folder = lines, code, folder

    def __str__(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True)
class FinishedRun:
    """A run that finished.

    The first read of `net` or `tokenizer` loads both by `gptrain.load`, with its errors, and keeps
    them. It also selects the run's project for this process: GPTRAIN_CONF is set, and the project's
    src/ is appended to `sys.path`.

    Attributes:
        folder: Run folder.
        conf: The conf/ folder of the run's project.
    """

    folder: Path
    conf: Path

    @property
    def metrics(self) -> dict[str, float]:
        """Final metrics of result.json under their logged names, such as "val/loss".

        Raises:
            OSError: If the file is missing, as after fast_dev_run, or cannot be read.
            UnreadableFileError: If the file is damaged.
        """
        return read_values(self.folder / RESULT_NAME)["metrics"]

    @property
    def net(self) -> nn.Module:
        """Net with the best weights of the run, on the CPU and in evaluation mode."""
        return self._loaded[0]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer in the run folder, or None if the run's data has no tokenizer."""
        return self._loaded[1]

    @cached_property
    def _loaded(self) -> Any:
        """Net and tokenizer, loaded when they are first read."""
        from gptrain.assemble.load import load  # imports torch

        # Classes of the project's src/ may be loaded, and can be imported.
        locations.enter(self.conf)
        return load(self.folder, with_tokenizer=True)


def fit(overrides: Iterable[str] = (), conf: str | Path | None = None) -> FinishedRun:
    """Run `python train.py <overrides>` in a new process, wait for it, and return the finished run.

    The run writes to the standard streams of this process. In a rank of torchrun, srun or mpirun,
    the new process is that rank of the run. Ctrl-C, or a notebook's stop button, lets the run save
    a checkpoint before `fit` raises KeyboardInterrupt.

    Args:
        overrides: Words of the command line without flags: ["trainer.devices=2", "data.path=a b"].
        conf: The project's conf/ folder, next to its train.py. Defaults to the conf/ of the project
            around the working directory.

    Raises:
        ConfigError: If the run was refused before it started, if there is no project, or if a word
            is a flag. `.lines` has one line per problem, `.code` is the exit code.
        RunFailed: If the run started and did not finish.
    """
    words, conf = list(overrides), Path(conf).absolute() if conf else locations.find_conf()
    if conf is None or not conf.with_name("train.py").is_file():
        message = "no project here, a folder with train.py and conf/"
        raise ConfigError.of("conf", str(conf), message, hint='fit(..., conf="project/conf")')
    if flags := [word for word in words if word.startswith("-") or not set(word) & set("=~")]:
        raise ConfigError.of("", None, f"{flags[0]}: not key=value")
    with TemporaryDirectory() as folder:
        report_path = Path(folder) / "report.json"
        code = _run([sys.executable, str(conf.with_name("train.py")), *words], report_path)
        report = read_facts(report_path)
    unknown_error = f"error: exit code {code}"
    if "folder" not in report:
        lines = [line.removeprefix("error: ") for line in report.get("lines", [unknown_error])]
        raise ConfigError([ConfigIssue("", None, line) for line in lines], code or BAD_CONFIG)
    run_dir = Path(report["folder"])
    if code == 0:
        return FinishedRun(run_dir, conf)
    message = (read_status(run_dir) or {}).get("message") or unknown_error
    raise RunFailed(message.splitlines(), code, run_dir)


def _run(command: list[str], report_path: Path) -> int:
    """Run a command and return its exit code. Ctrl-C is sent on, and raised when it has ended."""
    # "" is a notebook's own folder.
    search_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = subprocess.Popen(
        command,
        env=os.environ | {locations.REPORT_VARIABLE: str(report_path), "PYTHONPATH": search_path},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # the terminal's Ctrl-C reaches this process alone
    )
    interrupt = None
    while process.returncode is None:
        try:
            process.wait()
        except KeyboardInterrupt as error:
            interrupt = error
            process.send_signal(signal.SIGINT)
    if interrupt:
        raise interrupt
    return process.returncode
