"""python -m gptrain.plan: what it prints, for a cluster that is not there; what train.py keeps."""

import json
import re
import subprocess
import sys

import pytest

from gptrain.core.data_schema import DataConfig, DummyTextConfig
from gptrain.plan.__main__ import main
from tests.conftest import ROOT

SEVEN = ["model=gpt_7b", "data.seq_len=2048", "data.batch_size=2", "trainer.devices=8"]
H100 = ["hardware=h100_sxm", "hardware.link=nvlink4"]
PAIRS = """
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV12\tPXB\tPXB\t0-31
GPU1\tNV12\t X \tPXB\tPXB\t0-31
GPU2\tPXB\tPXB\t X \tNV12\t0-31
GPU3\tPXB\tPXB\tNV12\t X \t0-31
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
                           "pipeline", "ddp_pipeline", "diloco", "context_parallel"}  # fmt: skip
    for name, row in rows.items():
        held = row["bytes_per_device"]
        states = held["weights"] + held["gradients"] + held["optimizer"]
        assert states <= held["total"] <= sum(held.values()) - held["total"] + 9
        assert row["step_s"] > 0 and 0 < row["mfu"] < 1 and 0 < row["scaling_efficiency"] <= 1
        assert 0 <= row["overlapped_s"] <= row["communication_s"]
        assert (row["wire_bytes_per_step"] > 0) == (name != "single")
        assert row["hours"] == pytest.approx(1e10 / row["tokens_per_s"] / 3600)
        assert row["device_hours"] == pytest.approx(row["hours"] * (1 if name == "single" else 4))
    share = rows["diloco"]["wire_bytes_per_step"] / rows["ddp"]["wire_bytes_per_step"]
    assert share == pytest.approx(1 / 32)
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


def test_a_run_that_does_not_fit_gets_a_command_that_fits(plan):
    """A wider batch than a V100 can hold: its blocks are computed again."""
    words = ["model=gpt2_xl", "data.seq_len=512", "data.batch_size=16", "trainer.devices=1"]
    report = answer(plan, *words, "hardware=v100_sxm2_32gb")
    assert not any(row["fits"] for row in report["strategies"].values())
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


def test_pairs_of_gpus_keep_tensor_parallelism_inside(plan, tmp_path):
    (tmp_path / "topo").write_text(PAIRS)
    words = ["model=gpt2", "trainer.devices=4", "hardware=a100_sxm_40gb"]
    report = answer(plan, *words, f"topology={tmp_path / 'topo'}")
    assert report["topology"] == {"islands": [[0, 1], [2, 3]], "slowest_ring_link": "PXB"}
    plain = answer(plan, *words)["strategies"]
    for name in ("ddp", "tensor_parallel"):  # their group uses PCIe
        assert report["strategies"][name]["communication_s"] > 5 * plain[name]["communication_s"]
    wire = report["strategies"]["fsdp_tensor_parallel"]["wire"]
    assert any("tensor axis" in name for name in wire)


def test_a_cpu_that_was_not_measured_is_planned_without_a_speed(plan, tmp_path):
    words = ("model=gpt_nano", "trainer=cpu", "trainer.devices=2", "max_tokens=1e6")
    report = answer(plan, *words)
    row = report["strategies"]["ddp"]
    assert row["bytes_per_device"]["total"] > 0 and row["fits"] and report["best"] == "ddp"
    assert row["step_s"] is row["hours"] is None
    code, out, _ = plan(*words)
    assert code == 0 and "tokens/s" not in out and "--measure" in out
    (tmp_path / "machine.json").write_text('{"threads": 0}')
    code, out, err = plan(*words)
    assert code == 65 and not out and err.count("\n") == 1
    assert err.startswith(f"error: output_dir={tmp_path}: {tmp_path}/machine.json: damaged")


def test_the_doctor_judges_the_devices_and_the_backend_of_the_run(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # a folder without nvidia-smi
    monkeypatch.setenv("OMP_NUM_THREADS", "9999")
    lines = "\n".join(answer(plan, "--doctor", "trainer.devices=3", "strategy.backend=nccl"))
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
