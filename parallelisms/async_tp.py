"""Asynchronous tensor parallelism (`parallelism.async_tensor_parallel`): collectives of tensor
parallelism overlap with GEMMs."""

import warnings

from torch.distributed.device_mesh import DeviceMesh

from configs.schema import InputError

SYMMETRIC_MEMORY = ("cuda",)  # devices whose ranks can read each other's memory


def check_overlap(device_type: str) -> None:
    """Raises InputError if the ranks of a host cannot read each other's memory."""
    if device_type not in SYMMETRIC_MEMORY:
        raise InputError(
            "parallelism.async_tensor_parallel = true needs GPUs that are connected by NVLink, "
            "this is a "
            f"{device_type}: set it to false"
        )


def overlap(tp_mesh: DeviceMesh) -> None:
    """Asynchronous tensor parallelism (Wang et al., ASPLOS 2023, doi:10.1145/3567955.3567959), by
    inductor. In blocks that are compiled after this call, an all-gather before GEMMs, and a GEMM
    before a reduce-scatter, become one operator each: it sends pieces over NVLink while it
    multiplies others. Raises InputError if ranks cannot read each other's memory."""
    check_overlap(tp_mesh.device_type)
    from torch._inductor import config  # imported here because it takes two seconds
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    # torch 2.13 warns that this call is superfluous, but without it fuses nothing, in silence
    # (pytorch #193027).
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(tp_mesh.get_group().group_name)
