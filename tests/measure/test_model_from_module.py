"""The work of any module: what torch runs, whose it is, and what it keeps, without a weight in memory."""

from __future__ import annotations

import dataclasses
import functools
import resource
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from fsdp_sim.cost import Kernel, Work, Workload, workload
from fsdp_sim.engine.memory import memory
from fsdp_sim.measure import model_from_module
from fsdp_sim.mini import versions
from fsdp_sim.schedule import build
from fsdp_sim.simulation import simulate
from fsdp_sim.spec import Cluster, Model, Plan
from labs.model.gpt import GPT, Block, GPTConfig
from tests.measure.llama import Llama

trace = functools.partial(model_from_module, progress=False)
BF16 = Plan(param_dtype="bf16")
GPT_CONFIG = GPTConfig(n_layer=3, n_head=4, d_model=64, vocab_size=300, context=32)
TOKENS = torch.zeros(2, 32, dtype=torch.long)


def gpt(**changes: Any) -> GPT:
    return GPT(dataclasses.replace(GPT_CONFIG, **changes))


def kernels(work: Work | Workload, kind: str = "") -> list[Kernel]:
    segments = work.work.values() if isinstance(work, Workload) else [work]
    return [k for w in segments for k in (*w.forward, *w.backward) if kind in ("", k.kind)]


def flops(work: Workload) -> float:
    return sum(w.forward_flops + w.backward_flops for w in work.work.values())


def shapes_of(work: Work, kind: str) -> list[tuple[int, ...]]:
    return [k.shape for k in kernels(work, kind) for _ in range(k.count)]


# ---------------------------------------------------------------------- FLOPs


def test_matmuls_of_a_linear_layer_are_one_forward_and_two_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    work = trace(model, torch.zeros(10, 8), wrap=("0", "1")).work
    assert shapes_of(work["1"], "matmul") == [(1, 10, 4, 16), (1, 4, 16, 10), (1, 10, 16, 4)]
    assert shapes_of(work["0"], "matmul") == [(1, 10, 16, 8), (1, 16, 8, 10)]  # its input needs no gradient
    assert work["1"].forward[0].bytes == 4 * (10 * 16 + 16 * 4 + 10 * 4)


def test_flops_are_those_that_torch_counts_in_a_real_step() -> None:
    model = gpt()
    with FlopCounterMode(display=False) as counter:
        model(TOKENS, TOKENS).backward()
    traced = trace(model, (TOKENS, TOKENS))
    attention = sum(k.flops * k.count for k in kernels(traced, "attention"))
    # It does not know the CPU's attention; from torch 2.15 on it does, but not that it is causal, which halves it.
    counted = flops(traced) + attention if versions.TORCH >= (2, 15) else flops(traced) - attention
    assert counted == counter.get_total_flops()


def test_causal_attention_is_half_of_the_square() -> None:
    class Attend(nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.scale, self.causal = nn.Parameter(torch.ones(1)), causal

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.scale
            return F.scaled_dot_product_attention(x, x, x, is_causal=self.causal)

    x = torch.zeros(2, 4, 128, 16)
    for plan in (None, BF16):  # two kernels of a GPU: memory-efficient and flash
        full, causal = (
            kernels(trace(functools.partial(Attend, causal), x, plan=plan), "attention") for causal in (False, True)
        )
        assert [k.flops for k in full] == [4 * 2 * 4 * 128**2 * 16, 2.5 * 4 * 2 * 4 * 128**2 * 16]
        assert [2 * k.flops for k in causal] == [k.flops for k in full]
        assert full[0].shape == (2, 4, 128, 16)


def test_a_convolution_is_the_matmul_of_its_places_taps_and_channels() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2)
            self.up, self.head = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Linear(4, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu(self.second(F.relu(self.first(x))))
            return self.head(self.up(x).mean((2, 3)))

    x = torch.randn(2, 3, 16, 16)
    model = Net()
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    traced = trace(model, x, wrap=("first", "second", "up", "head"))
    assert flops(traced) == counter.get_total_flops()
    assert shapes_of(traced.work["first"], "matmul")[0] == (1, 2 * 16 * 16, 8, 27)
    assert shapes_of(traced.work["second"], "matmul")[0] == (1, 2 * 7 * 7, 8, 72)
    assert traced.tokens == 2
    grouped = trace(lambda: nn.Conv2d(8, 8, 3, groups=2), torch.zeros(2, 8, 9, 9), wrap="root").work["root"]
    assert shapes_of(grouped, "matmul") == [(2, 98, 4, 36), (2, 4, 36, 98)]


def test_kinds_of_kernels_and_which_a_compiler_fuses() -> None:
    work = trace(gpt, (TOKENS, TOKENS), plan=BF16).work
    assert {k.kind for k in work["embed"].forward} == {"embedding", "memory"}
    assert {k.kind for k in work["layers.0"].forward} == {"matmul", "attention", "memory"}
    assert {k.kind for k in work["head"].backward} >= {"cross_entropy", "matmul"}
    assert {k.fusable for k in kernels(work["layers.0"], "memory")} == {True}
    assert {k.dtype for k in kernels(work["layers.0"])} == {"bf16"}
    residual = [k for k in work["layers.0"].forward if k.bytes == 3 * TOKENS.numel() * 64 * 2]
    assert sum(k.count for k in residual) == 2  # reads two, writes one


def test_a_written_block_moves_what_torchs_operators_move() -> None:
    """Gradients of biases and of what norms learn, joined queries, keys and values: all of them are there."""
    written = workload(Model.preset("gpt2-124m"), dataclasses.replace(BF16, seq_len=1024)).work["layers.0"]
    tokens = torch.zeros(1, 1024, dtype=torch.long)
    traced = trace(lambda: GPT(GPTConfig.preset("gpt2", n_layer=1)), (tokens, tokens), plan=BF16).work["layers.0"]
    for ours, torchs in ((written.forward, traced.forward), (written.backward, traced.backward)):
        of_ours, of_torchs = ([k for k in some if k.kind == "memory"] for some in (ours, torchs))
        assert sum(k.count for k in of_ours) == pytest.approx(sum(k.count for k in of_torchs), abs=1)
        moved = sum(k.bytes * k.count for k in of_torchs)
        assert sum(k.bytes * k.count for k in of_ours) == pytest.approx(moved, rel=0.05)


# ---------------------------------------------------------------------- whose work it is


def test_every_unit_has_its_own_forward_and_backward_and_equal_blocks_share_one_work() -> None:
    traced = trace(gpt, (TOKENS, TOKENS))
    assert [u.name for u in traced.units] == ["root", "layers.0", "layers.1", "layers.2"]
    assert list(traced.work) == ["embed", "head", "layers.0", "layers.1", "layers.2"]
    assert traced.work["layers.0"] is traced.work["layers.1"]
    assert traced.work["layers.1"].backward_flops == pytest.approx(2 * traced.work["layers.1"].forward_flops, rel=0.1)
    assert {name for name, w in traced.work.items() if w.is_block} == {"layers.0", "layers.1", "layers.2"}
    assert traced.param_count == gpt().num_params()
    assert traced.model_flops_per_token == flops(traced) / 64


def test_a_tied_weight_is_used_by_both_ends_and_its_gradient_is_begun_at_the_head() -> None:
    tied, untied = trace(gpt, (TOKENS, TOKENS)), trace(lambda: gpt(tied=False), (TOKENS, TOKENS))
    uses = {p.name: p.used_by for p in tied.units[0].params}
    assert uses == {
        "tok_emb.weight": ("embed", "head"), "pos_emb.weight": ("embed",), "norm.weight": ("head",),
        "norm.bias": ("head",),
    }  # fmt: skip
    table = 300 * 64 * 4
    more = tied.work["embed"].backward_temporary_bytes - untied.work["embed"].backward_temporary_bytes
    assert more == table  # the embedding's part comes on top of the head's
    assert tied.work["layers.1"] == untied.work["layers.1"]  # and in between it is the unit's, not the blocks'


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    def adapted() -> nn.Module:
        model = gpt()
        model.requires_grad_(False)
        for block in model.layers:
            block.mlp.proj.weight.requires_grad_(True)
        return model

    frozen, free = (trace(one, (TOKENS, TOKENS)).work["layers.1"] for one in (adapted, gpt))
    assert len(shapes_of(free, "matmul")) - len(shapes_of(frozen, "matmul")) == 3  # of qkv, attention's proj and fc
    assert frozen.forward == free.forward
    assert frozen.saved_bytes < free.saved_bytes


def test_a_module_called_several_times_has_the_work_of_all_calls() -> None:
    class Looped(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.layers, self.times = nn.ModuleList([nn.Linear(8, 8)]), times

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                x = self.layers[0](x).tanh()
            return x

    once, thrice = (trace(functools.partial(Looped, n), torch.zeros(4, 8)) for n in (1, 3))
    assert thrice.work["layers.0"].forward_flops == 3 * once.work["layers.0"].forward_flops
    assert len(thrice.units) == 2


def test_units_inside_units_keep_their_work_apart() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.inner, self.after = nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.inner(self.before(x)))

    traced = trace(Outer, torch.zeros(3, 4), wrap=("inner",))
    assert [w.forward_flops for w in traced.work.values()] == [2 * 3 * 4 * 4, 2 * 3 * 6 * 2, 2 * 3 * 4 * 6]
    nested = trace(lambda: nn.Sequential(Outer()), torch.zeros(3, 4), wrap=("0", "0.inner"))
    assert {name: w.forward_flops for name, w in nested.work.items() if w.forward_flops} == {
        "0.embed": 96.0, "0.head": 72.0, "0.inner": 144.0,
    }  # fmt: skip


def test_a_unit_that_does_not_run_is_named() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](x)

    with pytest.warns(UserWarning, match=r"1 of 3 units of Half did not run with these inputs \(layers\.0\)"):
        traced = trace(Half, torch.zeros(1, 4))
    assert [u.name for u in traced.units] == ["root", "layers.1", "layers.0"]
    assert traced.work["layers.0"] == Work()


# ---------------------------------------------------------------------- what is wrapped


@pytest.mark.parametrize(
    "wrap",
    [
        "block", ("layers.0", "layers.1", "layers.2"), {Block}, ModuleWrapPolicy({Block}),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        lambda module: isinstance(module, Block), 49_000,
    ],
    ids=["block", "names", "classes", "policy", "fsdp1-policy", "function", "size"],
)  # fmt: skip
def test_ways_to_say_that_blocks_are_units(wrap: Any) -> None:
    assert [u.name for u in trace(gpt, (TOKENS, TOKENS), wrap=wrap).units[1:]] == ["layers.0", "layers.1", "layers.2"]


def test_a_number_means_blocks_as_for_a_model_by_its_dimensions() -> None:
    for number in (1, 1_000, 49_000, 10**9):
        units = [u.name for u in trace(gpt, (TOKENS, TOKENS), plan=Plan(wrap=number)).units]
        by_dimensions = Model("gpt", n_layer=3, d_model=64, n_head=2, d_ffn=256, vocab=300)
        assert units == [u.name for u in workload(by_dimensions, Plan(wrap=number)).units]


def test_a_module_that_is_called_as_a_piece_of_the_root_is_a_unit_like_any_other() -> None:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1_000)

    traced = trace(gpt, (TOKENS, TOKENS), wrap=policy)

    assert "head" in [u.name for u in traced.units]
    assert simulate(traced, Cluster("A100", gpus=8), Plan()).step_time_s > 0


def test_without_lists_of_blocks_the_stages_of_a_sequential_are_units() -> None:
    def stage(n: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(n, n, 1), nn.ReLU())

    model = nn.Sequential(nn.Conv2d(3, 4, 1), stage(4), stage(4), nn.Flatten(), nn.Linear(64, 2))
    assert [u.name for u in trace(model, torch.zeros(1, 3, 4, 4)).units] == ["root", "1", "2"]


def test_the_plan_says_what_is_wrapped_unless_told_otherwise() -> None:
    plan = Plan(wrap="root")
    assert len(trace(gpt, (TOKENS, TOKENS), plan=plan).units) == 1
    assert len(trace(gpt, (TOKENS, TOKENS), "block", plan=plan).units) == 4


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        ("blocks", "wrap is 'blocks'; it must be 'block', 'root', a number"),
        (0, "wrap is 0; it must be"),
        ({nn.Conv2d}, r"wrap \(classes Conv2d\) chooses no module of GPT, which is made of"),
        (("layers.7",), "wrap names 'layers.7', not a module of GPT"),
        ((1, 2), "a collection must hold names of modules or classes of modules"),
    ],
)
def test_a_wrap_that_means_nothing_says_so(wrap: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace(gpt, (TOKENS, TOKENS), wrap=wrap)


# ---------------------------------------------------------------------- inputs, outputs, losses


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Flexible(nn.Module):
    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.layers, self.form = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), form

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, extra: dict[str, torch.Tensor] | None = None) -> Any:
        for layer in self.layers:
            x = layer(x) * scale
        if extra is not None:
            x = x + extra["bias"]
        loss = x.square().mean()
        return {
            "tensor": x, "dataclass": Output(x, loss), "dict": {"loss": loss, "x": x}, "tuple": (loss, [x]),
            "nested": {"a": [x, {"b": x}]},
        }[self.form]  # fmt: skip


@pytest.mark.parametrize("form", ["tensor", "dataclass", "dict", "tuple", "nested"])
def test_outputs_of_every_form(form: str) -> None:
    traced = trace(functools.partial(Flexible, form), torch.zeros(4, 8))
    assert traced.work["layers.0"].forward_flops == 2 * 4 * 8 * 8
    assert traced.work["layers.1"].backward_flops == 2 * 2 * 4 * 8 * 8


def test_inputs_of_every_form() -> None:
    x, extra = torch.zeros(4, 8), {"bias": torch.zeros(8)}
    assert trace(Flexible, x) == trace(Flexible, (x,)) == trace(Flexible, {"x": x}) == trace(Flexible, lambda: x)
    assert flops(trace(Flexible, {"x": x, "scale": 2.0, "extra": extra})) == flops(trace(Flexible, x))
    assert trace(Flexible, torch.zeros(4, 8, device="meta")) == trace(Flexible, x)


def test_a_loss_of_ones_own() -> None:
    targets = torch.zeros(4, dtype=torch.long)
    traced = trace(Flexible, torch.zeros(4, 8), loss=lambda out: F.cross_entropy(out, targets))
    assert "cross_entropy" in {k.kind for k in traced.work["head"].forward}
    assert traced.work["head"].logits_bytes >= 4 * 8 * 4
    with pytest.raises(ValueError, match=r"loss returned float32\[4, 8\]; it must return a tensor with one element"):
        trace(Flexible, torch.zeros(4, 8), loss=lambda out: out)


# ---------------------------------------------------------------------- memory


def test_saved_bytes_are_what_autograd_really_saves() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(3)))
    x = torch.randn(16, 32)
    outside = {p.untyped_storage().data_ptr() for p in model.parameters()} | {x.untyped_storage().data_ptr()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
        loss = out.sum()
    traced = trace(model, x, wrap=("0", "1", "2"), loss=torch.sum, device="cpu").work
    assert sum(w.saved_bytes for w in traced.values()) == sum(saved.values()) + loss.nbytes
    assert traced["0"] == dataclasses.replace(
        traced["1"], input_bytes=0, backward=traced["0"].backward,
        backward_temporary_bytes=traced["0"].backward_temporary_bytes,
    )  # fmt: skip


def test_a_gpu_keeps_one_byte_of_a_dropout_mask_and_no_copies_of_a_norm() -> None:
    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64), nn.Dropout(0.1))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x).square()

    rows = 16
    gpu, cpu = (trace(Drop, torch.zeros(rows, 64), plan=BF16, device=d).work["layers.0"] for d in ("gpu", "cpu"))
    # linear's output, one inverse deviation per row, the mask, the output
    assert gpu.saved_bytes == rows * 64 * 2 + rows * 4 + rows * 64 + rows * 64 * 2
    assert cpu.saved_bytes > 2 * gpu.saved_bytes
    assert len(gpu.forward) == 3


def test_the_computes_dtype_is_the_plans_and_the_units_keep_theirs() -> None:
    wide, half = trace(gpt, (TOKENS, TOKENS)), trace(gpt, (TOKENS, TOKENS), plan=BF16)
    assert {p.dtype for u in half.units for p in u.params} == {"fp32"}
    assert half.work["layers.0"].output_bytes * 2 == wide.work["layers.0"].output_bytes == TOKENS.numel() * 64 * 4
    assert half.work["layers.1"].input_bytes == half.work["layers.0"].output_bytes == half.work["embed"].output_bytes


def test_a_checkpoint_of_the_modules_own_computes_again_in_backward() -> None:
    class Again(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.again = again
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.RMSNorm(256), nn.Linear(256, 64)) for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
            return x

    both = [trace(functools.partial(Again, a), torch.zeros(8, 64)) for a in (False, True)]
    assert both[0].model_flops_per_token == both[1].model_flops_per_token
    plain, again = (traced.work["layers.1"] for traced in both)
    assert again.forward_flops == plain.forward_flops
    assert again.saved_bytes < 0.2 * plain.saved_bytes
    assert plain.forward_flops / 4 < again.backward_flops - plain.backward_flops <= plain.forward_flops


def test_a_program_of_the_units_runs_and_has_a_peak() -> None:
    traced = trace(gpt, (TOKENS, TOKENS), plan=BF16)
    assert memory(build(traced.units, BF16, 8), traced).peak_bytes > sum(w.saved_bytes for w in traced.work.values())


def test_a_model_of_seventy_billion_parameters_takes_no_memory() -> None:
    tokens = torch.zeros(1, 4096, dtype=torch.long)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    traced = trace(lambda: Llama(Model.preset("llama3-70b")), (tokens, tokens), plan=BF16)
    assert traced.param_count == 70_553_706_496
    assert len(traced.units) == 81
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB: one GiB


def test_the_given_module_is_left_as_it_was() -> None:
    model = gpt()
    before = {name: (id(p), p.dtype, p.device) for name, p in model.named_parameters()}
    trace(model, (TOKENS, TOKENS), plan=BF16)
    assert {name: (id(p), p.dtype, p.device) for name, p in model.named_parameters()} == before
    assert all(p.grad is None for p in model.parameters())
    assert not model._forward_hooks
    model(TOKENS)
    with torch.device("meta"):
        meta = gpt()
    assert trace(meta, (TOKENS, TOKENS)) == trace(model, (TOKENS, TOKENS)) == trace(gpt, (TOKENS, TOKENS))


# ---------------------------------------------------------------------- errors


class Picky(nn.Module):
    """Looks at values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Faulty(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.zeros(3, 3)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), Picky()), ValueError, r"1 \(Picky\) asks for the values of a tensor"),
        (lambda: nn.Sequential(nn.Flatten()), ValueError, "Sequential has no parameter that requires gradients"),
        (lambda: nn.Linear(4, 4).requires_grad_(False), ValueError, "Linear has no parameter that requires gradients"),
        (lambda: torch.zeros(1), TypeError, r"build returned a \w*Tensor; it must return an nn.Module"),
        ("gpt2", TypeError, "build is a str; pass a function that returns an nn.Module"),
        (lambda: nn.Sequential(nn.Linear(4, 4), Faulty()), RuntimeError, "must have same reduction dim"),
        (lambda: nn.Sequential(nn.GRU(4, 4)), ValueError, "0 of Sequential is nn.GRU, .* over nn.GRUCell"),
    ],
    ids=["values", "no parameters", "frozen", "no module", "no function", "fault", "recurrence"],
)
def test_what_cannot_be_traced_is_named_with_a_remedy(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        trace(model, torch.zeros(2, 4), wrap="root")
    if caught.type is RuntimeError:
        assert caught.value.__notes__ == ["while 1 (Faulty) of Sequential was traced with inputs ((float32[2, 4]), {})"]


def test_an_output_that_depends_on_no_parameter_is_refused() -> None:
    class Detached(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).detach()

    with pytest.raises(ValueError, match=r"float32\[2, 4\], holds no tensor that depends on a parameter; pass loss="):
        trace(lambda: Detached(4, 4), torch.zeros(2, 4), wrap="root")
    with pytest.raises(ValueError, match="the loss of Detached does not depend on any parameter"):
        trace(lambda: Detached(4, 4), torch.zeros(2, 4), wrap="root", loss=torch.sum)


def test_inputs_without_a_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match=r"example_inputs holds float32\[0, 4\], in which there is nothing"):
        trace(lambda: nn.Linear(4, 4), torch.zeros(0, 4), wrap="root")
    with pytest.raises(ValueError, match="example_inputs holds no tensor of at least one dimension"):
        trace(gpt, {"idx": 3})


def test_a_build_that_needs_values_gets_them() -> None:
    class Scheduled(nn.Module):
        """Stochastic depth, as vision transformers set it up."""

        def __init__(self) -> None:
            super().__init__()
            self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in self.rates)
            self.layers[2].weight = self.layers[0].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for rate, layer in zip(self.rates, self.layers, strict=True):
                x = x + rate * layer(x)
            return x

    traced = trace(Scheduled, torch.zeros(2, 4))
    assert len(traced.units) == 4
    assert traced.param_count == 2 * 16 + 3 * 4  # what is tied stays so


# ---------------------------------------------------------------------- Hugging Face


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="needs transformers (pip install transformers)")


def test_hugging_faces_gpt2_is_the_gpt_of_its_dimensions(transformers: Any) -> None:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=300, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    theirs = trace(lambda: transformers.GPT2LMHeadModel(config), {"input_ids": TOKENS, "labels": TOKENS}, plan=BF16)
    ours = trace(lambda: gpt(n_layer=2), (TOKENS, TOKENS), plan=BF16)
    assert theirs.param_count == ours.param_count
    assert theirs.model_flops_per_token == ours.model_flops_per_token
    assert [u.name for u in theirs.units] == ["root", "transformer.h.0", "transformer.h.1"]
    wte = next(p for p in theirs.units[0].params if p.name == "transformer.wte.weight")
    assert wte.used_by == ("embed", "head")


@pytest.mark.parametrize("name", ["llama-checkpointed", "t5", "vit", "resnet"])
def test_hugging_faces_models_trace(transformers: Any, name: str) -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    text = {"input_ids": TOKENS, "labels": TOKENS, "attention_mask": torch.ones_like(TOKENS)}
    image = {"pixel_values": torch.zeros(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.long)}
    t5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "decoder_start_token_id": 0}
    kind, config, inputs, units = {
        "llama-checkpointed": ("LlamaForCausalLM", transformers.LlamaConfig(**small, use_cache=False), text, 3),
        "t5": ("T5ForConditionalGeneration", transformers.T5Config(**t5), text, 5),
        "vit": ("ViTForImageClassification", transformers.ViTConfig(**small, image_size=32), image, 3),
        "resnet": (
            "ResNetForImageClassification",
            transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]), image, 3,
        ),
    }[name]  # fmt: skip

    def make() -> nn.Module:
        model = getattr(transformers, kind)(config)
        if name == "llama-checkpointed":
            model.activation_checkpointing_enable()
        return model

    traced = trace(make, inputs, plan=BF16)
    assert len(traced.units) == units
    assert all(traced.work[u.name].forward_flops > 0 for u in traced.units[1:])
    assert all(traced.work[u.name].backward_flops > 0 for u in traced.units[1:])
    memory(build(traced.units, BF16, 2), traced)


# ---------------------------------------------------------------------- experts, and what cannot be priced


def mixtral(top: int) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM  # slow to import

    config = MixtralConfig(
        num_hidden_layers=2, hidden_size=1024, intermediate_size=3584, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=32000, num_local_experts=8, num_experts_per_tok=top,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def deepseek(top: int) -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        num_hidden_layers=3, hidden_size=1024, intermediate_size=3072, moe_intermediate_size=512, vocab_size=32000,
        num_attention_heads=8, num_key_value_heads=8, n_routed_experts=16, num_experts_per_tok=top, n_group=2,
        topk_group=2, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=256, kv_lora_rank=128,
        qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def active_params(build: Callable[[], nn.Module], experts: int, top: int) -> int:
    """Of the matmuls of one token: of the experts only those it is sent to, and no embedding."""
    with torch.device("meta"):
        named = dict(build().named_parameters())
    of_experts = sum(p.numel() for name, p in named.items() if ".experts." in name and "shared" not in name)
    others = sum(
        p.numel()
        for name, p in named.items()
        if p.dim() == 2 and ".experts." not in name and "embed_tokens" not in name
    )
    return others + of_experts * top // experts


@pytest.mark.parametrize(("build", "experts", "top"), [(mixtral, 8, 2), (deepseek, 16, 4)], ids=["mixtral", "deepseek"])
def test_experts_compute_for_the_tokens_that_are_sent_to_them(build: Any, experts: int, top: int) -> None:
    tokens = torch.zeros(1, 64, dtype=torch.long)
    traced = trace(functools.partial(build, top), {"input_ids": tokens, "labels": tokens}, plan=BF16)

    matmuls = sum(k.flops * k.count for w in traced.work.values() for k in w.forward if k.kind == "matmul")
    assert matmuls == pytest.approx(2 * 64 * active_params(functools.partial(build, top), experts, top), rel=0.01)
    backward = sum(k.flops * k.count for w in traced.work.values() for k in w.backward if k.kind == "matmul")
    assert backward == pytest.approx(2 * matmuls, rel=0.01)


@pytest.mark.parametrize(
    ("a", "b", "flops"),
    [
        ((64, 16), (4, 16, 32), 2 * 64 * 16 * 32),  # rows in groups
        ((4, 16, 32), (32, 64), 2 * 16 * 32 * 64),  # columns in groups
        ((16, 64), (64, 32), 2 * 16 * 64 * 32),  # the inner dimension in groups
        ((4, 16, 32), (4, 32, 8), 2 * 4 * 16 * 32 * 8),  # a matmul of each group
    ],
)
def test_a_grouped_matmul_has_the_flops_of_all_its_groups(a: Any, b: Any, flops: float) -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(b, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            offs = None if x.dim() == 3 and self.weight.dim() == 3 else torch.zeros(4, dtype=torch.int32)
            return torch._grouped_mm(x, self.weight, offs)

    (kernel,) = [
        k for k in trace(Grouped, torch.zeros(a, dtype=torch.bfloat16), wrap="root").work["root"].forward
        if k.kind == "matmul"
    ]  # fmt: skip
    assert kernel.flops == flops


class Applied(nn.Module):
    """A linear layer, then a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


@torch.library.custom_op("tests_of_tracing::scan", mutates_args=())
def scan(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)


@scan.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


scan.register_autograd(lambda ctx, grad: grad)


def test_a_function_may_convert_the_model_that_it_builds() -> None:
    """Whatever still refers to a parameter weakly, and with what is tied still tied."""
    seen = []

    def build() -> nn.Module:
        tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        tied[1].weight = tied[0].weight
        seen.append(weakref.ref(tied[0].weight))
        return tied.bfloat16()

    work = trace(build, torch.zeros(2, 4, dtype=torch.bfloat16), wrap="root")
    (root,) = work.units
    assert [(p.name, p.dtype) for p in root.params] == [("0.weight", "bf16"), ("0.bias", "bf16"), ("1.bias", "bf16")]


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (torch.linalg.inv, "aten.linalg_inv_ex.default"),
        (lambda x: torch.fft.fft(x).real, "aten._fft_"),
        (lambda x: torch.cdist(x, x), "aten._cdist_forward.default"),
        (lambda x: scan(x), "tests_of_tracing.scan.default"),
    ],
)
def test_an_operator_whose_work_is_not_known_is_named_and_refused(function: Any, operator: str) -> None:
    with pytest.raises(ValueError, match=f"Applied runs what cannot be priced: in root {operator}") as error:
        trace(lambda: Applied(function), torch.zeros(4, 4), wrap="root")
    assert "register_flop_formula(torch.ops." in str(error.value)


def test_an_operator_whose_flops_are_registered_with_torch_is_priced() -> None:
    register_flop_formula(torch.ops.tests_of_tracing.scan)(lambda x, *_, **__: 1000)
    try:
        work = trace(lambda: Applied(lambda x: scan(x)), torch.zeros(4, 4), wrap="root").work["root"]
    finally:
        del flop_registry[torch.ops.tests_of_tracing.scan]
    assert work.forward_flops == 2 * 4 * 4 * 4 + 1000


def test_quantised_and_fp8_weights_are_refused() -> None:
    class Quantised(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False)
            self.linear = nn.Linear(4, 4)

    for dtype in (torch.uint8, torch.float8_e4m3fn):
        with pytest.raises(
            ValueError, match=f"parameter 'weight' of Quantised is {dtype}: .* not priced yet; take the"
        ):
            trace(functools.partial(Quantised, dtype), torch.zeros(4, 4), wrap="root")


def test_matmuls_in_fp8_are_refused() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x + x.detach().to(torch.float8_e4m3fn).to(torch.float32)

    with pytest.raises(ValueError, match=r"on torch.float8_e4m3fn: what fp8 takes is not priced yet; trace .* in bf16"):
        trace(lambda: Applied(scaled), torch.zeros(4, 4), wrap="root")


def test_checkpointing_by_the_plan_does_not_leave_out_blocks_that_it_cannot_reach() -> None:
    plan, cluster = Plan(activation_checkpointing="full"), Cluster("A100", gpus=8)

    for wrap in ("root", 10**9, ("layers.0", "layers.1")):
        with pytest.raises(ValueError, match=r"Plan\.activation_checkpointing is 'full', but .* part of the root"):
            simulate(trace(gpt, (TOKENS, TOKENS), wrap=wrap), cluster, plan)
    assert simulate(trace(gpt, (TOKENS, TOKENS), wrap="block"), cluster, plan).step_time_s > 0


def test_a_plan_of_another_attention_than_the_trace_is_refused() -> None:
    math, cluster = Plan(attention_impl="math"), Cluster("A100", gpus=8)

    with pytest.raises(
        ValueError, match=r"Plan\.attention_impl is 'math', but GPT was traced with 'sdpa'; give the plan"
    ):
        simulate(trace(gpt, (TOKENS, TOKENS)), cluster, math)
    composed = trace(gpt, (TOKENS, TOKENS), plan=math)
    assert kernels(composed, "attention") == []
    assert simulate(composed, cluster, math).step_time_s > 0
