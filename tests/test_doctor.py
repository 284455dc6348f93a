"""Each common issue of several devices is found from texts of a machine, and a sound one is not."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import replace

import pytest

from gptrain.plan.doctor import Facts, doctor, find_problems, parse_csv

HEAD = "index, name, driver_version, mig.mode.current\n"
CAPS = (
    "index, power.limit [W], power.default_limit [W], "
    "clocks.applications.graphics [MHz], clocks.max.graphics [MHz]\n"
)


def gpus(*names: str, driver: str = "570.124.06", mig: str = "Disabled") -> list[dict[str, str]]:
    return parse_csv(HEAD + "".join(f"{i}, {n}, {driver}, {mig}\n" for i, n in enumerate(names)))


H100 = "NVIDIA H100 80GB HBM3"
SOUND = Facts(
    environment={},
    n_cores=64,
    gpus=gpus(H100, H100),
    caps=parse_csv(
        CAPS + "0, 700.00 W, 700.00 W, 1980 MHz, 1980 MHz\n1, [N/A], [N/A], [N/A], [N/A]\n"
    ),
    has_driver=True,
    shm_bytes=2**36,
    interfaces=["lo", "eth0"],
    address="10.0.0.7",
    busy_port=None,
)


def found(facts: Facts, n_local=2, n_nodes=1, accelerator="gpu", backend=None) -> list[str]:
    problems = find_problems(facts, n_local, n_nodes, accelerator, backend)
    return [f"{wrong} | {fix}" for wrong, fix in problems]


def test_a_sound_machine_has_no_findings():
    assert found(SOUND) == found(SOUND, n_nodes=2, backend="nccl") == []
    assert found(SOUND, n_local=None, accelerator="auto") == []


@pytest.mark.parametrize(
    "change, words",
    [
        ({"gpus": gpus(H100, "NVIDIA A100-SXM4-80GB")}, "mixed GPUs: NVIDIA A100"),
        ({"gpus": gpus(H100) + gpus(H100, driver="535.1")}, "mixed drivers: 535.1, 570.124.06"),
        ({"gpus": gpus(H100, H100, mig="Enabled")}, "MIG is on.*nvidia-smi -mig 0"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "1"}}, "but 1 of 2 GPUs are visible"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "0,7,1"}}, "1 of 2 .*trainer.devices=1"),
        ({"busy_port": "29500"}, "MASTER_PORT=29500 is in use"),
        ({"shm_bytes": 2**26}, "/dev/shm has 64 MiB.*shm-size"),
        ({"environment": {"NCCL_P2P_DISABLE": "1"}}, "NCCL_P2P_DISABLE=1: .*unset"),
        ({"environment": {"NCCL_DEBUG": "trace"}}, "NCCL_DEBUG=TRACE: .*unset NCCL_DEBUG"),
        ({"environment": {"NCCL_SOCKET_IFNAME": "ib0"}}, "ib0: no such interface.*eth0"),
        ({"environment": {"OMP_NUM_THREADS": "64"}}, "64 x 2 ranks on 64 cores.*THREADS=32"),
        ({"address": None}, "no address.*/etc/hosts"),
        ({"caps": parse_csv(CAPS + "1, 400.00 W, 700.00 W, 1980 MHz, 1980 MHz\n")},
         "GPU 1: power capped at 400 W of 700 .*-i 1 -pl 700"),
        ({"caps": parse_csv(CAPS + "0, [N/A], [N/A], 1200 MHz, 1980 MHz\n")},
         "GPU 0: clock capped at 1200 MHz of 1980 .*-rac"),
    ],
)  # fmt: skip
def test_one_fault_is_one_finding_with_its_fix(change, words):
    lines = found(replace(SOUND, **change))
    assert len(lines) == 1 and re.search(words, lines[0]), lines


def test_a_driver_without_its_nvidia_smi_is_told():
    lines = found(replace(SOUND, gpus=[], caps=[]), accelerator="cpu")
    assert [line.split(":")[0] for line in lines] == [
        "a driver is loaded, but nvidia-smi fails"
    ]  # fmt: skip


def test_backends_that_do_not_fit_and_names_that_others_cannot_reach():
    assert "strategy.backend=nccl" in found(SOUND, backend="gloo")[0]
    assert "strategy.backend=gloo" in found(SOUND, accelerator="cpu", backend="nccl")[0]
    assert "127.0.1.1" in found(replace(SOUND, address="127.0.1.1"), n_nodes=2)[0]
    assert found(replace(SOUND, address="127.0.1.1")) == []


def test_interfaces_may_be_excluded_listed_or_begun():
    for value in ("^docker0", "eth", "=eth0", "ib0,eth0"):
        assert found(replace(SOUND, environment={"NCCL_SOCKET_IFNAME": value})) == []


def test_idle_cores_are_told_on_a_cpu_only():
    facts = replace(SOUND, environment={"OMP_NUM_THREADS": "1"}, gpus=[], caps=[], has_driver=False)
    assert "THREADS=32" in found(facts, accelerator="cpu")[0]
    assert found(replace(SOUND, environment={"OMP_NUM_THREADS": "1"})) == []


def test_this_machine_says_what_it_checked(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi
    monkeypatch.setenv("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        *lines, checked = doctor(1, 1, "cpu", None)
    assert checked.startswith("checked: no GPU seen, backend, port")
    assert any("is in use; try: MASTER_PORT=" in line for line in lines)
    assert all(line.startswith("warning: ") and "; try: " in line for line in lines)
