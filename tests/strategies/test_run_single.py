"""strategy=single through train.py: the reference of all other strategies."""

import runs as helpers


class TestStrategy(helpers.PrecisionTests):
    name, data_ranks = "single", [0]
