"""One thread, a fixed seed, no network, and a folder of its own for all that a run writes."""

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
os.environ["GPTRAIN_CONF"] = str(Path(__file__).parents[1] / "conf")  # wherever a test goes
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the folder
    os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="gptrain-tests-")  # of the user's key

# A shell's job in the background ignores it, and all that such a job starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from composed_once import compose_once
from no_network import forbid_network

ROOT = Path(__file__).parents[1]
# Files that take longest begin first: the last ones to end decide how long the suite takes.
LONGEST = [
    "test_nodes", "test_slurm_cluster", "test_adopt", "test_launchers", "test_trace",  # slow
    "test_faults", "test_readme", "test_bench", "test_collectives", "test_sweeps",
    "test_fitting", "test_signals_run", "test_ladder", "test_project",
    "test_run_fsdp", "test_run_mixes", "test_run_options", "test_generate",
    "test_lightning_features", "test_run_nets", "test_run_diloco", "test_resume_changes",
    "test_train", "test_plan_accuracy", "test_learning_rate", "test_run_tensor_parallel",
    "test_mirror", "test_run_pipeline", "test_run_one_device", "test_own_modules",
    "test_run_ddp", "test_untrusted_files", "test_watchdog",
]  # fmt: skip

forbid_network()
compose_once()
with suppress(ImportError):  # an extra
    import hypothesis

    # No deadlines: a busy machine is no fault. No folder of examples in the checkout.
    hypothesis.settings.register_profile("suite", deadline=None, database=None)
    hypothesis.settings.load_profile("suite")


# Packages of the extra `dev` that files of tests import at their head.
EXTRAS = ("hypothesis", "safetensors", "transformers", "gptrain.export")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Three files at a time where pytest-xdist is there and nothing else was typed.

    A file's tests stay in one process, for they share what its fixtures make. Not `loadgroup`:
    workers take that from the words that were typed alone, and would know no groups.
    """
    option = config.option
    is_worker = "PYTEST_XDIST_WORKER" in os.environ or hasattr(config, "workerinput")
    if is_worker or not config.pluginmanager.has_plugin("xdist"):
        return
    if option.numprocesses is not None:  # typed
        return
    if not option.usepdb and not option.collectonly:
        option.numprocesses, option.dist, option.loadscopereorder = 3, "loadfile", False


class NeedsExtra(pytest.Module):
    """A file of tests that is skipped for want of a package."""

    missing = ""

    def collect(self) -> list:
        pytest.skip(f"needs {self.missing}: pip install -e '.[dev]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> object:
    text = module_path.read_text()
    imported = (name for name in EXTRAS if f"\nimport {name}" in text or f"\nfrom {name}" in text)
    missing = [name for name in imported if find_spec(name) is None]
    if not missing:
        return None
    found = NeedsExtra.from_parent(parent, path=module_path)
    found.missing = ", ".join(missing)
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
    """Not looked through each time that a run collects the garbage of the one before."""
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
def _nothing_of_the_run_before():
    """Reset what a run or a command leaves in its process.

    These are Hydra's config, the rank of Lightning's loggers and the handler of SIGPIPE.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if "hydra.core.hydra_config" in sys.modules:
        sys.modules["hydra.core.hydra_config"].HydraConfig.instance().cfg = None
    if "lightning.fabric" in sys.modules:
        sys.modules["lightning_utilities.core.rank_zero"].rank_zero_only.rank = 0


@pytest.fixture(autouse=True)
def _own_output(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GPTRAIN_OUTPUT_DIR", str(tmp_path_factory.mktemp("outputs")))


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess]:
    """Runs `python <arguments>` as a user would, from any folder; the output is text."""

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
    """Calls a command's main as if these words were typed: exit code, stdout, stderr."""

    def run(main: Callable[[], object], *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["command", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code or 0, *capfd.readouterr()

    return run


# A net and batches so small that a step takes milliseconds.
TINY = (
    "model=gpt_nano", "model.d_model=32", "model.n_heads=2", "model.n_layers=2",
    "data.seq_len=17", "data.batch_size=4", "trainer.accelerator=cpu", "trainer.max_steps=4",
    "trainer.limit_val_batches=2", "trainer.enable_progress_bar=false",
)  # fmt: skip


@dataclass
class Finished:
    """What is left of a run: exit code, what it printed, and its folder."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def metrics(self) -> dict[str, float]:
        return json.loads((self.folder / "result.json").read_text())["metrics"]

    def state(self, step: int) -> dict:
        """The checkpoint of one step."""
        from gptrain.checkpoints.amendment import load_state

        return load_state(self.folder / "checkpoints" / f"step-{step:08d}")

    def cut_back(self, step: int) -> None:
        """Makes it a run that was killed some time after the checkpoint of this step."""
        for path in (self.folder / "checkpoints").glob("step-*"):
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)
        (self.folder / "result.json").unlink()

    def losses(self) -> list[float]:
        """train/loss of every logged step (logger=csv)."""
        import csv

        with open(self.folder / "metrics.csv", newline="") as file:
            rows = [row["train/loss"] for row in csv.DictReader(file)]
        return [float(loss) for loss in rows if loss]


@pytest.fixture
def train(monkeypatch, capfd, tmp_path) -> Callable[..., Finished]:
    """Runs train.py with TINY and these options, in this process: the imports are paid once."""

    def run(*overrides: str, name: str = "run", tiny: bool = True) -> Finished:
        from forked import forked_ranks

        folder, said = tmp_path / name, (tmp_path / f"{name}.out", tmp_path / f"{name}.err")
        options = [f"run_dir='{folder}'", *(TINY if tiny else ()), *overrides]
        monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), *options])
        code = 0
        for path in said:
            path.write_bytes(b"")
        with forked_ranks(*said):
            try:
                runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
            except SystemExit as left:
                code = left.code or 0
        out, err = (
            here + path.read_text(errors="replace")
            for here, path in zip(capfd.readouterr(), said, strict=True)
        )
        return Finished(code, out, err, folder)

    return run


CORPUS = "naïve café, 數據 and def f(x): return x\n" * 40


@pytest.fixture
def speaker(train, tmp_path, tmp_path_factory) -> Path:
    """A run on CORPUS, which lay elsewhere and is gone since, copied to another place."""
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
        assert "data.path" not in run.out.rpartition("task=test")[2]  # its own run is signed
        shutil.rmtree(tmp_path / "cache")
        text.unlink()
        run.folder.rename(kept)
    return shutil.copytree(kept, tmp_path / "moved")


@pytest.fixture
def saved_twice(train, tmp_path, tmp_path_factory) -> Finished:
    """A run with two checkpoints, the first the better one: the second step is far too long.

    Trained once for all tests of a process, each of which gets a copy.
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
