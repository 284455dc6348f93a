"""Models of a scaling-law sweep: their configs, parameters, optimizer steps and costs."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gptrain.assemble.config_errors import as_config_errors
from gptrain.assemble.datasets import build_datasets, check_sample
from gptrain.assemble.lengths import plan_lengths
from gptrain.assemble.load import build_net
from gptrain.config import compose_command
from gptrain.config.check import check_config
from gptrain.config.compose import resolved
from gptrain.core.errors import DONE, ConfigError, ConfigIssue
from gptrain.core.lengths import DEFAULT_DECAY, token_steps, warmup_steps
from gptrain.core.schema import RunConfig
from gptrain.core.strategies import parallel_dims, strategy_name
from gptrain.costs.choice import estimates
from gptrain.costs.flops import train_flops_per_token
from gptrain.costs.shape import find_shape
from gptrain.data.samples import len_of
from gptrain.ladder.law import count_parameters
from gptrain.ladder.options import LadderRun, Options
from gptrain.parallel.placement import build_on_meta_device
from gptrain.plan.options import PlanRun, find_machine
from gptrain.runtime.process import count_nodes

D_FF_STEP = 8  # d_ff is a multiple of 8, for which 16-bit matrix multiplications are fast
FEW_STEPS = 100  # below this number of steps the loss does not follow a scaling law


@dataclass(frozen=True)
class Size:
    """One model of a scaling-law sweep, or its target, the large net whose loss is predicted.

    Attributes:
        words: Overrides that turn the typed command into this model.
        cfg: Configuration of the model's runs.
        counts: Number of parameters by each way of counting: `all`, `matrices` (without embedding
            tables) and `blocks` (without embeddings and head).
        step_tokens: Tokens of an optimizer step.
        epoch_tokens: Tokens of one pass over the training data.
        flops_per_token: FLOPs of a training step, per token.
        n_devices: Number of devices of all nodes.
        row: Estimate of a step by `gptrain.costs`, such as `tokens_per_s`. None if there is no
            estimate: the planner has no formulas for the net, the number of tokens per sample is
            not known, or the ranks do not divide the work.
    """

    words: list[str]
    cfg: RunConfig
    counts: dict[str, int]
    step_tokens: int
    epoch_tokens: int
    flops_per_token: float
    n_devices: int
    row: Mapping[str, Any] | None

    def hours(self, tokens: float) -> float:
        """Return the hours of a run, or nan if the planner does not know the net's speed.

        Args:
            tokens: Number of tokens on which the run trains.
        """
        return tokens / self.row["tokens_per_s"] / 3600 if self.row else math.nan


def find_sizes(cfg: LadderRun, typed: list[str]) -> tuple[Size, list[Size]]:
    """Return the target, whose loss is predicted, and the smaller models that the sweep trains.

    The smaller models are in ascending order of their numbers of parameters. The target trains on
    the hardware of the config, the smaller models on this machine.

    Args:
        cfg: Configuration of the target and of the sweep.
        typed: Overrides that the user typed.

    Raises:
        ConfigError: If a config is not valid, or if two models have the same number of parameters.
        HydraException: If an override of a model is not valid.
    """
    options = cfg.ladder
    width = options.lr_width or cfg.model.arguments.get("d_model")
    target_place = {"hardware": cfg.hardware, "topology": cfg.topology}
    target = make_size(typed, options.target.split(), options, width, target_place)
    this_machine = {"hardware": cfg.hardware.model_copy(update={"name": None}), "topology": None}
    sizes: dict[int, Size] = {}
    for entry in options.sizes:
        words = entry.split() if isinstance(entry, str) else scaled(cfg, entry)
        size = make_size(typed, words, options, width, this_machine)
        n = size.counts["all"]
        if n in sizes:
            message = f"{' '.join(words)} has {n:,} parameters, the same as another size"
            raise ConfigError.of("ladder.sizes", options.sizes, message)
        sizes[n] = size
    return target, [sizes[n] for n in sorted(sizes)]


def warn(sizes: list[Size], fewest_steps: int, tokens_per_parameter: float) -> None:
    """Print a warning on stderr if a scaling law may not hold for some runs.

    The reasons are runs of too few steps, and runs that see the same data more than once.

    Args:
        sizes: Models of the sweep, in ascending order.
        fewest_steps: Optimizer steps of the shortest run.
        tokens_per_parameter: Largest number of tokens per parameter.
    """
    if fewest_steps < FEW_STEPS:
        message = f"the smallest net has {fewest_steps} steps: too few for a law"
        hint = "a smaller data.batch_size, larger nets, or more tokens"
        issue = ConfigIssue("ladder.tokens_per_parameter", None, message, "", hint, DONE)
        print(issue.line, file=sys.stderr)
    largest = sizes[-1]
    passes = tokens_per_parameter * largest.counts["all"] / largest.epoch_tokens
    if passes > 1:
        message = f"the largest net trains on the same data {passes:.1f} times, but the law "
        message += "assumes new tokens (arXiv:2305.16264)"
        issue = ConfigIssue("data", None, message, code=DONE)
        print(issue.line, file=sys.stderr)


def make_size(
    typed: Sequence[str], words: Sequence[str], options: Options, width: int | None,
    place: Mapping[str, Any],
) -> Size:  # fmt: skip
    """Return a model of the sweep, with the learning rate scaled to its width.

    Args:
        typed: Overrides that the user typed.
        words: Overrides of this model.
        options: The group `ladder`.
        width: The d_model that `optimizer.lr` belongs to. None if it is not known.
        place: Values of the keys `hardware` and `topology`: the machine on which the model trains.

    Returns:
        The size. Its datasets were built, and so prepared if they were not, to know the length of
        an epoch.

    Raises:
        ConfigError: If the config is not valid, or if the net cannot be built.
        HydraException: If an override is not valid.
    """
    checked = check_config(resolved(compose_command(replace_overrides(typed, words))))
    if checked.errors:
        raise ConfigError(checked.errors)
    cfg = checked.run
    words = list(words)
    lr = carried_lr(cfg, words, options.lr_rule, width)
    if lr is not None:
        cfg = cfg.changed({"optimizer.lr": lr})
        words.append(f"optimizer.lr={lr}")
    machine, _ = find_machine(PlanRun.model_construct(**dict(cfg), **place))
    with as_config_errors(cfg, "model._target_"):
        net = build_on_meta_device(partial(build_net, cfg.model))
    counts = count_parameters(net, cfg.model.arguments.get("vocab_size"))
    train = build_datasets(cfg)[0]
    n_nodes = count_nodes(cfg.trainer.num_nodes)
    n_devices = machine.n_local * n_nodes
    n_data = parallel_dims(cfg.strategy, n_devices, n_nodes).data
    lengths = plan_lengths(cfg, len_of(train), check_sample(cfg, train[0]), n_data)
    shape = find_shape(cfg.model)
    attention = (shape.n_layers, shape.d_q, lengths.sample_tokens) if shape else (0, 0, 0)
    flops = train_flops_per_token(counts["matrices"], *attention)
    rows = estimates(cfg, lengths.sample_tokens, machine, n_nodes)
    row = rows.get(strategy_name(cfg.strategy.name, n_devices))
    epoch_tokens = lengths.epoch_steps * lengths.step_tokens
    return Size(words, cfg, counts, lengths.step_tokens, epoch_tokens, flops, n_devices, row)


def carried_lr(cfg: RunConfig, words: Sequence[str], rule: str, width: int | None) -> float | None:
    """Return the learning rate for a net whose width is not the one for which it was chosen.

    The rule `sqrt_width` multiplies `optimizer.lr` by (width / d_model)^(1/2), as Vaswani et al.
    2017 do, arXiv:1706.03762. The rule `constant` does not change it.

    Args:
        cfg: Configuration of the net.
        words: Overrides of this net. A learning rate among them is not changed.
        rule: Value of `ladder.lr_rule`: `constant` or `sqrt_width`.
        width: The d_model that `optimizer.lr` belongs to. None if it is not known.

    Returns:
        The learning rate, or None if `optimizer.lr` stays as it is.

    Raises:
        ConfigError: If the width of one of the two nets is not known.
    """
    lr = cfg.optimizer.lr
    if rule == "constant" or lr is None or "optimizer.lr" in map(key_of, words):
        return None
    if not width or "d_model" not in cfg.model.arguments:
        message = "the model group has no d_model, which scales the learning rate"
        hint = "ladder.lr_rule=constant, or optimizer.lr in each of ladder.sizes"
        raise ConfigError.of("ladder.lr_rule", rule, message, hint=hint)
    return float(f"{lr * (width / cfg.model.arguments['d_model']) ** 0.5:.6g}")


def scaled(cfg: RunConfig, factor: float) -> list[str]:
    """Return overrides that scale the depth and the width of a net.

    The width of a head stays the same. So does the number of query heads per key head. Depth, heads
    and d_ff are rounded, so that the width is only about the factor times the target's.

    Args:
        cfg: Configuration of the target.
        factor: Factor for n_layers and d_model.

    Raises:
        ConfigError: If the model group has no n_layers, n_heads and d_model.
    """
    model = cfg.model.arguments
    if not model.keys() >= {"n_layers", "n_heads", "d_model"}:
        message = "the model group has no n_layers, n_heads and d_model to scale"
        hint = "ladder.sizes=['model.width=64','model.width=128']"
        raise ConfigError.of("ladder.sizes", factor, message, hint=hint)
    n_heads, d_model = model["n_heads"], model["d_model"]
    queries_per_key = n_heads // model.get("n_kv_heads", n_heads)
    scaled_kv_heads = max(1, round(factor * n_heads / queries_per_key))
    scaled_heads = queries_per_key * scaled_kv_heads
    scaled_width = d_model // n_heads * scaled_heads
    scaled_d_ff = scaled_width / d_model * model.get("d_ff", 0)
    values = {
        "n_layers": max(1, round(factor * model["n_layers"])),
        "d_model": scaled_width,
        "n_heads": scaled_heads,
        "n_kv_heads": scaled_kv_heads,
        "d_ff": max(1, round(scaled_d_ff / D_FF_STEP)) * D_FF_STEP,
    }
    return [f"model.{key}={value}" for key, value in values.items() if key in model]


def replace_overrides(typed: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return overrides in which later ones replace earlier ones of the same key.

    Args:
        typed: Overrides that the user typed. Those of a key in `words` are left out.
        words: Overrides that are appended.
    """
    keys = set(map(key_of, words))
    return [*(word for word in typed if key_of(word) not in keys), *words]


def key_of(word: str) -> str:
    """Return the key of an override: `+a.b=1` -> `a.b`."""
    return word.lstrip("+~").partition("=")[0]


@dataclass(frozen=True)
class Phases:
    """Optimizer steps of the runs of one size.

    All runs share the stable phase of the longest run, in which the learning rate is constant. Each
    run has its own decay phase.

    Attributes:
        warmup: Steps of the warm-up.
        every: Number of stable steps between two checkpoints.
        stable: Step at which the decay phase of each run begins, for rising tokens_per_parameter.
        total: Number of steps at the end of each run, in the same order.
    """

    warmup: int
    every: int
    stable: list[int]
    total: list[int]

    @property
    def steps(self) -> int:
        """Steps that are trained in all runs. Only the longest run trains the stable phase."""
        return sum(self.total) - sum(self.stable[:-1])


def find_phases(size: Size, counts: Sequence[float]) -> Phases:
    """Return the optimizer steps of the runs of one size.

    The decay phase is a fixed fraction of each run. The stable phases end at multiples of `every`,
    so that a checkpoint of the longest run exists at each of these steps.

    Args:
        size: Model of the sweep.
        counts: Tokens per parameter of each run, rising.

    Raises:
        ConfigError: If the warm-up is not over before the first decay phase.
        ValueError: If `scheduler.warmup_tokens` is less than the tokens of one step.
    """
    scheduler = size.cfg.scheduler
    decay = scheduler.phase("decay").steps or DEFAULT_DECAY
    if decay >= 1:  # a number of steps does not suit runs of different lengths
        decay = DEFAULT_DECAY
    hundredths = [round(100 * count) for count in counts]
    unit = math.gcd(*hundredths)
    unit_tokens = unit / 100 * size.counts["all"]
    every = max(1, round(unit_tokens / size.step_tokens * (1 - decay)))
    stable = [count // unit * every for count in hundredths]
    total = [max(steps + 2, round(steps / (1 - decay))) for steps in stable]
    warmup = scheduler.warmup_steps
    if scheduler.warmup_tokens is not None:
        warmup = token_steps(scheduler.warmup_tokens, size.step_tokens)
    warmup = warmup_steps(warmup, total[0])
    if warmup >= stable[0]:
        message = f"{size.counts['all']:,} parameters warm up for {warmup} of {stable[0]} steps"
        hint = "scheduler.warmup_steps=0.1, or a smaller data.batch_size"
        raise ConfigError.of("ladder.tokens_per_parameter", counts[0], message, hint=hint)
    return Phases(warmup, every, stable, total)
