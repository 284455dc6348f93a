"""torch's collectives of Python objects, by copies alone: torch's own ones compute on the device.

The file runs once in each process, after torch was imported. Groups of a CPU keep torch's own.
"""

import pickle

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

NAMES = ("all_gather_object", "broadcast_object_list", "send_object_list", "recv_object_list")
original = {name: getattr(c10d, name) for name in NAMES}


def device_of(group) -> torch.device:
    """Return the device of the group's messages."""
    device = torch.device(c10d._get_object_coll_device(c10d._group_or_default_group(group)))
    index = torch.cuda.current_device() if device.type == "cuda" else None
    return torch.device(device.type, index)


def to_bytes(value) -> torch.Tensor:
    """Return a pickled object as uint8."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def from_bytes(data: torch.Tensor):
    """Return the object of `to_bytes`."""
    return pickle.loads(data.cpu().numpy().tobytes())


def all_gather_object(object_list, obj, group=None):
    """Gather an object of each rank on all ranks."""
    device, n_ranks, data = device_of(group), dist.get_world_size(group), to_bytes(obj)
    if device.type != "cuda":
        return original["all_gather_object"](object_list, obj, group)
    sizes = torch.zeros(n_ranks, dtype=torch.int64).to(device)
    c10d.all_gather_into_tensor(sizes, torch.tensor([len(data)]).to(device), group=group)
    sizes = sizes.cpu().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = data
    gathered = torch.zeros(n_ranks * max(sizes), dtype=torch.uint8).to(device)
    c10d.all_gather_into_tensor(gathered, padded.to(device), group=group)
    for rank, part in enumerate(gathered.cpu().split(max(sizes))):
        object_list[rank] = from_bytes(part[: sizes[rank]])


def broadcast_object_list(object_list, src=None, group=None, device=None, group_src=None):
    """Replace the objects of all ranks by those of one rank."""
    used = c10d._group_or_default_group(group)
    target = device_of(group)
    if target.type != "cuda":
        return original["broadcast_object_list"](object_list, src, group, device, group_src)
    if group_src is None:
        group_src = dist.get_group_rank(used, src or 0) if group is not None else src or 0
    data = to_bytes(object_list) if used.rank() == group_src else torch.zeros(0, dtype=torch.uint8)
    size = torch.tensor([len(data)]).to(target)
    c10d.broadcast(size, group_src=group_src, group=used)
    n_bytes = int(size.cpu())
    message = (data if len(data) else torch.zeros(n_bytes, dtype=torch.uint8)).to(target)
    c10d.broadcast(message, group_src=group_src, group=used)
    object_list[:] = from_bytes(message)


def send_object_list(
    object_list, dst=None, group=None, device=None, group_dst=None, use_batch=False
):
    """Send objects to one rank."""
    target = device_of(group)
    if target.type != "cuda":
        return original["send_object_list"](object_list, dst, group, device, group_dst, use_batch)
    data = to_bytes(object_list)
    place = {"dst": dst} if group_dst is None else {"group_dst": group_dst}
    c10d.send(torch.tensor([len(data)]).to(target), group=group, **place)
    c10d.send(data.to(target), group=group, **place)


def recv_object_list(
    object_list, src=None, group=None, device=None, group_src=None, use_batch=False
):
    """Receive the objects that another rank sends."""
    target = device_of(group)
    if target.type != "cuda":
        return original["recv_object_list"](object_list, src, group, device, group_src, use_batch)
    place = {"src": src} if group_src is None else {"group_src": group_src}
    size = torch.zeros(1, dtype=torch.int64).to(target)
    c10d.recv(size, group=group, **place)
    message = torch.zeros(int(size.cpu()), dtype=torch.uint8).to(target)
    c10d.recv(message, group=group, **place)
    object_list[:] = from_bytes(message)
    return 0


for name in NAMES:
    for owner in (c10d, dist):
        setattr(owner, name, globals()[name])
