"""The front door as a process: codes, one line per problem, once per job, nothing written."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from command_line import accepted, answer, refused
from omegaconf import DictConfig

from gptrain.config import ConfigError, check
from gptrain.config.cli import compose_command, run_command
from gptrain.config.schema import RunConfig, register
from gptrain.problems import JobFailed

NANO = ("model=gpt_nano", "trainer.accelerator=cpu")


@pytest.fixture
def outputs() -> Path:
    return Path(os.environ["GPTRAIN_OUTPUT_DIR"])


def test_a_wrong_command_writes_nothing_and_exits_2(command, outputs):
    done = command("train.py", "trainer.devices=0", "optimizer.lr=-1")
    assert done.returncode == 2 and done.stdout == ""
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "error"]
    assert list(outputs.iterdir()) == []


def test_a_wrong_command_is_answered_without_torch_or_lightning_or_numpy(command):
    code = """
import runpy, sys
sys.argv = ["train.py", "trainer.devices=0"]
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as end:
    heavy = {"torch", "lightning", "numpy", "multiprocessing.spawn"} & sys.modules.keys()
    print(end.code, sorted(heavy))
"""
    assert command("-c", code).stdout.strip() == "2 []"


def test_a_wrong_command_is_answered_soon(command):
    def seconds(*words: str) -> float:
        """Processor time: on a shared machine a clock measures somebody else's work, too."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command(*words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    hydra_s = min(seconds("-c", "import hydra") for _ in range(3))
    ours_s = min(seconds("train.py", "trainer.devices=0") for _ in range(3))
    assert ours_s <= 1.5 * hydra_s + 0.5


@pytest.mark.parametrize("words", [["--help"], ["--cfg", "job"], ["--info", "defaults"]])
def test_hydras_flags_work_and_import_nothing_heavy(command, words):
    code = f"""
import runpy, sys
sys.argv = ["train.py", *{words}]
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as end:
    print("code", end.code, {{"torch", "numpy"}} & sys.modules.keys())
"""
    done = command("-c", code)
    assert done.stdout.strip().endswith("code 0 set()"), done.stderr


@pytest.mark.parametrize("words", [["--help"], ["--info", "all"], ["--cfg", "job"]])
def test_a_reader_that_leaves_is_no_error(words):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "train.py", *words],
        cwd=Path(__file__).parents[1],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert done.stderr == "" and done.returncode == -signal.SIGPIPE


def test_help_fits_one_screen_and_names_every_choice(command):
    text = command("train.py", "--help").stdout
    assert len(text.splitlines()) <= 50
    for file in (Path(__file__).parents[1] / "conf").glob("*/*.yaml"):
        assert file.stem in text, file


def test_a_flag_on_a_wrong_command_is_one_line_too(command):
    for words in (["--cfg", "job"], ["--info", "all"]):
        done = command("train.py", *words, "modell.d_model=1")
        assert done.returncode == 2
        assert done.stderr.strip().splitlines()[-1].startswith("error: modell.d_model=1")


def test_under_torchrun_a_problem_is_told_once_and_no_rank_writes(command, outputs):
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    done = command(*launcher, "train.py", "trainer.devices=2", "optimizer.lr=-1")
    assert done.returncode != 0
    assert done.stderr.count("error: optimizer.lr=-1") == 1
    assert list(outputs.iterdir()) == []


def test_only_the_first_rank_speaks(capsys, monkeypatch):
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "LOCAL_WORLD_SIZE": 2}
    for rank, said in ((0, True), (1, False)):
        for name, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        assert run_command(never, ["trainer.devices=3"]) == 2
        assert bool(capsys.readouterr().err) == said


def test_a_launchers_broken_environment_is_a_line(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_command(never, []) == 2
    assert "error: " in capsys.readouterr().err


def test_a_sweep_inside_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    (line,) = refused("-m", "seed=1,2")
    assert "sweep" in line


def never(cfg: DictConfig) -> None:
    raise AssertionError("nothing may start")


def test_a_job_runs_once_with_the_config_it_was_checked_with():
    seen = []
    assert run_command(lambda cfg: seen.append(cfg.seed), ["seed=7", *NANO]) == 0
    assert seen == [7]


@pytest.mark.parametrize(
    "error, code, said",
    [
        (JobFailed(79, "told already"), 79, ""),
        (SystemExit(75), 75, ""),
        (KeyboardInterrupt(), 130, ""),
        (PermissionError(13, "Permission denied"), 73, "error: PermissionError"),
        (OSError(28, "No space left on device"), 74, "error: OSError"),
        (ZeroDivisionError("division by zero"), 70, "error: ZeroDivisionError: division by zero"),
    ],
)
def test_whatever_a_job_raises_is_a_code_and_at_most_one_line(error, code, said, capsys):
    def job(cfg):
        raise error

    assert run_command(job, list(NANO)) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(said) and all(line.startswith(said) for line in lines)


def test_debug_shows_the_traceback(capsys):
    def job(cfg):
        raise ZeroDivisionError("division by zero")

    run_command(job, [*NANO, "debug=true"])
    assert "Traceback" in capsys.readouterr().err


def test_in_a_sweep_a_failing_job_does_not_take_the_others_with_it(capsys):
    seen = []

    def job(cfg):
        seen.append(cfg.seed)
        if cfg.seed == 2:
            raise JobFailed(79, "loss is nan")
        if cfg.seed == 3:
            raise SystemExit(70)
        return float(cfg.seed)

    assert run_command(job, ["-m", "seed=1,2,3,4", *NANO]) == 79
    assert seen == [1, 2, 3, 4]
    table = capsys.readouterr().err.splitlines()[-5:]
    assert "failed (79)" in table[2] and "loss is nan" in table[2] and "seed=2" in table[2]
    assert "failed (70)" in table[3] and "val/loss 4" in table[4]


def test_jobs_that_cannot_run_are_announced_and_the_others_run(capsys):
    seen = []

    def job(cfg):
        check(cfg)
        seen.append(cfg.optimizer.lr)

    assert run_command(job, ["-m", "optimizer.lr=1e-3,-1,1e-4", *NANO]) == 2
    assert seen == [1e-3, 1e-4]
    assert capsys.readouterr().err.count("error: optimizer.lr=-1: must be > 0") == 1


def test_a_sweep_of_which_no_job_can_run_starts_none(outputs):
    assert len(refused("-m", "optimizer.lr=0,-1")) == 2
    assert run_command(never, ["-m", "optimizer.lr=0,-1"]) == 2
    assert list(outputs.iterdir()) == []


@pytest.mark.parametrize("word", ["optimizr.lr=1,2", "model=gpt2,gptx", "seed=1,abc"])
def test_a_job_that_cannot_be_composed_refuses_the_whole_sweep(word, outputs):
    assert run_command(never, ["-m", word]) == 2
    assert list(outputs.iterdir()) == []


def test_a_stop_ends_the_sweep_and_not_one_job():
    seen = []

    def job(cfg):
        seen.append(cfg.seed)
        raise JobFailed(75, "preempted")

    assert run_command(job, ["-m", "seed=1,2", *NANO]) == 75
    assert seen == [1]


def test_a_search_is_checked_as_far_as_it_is_known():
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    accepted("-m", "hparams_search=optuna", *NANO)
    (line,) = refused("-m", "hparams_search=optuna", "model.dropuot=interval(0,1)")
    assert "did you mean model.dropout" in line
    (line,) = refused("-m", "hparams_search=optuna", "model.dropout=interval(0,1.5)")
    assert "model.dropout=1.5: must be in [0, 1)" in line
    assert refused("-m", "hparams_search=optuna", "trainer.devices=0")


def test_check_takes_a_composed_config_and_raises_with_all_problems():
    register()
    cfg = compose_command(["trainer.devices=0", "optimizer.lr=-1", *NANO])
    with pytest.raises(ConfigError) as raised:
        check(cfg)
    assert [problem.key for problem in raised.value.problems] == ["optimizer.lr", "trainer.devices"]
    assert raised.value.code == 2
    assert check(compose_command([*NANO])) == []


def test_overrides_and_flags_may_stand_in_any_order():
    assert answer("seed=1", "-m", "name=a,b").jobs[1].overrides == ["seed=1", "name=b"]


# What a config may not name, whatever the detour -> a piece of the answer.
TARGETS = {
    "model._target_=os.system": "not in a package",
    "model._target_=torch.os.system": "posix.system",
    "model._target_=gptrain.models.simple_gpt.math.sqrt": "math.sqrt",
    "model._target_=torch.load": "not a class",
    "model._target_=torch.nn.modules.module.torch.hub.load": "not a class",
    "model._target_=torch.optim.AdamW": "no Module",
    "model._target_=torch.nn.Linea": "torch.nn.Linear",
    "model._target_=gptrain.modles.SimpleGPT": "gptrain",
    "model._target_=builtins.eval": "not in a package",
    "model._target_=5": "not a dotted name",
    "optimizer._target_=torch.hub.load": "not a class",
    "optimizer._target_=torch.optim.AdamV": "torch.optim.Adam",
    "scheduler._target_=torch.optim.AdamW": "not a function",
    "trainer._target_=lightning.fabric.Fabric": "no Trainer",
    "data.train._target_=torch.package.PackageImporter": "may not create",
    "+callbacks.x._target_=torch.distributed.run.main": "not a class",
    "+callbacks.x._target_=subprocess.Popen": "not in a package",
    "allowed_targets=[os] model._target_=os.system": "posix.system",
    "hydra.job_logging.handlers.console.class=os.system": "not in a package",
    "+hydra.job_logging.handlers.x.class=logging.os.system": "that is not allowed",
    "hydra.job_logging.handlers.console.stream=ext://os.environ": "ext://sys.stdout",
    "hydra.launcher._target_=os.system": "not in a package",
    "+hydra.callbacks.x._target_=subprocess.run": "not in a package",
}


@pytest.mark.parametrize("words", TARGETS)
def test_a_target_is_judged_by_what_it_stands_for(words):
    lines = refused(*words.split())
    assert any(TARGETS[words] in line for line in lines), lines


@pytest.mark.parametrize("name", ["ModelCheckpoint", "OnExceptionCheckpoint"])
def test_lightnings_own_checkpoints_are_refused_with_ours_named(name):
    (line,) = refused(f"+callbacks.x._target_=lightning.pytorch.callbacks.{name}", *NANO)
    assert f"{name}: a second writer of checkpoints" in line
    assert line.endswith("try: checkpoint=every_n_steps")


def test_a_wrong_keyword_names_those_that_the_target_takes():
    (line,) = refused("+model.n_head=4", *NANO)
    assert "model.n_head=4" in line and "model.n_heads" in line and "max_seq_len" in line
    (line,) = refused("+optimizer.nesterov=true", *NANO)
    assert "AdamW takes no such argument" in line and "amsgrad" in line
    assert refused("~model.vocab_size", "model._target_=torch.nn.Linear", *NANO)


def test_shipped_targets_are_what_the_check_takes_them_for():
    import inspect

    from gptrain.config.checks.objects import SHIPPED, judge, resolve
    from gptrain.config.checks.targets import PACKAGES

    for target, keywords in SHIPPED.items():
        found, wrong = resolve(target)
        assert wrong is None
        kind = "callbacks.x" if "callbacks" in target else "logger.x"
        assert judge(kind, found, PACKAGES) is None
        assert keywords <= inspect.signature(found).parameters.keys()


def test_no_python_process_is_started_for_a_wrong_command(tmp_path):
    """The interpreter's audit events show every process, socket and file that it opens to write."""
    code = """
import os, runpy, sys
def look(event, args):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.bind", "os.mkdir"):
        print("did", event, args)
    if event == "open" and isinstance(args[2], int) and args[2] & 3 and "/dev/" not in str(args[0]):
        # A folder that is opened is asked whether it can be written, by a file without a name.
        if ".pyc" not in str(args[0]) and not os.path.isdir(args[0]):
            print("wrote", args[0])
sys.addaudithook(look)
sys.argv = ["train.py", "trainer.devices=0", "data=text", "data.path=/nope"]
runpy.run_path("train.py", run_name="__main__")
"""
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "", done.stdout


@dataclass
class Elsewhere(RunConfig):
    """A verb that speaks of another machine."""

    runs_here: ClassVar[bool] = False


def test_a_verb_about_another_machine_checks_the_config_alone():
    words = ["trainer.devices=8", "trainer.num_nodes=4", "trainer.accelerator=gpu", "model=gpt_7b"]
    seen = []
    assert run_command(lambda cfg: seen.append(cfg.trainer.devices), words, schema=Elsewhere) == 0
    assert run_command(never, [*words, "model.n_heads=7"], schema=Elsewhere) == 2
    assert seen == [8]
    register()
