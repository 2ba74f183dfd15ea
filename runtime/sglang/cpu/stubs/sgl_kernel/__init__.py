"""Stands in for ``sgl_kernel``, SGLang's compiled kernels, where there is no GPU.

``torch.ops.sgl_kernel.convert_weight_packed`` is left out on purpose: without it SGLang takes the
plain PyTorch path of every layer. This module has the names that SGLang imports on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torch import Tensor

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write each request's new slots, which ``out_cache_loc`` holds request by request."""
    at = 0
    columns = (column.tolist() for column in (req_pool_indices, start_offset, end_offset))
    for row, start, end in zip(*columns, strict=True):
        slots = out_cache_loc[at : at + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        at += end - start


def _missing(name: str) -> Callable[..., NoReturn]:
    def call(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: speculative decoding needs a GPU")

    return call


assign_extend_cache_locs_cpu = _missing("assign_extend_cache_locs_cpu")
assign_draft_cache_locs_contiguous_cpu = _missing("assign_draft_cache_locs_contiguous_cpu")
build_draft_decode_metadata_cpu = _missing("build_draft_decode_metadata_cpu")
build_tree_kernel_efficient_cpu = _missing("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _missing("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _missing("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _missing("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _missing("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _missing("verify_tree_greedy_cpu")
