"""What the copy button gives is run: the Python predicts the same step, the torch code trains under torchrun."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_sim.forms import FormState
from fsdp_sim.forms.python_code import python_code, torchrun_command
from fsdp_sim.forms.torch_code import torch_code
from tests.some import some
from tests.warm import ADDRESS, CLIENT

TINY = "n_layer=3 d_model=32 heads=4 d_ffn=64 vocab=96 gpu=cpu gpus=2 seq_len=16 micro_batch=2"
PLANS = [
    "gpus=1",
    "forward_prefetch=1 backward_prefetch=2 param_dtype=bf16 reduce_dtype=fp32",
    "gpus=4 shard_size=2 grad_accum=2 requires_all_reduce=last reshard_after_forward=false kv_heads=2 positions=rope",
    "reshard_after_forward=2 activation_checkpointing=full cpu_offload=true ffn_type=swiglu norm=rmsnorm bias=false",
    "activation_checkpointing=selective reduce_scatter_max_input_buffers=2 separate_reduce_scatter_group=true",
    "activation_checkpointing=addmm,scaled_dot_product_attention",
    "activation_checkpointing=2 wrap=layers.1,layers.2 tied_embeddings=false grad_accum=2 requires_gradient_sync=last",
    "wrap=root optimizer=sgd gradient_divide_factor=4 causal=false is_last_backward=last reshard_after_backward=last",
    "wrap=5000 optimizer=sgd_momentum ffn_type=relu n_encoder_layer=1",
    "api=fsdp1 forward_prefetch=true backward_prefetch=BACKWARD_POST limit_all_gathers=false",
    "api=fsdp1 sharding_strategy=SHARD_GRAD_OP param_dtype=bf16 grad_accum=2 requires_gradient_sync=last",
    "api=fsdp1 sharding_strategy=HYBRID_SHARD shard_size=2 gpus=4 backward_prefetch=none",
    "api=ddp bucket_cap_mb=1 grad_accum=2 requires_gradient_sync=last",
    "api=zero1 optimizer=sgd_momentum",
    "api=zero2 bucket_cap_mb=1",
]
STATES = [
    "model=llama3-8b gpu=H100 gpus=64 seq_len=2048 latency_us=5 shard_size=8 straggler=1.2 jitter=0.02",
    "model=gpt2-124m gpu=V100 gpus=8 param_dtype=fp16 api=fsdp1 forward_prefetch=true",
    "model=gpt2-350m gpu=A100 gpus=32 inter='400 Gb/s RoCE per GPU' slow_node=2 wrap=layers.1,layers.2",
    "model=gpt2-124m gpu=A100 gpus=8 stack=llm-foundry cross_entropy=torch",
    "model_name='a \\'quoted\\' \"name\"' " + TINY,
]


def state(words: str) -> FormState:
    """The tiny model with some words replaced."""
    return FormState.read(TINY).with_texts(FormState.read(words).texts)


@pytest.mark.parametrize("line", [*STATES[:4], TINY])
def test_the_python_predicts_the_same_step(line: str) -> None:
    asked = FormState.read(line)
    names: dict[str, object] = {}
    code = python_code(asked).replace("sim.show()", "sim")
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)
    assert names["sim"].step_time_s == asked.simulate().step_time_s  # type: ignore[attr-defined]
    assert names["sim"].peak_memory_bytes == asked.simulate().peak_memory_bytes  # type: ignore[attr-defined]


def test_the_python_of_a_cluster_file_reads_the_file(tmp_path: Path) -> None:
    from fsdp_sim import Cluster

    Cluster("H100", gpus=16).to_file(tmp_path / "mine.toml")
    asked = FormState.read(f"model=gpt2-124m cluster={tmp_path / 'mine.toml'} gpus=32 bandwidth_gbps=50")
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(python_code(asked).replace("sim.show()", "sim"), names)
    assert names["sim"].step_time_s == asked.simulate().step_time_s  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("words", some(PLANS, first=4))
def test_the_torch_code_trains_under_its_torchrun_command(words: str, tmp_path: Path, warm_server: str) -> None:
    asked = state(words)
    (tmp_path / "train.py").write_text(torch_code(asked))
    command = torchrun_command(asked).split()
    assert command[0] == "torchrun"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    # Where main() ends in a forked rank, DDP's destructor can wait for gloo's threads, which wait for the GIL.
    client = [] if asked.texts.get("api") == "ddp" else [sys.executable, "-c", CLIENT]
    ran = subprocess.run(
        [*client, sys.executable, "-m", "torch.distributed.run", *command[1:]], cwd=tmp_path,
        capture_output=True, text=True, timeout=300, env=environment | {ADDRESS: warm_server},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", ran.stdout)]
    assert len(losses) == 3
    assert all(3 < loss < 7 for loss in losses)  # of 96 words chance is 4.6


@pytest.mark.parametrize("words", ["", "ffn_type=swiglu bias=false norm=rmsnorm positions=learned kv_heads=2",
                                   "tied_embeddings=false positions=rope max_seq_len=32"])  # fmt: skip
def test_the_model_of_the_torch_code_has_as_many_parameters_as_the_simulators(words: str) -> None:
    asked = state(words)
    names: dict[str, object] = {"__name__": "train"}
    exec(torch_code(asked), names)
    model = names["GPT"]()  # type: ignore[operator]
    assert sum(p.numel() for p in model.parameters()) == asked.simulate().workload.param_count


def test_every_setting_of_a_plan_is_a_call_of_torch() -> None:
    code = torch_code(FormState.read(
        "model=llama3-8b gpu=H100 gpus=64 shard_size=8 forward_prefetch=2 backward_prefetch=1 cpu_offload=true "
        "param_dtype=bf16 reduce_dtype=fp32 activation_checkpointing=full compile=true reshard_after_forward=4"
    ))  # fmt: skip
    for call in (
        "init_device_mesh(device.type, (world_size // 8, 8)", "MixedPrecisionPolicy(param_dtype=torch.bfloat16",
        "reduce_dtype=torch.float32", "CPUOffloadPolicy(", "reshard_after_forward=4", "checkpoint_wrapper(layer",
        "unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + 2])", "layer.compile()", "'nccl'",
        "unit.set_modules_to_backward_prefetch(units[max(i - 1, 0) : i][::-1])",
    ):  # fmt: skip
        assert call in code, call


def test_several_nodes_meet_at_the_first() -> None:
    command = torchrun_command(FormState.read("model=gpt2-124m gpu=H100 gpus=32"))
    assert "--nnodes=4 --nproc-per-node=8" in command
    assert "--rdzv-endpoint=$NODE_0:29500" in command
