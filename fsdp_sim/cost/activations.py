"""How many bytes a transformer keeps from forward to backward, and how many it needs for a moment, by segment.

A segment (the embedding, one block, the head with its loss) is written down as a tape: the operations of its forward
in order, each with the tensors it reads, writes and saves for backward. Walking the tape as autograd does, counting
what is alive, gives every figure: no formula has to be trusted that is not a sum over this list.

The tapes are those of torch on a GPU: fused attention (`F.scaled_dot_product_attention`, which keeps its output and
one number per row and head) unless the plan says ``math``, fused norms, no dropout. Sources: ``derivatives.yaml`` of
torch for what each operator saves; Korthikanti et al. 2022 (arXiv 2205.05198) for the idea. Traces of real modules
(`fsdp_sim.measure.model_from_module`) give the same bytes.
"""

from __future__ import annotations

import functools
from typing import Any

from fsdp_sim.cost.tape import Activations, Step, Tape, walk
from fsdp_sim.cost.weights import Weights, weights_of
from fsdp_sim.schedule import DTYPE_BYTES
from fsdp_sim.spec import Model, Plan

__all__ = ["Activations", "block_activations", "embed_activations", "head_activations"]


@functools.lru_cache(maxsize=256)
def block_activations(
    model: Model,
    plan: Plan,
    *,
    cross_attention: bool = False,
    fused_norm: bool = True,
    name: str = "",
    grad: bool = True,
) -> Activations:
    """What one block keeps and needs.

    Args:
        cross_attention: the block also attends to the output of an encoder (of as many tokens).
        fused_norm: an RMS norm is one kernel, as on a GPU; on a CPU torch composes it of eight, and keeps fp32 copies.
        name: of the block, which decides what of it is frozen.
        grad: its input needs a gradient.
    """
    tape = block_tape(model, plan, cross_attention=cross_attention, fused_norm=fused_norm, name=name)
    return walk(tape._replace(input_grad=grad))


@functools.lru_cache(maxsize=256)
def embed_activations(model: Model, plan: Plan, *, fused_norm: bool = True) -> Activations:
    """What looking up tokens (and adding positions) keeps and needs.

    Args:
        fused_norm: see `block_activations`.
    """
    return walk(embed_tape(model, plan, fused_norm=fused_norm)._replace(input_grad=False))


@functools.lru_cache(maxsize=256)
def head_activations(
    model: Model, plan: Plan, *, loss_dtype: str = "fp32", fused_norm: bool = True, grad: bool = True
) -> Activations:
    """What the last norm, the head and the cross-entropy keep and need.

    Args:
        loss_dtype: what the logits are converted to before the cross-entropy.
        fused_norm, grad: see `block_activations`.
    """
    return walk(head_tape(model, plan, loss_dtype, fused_norm=fused_norm)._replace(input_grad=grad))


def block_tape(
    model: Model, plan: Plan, *, cross_attention: bool = False, fused_norm: bool = True, name: str = ""
) -> Tape:
    """Norm, attention, addition, (the same over the encoder's output,) norm, feed-forward, addition."""
    tape = _Writer(model, plan, fused_norm, name)
    d, q, kv, ffn = model.d_model, _q(model), model.kv_heads * model.d_head, model.d_ffn

    def attend(name: str, stream: str, source: str = "") -> str:
        """Attention added to the stream; returns the new stream."""
        tape.norm(stream, f"{name}.n", d, f"{name}_norm")
        if model.bias and not source:  # one matrix; the gradients of q, k and v are joined into one before it
            tape.linear(f"{name}.n", f"{name}.qkv", d, q + 2 * kv, f"{name}.qkv")
            tape.attention((f"{name}.qkv",), f"{name}.o", q, joined=q + 2 * kv)
        else:
            source = source or f"{name}.n"
            rotated = model.positions == "rope" and source != "encoded"
            of_q, of_k, of_v = (f"{name}.{'qkv' if model.bias else of}" for of in ("wq", "wk", "wv"))
            tape.linear(f"{name}.n", f"{name}.q", d, q, of_q, rotated)
            tape.linear(source, f"{name}.k", d, kv, of_k, rotated)
            tape.linear(source, f"{name}.v", d, kv, of_v)
            keys, values = f"{name}.k", f"{name}.v"
            in_groups = not tape.math and (tape.number != 4 or not fused_norm)  # nor does a GPU's attention in fp32
            if kv != q and not in_groups:
                keys, values = tape.repeat(keys, q), tape.repeat(values, q)
            tape.attention((f"{name}.q", keys, values), f"{name}.o", q)
        tape.linear(f"{name}.o", f"{name}.p", q, d, f"{name}.{'proj' if model.bias else 'wo'}")
        tape.add(stream, f"{name}.p", f"{name}.y", d)
        return f"{name}.y"

    stream = attend("attn", "x")
    if cross_attention:
        stream = attend("cross", stream, "encoded")
    tape.norm(stream, "n", d, "ffn_norm")
    if model.ffn_type == "swiglu":
        tape.linear("n", "gate", d, ffn, "ffn.gate")
        tape.pointwise(("gate",), "act", ffn, saves=("gate",))
        tape.linear("n", "up", d, ffn, "ffn.up")
        tape.pointwise(("act", "up"), "inner", ffn, saves=("act", "up"))
    else:
        tape.linear("n", "up", d, ffn, "ffn.up")
        tape.pointwise(("up",), "inner", ffn, saves=("inner",) if model.ffn_type == "relu" else ("up",))
    tape.linear("inner", "down", ffn, d, "ffn.down")
    tape.add(stream, "down", "y", d)
    return tape.done()


def embed_tape(model: Model, plan: Plan, *, fused_norm: bool = True) -> Tape:
    """Rows of a table, and of a table of positions, or the tables that rotate by position, which all blocks share.

    The tokens are data, from outside.
    """
    tape = _Writer(model, plan, fused_norm)
    tape.sizes["x"] = 0
    d, trained = model.d_model, tape.weights.trains("embed.weight")
    whole = model.vocab * d * tape.number * trained
    tied = whole if model.tied_embeddings else 0
    learned = model.positions == "learned"
    # The gradient of a tied table was begun by the head; this part of it is added to that.
    tables = 2 * plan.seq_len * model.d_head * tape.number if model.positions == "rope" else 0
    tape.sizes["tables"] = tables
    table = Step(
        ("x",), ("e" if learned else "y",), ("tables",), scratch=tied, param_bytes=whole - tied, trains=trained
    )
    tape.step(table, {table.writes[0]: tape.bytes_of(d)})
    if learned:
        positions = tape.weights.trains("embed.positions")
        rows = (model.max_seq_len or plan.seq_len) * d * tape.number * positions
        sizes = {"i": 8 * plan.seq_len, "p": plan.seq_len * d * tape.number}
        tape.step(Step(("i",), ("p",), ("i",), param_bytes=rows, trains=positions), sizes)
        tape.add("e", "p", "y", d)
    return tape.done()


def head_tape(model: Model, plan: Plan, loss_dtype: str, *, fused_norm: bool = True) -> Tape:
    """Norm, head, conversion of the logits, log-softmax, mean of the losses."""
    tape = _Writer(model, plan, fused_norm)
    tape.norm("x", "n", model.d_model, "head.norm")
    trained = tape.weights.trains("embed.weight" if model.tied_embeddings else "head.weight")
    tape.matmul("n", "logits", model.d_model * model.vocab * tape.number, model.vocab, trained)
    logits = tape.tokens * model.vocab
    if plan.cross_entropy == "fused":  # keeps the logits and a number per row; its backward writes over the logits
        tape.step(Step(("logits",), ("y",), ("logits", "y"), alias=True), {"y": 4 * tape.tokens})
        return tape.done(logits=frozenset({"logits", "y"}))
    source, wide = "logits", DTYPE_BYTES[loss_dtype]
    if wide != tape.number:
        source = "wide"
        tape.step(Step(("logits",), ("wide",)), {"wide": logits * wide})
    tape.step(Step((source,), ("logp",), ("logp",)), {"logp": logits * wide})
    tape.step(Step(("logp",), ("y",), ("logp",)), {"y": wide})
    return tape.done(logits=frozenset({"logp", "y"}), held=frozenset({"logits"}))


class _Writer:
    """Writes a tape: torch's operators, by what they read, write, save, and make gradients of."""

    def __init__(self, model: Model, plan: Plan, fused_norm: bool = True, name: str = "") -> None:
        self.fused_norm = fused_norm
        self.weights: Weights = weights_of(model, plan).of_block(name) if name else weights_of(model, plan)
        self.math = plan.attention_impl == "math"
        self.scores = 4 * plan.micro_batch * model.n_head * plan.seq_len**2  # bytes, in fp32
        self.tokens = plan.micro_batch * plan.seq_len
        self.number = DTYPE_BYTES[plan.param_dtype or model.dtype]  # bytes of one
        self.model = model
        self.sizes = {"x": self.bytes_of(model.d_model), "encoded": self.bytes_of(model.d_model)}
        self.steps: list[Step] = []

    def bytes_of(self, features: int) -> int:
        return self.tokens * features * self.number

    def step(self, step: Step, sizes: dict[str, int]) -> None:
        self.sizes.update(sizes)
        self.steps.append(step)

    def trained_bytes(self, sizes: dict[str, int]) -> int:
        """Of the whole gradients of parameters, by their elements, those that are trained."""
        return self.number * sum(elements for name, elements in sizes.items() if self.weights.trains(name))

    def norm(self, read: str, write: str, d: int, name: str) -> None:
        """Keeps its input and, in fp32 whatever it computes in, an inverse deviation (and a mean) of each row."""
        centred = self.model.norm == "layernorm"
        stats = {f"{write}.stats": 4 * self.tokens * (2 if centred else 1), write: self.bytes_of(d)}
        params = {f"{name}.weight": d} | ({f"{name}.bias": d} if centred and self.model.bias else {})
        grads = self.trained_bytes(params)
        if not (centred or self.fused_norm):
            self._composed_norm(read, write, d, grads)
            return
        self.step(Step((read,), (write,), (read, f"{write}.stats"), param_bytes=grads, trains=grads > 0), stats)

    def _composed_norm(self, read: str, write: str, d: int, grads: int) -> None:
        """To fp32 (unless it is), times the inverse deviation, times the weight, and back."""
        wide = {f"{write}.{part}": 4 * self.tokens * d for part in ("wide", "normed", "scaled")}
        self.sizes.update(wide, **{f"{write}.stats": 4 * self.tokens})
        source, normed, scaled = wide
        if self.number == 4:
            source, scaled = read, write
        else:
            self.step(Step((read,), (source,)), {})
        self.step(Step((source,), (normed,), (source, f"{write}.stats"), scratch=4 * self.tokens * d), {})
        kept = (normed,) if grads else ()  # for the gradient of the weight
        self.step(Step((normed,), (scaled,), kept, param_bytes=grads, trains=grads > 0), {write: self.bytes_of(d)})
        if scaled != write:
            self.step(Step((scaled,), (write,)), {})

    def matmul(self, read: str, write: str, grad_bytes: int, n_out: int, trained: bool, **more: Any) -> None:
        """Keeps its input if its weight is trained."""
        saves = (read,) if trained else ()
        step = Step((read,), (write,), saves, kind="matmul", param_bytes=grad_bytes * trained, trains=trained)
        self.step(step._replace(**more), {write: self.bytes_of(n_out)})

    def linear(self, read: str, write: str, n_in: int, n_out: int, name: str, rotated: bool = False) -> None:
        """A linear layer; rotating its output by position keeps only tables that all blocks share."""
        weights = self.weights
        params = {f"{name}.weight": n_in * n_out} | ({f"{name}.bias": n_out} if self.model.bias else {})
        out = f"{write}.flat" if rotated else write
        base = f"{out}.base" if weights.adapts(name) else out
        grads, more = self.trained_bytes(params), {}
        if weights.quantization is not None:  # whole before its matmul, forward and backward
            whole = {f"{name}.whole": n_in * n_out * self.number}
            self.step(Step((), tuple(whole)), whole)
            more = {"holds": tuple(whole), "scratch": sum(whole.values())}
        elif weights.recipe(n_out, n_in):  # copies in fp8; backward those of the output's gradient, weight and input
            weight = 0 if weights.fp8_all_gather else n_in * n_out
            casts = {f"{write}.fp8": self.tokens * n_in + weight}
            self.step(Step((), tuple(casts)), casts)
            more = {"holds": tuple(casts), "scratch": sum(casts.values()) + self.tokens * n_out}
        trained = weights.trains(f"{name}.weight")
        self.matmul(read, base, 0, n_out, trained, param_bytes=grads, trains=grads > 0, **more)
        if weights.adapts(name):
            self._adapter(read, base, out, n_in, n_out)
        if rotated:
            self.step(Step((out,), (write,), scratch=self.bytes_of(n_out)), {write: self.bytes_of(n_out)})

    def _adapter(self, read: str, base: str, write: str, n_in: int, n_out: int) -> None:
        """peft: ``result + lora_B(lora_A(x)) * scaling``, of a copy of the result where the base is quantised."""
        rank, a, b, scaled = self.weights.lora_rank or 0, f"{write}.a", f"{write}.b", f"{write}.scaled"
        if self.weights.quantization is not None:
            self.step(Step((base,), (f"{base}.copy",), alias=True), {f"{base}.copy": self.bytes_of(n_out)})
            base = f"{base}.copy"
        self.matmul(read, a, rank * n_in * self.number, rank, trained=True)
        self.matmul(a, b, rank * n_out * self.number, n_out, trained=True)
        self.pointwise((b,), scaled, n_out, saves=())
        self.add(base, scaled, write, n_out)

    def attention(self, read: tuple[str, ...], write: str, q: int, joined: int = 0) -> None:
        if self.math:
            self._composed_attention(read, write, q, joined)
            return
        sizes = {write: self.bytes_of(q), f"{write}.lse": 4 * self.tokens * self.model.n_head}
        saves = (*read, write, f"{write}.lse")
        self.step(Step(read, (write,), saves, kind="attention", scratch=self.bytes_of(joined)), sizes)

    def _composed_attention(self, read: tuple[str, ...], write: str, q: int, joined: int) -> None:
        """torch's math backend: copies in fp32, one per head, and the probabilities of all pairs of tokens are kept."""
        copies = tuple(f"{write}.{part}" for part in ("q", "k", "v"))
        scores, probabilities = f"{write}.scores", f"{write}.p"
        out = f"{write}.wide" if self.number != 4 else write
        one = 4 * self.tokens * q
        between = {f"{write}.between": one * (2 if out == write else 5)}  # converted to fp32 (3), scaled (2)
        self.step(Step((), tuple(between)), between)
        self.step(Step(read, copies, scratch=self.bytes_of(joined)), dict.fromkeys((*copies, out), one))
        self.step(Step(copies[:2], (scores,), copies[:2], kind="matmul"), {scores: self.scores})
        if self.model.causal:
            self.step(Step((scores,), (f"{scores}.masked",), alias=True), {f"{scores}.masked": self.scores})
            scores = f"{scores}.masked"
        self.step(Step((scores,), (probabilities,), (probabilities,)), {probabilities: self.scores})
        kept = (probabilities, copies[2])
        self.step(Step(kept, (out,), kept, kind="matmul", holds=tuple(between) if out == write else ()), {})
        if out != write:
            self.step(Step((out,), (write,), holds=tuple(between)), {write: self.bytes_of(q)})

    def repeat(self, read: str, features: int) -> str:
        self.step(Step((read,), (f"{read}.repeated",)), {f"{read}.repeated": self.bytes_of(features)})
        return f"{read}.repeated"

    def pointwise(self, reads: tuple[str, ...], write: str, features: int, saves: tuple[str, ...]) -> None:
        self.step(Step(reads, (write,), saves), {write: self.bytes_of(features)})

    def add(self, a: str, b: str, write: str, features: int) -> None:
        self.step(Step((a, b), (write,), alias=True), {write: self.bytes_of(features)})

    def done(self, logits: frozenset[str] = frozenset(), held: frozenset[str] = frozenset()) -> Tape:
        keeps_output = self.fused_norm or self.model.norm == "layernorm" or self.number == 4
        return Tape(self.sizes, self.steps, logits, held, keeps_output)


def _q(model: Model) -> int:
    return model.n_head * model.d_head
