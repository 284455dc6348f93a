"""The planner against what real runs hold, compute and send; more: python -m tests.plan_accuracy.

States exactly, peak memory within 10 %, FLOPs within 1 %, bytes on the wire within 5 %.
"""

import pytest

from gptrain.costs import speed
from gptrain.costs.shape import gpt_shape
from tests.plan_accuracy import METERED, QUIET, compare_all, predict, read_meters

SMALL = "model.d_model=64 model.n_layers=2 data.seq_len=65 data.batch_size=4"
CONFIGS = {
    "gpt": f"model=gpt_nano {SMALL}",
    "gpt, accumulated, dropout": f"model=gpt_nano {SMALL} model.dropout=0.1 "
    "trainer.accumulate_grad_batches=2",
    "gpt, bf16": f"model=gpt_nano {SMALL} trainer.precision=bf16-mixed",
    "gpt, full": f"model=gpt_nano {SMALL} model.activation_checkpointing=full",
    "gpt, selective": f"model=gpt_nano {SMALL} model.activation_checkpointing=selective",
    "wide vocabulary": f"model=gpt_nano {SMALL} model.vocab_size=4000",
    "llama": f"model=llama_nano {SMALL}",
    "ddp": f"model=gpt_nano {SMALL} trainer.devices=2",
    "ddp, muon": f"model=gpt_nano {SMALL} trainer.devices=2 optimizer=muon",
    "fsdp, muon": f"model=gpt_nano {SMALL} trainer.devices=2 optimizer=muon strategy=fsdp",
    "fsdp": f"model=gpt_nano {SMALL} trainer.devices=2 strategy=fsdp",
    "tensor parallel": "model=gpt_nano data.seq_len=129 data.batch_size=8 trainer.devices=2 "
    "strategy=tensor_parallel",
    "pipeline": f"model=gpt_nano {SMALL} trainer.devices=2 strategy=pipeline",
}


@pytest.mark.parametrize("words", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_real_step_takes_what_the_plan_says(train, words):
    words = words.split()
    run = train(*words, *QUIET, *METERED, tiny=False)
    assert run.code == 0, run.err
    ratios = compare_all(predict(words), read_meters(run.folder))
    assert ratios["states"] == pytest.approx(1, abs=0.001)
    assert ratios["peak"] == pytest.approx(1, abs=0.1)
    assert ratios["flops"] == pytest.approx(1, abs=0.01)
    assert ratios["wire"] == pytest.approx(1, abs=0.05)


def test_muon_without_instructions_for_bf16_sends_fp32(monkeypatch):
    words = CONFIGS["ddp, muon"].split()
    for has_bf16 in (True, False):
        monkeypatch.setattr(speed, "cpu_has_bf16", lambda known=has_bf16: known)
        sent = predict(words)["wire"]["updates of Muon, data axis, gloo"]
        net = gpt_shape(256, 64, 4, 2, 256)
        matrices = net.n_layers * net.block_matrices
        assert sent == (2 if has_bf16 else 4) * matrices / 2
