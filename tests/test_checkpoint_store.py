"""Checkpoints are whole or do not exist, and loading never runs foreign code."""

import contextlib
import errno
import hashlib
import logging
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file

from gptrain.checkpoints import files, manifest
from gptrain.checkpoints import save as save_module
from gptrain.checkpoints import store as store_module
from gptrain.checkpoints.files import SaveFailedError
from gptrain.checkpoints.manifest import DamagedCheckpointError, read_manifest, seal, verify
from gptrain.checkpoints.store import CheckpointStore
from gptrain.checkpoints.tensors import SavedTensors, load_file
from tests.run import read_tensors

RUN = "a" * 32
FILES = ("state.ckpt", "model.safetensors")
MANIFEST = "manifest.json"


def weights(step: int) -> torch.Tensor:
    return torch.arange(750.0) + step  # 3000 bytes


def save(store: CheckpointStore, step: int, metrics: dict | None = None, **about: Any) -> Path:
    store.save(step, {"model": {"w": weights(step)}}, {"n": [step] * 500}, **about)
    if metrics:
        store.set_metrics(step, metrics)
    return store.folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def steps_of(store: CheckpointStore) -> list[int]:
    return [step_of(path) for path in store.paths()]


def holds(path: Path, step: int) -> bool:
    is_same = torch.equal(SavedTensors(path).full()["w"], weights(step))
    return is_same and load_file(path / "state.ckpt") == {"n": [step] * 500}


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", RUN)


OPERATIONS = ("statvfs", "makedirs", "open", "fsync", "close", "rename", "unlink", "rmdir")


def wrap_os(patch: pytest.MonkeyPatch, call: Callable) -> None:
    """Lets `call(name, operation, *arguments)` do each file operation of a save."""

    class Wrapped:
        def __getattr__(self, name):
            operation = getattr(os, name)
            wrapped = partial(call, name, operation) if name in OPERATIONS else operation
            setattr(self, name, wrapped)  # shutil compares functions by identity (Python 3.13)
            return wrapped

    for module in (save_module, files, store_module, shutil):
        patch.setattr(module, "os", Wrapped())


class Shim:
    """Counts the file operations and breaks the k-th."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.arm(0, 0)
        wrap_os(patch, self.call)

    def arm(self, at: int, number: int) -> None:
        self.at, self.number, self.names = at, number, []

    def call(self, name, operation, *arguments, **options):
        self.names.append(name)
        if len(self.names) != self.at:
            return operation(*arguments, **options)
        if name == "close":  # a descriptor is given back in any case, and may have been
            with contextlib.suppress(OSError):
                operation(*arguments)
        raise OSError(self.number, os.strerror(self.number))


# Whole


def test_a_save_is_found_again_with_its_metadata(store):
    config = {"model": {"d_model": 32}, "data.path": "caf\udce9"}  # a name that is not UTF-8
    save(store, 500, config=config, metrics={"val/loss": 2.0})
    path = CheckpointStore(store.folder, RUN).newest_intact()
    assert path.name == "step-00000500" and holds(path, 500)
    about = verify(path)
    assert (about.run_id, about.step) == (RUN, 500)
    assert about.config == config and about.metrics == {"val/loss": 2.0}
    assert {name: entry.bytes for name, entry in about.files.items()} == {
        name: (path / name).stat().st_size for name in FILES
    }


# Broken at every operation


@pytest.mark.parametrize(
    "number, in_background",
    [
        (errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EIO, False), (errno.EROFS, False),
        (errno.EIO, True),
    ],
)  # fmt: skip
def test_an_error_of_any_operation_is_one_exception_and_harms_nothing(
    store, monkeypatch, number, in_background
):
    shim = Shim(monkeypatch)
    save(store, 1)
    shim.arm(0, 0)
    save(store, 2)
    n_operations = len(shim.names)
    for at in range(1, n_operations + 1):
        shim.arm(0, 0)
        shutil.rmtree(store.folder)
        save(store, 1)
        shim.arm(at, number)
        with pytest.raises(SaveFailedError, match=f"{os.strerror(number)}.* are intact") as failed:
            save(store, 2, in_background=in_background)
            store.finish()
        broken_name = shim.names[at - 1]
        assert failed.value.errno == number, broken_name
        shim.arm(0, 0)
        # The last three sync the folder's names: the new one is there, whole.
        steps = [1] if at < n_operations - 2 else [1, 2]
        assert sorted(os.listdir(store.folder)) == [f"step-{step:08d}" for step in steps]
        assert step_of(store.newest_intact()) == steps[-1] and holds(
            store.folder / "step-00000001", 1
        )


def test_metrics_that_cannot_be_written_are_an_error_and_the_old_ones_stay(store, monkeypatch):
    """The manifest is replaced by `files.replace`, as status.json and result.json are."""
    path = save(store, 1)
    shim = Shim(monkeypatch)
    store.set_metrics(1, {"val/loss": 2.0})
    for at in range(1, shim.names.index("rename") + 2):
        shim.arm(at, errno.ENOSPC)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            store.set_metrics(1, {"val/loss": 1.0})
        shim.arm(0, 0)
        assert verify(path).metrics == {"val/loss": 2.0}
        assert {*os.listdir(path)} == {*FILES, "manifest.json"}


class Medium:
    """What SIGKILL after each operation leaves, and a power cut in the worst case: what was synced.

    `safe` holds the bytes or the entries that each inode had at its last sync.
    """

    def __init__(self, patch: pytest.MonkeyPatch, root: Path, look: Callable) -> None:
        self.root, self.look, self.safe, self.is_looking = root, look, {}, False
        self.held = contextlib.ExitStack()  # files that are open, so that no number is used again
        wrap_os(patch, self.call)

    def call(self, name, operation, *arguments, **options):
        result = operation(*arguments, **options)
        if self.is_looking:
            return result
        if name == "fsync":
            self.held.callback(os.close, os.dup(arguments[0]))
            self.sync(Path(f"/proc/self/fd/{arguments[0]}"))
        self.is_looking, after = True, self.root.with_name("after")
        for how, leave in (("killed", shutil.copytree), ("power cut", self.put_back)):
            leave(self.root, after)
            self.look(how, after)
            shutil.rmtree(after)
        self.is_looking = False
        return result

    def sync(self, path: Path) -> None:
        entries = os.scandir(path) if path.is_dir() else None
        names = entries and {entry.name: (entry.inode(), entry.is_dir()) for entry in entries}
        self.safe[path.stat().st_ino] = path.read_bytes() if names is None else names

    def put_back(self, root: Path, target: Path) -> None:
        """The file system as the next start finds it."""
        left = [(target, root.stat().st_ino, True)]
        for path, inode, is_folder in left:
            if not is_folder:
                path.write_bytes(self.safe.get(inode, b""))
                continue
            path.mkdir()
            left += [(path / name, *about) for name, about in self.safe.get(inode, {}).items()]


def test_killed_or_cut_off_after_any_operation_the_loader_finds_the_old_or_the_new(
    tmp_path, monkeypatch
):
    """New steps, one of them in the background, and what is pruned."""
    found_steps, before = {"killed": [], "power cut": []}, tmp_path / "before"
    before.mkdir()

    def look(how, folder):
        restarted = CheckpointStore(folder / "checkpoints", RUN)
        restarted.clean()
        checkpoint = restarted.newest_intact()
        found_steps[how].append(step_of(checkpoint) if checkpoint else 0)
        for path in restarted.folder.glob("*"):  # no hidden one, none that is damaged
            assert holds(path, read_manifest(path).step)

    with monkeypatch.context() as patch, Medium(patch, before, look).held:
        store = CheckpointStore(before / "checkpoints", RUN)
        for step, options in ((1, {}), (2, {"in_background": True})):
            save(store, step, **options)
            store.finish()
            # A save that has returned survives.
            assert found_steps["killed"][-1] == found_steps["power cut"][-1] == step
            store.set_metrics(step, {"val/loss": 1.0})
        store.prune(1)
    for steps in found_steps.values():
        assert steps == sorted(steps) and len(steps) > 40


# Damaged


def test_every_flipped_bit_is_detected(store):
    save(store, 1, config={"a": 1.5, "text": "ab"}, metrics={"val/loss": 0.25})
    path = save(store, 2, config={"a": 1.5, "text": "ab"}, metrics={"val/loss": 0.25})
    draw = random.Random(0)
    for _ in range(300):
        victim = path / draw.choice((*FILES, "manifest.json", "manifest.json"))
        good = bytearray(victim.read_bytes())
        bad = good.copy()
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        victim.write_bytes(bad)
        with pytest.raises(DamagedCheckpointError, match=f"^{path}: .*{victim.name}"):
            verify(path)
        victim.write_bytes(good)
    verify(path)


def reseal(path: Path, **changes: object) -> None:
    (path / "manifest.json").write_bytes(seal(read_manifest(path).model_dump() | changes))


def forge(path: Path) -> None:
    """Write a manifest that has the right hash and is not JSON."""
    text = b"{"
    sha256 = hashlib.sha256(text + b"\n}\n").hexdigest().encode()
    (path / "manifest.json").write_bytes(text + b',\n "sha256": "' + sha256 + b'"\n}\n')


DAMAGES = {
    "truncated": lambda path: os.truncate(path / "state.ckpt", 1000),
    "empty": lambda path: os.truncate(path / "state.ckpt", 0),
    "missing": lambda path: (path / "state.ckpt").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "a folder": lambda path: ((path / MANIFEST).unlink(), (path / MANIFEST).mkdir()),
    "torn manifest": lambda path: os.truncate(path / "manifest.json", 50),
    "forged manifest": forge,
    "another file": lambda path: shutil.copy(path / FILES[0], path / FILES[1]),
    "renamed": lambda path: path.rename(path.with_name("step-00000009")),
    "belongs to another run": lambda path: reseal(path, run_id="b" * 32),
    "older format": lambda path: reseal(path, format=1),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_newest_checkpoint_is_passed_over_and_the_previous_one_is_used(
    store, caplog, how
):
    save(store, 1)
    DAMAGES[how](save(store, 2))
    with caplog.at_level(logging.WARNING):
        checkpoint = store.newest_intact()
    assert step_of(checkpoint) == 1 and "warning: passed over: " in caplog.text


def test_a_run_that_goes_back_continues_from_its_own_saves(store, caplog):
    for step in (2, 4, 6):
        save(store, step)
    store.set_aside_after(2)
    save(store, 4)
    store.prune(1)
    assert steps_of(store) == [4] and holds(store.newest_intact(), 4)
    aside = sorted(path.name.partition(".unused-")[0] for path in store.folder.glob("*.unused-*"))
    assert aside == ["step-00000004", "step-00000006"] and "set aside as" in caplog.text


def test_a_store_that_only_reads_uses_the_previous_checkpoint_and_keeps_all(
    store, monkeypatch, caplog
):
    """An evaluation may read a checkpoint from a read-only folder. What is in the way stays."""
    save(store, 1)
    DAMAGES["truncated"](save(store, 2))
    reader = CheckpointStore(store.folder)
    assert step_of(reader.newest_intact()) == 1
    with pytest.raises(ValueError, match="run_id"):
        save(reader, 3)
    assert steps_of(store) == [1, 2]
    assert "is damaged (sha256)" in caplog.text

    def refuse(name, operation, *arguments, **options):
        if name == "rename":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return operation(*arguments, **options)

    wrap_os(monkeypatch, refuse)
    store.prune(1)
    assert steps_of(store) == [1, 2]


def test_a_network_file_system_that_is_away_is_an_error_and_no_damage(store, monkeypatch):
    save(store, 1)

    def refuse(number, *_):
        raise OSError(number, os.strerror(number))

    numbers = (errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH)
    places = ((manifest, "open_regular"), (os, "listdir"))
    for number, place in product(numbers, places):
        with monkeypatch.context() as patch:
            patch.setattr(*place, partial(refuse, number))
            with pytest.raises(OSError, match=os.strerror(number)):
                store.newest_intact()  # returning None would start the run from the beginning
    assert step_of(store.newest_intact()) == 1


def test_if_none_is_intact_every_start_stops_and_each_has_its_reason(store, caplog):
    DAMAGES["truncated"](save(store, 1))
    DAMAGES["missing"](save(store, 2))
    for _ in range(2):  # the second start must not begin from scratch either
        with pytest.raises(DamagedCheckpointError) as stop:
            store.newest_intact()
        assert "step-00000001: state.ckpt is damaged (sha256)" in str(stop.value)
    assert f"No such file or directory: '{store.folder}/step-00000002/state.ckpt'" in caplog.text


# Best, prune, clean


def test_the_best_is_the_whole_one_with_the_lowest_metric_and_of_equal_ones_the_earlier(
    store, caplog
):
    store.clean()
    assert store.newest_intact() is store.best("val/loss") is None and steps_of(store) == []
    losses = ((1, 3.0), (2, 1.0), (3, 2.0), (4, float("nan")), (20, 2.0), (100, 3.0))
    for step, loss in losses:
        save(store, step, metrics={"val/loss": loss})
    os.utime(store.folder / "step-00000001", (4e9, 4e9))
    assert step_of(store.newest_intact()) == 100  # by step and never by time
    ranking = [step_of(path) for path in store.ranking("val/loss", "max")]
    assert ranking[:4] == [1, 100, 3, 20]
    assert step_of(store.best("val/loss")) == 2
    assert step_of(store.best("val/loss", mode="max")) == 1
    DAMAGES["truncated"](store.folder / "step-00000002")
    assert step_of(store.best("val/loss")) == 3 and store.best("other") is None
    (record,) = caplog.records
    assert record.message.startswith(f"warning: passed over: {store.folder / 'step-00000002'}: ")


def test_prune_keeps_the_newest_and_the_protected(store):
    paths = [save(store, step) for step in range(1, 7)]
    store.prune(2, protect=[paths[0], paths[5]])  # the newest may be the best
    assert steps_of(store) == [1, 5, 6] and len(os.listdir(store.folder)) == 3


# In the background


def test_a_save_in_the_background_is_a_checkpoint_once_it_is_finished_or_the_next_begins(store):
    """`on_commit`, which copies checkpoints to a mirror, is called after each committed save."""
    tensor, steps_seen = weights(1), []
    store.on_commit = lambda: steps_seen.append(steps_of(store))
    store.save(1, {"model": {"w": tensor}}, {"n": [1] * 500}, in_background=True)
    tensor += 1  # the next step
    assert store.unfinished and steps_of(store) == []
    save(store, 2, in_background=True)
    assert steps_of(store) == [1]
    store.set_metrics(2, {"val/loss": 2.0})
    store.finish()
    store.set_metrics(7, {"val/loss": 1.0})  # was never saved
    assert steps_seen == [[1], [1, 2]]
    assert not store.unfinished
    assert holds(store.folder / "step-00000001", 1)
    assert holds(store.newest_intact(), 2)
    for step in (1, 2):
        store.set_metrics(step, {"val/loss": 2.0})
        metrics = verify(store.folder / f"step-{step:08d}").metrics
        assert metrics == {"val/loss": 2.0}
    assert len(steps_seen) == 4


def test_flipped_bits_in_an_unverified_file_raise_one_error(tmp_path):
    torch.save({"w": torch.ones(9), "step": 3}, tmp_path / "x.ckpt")
    good, draw = (tmp_path / "x.ckpt").read_bytes(), random.Random(0)
    for _ in range(200):
        bad = bytearray(good)
        for _ in range(draw.randrange(1, 9)):
            bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        (tmp_path / "x.ckpt").write_bytes(bad)
        with contextlib.suppress(DamagedCheckpointError):
            load_file(tmp_path / "x.ckpt")


def test_torch_and_safetensors_read_the_tensors_of_a_checkpoint(tmp_path):
    """Also empty tensors, numbers, and dtypes whose sizes differ."""
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    more = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.arange(5), "c": torch.zeros(())}
    more |= {"d": torch.tensor([True]), "e": torch.rand(2, 3).T, "f": torch.zeros(0)}
    moments = {f"{n}.{k}": v for n, p in enumerate(optimizer.state.values()) for k, v in p.items()}
    store = CheckpointStore(tmp_path, "a" * 32)
    for step, in_background in enumerate((False, True)):
        tensors = {"model": {**net.state_dict(), **more}, "optimizer": moments}
        store.save(step, tensors, {}, in_background=in_background)
        store.finish()
        path = store.newest_intact()
        assert path.name == f"step-{step:08d}"
        assert {*verify(path).files} == {
            "model.safetensors", "optimizer.safetensors", "state.ckpt"
        }  # fmt: skip
        loaded = read_tensors(path)
        assert loaded.keys() == {*tensors["model"], *moments}
        for kind, saved in tensors.items():
            direct = load_safetensors(path / f"{kind}.safetensors")
            mapped = SavedTensors(path, kind).full()
            for name, tensor in saved.items():
                for read in (loaded, direct, mapped):
                    assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    net.load_state_dict(load_safetensors(path / "model.safetensors"), strict=False)


def test_a_file_that_is_missing_or_of_another_save_is_found(tmp_path):
    net = {"w": torch.ones(4)}
    save_file(net, tmp_path / "model-00001.safetensors", {
        "DCP_SHARDING_INFO": '{"w": {"saved_offsets": [4]}}'
    })  # fmt: skip
    with pytest.raises(DamagedCheckpointError, match="parts of w are missing"):
        SavedTensors(tmp_path)
