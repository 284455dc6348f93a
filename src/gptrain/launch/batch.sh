#!/bin/bash
# A job of SLURM. Add what your cluster needs, for example #SBATCH --mem=0 or module load.
# Lines whose value is null are left out.
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
# The script makes the folder of its log. slurmd would not make the folder of --output, and the job
# would end without a message.
log="<log>"
mkdir -p "${log%/*}" && exec >>"$log" 2>&1 || exit 73
# Since SLURM 22.05 srun does not read --cpus-per-task from the lines above. --kill-on-bad-exit is not
# used because it turns exit code 75 of a run that has saved into 137. Hung ranks end by themselves,
# long before --wait.
srun --cpus-per-task=<cpus> --wait=300 <command> "run_dir='<folder>'"
code=$?
# The lists of codes are made from EXIT_CODES in gptrain/core/errors.py. A requeued job keeps its
# number, so that it resumes in its folder. scancel also ends this script.
again() { scontrol requeue "$SLURM_JOB_ID"; }
case $code in
  <requeued>) again ;; # asked to stop ahead of the time limit or by a preemption
  <restarted>) [ "${SLURM_RESTART_COUNT:-0}" -lt <launcher.max_restarts> ] && again ;; # a fault that a restart may cure
esac
exit $code
