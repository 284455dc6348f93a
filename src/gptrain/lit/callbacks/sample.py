"""A callback that generates text from a prompt, as an example of the model's output."""

import logging

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from gptrain.core import labels
from gptrain.lit.lightning import data_of, strategy_of
from gptrain.text.sampling import Sampling, generate, terminal_text

log = logging.getLogger(__name__)
_SAMPLING = Sampling(temperature=0.7)  # below 1, probable tokens become more probable


class SampleText(Callback):
    """Callback that lets the model continue the text `prompt`, to show what it has learned.

    All ranks generate the text at the end of training, and rank 0 logs it. The callback does
    nothing without a tokenizer that has tokens for the prompt, under fast_dev_run, with pipeline
    stages, or if the module has no `net`.

    Args:
        prompt: Beginning of the text.
        n_tokens: Largest number of tokens that are added to the prompt.
    """

    def __init__(self, prompt: str, n_tokens: int = 256):
        self._prompt = prompt
        self._n_tokens = n_tokens

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate the text, and log it on rank 0."""
        tokenizer = getattr(data_of(trainer).val, "tokenizer", None)
        is_pipeline = strategy_of(trainer).parallel.is_pipeline
        net = getattr(pl_module, "net", None)
        is_short = trainer.fast_dev_run  # ty: ignore[missing-attribute]
        if tokenizer is None or is_short or is_pipeline or net is None:
            return
        tokens = [int(token) for token in tokenizer.encode(self._prompt)]
        if not tokens:
            return
        # A generator of its own leaves the random numbers of the training alone.
        generator = torch.Generator(trainer.strategy.root_device).manual_seed(0)
        tokens += generate(net, tokens, self._n_tokens, _SAMPLING, generator)
        if trainer.is_global_zero:
            log.info(labels.line("sample", terminal_text(tokenizer.decode(tokens))))
