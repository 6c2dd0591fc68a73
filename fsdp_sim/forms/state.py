"""`FormState`: what is looked at, as one short line of words that can be shared: ``model=llama3-8b gpu=H100 gpus=64``.

The words are those of the command line and of requests, read by the same reader; three more say how ranks differ.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from fsdp_sim.cost import Workload
from fsdp_sim.engine import Given, jitter, slow_node, straggler
from fsdp_sim.requests import (
    ALIASES,
    CLUSTER_FIELDS,
    NAMES,
    PLAN_FIELDS,
    Job,
    choose_dtypes,
    request_of_texts,
    resolve,
    with_job,
)
from fsdp_sim.simulation import Simulation, simulate
from fsdp_sim.spec import Cluster, Gpu, Link, Model, Plan, text_of
from fsdp_sim.words import did_you_mean

MOST_RANKS = 2048  # that are played when they differ


class Skewed(NamedTuple):
    """A way in which ranks differ.

    Attributes:
        says: what its number is.
        default: the number that changes nothing.
        apply: makes durations per rank of durations and the cluster.
        least_ranks: how many it takes.
    """

    says: str
    default: float
    apply: Callable[[Given, Cluster, float], Given]


SKEWS = {
    "straggler": Skewed(
        "how many times as long the last rank computes", 1.0,
        lambda seconds, c, x: straggler(seconds, c.gpus, rank=c.gpus - 1, factor=x),
    ),
    "slow_node": Skewed(
        "how many times as long collectives take that touch the last node", 1.0,
        lambda seconds, c, x: slow_node(seconds, c.gpus, node=c.nodes - 1, factor=x, gpus_per_node=c.node_size),
    ),
    "jitter": Skewed(
        "how much every computation varies, as a fraction", 0.0,
        lambda seconds, c, x: jitter(seconds, c.gpus, sigma=x),
    ),
}  # fmt: skip
WORDS = (*NAMES, *SKEWS)


@dataclass(frozen=True)
class FormState:
    """A model, a cluster and a plan in words.

    Attributes:
        texts: by name: what `fsdp_sim.requests.request_of_texts` reads, and ``straggler``, ``slow_node``, ``jitter``.

    Example:
        >>> state = FormState.read("model=llama3-8b gpu=H100 gpus=64 micro_batch=1 seq_len=8192 forward_prefetch=2")
        >>> state.plan.forward_prefetch, state.cluster.gpus
        (2, 64)
        >>> FormState.read("modle=llama3-8b")
        Traceback (most recent call last):
        ValueError: there is no modle; did you mean model?
    """

    texts: Mapping[str, str]

    @classmethod
    def read(cls, line: str) -> FormState:
        """The state that a line describes.

        Raises:
            ValueError: a word that is no ``name=value``, a name that does not exist or is given twice.
        """
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise ValueError(
                f"{line!r} cannot be read: {error}; a value with spaces stands in quotation marks"
            ) from None
        texts: dict[str, str] = {}
        for word in words:
            name, equals, text = word.partition("=")
            if not equals or not name or not text:
                raise ValueError(f"{word!r} is no pair; write name=value, for example gpus=64")
            if name not in WORDS:
                raise ValueError(f"there is no {name}; {did_you_mean(name, WORDS)}")
            if name in texts:
                raise ValueError(f"{name} is given twice, as {texts[name]} and as {text}; give it once")
            texts[name] = text
        return cls(with_job(texts))

    @property
    def line(self) -> str:
        """The state in one line; `read` reads it."""
        return " ".join(f"{name}={shlex.quote(self.texts[name])}" for name in WORDS if name in self.texts)

    def with_texts(self, texts: Mapping[str, str | None]) -> FormState:
        """The same with some words replaced, or, where the new one is None, left out."""
        merged: dict[str, str | None] = {**self.texts, **texts}
        return FormState({name: text for name, text in merged.items() if text is not None})

    @cached_property
    def _job(self) -> Job:
        return resolve(request_of_texts({name: text for name, text in self.texts.items() if name not in SKEWS}))

    @property
    def model(self) -> Model:
        return self._job.dimensions

    @property
    def cluster(self) -> Cluster:
        return self._job.cluster

    @property
    def plan(self) -> Plan:
        return self._job.plan

    def notes_of(self, simulation: Simulation) -> list[str]:
        """What a reader of a simulation of the state should know beside the numbers: see `Job.notes_of`."""
        return self._job.notes_of(simulation)

    @cached_property
    def skews(self) -> dict[str, float]:
        """The ways in which ranks differ, and how much.

        Raises:
            ValueError: what is given is no number it takes, or there is but one rank.
        """
        found = {}
        for name, skew in SKEWS.items():
            if name not in self.texts:
                continue
            try:
                found[name] = float(self.texts[name])
            except ValueError:
                raise ValueError(f"{name} is {self.texts[name]!r}; it must be a number: {skew.says}") from None
            if found[name] == skew.default:
                del found[name]
        ranks = self.cluster.gpus if found else 0
        if ranks == 1:
            raise ValueError(f"{next(iter(found))} takes several ranks, and there is 1 GPU; take 2 or more")
        if ranks > MOST_RANKS:
            raise ValueError(
                f"{next(iter(found))} plays each of the {ranks:,} ranks; the explorer does for up to {MOST_RANKS:,}: "
                f"take fewer GPUs, or leave it out"
            )
        return found

    def simulate(self) -> Simulation:
        """The step that the state describes, predicted.

        Raises:
            ValueError: it is impossible; says what and the remedy.
        """
        cluster, skews = self.cluster, self.skews

        def skewed(seconds: Given, ranks: int) -> Given:
            for name, number in skews.items():
                seconds = SKEWS[name].apply(seconds, cluster, number)
            return seconds

        return simulate(self.model, cluster, self.plan, skew=skewed if skews else None)


def state_of(model: str | Model | Workload, cluster: Cluster | str | None, plan: Plan | None) -> FormState:
    """The state of a model, a cluster and a plan; without a cluster 8 GPUs of one node.

    Raises:
        ValueError: one of them cannot be said in words: a traced model, a device or link that is in no catalogue.
    """
    texts = _model_texts(model)
    if isinstance(cluster, Cluster):
        texts |= _cluster_texts(cluster)
    elif cluster is not None:
        texts |= {"cluster": str(cluster)} if Path(cluster).suffix else {"gpu": str(cluster), "gpus": "8"}
    else:
        texts |= {"gpu": "H100-SXM-80GB", "gpus": "8"}
    if plan is not None:
        texts |= plan_texts(plan, FormState(texts).cluster)
    state = FormState(texts)
    for part in ("model", "cluster", "plan"):
        getattr(state, part)  # or an error now
    return state


def plan_texts(plan: Plan, cluster: Cluster) -> dict[str, str]:
    """The words of a plan: what differs from the defaults of its stack, and the dtypes where others would be chosen."""
    texts = {name: text_of(value) for name, value in plan.unlike_its_stack.items()}
    texts |= {name: text_of(getattr(plan, name)) for name in ("micro_batch", "seq_len")}
    if choose_dtypes({"api": plan.api}, cluster)[0] and not {"param_dtype", "reduce_dtype"} & set(texts):
        texts["param_dtype"] = "none"
    return texts


def _model_texts(model: str | Model | Workload) -> dict[str, str]:
    if isinstance(model, str):
        return {"model": model}
    if isinstance(model, Workload):
        raise ValueError(
            f"{model.name} is a traced model, which has no words; the explorer takes a name or the dimensions of a "
            f"Model, and simulate(...).show() draws any model"
        )
    if model.name in Model.presets() and Model.preset(model.name) == model:
        return {"model": model.name}
    called = {name: option for option, name in ALIASES.items()}
    return {
        called.get(f.name, f.name): text_of(getattr(model, f.name))
        for f in fields(Model)
        if getattr(model, f.name) != f.default
    }


def _cluster_texts(cluster: Cluster) -> dict[str, str]:
    texts = {}
    for name in CLUSTER_FIELDS:
        value = getattr(cluster, name)
        if value is None:
            continue
        texts[name] = value.name if isinstance(value, (Gpu, Link)) else text_of(value)
    try:
        same = FormState({"model": "gpt2-124m", **texts}).cluster == cluster
    except ValueError:
        same = False
    if not same:
        raise ValueError(
            f"{cluster!r} has a device or a link that is in no catalogue, so no line of words says it; save it with "
            f"cluster.to_file('mine.toml') and give explorer(cluster='mine.toml')"
        )
    return texts


assert not set(SKEWS) & {*PLAN_FIELDS, *CLUSTER_FIELDS}
