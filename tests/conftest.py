"""Give each test one thread, a fixed seed, no network, and its own output folder."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["GPTRAIN_CONF"] = str(Path(__file__).parents[1] / "conf")  # tests may change the folder
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the folder
    # The user's key, which signs runs, is stored in this folder.
    os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="gptrain-tests-")
    # Runs and composed configs that all tests share, also those of other processes.
    os.environ["GPTRAIN_TEST_RUNS"] = tempfile.mkdtemp(dir=os.environ["XDG_CONFIG_HOME"])

# A shell starts its background jobs with SIGINT ignored, and their children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest

from gptrain.core import shell
from tests.fast import make_fast
from tests.no_network import forbid_network
from tests.run import Run
from tests.run import train as run_train

ROOT = Path(__file__).parents[1]
# The longest files start first, because the last file to end decides how long the suite takes.
LONGEST = [
    "test_interruption", "test_table", "test_refused", "test_golden", "test_run_options",
    "test_nodes", "test_launchers", "test_readme", "test_slurm_cluster", "test_own_parts",
    "test_own_nets", "test_text_data", "test_checkpoint_store", "test_watchdog",
]  # fmt: skip

forbid_network()
make_fast()
# A busy machine must not fail a test, and examples must not be stored in the checkout.
hypothesis.settings.register_profile("suite", deadline=None, database=None)
hypothesis.settings.load_profile("suite")


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
def _fixed_seed_and_own_output(tmp_path_factory, monkeypatch):
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    monkeypatch.setenv("GPTRAIN_OUTPUT_DIR", str(tmp_path_factory.mktemp("outputs")))


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess]:
    """Return a function that runs `python <arguments>` in a new process, with text output."""

    def run(*arguments: str, timeout_s: float = 300, **options) -> subprocess.CompletedProcess:
        options = {"cwd": ROOT, "capture_output": True, "text": True, **options}
        words = [sys.executable, *map(str, arguments)]
        return subprocess.run(words, timeout=timeout_s, **options)

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


# The net and the batches are so small that a step takes milliseconds.
TINY = (
    "model=gpt_nano", "model.d_model=32", "model.n_heads=2", "model.n_layers=2",
    "data.seq_len=17", "data.batch_size=4", "trainer.accelerator=cpu", "trainer.max_steps=4",
    "trainer.limit_val_batches=2", "trainer.enable_progress_bar=false",
)  # fmt: skip


@pytest.fixture
def train(tmp_path) -> Callable[..., Run]:
    """Return a function that runs train.py with TINY and its arguments in a folder of the test."""

    def run(*words: str, name: str = "run", tiny: bool = True, **options) -> Run:
        place = shell.override("run_dir", tmp_path / name)
        return run_train(place, *(TINY if tiny else ()), *words, **options)

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
def saved_twice(tmp_path) -> Run:
    """Return a run with two checkpoints. The first one is better, as the learning rate is too high.

    The run is trained once, and each test gets a copy.
    """
    run = run_train(
        *TINY, "logger=none", "trainer.val_check_interval=2", "optimizer.lr=0.3",
        "model.dropout=0.1", "scheduler.warmup_steps=3", "scheduler.start_factor=0.0001",
        "data.batch_size=2", "trainer.accumulate_grad_batches=2",
    )  # fmt: skip
    assert run.code == 0, run.err
    return replace(run, folder=shutil.copytree(run.folder, tmp_path / "run"))
