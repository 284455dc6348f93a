"""A folder of prepared text: train.bin, val.bin, the tokenizer, and a manifest of all that."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptrain.data.errors import DataError
from gptrain.data.tokenizers import ByteTokenizer, JsonTokenizer, load_tokenizer

FORMAT = 1  # of the folder; another one is another cache key
MANIFEST = "manifest.json"
TOKEN_BYTES = "token_bytes.npy"


@dataclass(frozen=True)
class PreparedText:
    """The token files of a corpus and what is known of them.

    Attributes:
        unigram_entropy: of the validation text, nats per byte: the loss of a model that knows
            how often each byte comes, and nothing else.
    """

    folder: Path
    vocab_size: int
    dtype: str
    unigram_entropy: float

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "PreparedText":
        """Reads the manifest; sizes are compared, contents are not.

        Raises: DataError if a file is missing or of another size.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        for name, told in manifest["files"].items():
            file = folder / name
            size_bytes = file.stat().st_size if file.exists() else 0
            if size_bytes != told["size_bytes"]:
                raise DataError(f"{file}: {size_bytes} bytes, {told['size_bytes']} in {MANIFEST}")
        return cls(
            folder=folder,
            vocab_size=manifest["vocab_size"],
            dtype=manifest["dtype"],
            unigram_entropy=manifest["files"]["val.bin"]["unigram_entropy"],
        )

    @property
    def train_file(self) -> Path:
        return self.folder / "train.bin"

    @property
    def val_file(self) -> Path:
        return self.folder / "val.bin"

    @property
    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text that each token stands for, (V,); None if the tokenizer cannot say."""
        file = self.folder / TOKEN_BYTES
        return np.load(file, allow_pickle=False) if file.exists() else None

    def tokenizer(self) -> ByteTokenizer | JsonTokenizer:
        """The tokenizer that made the tokens."""
        return load_tokenizer(self.folder)

    def check(self) -> "PreparedText":
        """Itself, if the token files are those that were written.

        Hashed only when a time stamp is not the one noted when they were written, as after a
        copy; a file that turns out well gets its time stamp back.

        Raises: DataError that names the file.
        """
        for name, told in _read_manifest(self.folder)["files"].items():
            file = self.folder / name
            if file.stat().st_mtime_ns == told["mtime_ns"]:
                continue
            if _sha256(file) != told["sha256"]:
                raise DataError(f"{file}: sha256 differs from {MANIFEST}")
            with suppress(OSError):  # a cache that may only be read is hashed at every start
                os.utime(file, ns=(told["mtime_ns"], told["mtime_ns"]))
        return self


def _read_manifest(folder: Path) -> dict:
    file = folder / MANIFEST
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        raise DataError(f"{folder}: holds no {MANIFEST}") from None
    except ValueError:
        raise DataError(f"{file}: damaged") from None


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(2**20):
            digest.update(block)
    return digest.hexdigest()
