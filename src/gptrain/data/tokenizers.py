"""Tokenizers: the bytes of the text, a tokenizer.json file, or a BPE trained on the corpus.

Both classes have `encode`, `encode_batch`, `decode`, `save`, `vocab_size`, `token_bytes`,
`special_ids` and these attributes:

- `identity`: String that is a part of the key of a cached corpus.
- `end_token`, `end_id`: Name and id of the token that may end a document, or None. No text is
  encoded to this token, unless `encode(text, special=True)` is called.
- `stop_ids`: Ids of the tokens at which generation ends. Empty, unless the tokenizer comes from the
  folder of a run that was trained with an end token.
- `chat_template`: Jinja template of a conversation, or None. See `gptrain.text.chat`.

Nothing is downloaded. Every tokenizer except bytes needs the package `tokenizers`, which is
imported only when such a tokenizer is used.

# N tokens, V vocab
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import ModuleType

import numpy as np

from gptrain.core.errors import DataError
from gptrain.core.locations import expand_home
from gptrain.core.small_files import read_bytes, read_facts

FILE_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
# Older versions of transformers store the names of special tokens in this file.
MAP_NAME = "special_tokens_map.json"
SPECIAL = ("bos_token", "eos_token", "pad_token")
# End tokens of GPT-2, Llama 2, Llama 3, Gemma and models like BERT. They are tried in this order if
# no configuration file names the end token.
END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]")
TEMPLATE_NAME = "chat_template.jinja"
_BYTES_JSON = b'{"type": "bytes"}\n'


class ByteTokenizer:
    """Tokenizer whose 256 tokens are the bytes of UTF-8 text. It needs no file and no package.

    The bytes 254 and 255, which UTF-8 text never contains, are the control tokens <|im_start|> and
    <|im_end|>.
    """

    vocab_size = 256
    identity = "bytes"
    end_token = "the byte 255"
    end_id = 255  # UTF-8 text never contains the byte 255
    token_bytes = np.array([1] * 255 + [0])  # (V,) int64
    control_tokens: Mapping[str, int] = {"<|im_start|>": 254, "<|im_end|>": 255}
    special_tokens: Mapping[str, str] = {}
    stop_ids: Sequence[int] = ()
    chat_template: str | None = None

    def special_ids(self) -> dict[str, int]:
        """Return an empty dict: no byte is a special token in the sense of transformers."""
        return {}

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token by its name, or None if there is no such token.

        Names are those of control tokens, and ASCII characters for the bytes 0 to 127.

        Args:
            token: Name of the token.
        """
        if token in self.control_tokens:
            return self.control_tokens[token]
        return ord(token) if len(token) == 1 and token.isascii() else None

    def encode(self, text: str | bytes, special: bool = False) -> np.ndarray:
        """Return the token ids of a text, (N,) int64.

        Args:
            text: Text to encode, or its bytes in UTF-8.
            special: Whether the names of `control_tokens` in the text become these tokens.
        """
        if special:
            return self.encode_special(text if isinstance(text, str) else text.decode())[0]
        text = text.encode() if isinstance(text, str) else text
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def encode_special(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode a text, in which names of control tokens such as <|im_end|> become these tokens.

        Args:
            text: Text to encode.

        Returns:
            Token ids (N,), and for each token the position of its first character in the text (N,).
        """
        tokens: list[int] = []
        starts: list[int] = []
        names = "|".join(map(re.escape, self.control_tokens))
        for match in re.finditer(f"({names})|(?s:.)", text):
            control = self.control_tokens.get(match[0])
            added = match[0].encode() if control is None else [control]
            tokens += added
            starts += [match.start()] * len(added)
        return np.array(tokens, dtype=np.int64), np.array(starts, dtype=np.int64)

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Return the token ids of each text, (N,) int64 each.

        Args:
            texts: Texts to encode, or their bytes in UTF-8.
        """
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids.

        Bytes that are not UTF-8, also an incomplete character, become U+FFFD. Ids that are not 0 to
        255 are left out.

        Args:
            ids: Token ids.
        """
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode(errors="replace")

    def save(self, folder: Path) -> Path:
        """Write a tokenizer.json that `load_tokenizer` recognizes, and return its path.

        Args:
            folder: Existing folder. The chat template, if any, is written to the same folder. Files
                of these names are replaced.
        """
        _write_template(folder, self.chat_template)
        return _write(folder, _BYTES_JSON)


class JsonTokenizer:
    """Tokenizer that a tokenizer.json file describes, by the package `tokenizers`.

    The name of a special token in a text is encoded as ordinary text, so that no text of a corpus
    can be mistaken for the end of a document. With `special=True` it becomes the token. No special
    token is added before or after a text.

    Args:
        path: Path of the tokenizer.json. A tokenizer_config.json and a special_tokens_map.json in
            the same folder name the special tokens.

    Attributes:
        special_tokens: Texts of the special tokens by their names in transformers: bos_token,
            eos_token, pad_token. Those that the vocabulary does not have are left out.
        control_tokens: Ids of all special tokens of the vocabulary, by their texts.

    Raises:
        OSError: If the file does not exist or cannot be read.
        DataError: If the file is not a tokenizer, or a chat_template.jinja in the same folder is
            not UTF-8.
        ModuleNotFoundError: If the package `tokenizers` is missing.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self._path = Path(path)
        self._json = read_bytes(path)
        library = _import_tokenizers()
        try:
            self._tokenizer = library.Tokenizer.from_buffer(self._json)
            content = json.loads(self._json)
        except Exception as error:  # the package raises no narrower class
            message = "not a tokenizer.json of the package tokenizers"
            raise DataError(f"{path}: {message}: {error}") from None
        self._decoder = json.dumps(content.get("decoder"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        model = content["model"]
        has_unknown = model.get("unk_token") is not None or model.get("byte_fallback")
        has_bytes = vocabulary.keys() >= {*library.pre_tokenizers.ByteLevel.alphabet()}
        # Such a tokenizer leaves out the characters that it has no token for.
        self._may_drop = "merges" in model and not has_unknown and not has_bytes
        folder = Path(path).parent
        self._config = _read_companion(folder / MAP_NAME) | _read_companion(folder / CONFIG_NAME)
        self.special_tokens = self._find_special()
        self.stop_ids: Sequence[int] = ()
        self.chat_template = read_chat_template(folder)
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.control_tokens = {token.content: i for i, token in added if token.special}
        self.end_token = self._find_end()
        self.end_id = self.end_token and self._tokenizer.token_to_id(self.end_token)
        if self.end_token:
            self.special_tokens.setdefault("eos_token", self.end_token)
        # Two folders with the same tokenizer.json may name different end tokens.
        named_end = "" if self.end_token in (None, *END_TOKENS) else f" {self.end_token}"
        self.identity = f"json:{hashlib.sha256(self._json).hexdigest()}{named_end}"

    @property
    def token_bytes(self) -> np.ndarray | None:
        """Number of bytes of text that each token stands for, (V,) int64; special tokens have 0.

        None if the tokenizer is not byte-level: other tokenizers drop or add spaces, so that their
        tokens do not stand for a fixed number of bytes.
        """
        # The ByteLevel decoder may be part of a sequence of decoders.
        if '"type": "ByteLevel"' not in self._decoder:
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in self._tokenizer.get_vocab().items():
            lengths[number] = len(token)  # one character of a byte-level token is one byte
        for number, added in self._tokenizer.get_added_tokens_decoder().items():
            lengths[number] = 0 if added.special else len(added.content.encode())
        return lengths

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary does not have it.

        Args:
            token: Text of the token in the vocabulary, such as `<|im_end|>`.
        """
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str | bytes, special: bool = False) -> np.ndarray:
        """Return the token ids of a text, (N,) int64.

        Args:
            text: Text to encode, or its bytes in UTF-8.
            special: Whether the names of special tokens in the text become these tokens.

        Raises:
            DataError: If the text has a character or word that the tokenizer has no token for.
        """
        if special:
            return self.encode_special(text if isinstance(text, str) else text.decode())[0]
        return self.encode_batch([text])[0]

    def encode_special(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode a text, in which names of special tokens such as <|im_end|> become these tokens.

        Args:
            text: Text to encode.

        Returns:
            Token ids (N,), and for each token the position of its first character in the text (N,).

        Raises:
            DataError: If the text has a character or word that the tokenizer has no token for.
        """
        (encoding,) = self._encode_texts([text], special=True)
        starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        return np.array(encoding.ids, dtype=np.int64), starts

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Return the token ids of each text, (N,) int64 each. The texts are encoded in parallel.

        Args:
            texts: Texts to encode, or their bytes in UTF-8.

        Raises:
            DataError: If a text has a character or word that the tokenizer has no token for.
        """
        decoded = [text if isinstance(text, str) else text.decode() for text in texts]
        encodings = self._encode_texts(decoded, special=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def _encode_texts(self, texts: list[str], special: bool) -> list:
        """Return an `Encoding` of the package `tokenizers` for each text.

        Args:
            texts: Texts to encode.
            special: Whether the names of special tokens become these tokens. The encodings have the
                offsets of their tokens then.

        Raises:
            DataError: If a text has a character or word that the tokenizer has no token for.
        """
        tokenizer = self._tokenizer
        needs_offsets = special or self._may_drop
        encode = tokenizer.encode_batch if needs_offsets else tokenizer.encode_batch_fast
        tokenizer.encode_special_tokens = not special
        try:
            encodings = encode(texts, add_special_tokens=False)
        except Exception as error:  # the package raises no narrower class
            hint = "a tokenizer whose unknown token is in its vocabulary, or data.tokenizer=bpe"
            message = f"cannot encode this text: {error}"
            raise DataError(f"{self._path}: {message}; try: {hint}") from None
        finally:
            tokenizer.encode_special_tokens = True
        if self._may_drop:
            for text, encoding in zip(texts, encodings, strict=True):
                self._check_complete(text, encoding.offsets)
        return encodings

    def _check_complete(self, text: str, offsets: Iterable[Sequence[int]]) -> None:
        """Check that the tokens of a text leave out no character that the vocabulary lacks.

        White space, and characters that the tokenizer's normalizer removes, may be left out.

        Args:
            text: Text that was encoded.
            offsets: Begin and end of each token in the text, in characters. After a character that
                was left out they are too small, until the next word begins.

        Raises:
            DataError: If the vocabulary has no token for a character.
        """
        is_covered = np.zeros(len(text), dtype=bool)
        for start, end in offsets:
            is_covered[start:end] = True
        normalizer = self._tokenizer.normalizer
        normalize = normalizer.normalize_str if normalizer else str
        left_out = "".join(text[position] for position in np.flatnonzero(~is_covered))
        if not normalize(left_out).strip():
            return
        for name in self.control_tokens:
            text = text.replace(name, "")
        for char in text:
            normalized = normalize(char).strip()
            if normalized and self.token_to_id(normalized) is None:
                message = f"no token for the character {char!r}, and no unknown token"
                raise DataError(f"{self._path}: {message}; try: data.tokenizer=bpe")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids.

        Bytes that are not UTF-8, also an incomplete character, become U+FFFD. Negative ids and ids
        outside the vocabulary are left out. Special tokens are shown by their names.

        Args:
            ids: Token ids.
        """
        ids = [i for i in map(int, ids) if i >= 0]
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def save(self, folder: Path) -> Path:
        """Write a copy of the tokenizer.json that was read, and return the path of the copy.

        Args:
            folder: Existing folder. A tokenizer_config.json, also with the content of an older
                special_tokens_map.json, and the chat template, if any, are written to the same
                folder. Files of these names are replaced.
        """
        if self._config:
            _write(folder, json.dumps(self._config).encode(), CONFIG_NAME)
        _write_template(folder, self.chat_template)
        return _write(folder, self._json)

    def special_ids(self) -> dict[str, int]:
        """Return the ids of the special tokens by names of transformers, such as `eos_token_id`.

        Special tokens that the vocabulary does not have are left out.
        """
        tokens = self.special_tokens.items()
        return {f"{name}_id": self._tokenizer.token_to_id(token) for name, token in tokens}

    def _find_special(self) -> dict[str, str]:
        """Return the special tokens that the configuration names and the vocabulary contains.

        Returns:
            Name in transformers, such as `eos_token`, -> text of the token.
        """
        tokens = {name: self._config.get(name) for name in SPECIAL}
        tokens = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
        texts = {name: token for name, token in tokens.items() if isinstance(token, str)}
        return {name: token for name, token in texts.items() if self.token_to_id(token) is not None}

    def _find_end(self) -> str | None:
        """Return the text of the token that may end a document, or None if there is no such token.

        It is the `eos_token` that the configuration names, or else the first of the usual end
        tokens (END_TOKENS), such as <|endoftext|>. Only a special token of the vocabulary counts.
        """
        names = (self.special_tokens.get("eos_token"), *END_TOKENS)
        return next((name for name in names if name in self.control_tokens), None)


def train_bpe(
    texts: Iterable[str | bytes], vocab_size: int, path: str | os.PathLike, has_end: bool = False
) -> JsonTokenizer:
    """Train a byte-level BPE tokenizer, write it to `path`, and return it.

    256 of its tokens are the bytes, so that every text can be encoded. Words are split as by GPT-2.

    Args:
        texts: Texts to learn from.
        vocab_size: Largest number of tokens, including the end token.
        path: Path of the tokenizer.json to write.
        has_end: Whether to add the end token `<|endoftext|>` as the last token.

    Raises:
        ValueError: If `vocab_size` is less than 256, or than 257 with `has_end`.
        ModuleNotFoundError: If the package `tokenizers` is missing.
    """
    n_end_tokens = 1 if has_end else 0
    if vocab_size < 256 + n_end_tokens:
        end_text = " and an end token" if has_end else ""
        raise ValueError(f"vocab_size={vocab_size}: a BPE starts from 256 bytes{end_text}")
    library = _import_tokenizers()
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size - n_end_tokens,
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    texts = (text if isinstance(text, str) else text.decode() for text in texts)
    # Python runs signal handlers in the main thread. Training runs in another thread, so that a
    # signal is handled at once.
    with ThreadPool(1) as pool:
        pool.apply(tokenizer.train_from_iterator, (texts, trainer))
    if has_end:
        tokenizer.add_special_tokens([END_TOKENS[0]])
    tokenizer.save(str(path))
    return JsonTokenizer(path)


Tokenizer = ByteTokenizer | JsonTokenizer


def load_tokenizer(spec: str | os.PathLike) -> Tokenizer:
    """Load the tokenizer that `data.tokenizer` or the folder of a run names.

    Args:
        spec: `bytes`, the path of a tokenizer.json, or the path of a folder with a tokenizer.json.
            A `~` at its beginning is the home folder.

    Raises:
        FileNotFoundError: If the file does not exist.
        OSError: If the file cannot be read.
        DataError: If the file is not a tokenizer, or a chat_template.jinja in the same folder is
            not UTF-8.
        ModuleNotFoundError: If the package `tokenizers` is needed and missing.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = expand_home(spec)
    if path.is_dir():
        path = path / FILE_NAME
    if read_bytes(path) != _BYTES_JSON:
        return JsonTokenizer(path)
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = read_chat_template(path.parent)
    return tokenizer


def read_chat_template(folder: Path) -> str | None:
    """Return the chat template in the folder of a tokenizer or a run, or None if there is none.

    A file chat_template.jinja takes precedence over the template in tokenizer_config.json. If that
    has several templates, the one with the name `default` is returned. Links are ignored.

    Args:
        folder: Folder of a tokenizer, a run or an export.

    Raises:
        OSError: If chat_template.jinja cannot be read.
        DataError: If chat_template.jinja is not UTF-8.
    """
    file = folder / TEMPLATE_NAME
    if file.is_file() and not file.is_symlink():
        try:
            return read_bytes(file).decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not UTF-8: {error}") from None
    template = _read_companion(folder / CONFIG_NAME).get("chat_template")
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, dict)]
        template = {item.get("name"): item.get("template") for item in named}.get("default")
    return template if isinstance(template, str) else None


def _read_companion(file: Path) -> dict:
    """Return the object in a JSON file, or an empty dict if it is a link or cannot be read.

    A link is not read, because the folder may be untrusted.

    Args:
        file: Path of the file, which may be missing.
    """
    return {} if file.is_symlink() else read_facts(file)


def _write_template(folder: Path, template: str | None) -> None:
    """Write a chat template to chat_template.jinja in a folder. Does nothing if it is None.

    Args:
        folder: Existing folder.
        template: Text of the template.
    """
    if template is not None:
        _write(folder, template.encode(), TEMPLATE_NAME)


def _write(folder: Path, content: bytes, name: str = FILE_NAME) -> Path:
    """Write a file in a folder and return its path. A link of this name is replaced, not followed.

    Args:
        folder: Existing folder.
        content: Content of the file.
        name: Name of the file.
    """
    path = Path(folder) / name
    path.unlink(missing_ok=True)  # the path may be a link to any file if the folder is untrusted
    path.write_bytes(content)
    return path


def _import_tokenizers() -> ModuleType:
    """Import and return the package `tokenizers`, and let it use several threads.

    Sets the environment variable TOKENIZERS_PARALLELISM, unless it is set.

    Raises:
        ModuleNotFoundError: If it is missing. The message has the pip command.
    """
    # The package prints a warning after a fork, because its threads do not survive a fork, unless
    # this variable is set. Forked DataLoader workers never tokenize, so the warning is not needed.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "this tokenizer needs the package tokenizers: pip install 'gptrain[text]';"
            " the tokenizer bytes needs nothing"
        ) from None
    return tokenizers
