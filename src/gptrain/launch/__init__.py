"""`python -m gptrain.launch`: what a cluster takes for a run: an sbatch script or a TrainJob."""
