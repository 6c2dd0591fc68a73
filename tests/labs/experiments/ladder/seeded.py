"""Faults in the mini's own code, each with the rung and the number on which it shows first."""

from collections.abc import Callable

from labs.experiments.ladder.rungs import Replicas


def seeded() -> dict[str, Callable[[Replicas], None]]:
    """By name what a rank does to the mini before it trains. Inside a function, so that they travel to the ranks."""

    def never_freed(_: Replicas) -> None:
        from fsdp_sim.mini.param import FSDPParam

        FSDPParam.free_unsharded_param = lambda self: None  # type: ignore[method-assign]

    def never_resharded(_: Replicas) -> None:
        from fsdp_sim.mini.group import FSDPParamGroup

        FSDPParamGroup.reshard = lambda self: None  # type: ignore[method-assign]

    def no_prefetch(_: Replicas) -> None:
        from fsdp_sim.mini import group

        group.backward_prefetch = lambda _: None

    def not_divided(_: Replicas) -> None:
        from torch.distributed import ReduceOp

        from fsdp_sim.mini import group

        divide = group.gradient_division
        group.gradient_division = lambda *a, **k: divide(*a, **k)._replace(reduce_scatter_op=ReduceOp.SUM)

    def accumulation_overwritten(_: Replicas) -> None:
        from fsdp_sim.mini import collectives

        hand_out = collectives.hand_out_grads

        def wrong(state, ctx):
            for p in state.fsdp_params:
                p.sharded_param.grad = None
            return hand_out(state, ctx)

        collectives.hand_out_grads = wrong

    def last_row_lost(_: Replicas) -> None:
        from fsdp_sim.mini.param import FSDPParam

        to_unsharded = FSDPParam.to_unsharded

        def wrong(self):
            to_unsharded(self)
            if self._orig_size[0] % self.mesh_info.shard_mesh_size:
                self._unsharded_param.data[-1] = 0

        FSDPParam.to_unsharded = wrong  # type: ignore[method-assign]

    def offloaded_gradient_lost(_: Replicas) -> None:
        from fsdp_sim.mini import collectives

        collectives.grad_to_cpu = lambda p, rows, stream: rows.new_zeros(rows.shape)

    def stale_shards_gathered(_: Replicas) -> None:
        from fsdp_sim.mini.param import FSDPParam

        inputs = FSDPParam.all_gather_inputs.fget  # type: ignore[attr-defined]

        def wrong(self):
            if not hasattr(self, "first"):
                self.first = [t.clone() for t in inputs(self)]
            return self.first

        FSDPParam.all_gather_inputs = property(wrong)  # type: ignore[assignment, method-assign]

    def partial_sums_lost(_: Replicas) -> None:
        from fsdp_sim.mini import reduction

        add = reduction.add_partial
        reduction.add_partial = lambda state, partial, follows, ctx: add(state, None, follows, ctx)

    def reduced_in_bfloat16(_: Replicas) -> None:
        import torch

        from fsdp_sim.mini.group import FSDPParamGroup

        lazy_init = FSDPParamGroup.lazy_init

        def wrong(self):
            lazy_init(self)
            self._reduce_dtype = torch.bfloat16

        FSDPParamGroup.lazy_init = wrong  # type: ignore[method-assign]

    def gathered_in_float32(_: Replicas) -> None:
        from fsdp_sim.mini import param, state

        param.mixed_dtypes = lambda policy, dtype: (None, policy.reduce_dtype)
        state.cast_forward_inputs = lambda policy, args, kwargs: (args, kwargs)

    def all_reduced_every_time(rung: Replicas) -> None:
        rung.begin_micro_batch = lambda last: None  # type: ignore[method-assign]

    return {name: fault for name, fault in locals().items() if callable(fault)}


WHAT = {
    "never_freed": ("mini-fsdp", "memory"),
    "accumulation_overwritten": ("mini-3", "gradient"),
    "reduced_in_bfloat16": ("mini-bf16", "gradient"),
    "never_resharded": ("mini-fsdp", "collectives"),
    "last_row_lost": ("mini-3", "loss"),
    "partial_sums_lost": ("mini-bf16", "gradient"),
    "not_divided": ("mini-fsdp", "gradient"),
    "offloaded_gradient_lost": ("mini-3", "gradient"),
    "gathered_in_float32": ("mini-bf16", "loss"),
    "stale_shards_gathered": ("mini-3", "loss"),
    "all_reduced_every_time": ("mini-bf16", "collectives"),
    "no_prefetch": ("mini-fsdp", "collectives"),
}
"""By name the rung, which is compared with its twin, torch's; and what it makes wrong first."""
