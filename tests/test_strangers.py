"""Somebody else's run folder, checkpoint, weights, tokens: nothing of it runs, nothing is harmed.

Each attack goes in where a user would let it in. Afterwards no payload has run, the victim's files
are as they were, the answer came in time, and was one of our own refusals.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import signal
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml

import gptrain
from gptrain.assemble.weights import load_weights
from gptrain.config import ConfigError
from gptrain.data import DataError
from gptrain.models import SimpleGPT
from gptrain.resilience.manifest import DamagedCheckpoint, NoGoodCheckpoint, read_manifest, seal
from gptrain.resilience.store import CheckpointStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
REFUSALS = (ConfigError, DamagedCheckpoint, NoGoodCheckpoint, DataError, FileNotFoundError)
IN_TIME_S, RUN_S = 10, 120  # an answer; a run of a few steps on a loaded machine
SIZES = {"vocab_size": 256, "d_model": 4, "n_heads": 1, "n_layers": 1, "max_seq_len": 32,
         "dropout": 0.0, "activation": "gelu"}  # fmt: skip
MODEL = {"_target_": "gptrain.models.SimpleGPT", **SIZES}
DEEP = 100_000


class Payload:
    """Leaves a mark when it is unpickled freely."""

    def __reduce__(self):
        return os.system, (f"touch {os.environ['MARK']}",)


class Hung(BaseException):
    """No answer in time; no Exception, which somebody could catch."""


@contextmanager
def in_time(seconds: int = IN_TIME_S):
    def ring(*_):
        raise Hung(f"no answer in {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def hashes(folder: Path) -> dict[str, tuple]:
    return {
        str(path): (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in [folder, *sorted(folder.rglob("*"))]
    }


@pytest.fixture(autouse=True)
def world(tmp_path, monkeypatch) -> Path:
    """A folder with a victim's files and armed payloads; afterwards nothing has run or changed."""
    mark, victim = tmp_path / "ran", tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    monkeypatch.setenv("MARK", str(mark))
    torch.save(Payload(), tmp_path / "evil.pt")
    code = "import os\nos.system('touch $MARK')\nfrom torch import nn\nclass Net(nn.Module): ...\n"
    for name in ("evilpkg.py", "hubconf.py", "sitecustomize.py", "old/__init__.py", "old/evil.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("BROWSER", "touch $MARK %s")
    before = hashes(victim)
    yield tmp_path
    assert not mark.exists() and hashes(victim) == before


def refused(call: Callable[[], object]) -> str:
    """The one line of a refusal that came in time."""
    with in_time(), pytest.raises(REFUSALS) as caught:
        call()
    lines = str(caught.value).splitlines()
    assert len(lines) <= 3 and all(len(line) < 1000 for line in lines), lines
    return lines[0]


def test_the_payloads_are_armed(world):
    torch.load(world / "evil.pt", weights_only=False)
    (world / "ran").unlink()


# A. An old run's overrides, through from_run

EVAL = r"'\${oc.create:\"{_target_: torch.load, weights_only: false, f: evil.pt}\"}'"
HUB = r"'\${oc.create:\"{_target_: torch.hub.load, source: local, repo_or_dir: ., model: x}\"}'"
PIPES = "{_target_: torch.utils.data.datapipes.iter.FileOpener, datapipe: [pipe]}"
OVERRIDES = {
    "e01": [f"data.train.seed={EVAL}"],
    "e02": [f"data.train.seed={HUB}"],
    "unescaped": [f"data.train.seed={EVAL}".replace("\\$", "$")],
    "d01": ["+callbacks.x={_target_: os.system, command: touch $MARK}"],
    "d02": ["+callbacks.x={_target_: torch.os.system, command: touch $MARK}"],
    "e03": ["model={_target_: torch.load, f: evil.pt, weights_only: false}"],
    "g01b": ["allowed_targets=[distutils]", "+data.test={_target_: distutils.spawn.spawn}"],
    "g10": ["allowed_targets=[antigravity]", "model._target_=antigravity.fly"],
    "f06": ["allowed_targets=[evilpkg]", "model._target_=evilpkg.Net"],
    "own": ["model._target_=old.evil.Net"],
    "g06": ["+data.test={_target_: gptrain.resilience.fileops.remove_tree, path: victim}"],
    "write": ["+data.test={_target_: gptrain.export.files.write_json, path: victim/kept}"],
    "g05": ["model=evil", "hydra.searchpath=[file://.]"],
    "file": ["+experiment=../../old/evil"],
    "web": ["+data.test={_target_: lightning.pytorch.demos.transformer.WikiText2}"],
    "datapipe": [f"+data.test={{_target_: torch.utils.data.ConcatDataset, datasets: {PIPES}}}"],
    "dirpath": ["+callbacks.x={_target_: lightning.pytorch.callbacks.ModelCheckpoint, "
                "dirpath: victim, every_n_train_steps: 1}"],
    "nested": ["+callbacks.x={_target_: torch.nn.Identity, y: {_target_: torch.load}}"],
    "indirect": ["+model.y={_target_: os.system}", "data.test=${model.y}"],
    "sweep": ["seed=1,2"],
    "doubling": ["+data.a0=xxxxxxxxxx", *(f"+data.a{i}=${{data.a{i - 1}}}${{data.a{i - 1}}}"
                                          for i in range(1, 40))],
    "key": ["+data.train.${oc.env:HOME}=1"],
}  # fmt: skip


@pytest.fixture
def old(world) -> Callable[[object], str]:
    """Writes .hydra/overrides.yaml of a stranger's run; the word that takes it up."""

    def write(content: object) -> str:
        (world / "old" / ".hydra").mkdir()
        path = world / "old" / ".hydra" / "overrides.yaml"
        if content == "pipe":
            os.mkfifo(path)
        elif str(content).startswith("/dev"):
            path.symlink_to(content)
        else:
            path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return f"from_run={world / 'old'}"

    return write


@pytest.mark.parametrize("attack", OVERRIDES)
def test_an_old_runs_overrides_are_data(attack, old, train):
    word = old(OVERRIDES[attack])
    with in_time(RUN_S):
        run = train(word, "trainer.fast_dev_run=true", tiny=False)
    assert run.code in (2, 65) and "Traceback" not in run.err, run.err
    assert run.err.startswith("error: ") and not run.folder.exists()


UNREADABLE = {
    "pipe": "pipe", "device": "/dev/zero", "mapping": "a: b", "numbers": "[1, 2]", "torn": "- [x",
    "deep": "[" * DEEP, "aliases": "- &a [x]\n- [*a, *a]", "tag": "!!python/object/apply:os.getcwd",
    "bytes": "\x00\x01", "many": "- seed=1\n" * 200_000,
}  # fmt: skip


@pytest.mark.parametrize("attack", UNREADABLE)
def test_overrides_that_cannot_be_read_are_refused_and_not_trained_as_the_default(
    attack, old, train
):
    word = old(UNREADABLE[attack])
    with in_time():
        run = train(word, "trainer.fast_dev_run=true")
    assert run.code == 65 and run.err.count("\n") == 1, run.err
    assert not run.folder.exists()


def test_what_an_old_run_says_of_hydra_and_its_folders_is_not_taken(world, old, train):
    victim = world / "victim"
    word = old([
        f"hydra.job.env_set.PYTHONPATH={world}", f"hydra.run.dir={victim}/run",
        f"hydra.job_logging.handlers.file.filename={victim}/kept", f"output_dir={victim}",
        "+hydra.callbacks.x={_target_: os.system}", "+logger.x={_target_: os.system}",
        "profiler={_target_: os.system}", f"run_dir={victim}/x", "hydra/launcher=submitit_slurm",
        f"+data.cache_dir={victim}/cache",
        "hydra.mode=MULTIRUN", "seed=7",
    ])  # fmt: skip
    with in_time(RUN_S):
        run = train(word, "trainer.fast_dev_run=true")
    assert run.code == 0, run.err
    assert "PYTHONPATH" not in os.environ or str(world) not in os.environ["PYTHONPATH"]
    assert "seed: 7" in (run.folder / ".hydra" / "config.yaml").read_text()


def test_an_export_takes_no_right_from_the_old_run(old, monkeypatch, capfd):
    from gptrain.export.command import main

    word = old(["allowed_targets=[antigravity]", "model._target_=antigravity.fly"])
    monkeypatch.setattr("sys.argv", ["export", word])
    with in_time(), pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2 and capfd.readouterr().err.startswith("error: from_run=")


# B. gptrain.load of a folder


def create(target: str) -> str:
    return "${oc.create:'" + target + "'}"


EVIL = "{_target_: torch.load, weights_only: false, f: evil.pt}"
IDENTITY = "torch.nn.Identity"
CONFIGS = {
    "f01": {"model": {"_target_": "os.system", "command": "touch $MARK"}},
    "f02": {"model": {"_target_": IDENTITY, "x": {"_target_": "torch.load", "f": "evil.pt"}}},
    "f03": {"model": {"_target_": IDENTITY, "x": create(EVIL)}},
    "f04": {"model": {"_target_": IDENTITY, "x": "${oc.decode:${s}}"}, "s": EVIL},
    "f04b": {"model": {"_target_": IDENTITY, "x": "${oc.create:${s}}"}, "s": EVIL},
    "f05": {"model": "${evil}", "evil": {"_target_": "os.system", "command": "touch $MARK"}},
    "f05b": {"model": {"_target_": "${s}", "f": "evil.pt", "weights_only": False},
             "s": "torch.load"},
    "f06": {"model": {"_target_": "evilpkg.Net"}, "allowed_targets": ["evilpkg"]},
    "f07": {"model": {"_target_": "antigravity.fly"}, "allowed_targets": ["antigravity"]},
    "f08": {"model": {"_target_": "torchmetrics.image.fid.FrechetInceptionDistance"}},
    "f09": {"model": {"_target_": "torchmetrics.text.BERTScore", "model_name_or_path": "x/y"}},
    "f14": {"model": {"_target_": IDENTITY, "x": "${oc.env:HOME}"}},
    "own": {"model": {"_target_": "old.evil.Net"}},
    "method": {"model": {"_target_": "gptrain.models.SimpleGPT.__init__"}},
    "loader": {"model": {"_target_": "lightning.pytorch.LightningModule.load_from_checkpoint"}},
    "list": [1, 2], "no model": {"seed": 1}, "model is a list": {"model": [1]},
    "no target": {"model": {"d_model": 4}},
    "f10": {"model": MODEL | {"d_model": 10**9}},
    "huge": {"model": MODEL | {"d_model": 10**30}},
    "wrong": {"model": MODEL | {"d_model": "many"}},
    "argument": {"model": MODEL | {"nosuch": 1}},
    "monitor": {"model": MODEL, "checkpoint": {"monitor": [1], "mode": "sideways"}} | {
        "seed": create(EVIL)},
    "f12": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{b}: &{b} [*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a}]\n"
        for a, b in zip("abcdefghi", "bcdefghij", strict=True)) + "model: {_target_: x, y: *j}\n",
    "f13": "model: !!python/object/apply:os.system ['touch $MARK']\n",
    "f15": "model: " + "[" * DEEP,
    "f15b": "model: {_target_: torch.nn.Identity, x: " + "[" * 150 + "]" * 150 + "}",
    "doubling": "a0: xxxxxxxxxx\n" + "".join(f"a{i}: ${{a{i - 1}}}${{a{i - 1}}}\n"
                for i in range(1, 40)) + "model: {_target_: torch.nn.Identity, x: '${a39}'}\n",
    "relative": "a0: {v: xxxxxxxxxx}\n" + "".join(
        f"a{i}: {{v: ['${{..a{i - 1}.v}}', '${{..a{i - 1}.v}}']}}\n" for i in range(1, 40))
        + "model: {_target_: torch.nn.Identity, x: '${a39}'}\n",
    "loop": {"model": {"_target_": IDENTITY, "x": "${model.y}", "y": "${model.x}"}},
}  # fmt: skip


def plant(folder: Path, state: object = None, step: int = 1, **changes: object) -> Path:
    """A sealed checkpoint whose file holds a state (or these bytes); entries of its manifest."""
    store = CheckpointStore(folder / "checkpoints", "run")
    folder.mkdir(exist_ok=True)
    with store.writing(step) as draft, draft.open("state.ckpt") as file:
        if isinstance(state, bytes):
            file.write(state)
        else:
            torch.save({"state_dict": SimpleGPT(**SIZES).state_dict()} if state is None else state,
                       file)  # fmt: skip
    path = store.newest()
    (path / "manifest.json").write_bytes(seal(read_manifest(path) | changes))
    return path


def config(folder: Path, content: object) -> Path:
    (folder / ".hydra").mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else yaml.safe_dump(content)
    (folder / ".hydra" / "config.yaml").write_text(text)
    return folder


def test_a_run_as_it_should_be_loads(world):
    plant(world / "old")
    assert isinstance(gptrain.load(config(world / "old", {"model": MODEL})), SimpleGPT)


@pytest.mark.parametrize("attack", CONFIGS)
def test_the_config_of_a_folder_is_data(attack, world):
    plant(world / "old")
    folder = config(world / "old", CONFIGS[attack])
    refused(lambda: gptrain.load(folder))


@pytest.mark.parametrize("attack", ["f01", "f02", "f03", "f06", "f14", "f15b", "wrong"])
def test_so_is_the_model_in_a_file_that_lightning_saved(attack, world):
    content = CONFIGS[attack]
    model = (yaml.safe_load(content) if isinstance(content, str) else content)["model"]
    torch.save({"state_dict": {}, "model": model}, world / "x.ckpt")
    refused(lambda: gptrain.load(world / "x.ckpt"))


@pytest.mark.parametrize("content", ["pipe", "/dev/zero"])
def test_a_config_that_is_no_file_is_not_waited_for(content, world, old):
    plant(world / "old")
    old([])
    path = world / "old" / ".hydra" / "config.yaml"
    os.mkfifo(path) if content == "pipe" else path.symlink_to(content)
    refused(lambda: gptrain.load(world / "old"))


def test_code_that_came_with_a_run_into_the_checkout_is_not_ours(world, old, train, monkeypatch):
    from gptrain.config import trust

    plant(world / "old")
    monkeypatch.setattr(trust, "PROJECT", world)
    assert trust.is_own("old") and not trust.is_own("old", world / "old")
    assert train(old(["model._target_=old.evil.Net"]), tiny=False).code == 2
    refused(lambda: gptrain.load(config(world / "old", CONFIGS["own"])))


# C. Checkpoints


def archive(**members: bytes) -> bytes:
    """What torch.save writes, with these members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for name, content in {"data.pkl": b"\x80\x02}.", "version": b"3\n", **members}.items():
            file.writestr(f"x/{name}", content)
    return buffer.getvalue()


def saved(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def bomb() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        with file.open("x/data.pkl", "w") as member:
            for _ in range(64):
                member.write(bytes(2**20))
        file.writestr("x/version", "3\n")
    return buffer.getvalue()


def expanded() -> dict:
    state = SimpleGPT(**SIZES).state_dict()
    return {name: torch.zeros(1).expand(2**40) for name in state}


FILES = {
    "k01": lambda: saved({"state_dict": Payload()}),
    "k05": lambda: pickle.dumps(Payload(), protocol=2),
    "legacy": lambda: pickle.dumps([Payload()], protocol=4),
    "k06": bomb,
    "z03": lambda: b"\x80\x02" + b"(" * 60_000_000 + b".",
    "z03b": lambda: archive(**{"data.pkl": b"\x80\x02" + b"(" * 60_000_000 + b"."}),
    "z04": lambda: archive(**{"data.pkl": b"\x80\x02]" + b"U\x01xa" * 5_000_000 + b"."}),
    "k09": lambda: saved({"state_dict": expanded()}),
    "empty": lambda: b"",
    "list": lambda: saved([1, 2]),
    "no tensors": lambda: saved({"state_dict": {"a": "b"}, "callbacks": 5}),
    "callbacks": lambda: saved({"state_dict": 5, "callbacks": [1]}),
    "deep": lambda: archive(**{"data.pkl": b"\x80\x02" + b"]" * DEEP + b"a" * (DEEP - 1) + b"."}),
}  # fmt: skip


@pytest.mark.parametrize("attack", FILES)
def test_a_sealed_checkpoint_and_a_bare_file_hold_tensors_or_are_refused(attack, world):
    content = FILES[attack]()
    plant(world / "old", content)
    (world / "x.ckpt").write_bytes(content)
    folder = config(world / "old", {"model": MODEL})
    refused(lambda: gptrain.load(folder))
    for source in (world / "old", world / "x.ckpt"):
        with (
            pytest.raises((*REFUSALS, ValueError)) as caught,
            in_time(),
        ):  # start_from: a ConfigError
            load_weights(SimpleGPT(**SIZES), source)
        assert len(str(caught.value)) < 1000


MANIFESTS = {
    "k11": {"files": {"../../../proc/self/mem": {"bytes": 1, "sha256": ""}}},
    "k12": {"files": {f"f{i}": {"bytes": 1, "sha256": ""} for i in range(1_000_000)}},
    "k13": {"step": "1"}, "k13b": {"run_id": 5}, "k14": {"files": [1]}, "k16": {"files": {"f": {}}},
    "k17": {"step": 2**70}, "kind": {"kind": "other"}, "metrics": {"metrics": {"val/loss": [1]}},
    "sharded": {"kind": "sharded"}, "step": {"step": 2}, "format": {"format": 2},
    "none": {"files": {}},
}  # fmt: skip


@pytest.mark.parametrize("attack", MANIFESTS)
def test_a_manifest_of_any_content_is_judged(attack, world):
    path = plant(world / "old", **MANIFESTS[attack])
    folder = config(world / "old", {"model": MODEL})
    refused(lambda: gptrain.load(folder))
    refused(lambda: gptrain.load(path))


@pytest.mark.parametrize("name", ["manifest.json", "state.ckpt"])
@pytest.mark.parametrize("attack", ["pipe", "/dev/zero", "/proc/self/mem", "deep"])
def test_a_file_of_a_checkpoint_is_a_regular_one(attack, name, world):
    file = plant(world / "old") / name
    file.unlink()
    if attack == "pipe":
        os.mkfifo(file)
    elif attack == "deep":
        file.write_bytes(b"[" * DEEP)
    else:
        file.symlink_to(attack)
    folder = config(world / "old", {"model": MODEL})
    refused(lambda: gptrain.load(folder))


@pytest.mark.parametrize(
    "attack", ["k01", "z03", "k09", "callbacks", "k13", "k16", "trash", "pipe"]
)
def test_a_run_that_goes_on_from_them_ends_in_one_line(attack, world, train):
    folder = world / "run"
    path = plant(folder, FILES[attack]() if attack in FILES else None, **MANIFESTS.get(attack, {}))
    if attack == "pipe":
        (path / "manifest.json").unlink()
        os.mkfifo(path / "manifest.json")
    if attack == "trash":  # r13: only the link goes
        for kind in ("trash", "draft"):
            (path.parent / f".{kind}-step-00000009").symlink_to(world / "victim")
    with in_time(RUN_S):
        run = train("ckpt_path=last", "allow_changes=[model,data,seed,module,optimizer,scheduler]")
    assert run.code == 65 and "Traceback" not in run.err and "error: " in run.err, run.err


def sharded(folder: Path, change: Callable[[Path], None]) -> Path:
    """A sealed folder of torch.distributed.checkpoint, changed."""
    draft = folder / "draft"
    dcp.save(SimpleGPT(**SIZES).state_dict(), checkpoint_id=draft)
    change(draft)
    path = plant(folder, kind="sharded")
    (path / "state.ckpt").unlink()
    entries = {}
    for file in sorted(draft.iterdir()):
        content = file.read_bytes()
        (path / file.name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        entries[file.name] = {"bytes": len(content), "sha256": digest}
    (path / "manifest.json").write_bytes(seal(read_manifest(path) | {"files": entries}))
    return path


def index(change: Callable[[object], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        (folder / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))

    return apply


def everywhere(**changes: object) -> Callable[[Path], None]:
    def change(metadata: object) -> None:
        for entry in metadata.storage_data.values():
            for key, value in changes.items():
                object.__setattr__(entry, key, value)

    return index(change)


def raw_index(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / ".metadata").write_bytes(content) and None


def as_bytes(metadata: object) -> None:
    for name in metadata.state_dict_metadata:
        metadata.state_dict_metadata[name] = dcp.metadata.BytesStorageMetadata()
    metadata.storage_data = {dcp.metadata.MetadataIndex(i.fqn): e
                             for i, e in metadata.storage_data.items()}  # fmt: skip


def evil_shards(folder: Path) -> None:
    for file in folder.glob("*.distcp"):
        file.write_bytes(saved(Payload()))
    everywhere(offset=0, length=10_000)(folder)


def evil_values(folder: Path) -> None:
    evil_shards(folder)
    index(as_bytes)(folder)


GETATTR = b"\x80\x04\x8c\x13torch.serialization\x8c\x20_get_layout.__globals__.__class__\x93."
SHARDS = {
    "dcp01": index(lambda _: Payload()),
    "dcp02": raw_index(
        GETATTR.replace(b"\x20_get", bytes([len(b"_get_layout.__globals__.__class__")]) + b"_get")
    ),
    "dcp03": raw_index(b"cos\nsystem\n(S'touch $MARK'\ntR."),
    "dcp04": index(lambda _: Path("victim/kept")),
    "dcp05": evil_values,
    "dcp06": evil_shards,
    "dcp07": everywhere(transform_descriptors=["zstd"]),
    "dcp08": everywhere(relative_path="../../../victim/kept"),
    "dcp09": everywhere(relative_path=".."),
    "dcp10": everywhere(relative_path=5),
    "dcp11": index(lambda metadata: setattr(metadata, "storage_data", [1, 2])),
    "offset": everywhere(offset=-5, length="x"),
    "state": index(lambda metadata: setattr(metadata, "state_dict_metadata", None)),
    "empty": raw_index(b""),
    "deep": raw_index(b"\x80\x04" + b"]" * DEEP + b"a" * (DEEP - 1) + b"."),
}


@pytest.mark.parametrize("attack", SHARDS)
def test_shards_are_tensors_and_their_index_is_data(attack, world):
    sharded(world / "old", SHARDS[attack])
    folder = config(world / "old", {"model": MODEL})
    refused(lambda: gptrain.load(folder))


def test_shards_as_they_should_be_load(world):
    sharded(world / "old", lambda _: None)
    assert isinstance(gptrain.load(config(world / "old", {"model": MODEL})), SimpleGPT)
