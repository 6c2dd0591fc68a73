"""Results as data that cannot execute."""

import itertools
import os
import pickle

import msgspec
import numpy as np
import pytest
import torch

from fsdp_sim.ranks import run
from fsdp_sim.ranks.plain import LENGTH, MAX_BYTES, MAX_PLAIN_BYTES, TENSOR, decode, encode


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -(2**63),
        2**200,
        -(2**200),
        2.5,
        float("inf"),
        "text",
        b"bytes",
        ...,
        [1, [2]],
        {"a": {1: [None]}, True: 2.5, 0.5: {}},
        {},
    ],
    ids=repr,
)
def test_what_goes_in_comes_out(value):
    assert decode(encode(value)) == value
    assert type(decode(encode(value))) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.tensor(3),
        torch.empty(0, 3),
        torch.ones(4, dtype=torch.bfloat16),
        torch.ones(2, 2).T,
    ],
)
def test_tensors_keep_their_shape_dtype_and_numbers(tensor):
    found = decode(encode(tensor))

    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(found, tensor)


def test_tuples_and_sets_become_lists_and_numpy_becomes_plain():
    assert decode(encode((1, {2}, np.float64(0.5), torch.float32))) == [1, [2], 0.5, "torch.float32"]
    assert torch.equal(decode(encode(np.arange(3))), torch.arange(3))


class Evil:
    def __reduce__(self):
        return os.abort, ()


UNSENDABLE = {
    "instance": Evil(), "class": object, "function": lambda: 1, "key": {(1, 2): 3}, "array": np.array([Evil()]),
}  # fmt: skip


@pytest.mark.parametrize("value", UNSENDABLE.values(), ids=UNSENDABLE)
def test_anything_else_is_refused_before_it_is_sent(value):
    with pytest.raises(TypeError):
        encode(value)


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def test_what_is_too_large_or_too_deep_is_refused():
    deep = []
    deep.append(deep)
    with pytest.raises(ValueError, match="nested more than"):
        encode(deep)
    with pytest.raises(ValueError, match="at most"):
        encode(bytes(MAX_PLAIN_BYTES + 1))
    with pytest.raises(ValueError, match="at most"):
        encode(torch.empty(MAX_BYTES + 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="number of 16,386 bits"):
        encode(2**16_385)


def test_a_few_bytes_do_not_become_gigabytes():
    """What costs little to send may cost much to hold: empty lists, or a tensor's numbers again and again."""
    lists = b"\x91\x90" * 30_000_000
    with pytest.raises(ValueError, match="at most"):
        decode(LENGTH.pack(6 + len(lists)) + b"\x91\xdd" + (30_000_000).to_bytes(4, "big") + lists)
    shape = msgspec.msgpack.encode(["torch.uint8", [1000]])
    twice = msgspec.msgpack.encode([[msgspec.msgpack.Ext(TENSOR, shape)] * 2])
    with pytest.raises(ValueError, match=r"where 0 bytes are left"):
        decode(LENGTH.pack(len(twice)) + twice + bytes(1000))
    with pytest.raises(ValueError, match="no result"):
        decode(LENGTH.pack(3_000_000) + b"\x91" * 3_000_000)  # lists in lists in lists


def test_keys_are_numbers_and_texts_of_which_few_have_the_same_hash():
    """Of lists any number have: `hash((-1, -1)) == hash((-2, -1))`. A dict of 250,000 such keys takes minutes."""
    lists = itertools.islice(itertools.product((b"\xff", b"\xfe"), repeat=15), 4000)
    pairs = b"".join(b"\x9f" + b"".join(key) + b"\xc0" for key in lists)
    with pytest.raises(ValueError, match="no result"):
        decode(framed(b"\xdf" + (4000).to_bytes(4, "big") + pairs))
    with pytest.raises(TypeError, match="dict"):
        encode({2**61 - 1: 0, 2**200: 1})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        *map(framed, (b"", b"\xc1", pickle.dumps(Evil()), b"\xc7\x01\x01\xff", b"\xd4\x09\x00")),
        encode(torch.ones(4))[:-3],
    ],
)
def test_bytes_of_someone_else_are_an_error_and_nothing_more(data):
    with pytest.raises(ValueError, match="no result"):
        decode(data)


def test_a_rank_sees_its_own_arguments_and_the_kernel_counts_what_it_sends():
    def exchange(common, own):
        import torch.distributed as dist

        whole = torch.empty(2 * own.numel())
        dist.all_gather(list(whole.chunk(2)), own)
        return common, whole.sum().item()

    inputs = [(torch.full((200_000,), float(rank)),) for rank in range(2)]
    results = run(exchange, 2, "a", each=inputs, plain=True, progress=False)

    assert list(results) == [["a", 200_000.0]] * 2
    assert [[record.op for record in of_rank] for of_rank in results.records] == [["all_gather"]] * 2
    assert all(written is None or 800_000 <= written <= 900_000 for written in results.written_bytes)
