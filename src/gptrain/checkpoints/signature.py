"""Signatures of runs: proof that this user has started a run on this machine.

A command with `from_run=<folder>` takes over the configuration of another run. It trusts the
configuration as if the user typed it again if the run is signed. A signature is an HMAC-SHA256 of
the run's record files and its id. The key is a file in the user's configuration folder. A person
who cannot read this file cannot sign, and a changed record does not match its signature. Without a
usable key no run is signed, and every run is untrusted.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gptrain.checkpoints import fileops
from gptrain.checkpoints.lock import read_holder
from gptrain.core.small_files import UnreadableFileError, read_bytes

SIGNATURE_NAME = "signature"
RECORDS = ("overrides.yaml", "config.yaml", "hydra.yaml")
_KEY_BYTES = 32
_PURPOSE = b"gptrain run 1"


def sign_record(run_dir: str | Path) -> None:
    """Sign the record files in the .hydra folder of a run, to prove that this user has started it.

    Creates the user's key if there is none. If no safe key can be used, an older signature of the
    run is removed.

    Args:
        run_dir: Run folder with its records and its lock file.

    Raises:
        OSError: If a record is missing, or the run's folder cannot be read or written.
        UnreadableFileError: If a record is no regular file.
    """
    file = Path(run_dir) / ".hydra" / SIGNATURE_NAME
    key = read_key(make=True)
    if key is None:
        remove_signature(run_dir)
    else:
        fileops.replace(file, _sign(key, run_dir, _read_records(run_dir)))


def remove_signature(run_dir: str | Path) -> None:
    """Remove the signature of a run, so that the run is untrusted. Does nothing without one.

    Args:
        run_dir: Run folder.

    Raises:
        OSError: If the file cannot be removed.
    """
    (Path(run_dir) / ".hydra" / SIGNATURE_NAME).unlink(missing_ok=True)


def read_signed_record(run_dir: str | Path) -> dict[str, bytes] | None:
    """Return the record files of a run if this user has signed them on this machine, else None.

    Use the returned bytes, which were verified, and do not read the files again: they may change.

    Args:
        run_dir: Run folder.

    Returns:
        Content of overrides.yaml, config.yaml and hydra.yaml, by file name.
    """
    key = read_key()
    if key is None:
        return None
    with suppress(OSError, UnreadableFileError):
        records = _read_records(run_dir)
        signature = read_bytes(Path(run_dir) / ".hydra" / SIGNATURE_NAME)
        if hmac.compare_digest(signature, _sign(key, run_dir, records)):
            return records
    return None


def read_key(make: bool = False) -> bytes | None:
    """Return this user's secret key for signatures, or None if there is no safe key.

    A key is safe if no other user can read or replace it.

    Args:
        make: Whether to create a key if there is none.
    """
    folder = _key_folder()
    if folder is None:
        return None
    with suppress(OSError):
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(_is_foreign_link(path) for path in (folder, *folder.parents)):
            return None
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        descriptor = os.open(folder, flags)
        try:
            if not _is_private(descriptor, 0o022):
                return None
            if make:
                _make_key(descriptor)
            return _read_key(descriptor)
        finally:
            os.close(descriptor)
    return None


def _key_folder() -> Path | None:
    """Return the absolute path of the folder for the key, or None if the user has no home folder.

    It is `gptrain` in $XDG_CONFIG_HOME or in ~/.config, and need not exist.
    """
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    base = configured if os.path.isabs(configured) else os.path.expanduser("~/.config")
    return Path(base, "gptrain") if os.path.isabs(base) else None


def _make_key(folder: int) -> None:
    """Create a random key in the user's key folder. Do nothing if there is a key.

    The key gets its name by a hard link after all of its bytes were written. So only one of several
    processes succeeds, and no process reads an incomplete key.

    Args:
        folder: Descriptor of the open folder.

    Raises:
        OSError: If the key cannot be written.
    """
    with suppress(FileNotFoundError):
        os.stat("key", dir_fd=folder, follow_symlinks=False)
        return
    draft = f".key.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o600, dir_fd=folder)
    try:
        os.write(descriptor, secrets.token_bytes(_KEY_BYTES))
        os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(draft, "key", src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(descriptor)
        os.unlink(draft, dir_fd=folder)


def _read_key(folder: int) -> bytes | None:
    """Return the key in a folder, or None if it is incomplete or not private to this user.

    Args:
        folder: Descriptor of the open folder.

    Raises:
        OSError: If there is no key, or it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open("key", flags, dir_fd=folder)
    try:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        key = os.read(descriptor, _KEY_BYTES) if is_file and _is_private(descriptor, 0o077) else b""
    finally:
        os.close(descriptor)
    return key if len(key) == _KEY_BYTES else None


def _is_private(descriptor: int, forbidden: int) -> bool:
    """Return whether this user owns an open file that has none of the forbidden mode bits.

    Args:
        descriptor: Descriptor of the open file or folder.
        forbidden: Mode bits, such as 0o077 for all rights of other users.
    """
    status = os.fstat(descriptor)
    return status.st_uid == os.geteuid() and not status.st_mode & forbidden


def _is_foreign_link(path: Path) -> bool:
    """Return whether a path is a link that neither this user nor root owns.

    Its owner could make it point to another folder at any time.

    Args:
        path: Existing path.
    """
    status = os.lstat(path)
    return stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.geteuid(), 0)


def _read_records(run_dir: str | Path) -> dict[str, bytes]:
    """Return the content of each record file in the .hydra folder of a run, by file name.

    Args:
        run_dir: Run folder.

    Raises:
        OSError: If a file is missing or cannot be read.
        UnreadableFileError: If a file is not a regular file.
    """
    return {name: read_bytes(Path(run_dir) / ".hydra" / name) for name in RECORDS}


def _sign(key: bytes, run_dir: str | Path, records: Mapping[str, bytes]) -> bytes:
    """Return the signature of a run's records and id, as the bytes of a hexadecimal text.

    Args:
        key: Key of this user.
        run_dir: Run folder, whose lock file has the id of the run. The id is empty without one.
        records: Content of each file in RECORDS, by file name.

    Raises:
        OSError: If the lock file exists and cannot be read.
    """
    run_id = str(read_holder(run_dir).get("run_id", "")).encode()
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in (_PURPOSE, run_id, *(records[name] for name in RECORDS)):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest().encode()
