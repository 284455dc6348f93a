"""Checks of a typed config, before anything is written and before a rank starts.

`check_rules` has the rules between keys, without which a run would silently compute something else,
or never end. The net, the strategy, the batch and the launcher have rules of their own, which
`assemble.run.check` applies. They are not repeated in this file, except for the heads of shipped
nets: the planner counts these nets without building them.
"""

import inspect
import json
import typing
from collections.abc import Iterator
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from gptrain.config.compose import key_of, plain, typed
from gptrain.core.errors import ConfigError, ConfigIssue, first_line, show
from gptrain.core.lengths import find_end
from gptrain.core.precision import find_precision
from gptrain.core.schema import DataModuleConfig, DecayConfig, DecoderConfig, LlamaConfig, RunConfig
from gptrain.core.value_types import TargetConfig

LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "transformers", "gptrain")
BASES = {  # base class of the object at a key, or at each key of a group
    "model": "torch.nn.Module",
    "module": "lightning.pytorch.LightningModule",
    "optimizer": "torch.optim.Optimizer",
    "scheduler": "torch.optim.lr_scheduler.LRScheduler",
    "trainer": "lightning.pytorch.Trainer",
    "data": "lightning.pytorch.LightningDataModule",
    "callbacks.": "lightning.pytorch.Callback",
    "logger.": "lightning.pytorch.loggers.Logger",
    "profiler": "lightning.pytorch.profilers.Profiler",
}
PHASES = ("warmup", "decay", "total")
STRICT = ConfigDict(arbitrary_types_allowed=True, strict=True)


def problem(run: RunConfig, key: str, message: str, hint: str = "") -> ConfigIssue:
    """Return the problem of a key, with its value in the config."""
    return ConfigIssue(key, show(run.value_of(key)), message, hint=hint)


def check(cfg: DictConfig, schema: type[RunConfig] = RunConfig) -> RunConfig:
    """Check a composed config and return the typed config. Nothing is written.

    Classes are checked only for a training or an evaluation.

    Raises:
        ConfigError: With all problems of the first kind of check that finds one.
    """
    run = typed(values := plain(cfg), schema)
    problems = [*check_rules(run)]
    # References in the words stay as they are.
    words: Any = OmegaConf.to_container(HydraConfig.get().overrides.task)
    if schema.expands_run and run.from_run and "from_run" not in map(key_of, words):
        problems.append(problem(run, "from_run", "has an effect on the command line only"))
    if schema is RunConfig and not problems:  # a command with keys of its own makes no run
        problems += check_classes(run, values)  # torch takes seconds
    if problems:
        raise ConfigError(problems)
    cfg.run_dir = HydraConfig.get().runtime.output_dir  # each job of a sweep has its own
    return typed(plain(cfg), schema)


def check_rules(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a problem for each key that contradicts another one. Imports no torch."""
    strategy, model, scheduler = run.strategy, run.model, run.scheduler
    is_divided = isinstance(model, DecoderConfig) and getattr(model, "d_head", None) is None
    n_parts, of = (2, " of pairs of features") if isinstance(model, LlamaConfig) else (1, "")
    if is_divided and model.d_model % (n_parts * model.n_heads):
        yield problem(run, "model.d_model", f"not divisible into {model.n_heads} heads{of}")
    if isinstance(model, LlamaConfig) and model.n_heads % model.n_kv_heads:
        yield problem(run, "model.n_kv_heads", f"does not divide {model.n_heads} heads")
    if find_precision(run.trainer.precision).is_fp16 and strategy.needs:
        message = f"strategy={strategy.name} does not scale the loss, which fp16 needs"
        yield problem(run, "trainer.precision", message, "trainer.precision=bf16-mixed")
    if strategy.needs and model.compile == "model":
        message = f"strategy={strategy.name} has collectives and hooks between the blocks"
        yield problem(run, "model.compile", message, "model.compile=blocks")
    if isinstance(run.data, DataModuleConfig):
        if strategy.needs:
            message = "divides the samples, and a LightningDataModule divides its own"
            yield problem(run, "strategy.name", message, "strategy=ddp")
        message = "not with a LightningDataModule, whose order, samples and tokens are not known"
        keys = ["max_tokens", "data.global_batch_size", "trainer.overfit_batches"]
        for key in (*keys, *(f"scheduler.{phase}_tokens" for phase in PHASES)):
            if run.value_of(key):
                yield problem(run, key, message, "data.train._target_ and data.val._target_")
    for phase in PHASES:
        steps, tokens = scheduler.phase(phase)
        if steps is not None and tokens:
            key = f"scheduler.{phase}_steps"
            message = f"excludes {key}={show(steps)}: both set the same length"
            yield problem(run, f"scheduler.{phase}_tokens", message, f"{key}=null")
    needs_end = isinstance(scheduler, DecayConfig) and not any(scheduler.phase("total"))
    n_steps, _ = find_end(run, epoch_steps=1, step_tokens=1)  # any size: only None matters
    if run.task == "fit" and needs_end and n_steps is None:
        message = "the schedule decays until the last step, which is not known"
        yield problem(run, "scheduler.total_steps", message, "scheduler=warmup_constant")
    is_path = run.ckpt_path not in (None, "last", "best")
    if is_path and run.init_from and not run.from_run:  # else the path may be of the earlier run
        message = "excludes a path in ckpt_path: a run has one source of its first weights"
        yield problem(run, "init_from", message, "ckpt_path=last")


def check_classes(run: RunConfig, node: Any, place: str = "") -> Iterator[ConfigIssue]:
    """Yield a problem for a `_target_` that cannot be imported, take its keys or fit its group.

    A function of the user fits every group. Missing arguments are reported when the object is
    built. `place` is the dotted key of the node, "" for the config.
    """
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, dict | list):
            yield from check_classes(run, value, f"{place}.{key}".lstrip("."))
    if isinstance(node, dict) and (target := node.get("_target_")) is not None:
        try:
            yield from _check_arguments(run, node, place)
        except Exception as error:  # the import of a user's module may raise anything
            yield ConfigIssue(f"{place}._target_", target, first_line(error))


def _check_arguments(run: RunConfig, node: dict[str, Any], place: str) -> Iterator[ConfigIssue]:
    """Yield a problem for each value that a class refuses. Raise if the class or a key is wrong."""
    made = resolve_name(str(node["_target_"]))
    is_library = str(made.__module__).split(".")[0] in LIBRARIES
    if base := BASES.get(place) or BASES.get(f"{place.rpartition('.')[0]}."):
        kind = getattr(made, "__self__", made)  # a class method makes an object of its class
        is_factory = inspect.isfunction(made) and (place == "scheduler" or not is_library)
        is_kind = inspect.isclass(kind) and issubclass(kind, resolve_name(base))
        if not (is_factory or is_kind):
            raise TypeError(f"not of type {base}, which the group needs")
    section = getattr(run, place, None)
    # Keys that gptrain reads, or passes only if the class takes them.
    computed = set(type(section).model_fields) if isinstance(section, TargetConfig) else set()
    if place == "optimizer" and hasattr(made, "parameter_groups"):
        computed |= {*inspect.signature(made.parameter_groups).parameters}
    try:
        signature = inspect.signature(made)
    except (ValueError, TypeError):  # written in C
        return
    given = {key: value for key, value in node.items() if not key.startswith("_")}
    unused = computed - signature.parameters.keys()
    signature.bind_partial(**{key: value for key, value in given.items() if key not in unused})
    if is_library:
        return
    types = {}
    with suppress(Exception):  # an annotation may name something that only a type checker imports
        types = typing.get_type_hints(made.__init__ if inspect.isclass(made) else made)
    for key in types.keys() & given.keys() - computed:
        text = json.dumps(given[key], default=str)
        try:
            if "_target_" not in text:  # the value of a nested node is made later
                TypeAdapter(types[key], config=STRICT).validate_json(text)
        except PydanticUserError:
            continue  # a type that pydantic does not know, or one with a config of its own
        except ValidationError as error:
            message = error.errors()[0]["msg"].replace("Input should be", "must be")
            yield ConfigIssue(f"{place}.{key}", show(given[key]), message)
