"""What the fork server of the tests does once for all ranks (`forked.server` starts it).

It imports all modules and composes a config. It runs no operation of torch, because a fork of the
process would lack torch's threads.
"""

import importlib
import pkgutil

import gptrain
from tests.fast import make_fast
from tests.no_network import forbid_network

LIBRARIES = (
    "lightning.pytorch", "torchmetrics.classification", "pytest",
    "torch._dynamo",  # every optimizer of torch imports torch._dynamo
)  # fmt: skip

forbid_network()
for module in pkgutil.walk_packages(gptrain.__path__, "gptrain."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in LIBRARIES:
    importlib.import_module(name)
make_fast()
importlib.import_module("gptrain.config.compose").compose_words(["model=gpt_nano"])
