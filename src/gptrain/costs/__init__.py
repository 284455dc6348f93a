"""What a run will cost: memory, FLOPs, traffic, time, on which hardware; standard library only."""
