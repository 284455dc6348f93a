"""Shows what the net writes."""

import logging

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from gptrain.lit.callbacks.progress import ProgressBar
from gptrain.lit.lightning import connected, data_of
from gptrain.sampling import Sampling, generate, printable

log = logging.getLogger(__name__)
SAMPLING = Sampling(temperature=0.7)  # below 1 the likelier tokens are preferred


class SampleText(Callback):
    """At the end of the run a continuation of `prompt`, where the data has a tokenizer.

    Args:
        prompt: what is continued, of one token at least.
        n_tokens: how many are generated.
    """

    def __init__(self, prompt: str, n_tokens: int = 256):
        self.prompt, self.n_tokens = prompt, n_tokens

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        tokenizer = getattr(data_of(trainer).val, "tokenizer", None)
        parallel = getattr(trainer.strategy, "parallel", None)  # none in a Trainer of one's own
        by_stages, net = getattr(parallel, "by_stages", False), getattr(pl_module, "net", None)
        if tokenizer is None or connected(trainer).fast_dev_run or by_stages or net is None:
            return
        # On every rank: where the net is partitioned, its forward pass needs them all.
        device = trainer.strategy.root_device
        tokens = [int(token) for token in tokenizer.encode(self.prompt)]
        generator = torch.Generator(device).manual_seed(0)  # apart from the run's own numbers
        tokens += generate(net, tokens, self.n_tokens, SAMPLING, generator)
        if trainer.is_global_zero:
            if isinstance(bar := trainer.progress_bar_callback, ProgressBar):
                bar.end_line()
            text = printable(tokenizer.decode(tokens))
            log.info("%-9s %s", "sample", text.replace("\n", "\n" + 10 * " "))
