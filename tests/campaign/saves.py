"""Every operation of a save broken, every kind of damage to what was saved; without a run."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from gptrain.resilience import fileops
from gptrain.resilience.draft import SaveFailed
from gptrain.resilience.manifest import DamagedCheckpoint, NoGoodCheckpoint
from gptrain.resilience.store import CheckpointStore
from tests.campaign.lab import Lab

RUN_ID = "c" * 32


def operations_killed(lab: Lab, reference: dict, draw: random.Random) -> list[str | None]:
    """A save killed at every operation, whole and sharded: the old one or the new, never a mix."""
    return [
        found
        for write in (write_whole, write_shards)
        for in_background in (False, True)
        for found in at_every_operation(lab, write, signal.SIGKILL, in_background)
    ]


def operations_refused(lab: Lab, reference: dict, draw: random.Random) -> list[str | None]:
    """A save with an error of every operation: one exception, the old one is there."""
    return [
        found
        for write in (write_whole, write_shards)
        for number in (errno.ENOSPC, errno.EIO, errno.EDQUOT)
        for in_background in (False, True)
        for found in at_every_operation(lab, write, number, in_background)
    ]


def operations_refused_once(lab: Lab, reference: dict, draw: random.Random) -> list[str | None]:
    return at_every_operation(lab, write_whole, errno.EIO)


def at_every_operation(
    lab: Lab, write: Callable, fault: int, in_background: bool = False
) -> list[str | None]:
    """One result for each operation that a save has, until a save has fewer."""
    results, base = [], lab.new("store")
    in_child(lambda: save(CheckpointStore(base, RUN_ID), 1, write))
    for count in range(1, 1000):
        folder = lab.new("store")
        shutil.copytree(base, folder)

        def broken_save(folder=folder, count=count) -> int:
            breaks = break_operation(count, fault)
            try:
                save(CheckpointStore(folder, RUN_ID), 2, write, in_background)
            except SaveFailed:
                return 74
            return 0 if breaks else 99

        code = in_child(broken_save)
        if code == 99:  # a save has fewer operations
            return results
        store = CheckpointStore(folder, RUN_ID)
        store.clean()
        good = store.newest_good()
        left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        problem = None
        if good is None or good.step not in (1, 2) or good.damaged:
            problem = f"operation {count}: step {good and good.step} is taken"
        elif left:
            problem = f"operation {count}: {left} left"
        results.append(problem)
        shutil.rmtree(folder)
    return results


def save(store: CheckpointStore, step: int, write: Callable, in_background: bool = False) -> None:
    with store.writing(step, in_background=in_background) as draft:
        write(draft, step)
    store.finish()


def write_whole(draft, step: int) -> None:
    import torch

    with draft.open("state.ckpt") as file:
        torch.save(state(step), file)


def write_shards(draft, step: int) -> None:
    import torch.distributed.checkpoint as dcp

    from gptrain.resilience.sharded import ShardWriter

    dcp.save(state(step), storage_writer=ShardWriter(draft), no_dist=True)


def state(step: int) -> dict:
    import torch

    return {f"layer-{index}": torch.full((64, 64), float(step)) for index in range(4)}


def break_operation(count: int, fault: int) -> list[int]:
    """Breaks the count-th file operation from here on; the list is empty until it came."""
    broken, seen = [], []

    def breaking(operation: Callable) -> Callable:
        def call(*args):
            seen.append(None)
            if len(seen) == count:
                broken.append(count)
                if fault == signal.SIGKILL:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(fault, os.strerror(fault))
            return operation(*args)

        return call

    for name in fileops.OPERATIONS:
        setattr(fileops, name, breaking(getattr(fileops, name)))
    return broken


def in_child(work: Callable[[], object]) -> int:
    """Exit code of a forked process that does it; negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            code = work() or 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def bits_flipped(lab: Lab, reference: dict, draw: random.Random, n: int = 100) -> list[str | None]:
    """One bit of any file of a checkpoint: found, and the one before is taken."""
    return damaged(lab, draw, flip_any, n)


def many_bits_flipped(lab: Lab, reference: dict, draw: random.Random) -> list[str | None]:
    return bits_flipped(lab, reference, draw, 1000)


def truncated(lab: Lab, reference: dict, draw: random.Random) -> list[str | None]:
    """Cut off anywhere, at 0 and 1 bytes too."""
    return damaged(lab, draw, cut_any, 200)


def shards_mixed(lab: Lab, reference: dict, draw: random.Random) -> list[str | None]:
    """A file gone, two files swapped, a file of another step, a checkpoint of another run."""
    return damaged(lab, draw, mix_up, 30)


def damaged(lab: Lab, draw: random.Random, harm: Callable, n: int) -> list[str | None]:
    """n times: two good checkpoints, the newer harmed; it must be seen, and the older taken."""
    base, results = lab.new("store"), []
    for step in (1, 2):
        in_child(lambda step=step: save(CheckpointStore(base, RUN_ID), step, write_two_files))
    newest = base / "step-00000002"
    kept = {path.name: path.read_bytes() for path in newest.iterdir()}
    for _ in range(n):
        what = harm(newest, draw)
        try:
            CheckpointStore(base, RUN_ID).verify(newest)
            results.append(f"{what} was not seen")
        except DamagedCheckpoint:
            results.append(None)
        for name, content in kept.items():
            (newest / name).write_bytes(content)
    harm(newest, draw)
    found = CheckpointStore(base, RUN_ID).newest_good()
    if found.step != 1 or not (base / "step-00000002.corrupt").exists():
        results.append("the older one was not taken")
    for path in (base / "step-00000001").iterdir():
        flip(path, draw)
    try:
        CheckpointStore(base, RUN_ID).newest_good()
        results.append("one of two damaged ones was taken")
    except NoGoodCheckpoint:
        pass
    return results


def write_two_files(draft, step: int) -> None:
    import torch

    for rank in range(2):
        with draft.open(f"shard-{rank}.pt") as file:
            torch.save({"step": step, "rank": rank, "weights": torch.arange(500 + rank)}, file)


def flip(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    place = draw.randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)
    return f"bit {place} of {path.name}"


def flip_any(folder: Path, draw: random.Random) -> str:
    return flip(draw.choice(sorted(folder.iterdir())), draw)


def cut_any(folder: Path, draw: random.Random) -> str:
    path = draw.choice(sorted(folder.iterdir()))
    size = draw.choice((0, 1, draw.randrange(path.stat().st_size)))
    os.truncate(path, size)
    return f"{path.name} cut to {size} bytes"


def damage(folder: Path, draw: random.Random) -> str:
    return draw.choice((flip_any, cut_any))(folder, draw)


def mix_up(folder: Path, draw: random.Random) -> str:
    one, two, manifest = (folder / name for name in ("shard-0.pt", "shard-1.pt", "manifest.json"))
    how = draw.randrange(4)
    if how == 0:
        draw.choice((one, two, manifest)).unlink()
    elif how == 1:
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
    elif how == 2:
        shutil.copy(folder.with_name("step-00000001") / one.name, one)
    else:
        shutil.copy(folder.with_name("step-00000001") / manifest.name, manifest)
    return f"mix {how}"
