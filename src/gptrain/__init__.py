"""Multi-GPU training of GPT language models with PyTorch Lightning and Hydra."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "load":  # here and not above: it imports torch, and every `import gptrain` would
        from gptrain.nets.load import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), "load"]  # for a notebook's completion
