"""Text to token ids and back: bytes (built in), a tokenizer.json, or a BPE trained on the corpus.

All have `encode`, `encode_batch`, `decode`, `save`, `vocab_size`, `identity` (what a cache is keyed
by), `token_bytes`, `special_ids`, and `end_token` with `end_id`, which no text is encoded to and
which may end a document (None: there is none). Nothing is downloaded; the `tokenizers` library is
needed for everything but bytes, and imported when it is.

# N tokens, V vocab
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import ModuleType

import numpy as np

from gptrain.core.small_files import DataError, read_bytes, read_facts

FILE_NAME, CONFIG_NAME = "tokenizer.json", "tokenizer_config.json"
MAP_NAME = "special_tokens_map.json"  # where older versions of transformers name them
SPECIAL = ("bos_token", "eos_token", "pad_token")
# Of GPT-2, Llama 2, Llama 3, Gemma, BERT-like ones; where no configuration says which it is.
END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]")
_BYTES_JSON = b'{"type": "bytes"}\n'


class ByteTokenizer:
    """Every byte is a token: 256 of them, no file, no library, any text."""

    vocab_size = 256
    identity = "bytes"
    end_token, end_id = "the byte 255", 255  # which no UTF-8 has
    token_bytes = np.array([1] * 255 + [0])  # (V,) int64

    def special_ids(self) -> dict[str, int]:
        """Return no ids: a byte is a special token only where the data use it as one."""
        return {}

    def encode(self, text: str | bytes) -> np.ndarray:
        """Token ids of a text, (N,) int64."""
        text = text.encode() if isinstance(text, str) else text
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text; what is no UTF-8 (yet) shows as U+FFFD, ids that are no byte as nothing."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode(errors="replace")

    def save(self, folder: Path) -> Path:
        """Writes what `load_tokenizer` brings back; returns the file."""
        return _write(folder, _BYTES_JSON)


class JsonTokenizer:
    """A tokenizer of the `tokenizers` library, from its one JSON file.

    Names of special tokens in a text are text: nothing that a corpus contains can stand for the
    end of a document. None are added either.

    Raises: FileNotFoundError; DataError for a file that is no tokenizer.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self._path, self._json, library = Path(path), read_bytes(path), _library()
        try:
            self._tokenizer = library.Tokenizer.from_buffer(self._json)
            self._decoder = json.dumps(json.loads(self._json).get("decoder"))
        except Exception as error:  # the library raises nothing narrower
            message = "no tokenizer.json of the tokenizers library"
            raise DataError(f"{path}: {message}: {error}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        self.identity = "json:" + hashlib.sha256(self._json).hexdigest()
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self._config = _read_own(Path(path).with_name(CONFIG_NAME))
        named = _read_own(Path(path).with_name(MAP_NAME)) | self._config
        self.special_tokens = self._find_special(named)
        self.end_token = self._find_end()
        self.end_id = self.end_token and self._tokenizer.token_to_id(self.end_token)
        if self.end_token:
            self.special_tokens.setdefault("eos_token", self.end_token)

    @property
    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text that each token stands for, (V,) int64, special ones for 0.

        None unless the tokenizer is byte-level: others drop or add spaces.
        """
        if '"type": "ByteLevel"' not in self._decoder:  # it may be one of a sequence
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in self._tokenizer.get_vocab().items():
            lengths[number] = len(token)  # byte-level: one character stands for one byte
        for number, added in self._tokenizer.get_added_tokens_decoder().items():
            lengths[number] = 0 if added.special else len(added.content.encode())
        return lengths

    def encode(self, text: str | bytes) -> np.ndarray:
        """Token ids of a text, (N,) int64."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Return the token ids of each text, (N,) int64 each; the library encodes in parallel.

        Raises:
            DataError: If a text has a character or word that the tokenizer has no token for.
        """
        texts = [text if isinstance(text, str) else text.decode() for text in texts]
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            hint = "a tokenizer whose unknown token is in its vocabulary, or data.tokenizer=bpe"
            message = f"cannot encode this text: {error}"
            raise DataError(f"{self._path}: {message}; try: {hint}") from None
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text; what is no UTF-8 (yet) shows as U+FFFD, ids that are no token as nothing."""
        ids = [i for i in map(int, ids) if i >= 0]
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def save(self, folder: Path) -> Path:
        """Writes the very file that was read, and its configuration; returns it."""
        if self._config:
            _write(folder, json.dumps(self._config).encode(), CONFIG_NAME)
        return _write(folder, self._json)

    def special_ids(self) -> dict[str, int]:
        """Return the ids of the special tokens by the names that transformers gives them."""
        tokens = self.special_tokens.items()
        return {f"{name}_id": self._tokenizer.token_to_id(token) for name, token in tokens}

    def _find_special(self, named: dict) -> dict[str, str]:
        """Return those special tokens of a configuration that the vocabulary has."""
        tokens = {name: named.get(name) for name in SPECIAL}
        tokens = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
        texts = {name: token for name, token in tokens.items() if isinstance(token, str)}
        known = self._tokenizer.token_to_id
        return {name: token for name, token in texts.items() if known(token) is not None}

    def _find_end(self) -> str | None:
        """Return the end token that the configuration names, or a special one of a known name."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]
        names = (self.special_tokens.get("eos_token"), *END_TOKENS)
        return next((name for name in names if name in special), None)


def train_bpe(
    texts: Iterable[str | bytes], vocab_size: int, path: str | os.PathLike, has_end: bool = False
) -> JsonTokenizer:
    """A byte-level BPE of at most `vocab_size` tokens, learned from `texts`, stored in `path`.

    256 of them are bytes, so that every text can be encoded; words are split as GPT-2 does. With
    `has_end` one more, the last, is `<|endoftext|>`.
    """
    if vocab_size < 256 + has_end:
        n_ends = " and an end token" * has_end
        raise ValueError(f"vocab_size={vocab_size}: a BPE starts from 256 bytes{n_ends}")
    library = _library()
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size - has_end,
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    texts = (text if isinstance(text, str) else text.decode() for text in texts)
    with ThreadPool(1) as pool:  # a signal's handler, which runs in this one, need not wait
        pool.apply(tokenizer.train_from_iterator, (texts, trainer))
    if has_end:
        tokenizer.add_special_tokens([END_TOKENS[0]])
    tokenizer.save(str(path))
    return JsonTokenizer(path)


Tokenizer = ByteTokenizer | JsonTokenizer


def load_tokenizer(spec: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a spec: `bytes`, a tokenizer.json, or a folder that holds one."""
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec).expanduser()
    if path.is_dir():
        path = path / FILE_NAME
    is_bytes = read_bytes(path) == _BYTES_JSON
    return ByteTokenizer() if is_bytes else JsonTokenizer(path)


def _read_own(file: Path) -> dict:
    """Return the values of a small file beside a tokenizer; of a link none."""
    return {} if file.is_symlink() else read_facts(file)


def _write(folder: Path, content: bytes, name: str = FILE_NAME) -> Path:
    path = Path(folder) / name
    path.unlink(missing_ok=True)  # in a stranger's folder it may be a link to anywhere
    path.write_bytes(content)
    return path


def _library() -> ModuleType:
    # Its threads die in a fork, which it reports on the terminal unless this is set. The
    # workers of a data loader, which are forked, never tokenize.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "this tokenizer needs the package tokenizers: pip install 'gptrain[text]';"
            " the tokenizer bytes needs nothing"
        ) from None
    return tokenizers
