"""Start, watch and end the processes of a job.

`rank.run` trains in this process if the job has one device, or if a launcher has started this
process as a rank. Otherwise it starts a process for each device, as torchrun does. The modules:

process     rank and world size of this process, and the store of the job
devices     accelerator, devices, precision and threads of a run
rank        the run of a job, and of the training function in one rank; the report of its end
launch      the start of local ranks, and their restarts
signals     requests to stop
watchdog    heartbeats, and the thread that ends a rank that hangs
"""
