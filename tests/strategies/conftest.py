"""The fixture behind `on_ranks`."""

import pytest
from ranks import Ranks


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    """Runs a case of this file on so many ranks, which live as long as the file is tested."""
    folder, groups = tmp_path_factory.mktemp("ranks"), {}

    def run(world_size, name):
        if world_size not in groups or not groups[world_size].processes:
            groups[world_size] = Ranks(world_size, request.module.__name__, folder)
        groups[world_size].run(name)

    yield run
    for group in groups.values():
        group.stop()


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Runs of train.py, each made once: `runs.Runs`."""
    from runs import Runs, shared_folder

    return Runs(shared_folder(tmp_path_factory))
