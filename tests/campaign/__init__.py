"""python -m tests.campaign [--quick]: real faults in real runs, held against an undisturbed run.

scenarios  the table: what is done to a run, how it must end, how it must go on
trial      one try of a scenario, special: those of another shape
lab        runs of real ranks, forked from a process that has imported everything (warm)
faults     the callback that brings a fault into a rank, and what it does there
truth      what of a run must be equal, bit for bit, whatever befell it
"""
