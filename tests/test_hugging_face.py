"""A causal language model of transformers trains here as it computes there."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptrain.assemble.load import find_weights, load_weights
from gptrain.export.files import write_net
from gptrain.models import HuggingFace
from gptrain.text.sampling import Sampling, generate
from tests.refused.commands import answer
from tests.run import Run, train

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 32, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CONFIGS = {
    "gpt2": {"model_type": "gpt2", **GPT2},
    **{name: {"model_type": name, **SIZES} for name in ("llama", "qwen2", "qwen3", "mistral")},
}
pytestmark = pytest.mark.engine("transformers")
TOKENS = torch.arange(30).view(2, 15)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_net_equals_transformers_and_its_weights_can_be_exchanged(tmp_path, name):
    from transformers import AutoModelForCausalLM

    net, back = (HuggingFace(61, CONFIGS[name]).eval() for _ in range(2))
    assert len(net.blocks) == 2 and net(TOKENS).shape == (2, 15, 61)
    assert torch.equal(net(TOKENS), net.model(TOKENS).logits)
    assert torch.equal(net.head(net.hidden(TOKENS)), net(TOKENS))
    assert all(key.startswith("model.") for key in net.state_dict())  # nothing twice
    write_net(net, tmp_path, "hf", "fp32")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(reference(TOKENS).logits, net(TOKENS))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [type(reference).__name__]
    load_weights(back, find_weights(tmp_path))
    assert torch.equal(back(TOKENS), net(TOKENS))
    # A table of learned positions bounds the context. Rotary positions have no bound.
    assert getattr(net, "max_seq_len", None) == (32 if name == "gpt2" else None)
    drawn = generate(net, [5], 33, Sampling(), torch.Generator().manual_seed(0))
    assert len(list(drawn)) == 33


def step_of(config: dict) -> Run:
    """Take a step of train.py."""
    run = train(
        "model=hugging_face", "model.vocab_size=256", "trainer.accelerator=cpu",
        "model.config=" + json.dumps(config).replace('"', ""), "trainer.max_steps=1",
        "data.seq_len=16", "data.batch_size=2", "data.num_samples=8", "logger=none",
    )  # fmt: skip
    assert run.code == 0, run.err
    return run


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])  # a tied head and transposed matrices; neither
def test_it_takes_a_step_of_train_py(name):
    parameters = dict(HuggingFace(256, CONFIGS[name]).named_parameters())  # a tied head once
    assert step_of(CONFIGS[name]).state(1)["weights"].keys() == parameters.keys()


def test_a_model_that_bounds_its_logits_trains_by_its_forward():
    sizes = SIZES | {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 1e-3}
    run = step_of(sizes)
    assert "computed from the logits of forward" in run.out + run.err
    # All logits are below 0.001, so that the net cannot tell one token from another.
    assert run.metrics["val/loss"] == pytest.approx(math.log(256), abs=0.003)


def test_a_model_that_is_none_and_a_missing_folder_are_one_line(tmp_path):
    for word, code in (("model.config={model_type: vit}", 2), ("model.path=missing", 66)):
        ended = answer(f"model=hugging_face trainer.accelerator=cpu '{word}'", tmp_path)
        assert (ended.code, len(ended.err)) == (code, 1), ended.err


def test_a_file_of_a_model_without_its_head_and_with_masks_is_read(tmp_path):
    """The published weights of GPT-2 have this form."""
    net, back = (HuggingFace(61, CONFIGS["gpt2"]).eval() for _ in range(2))
    write_net(net, tmp_path, "hf", "fp32")
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors  # a tied tensor has the first of its names
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    save_file(bare, tmp_path / "model.safetensors")
    load_weights(back, find_weights(tmp_path))
    assert torch.equal(back(TOKENS), net(TOKENS))
    state = back.from_hugging_face({"model_type": "gpt2"}, bare)
    assert state.keys() == {name for name, _ in back.named_parameters()}  # a tied head once


def test_a_folder_is_read_as_data(tmp_path):
    keys = {
        **CONFIGS["llama"], "vocab_size": 61, "dtype": "bfloat16",
        "auto_map": {"AutoModelForCausalLM": "evil.Evil"}, "_attn_implementation": "evil/kernel",
        "inner": {"auto_map": "evil.Evil", "size": 1},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(keys))
    net = HuggingFace(61, {"num_hidden_layers": 3}, str(tmp_path))
    assert type(net.model).__name__ == "LlamaForCausalLM" and len(net.blocks) == 3
    assert net.model.config._attn_implementation in ("sdpa", "eager")
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert net.model.config.inner == {"size": 1}
