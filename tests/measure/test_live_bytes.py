"""The meter of live bytes is exact on programs of known peak, and the same whenever they are run."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

import fsdp_sim.mini as mini
from fsdp_sim.measure import live_bytes
from fsdp_sim.ranks import run
from tests.measure.allocator import Allocator

KB = 4000  # bytes of `block()`


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> Iterator[None]:
    """A meter goes through Python's heap twice, in which hundreds of thousands of objects of pytest and torch lie."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def block(requires_grad: bool = False) -> torch.Tensor:
    return torch.ones(1000, requires_grad=requires_grad)


def measured(program: Callable[[], Any]) -> tuple[int, int]:
    """Peak, and what is alive when the program has ended but still holds what it returned."""
    with live_bytes() as meter:
        kept = program()
    del kept
    return meter.peak_bytes, meter.live_bytes


# Programs of known peak


def test_a_temporary_lives_until_the_operation_that_reads_it_is_done() -> None:
    assert measured(lambda: block() * 2 + 1) == (2 * KB, KB)  # the ones are gone when 1 is added


def test_views_take_no_bytes_and_keep_those_of_their_base() -> None:
    def program() -> torch.Tensor:
        whole = block()
        return whole.view(10, 100)[3].t()

    assert measured(program) == (KB, KB)


def test_a_storage_of_two_tensors_counts_once() -> None:
    def program() -> list[torch.Tensor]:
        a = block()
        b = torch.empty(0).set_(a.untyped_storage())
        return [a, b]

    assert measured(program) == (KB, KB)


def test_resizing_to_nothing_frees_while_the_tensor_stays() -> None:
    def program() -> torch.Tensor:
        a = block()
        a.untyped_storage().resize_(0)
        b = block()
        del b
        a.untyped_storage().resize_(KB)
        return a

    assert measured(program) == (KB, KB)


def test_growing_holds_the_old_and_the_new_until_the_content_is_copied() -> None:
    def program() -> torch.Tensor:
        return block().resize_(3000)

    assert measured(program) == (KB + 3 * KB, 3 * KB)


def test_an_output_that_an_operator_resizes_counts() -> None:
    def program() -> torch.Tensor:
        out = torch.empty(0)
        torch.add(block(), 1, out=out)
        return out

    assert measured(program) == (2 * KB, KB)


def test_outputs_that_an_operator_resizes_but_does_not_return_count() -> None:
    def program() -> list[torch.Tensor]:
        halves = [torch.empty(0), torch.empty(0)]
        torch.split_with_sizes_copy(block(), [500, 500], out=halves)
        return halves

    assert measured(program) == (2 * KB, KB)


def test_what_autograd_saves_lives_until_backward_has_used_it() -> None:
    x = block(requires_grad=True)
    with live_bytes(x) as meter:
        y = (x * x).exp().sum()  # x * x is not saved; exp saves its output
        forward = meter.mark("forward")
        y.backward()
        backward = meter.mark("backward")
    assert (forward.live_bytes, forward.peak_bytes) == (2 * KB + 4, 3 * KB)
    # backward: y and its gradient, 4 bytes each; x; then beside each other the gradient of exp and twice that times x,
    # once for each factor of x * x, which are added in the place of one of them
    assert backward.live_bytes == 2 * KB + 4  # x, its gradient, y
    assert backward.peak_bytes == 4 * KB + 8


def test_gradients_are_accumulated_in_place() -> None:
    x = block(requires_grad=True)

    def step() -> None:
        (x * 3).sum().backward()

    with live_bytes(x) as meter:
        step()
        first = meter.mark("first")
        step()
        second = meter.mark("second")
    assert first.live_bytes == second.live_bytes == 2 * KB
    assert first.peak_bytes == 2 * KB + 8  # x and its gradient; the sum and its gradient
    assert second.peak_bytes == 3 * KB + 8  # and what is added to the gradient


@pytest.mark.parametrize(
    ("how", "temporaries"), [({"foreach": False}, None), ({"foreach": True}, 3), ({"fused": True}, 0)]
)
def test_an_optimizer_step(how: dict[str, bool], temporaries: int | None) -> None:
    model = nn.Linear(100, 100, bias=False)  # 40,000 bytes
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    assert model.weight.grad is None
    model.weight.grad = torch.ones_like(model.weight)
    with live_bytes(model, optimizer) as meter:
        assert meter.live_bytes == 2 * 40_000
        optimizer.step()
        assert meter.live_bytes == 4 * 40_000 + 4  # two states and the count of steps
    if temporaries is not None:
        assert meter.peak_bytes == (4 + min(temporaries, 1)) * 40_000 + 4


def test_cycles_are_alive_until_the_end_and_named() -> None:
    def cyclic() -> None:
        loop: list[Any] = [block()]
        loop.append(loop)
        del loop
        _ = [[] for _ in range(5000)]  # would set off the collector

    for _ in range(3):
        with live_bytes() as meter:
            cyclic()
            cyclic()
        assert (meter.peak_bytes, meter.live_bytes, meter.cycle_bytes) == (2 * KB, 2 * KB, 2 * KB)
    assert gc.isenabled()


# Against an independent count: torch's profiler, which is told of each allocation by the allocator itself. It cannot be
# the meter, since it sees one thread, and no names; in one thread of one program it is exact.


def attention() -> torch.Tensor:
    q = torch.randn(1, 2, 40, 80, requires_grad=True)
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    return q


def chunk_cat() -> torch.Tensor:
    out = torch.empty(3, 47)
    torch._chunk_cat([torch.ones(50), torch.ones(7, 10)], dim=0, num_chunks=3, out=out)
    return out


def train() -> nn.Module:
    model = nn.Sequential(nn.Embedding(30, 16), nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 30))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        for _ in range(2):
            F.cross_entropy(model(torch.arange(30)), torch.arange(30)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


PROGRAMS = {
    "sort": lambda: torch.sort(torch.randn(999)),
    "einsum": lambda: torch.einsum("ij,jk,kl->il", torch.ones(20, 30), torch.ones(30, 40), torch.ones(40, 5)),
    "not contiguous": lambda: torch.randn(80, 90)[::2, ::3] @ torch.randn(60, 90).t()[::3],
    "grouped": lambda: torch._foreach_lerp([torch.ones(9), torch.ones(5)], [torch.ones(9), torch.ones(5)], 0.5),
    "attention": attention,
    "chunk_cat": chunk_cat,
    "train": train,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_inside_operators_every_byte_is_seen(name: str) -> None:
    PROGRAMS[name]()  # what torch sets up once
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = PROGRAMS[name]()
    del kept
    events = sorted(
        (e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    )
    alive = np.cumsum([event.nbytes() for event in events])
    assert len(alive) >= 3
    assert measured(PROGRAMS[name])[0] == alive.max()


# What was there before


def test_what_it_is_given_counts_from_the_start_under_its_name() -> None:
    model = nn.Linear(100, 100, bias=False)
    model.register_buffer("table", torch.ones(250))
    model.weight.grad = torch.ones(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.step()
    with live_bytes(model, optimizer) as meter:
        pass
    assert meter.live_bytes == 3 * 40_000 + 1000
    assert {a.source for a in meter.at_peak()} == {
        "weight", "gradient of weight", "momentum_buffer of weight", "table",
    }  # fmt: skip


def test_what_it_was_not_given_counts_from_the_start_once_it_is_used() -> None:
    old = block()
    with live_bytes() as meter:
        new = block()
        del new
        assert meter.peak_bytes == KB
        old.add_(1)
    assert meter.peak_bytes == 2 * KB  # for `old` was there beside `new`
    assert meter.live_bytes == KB


def test_memory_taken_without_an_operator_counts_from_its_first_use() -> None:
    with live_bytes() as meter:
        block()
        new = torch.from_numpy(np.ones(1000, dtype=np.float32))
        new.add_(1)
    assert meter.peak_bytes == meter.live_bytes == KB


# Answers


def test_marks_say_what_is_alive_and_the_peak_since_the_mark_before() -> None:
    with live_bytes() as meter:
        a = block()
        block()
        assert (meter.mark("two").live_bytes, meter.mark("nothing since").peak_bytes) == (KB, KB)
        del a
        meter.mark("none")
    assert [(m.name, m.live_bytes, m.peak_bytes) for m in meter.marks] == [
        ("two", KB, 2 * KB), ("nothing since", KB, KB), ("none", 0, KB),
    ]  # fmt: skip


def test_it_says_what_was_alive_at_the_peak_and_which_line_allocated_it() -> None:
    with live_bytes() as meter:
        small = torch.ones(10)
        large = torch.zeros(1000) + small.sum()
        del small, large
        torch.ones(1)
    here = [(a.bytes, a.op, a.source.rpartition("/")[2].partition(":")[0]) for a in meter.at_peak()]
    assert here[:2] == [
        (KB, "aten.zeros.default", "test_live_bytes.py"), (KB, "aten.add.Tensor", "test_live_bytes.py"),
    ]  # fmt: skip
    assert "8,044 B at the peak" in meter.by_size()
    assert "8,044 B at the peak" in (few := meter.by_size(1))
    assert "4,044 B in 3 more places" in few


def test_the_meter_changes_no_value() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    x = torch.randn(4, 8)

    def step(model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        model(x).square().mean().backward()
        optimizer.step()

    step(model)
    with live_bytes(twin):
        step(twin)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_nothing_is_left_behind() -> None:
    before = torch.UntypedStorage.resize_
    meter = live_bytes()
    a = block()
    with pytest.raises(RuntimeError, match="size"), meter:
        a.add_(torch.ones(3))
    assert torch.UntypedStorage.resize_ is before
    assert gc.isenabled()
    del a
    assert meter.live_bytes == KB + 12  # as it was when the block ended: the traceback held the three ones
    with pytest.raises(RuntimeError, match="one block"):
        meter.__enter__()


@pytest.mark.parametrize(("held", "device"), [((3,), "cpu"), (([nn.Linear(1, 1)],), "cpu"), ((), "tpu")])
def test_what_it_cannot_measure_is_refused(held: Any, device: str) -> None:
    with pytest.raises((TypeError, ValueError), match="live_bytes"):
        live_bytes(*held, device=device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_allocator_counts() -> None:
    with live_bytes(device="cuda") as meter:
        start = meter.live_bytes
        a = torch.ones(1024, device="cuda")
        del a
        assert meter.mark("a").peak_bytes == start + 4096
    assert (meter.peak_bytes, meter.live_bytes) == (start + 4096, start)


def test_workspaces_of_cublas_are_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As seen from what torch.cuda answers. To look gives them back: what was there at the peak is remembered."""
    gpu = Allocator(monkeypatch)
    gpu.alloc(1000)
    gpu.matmul()
    with live_bytes(device="cuda") as meter:
        for size in (500, 300):
            gpu.matmul()
            gpu.alloc(size)
            gpu.alloc(-size)
            assert meter.live_bytes == 1000
            mark = meter.mark("step")
            assert (mark.live_bytes, mark.peak_bytes) == (1000, 1000 + size)
    assert (meter.live_bytes, meter.peak_bytes) == (1000, 1500)


# On ranks


class Layers(nn.Module):
    """Wide layers and one row of input: all that counts is parameters."""

    def __init__(self, n: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def three_steps(which: str, n: int, width: int) -> list[Any]:
    """Peaks of forward, backward and optimizer, and the bytes at the end, in three meters; and what only gc frees."""
    gc.freeze()  # what the rank has imported: a quicker meter
    model = Layers(n, width)
    if which == "ddp":
        sharded: Any = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard = mini.fully_shard if which == "mini" else dist.fsdp.fully_shard
        for layer in model.layers:
            fully_shard(layer)
        sharded = fully_shard(model)
    optimizer = torch.optim.AdamW(sharded.parameters())
    found = []
    for step in range(4):
        with live_bytes(sharded, optimizer) as meter:
            sharded(torch.ones(1, width)).sum().backward()
            meter.mark("forward and backward")
            optimizer.step()
            optimizer.zero_grad()
            meter.mark("optimizer")
        if step:
            found.append([meter.marks, meter.live_bytes])
    return found


@pytest.mark.parametrize("which", ["mini", "torch", "ddp"])
def test_three_times_the_same_on_every_rank(which: str) -> None:
    ranks = run(three_steps, 2, which, 5, 64, progress=False, record=False)
    assert all(found == ranks[0][0] for rank in ranks for found in rank)


def forward_only(which: str, n: int, width: int, world_size: int) -> int:
    fully_shard = mini.fully_shard if which == "mini" else dist.fsdp.fully_shard
    model: Any = Layers(n, width)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    x = torch.ones(1, width)
    with torch.no_grad(), live_bytes(model, x) as meter:
        model(x)
    shards, activations = n * width * width * 4 // world_size, 4 * width
    return meter.peak_bytes - shards - 2 * activations


@pytest.mark.parametrize("which", ["mini", "torch"])
def test_forward_holds_two_gathered_buffers_and_one_unit(which: str) -> None:
    """The bound that torch states for forward: three units (`all_gather_state` of `FSDPCommContext`). From torch 2.15
    on the first goes before the next is copied out: two, and the activation that is there then."""
    found = run(forward_only, 2, which, 4, 64, 2, progress=False, record=False)
    unit, activation = 64 * 64 * 4, 64 * 4
    expected = 2 * unit + activation if mini.versions.GATHERED_GOES_BEFORE_COPY_OUT else 3 * unit
    assert list(found) == [expected] * 2


def gather_and_drop() -> list[int]:
    peaks = []
    for how in ("sync", "async"):
        with live_bytes() as meter:
            for _ in range(30):
                mine, whole = torch.ones(500), torch.empty(1000)
                work = dist.all_gather_into_tensor(whole, mine, async_op=how == "async")
                if work is not None:
                    work.wait()
                del mine, whole, work
        peaks += [meter.peak_bytes, meter.live_bytes]
    return peaks


def test_gloo_lets_go_of_its_buffers_before_they_are_counted_again() -> None:
    assert list(run(gather_and_drop, 2, progress=False, record=False)) == [[6000, 0, 6000, 0]] * 2


def add_rows_and_columns() -> tuple[int, int, float]:
    mesh = DeviceMesh("cpu", range(2))
    rows, columns = (distribute_tensor(torch.ones(100, 10), mesh, [Shard(dim)]) for dim in (0, 1))  # 2,000 bytes each
    with live_bytes(rows, columns) as meter:
        total = rows + columns
    return meter.peak_bytes, meter.live_bytes, total.to_local().sum().item()


def test_of_a_dtensor_this_ranks_part_counts_and_what_it_is_redistributed_through() -> None:
    for peak, alive, value in run(add_rows_and_columns, 2, progress=False, record=False):
        assert alive == 3 * 2000
        assert peak >= alive + 4000  # the columns of all ranks, gathered; gloo has no all-to-all, other backends have
        assert value == 2.0 * 500
