"""Each issue of several devices is reported with its fix, and a sound machine has no findings."""

from __future__ import annotations

import os
import re
import socket
from collections import namedtuple

import pytest

from gptrain.plan import doctor as module
from gptrain.plan.doctor import doctor

H100 = "NVIDIA H100 80GB HBM3"
SOUND = "700.00, 700.00, 1980, 1980"  # watts and MHz: now, usual


def gpus(*names: str, driver="570.124.06", mig="Disabled", caps=SOUND) -> str:
    return "".join(f"{i}, {name}, {driver}, {mig}, {caps}\n" for i, name in enumerate(names))


TWO_H100 = gpus(H100, H100)


@pytest.fixture
def findings(monkeypatch, tmp_path):
    """Findings of a machine of two H100 and 64 cores that differs in these facts."""
    Disk = namedtuple("Disk", "total")
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])

    def find(
        *, smi=TWO_H100, has_driver=True, shm_bytes=2**36, address="10.0.0.7",
        environment=(), n_local=2, n_nodes=1, accelerator="gpu", backend=None,
    ) -> list[str]:  # fmt: skip
        def lookup(_name: str) -> str:
            if address is None:
                raise socket.gaierror("no address")
            return address

        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\nprintf '{smi}'\n")
        script.chmod(0o755)
        with socket.create_server(("", 0)) as free:
            monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
        for name, value in dict(environment).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(module, "DRIVER", tmp_path if has_driver else tmp_path / "none")
        monkeypatch.setattr(module.shutil, "disk_usage", lambda _: Disk(shm_bytes))
        monkeypatch.setattr(socket, "gethostbyname", lookup)
        *lines, checked = doctor(n_local, n_nodes, accelerator, backend)
        assert checked.startswith("checked: ")
        assert all(line.startswith("warning: ") and "; try: " in line for line in lines)
        return lines

    return find


def test_a_sound_machine_has_no_findings(findings):
    assert findings() == findings(n_nodes=2, backend="nccl") == []
    assert findings(n_local=None, accelerator="auto") == []
    assert findings(smi=gpus(H100, H100, caps="[N/A], [N/A], [N/A], [N/A]")) == []
    assert findings(address="127.0.1.1") == []  # harms several nodes
    assert findings(smi=gpus(H100, mig="Enabled"), n_local=1) == []
    assert findings(environment={"OMP_NUM_THREADS": "1"}) == []  # a GPU computes
    for shown, n_local in (("1", None), ("GPU-8f2a,MIG-3c1e", 2)):
        assert findings(environment={"CUDA_VISIBLE_DEVICES": shown}, n_local=n_local) == []


@pytest.mark.parametrize(
    "change, words",
    [
        ({"smi": gpus(H100, "NVIDIA A100-SXM4-80GB")}, "mixed GPUs: NVIDIA A100"),
        ({"smi": gpus(H100) + gpus(H100, driver="535.1").replace("0,", "1,", 1)},
         "mixed drivers: 535.1, 570.124.06"),
        ({"smi": gpus(H100, H100, mig="Enabled")}, "MIG is on.*nvidia-smi -mig 0"),
        ({"smi": gpus(H100), "n_local": None, "environment": {"OMP_NUM_THREADS": "65"}},
         "65 x 1 ranks on 64 cores"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "1"}}, "but 1 of 2 GPUs are visible"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "0,7,1"}}, "1 of 2 .*trainer.devices=1"),
        ({"shm_bytes": 2**26}, "/dev/shm has 64 MiB.*shm-size"),
        ({"environment": {"NCCL_P2P_DISABLE": "1"}}, "NCCL_P2P_DISABLE=1: .*unset"),
        ({"environment": {"NCCL_DEBUG": "trace"}}, "NCCL_DEBUG=TRACE: .*unset NCCL_DEBUG"),
        ({"environment": {"NCCL_SOCKET_IFNAME": "ib0"}}, "ib0: no such interface.*eth0"),
        ({"environment": {"OMP_NUM_THREADS": "64"}}, "64 x 2 ranks on 64 cores.*THREADS=32"),
        ({"address": None}, "no address.*/etc/hosts"),
        ({"smi": TWO_H100.replace("700.00,", "400.00,", 1)},
         "GPU 0: power capped at 400 W of 700; .*-i 0 -pl 700"),
        ({"smi": gpus(H100) + gpus(H100, caps="[N/A], [N/A], 1200, 1980").replace("0,", "5,", 1)},
         "GPU 5: clock capped at 1200 MHz of 1980; .*-i 5 -rac"),
        ({"smi": "", "accelerator": "cpu"}, "a driver is loaded, but nvidia-smi fails"),
        ({"backend": "gloo"}, "strategy.backend=gloo on gpu; try: strategy.backend=nccl"),
        ({"backend": "nccl", "accelerator": "cpu"}, "; try: strategy.backend=gloo"),
        ({"address": "127.0.1.1", "n_nodes": 2}, "127.0.1.1: other nodes cannot reach it"),
        ({"smi": "", "has_driver": False, "accelerator": "cpu",
          "environment": {"OMP_NUM_THREADS": "1"}}, "1 x 2 ranks on 64 cores.*THREADS=32"),
        # The GPUs of the machine do not compute here.
        ({"accelerator": "cpu", "environment": {"OMP_NUM_THREADS": "2"}}, "2 x 2 ranks on 64"),
    ],
)  # fmt: skip
def test_one_fault_is_one_finding_with_its_fix(findings, change, words):
    lines = findings(**change)
    assert len(lines) == 1 and re.search(words, lines[0]), lines


@pytest.mark.parametrize("value", ["^docker0", "eth", "=eth0", "ib0,eth0"])
def test_interfaces_may_be_excluded_listed_or_begun(findings, value):
    assert findings(environment={"NCCL_SOCKET_IFNAME": value}) == []


def test_the_report_of_this_machine_names_its_checks(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # a folder without nvidia-smi
    monkeypatch.setenv("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        *lines, checked = doctor(1, 1, "cpu", None)
    assert checked.startswith("checked: no GPU seen, backend, port")
    assert any("MASTER_PORT" in line and "is in use" in line for line in lines)
    assert all(line.startswith("warning: ") and "; try: " in line for line in lines)


def test_a_torch_newer_than_those_tested_is_a_warning(findings, monkeypatch):
    monkeypatch.setattr(module, "version", lambda _: "2.15.1+cu132")
    assert not any("torch 2" in line for line in findings())
    monkeypatch.setattr(module, "version", lambda _: "2.16.0")
    assert any(line.startswith("warning: torch 2.16.0 is newer") for line in findings())
