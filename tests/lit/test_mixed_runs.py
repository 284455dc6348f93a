"""A run on a mixture of datasets reports the loss of each part."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lit.fit import TWO, fit


@pytest.fixture
def mixed(tmp_path) -> tuple[str, ...]:
    """Return the overrides of a mixture of a text file and of token files."""
    (tmp_path / "book.txt").write_text("".join(f"{n} and {n + 1}\n" for n in range(100)))
    for name, n_tokens in (("train", 3000), ("val", 200)):
        tokens = np.random.default_rng(n_tokens).integers(0, 256, n_tokens)
        tokens.astype("uint16").tofile(tmp_path / f"{name}.bin")
    book, web = "data.parts.book", "data.parts.web"
    return (
        "data=mixture", f"+data@{book}=text", f"{book}.path={tmp_path}/book.txt",
        f"+data@{web}=tokens", f"{web}.train_path={tmp_path}/train.bin",
        f"{web}.val_path={tmp_path}/val.bin", f"+{book}.weight=3",
        "model.vocab_size=256", f"output_dir={tmp_path}/out",
    )  # fmt: skip


def test_two_ranks_read_the_same_samples_and_report_the_same_losses_as_one(mixed):
    words = (*mixed, "trainer.max_steps=3", "objective=val/web/loss")
    one_rank, two_ranks = fit(*words), fit(*words, *TWO, "data.batch_size=2")
    for name in ("train/loss", "val/loss", "val/book/loss", "val/web/loss"):
        assert two_ranks.column(name) == pytest.approx(one_rank.column(name), rel=1e-5)
    # All ranks count: 3 of 12 samples are of this part, which has 2999 // 17 = 176 samples.
    assert one_rank.line("data") == two_ranks.line("data")
    assert "web 0.25: 3,000 tokens · 0.017 epochs" in one_rank.line("data")
    words = (*words, "task=validate", f"ckpt_path={one_rank.folder}")
    again = fit(*words)
    for name in ("val/loss", "val/book/loss", "val/web/loss"):
        assert again.metrics[name] == pytest.approx(one_rank.metrics[name], rel=1e-6)
    one_batch_each = fit(*words, "trainer.limit_val_batches=1").metrics
    assert {"val/book/loss", "val/web/loss"} <= one_batch_each.keys()
