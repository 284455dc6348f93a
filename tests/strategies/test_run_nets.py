"""Nets other than SimpleGPT through train.py: Llama, and a net of transformers."""

from __future__ import annotations

import pytest
import runs as helpers
import torch

import gptrain
from gptrain.config.cli import run_command
from gptrain.export.__main__ import DEFAULTS, ExportRun, export

GPT2 = (
    "model=hugging_face", "model.vocab_size=61", "trainer.max_steps=4",
    "model.config={model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 16, "
    "resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}",
)  # fmt: skip


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
