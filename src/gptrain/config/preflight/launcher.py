"""Check that the config and the launcher that started this process agree."""

import os
from collections.abc import Iterator

from gptrain.config.check import CheckedConfig
from gptrain.core.errors import DONE, ConfigIssue
from gptrain.runtime.process import count_devices, count_nodes, run_stamp, this_process

# If 1, torchrun gives the ranks a TCP store of their own, apart from the store of its agents.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def check_launcher(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Yield a problem if the config does not match the launcher that started this process.

    `trainer.devices` and `trainer.num_nodes` must match the number of ranks. On several nodes the
    ranks need an address at which they find each other, and one name for the run folder. A torchrun
    that could not restart a lost node is a warning. Without a launcher, only a run on several nodes
    is a problem.

    Raises:
        ConfigError: If the environment variables of the launcher contradict each other.
    """
    process = this_process()
    n_nodes = count_nodes(checked.run.trainer.num_nodes or 1)
    n_local = count_devices(checked.run.trainer.devices)
    if process.launcher == "none" and n_nodes > 1:
        message = "without a launcher, ranks start on this machine only"
        hint = f"torchrun --nnodes={n_nodes} ... train.py on each node, or srun, or mpirun"
        yield checked.error("trainer.num_nodes", message, hint)
    names = process.variables
    if names is None:
        return
    n_per_node = process.world_size // process.n_nodes
    n_local = n_local or n_per_node
    if n_local * n_nodes != process.world_size:
        product = f"{n_local} x trainer.num_nodes={n_nodes} = {n_local * n_nodes}"
        hint = f"trainer.devices={n_per_node} trainer.num_nodes={process.n_nodes}"
        message = f"{product}, but {names.world_size}={process.world_size}"
        yield checked.error("trainer.devices", message, hint)
    elif process.n_nodes != n_nodes:
        message = f"{process.launcher} started ranks on {process.n_nodes} nodes"
        yield checked.error("trainer.num_nodes", message, f"trainer.num_nodes={process.n_nodes}")
    if n_nodes > 1 and names.needs_address and "MASTER_ADDR" not in os.environ:
        hint = "mpirun -x MASTER_ADDR=<first node> -x MASTER_PORT=29500 ... (MPICH: -genv)"
        message = "not set; the ranks need the address of the first node"
        yield ConfigIssue("MASTER_ADDR", None, message, hint=hint)
    if process.launcher != "slurm" and n_nodes > 1 and run_stamp() in (checked.run.run_dir or ""):
        message = "each node would name the folder by its own clock"
        yield checked.error("run_dir", message, "run_dir=<a folder that all nodes see>")
    if process.launcher == "torchrun" and n_nodes > 1 and os.environ.get(OWN_STORE) != "1":
        message = "not set; torchrun cannot restart a lost node (pytorch#135712)"
        yield ConfigIssue(OWN_STORE, "", message, hint=f"{OWN_STORE}=1 torchrun ...", code=DONE)
