"""Score the net of a finished run with the callbacks that can do so, for example `scores`.

    python -m gptrain.evaluate from_run=outputs/a callbacks=scores "callbacks.scores.files={arc: F}"

    from_run   folder of a run; its callbacks are used if no others are named
    ckpt_path  best or last checkpoint of the run (best)
    callbacks  callbacks with a method evaluate(net, tokenizer) -> dict of scores by name

Each score is printed on a line of its own: its name, a tab, its value. For the loss on the test
set, type: python train.py from_run=outputs/a task=test
"""

from typing import Literal

from gptrain import config
from gptrain.core.errors import ConfigError
from gptrain.core.schema import RunConfig
from gptrain.core.value_types import LocalPath


class EvaluateRun(RunConfig):
    """Keys of the command `gptrain.evaluate`, which are those of a run.

    Attributes:
        from_run: Folder of the run whose net is scored. Required.
        ckpt_path: Checkpoint of the run. None stands for the best.
    """

    runs_here = False
    reads_data = False

    from_run: LocalPath  # ty: ignore[incompatible-mutable-override]  # required
    ckpt_path: Literal["best", "last"] | None  # ty: ignore[incompatible-mutable-override]


def main() -> None:
    """Run the command `python -m gptrain.evaluate` with the words in `sys.argv`, and exit."""
    config.main(evaluate, EvaluateRun, {}, usage=__doc__)


def evaluate(cfg: EvaluateRun) -> None:
    """Print the scores of a run's net, one on each line: name, tab, value.

    Args:
        cfg: Configuration of the command. Its callbacks with a method `evaluate(net, tokenizer)`
            compute the scores.

    Raises:
        ConfigError: If no callback can score, the device or the tokenizer is missing, or the run is
            damaged (exit code 65) or missing (66).
        ModuleNotFoundError: If an optional package that a file of the run needs is missing.
        Exception: Any exception that a callback raises.
    """
    # Import torch only now, so that an invalid option is reported without waiting for the import.
    from hydra.utils import get_method

    from gptrain.assemble.load import build_target, load_for_command

    nodes = [node for node in cfg.callbacks.values() if node]
    nodes = [node for node in nodes if hasattr(get_method(node.target), "evaluate")]
    if not nodes:
        message = "no callback of the run has a method evaluate(net, tokenizer)"
        raise ConfigError.of("callbacks", None, message, hint="callbacks=scores")
    net, tokenizer, device = load_for_command(cfg)
    if tokenizer is None:
        raise ConfigError.of("from_run", cfg.from_run, "the folder has no tokenizer")
    for node in nodes:
        scorer = build_target(node.node(), "callbacks")
        for name, value in scorer.evaluate(net.to(device), tokenizer).items():
            print(f"{name}\t{value:.6g}", flush=True)


if __name__ == "__main__":
    main()
