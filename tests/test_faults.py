"""A sample of the campaign of faults, on real runs of two ranks; the full one is run by hand."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.campaign.campaign import KINDS
from tests.campaign.plant import Fault

from gptrain.config.schema import RunConfig

QUICK = [kind for kind in KINDS if kind.quick]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> dict[str, dict]:
    """What of each kind of fault came out: its words -> the results."""
    path = tmp_path_factory.mktemp("chaos") / "results.json"
    command = [sys.executable, "-m", "tests.campaign", "--quick", "--json", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert path.exists(), run.stderr
    return {fault["what"]: fault for fault in json.loads(path.read_text())["faults"]}


@pytest.mark.parametrize("kind", QUICK, ids=lambda kind: f"{kind.name} {kind.what}")
def test_what_is_promised_for_a_fault_holds(campaign, kind):
    found = campaign[kind.what]
    assert found["held"] == found["tries"] > 0, found["problems"]


def test_no_key_of_a_run_reaches_a_fault():
    assert not set(Fault.__dataclass_fields__) & set(RunConfig.__dataclass_fields__)
    code = (
        "import sys, gptrain.assemble, gptrain.launch.local; print('tests.campaign' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
