"""Shows what the net writes."""

import logging

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from gptrain.core import labels
from gptrain.lit.callbacks.monitor import log_note
from gptrain.lit.callbacks.progress import ProgressBar
from gptrain.lit.lightning import connected, data_of
from gptrain.text.sampling import Sampling, generate, printable

log = logging.getLogger(__name__)
SAMPLING = Sampling(temperature=0.7)  # below 1 the likelier tokens are preferred


class SampleText(Callback):
    """A continuation of `prompt`, where the data has a tokenizer.

    Printed at the end of the run; loggers that take text get one at each validation.

    Args:
        prompt: what is continued, of one token at least.
        n_tokens: how many are generated.
    """

    def __init__(self, prompt: str, n_tokens: int = 256):
        self.prompt, self.n_tokens = prompt, n_tokens
        self._written: tuple[int, str | None] = -1, None  # at which step, and the text

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_kept = any(hasattr(logger, "log_note") for logger in trainer.loggers)
        if is_kept and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._write(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        text = self._write(trainer, pl_module)
        if text is not None and trainer.is_global_zero:
            if isinstance(bar := trainer.progress_bar_callback, ProgressBar):
                bar.end_line()
            log.info(labels.line("sample", text))

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> str | None:
        """What the net writes at this step, once; None where it cannot."""
        if self._written[0] == trainer.global_step:
            return self._written[1]
        tokenizer = getattr(data_of(trainer).val, "tokenizer", None)
        parallel = getattr(trainer.strategy, "parallel", None)  # none in a Trainer of one's own
        by_stages, net = getattr(parallel, "by_stages", False), getattr(pl_module, "net", None)
        if tokenizer is None or connected(trainer).fast_dev_run or by_stages or net is None:
            return None
        # On every rank: where the net is partitioned, its forward pass needs them all.
        device = trainer.strategy.root_device
        tokens = [int(token) for token in tokenizer.encode(self.prompt)]
        generator = torch.Generator(device).manual_seed(0)  # apart from the run's own numbers
        tokens += generate(net, tokens, self.n_tokens, SAMPLING, generator)
        text = printable(tokenizer.decode(tokens))
        self._written = trainer.global_step, text
        log_note(trainer, "sample", text)
        return text
