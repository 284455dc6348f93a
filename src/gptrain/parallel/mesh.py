"""The axes along which ranks divide the work."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Outermost to innermost. Ranks of one tensor group are neighbours, because they talk most and one
# node's links are the fastest; stages of a pipeline talk least and may lie far apart.
AXES = ("pipeline", "data", "tensor")


def build_mesh(
    device_type: str, *, data: int = 1, tensor: int = 1, pipeline: int = 1
) -> DeviceMesh:
    """Mesh with the axes "pipeline", "data" and "tensor", one group of ranks along each.

    Every rank must call it, after the process group exists.

    Raises: RuntimeError if the product of the degrees is not the world size.
    """
    return init_device_mesh(device_type, (pipeline, data, tensor), mesh_dim_names=AXES)
