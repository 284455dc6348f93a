"""python -m tests.campaign [--quick]: real faults in real runs, held against an undisturbed run.

scenarios  the table of faults             trial   one try of a row; special: other shapes of a try
faults     what happens in a rank          lab     runs of real ranks, forked from a warm process
truth      what of a run must be equal, bit for bit, whatever befell it
"""
