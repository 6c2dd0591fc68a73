"""The judge of a part of the learner's own FSDP: the file with the answer in it trains as torch's `fully_shard` does.

Both train on ranks of their own, so that an answer has nothing of torch's run at hand. Compared are, bit for bit, the
losses, gradients and parameters of every rank, and the collectives in the order of issue.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_sim.learn import mine
from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.edit import made
from fsdp_sim.learn.exercise import Wrong
from fsdp_sim.learn.judges.account import dishonest
from fsdp_sim.learn.judges.claims import refuse
from fsdp_sim.learn.verdict import Finding, Grade

RANKS, STEPS = 2, 2
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
IMPORTS = {"torch", "math", "itertools", "functools", "collections", "contextlib", "typing"}
FOREIGN = ("fsdp", "fully_shard", "clip_grad", "total_norm", "_composable", "_data_parallel")
"""In the name of whatever is torch's own answer."""
APART = {"open", "exec", "eval", "compile", "globals", "__import__", "importlib", "inspect", "sys", "os", "_getframe"}
TORCHS = "torch's own FSDP is what this file replaces: write it with plain torch and torch.distributed"


@dataclass(frozen=True)
class Way:
    """One way to train: the options of `fully_shard`, and of the loop."""

    name: str
    micro_batches: int = 1
    clip: bool = False
    recompute: bool = False
    path: tuple[int, ...] = (0, 1, 2)
    options: tuple[tuple[str, Any], ...] = ()


PLAIN, MIXED, TWICE, RECOMPUTED, SAVED = (
    "plain",
    "bfloat16, accumulated, clipped",
    "kept whole, a block called twice",
    "recomputed in backward",
    "saved whole",
)
WAYS = {
    way.name: way
    for way in (
        Way(PLAIN),
        Way(MIXED, 2, clip=True, options=(("mp_policy", BF16),)),
        Way(TWICE, path=(0, 1, 2, 1), options=(("reshard_after_forward", False),)),
        Way(RECOMPUTED, recompute=True),
    )
}


@dataclass(frozen=True)
class InMyFile:
    """Judges a part of `fsdp_sim.learn.mine`, by the name of its function.

    Attributes:
        ways: those of `WAYS`, or `SAVED`, in which it matters.
        gives: what the function returns, by name, if that is more than one thing.
        waits: whether it may wait for a collective.
    """

    part: str
    ways: tuple[str, ...]
    gives: tuple[str, ...] = ()
    waits: bool = True

    def trial(self, seed: int) -> Trial:
        cases = tuple((way, seed) for way in self.ways)
        return Trial((cases,) * RANKS, within=functools.partial(within, self))

    def grade(self, trial: Trial, ran: TrialRun, wrong: Sequence[Wrong]) -> Finding:
        if ran.replaced:
            return Finding(Grade.NOT_YET, f"{dishonest(ran)}.")
        expected, programs = of_torch(trial.each[0][0][1], self.ways)
        for number, name in enumerate(self.ways):
            for rank in range(RANKS):
                if found := _difference(expected[rank][number], ran.answers[rank][number]):
                    return Finding(Grade.NOT_YET, f"the file with your {self.part}, {name}: on rank {rank} {found}.")
        for rank, (theirs, records) in enumerate(zip(programs, ran.records, strict=True)):
            issued = _program(records)[: len(theirs)]
            for number, (a, b) in enumerate(zip(theirs, [*issued, "nothing more"], strict=False), 1):
                to_rank_0 = b.startswith("gather") and a.startswith("all_gather")  # enough for a file
                if a != b and not to_rank_0:
                    return Finding(
                        Grade.NOT_YET,
                        f"every number is right, but rank {rank} issues other collectives: number {number} of torch's "
                        f"fully_shard is {a}, the file's is {b}.",
                    )
            reductions = sum(record.op == "all_reduce" for record in records)
            if reductions > STEPS:
                return Finding(
                    Grade.NOT_YET,
                    f"rank {rank} issues {reductions} all-reduces in {STEPS} steps; clipping takes one for each step.",
                )
        if message := dishonest(ran):
            return Finding(Grade.NOT_YET, f"{message}.")
        ways = "; ".join(self.ways)
        return Finding(
            Grade.PASS,
            f"the file with it trains as torch's fully_shard, bit for bit and in the same order: {ways}.",
        )


def within(judge: InMyFile, function: Callable[..., Any]) -> InTheFile:
    """The file with the function in it.

    Raises:
        ValueError: it cannot stand there: it needs more than plain torch, or takes torch's own answer.
    """
    source = mine.source_of(function, part := judge.part)
    for node in ast.walk(ast.parse(source)):
        names = _names(node)
        if taken := next((name for name in names if any(word in name.lower() for word in FOREIGN)), ""):
            raise ValueError(f"it uses `{taken}`; {TORCHS}")
        imported = isinstance(node, ast.Import | ast.ImportFrom)
        if more := next((n for n in names if n in APART or (imported and n.partition(".")[0] not in IMPORTS)), ""):
            raise ValueError(f"it uses `{more}`; a part of {mine.FILE} takes no more than torch, and reads no files")
    return InTheFile(part, mine.with_part(part, source), judge.gives, judge.waits)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}"] + [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value] if any(word in node.value for word in FOREIGN) else []
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return [name] if name else []


@functools.lru_cache(maxsize=8)
def of_torch(seed: int, ways: tuple[str, ...]) -> tuple[list[list[Any]], list[list[str]]]:
    """What torch's `fully_shard` makes of each case, and the collectives that it issues, by rank."""
    from fsdp_sim.ranks import run

    results = run(by_torch, RANKS, seed, ways, progress=False, show_output=False)
    return list(results), [_program(records) for records in results.records]


def by_torch(seed: int, ways: tuple[str, ...]) -> list[Any]:
    warnings.simplefilter("ignore")
    return [trained(name, seed, fully_shard, nn.utils.clip_grad_norm_, _whole_by_torch) for name in ways]


def _whole_by_torch(tensors: dict[str, DTensor]) -> dict[str, torch.Tensor]:
    wholes = {name: tensor.full_tensor() for name, tensor in tensors.items()}  # a collective: on every rank
    return wholes if dist.get_rank() == 0 else {}


def _program(records: Sequence[Any]) -> list[str]:
    return [
        f"{record.op} of {record.numel:,} {record.dtype}"
        for record in records
        if record.op in ("all_gather", "gather", "reduce_scatter") and "int" not in record.dtype
    ]


ROUNDING = 0.01  # a factor nearer to 1 is none


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """The first number that differs, in the order in which numbers come into being."""
    if more := [name for name in found if name not in expected]:
        return f"there is {more[0]}, which torch's fully_shard does not have there"
    if missing := [name for name in expected if name not in found]:
        return f"{missing[0]} is missing"
    for name, truth in expected.items():
        answer = found[name]
        if answer.shape != truth.shape or answer.dtype != truth.dtype:
            return f"{name} is {answer.dtype} of shape {tuple(answer.shape)}, not {truth.dtype} of {tuple(truth.shape)}"
        if not torch.equal(truth, answer):
            times = float(answer.double().norm() / truth.double().norm().clamp(min=1e-30))
            off = float((truth - answer).abs().max())
            larger = f", and {times:.3g} times as large" if abs(times - 1) > ROUNDING else ""
            if abs(times - RANKS) < ROUNDING:
                larger += f", as a sum over {RANKS} ranks is where their mean is asked for"
            return f"{name} is not torch's: the numbers are off by up to {off:.2g}{larger}"
    return ""


# ---- In a rank ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InTheFile:
    """Trains with the text of a file, whose part ``name`` is the learner's; see `InMyFile`."""

    name: str
    text: str
    gives: tuple[str, ...] = ()
    waits: bool = True

    def __call__(self, way: str, seed: int) -> dict[str, torch.Tensor]:
        space: dict[str, Any] = {"__name__": "my_fsdp"}
        made(self.name, self.text, mine.FILE, space)
        learners = space[self.name]

        def answered(*given: Any) -> Any:
            with contextlib.nullcontext() if self.waits else without_waiting():
                found = learners(*given)
            if found is ...:
                raise NotImplementedError
            if self.gives and not (isinstance(found, tuple | list) and len(found) == len(self.gives)):
                refuse(f"{self.name} returns {len(self.gives)} things: {' and '.join(self.gives)}")
            return found

        space[self.name] = answered
        with without_torchs():
            return trained(way, seed, space["fully_shard"], space["clip_grad_norm"], space["whole_tensors"])


TORCHS_OWN = (
    (DTensor, "full_tensor"),
    (DTensor, "redistribute"),
    *(
        (at, name)
        for at in (nn.utils, nn.utils.clip_grad)
        for name in vars(at)
        if "clip_grad" in name or "total_norm" in name
    ),
)
"""What does what a part is to do, by whatever way it is reached."""


@contextlib.contextmanager
def without_torchs() -> Iterator[None]:
    """Nobody makes a unit of torch's own meanwhile, nor has torch gather a tensor or clip gradients."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    def refused(why: str) -> Callable[..., None]:
        return lambda *_, **__: refuse(why)

    with contextlib.ExitStack() as stack:
        for owner in (FSDPState, FSDPParamGroup, FullyShardedDataParallel):
            stack.enter_context(patch.object(owner, "__init__", refused(TORCHS)))
        for where, name in TORCHS_OWN:
            if callable(getattr(where, name, None)):
                stack.enter_context(patch.object(where, name, refused(f"it calls `{name}`; {TORCHS}")))
        yield


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Nobody waits for a collective meanwhile."""
    from fsdp_sim.ranks.work import WatchedWork

    def stop(*_: Any, **__: Any) -> None:
        refuse("it waits for its collective: issue it with async_op=True, and return the work unwaited")

    with patch.object(WatchedWork, "wait", stop):
        yield


class Block(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(17), nn.Linear(17, 35), nn.Linear(35, 17)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks between an embedding and a head of the same weight."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way, self.embed, self.head = way, nn.Embedding(97, 17), nn.Linear(17, 97, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number in self.way.path:
            block = self.blocks[number]
            x = checkpoint(block, x, use_reentrant=True) if self.way.recompute else block(x)
        return self.head(x)


def trained(
    case: str, seed: int, fully_shard: Callable[..., Any], clip: Callable[..., Any], whole: Callable[..., Any]
) -> dict[str, torch.Tensor]:
    """What this rank has of each step, by name; of `SAVED` what it has of the whole model."""
    way = WAYS.get(case, WAYS[PLAIN])
    torch.set_num_threads(1)  # what is this small takes longer on more
    torch.manual_seed(seed)
    model, mesh = Net(way), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **dict(way.options))
    fully_shard(model, mesh=mesh, **dict(way.options))
    if case == SAVED:
        return dict(whole({name: param.detach() for name, param in model.named_parameters()}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, torch.Tensor] = {}
    for step in range(1, STEPS + 1):
        for number in range(way.micro_batches):
            draw = torch.Generator().manual_seed((seed + 97 * step + 7 * number + dist.get_rank()) % 2**31)
            tokens = torch.randint(97, (2, 9), generator=draw)
            model.set_requires_gradient_sync(number == way.micro_batches - 1)  # type: ignore[operator]
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            found[f"the loss of step {step}"] = loss.detach()
        if way.clip and any(param.grad is not None for param in model.parameters()):
            norm = clip(list(model.parameters()), 0.5 if step == 1 else 100.0)
            found[f"the norm of step {step}"] = norm.full_tensor() if isinstance(norm, DTensor) else norm
        for name, param in reversed(list(model.named_parameters())):
            if param.grad is not None:
                found[f"the gradient of {name} in step {step}"] = _own(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"the parameter {name} at the end": _own(param) for name, param in model.named_parameters()}


def _own(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.detach()
    return (local.to_local() if isinstance(local, DTensor) else local).clone()
