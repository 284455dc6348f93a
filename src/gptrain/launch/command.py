"""Print or submit what a cluster's scheduler needs for the run that train.py would start.

python -m gptrain.launch slurm trainer.devices=8 trainer.num_nodes=2        print an sbatch script
python -m gptrain.launch slurm --submit trainer.devices=8 slurm.time=12:00:00        submit it
python -m gptrain.launch slurm -m optimizer.lr=1e-3,3e-4 trainer.devices=8          a job array
python -m gptrain.launch kubernetes trainer.devices=8 trainer.num_nodes=2
                                              print a Dockerfile and a TrainJob of Kubeflow

  slurm.partition, account, time   values of sbatch's options; null: the cluster's defaults
  slurm.cpus_per_task              null: one core, and one for each data worker
  slurm.save_s                     seconds before the time limit at which the run is asked to save
  kubernetes.image                 name of the image in a registry (gptrain: as the Dockerfile says)
  kubernetes.claim                 volume claim that all pods can write, mounted at /outputs

Options that only your cluster needs go into batch.sh and trainjob.yaml, in src/gptrain/launch.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gptrain import config
from gptrain.config.overrides import line_of, parse
from gptrain.core import shell
from gptrain.core.errors import BAD_CONFIG, EXIT_CODES, ConfigError, ConfigIssue
from gptrain.core.locations import find_project
from gptrain.core.schema import RunConfig
from gptrain.core.value_types import Count, LocalPath, Section, between
from gptrain.runtime.process import run_stamp

HERE = Path(__file__).parent
KEY = r"<([\w.]+)>"  # placeholder in the templates
DEFAULTS = {
    "slurm": "{partition:null,account:null,time:null,cpus_per_task:null,save_s:120}",
    "kubernetes": "{image:gptrain,claim:outputs}",
}


def safe_text(characters: str) -> Any:
    """Return the pydantic field of a text that is safe in a shell script.

    Values of an untrusted run are written into the script, where `$(command)` would be executed.

    Args:
        characters: Characters that are allowed in addition to letters, digits and the underscore.
    """
    description = f"made of letters, digits and {characters}"
    return Field(pattern=rf"^[\w{characters}]+$", description=description)


Word = Annotated[str, safe_text(".,:+@%/_-")]


class Slurm(Section):
    """Options of the group `slurm`, for sbatch.

    Attributes:
        partition: Partition of the job. None for the cluster's default.
        account: Account of the job. None for the cluster's default.
        time: Time limit of the job. None for the cluster's default.
        cpus_per_task: Cores of each rank. None stands for one core, and one for each data worker.
        save_s: Seconds before the time limit at which the run is asked to save.
    """

    partition: Word | None
    account: Word | None
    time: Word | Count | None
    cpus_per_task: Count | None
    save_s: Annotated[int, between(1, 65535)]  # 65535 is the maximum of sbatch --signal


class Kubernetes(Section):
    """Options of the group `kubernetes`, for a TrainJob of Kubeflow.

    Attributes:
        image: Name of the container image in a registry.
        claim: Name of a persistent volume claim that all pods can write. It is mounted at /outputs.
    """

    image: Word
    claim: Word


class LaunchRun(RunConfig):
    """Keys of the command `gptrain.launch`: those of a run, and those of the engine that was typed.

    Attributes:
        run_dir: Run folder. Its characters must be safe in a shell script.
        slurm: Options of sbatch, or None for another engine.
        kubernetes: Options of the TrainJob, or None for another engine.
    """

    runs_here = False
    run_dir: Annotated[LocalPath, safe_text(" .,:+@=/_-")]
    slurm: Slurm | None = None
    kubernetes: Kubernetes | None = None


def main() -> None:
    """Run the command `python -m gptrain.launch` with the words in `sys.argv`, and exit.

    The first word is the engine, `slurm` or `kubernetes`. The other words are overrides of train.py
    and flags. Prints a batch script or a TrainJob, or submits the script with `--submit`. Errors
    are printed on stderr. The exit code is 2 for an unknown engine, otherwise as for train.py.
    """
    engine, *typed = sys.argv[1:] or [""]
    if engine not in (*DEFAULTS, "--help", "-h"):
        problem = ConfigIssue("", None, f"{engine!r} is not an engine", ", ".join(DEFAULTS))
        print(problem.line, file=sys.stderr)
        sys.exit(BAD_CONFIG)
    flags = {"--submit", "-m", "--multirun"} & set(typed)
    shared, jobs = [word for word in typed if word not in flags], [[]]
    if flags - {"--submit"}:
        shared, jobs = split_sweep(shared)

    def launch(cfg: LaunchRun) -> None:
        if flags and engine != "slurm":
            raise ConfigError.of(min(flags), None, "only slurm supports this option")
        for job in jobs[1:]:  # the first has been
            own = f"+{engine}={DEFAULTS[engine]}"
            config.check(config.compose_command([own, *shared, *job]), LaunchRun)
        for key in ("devices", "num_nodes"):
            if type(asked := getattr(cfg.trainer, key)) is not int or asked < 1:
                message = "the cluster must know the number before the job starts"
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
    """Return the overrides that all jobs of a sweep share, and the overrides of each job.

    Args:
        words: Overrides. One with several values, such as `seed=1,2`, makes several jobs.

    Returns:
        The shared overrides, and one list for each combination of the values. It is one empty list
        if no override has several values.
    """
    swept = [override for override in parse(words)[0] if override.is_discrete_sweep()]
    swept_words = {line_of(override) for override in swept}
    shared = [word for word in words if word not in swept_words]
    choices = (
        [f"{line_of(override).partition('=')[0]}={v}" for v in override.sweep_string_iterator()]
        for override in swept
    )
    return shared, [list(job) for job in itertools.product(*choices)]


def batch_script(cfg: LaunchRun, words: list[str], jobs: list[list[str]]) -> str:
    """Return the text of an sbatch script that runs train.py.

    Args:
        cfg: Checked configuration, that of the first job if there are several.
        words: Overrides that all jobs share.
        jobs: Overrides of each job, `[[]]` for a single job. Several jobs become a job array.

    Raises:
        ConfigError: If the command is not typed in a project.
    """
    if (project := find_project()) is None:
        message = "not in a project, which is a folder with train.py and conf/"
        raise ConfigError.of("", None, message)
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
    """Return the exit codes with a consequence as the pattern of a shell's case, such as `70 | 76`.

    Args:
        consequence: Attribute of ExitCode that is True for these codes.
    """
    codes = (code for code, facts in sorted(EXIT_CODES.items()) if getattr(facts, consequence))
    return " | ".join(map(str, codes))


def run_folder(cfg: LaunchRun, task: str) -> str:
    """Return the run folder of a SLURM job.

    The name of the job replaces the time stamp in `cfg.run_dir`. If the user typed a `run_dir`,
    which has no time stamp, the folder is a subfolder of it.

    Args:
        cfg: Configuration of the run.
        task: Number of the job, or the shell variables that hold it.
    """
    name, stamp = f"slurm-{task}", run_stamp()
    return cfg.run_dir.replace(stamp, name) if stamp in cfg.run_dir else f"{cfg.run_dir}/{name}"


def submit(cfg: LaunchRun, script: str) -> str:
    """Submit a script with sbatch and return lines about the job, its log and how to cancel it.

    Args:
        cfg: Configuration of the run.
        script: Text of the script, which sbatch reads from stdin.

    Raises:
        ConfigError: If sbatch is missing or refuses the script.
    """
    if not shutil.which("sbatch"):
        raise ConfigError.of("--submit", None, "sbatch is not installed on this machine")
    sbatch = ["sbatch", "--parsable"]
    # A pipe would end this process with SIGPIPE if sbatch left before it has read the script.
    with tempfile.TemporaryFile("w+") as file:
        file.write(script)
        file.seek(0)
        done = subprocess.run(sbatch, stdin=file, text=True, capture_output=True)
    if done.returncode:
        raise ConfigError.of("--submit", None, " ".join(done.stderr.split()))
    job = done.stdout.strip().partition(";")[0]  # sbatch prints JOB;CLUSTER
    return f"job       {job}\nlog       {run_folder(cfg, job)}*.log\ncancel    scancel {job}\n"


def train_job(cfg: LaunchRun, words: list[str]) -> str:
    """Return the TrainJob manifest for kubectl, with the Dockerfile of its image in comments above.

    The run folder gets the name of the job. A training gets `ckpt_path=last`, unless `ckpt_path`
    was typed, so that a job that is started again resumes.

    Args:
        cfg: Configuration of the run.
        words: Overrides of train.py, without `run_dir`.

    Raises:
        ConfigError: If run_dir lies outside output_dir, which is the mounted volume.
    """
    job = f"{label(cfg.name)[:24]}-{label(run_stamp())}"  # names of pods add a suffix, up to 63
    folder = os.path.relpath(cfg.run_dir.replace(run_stamp(), job), cfg.output_dir)
    if folder.startswith(".."):
        message = "outside output_dir, which is the mounted volume of the pods"
        raise ConfigError.of("run_dir", cfg.run_dir, message)
    words = [word for word in words if not word.startswith("output_dir=")]
    words.append(shell.override("run_dir", f"/outputs/{folder}"))
    if cfg.task == "fit" and not cfg.ckpt_path:
        words.append("ckpt_path=last")  # the first start finds no checkpoint and begins at step 0
    image = [f"# {line}\n" for line in (HERE / "Dockerfile").read_text().splitlines()]
    gpus = 0 if cfg.trainer.accelerator == "cpu" else cfg.trainer.devices
    own = {"job": job, "gpus": gpus, "words": json.dumps(words)}
    return "".join([*image, "\n", fill("trainjob.yaml", cfg, own)])


def label(name: str) -> str:
    """Return a name in lower case, for SLURM or Kubernetes.

    Each run of characters other than a-z and 0-9 becomes one hyphen. A hyphen at either end is
    removed. The length is not limited.
    """
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def fill(name: str, cfg: LaunchRun, own: Mapping[str, Any]) -> str:
    """Return a template of this folder with each <key> replaced by its value.

    Lines with a key whose value is None are left out.

    Args:
        name: File name of the template.
        cfg: Configuration of the run, which has the values of dotted keys such as `slurm.time`.
        own: Values of other keys. They take precedence.
    """
    lines = []
    for line in (HERE / name).read_text().splitlines():
        values = {key: own.get(key, cfg.value_of(key)) for key in re.findall(KEY, line)}
        if None not in values.values():
            lines.append(re.sub(KEY, lambda key, of=values: str(of[key[1]]), line))
    return "\n".join(lines) + "\n"
