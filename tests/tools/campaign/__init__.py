"""Plant faults in real runs and compare the results with a run without a fault.

Run `python -m tests.tools.campaign [--quick]`. `scenarios` is the table of faults, `trial` performs
one try of a row, `lab` starts the runs, `faults` holds the faults inside a rank, and `truth`
compares the results that must be equal bit for bit.
"""
