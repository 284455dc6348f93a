"""`python -m gptrain.collectives`: what ranks say to each other, seen on the real backend."""
