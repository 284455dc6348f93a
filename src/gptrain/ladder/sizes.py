"""The nets of a ladder: their configs, parameters and steps, and what they cost."""

from __future__ import annotations

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
from gptrain.plan.__main__ import PlanRun, find_machine
from gptrain.runtime.process import count_nodes

D_FF_STEP = 8  # a multiple that products of 16 bits are fast for
FEW_STEPS = 100  # a schedule of fewer leaves a loss that no law is about


@dataclass(frozen=True)
class Size:
    """One net.

    Attributes:
        words: overrides of what was typed.   counts: N, by gptrain.ladder.law.COUNTS.
        step_tokens, epoch_tokens: of an optimizer step, of one pass over the data.
        row: what gptrain.costs says of a step; None for a net that it does not know.
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
        """nan where it is not known."""
        return tokens / self.row["tokens_per_s"] / 3600 if self.row else math.nan


def find_sizes(cfg: LadderRun, typed: list[str]) -> tuple[Size, list[Size]]:
    """The target, and the sizes below it, the smallest first.   Raises: ConfigError."""
    options, found = cfg.ladder, {}
    width = options.lr_width or cfg.model.arguments.get("d_model")
    place = {"hardware": cfg.hardware, "topology": cfg.topology}
    target = make_size(typed, options.target.split(), options, width, place)
    place = {
        "hardware": cfg.hardware.model_copy(update={"name": None}),
        "topology": None,
    }  # this machine
    for one in options.sizes:
        words = one.split() if isinstance(one, str) else scaled(cfg, one)
        size = make_size(typed, words, options, width, place)
        n = size.counts["all"]
        if n in found:
            message = f"{' '.join(words)} has {n:,} parameters, as another of them"
            raise ConfigError.of("ladder.sizes", options.sizes, message)
        found[n] = size
    return target, [found[n] for n in sorted(found)]


def warn(sizes: list[Size], fewest_steps: int, most: float) -> None:
    """Prints about which runs the law does not speak."""
    passes = most * sizes[-1].counts["all"] / sizes[-1].epoch_tokens
    if fewest_steps < FEW_STEPS:
        message = f"the smallest net has {fewest_steps} steps: too few for a law"
        hint = "a smaller data.batch_size, larger nets, or more tokens"
        found = ConfigIssue("ladder.tokens_per_parameter", None, message, "", hint, DONE)
        print(found.line, file=sys.stderr)
    if passes > 1:
        message = f"the largest net sees it {passes:.1f} times, and the law is about new tokens"
        found = ConfigIssue("data", None, f"{message} (arXiv:2305.16264)", code=DONE)
        print(found.line, file=sys.stderr)


def make_size(
    typed: Sequence[str], words: Sequence[str], options: Options, width: int | None,
    place: Mapping[str, Any],
) -> Size:  # fmt: skip
    """The size that these words make of what was typed, with the learning rate carried to it.

    Args:
        options: the ladder's.   width: to which optimizer.lr belongs.
        place: values of `hardware` and `topology`: where it trains.
    Raises: ConfigError.
    """
    checked = check_config(resolved(compose_command(merged(typed, words))))
    if checked.errors:
        raise ConfigError(checked.errors)
    cfg, words = checked.run, list(words)
    if (lr := carried_lr(cfg, words, options.lr_rule, width)) is not None:
        cfg = cfg.changed({"optimizer.lr": lr})
        words.append(f"optimizer.lr={lr}")
    machine, _ = find_machine(PlanRun.model_construct(**dict(cfg), **place))
    with as_config_errors(cfg, "model._target_"):
        net = build_on_meta_device(partial(build_net, cfg.model))
    counts = count_parameters(net, cfg.model.arguments.get("vocab_size"))
    n_nodes, train = count_nodes(cfg.trainer.num_nodes), build_datasets(cfg)[0]
    n_devices = machine.n_local * n_nodes
    n_data = parallel_dims(cfg.strategy, n_devices).data
    lengths = plan_lengths(cfg, len_of(train), check_sample(cfg, train[0]), n_data)
    shape = find_shape(cfg.model)
    attention = (shape.n_layers, shape.d_model, lengths.sample_tokens) if shape else ()
    flops = train_flops_per_token(counts["matrices"], *attention)
    rows = estimates(cfg, lengths.sample_tokens, machine, n_nodes)
    row = rows.get(strategy_name(cfg.strategy.name, n_devices))
    epoch_tokens = lengths.epoch_steps * lengths.step_tokens
    return Size(words, cfg, counts, lengths.step_tokens, epoch_tokens, flops, n_devices, row)


def carried_lr(cfg: RunConfig, words: Sequence[str], rule: str, width: int | None) -> float | None:
    """Return the learning rate of a net, carried over from a net of another width.

    The rule `sqrt_width` multiplies `optimizer.lr` by (width / d_model)^(1/2), as Vaswani et al.
    2017 do, arXiv:1706.03762. The rule `constant` does not change it.

    Args:
        cfg: Configuration of the net.
        words: Overrides of this net. A learning rate among them is not changed.
        rule: Value of `ladder.lr_rule`.
        width: The d_model that `optimizer.lr` belongs to.

    Returns:
        The learning rate, or None if `optimizer.lr` stays as it is.

    Raises:
        ConfigError: If the width of one of the two nets is not known.
    """
    lr = cfg.optimizer.lr
    if rule == "constant" or lr is None or "optimizer.lr" in map(key_of, words):
        return None
    if not width or "d_model" not in cfg.model.arguments:
        message = "the model group has no d_model, by which it carries the learning rate"
        hint = "ladder.lr_rule=constant, or optimizer.lr in each of ladder.sizes"
        raise ConfigError.of("ladder.lr_rule", rule, message, hint=hint)
    return float(f"{lr * (width / cfg.model.arguments['d_model']) ** 0.5:.6g}")


def scaled(cfg: RunConfig, factor: float) -> list[str]:
    """Overrides of a net of so much of cfg's depth and width; a head keeps its width.

    Raises: ConfigError for a net without these keys.
    """
    model = cfg.model.arguments
    if not model.keys() >= {"n_layers", "n_heads", "d_model"}:
        message = "the model group has no n_layers, n_heads and d_model to scale"
        hint = "ladder.sizes=['model.width=64','model.width=128']"
        raise ConfigError.of("ladder.sizes", factor, message, hint=hint)
    shared = model["n_heads"] // model.get(
        "n_kv_heads", model["n_heads"]
    )  # heads of q for one of k
    heads = shared * max(1, round(factor * model["n_heads"] / shared))
    width = model["d_model"] // model["n_heads"] * heads
    found = {"n_layers": max(1, round(factor * model["n_layers"])), "d_model": width}
    found |= {"n_heads": heads, "n_kv_heads": heads // shared}
    wide = width / model["d_model"] * model.get("d_ff", 0) / D_FF_STEP
    found["d_ff"] = max(1, round(wide)) * D_FF_STEP
    return [f"model.{key}={value}" for key, value in found.items() if key in model]


def merged(typed: Sequence[str], words: Sequence[str]) -> list[str]:
    """What was typed, without what the words say otherwise, and the words."""
    keys = set(map(key_of, words))
    return [*(word for word in typed if key_of(word) not in keys), *words]


def key_of(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


@dataclass(frozen=True)
class Phases:
    """Optimizer steps of one size: a stable phase, and the runs that leave it to cool down.

    Attributes:
        every: after so many stable steps lies a checkpoint.
        stable, total: of each run, in the order of tokens_per_parameter.
    """

    warmup: int
    every: int
    stable: list[int]
    total: list[int]

    @property
    def steps(self) -> int:
        """Taken in all: the last run goes through the whole stable phase."""
        return sum(self.total) - sum(self.stable[:-1])


def find_phases(size: Size, counts: Sequence[float]) -> Phases:
    """Steps of one size's runs.

    Args:
        counts: tokens per parameter, rising.
    Raises: ConfigError where they are too few to warm up.
    """
    asked, hundredths = size.cfg.scheduler, [round(100 * one) for one in counts]
    cooled = asked.phase("decay").steps or DEFAULT_DECAY
    cooled = cooled if cooled < 1 else DEFAULT_DECAY
    unit = math.gcd(*hundredths)
    steps = unit / 100 * size.counts["all"] / size.step_tokens * (1 - cooled)
    every = max(1, round(steps))
    stable = [one // unit * every for one in hundredths]
    total = [max(one + 2, round(one / (1 - cooled))) for one in stable]
    warmup = asked.warmup_steps
    if asked.warmup_tokens is not None:
        warmup = token_steps(asked.warmup_tokens, size.step_tokens)
    warmup = warmup_steps(warmup, total[0])
    if warmup >= stable[0]:
        message = f"{size.counts['all']:,} parameters warm up for {warmup} of {stable[0]} steps"
        hint = "scheduler.warmup_steps=0.1, or a smaller data.batch_size"
        raise ConfigError.of("ladder.tokens_per_parameter", counts[0], message, hint=hint)
    return Phases(warmup, every, stable, total)
