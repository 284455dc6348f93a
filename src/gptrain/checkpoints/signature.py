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

from gptrain.checkpoints import files

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


def read_signed_record(run_dir: str | Path) -> dict[str, bytes] | None:
    """Return name -> content of the record files in the .hydra folder of a run, if it is signed.

    None if this user has not signed them on this machine, or if a file cannot be read. Use the
    returned bytes, which were verified, and do not read the files again: they may change.
    """
    with suppress(OSError):
        records = _read_records(run_dir)
        signature = (Path(run_dir) / ".hydra" / "signature").read_bytes()
        return records if hmac.compare_digest(signature, _sign(records)) else None
    return None


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
