"""`Writer`: writes a tape in the words of a transformer's pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fsdp_sim.cost.tape import Step, Tape
from fsdp_sim.cost.weights import Weights, weights_of
from fsdp_sim.schedule import DTYPE_BYTES, SDPA
from fsdp_sim.spec import Model, Plan, Shape


class Writer:
    """Writes a tape: torch's operators, by what they read, write, save, and make gradients of."""

    def __init__(
        self, model: Model, plan: Plan, shapes: Iterable[Shape], fused_norm: bool = True, name: str = ""
    ) -> None:
        self.fused_norm = fused_norm
        self.on_cpu = not fused_norm and plan.rms_norm == "fused"  # a plan can compose a norm on a GPU too
        self.weights: Weights = weights_of(model, plan).of_block(name) if name else weights_of(model, plan)
        self.params = {of: rows * columns for of, rows, columns in shapes}
        self.math = plan.attention_impl == "math"
        self.scores = 4 * plan.micro_batch * model.n_head * plan.seq_len**2  # bytes, in fp32
        self.tokens = plan.micro_batch * plan.seq_len
        self.number = DTYPE_BYTES[plan.param_dtype or model.dtype]  # bytes of one
        self.model = model
        self.sizes = {"x": self.bytes_of(model.d_model), "encoded": self.bytes_of(model.d_model)}
        self.steps: list[Step] = []
        self.expert_parallel = plan.expert_parallel
        self.parts: list[tuple[str, int]] = [("", 0)]

    def branch(self, name: str, stream: str, body: Callable[[str], str], out: str) -> None:
        """Attention or feed-forward with the norms around it, added to the stream, which is ``out`` from then on."""
        d, position, read = self.model.d_model, self.model.norm_position, stream
        if position in ("pre", "both"):
            self.norm(stream, f"{name}.n", d, f"{name}_norm")
            read = f"{name}.n"
        if self.model.adaln:
            read = self.scale(read, f"{name}.scaled", d)
        result = body(read)
        if position in ("output", "both"):
            self.norm(result, f"{name}.out", d, f"{name}_post_norm")
            result = f"{name}.out"
        if self.model.adaln:
            result = self.scale(result, f"{name}.gated", d)
        summed = f"{name}.sum" if position == "post" else out
        self.add(stream, result, summed, d)
        if position == "post":
            self.norm(summed, out, d, f"{name}_post_norm")

    def scale(self, read: str, write: str, features: int) -> str:
        """A product with a row per image."""
        self.pointwise((read,), write, features, saves=(read,))
        return write

    def bytes_of(self, features: int) -> int:
        return self.tokens * features * self.number

    def begin(self, part: str) -> None:
        """What follows is computed in another segment, whose name ends so."""
        self.parts.append((part, len(self.steps)))

    def step(self, step: Step, sizes: dict[str, int]) -> None:
        self.sizes.update(sizes)
        self.steps.append(step)

    def trained_bytes(self, sizes: dict[str, int]) -> int:
        """Of the whole gradients of parameters, by their elements, those that are trained."""
        return self.number * sum(elements for name, elements in sizes.items() if self.weights.trains(name))

    def params_of(self, *names: str) -> dict[str, int]:
        """Those of some names that the segment has, with their elements."""
        return {name: self.params[name] for name in names if name in self.params}

    def norm(self, read: str, write: str, d: int, name: str) -> None:
        """Keeps its input and, in fp32 whatever it computes in, an inverse deviation (and a mean) of each row."""
        centred = self.model.norm == "layernorm"
        stats = {f"{write}.stats": 4 * self.tokens * (2 if centred else 1), write: self.bytes_of(d)}
        grads = self.trained_bytes(self.params_of(f"{name}.weight", f"{name}.bias"))
        if not (centred or self.fused_norm):
            self._composed_norm(read, write, d, grads)
            return
        self.step(Step((read,), (write,), (read, f"{write}.stats"), param_bytes=grads, trains=grads > 0), stats)

    def head_norm(self, read: str, features: int, name: str) -> str:
        """Of queries or keys: an RMS norm of each head, or of all."""
        write, by_head = f"{read}.n", self.model.qk_norm != "projection"
        rows = self.tokens * (features // self.model.d_head if by_head else 1)
        grads = self.trained_bytes(self.params_of(f"{name}.weight"))
        if self.fused_norm:
            stats = {f"{write}.stats": 4 * rows, write: self.bytes_of(features)}
            self.step(Step((read,), (write,), (read, f"{write}.stats"), param_bytes=grads, trains=grads > 0), stats)
        else:
            self._composed_norm(read, write, features, grads, rows)
        return write

    def rotate(self, read: str, features: int) -> str:
        """By position; it keeps only tables that all blocks share."""
        write = f"{read}.r"
        self.step(Step((read,), (write,), scratch=self.bytes_of(features)), {write: self.bytes_of(features)})
        return write

    def _composed_norm(self, read: str, write: str, d: int, grads: int, rows: int = 0) -> None:
        """To fp32 (unless it is), times the inverse deviation, times the weight, and back."""
        wide = {f"{write}.{part}": 4 * self.tokens * d for part in ("wide", "normed", "scaled")}
        self.sizes.update(wide, **{f"{write}.stats": 4 * (rows or self.tokens)})
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
        step = Step((read,), (write,), saves, param_bytes=grad_bytes * trained, trains=trained)
        self.step(step._replace(**more), {write: self.bytes_of(n_out)})

    def linear(self, read: str, write: str, n_in: int, n_out: int, name: str, rotated: bool = False) -> None:
        """A linear layer; rotating its output by position keeps only tables that all blocks share."""
        weights = self.weights
        params = {f"{name}.weight": n_in * n_out} | dict.fromkeys(self.params_of(f"{name}.bias"), n_out)
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
        op = "addmm" if len(params) > 1 and not weights.recipe(n_out, n_in) else "mm"  # fp8 adds a bias apart
        self.matmul(read, base, 0, n_out, trained, op=op, param_bytes=grads, trains=grads > 0, **more)
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
        self.matmul(read, a, rank * n_in * self.number, rank, trained=True, op="mm")
        self.matmul(a, b, rank * n_out * self.number, n_out, trained=True, op="mm")
        self.pointwise((b,), scaled, n_out, saves=())
        self.add(base, scaled, write, n_out)

    def attention(self, read: tuple[str, ...], write: str, q: int, joined: int = 0) -> None:
        if self.math:
            self._composed_attention(read, write, q, joined)
            return
        sizes = {write: self.bytes_of(q), f"{write}.lse": 4 * self.tokens * self.model.n_head}
        saves = (*read, write, f"{write}.lse")
        self.step(Step(read, (write,), saves, op=SDPA, scratch=self.bytes_of(joined)), sizes)

    def _composed_attention(self, read: tuple[str, ...], write: str, q: int, joined: int) -> None:
        """torch's math backend: copies in fp32, one per head, and the probabilities of all pairs of tokens are kept."""
        copies = tuple(f"{write}.{part}" for part in ("q", "k", "v"))
        scores, probabilities = f"{write}.scores", f"{write}.p"
        out = f"{write}.wide" if self.number != 4 else write
        one = 4 * self.tokens * q
        between = {f"{write}.between": one * (2 if out == write else 5)}  # converted to fp32 (3), scaled (2)
        self.step(Step((), tuple(between)), between)
        self.step(Step(read, copies, scratch=self.bytes_of(joined)), dict.fromkeys((*copies, out), one))
        self.step(Step(copies[:2], (scores,), copies[:2]), {scores: self.scores})
        if self.model.causal:
            self.step(Step((scores,), (f"{scores}.masked",), alias=True), {f"{scores}.masked": self.scores})
            scores = f"{scores}.masked"
        self.step(Step((scores,), (probabilities,), (probabilities,)), {probabilities: self.scores})
        kept = (probabilities, copies[2])
        self.step(Step(kept, (out,), kept, holds=tuple(between) if out == write else ()), {})
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
        return Tape(self.sizes, self.steps, logits, held, keeps_output, parts=tuple(self.parts))
