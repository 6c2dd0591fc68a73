"""`Bounds`: what a plan takes at least, in time and in memory, known without playing its step.

What is computed, and what is kept of it, is the same in all plans that differ only in when and with whom they
communicate (`NOT_COMPUTED`), so that one program of one micro-batch prices many plans; what is moved is the same in all
that compute otherwise. A rank computes one operation after the other, with copies between them and the optimizer after
them: a step takes at least the sum of them, and at least what one lane or one kind of collective takes. When backward
begins, parameters, states of the optimizer and all that forward keeps are alive: a rank needs at least these.
Activations that are offloaded are copied one after the other too, and alive is at least what one segment needs back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from fsdp_sim.cost import NOT_COMPUTED, kept_of
from fsdp_sim.explore.search import Outcome
from fsdp_sim.schedule import NOT_ISSUED, policy_of, state_bytes
from fsdp_sim.simulation import Simulation, simulate
from fsdp_sim.spec import Cluster, Model, Plan
from fsdp_sim.timeline import COLLECTIVES, Lane, Op

# Of these the kernels of a micro-batch know nothing.
ELSEWHERE = NOT_COMPUTED | {"cpu_offload", "expandable_segments", "optimizer_impl"}
ALONE = {name: getattr(Plan, name) for name in ELSEWHERE}
LASTING = (NOT_COMPUTED | NOT_ISSUED) - {"shard_size", "sharding_strategy"}  # and of these what lives through all steps
ORDER = {
    "forward_prefetch", "backward_prefetch", "limit_all_gathers", "post_optim_event", "expandable_segments",
    "reduce_scatter_max_input_buffers", "separate_reduce_scatter_group",
}  # fmt: skip
"""When something is moved, not what."""
MOVED_ALIKE = (NOT_ISSUED | ORDER | {"activation_checkpointing", "activation_offload"}) - {"optimizer_impl"}
WORK = (Op.FWD, Op.BWD, Op.RECOMPUTE, Op.ACT_D2H, Op.ACT_H2D)
UNKNOWN = 1e-12  # of the seconds, where a rank may compute faster than its GPU


def _settings(without: frozenset[str]) -> Callable[[Plan], tuple[Any, ...]]:
    values = attrgetter(*[f.name for f in fields(Plan) if f.name not in without])
    return lambda plan: (*values(plan), *map(type, values(plan)))  # True is not 1


_computed, _lasting = _settings(ELSEWHERE), _settings(LASTING)


_moving = _settings(MOVED_ALIKE | {"micro_batch", "grad_accum"})


class Bounds:
    """Calling it gives what a plan takes at least.

    Args:
        model, cluster, options: of `simulate`.
    """

    def __init__(self, model: Model, cluster: Cluster, options: Mapping[str, Any]) -> None:
        self._simulate = lambda plan: simulate(model, cluster, plan, **options)
        self._share = UNKNOWN if options.get("skew") else 1.0
        self._computes: dict[tuple[Any, ...], tuple[float, float, int, int]] = {}
        self._moves: dict[tuple[Any, ...], tuple[list[float], list[list[float]]]] = {}
        self._lasts: dict[tuple[Any, ...], int] = {}

    def __call__(self, plan: Plan, most: Outcome | None = None) -> Outcome | None:
        """Seconds of a GPU per token, and bytes of a rank; None if the model or the cluster takes no such plan. Of one
        that computes or keeps ``most`` or more, what is moved is not asked for."""
        try:
            return self._at_least(plan, most)
        except ValueError:
            return None

    def _at_least(self, plan: Plan, most: Outcome | None) -> Outcome:
        computes, lasts = _computed(plan), _lasting(plan)
        if computes not in self._computes:
            self._computes[computes] = self._computed_by(self._simulate(replace(plan, **ALONE)))
        if lasts not in self._lasts:
            sim = self._simulate(plan)
            self._lasts[lasts] = sum(state_bytes(sim.workload.units, sim.plan, sim.cluster.gpus).values())
        each_s, step_s, tokens, kept_bytes = self._computes[computes]
        least = Outcome(self._share * (each_s + step_s / plan.grad_accum) / tokens, self._lasts[lasts] + kept_bytes)
        if most and (least.seconds >= most.seconds or least.bytes >= most.bytes):
            return least
        beside_s, moved_s = self._moved_by(plan)
        return least._replace(
            seconds=self._share * (max(each_s + beside_s, moved_s) + step_s / plan.grad_accum) / tokens
        )

    def _moved_by(self, plan: Plan) -> tuple[float, float]:
        """Seconds per micro-batch of what a rank does before or after what it computes, and of what a lane moves."""
        few = min(plan.grad_accum, 3)
        moving = *_moving(plan), few, plan.micro_batch if plan.expert_parallel > 1 else None
        if moving not in self._moves:
            sim = self._simulate(replace(plan, grad_accum=few))
            found: dict[Any, list[float]] = defaultdict(lambda: [0.0, 0.0])
            for i in sim.program.ops:
                if i.op not in WORK:
                    in_turn = i.lane is Lane.COMPUTE or i.op is Op.OPTIM
                    lane = found[None if in_turn else i.op if i.op in COLLECTIVES else i.lane]
                    seconds = sim.costs.seconds(i)
                    lane[0] += seconds
                    lane[1] += seconds if i.micro_batch == 1 else 0.0
            self._moves[moving] = found.pop(None, [0.0, 0.0]), list(found.values())
        beside, moved = self._moves[moving]
        more = plan.grad_accum - few  # as the second of three
        first, *others = [(few_s + more * second_s) / plan.grad_accum for few_s, second_s in (beside, *moved)]
        return first, max(others, default=0.0)

    @staticmethod
    def _computed_by(sim: Simulation) -> tuple[float, float, int, int]:
        """Seconds of one micro-batch and of what is between steps, its tokens, and bytes that forward keeps."""
        program, work = sim.program, sim.workload.work
        lanes: dict[Lane | None, float] = defaultdict(float)
        for i in program.ops:
            if i.op in WORK:
                lanes[i.lane] += sim.costs.seconds(i)
        again, back, policy = program.segments_of(Op.RECOMPUTE), program.segments_of(Op.BWD), policy_of(sim.plan)
        away = program.segments_of(Op.ACT_D2H)
        kept = largest = 0
        for segment in program.segments_of(Op.FWD):
            if segment in again:
                own = work[segment].output_bytes + kept_of(work[segment].outputs, policy).bytes
            elif segment in back:
                own = max(work[segment].saved_bytes, work[segment].logits_bytes)
            else:
                continue
            if segment in away:
                largest = max(largest, own)
            else:
                kept += own
        return max(lanes.values()), sim.costs.calibration.step_s, sim.workload.tokens, max(kept, largest)
