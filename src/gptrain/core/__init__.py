"""What every other package may import: the typed configuration, its value types, the strategies."""
