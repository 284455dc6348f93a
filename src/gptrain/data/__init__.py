"""Datasets of tokens, and the order in which training and evaluation read their samples.

A dataset is a `torch.utils.data.Dataset` with `__len__` and `__getitem__(i) -> (tokens, targets)`.
Both tensors are (T,) int64. `targets[t]` is `tokens[t + 1]`, or -100 where no loss is counted.
A dataset may have these attributes and methods in addition:

- `__getitems__(indices) -> (tokens, targets)`: Returns a whole batch, both tensors (B, T).
- `token_bytes`: Integers (V,), the bytes of text that each token stands for. The validation then
  reports bits per byte.
- `fingerprint`: String that identifies the content. A resumed run must find the same string.
- `tokenizer`: Tokenizer that is copied into the run folder and decodes the text that is generated
  at the end of training.
- `end_id`: Id of the token that ends a document or an answer. Generation from the run stops at it.
- `describe(n_samples) -> str`: Description of the data that a run of `n_samples` samples sees. The
  run prints the description when training starts.

A dataset may draw random numbers from torch, from NumPy's global generator or from `random`, for
example to augment a sample. A resumed run then draws the same numbers, also in data workers, unless
data.num_workers has changed from or to 0.

A stream, such as an IterableDataset or `datasets` in streaming mode, works as well: see
`gptrain.data.stream` for what it may have.

Samples in the form of Hugging Face work as well: dicts of `input_ids` and `labels`, each a tensor
or a list of T integers. `labels` are not shifted: `labels[t]` is `input_ids[t]`, or -100 where no
loss is counted (see `pair_of`). A right-padded `attention_mask` is taken into account.
"""

from gptrain.core.errors import DataError
from gptrain.data.dummy import DummyTextDataset
from gptrain.data.mixture import Mixture
from gptrain.data.order import EvalBatches, MixtureOrder, SampleOrder, TrainBatches
from gptrain.data.prepare import TextDataset
from gptrain.data.samples import BatchReader, as_pairs, collate, pair_of
from gptrain.data.tokenizers import Tokenizer, load_tokenizer, train_bpe
from gptrain.data.tokens import TokenDataset
