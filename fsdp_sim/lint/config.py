"""Traps in another trainer's configuration, as `fsdp_sim.configurations` reads it. A detector has its rule's name."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_sim.configurations import Configuration, read
from fsdp_sim.explore import changes_that_fit
from fsdp_sim.lint.cost import Costs, in_words
from fsdp_sim.lint.report import FileReport, Finding, report_of
from fsdp_sim.lint.rules import Rule, rules
from fsdp_sim.simulation import Fit

SHARDED = ("fsdp1", "fsdp2")


class Trap(NamedTuple):
    """What a detector finds: a message, and the key that has it. ``instead``: fields of the plan without the trap."""

    message: str
    key: str = ""
    instead: Mapping[str, Any] | None = None
    simulated: str = ""


class Given(NamedTuple):
    """A configuration, and with what its costs are simulated."""

    said: Configuration
    costs: Costs

    @property
    def plan(self) -> dict[str, Any]:
        return self.said.plan

    def key(self, *ends: str) -> str:
        """The first key of the file whose last part is one of these; empty if there is none."""
        return next((key for key in self.said.given if key.rpartition(".")[2] in ends), "")

    def value(self, *ends: str) -> Any:
        """Its value; None where the file says nothing."""
        return self.said.given.get(self.key(*ends))


def lint_config(path: str, looked_for: Mapping[str, Rule], costs: Costs) -> FileReport:
    """The traps of a configuration.

    Raises:
        ValueError: no format fits, or it says what no reader understands; names it.
    """
    given = {name: text for name, text in costs.texts.items() if name == "gpus"}
    said = read(path, gpus=int(given["gpus"]) if "gpus" in given else None)
    of = Given(said, Costs(costs.texts | {"config": path}, has_model=bool(said.preset or said.model_file)))
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    found = [
        _finding(id, trap, of, looked_for[id], lines)
        for id, detector in DETECTORS.items() if id in looked_for and "config" in looked_for[id].where
        for trap in detector(of)
    ]  # fmt: skip
    return report_of(path, "config", found, lines, notes=[f"read as {said.package} does"])


def _finding(id: str, trap: Trap, of: Given, rule: Rule, lines: list[str]) -> Finding:
    instead = dict(rule.instead) if trap.instead is None else dict(trap.instead)
    simulated = trap.simulated
    if not simulated and instead and of.costs.knows():
        simulated = of.costs.compared({}, instead)
    name = trap.key.rpartition(".")[2]
    for number, line in enumerate(lines if name else [], 1):
        if match := re.search(rf"(?<![\w-])[\"']?(\w+_)?{re.escape(name)}[\"']?\s*[:=]", line):
            return Finding(id, trap.message, number, match.start() + 1, len(line.rstrip()) + 1, line, simulated)
    return Finding(id, trap.message, simulated=simulated)


def one_unit(of: Given) -> Iterator[Trap]:
    if of.plan.get("wrap") == "root" and of.plan.get("api") in SHARDED and not _by_size(of):
        key = of.key("auto_wrap_policy", "fsdp", "data_parallel_shard_degree")
        whole = "embed_block_head" if of.plan["api"] == "fsdp2" else "block"
        yield Trap(f"no block is a unit ({of.value('auto_wrap_policy') or 'no wrap policy'})", key, {"wrap": whole})


def _by_size(of: Given) -> bool:
    return str(of.value("auto_wrap_policy")).upper() in ("SIZE_BASED_WRAP", "SIZE")


def size_wraps_nothing(of: Given) -> Iterator[Trap]:
    if not _by_size(of) or of.plan.get("api") not in SHARDED:
        return
    key = of.key("min_num_params") or of.key("auto_wrap_policy")
    if of.plan.get("wrap") == "root":
        yield Trap("min_num_params is 0, and sets no policy", key)
    elif of.costs.knows():
        units = of.costs.job().simulate().program.units
        if len(units) == 1:
            yield Trap(f"no block has {of.plan['wrap']:,} parameters", key)


def reshard_ignored(of: Given) -> Iterator[Trap]:
    asked = of.value("reshard_after_forward")
    strategy = of.plan.get("sharding_strategy")
    if of.plan.get("api") == "fsdp1" and asked not in (None, True, strategy):
        yield Trap(f"fsdp_reshard_after_forward is {asked!r}, and the sharding strategy stays {strategy}",
                   of.key("reshard_after_forward"))  # fmt: skip


def backward_prefetch_off(of: Given) -> Iterator[Trap]:
    if of.plan.get("api") == "fsdp1" and of.plan.get("backward_prefetch") == "none":
        key = of.key("backward_prefetch")
        yield Trap("no unit is asked for ahead in backward" + ("" if key else ", which is the default here"), key)


def no_shard(of: Given) -> Iterator[Trap]:
    if of.plan.get("sharding_strategy") == "NO_SHARD":
        yield Trap(
            "the sharding strategy is NO_SHARD", of.key("sharding_strategy"), {"sharding_strategy": "FULL_SHARD"}
        )


def local_state_dict(of: Given) -> Iterator[Trap]:
    if "LOCAL" in str(of.value("state_dict_type")).upper():
        yield Trap("the state dict type is LOCAL_STATE_DICT", of.key("state_dict_type"))


@functools.cache
def blocks() -> dict[str, str]:
    """The class of a model's blocks, by the beginning of the model's name."""
    return tomllib.loads(files("fsdp_sim.lint").joinpath("blocks.toml").read_text())


def other_models_block(of: Given) -> Iterator[Trap]:
    names = of.value("transformer_layer_cls_to_wrap")
    given = [part.strip() for part in names.split(",")] if isinstance(names, str) else list(names or ())
    model = of.said.preset or of.costs.texts.get("model", "")
    own = [blocks()[start] for start in sorted(blocks(), key=len) if model.startswith(start)]
    if given and own and all(name in blocks().values() for name in given) and own[-1] not in given:
        yield Trap(f"{', '.join(given)} is wrapped, and the blocks of {model} are {own[-1]}",
                   of.key("transformer_layer_cls_to_wrap"))  # fmt: skip


def fsdp_config_without_fsdp(of: Given) -> Iterator[Trap]:
    below = [key for key in of.said.given if key.startswith("fsdp_config")]
    if of.said.format in ("trainer", "trl") and below and not of.key("fsdp"):
        yield Trap("there is fsdp_config, and no fsdp", "fsdp_config")


def hybrid_on_one_node(of: Given) -> Iterator[Trap]:
    gpus, size = of.said.cluster.get("gpus"), of.plan.get("shard_size")
    hybrid = "HYBRID" in str(of.plan.get("sharding_strategy"))
    if gpus is not None and size == gpus and (hybrid or of.plan.get("api") == "fsdp2"):
        key = of.key("sharding_strategy", "dp_shard_size", "data_parallel_shard_degree")
        yield Trap(f"{gpus} GPUs in shard groups of {size}: one group", key)


def one_rank(of: Given) -> Iterator[Trap]:
    if of.said.cluster.get("gpus") == 1 and of.plan.get("api") in SHARDED:
        yield Trap("there is one GPU", of.key("num_processes"))


def limit_all_gathers_off(of: Given) -> Iterator[Trap]:
    if of.plan.get("api") == "fsdp1" and of.plan.get("limit_all_gathers") is False:
        yield Trap("limit_all_gathers is off", of.key("limit_all_gathers"), {"limit_all_gathers": True})


def gradients_kept_whole(of: Given) -> Iterator[Trap]:
    if of.plan.get("api") in SHARDED and of.plan.get("requires_gradient_sync") == "last":
        key = of.key("gradient_accumulation_steps", "num_steps")
        yield Trap(f"of {of.plan.get('grad_accum')} micro-batches the last alone reduces gradients", key,
                   {"requires_gradient_sync": True})  # fmt: skip


def compile_flat_parameters(of: Given) -> Iterator[Trap]:
    given = of.key("use_orig_params")
    if of.plan.get("api") == "fsdp1" and of.plan.get("compile") and given and not _is_true(of.value("use_orig_params")):
        yield Trap("the model is compiled, and use_orig_params is off", given, {})


def does_not_fit(of: Given) -> Iterator[Trap]:
    if not of.costs.knows():
        return
    job = of.costs.job()
    step = job.simulate()
    if step.fit == Fit.DOES_NOT_FIT:
        ways = changes_that_fit(job.dimensions, job.cluster, job.plan, **job.options)
        told = f"what fits: {ways[0].what}" if ways else "nothing that was tried fits"
        yield Trap(f"{in_words(step)} on {job.cluster.gpus} {job.cluster.gpu.name}; {told}", simulated="", instead={})


def offload_though_it_fits(of: Given) -> Iterator[Trap]:
    if of.plan.get("cpu_offload") and of.costs.knows():
        step = of.costs.job(cpu_offload=False).simulate()
        if step.fit == Fit.FITS:
            yield Trap("it fits without", of.key("offload_params", "cpu_offload", "fsdp_cpu_offload", "offload"))


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "yes", "on", "1")


DETECTORS: dict[str, Callable[[Given], Iterator[Trap]]] = {
    id: found for name, found in list(globals().items()) if (id := name.replace("_", "-")) in rules()
}
"""By rule."""
