"""Traps in a model, which is made on the meta device in a process of its own. A detector has its rule's name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from math import ceil, prod
from pathlib import Path
from typing import Any

from fsdp_sim.lint.cost import Costs
from fsdp_sim.lint.report import FileReport, Finding, report_of
from fsdp_sim.lint.rules import Rule, rules
from fsdp_sim.packages import need
from fsdp_sim.words import human_bytes, percent

LONGEST_S = 120
MOST_BYTES = 16 * 2**30  # of memory of its own
RANKS = 8  # where nobody says how many
LOW = ("bfloat16", "float16")
WASTE, LEAST_WASTED = 0.1, 2**18  # of a unit's elements, and elements
MOST_IN_ROOT, LEAST_IN_ROOT = 0.5, 10**6
TINY = 100_000  # parameters: 200 kB in bf16, less than any link moves in the time of its latency
NAMED = 3


class Model:
    """What is known of a model, and how it is to be trained."""

    def __init__(self, facts: Mapping[str, Any], ranks: int, api: str) -> None:
        self.facts, self.ranks, self.api = facts, ranks, api
        self.params: list[dict[str, Any]] = facts["params"]
        self.units: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for param in self.params:
            self.units[param["unit"]].append(param)


def lint_module(target: str, looked_for: Mapping[str, Rule], costs: Costs) -> FileReport:
    """The traps of a model.

    Raises:
        ValueError: it cannot be made, or takes too long.
    """
    need("fsdp-sim lint on a model", "torch")
    ranks = int(costs.texts.get("gpus", RANKS))
    model = Model(look_at(target), ranks, costs.texts.get("api", "fsdp2"))
    found = [
        Finding(id, message)
        for id, detector in DETECTORS.items() if id in looked_for and "module" in looked_for[id].where
        for message in detector(model)
    ]  # fmt: skip
    blocks = len(model.facts["blocks"])
    units = (
        f"{blocks} blocks in ModuleLists are units, and the root" if blocks else "no ModuleList: the root is the unit"
    )
    return report_of(target, "module", found, [], notes=[f"{model.facts['class']} on {ranks} ranks; {units}"])


def look_at(target: str, longest_s: float = LONGEST_S) -> dict[str, Any]:
    """The facts of a model.

    Raises:
        ValueError: its process said what is wrong, died, or took longer.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "facts.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "fsdp_sim.lint.made_on_meta", target, str(out)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            preexec_fn=_limit, start_new_session=True,
        )  # fmt: skip
        try:
            _, said = process.communicate(timeout=longest_s)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{target} is not made after {longest_s:g} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not out.exists():
            last = (said or "").strip().splitlines()[-1:] or [f"status {process.returncode}"]
            raise ValueError(f"{target} cannot be made; its process ended: {last[0][:300]}")
        facts: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    if "error" in facts:
        raise ValueError(facts["error"])
    return facts


def _limit() -> None:
    import resource

    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))


def _unit(name: str) -> str:
    return name or "the root"


def _several(names: list[str]) -> str:
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def tied_across_units(model: Model) -> Iterator[str]:
    for param in model.params:
        for name, unit in param["also"]:
            if unit != param["unit"]:
                yield f"{param['name']} (of {_unit(param['unit'])}) and {name} (of {_unit(unit)}) are one tensor"


def low_precision_parameters(model: Model) -> Iterator[str]:
    low = [param for param in model.params if param["trainable"] and param["dtype"] in LOW]
    if low:
        yield f"{len(low)} trainable parameters are {low[0]['dtype']}, such as {low[0]['name']}"


def padded_rows(model: Model) -> Iterator[str]:
    for unit, params in model.units.items():
        shaped = [param for param in params if param["shape"]]
        numel = sum(prod(param["shape"]) for param in shaped)
        waste = {param["name"]: _padding(param["shape"], model.ranks) for param in shaped}
        total = sum(waste.values())
        if numel and total > max(WASTE * numel, LEAST_WASTED):
            worst = max(shaped, key=lambda param: waste[param["name"]])
            yield (
                f"{worst['name']} has {worst['shape'][0]} rows for {model.ranks} ranks: "
                f"{percent(total, numel + total)} of what {_unit(unit)} gathers is padding"
            )


def _padding(shape: list[int], ranks: int) -> int:
    return (ceil(shape[0] / ranks) * ranks - shape[0]) * prod(shape[1:])


def scalar_parameter(model: Model) -> Iterator[str]:
    if model.api != "fsdp1" and (names := [param["name"] for param in model.params if not param["shape"]]):
        yield f"{_several(names)}: shape ()"


def mixed_dtypes(model: Model) -> Iterator[str]:
    for unit, params in model.units.items():
        dtypes = sorted({param["dtype"] for param in params if param["trainable"]})
        if len(dtypes) > 1:
            yield f"{_unit(unit)} trains parameters in {' and '.join(dtypes)}"


def frozen_in_flat_unit(model: Model) -> Iterator[str]:
    for unit, params in model.units.items() if model.api == "fsdp1" else ():
        frozen = [param["name"] for param in params if not param["trainable"]]
        if frozen and len(frozen) < len(params):
            yield f"{_unit(unit)} has {len(frozen)} frozen parameters of {len(params)}, such as {frozen[0]}"


def integer_parameters(model: Model) -> Iterator[str]:
    whole = [param for param in model.params if "int" in param["dtype"]]
    if whole and model.api == "fsdp1":
        yield f"{_several([param['name'] for param in whole])}: {whole[0]['dtype']}"


def buffers_not_saved(model: Model) -> Iterator[str]:
    if names := model.facts["unset_buffers"]:
        yield f"{_several(names)}: not persistent, and their modules have no reset_parameters"


def parameters_without_reset(model: Model) -> Iterator[str]:
    if names := model.facts["unset_modules"]:
        yield f"{_several(names)}: parameters of their own, and no reset_parameters"


def batch_norm_statistics(model: Model) -> Iterator[str]:
    if names := model.facts["batch_norms"]:
        yield _several(names)


def most_in_root(model: Model) -> Iterator[str]:
    root, every = _numel(model.units.get("", [])), _numel(model.params)
    if model.facts["blocks"] and root > max(MOST_IN_ROOT * every, LEAST_IN_ROOT):
        yield (
            f"{root:,} of {every:,} parameters ({percent(root, every)}): {human_bytes(2 * root)} in bf16 on every rank "
            f"for the whole step"
        )


def tiny_units(model: Model) -> Iterator[str]:
    small = [unit for unit, params in model.units.items() if unit and 0 < _numel(params) < TINY]
    if len(small) >= 4:
        largest = max(_numel(model.units[unit]) for unit in small)
        yield f"{len(small)} units have at most {largest:,} parameters each: {3 * len(small)} collectives a step"


def _numel(params: list[dict[str, Any]]) -> int:
    return sum(prod(param["shape"]) for param in params)


DETECTORS: dict[str, Callable[[Model], Iterator[str]]] = {
    id: found for name, found in list(globals().items()) if (id := name.replace("_", "-")) in rules()
}
"""By rule."""
