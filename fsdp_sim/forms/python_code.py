"""A state as code: Python for the simulator, torch, and the command that starts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from fsdp_sim.forms.state import SKEWS, FormState
from fsdp_sim.forms.torch_code import torch_code
from fsdp_sim.spec import Cluster, Model, Plan


def python_code(state: FormState) -> str:
    """Code that predicts the same step with `fsdp_sim.simulate`."""
    model, plan, skews = state.model, state.plan, state.skews
    names = ["Cluster", *([] if _named(model) else ["Model"]), "Plan", "simulate"]
    lines = [f"from fsdp_sim import {', '.join(names)}"]
    if "cluster" in state.texts:
        lines.insert(0, "from dataclasses import replace\n")
    if skews:
        lines.append(f"from fsdp_sim.engine import {', '.join(sorted(skews))}")
    lines += ["", f"model = {_model(model)}", f"cluster = {_cluster(state)}", f"plan = {_call('Plan', plan)}"]
    more = ""
    if skews:
        lines += ["", "", "def skew(seconds, ranks):"]
        for name, number in skews.items():
            lines.append(f"    seconds = {_SKEW_CALLS[name].format(number=repr(number))}")
        lines += ["    return seconds", "", ""]
        more = ", skew=skew"
    lines += [
        f"sim = simulate(model, cluster, plan{more})",
        "print(sim)",
        "print(sim.explain())",
        "sim.show()  # in a notebook",
    ]
    return "\n".join(lines) + "\n"


def state_code(state: FormState) -> str:
    """The line that opens the explorer at the state."""
    return f'from fsdp_sim import viz\n\nviz.explorer(state="{state.line}")\n'


def torchrun_command(state: FormState) -> str:
    """The command that starts the torch code, saved as ``train.py``, on every node of the cluster."""
    cluster = state.cluster
    if cluster.nodes == 1:
        return f"torchrun --standalone --nproc-per-node={cluster.gpus} train.py\n"
    return (
        f"# on each of the {cluster.nodes} nodes, with NODE_0 the name of the first\n"
        f"torchrun --nnodes={cluster.nodes} --nproc-per-node={cluster.node_size} \\\n"
        f"    --rdzv-backend=c10d --rdzv-id=fsdp --rdzv-endpoint=$NODE_0:29500 train.py\n"
    )


_LINKS = ("intra", "inter", "host")
FORMS: dict[str, Callable[[FormState], str]] = {
    "Python: fsdp_sim": python_code,
    "torch: train.py": torch_code,
    "torchrun command": torchrun_command,
    "state: explorer": state_code,
}
_SKEW_CALLS = {
    "straggler": "straggler(seconds, ranks, rank=ranks - 1, factor={number})",
    "slow_node": "slow_node(seconds, ranks, node=cluster.nodes - 1, factor={number}, gpus_per_node=cluster.node_size)",
    "jitter": "jitter(seconds, ranks, sigma={number})",
}
assert set(_SKEW_CALLS) == set(SKEWS)


def _named(model: Model) -> bool:
    return model.name in Model.presets() and Model.preset(model.name) == model


def _model(model: Model) -> str:
    return repr(model.name) if _named(model) else _call("Model", model)


def _cluster(state: FormState) -> str:
    if "cluster" not in state.texts:
        return repr(state.cluster)
    base = f"Cluster.from_file({state.texts['cluster']!r})"
    given = [f"{name}={state.texts[name]!r}" for name in ("gpu", *_LINKS) if name in state.texts]
    given += [f"{f.name}={getattr(state.cluster, f.name)!r}" for f in fields(Cluster)
              if f.name in state.texts and f.name not in ("gpu", *_LINKS)]  # fmt: skip
    return f"replace({base}, {', '.join(given)})" if given else base


def _call(name: str, made: Any) -> str:
    """A spec as the call that makes it: what differs from the defaults."""
    own = {f.name: getattr(made, f.name) for f in fields(made) if getattr(made, f.name) != f.default}
    given = [f"{key}={value!r}" for key, value in (made.unlike_its_stack if isinstance(made, Plan) else own).items()]
    short = f"{name}({', '.join(given)})"
    return short if len(short) < 100 else f"{name}(\n" + "".join(f"    {one},\n" for one in given) + ")"
