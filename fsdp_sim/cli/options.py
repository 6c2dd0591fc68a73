"""Options that several commands share, and the kind of command that takes them.

An option's value stays a text until `fsdp_sim.requests` reads it: the same reading, and the same messages, for the
command line, for a sweep's lists and for a file. Texts are completed by the shell: names of models, GPUs, links, plans.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NoReturn

import click
import msgspec
from click.shell_completion import CompletionItem

from fsdp_sim.configurations import FORMATS
from fsdp_sim.requests import ALIASES, MODEL_FIELDS, PLAN_FIELDS
from fsdp_sim.spec import Model, Plan, gpu_names, link_names, number_meant
from fsdp_sim.words import called_here, did_you_mean, harmless, shortened

if TYPE_CHECKING:
    from rich.status import Status

Function = Callable[..., Any]
# Exit statuses: the answer is no (it does not fit), what was asked wrongly, Ctrl-C; 0 is done.
NO, WRONG, INTERRUPTED = 1, 2, 130


class Text(click.ParamType):
    """A text that the shell completes with some names."""

    name = "text"

    def __init__(self, names: Callable[[], Iterable[str]]) -> None:
        self.names = names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found = [name for name in self.names() if name.lower().startswith(incomplete.lower())]
        return [CompletionItem(name) for name in found]


class Whole(click.IntRange):
    """A whole number; one that is written otherwise is answered with what to write."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            meant = number_meant(value)
            self.fail(f"{error.message.rstrip('.')}{f'; {meant}' if meant else ''}", param, ctx)


class KeyValue(Text):
    """``key=value``: the shell completes the keys, then the values."""

    name = "key=value"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        key, equals, value = incomplete.partition("=")
        if not equals:
            return [CompletionItem(f"{name}=", type="plain") for name in self.names() if name.startswith(key)]
        values = values_of(key)
        return [CompletionItem(f"{key}={text}") for text in values if text.startswith(value)]


def several(values: str) -> list[str]:
    """The texts of a list with commas between them; with semicolons where values contain commas.

    Example:
        >>> several("none,full"), several("mm,scaled_dot_product_attention;full"), several("mm,addmm;")
        (['none', 'full'], ['mm,scaled_dot_product_attention', 'full'], ['mm,addmm'])
    """
    texts = values.removesuffix(";").split(";") if ";" in values else values.split(",")
    return [text.strip() for text in texts]


def values_of(key: str) -> list[str]:
    """The values to complete a field with: the names it lists, and the words that it takes."""
    by_name: dict[str, Callable[[], Iterable[str]]] = {"model": Model.presets, "gpu": gpu_names}
    by_name |= dict.fromkeys(("intra", "inter", "host"), link_names)
    if key in by_name:
        return list(by_name[key]())
    field = Plan.__dataclass_fields__.get(key)
    if field is None:
        return []
    named = field.metadata["allowed"].names
    readings = {"true": True, "false": False, "none": None, "1": 1, "2": 2}
    return [*named, *(text for text, value in readings.items() if field.metadata["allowed"].test(value))]


# ---- the options: name, type, metavar, help -----------------------------------------------------------------------

_WHOLE, _TEXT = "INTEGER", "TEXT"
MODEL = "Model (a name, a file, or dimensions; a dimension beside a name replaces the model's own)"
CLUSTER = "Cluster"
PLAN = "Plan (--plan reaches every field; these are the common ones)"
OUTPUT = "Output"

SHARED: tuple[tuple[str, str, Any, str, str], ...] = (
    (MODEL, "--model", Text(Model.presets), "NAME", "A published model, such as llama3-8b."),
    (
        MODEL, "--model-file", click.Path(), "FILE",
        "Hugging Face's config.json or its folder, torchtitan's TOML, or fields of Model, maybe with preset.",
    ),
    (MODEL, "--layers", None, _WHOLE, "Blocks."),
    (MODEL, "--d-model", None, _WHOLE, "Width."),
    (MODEL, "--heads", None, _WHOLE, "Heads of attention."),
    (MODEL, "--kv-heads", None, _WHOLE, "Key and value heads.  [default: --heads]"),
    (MODEL, "--head-dim", None, _WHOLE, "Width of a head.  [default: --d-model / --heads]"),
    (MODEL, "--d-ffn", None, _WHOLE, "Width of the feed-forward."),
    (MODEL, "--vocab", None, _WHOLE, "Tokens of the vocabulary."),
    (MODEL, "--ffn-type", Text(lambda: names_of("ffn_type")), _TEXT, "gelu, swiglu, geglu or relu.  [default: gelu]"),
    (MODEL, "--norm", Text(lambda: names_of("norm")), _TEXT, "layernorm or rmsnorm.  [default: layernorm]"),
    (MODEL, "--positions", Text(lambda: names_of("positions")), _TEXT, "learned, rope, relative or none."),
    (MODEL, "--max-seq-len", None, _WHOLE, "Rows of the table of learned positions."),
    (MODEL, "--encoder-layers", None, _WHOLE, "Layers of an encoder (T5).  [default: 0]"),
    (MODEL, "--bias", None, _TEXT, "Linear layers have biases: true, false, qkv, attention or ffn.  [default: true]"),
    (MODEL, "--tied-embeddings", None, "BOOL", "The head uses the embedding's weight.  [default: true]"),
    (MODEL, "--causal", None, "BOOL", "Attention looks back only.  [default: true]"),
    (MODEL, "--model-dtype", None, _TEXT, "Of the parameters that the optimizer updates.  [default: fp32]"),
    (CLUSTER, "--gpu", Text(gpu_names), "NAME", "A GPU, such as H100-SXM-80GB; cpu for processes on CPU cores."),
    (CLUSTER, "--gpus", None, _WHOLE, "How many: the world size."),
    (CLUSTER, "--gpus-per-node", None, _WHOLE, "GPUs of one server.  [default: what its servers hold]"),
    (CLUSTER, "--intra", Text(link_names), "LINK", "Between the GPUs of a node.  [default: what its servers have]"),
    (CLUSTER, "--inter", Text(link_names), "LINK", "Between nodes: a name, or '1600 Gb/s per node'."),
    (CLUSTER, "--host", Text(link_names), "LINK", "Between a GPU and the memory of its CPU."),
    (CLUSTER, "--host-memory-gb-per-s", None, "FLOAT", "Of the CPUs' memory of a node, which its GPUs share."),
    (CLUSTER, "--bandwidth-gbps", None, "FLOAT", "Gigabits per second between nodes, in place of the link's."),
    (CLUSTER, "--latency-us", None, "FLOAT", "Microseconds of a message of no bytes, in place of the link's."),
    (CLUSTER, "--cluster", click.Path(), "FILE", "A cluster file, as fsdp-sim calibrate writes it."),
    (
        PLAN, "--torchtitan", click.Path(), "FILE",
        "A run's TOML for torchtitan 0.2.2: its model, number of GPUs and plan, which the other options replace.",
    ),
    (
        PLAN, "--config", click.Path(), "FILE",
        "A run's configuration for another trainer, such as Accelerate's YAML, which the other options replace.",
    ),
    (PLAN, "--config-format", Text(lambda: FORMATS), "NAME", "Of --config.  [default: told by its keys]"),
    (PLAN, "--api", Text(lambda: values_of("api")), _TEXT, "fsdp2, fsdp1, ddp, zero1 or zero2.  [default: fsdp2]"),
    (PLAN, "--micro-batch", None, _WHOLE, "Sequences per rank and micro-batch.  [default: 1]"),
    (PLAN, "--seq-len", None, _WHOLE, "Tokens per sequence.  [default: 1024]"),
    (PLAN, "--grad-accum", None, _WHOLE, "Micro-batches per optimizer step.  [default: 1]"),
    (
        PLAN, "--param-dtype", Text(lambda: values_of("param_dtype")), _TEXT,
        "Of gathers and compute.  [default: bf16 for FSDP on GPUs that have it, with --reduce-dtype fp32; "
        "none is torch's default, the parameters' fp32]",
    ),
    (PLAN, "--reduce-dtype", Text(lambda: values_of("reduce_dtype")), _TEXT, "Of the gradients' reduction."),
    (
        PLAN, "--activation-checkpointing", Text(lambda: values_of("activation_checkpointing")), _TEXT,
        "none, full, selective, or every k-th block.  [default: none]",
    ),
    (PLAN, "--shard-size", None, _WHOLE, "Ranks that share one copy of the parameters (HSDP).  [default: all]"),
    (
        PLAN, "--reshard-after-forward", Text(lambda: values_of("reshard_after_forward")), _TEXT,
        "true, false, none or a number.  [default: none, true for all but the root]",
    ),
    (PLAN, "--cpu-offload", None, "BOOL", "Shards and the optimizer in the CPU's memory.  [default: false]"),
    (PLAN, "--compile", None, "BOOL", "torch.compile of each block.  [default: false]"),
)  # fmt: skip


def names_of(field: str) -> tuple[str, ...]:
    """The names that a field of a model lists."""
    names: tuple[str, ...] = Model.__dataclass_fields__[field].metadata["allowed"].names
    return names


class Option(click.Option):
    """An option under a heading."""

    def __init__(self, *args: Any, section: str = OUTPUT, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


def option(*args: Any, section: str = OUTPUT, **kwargs: Any) -> Callable[[Function], Function]:
    """`click.option` under a heading."""
    return click.option(*args, cls=Option, section=section, **kwargs)


def request_options(*sections: str) -> Callable[[Function], Function]:
    """The shared options of some headings, or of all; ``texts`` has them, by the names of `fsdp_sim.requests`."""

    sections = sections or (MODEL, CLUSTER, PLAN)

    def decorate(function: Function) -> Function:
        names = [name for section, name, *_ in SHARED if section in sections]
        keys = {name.removeprefix("--").replace("-", "_") for name in names}

        @functools.wraps(function)
        def with_texts(**values: Any) -> Any:
            given = {key: values.pop(key) for key in list(values) if key in keys}
            texts = {key: str(text) for key, text in given.items() if text is not None}
            if MODEL in sections:
                texts = with_pairs(texts, values.pop("dim"), "--dim", "a model", MODEL_FIELDS)
            if PLAN in sections:
                texts = with_pairs(texts, values.pop("plan"))
            return function(texts=texts, **values)

        decorated: Function = with_texts
        if PLAN in sections:
            decorated = plan_option(decorated)
        if MODEL in sections:
            decorated = option(
                "--dim", multiple=True, section=MODEL, type=KeyValue(lambda: MODEL_FIELDS), metavar="KEY=VALUE",
                help="Any field of Model, such as n_expert=8.",
            )(decorated)  # fmt: skip
        for section, name, kind, metavar, text in reversed(SHARED):
            if section in sections:
                decorated = option(name, section=section, type=kind, metavar=metavar, help=text)(decorated)
        return decorated

    return decorate


def plan_option(function: Function) -> Function:
    return option(
        "--plan", multiple=True, section=PLAN, type=KeyValue(lambda: PLAN_FIELDS), metavar="KEY=VALUE",
        help="Any field of Plan, with torch's names; values are true, false, none, last, numbers, dtypes, names.",
    )(function)  # fmt: skip


def with_pairs(
    texts: dict[str, str],
    pairs: Sequence[str],
    option: str = "--plan",
    owner: str = "a plan",
    fields: Sequence[str] = PLAN_FIELDS,
) -> dict[str, str]:
    """Add ``key=value`` pairs to the texts of other options.

    Raises:
        ValueError: a pair without ``=``, or a field that is given twice or that there is not.
    """
    found = dict(texts)
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise ValueError(f"{option} {pair!r} is no pair; write key=value, for example forward_prefetch=1")
        if key not in fields:
            raise ValueError(f"{option} {pair!r}: {owner} has no field {key}; {did_you_mean(key, fields)}")
        if key in {ALIASES.get(name, name) for name in found} | set(found):
            raise ValueError(f"{option} {pair!r}: {key} is given twice; give it once")
        found[key] = value
    return found


VERSION = 1
"""Of the JSON that commands print: it grows by one when a field goes, or comes to mean something else."""


def labelled(command: str, result: Any) -> Any:
    """A result as it is printed as JSON: with the name of its schema and the version, each of a list."""
    plain = msgspec.to_builtins(result, enc_hook=_plain)
    if isinstance(plain, list):
        return [labelled(command, one) for one in plain]
    return {"schema": f"fsdp-sim {command}", "version": VERSION, **plain}


def _plain(value: Any) -> Any:
    """A text or number of a class of its own, such as torch's version, as what it is."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise NotImplementedError(f"a result has a {type(value).__name__}, which JSON has not")


def print_json(command: str, result: Any) -> None:
    """Print a result as JSON, labelled."""
    click.echo(msgspec.json.format(msgspec.json.encode(labelled(command, result)), indent=2).decode())


json_option = option("--json", "as_json", is_flag=True, help="Print JSON; errors are JSON too.")


def schema_option(name: str) -> Callable[[Function], Function]:
    """``--schema``: print the JSON schema of the command's requests and results, and end."""

    def show(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            click.echo(files("fsdp_sim").joinpath("schemas", f"{name.replace(' ', '_')}.json").read_text(), nl=False)
            ctx.exit()

    return option(
        "--schema", is_flag=True, is_eager=True, expose_value=False, callback=show,
        help="Print the JSON schema of requests and results.",
    )  # fmt: skip


def working(on: str) -> Status:
    """While it is entered, a line that moves on stderr, if that is a terminal, says what takes so long."""
    from rich.console import Console

    return Console(stderr=True).status(on)


class Command(click.Command):
    """A command with its options under headings, and with errors in one sentence.

    Whatever is impossible is a ValueError or OSError somewhere below; here it becomes one line on stderr, with
    ``--json`` also ``{"error": ...}`` on stdout, and exit status 2.
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(param, "section", OUTPUT), []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        asked_for_json = "--json" in args
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            own = {name for param in self.params for name in param.opts}
            called = called_here(error.option_name.lstrip("-"))
            fail(_no_such_option(error.option_name, called, own) or error.format_message(), asked_for_json)
        except click.UsageError as error:
            fail(error.format_message(), asked_for_json)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            fail(error.format_message(), bool(ctx.params.get("as_json")))
        except (ValueError, OSError) as error:
            fail(str(error), bool(ctx.params.get("as_json")))


def _no_such_option(name: str, called: str, own: Collection[str]) -> str:
    """The sentence about an option that other software has; empty if it has none, or the command has not ours."""
    owner, _, field = called.partition(".")
    if not called:
        return ""
    if not field:
        return f"there is no option {name}; {owner}"
    key, comma, remark = field.partition(",")
    option_of = {ALIASES.get(o[2:].replace("-", "_"), o[2:].replace("-", "_")): o for _, o, *_ in SHARED}
    pair = f"--{'dim' if owner == 'Model' else 'plan'} {key}=VALUE"
    option = option_of.get(key, pair)
    return f"there is no option {name}; did you mean {option}{comma}{remark}?" if option.split()[0] in own else ""


def fail(message: str, as_json: bool) -> NoReturn:
    """Print an error and exit with status 2."""
    message = shortened(message)
    if as_json:
        click.echo(json.dumps({"error": message}))
    click.echo(f"Error: {harmless(message)}", err=True)
    sys.exit(WRONG)
