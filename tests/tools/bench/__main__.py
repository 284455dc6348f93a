"""`python -m tests.tools.bench`: read the options, run the loops in turns, print a table."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

from hydra.core.hydra_config import HydraConfig
from pydantic import Field

from gptrain import config
from gptrain.core.errors import ConfigError
from gptrain.core.schema import ModelConfig, RunConfig
from gptrain.core.shell import quoted
from gptrain.core.value_types import Count, Name, Positive
from gptrain.costs.net import net_of, train_flops_per_token
from tests.tools import bench as package
from tests.tools.bench import target
from tests.tools.bench.result import summarize, table
from tests.tools.bench.turns import Contestant

# Overrides of each size, which typed overrides follow. A step takes about 1 ms, 0.1 s and 2 s on a
# CPU, and a step of gpt2 0.1 s on a GPU.
SIZES = {
    "tiny": "model=gpt_nano model.d_model=32 model.n_heads=2 model.n_layers=1 data.seq_len=17 "
    "data.batch_size=4 trainer.log_every_n_steps=50 steps=50 rounds=15",
    "cpu": "model=gpt_nano data.seq_len=129 data.batch_size=16 steps=5 rounds=8",
    "simple_gpt": "model=simple_gpt data.seq_len=128 data.batch_size=8 steps=1 rounds=5",
    "gpt2": "model=gpt2 data.seq_len=1025 data.batch_size=16 model.dropout=0 steps=10 rounds=5",
    "llama_124m": "model=llama_124m data.seq_len=1025 data.batch_size=16 steps=10 rounds=5 "
    "loops=[bare,ours]",
}
LOOPS = ("tutorial", "bare", "ours")
COMPARED = {
    "data.train._target_": "gptrain.data.DummyTextDataset",
    "optimizer._target_": "torch.optim.AdamW",
}
# These options disable the parts of a run that the other loops do not have.
FIXED = ("trainer.limit_val_batches=0", "trainer.max_steps=100000000", "trainer.max_epochs=-1")


class BenchRun(RunConfig):
    """The keys of a run and the keys of this command."""

    size: Literal[tuple(SIZES)] = "cpu"
    rounds: Count = 5  # number of turns of each loop
    steps: Count = 2  # number of steps in a turn
    loops: list[Literal[LOOPS]] = Field([*LOOPS])
    target_loss: Literal["first"] | Positive | None = None
    configs: Annotated[list[Name], Field(min_length=1)] = Field([*target.CONFIGS])
    seeds: Count = 3


def main() -> None:
    """Run the command line, with size=… replaced by its overrides in SIZES."""
    words = sys.argv[1:]
    sizes = [word.partition("=")[2] for word in words if word.startswith("size=")]
    preset = SIZES.get(sizes[-1] if sizes else "cpu", "").split()
    if any(word.startswith("target_loss=") for word in words):
        preset = []  # the configs choose their model and batch
    sys.argv[1:] = ["name=bench", *preset, *words]  # the later of two words counts
    config.main(bench, BenchRun, usage=package.__doc__)


def bench(cfg: BenchRun) -> None:
    """Run the loops in turn, print the comparison and write result.json into the run folder.

    Raises:
        ConfigError: If the dataset or the optimizer is another one.
    """
    import torch  # imported lazily: config errors are reported before torch is loaded

    from gptrain.lit.measure import find_peak
    from gptrain.runtime.devices import find_devices, native_precision, set_threads
    from tests.tools.bench import loops

    overrides = typed_words()
    folder = Path(cfg.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if cfg.target_loss is not None:
        results = target.race(cfg, overrides)
        facts = {"target_loss": cfg.target_loss, "configs": results}
        return report(facts, target.table(results), folder)
    devices = find_devices(cfg)
    if cfg.trainer.precision == "auto":
        cfg = cfg.changed({"trainer.precision": native_precision(devices)})
    spec = make_spec(cfg, devices.accelerator)
    set_threads(devices.n_local)
    spec["peak_flops_per_s"], _ = find_peak(devices.device(0), str(cfg.trainer.precision))
    contestants = []
    with ExitStack() as stack:
        for name in cfg.loops:
            run_dir = str(folder / name)
            words = ["checkpoint=none", *overrides, *FIXED, f"run_dir={quoted(run_dir)}"]
            loop_spec = {**spec, "loop": name, "run_dir": run_dir, "overrides": words}
            n_threads = torch.get_num_threads()
            contestant = Contestant(loops.run, loop_spec, devices.n_local, n_threads, folder)
            stack.callback(contestant.end)
            contestant.read()
            contestants.append(contestant)
        run_rounds(contestants, cfg.rounds, cfg.steps)
    results = summarize(contestants, spec)
    facts = {"size": cfg.size, "spec": {**spec, "overrides": overrides}, "loops": results}
    report(facts, table(results), folder)


def typed_words() -> list[str]:
    """Return the overrides except those of the bench's own keys and of its folder."""
    own_keys = {*BenchRun.model_fields} - {*RunConfig.model_fields} | {"name", "run_dir"}
    words = HydraConfig.get().overrides.task
    return [word for word in words if word.partition("=")[0].lstrip("+") not in own_keys]


def report(facts: dict[str, Any], text: str, folder: Path) -> None:
    """Write the facts to result.json and print the text."""
    (folder / "result.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(text, flush=True)


def make_spec(cfg: BenchRun, accelerator: str) -> dict[str, Any]:
    """Return the options of the other loops, which do the same work as the run of this config.

    Raises:
        ConfigError: If the other loops cannot do the same work.
    """
    values = cfg.plain()
    options = values["optimizer"]
    model = cfg.model.arguments
    for key, known in COMPARED.items():
        value = cfg.value_of(key)
        if value != known:
            raise ConfigError.of(key, value, f"the other loops have {known}")
    seq_len = values["data"]["seq_len"]
    return {
        "net": cfg.model.target,
        "model": model,
        "compile": cfg.model.compile,
        "batch_size": cfg.data.batch_size,
        "seq_len": seq_len,
        "flops_per_token": flops_per_token(cfg.model, seq_len - 1),
        "num_samples": values["data"]["num_samples"],
        "optimizer": {key: options[key] for key in ("lr", "betas", "eps", "weight_decay", "fused")},
        "clip": cfg.trainer.gradient_clip_val,
        "precision": cfg.trainer.precision,
        "device": accelerator,
    }


def flops_per_token(model: ModelConfig, n_positions: int) -> int | None:
    """Return the FLOPs of gptrain's net per token and step, or None for a net of another class.

    The tutorial's net has more: its blocks also attend to their own input.
    """
    net = net_of(model)
    if net is None:
        return None
    return train_flops_per_token(net.matrix_weights, net.n_layers, net.d_q, n_positions)


def run_rounds(contestants: list[Contestant], rounds: int, steps: int) -> None:
    """Run every loop once per round, in alternating order. The first round does not count."""
    from tqdm import trange

    for number in trange(rounds + 1, desc="rounds", disable=None, leave=False):
        for contestant in contestants[:: 1 if number % 2 else -1]:
            contestant.take_turn(steps)
    for contestant in contestants:
        del contestant.steps_s[0]


if __name__ == "__main__":
    main()
