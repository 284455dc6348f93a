"""The command: what is continued, by which net, and where the text is shown."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from pydantic import Field, NonNegativeFloat

from gptrain import config
from gptrain import generate as package
from gptrain.config.compose import parse
from gptrain.config.kinds import Count, Fraction, LocalPath, Name, described, number
from gptrain.config.schema import Run
from gptrain.problems import DONE, ConfigError, Problem, quoted

Several = Field(min_length=1)
Prompt = str | Annotated[list[int], Several] | Annotated[list[str], Several] | None
LIMITS = ("top_k", "top_p", "min_p")
DEFAULTS = {
    **dict.fromkeys(("prompt", *LIMITS), "null"),
    **{"n_tokens": 256, "temperature": 0.7, "stop": "[]", "cache": "true", "interactive": "false"},
}
OF_A_RUN = {"from_run", "ckpt_path", "seed", "trainer", "trainer.accelerator", "allowed_targets",
            "debug"}  # fmt: skip


class GenerateRun(Run):
    """The command's keys among those of a run, most of which have no effect on it."""

    runs_here: ClassVar[bool] = False
    expands_run: ClassVar[bool] = False

    from_run: LocalPath
    ckpt_path: Literal["best", "last"] | None
    prompt: described("a text, a list of texts, or one of token ids", Prompt)
    n_tokens: Count
    temperature: NonNegativeFloat
    top_k: Count | None
    top_p: number(gt=0, le=1) | None
    min_p: Fraction | None
    stop: Name | list[Name]
    cache: bool
    interactive: bool


def main() -> None:
    """The command line, in which a prompt is taken as it is typed."""
    sys.argv[1:] = [as_typed(word) for word in sys.argv[1:]]
    config.main(generate, GenerateRun, DEFAULTS, usage=package.__doc__)


def as_typed(word: str) -> str:
    """An override whose text is quoted for Hydra, unless it is a list or in quotes already."""
    key, equals, value = word.partition("=")
    is_text = equals and key in ("prompt", "stop")
    if not is_text or (value.startswith(("[", "'", '"')) and not parse([word])[1]):
        return word
    return f"{key}={quoted(value)}"


def generate(cfg: DictConfig) -> None:
    """Writes what the net of from_run makes of each prompt, and on stderr how fast.

    Raises: ConfigError, with code 65 or 66 for a run that cannot be taken.
    """
    check_effects(cfg)
    from gptrain.assemble.load import load  # here, so that a wrong option is answered without torch
    from gptrain.assemble.resume import named_source
    from gptrain.launch.devices import accelerator_of, find_machine, set_threads

    if accelerator_of(asked := cfg.trainer.accelerator) is None:
        raise ConfigError.of("trainer.accelerator", asked, "not on this machine")
    set_threads(1)
    with named_source("from_run", cfg.from_run):
        which, allowed = cfg.ckpt_path or "best", cfg.allowed_targets
        net, tokenizer = load(cfg.from_run, which, allowed, with_tokenizer=True)
    writer = Writer(cfg, net.to(find_machine(cfg).device(0)), tokenizer)
    try:
        if cfg.prompt is not None or not cfg.interactive:
            writer.write(cfg.prompt)
        while cfg.interactive:
            writer.answer(input("> " if sys.stdin.isatty() else ""))
    except EOFError:
        print()
    except BrokenPipeError:  # a reader that has seen enough: nothing is left to be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_effects(cfg: DictConfig) -> None:
    """Raises: ConfigError for what was typed and would change nothing."""
    typed = (word.lstrip("+~").partition("=")[0] for word in HydraConfig.get().overrides.task)
    limits = [key for key in LIMITS if cfg[key] is not None and cfg.temperature == 0]
    idle = [key for key in typed if key not in OF_A_RUN | DEFAULTS.keys()]
    of_net, of_zero = "the net is that of from_run, as it was trained", "temperature=0 is greedy"
    problems = [Problem(key, None, f"has no effect: {of_net}") for key in idle]
    problems += [Problem(key, cfg[key], f"has no effect: {of_zero}") for key in limits]
    if problems:
        raise ConfigError(problems)


class Writer:
    """Continues prompts by one net, with one series of random numbers."""

    def __init__(self, cfg: DictConfig, net: Any, tokenizer: Any):
        import torch

        from gptrain.generate.text import Numbers
        from gptrain.sampling import Sampling

        self.cfg, self.net, self.tokenizer = cfg, net, tokenizer or Numbers()
        self.start, self.is_text = "\n" if tokenizer else [0], tokenizer is not None
        self.stop = [cfg.stop] if isinstance(cfg.stop, str) else cfg.stop
        self.sampling = Sampling(cfg.temperature, *(cfg[key] for key in LIMITS))
        self.generator = torch.Generator(next(net.parameters()).device).manual_seed(cfg.seed)

    def write(self, prompt: str | Sequence | None) -> None:
        """Prints a prompt, or each of several.   Raises: ConfigError for what is none."""
        from gptrain.generate.text import Text, in_order
        from gptrain.sampling import generate, printable

        cfg, given = self.cfg, self.start if prompt is None else prompt
        several = not isinstance(given, str) and isinstance(given[0], str)
        prompts = [self.read(one) for one in (given if several else [given])]
        texts = [Text(self.tokenizer, ids, cfg.n_tokens, self.stop) for ids in prompts]
        start_s, options = time.perf_counter(), (self.sampling, self.generator, cfg.cache)
        for piece in in_order(texts, generate(self.net, prompts, cfg.n_tokens, *options)):
            print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
        seconds, n_made = time.perf_counter() - start_s, sum(text.n_made for text in texts)
        said = f"{n_made} tokens in {seconds:.2f} s, {n_made / seconds:.0f} tokens/s"
        print(said, file=sys.stderr, flush=True)

    def answer(self, line: str) -> None:
        """Writes for a line that was typed, until Ctrl-C."""
        try:
            self.write(line)
        except ConfigError as error:
            print(error, file=sys.stderr)
        except KeyboardInterrupt:
            print()

    def read(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt.   Raises: ConfigError."""
        typed, wrong = isinstance(prompt, str), ""
        try:
            ids = [int(token) for token in (self.tokenizer.encode(prompt) if typed else prompt)]
        except ValueError:
            ids, wrong = [0], "not token ids, and no tokenizer lies in the run's folder"
        last = getattr(self.net, "vocab_size", max(ids, default=0) + 1) - 1
        if not ids:
            wrong = "has no token for the net to go on from"
        elif not 0 <= min(ids) <= max(ids) <= last:
            wrong = f"has tokens from {min(ids)} to {max(ids)}, the net has 0 to {last}"
        if wrong:
            attempt = "" if self.is_text else "prompt=[1,2,3]"
            raise ConfigError.of("prompt", prompt, wrong, attempt=attempt)
        known = self.tokenizer.decode(ids)
        if self.is_text and typed and known.strip() != prompt.strip():
            wrong = f"the tokenizer does not know all of it and reads {known!r}"
            print(Problem("prompt", prompt, wrong, code=DONE).line, file=sys.stderr)
        return ids
