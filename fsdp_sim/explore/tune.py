"""`tune`: the fastest plan for a model on a cluster, what else is worth choosing from, and what each change is worth.

Everything told has been simulated. What is learnt stays the same: the tokens of a step over all GPUs, the sequence
length, the dtypes and the optimizer are held unless they are allowed to vary (see `fsdp_sim.explore.space`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from fsdp_sim.explore.bounds import Bounds
from fsdp_sim.explore.changes import MAX_BLOCKS_TRIED, changes_that_fit
from fsdp_sim.explore.garbage import seldom_collected
from fsdp_sim.explore.pareto import pareto
from fsdp_sim.explore.search import Outcome, Search
from fsdp_sim.explore.space import Space, space_of
from fsdp_sim.requests import Change
from fsdp_sim.simulation import EDGE, Fit, Simulation, simulate
from fsdp_sim.spec import Cluster, Model, Plan, number

SAME = 0.0005  # of a step: for less than this no setting is changed
SMALLER = (0.75, 0.5, 0.25)  # of the best plan's memory: where else the front is looked for
FRONT = 0.01  # of a step: what a look at the front is expected to gain at least
PATIENCE = 15  # looks at the front in a row that find nothing better, and it is left
OVER = 1.001  # times the limit: what a plan on the edge counts as


@dataclass(frozen=True)
class Candidate:
    """A plan that was simulated.

    Attributes:
        peak_memory_bytes: on a rank.
        fits: into the memory that was to hold, and not on the edge of it.
    """

    plan: Plan
    step_time_s: float
    tokens_per_s_per_gpu: float
    peak_memory_bytes: int
    fits: bool


class Worth(NamedTuple):
    """What one change is worth in the best plan.

    Attributes:
        before, after: the values of its fields.
        without: the best plan with them as they were before.
    """

    before: dict[str, Any]
    after: dict[str, Any]
    without: Candidate


@dataclass(frozen=True)
class Tuned:
    """What a search found.

    Attributes:
        space: what was allowed to vary, and the start.
        start: the plan as it was.
        best: the fastest that fits; None if none does.
        worth: of each change from the start to the best, what matters most first.
        front: the plans that fit and that no other simulated one beats in both time and memory, fastest first.
        nearest: where none fits, the plan that needs least memory.
        would_fit: where none fits, changes of the nearest plan with which it does, the fastest first. With more GPUs
            each keeps its micro-batch: a step then has more tokens.
        simulations: how many plans were simulated.
        memory_limit_bytes: what a rank may need.
        interrupted: whether Ctrl-C ended it early: then ``worth`` and ``would_fit`` may be missing.
    """

    model: Model
    space: Space = field(repr=False)
    start: Candidate
    best: Candidate | None
    worth: tuple[Worth, ...]
    front: tuple[Candidate, ...]
    nearest: Candidate | None
    would_fit: tuple[Change, ...]
    simulations: int
    memory_limit_bytes: float
    interrupted: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def sim(self) -> Simulation | None:
        """The simulation of the best plan."""
        if self.best is None:
            return None
        return simulate(self.model, self.space.cluster, self.best.plan, **self.options)


@seldom_collected()
def tune(
    model: str | Model,
    cluster: Cluster,
    plan: Plan | None = None,
    *,
    vary: Iterable[str] | Mapping[str, Sequence[Any] | None] | None = None,
    hold: Iterable[str] = (),
    allow: Iterable[str] = (),
    global_batch: int | None = None,
    memory_limit_bytes: float | None = None,
    on_simulated: Callable[[int, Candidate | None], object] = lambda count, best: None,
    **options: Any,
) -> Tuned:
    """Find the fastest plan that fits, with few simulations.

    Ctrl-C ends the search with the best plan so far.

    Args:
        model: a name of the catalogue, or dimensions.
        plan: where to begin, and what holds where nothing varies; torch's defaults if not given.
        vary, hold, allow: see `fsdp_sim.explore.space_of`.
        global_batch: sequences of a step over all GPUs; by default those of ``plan``.
        memory_limit_bytes: what a rank may need at most; by default what a process can use of the GPU's memory. A plan
            on the edge of the GPU's memory (see `Simulation.fit`) does not count as fitting either way.
        on_simulated: is called after each simulation with their number and the best plan so far that fits.
        options: of `simulate`.

    Raises:
        ValueError: an impossible request.

    Example:
        >>> asked = Plan(micro_batch=1, grad_accum=4, param_dtype="bf16", reduce_dtype="fp32")
        >>> found = tune("gpt2-124m", Cluster("A100-SXM-40GB", gpus=8), asked, vary=["micro_batch", "compile"])
        >>> found.best.plan.micro_batch, found.best.plan.grad_accum, found.best.plan.compile
        (4, 1, True)
    """
    if isinstance(model, str):
        model = Model.preset(model)
    if not isinstance(model, Model):
        raise ValueError(f"{model!r} cannot be tuned; take a Model or the name of one, whose micro-batch can vary")
    if memory_limit_bytes is not None and not number(above=True).test(memory_limit_bytes):
        raise ValueError(f"memory_limit_bytes is {memory_limit_bytes}; it must be a number > 0, or None")
    asked = with_global_batch(plan or Plan(), cluster, global_batch)
    space = space_of(model, cluster, asked, vary=vary, hold=hold, allow=allow)
    tries = _Tries(model, cluster, asked, memory_limit_bytes, on_simulated, options)
    tries.simulated(asked)
    search = Search(space, tries.look, Bounds(model, cluster, options))
    worth: list[Worth] = []
    would_fit: list[Change] = []
    interrupted = False
    try:
        search.run(tries.usable_bytes)
        if (fastest := tries.best) is not None:
            for share in SMALLER:
                search.follow(share * fastest.peak_memory_bytes, FRONT, PATIENCE)
            if tries.best is not fastest:  # that was found on the way
                search.run(tries.usable_bytes)
            tries.best = _simplest(space, tries, tries.best or fastest)
            worth = _worth(space, tries, tries.best)
        else:
            would_fit = changes_that_fit(model, cluster, tries.smallest.plan, **options)
    except KeyboardInterrupt:
        interrupted = True
    best, start = tries.best, tries.checked(asked)
    return Tuned(
        model=model, space=space, start=start, best=best, worth=tuple(worth), front=tuple(tries.front()),
        nearest=tries.smallest if best is None else None, would_fit=tuple(would_fit), simulations=len(tries.seen),
        memory_limit_bytes=tries.limit_bytes, interrupted=interrupted, options=options,
    )  # fmt: skip


def with_global_batch(plan: Plan, cluster: Cluster, sequences: int | None) -> Plan:
    """The plan with as many micro-batches as a step of so many sequences over all GPUs takes.

    Raises:
        ValueError: they cannot be cut into whole micro-batches for each GPU.
    """
    if sequences is None:
        return plan
    each = cluster.gpus * plan.micro_batch
    if sequences < 1 or sequences % each:
        near = max(1, round(sequences / each)) * each
        raise ValueError(
            f"the global batch is {sequences}, which {cluster.gpus} GPUs cannot share in micro-batches of "
            f"{plan.micro_batch}; take a multiple of {each}, for example {near}"
        )
    try:
        return replace(plan, grad_accum=sequences // each)
    except ValueError as error:
        tokens = f"; it counts sequences, so if these were tokens take {sequences // plan.seq_len:,}"
        raise ValueError(f"the global batch is {sequences:,} sequences: {error}{tokens}") from None


class _Tries:
    """The plans simulated so far, each once."""

    def __init__(
        self, model: Model, cluster: Cluster, start: Plan, limit_bytes: float | None,
        on_simulated: Callable[[int, Candidate | None], object], options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.model, self.cluster, self.options = model, cluster, options
        self.on_simulated = on_simulated
        self.most_blocks = max(MAX_BLOCKS_TRIED, _blocks(model) * start.grad_accum)
        self.seen: dict[Plan, Candidate] = {}
        self.checks: set[Plan] = set()  # plans that were simulated whole, with torch's allocator
        self.held: dict[Plan, float] = {}  # bytes that torch's allocator holds, where it was played
        self.best: Candidate | None = None
        of_gpu = simulate(model, cluster, start, **options).memory_limit_bytes
        self.limit_bytes = of_gpu if limit_bytes is None else min(of_gpu, limit_bytes)
        self.usable_bytes = min(self.limit_bytes, EDGE * of_gpu if cluster.kind == "gpu" else of_gpu)

    def simulated(self, plan: Plan) -> Candidate:
        """The plan, simulated, maybe in short. Raises ValueError for one that is impossible."""
        if plan not in self.seen:
            self.seen[plan] = found = self._in_short(plan)
            if found.fits and (self.best is None or _rank(found) < _rank(self.best)):
                found = self.checked(plan)
                self.best = found if found.fits else self.best
            self.on_simulated(len(self.seen), self.best)
        return self.seen[plan]

    def _in_short(self, plan: Plan) -> Candidate:
        """Of many micro-batches three are simulated: each further one takes as long as the third and needs no more."""
        short = simulate(self.model, self.cluster, replace(plan, grad_accum=min(plan.grad_accum, 3)), **self.options)
        step_s = short.step_time_s
        if more := plan.grad_accum - short.plan.grad_accum:
            two = simulate(self.model, self.cluster, replace(plan, grad_accum=2), **self.options)
            step_s += more * (step_s - two.step_time_s)
        tokens, peak = short.workload.tokens * plan.grad_accum, short.peak_memory_bytes
        return Candidate(plan, step_s, tokens / step_s, peak, peak <= self.limit_bytes)

    def look(self, plan: Plan) -> Outcome | None:
        """What the search is told of a plan."""
        if _blocks(self.model) * plan.grad_accum > self.most_blocks:
            return None
        try:
            found = self.simulated(plan)
        except ValueError:  # this model or cluster does not take such a plan
            return None
        held = self.held.get(plan)
        if not found.fits:
            held = max(held or found.peak_memory_bytes, OVER * self.usable_bytes)
        return Outcome(1.0 / found.tokens_per_s_per_gpu, found.peak_memory_bytes, held)

    @property
    def smallest(self) -> Candidate:
        return self.checked(min(self.seen.values(), key=lambda one: (one.peak_memory_bytes, one.step_time_s)).plan)

    def front(self) -> list[Candidate]:
        """No dearer twins: of plans as fast and as large the first that was simulated."""
        while True:
            fitting = [one for one in self.seen.values() if one.fits]
            front = [fitting[n] for n in pareto([_rank(one) for one in fitting])]
            if front == [self.checked(one.plan) for one in front]:
                return front

    def checked(self, plan: Plan) -> Candidate:
        """A plan that was simulated, now whole; whether it fits is known with torch's allocator played."""
        if plan not in self.checks:
            self.checks.add(plan)
            sim = simulate(self.model, self.cluster, plan, **self.options)
            peak = sim.peak_memory_bytes
            fits = peak <= self.limit_bytes and sim.fit is Fit.FITS
            if sim.fit_at_once is None and self.usable_bytes < self.limit_bytes:
                self.held[plan] = sim.memory.reserved_bytes
            self.seen[plan] = Candidate(plan, sim.step_time_s, sim.tokens_per_s_per_gpu, peak, fits)
        return self.seen[plan]


def _rank(one: Candidate) -> tuple[float, float]:
    return 1.0 / one.tokens_per_s_per_gpu, float(one.peak_memory_bytes)


def _blocks(model: Model) -> int:
    return model.n_layer + model.n_encoder_layer


def _put_back(space: Space, best: Plan) -> list[tuple[tuple[str, ...], Plan]]:
    """For each lever at which the best plan differs from the start: its fields, and the plan with them put back."""
    found = []
    for lever, _ in space.levers.values():
        changed = tuple(name for name in lever.fields if getattr(best, name) != getattr(space.start, name))
        if changed:
            plan = space.with_fields(best, {name: getattr(space.start, name) for name in lever.fields})
            if plan is not None and plan != best:
                found.append((changed, plan))
    return found


def _simplest(space: Space, tries: _Tries, best: Candidate) -> Candidate:
    """The best plan without the changes that gain next to nothing."""
    most_s = (1.0 + SAME) / best.tokens_per_s_per_gpu
    for _ in range(len(space.levers)):
        for _, plan in _put_back(space, best.plan):
            if tries.look(plan) and _rank(tries.seen[plan])[0] <= most_s and tries.checked(plan).fits:
                best = tries.seen[plan]
                break
        else:
            break
    return best


def _worth(space: Space, tries: _Tries, best: Candidate) -> list[Worth]:
    found = []
    for _, plan in _put_back(space, best.plan):
        if tries.look(plan) is not None:
            changed = [f.name for f in fields(Plan) if getattr(plan, f.name) != getattr(best.plan, f.name)]
            before, after = ({name: getattr(one, name) for name in changed} for one in (plan, best.plan))
            found.append(Worth(before, after, tries.checked(plan)))
    return sorted(found, key=lambda one: (one.without.fits, one.without.tokens_per_s_per_gpu))
