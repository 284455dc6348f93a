"""What runs on a GPU only, held on a CPU: devices, streams, kernels and copies that are chosen."""

from __future__ import annotations

import os
import socket
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed import HashStore

from gptrain.assemble.report import describe_run
from gptrain.checkpoints import rng
from gptrain.core.strategies import default_options
from gptrain.lit.measure import wait_for
from gptrain.lit.strategies import base
from gptrain.lit.strategies.base import ManyRanks, OneDevice
from gptrain.loss import chunked_next_token_loss, cross_entropy_in_place
from gptrain.models.attention import attend
from gptrain.parallel import mesh
from gptrain.parallel.base import Parallel
from gptrain.parallel.gradients import clip_grad_norm
from gptrain.runtime.devices import RunDevices, accelerator_of, native_precision
from gptrain.text.sampling import Sampling, generate

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}])
def test_the_compiled_loss_is_one_graph_equal_to_the_eager_one_and_in_place(dtype, options):
    torch._dynamo.reset()  # options of an earlier call may become inputs of the graph
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.manual_seed(0)
    logits = torch.randn(12, 64).to(dtype)
    targets = torch.randint(0, 61, (12,)).where(torch.arange(12) % 4 > 0, -100)
    copy = logits.clone()
    compiled = torch.compile(cross_entropy_in_place, fullgraph=True, backend=backend)
    losses, gradient = compiled(copy, targets, 61, True, **options)
    eager_losses, eager_gradient = cross_entropy_in_place(logits, targets, 61, True, **options)
    torch.testing.assert_close(losses, eager_losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, eager_gradient, rtol=1e-6, atol=1e-6)
    assert gradient is not None
    assert gradient.data_ptr() == copy.data_ptr()
    assert len(graphs) == 1
    # A scatter would write the fp32 values of all logits to memory.
    assert not [node for node in graphs[0].graph.nodes if "scatter" in str(node.target)]


def test_the_loss_is_compiled_on_a_gpu_and_not_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: (function, options))
    on_gpu, on_cpu = (Parallel(device=torch.device(name)) for name in ("cuda", "cpu"))
    for parallel in (on_gpu, on_cpu):
        parallel.compile_loss()
    assert on_cpu.chunked_loss is chunked_next_token_loss
    compiled = cast(Any, on_gpu.chunked_loss).keywords["cross_entropy"]
    assert compiled == (cross_entropy_in_place, {"fullgraph": True})


@pytest.mark.parametrize(
    ("dtype", "device", "n_heads"),
    [(torch.float32, "cuda", 4), (torch.bfloat16, "cuda", 2), (torch.float32, "cpu", 2)],
)
def test_grouped_heads_are_repeated_in_fp32_on_a_gpu(monkeypatch, dtype, device, n_heads):
    """The only kernel that groups heads in fp32 stores a (T, T) matrix per head."""
    seen = []

    def record(q, k, v, *_, enable_gqa, **__):
        seen.append((k.shape[1], v.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    with FakeTensorMode():
        q, k = (torch.empty(1, n, 8, 16, dtype=dtype, device=device) for n in (4, 2))
        attend(q, k, k)
    assert seen == [(n_heads, n_heads, n_heads == 2)]


def test_repeated_heads_give_the_attention_of_grouped_heads():
    q, k, v = (torch.randn(2, n, 8, 16) for n in (4, 2, 2))
    wide_k, wide_v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(attend(q, wide_k, wide_v), attend(q, k, v))


def test_the_gradient_norm_never_mixes_devices(monkeypatch):
    """FSDP's CPU offload keeps the net on the CPU, and the module's own parameters on the GPU."""
    calls = []
    for name in ("_foreach_norm", "_foreach_mul_"):
        function = getattr(torch, name)

        def record(tensors, *args, function=function, **kwargs):
            calls.append({tensor.device.type for tensor in tensors})
            return function(tensors, *args, **kwargs)

        monkeypatch.setattr(torch, name, record)
    parameters = [nn.Parameter(torch.zeros(3, device=name)) for name in ("cpu", "meta")]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(NotImplementedError):  # the values of a tensor on the meta device
        clip_grad_norm(parameters, 1.0)
    assert calls[:2] == [{"cpu"}, {"meta"}]


def test_ddp_is_built_on_the_current_stream_of_its_gpu(monkeypatch):
    def refuse(*_):
        raise AssertionError("a side stream")

    built = []
    monkeypatch.setattr(torch.cuda, "Stream", refuse)
    monkeypatch.setattr(
        base, "DistributedDataParallel", lambda *args, **kwargs: built.append((args, kwargs))
    )
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    try:
        strategy = ManyRanks(Parallel(default_options("ddp")))
    finally:
        dist.destroy_process_group()
    strategy._model = net = nn.Linear(1, 1)
    monkeypatch.setattr(strategy, "determine_ddp_device_ids", lambda: [3])
    strategy.configure_ddp()
    ((arguments, keywords),) = built
    assert (arguments, keywords["device_ids"]) == ((net,), [3])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_end_of_a_run_copies_no_state_from_a_gpu_to_the_host(monkeypatch, device):
    calls = []
    monkeypatch.setattr(SingleDeviceStrategy, "teardown", lambda _: calls.append("copied"))
    strategy = OneDevice(Parallel(device=torch.device(device)))
    strategy._accelerator = SimpleNamespace(teardown=lambda: calls.append("accelerator"))
    strategy.teardown()
    assert calls == [{"cpu": "copied", "cuda": "accelerator"}[device]]


def test_generation_leaves_cudnn_attention_out():
    """CuDNN makes a plan for each length of the text."""
    seen = []

    class Net(nn.Module):
        def forward(self, tokens):
            seen.append(torch.backends.cuda.cudnn_sdp_enabled())
            return torch.zeros(*tokens.shape, 5)

    before = torch.backends.cuda.cudnn_sdp_enabled()
    for _ in generate(Net(), [1], 3, Sampling(), torch.Generator()):
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
    assert seen == [False] * 3


@pytest.mark.parametrize(("backend", "timeout_s"), [("nccl", 3660), ("gloo", 30)])
def test_nccl_waits_longer_than_a_compilation_and_a_save_may_take(monkeypatch, backend, timeout_s):
    """Ranks of one node open no port to other machines."""
    interfaces = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in interfaces:
        monkeypatch.setenv(name, "eth0")
        monkeypatch.delenv(name)
    groups, devices = [], []
    monkeypatch.setattr(
        mesh.dist, "init_process_group", lambda name, **options: groups.append((name, options))
    )
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    gpu = torch.device("cuda", 1)
    mesh.start_group(backend, gpu, 0, 1, 30.0, HashStore(), is_one_node=False)
    ((name, options),) = groups
    assert name == backend and (options["rank"], options["world_size"]) == (0, 1)
    assert options["timeout"].total_seconds() == timeout_s and devices == [gpu]
    assert options["device_id"] == (gpu if backend == "nccl" else None)
    assert not {*interfaces} & os.environ.keys()
    mesh.start_group(backend, torch.device("cpu"), 0, 1, 30.0, HashStore())
    assert [os.environ[name] for name in interfaces] == ["lo", "lo"]


@pytest.mark.parametrize("is_used", [True, False])
def test_a_checkpoint_has_the_random_state_of_a_gpu_that_was_used(is_used, monkeypatch):
    states = [torch.tensor(1)]
    gpu = SimpleNamespace(
        is_initialized=lambda: is_used, get_rng_state=lambda: states[-1],
        set_rng_state=states.append,
    )  # fmt: skip
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu)

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return torch.device("cuda", 1) if check_available else None

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    state = rng.capture()
    assert state.get("cuda") is (states[0] if is_used else None)
    rng.restore(state | {"cuda": torch.tensor(2)})
    state.pop("cuda", None)
    rng.restore(state)  # the checkpoint was saved on a CPU
    assert [int(value) for value in states] == ([1, 2] if is_used else [1])


def test_a_run_on_gpus_has_their_name_backend_and_precision(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: H100)
    monkeypatch.setattr(sys, "argv", ["train.py", "name=a b"])
    devices = RunDevices("cuda", 2, 3)
    facts = cast(Any, describe_run(devices))
    assert (facts["devices"], facts["overrides"]) == (f"6 x {H100}", [])
    assert facts["command"] == "python train.py 'name=a b'"
    assert facts["threads"] == torch.get_num_threads() and facts["host"] == socket.gethostname()
    assert {"python", "torch", "lightning", "numpy"} <= facts["versions"].keys()
    assert describe_run(RunDevices("cpu", 2, 1))["devices"].startswith("2 x cpu (")
    assert (devices.backend, RunDevices("mps", 1, 1).backend) == ("nccl", "gloo")
    assert str(RunDevices("mps", 1, 1).device(0)) == "mps"
    assert str(RunDevices("tpu", 1, 1).device(0)) == "cpu"
    for capability, precision in (((7, 9), "32-true"), ((8, 0), "bf16-mixed")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert native_precision(devices) == precision


@pytest.mark.parametrize(
    ("has_cuda", "has_mps", "chosen"),
    [(True, True, ["cuda", "cuda", "mps"]), (False, True, ["mps", "mps", "mps"]),
     (False, False, ["cpu", None, None])],
)  # fmt: skip
def test_an_accelerator_is_the_first_that_the_machine_has(has_cuda, has_mps, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    assert [accelerator_of(name) for name in ("auto", "gpu", "mps")] == chosen


def test_the_host_waits_for_a_device_with_a_queue(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    for name in ("cpu", "mps", "cuda"):
        wait_for(torch.device(name))
    assert [device.type for device in waited] == ["mps", "cuda"]
