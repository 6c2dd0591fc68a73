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
        self.stream = DTYPE_BYTES[self.weights.stream_dtype]
        self.widths = {"x": self.stream, "encoded": self.stream}  # of tensors whose numbers may have others
        self.model = model
        self.sizes = dict.fromkeys(self.widths, self.bytes_of(model.d_model, self.stream))
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

    def bytes_of(self, features: int, width: int | None = None) -> int:
        return self.tokens * features * (width or self.number)

    def width(self, *names: str) -> int:
        """Bytes of a number of these tensors, or of what is computed of them."""
        return max(self.widths.get(name, self.number) for name in names)

    def cast(self, read: str, write: str, features: int, width: int) -> str:
        """A tensor in numbers of so many bytes; itself if it has them."""
        if self.width(read) == width:
            return read
        self.widths[write] = width
        self.step(Step((read,), (write,)), {write: self.bytes_of(features, width)})
        return write

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
        self.widths[write] = self.stream
        stats = {f"{write}.stats": 4 * self.tokens * (2 if centred else 1), write: self.bytes_of(d, self.stream)}
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
        self.widths[write] = self.stream
        if self.fused_norm:
            stats = {f"{write}.stats": 4 * rows, write: self.bytes_of(features, self.stream)}
            self.step(Step((read,), (write,), (read, f"{write}.stats"), param_bytes=grads, trains=grads > 0), stats)
        else:
            self._composed_norm(read, write, features, grads, rows)
        return write

    def rotate(self, read: str, features: int) -> str:
        """By position; it keeps only tables that all blocks share."""
        write = f"{read}.r"
        self._rotate(read, write, features)
        return write

    def _rotate(self, read: str, write: str, features: int) -> None:
        self.widths[write] = self.width(read)
        n_bytes = self.bytes_of(features, self.width(read))
        self.step(Step((read,), (write,), scratch=n_bytes), {write: n_bytes})

    def _composed_norm(self, read: str, write: str, d: int, grads: int, rows: int = 0) -> None:
        """To fp32 (unless it is), times the inverse deviation, times the weight, and back."""
        wide = {f"{write}.{part}": 4 * self.tokens * d for part in ("wide", "normed", "scaled")}
        self.sizes.update(wide, **{f"{write}.stats": 4 * (rows or self.tokens)})
        source, normed, scaled = wide
        if self.stream == 4:
            source, scaled = read, write
        else:
            self.step(Step((read,), (source,)), {})
        self.step(Step((source,), (normed,), (source, f"{write}.stats"), scratch=4 * self.tokens * d), {})
        kept = (normed,) if grads else ()  # for the gradient of the weight
        step = Step((normed,), (scaled,), kept, param_bytes=grads, trains=grads > 0)
        self.step(step, {write: self.bytes_of(d, self.stream)})
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
            whole = {f"{write}.whole": n_in * n_out * self.number}
            self.step(Step((), tuple(whole)), whole)
            more = {"holds": tuple(whole), "scratch": sum(whole.values())}
        elif weights.recipe(n_out, n_in):  # copies in fp8; backward those of the output's gradient, weight and input
            weight = 0 if weights.fp8_all_gather else n_in * n_out
            casts = {f"{write}.fp8": self.tokens * n_in + weight}
            self.step(Step((), tuple(casts)), casts)
            more = {"holds": tuple(casts), "scratch": sum(casts.values()) + self.tokens * n_out}
        trained = weights.trains(f"{name}.weight")
        op = "addmm" if len(params) > 1 and not weights.recipe(n_out, n_in) else "mm"  # fp8 adds a bias apart
        given, wide = read, self.width(read)  # bitsandbytes gives back the dtype that it was given
        read = self.cast(read, f"{write}.narrow", n_in, self.number)
        made = base if wide == self.number else f"{base}.narrow"
        self.matmul(read, made, 0, n_out, trained, op=op, param_bytes=grads, trains=grads > 0, **more)
        self.cast(made, base, n_out, wide)
        read = given
        if weights.adapts(name):
            self._adapter(read, base, out, n_in, n_out)
        if rotated:
            self._rotate(out, write, n_out)

    def _adapter(self, read: str, base: str, write: str, n_in: int, n_out: int) -> None:
        """peft: ``result + lora_B(lora_A(x)) * scaling``, of a copy of the result where the base is quantised."""
        rank, a, b, scaled = self.weights.lora_rank or 0, f"{write}.a", f"{write}.b", f"{write}.scaled"
        if self.weights.quantization is not None:
            copy = f"{base}.copy"
            self.widths[copy] = self.width(base)
            self.step(Step((base,), (copy,), alias=True), {copy: self.bytes_of(n_out, self.width(base))})
            base = copy
        read = self.cast(read, f"{a}.narrow", n_in, self.number)
        self.matmul(read, a, rank * n_in * self.number, rank, trained=True, op="mm")
        self.matmul(a, b, rank * n_out * self.number, n_out, trained=True, op="mm")
        self.pointwise((b,), scaled, n_out, saves=())
        self.add(base, scaled, write, n_out)

    def attention(self, read: tuple[str, ...], write: str, q: int, joined: int = 0) -> None:
        if self.math:
            self._composed_attention(read, write, q, joined)
            return
        read = tuple(self.cast(of, f"{of}.narrow", self._features(of), self.number) for of in read)
        sizes = {write: self.bytes_of(q), f"{write}.lse": 4 * self.tokens * self.model.n_head}
        saves = (*read, write, f"{write}.lse")
        self.step(Step(read, (write,), saves, op=SDPA, scratch=self.bytes_of(joined)), sizes)

    def _features(self, name: str) -> int:
        return self.sizes[name] // (self.tokens * self.width(name))

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
        write = f"{read}.repeated"
        self.widths[write] = self.width(read)
        self.step(Step((read,), (write,)), {write: self.bytes_of(features, self.width(read))})
        return write

    def pointwise(self, reads: tuple[str, ...], write: str, features: int, saves: tuple[str, ...]) -> None:
        self.widths[write] = self.width(*reads)
        self.step(Step(reads, (write,), saves), {write: self.bytes_of(features, self.width(*reads))})

    def add(self, a: str, b: str, write: str, features: int) -> None:
        self.widths[write] = self.width(a, b)
        self.step(Step((a, b), (write,), alias=True), {write: self.bytes_of(features, self.width(a, b))})

    def done(self, logits: frozenset[str] = frozenset(), held: frozenset[str] = frozenset()) -> Tape:
        keeps_output = self.fused_norm or self.model.norm == "layernorm" or self.stream == 4
        return Tape(self.sizes, self.steps, logits, held, keeps_output, parts=tuple(self.parts))
