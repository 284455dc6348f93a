"""What is read of an untrusted run, and the user's own runs. tests/refused has the attacks."""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from hydra.core.hydra_config import HydraConfig

import gptrain
from gptrain.assemble.load import load_for_command
from gptrain.config import ConfigError
from gptrain.config.from_run import expand
from gptrain.models import SimpleGPT
from tests.processes import LOOPBACK, family, listeners
from tests.refused.hostile import MODEL, config, fill, plant, victim_and_payloads


@pytest.fixture(autouse=True)
def world(tmp_path, monkeypatch):
    with victim_and_payloads(tmp_path, monkeypatch):
        yield tmp_path


@pytest.fixture
def old(world) -> Callable[[object], str]:
    """Write .hydra/overrides.yaml of an untrusted run and return the from_run override."""

    def write(content: object) -> str:
        text = content if isinstance(content, str) else yaml.safe_dump(content)
        fill(world / "old", {".hydra/overrides.yaml": text.encode()})
        return f"from_run={world / 'old'}"

    return write


def test_a_file_outside_is_read_if_it_is_typed_again(old):
    word = old(["data=text", "data.path=/etc/hostname"])
    with pytest.raises(ConfigError, match=r"repeat the override to allow it; try: data\.path=/etc"):
        expand([word])
    assert "data.path=/etc/hosts" in expand([word, "data.path=/etc/hosts"])


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


def test_config_sections_that_the_net_does_not_need_are_ignored(world):
    plant(world / "old")
    evil = "${oc.create:'{_target_: torch.load, weights_only: false, f: evil.pt}'}"
    more = {"seed": evil, "checkpoint": {"monitor": [1], "mode": "sideways"}}
    net = gptrain.load(config(world / "old", {"model": MODEL, **more}))
    assert isinstance(net, SimpleGPT)


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
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # a new process has no config
    with pytest.raises(ConfigError, match="users_nets"):
        gptrain.load(first.folder)
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
