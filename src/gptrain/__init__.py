"""Multi-GPU training of GPT language models with PyTorch Lightning and Hydra."""

from importlib import import_module
from typing import Any

_PLACES = {  # imported when asked for: torch is not, by `import gptrain`
    "fit": "gptrain.assemble.fit",
    "generate": "gptrain.text.writing",
    "load": "gptrain.assemble.load",
    "score": "gptrain.text.scoring",
    "FinishedRun": "gptrain.assemble.fit",
    "RunFailed": "gptrain.assemble.fit",
    "ConfigError": "gptrain.core.errors",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_PLACES]  # for a notebook's completion
