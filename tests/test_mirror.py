"""checkpoint.mirror: each checkpoint is copied, and a run resumes from the copy alone."""

import os
import shutil
from pathlib import Path
from unittest.mock import patch

import fsspec
import pytest

from gptrain.checkpoints.manifest import DamagedCheckpointError, read_manifest
from gptrain.checkpoints.mirror import Mirror
from gptrain.checkpoints.store import CheckpointStore
from gptrain.checkpoints.tensors import load_file
from tests.run import same

SAVES = (
    "trainer.max_steps=6", "trainer.val_check_interval=2", "checkpoint.every_n_steps=1",
    "model.dropout=0.1", "logger=none", "trainer.log_every_n_steps=1",
)  # fmt: skip


OBJECT_STORE = ("s3fs", "moto", "flask_cors")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*")}


@pytest.fixture(scope="module")
def s3():
    """A bucket of a server in this process."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    place = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with patch.dict(os.environ, place | keys):
        boto3.client("s3").create_bucket(Bucket="runs")
        yield "s3://runs/a"
    server.stop()


@pytest.mark.parametrize(
    "kind",
    ["folder", pytest.param("s3", marks=[pytest.mark.slow, pytest.mark.engine(*OBJECT_STORE)])],
)
def test_a_run_goes_on_from_the_mirror_alone(train, tmp_path, kind, request):
    """The folder is lost after step 4: a run in a new one ends in the same bits."""
    mirror = request.getfixturevalue("s3") if kind == "s3" else f"file://{tmp_path}/mirror"
    words = (*SAVES, "checkpoint.keep=9", f"checkpoint.mirror={mirror}")
    whole = train(*words, name="whole")
    assert whole.code == 0, whole.err
    state, losses = whole.state(), whole.column("train/loss")
    shutil.rmtree(whole.folder)
    files, root = fsspec.url_to_fs(mirror)
    for step in (5, 6):
        files.rm(f"{root}/step-{step:08d}", recursive=True)
    again = train(*words, "ckpt_path=last", name="again")
    assert again.code == 0 and "from step 4" in again.out, again.err
    assert again.column("train/loss") == losses[4:] and len(losses) == 6
    assert not same(again.state()["weights"], state["weights"])


def test_the_mirror_holds_what_the_run_folder_holds_and_is_refused_to_another_run(train, tmp_path):
    """Old ones go there, too; a step that is saved again after its validation is copied again."""
    mirror = tmp_path / "mirror"
    words = (*SAVES, f"checkpoint.mirror={mirror}")
    run = train(*words)
    assert run.code == 0, run.err
    assert names(mirror) == {path.name for path in run.checkpoints} and len(names(mirror)) <= 3
    first, second = (read_manifest(path).metrics for path in run.checkpoints[-2:])
    assert first == {} and second["val/loss"] > 0  # validated are steps 2, 4 and 6
    for path in run.folder.glob("checkpoints/*/*"):
        copy = mirror / path.relative_to(run.folder / "checkpoints")
        assert copy.read_bytes() == path.read_bytes()
    shutil.rmtree(mirror / "step-00000006")  # the start was killed before this copy
    again = train(*words, "ckpt_path=last")  # no step is left
    assert again.code == 0 and "step-00000006" in names(mirror), again.err
    before = {path: path.stat().st_mtime_ns for path in mirror.rglob("*")}
    other = train(*words, name="other")
    hint = "holds another run; try: ckpt_path=last in a new run_dir to resume that run"
    assert other.code == 73 and hint in other.err
    assert before == {path: path.stat().st_mtime_ns for path in mirror.rglob("*")}


def save(store: CheckpointStore, content: bytes, step: int = 1) -> None:
    store.set_aside_after(step - 1)  # the run has gone back
    store.save(step, {}, content)


def damage(file: Path) -> None:
    """Change one byte of a file."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def copy(store: CheckpointStore, mirror: Mirror) -> None:
    mirror.update(store).result()


@pytest.fixture
def pair(tmp_path) -> tuple[CheckpointStore, Mirror]:
    return CheckpointStore(tmp_path / "run", "a"), Mirror(str(tmp_path / "mirror"))


def test_a_step_that_is_saved_again_while_it_is_copied_is_copied_again(pair, tmp_path, monkeypatch):
    store, mirror = pair
    save(store, b"first")
    put_file = mirror.files.put_file

    def put_file_late(*paths):
        save(store, b"second")
        put_file(*paths)

    monkeypatch.setattr(mirror.files, "put_file", put_file_late)
    copy(store, mirror)
    monkeypatch.undo()
    copy(store, mirror)
    again = CheckpointStore(tmp_path / "again", "a")
    mirror.restore(again)
    assert load_file(again.newest_intact() / "state.ckpt") == b"second"


def test_a_copy_cut_off_while_a_step_is_copied_again_counts_as_unfinished(
    pair, tmp_path, monkeypatch
):
    """The manifest of the first copy goes before the first file of the second one arrives."""
    store, mirror = pair
    save(store, b"first")
    copy(store, mirror)
    save(store, b"second")

    def lose_the_connection(*_):
        raise OSError("the network is away")

    monkeypatch.setattr(mirror.files, "put_file", lose_the_connection)
    copy(store, mirror)
    assert names(tmp_path / "mirror" / "step-00000001") == {"state.ckpt"}
    (tmp_path / "mirror" / "step-00000001" / "manifest.json").write_text("damaged")
    copy(store, mirror)
    assert names(tmp_path / "mirror" / "step-00000001") == {"state.ckpt"}
    again = CheckpointStore(tmp_path / "again", "a")
    mirror.restore(again)  # a damaged copy would be an error here
    assert again.paths() == []


def test_only_files_that_the_manifest_names_are_fetched_from_an_untrusted_mirror(tmp_path):
    """Keys of an object store are any text, and a folder there may hold whatever somebody put."""
    store, mirror = CheckpointStore(tmp_path / "run", "a"), Mirror("memory://strangers")
    save(store, b"state")
    copy(store, mirror)
    for name in ("more", "../../../victim"):
        mirror.files.store[f"{mirror.root}/step-00000001/{name}"] = mirror.files.open(
            f"{mirror.root}/step-00000001/state.ckpt"
        )
    (tmp_path / "deep").mkdir()
    again = CheckpointStore(tmp_path / "deep" / "again", "a")
    mirror.restore(again)
    assert sorted(path.name for path in again.newest().iterdir()) == ["manifest.json", "state.ckpt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "run"]


def test_a_damaged_or_unfinished_copy_is_not_used_and_without_a_whole_copy_the_run_stops(
    pair, tmp_path, caplog
):
    store, mirror = pair
    for step in (1, 2, 3, 4):
        save(store, b"state", step)
    copy(store, mirror)
    (tmp_path / "mirror" / "step-00000004" / "manifest.json").unlink()
    os.mkfifo(tmp_path / "mirror" / "step-00000004" / "manifest.json")  # would wait for a writer
    (tmp_path / "mirror" / "step-00000003" / "manifest.json").write_bytes(b"other")
    damage(tmp_path / "mirror" / "step-00000002" / "state.ckpt")
    of_another_run = CheckpointStore(tmp_path / "another", "b")
    save(of_another_run, b"state", 5)
    (tmp_path / "another" / "step-00000005").rename(tmp_path / "mirror" / "step-00000005")
    again = CheckpointStore(tmp_path / "again", "a")
    mirror.restore(again)
    assert again.newest_intact() == again.newest() == again.folder / "step-00000001"
    assert "/step-00000005: belongs to another run (b)" in caplog.text
    assert "/step-00000002: state.ckpt is damaged (sha256)" in caplog.text
    assert "/step-00000003: manifest.json is damaged" in caplog.text
    copy(again, mirror)  # the run repeats these steps, and copies them again
    assert names(tmp_path / "mirror") == {"step-00000001", "step-00000004"}
    damage(tmp_path / "mirror" / "step-00000001" / "state.ckpt")
    third = CheckpointStore(tmp_path / "third", "a")
    with pytest.raises(DamagedCheckpointError, match="no checkpoint is intact"):
        mirror.restore(third)
    with pytest.raises(DamagedCheckpointError):  # the second start must not begin from scratch
        third.newest_intact()


def test_copies_of_steps_before_which_the_run_went_back_are_removed(pair, tmp_path):
    store, mirror = pair
    for step in (1, 2, 3):
        save(store, b"state", step)
    copy(store, mirror)
    store.set_aside_after(2, "damaged")  # the copy may be intact
    store.set_aside_after(1)
    copy(store, mirror)
    assert names(tmp_path / "mirror") == {"step-00000001", "step-00000003"}


def test_a_restore_that_is_cut_off_leaves_nothing_so_that_no_copy_is_lost_later(pair, tmp_path):
    store, mirror = pair
    for step in (1, 2):
        save(store, b"state", step)
    copy(store, mirror)
    again = CheckpointStore(tmp_path / "again", "a")
    (again.folder / ".draft-step-00000001").mkdir(parents=True)
    with pytest.raises(FileExistsError):  # when the copy of step 2 is complete
        mirror.restore(again)
    assert again.paths() == []


def test_only_the_own_copies_are_removed(tmp_path):
    """The name of a mirror may be a pattern that another one matches."""
    store, other = CheckpointStore(tmp_path / "run", "a"), CheckpointStore(tmp_path / "other", "b")
    mirrors = [Mirror(f"memory://{name}") for name in ("run[1]", "run1")]
    for step in (1, 2):
        save(store, b"state", step)
        for mirror in mirrors:
            copy(store, mirror)
    save(other, b"state", 3)  # of a run that has begun at the same time
    copy(other, mirrors[1])
    store.prune(1)
    copy(store, mirrors[0])
    left = [{Path(path).name for path in m.files.ls(m.root, detail=False)} for m in mirrors]
    assert left == [{"step-00000002"}, {"step-00000001", "step-00000002"}]


def test_a_mirror_that_fails_on_the_way_is_a_warning(pair, tmp_path, caplog):
    store, mirror = pair
    (tmp_path / "mirror").write_text("no folder")
    save(store, b"whole")
    copy(store, mirror)
    assert caplog.text.count("warning: checkpoint.mirror=") == 1
    assert "own checkpoints are intact" in caplog.text and store.newest_intact() == store.newest()
