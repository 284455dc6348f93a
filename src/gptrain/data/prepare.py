"""Text to token files, once: split, tokenized, and cached by the hash of all that went in."""

import hashlib
import json
import logging
import os
import shutil
import uuid
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from gptrain.data import DataError, corpus, tokenizers
from gptrain.data.cache import MANIFEST, PreparedText, file_entry, fresh_folder
from gptrain.small_files import UnreadableFile, read_json

log = logging.getLogger(__name__)

FORMAT = 2  # of the folder and of the split; another one is another place in the cache
_BATCH_BLOCKS = 16  # tokenized at once, 1 MiB: in parallel, in constant memory

Tokenizer = tokenizers.ByteTokenizer | tokenizers.JsonTokenizer
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
    documents = corpus.find_documents(path, pattern, leave_out=cache_dir)
    digest, skipped = _hash_corpus(documents, cache_dir)
    texts = [doc for doc in documents if doc.name not in set(skipped)]
    if not texts:
        raise DataError(f"{path}: no UTF-8 text in {len(documents)} files")
    if skipped:
        warnings.warn(
            f"{len(skipped)} of {len(documents)} files left out, no UTF-8: the first is"
            f" {skipped[0]}",
            stacklevel=2,
        )
    key = repr((FORMAT, digest, identity, float(val_fraction)))
    folder = cache_dir / hashlib.sha256(key.encode()).hexdigest()[:16]
    if folder.exists():
        try:
            return PreparedText.load(folder)
        except DataError as error:
            warnings.warn(f"{error}: prepared again", stacklevel=2)
        damaged = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        folder.rename(damaged)  # such that no one meets a half of it
        shutil.rmtree(damaged)
    with fresh_folder(folder) as draft:
        _write(draft, texts, tokenizer, val_fraction, vocab_size)
        for doc in texts:
            if corpus.Document.of(doc.name, doc.path) != doc:
                raise DataError(f"{doc.path}: changed while it was read; start again")
    return PreparedText.load(folder)


def _identity(tokenizer: str, vocab_size: int | None) -> str:
    """What a tokenizer does to a text depends on this, and on the text if it is trained."""
    if tokenizer == "bpe":
        if vocab_size is None:
            raise ValueError("tokenizer=bpe: vocab_size says how many tokens to learn")
        return f"bpe:{vocab_size}"
    loaded = tokenizers.load_tokenizer(tokenizer)
    if vocab_size is not None and loaded.vocab_size > vocab_size:
        raise DataError(f"tokenizer has {loaded.vocab_size} tokens, vocab_size={vocab_size}")
    return loaded.identity


def _hash_corpus(documents: Sequence[corpus.Document], cache_dir: Path) -> tuple[str, list[str]]:
    """SHA-256 over names and contents, and the names of files that are no UTF-8.

    To hash a corpus is to read it. So the result is remembered in `index/`, under the names,
    sizes and time stamps of the files, and found again while these are the same.
    """
    states = [(d.name, str(d.path), d.size_bytes, d.mtime_ns) for d in documents]
    known = cache_dir / "index" / f"{hashlib.sha256(repr(states).encode()).hexdigest()}.json"
    with suppress(OSError, UnreadableFile):
        match read_json(known):
            case [str(found), list(skipped)]:
                return found, skipped
    digest, skipped = hashlib.sha256(), []
    for document in documents:
        content = corpus.hash_document(document)
        if content is None:
            skipped.append(document.name)
        else:
            digest.update(f"{document.name!r} {content}\n".encode())
    known.parent.mkdir(parents=True, exist_ok=True)
    known.write_text(json.dumps([digest.hexdigest(), skipped]))
    return digest.hexdigest(), skipped


def _write(
    folder: Path,
    documents: list[corpus.Document],
    spec: str,
    val_fraction: float,
    vocab_size: int | None,
) -> None:
    """Writes all files of a prepared text, the manifest last."""
    train, val = corpus.split(documents, val_fraction)
    n_bytes = sum(document.size_bytes for document in documents)
    if not train or not val:
        raise DataError(
            f"{documents[0].path}: {n_bytes} bytes of text; too few to take {val_fraction:g} of"
            " them for validation"
        )
    log.info("preparing %.1f MB of text in %s, once", n_bytes / 1e6, folder.parent)
    if spec == "bpe":
        file = folder / tokenizers.FILE_NAME
        tokenizer = tokenizers.train_bpe(corpus.read_blocks(train), vocab_size, file)
    else:
        tokenizer = tokenizers.load_tokenizer(spec)
        tokenizer.save(folder)
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    files = {
        f"{name}.bin": _write_tokens(folder / f"{name}.bin", parts, tokenizer, dtype)
        for name, parts in (("train", train), ("val", val))
    }
    manifest = {"vocab_size": tokenizer.vocab_size, "dtype": dtype, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _write_tokens(
    path: Path, parts: list[corpus.Part], tokenizer: Tokenizer, dtype: str
) -> dict[str, Any]:
    """Writes one token file; what the manifest says of it.

    It begins with a newline that is context and never a target, so that every byte of the text
    is predicted, and counted, whatever the tokenizer.
    """
    digest, blocks, rest = hashlib.sha256(), [b"\n"], corpus.read_blocks(parts)
    with path.open("wb") as file:
        while blocks:
            tokens = tokenizer.encode(*blocks).astype(dtype)
            file.write(tokens)
            digest.update(tokens)
            blocks = list(islice(rest, _BATCH_BLOCKS))
    return file_entry(path, digest.hexdigest())
