"""Tokenizers: a tokenizer.json, `bytes` (a tokenizer.json that ships), or a BPE of the text.

Nothing is downloaded.

# N tokens, V vocab
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from gptrain.core.errors import DataError
from gptrain.core.locations import expand_home
from gptrain.core.small_files import read_bytes, read_facts

FILE_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"
BYTES = Path(__file__).with_name("bytes")  # folder of the tokenizer `bytes`
# Files that may accompany a tokenizer.json
COMPANIONS = (CONFIG_NAME, "special_tokens_map.json", "added_tokens.json", TEMPLATE_NAME)
SPECIAL = ("bos_token", "eos_token", "pad_token")
# End tokens of GPT-2, Llama 2, Llama 3, Gemma and models like BERT. They are tried in this order if
# no configuration file names the end token.
END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]")

# The package prints a warning after a fork, because its threads do not survive a fork, unless this
# variable is set. `gptrain.data.stream` sets it to false in a worker that tokenizes.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


class Tokenizer:
    """Tokenizer that a tokenizer.json describes, with the files that accompany it.

    Args:
        path: Path of the tokenizer.json.

    Attributes:
        core: The tokenizer of the package tokenizers, for what this class does not offer, such as
            `core.token_to_id("<|im_end|>")`. Each method that encodes sets whether it reads names
            of control tokens.
        vocab_size: Highest token id plus 1.
        identity: Hash of the file and the end token, a part of the key of a cached corpus.
        special_tokens: Texts of the special tokens by their names in transformers: bos_token,
            eos_token, pad_token. Those that the vocabulary does not have are left out.
        end_token: Text of the token that may end a document, or None: the `eos_token` of the
            configuration, or else the first of the usual ones.
        end_id: Id of `end_token`, or None.
        ends_documents: Whether a corpus has `end_token` after each document, if the config leaves
            it open: True if there is one, unless tokenizer_config.json has `ends_documents: false`.
        stop_ids: Ids of the tokens at which generation ends. Empty, until `gptrain.load` reads them
            from the generation_config.json of a run's folder.
        chat_template: Jinja template of a conversation, or None. See `gptrain.text.chat`.

    Raises:
        OSError: If the file does not exist or cannot be read.
        DataError: If the file is not a tokenizer.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        content = read_bytes(self.path)
        try:
            self.core = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the package raises no narrower class
            raise DataError(f"{path}: no tokenizer of the package tokenizers: {error}") from None
        self.core.no_padding()
        self.core.no_truncation()
        self._is_bytes = content == (BYTES / FILE_NAME).read_bytes()
        vocab = self.core.get_vocab()
        self.vocab_size = max(vocab.values(), default=-1) + 1
        config = read_facts(self.path.with_name(CONFIG_NAME))
        added = self.core.get_added_tokens_decoder().items()
        control = {t.content: i for i, t in added if t.special}
        named = {name: config.get(name) for name in SPECIAL}
        texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in named.items()}
        self.special_tokens = {k: t for k, t in texts.items() if isinstance(t, str) and t in vocab}
        ends = (self.special_tokens.get("eos_token"), *END_TOKENS)
        self.end_token = next((name for name in ends if name in control), None)
        self.end_id = control.get(self.end_token or "")
        if self.end_token is not None:
            self.special_tokens.setdefault("eos_token", self.end_token)
        self.ends_documents = self.end_id is not None and config.get("ends_documents", True)
        self.stop_ids: Sequence[int] = ()
        self.chat_template = read_chat_template(self.path.parent, config)
        # Two folders with the same tokenizer.json may name different end tokens.
        end = str(self.end_token).encode()
        self.identity = hashlib.sha256(content + end).hexdigest()

    @property
    def token_bytes(self) -> np.ndarray | None:
        """Number of bytes of text that each token stands for, (V,) int64; special tokens have 0.

        None if the tokenizer is not byte-level: other tokenizers drop or add spaces, so that their
        tokens do not stand for a fixed number of bytes.
        """
        if "ByteLevel(" not in str(self.core.decoder):  # it may be in a sequence of decoders
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in self.core.get_vocab().items():
            lengths[number] = len(token)  # one character of a byte-level token is one byte
        for number, added in self.core.get_added_tokens_decoder().items():
            lengths[number] = 0 if added.special else len(added.content.encode())
        return lengths

    def special_ids(self) -> dict[str, Any]:
        """Return the ids of the special tokens by names of transformers, such as `eos_token_id`."""
        return {f"{k}_id": self.core.token_to_id(text) for k, text in self.special_tokens.items()}

    def encode(self, text: str, special: bool = False) -> np.ndarray:
        """Return the token ids of a text, (N,) int64.

        With `special`, the texts of control tokens become these tokens, else they are plain text. A
        character without a token becomes the unknown token. If there is none, a BPE leaves the
        character out, and other tokenizers raise a plain Exception.
        """
        return self.encode_special(text)[0] if special else self.encode_batch([text])[0]

    def encode_special(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode a text, in which names of control tokens such as <|im_end|> become these tokens.

        Returns:
            Token ids (N,), and for each token the position in the text at which it begins (N,).
            Some tokenizers do not count white space at the beginning of a token.
        """
        self.core.encode_special_tokens = False
        encoding = self.core.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        return np.array(encoding.ids, dtype=np.int64), starts

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, (N,) int64 each, as `encode` does, in parallel."""
        if self._is_bytes:  # the package needs seconds for what NumPy does in milliseconds
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]
        self.core.encode_special_tokens = True
        encodings = self.core.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids.

        Bytes that are not UTF-8, also an incomplete character, become U+FFFD. Negative ids and ids
        outside the vocabulary are left out. Special tokens are shown by their names.
        """
        return self.core.decode([i for i in map(int, ids) if i >= 0], skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Copy the tokenizer.json and its companions to a folder, and replace files of these names.

        The folder must exist. `chat_template` is written also if it was set after loading.
        """
        copy_files(self.path.parent, folder, COMPANIONS)
        replace_file(folder / FILE_NAME, self.path.read_bytes())
        if self.chat_template is not None:
            replace_file(folder / TEMPLATE_NAME, self.chat_template.encode())


def copy_files(source: Path, folder: Path, names: Iterable[str]) -> None:
    """Copy those of the named files that exist to another folder, by `replace_file`."""
    for name in names:
        if (source / name).is_file():
            replace_file(folder / name, (source / name).read_bytes())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that has another content. A link is replaced, not followed."""
    if path.is_symlink() or not path.is_file() or path.read_bytes() != content:
        path.unlink(missing_ok=True)
        path.write_bytes(content)


def load_tokenizer(spec: str | os.PathLike) -> Tokenizer:
    """Load a tokenizer.json, that of a folder, or, if `spec` is "bytes", the tokenizer of bytes.

    The latter ships with gptrain and has a token for each byte. `~` is the home folder.

    Raises:
        FileNotFoundError: If the file does not exist.
        OSError: If the file cannot be read.
        DataError: If the file is not a tokenizer.
    """
    path = BYTES if spec == "bytes" else expand_home(spec)
    return Tokenizer(path / FILE_NAME if path.is_dir() else path)


def train_bpe(
    texts: Iterable[str], vocab_size: int, path: str | os.PathLike, has_end: bool = False
) -> Tokenizer:
    """Train a byte-level BPE tokenizer, write it to `path`, and return it.

    256 of its tokens are the bytes, so that every text can be encoded. Words are split as by GPT-2.
    With `has_end` one more is the end token <|endoftext|>. A short text gives fewer tokens than
    `vocab_size`. The folder of `path` must exist. Raises a ValueError if `vocab_size` is below 256,
    or 257 with an end token.
    """
    ends = [END_TOKENS[0]] if has_end else []
    if vocab_size < 256 + len(ends):
        raise ValueError(f"vocab_size={vocab_size}: a BPE has at least {256 + len(ends)} tokens")
    bpe = tokenizers.ByteLevelBPETokenizer()
    options = {"vocab_size": vocab_size - len(ends), "min_frequency": 0, "show_progress": False}
    # Python runs signal handlers in the main thread. Training runs in another thread, so that a
    # signal is handled at once.
    with ThreadPool(1) as pool:
        pool.apply(bpe.train_from_iterator, (texts,), options)
    bpe.add_special_tokens(ends)
    bpe.save(str(path))
    return Tokenizer(path)


def read_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template of a folder: of its .jinja file, or `default` of its config."""
    if (file := folder / TEMPLATE_NAME).is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {item.get("name"): item.get("template") for item in template}.get("default")
    return template if isinstance(template, str) else None
