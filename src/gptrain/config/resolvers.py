"""Functions that the yaml files of conf/ call, as resolvers of OmegaConf."""

import copy
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

SHORT_SEQ_LEN = 128  # default data.seq_len of a net that does not name its context length
# Largest default data.seq_len: longer contexts are an extension of a trained net.
LONG_SEQ_LEN = 8192


def job_folder(number: int, varied: str) -> str:
    """Return the folder name of a sweep's job, such as `3-lr_0.001-seed_1`.

    Args:
        number: Index of the job in the sweep.
        varied: The overrides that differ between jobs, `key=value`, joined by spaces.
    """
    name = re.sub(r"[\w./@+]*?(\w+)=", r"\1_", varied)
    return re.sub(r"[^\w.+-]+", "-", f"{number}-{name}")[:80].strip("-.")


def plus(left: Any, right: int) -> Any:
    """Return left + right, or `left` unchanged if it is no integer, so that only its key is wrong.

    Used as `${plus:${seed},1}`.
    """
    return left + right if isinstance(left, int) else left


def default_seq_len(model: Any, shortest: int = 1) -> int:
    """Return the default of `data.seq_len`: the context length of the net, at most LONG_SEQ_LEN.

    Args:
        model: Node `model` of the config. Without an integer `max_seq_len` the result is
            SHORT_SEQ_LEN.
        shortest: Smallest context length that is used. A net with a shorter context gets
            SHORT_SEQ_LEN.
    """
    length = model.get("max_seq_len") if isinstance(model, DictConfig) else None
    if type(length) is not int or length < shortest:
        return SHORT_SEQ_LEN
    return min(length, LONG_SEQ_LEN)


def of_parts(parts: Any, key: str, seq_len: int | None = None) -> Any:
    """Return the value of one key in each part of a data mixture, by the name of the part.

    Used as `${of_parts:${data.parts},weight}`.

    Args:
        parts: Node `data.parts`.
        key: Key of a part: `train`, `val` or `weight`. A part without the key gets 1.
        seq_len: Number of positions that replaces `seq_len` in each part that has this key. None
            keeps the values of the parts.
    """
    values = {}
    for name, part in parts.items():
        part = copy.copy(part)
        if seq_len is not None and "seq_len" in part:
            part.seq_len = seq_len
        node = part.get(key, 1)
        is_node = OmegaConf.is_config(node)
        values[name] = OmegaConf.to_container(node, resolve=True) if is_node else node
    return values


RESOLVERS = (job_folder, plus, default_seq_len, of_parts)
