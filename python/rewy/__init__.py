"""Exact gradients of delta-rule attention for PyTorch: DeltaNet, Gated DeltaNet, KDA and Gated DeltaNet-2.

The functions take Flash Linear Attention's arguments, on CPU and CUDA tensors::

    from rewy import chunk_kda

    o, final_state = chunk_kda(q, k, v, g, beta)

``patch_fla()`` and ``patch_transformers()`` make the layers of those packages use them. Everything that computes is C++
and CUDA; the operators below the functions are ``torch.ops.rewy``.
"""

import torch as _torch  # noqa: F401  # its library must be loaded before the module that uses it

from ._C import version as __version__
from ._call import explain
from .chunk import chunk_delta_rule, chunk_gated_delta_rule, chunk_gdn2, chunk_kda
from .patch import patch_fla, patch_transformers, unpatch_fla, unpatch_transformers
from .recurrent import (
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn2,
    fused_recurrent_kda,
)

__all__ = [
    "__version__",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn2",
    "chunk_kda",
    "explain",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn2",
    "fused_recurrent_kda",
    "patch_fla",
    "patch_transformers",
    "unpatch_fla",
    "unpatch_transformers",
]
