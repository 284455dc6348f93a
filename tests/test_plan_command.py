"""python -m gptrain.plan: what it prints, for a cluster that is not there; what train.py keeps."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest

from gptrain.core.data_schema import DataConfig, DummyTextConfig
from gptrain.costs import machine
from gptrain.costs.choice import changed_overrides
from gptrain.costs.topology import parse_topology
from gptrain.plan.__main__ import (
    PARTS,
    main,
    memory_lines,
    planned_lines,
    step_table,
    traced_lines,
)
from tests.conftest import ROOT

SEVEN = ["model=gpt_7b", "data.seq_len=2048", "data.batch_size=2", "trainer.devices=8"]
H100 = ["hardware=h100_sxm", "hardware.link=nvlink4"]
# A chain of NVLinks: all four GPUs are connected, but only pairs of them are all linked.
CHAIN = """
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV12\tPXB\tPXB\t0-31
GPU1\tNV12\t X \tNV12\tPXB\t0-31
GPU2\tPXB\tNV12\t X \tNV12\t0-31
GPU3\tPXB\tPXB\tNV12\t X \t0-31
"""
# All but the last GPU are linked to each other.
TRIANGLE = """
\tGPU0\tGPU1\tGPU2\tGPU3
GPU0\t X \tNV4\tNV4\tPXB
GPU1\tNV4\t X \tNV4\tPXB
GPU2\tNV4\tNV4\t X \tPXB
GPU3\tPXB\tPXB\tPXB\t X
"""


@pytest.fixture
def plan(typed, tmp_path):
    """Runs the command: exit code, stdout, stderr."""
    return lambda *words: typed(main, f"output_dir={tmp_path}", *words)


def answer(plan, *words):
    code, out, err = plan(*words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_the_sums_of_seven_billion_parameters(plan):
    """28 GB of weights, 28 of gradients, 56 of Adam in fp32, 130 and more with activations."""
    report = answer(plan, *SEVEN, *H100, "strategy=ddp", "strategy.comm_hook=fp16")
    held = report["strategies"]["ddp"]["bytes_per_device"]
    for part, gb in (("weights", 28), ("gradients", 28), ("optimizer", 56)):
        assert held[part] / 1e9 == pytest.approx(gb, rel=0.06)  # 6.66 B parameters
    assert held["total"] > 130e9
    assert not report["strategies"]["ddp"]["fits"]
    assert report["strategies"]["fsdp"]["fits"] and report["best"] == "fsdp"
    assert report["command"].endswith("strategy=fsdp") and "comm_hook" not in report["command"]


@pytest.mark.parametrize("name, tokens", [("gpt2_124m", 19000 * 512 * 1024), ("llama_124m", 2.7e9)])
def test_the_time_in_the_comment_of_an_experiment_is_that_of_the_plan(plan, name, tokens):
    text = (ROOT / f"conf/experiment/{name}.yaml").read_text()
    minutes = float(re.search(r"# Cost: (\d+) minutes on eight H100", text)[1])
    report = answer(plan, f"experiment={name}", "trainer.devices=8", *H100)
    planned = tokens / report["strategies"]["ddp"]["tokens_per_s"] / 60
    assert minutes == pytest.approx(planned, rel=0.15)


def test_every_strategy_has_its_bytes_time_and_traffic(plan):
    words = ["model=gpt2", "trainer.devices=4", "data.batch_size=8", "max_tokens=1e10"]
    report = answer(plan, *words, *H100)
    assert report["parameters"] == 124_439_808
    rows = report["strategies"]
    assert rows.keys() == {"single", "ddp", "fsdp", "tensor_parallel", "fsdp_tensor_parallel",
                           "pipeline", "ddp_pipeline", "context_parallel"}  # fmt: skip
    for name, row in rows.items():
        held = row["bytes_per_device"]
        states = held["weights"] + held["gradients"] + held["optimizer"]
        assert states <= held["total"] <= sum(held.values()) - held["total"] + 9
        assert row["step_s"] > 0 and 0 < row["mfu"] < 1 and 0 < row["scaling_efficiency"] <= 1
        assert 0 <= row["overlapped_s"] <= row["communication_s"]
        assert (row["wire_bytes_per_step"] > 0) == (name != "single")
        assert row["hours"] == pytest.approx(1e10 / row["tokens_per_s"] / 3600)
        assert row["device_hours"] == pytest.approx(row["hours"] * (1 if name == "single" else 4))
    assert rows["ddp"]["wire_bytes_per_step"] == pytest.approx(1.5 * 4 * 124_439_808, abs=1)


def test_under_fp16_only_what_train_py_allows_is_proposed(plan):
    """FSDP and pipelines do not scale losses, although they would fit and ddp does not."""
    words = ["model=gpt2_xl", "data.seq_len=1025", "data.batch_size=8", "trainer.devices=8"]
    words = [*words, "trainer.precision=16-mixed"]
    report = answer(plan, *words, "hardware=v100_sxm2_32gb")
    fits = {name for name, row in report["strategies"].items() if row["fits"]}
    assert fits == {"fsdp", "ddp_pipeline"}
    assert (report["best"], report["command"].split()[-2:]) == (
        "ddp", ["strategy=ddp", "model.activation_checkpointing=full"],
    )  # fmt: skip
    words[-1] = "model.compile=model"
    report = answer(plan, *words, "hardware=v100_sxm2_32gb")
    assert report["best"] == "ddp" and not report["strategies"]["ddp"]["fits"]


def test_one_device_is_the_best_where_the_link_is_too_slow_for_more(plan):
    """Options of another strategy are left out of the command, those of the same are kept."""
    words = ["model=gpt_nano", "data.batch_size=1", "trainer.devices=2", "hardware=t4"]
    report = answer(plan, *words, "hardware.link=ethernet_10", "strategy=ddp",
                    "strategy.bucket_cap_mb=50")  # fmt: skip
    assert report["command"].endswith(
        " model=gpt_nano data.batch_size=1 strategy=single trainer.devices=1"
    )
    words[2] = "trainer.num_nodes=2"  # train.py refuses strategy=single on several nodes
    slow = ("hardware.link=ethernet_10", "hardware.network=ethernet_10", "trainer.devices=1")
    report = answer(plan, *words, *slow)
    assert report["command"].endswith(
        " data.batch_size=1 strategy=single trainer.devices=1 trainer.num_nodes=1"
    )
    assert planned_lines(None, report)[-2] == "best      single"
    typed = ["strategy=fsdp", "strategy.replicas=2", "+data.test=null"]
    assert changed_overrides(typed, {"strategy": "fsdp", "data.test": 1}) == [
        "strategy.replicas=2", "strategy=fsdp", "data.test=1",
    ]  # fmt: skip


def test_a_run_that_does_not_fit_gets_a_command_that_fits(plan):
    """A wider batch than a V100 can hold: its blocks are computed again."""
    words = ["model=gpt2_xl", "data.seq_len=512", "data.batch_size=16", "trainer.devices=1"]
    report = answer(plan, *words, "hardware=v100_sxm2_32gb")
    assert report["strategies"].keys() == {"single"}
    # A V100 has no bf16: `auto`, the default, is fp32 on it.
    in_fp32 = answer(plan, *words, "hardware=v100_sxm2_32gb", "trainer.precision=32-true")
    assert report["strategies"] == in_fp32["strategies"]
    assert not report["strategies"]["single"]["fits"]
    typed = report["command"].split()
    assert "model.activation_checkpointing=full" in typed
    again = answer(plan, *typed[2:], "hardware=v100_sxm2_32gb")
    assert again["strategies"][again["best"]]["fits"]


def test_a_sequence_that_does_not_fit_one_gpu_is_divided_over_eight(plan):
    words = ["model=llama_8b", "trainer.devices=8", "data.batch_size=1", *H100]
    words.append("trainer.precision=bf16-mixed")
    report = answer(plan, *words, "data.seq_len=131072", "model.max_seq_len=131072")
    row, whole = (report["strategies"][name] for name in ("context_parallel", "fsdp"))
    held, of_whole = row["bytes_per_device"], whole["bytes_per_device"]
    assert held["weights"] == of_whole["weights"]
    assert 7 < of_whole["activations"] / held["activations"] < 8  # two copies of attention's output
    # In each of 32 blocks 16,384 rows of 16 bits: q and out of 4096 columns, k and v of 1024.
    exchanged = 2 * 32 * 16384 * (2 * 4096 + 2 * 1024) * 2 * 7 / 8
    (sent,) = (n for what, n in row["wire"].items() if what.startswith("heads"))
    assert sent == exchanged and row["tokens_per_s"] / whole["tokens_per_s"] == pytest.approx(
        1, 0.1
    )
    assert report["best"] == "context_parallel"
    assert "strategy=context_parallel" in report["command"]
    assert answer(plan, *words, "data.seq_len=8192")["best"] != "context_parallel"


def links(report, name):
    """Return "axis link" for all traffic of a strategy."""
    wire = report["strategies"][name]["wire"]
    return {f"{axis.split()[0]} {link}" for _, axis, link in (kind.split(", ") for kind in wire)}


def test_pairs_of_gpus_keep_tensor_parallelism_inside(plan, tmp_path, monkeypatch):
    """Rings of two neighbours use NVLink. All others use PCIe, also rings of every second GPU."""
    (tmp_path / "topo").write_text(CHAIN)
    words = ["model=gpt2", "trainer.devices=4", "hardware=a100_sxm_40gb"]
    report = answer(plan, *words, f"topology={tmp_path / 'topo'}")
    assert report["topology"] == {"islands": [[0, 1, 2, 3]], "slowest_ring_link": "PXB"}
    assert "topology" not in report["command"]
    plain = answer(plan, *words)["strategies"]
    for name in ("ddp", "tensor_parallel"):
        assert report["strategies"][name]["communication_s"] > 5 * plain[name]["communication_s"]
    assert links(report, "fsdp_tensor_parallel") == {"tensor nvlink3", "data pcie4"}
    assert links(report, "ddp_pipeline") == {"data nvlink3", "pipeline pcie4"}
    (tmp_path / "three").write_text(TRIANGLE)
    words[1] = "trainer.devices=3"
    of_three = answer(plan, *words, f"topology={tmp_path / 'three'}")
    assert links(of_three, "ddp") == {"data nvlink3"}
    # The GPUs of this machine and their links are those that nvidia-smi prints.
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        f"#!/bin/sh\ncase $1 in topo) cat {tmp_path}/topo;;"
        " *) yes NVIDIA A100-SXM4-40GB | head -4;; esac\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = answer(plan, "model=gpt2", "trainer.devices=auto")
    assert found["strategies"] == report["strategies"] and found["machine"] == report["machine"]
    of_two = answer(plan, "model=gpt2", "trainer.devices=2")["strategies"]["ddp"]
    assert of_two["wire_bytes_per_step"] == 4 * 124_439_808  # two of the four GPUs
    on_cpu = answer(plan, "model=gpt_nano", "trainer=cpu", "trainer.devices=2")
    assert on_cpu["machine"]["name"] == f"{machine.count_cores()} cores"


def test_the_links_that_are_typed_are_those_of_the_plan(plan):
    """Two nodes of two GPUs. The hours of a device are those of the run on all four."""
    words = ["model=gpt2", "trainer.devices=2", "trainer.num_nodes=2", "hardware=h100_sxm"]
    words += ["hardware.link=pcie4", "hardware.network=ethernet_10", "max_tokens=1e9"]
    report = answer(plan, *words)
    assert links(report, "fsdp_tensor_parallel") == {"tensor pcie4", "data ethernet_10"}
    assert report["machine"]["source"].endswith("; pcie4, ethernet_10")
    row = report["strategies"]["ddp"]
    assert row["device_hours"] == 4 * row["hours"]


def test_the_tables_show_each_number_under_its_name():
    """Of 0.5 s of communication 0.125 s are hidden. Most is sent over the data axis."""
    row = {
        "step_s": 2.0, "tokens_per_s": 12345.6, "mfu": 0.25, "wire_bytes_per_step": 3 * 2**29,
        "wire": {"weights, data axis, nvlink4": 2**30, "heads, context axis, pcie4": 2**29},
        "communication_s": 0.5, "overlapped_s": 0.125, "scaling_efficiency": 0.75,
        "hours": 1234.5, "device_hours": 4938.0,
        "bytes_per_device": {part: 2**30 * n for n, part in enumerate(PARTS, 1)}, "fits": False,
    }  # fmt: skip
    rows = {"fsdp": row, "single": row | {"wire": {}, "wire_bytes_per_step": 0, "fits": True}}
    table = step_table(rows)
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["fsdp", "2", "12,346", "25.0%", "1.50", "0.125", "0.375", "75.0%", "1,234.5", "4,938.0",
         "nvlink4"],
        ["single", "2", "12,346", "25.0%", "0.00", "0.125", "0.375", "75.0%", "1,234.5", "4,938.0",
         "-"],
    ]  # fmt: skip
    machine = {"name": "h100_sxm", "source": "its data sheet"}
    result = {"machine": machine, "strategies": rows, "parameters": 1_234_567_890}
    head, table = memory_lines(result)
    assert head == "1,234.6 M parameters, h100_sxm (its data sheet)"
    assert table.splitlines()[0].split() == ["GiB", "of", "a", "device", *PARTS, "fits"]
    assert table.splitlines()[1].split() == ["fsdp", *(f"{n}.00" for n in range(1, 8)), "no"]
    assert table.splitlines()[2].endswith(" yes")
    for total, unit, shown in ((2**30, "GiB", "1.00"), (2**30 - 2**20, "MiB", "1023.00")):
        sizes = dict.fromkeys(PARTS, 0) | {"total": total}
        alone = result | {"strategies": {"ddp": row | {"bytes_per_device": sizes}}}
        lines = memory_lines(alone)[1].splitlines()
        assert lines[0].startswith(f"{unit} of a device ") and shown in lines[1].split()
    changes = {"strategy": "fsdp", "data.batch_size": 1}
    result |= {"best": "fsdp", "changes": changes, "command": "python train.py"}
    best = "best      fsdp; nothing fits as typed, but with data.batch_size=1"
    assert planned_lines(None, result)[-2:] == [best, "command   python train.py"]
    result["changes"] = {"strategy": "fsdp"}
    assert planned_lines(None, result)[-2] == "best      fsdp"
    topology = parse_topology(CHAIN)
    assert planned_lines(topology, result)[-3] == (
        f"topology  tensor parallelism inside {topology.tensor_groups}, "
        f"slowest link of a ring {topology.slowest_ring_link}"
    )
    result["changes"] = None
    last = planned_lines(None, result)[-1]
    assert last == "best      nothing fits: more devices, or a smaller model"
    traced = {"single": rows["single"] | {"flops": 2.5e12, "wire": {"weights": 2**21, "heads": 0}}}
    result |= {"strategies": traced, "layers": (6, 12, 80)}
    assert traced_lines(result)[2:] == [
        "a step    2.5 TFLOP of a device, traced; sent: weights 2.0 MiB, heads 0.0 MiB",
        "layers    of 80; 6 and 12 were traced, the rest is extrapolated",
    ]
    result["layers"] = None
    traced["single"]["wire"] = {}
    assert traced_lines(result) == [
        *memory_lines(result), "a step    2.5 TFLOP of a device, traced; sent: nothing"
    ]  # fmt: skip


def test_a_cpu_that_was_not_measured_is_planned_without_a_speed(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "cpu_has_bf16", lambda: True)  # only GPUs take bf16 for auto
    words = ("model=gpt_nano", "trainer=cpu", "trainer.devices=2", "max_tokens=1e6")
    report = answer(plan, *words)
    row = report["strategies"]["ddp"]
    assert row["bytes_per_device"]["total"] > 0 and row["fits"] and report["best"] == "ddp"
    assert row["step_s"] is row["hours"] is None
    in_fp32 = answer(plan, *words, "trainer.precision=32-true")
    assert report["strategies"] == in_fp32["strategies"]
    code, out, _ = plan(*words)
    assert code == 0 and "tokens/s" not in out and "--measure" in out
    (tmp_path / "machine.json").write_text('{"threads": 0}')
    code, out, err = plan(*words)
    assert code == 65 and not out and err.count("\n") == 1
    assert err.startswith(f"error: output_dir={tmp_path}: {tmp_path}/machine.json: damaged")


def test_the_doctor_judges_the_devices_and_the_backend_of_the_run(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # a folder without nvidia-smi
    monkeypatch.setenv("OMP_NUM_THREADS", "9999")
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")  # harms several nodes
    words = ("trainer.devices=3", "trainer.num_nodes=2", "strategy.backend=nccl")
    lines = "\n".join(answer(plan, "--doctor", *words))
    assert "the host's own name is 127.0.1.1: other nodes" in lines
    assert "OMP_NUM_THREADS=9999 x 3 ranks on " in lines
    assert "strategy.backend=nccl on auto; try: strategy.backend=gloo" in lines


def test_a_token_of_a_sample_is_a_target_alone_in_dummy_data_only():
    """Whatever keys another data set has."""
    dummy = DummyTextConfig.model_construct(seq_len=65)
    mine = DataConfig.model_construct(seq_len=65, num_samples=7)
    assert (dummy.sample_tokens, mine.sample_tokens) == (64, 65)
    assert DataConfig.model_construct().sample_tokens is None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["hardware=h1000"], "error: hardware.name=h1000: unknown, did you mean"),
        (["hardware=t4", "hardware.link=rope"], "error: hardware.link=rope: unknown; allow"),
        (["hardware=h100_sxm", "trainer.devices=auto"], "error: trainer.devices=auto: devices of"),
        (["topology=nowhere"], "error: topology=nowhere: No such file"),
        (["topology=conf/train.yaml"], "error: topology=conf/train.yaml: the text has no matrix"),
        (["--measure", "max_bytes=10"], "error: max_bytes=10: "),
        (["--measure", "trainer.devices=x"], "error: trainer.devices=x: "),
        (["model.n_heads=7"], "error: model.d_model=512: not divisible by model.n_heads=7"),
    ],
)
def test_a_wrong_word_is_one_line(plan, words, line):
    code, out, err = plan(*words)
    assert code == (66 if words == ["topology=nowhere"] else 2) and not out
    assert err.startswith(line) and err.count("\n") == 1


def test_the_planner_needs_no_torch():
    """Nor Lightning, nor what that brings: Hydra and pydantic alone."""
    words = ["model=gpt2", "trainer.devices=8", "hardware=h100_sxm", "--json"]
    code = (
        "import sys\n"
        "for name in ('torch', 'lightning', 'numpy', 'tqdm'): sys.modules[name] = None\n"
        f"sys.argv[1:] = {words}\n"
        "from gptrain.plan.__main__ import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["best"]
