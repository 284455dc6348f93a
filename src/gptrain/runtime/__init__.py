"""Start, watch and end the processes of a job. `launch.run` runs a job, see the README."""
