"""The command `python -m gptrain.launch`: it prints an sbatch script or a TrainJob for a run."""
