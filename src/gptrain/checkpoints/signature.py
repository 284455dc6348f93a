"""Signatures of runs: proof that this user has started a run on this machine.

The config of a run may name any class, so a command uses the config of an earlier run only if this
user has signed it. The signature is an HMAC-SHA256 of the record files with a key in the user's
configuration folder.
"""

import hmac
import os
import secrets
import stat
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from gptrain.checkpoints import files
from gptrain.core.small_files import UnreadableFileError, read_bytes, read_values

RECORDS = ("overrides.yaml", "config.yaml", "hydra.yaml")


def sign_record(run_dir: str | Path) -> None:
    """Sign the record files in the .hydra folder of a run. Create the user's key if there is none.

    Raises:
        OSError: If there is no safe key, or a file cannot be read or written.
    """
    key_file = _key_file()
    key_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    make = partial(os.open, mode=0o600)
    with suppress(FileExistsError), open(key_file, "xb", opener=make) as file:
        file.write(secrets.token_bytes(32))
    files.replace(Path(run_dir) / ".hydra" / "signature", _sign(_read_records(run_dir)))


def read_record(file: Path) -> tuple[Any, bool]:
    """Return the content of a record file of a run, and whether this user has signed it.

    A signed record is the content whose signature was verified. Aliases of YAML are allowed in it,
    because gptrain has written it. Raises the errors of `read_values` for any other file.
    """
    with suppress(OSError, UnreadableFileError):
        records = _read_records(file.parents[1])
        signature = read_bytes(file.with_name("signature"))
        if hmac.compare_digest(signature, _sign(records)):  # the files may change from now on
            return yaml.safe_load(records[file.name]), True
    return read_values(file), False


def _key_file() -> Path:
    """Return the path of the user's key, which need not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "gptrain" / "key"


def _read_records(run_dir: str | Path) -> dict[str, bytes]:
    """Return the content of each record file that is there. An export has config.yaml only."""
    paths = [Path(run_dir) / ".hydra" / name for name in RECORDS]
    # Opening a named pipe would wait for a writer.
    return {file.name: file.read_bytes() for file in paths if file.is_file()}


def _sign(records: dict[str, bytes]) -> bytes:
    """Return the signature of the records. Raises an OSError without a key that is safe to use."""
    key_file = _key_file()
    status = os.lstat(key_file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{key_file}: not a file that only you can read")
    text = repr(records).encode()  # shows where each name and content ends
    return hmac.new(key_file.read_bytes(), text, "sha256").hexdigest().encode()
