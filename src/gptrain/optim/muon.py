"""One optimizer that updates hidden matrices by Muon and all other parameters by AdamW."""

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from gptrain.optim.groups import muon_groups

# Coefficients of a x + b x^3 + c x^5, chosen for a steep slope at 0: Jordan et al. 2024,
# kellerjordan.github.io/posts/muon. These three constants are the defaults of torch.optim.Muon.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_NORM_FLOOR = 1e-7  # smallest divisor of a matrix, which may be 0
# Root mean square of AdamW's update, to which Muon's is scaled: arXiv:2502.16982, section 2.2
_ADAMW_RMS = 0.2


class Muon(torch.optim.Optimizer):
    """Muon for parameter groups with `use_muon=True`, and torch.optim.AdamW for all other groups.

    The updates of matrices are those of torch.optim.Muon with adjust_lr_fn="match_rms_adamw", of
    the size of AdamW's updates, so that a learning rate and a weight decay tuned for AdamW can be
    kept. Matrices of one shape are orthogonalized as a batch, which the ranks that share them
    divide among themselves, in fp32 on a device without fast bf16.

    Args:
        params: Parameter groups, as `muon_groups` makes them. A group without `use_muon` is updated
            by AdamW. One with it must have matrices only.
        lr: Learning rate of groups without their own.
        betas: Decay rates of AdamW's averages.
        eps: Epsilon of AdamW.
        weight_decay: Decoupled weight decay of groups without their own.
        momentum: Nesterov momentum of Muon.
        fused: True to run AdamW as one kernel. It must be False on devices without that kernel.

    Attributes:
        replicas: Mesh of the ranks that hold the same plain (not sharded) weights and gradients,
            which the caller sets. None if this rank works alone. Sharded weights use their own
            mesh.
        found_inf: Scalar on the device of the parameters, which the caller sets before a step. If
            it is 1, the step changes neither parameters nor state. None for steps that are always
            taken. It requires `fused`.
        skips_on_device: True, by which gptrain knows that this class reads `found_inf`.
        parameter_groups: `muon_groups`. gptrain calls it to make `params`.

    Raises:
        ValueError: If torch.optim.AdamW refuses an option.
    """

    replicas: DeviceMesh | None = None
    found_inf: Tensor | None = None
    skips_on_device = True

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        fused: bool = True,
    ):
        no_parameters = [{"params": []}]  # step() gives AdamW its groups
        self._adamw = torch.optim.AdamW(no_parameters, lr, betas, eps, weight_decay, fused=fused)
        defaults = {**self._adamw.defaults, "momentum": momentum, "use_muon": False}
        super().__init__(params, defaults)

    # gptrain calls this function before it builds the optimizer of a run.
    parameter_groups = staticmethod(muon_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, unless `found_inf` is 1.

        All ranks of `replicas`, and all ranks of the mesh of a DTensor, must call this method,
        because they divide the orthogonalization among themselves.

        Args:
            closure: Function that computes the gradients and returns the loss, or None.

        Returns:
            The result of the closure, or None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Share groups and state at each step, because load_state_dict() replaces both.
        self._adamw.state = self.state
        self._adamw.param_groups = [g for g in self.param_groups if not g["use_muon"]]
        cast(Any, self._adamw).found_inf = self.found_inf
        self._adamw.step()
        for group in self.param_groups:
            if group["use_muon"]:
                self._muon_step(group)
        return loss

    def _muon_step(self, group: dict[str, Any]) -> None:
        """Update the matrices of a group: weight decay, then the orthogonalized momentum."""
        batches: dict[tuple, list[Tensor]] = {}  # (shape, mesh, placements) -> parameters
        for parameter in group["params"]:
            if parameter.grad is not None:
                mesh = getattr(parameter, "device_mesh", None)
                placements = getattr(parameter, "placements", None)
                batches.setdefault((parameter.shape, mesh, placements), []).append(parameter)
        is_skipped = None if self.found_inf is None else self.found_inf > 0
        for (shape, *_), parameters in batches.items():
            step_size = group["lr"] * _ADAMW_RMS * math.sqrt(max(shape))
            decay: Any = 1 - group["lr"] * group["weight_decay"]
            momenta = self._nesterov_momenta(parameters, group["momentum"], is_skipped)
            weights = [_local(parameter) for parameter in parameters]
            # The _foreach functions are fast for tensors of one dtype and one memory layout.
            updates = _orthogonalize_shared(momenta, self.replicas).to(
                weights[0], memory_format=torch.contiguous_format
            )
            if is_skipped is not None:
                updates = updates.where(~is_skipped, 0.0)
                decay = torch.where(is_skipped, 1.0, decay)
            torch._foreach_mul_(weights, decay)
            torch._foreach_add_(weights, list(updates), alpha=-step_size)

    def _nesterov_momenta(
        self, parameters: list[Tensor], momentum: float, is_skipped: Tensor | None
    ) -> list[Tensor]:
        """Update the momentum buffers, and return (1 - momentum) * gradient + momentum * buffer."""
        for parameter in parameters:
            if not self.state[parameter]:
                buffer = torch.zeros_like(cast(Tensor, parameter.grad))
                self.state[parameter]["momentum_buffer"] = buffer
        gradients = [_local(cast(Tensor, parameter.grad)) for parameter in parameters]
        buffers = [_local(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        if is_skipped is not None:
            pairs = zip(buffers, gradients, strict=True)
            gradients = [buffer.where(is_skipped, gradient) for buffer, gradient in pairs]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        averages = torch._foreach_lerp(gradients, buffers, momentum)
        return [_shard_of(p, average) for p, average in zip(parameters, averages, strict=True)]


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_of(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a DTensor sharded like a parameter, with this shard; for a plain one, `local`."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, placements, shape=shape, stride=stride)


def _orthogonalize_shared(matrices: list[Tensor], replicas: DeviceMesh | None) -> Tensor:
    """Orthogonalize matrices of one shape, divided over a mesh, into a stack of local shards."""
    first = matrices[0]
    mesh = first.device_mesh if isinstance(first, DTensor) else replicas
    if mesh is None:
        return _orthogonalize(torch.stack(matrices), native_dtype(first.device))
    device = torch.device(mesh.device_type)
    dtype = native_dtype(device)
    replicated = [Replicate()] * mesh.ndim
    by_matrix = [Shard(0)] * mesh.ndim  # the first dimension of the stack numbers the matrices
    # (N, rows, columns)
    stack = torch.stack([matrix.to(device.type, dtype) for matrix in matrices])
    if not isinstance(stack, DTensor):
        stack = DTensor.from_local(stack, mesh, replicated)
    # Redistribution between shards of different dimensions needs all_to_all, which gloo lacks. With
    # gloo, gather all matrices first, and later gather the results one mesh axis after another.
    is_gloo = device.type == "cpu"
    gathered = stack.redistribute(placements=replicated) if is_gloo else stack
    stack_by_matrix = gathered.redistribute(placements=by_matrix)
    del gathered
    local_result = _orthogonalize(stack_by_matrix.to_local(), dtype).contiguous()
    result: Any = _shard_of(stack_by_matrix, local_result)
    if is_gloo:
        for axis in reversed(range(mesh.ndim)):
            result = result.redistribute(placements=[*by_matrix[:axis], *replicated[axis:]])
    return result.redistribute(placements=stack.placements).to_local()


def _orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Bring the singular values of matrices (N, rows, columns) to 0.7 to 1.2, from 0.002 on."""
    a, b, c = _NEWTON_SCHULZ
    is_tall = matrices.size(1) > matrices.size(2)
    # The Gram matrix of a wide matrix is the smaller one.
    wide = (matrices.mT if is_tall else matrices).to(dtype)
    # The Frobenius norm is at least the largest singular value, which becomes at most 1.
    wide = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=_NORM_FLOOR)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.baddbmm(wide, polynomial, wide, beta=a)
    return wide.mT if is_tall else wide


def native_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of fast matrix multiplications on a device, bf16 or fp32.

    It is fp32 for a CPU without AVX512-BF16 and for an NVIDIA GPU before Ampere, else bf16.
    """
    has_bf16 = True
    if device.type == "cpu":
        has_bf16 = torch.cpu._is_avx512_bf16_supported()
    elif device.type == "cuda" and torch.version.hip is None:
        has_bf16 = torch.cuda.get_device_capability(device)[0] >= 8  # Ampere or newer
    return torch.bfloat16 if has_bf16 else torch.float32
