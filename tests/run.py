"""The harness of the new tables: run `train.py` as a user does, and read what the run has left.

    run = train("model=gpt_nano", "trainer.max_steps=4", ranks=2)
    assert run.code == 0, run.err
    run.column("train/loss"), run.state()["weights"], same(run.state(), other.state())

A run of one rank takes place in this process, and one of several ranks in processes that a fork
server starts with torchrun's environment variables: torch is imported only once. With
`trainer.devices=2` and without `ranks`, the run starts its ranks itself. A run of one rank that may
be killed has a process of its own.

A run is identified by its words. The first test that needs it makes it, in any process of the
suite, and the other processes wait. So every test can run alone (-k) and in any order.
"""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import shutil
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha1
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

from hydra.core.override_parser.overrides_parser import OverridesParser

from gptrain.core import shell
from tests.fast import some_flops_per_s
from tests.forked import forked_ranks, server

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "train.py")
PEERS_S = 1.0  # after a rank has failed, the others get SIGTERM; torchrun does so at once
KILLED_S = 15.0  # after SIGTERM, they get SIGKILL
LIMIT_S = 240.0


@dataclass
class Run:
    """A finished run.

    Attributes:
        folder: Run folder.
        code: Exit code: that of the first process that failed, negative for a signal.
        out: What all processes printed on stdout.
        err: What all processes printed on stderr.
    """

    folder: Path
    code: int
    out: str
    err: str

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl, one per logged step."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def column(self, name: str) -> list[float]:
        """Return the values of one metric, without the steps that do not have it."""
        return [row[name] for row in self.rows if name in row]

    @cached_property
    def result(self) -> dict[str, Any]:
        """Content of result.json."""
        return json.loads((self.folder / "result.json").read_text())

    @cached_property
    def status(self) -> dict[str, Any]:
        """Content of status.json."""
        return json.loads((self.folder / "status.json").read_text())

    @property
    def checkpoints(self) -> list[Path]:
        """Folders of the checkpoints, the oldest first."""
        return sorted((self.folder / "checkpoints").glob("step-*"))

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the result."""
        return self.result["metrics"]

    def state(self, step: int | None = None) -> dict[str, Any]:
        """Return the content of the checkpoint of a step, by default the newest (`read_state`)."""
        folder = self.folder / "checkpoints"
        return read_state(self.checkpoints[-1] if step is None else folder / f"step-{step:08d}")

    def cut_back(self, step: int) -> None:
        """Change the folder as if the run had been killed after the checkpoint of this step."""
        for path in self.checkpoints:
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)
        (self.folder / "result.json").unlink()


def read_tensors(checkpoint: Path) -> dict[str, Any]:
    """Return the tensors of a checkpoint in full, by torch's own reader."""
    import torch
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = dcp.HuggingFaceStorageReader(str(checkpoint))
        saved = reader.read_metadata().state_dict_metadata
        tensors = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in saved.items()}
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the state in a checkpoint, with full tensors.

    `weights` maps names to tensors, `optimizer` has `state` (by the names of the weights) and
    `groups`, `rng` has the random states of each rank, and `counters` has everything else.
    """
    import torch
    from safetensors import safe_open

    counters = torch.load(checkpoint / "state.ckpt", weights_only=True)
    names = {kind: set() for kind in ("model", "optimizer")}
    for kind, found in names.items():
        for file in checkpoint.glob(f"{kind}*.safetensors"):
            with safe_open(file, "pt") as content:
                found.update(content.keys())
    tensors = read_tensors(checkpoint)
    groups, state = [], {}
    for part in counters.pop("optimizer_states", []):
        groups += part["param_groups"]
        state |= {name: dict(values) for name, values in part["values"].items()}
    for key in names["optimizer"]:
        name, _, kind = key.rpartition(".")
        state.setdefault(name, {})[kind] = tensors[key]
    return {
        "weights": {name: tensors[name] for name in names["model"]},
        "optimizer": {"state": state, "groups": groups}, "rng": counters.pop("rng"),
        "counters": counters,
    }  # fmt: skip


def train(
    *words: str,
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    own_process: bool = False,
    cached: bool = True,
) -> Run:
    """Run `python train.py <words>`, or find the same run, and return it.

    Args:
        words: Overrides of the command. Unless `run_dir=` is among them, the run has a new folder.
        ranks: Number of processes. `trainer.devices` is added for several.
        env: Environment variables of the run.
        own_process: Whether a run of one rank may be killed.
        cached: Whether an equal run of another test may be returned. Tests must not change a cached
            run. A run in a folder of the test's own (`run_dir=`) is always made.
    """
    typed = [word for word in words if word.startswith("run_dir=")]
    parse = OverridesParser.create().parse_override
    own_folder = str(parse(typed[-1]).value()) if typed else ""
    if ranks > 1 and not any(word.startswith("trainer.devices=") for word in words):
        words = (f"trainer.devices={ranks}", *words)
    run = partial(start, words, ranks, dict(env or {}), own_process)
    if own_folder or not cached:
        place = new_place()
        return run(place, Path(own_folder).expanduser() if own_folder else place / "run")
    key = json.dumps([words, ranks, env and sorted(env.items()), own_process])
    place = Path(os.environ["GPTRAIN_TEST_RUNS"], sha1(key.encode()).hexdigest()[:12])
    place.mkdir(exist_ok=True)
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (place / "code.json").exists():
            return read_run(place, place / "run")
        shutil.rmtree(place / "run", ignore_errors=True)  # the test that made it was killed
        return run(place, place / "run")


def read_run(place: Path, folder: Path) -> Run:
    """Return the finished run whose output is in the folder `place`."""
    code = json.loads((place / "code.json").read_text())
    out, err = ((place / name).read_text(errors="replace") for name in ("out", "err"))
    return Run(folder, code, out, err)


def start(
    words: tuple[str, ...],
    ranks: int,
    env: dict[str, str],
    own_process: bool,
    place: Path,
    folder: Path,
) -> Run:
    """Run a command in a run folder. Its output and its exit code go into `place`."""
    command = [word for word in words if not word.startswith("run_dir=")]
    command.append(shell.override("run_dir", folder))
    env = {"GPTRAIN_OUTPUT_DIR": str(place / "outputs"), **env}
    for name in ("out", "err"):
        (place / name).write_bytes(b"")
    if ranks == 1 and not own_process:
        started = forked_ranks(place / "out", place / "err")  # those that the run starts itself
        with redirected(place), patch.dict(os.environ, env), started:
            code = run_script(command)
    else:
        of_torchrun = torchrun_variables(ranks, place) if ranks > 1 else {}
        processes = []
        for rank in range(ranks):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            arguments = (command, {**os.environ, **of_torchrun, **env, **of_rank}, place)
            processes.append(server().Process(target=run_rank, args=arguments))
            processes[-1].start()
        code = wait_for(processes)
    (place / "code.json").write_text(json.dumps(code))
    return read_run(place, folder)


def run_script(words: list[str], module: str = "") -> int:
    """Run train.py, or a module, with these words in this process; return its exit code."""
    from gptrain.lit import measure

    argv = sys.argv
    sys.argv = [module or SCRIPT, *words]
    try:
        with patch.object(measure, "measure_matmul", some_flops_per_s):
            if module:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(SCRIPT, run_name="__main__")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        sys.argv = argv
    return 0


def run_rank(words: list[str], env: dict[str, str], place: Path) -> None:
    """Run train.py as the main program of this new process."""
    os.environ.clear()
    os.environ.update(env)
    with redirected(place):
        code = run_script(words)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def wait_for(processes: list) -> int:
    """Wait for all processes, and return the code of the first one that did not end with 0."""
    code, since, limit = 0, time.monotonic(), LIMIT_S
    is_asked = False
    while any(process.is_alive() for process in processes):
        for process in processes:
            process.join(0.05)
            if process.exitcode and not code:  # the others wait for the failed rank
                code, since, limit = process.exitcode, time.monotonic(), PEERS_S
        if time.monotonic() - since > limit:
            for process in processes:
                process.kill() if is_asked else process.terminate()
            is_asked, since, limit = True, time.monotonic(), KILLED_S
    return code or next((process.exitcode for process in processes if process.exitcode), 0)


def free_port() -> int:
    """Return a free port below those that the kernel gives to the sockets of other processes."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", 10_000 + int.from_bytes(os.urandom(2), "big") % 10_000))
            return probe.getsockname()[1]


def torchrun_variables(ranks: int, place: Path) -> dict[str, str]:
    """Return the variables that torchrun sets in all ranks of one node."""
    port = free_port()
    return {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": place.name, "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


@contextmanager
def redirected(place: Path) -> Iterator[None]:
    """Append the output of this process, and of its children, to `place`/out and `place`/err."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    kept = os.dup(1), os.dup(2)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        sys.stdout, sys.stderr = streams
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)


def new_place() -> Path:
    """Return a new folder for a run that no other test reads."""
    return Path(mkdtemp(prefix="run-", dir=os.environ["GPTRAIN_TEST_RUNS"]))


def same(first: Any, second: Any, rtol: float = 0.0, at: str = "") -> list[str]:
    """List the differences of two nested states: bit for bit, or of numbers up to `rtol`.

    The error of a tensor is relative to the largest element of `second`. NaN equals NaN.
    """
    import torch

    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.shape != second.shape or first.dtype != second.dtype:
            return [f"{at}: {first.dtype} {[*first.shape]} != {second.dtype} {[*second.shape]}"]
        if torch.allclose(first, second, rtol=0, atol=0, equal_nan=True):
            return []
        error = (first.double() - second.double()).abs().max().item()
        scale = second.double().abs().max().item()
        return [] if error <= rtol * scale else [f"{at}: differs by {error:.3g}, of {scale:.3g}"]
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        lone = [f"{at}.{key}: on one side only" for key in first.keys() ^ second.keys()]
        both = [key for key in first if key in second]
        return lone + [x for k in both for x in same(first[k], second[k], rtol, f"{at}.{k}")]
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        if len(first) != len(second):
            return [f"{at}: {len(first)} entries != {len(second)}"]
        pairs = enumerate(zip(first, second, strict=True))
        return [x for i, (a, b) in pairs for x in same(a, b, rtol, f"{at}[{i}]")]
    if first == second or (first != first and second != second):
        return []
    are_numbers = isinstance(first, float) and isinstance(second, float)
    is_close = are_numbers and abs(first - second) <= rtol * abs(second)
    return [] if is_close else [f"{at}: {first!r} != {second!r}"]
