"""The recorder, with torch's own FSDP2 and FSDP1, reproduces the recordings of torch line by line."""

import gc
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group, _fsdp_state
from torch.optim import optimizer

import fsdp_sim.mini
from fsdp_sim.measure.record import record
from tests.mini.models import Matrix, Toy, shard

RECORDINGS = Path(__file__).parents[1] / "schedule" / "recordings"
INSTALLED = ".".join(torch.__version__.split(".")[:2])
RECORDED = {"2.13": "", "2.14": "", "2.15": "torch-2.15"}  # folders of recordings; 2.14 issues what 2.13 does
needs_recordings = pytest.mark.skipif(
    INSTALLED not in RECORDED, reason=f"needs torch {', '.join(RECORDED)}, of which there are recordings"
)


def nothing(*_):
    pass


def train(layers=3, steps=1, micro_batches=1, set_up=nothing, each=nothing, mesh=None, shard_fn=fully_shard, **options):
    """A training run of the recordings' model.

    Args:
        set_up: called with the sharded model. each: with the model and "is this the last micro-batch".
        mesh: sizes of a 2-D one.
    """

    def run(recorder):
        model = Toy(layers)
        for name, module in model.named_modules():
            if isinstance(module, Matrix):
                recorder.watch(module, name)
        if mesh:
            options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
        shard(model, shard_fn, **options)
        set_up(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            for micro_batch in range(micro_batches):
                each(model, micro_batch == micro_batches - 1)
                recorder.mark(f"step {step} microbatch {micro_batch}: forward")
                loss = model(torch.ones(2, 4)).sum()
                recorder.mark(f"step {step} microbatch {micro_batch}: backward")
                loss.backward()
            recorder.mark(f"step {step}: optimizer")
            optimizer.step()
            optimizer.zero_grad()
        return model

    return run


def prefetch_forward(model):
    for layer, following in zip(model.layers, model.layers[1:], strict=False):
        layer.set_modules_to_forward_prefetch([following])


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
FSDP2 = {
    "default_raf_none": {"steps": 2},
    "raf_true_everywhere": {"reshard_after_forward": True},
    "raf_false": {"reshard_after_forward": False},
    "forward_prefetch_1": {"layers": 4, "set_up": prefetch_forward},
    "hsdp_2x4": {"mesh": (2, 4)},
    "grad_acc_no_sync": {
        "layers": 2,
        "micro_batches": 2,
        "each": lambda model, last: model.set_requires_gradient_sync(last),
    },
    "mixed_bf16_fp32reduce": {"mp_policy": BF16},
    "mixed_bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "hsdp_2x4_all_reduce_last": {
        "mesh": (2, 4),
        "micro_batches": 2,
        "each": lambda model, last: model.set_requires_all_reduce(last),
    },
}


def train_fsdp1(steps=1, **options):
    options["device_id"] = torch.device("cpu")

    def run(recorder):
        model = Toy(4)
        for name, module in model.named_modules():
            if isinstance(module, Matrix):
                recorder.watch(module, name)
        for number, layer in enumerate(model.layers):
            model.layers[number] = FullyShardedDataParallel(layer, **options)
        model = FullyShardedDataParallel(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            recorder.mark(f"step {step}: forward")
            loss = model(torch.ones(2, 4)).sum()
            recorder.mark(f"step {step}: backward")
            loss.backward()
            recorder.mark(f"step {step}: optimizer")
            optimizer.step()
            optimizer.zero_grad()
        return model

    return run


FSDP1 = {
    "fsdp1_full_shard_default": train_fsdp1(steps=2),
    "fsdp1_full_shard_no_limit": train_fsdp1(limit_all_gathers=False),
    "fsdp1_shard_grad_op": train_fsdp1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
}


def recorded(name):
    folder = RECORDINGS if name in FSDP1 else RECORDINGS / RECORDED[INSTALLED]
    return [line for line in (folder / f"{name}.txt").read_text().splitlines() if not line.startswith("#")]


@needs_recordings
@pytest.mark.parametrize("fsdp", [torch.distributed.fsdp, fsdp_sim.mini], ids=["torch", "mini"])
@pytest.mark.parametrize("name", FSDP2)
def test_fsdp2_is_recorded_line_by_line(name, fsdp):
    assert record(train(shard_fn=fsdp.fully_shard, **FSDP2[name])) == recorded(name)


@needs_recordings
@pytest.mark.parametrize("name", FSDP1)
def test_fsdp1_is_recorded_line_by_line(name):
    assert record(FSDP1[name]) == recorded(name)


# Settings of which there is no recording: the lines that make them what they are, each reasoned from torch's source


def extract(lines, *kinds, unit="layers.0"):
    """`kind stream what` of the lines of some kinds, without the columns, that name a unit."""
    return [" ".join(line.split()) for line in lines if line.split()[0] in kinds and f"({unit})" in line]


SETTINGS = {
    "an int keeps a slice and gathers it from two ranks": (
        train(1, reshard_after_forward=2),
        ("op",),
        [
            "op ag_copy_in ag_copy_in(layers.0)",
            "op all_gather ALL_GATHER(layers.0) n=8",
            "op compute ag_copy_out(layers.0)",
            "op compute clone_post_forward_shard(layers.0)",
            "op ag_copy_in ag_copy_in(layers.0)",
            "op all_gather ALL_GATHER(layers.0) n=2",
            "op compute ag_copy_out(layers.0)",
            "op compute rs_copy_in(layers.0)",
            "op reduce_scatter REDUCE_SCATTER(layers.0) n=8 op=AVG",
        ],
    ),
    "an asynchronous unshard stays on the compute stream": (
        train(1, set_up=lambda model: model._set_unshard_async_op(True), reshard_after_forward=False),
        ("alloc", "op", "wait"),
        [
            "alloc compute ag_output(layers.0)",
            "op compute ag_copy_in(layers.0)",
            "op compute ALL_GATHER(layers.0) n=8 async",
            "wait compute ALL_GATHER(layers.0)",
            "alloc compute unsharded(layers.0)",
            "op compute ag_copy_out(layers.0)",
            "alloc compute rs_input(layers.0)",
            "op compute rs_copy_in(layers.0)",
            "alloc reduce_scatter rs_output(layers.0)",
            "op reduce_scatter REDUCE_SCATTER(layers.0) n=8 op=AVG",
        ],
    ),
    "float16 is divided before and after, then cast": (
        train(1, mp_policy=FP16, reshard_after_forward=False),
        ("op",),
        [
            "op ag_copy_in ag_cast(layers.0) to torch.float16",
            "op ag_copy_in ag_copy_in(layers.0)",
            "op all_gather ALL_GATHER(layers.0) n=8",
            "op compute ag_copy_out(layers.0)",
            "op compute rs_copy_in(layers.0)",
            "op reduce_scatter div(layers.0) by 4",
            "op reduce_scatter REDUCE_SCATTER(layers.0) n=8 op=SUM",
            "op reduce_scatter div(layers.0) by 2.0",
            "op reduce_scatter grad_cast(layers.0) torch.float16 -> torch.float32",
        ],
    ),
    "a divide factor is part of the collective": (
        train(1, set_up=lambda model: model.set_gradient_divide_factor(4)),
        ("op",),
        [
            "op ag_copy_in ag_copy_in(root)",
            "op all_gather ALL_GATHER(root) n=8",
            "op compute ag_copy_out(root)",
            "op compute rs_copy_in(root)",
            "op reduce_scatter REDUCE_SCATTER(root) n=8 op=PREMUL_SUM(0.25)",
        ],
        "root",
    ),
    "an unsharded gradient that is kept is cast once": (
        train(1, 1, 2, each=lambda model, last: model.set_requires_gradient_sync(last), mp_policy=BF16),
        ("op",),
        [
            *("op ag_copy_in ag_cast(root) to torch.bfloat16", "op ag_copy_in ag_copy_in(root)"),
            *("op all_gather ALL_GATHER(root) n=8", "op compute ag_copy_out(root)"),
            *["op compute upcast_unsharded_grad(root)"] * (0 if INSTALLED == "2.15" else 2),  # there autograd casts
            *("op ag_copy_in ag_cast(root) to torch.bfloat16", "op ag_copy_in ag_copy_in(root)"),
            *("op all_gather ALL_GATHER(root) n=8", "op compute ag_copy_out(root)"),
            *("op compute rs_copy_in(root)", "op reduce_scatter REDUCE_SCATTER(root) n=8 op=AVG"),
        ],
        "root",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_shows_in_its_lines(name):
    run, kinds, lines, *unit = SETTINGS[name]

    assert extract(record(run), *kinds, unit=unit[0] if unit else "layers.0") == lines


def test_two_reduce_scatter_inputs_may_live_at_once():
    lines = record(train(3, set_up=lambda model: model.set_reduce_scatter_max_input_buffers(2)))

    alive = most = 0
    for line in lines:
        if "rs_input" in line:
            alive += 1 if line.startswith("alloc") else -1
            most = max(most, alive)
    assert (alive, most) == (0, 2)


def test_cpu_offload_makes_the_cpu_wait_for_the_copies_of_the_gradients():
    lines = record(train(1, offload_policy=CPUOffloadPolicy()))

    waits = [line for line in lines if line.startswith("cpu_sync")]
    assert waits == [f"{'cpu_sync':<12}{'-':<16}e{event}@reduce_scatter" for event in (11, 12, 8)]  # root first
    assert lines.index(waits[0]) > lines.index(f"{'hook':<12}{'-':<16}finalize_backward(root)")


def test_operations_outside_the_recorded_format_are_written_on_request():
    run = train(1, micro_batches=2, offload_policy=CPUOffloadPolicy())
    usual, every = record(run), record(run, every_op=True)

    extra = [line for line in every if any(name in line for name in ("h2d(", "d2h(", "accumulate("))]
    assert len(extra) == (3 + 1) * 2 + 3 * 2 + 3  # shards in forward and, but for the root's, backward; gradients; sums
    assert [line for line in every if line not in extra] == usual


def test_an_all_reduce_hook_runs_on_its_own_stream_under_its_own_name():
    def run(recorder):
        def hook(gradient):
            dist.all_reduce(gradient)

        def set_up(model):
            model.layers[0].set_all_reduce_hook(hook, stream=recorder.device.Stream(name="mine"))

        return train(1, set_up=set_up)(recorder)

    lines = [" ".join(line.split()) for line in record(run)]
    reduced = lines.index("op mine ALL_REDUCE(layers.0) n=8")
    assert lines[reduced - 1] == "wait_stream mine reduce_scatter"
    assert any(re.fullmatch(r"wait compute e\d+@mine", line) for line in lines)


def test_the_post_optimizer_event_is_what_the_next_gather_waits_for():
    def run(recorder):
        def each(model, last):
            event = recorder.device.Event()
            event.record()
            model.set_post_optim_event(event)

        return train(1, each=each)(recorder)

    lines = [" ".join(line.split()) for line in record(run)]
    assert lines[:4] == [
        "record compute e1@compute",
        "--- step 0 microbatch 0: forward",
        "wait ag_copy_in e1@compute",
        "wait all_gather e1@compute",
    ]


def test_one_rank_gathers_nothing():
    lines = record(train(1), world_size=1)

    assert not [line for line in lines if "ALL_GATHER" in line or "REDUCE_SCATTER" in line]
    assert extract(lines, "alloc", "free") == [
        "alloc compute unsharded(layers.0)",
        "free compute unsharded(layers.0)",
        "alloc compute unsharded(layers.0)",
        "free compute unsharded(layers.0)",
        "alloc compute rs_input(layers.0)",
        "alloc reduce_scatter rs_output(layers.0)",
        "free compute rs_input(layers.0)",
        "free reduce_scatter rs_output(layers.0)",
    ]


# The recorder itself


def test_what_the_training_returns_outlives_the_recording_and_the_rest_is_freed():
    def run(recorder, keep):
        model = shard(Toy(1), reshard_after_forward=False)
        output = model(torch.ones(2, 4))
        output.sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        recorder.mark("the end")
        return gradients if keep else None

    def freed(keep):
        lines = record(lambda recorder: run(recorder, keep))
        return [line.split()[-1] for line in lines[lines.index("--- the end") :] if line.startswith("free")]

    assert freed(keep=True) == []
    assert sorted(freed(keep=False)) == ["rs_output(layers.0)", "rs_output(root)"]


class Two(Matrix):
    """Two outputs."""

    def forward(self, x):
        return super().forward(x), -super().forward(x)


def test_a_module_with_two_outputs_has_one_backward():
    def run(recorder):
        model = Two()
        recorder.watch(model, "two")
        for _ in range(2):
            a, b = model(torch.ones(2, 4))
            (a + b).sum().backward()
        return model

    assert [" ".join(line.split()) for line in record(run)] == ["op compute FWD two", "op compute BWD two"] * 2


def test_a_second_backward_through_the_same_graph_is_seen():
    def run(recorder):
        model = Matrix()
        recorder.watch(model, "one")
        loss = model(torch.ones(2, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert [line.split()[-2] for line in record(run)] == ["FWD", "BWD", "BWD"]


def test_a_process_group_that_exists_is_named_and_left_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match=r"process group of 1 ranks \(gloo\).*destroy_process_group"):
            record(train())
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def patched():
    """Everything that a recording puts something else in the place of, or may leave behind."""
    return (
        *(vars(module).get("_get_device_handle") for module in (_fsdp_collectives, _fsdp_param_group, _fsdp_state)),
        *(vars(_fsdp_param_group.FSDPParamGroup).values()),
        *(vars(_fsdp_state.FSDPState).values()),
        *(vars(fsdp_sim.mini.FSDPParamGroup).values()),
        *(vars(fsdp_sim.mini.FSDPState).values()),
        *(vars(dist.ProcessGroup).values()),
        *(vars(torch.UntypedStorage).values()),
        *(torch.Tensor.to, torch.Tensor.pin_memory, torch.Tensor.is_pinned),
        *(torch.accelerator.current_stream, torch.accelerator.is_available, torch._C._get_accelerator),
        *(len(optimizer._global_optimizer_pre_hooks), gc.isenabled(), dist.is_initialized()),
    )


def test_torch_is_left_as_it_was():
    before = patched()
    record(train())

    assert patched() == before


def test_torch_is_left_as_it_was_after_an_exception():
    class MineError(Exception):
        pass

    models = []

    def run(recorder):
        models.append(nn.Sequential(Matrix(), Matrix()))
        recorder.watch(models[0][1], "fails")
        fully_shard(models[0])
        models[0][1].register_forward_hook(fail)
        models[0](torch.ones(2, 4))

    def fail(*_):
        raise MineError

    before = patched()
    with pytest.raises(MineError):
        record(run)

    assert patched() == before
    assert isinstance(models[0], FSDPModule)
    assert [hook for hook in models[0][1]._forward_hooks.values() if hook is not fail] == []
    assert record(train()) == record(train())


class Pair(tuple):
    """An output of a class that is made in its own way."""

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


def test_an_output_of_a_class_of_its_own_is_watched():
    class Two(nn.Linear):
        def forward(self, x):
            return Pair(super().forward(x), None)

    def run(recorder):
        model = nn.Sequential(Two(4, 4))
        recorder.watch(model[0], "0")
        out, _ = model(torch.ones(2, 4))
        out.sum().backward()
        return model

    assert [line.split()[-2] for line in record(run, world_size=2) if "WD 0" in line] == ["FWD", "BWD"]
