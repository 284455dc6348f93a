"""A callback that generates text from a prompt, as an example of the model's output."""

import logging
from contextlib import suppress

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from gptrain.core import labels
from gptrain.core.errors import DataError
from gptrain.lit.lightning import data_of, strategy_of
from gptrain.lit.loggers import log_note
from gptrain.text.sampling import Sampling, generate, terminal_text

log = logging.getLogger(__name__)
SAMPLING = Sampling(temperature=0.7)  # below 1, probable tokens become more probable


class SampleText(Callback):
    """Callback that lets the model continue the text `prompt`, to show what it has learned.

    The text is printed at the end of training. Loggers with a `log_note` method also get one at
    each validation. The callback does nothing without a tokenizer that has tokens for the prompt,
    under fast_dev_run, with pipeline stages, or if the module has no `net`.
    """

    def __init__(self, prompt: str, n_tokens: int = 256):
        self.prompt = prompt
        self.n_tokens = n_tokens

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pass a text to the loggers at a validation during training."""
        is_logged = any(hasattr(logger, "log_note") for logger in trainer.loggers)
        if is_logged and trainer.state.fn == "fit" and not trainer.sanity_checking:
            text = self._generate(trainer, pl_module)
            if text is not None:
                log_note(trainer, "sample", text)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print a text on rank 0 at the end of training."""
        text = self._generate(trainer, pl_module)
        if text is not None and trainer.is_global_zero:
            log.info(labels.line("sample", text))

    def _generate(self, trainer: Trainer, pl_module: LightningModule) -> str | None:
        """Return a text, which all ranks generate together, or None if the run cannot have one."""
        tokenizer = getattr(data_of(trainer).val, "tokenizer", None)
        is_pipeline = strategy_of(trainer).parallel.is_pipeline
        net = getattr(pl_module, "net", None)
        is_short = trainer.fast_dev_run  # ty: ignore[missing-attribute]
        if tokenizer is None or is_short or is_pipeline or net is None:
            return None
        tokens = []
        with suppress(DataError):  # the tokenizer has no token for the prompt
            tokens = [int(token) for token in tokenizer.encode(self.prompt)]
        if not tokens:
            return None
        # A generator of its own leaves the random numbers of the training alone.
        generator = torch.Generator(trainer.strategy.root_device).manual_seed(0)
        tokens += generate(net, tokens, self.n_tokens, SAMPLING, generator)
        return terminal_text(tokenizer.decode(tokens))
