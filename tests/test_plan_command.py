"""python -m gptrain.plan: what it prints, and the links of a node as nvidia-smi prints them."""

import json
import os
import re
import socket
from pathlib import Path

import pytest
from torch import nn

from gptrain.costs.topology import find_islands, parse_topology, slowest_ring_link
from gptrain.plan.__main__ import main
from tests.conftest import ROOT

TOPOLOGY = ROOT / "tests/topologies/pairs.txt"


class OwnNet(nn.Module):
    """A net without formulas, with a frozen table."""

    def __init__(self, vocab_size: int = 61) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.head = nn.Linear(8, vocab_size, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SharedSigns:
    """An optimizer from outside that states half a value per parameter."""

    states_per_parameter = 0.5


@pytest.fixture
def plan(typed, tmp_path):
    """Runs the command: exit code, stdout, stderr."""
    return lambda *words: typed(main, f"output_dir={tmp_path}", *words)


def answer(plan, *words):
    code, out, err = plan(*words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_run_that_does_not_fit_gets_a_command_that_fits(plan):
    """A wider batch than a V100 can hold. It has no bf16: `auto`, the default, is fp32 on it."""
    words = ["model=gpt2_xl", "data.seq_len=512", "data.batch_size=16", "trainer.devices=1"]
    report = answer(plan, *words, "hardware=v100_sxm2_32gb")
    in_fp32 = answer(plan, *words, "hardware=v100_sxm2_32gb", "trainer.precision=32-true")
    assert report["strategies"] == in_fp32["strategies"]
    assert not report["strategies"]["single"]["fits"]
    typed = report["command"].split()
    assert "model.activation_checkpointing=full" in typed
    again = answer(plan, *typed[2:], "hardware=v100_sxm2_32gb")
    assert again["strategies"][again["best"]]["fits"]


def links(report, name):
    """Return "axis link" for all traffic of a strategy."""
    wire = report["strategies"][name]["wire"]
    return {f"{axis.split()[0]} {link}" for _, axis, link in (kind.split(", ") for kind in wire)}


def test_pairs_of_gpus_keep_tensor_parallelism_inside(plan, tmp_path, monkeypatch):
    """Rings of two neighbours use NVLink. All others use PCIe, also rings of every second GPU."""
    words = ["model=gpt2", "trainer.devices=4", "hardware=a100_sxm_40gb"]
    report = answer(plan, *words, f"topology={TOPOLOGY}")
    assert report["topology"] == {"islands": [[0, 1], [2, 3]], "slowest_ring_link": "PXB"}
    assert "topology" not in report["command"]
    plain = answer(plan, *words)["strategies"]
    for name in ("ddp", "tensor_parallel"):
        assert report["strategies"][name]["communication_s"] > 5 * plain[name]["communication_s"]
    assert links(report, "fsdp_tensor_parallel") == {"tensor nvlink3", "data pcie4"}
    assert links(report, "ddp_pipeline") == {"data nvlink3", "pipeline pcie4"}
    # The GPUs of this machine and their links are those that nvidia-smi prints.
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        f"#!/bin/sh\ncase $1 in topo) cat '{TOPOLOGY}';;"
        " *) yes NVIDIA A100-SXM4-40GB | head -4;; esac\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = answer(plan, "model=gpt2", "trainer.devices=auto")
    assert found["strategies"] == report["strategies"] and found["machine"] == report["machine"]
    on_cpu = answer(plan, "model=gpt_nano", "trainer=cpu", "trainer.devices=2")
    assert on_cpu["machine"]["name"] == "cpu" and on_cpu["best"] == "ddp"


def test_of_an_own_net_what_is_exact_is_planned_and_nothing_else(plan):
    """Frozen: 61 * 8. Trained: 3 * 64 + 61 * 8. Two ranks hold 31 of 61 rows of a table."""
    own = ["model=my_lstm", f"model._target_={__name__}.OwnNet", "model.vocab_size=61"]
    own += ["~model.d_model"]
    own += ["trainer.devices=2", "data.batch_size=3", "data.seq_len=5", "hardware=t4"]
    report = answer(plan, *own, "trainer.precision=32-true")
    assert report["parameters"] == 3 * 64 + 2 * 488 and report["best"] is None
    rows = report["strategies"]
    assert rows["ddp"]["bytes_per_device"] == {
        "weights": 4 * (192 + 976), "gradients": 4 * (192 + 488), "optimizer": 8 * (192 + 488),
    }  # fmt: skip
    assert rows["fsdp"]["bytes_per_device"]["gradients"] == 4 * (192 / 2 + 31 * 8)
    assert rows["ddp"]["fits"] is None
    signs = [f"optimizer._target_={__name__}.SharedSigns", "~optimizer.betas", "~optimizer.eps"]
    halves = answer(plan, *own, *signs, "~optimizer.fused", "optimizer.lr=1")["strategies"]["ddp"]
    assert halves["bytes_per_device"]["optimizer"] == 2 * (192 + 488)


def test_the_doctor_finds_a_port_that_is_taken(plan, monkeypatch):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", f"{port}")
        code, out, _ = plan("--doctor", "trainer=cpu", "trainer.devices=2")
    assert code == 0 and f"MASTER_PORT={port} is in use" in out


FOLDER = Path(__file__).parent / "topologies"
ALL = list(range(8))
# File -> groups for tensor parallelism, the slowest link of a ring.
GOLDEN = {
    # Each GPU has six links: two to two neighbours, one to two; a ring of double links exists.
    "v100_hybrid_mesh": ([[0, 1, 2, 3], [4, 5, 6, 7]], "NV2"),
    "a100_nvswitch": ([ALL], "NV12"),
    "h100_nvswitch": ([ALL], "NV18"),
    "pcie_box": ([[gpu] for gpu in ALL], "SYS"),
    # A chain: all four GPUs are connected, but only pairs of them are all linked.
    "pairs": ([[0, 1], [2, 3]], "PXB"),
    "mig": ([[0], [1]], "NODE"),  # a GPU in slices has no NVLink
}


def with_spaces_without_legend(text: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", text.partition("\nLegend")[0]).expandtabs(12)


def underlined_from_windows(text: str) -> str:
    lines = (f"\x1b[4m{line}\x1b[0m\x1b[K\r\n" for line in text.splitlines())
    return "$ nvidia-smi topo -m\r\n\r\n" + "".join(lines)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_matrix_is_read_however_it_was_copied(name):
    text = (FOLDER / f"{name}.txt").read_text()
    for copied in (text, with_spaces_without_legend(text), underlined_from_windows(text)):
        links = parse_topology(copied)
        assert (find_islands(links), slowest_ring_link(links)) == GOLDEN[name]


def test_gpus_and_columns_may_come_in_any_order():
    text = """
            NIC0  GPU3  GPU1  GPU10  CPU Affinity  NUMA Affinity
    GPU10   SYS   NV4   SYS   X      0-7           0
    GPU1    PIX   NV4   X     SYS    0-7           0
    GPU3    PHB   X     NV4   NV4    0-7           0
    NIC0    X     PHB   PIX   SYS
    """
    links = parse_topology(text)
    assert links[1, 3] == links[10, 3] == "NV4"
    assert links[1, 10] == slowest_ring_link(links) == "SYS"  # three need all three
    assert find_islands(links) == [[1, 3], [10]]


@pytest.mark.parametrize(
    "text",
    [
        "loss 3.2\n",
        "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV4\n",
        *((FOLDER / f"{name}.txt").read_text() for name in ("no_gpu", "no_driver", "only_nics")),
    ],
)
def test_a_text_without_a_complete_matrix_is_an_error(text):
    with pytest.raises(ValueError, match="matrix"):
        parse_topology(text)
