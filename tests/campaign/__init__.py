"""python -m tests.campaign: real faults in real runs, and whether what was promised held.

campaign   the table of faults, tries, results
killed, told, failing, folders, disk   faults in a run, each function one try
saves      every file operation of a save broken, every kind of damage, without a run
outside    real commands, their processes and sockets
lab        real runs of two ranks, forked from one process that has imported everything
plant      how a fault gets into a run, and acts: what it does; no config of a run can do this
expect     what must be true after a fault
truth      what must be equal, bit for bit, to the run that nothing befell
"""
