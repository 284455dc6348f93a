"""A user net is compared with its unpartitioned form before the first step."""

import random
import unittest
from contextlib import nullcontext

import numpy
import own_nets
import pytest
import runs as helpers
import torch
import torch.distributed as dist
from ranks import on_ranks

from gptrain.core.strategies import ParallelDims, default_options, parallel_dims
from gptrain.lit.strategies import build_strategy
from gptrain.models import Llama, SimpleGPT
from gptrain.parallel import compare
from gptrain.parallel.base import Parallel
from gptrain.parallel.compare import first_cause, is_of_library
from gptrain.parallel.pipeline import keep_stage
from gptrain.parallel.placement import build_on_meta_device
from gptrain.parallel.requirements import IncompatibleModelError, check_fit, check_layout

CPU = torch.device("cpu")
SAMPLE = torch.randint(61, (40,), generator=torch.Generator().manual_seed(0))


def build(name, net_class, sample=SAMPLE, **modes):
    """Build the strategy and the net of one rank as a run does."""
    options = default_options(name)
    dims = parallel_dims(options, dist.get_world_size() if dist.is_initialized() else 1)
    torch.manual_seed(0)
    return build_strategy(net_class, options, dims, CPU, sample=sample, **modes)


def check_refused(name, cases):
    """Check that each net is refused with a line that contains the expected text."""
    for net_class, piece in cases.items():
        with pytest.raises(IncompatibleModelError) as error:
            build(name, net_class)
        assert piece in str(error.value), (net_class.__name__, str(error.value))
        assert error.value.key == "strategy.name"
        assert "\n" not in str(error.value) and "gptrain.models" in str(error.value)


LOGITS = "the output differs; "
OF_FORWARD = {own_nets.SoftCapped: LOGITS, own_nets.ExtraBias: LOGITS}


@on_ranks(2)
def test_tensor_parallelism_accepts_nets_that_keep_the_contract_and_refuses_the_others():
    for net_class in (
        own_nets.OwnNet,
        own_nets.OnlyChain,
        own_nets.HalfLogits,
        own_nets.BiasedHead,
    ):
        sample = SAMPLE.roll(dist.get_rank())  # data of its own
        net, strategy = build("tensor_parallel", net_class, sample)
        assert {*strategy.parallel.partial_parameters} < {*net.parameters()}
    check_refused(
        "tensor_parallel",
        {
            own_nets.CountsHeads: LOGITS,
            own_nets.Fused: LOGITS,
            own_nets.CountsWidth: "RuntimeError: shape",
            own_nets.UnplannedScale: "the gradient of blocks.1.gain differs",
            own_nets.UnplannedEmbedding: "Error: ",
            own_nets.UnknownRole: "KeyError: 'diagonal'",
            own_nets.ScalesInLayer: LOGITS,
        },
    )


def test_ranks_that_do_not_divide_the_heads_are_refused_before_any_rank_starts():
    options = default_options("tensor_parallel")
    modes = {"compile": "none", "activation_checkpointing": "none", "documents": False}
    llama = Llama(61, 32, 4, 2, n_layers=1, d_ff=40, max_seq_len=16)
    message = r"4 ranks do not divide n_kv_heads=2: .* 1, 2$"
    with pytest.raises(IncompatibleModelError, match=message) as error:
        check_fit(llama, options, parallel_dims(options, 4), **modes)
    assert error.value.key == "strategy.tensor_parallel_size"
    check_fit(llama, options, parallel_dims(options, 2), **modes)


def test_stages_have_blocks_of_their_own_and_share_only_a_weight_of_embedding_and_head():
    options = default_options("pipeline")
    modes = {"compile": "none", "activation_checkpointing": "none", "documents": False}
    net = SimpleGPT(61, 32, n_heads=4, n_layers=4, max_seq_len=16)
    check_fit(net, options, parallel_dims(options, 2), **modes)
    message = "5 stages, but the net has 4 blocks"
    with pytest.raises(IncompatibleModelError, match=message) as error:
        check_fit(net, options, parallel_dims(options, 5), **modes)
    assert error.value.key == "strategy.pipeline_parallel_size"
    net.head.bias = net.offset = torch.nn.Parameter(torch.zeros(61))
    message = (
        r"can share one weight, .* shares token_\w+\.weight = head\.weight; offset = head\.bias$"
    )
    with pytest.raises(IncompatibleModelError, match=message):
        check_fit(net, options, parallel_dims(options, 2), **modes)
    net.head.bias = None
    net.head.weight = net.blocks[0].attention.q_proj.weight
    message = r"this net shares blocks\.0.* = head\.weight"
    with pytest.raises(IncompatibleModelError, match=message) as error:
        check_fit(net, options, parallel_dims(options, 2), **modes)
    assert error.value.key == "strategy.name"


def test_the_first_stage_keeps_the_parameters_outside_of_all_layers():
    kept = []
    for stage in (0, 1):
        net = own_nets.ExtraBias()
        keep_stage(net, stage, 2)
        parts = {"bias": net.bias, "embedding": net.embedding, "norm": net.norm, "head": net.head}
        kept.append([*net.blocks, *(name for name, part in parts.items() if part is not None)])
    assert kept == [["0", "bias", "embedding"], ["1", "norm", "head"]]


def test_sequences_are_divided_over_ranks_that_divide_the_heads_of_a_net_with_a_plan():
    options = default_options("context_parallel")
    modes = {"compile": "none", "activation_checkpointing": "none", "documents": False}
    net = own_nets.DividesSequences()
    net.n_heads = 6
    for n_ranks, message in ((3, None), (4, "4 ranks do not divide n_heads=6: .*: 1, 2, 3, 6$")):
        refused = pytest.raises(IncompatibleModelError, match=message) if message else nullcontext()
        with refused as error:
            check_fit(net, options, parallel_dims(options, n_ranks), **modes)
        assert not message or error.value.key == "strategy.context_parallel_size"
    for plan, reason in (
        (("blocks.*.norm_2",), "must name modules with an attribute exchange"),
        (("layers.*",), "must name modules with an attribute exchange"),
    ):
        net.context_plan = plan
        message = rf"context_plan=.*{reason}"
        with pytest.raises(IncompatibleModelError, match=message) as error:
            check_fit(net, options, parallel_dims(options, 2), **modes)
        assert error.value.key == "strategy.name"


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_net_without_blocks_is_refused_for_what_works_block_by_block(mode):
    options, net = default_options("single"), torch.nn.Linear(2, 2)
    modes = {"compile": "none", "activation_checkpointing": "none", "documents": False}
    for key, value in (("activation_checkpointing", mode), ("compile", "blocks")):
        message = "needs `blocks` of Linear"
        with pytest.raises(IncompatibleModelError, match=message) as error:
            check_fit(net, options, parallel_dims(options, 1), **modes | {key: value})
        assert error.value.key == f"model.{key}"
    check_fit(net, options, parallel_dims(options, 1), **modes | {"compile": "model"})


def test_a_net_without_a_layout_is_refused_for_documents_that_do_not_see_each_other():
    options = default_options("single")
    modes = {"compile": "none", "activation_checkpointing": "none", "documents": True}
    with pytest.raises(IncompatibleModelError, match="argument `layout` of SoftCapped") as error:
        check_fit(own_nets.SoftCapped(), options, parallel_dims(options, 1), **modes)
    assert error.value.key == "data.documents"
    net = SimpleGPT(61, 32, n_heads=4, n_layers=1, max_seq_len=16)
    check_fit(net, options, parallel_dims(options, 1), **modes)
    check_layout(net, 16)  # as many positions as the net has
    with pytest.raises(IncompatibleModelError, match="a sample has 17 positions") as error:
        check_layout(net, 17)
    assert error.value.key == "model.max_seq_len"
    net.max_seq_len = None  # any number of positions
    check_layout(net, 17)


@on_ranks(2)
def test_a_pipeline_accepts_nets_that_are_a_chain_of_their_parts_and_refuses_the_others():
    for net_class in (own_nets.OwnNet, own_nets.OnlyChain, own_nets.CountsHeads, own_nets.Fused):
        build("pipeline", net_class)
    check_refused(
        "pipeline",
        OF_FORWARD
        | {
            own_nets.HalfLogits: LOGITS,
            own_nets.ScaledEmbedding: LOGITS,
            own_nets.MaskOfTokens: LOGITS,
            own_nets.ResidualOfEmbedding: LOGITS,
        },
    )


@on_ranks(2)
def test_fsdp_and_activation_checkpointing_accept_any_forward():
    for net_class in (own_nets.OwnNet, own_nets.MaskOfTokens, own_nets.SoftCapped, own_nets.Random):
        modes = {"activation_checkpointing": "full", "precision": "bf16-mixed"}
        net, strategy = build("fsdp", net_class, **modes)
        # The comparison in fp32 leaves nothing in the strategy of the run.
        assert (strategy.parallel.precision, strategy.parallel.net) == ("bf16-mixed", net)
    # A net that cannot be compared is trained after a warning that names the first cause.
    for net_class, reason in (
        (own_nets.Raises, "OSError: two lines"),
        (own_nets.RaisesOnOneRank, "MemoryError: too little"),
    ):
        with unittest.TestCase().assertLogs("gptrain", "WARNING") as logged:
            build("fsdp", net_class)
        record = logged.records[-1]
        expected = f"warning: the partitioned net was not compared with the plain net: {reason}"
        assert record.getMessage().startswith(expected), record.getMessage()


def words_of(net_class):
    """Return the overrides of a run that trains a net of `own_nets`."""
    return (
        "model=gpt_nano", f"model._target_=own_nets.{net_class.__name__}", "model.vocab_size=61",
        "+model.width=32", "model.n_heads=4", "model.n_layers=2", "~model.d_model",
        "~model.max_seq_len", "model.dropout=0.0", "~model.activation", "trainer.max_steps=2",
        "trainer.val_check_interval=2",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "net_class", "piece"),
    [
        ("tensor_parallel", own_nets.CountsHeads, "the output differs; "),
        ("pipeline", own_nets.HalfLogits, "the output differs; a pipeline needs forward"),
        ("pipeline", own_nets.NeedsMask, "TypeError: StrictBlock.forward() missing"),
    ],
)
def test_a_run_that_would_train_another_function_ends_with_one_error_line(
    name, net_class, piece, runs
):
    """The run ends even if only one rank sees the difference."""
    run = runs(*helpers.PLACES[name], model=words_of(net_class), code=2)
    (line,) = (line for line in run.output.splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: strategy.name={name}: ") and piece in line
    assert "Traceback" not in run.output
    assert not list((run.folder / "checkpoints").glob("step-*"))


def test_a_user_net_is_compared_and_trains_as_on_one_device(runs):
    model = words_of(own_nets.OnlyChain)
    truth, run = (runs(*helpers.PLACES[name], model=model) for name in ("single", "pipeline"))
    helpers.check_losses(run, truth)
    assert "warning" not in run.output


def test_the_message_of_an_error_is_that_of_its_first_cause():
    error = RuntimeError("the last")
    error.__cause__ = KeyError("in between")
    error.__cause__.__cause__ = ValueError("the\n  first")
    assert first_cause(error) == "ValueError: the first"


def small_capped_gpt():
    return own_nets.CappedGPT(61, 32, 4, 2, 64)


def test_one_device_computes_the_loss_from_forward_if_hidden_and_head_differ():
    """Also for a subclass of SimpleGPT."""
    with unittest.TestCase().assertNoLogs("gptrain", "WARNING"):
        for net_class in (own_nets.OwnNet, own_nets.SoftCapped):
            build("single", net_class)
    for net_class in (
        own_nets.HalfLogits, own_nets.OnlyFloat32, small_capped_gpt, own_nets.ScaledByBatch,
        own_nets.DetachedEmbedding, own_nets.NotFiniteBackward, own_nets.Infinite,
    ):  # fmt: skip
        with unittest.TestCase().assertLogs("gptrain", "WARNING"):
            net, strategy = build("single", net_class)
        assert not strategy.parallel.uses_hidden(net)


def test_a_batch_for_the_comparison_is_short_and_of_a_length_that_ranks_divide_as_the_sample():
    for world_size, n_tokens, n_compared in (
        (4, 1023, 32 + 3), (4, 1024, 32), (3, 36, 32 + 1), (4, 35, 35), (4, 9, 9),
    ):  # fmt: skip
        parallel = Parallel(dims=ParallelDims(data=world_size))
        parallel.microbatches = world_size
        sample = torch.arange(n_tokens)
        tokens, targets, _ = compare.make_batch(sample, parallel)
        assert tokens.shape == targets.shape == (world_size, n_compared)
        assert torch.equal(tokens[0], sample[:n_compared])
        assert torch.equal(targets[:, :-1], tokens[:, 1:])
        assert len({tuple(row) for row in tokens.tolist()}) == world_size


def test_a_net_that_cannot_be_built_without_values_has_the_weights_of_its_seed():
    for net_class in (own_nets.ReadsValues, own_nets.DrawsOnCPU):
        net, _ = build("single", net_class, None)
        torch.manual_seed(0)
        expected = net_class()
        assert net.factor == expected.factor
        assert torch.equal(net.blocks[1].up.weight, expected.blocks[1].up.weight)
    values = build_on_meta_device(lambda: torch.ones(2).numpy())  # a TypeError on the meta device
    assert values.tolist() == [1.0, 1.0]


def test_the_comparison_does_not_change_weights_or_random_generators():
    def make():
        net = own_nets.OwnNet()
        torch.nn.init.constant_(net.embedding.weight, random.random() + numpy.random.rand())
        return net

    states = []
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    for sample in (None, SAMPLE):
        random.seed(3)
        numpy.random.seed(4)
        net, _ = build("single", make, sample)
        numbers = torch.tensor([torch.rand(()), random.random(), numpy.random.rand()])
        states.append(net.state_dict() | {"numbers": numbers})
    after = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    torch.set_float32_matmul_precision(before)
    assert after == ("high", torch.float32)
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    assert net.training


def test_only_nets_built_from_gptrains_classes_are_not_compared():
    sizes = {"vocab_size": 61, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 16}
    assert is_of_library(SimpleGPT(**sizes))
    assert not is_of_library(own_nets.CappedGPT(**sizes))
    changed = SimpleGPT(**sizes)
    changed.blocks[1].mlp = torch.nn.Identity()
    assert is_of_library(changed)
    changed.blocks[1].mlp = own_nets.Attention(32, 4)
    assert not is_of_library(changed)
    hooked = SimpleGPT(**sizes)
    hooked.norm.register_forward_hook(lambda *_: None)
    assert not is_of_library(hooked)
    replaced = SimpleGPT(**sizes)
    replaced.forward = lambda tokens: 0.5 * replaced.head(replaced.hidden(tokens))
    assert not is_of_library(replaced)
