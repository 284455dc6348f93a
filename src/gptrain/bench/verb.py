"""The verb: what is compared, in which order, and what is told of it."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from gptrain import bench as package
from gptrain import config
from gptrain.bench.result import Result, summarize, table
from gptrain.bench.turns import Contestant
from gptrain.config import forms
from gptrain.config.schema import Run
from gptrain.problems import BAD_CONFIG, ConfigError, Problem

log = logging.getLogger(__name__)

# What each size adds before what is typed; a step takes about 1 ms, 0.1 s, 2 s, and (GPU) 0.1 s.
SIZES = {
    "tiny": "model=gpt_nano model.d_model=32 model.n_heads=2 model.n_layers=1 data.seq_len=17 "
    "data.batch_size=4 trainer.log_every_n_steps=50 steps=50 rounds=15",
    "cpu": "model=gpt_nano data.seq_len=129 data.batch_size=16 steps=5 rounds=8",
    "simple_gpt": "model=simple_gpt data.seq_len=128 data.batch_size=8 steps=1 rounds=5",
    "gpt2": "model=gpt2 data.seq_len=1025 data.batch_size=16 model.dropout=0 steps=10 rounds=5",
}
SIZE_KEYS = ("vocab_size", "d_model", "n_heads", "n_layers", "max_seq_len", "dropout")
OWN_KEYS = ("rounds", "steps", "loops", "json", "size")
COMPARED = {
    "data.train._target_": "gptrain.data.DummyTextDataset",
    "optimizer._target_": "torch.optim.AdamW",
}
# A run without what the other loops do not do either.
FIXED = (
    "checkpoint=none",
    "trainer.limit_val_batches=0",
    "trainer.max_steps=100000000",
    "trainer.max_epochs=-1",
)


class BenchRun(Run):
    """A run's keys and the command's own."""

    size: forms.choice(*SIZES)
    rounds: forms.Count  # turns of each loop
    steps: forms.Count  # of a turn
    loops: forms.Words
    json: forms.Flag  # print JSON on stdout, also typed --json


DEFAULTS = {
    "size": "cpu",
    "rounds": 5,
    "steps": 2,
    "loops": "[tutorial,bare,accelerate,ours]",
    "json": "false",
}


def main() -> None:
    """The command line, in which size=… stands for what SIZES says."""
    words = ["json=true" if word == "--json" else word for word in sys.argv[1:]]
    sizes = [word.partition("=")[2] for word in words if word.startswith("size=")]
    size = sizes[-1] if sizes else "cpu"
    if size not in SIZES:  # before Hydra makes a folder
        print(Problem("size", size, "not known", allowed=", ".join(SIZES)).line, file=sys.stderr)
        sys.exit(BAD_CONFIG)
    preset = SIZES[size].split()
    typed = {word.partition("=")[0] for word in words}
    sys.argv[1:] = ["name=bench", *(w for w in preset if w.partition("=")[0] not in typed), *words]
    config.main(bench, BenchRun, DEFAULTS, usage=package.__doc__)


def bench(cfg: DictConfig) -> None:
    """Runs the loops in turn and prints what was found; result.json in the run folder has all.

    Raises: ConfigError for a loop that is not known, or a model without these sizes.
    """
    from gptrain import launch  # here, so that a wrong option is answered without torch
    from gptrain.launch.devices import find_machine

    cfg = launch.settle(cfg)
    machine = find_machine(cfg)
    folder = Path(cfg.run_dir)
    spec = make_spec(cfg, machine.accelerator)
    share = max(1, len(os.sched_getaffinity(0)) // machine.n_local)
    threads = int(os.environ.get("OMP_NUM_THREADS", share))
    with ExitStack() as stack:
        contestants = []
        for name in choose_loops(cfg, machine.n_local):
            n_ranks = 1 if name == "ours_alone" else machine.n_local
            own = {**spec, "loop": name, "run_dir": str(folder / name)}
            own["overrides"] = [*spec["overrides"], f"run_dir={json.dumps(own['run_dir'])}"]
            if name == "ours_alone":
                own["overrides"] += ["trainer.devices=1", "strategy=single"]
            progress(f"{name}: starting")
            contestants.append(Contestant(name, own, n_ranks, threads, folder))
            stack.callback(contestants[-1].end)
            contestants[-1].first_step()
        run_rounds(contestants, cfg.rounds, cfg.steps)
    results = summarize(contestants, spec)
    report(results, cfg, spec, folder)


def make_spec(cfg: DictConfig, accelerator: str) -> dict[str, Any]:
    """What the loops are told; ours gets the command itself."""
    missing = [key for key in SIZE_KEYS if key not in cfg.model]
    if missing:
        wrong = f"has no {', '.join(missing)}: the loops beside it need the sizes of a SimpleGPT"
        raise ConfigError([Problem("model", cfg.model.get("_target_"), wrong)])
    for key, known in COMPARED.items():
        if (target := OmegaConf.select(cfg, key)) != known:
            raise ConfigError([Problem(key, target, "the loops beside ours have", allowed=known)])
    words = HydraConfig.get().overrides.task
    mine = [word for word in words if word.partition("=")[0].lstrip("+") not in OWN_KEYS]
    options = OmegaConf.to_container(cfg.optimizer, resolve=True)
    precision = cfg.trainer.precision
    if precision == "auto":
        from gptrain.launch.devices import find_machine, native_precision

        precision = native_precision(find_machine(cfg))
    return {
        "overrides": [*mine, *FIXED],
        "model": {key: cfg.model[key] for key in SIZE_KEYS},
        "compile": cfg.model.compile,
        "batch_size": cfg.data.batch_size,
        "seq_len": cfg.data.seq_len,
        "num_samples": cfg.data.num_samples,
        "optimizer": {key: options[key] for key in ("lr", "betas", "eps", "weight_decay", "fused")},
        "clip": cfg.trainer.gradient_clip_val,
        "precision": precision,
        "device": accelerator,
    }


def choose_loops(cfg: DictConfig, n_ranks: int) -> list[str]:
    """The loops asked for that can run here, and what they are measured against."""
    known = {"tutorial", "bare", "accelerate", "ours", "ours_saving"}
    if unknown := set(cfg.loops) - known:
        allowed = ", ".join(sorted(known))
        raise ConfigError([Problem("loops", sorted(unknown), "not known", allowed=allowed)])
    names = list(cfg.loops)
    if "accelerate" in names and find_spec("accelerate") is None:
        log.warning('accelerate: not installed, left out; try: pip install -e ".[bench]"')
        names.remove("accelerate")
    if "tutorial" in names and "16" in str(cfg.trainer.precision):
        names.insert(0, "tutorial_fp32")
    if "ours" in names and n_ranks > 1:
        names.append("ours_alone")
    return [*names, "loader", "matmul"]


def run_rounds(contestants: list[Contestant], rounds: int, steps: int) -> None:
    """Every loop once a round, each round in the other direction; the first does not count."""
    for number in range(rounds + 1):
        for contestant in contestants[:: 1 if number % 2 else -1]:
            progress(f"round {number} of {rounds}: {contestant.name}")
            contestant.take_turn(1 if contestant.name == "matmul" else steps)
    for contestant in contestants:
        del contestant.turns[0]
    progress("")


def report(results: list[Result], cfg: DictConfig, spec: dict[str, Any], folder: Path) -> None:
    """Prints the table, or JSON; keeps the JSON."""
    found = {"size": cfg.size, "spec": spec, "loops": [result.as_dict() for result in results]}
    text = json.dumps(found, indent=1)
    (folder / "result.json").write_text(text + "\n")
    print(text if cfg.json else table(results), flush=True)


def progress(line: str) -> None:
    """One line on a terminal that replaces itself; nothing where the output is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
