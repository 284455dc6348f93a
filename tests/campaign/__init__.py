"""Real faults in real runs, held against an undisturbed run: python -m tests.campaign [--quick].

`scenarios` is the table, `trial` one try of a row, `lab` starts the runs, `faults` is what happens
in a rank, `truth` what of a run must be equal, bit for bit, whatever befell it.
"""
