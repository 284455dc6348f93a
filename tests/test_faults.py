"""A sample of the fault campaign, on real runs of two ranks; all: python -m tests.tools.campaign.

Two cases run at a time, forked from one process that has imported everything; a case that is run
alone by -k starts no others.
"""

from __future__ import annotations

import re
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from gptrain.core.schema import RunConfig
from tests.conftest import ROOT
from tests.tools.campaign.lab import Lab
from tests.tools.campaign.scenarios import SCENARIOS

QUICK = [row for row in SCENARIOS if row.quick]


@pytest.fixture(scope="module")
def tries(request, tmp_path_factory) -> dict[str, list[Future]]:
    """Words of a scenario -> its tries, of those that this session has selected."""
    selected = [item.callspec.params["row"] for item in request.session.items if is_ours(item)]
    lab = Lab(tmp_path_factory.mktemp("campaign"), n_steps=20)
    with ThreadPoolExecutor(2) as pool:
        yield {
            row.what: [pool.submit(row.attempt, lab, number) for number in range(row.quick)]
            for row in selected
        }


def is_ours(item: pytest.Item) -> bool:
    return getattr(item, "originalname", "") == "test_the_documented_behaviour_after_a_fault_holds"


@pytest.mark.slow
@pytest.mark.parametrize("row", QUICK, ids=lambda row: f"{row.fault} {row.what}")
def test_the_documented_behaviour_after_a_fault_holds(tries, row):
    assert [future.result() for future in tries[row.what]] == [None] * row.quick


def test_no_key_of_a_run_reaches_a_fault():
    keys = str(RunConfig.model_json_schema()).lower()
    assert not [word for word in ("fault", "campaign", "planted") if f"'{word}" in keys]
    for path in (ROOT / "src").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) tests\b", path.read_text(), re.MULTILINE), path
