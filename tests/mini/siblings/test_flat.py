"""FSDP1 in miniature: trains as one process does, and step for step as torch's FullyShardedDataParallel does."""

import copy
import warnings
from contextlib import ExitStack, nullcontext
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp._runtime_utils as torch_runtime
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fsdp_sim.mini.siblings.flat import FlatParameterFSDP, Stream
from fsdp_sim.timeline import RECORDER, Header, Memory, Op, Timeline
from tests.mini.models import (
    Block,
    Matrix,
    Toy,
    Transformer,
    batches,
    mean_over_ranks,
    my_part,
    token_loss,
    twin,
)
from tests.some import some

FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
NO_SHARD = ShardingStrategy.NO_SHARD
STRATEGIES = [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD]
PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST


class Layer(nn.Module):
    """A matrix, a vector and one number in one flat parameter: no number of ranks cuts it where they meet."""

    def __init__(self, rows, columns):
        super().__init__()
        self.w = nn.Parameter(torch.randn(rows, columns) / rows**0.5)
        self.b = nn.Parameter(torch.randn(columns))
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x):
        return (x @ self.w + self.b) * self.scale


class Net(nn.Module):
    """The root owns ``embed``, ``head`` and a buffer; every layer is a unit of its own size."""

    def __init__(self, sizes=(5, 3, 7, 2)):
        super().__init__()
        self.embed = Matrix(4, sizes[0])
        self.layers = nn.ModuleList(Layer(a, b) for a, b in pairwise(sizes))
        self.head = Matrix(sizes[-1], 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + self.shift


def mini(model, units=Layer, **options):
    return FlatParameterFSDP(copy.deepcopy(model), auto_wrap={units}, **options)


def of_torch(model, units=Layer, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NO_SHARD is deprecated, one rank makes every strategy NO_SHARD
        policy, cpu = ModuleWrapPolicy({units}), torch.device("cpu")
        return FullyShardedDataParallel(copy.deepcopy(model), auto_wrap_policy=policy, device_id=cpu, **options)


def flat_params(model):
    """By unit: the names differ in where the wrappers stand."""
    strip = {"_fsdp_wrapped_module.": "", "module.": "", "_flat_param": ""}
    found = {}
    for name, param in model.named_parameters():
        for old, new in strip.items():
            name = name.replace(old, new)
        found[name.removesuffix(".") or "root"] = param
    return found


def assert_equal(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda m, name=name: f"{name}: {m}", **tolerance)


def grads_of(plain):
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


# The layout


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_holds_the_chunk_that_torch_gives_it(ranks, world_size):
    """Layer 0 is w (5, 3), b (3), scale (1): 19 elements, padded to 20. The cut of 2 ranks is inside w."""

    def run():
        model = Net(sizes=(5, 3, 7, 1, 1))  # the last layer has 3 elements: on 4 ranks one holds nothing but padding
        ours, theirs = flat_params(mini(model)), flat_params(of_torch(model))
        assert ours.keys() == theirs.keys() == {"root", "layers.0", "layers.1", "layers.2", "layers.3"}
        return all(torch.equal(ours[unit], theirs[unit]) for unit in ours), len(ours["layers.3"])

    chunk = {1: 3, 2: 2, 3: 1, 4: 1}[world_size]
    assert ranks(world_size, run) == [(True, chunk)] * world_size


def test_parameters_are_flat_and_the_original_names_are_views_of_them(ranks):
    def run():
        model = mini(Net())
        seen = {}

        def look(module, *_):
            seen.update(is_view=module.w._base is not None, shapes=(module.w.shape, module.b.shape, module.scale.shape))
            seen.update(same_memory=module.w.data_ptr() == flat_params(model)["layers.0"].data_ptr())

        model.module.layers[0].register_forward_hook(look, prepend=True)
        model(torch.ones(2, 4))
        names = [name for name, _ in model.named_parameters()]
        return names, seen, model.module.layers[0].w.untyped_storage().size()

    names, seen, bytes_after = ranks(2, run)[0]
    assert names == [f"module.{unit}_flat_param" for unit in ("", "layers.0.", "layers.1.", "layers.2.")]
    assert seen == {"is_view": True, "shapes": ((5, 3), (3,), (1,)), "same_memory": True}
    assert bytes_after == 0, "freed after forward"


# One process


def train_beside_one_process(model, **options):
    plain = twin(model)
    sharded = mini(model, Block, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (sharded, plain)]
    losses, plain_losses = [], []
    for batch in batches(6):
        loss, plain_loss = token_loss(sharded, my_part(batch)), token_loss(plain, batch)
        loss.backward()
        plain_loss.backward()
        assert_equal(sharded.full_gradients(), grads_of_tied(plain), rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
        plain_losses.append(plain_loss.item())
    assert_equal(sharded.full_state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-5)
    return losses, plain_losses


def grads_of_tied(plain):
    """Tied parameters under each of their names."""
    return {n: p.grad for n, p in plain.named_parameters(remove_duplicate=False) if p.grad is not None}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", some([3, 1, 2, 4], first=1))
def test_trains_as_one_process_does(ranks, world_size, strategy):
    def run():
        return train_beside_one_process(Transformer(tied=True), sharding_strategy=strategy)

    for losses, plain_losses in ranks(world_size, run):
        assert losses == pytest.approx(plain_losses, rel=1e-5)
        assert losses[-1] < losses[0]


# torch's program


class Program(TorchDispatchMode):
    """What a step does, in order: unshard, gather, wait, multiply, reshard, limit, reduce; of the mini or of torch."""

    def __init__(self, model):
        super().__init__()
        self.lines = []
        if isinstance(model, FlatParameterFSDP):
            handles = {h: h.unit for h in model._all_handles}
            streams, owner = (model._unshard_stream, model._post_backward_stream), FlatParameterFSDP
        else:
            torch_runtime._lazy_init(model, model)
            states = {m: name for name, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)}
            handles = {s._handle: n.replace("_fsdp_wrapped_module.", "") or "root" for s, n in states.items()}
            streams, owner = (model._unshard_stream, model._post_backward_stream), torch_runtime
        self.names = handles | dict(zip(streams, ("unshard", "post_backward"), strict=True))
        self.patches = [
            self.before(owner, "_unshard", lambda _, handle, *__: f"unshard({self.names[handle]})"),
            self.before(owner, "_reshard", lambda _, handle, free: f"reshard({self.names[handle]}){' free' * free}"),
            self.before(owner, "_post_backward_final_callback", lambda *_: "final callback"),
            self.before(torch.cpu.Event, "synchronize", lambda event: f"limiter waits for {self.names[event]}"),
            self.before(torch.cpu.Event, "record", self.number_event),
            self.before(torch.cpu.Stream, "wait_stream", lambda _, other: self.wait_line(other)),
            self.before(Stream, "wait", self.wait_of_mini),
        ]

    def before(self, owner, name, line_of):
        original = getattr(owner, name)

        def wrapper(*args, **kwargs):
            if line := line_of(*args, **kwargs):
                self.lines.append(line)
            return original(*args, **kwargs)

        return patch.object(owner, name, wrapper)

    def number_event(self, event):
        self.names[event] = f"free event {sum(isinstance(e, torch.cpu.Event) for e in self.names)}"

    def wait_line(self, stream):
        return f"wait for {self.names[stream]}" if stream in self.names else None  # torch has others, unused here

    def wait_of_mini(self, stream, only_what_is_done=False):
        """Without the waits that only a CPU needs, or that wait for nothing where torch does not wait."""
        at_the_end = self.lines[-1] in ("final callback", "wait for post_backward")
        needless = not stream._under_way if self.names[stream] == "post_backward" else at_the_end
        return None if only_what_is_done or needless else self.wait_line(stream)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        collective = {
            "allgather_": "ALL_GATHER",
            "_allgather_base_": "ALL_GATHER",
            "_reduce_scatter_base_": "REDUCE_SCATTER",
            "allreduce_": "ALL_REDUCE",
        }.get(func._opname)
        if func.namespace == "c10d":
            tensors = args[1] if func._opname == "_reduce_scatter_base_" else args[0]
            tensors = tensors[0] if isinstance(tensors, list) else tensors
            whole = sum(t.numel() for t in tensors) if isinstance(tensors, list) else tensors.numel()
            self.lines.append(f"{collective} {whole}")
        elif func._opname == "mm":
            self.lines.append(f"mm {tuple(args[0].shape)} {tuple(args[1].shape)}")
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.stack = ExitStack()
        for p in self.patches:
            self.stack.enter_context(p)
        return super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        self.stack.close()


def programs(iterations=3, micro_batches=1, no_sync=False, **options):
    """Three training steps of the mini and of torch: their programs, losses, and whether shards stay bitwise equal."""
    model = Net()
    results = []
    for sharded in (mini(model, **options), of_torch(model, **options)):
        optimizer = torch.optim.SGD(sharded.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(dist.get_rank())
        losses = []
        with Program(sharded) as program:
            for _ in range(iterations):
                for i in range(micro_batches):
                    with sharded.no_sync() if no_sync and i < micro_batches - 1 else nullcontext():
                        loss = sharded(torch.randn(2, 4, generator=generator)).pow(2).mean()
                        loss.backward()
                    losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        results.append(SimpleNamespace(lines=program.lines, losses=losses, params=flat_params(sharded)))
    ours, theirs = results
    assert all(torch.equal(ours.params[unit], theirs.params[unit]) for unit in theirs.params)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    return ours.lines, theirs.lines


@pytest.mark.parametrize(
    ("strategy", "backward_prefetch", "forward_prefetch"), list(product(STRATEGIES, [PRE, POST, None], [False, True]))
)
def test_issues_what_torch_issues(ranks, strategy, backward_prefetch, forward_prefetch):
    options = {"backward_prefetch": backward_prefetch, "forward_prefetch": forward_prefetch}
    for ours, theirs in ranks(2, lambda: programs(sharding_strategy=strategy, **options)):
        assert len(theirs) > 90
        assert ours == theirs


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
def test_issues_what_torch_issues_without_the_limiter(ranks, strategy):
    for ours, theirs in ranks(2, lambda: programs(sharding_strategy=strategy, limit_all_gathers=False)):
        assert not any("limiter" in line for line in ours)
        assert ours == theirs


@pytest.mark.parametrize(("strategy", "no_sync"), list(product(STRATEGIES, [False, True])))
def test_accumulates_as_torch_does(ranks, strategy, no_sync):
    for ours, theirs in ranks(
        2, lambda: programs(iterations=2, micro_batches=3, sharding_strategy=strategy, no_sync=no_sync)
    ):
        reductions = sum(line.startswith(("REDUCE_SCATTER", "ALL_REDUCE")) for line in ours)
        assert reductions == 4 * 2 * (1 if no_sync else 3)
        assert ours == theirs


def test_the_limiter_takes_the_oldest_of_two_free_events(ranks):
    """As in a program of torch on 8 GPUs: the third layer of the first forward waits for the first one's free."""

    def run():
        model = mini(Net())
        with Program(model) as program:
            model(torch.ones(2, 4)).sum().backward()
        return program.lines

    lines = ranks(2, run)[0]
    limited = {line: before for before, line in pairwise(lines) if line.startswith("limiter")}
    assert limited["limiter waits for free event 0"] == "unshard(layers.2)"
    assert limited["limiter waits for free event 1"] == "unshard(root)"  # in backward: it frees nothing for it


# Modules that are not a plain chain


def gradients_beside_torch(model, x, **options):
    """The mini's, after comparing its program, loss and sharded gradients with torch's."""
    results = []
    for sharded in (mini(model, **options), of_torch(model, **options)):
        with Program(sharded) as program:
            for _ in range(2):
                loss = sharded(x).pow(2).mean()
                loss.backward()
        grads = {unit: p.grad for unit, p in flat_params(sharded).items()}
        results.append((sharded, program.lines, loss.item(), grads))
    (ours, lines, loss, grads), (_, torch_lines, torch_loss, torch_grads) = results
    assert lines == torch_lines
    assert loss == pytest.approx(torch_loss, rel=1e-6)
    assert_equal(grads, torch_grads)
    return ours.full_gradients()


class TwiceNet(Net):
    """The first layer runs before and after the second, and once without gradients; the third in vain."""

    def __init__(self):
        super().__init__(sizes=(5, 5, 5, 2))

    def forward(self, x):
        x = self.embed(x)
        x = self.layers[0](self.layers[1](self.layers[0](x)))
        with torch.no_grad():
            side = self.layers[0](x)
        self.layers[2](x)
        return self.head((x + side)[:, :2])


class Checkpointed(Net):
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def with_a_frozen_layer():
    model = Net()
    model.layers[1].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "options"),
    [
        *((TwiceNet, {"sharding_strategy": s, "forward_prefetch": p}) for s, p in product(STRATEGIES, (False, True))),
        (with_a_frozen_layer, {}),
        (Checkpointed, {}),
    ],
)
def test_units_that_run_often_or_in_vain_are_frozen_or_recomputed(ranks, make, options):
    def run():
        model, x = make(), torch.randn(4, 4)
        plain = twin(model)
        for _ in range(2):
            plain(x).pow(2).mean().backward()
        assert_equal(gradients_beside_torch(model, my_part(x), **options), grads_of(plain), rtol=1e-5, atol=1e-6)

    ranks(2, run)


# What the training script calls


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
def test_clip_grad_norm_is_global(ranks, strategy, norm_type):
    def run():
        model, x = Net(), torch.randn(6, 4)
        plain, sharded = twin(model), mini(model, sharding_strategy=strategy)
        plain(x).pow(2).mean().backward()
        sharded(my_part(x)).pow(2).mean().backward()
        norms = [torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type).item()]
        norms.append(sharded.clip_grad_norm_(0.1, norm_type).item())
        assert_equal(sharded.full_gradients(), grads_of(plain), rtol=1e-5, atol=1e-6)
        return norms

    for plain_norm, norm in ranks(3, run):
        assert norm == pytest.approx(plain_norm, rel=1e-5)
        assert norm > 0.1, "else nothing was clipped"


def test_the_full_state_dict_is_that_of_the_module_before(ranks):
    def run():
        model = Net()
        state = mini(model).full_state_dict()
        assert_equal(state, model.state_dict(), rtol=0, atol=0)
        other = Net()
        other.load_state_dict(state)
        return "shift" in state

    assert ranks(3, run) == [True] * 3


def test_errors_come_before_anything_is_sharded(ranks):
    class Tied(Net):
        def __init__(self):
            super().__init__(sizes=(4, 4, 4))
            self.layers[1].w = self.layers[0].w

    class Scalar(Net):
        def __init__(self):
            super().__init__()
            self.layers[0].scale = nn.Parameter(torch.tensor(1.0))

    def message(model, **options):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            FlatParameterFSDP(model, auto_wrap={Layer}, **options)
        assert not any("flat" in name for name, _ in model.named_parameters())
        return str(error.value)

    def run():
        half, frozen = Net(), Net()
        half.layers[1].b.data = half.layers[1].b.data.half()
        frozen.layers[1].b.requires_grad_(False)
        hybrid = message(Net(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        return [*map(message, (frozen, half, Tied(), Scalar())), hybrid]

    frozen, half, tied, scalar, hybrid = ranks(2, run)[0]
    assert "one requires_grad, but layers.1.w has True and layers.1.b has False" in frozen
    assert "one dtype, but layers.1.w has torch.float32 and layers.1.b has torch.float16" in half
    assert "layers.1.w is in unit 'layers.1' and in unit 'layers.0'" in tied
    assert "layers.0.scale is a scalar" in scalar
    assert "HYBRID_SHARD is not in this miniature" in hybrid


# The timeline


RECORDINGS = Path(__file__).parents[2] / "schedule" / "recordings"  # torch's unmodified FSDP1, on 8 ranks


class ToyLayer(Matrix):
    """A unit of the recorded programs."""


def record(**options):
    """Two steps of the model of the recorded programs."""
    model = Toy(4)
    model.layers = nn.ModuleList(ToyLayer() for _ in range(4))
    sharded = mini(model, ToyLayer, **options)
    optimizer = torch.optim.AdamW(sharded.parameters())
    RECORDER.start(dist.get_rank())
    for _ in range(2):
        sharded(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return RECORDER.stop()


def timeline_of(ranks, world_size=2, **options):
    events = [e for of_rank in ranks(world_size, lambda: record(**options)) for e in of_rank]
    return Timeline(Header(producer="mini flat", clock="measured", world_size=world_size), events)


def lines_of_torch(name):
    """Operations but divisions, allocs and frees of the first step."""
    lines = []
    for line in (RECORDINGS / f"{name}.txt").read_text().split("--- step 1")[0].splitlines():
        kind, what = line[:12].strip(), line[28:]
        if kind in ("op", "alloc", "free") and not what.startswith("div"):
            lines.append(f"{kind} {what}")
    return lines


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fsdp1_full_shard_default", {}),
        ("fsdp1_full_shard_no_limit", {"limit_all_gathers": False}),
        ("fsdp1_shard_grad_op", {"sharding_strategy": SHARD_GRAD_OP}),
    ],
)
def test_the_timeline_has_every_op_alloc_and_free_where_torch_has_it(ranks, name, options):
    expected = lines_of_torch(name)
    assert len(expected) > 30
    timeline = timeline_of(ranks, **options)
    for rank, step in product((0, 1), (0, 1)):
        events = [e for e in timeline.events if (e.rank, e.step) == (rank, step)]
        ours = [
            f"{e.op} {e.category}({e.unit})" if e.is_memory else f"op {e.label}"
            for e in events
            if not e.is_memory or e.category is Memory.UNSHARDED
        ]
        assert ours == expected


def test_the_timeline_says_what_was_waited_for_and_what_stays(ranks):
    timeline = timeline_of(ranks)
    by_seq = {e.seq: e for e in timeline.events if e.rank == 0}
    waits = {e.label: {by_seq[s].label for s in e.waits_on} for e in by_seq.values() if e.step == 1}
    assert waits["BWD layers.0"] == {"ALL_GATHER(layers.0)"}
    assert waits["OPTIM"] == {"REDUCE_SCATTER(root)"}
    gather = timeline.select(op=Op.ALL_GATHER, unit="layers.0", rank=0, step=0).events[0]
    assert (gather.bytes, gather.group_size, gather.dtype) == (64, 2, "fp32")
    _, live = timeline.live_bytes(rank=0)
    assert {category for category, n_bytes in live.items() if n_bytes[-1]} == {Memory.SHARDED, Memory.OPTIMIZER}
    assert set(live) >= {Memory.UNSHARDED, Memory.UNSHARDED_GRAD, Memory.RS_OUTPUT}
    assert Memory.RS_INPUT not in live, "16 and 32 elements on 2 ranks: nothing to pad, nothing to copy"


def test_collectives_run_beside_backward(ranks):
    """When layer 1's backward begins, the next all-gather and the last reduce-scatter are under way."""

    def run():
        model, seen = mini(Net()), []

        def look(module, args, output):
            streams = model._unshard_stream, model._post_backward_stream
            output.register_hook(lambda _: seen.extend(len(stream._under_way) for stream in streams))

        model.module.layers[1].register_forward_hook(look)
        model(torch.randn(2, 4)).sum().backward()
        return seen

    assert ranks(2, run) == [[1, 1]] * 2
