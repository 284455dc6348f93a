"""What a net writes at the end of its training; how it draws: tests/test_sampling.py."""

import math
import re

import pytest
import runs as claims


def test_a_net_that_is_sharded_writes_what_one_process_writes(runs, tmp_path_factory):
    path = claims.shared_folder(tmp_path_factory) / "text.txt"
    path.write_text("to be or not to be " * 400)
    words = (
        "trainer.max_steps=2", "+callbacks.sample._target_=gptrain.lit.callbacks.SampleText",
        "+callbacks.sample.prompt='not '", "+callbacks.sample.n_tokens=10",
    )  # fmt: skip
    texts = []
    for name in ("single", "tensor_parallel"):
        run = runs(
            *claims.PLACES[name], *words, model=(*claims.MODEL, "model.vocab_size=256"),
            data=("data=text", f"data.path={path}", f"output_dir={path.parent}"),
        )  # fmt: skip
        texts.append(re.search(r"^sample {4}(not .*)$", run.said, re.MULTILINE).group(1))
        bits = [nats / math.log(2) for nats in run.column("val/loss")]  # a token is a byte
        assert run.column("val/bits_per_byte") == pytest.approx(bits, rel=1e-6)
    assert texts[0] == texts[1] != "not "
