"""Tasks of srun as ranks: what is read of SLURM's words. With daemons: test_slurm_cluster."""

from __future__ import annotations

import os
from pathlib import Path
from socket import inet_aton
from sys import byteorder

import pytest
from command_line import accepted, refused

from gptrain.runtime import process
from gptrain.runtime.devices import cores_per_rank
from gptrain.runtime.process import (
    Process,
    attempt,
    first_host,
    interface_towards,
    run_stamp,
    set_rendezvous,
    store_path,
    this_process,
)

TASK = {  # environment of the last task of `srun --ntasks=4 --nodes=2` in SLURM 22.05
    "SLURM_JOB_ID": "40015", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[003-004]", "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1", "SLURM_NTASKS": "4",
}  # fmt: skip


@pytest.fixture
def task(monkeypatch):
    """Return a function that gives this process the environment TASK with changes."""

    def put(**changes: str) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        for name in (*names, "GLOO_SOCKET_IFNAME"):
            monkeypatch.setenv(name, "")  # monkeypatch restores what it has set
            monkeypatch.delenv(name)
        for name, value in {**TASK, **changes}.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(
    "nodes, first",
    [("a,b", "a"), ("gpu[003-007,9],login1", "gpu003"), ("r[1-2]n[03,05]", "r1n03"),
     ("node-12,node-13", "node-12")],
)  # fmt: skip
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def test_tasks_of_several_nodes_connect_to_the_first_node_or_to_the_job_scripts_address(
    task, monkeypatch
):
    monkeypatch.setattr(process, "interface_towards", lambda host: f"towards-{host}")
    task()
    assert this_process() == Process("slurm", rank=3, local_rank=1, world_size=4, n_nodes=2)
    set_rendezvous("/runs/a")
    assert os.environ["MASTER_ADDR"] == "gpu003" and os.environ["MASTER_PORT"] == "20015"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "towards-gpu003"
    assert store_path("/runs/a") is None
    task(SLURM_STEP_ID="2")  # a second srun in the allocation
    set_rendezvous("/runs/a")
    assert run_stamp() == "slurm-40015.2" and os.environ["MASTER_PORT"] == "22009"
    typed = {"MASTER_ADDR": "head", "MASTER_PORT": "77", "GLOO_SOCKET_IFNAME": "ib7"}
    for name, value in typed.items():
        monkeypatch.setenv(name, value)
    set_rendezvous("/runs/a")
    assert os.environ.items() >= typed.items()


def test_the_network_interface_is_that_of_the_most_specific_route(monkeypatch):
    # Destination, gateway, flags, three numbers and mask, as in /proc/net/route of this machine.
    values = {"eth0": ("0.0.0.0", "0.0.0.0"), "ib0": ("10.1.0.0", "255.255.0.0"),
              "ib1": ("10.0.0.0", "255.0.0.0")}  # fmt: skip
    number = lambda text: f"{int.from_bytes(inet_aton(text), byteorder):08X}"  # noqa: E731
    lines = [f"{n} {number(to)} 0 3 0 0 0 {number(mask)}" for n, (to, mask) in values.items()]
    monkeypatch.setattr(process.socket, "gethostbyname", lambda address: address)
    monkeypatch.setattr(Path, "read_text", lambda _: "\n".join(["Iface ...", *lines]))
    addresses = ("10.1.2.3", "10.2.2.3", "11.1.2.3")
    assert list(map(interface_towards, addresses)) == ["ib0", "ib1", "eth0"]
    del lines[0]  # no route leads to 11.1.2.3
    assert list(map(interface_towards, addresses)) == ["ib0", "ib1", "ib0"]
    lines.clear()
    assert interface_towards("10.1.2.3") is None


def test_tasks_of_one_node_connect_through_a_file_of_their_step(task):
    task(SLURM_STEP_NUM_NODES="1")
    set_rendezvous("/runs/a")
    first = store_path("/runs/a")
    assert "MASTER_ADDR" not in os.environ
    task(SLURM_STEP_NUM_NODES="1", SLURM_STEP_ID="1")
    assert store_path("/runs/a") != first


def test_a_task_takes_the_threads_that_it_asked_for(task):
    task(SLURM_CPUS_PER_TASK="1")
    assert cores_per_rank(n_local=1) == 1
    task(SLURM_CPUS_PER_TASK="2")
    assert cores_per_rank(n_local=8) == 2


def test_each_start_of_a_step_has_a_name_of_its_own(task):
    names = []
    for rank, restarts in (("3", "0"), ("0", "0"), ("0", "1")):
        task(SLURM_PROCID=rank, SLURM_RESTART_COUNT=restarts)
        names.append(attempt())
    assert names[0] == names[1] != names[2]


def test_a_run_folder_is_named_by_the_job_and_its_place_in_an_array(task):
    task()
    assert run_stamp() == "slurm-40015"  # also after a requeue, and in every task
    task(SLURM_ARRAY_JOB_ID="40010", SLURM_ARRAY_TASK_ID="5")
    assert run_stamp() == "slurm-40010_5"


def test_a_number_of_nodes_that_srun_did_not_start_is_refused(task):
    task(SLURM_PROCID="0", SLURM_LOCALID="0")
    (line,) = refused("trainer.devices=4", "trainer.accelerator=cpu")
    assert line.startswith("error: trainer.num_nodes=1: slurm started ranks on 2")
    assert line.endswith("; try: trainer.num_nodes=2")
    (line,) = refused("trainer.devices=3", "trainer.accelerator=cpu")
    assert "trainer.devices=3: 3 x trainer.num_nodes=1 = 3, but SLURM_STEP_NUM_TASKS=4" in line
    assert line.endswith("; try: trainer.devices=2 trainer.num_nodes=2")


def test_nodes_of_torchrun_need_a_folder_of_one_name(task, monkeypatch, tmp_path):
    task(SLURM_STEP_NUM_TASKS="1")
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**torchrun, "MASTER_ADDR": "head", "MASTER_PORT": "2950"}.items():
        monkeypatch.setenv(name, value)
    words = ("trainer.devices=auto", "trainer.num_nodes=2", "trainer.accelerator=cpu")
    (line,) = refused(*words)
    assert "each node would name the folder by its own clock" in line
    lines = accepted(*words, f"run_dir={tmp_path}/seen_by_all")
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    (line,) = [line for line in lines if name in line]
    assert line.startswith(f"warning: {name}=: not set; torchrun cannot restart a lost node")
    assert line.endswith(f"; try: {name}=1 torchrun ...")


@pytest.fixture
def agent(monkeypatch):
    """Puts this process behind an agent of torchrun; the name of its start."""

    def put(n_local: int, count: int, port: int = 40001) -> str:
        torchrun = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": n_local, "MASTER_PORT": port}
        for name, value in (torchrun | {"TORCHELASTIC_RESTART_COUNT": count}).items():
            monkeypatch.setenv(name, str(value))
        return attempt()

    return put


def test_a_restart_of_torchrun_on_one_node_has_a_name_of_its_own(agent):
    assert len({agent(n_local=2, count=count) for count in range(3)}) == 3


def test_each_start_of_open_mpi_on_several_nodes_has_a_name_of_its_own(monkeypatch):
    """All ranks of a start have the name of its job, which they take on one port."""
    names = {}
    for job, rank in (("prterun-a@1", 0), ("prterun-a@1", 3), ("prterun-b@1", 0)):
        ranks = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_SIZE": 2}
        variables = {f"OMPI_COMM_WORLD_{key}": value for key, value in ranks.items()}
        variables |= {"PMIX_NAMESPACE": job, "MASTER_PORT": 29500}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        assert this_process().n_nodes == 2
        names[job, rank] = attempt()
    first, same, other = names.values()
    assert first == same != other


def test_agents_of_several_nodes_give_a_start_the_same_name(agent):
    first, second = (agent(n_local=1, count=count) for count in range(2))
    assert first == second != agent(n_local=1, count=0, port=40002)
