"""`largest`: the largest model, number of layers, micro-batch or sequence length that fits, and what stands in the way.

Memory grows with each of the last three, so the largest is found by doubling and halving; published models are tried
one by one. The answer has been simulated, and so has the next larger one, which does not fit or is on the edge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fsdp_sim.simulation import MAX_BLOCKS, Fit, Simulation, check_blocks, in_short, simulate
from fsdp_sim.spec import Cluster, Model, Plan

LARGEST_OF = ("model", "layers", "micro-batch", "seq-len")
SEARCH_LIMITS = {"layers": 1_000, "micro-batch": 2**20, "seq-len": 2**26}  # where the search gives up


@dataclass(frozen=True)
class LargestFit:
    """What a search found.

    Attributes:
        what: what was varied, one of `LARGEST_OF`.
        value: the largest that fits: a number, or the name of a model; None if none fits.
        fits: its simulation.
        next: the smallest larger one that was found not to fit or to be on the edge; None where something else
            ends the search.
        too_large: its simulation.
        model, plan: of ``next``, or of ``value`` where there is no next.
        ends: why there is no larger one, where memory is not the reason.
    """

    what: str
    value: int | str | None
    fits: Simulation | None
    next: int | str | None
    too_large: Simulation | None
    model: Model
    plan: Plan
    ends: str = ""


def largest(
    what: str,
    model: Model | None,
    cluster: Cluster,
    plan: Plan,
    *,
    multiple_of: int = 1,
    family: str = "",
    **options: Any,
) -> LargestFit:
    """Search for the largest that fits.

    Args:
        what: ``model`` (of the catalogue), ``layers`` of the given model, ``micro-batch`` or ``seq-len``.
        model: what is trained; not needed for ``model``.
        multiple_of: the answer is a multiple of it.
        family: for ``model``: only those whose name begins so.
        options: of `simulate`.

    Raises:
        ValueError: an impossible request.
    """
    if what not in LARGEST_OF:
        raise ValueError(f"there is no largest {what!r}; it must be one of {', '.join(LARGEST_OF)}")
    if multiple_of < 1:
        raise ValueError(f"the answer cannot be a multiple of {multiple_of}; take a whole number >= 1")
    if what == "model":
        return _largest_model(cluster, plan, family, options)
    if model is None:
        raise ValueError(f"the largest {what} of which model? Name one, or give its dimensions")

    def job_at(n: int) -> tuple[Model, Plan]:
        if what == "layers":
            return replace(model, n_layer=n, name=f"{model.name}, {n:,} layers"), plan
        return model, replace(plan, micro_batch=n) if what == "micro-batch" else replace(plan, seq_len=n)

    def simulate_at(n: int, short: bool = False) -> Simulation:
        of_model, of_plan = job_at(n)
        return simulate(of_model, cluster, in_short(of_plan) if short else of_plan, **options)

    bound, ends = SEARCH_LIMITS[what], f"the search ends at {SEARCH_LIMITS[what]:,}"
    most_layers = MAX_BLOCKS // plan.grad_accum - model.n_encoder_layer
    if what == "layers" and most_layers < bound:
        bound, ends = most_layers, f"the search ends at {MAX_BLOCKS:,} blocks in a step (layers times grad_accum)"
    if what == "seq-len" and model.positions == "learned" and model.max_seq_len:
        bound, ends = model.max_seq_len, f"{model.name} has learned positions for {model.max_seq_len:,} tokens"
    if multiple_of > bound:
        raise ValueError(f"no multiple of {multiple_of} is allowed: {ends}")
    value, fits, beyond, too_large = _search_in_short(simulate_at, plan, multiple_of, bound)
    of_model, of_plan = job_at(beyond or value or multiple_of)
    return LargestFit(what, value, fits, beyond, too_large, of_model, of_plan, "" if beyond else ends)


_Found = tuple[int | None, Simulation | None, int | None, Simulation | None]


def _search_in_short(simulate_at: Callable[..., Simulation], plan: Plan, step: int, bound: int) -> _Found:
    """As `_search`, but looked for with `in_short`'s plan; what is found there is simulated as it was asked for."""
    if in_short(plan) != plan:
        value, _, beyond, _ = _search(lambda n: simulate_at(n, short=True), step, bound)
        fits = None if value is None else simulate_at(value)
        too_large = None if beyond is None else simulate_at(beyond)
        if (fits is None or fits.fit is Fit.FITS) and (too_large is None or too_large.fit is not Fit.FITS):
            return value, fits, beyond, too_large
    return _search(simulate_at, step, bound)


def _search(simulate_at: Callable[[int], Simulation], step: int, bound: int) -> _Found:
    """The largest multiple of ``step`` that fits and the next, which does not, with their simulations."""
    low, low_sim = 0, None
    high, high_sim = None, None
    n = 1
    while high is None:
        sim = simulate_at(n * step)
        if sim.fit is not Fit.FITS:
            high, high_sim = n, sim
        elif n * step + step > bound:
            return n * step, sim, None, None
        else:
            low, low_sim = n, sim
            n = min(2 * n, bound // step)
    while high - low > 1:
        middle = (low + high) // 2
        sim = simulate_at(middle * step)
        if sim.fit is Fit.FITS:
            low, low_sim = middle, sim
        else:
            high, high_sim = middle, sim
    return low * step or None, low_sim, high * step, high_sim


def _largest_model(cluster: Cluster, plan: Plan, family: str, options: dict[str, Any]) -> LargestFit:
    names = [name for name in Model.presets() if name.startswith(family)]
    if not names:
        raise ValueError(f"no model's name begins with {family!r}; there are {', '.join(Model.presets())}")
    models = sorted(map(Model.preset, names), key=lambda m: m.param_count)
    beyond: Model | None = None
    refused, larger = "", ""

    def simulated(model: Model | None) -> Simulation | None:
        return None if model is None else simulate(model, cluster, plan, **options)

    for model in reversed(models):
        try:
            check_blocks(model.n_layer + model.n_encoder_layer, plan)
            sim = simulate(model, cluster, in_short(plan), **options)
        except ValueError as error:  # for example a sequence longer than its positions
            refused, larger = refused or str(error), f"{model.name} is larger and refused: {error}"
            continue
        if sim.fit is Fit.FITS:
            sim = simulate(model, cluster, plan, **options)
        if sim.fit is Fit.FITS:
            above = beyond.name if beyond else None
            top = f"{model.name} is the largest model of the catalogue" + (f" {family}" if family else "")
            return LargestFit(
                "model", model.name, sim, above, simulated(beyond), beyond or model, plan,
                "" if beyond else larger or top,
            )  # fmt: skip
        beyond = model
    if beyond is None:
        raise ValueError(refused)
    return LargestFit("model", None, None, beyond.name, simulated(beyond), beyond, plan)
