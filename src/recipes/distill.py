"""Train a net on the logits of a teacher. Config: conf/experiment/distill.yaml.

The loss is (1 - w) times the cross entropy plus w t^2 KL(teacher || student), with the logits of
both divided by the temperature t. Source: Hinton et al. 2015, arXiv:1503.02531.
"""

# B batch, T time, V vocab, N positions with a target

from typing import Any

import torch
from torch import Tensor, nn

import gptrain
from gptrain.lit import LanguageModel
from gptrain.loss import IGNORED
from gptrain.models.attention import layout_argument


class Distilled(LanguageModel):
    """Language model that learns from a teacher with the same vocabulary.

    `val/loss` is the cross entropy alone. Every strategy works except pipelines, where no rank has
    the full net. Each rank holds the full teacher, which is in no checkpoint.

    Args:
        *args: Arguments of `LanguageModel`.
        teacher: Run folder of the teacher, whose best checkpoint is used.
        weight: Weight w of the teacher.
        temperature: Temperature t.
        **kwargs: Keyword arguments of `LanguageModel`.
    """

    def __init__(
        self, *args: Any, teacher: str, weight: float = 0.5, temperature: float = 1.0, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self.weight, self.temperature = weight, temperature
        net = gptrain.load(teacher)
        assert isinstance(net, nn.Module)
        # A list hides the teacher from the module's parameters and checkpoints.
        self.teacher = [net.requires_grad_(False)]

    def on_fit_start(self) -> None:
        """Move the teacher, which Lightning does not see, to the device of this rank."""
        self.teacher[0].to(self.device)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Return the loss of a batch, and log the KL divergence from the teacher as `train/kl`.

        Args:
            batch: Tokens (B, T), targets (B, T) and, with `data.documents=masked`, documents (B,
                T).
            batch_idx: Index of the micro-batch in the epoch, not used.
        """
        tokens, targets, *documents = batch  # (B, T) each; documents only if they are masked
        is_counted = targets != IGNORED
        log_q = self.log_probabilities(self.net, tokens, is_counted, documents)
        with torch.no_grad():
            log_p = self.log_probabilities(self.teacher[0], tokens, is_counted, documents)
        kl = (log_p.exp() * (log_p - log_q)).sum() / is_counted.sum().clamp(min=1)
        self.log("train/kl", kl)
        loss = self.loss(tokens, targets, *documents)
        return (1 - self.weight) * loss + self.weight * self.temperature**2 * kl

    def log_probabilities(
        self, net: nn.Module, tokens: Tensor, is_counted: Tensor, documents: list[Tensor]
    ) -> Tensor:
        """Return the log probabilities (N, V) of a net at the temperature, in fp32.

        Args:
            net: Student or teacher.
            tokens: Token ids, (B, T).
            is_counted: True at the N positions whose target counts, (B, T).
            documents: List with the index of the document of each token, (B, T), or an empty list.
        """
        layout = layout_argument(*documents or [None])
        logits = net(tokens, **layout)[is_counted]  # (B, T, V) -> (N, V)
        return (logits.float() / self.temperature).log_softmax(-1)
