"""A simulation says which of the settings that were given change nothing, and why."""

import json
from dataclasses import astuple, replace
from html import escape

import pytest
from hypothesis import Phase, given, settings

from fsdp_sim import Cluster, Model, Plan, simulate
from fsdp_sim.engine import jitter
from fsdp_sim.forms import FormState
from fsdp_sim.requests import request_of_texts, resolve, result_of
from fsdp_sim.simulation import Simulation
from fsdp_sim.simulation.without_effect import without_effect
from fsdp_sim.viz.explorer.words import words_html
from tests.laws.draws import alone, requests
from tests.laws.law import Request, simulated

NODE = Cluster("A100", gpus=8)


@pytest.mark.parametrize(("model", "cluster", "plan", "names", "why"), [
    ("gpt2-124m", NODE, Plan(rms_norm="composed"), ["rms_norm"], "for RMSNorm"),
    ("llama3-8b", NODE, Plan(rms_norm="composed"), [], ""),
    ("llama3-8b", NODE, Plan(rms_norm="composed", compile=True), ["rms_norm"], "compiler"),
    ("llama3-8b", NODE, Plan(stack="hf-trainer"), [], ""),
    ("gpt2-124m", NODE, Plan(stack="hf-trainer"), [], ""),  # other kernels or not, time passes between its steps
    ("gpt2-124m", Cluster("A100", gpus=8, bandwidth_gbps=100), Plan(), ["bandwidth_gbps"], "in one node"),
    ("gpt2-124m", Cluster("A100", gpus=16, bandwidth_gbps=100), Plan(), [], ""),
    ("gpt2-124m", NODE, Plan(requires_gradient_sync="last"), ["requires_gradient_sync"], "one micro-batch"),
    ("gpt2-124m", NODE, Plan(requires_gradient_sync="last", grad_accum=2), [], ""),
    ("gpt2-124m", NODE, Plan(torch="2.14"), ["torch"], "what 2.13 does"),
    ("gpt2-124m", Cluster("A100", gpus=1), Plan(separate_reduce_scatter_group=True),
     ["separate_reduce_scatter_group"], "no other"),
    ("gpt2-124m", NODE, Plan(shard_size=8), ["shard_size"], "all GPUs"),
    ("gpt2-124m", NODE, Plan(activation_checkpointing=24), ["activation_checkpointing"], "those without it"),
    ("gpt2-124m", NODE, Plan(expandable_segments=True, param_dtype="bf16"), [], ""),
    ("gpt2-124m", NODE, Plan(api="fsdp1", sharding_strategy="HYBRID_SHARD"), [], ""),
    ("gpt2-124m", NODE, Plan(api="fsdp1", activation_checkpointing="full", use_reentrant=True), ["use_reentrant"],
     "again is frozen"),
    ("gpt2-124m", NODE, Plan(api="fsdp1", activation_checkpointing="full", use_reentrant=True, lora_rank=8),
     ["use_reentrant"], "those of False"),
])  # fmt: skip
def test_what_changes_nothing_is_named_with_the_reason(model, cluster, plan, names, why) -> None:
    found = simulate(model, cluster, plan).without_effect
    assert list(found) == names
    assert all(f".{name}=" in sentence and why in sentence for name, sentence in found.items())


@pytest.mark.parametrize(("config", "seq_len", "noted"), [
    ({"max_position_embeddings": 2048}, 4096, True),
    ({"max_position_embeddings": 2048}, 2048, False),
    ({}, 4096, False),
    ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 4096, False),
    ({"max_position_embeddings": 2048, "rope_parameters": {"full_attention": {"type": "linear"}}}, 4096, False),
    ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 4096, True),
])  # fmt: skip
def test_a_sequence_longer_than_rotary_positions_were_made_for_is_remarked_on(tmp_path, config, seq_len, noted) -> None:
    of = {"model_type": "llama", "num_hidden_layers": 2, **config}
    (tmp_path / "config.json").write_text(json.dumps(of))
    texts = {"model_file": str(tmp_path), "gpu": "A100", "gpus": "8", "seq_len": str(seq_len)}

    said = f"Plan.seq_len is {seq_len}, and llama is for sequences of at most 2048"
    for notes in (
        simulate(Model.from_config(of), NODE, Plan(seq_len=seq_len)).notes,
        result_of(sim := (job := resolve(request_of_texts(texts))).simulate(), notes=job.notes_of(sim)).notes,
    ):
        assert any(note.startswith(said) for note in notes) is noted


@pytest.mark.parametrize(("gpu", "plan", "says"), [
    ("A100", Plan(grad_accum=2, requires_gradient_sync=False), "Plan.requires_gradient_sync=False: no micro-batch"),
    ("A100", Plan(reshard_after_backward=False), "the next step computes with the old ones"),
    ("A100", Plan(api="fsdp1", cpu_offload=True, grad_accum=2), "each micro-batch replaces those of the one before"),
    ("A100", Plan(stack="hf-trainer", grad_accum=2), "transformers' Trainer reduces gradients with the last"),
    ("A100", Plan(stack="hf-trainer", grad_accum=2, requires_gradient_sync="last"), ""),
    ("V100", Plan(), "V100-SXM2-32GB has no bf16, and gathers and compute are in fp32; its peak in fp16 is"),
    ("V100", Plan(param_dtype="fp16"), ""),
    ("A100", Plan(grad_accum=2, requires_gradient_sync="last"), ""),
])  # fmt: skip
def test_what_trains_wrongly_or_far_below_the_gpu_is_said(gpu, plan, says) -> None:
    notes = simulate("gpt2-124m", Cluster(gpu, gpus=8), plan).notes
    assert sum(says in note for note in notes) == (1 if says else 0), notes


@pytest.mark.parametrize(("model", "plan", "says"), [
    ("mixtral-8x7b", {"fp8": "rowwise"}, "the 8 experts of a layer (89% of the parameters) are one"),
    ("mixtral-8x7b", {"lora_rank": 8}, "are one tensor, which has no adapters (peft's target_parameters"),
    ("mixtral-8x7b", {"lora_rank": 8, "experts_impl": "loop"}, "adapts the linear layers of the 8 experts of a layer"),
    ("mixtral-8x7b", {"lora_rank": 8, "base_quantization": "nf4"}, "not the router, which peft adapts too"),
    ("mixtral-8x7b", {"lora_rank": 8, "experts_impl": "loop", "lora_targets": ("wq", "wv")}, ""),
    ("mixtral-8x7b", {}, ""),
    ("llama3-8b", {"fp8": "rowwise", "compile": True}, ""),
])  # fmt: skip
def test_that_fp8_and_adapters_do_not_reach_experts_is_said(model, plan, says) -> None:
    few = replace(Model.preset(model), n_layer=2)
    sim = simulate(few, Cluster("H100", gpus=8), Plan(param_dtype="bf16", **plan))
    said = [note for note in sim.notes if "experts of a layer (" in note]
    assert [says in note for note in said] == [True] * bool(says)


@pytest.mark.parametrize("plan", [
    Plan(activation_checkpointing=24), Plan(wrap=1), Plan(experts_impl="loop"),
])  # fmt: skip
def test_one_gpu_is_no_reason_for_what_is_not_about_communication(plan) -> None:
    notes = simulate("gpt2-124m", Cluster("A100", gpus=1), plan).notes
    assert ["are those" in note for note in notes] == [True]


def test_of_many_micro_batches_two_tell_what_has_an_effect() -> None:
    """The whole step is simulated for what has none in two: as it is, and without."""
    micro_batches: list[int] = []

    def again(cluster: Cluster, plan: Plan) -> Simulation:
        micro_batches.append(plan.grad_accum)
        return simulate("gpt2-124m", cluster, plan)

    plan = Plan(grad_accum=9, param_dtype="bf16", seq_len=512, shard_size=8)
    assert list(without_effect(NODE, plan, again)) == ["shard_size"]
    assert micro_batches.count(9) == 2


def test_reductions_in_bf16_alone_are_said_to_leave_compute_in_fp32() -> None:
    """What a user of ``--reduce-dtype bf16`` may take for mixed precision; torch's semantics stay."""
    asked = {"model": "gpt2-124m", "gpu": "A100", "gpus": "8", "reduce_dtype": "bf16"}
    (note,) = (note for note in simulate("gpt2-124m", NODE, Plan(reduce_dtype="bf16")).notes if "fp32" in note)
    assert "Compute and gathers are in fp32" in note
    assert "param_dtype='bf16' computes in it" in note
    job = resolve(request_of_texts(asked))
    assert note in job.notes_of(job.simulate())
    job = resolve(request_of_texts(asked | {"param_dtype": "bf16"}))
    assert not any("Compute and gathers" in note for note in job.notes_of(job.simulate()))


def test_what_is_left_out_is_not_named() -> None:
    sim = simulate("llama3-8b", NODE)
    assert sim.notes == []
    assert str(sim) == repr(sim)
    noted = simulate("llama3-8b", replace(NODE, inter="IB NDR x8"))
    assert str(noted) == f"{noted!r}\n{noted.notes[0]}"


def test_a_request_names_no_setting_that_was_chosen_for_it() -> None:
    job = resolve(
        request_of_texts({"model": "gpt2-124m", "gpu": "A100", "gpus": "8", "torch": "2.15", "shard_size": "8"})
    )
    sim = job.simulate()
    assert {"reduce_dtype", "shard_size"} == set(sim.without_effect)
    notes = result_of(sim, notes=job.notes_of(sim), explained=False).notes
    assert any("shard_size=8" in note for note in notes)
    assert not any("reduce_dtype='fp32'" in note for note in notes)


def test_ranks_that_differ_change_nothing_of_the_notes() -> None:
    plan = Plan(requires_gradient_sync="last")
    sim = simulate("gpt2-124m", NODE, plan, skew=lambda seconds, ranks: jitter(seconds, ranks, sigma=0.1))
    assert sim.notes == simulate("gpt2-124m", NODE, plan).notes


def all_of(sim: Simulation) -> list[object]:
    """What one may read off it: the program, each operation's times, memory, rates."""
    columns = sim.run.columns
    return [
        sim.program.instructions, list(columns.start_s), list(columns.end_s), astuple(sim.exposure),
        sim.memory.peak_by_category, sim.memory.reserved_bytes, sim.host_memory_bytes, sim.step_time_s, sim.mfu,
    ]  # fmt: skip


@pytest.mark.parametrize("where", [lambda request: request, alone], ids=["anywhere", "on one GPU"])
def test_a_setting_has_a_note_exactly_where_nothing_changes_without_it(where) -> None:
    @settings(phases=[Phase.reuse, Phase.generate], derandomize=True)
    @given(requests())
    def holds(drawn: Request) -> None:
        request = where(drawn)
        asked = simulated(request)
        usual = Plan(stack=request.plan.stack)
        for name in request.plan.unlike_its_stack:
            default = "plain" if name == "stack" else getattr(usual, name)
            try:
                other = simulated(request._replace(plan=replace(request.plan, **{name: default})))
            except ValueError:  # another setting needs it
                continue
            changed = all_of(other) != all_of(asked)
            assert changed != (name in asked.without_effect), f"{name} of {request}"

    holds()


def test_what_a_traced_model_was_traced_with_is_not_taken_for_a_setting() -> None:
    torch = pytest.importorskip("torch")
    from fsdp_sim.measure import model_from_module
    from labs.model.gpt import GPT, GPTConfig

    tokens = torch.zeros(2, 32, dtype=torch.long)
    module = GPT(GPTConfig(n_layer=2, n_head=4, d_model=64, vocab_size=300, context=32))
    traced = model_from_module(module, (tokens, tokens), progress=False)

    one = simulate(traced, Cluster("A100", gpus=1), Plan(micro_batch=7, seq_len=77, cross_entropy="fused"))
    assert [note.split(": ")[1] for note in one.notes] == [
        "a traced model has that of its example inputs.",
        "a traced model has that of its example inputs.",
        "a traced model computes what its module and its loss do.",
    ]
    eager, compiled = simulate(traced, NODE), simulate(traced, NODE, Plan(compile=True))
    assert compiled.step_time_s < eager.step_time_s
    assert compiled.peak_memory_bytes == eager.peak_memory_bytes
    assert eager.notes == []
    assert ["changes no byte" in note for note in compiled.notes] == [True]


@pytest.mark.parametrize("words", [
    "model=gpt2-124m gpu=H100 gpus=8 cpu_offload=true", "model=gpt2-124m gpu=H100 gpus=8 bandwidth_gbps=100",
    "model=gpt2-124m gpu=MI355X gpus=8 param_dtype=bf16",
])  # fmt: skip
def test_a_request_and_the_explorer_say_all_that_a_simulation_notes(words) -> None:
    state = FormState.read(words)
    sim = state.simulate()
    job = resolve(request_of_texts(dict(state.texts)))
    noted = [note for note in sim.notes if note not in [sim.without_effect.get(name) for name in job.chosen]]
    assert noted
    assert job.notes_of(sim) == state.notes_of(sim) == [*job.notes, *noted]
    shown = words_html(state, sim, sim.explain())
    assert all(escape(note) in shown for note in noted)
