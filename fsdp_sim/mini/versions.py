"""Where versions of torch differ, and nowhere else: the mini follows the torch that it runs beside.

Each says what changed and where that stands in torch; the program tests compare the two on every version of the matrix.
"""

from __future__ import annotations

import torch

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])

GRADS_KEEP_ORIGINAL_DTYPE = TORCH >= (2, 15)
"""Without a ``reduce_dtype`` gradients are reduced in the dtype of the sharded parameter; before 2.15, in
``param_dtype``. Gradients that are not reduced yet accumulate in ``.grad`` of the unsharded parameter, whose
``grad_dtype`` makes autograd cast; before, in a copy that FSDP kept beside it. And what earlier micro-batches scattered
and did not all-reduce yet is part of every reduction. Source: `MixedPrecisionPolicy`, "versionchanged:: 2.15", and
`FSDPParamGroup._set_unsharded_grad_dtypes`."""

GATHERED_GOES_BEFORE_COPY_OUT = TORCH >= (2, 15)
"""G(i) goes when copy-out(i+1) begins; before 2.15 a local variable of `FSDPParamGroup.wait_for_unshard` held it to the
end. Source: `FSDPCommContext.release_all_gather_state_for_comm_reuse`."""

WAITS_BEFORE_FINALIZE = TORCH >= (2, 15)
"""At the end of backward the last reductions are waited for before the first unit is finalized; before 2.15, inside
it. Source: `FSDPState._end_backward_iteration`."""

REDUCED_OUTLIVES_ITS_CAST = TORCH >= (2, 15)
"""O in the reduce dtype goes after the event that ends the reduction; before 2.15, when it had been cast. Source:
`foreach_reduce`, which since then casts runs of parameters one by one."""

HOOKED_OUTLIVES_ITS_HOOK = TORCH >= (2, 15)
"""O is held until the user's all-reduce hook has ended on its stream, as it is for an all-reduce. Source:
`AllReduceState`."""

RESET_DROPS_SHARDED_GRADS = TORCH >= (2, 15)
"""`reset_iter_state` forgets the gradients of sharded parameters too. Source: `FSDPParamGroup._reset_iter_state`."""

ALL_GATHER, REDUCE_SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if TORCH >= (2, 13)  # renamed; the old names still work there, and warn
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)
"""The names in torch.distributed of the collectives of single tensors."""
