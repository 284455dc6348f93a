"""A run from Python: `gptrain.fit(["experiment=quickstart"])`, in a process of its own.

That process is the project's train.py, so that checks, ranks, run folder and signals are those of
the command line. This one keeps its Hydra, its log, its random numbers and its GPU as they were.
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
from threading import Thread
from typing import IO, TYPE_CHECKING, Any, TextIO

from gptrain import home
from gptrain.problems import BAD_CONFIG, ConfigError, Problem
from gptrain.resilience.status import RESULT_NAME, read_status
from gptrain.small_files import read_json
from gptrain.streams import Stream

if TYPE_CHECKING:
    from torch import nn

    from gptrain.data.tokenizers import Tokenizer


class RunFailed(Exception):
    """A run that began, and is not done.

    Attributes:
        lines: what it said on stderr about the error.   code: its exit code; 75: saved and stopped.
        folder: of the run; `fit([..., f"run_dir={folder}", "ckpt_path=last"])` goes on with it.
    """

    def __init__(self, lines: list[str], code: int, folder: Path):
        super().__init__(lines, code, folder)
        self.lines, self.code, self.folder = lines, code, folder

    def __str__(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True)
class Run:
    """A run that is done.

    Attributes:
        folder: its run folder.   conf: the folder of yaml of its project.
    """

    folder: Path
    conf: Path

    @property
    def metrics(self) -> dict[str, float]:
        """Of result.json, under their logged names: losses in nats per token."""
        return read_json(self.folder / RESULT_NAME)["metrics"]

    @property
    def net(self) -> nn.Module:
        """The net with the best weights, on the CPU in evaluation mode, as by `gptrain.load`."""
        return self._loaded[0]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Of the run's text; None where its data has none."""
        return self._loaded[1]

    @cached_property
    def _loaded(self) -> Any:
        from gptrain.nets.load import load  # torch

        home.enter(self.conf)  # whose classes may be named, and are found in its src/
        return load(self.folder, with_tokenizer=True)


def fit(overrides: Iterable[str] = (), conf: str | Path | None = None) -> Run:
    """The run of `python train.py <overrides>`, once it is done; what it prints is printed here.

    In a rank of torchrun, srun or mpirun it is that rank of the run. Ctrl-C, or a notebook's stop,
    lets the run save before KeyboardInterrupt is raised.

    Args:
        overrides: as on the command line, without flags: ["trainer.devices=2", "data.path=a b"].
        conf: the project's conf/, beside its train.py; None: of the project around the working
            directory.

    Raises:
        ConfigError: refused, nothing was started; `.lines`, and `.code`, the exit code.
        RunFailed: `.lines`, `.code`, `.folder`.
    """
    words, conf = list(overrides), Path(conf).absolute() if conf else home.find_conf()
    if conf is None or not conf.with_name("train.py").is_file():
        wrong = "no project here, a folder with train.py and conf/"
        raise ConfigError.of("conf", str(conf), wrong, attempt='fit(..., conf="project/conf")')
    if flags := [word for word in words if word.startswith("-") or not set(word) & set("=~")]:
        raise ConfigError.of("", None, f"{flags[0]}: not key=value")
    with TemporaryDirectory() as place:
        told = Path(place) / "folder"
        errors, code = _run([sys.executable, str(conf.with_name("train.py")), *words], told)
        folder = Path(os.fsdecode(told.read_bytes())) if told.exists() else None
    if folder and code == 0:
        return Run(folder, conf)
    status = (read_status(folder) or {}).get("message") if folder else None
    lines = errors or [status or f"error: exit code {code}"]
    if folder:
        raise RunFailed(lines, code, folder)
    wrong = [line.removeprefix("error: ") for line in lines]
    raise ConfigError([Problem("", None, line, code=code or BAD_CONFIG) for line in wrong])


def _run(command: list[str], told: Path) -> tuple[list[str], int]:
    """Lines of stderr that tell an error, and the exit code, of a command that ends with us.

    Args:
        told: file into which it writes the run's folder, as soon as it has begun.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # of a notebook: ""
    environment = os.environ | {home.FOLDER_VARIABLE: str(told), "PYTHONPATH": path}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches it through us, and once
    )
    errors: list[str] = []

    def show(lines: IO[str] | None, out: TextIO) -> None:
        stream: Any = Stream(out)
        for line in lines or ():  # not by descriptors, which a notebook does not show
            print(line, end="", file=stream, flush=True)
            if line.startswith("error: "):
                errors.append(line.rstrip("\n"))

    beside, is_stopped = Thread(target=show, args=(process.stderr, sys.stderr), daemon=True), False
    beside.start()
    while True:
        try:
            show(process.stdout, sys.stdout)
            beside.join()
            code = process.wait()
            break
        except KeyboardInterrupt:
            is_stopped = True
            process.send_signal(signal.SIGINT)
    if is_stopped:
        raise KeyboardInterrupt
    return errors, code
