"""Data parallelism beside tensor parallelism, and beside a pipeline, on four ranks."""

import copy

from kinds import OneProcess, Piped, Sharded, broadcast, check_equals_one_process, fraction_of_bytes
from ranks import on_ranks
from test_states import check_goes_on_like, check_state_of, trained


@on_ranks(4)
def test_fsdp_by_tensor_parallel_equals_one_process():
    check_equals_one_process(Sharded(data=2, tensor=2), n_steps=2)


@on_ranks(4)
def test_ddp_by_pipeline_equals_one_process():
    check_equals_one_process(Piped("1f1b", data=2), n_steps=2)


@on_ranks(4)
def test_fsdp_by_tensor_parallel_holds_a_quarter_of_the_bytes():
    assert fraction_of_bytes(Sharded(data=2, tensor=2)) < 0.25 * 1.1


@on_ranks(4)
def test_the_mixes_save_and_load_states():
    truth = trained(OneProcess())
    states = copy.deepcopy(truth.states())
    check_state_of(trained(Sharded(data=2, tensor=2)), truth)
    check_state_of(trained(Piped(data=2)), truth)
    expected = truth.step(1)
    for kind in (Sharded(data=2, tensor=2, seed=1), Piped(data=2, seed=1)):
        kind.load(*broadcast(states))
        check_goes_on_like(kind, expected)
