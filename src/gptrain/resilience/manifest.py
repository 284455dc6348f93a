"""What a checkpoint consists of, and whether it is all there: `manifest.json`.

The manifest is written last, lists every file with its size and SHA-256, and carries the SHA-256 of
its own text, so one flipped bit anywhere in the folder is seen. It says which run and which step
it belongs to: order is by step, never by a file's time, and a folder of another run is not taken
for ours. The run's configuration is in it, readable without loading a tensor.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gptrain.resilience.status import to_json

MANIFEST_NAME = "manifest.json"
FORMAT = 1
_READ_BYTES = 1 << 20  # hashed while still in the processor's cache


class DamagedCheckpoint(Exception):
    """A checkpoint folder that is not what its manifest says."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


class NoGoodCheckpoint(Exception):
    """There are checkpoints, and none of them is whole: a person must decide."""

    def __init__(self, folder: Path, damaged: list[DamagedCheckpoint]) -> None:
        self.folder, self.damaged = folder, damaged
        reasons = "; ".join(f"{one.path.name}: {one.reason}" for one in damaged)
        super().__init__(f"{folder}: no checkpoint is good: {reasons}")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: its folder, its manifest, and the newer ones that were damaged."""

    path: Path
    manifest: dict
    damaged: tuple[DamagedCheckpoint, ...] = ()

    @property
    def step(self) -> int:
        """Optimizer steps done when it was written."""
        return self.manifest["step"]


def manifest_bytes(
    *,
    run_id: str,
    step: int,
    kind: str,
    world_size: int,
    config: dict,
    metrics: dict[str, float],
    files: dict[str, dict],
) -> bytes:
    """The text of a manifest, sealed with its own hash.

    Args:
        kind: full (one file holds everything) or sharded (every rank wrote its own).
        files: name -> {"bytes": size, "sha256": hex}.
    """
    return seal(
        {
            "format": FORMAT,
            "run_id": run_id,
            "step": step,
            "kind": kind,
            "world_size": world_size,
            "metrics": metrics,
            "files": dict(sorted(files.items())),
            "config": config,
        }
    )


def seal(content: dict) -> bytes:
    """JSON text of the content, with the text's own hash as last entry in place of any earlier."""
    content = {key: value for key, value in content.items() if key != "sha256"}
    return to_json(content | {"sha256": hashlib.sha256(to_json(content)).hexdigest()})


def read_manifest(path: Path) -> dict:
    """The manifest of a checkpoint folder; its own seal is checked, the files are not.

    Raises: DamagedCheckpoint.
    """
    try:
        text = (path / MANIFEST_NAME).read_bytes()
        manifest = json.loads(text)
    except FileNotFoundError:
        raise DamagedCheckpoint(path, f"{MANIFEST_NAME} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(path, f"{MANIFEST_NAME}: {error.strerror}") from error
    except ValueError:  # also covers text that is no UTF-8
        raise DamagedCheckpoint(path, f"{MANIFEST_NAME} is damaged (not JSON)") from None
    # The text is compared, not the values: JSON has many spellings of one value.
    if not isinstance(manifest, dict) or seal(manifest) != text:
        raise DamagedCheckpoint(path, f"{MANIFEST_NAME} is damaged (sha256)")
    if manifest.get("format") != FORMAT:
        raise DamagedCheckpoint(
            path, f"written in format {manifest.get('format')}, this version reads {FORMAT}"
        )
    return manifest


def verify(
    path: Path, *, run_id: str | None = None, progress: Callable[[], None] | None = None
) -> dict:
    """The manifest of a checkpoint of which every byte was read and found right.

    Args:
        run_id: the run it must belong to, None for any.
        progress: called after every piece read, at least once a second on a working disk.
    Raises: DamagedCheckpoint, naming the first file that is wrong.
    """
    manifest = read_manifest(path)
    if run_id is not None and manifest["run_id"] != run_id:
        raise DamagedCheckpoint(path, f"of another run ({manifest['run_id']}, this is {run_id})")
    if path.name.startswith("step-") and path.name != folder_name(manifest["step"]):
        raise DamagedCheckpoint(path, f"holds step {manifest['step']}")

    def check(name: str) -> str | None:
        return difference(path / name, manifest["files"][name], progress)

    workers = min(8, os.cpu_count() or 1)  # hashing leaves the interpreter lock
    with ThreadPoolExecutor(max_workers=workers) as pool:
        _raise_first(path, pool.map(check, manifest["files"]))
    return manifest


def difference(path: Path, expected: dict, progress: Callable[[], None] | None) -> str | None:
    """How a file differs from its entry in a manifest; None if it does not."""
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{path.name} has {size} bytes, its manifest says {expected['bytes']}"
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
                if progress:
                    progress()
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None if digest.hexdigest() == expected["sha256"] else f"{path.name} is damaged (sha256)"


def folder_name(step: int) -> str:
    """`step-00000500`; the digits keep a listing in order."""
    return f"step-{step:08d}"


def _raise_first(path: Path, differences: Iterable[str | None]) -> None:
    for difference in differences:
        if difference:
            raise DamagedCheckpoint(path, difference)
