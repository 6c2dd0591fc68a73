"""What is asked of the trainer: defaults, a TOML file, and --key=value, checked before anything is started.

How the model is sharded and stepped is a `Plan`, the one of the simulator. Everything else is a field of `TrainConfig`,
which says what it takes as the fields of a `Plan` do. A value means the same from Python, from TOML and from the
command line, and what its field does not take is refused with the same sentence.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fsdp_sim.spec import Allowed, Plan, field, number, one_of, text, text_of, toml_or_json, value_of, whole
from fsdp_sim.spec.fields import check
from fsdp_sim.timeline import read_text
from labs.model import ModelConfig, model_config
from labs.model.gpt import did_you_mean

PLAN_KEYS = {
    "seq_len": "Tokens per row, at most the model's context.",
    "requires_gradient_sync": """true: reduce gradients in every micro-batch. last: only in the last one (whole
        gradients stay alive until it; FSDP1 sums them in param_dtype, FSDP2 in reduce_dtype).""",
    "wrap": "Which modules become units: block, root, a number (those with so many parameters), or their classes.",
    "reshard_after_forward": """fsdp2, hsdp, mini: free parameters after forward; none is torch's default (all units but
        the root).""",
    "shard_size": """hsdp: ranks that share one copy of the parameters; by default those of one node, or half of all
        ranks.""",
    "forward_prefetch": "fsdp2, hsdp, mini: depth of explicit prefetch. fsdp1: true or false.",
    "backward_prefetch": """fsdp2, hsdp, mini: depth. fsdp1: BACKWARD_PRE (none means it, as in torch), BACKWARD_POST,
        or off.""",
    "sharding_strategy": "fsdp1's.",
    "limit_all_gathers": "fsdp1's rate limiter.",
    "param_dtype": "Of gathers and compute; parameters and optimizer stay fp32, whose matmuls are fp32 too, not TF32.",
    "reduce_dtype": "Of the gradients' reduction; by default fp32.",
    "cpu_offload": "Shards, gradients and optimizer state live in host memory.",
    "activation_checkpointing": """full: keep each block's input, compute the block again; a number k does so for every
        k-th. selective: keep every other matmul and attention. mm,scaled_dot_product_attention: keep what these put
        out.""",
    "compile": "torch.compile each block, before it is sharded.",
}
"""The fields of `Plan` that the trainer takes, and what they mean to it."""
PLAN_API = {"single": "ddp", "hsdp": "fsdp2", "mini": "fsdp2"}
"""What a plan calls an api that it does not know by name: torch's program is the same, or there is none."""
DEFAULTS = Plan(seq_len=128, param_dtype="fp32")

MOST_S = 365 * 24 * 3600
_BOOL, _NONE, _COUNT, _POSITIVE = one_of(True, False), one_of(None), whole(0), whole(1)
_SHARE = Allowed("a number, at least 0 and below 1", lambda value: number().test(value) and value < 1)
_PATH = _NONE | Allowed(
    "a path (a file called none is ./none)",
    lambda value: isinstance(value, str) and value.lower() != "none" and value != "" and "\0" not in value,
)
_TIMEOUT = Allowed(
    f"a number > 0, at most {MOST_S} (a year)", lambda value: number(above=True).test(value) and value <= MOST_S
)


@dataclasses.dataclass(frozen=True, init=False)
class TrainConfig:
    """What to train, on what, how, and for how long. Keys on the command line win over those of the config file.

    Keys of the plan are given like all others: ``TrainConfig(steps=5, api="hsdp", reshard_after_forward=False)``.
    """

    config: str | None = field(_PATH, default=None)
    """A TOML file with any of the keys below."""

    # ---- The model ----
    model: str = field(text(), default="teaching")
    """A preset: teaching, gpt2, gpt2-medium, gpt2-large, gpt2-xl; Llama-shaped: teaching-llama, llama-1b, llama-8b."""
    n_layer: int | None = field(_NONE | _POSITIVE, default=None)
    """Another number of layers than the preset's."""
    dropout: float = field(_SHARE, default=0.0)
    """Share of values dropped in training (GPT-2 shapes)."""
    init_from: str | None = field(_PATH, default=None)
    """Start from these weights: a full checkpoint, or a folder with a Hugging Face GPT-2's model.safetensors."""
    meta_init: bool = field(_BOOL, default=False)
    """Build on the meta device, shard, then fill shard by shard: no rank ever holds the whole model."""

    # ---- The data ----
    data: str | None = field(_PATH, default=None)
    """A text file or a folder of text files; by default the source of torch.distributed."""
    tokenizer: str = field(one_of("bytes", "gpt2"), default="bytes")
    """bytes: a token is a byte. gpt2: GPT-2's BPE through tiktoken, whose vocabulary must be at hand."""

    # ---- The steps ----
    steps: int = field(_POSITIVE, default=20)
    """Optimizer steps, from the first one ever: a resumed run goes on to the same number."""
    global_batch: int = field(_POSITIVE, default=8)
    """Rows per optimizer step over all ranks; this and the learning rate stay when the number of ranks changes."""
    micro_batch: int | None = field(_NONE | _POSITIVE, default=None)
    """Rows per rank and micro-batch; the rest of global_batch becomes accumulation. By default all in one."""

    # ---- The optimizer ----
    lr: float = field(number(above=True).explained("such as 1e-3"), default=1e-3)
    """AdamW's learning rate after warm-up, for global_batch rows."""
    min_lr: float | None = field(_NONE | number(), default=None)
    """Where a cosine schedule ends; by default lr / 10."""
    schedule: str = field(one_of("constant", "cosine"), default="constant")
    """constant, or cosine from lr to min_lr at the last step; both after warm-up."""
    warmup_steps: int = field(_COUNT, default=0)
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: float = field(number(), default=0.01)
    """Of matrices and embeddings; never of biases and norms."""
    beta1: float = field(_SHARE, default=0.9)
    """AdamW's decay of the mean of gradients."""
    beta2: float = field(_SHARE, default=0.999)
    """AdamW's decay of their squares."""
    clip: float | None = field(_NONE | number(above=True).explained("such as 1.0"), default=None)
    """Clip the gradients' norm, over all ranks, to this."""
    nonfinite: str = field(one_of("stop", "skip"), default="stop")
    """When loss or gradients are not finite on any rank: stop before the update, or skip the update and go on."""

    # ---- How it is spread over the ranks ----
    api: str = field(one_of("single", "ddp", "fsdp2", "fsdp1", "hsdp", "mini"), default="fsdp2")
    """One process, DDP, fully_shard, FullyShardedDataParallel, fully_shard on a 2-D mesh, or the mini-FSDP."""
    plan: Plan = DEFAULTS
    """Of its keys `PLAN_KEYS`; micro-batches and the ranks of a shard group follow from the number of ranks."""
    use_orig_params: bool = field(_BOOL, default=True)
    """fsdp1: keep the original parameters; false flattens, and then weight_decay must be 0."""
    sync_module_states: bool = field(_BOOL, default=False)
    """fsdp1: broadcast rank 0's weights when wrapping (GPUs only)."""
    compile_backend: str = field(text(), default="inductor")
    """aot_eager needs no C++ compiler."""

    # ---- What is kept ----
    out: str | None = field(_PATH, default=None)
    """The run's folder: checkpoints, metrics, report. Without it nothing is kept. One run at a time uses it."""
    resume: str = field(one_of("auto", "never", "must"), default="auto")
    """auto: go on from the newest good checkpoint in out, if any. never, must: refuse if there is one, or none."""
    save_every: int = field(_COUNT, default=0)
    """Steps between checkpoints; 0: only at the end. One is also written when a stop is asked for."""
    keep: int = field(whole(2).explained("in case the newest checkpoint is damaged"), default=2)
    """Checkpoints kept, at least 2."""
    checkpoint: str = field(one_of("sharded", "full"), default="sharded")
    """sharded: every rank writes its part. full: rank 0 writes everything, weights as safetensors."""
    async_save: bool = field(_BOOL, default=False)
    """Write in the background while training goes on (sharded)."""

    # ---- What is shown ----
    eval_every: int = field(_COUNT, default=0)
    """Steps between evaluations on the validation text; 0: never."""
    eval_batches: int = field(_POSITIVE, default=8)
    """Batches of global_batch rows per evaluation."""
    sample: int = field(_COUNT, default=0)
    """Tokens to generate at the end."""
    prompt: str = field(Allowed("a text", lambda value: isinstance(value, str)), default="def ")
    """What the sample begins with."""
    log_every: int = field(_POSITIVE, default=1)
    """Print every so many steps."""
    metrics: str | None = field(_PATH, default=None)
    """Write a JSON line per step to this file; by default metrics.jsonl in out."""
    tensorboard: bool = field(_BOOL, default=False)
    """Write TensorBoard events to out/tensorboard."""
    predict: bool | None = field(one_of(True, False, None), default=None)
    """End with the simulator's prediction beside the measurement; by default on GPUs (on CPUs it trains once more)."""
    profile: int = field(_COUNT, default=0)
    """Record so many steps more at the end, which are not kept: what all ranks did, in out/timeline.jsonl.gz."""

    # ---- The machine ----
    seed: int = field(_COUNT, default=0)
    """Of the weights and of the order of the data."""
    device: str = field(one_of("auto", "cpu", "cuda"), default="auto")
    """auto: cuda (NCCL) when every rank of this machine has a GPU of its own, else cpu (gloo)."""
    timeout_s: float = field(_TIMEOUT, default=60.0)
    """A collective that takes longer fails: the end of waiting for a rank that hangs."""
    deterministic: bool = field(_BOOL, default=False)
    """Deterministic algorithms, so that a resumed run repeats every bit on a GPU too (slower there)."""

    def __init__(self, *, plan: Plan | None = None, **given: Any) -> None:
        """Take keys of both kinds.

        Raises:
            TypeError: no such key. ValueError: a value that cannot be, or that does not go with another; says what
                would.
        """
        for key, allowed in ALLOWED.items():
            value = given.pop(key, type(self).__dataclass_fields__[key].default)
            check("TrainConfig", key, value, allowed)
            if type(value) is int and "float" in type(self).__annotations__[key]:
                value = float(value)  # lr=1 is lr=1.0
            object.__setattr__(self, key, value)
        of_plan: dict[str, Any] = {key: _plan_value(key, given.pop(key)) for key in PLAN_KEYS if key in given}
        if given:
            key = next(iter(given))
            raise TypeError(f"TrainConfig has no key {key!r}{did_you_mean(key, KEYS)}")
        api: Any = PLAN_API.get(self.api, self.api)
        try:
            object.__setattr__(self, "plan", dataclasses.replace(plan or DEFAULTS, api=api, **of_plan))
        except ValueError as error:
            raise ValueError(f"{error} (api={self.api} is {api} there)" if api != self.api else str(error)) from None
        self._check_together()

    def _check_together(self) -> None:
        if self.plan.requires_gradient_sync is False:
            raise ValueError("requires_gradient_sync=false would never reduce gradients; use true or last")
        if self.min_lr is not None and self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr}: a schedule goes down")
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps}, but there are {self.steps} steps")
        if self.async_save and self.checkpoint == "full":
            raise ValueError("async_save=true writes sharded checkpoints; use checkpoint=sharded")
        if self.profile and self.api == "single":
            raise ValueError(f"profile={self.profile} records ranks that communicate; use another api than single")
        for key in NEED_OUT:
            if getattr(self, key) and self.out is None:
                raise ValueError(f"{key}={text_of(getattr(self, key))} keeps something; say where with out=FOLDER")
        _ = self.model_config  # raises for a preset or a change that does not exist

    def by_key(self) -> dict[str, Any]:
        """Every key and its value, those of the plan among them."""
        own = {key: getattr(self, key) for key in ALLOWED}
        return own | {key: getattr(self.plan, key) for key in PLAN_KEYS}

    def replace(self, **keys: Any) -> TrainConfig:
        """The same with other values for some keys."""
        return dataclasses.replace(self, **keys)

    def arguments(self) -> list[str]:
        """The command line that `read_config` makes this configuration of: what is not as by default."""
        defaults = TrainConfig().by_key()
        changed = {key: value for key, value in self.by_key().items() if value != defaults[key]}
        if changed.get("backward_prefetch") == "none":
            changed["backward_prefetch"] = "off"
        return [f"--{key}={text_of(value)}" for key, value in changed.items()]

    @property
    def model_config(self) -> ModelConfig:
        """The shape of the model: the preset with what was changed."""
        changes: dict[str, Any] = {"n_layer": self.n_layer} if self.n_layer else {}
        return model_config(self.model, **changes, **({"dropout": self.dropout} if self.dropout else {}))


NEED_OUT = ("save_every", "async_save", "tensorboard", "profile")
ALLOWED: dict[str, Allowed] = {
    key: it.metadata["allowed"] for key, it in TrainConfig.__dataclass_fields__.items() if key != "plan"
}
"""What each key takes that is not the plan's."""
KEYS = (*ALLOWED, *PLAN_KEYS)


def _plan_value(key: str, value: object) -> object:
    """A value of the plan, or what a text stands for: as the simulator reads it, but that none is the default."""
    none = isinstance(value, str) and value.lower() == "none"
    if key == "backward_prefetch" and value == "off":
        return "none"  # FSDP1's word for it; here none is torch's default, as everywhere else
    if key == "param_dtype" and (none or value is None):
        return "fp32"  # of the parameters
    if none and getattr(Plan(), key) is None:
        return None
    return value_of(Plan, key, value) if isinstance(value, str) else value


def read_config(arguments: Sequence[str], usage: str = "", *, quiet: bool = False) -> TrainConfig:
    """Defaults, then the file named by --config, then --key=value (or --key value).

    Args:
        usage: what --help prints above the keys.
        quiet: print nothing (the ranks but one).

    Raises:
        FileNotFoundError: no such file. ValueError: not TOML, an unknown key, or a bad value (named).
        SystemExit: with 0 after --help.
    """
    if "--help" in arguments or "-h" in arguments:
        if not quiet:
            print(help_text(usage))
        raise SystemExit(0)
    given = {key: _value(key, text) for key, text in _pairs(arguments)}
    path = given.pop("config", None)
    return _checked(_read_table(str(path)) if path is not None else {}, given)


def _value(key: str, text: str) -> Any:
    """What was typed, in a text key with its spaces; the plan's keys are read when the API is known."""
    return text if key in PLAN_KEYS or ALLOWED[key].test(text) else value_of(TrainConfig, key, text)


def help_text(usage: str = "") -> str:
    """Every key with what it may be, its default and its meaning: the lines of `TrainConfig`, in their order."""
    lines, defaults = [usage, "", "Keys, as --key=value or in a TOML file:"], TrainConfig()
    body = ast.parse(inspect.getsource(TrainConfig)).body[0]
    assert isinstance(body, ast.ClassDef)
    for declared, meaning in pairwise(body.body):
        match declared, meaning:
            case ast.AnnAssign(target=ast.Name(id="plan")), _:
                for key, text in PLAN_KEYS.items():
                    lines += _help_of(key, "VALUE", getattr(defaults.plan, key), text)
            case ast.AnnAssign(target=ast.Name(id=key), annotation=kind), ast.Expr(value=ast.Constant(value=str(text))):
                lines += _help_of(key, _metavar(key, ast.unparse(kind)), getattr(defaults, key), text)
    return "\n".join(lines)


def _metavar(key: str, annotation: str) -> str:
    """``int | None`` is ``N|none`` there; where only some words are allowed, these."""
    if names := ALLOWED[key].names:
        return "|".join(names)
    shown = {"bool": "true|false", "int": "N", "float": "NUMBER", "str": "TEXT", "None": "none"}
    return "|".join(shown[part] for part in annotation.split(" | "))


def _help_of(key: str, values: str, default: object, meaning: str) -> list[str]:
    wrapped = textwrap.wrap(" ".join(meaning.split()), 112, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return [
        f"  --{key}={values}  (default: {repr(default) if isinstance(default, str) else text_of(default)})",
        *wrapped,
    ]


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Keys and values as they were typed; a dash in a key is as good as an underscore."""
    rest = iter(arguments)
    for argument in rest:
        typed, equals, text = argument.partition("=")
        key = typed.removeprefix("--").replace("-", "_")
        if not typed.startswith("--") or key not in KEYS:
            raise ValueError(f"unknown argument {argument!r}{did_you_mean(typed, [f'--{known}' for known in KEYS])}")
        if not equals and (text := next(rest, "--")).startswith("--"):
            allowed = ALLOWED.get(key) or Plan.__dataclass_fields__[key].metadata["allowed"]
            raise ValueError(f"--{key} has no value; it is {allowed.words}, as in --{key}=VALUE")
        yield key, text


def _read_table(path: str | Path) -> dict[str, Any]:
    """What a TOML file says, and under ``config`` where it is."""
    try:
        table: dict[str, Any] = toml_or_json(read_text(path))
    except FileNotFoundError:
        raise FileNotFoundError(f"no config file at {path}; there is labs/configs/teaching.toml") from None
    except OSError as error:
        raise OSError(f"config={path} cannot be read ({error.strerror}); name a TOML file") from error
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    known = [key for key in KEYS if key != "config"]
    for key in table:
        if key not in known:
            raise ValueError(f"{path}: unknown key {key!r}{did_you_mean(key, known)}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return values | {"config": str(path)}  # TOML has no tuples


def _checked(table: dict[str, Any], given: dict[str, Any]) -> TrainConfig:
    """The configuration of a file and of what was typed, which wins; a complaint about the file alone names it."""
    try:
        return TrainConfig(**table | given)
    except ValueError as error:
        if table and str(error) == _complaint(table):
            raise ValueError(f"{table['config']}: {error}") from error
        raise


def _complaint(table: dict[str, Any]) -> str:
    try:
        TrainConfig(**table)
    except ValueError as error:
        return str(error)
    return ""
