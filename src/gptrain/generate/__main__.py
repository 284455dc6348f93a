"""Text from a trained net, shown as it is made; each prompt is told with what follows it.

    python -m gptrain.generate from_run=outputs/a prompt="def "
    python -m gptrain.generate from_run=outputs/a interactive=true     reads prompts until Ctrl-D
    python -m gptrain.generate from_run=outputs/a prompt='["if ","for "]' stop=$'\\n\\n'

    from_run     a run, a checkpoint of it, an exported folder; ckpt_path  best, last: of a run
    prompt       a text, or a list of them; interactive  true: they are typed
    n_tokens     at most; stop  a text or a list of them: ends before it; seed
    temperature  0: the most probable token; top_k  top_p  leave out improbable tokens
    cache        true: each position is computed once; false: for comparison

A run's tokenizer lies in its folder; where there is none (data=tokens), a text is token ids.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, ClassVar, Literal, cast

from hydra.core.hydra_config import HydraConfig
from pydantic import Field, NonNegativeFloat

from gptrain import config
from gptrain.config.compose import parse
from gptrain.core.errors import ConfigError, ConfigIssue, quoted
from gptrain.core.schema import RunConfig
from gptrain.core.value_types import Count, LocalPath, Name

Prompt = str | Annotated[list[str], Field(min_length=1)] | None
DEFAULTS = {
    **dict.fromkeys(("prompt", "top_k", "top_p"), "null"),
    **{"n_tokens": 256, "temperature": 0.7, "stop": "[]", "cache": "true", "interactive": "false"},
}
OF_A_RUN = {"from_run", "ckpt_path", "seed", "trainer", "trainer.accelerator", "allowed_targets",
            "debug"}  # fmt: skip


class GenerateRun(RunConfig):
    """The command's keys among those of a run, most of which have no effect on it."""

    runs_here: ClassVar[bool] = False
    expands_run: ClassVar[bool] = False

    from_run: LocalPath  # ty: ignore[incompatible-mutable-override]  # it is needed
    ckpt_path: Literal["best", "last"] | None  # ty: ignore[incompatible-mutable-override]
    prompt: Annotated[Prompt, Field(description="a text or a list of texts")]
    n_tokens: Count
    temperature: NonNegativeFloat
    top_k: Count | None
    top_p: Annotated[float, Field(gt=0, le=1)] | None
    stop: Name | list[Name]
    cache: bool
    interactive: bool


def main() -> None:
    """The command line, in which a prompt is taken as it is typed."""
    sys.argv[1:] = [as_typed(word) for word in sys.argv[1:]]
    config.main(generate, GenerateRun, DEFAULTS, usage=__doc__)


def as_typed(word: str) -> str:
    """An override whose text is quoted for Hydra, unless it is a list or in quotes already."""
    key, equals, value = word.partition("=")
    is_text = equals and key in ("prompt", "stop")
    if not is_text or (value.startswith(("[", "'", '"')) and not parse([word])[1]):
        return word
    return f"{key}={quoted(value)}"


def generate(cfg: GenerateRun) -> None:
    """Writes what the net of from_run makes of each prompt, and on stderr how fast.

    Raises: ConfigError, with code 65 or 66 for a run that cannot be taken.
    """
    check_effects()
    from gptrain.assemble.load import load
    from gptrain.assemble.weights import named_source
    from gptrain.runtime.devices import accelerator_of, set_threads  # torch
    from gptrain.text.writing import Writer  # here, so that a wrong option is answered without

    if (device := accelerator_of(asked := cfg.trainer.accelerator)) is None:
        raise ConfigError.of("trainer.accelerator", asked, "not on this machine")
    set_threads(1)
    with named_source("from_run", cfg.from_run):
        which, allowed = cfg.ckpt_path or "best", cfg.allowed_targets
        net, tokenizer = cast(Any, load(cfg.from_run, which, allowed, with_tokenizer=True))
    given = ([] if cfg.interactive else "\n") if cfg.prompt is None else cfg.prompt
    writer = Writer(cfg, net.to(device), tokenizer, device)
    for number, prompt in enumerate([given] if isinstance(given, str) else given):
        print("---\n" if number else "", end="")
        writer.write(prompt)
    if cfg.interactive:
        writer.answer()


def check_effects() -> None:
    """Raises: ConfigError for what was typed and would change nothing."""
    typed = (word.lstrip("+~").partition("=")[0] for word in HydraConfig.get().overrides.task)
    message = "has no effect: the net is that of from_run, as it was trained"
    idle = [
        ConfigIssue(key, None, message) for key in typed if key not in OF_A_RUN | DEFAULTS.keys()
    ]
    if idle:
        raise ConfigError(idle)


if __name__ == "__main__":
    main()
