"""Datasets of a user's own."""

from torch.utils.data import Dataset

from gptrain.data import DummyTextDataset


class Dicts(Dataset):
    """Samples that are dicts of tensors."""

    def __init__(self, num_samples, seq_len, vocab_size, seed):
        self.inner = DummyTextDataset(num_samples, seq_len, vocab_size, seed)

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        tokens, targets = self.inner[index]
        return {"tokens": tokens, "targets": targets}
