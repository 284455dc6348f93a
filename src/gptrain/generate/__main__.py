r"""Generate text with a trained net and print each prompt with its continuation.

    python -m gptrain.generate from_run=outputs/a prompt="def "
    python -m gptrain.generate from_run=outputs/a interactive=true     reads prompts until Ctrl-D
    python -m gptrain.generate from_run=outputs/a prompt='["if ","for "]' stop=$'\n\n'

    from_run     folder of a run, a checkpoint or an exported model
    ckpt_path    best or last checkpoint of the run (best)
    prompt       text, or a list of texts
    interactive  true: read prompts from the terminal, one per line (false)
    chat         true: a prompt is a message of a conversation, which the run's chat template, or
                 ChatML, renders; by default only if interactive, and if the run has a template
    n_tokens     largest number of tokens to generate (256); the run's end token ends it earlier
    stop         text, or a list of texts, before which the continuation ends
    temperature  divisor of the logits; 0 takes the most probable token (0.7)
    top_k        draw only from this number of the most probable tokens
    top_p        draw only from the most probable tokens that together reach this probability
    seed         seed of the random numbers

The tokenizer is read from the run's folder. After data=tokens, copy its tokenizer.json there.
"""

import sys
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field, NonNegativeFloat

from gptrain import config
from gptrain.core.errors import BAD_DATA, INPUT_NOT_FOUND, ConfigError
from gptrain.core.schema import RunConfig
from gptrain.core.shell import quoted
from gptrain.core.value_types import Count, LocalPath, Name

# A text stands for a list of one.
_Texts = Annotated[list[Name], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]


class GenerateRun(RunConfig):
    """Keys of the command `gptrain.generate`: those of a run, and those that its usage lists.

    Most keys of a run have no effect on the command: the net is used as it was trained.
    """

    expands_run: ClassVar[bool] = False

    from_run: LocalPath  # ty: ignore[incompatible-mutable-override]  # required
    ckpt_path: Literal["best", "last"] | None  # ty: ignore[incompatible-mutable-override]
    prompt: Annotated[_Texts, Field(min_length=1)] | None = None
    n_tokens: Count = 256
    temperature: NonNegativeFloat = 0.7
    top_k: Count | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: _Texts = Field([])
    interactive: bool = False
    chat: bool | None = None


def main() -> None:
    """Run the command `python -m gptrain.generate` with the words in `sys.argv`, and exit.

    The text of `prompt` and `stop` needs no quotes for Hydra.
    """
    sys.argv[1:] = [quote_text(word) for word in sys.argv[1:]]
    config.main(generate, GenerateRun, usage=__doc__)


def quote_text(word: str) -> str:
    """Return a word of the command line, with the value of `prompt=` or `stop=` quoted for Hydra.

    A value that begins as a list or a quoted text is unchanged, as are all other words.
    """
    key, equals, value = word.partition("=")
    if equals and key in ("prompt", "stop") and not value.startswith(("[", "'", '"')):
        return f"{key}={quoted(value)}"
    return word


def generate(cfg: GenerateRun) -> None:
    """Print each prompt with its continuation; in a chat, only the answer.

    If `interactive` is set, prompts are then read from stdin until its end.

    Raises:
        ConfigError: If this machine does not have the device (exit code 2), or if `from_run` is
            not trusted (2), is damaged or does not fit its net (65), or has no tokenizer (66).
        DataError: If `prompt` has no token, or the chat template is invalid or refuses it. That of
            a prompt from stdin is printed.
        OSError: If a file cannot be read.
    """
    # Import torch only now, so that an invalid option is reported without waiting for the import.
    from gptrain.assemble.config_errors import as_config_errors
    from gptrain.assemble.load import load
    from gptrain.runtime.devices import accelerator_of, set_threads
    from gptrain.text.sampling import Sampling
    from gptrain.text.writing import Writer

    device, which = accelerator_of(cfg.trainer.accelerator), cfg.ckpt_path or "best"
    set_threads(1)  # this process may use all cores
    with as_config_errors(cfg, "from_run", BAD_DATA):
        net, tokenizer = cast(Any, load(cfg.from_run, which, trust=cfg.trust, with_tokenizer=True))
    if tokenizer is None:
        message, hint = "has no tokenizer", "copy the tokenizer.json of its data into the folder"
        raise ConfigError.of("from_run", cfg.from_run, message, hint=hint, code=INPUT_NOT_FOUND)
    prompts = cfg.prompt or ([] if cfg.interactive else ["\n"])
    is_chat = bool(cfg.interactive and tokenizer.chat_template) if cfg.chat is None else cfg.chat
    limits = Sampling(cfg.temperature, cfg.top_k, cfg.top_p)
    writer = Writer(net.to(device), tokenizer, limits, cfg.n_tokens, cfg.stop, cfg.seed, is_chat)
    for number, prompt in enumerate(prompts):
        if number:
            print("---")
        writer.write(prompt)
    if cfg.interactive:
        writer.run_interactively()


if __name__ == "__main__":
    main()
