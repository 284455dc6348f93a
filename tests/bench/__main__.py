"""The command: what is compared, in which order, and what is printed."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from gptrain import config
from gptrain.core.errors import ConfigError, quoted
from gptrain.core.schema import RunConfig
from gptrain.core.value_types import Count, Name, Positive
from tests import bench as package
from tests.bench import target
from tests.bench.result import summarize, table
from tests.bench.target import CONFIGS
from tests.bench.turns import Contestant

# What each size adds before what is typed; a step takes about 1 ms, 0.1 s, 2 s, and (GPU) 0.1 s.
SIZES = {
    "tiny": "model=gpt_nano model.d_model=32 model.n_heads=2 model.n_layers=1 data.seq_len=17 "
    "data.batch_size=4 trainer.log_every_n_steps=50 steps=50 rounds=15",
    "cpu": "model=gpt_nano data.seq_len=129 data.batch_size=16 steps=5 rounds=8",
    "simple_gpt": "model=simple_gpt data.seq_len=128 data.batch_size=8 steps=1 rounds=5",
    "gpt2": "model=gpt2 data.seq_len=1025 data.batch_size=16 model.dropout=0 steps=10 rounds=5",
}
LOOPS = ("tutorial", "bare", "ours")
DEFAULTS = {
    "size": "cpu", "rounds": 5, "steps": 2, "loops": f"[{','.join(LOOPS)}]",
    "target_loss": "null", "configs": json.dumps(CONFIGS), "seeds": 3,
}  # fmt: skip
SIZE_KEYS = ("vocab_size", "d_model", "n_heads", "n_layers", "max_seq_len", "dropout")
COMPARED = {
    "data.train._target_": "gptrain.data.DummyTextDataset",
    "optimizer._target_": "torch.optim.AdamW",
}
# A run without what the other loops do not do either.
FIXED = ("trainer.limit_val_batches=0", "trainer.max_steps=100000000", "trainer.max_epochs=-1")


class BenchRun(RunConfig):
    """A run's keys and the command's own."""

    size: Literal[tuple(SIZES)]
    rounds: Count  # turns of each loop
    steps: Count  # of a turn
    loops: list[Literal[LOOPS]]
    target_loss: Literal["first"] | Positive | None
    configs: Annotated[list[Name], Field(min_length=1)]
    seeds: Count


def main() -> None:
    """The command line, in which size=… stands for what SIZES says."""
    words = sys.argv[1:]
    sizes = [word.partition("=")[2] for word in words if word.startswith("size=")]
    preset = SIZES.get(sizes[-1] if sizes else DEFAULTS["size"], "").split()
    if any(word.startswith("target_loss=") for word in words):
        preset = []  # the runs have their own
    sys.argv[1:] = ["name=bench", *preset, *words]  # the later of two words counts
    config.main(bench, BenchRun, DEFAULTS, usage=package.__doc__)


def bench(cfg: DictConfig) -> None:
    """Runs the loops in turn and prints what was found; result.json in the run folder has all.

    Raises: ConfigError for a model without these sizes, or another data set or optimizer.
    """
    import torch  # here, so that a wrong option is answered without it

    from gptrain import runtime
    from gptrain.runtime.devices import find_devices, native_precision, set_threads

    cfg, mine = runtime.settle(cfg), typed_words()
    folder = Path(cfg.run_dir)
    if cfg.target_loss is not None:
        results = target.race(cfg, mine)
        found = {"target_loss": cfg.target_loss, "configs": results}
        return report(found, target.table(results), folder)
    machine = find_devices(cfg)
    if cfg.trainer.precision == "auto":
        cfg.trainer.precision = native_precision(machine)
    spec = make_spec(cfg, machine.accelerator)
    set_threads(machine.n_local)
    contestants = []
    with ExitStack() as stack:
        for name in cfg.loops:
            run_dir = str(folder / name)
            overrides = ["checkpoint=none", *mine, *FIXED, f"run_dir={quoted(run_dir)}"]
            its = {**spec, "loop": name, "run_dir": run_dir, "overrides": overrides}
            one = Contestant(name, its, machine.n_local, torch.get_num_threads(), folder)
            stack.callback(one.end)
            one.first_step()
            contestants.append(one)
        run_rounds(contestants, cfg.rounds, cfg.steps)
    results = summarize(contestants, spec)
    found = {"size": cfg.size, "spec": {**spec, "overrides": mine}, "loops": results}
    report(found, table(results), folder)


def typed_words() -> list[str]:
    """The overrides that are no keys of the bench, nor of its own folder."""
    left = {*DEFAULTS, "name", "run_dir"}
    words = HydraConfig.get().overrides.task
    return [word for word in words if word.partition("=")[0].lstrip("+") not in left]


def report(found: dict[str, Any], text: str, folder: Path) -> None:
    """Writes result.json, and prints a text for people."""
    (folder / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    print(text, flush=True)


def make_spec(cfg: DictConfig, accelerator: str) -> dict[str, Any]:
    """What the loops beside ours make of a run's config."""
    if missing := [key for key in SIZE_KEYS if key not in cfg.model]:
        wrong = f"has no {', '.join(missing)}: the loops beside it need the sizes of a SimpleGPT"
        raise ConfigError.of("model", cfg.model.get("_target_"), wrong)
    for key, known in COMPARED.items():
        if (target := OmegaConf.select(cfg, key)) != known:
            raise ConfigError.of(key, target, "the loops beside ours have", allowed=known)
    options = OmegaConf.to_container(cfg.optimizer, resolve=True)
    return {
        "model": {key: cfg.model[key] for key in SIZE_KEYS},
        "compile": cfg.model.compile,
        "batch_size": cfg.data.batch_size,
        "seq_len": cfg.data.seq_len,
        "num_samples": cfg.data.num_samples,
        "optimizer": {key: options[key] for key in ("lr", "betas", "eps", "weight_decay", "fused")},
        "clip": cfg.trainer.gradient_clip_val,
        "precision": cfg.trainer.precision,
        "device": accelerator,
    }


def run_rounds(contestants: list[Contestant], rounds: int, steps: int) -> None:
    """Every loop once a round, each round in the other direction; the first does not count."""
    from tqdm import trange

    for number in trange(rounds + 1, desc="rounds", disable=None, leave=False):
        for contestant in contestants[:: 1 if number % 2 else -1]:
            contestant.take_turn(steps)
    for contestant in contestants:
        del contestant.steps_s[0]


if __name__ == "__main__":
    main()
