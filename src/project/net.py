"""Your net. Optional attributes and the strategies that need them: gptrain/models/__init__.py."""

from torch import Tensor, nn


class MyLSTM(nn.Module):
    """LSTM language model. Config: conf/model/my_lstm.yaml.

    Args:
        vocab_size: Number of token ids V.
        d_model: Width D of the embedding and of the LSTM.
    """

    def __init__(self, vocab_size: int, d_model: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.lstm = nn.LSTM(d_model, d_model, batch_first=True)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of the next token, (B, T) -> (B, T, V)."""
        return self.head(self.lstm(self.embedding(tokens))[0])
