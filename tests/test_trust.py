"""What is in somebody else's run folder: data, never code."""

from __future__ import annotations

import pytest
import yaml

from gptrain.config.from_run import check_values
from gptrain.core.errors import ConfigIssue

SAVER = "lightning.pytorch.callbacks.ModelCheckpoint"
# (group, target) that a stranger's run may name.
ALLOWED = [
    ("model", "gptrain.models.SimpleGPT"),
    ("model", "project.net.MyLSTM"),  # of the project's own conf/
    ("module", "gptrain.lit.LanguageModel"),
    ("data", "gptrain.data.TextDataset.from_corpus"),
    ("optimizer", "torch.optim.SGD"),
    ("scheduler", "gptrain.optim.warmup_cosine"),
    ("scheduler", "torch.optim.lr_scheduler.StepLR"),
    ("callbacks", "lightning.pytorch.callbacks.LearningRateMonitor"),
    ("module.metrics.a", "torchmetrics.classification.MulticlassAccuracy"),
]
# ... and may not.
REFUSED = [
    ("model", "os.system"),
    ("model", "torch.os.system"),
    ("model", "torch.load"),
    ("model", "torchmetrics.text.BERTScore"),
    ("model", "gptrain.config.preflight.os.system"),
    ("model", "torch.optim.SGD"),
    ("model", "outputs.stranger.Net"),
    ("model", 5),
    ("model", "tests.campaign.faults.Fault"),
    ("module", "gptrain.lit.LanguageModel.load_from_checkpoint"),
    ("module.metrics.a", "torchmetrics.image.fid.FrechetInceptionDistance"),
    ("data", "gptrain.checkpoints.fileops.remove_tree"),
    ("callbacks", "tests.campaign.faults.Fault"),
    ("callbacks", "gptrain.assemble.build"),
    ("callbacks", "lightning.pytorch.callbacks.os.system"),
]


def refused(values: dict, *allowed: str) -> list[ConfigIssue]:
    return list(check_values(values, allowed))


@pytest.mark.parametrize("group, target", ALLOWED)
def test_a_class_that_conf_or_a_library_names_in_its_group_is_taken(group, target):
    assert not refused({group: {"_target_": target}})


@pytest.mark.parametrize("group, target", REFUSED)
def test_nothing_else_is_taken_wherever_it_stands(group, target):
    assert refused({group: {"_target_": target}})
    good = {"_target_": "gptrain.models.SimpleGPT", "x": [{"y": {"_target_": target}}]}
    assert refused({group: good})


@pytest.mark.parametrize("key", ["_args_", "_partial_", "_recursive_", "_convert_"])
def test_a_class_gets_keywords_only(key):
    """Positional arguments have no key by which they could be judged: `_args_: [/anywhere]`."""
    assert refused({"callbacks.x": {"_target_": SAVER, key: ["/victim"]}})


def test_a_config_dir_that_is_typed_names_classes_too(tmp_path):
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "mine.yaml").write_text("x: {_target_: mine.Callback}")
    values = {"callbacks": {"y": {"_target_": "mine.Callback"}}}
    assert list(check_values(values)) and not list(check_values(values, (), [tmp_path]))
    assert list(check_values({"model": values["callbacks"]["y"]}, (), [tmp_path]))  # elsewhere


@pytest.mark.parametrize("name", ["/victim", "../victim", "~/x", "{step:c}{step:c}x", "a/b", None])
def test_a_file_of_a_strangers_callback_lies_where_ours_do(name):
    saver = {"_target_": SAVER, "filename": name}
    assert bool(refused({"callbacks": {"a": saver}})) == (name is not None)
    saver["filename"] = "{epoch}-{step}"
    assert not refused({"callbacks": {"a": saver}})


def test_a_package_is_allowed_by_the_user_and_never_imported_to_judge(tmp_path, monkeypatch):
    code = "from torch import nn\nopen(__file__ + '.ran', 'w')\nclass Net(nn.Module): ..."
    (tmp_path / "theirs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    values = {"model": {"_target_": "theirs.Net"}}
    (problem,) = refused(values)
    assert "allowed_targets=[theirs]" in problem.line
    assert not refused(values, "theirs")
    assert not list(tmp_path.glob("*.ran"))


@pytest.mark.parametrize(
    "value",
    [
        "${oc.create:'{_target_: torch.load}'}", "\\${oc.create:'{_target_: torch.load}'}",
        "${oc.env:HOME}", "${oc.decode:x}", "${${a}}", "${hydra:run.dir}", "${a", "a$",
        "${a}{oc.create:x}", "${a}${b}", "${plus:$,'{oc.create:x}'}",
    ],
)  # fmt: skip
def test_a_value_that_runs_a_resolver_or_could_become_one_that_does_is_refused(value):
    assert refused({"a": "b", "model": {"x": [value]}})
    assert not refused({"a": "b", "model": {"x": ["${a}", "b/${..a}.c"]}})


def test_the_record_of_a_run_is_of_plain_values(train):
    run = train("trainer.max_steps=1")
    record = yaml.safe_load((run.folder / ".hydra" / "config.yaml").read_text())
    assert record["data"]["val"]["seed"] == 43 and "${" not in str(record)
