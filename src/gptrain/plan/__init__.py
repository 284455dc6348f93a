"""`python -m gptrain.plan`: what a run will cost, by `costs`; faults of a machine."""
