"""Nets other than SimpleGPT through train.py: Llama, and a net of transformers."""

from __future__ import annotations

import pytest
import runs as helpers
import torch

import gptrain
from gptrain.config.cli import run_command
from gptrain.export.__main__ import DEFAULTS, ExportRun, export

LLAMA = (
    "model=llama_nano", "model.vocab_size=61", "model.d_model=32", "model.n_heads=4",
    "model.n_kv_heads=2", "model.d_head=10", "model.d_ff=40", "model.n_layers=4",
    "model.max_seq_len=16", "trainer.max_steps=2", "trainer.val_check_interval=2",
)  # fmt: skip
GPT2 = (
    "model=hugging_face", "model.vocab_size=61", "trainer.max_steps=4",
    "model.config={model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 16, "
    "resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}",
)  # fmt: skip


def test_the_flops_of_attention_follow_the_width_of_its_heads(runs):
    """Four heads of 10 features, of which two heads of k and v, in a net of 32 features."""
    run = runs(*helpers.PLACES["single"], model=LLAMA)
    matrices = 4 * (2 * 32 * 40 + 2 * 32 * 20 + 3 * 32 * 40) + 61 * 32
    token_flops = 6 * matrices + 12 * 4 * (4 * 10) * 15
    speeds = run.column("perf/tokens_per_s")
    expected = [token_flops * speed / run.record()["peak"] for speed in speeds]
    assert run.column("perf/mfu") == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_net_of_transformers_equals_one_process_and_is_loaded_and_exported(runs, tmp_path):
    from transformers import AutoModelForCausalLM

    truth = runs(*helpers.PLACES["single"], model=GPT2)
    sharded = runs(*helpers.PLACES["fsdp"], model=GPT2)
    helpers.check_losses(sharded, truth)
    net, folder = gptrain.load(sharded.folder, "last"), tmp_path / "export"
    words = (f"run_dir={folder}", f"from_run={sharded.folder}", "ckpt_path=last", "format=hf")
    assert run_command(export, [*words], ExportRun, DEFAULTS) == 0
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.arange(30).view(2, 15)
    torch.testing.assert_close(reference(tokens).logits, net(tokens))
