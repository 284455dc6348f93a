"""`python -m gptrain.launch`: what a scheduler takes, for the config that train.py would run."""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial

import pytest
import yaml

from gptrain.core.shell import quoted
from gptrain.launch.command import main
from tests.conftest import ROOT

PATH = {"PATH": os.environ["PATH"]}


@pytest.fixture
def launch(typed):
    """Exit code and what was printed, in this process."""
    return partial(typed, main)


def test_a_script_asks_for_what_the_run_needs_and_makes_nothing(launch, tmp_path):
    code, script, err = launch(
        "slurm", "trainer.devices=8", "trainer.num_nodes=2", "data.num_workers=3",
        "slurm.time=1-12:00:00", "slurm.account=me", "slurm.save_s=77", f"output_dir={tmp_path}",
    )  # fmt: skip
    assert code == 0, err
    asked = {line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line}
    assert asked >= {
        "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=4",
        "--time=1-12:00:00", "--signal=USR1@77", "--requeue", "--account=me",
    }  # fmt: skip
    assert "trainer.devices=8 trainer.num_nodes=2 data.num_workers=3 output_dir=" in script
    assert f"run_dir='{tmp_path}/train/slurm-$SLURM_JOB_ID'" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert not list(tmp_path.iterdir())


def test_what_sbatch_refuses_is_one_line_and_a_job_is_named(launch, tmp_path, monkeypatch):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\nprintf 'sbatch: error:\n no such account' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code, out, err = launch("slurm", "--submit", "trainer=cpu", f"output_dir={tmp_path / 'o'}")
    assert (code, out) == (2, "")
    assert err == "error: --submit: sbatch: error: no such account\n"
    sbatch.write_text("#!/bin/sh\ncat >/dev/null\necho '7;cluster'\n")
    code, out, err = launch("slurm", "--submit", "trainer=cpu", f"output_dir={tmp_path / 'o'}")
    log = f"log       {tmp_path}/o/train/slurm-7*.log"
    assert (code, out.splitlines()) == (0, ["job       7", log, "cancel    scancel 7"]), err


def test_without_a_project_or_sbatch_nothing_is_launched(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    words = ("slurm", "model=gpt_nano", "trainer=cpu", f"output_dir={tmp_path / 'o'}")
    message = "sbatch is not installed on this machine"
    assert launch(*words, "--submit")[::2] == (2, f"error: --submit: {message}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPTRAIN_CONF")
    message = "not in a project, which is a folder with train.py and conf/"
    assert launch(*words)[::2] == (2, f"error: {message}\n")


def test_the_command_runs_as_a_module(command):
    result = command("-m", "gptrain.launch", "nowhere")
    assert (
        result.returncode == 2 and result.stderr.startswith("error: ") and "slurm" in result.stderr
    )


def test_a_sweep_is_an_array_of_which_each_job_has_its_words_and_folder(launch, tmp_path):
    code, script, err = launch(
        "slurm", "-m", "optimizer.lr=1e-3,3e-4", "seed=1,2", "name='a b'", "trainer=cpu",
        "slurm.cpus_per_task=5", f"run_dir={tmp_path}/sweep",
    )  # fmt: skip
    assert code == 0, err
    assert "--array=0-3" in script and "--job-name=a-b" in script and "gpus" not in script
    assert script.count("--cpus-per-task=5") == 2  # the job and srun ask for the same cores
    fake = 'srun() { for word; do echo "$word"; done; }; scontrol() { exit 1; }\n'
    environment = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    subprocess.run(["bash", "-c", fake + script], env=environment | PATH, check=True)
    log = (tmp_path / "sweep/slurm-7_2.log").read_text()
    words = log.splitlines()[4:]  # behind srun's own, python and train.py
    folder = f"run_dir='{tmp_path}/sweep/slurm-7_2'"
    assert words == ["name='a b'", "trainer=cpu", "optimizer.lr=0.0003", "seed=1", folder]


@pytest.mark.parametrize(
    "code, restarts, goes_on",
    [
        (0, 0, False),
        (75, 5, True),
        (138, 5, True),
        (2, 0, False),
        (70, 1, True),
        (70, 2, False),
        (139, 1, True),
        (139, 2, False),
    ],
)
def test_which_ends_put_the_job_back_into_the_queue(launch, tmp_path, code, restarts, goes_on):
    folder = f"{tmp_path}/a folder that nobody made"
    _, script, _ = launch("slurm", "trainer=cpu", "launcher.max_restarts=2", f"run_dir={folder}")
    fake = f'srun() {{ echo "${{@: -1}}"; return {code}; }}; scontrol() {{ echo $*; }}\n'
    environment = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    for _ in range(2):  # a requeued job appends to its log
        ended = subprocess.run(["bash", "-c", fake + script], env=environment | PATH)
        assert ended.returncode == code
    (log,) = tmp_path.glob("*/slurm-7.log")
    # A log that cannot be written ends the job before the run starts.
    ended = subprocess.run(["bash", "-c", fake + script.replace('log="', 'log="/dev/null')])
    assert ended.returncode == 73
    # The run writes into the folder that was typed, also when the job is requeued.
    assert log.read_text() == 2 * (f"run_dir='{folder}'\n" + ("requeue 7\n" if goes_on else ""))


@pytest.mark.parametrize(
    "words, line",
    [
        ((), "error: '' is not an engine; allowed: slurm, kubernetes"),
        (("slurm", "slurm.save_s=0"), "error: slurm.save_s=0: must be >= 1"),
        (
            ("slurm", "trainer.devices=auto"),
            "error: trainer.devices=auto: the cluster must know the number before the job starts;"
            " try: trainer.devices=2",
        ),
        (
            ("slurm", "trainer.num_nodes=auto"),
            "error: trainer.num_nodes=auto: the cluster must know the number before the job starts;"
            " try: trainer.num_nodes=2",
        ),
        (("slurm", "slurm.account='a\nb'"), "error: slurm.account=a\\nb: "),
        (("slurm", "-m", "seed=1,-2"), "error: seed=-2: must be"),
        (
            ("slurm", "trainer.devices=2", "trainer.num_nodes=3", "data.global_batch_size=64"),
            "error: data.global_batch_size=64: not divisible by 6 ranks x data.batch_size 32",
        ),
        (("kubernetes", "-m", "seed=1,2"), "error: -m: only slurm supports this option"),
        (("kubernetes", "run_dir=/elsewhere"), "error: run_dir=/elsewhere: outside output_dir"),
        (("kubernetes", "kubernetes.claim=null"), "error: kubernetes.claim=null"),
    ],
)
def test_a_wrong_word_is_one_line(launch, words, line):
    code, out, err = launch(*words)
    assert (code, out) == (2, "") and err.startswith(line) and err.count("\n") == 1


@pytest.mark.engine("kubeflow_trainer_api")
def test_a_train_job_has_the_published_fields_and_nothing_else(launch):
    from kubeflow_trainer_api import models as kubeflow

    code, text, err = launch(
        "kubernetes", "trainer.devices=8", "trainer.num_nodes=2", "name=My_run",
        "kubernetes.image=me/gpt:1", "kubernetes.claim=shared", "launcher.max_restarts=3",
        "+data.note='a \"b\", ${seed}'",
    )  # fmt: skip
    assert code == 0, err
    job = yaml.safe_load(text)
    assert kubeflow.TrainerV1alpha1TrainJob.from_json(json.dumps(job)).to_dict() == job
    trainer, name = job["spec"]["trainer"], job["metadata"]["name"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert name.startswith("my-run-")
    assert trainer["command"] == ["torchrun", "--max-restarts=3", "train.py"]
    assert trainer["args"][-2:] == [f"run_dir=/outputs/My_run/{name}", "ckpt_path=last"]
    assert "+data.note='a \"b\", ${seed}'" in trainer["args"]


def test_a_pod_resumes_by_itself_also_a_run_that_begins_from_other_weights(launch):
    words = ("trainer=cpu", "kubernetes.image=a", "kubernetes.claim=b", "init_from=/mine")
    code, text, err = launch("kubernetes", *words, "launcher.max_restarts=4")
    assert code == 0, err
    spec = yaml.safe_load(text)["spec"]
    trainer, (patch,) = spec["trainer"], spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 300  # as long as srun waits
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes == {
        "outputs": {"persistentVolumeClaim": {"claimName": "b"}},
        "memory": {"emptyDir": {"medium": "Memory"}},
    }
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"outputs": "/outputs", "memory": "/dev/shm"}
    assert {entry["name"]: entry["value"] for entry in trainer["env"]} == {
        "GPTRAIN_OUTPUT_DIR": "/outputs",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    assert (trainer["image"], trainer["command"][1]) == ("a", "--max-restarts=4")
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "0"}
    arguments = trainer["args"]
    starts = {word for word in arguments if word.startswith(("ckpt_path=", "init_from="))}
    assert starts == {"ckpt_path=last", "init_from=/mine"}
    _, text, _ = launch("kubernetes", *words[:3], "ckpt_path=/another/run")
    arguments = yaml.safe_load(text)["spec"]["trainer"]["args"]
    assert [word for word in arguments if "ckpt_path=" in word] == ["ckpt_path=/another/run"]
    # An evaluation resumes nothing. The mounted volume is the only output folder of a pod, whose
    # name has at most 63 characters.
    own = ("task=validate", "output_dir=/mine", f"name={'long_' * 9}")
    _, text, _ = launch("kubernetes", *words[:3], *own)
    job = yaml.safe_load(text)
    arguments = job["spec"]["trainer"]["args"]
    assert not [word for word in arguments if word.startswith(("ckpt_path=", "output_dir="))]
    assert job["metadata"]["name"].startswith("long-long-") and len(job["metadata"]["name"]) < 50


def test_the_dockerfile_in_front_of_the_job_copies_what_is_there(launch):
    code, text, _ = launch("kubernetes", "trainer=cpu", "kubernetes.image=a", "kubernetes.claim=b")
    assert code == 0 and "# FROM python" in text
    copied = [line.split()[2:] for line in text.splitlines() if line.startswith("# COPY")]
    names = {word for words in copied for word in words} - {"./"}
    assert names >= {"src", "conf", "train.py", "pyproject.toml"}
    for name in names:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("name", ["a;touch x", "a\n#SBATCH --wrap=x"])
@pytest.mark.parametrize(
    "words", [("slurm",), ("kubernetes", "kubernetes.image=a", "kubernetes.claim=b")]
)
def test_an_untrusted_run_adds_nothing_to_a_launch_script(launch, tmp_path, words, name):
    (tmp_path / ".hydra").mkdir()
    old = [f"name={quoted(name)}", "trainer=cpu"]
    (tmp_path / ".hydra" / "overrides.yaml").write_text(json.dumps(old))
    words = (*words, f"from_run={tmp_path}")
    code, out, err = launch(*words)
    assert (code, out) == (2, "") and ": must be made of letters" in err, err
    code, out, err = launch(*words, f"output_dir={tmp_path}", f"run_dir={tmp_path}/a")
    assert code == 0 and name not in out, err
