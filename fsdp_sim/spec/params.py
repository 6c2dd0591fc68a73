"""The parameters of a transformer: names and shapes, block by block, as a torch module would list them."""

from __future__ import annotations

from fsdp_sim.spec.model import Model

Shape = tuple[str, int, int]  # name, rows (dimension 0), columns (1 for a vector)


def block_shapes(model: Model, *, cross_attention: bool = False) -> list[Shape]:
    """Parameters of one block: norms, attention, (attention to the encoder,) feed-forward."""
    d, ffn, q, kv = model.d_model, model.d_ffn, model.n_head * model.d_head, model.kv_heads * model.d_head

    def linear(name: str, rows: int, columns: int) -> list[Shape]:
        return [(f"{name}.weight", rows, columns)] + ([(f"{name}.bias", rows, 1)] if model.bias else [])

    def attention(name: str) -> list[Shape]:
        if model.bias:  # GPT keeps queries, keys and values in one matrix
            return linear(f"{name}.qkv", q + 2 * kv, d) + linear(f"{name}.proj", d, q)
        queries_keys_values = linear(f"{name}.wq", q, d) + linear(f"{name}.wk", kv, d) + linear(f"{name}.wv", kv, d)
        return queries_keys_values + linear(f"{name}.wo", d, q)

    shapes = norm_shapes(model, "attn_norm") + attention("attn")
    if cross_attention:
        shapes += norm_shapes(model, "cross_norm") + attention("cross")
    shapes += norm_shapes(model, "ffn_norm") + linear("ffn.up", ffn, d)
    if model.ffn_type == "swiglu":
        shapes += linear("ffn.gate", ffn, d)
    return shapes + linear("ffn.down", d, ffn)


def norm_shapes(model: Model, name: str) -> list[Shape]:
    """A norm has a weight, and a bias if the model has biases and the norm centres."""
    bias = [(f"{name}.bias", model.d_model, 1)] if model.bias and model.norm == "layernorm" else []
    return [(f"{name}.weight", model.d_model, 1), *bias]


def root_shapes(model: Model, seq_len: int) -> list[Shape]:
    """What is in no block: embeddings, the last norm, the head unless it is tied."""
    shapes = [("embed.weight", model.vocab, model.d_model)]
    if model.positions == "learned":
        shapes += [("embed.positions", model.max_seq_len or seq_len, model.d_model)]
    shapes += norm_shapes(model, "head.norm")
    return shapes if model.tied_embeddings else [*shapes, ("head.weight", model.vocab, model.d_model)]


def param_shapes(model: Model, seq_len: int) -> list[Shape]:
    """Every parameter of the model; a tied weight once."""
    encoder = [s for _ in range(model.n_encoder_layer) for s in block_shapes(model)]
    decoder = block_shapes(model, cross_attention=model.n_encoder_layer > 0)
    return root_shapes(model, seq_len) + encoder + decoder * model.n_layer
