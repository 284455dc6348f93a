"""Command that prints the cost of a run before it starts, and the faults of a machine."""
