#!/bin/bash
# A job of SLURM. What this machine's people need besides (#SBATCH --mem=0, module load) goes here;
# lines whose value is null are left out.
#SBATCH --job-name=<job>
#SBATCH --partition=<slurm.partition>
#SBATCH --account=<slurm.account>
#SBATCH --array=<array>
#SBATCH --nodes=<trainer.num_nodes>
#SBATCH --ntasks-per-node=<trainer.devices>
#SBATCH --gpus-per-node=<gpus>
#SBATCH --cpus-per-task=<cpus>
#SBATCH --time=<slurm.time>
#SBATCH --signal=USR1@<slurm.save_s>
#SBATCH --requeue
#SBATCH --output=/dev/null
<cases>
# By ourselves: slurmd would not make the folder of --output, and the job would end without a word.
log="<log>"
mkdir -p "${log%/*}" && exec >>"$log" 2>&1 || exit 73
# srun does not read --cpus-per-task from above since 22.05. No --kill-on-bad-exit: it makes 137 of
# the 75 of a run that has saved. Ranks that hang end by themselves, long before --wait.
srun --cpus-per-task=<cpus> --wait=300 <command> "run_dir='<folder>'"
code=$?
# The lists of codes are made from EXIT_CODES in gptrain/core/errors.py. A requeued job keeps its
# number, so that it resumes in its folder. scancel ends this script, too.
again() { scontrol requeue "$SLURM_JOB_ID"; }
case $code in
  <requeued>) again ;; # asked to stop ahead of the time limit or by a preemption
  <restarted>) [ "${SLURM_RESTART_COUNT:-0}" -lt <launcher.max_restarts> ] && again ;; # a fault that a restart may cure
esac
exit $code
