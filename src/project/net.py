"""Your net. What more it may offer, and which strategies that opens: gptrain/models/__init__.py."""

from torch import Tensor, nn


class MyLSTM(nn.Module):
    """tokens (B, T) -> logits (B, T, V).   conf/model/my_lstm.yaml"""

    def __init__(self, vocab_size: int, d_model: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.lstm = nn.LSTM(d_model, d_model, batch_first=True)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])
