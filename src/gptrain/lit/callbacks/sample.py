"""Shows what the net writes."""

from __future__ import annotations

import logging

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from gptrain.lit.callbacks.progress import ProgressBar

log = logging.getLogger(__name__)


class SampleText(Callback):
    """Prints a continuation of `prompt` at the end of the run, where the data has a tokenizer.

    Args:
        prompt: what is continued, of one token at least.
        n_tokens: how many are generated.
        temperature: below 1 the likelier tokens are preferred.
        seed: of what is drawn, apart from the run's own random numbers.
    """

    def __init__(self, prompt: str, n_tokens: int = 256, temperature: float = 0.7, seed: int = 0):
        self.prompt, self.n_tokens = prompt, n_tokens
        self.temperature, self.seed = temperature, seed

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        tokenizer = getattr(trainer.datamodule.val, "tokenizer", None)
        whole = getattr(trainer.strategy, "runs_whole_net", True)  # not a stage of a pipeline
        net = getattr(module, "net", None)
        if tokenizer is None or trainer.fast_dev_run or not whole or net is None:
            return
        # On every rank: where the net is partitioned, its forward pass needs them all.
        device = trainer.strategy.root_device
        tokens = torch.as_tensor(tokenizer.encode(self.prompt), device=device).long()
        generator = torch.Generator(device).manual_seed(self.seed)
        written = sample(net, tokens, self.n_tokens, self.temperature, generator)
        if trainer.is_global_zero:
            if isinstance(bar := trainer.progress_bar_callback, ProgressBar):
                bar.end_line()
            text = printable(tokenizer.decode(written.tolist()))
            log.info("%-9s %s", "sample", text.replace("\n", "\n" + 10 * " "))


@torch.no_grad()
def sample(
    net: nn.Module, tokens: Tensor, n_tokens: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """The tokens (T,) followed by n_tokens drawn from the net's own predictions."""
    training = net.training
    net.eval()
    for _ in range(n_tokens):
        window = tokens[-getattr(net, "max_seq_len", len(tokens)) :]
        logits = net(window[None])[0, -1]  # (V,)
        probabilities = torch.softmax(logits.float() / temperature, dim=-1)
        drawn = torch.multinomial(probabilities, 1, generator=generator)  # (1,)
        tokens = torch.cat([tokens, drawn])
    net.train(training)
    return tokens


def printable(text: str) -> str:
    """Text for a terminal: control characters, and bytes that are no text, as a middle dot."""
    kept = (char if char.isprintable() or char in "\n\t" else "·" for char in text)
    return "".join(kept).replace("\N{REPLACEMENT CHARACTER}", "·")
