"""A trained net in one line: `gptrain.load(run_dir)`."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import gptrain
from gptrain.checkpoints.manifest import DamagedCheckpointError
from tests.conftest import ROOT


def equal(net, state) -> bool:
    weights = net.state_dict()
    lone = weights.keys() - state.keys()  # a tied weight is saved once
    return lone <= {"head.weight"} and all(torch.equal(weights[key], state[key]) for key in state)


def test_the_best_and_the_last_net_come_back_ready_to_use(saved_twice):
    rng = torch.get_rng_state()
    best = gptrain.load(saved_twice.folder)
    last = gptrain.load(str(saved_twice.folder), which="last")
    assert equal(best, saved_twice.state(2)["weights"])
    assert equal(last, saved_twice.state(4)["weights"])
    assert gptrain.load(saved_twice.folder, with_tokenizer=True)[1] is None
    assert not best.training and {p.device.type for p in best.parameters()} == {"cpu"}
    assert best(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 256)
    assert best.head.weight is best.token_embedding.weight
    assert torch.equal(rng, torch.get_rng_state())
    assert not GlobalHydra.instance().is_initialized()
    file = saved_twice.folder / ".hydra" / "config.yaml"
    config = OmegaConf.load(file)
    config.checkpoint.mode = "max"
    OmegaConf.save(config, file)
    worst = gptrain.load(saved_twice.folder, trust=True)
    assert equal(worst, saved_twice.state(4)["weights"])


def test_a_damaged_checkpoint_is_passed_over_and_left_where_it_is(saved_twice):
    newest = saved_twice.folder / "checkpoints" / "step-00000004" / "state.ckpt"
    newest.write_bytes(newest.read_bytes()[:-9])
    assert equal(gptrain.load(saved_twice.folder, "last"), saved_twice.state(2)["weights"])
    assert newest.exists()
    shutil.rmtree(saved_twice.folder / "checkpoints" / "step-00000002")
    with pytest.raises(DamagedCheckpointError, match="step-00000004"):
        gptrain.load(saved_twice.folder)


def test_a_run_that_is_done_gives_its_net_and_its_tokenizer(speaker, monkeypatch):
    monkeypatch.setenv("GPTRAIN_CONF", "/another")  # the run's project is selected
    run = gptrain.FinishedRun(speaker, ROOT / "conf")
    tokens = run.tokenizer.encode("café")
    assert run.tokenizer.decode(tokens) == "café"
    assert os.environ["GPTRAIN_CONF"] == str(ROOT / "conf")
    assert not run.net.training and run.net(torch.tensor([[*tokens]])).shape[-1] == 270
