"""A progress bar where waiting is long."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def with_bar(
    items: Iterable[Item], title: str, total_bytes: int, n_bytes: Callable[[Item], int]
) -> Iterator[Item]:
    """The items, with a bar of their bytes on standard error if that is a terminal."""
    from tqdm import tqdm  # comes with lightning; not needed where the cache holds the text

    with tqdm(
        total=total_bytes, desc=title, unit="B", unit_scale=True, disable=None, leave=False
    ) as bar:
        for item in items:
            yield item
            bar.update(n_bytes(item))
