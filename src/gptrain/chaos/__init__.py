"""python -m gptrain.chaos: real faults in real runs, and whether what was promised held.

campaign   the table of faults, tries, results
processes  faults of processes: killed, told to stop, stopped, failing, two at once
files      faults of a save: every file operation broken, every kind of damage
outside    real commands, their processes and sockets
lab        real runs of two ranks, forked from one process that has imported everything
plant      how a fault gets into a run; nothing in a run's config can do this
truth      what must be equal, bit for bit, to the run that nothing befell
"""
