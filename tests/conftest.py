"""Give each test one thread, a fixed seed, no network, and its own output folder."""

from __future__ import annotations

import gc
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["GPTRAIN_CONF"] = str(Path(__file__).parents[1] / "conf")  # tests may change the folder
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the folder
    # The user's key, which signs runs, is stored in this folder.
    os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="gptrain-tests-")
    os.environ["GPTRAIN_TEST_RUNS"] = os.environ["XDG_CONFIG_HOME"] + "/runs"  # tests/run.py

# A shell starts its background jobs with SIGINT ignored, and their children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from no_network import forbid_network

from tests.fast import make_fast

ROOT = Path(__file__).parents[1]
# The longest files start first, because the last file to end decides how long the suite takes.
LONGEST = [
    "test_interruption", "test_refused", "test_table", "test_run_options", "test_golden",
    "test_nodes", "test_readme", "test_collectives", "test_launchers", "test_slurm_cluster",  # slow
    "test_own_parts", "test_text_data", "test_sweeps", "test_own_nets", "test_checkpoint_store",
    "test_own_modules", "test_own_data", "test_watchdog",
    "test_lightning_features", "test_hugging_face", "test_models", "test_generate", "test_finite",
    "test_train", "test_mirror", "test_export", "test_resume_changes",
]  # fmt: skip

forbid_network()
make_fast()
with suppress(ImportError):  # hypothesis belongs to the extra `dev`
    import hypothesis

    # A busy machine must not fail a test, and examples must not be stored in the checkout.
    hypothesis.settings.register_profile("suite", deadline=None, database=None)
    hypothesis.settings.load_profile("suite")


# Packages of the extra `dev` that test files import at the top.
EXTRAS = ("hypothesis", "safetensors", "transformers", "gptrain.export")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run three files at a time if pytest-xdist is installed and `-n` was not typed.

    Tests of GPUs run one at a time: they measure speed and memory, and print a table.

    The tests of a file stay in one process, because they share fixtures. The mode `loadgroup` does
    not work here: workers read it from the command line only, and would see no groups.
    """
    option = config.option
    is_worker = "PYTEST_XDIST_WORKER" in os.environ or hasattr(config, "workerinput")
    if is_worker or not config.pluginmanager.has_plugin("xdist"):
        return
    if option.numprocesses is not None or option.markexpr == "gpu":  # -n was typed
        return
    if not option.usepdb and not option.collectonly:
        option.numprocesses, option.dist, option.loadscopereorder = 3, "loadfile", False


class NeedsExtra(pytest.Module):
    """A test file that is skipped because a package is not installed."""

    missing = ""

    def collect(self) -> list:
        pytest.skip(f"needs {self.missing}: pip install -e '.[dev]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> object:
    text = module_path.read_text()
    imported = (name for name in EXTRAS if f"\nimport {name}" in text or f"\nfrom {name}" in text)
    missing = [name for name in imported if find_spec(name) is None]
    if not missing:
        return None
    module = NeedsExtra.from_parent(parent, path=module_path)
    module.missing = ", ".join(missing)
    return module


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):
        return  # one process runs the tests in the order of the command line
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    engine = item.get_closest_marker("engine")
    missing = [name for name in (engine.args if engine else ()) if find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install -e '.[engines]'")
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no GPU")


def pytest_collection_finish() -> None:
    """Exclude all objects made so far from garbage collection, which each run performs."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the suite's configuration folder, with the key in it."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["XDG_CONFIG_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _fixed_seed():
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _own_output(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GPTRAIN_OUTPUT_DIR", str(tmp_path_factory.mktemp("outputs")))


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess]:
    """Return a function that runs `python <arguments>` in a new process, with text output."""

    def run(*arguments: str, timeout_s: float = 300, **options) -> subprocess.CompletedProcess:
        options = {"cwd": ROOT, **options}
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            **options,
        )

    return run


@pytest.fixture
def typed(monkeypatch, capfd) -> Callable[..., tuple[int, str, str]]:
    """Return a function that calls a command's `main` with these words on the command line.

    The function returns the exit code, stdout and stderr.
    """

    def run(main: Callable[[], object], *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["command", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code or 0, *capfd.readouterr()

    return run


@pytest.fixture
def launched(monkeypatch):
    """Return a function that puts this process into the environment of torchrun.

    It takes the rank, the number of ranks, the local rank and the number of ranks of a node.
    """
    from gptrain.runtime.process import TORCHRUN

    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)

    def put(*numbers: int) -> None:
        for name, number in zip(TORCHRUN, numbers, strict=True):
            monkeypatch.setenv(name, str(number))

    return put


# The net and the batches are so small that a step takes milliseconds.
TINY = (
    "model=gpt_nano", "model.d_model=32", "model.n_heads=2", "model.n_layers=2",
    "data.seq_len=17", "data.batch_size=4", "trainer.accelerator=cpu", "trainer.max_steps=4",
    "trainer.limit_val_batches=2", "trainer.enable_progress_bar=false",
)  # fmt: skip


@dataclass
class Finished:
    """A finished run: its exit code, stdout, stderr and folder."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def metrics(self) -> dict[str, float]:
        return json.loads((self.folder / "result.json").read_text())["metrics"]

    def state(self, step: int) -> dict:
        """Return the content of the checkpoint of a step, with full tensors."""
        from tests.run import read_state

        state = read_state(self.folder / "checkpoints" / f"step-{step:08d}")
        optimizer = state["optimizer"]
        groups = {"state": optimizer["state"], "param_groups": optimizer["groups"]}
        weights = state["weights"]
        if "token_embedding.weight" in weights:  # a tied weight is saved once
            weights.setdefault("head.weight", weights["token_embedding.weight"])
        about = {"state_dict": weights, "optimizer_states": [groups], "rng": state["rng"]}
        return state["counters"] | about

    def cut_back(self, step: int) -> None:
        """Change the folder as if the run had been killed after the checkpoint of this step."""
        for path in (self.folder / "checkpoints").glob("step-*"):
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)
        (self.folder / "result.json").unlink()

    @property
    def rows(self) -> list[dict]:
        """Rows of metrics.jsonl (`logged_rows`)."""
        return logged_rows(self.folder)

    def losses(self) -> list[float]:
        """Return train/loss of every logged step."""
        return [row["train/loss"] for row in self.rows if row["train/loss"] is not None]


def logged_rows(folder: Path) -> list[dict]:
    """Return the rows of metrics.jsonl, each with all names: None where a step lacks a value."""
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


@pytest.fixture
def train(monkeypatch, capfd, tmp_path) -> Callable[..., Finished]:
    """Return a function that runs train.py with TINY and its arguments, in this process.

    The process imports torch and Lightning only once for all runs.
    """

    def run(*overrides: str, name: str = "run", tiny: bool = True) -> Finished:
        from forked import forked_ranks

        folder = tmp_path / name
        rank_files = (tmp_path / f"{name}.out", tmp_path / f"{name}.err")
        options = [f"run_dir='{folder}'", *(TINY if tiny else ()), *overrides]
        monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), *options])
        code = 0
        for path in rank_files:
            path.write_bytes(b"")
        with forked_ranks(*rank_files):
            try:
                runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
            except SystemExit as left:
                code = left.code or 0
        out, err = (
            text + path.read_text(errors="replace")
            for text, path in zip(capfd.readouterr(), rank_files, strict=True)
        )
        return Finished(code, out, err, folder)

    return run


CORPUS = "naïve café, 數據 and def f(x): return x\n" * 40


@pytest.fixture
def speaker(train, tmp_path, tmp_path_factory) -> Path:
    """Return the folder of a run on CORPUS. The folder was moved, and the corpus was deleted."""
    kept = tmp_path_factory.getbasetemp() / "speaker"
    if not kept.exists():
        text = tmp_path_factory.mktemp("elsewhere") / "corpus.txt"
        text.write_text(CORPUS)
        run = train(
            "model=llama_nano", "model.n_heads=4", "model.n_kv_heads=2", "model.d_ff=64",
            "model.vocab_size=270", "data=text", f"data.path={text}", "data.tokenizer=bpe",
            "data.val_fraction=0.5", "logger=none",
            "callbacks=none", "trainer.max_steps=2", f"output_dir={tmp_path / 'cache'}",
        )  # fmt: skip
        assert run.code == 0, run.err
        # The printed command needs no data.path, because the run folder is signed.
        assert "data.path" not in run.out.rpartition("task=test")[2]
        shutil.rmtree(tmp_path / "cache")
        text.unlink()
        run.folder.rename(kept)
    return shutil.copytree(kept, tmp_path / "moved")


@pytest.fixture
def saved_twice(train, tmp_path, tmp_path_factory) -> Finished:
    """Return a run with two checkpoints. The first one is better, as the learning rate is too high.

    The run is trained once per process, and each test gets a copy.
    """
    kept = tmp_path_factory.getbasetemp() / "saved_twice"
    if kept.exists():
        return Finished(0, "", "", shutil.copytree(kept, tmp_path / "run"))
    run = train(
        "logger=none", "trainer.val_check_interval=2", "optimizer.lr=0.3", "model.dropout=0.1",
        "scheduler.warmup_steps=3", "scheduler.start_factor=0.0001", "data.batch_size=2",
        "trainer.accumulate_grad_batches=2",
    )  # fmt: skip
    assert run.code == 0, run.err
    shutil.copytree(run.folder, kept)
    return run
