"""What a run will cost: batch arithmetic, memory, FLOPs and communication, without torch."""
