"""Start, watch and end the processes of a job. `rank.run` runs a job, see the README."""
