"""A run on a cluster: what its scheduler takes, for the config that train.py would run.

python -m gptrain.launch slurm trainer.devices=8 trainer.num_nodes=2       an sbatch script, printed
python -m gptrain.launch slurm --submit trainer.devices=8 slurm.time=12:00:00       or handed over
python -m gptrain.launch slurm -m optimizer.lr=1e-3,3e-4 trainer.devices=8          a job array
python -m gptrain.launch kubernetes trainer.devices=8 trainer.num_nodes=2
                                              a TrainJob of Kubeflow, below a Dockerfile, printed

  slurm.partition, account, time   as sbatch takes them; null: the cluster's own
  slurm.cpus_per_task              null: one, and one a data worker
  slurm.save_s                     before the time is up the run is asked to save
  kubernetes.image                 gptrain: what the Dockerfile makes, by its name in a registry
  kubernetes.claim                 outputs: a volume claim that all pods can write, at /outputs

All else of a cluster goes into batch.sh and trainjob.yaml, in src/gptrain/launch.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gptrain import config
from gptrain.config.compose import line_of, parse
from gptrain.core import shell
from gptrain.core.errors import BAD_CONFIG, EXIT_CODES, ConfigError, ConfigIssue
from gptrain.core.locations import find_project
from gptrain.core.schema import RunConfig
from gptrain.core.value_types import Count, LocalPath, Section, between
from gptrain.runtime.process import run_stamp

HERE = Path(__file__).parent
KEY = r"<([\w.]+)>"  # of the texts there
DEFAULTS = {
    "slurm": "{partition:null,account:null,time:null,cpus_per_task:null,save_s:120}",
    "kubernetes": "{image:gptrain,claim:outputs}",
}


def made_of(characters: str) -> Any:
    """A text that may stand in a script, where the name of a stranger's run, $(x), is code."""
    words = f"made of letters, digits and {characters}"
    return Field(pattern=rf"^[\w{characters}]+$", description=words)


Word = Annotated[str, made_of(".,:+@%/_-")]


class Slurm(Section):
    partition: Word | None
    account: Word | None
    time: Word | Count | None
    cpus_per_task: Count | None
    save_s: Annotated[int, between(1, 65535)]  # sbatch takes no more


class Kubernetes(Section):
    image: Word
    claim: Word


class LaunchRun(RunConfig):
    """A run's keys and those of one engine."""

    runs_here = False
    run_dir: Annotated[LocalPath, made_of(" .,:+@=/_-")]
    slurm: Slurm | None = None
    kubernetes: Kubernetes | None = None


def main() -> None:
    """The command line: an engine, then what train.py takes."""
    engine, *typed = sys.argv[1:] or [""]
    if engine not in (*DEFAULTS, "--help", "-h"):
        problem = ConfigIssue("", None, f"{engine!r} is no engine", ", ".join(DEFAULTS))
        print(problem.line, file=sys.stderr)
        sys.exit(BAD_CONFIG)
    flags = {"--submit", "-m", "--multirun"} & set(typed)
    shared, jobs = [word for word in typed if word not in flags], [[]]
    if flags - {"--submit"}:
        shared, jobs = split_sweep(shared)

    def launch(cfg: LaunchRun) -> None:
        if flags and engine != "slurm":
            raise ConfigError.of(min(flags), None, "for slurm alone")
        for job in jobs[1:]:  # the first has been
            own = f"+{engine}={DEFAULTS[engine]}"
            config.check(config.compose_command([own, *shared, *job]), LaunchRun)
        for key in ("devices", "num_nodes"):
            if type(asked := getattr(cfg.trainer, key)) is not int or asked < 1:
                message = "the cluster chooses which, it must know how many"
                raise ConfigError.of(f"trainer.{key}", asked, message, hint=f"trainer.{key}=2")
        words = [word for word in shared if not word.startswith((f"{engine}.", "run_dir="))]
        if engine == "kubernetes":
            return print(train_job(cfg, words), end="")
        script = batch_script(cfg, words, jobs)
        print(submit(cfg, script) if "--submit" in flags else script, end="")

    defaults = {engine: DEFAULTS[engine]} if engine in DEFAULTS else {}
    sys.argv[1:] = [*shared, *jobs[0]] if defaults else ["--help"]
    config.main(launch, LaunchRun, defaults, usage=__doc__)


def split_sweep(words: list[str]) -> tuple[list[str], list[list[str]]]:
    """The words that all jobs of a sweep share, and those of each job."""
    varied = [one for one in parse(words)[0] if one.is_discrete_sweep()]
    shared = [word for word in words if word not in {line_of(one) for one in varied}]
    choices = (
        [f"{line_of(one).partition('=')[0]}={value}" for value in one.sweep_string_iterator()]
        for one in varied
    )
    return shared, [list(job) for job in itertools.product(*choices)]


def batch_script(cfg: LaunchRun, words: list[str], jobs: list[list[str]]) -> str:
    """The text that sbatch takes; several jobs make an array."""
    if (project := find_project()) is None:
        raise ConfigError.of("", None, "no project here, a folder with train.py and conf/")
    command = shell.command(sys.executable, str(project / "train.py"), *words)
    task, cases = "$SLURM_JOB_ID", None
    if jobs != [[]]:
        task = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
        lines = [f"  {n}) job=({shell.command(*job)}) ;;" for n, job in enumerate(jobs)]
        cases = "\n".join(["", "case $SLURM_ARRAY_TASK_ID in", *lines, "esac"])
        command += ' "${job[@]}"'
    is_typed = run_stamp() not in cfg.run_dir
    return fill("batch.sh", cfg, {
        "job": label(cfg.name),
        "array": f"0-{len(jobs) - 1}" if cases else None,
        "gpus": None if cfg.trainer.accelerator == "cpu" else cfg.trainer.devices,
        "cpus": (cfg.slurm and cfg.slurm.cpus_per_task) or 1 + cfg.data.num_workers,
        "log": run_folder(cfg, task) + ".log",
        "cases": cases,
        "requeued": code_pattern("is_requeued"),
        "restarted": code_pattern("is_restarted"),
        "command": command,
        "folder": cfg.run_dir if is_typed and not cases else run_folder(cfg, task),
    })  # fmt: skip


def code_pattern(consequence: str) -> str:
    """Return the pattern of a shell's case for the exit codes with a consequence."""
    codes = (code for code, facts in sorted(EXIT_CODES.items()) if getattr(facts, consequence))
    return " | ".join(map(str, codes))


def run_folder(cfg: LaunchRun, task: str) -> str:
    """A job's folder, of its number where none was typed; else one of that number in it."""
    name, stamp = f"slurm-{task}", run_stamp()
    return cfg.run_dir.replace(stamp, name) if stamp in cfg.run_dir else f"{cfg.run_dir}/{name}"


def submit(cfg: LaunchRun, script: str) -> str:
    """Hands a script to sbatch; what to type next. Raises: ConfigError."""
    if not shutil.which("sbatch"):
        raise ConfigError.of("--submit", None, "no sbatch on this machine")
    sbatch = ["sbatch", "--parsable"]
    done = subprocess.run(sbatch, input=script, text=True, capture_output=True)
    if done.returncode:
        raise ConfigError.of("--submit", None, " ".join(done.stderr.split()))
    job = done.stdout.strip().partition(";")[0]  # behind it the cluster, where there are several
    return f"job       {job}\nlog       {run_folder(cfg, job)}*.log\ncancel    scancel {job}\n"


def train_job(cfg: LaunchRun, words: list[str]) -> str:
    """The manifest that kubectl takes, and above it the Dockerfile of its image."""
    job = f"{label(cfg.name)[:24]}-{label(run_stamp())}"  # a pod's is longer, and at most 63
    folder = os.path.relpath(cfg.run_dir.replace(run_stamp(), job), cfg.output_dir)
    if folder.startswith(".."):
        message = "not in output_dir, which is the claim there"
        raise ConfigError.of("run_dir", cfg.run_dir, message)
    words = [word for word in words if not word.startswith("output_dir=")]
    words.append(shell.override("run_dir", f"/outputs/{folder}"))
    if cfg.task == "fit" and not (cfg.ckpt_path or cfg.init_from):
        words.append("ckpt_path=last")  # a first start that finds none begins anew
    image = [f"# {line}\n" for line in (HERE / "Dockerfile").read_text().splitlines()]
    gpus = 0 if cfg.trainer.accelerator == "cpu" else cfg.trainer.devices
    own = {"job": job, "gpus": gpus, "words": json.dumps(words)}
    return "".join([*image, "\n", fill("trainjob.yaml", cfg, own)])


def label(name: str) -> str:
    """A name of a job, as Kubernetes takes it."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def fill(name: str, cfg: LaunchRun, own: Mapping[str, Any]) -> str:
    """A text of this folder with <key> replaced by values; no line of it whose value is None."""
    lines = []
    for line in (HERE / name).read_text().splitlines():
        values = {key: own.get(key, cfg.value_of(key)) for key in re.findall(KEY, line)}
        if None not in values.values():
            lines.append(re.sub(KEY, lambda key, of=values: str(of[key[1]]), line))
    return "\n".join(lines) + "\n"
