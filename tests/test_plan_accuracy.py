"""The planner against what real runs hold, compute and send; more: python -m tests.plan_accuracy.

States exactly, peak memory within 10 %, FLOPs within 1 %, bytes on the wire within 5 %.
"""

import pytest

from gptrain.costs import machine
from gptrain.costs.shape import gpt_shape
from tests.plan_accuracy import METERED, QUIET, compare_all, predict, read_meters

SMALL = "model.d_model=64 model.n_layers=2 data.seq_len=65 data.batch_size=4"
TWO, MUON = "trainer.devices=2", "optimizer=muon"
CONFIGS = {
    "accumulated, dropout": "model.dropout=0.1 trainer.accumulate_grad_batches=2",
    "bf16": "trainer.precision=bf16-mixed",
    "full": "model.activation_checkpointing=full",
    "selective": "model.activation_checkpointing=selective",
    "wide vocabulary": "model.vocab_size=4000",
    "llama": "model=llama_nano",
    "pipeline": f"{TWO} strategy=pipeline",
}
SLOW = {
    "fsdp": f"{TWO} strategy=fsdp",
    "ddp, muon": f"{TWO} {MUON}",
    "fsdp, muon": f"{TWO} {MUON} strategy=fsdp",
    "tensor parallel": f"{TWO} strategy=tensor_parallel model.d_model=128 model.n_layers=4 "
    "data.seq_len=129 data.batch_size=8",
}


@pytest.mark.parametrize(
    "words",
    [*CONFIGS.values(), *(pytest.param(words, marks=pytest.mark.slow) for words in SLOW.values())],
    ids=[*CONFIGS, *SLOW],
)
def test_a_real_step_uses_the_planned_memory_flops_and_traffic(train, words):
    words = ["model=gpt_nano", *SMALL.split(), *words.split()]
    run = train(*words, *QUIET, *METERED, tiny=False)
    assert run.code == 0, run.err
    ratios = compare_all(predict(words), read_meters(run.folder))
    assert ratios["states"] == pytest.approx(1, abs=0.001)
    assert ratios["peak"] == pytest.approx(1, abs=0.1)
    assert ratios["flops"] == pytest.approx(1, abs=0.01)
    assert ratios["wire"] == pytest.approx(1, abs=0.05)


def test_muon_without_instructions_for_bf16_sends_fp32(monkeypatch):
    words = f"model=gpt_nano {SMALL} {TWO} {MUON}".split()
    for has_bf16 in (True, False):
        monkeypatch.setattr(machine, "cpu_has_bf16", lambda known=has_bf16: known)
        sent = predict(words)["wire"]["updates of Muon, data axis, gloo"]
        net = gpt_shape(256, 64, 4, 2, 256)
        matrices = net.n_layers * net.block_matrices
        assert sent == (2 if has_bf16 else 4) * matrices / 2
