"""The recipe `distill`: its loss, and a student that has learned from its teacher."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import gptrain
from gptrain.models.attention import layout_argument
from recipes.distill import Distilled

WORDS = ("model=llama_nano", "model.d_model=16", "model.n_heads=2", "model.n_kv_heads=1",
         "model.n_layers=1", "model.d_ff=32", "data=dummy_text", "data.seq_len=17",
         "data.train.num_samples=64", "trainer.accelerator=cpu", "callbacks.sample=null",
         "trainer.limit_val_batches=1", "data.batch_size=4",
         "data.global_batch_size=4")  # fmt: skip


def test_the_loss_is_the_cross_entropy_and_the_divergence_from_the_teacher(tmp_path, train):
    # The loss grows in the last step, so that the best checkpoint is not the last one.
    words = ("trainer.val_check_interval=1", "scheduler=constant", "optimizer.lr=0.3")
    train(*WORDS, f"run_dir={tmp_path}/teacher", "trainer.max_steps=2", *words)
    last = gptrain.load(tmp_path / "teacher", "last")
    student = (f"run_dir={tmp_path}/student", f"module.teacher={tmp_path}/teacher", "seed=1")
    train(*WORDS, "experiment=distill", *student, "trainer.max_steps=2")
    net = gptrain.load(tmp_path / "student", trust=True)
    teacher = gptrain.load(tmp_path / "teacher")
    assert not torch.equal(*(next(net.parameters()) for net in (teacher, last)))
    tokens, targets = torch.randint(256, (2, 3, 8), generator=torch.Generator().manual_seed(0))
    targets[0, :5] = -100
    documents = torch.tensor([[0] * 3 + [1] * 5] * 3)  # do not see each other
    for weight, temperature, *packed in ((0.3, 2.0), (1.0, 1.0), (0.3, 0.05, documents)):
        module = Distilled(
            net, lambda module: None, teacher=str(tmp_path / "teacher"), weight=weight,
            temperature=temperature,
        )  # fmt: skip
        logged: dict[str, torch.Tensor] = {}
        module.log = logged.__setitem__
        loss = module.training_step((tokens, targets, *packed), 0)
        counted = targets != -100
        layout = layout_argument(*packed or [None])
        both = (n(tokens, **layout)[counted] / temperature for n in (net, teacher))
        logits, teacher_logits = both
        kl = F.kl_div(logits.log_softmax(-1), teacher_logits.softmax(-1), reduction="batchmean")
        expected = (1 - weight) * F.cross_entropy(logits * temperature, targets[counted])
        torch.testing.assert_close(loss, expected + weight * temperature**2 * kl)
        torch.testing.assert_close(logged["train/kl"], kl, rtol=1e-3, atol=1e-5)
        assert module.training_step((tokens, torch.full_like(targets, -100), *packed), 0) == 0
    assert len(module.state_dict()) == len(net.state_dict())  # the teacher is not saved
    module.to("meta").on_fit_start()  # the teacher follows to the device of the rank
    assert all(parameter.is_meta for parameter in module.teacher[0].parameters())
