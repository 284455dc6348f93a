"""Which options the loss has, and the parts of it that strategies share.

A net that offers `hidden` and a `head` without bias is trained by the chunked loss, which never
holds the logits of a whole batch (`gptrain.loss`).
"""

# B batch, T time, D d_model, V vocab

from dataclasses import dataclass

from torch import Tensor, nn

from gptrain.loss import chunked_next_token_loss, next_token_loss


@dataclass(frozen=True)
class LossOptions:
    """What is trained on: next-token cross entropy, and what is added to it.

    Attributes:
        label_smoothing: fraction of the target that is spread over the vocabulary.
        z_loss: factor on the mean of logsumexp(logits)^2 (PaLM, arXiv:2204.02311).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def added(self) -> dict[str, float]:
        """What is added to the cross entropy."""
        return {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}


PLAIN = LossOptions()  # of val/loss: the cross entropy alone


def has_chunks(net: nn.Module) -> bool:
    """Whether the net allows the chunked loss."""
    head = getattr(net, "head", None)
    return hasattr(net, "hidden") and isinstance(head, nn.Linear) and head.bias is None


def head_loss(head: nn.Linear, hidden: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
    """Sum of the losses of hidden states (..., D); in chunks where the head has no bias."""
    if head.bias is not None:
        return next_token_loss(head(hidden), targets, reduction="sum", **options.added)
    weight = head.weight
    return chunked_next_token_loss(hidden, weight, targets, reduction="sum", **options.added)


def net_logits(net: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Logits (B, T, V) of tokens (B, T).   Raises: ValueError for any other shape."""
    logits = net(tokens)
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"{type(net).__name__} made {tuple(logits.shape)} of tokens {tuple(tokens.shape)}; "
            f"a net's forward returns logits (B, T, V)"
        )
    return logits
