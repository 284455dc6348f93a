"""Compare runs by reading the files in their folders."""
