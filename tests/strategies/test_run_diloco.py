"""strategy=diloco through train.py: replicas that synchronize every `sync_every` steps."""

import copy
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import runs as helpers
import torch
import torch.distributed as dist
from kinds import CPU, make_net
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy

from gptrain.checkpoints.amendment import NAME
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core.strategies import ParallelDims, default_options
from gptrain.lit.strategies import build_strategy
from gptrain.lit.strategies.saving import SavingStrategy
from gptrain.parallel import diloco
from gptrain.parallel.diloco import DiLoCo

TWO = (
    "strategy=diloco", "trainer.devices=2", "strategy.sync_every=2",
    "trainer.val_check_interval=8",
)  # fmt: skip
NOTES = ("+callbacks.weights._target_=own_parts.NoteWeights",)
SGD = (
    "optimizer._target_=torch.optim.SGD", "optimizer.lr=0.1", "trainer.gradient_clip_val=0",
    "~optimizer.betas", "~optimizer.eps",
)  # fmt: skip
FULL = ("data.num_samples=200",)  # every sample has the same number of targets
INFINITE = ("+callbacks.bad._target_=own_parts.InfiniteAt", "+callbacks.bad.step=2")
STOP = ("+callbacks.stop._target_=own_parts.StopAt", "+callbacks.stop.rank=1")
SHORT = (*helpers.DROPOUT, "trainer.val_check_interval=6", "strategy.outer_lr=0.5")


@pytest.fixture
def one_rank():
    """Create a process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def weights(run, rank=0):
    """Return one rank's weights after each step."""
    return torch.load(run.folder / f"weights-{rank}.pt", weights_only=True)


def check_same_replicas(run, whole):
    """Check that the last checkpoints are equal, for the first and for the second replica."""
    assert not helpers.differences(run.state(6), whole.state(6))
    name = "replica-0001.ckpt"
    files = (
        torch.load(some_run.checkpoint(6) / name, weights_only=True) for some_run in (run, whole)
    )
    assert not helpers.differences(*files)


def stopped(runs):
    """Return a run of six steps that was stopped between two synchronizations."""
    run = runs(*TWO, *SHORT, *STOP, "+callbacks.stop.step=3", code=75)
    assert run.n_steps == 5  # the run stops one step after the signal
    return run


def test_synchronizing_at_every_step_equals_ddp(runs):
    local = ("strategy.sync_every=1", "strategy.outer_lr=1", "strategy.outer_momentum=0")
    words = (*SGD, *NOTES, "trainer.max_steps=4", "trainer.val_check_interval=4")
    run = runs(*TWO, *local, *words, data=FULL)
    truth = runs(*helpers.PLACES["ddp"], *words, data=FULL)
    helpers.check_close(run.column("train/loss"), truth.column("train/loss"), 1e-6)
    helpers.check_close(run.column("val/loss"), truth.column("val/loss"), 1e-6)
    for weight, expected in zip(weights(run), weights(truth), strict=True):
        assert (weight - expected).abs().max() < 1e-6


def test_the_outer_step_is_sgd_with_nesterov_momentum(one_rank):
    """A frozen bias takes no part. Another object continues with the state of the first."""
    net = torch.nn.Linear(3, 1)
    net.bias.requires_grad_(False)
    options = SimpleNamespace(replicas=1, outer_lr=0.7, outer_momentum=0.9, outer_dtype="fp32")

    def prepared():
        outer = DiLoCo(options, ParallelDims())
        outer.prepare(net, torch.optim.SGD(net.parameters()))
        return outer

    outer = prepared()
    assert len(outer.state()["anchors"]) == 1
    place, momentum = net.weight.detach().clone(), torch.zeros(1, 3)
    for number in range(1, 4):
        moved = torch.full((1, 3), 0.1 * number)
        net.weight.data.add_(moved)
        outer.sync(number)
        momentum = 0.9 * momentum - moved
        place = place - 0.7 * (-moved + 0.9 * momentum)
        torch.testing.assert_close(net.weight.detach(), place)
        state = copy.deepcopy(outer.state())
        net.weight.data.add_(1.0)  # the anchors of the next object come from the state
        outer = prepared()
        net.weight.data.sub_(1.0)
        outer.load(state)
        assert (outer.synced_step, len(outer.state()["momentum"])) == (number, 1)


def test_on_several_nodes_each_is_a_replica():
    """Each rank exchanges parameter changes with the rank at its place on the other node."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=4)
    try:
        options, dims = default_options("diloco"), ParallelDims(data=4)
        outer = build_strategy(make_net, options, dims, CPU, n_nodes=2)[1].parallel
        assert dist.get_process_group_ranks(outer.step_group) == [0, 1]
        assert dist.get_process_group_ranks(outer.data_group) == [0, 1]
        assert dist.get_process_group_ranks(outer.sync_group) == [1, 3]
        assert outer.ddp_arguments["process_group"] is outer.replica_group
        assert outer.replicas is not None and outer.replicas.size() == 2  # Muon divides its updates
        net = make_net()
        outer.prepare(net, torch.optim.SGD(net.parameters()))
        assert outer.state()["number"] == 2
        sources, averaged = [], []
        with (
            patch.object(dist, "broadcast", lambda *_, group_src, **__: sources.append(group_src)),
            patch.object(diloco, "sum_gradients", lambda part, *_, **__: averaged.extend(part)),
        ):
            outer.sync(1)
        anchors = list(outer.anchors.values())
        assert sources == [index % 2 for index in range(len(anchors))]
        assert all(a is b for a, b in zip(averaged, anchors[1::2], strict=True))
    finally:
        dist.destroy_process_group()


def test_a_synchronization_is_done_once_after_a_step_and_after_its_decision(one_rank, monkeypatch):
    """Replicas synchronize after every third and the last step, and before a validation."""
    options = default_options("diloco").model_copy(update={"sync_every": 3})
    net, strategy = build_strategy(make_net, options, ParallelDims(), CPU)
    trainer = SimpleNamespace(max_steps=7, sanity_checking=False, state=SimpleNamespace(fn="fit"))
    module = LightningModule()
    module.net, module.trainer = net, trainer
    strategy.connect(module)
    done = []

    def sync(step):
        done.append(step)
        strategy.parallel.synced_step = step

    monkeypatch.setattr(DDPStrategy, "optimizer_step", lambda *_: done.append("update"))
    monkeypatch.setattr(strategy.parallel, "sync", sync)
    monkeypatch.setattr(strategy, "synchronize_buffers", done.append)
    strategy.conclude_step = lambda: done.append("decision")
    for step in range(7):
        trainer.global_step = step  # Lightning increases it after the optimizer's step
        strategy.optimizer_step(None)
        trainer.global_step = step + 1
        if step + 1 in (2, 6):
            strategy.on_validation_start()
    replicas = strategy.parallel.sync_group  # the buffers of the replicas follow their weights
    at = {2: [2, replicas]} | {step: ["decision", step, replicas] for step in (3, 6, 7)}
    of_steps = [at.get(step, []) for step in range(1, 8)]
    assert done == [entry for of_step in of_steps for entry in ("update", *of_step)]
    for fn, is_sanity_check in (("validate", False), ("fit", True)):
        trainer.global_step, trainer.state.fn, trainer.sanity_checking = 9, fn, is_sanity_check
        strategy.on_validation_start()
    assert done[-2:] == [7, replicas]


def test_a_rank_resumes_its_replica_and_evaluates_the_first_one(tmp_path, caplog, monkeypatch):
    first = {"state_dict": {"w": 0.0}, "optimizer_states": [{"state": {"w": {"sum": 10.0}}}]}
    further = [
        {"state_dict": {"w": float(n)}, "optimizer": {"w": {"sum": 10.0 + n}}} for n in (1, 2)
    ]
    store = CheckpointStore(tmp_path, "a" * 32)
    for number in (2, 3):  # step 2 has two replicas, and step 3 has three
        with store.writing(number) as draft:
            for replica, state in enumerate([first, *further][:number]):
                name = f"replica-{replica:04d}" if replica else "state"
                with draft.open(f"{name}.ckpt") as file:
                    torch.save(state | {"replicas": {"number": number}}, file)
    monkeypatch.setattr(SavingStrategy, "load_optimizer_state_dict", lambda *_: None)
    module = LightningModule()
    module.trainer = trainer = SimpleNamespace(state=SimpleNamespace(fn="fit"))
    for step, rank, n_ranks, fn, expected in (
        (2, 1, 2, "fit", 1), (2, 1, 2, "validate", 0), (2, 1, 3, "fit", 0), (3, 2, 3, "fit", 2)
    ):  # fmt: skip
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=n_ranks)
        try:
            options, dims = default_options("diloco"), ParallelDims(data=n_ranks)
            strategy = build_strategy(make_net, options, dims, CPU)[1]
            strategy.connect(module)
            trainer.state.fn = fn
            loaded = strategy.load_checkpoint(tmp_path / f"step-{step:08d}")
            outer = []
            monkeypatch.setattr(strategy.parallel, "load", outer.append)
            strategy.load_optimizer_state_dict(loaded)
            assert [state["number"] for state in outer] == [step]
        finally:
            dist.destroy_process_group()
        assert loaded["state_dict"] == {"net.w": expected}
        assert loaded["optimizer_states"][0]["state"] == {"w": {"sum": 10.0 + expected}}
    (message,) = caplog.messages  # three ranks cannot resume two replicas
    assert message.startswith("warning: the checkpoint has 2 replicas; all replicas of this run")


@pytest.mark.parametrize(("rank", "n_files"), [(1, 0), (2, 1), (3, 0)])
def test_the_first_rank_of_a_further_replica_writes_the_weights_that_a_callback_has_put_into_a_save(
    tmp_path, rank, n_files
):
    """Two replicas of two ranks: the state file of the run has the first replica."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=4)
    try:
        options, dims = default_options("diloco"), ParallelDims(data=4)
        net, strategy = build_strategy(make_net, options, dims, CPU, n_nodes=2)
        module = LightningModule()
        module.net = net
        strategy.connect(module)
        strategy.optimizers = [torch.optim.SGD(net.parameters(), momentum=0.9)]
        strategy.parallel.prepare(module, strategy.optimizers[0])
        strategy.saves_to_store = True
        store = CheckpointStore(tmp_path, "a" * 32)
        averaged = {"state_dict": {"net.w": 0.5}, "validated": True}
        with store.writing(1) as draft:
            strategy.save_checkpoint(averaged, None, draft)
        names = sorted(strategy.saved_parameters())
    finally:
        dist.destroy_process_group()
    assert averaged["replicas"]["number"] == 2
    files = [*store.newest().glob("replica-*")]
    assert [path.name for path in files] == ["replica-0001.ckpt"] * n_files
    for path in files:
        saved = torch.load(path, weights_only=True)
        assert saved["state_dict"] == {"w": 0.5} and sorted(saved["optimizer"]) == names


ONLY_FORWARD = (
    "model=gpt_nano", "model._target_=own_parts.OnlyForward", "model.vocab_size=61",
    "model.d_model=8", "~model.n_heads", "~model.n_layers", "~model.max_seq_len", "~model.dropout",
    "~model.activation",
)  # fmt: skip
OWN = ("module._target_=own_parts.Plain", "trainer.gradient_clip_val=null")


@pytest.mark.parametrize(
    ("words", "model"), [(("strategy.outer_dtype=bf16",), helpers.MODEL), (OWN, ONLY_FORWARD)]
)
def test_replicas_are_bit_identical_after_a_synchronization_and_only_then(words, model, runs):
    """Replicas synchronize after every second step and after the last, also for a user's net."""
    run = runs(*TWO, *NOTES, *words, "trainer.max_steps=5", model=model)
    first, second = weights(run, 0), weights(run, 1)
    equal = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    assert equal == [False, True, False, True, True]


@pytest.mark.slow
def test_a_run_stopped_between_synchronizations_resumes_bit_for_bit(runs):
    whole = runs(*TWO, *SHORT)
    resumed = runs(*TWO, *SHORT, "ckpt_path=last", begun=stopped(runs))
    helpers.check_same_bits(resumed, whole)
    check_same_replicas(resumed, whole)


# A validation between two synchronizations. Record acts on validations: no stop interrupts them.
ROUNDS = (
    *TWO, *SHORT, "strategy.sync_every=4", "trainer.val_check_interval=2", "~callbacks.record",
)  # fmt: skip


def test_a_validation_between_synchronizations_evaluates_the_synchronized_net(runs):
    run = runs(*ROUNDS)
    for step in (2, 4, 6):
        second = torch.load(run.checkpoint(step) / "replica-0001.ckpt", weights_only=True)
        first = run.state(step)["state_dict"]
        assert first.keys() == second["state_dict"].keys()
        assert not helpers.differences(first, second["state_dict"]), step
        # The replicas have synchronized before this save, so that it was not repeated.
        assert (run.checkpoint(step) / NAME).is_file()


@pytest.mark.slow
def test_a_run_stopped_in_a_validation_between_synchronizations_resumes_bit_for_bit(runs):
    """The validation is repeated, but the synchronization for the validation is not."""
    begun = runs(*ROUNDS, *STOP, "+callbacks.stop.step=2", code=75)
    assert begun.n_steps == 2 and not begun.column("val/loss")
    resumed, whole = runs(*ROUNDS, "ckpt_path=last", begun=begun), runs(*ROUNDS)
    helpers.check_same_bits(resumed, whole)
    check_same_replicas(resumed, whole)


def test_a_resume_with_another_number_of_replicas_uses_the_first_replicas_state(runs):
    words, begun = (*TWO, *SHORT, "ckpt_path=last"), stopped(runs)
    resumed = runs(*words, "trainer.devices=1", begun=begun)
    assert "the checkpoint has 2 replicas; all replicas of this run resume with" in resumed.output
    assert resumed.n_steps == 6
    refused = runs(*words, "strategy.sync_every=3", begun=begun, code=2)
    assert "strategy.sync_every" in refused.output


def test_a_nonfinite_step_is_skipped_only_by_its_replica(runs):
    run = runs(*TWO, *NOTES, *INFINITE, "on_nonfinite=skip")
    first, second = weights(run, 0), weights(run, 1)
    assert torch.equal(second[2], second[1]) and not torch.equal(first[2], first[1])
    assert torch.equal(first[-1], second[-1]) and first[-1].isfinite().all()
    assert run.output.count("the step is skipped") == 1


def test_callbacks_that_need_the_synchronized_weights_of_every_step_are_refused(runs):
    assert "averages the full net" in runs(*TWO, "callbacks=ema", code=2).output


@pytest.mark.slow
def test_ranks_of_one_replica_take_each_step_together(runs):
    """Two replicas of two ranks resume bit for bit between synchronizations, also with Muon."""
    words = (
        *TWO, *SHORT, "trainer.devices=4", "strategy.replicas=2", "data.batch_size=2",
        "optimizer=muon", "checkpoint=every_n_steps", "checkpoint.every_n_steps=3",
    )  # fmt: skip
    whole = runs(*words, *NOTES)
    steps = [weights(whole, rank) for rank in range(4)]
    for number, (a, b, c, d) in enumerate(zip(*steps, strict=True), 1):
        assert torch.equal(a, b) and torch.equal(c, d)
        assert torch.equal(a, c) == (number % 2 == 0)
    check_same_replicas(runs(*words, f"ckpt_path={whole.checkpoint(3)}"), whole)


@pytest.mark.slow
def test_a_replica_that_stops_at_a_nonfinite_step_ends_the_run(runs):
    run = runs(*TWO, *INFINITE, code=79)
    assert "at step 2 are not finite" in run.output
