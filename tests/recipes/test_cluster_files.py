"""The recipes `slurm.sh` and `trainjob.yaml`: a job resumes where it should, and nowhere else."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

import recipes
from gptrain.core.errors import REQUEUED, RESTARTED

FOLDER = Path(recipes.__file__).parent
SCRIPT = FOLDER / "slurm.sh"


def is_requeued(code: int, restarts: int) -> bool:
    """Run the script with an `srun` that returns a code, and return whether it requeues the job."""
    fake = f"srun() {{ return {code}; }}; scontrol() {{ echo $*; }}\n"
    environment = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(
        ["bash", "-c", fake + SCRIPT.read_text()],
        env=environment | {"PATH": os.environ["PATH"]}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout in ("", "requeue 7\n")
    return bool(done.stdout)


@pytest.mark.parametrize("code", [0, 2, 3, 65, 66, 73, 74, 79, 130, *RESTARTED, *REQUEUED])
def test_a_job_is_requeued_by_the_exit_code_of_its_run(code):
    assert is_requeued(code, 2) == (code in REQUEUED | RESTARTED)
    assert is_requeued(code, 3) == (code in REQUEUED)


def test_the_words_of_a_job_reach_train_py_as_they_were_typed():
    fake = 'srun() { for word; do echo "$word"; done; }\n'
    words = ["name='a b'", "+data.note=$HOME", 'logger="none"']
    command = ["bash", "-c", fake + SCRIPT.read_text(), "slurm.sh", *words]
    environment = {"PATH": os.environ["PATH"], "SLURM_CPUS_PER_TASK": "5", "SLURM_JOB_ID": "7"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    command = ["python", "train.py", "run_dir='outputs/slurm-7'", *words]
    assert done.stdout.splitlines() == ["--cpus-per-task=5", "--wait=300", *command]


def test_a_train_job_starts_as_many_ranks_as_train_py_expects_and_resumes():
    job = yaml.safe_load((FOLDER / "trainjob.yaml").read_text())
    trainer, words = job["spec"]["trainer"], job["spec"]["trainer"]["args"]
    assert f"trainer.num_nodes={trainer['numNodes']}" in words
    assert f"trainer.devices={trainer['numProcPerNode']}" in words
    gpus = trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert gpus == str(trainer["numProcPerNode"])
    assert "ckpt_path=last" in words
    (run_dir,) = [word for word in words if word.startswith("run_dir=")]
    (patch,) = job["spec"]["runtimePatches"]
    (replicas,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicas["template"]["spec"]["template"]["spec"]
    mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()
    assert run_dir.startswith(f"run_dir={mounts['outputs']}/")


def test_the_dockerfile_copies_what_a_project_has():
    text = (FOLDER / "trainjob.yaml").read_text()
    copied = {name for line in re.findall(r"COPY (.*)", text) for name in line.split()[:-1]}
    assert copied >= {"src", "conf", "train.py", "pyproject.toml"}
    project = next(path for path in Path(__file__).parents if (path / "train.py").is_file())
    assert not [name for name in copied if not (project / name).exists()]


@pytest.mark.engine("kubeflow_trainer_api")
def test_a_train_job_has_the_published_fields_and_nothing_else():
    from kubeflow_trainer_api import models as kubeflow

    job = yaml.safe_load((FOLDER / "trainjob.yaml").read_text())
    assert kubeflow.TrainerV1alpha1TrainJob.from_json(json.dumps(job)).to_dict() == job
