"""The command line: codes, one line per problem, once per job, nothing written."""

from __future__ import annotations

import os
import pickle
from functools import partial
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig

from gptrain.config import ConfigError, check, cli, compose_command
from gptrain.config.cli import run_command
from gptrain.core.errors import ConfigIssue, JobFailedError
from gptrain.core.schema import RunConfig
from gptrain.core.value_types import Count
from tests.command_line import refused
from tests.test_choices import CONFS

NANO = ("model=gpt_nano", "trainer.accelerator=cpu")


@pytest.fixture
def outputs() -> Path:
    return Path(os.environ["GPTRAIN_OUTPUT_DIR"])


def never(cfg: DictConfig) -> None:
    raise AssertionError("nothing may start")


LOOK = """
import os, runpy, sys
def look(event, args):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.bind", "os.mkdir"):
        print("did", event, args)
    if event == "open" and isinstance(args[2], int) and args[2] & 3 and ".pyc" not in str(args[0]):
        print("wrote", args[0])
sys.addaudithook(look)
sys.argv = ["train.py", "trainer.devices=0", "optimizer.lr=-1"]
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as end:
    print(end.code, sorted({"torch", "lightning", "numpy"} & sys.modules.keys()), len(sys.modules))
"""


def test_a_wrong_command_starts_and_writes_nothing_and_imports_nothing_heavy(command, outputs):
    """Little more than Hydra and pydantic, before its answer: a second, where torch takes six."""
    done = command("-c", LOOK)
    code, heavy, n_modules = done.stdout.split()
    assert (code, heavy) == ("2", "[]")
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "error"]
    assert list(outputs.iterdir()) == []
    n_allowed = int(command("-c", "import hydra, pydantic, sys; print(len(sys.modules))").stdout)
    assert n_allowed < int(n_modules) < n_allowed + 250


def test_help_fits_one_screen_and_names_every_choice(capsys):
    assert run_command(never, ["--help"], usage="python train.py") == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 50
    for file in [file for conf in CONFS for file in conf.glob("*/*.yaml")]:
        assert file.stem in text, file


@pytest.mark.parametrize("rank", [0, 1])
def test_a_problem_is_reported_by_the_first_rank_before_another_exits_and_no_rank_writes(
    typed, monkeypatch, outputs, rank
):
    """A launcher kills all ranks when one of them exits with an error."""
    for name, value in {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    waited = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    code, _, err = typed(partial(cli.main, never), "trainer.devices=3")
    assert (code, waited) == (2, [cli.LINGER_S] * rank) and ("error: " in err) == (rank == 0)
    assert list(outputs.iterdir()) == []


def test_a_rank_other_than_0_writes_no_log(monkeypatch, outputs):
    for name, value in {"WORLD_SIZE": 2, "RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    for words in ((), ("hydra/job_logging=disabled",)):
        words = (*words, "trainer.devices=2", f"run_dir={outputs}/run")
        assert run_command(lambda cfg: None, [*NANO, *words]) == 0
    assert not [path for path in outputs.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "error, code, message",
    [
        (pickle.loads(pickle.dumps(JobFailedError(79, "of another process"))), 79, ""),
        (SystemExit(75), 75, ""),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("division by zero"), 70, "error: ZeroDivisionError: division by zero"),
    ],
)
def test_whatever_a_job_raises_is_a_code_and_at_most_one_line(error, code, message, capsys):
    def job(cfg):
        raise error

    assert run_command(job, list(NANO)) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(message) and all(line.startswith(message) for line in lines)
    run_command(job, [*NANO, "debug=true"])
    is_told = isinstance(error, JobFailedError)
    assert ("Traceback" in capsys.readouterr().err) != is_told


def test_a_job_that_is_refused_leaves_no_empty_folder(outputs):
    def job(cfg):
        raise ConfigError([ConfigIssue("model", None, "does not fit")])

    assert run_command(job, [*NANO, "name=a"]) == 2
    assert not list(outputs.glob("a/*"))


def test_in_a_sweep_a_failing_job_does_not_take_the_others_with_it(capsys):
    seen = []

    def job(cfg):
        seen.append(cfg.seed)
        if cfg.seed == 2:
            raise JobFailedError(79, "loss is nan")
        return float(cfg.seed)

    words = ["-m", "seed=1,2,3,-4", "hydra.sweeper.max_batch_size=1", "strategy=ddp", *NANO]
    assert run_command(job, words) == 79
    assert seen == [1, 2, 3]
    out, err = capsys.readouterr()
    assert "Error executing job" not in err  # Hydra's own words
    assert err.count("error: seed=-4: must be") == 1
    begun = [line.split() for line in out.splitlines() if line.startswith("job ")]
    assert begun == [["job", str(n), f"seed={seed}"] for n, seed in enumerate((1, 2, 3, -4))]


@pytest.mark.parametrize(
    "stop, code", [(JobFailedError(75, "preempted"), 75), (KeyboardInterrupt(), 130)], ids=str
)
def test_a_stop_ends_the_sweep_and_not_one_job(stop, code):
    seen = []

    def job(cfg):
        seen.append(cfg.seed)
        raise stop

    assert run_command(job, ["-m", "seed=1,2", *NANO]) == code
    assert seen == [1]


def test_a_sweep_over_the_choices_of_a_pattern():
    seen = []
    words = ["-m", "model=glob(gpt_n*)", "seed=1,2", *NANO[1:]]
    assert run_command(lambda cfg: seen.append((cfg.model.d_model, cfg.seed)), words) == 0
    assert seen == [(128, 1), (128, 2)]


def test_a_folder_of_user_configs_may_have_any_name(tmp_path):
    folder = tmp_path / "it's mine, é" / "conf"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "mine.yaml").write_text("defaults: [gpt_nano]\nd_model: 64\n")
    seen = []
    words = ["--config-dir", str(folder), "model=mine", *NANO[1:]]
    assert run_command(lambda cfg: seen.append(cfg.model.d_model), words) == 0
    assert seen == [64]


def test_a_home_folder_in_output_dir_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    seen = []
    assert run_command(lambda cfg: seen.append(cfg.output_dir), ["output_dir='~/mine'", *NANO]) == 0
    assert seen == [f"{tmp_path}/mine"] and os.listdir(tmp_path) == ["mine"]


@pytest.mark.engine("optuna")
def test_a_search_is_composed_before_it_starts(outputs):
    words = ("-m", "hparams_search=optuna", *NANO)
    (line,) = refused(*words, "model.dropuot=interval(0,1)")
    assert "model.dropuot" in line
    words = [*words, "hydra.sweeper.n_trials=2", "checkpoint.mode=max"]
    assert run_command(lambda cfg: cfg.model.dropout, words) == 0
    result = yaml.safe_load(next(outputs.rglob("optimization_results.yaml")).read_text())
    assert result["best_value"] == result["best_params"]["model.dropout"]


def test_check_takes_a_composed_config_and_raises_with_all_problems():
    with pytest.raises(ConfigError) as raised:
        check(compose_command(["trainer.devices=0", "optimizer.lr=-1", *NANO]))
    assert [problem.key for problem in raised.value.problems] == ["optimizer.lr", "trainer.devices"]
    assert raised.value.code == 2
    assert check(compose_command([*NANO])).model.compile == "none"


class Elsewhere(RunConfig):
    """A command of its own keys, about another machine."""

    runs_here = False
    rounds: Count


def test_a_command_about_another_machine_checks_the_config_alone():
    words = ["trainer.devices=8", "trainer.num_nodes=4", "trainer.accelerator=gpu", "model=gpt_7b"]
    seen, own = [], {"schema": Elsewhere, "defaults": {"rounds": 3}}
    assert run_command(lambda cfg: seen.append(cfg.rounds), words, **own) == 0
    assert run_command(lambda cfg: seen.append(cfg.rounds), [*words, "rounds=5"], **own) == 0
    assert run_command(never, [*words, "model.n_heads=7"], **own) == 2
    assert run_command(never, [*words, "rounds=0"], **own) == 2
    assert seen == [3, 5]
