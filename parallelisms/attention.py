"""Which of PyTorch's kernels causal attention runs on a GPU (`training.attention`).

Document masking is not asked: `models/kernels/document_attention.py` calls varlen_attn, which is FlashAttention, of the generation
that is chosen here. `python -m tools.bench.attention` measures the kernels for a model's heads on the GPU at hand.
"""

import torch

from configs.schema import InputError


def choose(kernel: str, device: torch.device) -> None:
    """For the whole process, from now on; "auto" changes nothing. A kernel that cannot run a shape is then an error, not a
    slower kernel. Raises InputError without a GPU, or without the package that has FlashAttention-3."""
    if kernel == "auto":
        return
    if device.type != "cuda":
        raise InputError(f'training.attention = "{kernel}" is a kernel for GPUs, this is a {device.type}: set it to "auto"')
    if kernel == "flash3":
        try:
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl("FA3")
        except (ImportError, ValueError) as error:  # ValueError: a torch that does not know it
            raise InputError(f'training.attention = "flash3" needs the package flash_attn_3, or set it to "flash": {error}') from None
    torch.backends.cuda.enable_flash_sdp(kernel != "cudnn")
    torch.backends.cuda.enable_cudnn_sdp(kernel == "cudnn")
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
