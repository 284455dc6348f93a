"""Checkpoints are whole or do not exist: every operation of a save broken, every file damaged."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import random
import shutil
import threading
from pathlib import Path

import pytest

from gptrain.resilience import draft, fileops, manifest
from gptrain.resilience import store as store_module
from gptrain.resilience.draft import NoSpace, SaveFailed
from gptrain.resilience.manifest import DamagedCheckpoint, NoGoodCheckpoint, seal, verify
from gptrain.resilience.store import CheckpointStore

RUN = "a" * 32
FILES = ("state.ckpt", "extra.bin")


def content(step: int, name: str = "state.ckpt", n_bytes: int = 3000) -> bytes:
    return random.Random(f"{step} {name}").randbytes(n_bytes)


def save(store: CheckpointStore, step: int, **about: object) -> Path:
    with store.writing(step, **about) as part:
        for name in FILES:
            with part.open(name) as file:
                file.write(content(step, name)[:100])
                file.write(memoryview(content(step, name))[100:])
    return store.folder / f"step-{step:08d}"


def holds(path: Path, step: int) -> bool:
    return all((path / name).read_bytes() == content(step, name) for name in FILES)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", RUN)


class Killed(BaseException):
    """What SIGKILL is to the file system: nothing after it happens."""


class Wrapped:
    """Stands for `os` in the modules of a save, with other functions in place of some."""

    def __init__(self, functions: dict) -> None:
        vars(self).update(functions)

    def __getattr__(self, name):
        return getattr(os, name)

    def put_into(self, patch: pytest.MonkeyPatch, *more_modules) -> None:
        for module in (draft, fileops, store_module, *more_modules):
            patch.setattr(module, "os", self)
        for name in ("create", "sync_folder"):
            if name in vars(self):
                patch.setattr(fileops, name, getattr(self, name))


def operation_of(name: str):
    return getattr(fileops if name in ("create", "sync_folder") else os, name)


class Shim:
    """Counts the file operations of `os` and breaks the k-th, as the fault campaign does."""

    NAMES = ("statvfs", "mkdir", "create", "write", "fsync", "close", "rename", "unlink", "rmdir")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, self.at, self.fault, self.names = 0, -1, None, []
        wrapped = Wrapped({name: self._broken(name, operation_of(name)) for name in self.NAMES})
        wrapped.put_into(patch, shutil)

    def _broken(self, name, operation):
        def call(*arguments, **options):
            self.count += 1
            self.names.append(name)
            fault = None
            if self.fault is Killed and self.count >= self.at:
                fault = Killed()
            elif self.count == self.at:
                fault = OSError(self.fault, os.strerror(self.fault))
            if fault is None:
                return operation(*arguments, **options)
            if name == "close":  # a descriptor is given back in any case, and may have been
                with contextlib.suppress(OSError):
                    operation(*arguments)
            raise fault

        return call

    def arm(self, at: int, fault: object) -> None:
        self.count, self.at, self.fault, self.names = 0, at, fault, []


@pytest.fixture
def shim(monkeypatch):
    return Shim(monkeypatch)


def operations_of_a_save(shim, store) -> int:
    save(store, 1)
    shim.arm(-1, None)
    save(store, 2)
    return shim.count


def begin_with_one(store, shim) -> None:
    """Leaves the checkpoint of step 1 alone, and no fault armed."""
    shim.arm(-1, None)
    shutil.rmtree(store.folder)
    save(store, 1)


# Whole


def test_a_save_is_found_again_with_what_was_said_about_it(store):
    save(store, 500, config={"model": {"d_model": 32}}, metrics={"val/loss": 2.0})
    found = CheckpointStore(store.folder, RUN).newest_good()
    assert found.path.name == "step-00000500" and holds(found.path, 500)
    assert found.step == 500
    about = found.manifest
    assert (about["kind"], about["world_size"], about["run_id"]) == ("full", 1, RUN)
    assert about["config"] == {"model": {"d_model": 32}}
    assert {name: entry["bytes"] for name, entry in about["files"].items()} == {
        name: 3000 for name in FILES
    }


def test_large_and_many_small_pieces_arrive_as_written(store):
    large = content(1, n_bytes=(9 << 20) + 5)
    with store.writing(1) as draft, draft.open("state.ckpt") as file:
        for start in range(0, 5000, 7):
            file.write(large[start : start + 7])
        file.write(memoryview(large)[file.tell() :])
        assert file.tell() == len(large)
    assert (store.newest_good().path / "state.ckpt").read_bytes() == large


def test_an_empty_folder_has_no_checkpoint_and_that_is_no_error(store):
    assert store.newest_good() is None
    store.clean()
    assert store.steps() == [] and store.best("val/loss") is None


def test_an_exception_in_the_block_leaves_nothing(store):
    save(store, 1)
    with pytest.raises(KeyError), store.writing(2) as draft, draft.open("state.ckpt") as file:
        file.write(b"half")
        raise KeyError
    assert os.listdir(store.folder) == ["step-00000001"]


def test_a_step_saved_twice_holds_the_second_save(store):
    save(store, 1)
    with store.writing(1) as draft, draft.open("state.ckpt") as file:
        file.write(b"second")
    assert (store.newest_good().path / "state.ckpt").read_bytes() == b"second"
    assert os.listdir(store.folder) == ["step-00000001"]


# Broken at every operation


@pytest.mark.parametrize("again", [False, True], ids=["new step", "same step again"])
def test_killed_at_any_operation_the_loader_finds_the_old_or_the_new(store, shim, again):
    n_operations = operations_of_a_save(shim, store) + 5 * again
    for at in range(1, n_operations + 2):
        begin_with_one(store, shim)
        save(store, 2)
        shim.arm(at, Killed)
        with contextlib.suppress(Killed):
            save(store, 2 if again else 3)
        shim.arm(-1, None)
        restarted = CheckpointStore(store.folder, RUN)
        restarted.clean()
        found = restarted.newest_good()
        assert found.step in ((2,) if again else (2, 3))
        assert not any(restarted.folder.glob("*.corrupt"))
        assert holds(found.path, found.step)
        assert all(name.startswith("step-") for name in os.listdir(store.folder))
    assert found.step == (2 if again else 3)  # the last round was not broken at all


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_an_error_of_any_operation_is_one_exception_and_harms_nothing(store, shim, number):
    n_operations = operations_of_a_save(shim, store)
    for at in range(1, n_operations + 1):
        begin_with_one(store, shim)
        shim.arm(at, number)
        with pytest.raises(SaveFailed) as failed:
            save(store, 2)
        broken_name = shim.names[at - 1]
        assert failed.value.errno == number, broken_name
        assert os.strerror(number) in str(failed.value)
        assert failed.value.free is None or failed.value.free > 0
        if broken_name in ("write", "rename"):
            assert failed.value.needed == 2 * 3000
        shim.arm(-1, None)
        # The last operations sync the parent's names (fsync, close): the new one is there, whole.
        steps = [1] if at < n_operations - 1 else [1, 2]
        assert sorted(os.listdir(store.folder)) == [f"step-{step:08d}" for step in steps]
        assert store.newest_good().step == steps[-1] and holds(store.folder / "step-00000001", 1)


class Medium:
    """What a power cut leaves in the worst case: nothing that was not synced.

    A node is a bytearray or a dict of names; `safe` holds what each looked like at its last sync.
    """

    def __init__(self, patch: pytest.MonkeyPatch, root: Path, after_each) -> None:
        self.root, self.tree, self.open_files, self.safe = root, {}, {}, {}
        names = ("mkdir", "create", "write", "rename", "fsync", "sync_folder")
        functions = {name: self._followed(name, operation_of(name), after_each) for name in names}
        Wrapped(functions).put_into(patch)

    def _followed(self, name, operation, after_each):
        def call(*arguments):
            result = operation(*arguments)
            getattr(self, name)(*arguments, result)
            after_each()
            return result

        return call

    def _node(self, path: Path):
        node = self.tree
        for part in path.relative_to(self.root).parts:
            node = node[part]
        return node

    def mkdir(self, path, _):
        self._node(path.parent)[path.name] = {}

    def create(self, path, descriptor):
        self.open_files[descriptor] = self._node(path.parent)[path.name] = bytearray()

    def write(self, descriptor, data, n_bytes):
        self.open_files[descriptor] += data[:n_bytes]

    def fsync(self, descriptor, _):
        if (node := self.open_files.get(descriptor)) is not None:  # else a folder
            self.safe[id(node)] = bytes(node)

    def sync_folder(self, path, _):
        node = self._node(path)
        self.safe[id(node)] = dict(node)

    def rename(self, source, target, _):
        self._node(target.parent)[target.name] = self._node(source.parent).pop(source.name)

    def put_back(self, target: Path, node=None) -> None:
        """The file system as the next start finds it."""
        node = self.tree if node is None else node
        safe = self.safe.get(id(node), type(node)())
        if isinstance(safe, dict):
            target.mkdir()
            for name, entry in safe.items():
                self.put_back(target / name, entry)
        else:
            target.write_bytes(safe)


def test_a_power_cut_after_any_operation_leaves_the_old_or_the_new(tmp_path, monkeypatch):
    found_steps, before = [], tmp_path / "before"
    before.mkdir()

    def cut_the_power():
        after = tmp_path / "after"
        shutil.rmtree(after, ignore_errors=True)
        medium.put_back(after)
        restarted = CheckpointStore(after / "checkpoints", RUN)
        restarted.clean()
        found = restarted.newest_good()
        found_steps.append(found.step if found else 0)
        assert found is None or holds(found.path, found.step)
        assert not any(restarted.folder.glob("*.corrupt"))

    with monkeypatch.context() as patch:
        medium = Medium(patch, before, cut_the_power)
        for step in (1, 2, 3):
            save(CheckpointStore(before / "checkpoints", RUN), step)
            assert found_steps[-1] == step  # a save that has returned survives
    assert found_steps == sorted(found_steps) and len(found_steps) > 30


def test_a_file_larger_than_the_limit_of_the_process_is_the_same_error(store):
    resource = pytest.importorskip("resource")
    save(store, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(SaveFailed) as failed:
            save(store, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failed.value.errno == errno.EFBIG
    assert os.listdir(store.folder) == ["step-00000001"]
    assert str(failed.value).endswith("earlier checkpoints are intact")
    shutil.rmtree(store.folder)
    assert str(failed.value).endswith("the folder is gone")


def test_too_little_space_is_found_out_before_anything_is_written(store):
    with pytest.raises(NoSpace) as short:
        store.check_space(1 << 60)
    assert (short.value.needed, short.value.path) == (1 << 60, store.folder)
    assert 0 < short.value.free < 1 << 60
    with pytest.raises(SaveFailed, match="ENOSPC"):
        save(store, 1, needed_bytes=1 << 60)
    store.check_space(1)
    assert not store.folder.exists()


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
        with pytest.raises(DamagedCheckpoint, match=victim.name):
            verify(path)
        victim.write_bytes(good)
    verify(path)


def damage(path: Path, how: str) -> None:
    state = path / "state.ckpt"
    if how == "truncated":
        os.truncate(state, 1000)
    elif how == "empty":
        os.truncate(state, 0)
    elif how == "missing":
        state.unlink()
    elif how == "swapped":
        other = state.with_name("extra.bin")
        one, two = state.read_bytes(), other.read_bytes()
        state.write_bytes(two), other.write_bytes(one)
    elif how == "no manifest":
        (path / "manifest.json").unlink()
    elif how == "torn manifest":
        os.truncate(path / "manifest.json", 50)
    elif how == "renamed":
        os.rename(path.parent / "step-00000001", path.parent / "gone")
        os.rename(path, path.parent / "step-00000009")
        os.rename(path.parent / "gone", path.parent / "step-00000001")


DAMAGES = ["truncated", "empty", "missing", "swapped", "no manifest", "torn manifest", "renamed"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_newest_is_set_aside_and_the_one_before_is_used(store, caplog, how):
    save(store, 1)
    damage(save(store, 2), how)
    with caplog.at_level(logging.WARNING):
        found = store.newest_good()
    assert found.step == 1
    (aside,) = store.folder.glob("*.corrupt")  # set aside, not deleted
    assert f"set aside as {aside.name}" in caplog.text
    caplog.clear()
    assert store.newest_good().step == 1 and not caplog.text


def test_a_network_file_system_that_is_away_is_an_error_and_no_damage(store, monkeypatch):
    for step in (1, 2):
        save(store, step)

    def stale(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    for name in ("read_bytes", "open_regular"):
        with monkeypatch.context() as patch:
            patch.setattr(manifest, name, stale)
            with pytest.raises(OSError, match="Stale"):
                store.newest_good()
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", stale)
        with pytest.raises(OSError, match="Stale"):
            store.newest_good()  # not None, which would be a start from the beginning
    assert store.newest_good().step == 2


def test_two_damaged_saves_of_one_step_are_both_kept_for_a_person(store):
    save(store, 1)
    for _ in range(2):
        damage(save(store, 2), "missing")
        store.newest_good()
    assert sorted(os.listdir(store.folder)) == [
        "step-00000001",
        "step-00000002.corrupt",
        "step-00000002.corrupt-2",
    ]


def test_if_none_is_good_every_start_stops_and_lists_each_with_its_reason(store):
    damage(save(store, 1), "truncated")
    damage(save(store, 2), "missing")
    for _ in range(2):  # the second start must not begin from scratch either
        with pytest.raises(NoGoodCheckpoint) as stop:
            store.newest_good()
        assert "step-00000001: state.ckpt has 1000 bytes" in str(stop.value)
        assert "step-00000002: state.ckpt is missing" in str(stop.value)


def test_what_an_earlier_start_set_aside_still_counts_as_a_checkpoint(store):
    good = save(store, 1)
    damage(save(store, 2), "missing")
    store.newest_good()
    shutil.rmtree(good)
    with pytest.raises(NoGoodCheckpoint, match=r"step-00000002\.corrupt: found damaged before"):
        store.newest_good()


def test_a_checkpoint_of_another_run_is_refused(store, tmp_path, caplog):
    save(store, 1)
    foreign = save(CheckpointStore(tmp_path / "other", "b" * 32), 2)
    shutil.copytree(foreign, store.folder / foreign.name)
    with caplog.at_level(logging.WARNING):
        assert store.newest_good().step == 1
    assert "another run" in caplog.text
    forge(store.folder / f"{foreign.name}.corrupt", run_id="b" * 10_000)
    with pytest.raises(DamagedCheckpoint, match=r"another run \(b{40}, this is"):
        store.verify(store.folder / f"{foreign.name}.corrupt")


def test_order_is_by_step_and_never_by_time(store):
    for step in (100, 20, 3):
        os.utime(save(store, step), (4e9, 4e9) if step == 3 else (0, 0))
    assert store.newest_good().step == 100


# Made by somebody else


def forge(path: Path, **entries: object) -> None:
    """Seals another manifest."""
    manifest = json.loads((path / "manifest.json").read_bytes()) | entries
    (path / "manifest.json").write_bytes(seal(manifest))


ENTRY = {"bytes": 3000, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "entries",
    [
        {"step": "2"}, {"step": -1}, {"step": 2**70}, {"step": True}, {"run_id": None},
        {"files": []}, {"files": {"state.ckpt": {}}}, {"files": {"state.ckpt": None}},
        {"files": {"../secret": ENTRY}}, {"files": {"/etc/passwd": ENTRY}},
        {"files": {"..": ENTRY}}, {"files": {"a\0b": ENTRY}},
        {"files": {"a" * 256: ENTRY}},
        {"files": {"state.ckpt": {"bytes": "3000", "sha256": "0"}}},
        {"files": {"state.ckpt": {"bytes": True, "sha256": "0"}}},
        {"metrics": {"val/loss": "low"}}, {"metrics": {"val/loss": []}}, {"config": 5},
    ],
)  # fmt: skip
def test_a_manifest_of_another_shape_is_damaged(store, entries):
    path = save(store, 2)
    forge(path, **entries)
    with pytest.raises(DamagedCheckpoint, match="none of ours"):
        verify(path)
    assert store.best("val/loss") is None


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900, b"[]", b"1"])
def test_a_manifest_that_is_nested_deeply_or_no_manifest_is_damaged(store, text):
    path = save(store, 2)
    (path / "manifest.json").write_bytes(text)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
        verify(path)


@pytest.mark.parametrize("name", ["manifest.json", "state.ckpt"])
def test_a_pipe_or_a_device_in_place_of_a_file_is_damage_and_no_wait(store, name):
    path = save(store, 2)
    empty = hashlib.sha256(b"").hexdigest()
    forge(path, files={"state.ckpt": {"bytes": 0, "sha256": empty}})
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(DamagedCheckpoint, match=f"{name}.* not a regular file"):
        verify(path)
    (path / name).unlink()
    (path / name).symlink_to("/dev/zero")
    with pytest.raises(DamagedCheckpoint, match=f"{name}.* not a regular file"):
        verify(path)


@pytest.mark.parametrize("kind", ["trash", "draft", "old"])
def test_of_a_hidden_link_only_the_link_is_removed(store, tmp_path, kind):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("content")
    save(store, 1)
    (store.folder / f".{kind}-step-00000001").symlink_to(victim)
    store.clean()
    assert os.listdir(store.folder) == ["step-00000001"]
    (store.folder / ".draft-step-00000002").symlink_to(victim)
    save(store, 2)
    assert (victim / "file").read_text() == "content"


# Best, prune, clean


def test_the_best_is_the_whole_one_with_the_lowest_metric(store):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, float("nan"))):
        save(store, step, metrics={"val/loss": loss})
    save(store, 5)
    assert store.best("val/loss").step == 2
    assert store.best("val/loss", mode="max").step == 1
    damage(store.folder / "step-00000002", "truncated")
    store = CheckpointStore(store.folder, RUN)  # a later start: one process reads a file once
    assert store.best("val/loss").step == 3
    assert store.best("other") is None


def test_prune_keeps_the_newest_and_the_protected(store):
    paths = [save(store, step) for step in range(1, 7)]
    store.prune(2, protect=[paths[0]])
    assert store.steps() == [1, 5, 6] and len(os.listdir(store.folder)) == 3


def test_killed_while_pruning_leaves_no_half_checkpoint(store, shim):
    save(store, 0)
    for at in range(1, 10):
        shim.arm(-1, None)
        shutil.rmtree(store.folder)
        for step in (1, 2, 3):
            save(store, step)
        shim.arm(at, Killed)
        with contextlib.suppress(Killed):
            store.prune(2)
        shim.arm(-1, None)
        restarted = CheckpointStore(store.folder, RUN)
        restarted.clean()
        for step in restarted.steps():
            restarted.verify(store.folder / f"step-{step:08d}")
        assert restarted.steps() in ([1, 2, 3], [2, 3])


# In the background


def test_a_save_in_the_background_is_a_checkpoint_once_it_is_finished(store):
    weights = bytearray(b"before")
    with store.writing(1, in_background=True) as draft, draft.open("state.ckpt") as file:
        file.write(weights)
    weights[:] = b"after!"  # the next step
    assert store.is_unfinished and store.steps() == []
    store.finish()
    assert not store.is_unfinished and not store.is_writing
    assert (store.newest_good().path / "state.ckpt").read_bytes() == b"before"


def test_the_next_save_waits_for_the_one_in_the_background(store):
    save(store, 1, in_background=True)
    save(store, 2, in_background=True)
    assert store.steps() == [1]
    store.finish()
    assert holds(store.folder / "step-00000001", 1) and holds(store.folder / "step-00000002", 2)


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, Killed])
def test_whatever_fails_in_the_background_the_loader_finds_the_old_or_the_new(store, shim, fault):
    n_operations = operations_of_a_save(shim, store)
    for at in range(1, n_operations + 1):
        begin_with_one(store, shim)
        shim.arm(at, fault)
        error = None
        try:
            save(store, 2, in_background=True)
            store.finish()
        except (SaveFailed, Killed) as failure:
            error = failure
        assert isinstance(error, Killed if fault is Killed else SaveFailed), shim.names[at - 1]
        shim.arm(-1, None)
        restarted = CheckpointStore(store.folder, RUN)
        restarted.clean()
        found = restarted.newest_good()
        assert found.step in (1, 2) and holds(found.path, found.step)


# Several ranks


class Ranks:
    """all_gather_object among threads."""

    def __init__(self, world_size: int) -> None:
        self.values = [None] * world_size
        self.barrier = threading.Barrier(world_size)

    def gather(self, rank: int):
        def gather(value: object) -> list:
            self.values[rank] = value
            self.barrier.wait(10)
            values = list(self.values)
            self.barrier.wait(10)
            return values

        return gather


def full(path: Path, content: memoryview) -> dict:
    raise OSError(errno.ENOSPC, "full")


def save_sharded(
    store: CheckpointStore, step: int, bad_rank: int | None = None, in_background: bool = False
) -> list:
    ranks, answers = Ranks(2), [None, None]

    def one(rank: int) -> None:
        own = CheckpointStore(store.folder, RUN)
        about = {"kind": "sharded", "rank": rank, "gather": ranks.gather(rank)}
        try:
            with own.writing(step, **about, in_background=in_background) as draft:
                with draft.open(f"__{rank}_0.distcp") as file:
                    file.write(content(step, str(rank)))
                if rank == bad_rank:
                    draft._write_file = full
            own.finish()
        except SaveFailed as error:
            answers[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers


def test_ranks_write_their_shards_into_one_checkpoint(store):
    assert save_sharded(store, 1) == [None, None]
    found = store.newest_good()
    assert (found.manifest["kind"], found.manifest["world_size"]) == ("sharded", 2)
    assert list(found.manifest["files"]) == ["__0_0.distcp", "__1_0.distcp"]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_failure_of_one_rank_is_the_same_exception_on_all(store, bad_rank, in_background):
    assert save_sharded(store, 1, in_background=in_background) == [None, None]
    answers = save_sharded(store, 2, bad_rank, in_background)
    assert [(error.errno, error.rank) for error in answers] == [(errno.ENOSPC, bad_rank)] * 2
    assert os.listdir(store.folder) == ["step-00000001"]


def test_progress_is_told_while_bytes_are_written_and_read(tmp_path):
    beats = []
    store = CheckpointStore(tmp_path, RUN, progress=lambda: beats.append(1))
    save(store, 1)
    n_written = len(beats)
    store.newest_good()
    assert n_written >= 2 and len(beats) >= n_written + 2
