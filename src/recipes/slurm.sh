#!/bin/bash
# Train on SLURM. Copy this file, edit the lines #SBATCH, and submit it from the project's folder
# with the words of train.py:
#     sbatch slurm.sh trainer.devices=8 trainer.num_nodes=2 model=gpt2
# A requeued job keeps its number, so that the run resumes in its folder outputs/slurm-<job>.
#SBATCH --job-name=gptrain
#SBATCH --nodes=2            # trainer.num_nodes
#SBATCH --ntasks-per-node=8  # trainer.devices
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=4    # 1 + data.num_workers
#SBATCH --time=12:00:00
#SBATCH --signal=USR1@120    # the run is asked to save 120 s ahead of the time limit
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=outputs/slurm-%j.log  # this folder must exist: SLURM does not make it

max_restarts=3 # of a run that has failed in a way that a restart may cure

# Since SLURM 22.05 srun does not read --cpus-per-task from the lines above. --kill-on-bad-exit is
# not used because it turns exit code 75 of a run that has saved into 137. Hung ranks end by
# themselves, long before --wait.
folder="${GPTRAIN_OUTPUT_DIR:-outputs}/slurm-$SLURM_JOB_ID"
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --wait=300 python train.py "run_dir='$folder'" "$@"
code=$?
# The exit codes are those of the README. Above 128 a signal has ended the run. scancel also ends
# this script, so that a cancelled job is not requeued.
again() { scontrol requeue "$SLURM_JOB_ID"; }
case $code in
  75 | 138 | 143) again ;; # asked to stop ahead of the time limit or by a preemption
  70 | 76 | 137 | 139) [ "${SLURM_RESTART_COUNT:-0}" -lt "$max_restarts" ] && again ;;
esac
exit $code
