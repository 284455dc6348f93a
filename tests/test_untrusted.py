"""An untrusted run folder executes no code and changes no file outside.

Each attack enters through a command that a user would type, and is refused in one line.
"""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from hydra.core.hydra_config import HydraConfig

import gptrain
from gptrain.assemble.load import load_for_command
from gptrain.config import ConfigError
from gptrain.config.from_run import expand
from gptrain.models import SimpleGPT
from tests.processes import LOOPBACK, family, listeners
from tests.untrusted import MODEL, config, fill, plant, refused, victim_and_payloads


@pytest.fixture(autouse=True)
def world(tmp_path, monkeypatch):
    with victim_and_payloads(tmp_path, monkeypatch) as folder:
        yield folder


def test_the_payloads_are_armed(world):
    torch.load(world / "evil.pt", weights_only=False)
    (world / "ran").unlink()


# A. An old run's overrides, through from_run

EVAL = r"'\${oc.create:\"{_target_: torch.load, weights_only: false, f: evil.pt}\"}'"
OVERRIDES = {
    "e01": [f"data.train.seed={EVAL}"],
    "unescaped": [f"data.train.seed={EVAL}".replace("\\$", "$")],
    "d01": ["+callbacks.x={_target_: os.system, command: touch $MARK}"],
    "e03": ["model={_target_: torch.load, f: evil.pt, weights_only: false}"],
    "g01b": ["allowed_targets=[distutils]", "+data.test={_target_: distutils.spawn.spawn}"],
    "f06": ["allowed_targets=[evilpkg]", "model._target_=evilpkg.Net"],
    "own": ["model._target_=old.evil.Net"],
    "g06": ["+data.test={_target_: gptrain.checkpoints.fileops.remove_tree, path: victim}"],
    "g05": ["model=evil", "hydra.searchpath=[file://.]"],
    "file": ["+experiment=../../old/evil"], "absolute": ["+experiment=/tmp/evil"],
    "dirpath": ["+callbacks.x={_target_: lightning.pytorch.callbacks.ModelCheckpoint, "
                "dirpath: victim, every_n_train_steps: 1}"],
    "nested": ["+callbacks.x={_target_: torch.nn.Identity, y: {_target_: torch.load}}"],
    "indirect": ["+model.y={_target_: os.system}", "data.test=${model.y}"],
    "sweep": ["seed=1,2"],
    "injector": ["+callbacks.x={_target_: tests.tools.campaign.faults.Fault, phase: setup, "
                 "rank: 0, step: 0, always: true, operation: 0, target: group, "
                 "act: 'SIG0 1; touch $MARK; exit #'}"],
    "position": ["+callbacks.x={_target_: lightning.pytorch.callbacks.ModelCheckpoint, "
                 "_args_: [victim], every_n_train_steps: 1}"],
    "key": ["+data.train.${oc.env:HOME}=1"],
    "glued": ["+data.x='$'", "data.train.seed='${data.x}{oc.create:\"{_target_: torch.load, "
              "weights_only: false, f: evil.pt}\"}'"],
    "own place": ["data=text", "data.train={cache_dir: victim}"],
    "outside": ["data=text", "data.path=/etc/hostname"], "link": ["data=text", "data.path=link"],
}  # fmt: skip


@pytest.fixture
def old(world) -> Callable[[object], str]:
    """Write .hydra/overrides.yaml of an untrusted run and return the from_run override."""

    def write(content: object) -> str:
        text = content if isinstance(content, str) else yaml.safe_dump(content)
        fill(world / "old", {".hydra/overrides.yaml": text.encode()})
        return f"from_run={world / 'old'}"

    return write


@pytest.mark.parametrize("attack", OVERRIDES)
def test_an_old_runs_overrides_are_data(attack, world, old, train):
    (world / "link").symlink_to("/etc/hostname")
    run = train(old(OVERRIDES[attack]), "trainer.fast_dev_run=true", tiny=False)
    assert run.code in (2, 65) and "Traceback" not in run.err, run.err
    assert run.err.startswith("error: ") and not run.folder.exists()


@pytest.mark.parametrize(
    "text", ["a: b", "[1, 2]", "- [x", "\x00\x01", "!!python/name:os.getcwd x"]
)
def test_overrides_that_cannot_be_read_are_refused_and_not_trained_as_the_default(text, old, train):
    run = train(old(text), "trainer.fast_dev_run=true")
    assert run.code == 65 and run.err.count("\n") == 1, run.err
    assert "old/.hydra/overrides.yaml: " in run.err
    assert not run.folder.exists()


def test_a_file_outside_is_read_if_it_is_typed_again(old):
    word = old(["data=text", "data.path=/etc/hostname"])
    with pytest.raises(ConfigError, match=r"repeat the override to allow it; try: data\.path=/etc"):
        expand([word])
    assert "data.path=/etc/hosts" in expand([word, "data.path=/etc/hosts"])


UP = "../" * 30
OUTSIDE = {
    "a glob that goes up": [f"data.path={UP}etc/host*"],
    "a folder that goes up": [f"data.path={UP}no_such_folder"],
    "a link in a folder": ["data.path=links"],
    "links in a glob": ["data.path=links/*"],
    "a link behind a link": ["data.path=[chain]"],
    "a link under a glob of folders": ["data.path=cha*"],
    "a reference": ["name=.", "data.path='${name}./" + UP + "etc/hostname'"],
    "a reference in a mapping": ["name=''", "+data.x={y: '${name}/etc/hostname'}"],
    "a companion of a tokenizer": ["data.tokenizer=tok/tokenizer.json"],
}  # fmt: skip


@pytest.mark.parametrize("attack", OUTSIDE)
def test_an_untrusted_run_reads_nothing_outside_through_globs_and_links(attack, world, old):
    fill(world / "links", {"a.txt": b"text", "b.txt": "/etc/hostname"})
    fill(world / "chain", {"inside": "../links", "again": "../chain"})
    fill(
        world / "tok",
        {"tokenizer.json": b'{"type": "bytes"}\n', "chat_template.jinja": "/etc/passwd"},
    )
    words = ["data=text", *OUTSIDE[attack]]
    with pytest.raises(ConfigError) as refusal:
        expand([old(words)])
    (line,) = str(refusal.value).splitlines()
    assert "not started by you on this machine: was started with data." in line, line
    assert "outside of this project: repeat the override to allow it; try: " in line, line


def test_links_that_stay_next_to_an_untrusted_run_are_followed(world, old):
    (world / "links").mkdir()
    fill(world / "links", {"a.txt": b"text", "b.txt": "../links/a.txt", "circle": "../links"})
    words = ["data=text", "data.path=[links,'links/*.txt',links/a.txt]", "data.pattern='*'"]
    assert expand([old(words)])[:3] == words


def test_an_untrusted_run_reads_files_in_the_output_folder_and_next_to_the_run(
    old, monkeypatch, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("shared")
    (folder / "a.txt").write_text("a text")
    words = ["data=text", f"data.path={folder}/a.txt"]
    with pytest.raises(ConfigError, match="outside of this project"):
        expand([old(words)])
    monkeypatch.setenv("GPTRAIN_OUTPUT_DIR", str(folder))
    assert expand([old(words)])[:2] == words
    monkeypatch.delenv("GPTRAIN_OUTPUT_DIR")
    fill(folder / "old", {".hydra/overrides.yaml": yaml.safe_dump(words).encode()})
    assert expand([f"from_run={folder / 'old'}"])[:2] == words


def test_the_hydra_section_and_the_folders_of_an_old_run_are_ignored(world, old, train):
    victim = world / "victim"
    word = old([
        f"hydra.job.env_set.PYTHONPATH={world}", f"hydra.run.dir={victim}/run",
        f"hydra.job_logging.handlers.file.filename={victim}/kept", f"output_dir={victim}",
        "+hydra.callbacks.x={_target_: os.system}", "+logger.x={_target_: os.system}",
        "profiler={_target_: os.system}", f"run_dir={victim}/x", "hydra/launcher=submitit_slurm",
        f"+data.cache_dir={victim}/cache", f"checkpoint.mirror={victim}/mirror",
        "+experiment@hydra.callbacks=quickstart", "hydra.mode=MULTIRUN", "seed=7",
    ])  # fmt: skip
    run = train(word, "trainer.fast_dev_run=true")
    assert run.code == 0, run.err
    assert "PYTHONPATH" not in os.environ or str(world) not in os.environ["PYTHONPATH"]
    config = (run.folder / ".hydra" / "config.yaml").read_text()
    assert "seed: 7" in config and "mirror: null" in config


def test_an_export_ignores_the_permissions_in_an_old_run(old, monkeypatch, capfd):
    from gptrain.export.__main__ import main

    word = old(["allowed_targets=[antigravity]", "model._target_=antigravity.fly"])
    monkeypatch.setattr("sys.argv", ["export", word])
    with pytest.raises(SystemExit) as left:
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
    "f05": {"model": "${evil}", "evil": {"_target_": "os.system", "command": "touch $MARK"}},
    "f06": {"model": {"_target_": "evilpkg.Net"}, "allowed_targets": ["evilpkg"]},
    "f14": {"model": {"_target_": IDENTITY, "x": "${oc.env:HOME}"}},
    "own": {"model": {"_target_": "old.evil.Net"}},
    "method": {"model": {"_target_": "gptrain.models.SimpleGPT.__init__"}},
    "loader": {"model": {"_target_": "lightning.pytorch.LightningModule.load_from_checkpoint"}},
    "list": [1, 2], "no model": {"seed": 1}, "model is a list": {"model": [1]},
    "no target": {"model": {"d_model": 4}},
    "wrong": {"model": MODEL | {"d_model": "many"}},
    "argument": {"model": MODEL | {"nosuch": 1}},
    "f13": "model: !!python/object/apply:os.system ['touch $MARK']\n",
    "glued": {"model": {"_target_": IDENTITY, "d": "$",
                        "x": "${model.d}{oc.create:'" + EVIL + "'}"}},
    "loop": {"model": {"_target_": IDENTITY, "x": "${model.y}", "y": "${model.x}"}},
}  # fmt: skip


def test_an_intact_run_loads(world):
    plant(world / "old")
    assert isinstance(gptrain.load(config(world / "old", {"model": MODEL})), SimpleGPT)


@pytest.mark.parametrize("attack", CONFIGS)
def test_the_config_of_a_folder_is_data(attack, world):
    plant(world / "old")
    folder = config(world / "old", CONFIGS[attack])
    refused(lambda: gptrain.load(folder))


def test_config_sections_that_the_net_does_not_need_are_ignored(world):
    plant(world / "old")
    more = {"seed": create(EVIL), "checkpoint": {"monitor": [1], "mode": "sideways"}}
    net = gptrain.load(config(world / "old", {"model": MODEL, **more}))
    assert isinstance(net, SimpleGPT)


@pytest.mark.parametrize("attack", ["f01", "f02", "f03", "f06", "f14", "wrong"])
def test_the_model_config_in_a_lightning_checkpoint_is_data(attack, world):
    torch.save({"state_dict": {}, "model": CONFIGS[attack]["model"]}, world / "x.ckpt")
    refused(lambda: gptrain.load(world / "x.ckpt"))


# E. Run folders


FOLDERS = {name: {name: "../victim/kept"} for name in (".lock", "train.log", "status.json")}
FOLDERS |= {
    "r03": {".hydra/config.yaml": "../../victim/kept"}, "hydra": {".hydra": "../victim"},
    "beats": {".beats": "../victim"}, "result": {"result.json": "../victim/kept"},
    "r08": {".lock": b"[1]", "status.json": b"[1]", ".restarts": b"[1]"},
    "r07": {".lock": b'{"run_id": 5}', ".restarts": b"{"},
    "r13": {f"checkpoints/.{kind}-step-00000001": "../../victim" for kind in ("trash", "draft")},
    "r05": {"checkpoints/.old-step-00000001": "../../victim"},
    "kinds": {".hydra": b"x", ".beats": b"x"}, "log folder": {"train.log/x": b"x"},
    "events": {"tensorboard": "../victim", "metrics.csv": "../victim/kept"},
}  # fmt: skip


@pytest.mark.parametrize("attack", FOLDERS)
def test_a_run_writes_and_removes_nothing_through_a_link(attack, world, train):
    fill(world / "run", FOLDERS[attack])
    run = train("trainer.max_steps=1", "ckpt_path=last", "logger=csv", "callbacks=none")
    assert run.code in (0, 65, 73) and "Traceback" not in run.err, run.err
    assert run.err.count("error: ") == bool(run.code), run.err


# The user's own runs


MINE = """
from torch import nn


class Net(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.table, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)

    def forward(self, tokens):
        return self.head(self.table(tokens))
"""


def test_the_users_own_runs_are_resumed_without_a_warning(world, train, monkeypatch, capfd):
    from gptrain.export.__main__ import main

    (world / "users_nets.py").write_text(MINE)
    (world / "nets" / "model").mkdir(parents=True)
    (world / "nets" / "model" / "users_nets.yaml").write_text(
        "_target_: users_nets.Net\nvocab_size: 256\nwidth: 4\n"
    )
    typed = ["--config-dir", "nets"]
    small = ["model=users_nets", "trainer.accelerator=cpu", "data.seq_len=8", "data.batch_size=2",
             "trainer.max_steps=1", "trainer.limit_val_batches=1", "logger=none"]  # fmt: skip
    first = train(*typed, *small, tiny=False)
    assert first.code == 0 and not first.err, first.err
    old = f"from_run={first.folder}"
    again = train(old, "task=test", name="test", tiny=False)  # --config-dir is in the signed record
    assert again.code == 0, again.err
    (first.folder / ".hydra" / "signature").unlink()
    more = train(*typed, old, "ckpt_path=last", "trainer.max_steps=2", tiny=False)
    assert more.code == 0 and "warning" not in more.err, more.err
    (line,) = [line for line in more.out.splitlines() if line.startswith("next ")]
    assert f"hydra.searchpath=['file://{world}/nets']" in shlex.split(line.partition("; ")[0])
    assert type(gptrain.load(first.folder, allowed_targets=["users_nets"])).__name__ == "Net"
    monkeypatch.setattr("sys.argv", ["export", *typed, old, f"run_dir={world}/out"])
    with pytest.raises(SystemExit) as left:
        main()
    out, err = capfd.readouterr()
    assert not left.value.code, err
    (line,) = [line for line in out.splitlines() if line.startswith("next ")]
    assert f"hydra.searchpath=['file://{world}/nets']" in shlex.split(line)
    # A yaml file in the --config-dir of the command names the class.
    assert type(gptrain.load(first.folder)).__name__ == "Net"
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # a new process has no config
    refused(lambda: gptrain.load(first.folder))
    trainer, packages = SimpleNamespace(accelerator="cpu"), ["users_nets"]
    cfg = SimpleNamespace(
        from_run=str(first.folder), ckpt_path=None, allowed_targets=packages, trainer=trainer
    )
    net, _, device = load_for_command(cast(Any, cfg))
    assert (type(net).__name__, device) == ("Net", "cpu")


@pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="Linux alone has it")
def test_ranks_on_one_machine_accept_no_connections_from_other_machines(world, train):
    """The ranks listen on 127.0.0.1 only, which may be written as an IPv6 address."""
    seen, done = set(), threading.Event()

    def look() -> None:
        while not done.wait(0.1):
            for pid in family(os.getpid()):
                with suppress(OSError):  # the process has ended
                    seen.update(listeners(pid))

    thread = threading.Thread(target=look)
    thread.start()
    run = train("trainer.devices=2", "trainer.max_steps=10", "logger=none", "callbacks=none")
    done.set()
    thread.join()
    assert run.code == 0, run.err
    assert seen and seen <= LOOPBACK
