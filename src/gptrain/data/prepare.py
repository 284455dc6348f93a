"""Text to token files, once: split, tokenized, and cached by the hash of all that went in."""

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from gptrain.data.bar import with_bar
from gptrain.data.cache import (
    TextHash,
    fresh_folder,
    known_hash,
    remove_folder,
    take_hash,
)
from gptrain.data.corpus import SPLIT_RULE, Document, Part, find_documents, read_blocks, split
from gptrain.data.errors import DataError
from gptrain.data.prepared import FORMAT, MANIFEST, TOKEN_BYTES, PreparedText
from gptrain.data.tokenizers import (
    FILE_NAME,
    ByteTokenizer,
    JsonTokenizer,
    load_tokenizer,
    train_bpe,
)

_BATCH_BLOCKS = 16  # tokenized at once, 1 MiB: in parallel, in constant memory

Paths = str | os.PathLike | Sequence[str | os.PathLike] | None


def prepare_text(
    path: Paths,
    tokenizer: str,
    cache_dir: str | os.PathLike,
    val_fraction: float = 0.05,
    pattern: str = "*",
    vocab_size: int | None = None,
) -> PreparedText:
    """The train and validation tokens of a corpus, from the cache or made now.

    The corpus is hashed when one of its files has changed, tokenized when the hash, the
    tokenizer or the split has; a damaged cache is made again, with a warning. Memory is constant.
    Processes that do this at once end alike.

    Args:
        path: a UTF-8 file, a folder with all below it, a list of them; None: the standard
            library's source. Files that are no UTF-8 are left out with one warning.
        tokenizer: `bytes`, `bpe` (trained on the train part), or a tokenizer.json.
        pattern: that names of files within folders must match.
        vocab_size: of the model: as many tokens are learned for `bpe` if the text gives them; no
            tokenizer may have more.
    Raises: FileNotFoundError; DataError for no text; OSError if the disk is full or not to be
        written to, with nothing left behind.
    """
    cache_dir = Path(cache_dir)
    identity = _identity(tokenizer, vocab_size)
    documents = find_documents(path, pattern, leave_out=cache_dir)
    text = known_hash(documents, cache_dir) or take_hash(documents, cache_dir)
    texts = [doc for doc in documents if doc.name not in text.skipped]
    if not texts:
        raise DataError(f"{path}: no UTF-8 text in {len(documents)} files")
    if text.skipped:
        warnings.warn(
            f"{len(text.skipped)} of {len(documents)} files left out, no UTF-8: the first is"
            f" {text.skipped[0]}",
            stacklevel=2,
        )
    folder = _folder(cache_dir, text, identity, val_fraction)
    if folder.exists():
        try:
            return PreparedText.load(folder).check()
        except DataError as error:
            warnings.warn(f"{error}: prepared again", stacklevel=2)
        remove_folder(folder)
    with fresh_folder(folder) as draft:
        _write(draft, texts, tokenizer, identity, val_fraction, vocab_size)
        for doc in texts:
            if Document.of(doc.name, doc.path) != doc:
                raise DataError(f"{doc.path}: changed while it was read; start again")
    return PreparedText.load(folder)


def _identity(tokenizer: str, vocab_size: int | None) -> str:
    """What a tokenizer does to a text depends on this, and on the text if it is trained."""
    if tokenizer == "bpe":
        if vocab_size is None:
            raise ValueError("tokenizer=bpe: vocab_size says how many tokens to learn")
        return f"bpe:{vocab_size}"
    loaded = load_tokenizer(tokenizer)
    if vocab_size is not None and loaded.vocab_size > vocab_size:
        raise DataError(f"tokenizer has {loaded.vocab_size} tokens, vocab_size={vocab_size}")
    return loaded.identity


def _folder(cache_dir: Path, text: TextHash, identity: str, val_fraction: float) -> Path:
    key = repr((FORMAT, SPLIT_RULE, text.digest, identity, float(val_fraction)))
    return cache_dir / hashlib.sha256(key.encode()).hexdigest()[:16]


def _write(
    folder: Path,
    documents: list[Document],
    tokenizer_spec: str,
    identity: str,
    val_fraction: float,
    vocab_size: int | None,
) -> None:
    train, val = split(documents, val_fraction)
    if not train or not val:
        n_bytes = sum(document.size_bytes for document in documents)
        raise DataError(
            f"{documents[0].path}: {n_bytes} bytes of text; too few to take {val_fraction:g} of"
            " them for validation"
        )
    if tokenizer_spec == "bpe":
        tokenizer = train_bpe(_blocks(train, "learn BPE"), vocab_size, folder / FILE_NAME)
    else:
        tokenizer = load_tokenizer(tokenizer_spec)
        tokenizer.save(folder)
    if tokenizer.token_bytes is not None:
        np.save(folder / TOKEN_BYTES, tokenizer.token_bytes)
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    files = {
        f"{name}.bin": _write_tokens(folder / f"{name}.bin", parts, tokenizer, dtype)
        for name, parts in (("train", train), ("val", val))
    }
    manifest = {
        "format": FORMAT,
        "split": SPLIT_RULE,
        "val_fraction": val_fraction,
        "documents": len(documents),
        "tokenizer": identity,
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _write_tokens(
    path: Path, parts: list[Part], tokenizer: ByteTokenizer | JsonTokenizer, dtype: str
) -> dict:
    """Writes one token file; what the manifest says of it.

    It begins with a newline that is context and never a target, so that every byte of the text
    is predicted, and counted, whatever the tokenizer.
    """
    digest, n_tokens, byte_counts = hashlib.sha256(), 0, np.zeros(256, dtype=np.int64)
    with path.open("wb") as file:
        blocks: list[bytes] = [b"\n"]
        rest = _blocks(parts, f"tokenize {path.stem}")
        while blocks:
            tokens = tokenizer.encode_blocks(blocks).astype(dtype)
            file.write(tokens.tobytes())
            digest.update(tokens.tobytes())
            n_tokens += len(tokens)
            blocks = list(islice(rest, _BATCH_BLOCKS))
            for block in blocks:
                byte_counts += np.bincount(np.frombuffer(block, np.uint8), minlength=256)
    status = path.stat()
    return {
        "tokens": n_tokens,
        "text_bytes": int(byte_counts.sum()),
        "unigram_entropy": _entropy(byte_counts),
        "size_bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "sha256": digest.hexdigest(),
    }


def _entropy(counts: np.ndarray) -> float:
    """Nats per symbol of the distribution that these counts are of."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _blocks(parts: list[Part], title: str) -> Iterator[bytes]:
    total_bytes = sum(part.stop - part.start for part in parts)
    return with_bar(read_blocks(parts), title, total_bytes, len)
