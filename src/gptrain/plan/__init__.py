"""What a run will cost: batch arithmetic, the table of strategies, memory, FLOPs; no torch."""
