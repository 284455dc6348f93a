"""Plant faults in real runs and compare the results with a run without a fault.

Run `python -m tests.tools.campaign [--quick]`. `scenarios` is the table of faults, `trial` performs
one try of a row, `faults` holds the faults inside a rank, and `runs` starts runs and compares the
results that must be equal bit for bit.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
