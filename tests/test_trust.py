"""An untrusted run folder is read as data, never executed as code."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from gptrain.checkpoints.signature import read_key, read_signed_record, sign_record
from gptrain.config import ConfigError
from gptrain.config.from_run import check_values, expand, words_to_repeat
from gptrain.config.outside import find_outside
from gptrain.core.errors import ConfigIssue
from tests.refused.hostile import fill

SAVER = "lightning.pytorch.callbacks.ModelCheckpoint"
# (group, target) pairs that an untrusted run may name.
ALLOWED = [
    ("model", "gptrain.models.SimpleGPT"),
    ("model", "project.net.MyLSTM"),  # the project's own conf/ names this class
    ("module", "gptrain.lit.LanguageModel"),
    ("data", "gptrain.data.TextDataset"),
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
    ("model", "gptrain.config.preflight.devices.os.system"),
    ("model", "torch.optim.SGD"),
    ("model", "outputs.stranger.Net"),
    ("model", 5),
    ("model", "tests.tools.campaign.faults.Fault"),
    ("module", "gptrain.lit.LanguageModel.load_from_checkpoint"),
    ("module.metrics.a", "torchmetrics.image.fid.FrechetInceptionDistance"),
    ("data", "gptrain.checkpoints.fileops.remove_tree"),
    ("callbacks", "tests.tools.campaign.faults.Fault"),
    ("callbacks", "gptrain.assemble.build"),
    ("callbacks", "lightning.pytorch.callbacks.os.system"),
]


def refused(values: dict, *allowed: str) -> list[ConfigIssue]:
    return list(check_values(values, allowed))


@pytest.mark.parametrize("group, target", ALLOWED)
def test_a_class_that_conf_or_a_library_names_in_its_group_is_taken(group, target):
    assert not refused({group: {"_target_": target}})


@pytest.mark.parametrize("group, target", REFUSED)
def test_other_targets_are_refused_in_every_config_group(group, target):
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
    assert list(check_values({"model": values["callbacks"]["y"]}, (), [tmp_path]))  # another group


@pytest.mark.parametrize("name", ["/victim", "../victim", "~/x", "{step:c}{step:c}x", "a/b", None])
def test_the_file_of_an_untrusted_callback_is_written_where_gptrains_files_are(name):
    saver = {"_target_": SAVER, "filename": name}
    assert bool(refused({"callbacks": {"a": saver}})) == (name is not None)
    saver["filename"] = "{epoch}-{step}"
    assert not refused({"callbacks": {"a": saver}})


def test_an_untrusted_run_does_not_choose_a_folder_to_write_to():
    names = [
        "cache_dir",
        "default_root_dir",
        "dirpath",
        "exclude_batches_path",
        "mirror",
        "save_dir",
    ]
    problems = refused({"callbacks": {"a": {"_target_": SAVER, **dict.fromkeys(names, "x")}}})
    assert [problem.key for problem in problems] == [f"callbacks.a.{name}" for name in names]
    assert all("where files are written" in problem.message for problem in problems)
    (problem,) = refused({"model": {"_target_": "mine.nets.Net"}})
    assert problem.hint == "'allowed_targets=[mine]', if you trust its code"


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


# A run that this user started on this machine


@pytest.fixture
def configuration(tmp_path, monkeypatch) -> Path:
    """Return a configuration folder of this test's own, in which there is no key."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    return tmp_path / "configuration"


@pytest.fixture
def own_run(train, configuration, tmp_path_factory) -> Path:
    """Return the folder of a run that this user started with text outside of the project."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "text.txt").write_text("a text outside of the project\n" * 40)
    words = ("data=text", f"data.path={folder}", "data.val_fraction=0.3", "data.seq_len=8")
    run = train(*words, "trainer.max_steps=1", "logger=none", "callbacks=none")
    assert run.code == 0, run.err
    assert "task=test" in run.out and "data.path" not in run.out.rpartition("task=test")[2]
    return run.folder


def test_the_users_own_run_is_evaluated_without_repeating_its_paths(own_run, train, monkeypatch):
    test = train(f"from_run={own_run}", "task=test", name="test", tiny=False)
    assert test.code == 0 and "test/loss" in test.metrics, test.err
    monkeypatch.setenv("HOME", str(own_run.parent))
    again = train(f"from_run='~/{own_run.name}'", "seed=2", name="again", tiny=False)
    assert again.code == 0 and read_signed_record(again.folder), (
        again.err
    )  # the new run is trusted, too


def test_whatever_is_changed_in_a_signed_record_makes_the_run_untrusted(
    own_run, configuration, tmp_path
):
    moved = own_run.rename(tmp_path / "moved")  # a folder may move
    assert read_signed_record(moved) and not words_to_repeat(["data.path=/etc"], moved)
    for name in ("config.yaml", "hydra.yaml", "overrides.yaml", "signature", "../.lock"):
        copy = shutil.copytree(moved, tmp_path / "copy")
        file = copy / ".hydra" / name
        if name == "../.lock":
            file.write_text(file.read_text().replace('"run_id": "', '"run_id": "0'))
        else:
            file.write_bytes(file.read_bytes() + b"\n")
        assert read_signed_record(copy) is None, name
        # A place to which a run writes is never taken, so that it need not be repeated.
        words = ["checkpoint.mirror=/elsewhere", "data.path=/etc"]
        assert words_to_repeat(words, copy) == ["data.path=/etc"]
        with pytest.raises(ConfigError, match="not started by you on this machine: was started"):
            expand([f"from_run={copy}"])
        shutil.rmtree(copy)
    shutil.rmtree(configuration)  # another machine has another key
    with pytest.raises(ConfigError, match="not started by you on this machine: was started"):
        expand([f"from_run={moved}"])
    read_key(make=True)
    assert read_signed_record(moved) is None


def test_a_run_that_takes_its_words_from_an_untrusted_run_is_not_signed(
    train, configuration, tmp_path
):
    fill(tmp_path / "theirs", {".hydra/overrides.yaml": b"[seed=7]"})
    words = ("trainer.max_steps=1", "logger=none", "allowed_targets=[tests]")
    run = train(f"from_run={tmp_path / 'theirs'}", *words)
    assert run.code == 0 and read_key(make=True), run.err
    # The command that evaluates the run repeats what nobody may take from an unsigned record.
    assert "allowed_targets=[tests]" in run.out.rpartition("task=test")[2]
    assert not (run.folder / ".hydra" / "signature").exists()


def test_the_key_is_made_once_and_is_readable_only_by_this_user(configuration):
    assert read_key() is None and not configuration.exists()
    with ThreadPoolExecutor(16) as pool:
        keys = set(pool.map(lambda _: read_key(make=True), range(64)))
    assert len(keys) == 1 and len(keys.pop()) == 32
    folder = configuration / "gptrain"
    assert os.listdir(folder) == ["key"]
    modes = [path.stat().st_mode & 0o777 for path in (folder, folder / "key")]
    assert modes == [0o700, 0o600]
    descriptors = Path("/proc/self/fd")  # on Linux only
    n_open = len(os.listdir(descriptors)) if descriptors.exists() else 0
    assert all(read_key(make=number % 2 == 0) for number in range(9))
    assert not n_open or len(os.listdir(descriptors)) < n_open + 9


def test_a_key_that_others_could_read_or_replace_is_not_used(configuration, tmp_path):
    assert read_key(make=True)
    folder, key = configuration / "gptrain", configuration / "gptrain" / "key"
    for path, bad_modes, good in ((key, (0o644, 0o640), 0o600), (folder, (0o777, 0o720), 0o700)):
        for bad in bad_modes:  # also only a group may not read the key, or write in its folder
            path.chmod(bad)
            assert read_key(make=True) is None
        path.chmod(good)
    assert read_key(make=True)
    key.rename(tmp_path / "other")
    key.symlink_to(tmp_path / "other")
    assert read_key(make=True) is None
    key.unlink()
    key.write_bytes(b"short")
    key.chmod(0o600)
    assert read_key(make=True) is None


def test_a_user_without_a_home_folder_has_no_key(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "relative")
    assert read_key(make=True) is None and not os.path.exists("relative")
    fill(tmp_path, {".hydra/signature": b"of an earlier start, which had a key"})
    sign_record(tmp_path)
    assert not (tmp_path / ".hydra" / "signature").exists()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")  # does not count, by the standard
    assert read_key(make=True) == (tmp_path / ".config" / "gptrain" / "key").read_bytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_folder_or_a_link_of_another_user_is_not_used_for_the_key(configuration, tmp_path):
    (tmp_path / "own").mkdir(mode=0o700)
    configuration.mkdir()
    link = configuration / "gptrain"
    link.symlink_to(tmp_path / "own")
    assert read_key(make=True)
    os.lchown(link, 12345, 12345)
    assert read_key(make=True) is None
    link.unlink()
    link.mkdir(mode=0o700)
    os.chown(link, 12345, 12345)
    assert read_key(make=True) is None


def test_a_home_that_cannot_be_written_is_no_error(train, configuration):
    configuration.write_text("not a folder")
    run = train("trainer.max_steps=1", "logger=none")
    assert run.code == 0 and not run.err, run.err
    assert not (run.folder / ".hydra" / "signature").exists()


def test_links_in_a_circle_are_followed_once(tmp_path):
    for name in ("corpus", "shared"):
        (tmp_path / name).mkdir()
    (tmp_path / "corpus" / "more").symlink_to(tmp_path / "shared")
    (tmp_path / "shared" / "again").symlink_to(tmp_path / "shared")
    assert find_outside(str(tmp_path / "corpus"), [tmp_path]) is None
    (tmp_path / "shared" / "etc").symlink_to("/etc")
    assert "shared/etc, a link that leads" in find_outside(str(tmp_path / "corpus"), [tmp_path])
