"""Text as a data set: split and tokenized once, and cached by the hash of all that went in."""

import hashlib
import json
import logging
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from gptrain.data import corpus
from gptrain.data.tokenizers import FILE_NAME, Tokenizer, load_tokenizer, train_bpe
from gptrain.data.tokens import TokenDataset, token_dtype
from gptrain.progress import progress_bar
from gptrain.small_files import DataError, read_json

log = logging.getLogger(__name__)

FORMAT = 4  # of the folder and of the split; another one is another place in the cache
MANIFEST = "manifest.json"
_BATCH_BLOCKS = 16  # tokenized at once, 1 MiB: in parallel, in constant memory


class TextDataset(TokenDataset):
    """Windows of one part of a tokenized text; `val` keeps its tail, so that every byte counts.

    Args:
        folder: holds `train.bin`, `val.bin` and their tokenizer, as `from_corpus` writes them.
        split: train or val.
    Attributes:
        folder: as given; its name is the fingerprint, of the text, the tokenizer and the split.
        tokenizer: what made the tokens.
    """

    def __init__(self, folder: Path, split: str, seq_len: int) -> None:
        self.folder, self.tokenizer = folder, load_tokenizer(folder)
        vocab_size, dtype = self.tokenizer.vocab_size, token_dtype(self.tokenizer.vocab_size)
        super().__init__(folder / f"{split}.bin", seq_len, dtype, vocab_size, split == "val")
        self.token_bytes, self.fingerprint = self.tokenizer.token_bytes, folder.name

    @classmethod
    def from_corpus(
        cls,
        split: str,
        seq_len: int,
        path: str | os.PathLike | Sequence[str | os.PathLike] | None,
        tokenizer: str,
        cache_dir: str | os.PathLike,
        val_fraction: float = 0.05,
        pattern: str = "*",
        vocab_size: int | None = None,
    ) -> "TextDataset":
        """One part of a corpus, from the cache or tokenized now.

        The corpus is hashed when one of its files has changed, tokenized when the hash, the
        tokenizer or the split has. Memory is constant. Processes that do this at once end alike.

        Args:
            path: a UTF-8 file, a folder with all below it, a list of them; None: the standard
                library's source. Files that are no UTF-8 are left out with one warning.
            tokenizer: `bytes`, `bpe` (trained on the train part), or a tokenizer.json.
            pattern: that names of files within folders must match.
            vocab_size: of the model: as many tokens are learned for `bpe` if the text gives them;
                no tokenizer may have more.
        Raises: FileNotFoundError; DataError for no text, or a cache that somebody has changed;
            OSError if the disk is full or not to be written to, with nothing left behind.
        """
        cache_dir, ready = Path(cache_dir).resolve(), None
        identity = f"bpe:{vocab_size}"
        if tokenizer != "bpe":
            ready = load_tokenizer(tokenizer)
            identity = ready.identity
            if vocab_size is not None and ready.vocab_size > vocab_size:
                raise DataError(f"tokenizer has {ready.vocab_size} tokens, vocab_size={vocab_size}")
        documents = [
            document
            for document in corpus.find_documents(path, pattern)
            if cache_dir not in document.path.parents
        ]
        digest, no_text = _hash_corpus(documents, cache_dir)
        texts = [document for document in documents if str(document.path) not in no_text]
        if not texts:
            raise DataError(f"{path}: no UTF-8 text in {len(documents)} files")
        if no_text:
            first = next(document.name for document in documents if str(document.path) in no_text)
            said = f"{len(no_text)} of {len(documents)} files left out, no UTF-8: the first is"
            warnings.warn(f"{said} {first}", stacklevel=2)
        key = repr((FORMAT, digest, identity, float(val_fraction)))
        folder = cache_dir / hashlib.sha256(key.encode()).hexdigest()[:16]
        if not folder.exists():
            with fresh_folder(folder) as draft:
                _write(draft, texts, ready, val_fraction, vocab_size)
        _check_folder(folder)
        return cls(folder, split, seq_len)


def _hash_corpus(documents: Sequence[corpus.Document], cache_dir: Path) -> tuple[str, list[str]]:
    """SHA-256 over names and contents, and the paths of files that are no UTF-8.

    To hash a corpus is to read it. So the result is remembered in `index/`, under the names,
    sizes and time stamps of the files, and found again while these are the same.
    """
    states = [(d.name, str(d.path), d.size_bytes, d.mtime_ns) for d in documents]
    key = hashlib.sha256(repr((FORMAT, states)).encode()).hexdigest()
    known = cache_dir / "index" / f"{key}.json"
    with suppress(OSError, ValueError):  # missing, or half written
        digest, no_text = read_json(known)
        return digest, no_text
    hashes = [(document, corpus.hash_document(document)) for document in documents]
    no_text = [str(document.path) for document, content in hashes if content is None]
    text = [(document.name, content) for document, content in hashes if content is not None]
    digest = hashlib.sha256(repr(text).encode()).hexdigest()
    known.parent.mkdir(parents=True, exist_ok=True)
    known.write_text(json.dumps([digest, no_text]))
    return digest, no_text


def _write(
    folder: Path,
    documents: list[corpus.Document],
    tokenizer: Tokenizer | None,
    val_fraction: float,
    vocab_size: int | None,
) -> None:
    """Writes the token files and their tokenizer; None: a BPE, learned from the train part."""
    train, val = corpus.split(documents, val_fraction)
    n_bytes = sum(document.size_bytes for document in documents)
    if not train or not val:
        raise DataError(
            f"{documents[0].path}: {n_bytes} bytes of text; too few to take {val_fraction:g} of"
            " them for validation"
        )
    log.info("preparing %.1f MB of text in %s, once", n_bytes / 1e6, folder.parent)
    if tokenizer is None:
        tokenizer = train_bpe(corpus.read_blocks(train), vocab_size, folder / FILE_NAME)
    else:
        tokenizer.save(folder)
    bar = progress_bar("tokenizing", n_bytes)
    for name, parts in (("train", train), ("val", val)):
        # The newline in front is context and never a target, so that every byte of the text is
        # predicted, and counted, whatever the tokenizer.
        blocks, rest = [b"\n"], corpus.read_blocks(parts)
        with (folder / f"{name}.bin").open("wb") as file:
            while blocks:
                file.write(tokenizer.encode(*blocks).astype(token_dtype(tokenizer.vocab_size)))
                bar.update(sum(map(len, blocks)))
                blocks = list(islice(rest, _BATCH_BLOCKS))
            file.flush()
            os.fsync(file.fileno())  # before the folder gets its name
    bar.close()
    for document in documents:
        if corpus.Document.of(document.name, document.path) != document:
            raise DataError(f"{document.path}: changed while it was read; start again")
    files = {path.name: [*_state(path), _hash_file(path)] for path in folder.iterdir()}
    with (folder / MANIFEST).open("w") as file:
        json.dump(files, file)
        file.flush()
        os.fsync(file.fileno())  # an empty one would refuse the folder for ever


def _check_folder(folder: Path) -> None:
    """Raises DataError where a file is not what was written; read only if size or time differ."""
    for name, (*state, digest) in read_json(folder / MANIFEST).items():
        path = folder / name
        if path.exists() and _state(path) != state and _hash_file(path) != digest:
            wrong = f"sha256 differs from {MANIFEST}"
            raise DataError(f"{path}: {wrong}; delete {folder}, it is prepared again")


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """An empty folder that becomes `target` if the block succeeds, and else is removed.

    Another process may do the same: the first one's folder stays, both find `target` complete.
    """
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    draft.mkdir(parents=True)
    try:
        yield draft
        try:
            draft.rename(target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # gone, if it was renamed
