"""The fixture `runs`."""

import pytest


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Return the cache of train.py runs, each of which is made once (`runs.Runs`)."""
    from runs import Runs, shared_folder

    return Runs(shared_folder(tmp_path_factory))
