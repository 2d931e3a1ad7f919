"""Chooses which of PyTorch's kernels causal attention uses on a GPU (`training.attention`).

With document masking there is no such choice: `models/kernels/document_attention.py` always calls
varlen_attn, which is FlashAttention, of the generation that is chosen here. `python -m
lab.bench attention` measures the kernels for a model's heads on the GPU at hand.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from configs.schema import InputError


def choose(kernel: str, device: torch.device) -> None:
    """Choose the kernel for the whole process; "auto" changes nothing. A shape that the kernel
    cannot run is then an error instead of falling back to a slower kernel. Raises InputError
    without a GPU, or if FlashAttention-3's package is missing."""
    if kernel == "auto":
        return
    if device.type != "cuda":
        raise InputError(
            f'training.attention = "{kernel}" is a kernel for GPUs, this is a {device.type}: set '
            'it to "auto"'
        )
    if kernel == "flash3":
        try:
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl("FA3")
        except (ImportError, ValueError) as error:  # ValueError: this torch does not know FA3
            raise InputError(
                'training.attention = "flash3" needs the package flash_attn_3, or set it to '
                f'"flash": {error}'
            ) from None
    torch.backends.cuda.enable_flash_sdp(kernel != "cudnn")
    torch.backends.cuda.enable_cudnn_sdp(kernel == "cudnn")
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)


@contextmanager
def for_many_shapes() -> Iterator[None]:
    """Allow lengths to vary from forward to forward, inside the context. Nothing is compiled, since
    each new length would be compiled again. PyTorch chooses among all kernels except cuDNN's, which
    plans every new shape: one for each sampled token, 40 ms each on an H200 (torch 2.11). The choice
    for training does not count here: FlashAttention alone refuses the mask of one new token."""
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(kernels):
        yield
