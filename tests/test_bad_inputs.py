"""What is checked of GPUs, and of a run that resumes. tests/refused has the errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gptrain.config.check import check_config, find_world_size
from gptrain.config.cli import compose_command
from gptrain.config.compose import plain
from gptrain.config.preflight import check_paths
from gptrain.config.preflight.devices import check_devices, check_memory, check_visible
from tests.command_line import accepted, compose_run

NANO = ("model=gpt_nano", "trainer.accelerator=cpu")


def test_a_run_that_began_from_other_weights_may_be_evaluated_by_a_path_of_its_checkpoint():
    """`init_from` is then an override of the earlier run, and names no second source of weights."""
    values = plain(compose_command([*NANO, "init_from=/weights", "ckpt_path=/a/step-00000005"]))
    assert [problem.key for problem in check_config(values).errors] == ["init_from"]
    for name in ("last", "best"):  # the checkpoints of a run that began from other weights
        assert check_config(values | {"ckpt_path": name}).errors == []
    assert check_config(values | {"from_run": "/a", "task": "test"}).errors == []
    # Weights of `init_from` are no initial weights: an evaluation of them is no reason to warn.
    assert check_config(values | {"ckpt_path": None, "task": "test"}).problems == []


def test_the_ranks_of_a_job_are_those_of_all_its_nodes():
    run = compose_run("trainer.devices=[0,3]", "trainer.num_nodes=3")
    assert find_world_size(run) == 6
    assert find_world_size(run.changed({"trainer.devices": "auto"})) is None


@pytest.mark.parametrize("devices", ["8", "[0,2]"])
def test_more_gpus_than_visible_names_how_many_and_the_variable(devices):
    run = check_config(plain(compose_command([f"trainer.devices={devices}"])))
    (problem,) = check_visible(run, n_visible=2, variable="0,1")
    assert "only 2 GPUs visible (CUDA_VISIBLE_DEVICES=0,1)" in problem.line
    assert not list(check_visible(run, n_visible=8, variable=None))
    # A launcher may show each rank its own GPU alone.
    assert not list(check_visible(run, n_visible=1, variable="3", is_rank=True))


def test_the_gpus_of_a_process_are_enough_for_its_ranks_and_their_smallest_memory(
    launched, monkeypatch
):
    """A rank of torchrun may see its own GPU alone. The memory is that of the smallest GPU."""
    memory = [2**40]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(memory))
    facts = SimpleNamespace
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: facts(total_memory=memory[i])
    )
    words = ["trainer.devices=2", "trainer.accelerator=gpu", "strategy=ddp"]
    checked = check_config(plain(compose_command(words)))
    (line,) = (problem.line for problem in check_devices(checked))
    assert "only 1 GPU visible" in line and line.endswith("; try: trainer.devices=1")
    memory.append(3)
    for other in (["trainer.devices=1"], ["strategy=fsdp", "strategy.cpu_offload=true"]):
        unlike = check_config(plain(compose_command([*words, *other])))
        assert not [p for p in check_devices(unlike) if "GiB" in p.message]
    del memory[1]
    launched(1, 2, 1, 2)
    assert not list(check_devices(checked))
    memory.append(3)
    (line,) = (problem.line for problem in check_devices(checked))
    assert line.startswith("warning: model: weights, gradients") and "a device has 0 GiB" in line


def test_a_model_larger_than_the_machine_is_a_warning_by_its_real_types():
    gib = []
    for precision in ("32-true", "bf16-true"):
        words = ("model=gpt_7b", "model.n_layers=32000", f"trainer.precision={precision}")
        (line,) = accepted(*words, "trainer.accelerator=cpu")
        needed = "warning: model: weights, gradients and optimizer states need about "
        assert line.startswith(needed)
        gib.append(int(line.removeprefix(needed).split()[0]))
        assert " GiB, this machine has " in line
        assert line.endswith(" GiB; try: strategy=fsdp or a smaller model")
    assert gib[0] == pytest.approx(2 * gib[1], rel=0.01)
    (line,) = accepted(*words, "trainer.accelerator=cpu", "trainer.devices=2")
    assert int(line.removeprefix(needed).split()[0]) == pytest.approx(
        2 * gib[1], rel=0.01
    )  # ranks share a CPU's memory
    evaluation = plain(compose_command([*words, "trainer=cpu", "task=test", "ckpt_path=best"]))
    assert list(check_memory(check_config(evaluation), "cpu", n_local=1, world_size=1)) == []


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a text")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert accepted("data=text", "data.path='~/*.txt'", *NANO) == []


def test_a_folder_that_holds_a_finished_run(tmp_path, launched):
    (tmp_path / "result.json").write_text("{}")
    accepted(f"run_dir={tmp_path}", "ckpt_path=last", *NANO)
    launched(1, 2, 1, 2)
    words = ["trainer.devices=2", *NANO, f"run_dir={tmp_path}"]
    checked = check_config(plain(compose_command(words)))
    # Rank 0 may have written its record before rank 1 checks the config.
    assert not list(check_paths(checked, str(tmp_path)))
