"""strategy=tensor_parallel through train.py."""

import runs as helpers


class TestStrategy(helpers.PrecisionTests):
    name, data_ranks = "tensor_parallel", [0, 0]
