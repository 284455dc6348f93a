"""What a model learns from: dummy tokens, text, ready token files, and the order of samples.

The contract of a data set: `__len__`, and `__getitem__(i) -> (tokens, targets)`, both (T,) int64,
targets[t] = tokens[t + 1] and -100 where no loss is counted. Optional:

- `__getitems__(indices) -> (tokens, targets)`, both (B, T): a whole batch in one call.
- `token_bytes`, (V,) integers: bytes of text that each token stands for; opens bits per byte.
- `fingerprint`, a string: a resumed run must find the one that it began with.
- `tokenizer`: is kept in the run folder, and writes a sample of text at the end.
- `about(n_samples)`, a string: what a run of so many samples sees, for the line at its start.

Samples in Hugging Face's form work as well: a dict of `input_ids` and `labels` (tensors or lists,
all of one length T), where labels are input_ids, or -100 where no loss is counted. They are not
shifted: see `HuggingFacePairs`. A right-padded `attention_mask` is taken into account.
"""

from gptrain.core.small_files import DataError
from gptrain.data.corpus import default_corpus
from gptrain.data.dummy import DummyTextDataset
from gptrain.data.hugging_face import HuggingFacePairs, as_pairs
from gptrain.data.mixture import Mixture
from gptrain.data.order import EvalBatches, SampleOrder, TrainBatches
from gptrain.data.samples import BatchReader, collate
from gptrain.data.text import TextDataset
from gptrain.data.tokenizers import ByteTokenizer, JsonTokenizer, load_tokenizer, train_bpe
from gptrain.data.tokens import TokenDataset
