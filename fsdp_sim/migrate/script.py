"""`migrate_script`: a training script from FSDP1, DDP or DeepSpeed to FSDP2, change by change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import libcst as cst

from fsdp_sim.migrate.blocks import find_blocks
from fsdp_sim.migrate.gradients import Gradients
from fsdp_sim.migrate.imports import mend_imports
from fsdp_sim.migrate.lightning import Strategies, strategies_of
from fsdp_sim.migrate.order import Compiling, Ordering, makes_optimizer
from fsdp_sim.migrate.result import LookAt, Migration, diff_of, told
from fsdp_sim.migrate.source import SHARDED, Script, arguments_of, calls_in, dotted, names_in, targets_of, walk
from fsdp_sim.migrate.state import States
from fsdp_sim.migrate.traps import name_traps, traps_of_new
from fsdp_sim.migrate.wrapping import Policies, Splitting, Wrapping


def migrate_script(text: str, where: str, blocks: Sequence[str] = ()) -> tuple[str, Script]:
    """The script with FSDP2, and what was found on the way. It is read, and never run.

    Args:
        where: its path, beside which files that it imports are looked for.
        blocks: names of the classes of modules that become units; none finds them out.

    Raises:
        ValueError: it is no Python, or has nothing that is migrated.
    """
    try:
        script = Script.of(text, Path(where).parent)
    except cst.ParserSyntaxError as error:
        raise ValueError(f"{where} is not Python: line {error.raw_line}: {error.message}") from None
    script.blocks, script.blocks_given = tuple(blocks), bool(blocks)
    since = _models(script)
    has_strategies = bool(strategies_of(script))
    wrappers = [call for call in calls_in(script.module) if script.name_of(call) in SHARDED]
    if not has_strategies and not wrappers:
        return text, script
    find_blocks(script)
    for name in script.blocks:
        if name.partition(".")[0] not in names_in(script.module) | {name for _, name in script.imports}:
            script.look(
                next(iter(wrappers), script.module),
                f"{name} is not defined in this script: import it from where it is.", must=True,
            )  # fmt: skip
    script.apply(Splitting(script))
    script.apply(Ordering(script))
    script.apply(Policies(script))
    if has_strategies:
        script.apply(Strategies(script))
    script.apply(Compiling(script))
    script.apply(Gradients(script))
    script.apply(States(script, since))
    script.apply(Wrapping(script))
    name_traps(script)
    mend_imports(script)
    script.looks.sort(key=lambda one: (one.line, one.what))
    return script.module.code, script


def migration_of_script(text: str, where: str, blocks: Sequence[str] = ()) -> tuple[Migration, dict[str, object]]:
    """A script's migration, and what the script says of a `Plan`, its API included; see `migrate_script`."""
    new, script = migrate_script(text, where, blocks)
    found = list(dict.fromkeys(script.found))
    if not found and not script.looks:
        return Migration(file=where, source=[], changed=False, notes=[_nothing(script, where)]), {}
    same, differs, test = told([*found, *script.uses])
    look = [LookAt(one.line, one.what, one.must, one.rule) for one in script.looks]
    if new != text and not script.refused:  # half of a migration has traps that the other half takes away
        look += traps_of_new(text, new, {one.rule for one in look})
    return Migration(
        file=where, source=found, changed=new != text, new=new, diff=diff_of(text, new, where, where), look=look,
        same=same, differs=differs, test=test,
    ), {"api": found[0] if found else "fsdp2"} | script.plan  # fmt: skip


def _nothing(script: Script, where: str) -> str:
    names = {script.name_of(call).rpartition(".")[2] for call in calls_in(script.module)}
    if "fully_shard" in names:
        return f"{where} uses fully_shard already: nothing to do. fsdp-sim lint {where} looks for traps."
    return (
        f"{where} wraps no model in FullyShardedDataParallel, DistributedDataParallel, deepspeed.initialize or "
        "Lightning's strategies for them: nothing to do. A trainer's configuration is migrated by naming that file; "
        "where the wrapping is in another file, name that."
    )


def _models(script: Script) -> dict[str, int]:
    """Find the names of wrapped models and of optimizers; return the lines at which models are wrapped."""
    since: dict[str, int] = {}
    makers: set[str] = set()
    assigns = [one for one in walk(script.module) if isinstance(one, cst.Assign | cst.AnnAssign)]
    for function in [one for one in walk(script.module) if isinstance(one, cst.FunctionDef)]:
        returned = [one.value for one in walk(function) if isinstance(one, cst.Return)]
        if any(isinstance(one, cst.Call) and script.name_of(one) in SHARDED for one in returned):
            makers.add(function.name.value)
    for one in assigns:
        calls = list(calls_in(one.value)) if one.value is not None else []
        if any(script.name_of(call) in SHARDED or dotted(call.func) in makers for call in calls):
            for target in targets_of(one)[:1]:
                if name := dotted(target):
                    since[name] = script.line_of(one)
                    script.models.add(name)
            for call in calls:
                inner = dotted(arguments_of(call, ("module",)).get("module", call.func))
                if script.name_of(call) in SHARDED and inner and script.name_of(call) != "deepspeed.initialize":
                    script.models.add(inner)
                    since.setdefault(inner, script.line_of(one))
    for one in assigns:
        if one.value is not None and any(makes_optimizer(script, call) for call in calls_in(one.value)):
            models = [name for name in script.models if any(dotted(part) == name for part in walk(one))]
            for target in targets_of(one)[:1]:
                script.optimizers[dotted(target)] = max(models, key=len, default="")
    for _ in range(3):  # a model goes from name to name, and into functions
        for one in assigns:
            value = one.value
            parts = [value.body, value.orelse] if isinstance(value, cst.IfExp) else [value]
            names = [dotted(part).removesuffix(".module") for part in parts if part is not None]
            if names and all(name in script.models for name in names):
                script.models |= {name for target in targets_of(one) if (name := dotted(target))}
        _into_functions(script)
    return since


def _into_functions(script: Script) -> None:
    functions = {one.name.value: one for one in walk(script.module) if isinstance(one, cst.FunctionDef)}
    for call in calls_in(script.module):
        function = functions.get(dotted(call.func).rpartition(".")[2])
        if function is None:
            continue
        params = [one.name.value for one in function.params.params if one.name.value != "self"]
        given = {name: dotted(value) for name, value in arguments_of(call, params).items() if name in params}
        script.models |= {name for name, value in given.items() if value in script.models}
        for name, value in given.items():
            if value in script.optimizers:
                model = script.optimizers[value]
                beside = [other for other, of in given.items() if of == model or (not model and of in script.models)]
                script.optimizers.setdefault(name, beside[0] if beside else "")
