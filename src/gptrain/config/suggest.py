"""Suggestions for a misspelt option: the most similar name, or gptrain's name for an alias."""

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

# Override that replaces an option of Lightning, nanoGPT or Hugging Face, by a pattern of its name.
OPTION_ALIASES = {
    "trainer.logger": "logger=csv",
    "trainer.callbacks": "callbacks=default",
    "trainer.strategy": "strategy={value}",
    "*learning_rate": "optimizer.lr={value}",
    "*n_embd": "model.d_model={value}",
    "*block_size": "model.max_seq_len={value}",
    "*train_batch_size": "data.batch_size={value}",
    "epochs": "trainer.max_epochs={value}",
    "*max_iters": "trainer.max_steps={value}",
    "*gpus": "trainer.devices={value}",
}


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name that is most similar to a word, or None if none is similar enough.

    Args:
        word: Misspelt name.
        names: Names to choose from.
        cutoff: Least similarity of a match between 0 and 1, as in `difflib.get_close_matches`.
    """
    matches = get_close_matches(word[:100].lower(), list(map(str, names)), 1, cutoff)
    return matches[0] if matches else None


def find_alias(key: str, value: str) -> str | None:
    """Return gptrain's override for an option of another project, or None for an unknown option.

    Args:
        key: Name of the option, such as `learning_rate`.
        value: Value of the option, which is inserted into the override. An empty value becomes the
            placeholder `<value>`.
    """
    for pattern, override in OPTION_ALIASES.items():
        if fnmatchcase(key, pattern):
            return override.format(value=value or "<value>")
    return None


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Return the known key whose last part is most similar to that of a key, or None.

    A similar key of the same group is preferred. In other groups the last part must be nearly
    equal, and None is returned if there is none. If several keys have the same last part, the one
    with the fewest parts is returned.

    Args:
        key: Misspelt dotted key.
        known: Dotted keys of the config.
    """
    group, _, leaf = key.rpartition(".")
    every = sorted(known, key=lambda name: (name.count("."), name), reverse=True)
    own = [name for name in every if name.rpartition(".")[0] == group]
    for names, cutoff in ((own, 0.6), (every, 0.8)):
        leaves = {name.rpartition(".")[2]: name for name in names}
        if near := nearest(leaf, leaves, cutoff):
            return leaves[near]
    return None
