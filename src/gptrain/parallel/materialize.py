"""Real weights for a spread net: every rank's slices of what one process would have made."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gptrain.parallel.slices import copy_slice


def build_spread(
    make_net: Callable[[], nn.Module],
    spread: Callable[[nn.Module], None],
    device: torch.device | str,
) -> nn.Module:
    """Net made by make_net, spread in place by spread(net), with real parameters on device.

    A net with `init_parameter` and without buffers is made on the meta device, spread there, and
    filled one parameter at a time: a rank never holds more than its slices and one whole parameter.
    Any other net is made whole on the CPU, then spread.
    Both draw from the global CPU generator what one call of make_net draws, so the same seed gives
    the weights of a single process.
    """
    before = torch.random.get_rng_state()
    with torch.device("meta"):
        net = make_net()
    if not hasattr(net, "init_parameter") or any(True for _ in net.buffers()):
        torch.random.set_rng_state(before)
        net = make_net()
        spread(net)
        return net.to(device)
    first_names: dict[int, str] = {}
    canonical = {  # a tied weight is initialised under its first name, also where that is cut off
        name: first_names.setdefault(id(parameter), name)
        for name, parameter in net.named_parameters(remove_duplicate=False)
    }
    spread(net)
    net.to_empty(device=device)
    for name, parameter in net.named_parameters():
        fill(parameter, lambda full, name=name: net.init_parameter(canonical[name], full))
    return net


@torch.no_grad()
def fill(parameter: Tensor, init: Callable[[Tensor], None]) -> None:
    """Fill a plain or sharded tensor with its slice of what init writes into a whole one."""
    whole = torch.empty(parameter.shape, dtype=parameter.dtype)
    init(whole)
    copy_slice(parameter, whole)
