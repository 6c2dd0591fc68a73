"""What happens at each moment of a step, in a sentence or two, as a teacher would say it at the picture."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_sim.timeline import Op, Phase, UnitShards
from fsdp_sim.viz.shard_maps.cast import Cast
from fsdp_sim.viz.shard_maps.holdings import HoldingsMoment

PARTS = {2: "half", 3: "third", 4: "quarter", 5: "fifth", 6: "sixth", 7: "seventh", 8: "eighth", 16: "sixteenth"}
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


def part(of: int) -> str:
    """One of so many: ``quarter``, ``1/64``."""
    return PARTS.get(of, f"1/{of}")


def a_part(of: int) -> str:
    """``a quarter``, ``1/64``."""
    if of not in PARTS:
        return part(of)
    return f"{'an' if part(of)[0] in 'ae' else 'a'} {part(of)}"


def parts(n: int, of: int) -> str:
    """Several of so many: ``three quarters``, ``63/64``."""
    if of not in PARTS or n >= len(COUNTS):
        return f"{n}/{of}"
    return f"{COUNTS[n]} {part(of) if n == 1 else _plural(part(of))}"


def ranks_text(ranks: Sequence[int]) -> str:
    """``ranks 0 to 3``, ``ranks 0 and 4``, ``ranks 0 to 3 and 64 to 67``, ``rank 0``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    if all(len(run) == 1 for run in runs) and len(runs) > 4:
        return f"ranks {ranks[0]}, {ranks[1]}, {ranks[2]} to {ranks[-1]}"
    sentences = [
        str(run[0]) if len(run) == 1 else f"{run[0]} {'to' if len(run) > 2 else 'and'} {run[-1]}" for run in runs
    ]
    shown = sentences if len(sentences) <= 4 else [*sentences[:3], "...", sentences[-1]]
    return f"ranks {', '.join(shown[:-1])}{' and ' * (len(shown) > 1)}{shown[-1]}"


def called(name: str) -> str:
    """A name in a sentence; a mere number, as those of a ``Sequential``, is called a unit."""
    return f"unit {name}" if name.isdigit() else name


def piece(band: UnitShards) -> str:
    """What each rank has of a band: its ``quarter``, or where rows do not divide evenly its ``shard``."""
    most, least = max(band.part_bytes, default=1), min(band.part_bytes, default=1)
    return part(band.shards) if least > 0.9 * most else "shard"


def briefly(moment: HoldingsMoment) -> str:
    """A moment in a few words: ``in forward of layers.1``."""
    words = {
        Op.ALL_GATHER: "when {} is gathered",
        Op.FWD: "in forward of {}",
        Op.RECOMPUTE: "when {} is computed again",
        Op.BWD: "in backward of {}",
        Op.FREE: "after {}",
        Op.REDUCE_SCATTER: "when {} is reduce-scattered",
        Op.ALL_REDUCE: "when {} is all-reduced",
        Op.OPTIM: "in the optimizer's step",
    }
    return words.get(moment.op or Op.OTHER, "at rest").format(called(moment.name) or "the optimizer's step")


def sentence(cast: Cast, moment: HoldingsMoment) -> str:
    """What happens at a moment, and what it means."""
    bands = {band.name: band for band in cast.bands}
    band = bands.get(moment.band)
    match moment.op:
        case None:
            return _rest(cast)
        case Op.ALL_GATHER if band:
            return _gather(cast, band, moment)
        case Op.FWD | Op.RECOMPUTE | Op.BWD:
            return _compute(cast, moment)
        case Op.REDUCE_SCATTER if band:
            return _reduce_scatter(cast, band)
        case Op.ALL_REDUCE if band:
            return _all_reduce(cast, band)
        case Op.FREE if band:
            return _reshard(band, moment)
        case Op.FREE:
            return (
                "zero_grad: the gradients are dropped. Every rank holds what it held before the step, with new values."
            )
        case Op.OPTIM:
            return _optimizer(cast)
    return f"{moment.op} of {moment.name or 'no unit'}, over {moment.group_size} ranks."


def _rest(cast: Cast) -> str:
    n, unknown = cast.shards, cast.optimizer is None
    states = "the optimizer state" if cast.optimizer else "no optimizer state"
    and_states = "" if unknown else f" and {states}"
    if cast.ranks == 1:
        return f"At rest: one rank holds all parameters{and_states}."
    each = f"At rest: each of {cast.ranks} ranks holds"
    if cast.keeps_whole and n > 1:
        return (
            f"{each} all parameters, but {'updates' if unknown else f'{states} of'} only {a_part(n)} of every bucket."
        )
    if n == 1:
        return f"{each} everything: all parameters{and_states}."
    where = " in the CPU's memory" if cast.offload else ""
    of = f"; {cast.replicas} groups of {n} ranks hold the same" if cast.replicas > 1 else ""
    if uneven := [band for band in cast.bands if piece(band) == "shard"]:
        none = [rank for rank in range(n) if uneven[0].part_bytes[rank] == 0]
        have = "have" if len(none) > 1 else "has"
        left = f": {ranks_text(none)} {have} nothing of {called(uneven[0].name)}" if none else ""
        return (
            f"{each} its shard of every unit{where}{'' if unknown else f', and {states} of it'}{of}. "
            f"Parameters are cut along their rows, so shards are uneven{left}."
        )
    return f"{each} {a_part(n)} of every unit{where}{'' if unknown else f', and {states} of that {part(n)}'}{of}."


def _gather(cast: Cast, band: UnitShards, moment: HoldingsMoment) -> str:
    n, name = moment.group_size, called(moment.band)
    if moment.phase is Phase.OPTIMIZER and band.replicated:
        return (
            f"All-gather of {name}: every rank sends the {part(n)} it has updated, and every copy is up to date again."
        )
    who, own = _groups(cast, n), piece(band)
    if moment.from_slice:
        what = f"All-gather of {name} within {who}, from the {_plural(part(n))} kept after forward."
    elif n < cast.ranks:
        what = f"All-gather of {name} within {who}: each sends its {own} and now holds all of it."
    else:
        what = (
            f"{who[0].upper()}{who[1:]} all-gather {name}: each sends its {own}, and each now holds all {_number(n)}."
        )
    if cast.offload and not moment.from_slice:
        what = what.replace("each sends its", "each copies its", 1).replace(own, f"{own} from the CPU and sends it", 1)
    if moment.ahead:
        what += f" Ahead of time: {called(moment.ahead)} is computed first."
    return what


def _compute(cast: Cast, moment: HoldingsMoment) -> str:
    name = called(moment.name)
    each = "Every rank" if cast.ranks > 1 else "The rank"
    if moment.op is Op.FWD:
        data = "on its own micro-batch, " if cast.ranks > 1 else ""
        return f"Forward of {name}: {each.lower()} computes {data}with the whole parameters."
    if moment.op is Op.RECOMPUTE:
        return f"{name} is computed again: its activations were not kept, and backward needs them."
    if moment.adds:
        return f"Backward of {name}: {each.lower()} adds to the whole gradient it kept, which has not been reduced yet."
    alone = f"Backward of {name}: {each.lower()} now has a whole gradient"
    return f"{alone}, from its own data alone: no two are alike." if cast.ranks > 1 else f"{alone}."


def _reduce_scatter(cast: Cast, band: UnitShards) -> str:
    n, own, name = band.shards, piece(band), called(band.name)
    moved = " It goes to the CPU's memory." if cast.offload else ""
    if n == 1:
        return f"The gradient of {name} becomes the shard the optimizer reads: the group is one rank, so all of it."
    if n < cast.ranks:
        return (
            f"Reduce-scatter of {name} within {_groups(cast, n)}: each keeps its {own} of the sum, "
            f"which has not seen the other {'group' if cast.replicas == 2 else 'groups'} yet."
        )
    return (
        f"{_groups(cast, n).capitalize()} reduce-scatter {name}: each receives its {own} of the gradient, "
        f"averaged over all {_number(n)}.{moved}"
    )


def _all_reduce(cast: Cast, band: UnitShards) -> str:
    name = called(band.name)
    if band.shards > 1 and not band.replicated:
        pairs = [list(range(place, cast.ranks, cast.shards)) for place in range(min(cast.shards, 2))]
        text = "; ".join(ranks_text(pair) for pair in pairs) + ("; ..." if cast.shards > 2 else "")
        mean = f"each shard is now the mean over all {cast.ranks} ranks"
        return f"All-reduce of {name} between groups ({text}): {mean}."
    return f"All-reduce of {name}: every rank now holds the same whole gradient, the mean over all {cast.ranks}."


def _reshard(band: UnitShards, moment: HoldingsMoment) -> str:
    n = band.shards
    what = f"{called(band.name)} reshards after {moment.phase or 'compute'}"
    kept = moment.of(band.name).slice_of
    if kept and kept < n:
        return f"{what}, but not all the way: each rank keeps {a_part(kept)}, not {a_part(n)}."
    if n == 1:
        return f"{what}: the copy that was computed with is freed, the parameters stay."
    verb = "is" if n == 2 or n not in PARTS else "are"
    if piece(band) == "shard":
        return f"{what}: each rank keeps its own shard, and the rest is freed."
    return f"{what}: {parts(n - 1, n)} of it {verb} freed, and each rank keeps its own."


def _optimizer(cast: Cast) -> str:
    n = cast.shards
    if cast.ranks == 1:
        return "Optimizer: the rank updates all parameters."
    if n == 1:
        return f"Optimizer: all {cast.ranks} ranks make the same update of the whole model, each for itself."
    if cast.keeps_whole:
        return (
            f"Optimizer: each rank updates its {part(n)} of every bucket; {parts(n - 1, n)} of its copy are now stale."
        )
    own = next((piece(band) for band in cast.bands if piece(band) == "shard"), part(n))
    return f"Optimizer: each rank updates its own {own} of every unit, with its own state. Nothing is sent."


def _groups(cast: Cast, n: int) -> str:
    """Who takes part, where groups of n consecutive ranks do the same."""
    if n >= cast.ranks:
        return ranks_text(range(cast.ranks))
    groups = [ranks_text(range(first, first + n)) for first in range(0, min(cast.ranks, 2 * n), n)]
    if cast.ranks <= 2 * n:
        return " and within ".join(groups)
    return f"each group of {n} ranks ({', '.join(group.partition(' ')[2] for group in groups)}, ...)"


def _number(n: int) -> str:
    return COUNTS[n] if n < len(COUNTS) else str(n)


def _plural(word: str) -> str:
    return "halves" if word == "half" else f"{word}s"
