"""Chakra execution traces, read with MLCommons' own schema by protobuf, neither of which is ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_sim import Cluster, Model, Plan, simulate
from fsdp_sim.timeline import COLLECTIVES, Op, Timeline, write_chakra
from fsdp_sim.timeline.chakra import COMM_TYPES
from tests.timeline.strategies import gather, op, timeline_of

SCHEMA = Path(__file__).parent / "chakra" / "et_def.desc"


@pytest.fixture(scope="module")
def messages() -> dict[str, Any]:
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto.FromString(SCHEMA.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClassesForFiles([file.name], pool)


def parts(data: bytes) -> Iterator[bytes]:
    """What stands after each length; as chakra's protolib cuts a file."""
    at = 0
    while at < len(data):
        size = shift = 0
        while True:
            byte, at = data[at], at + 1
            size, shift = size | (byte & 127) << shift, shift + 7
            if byte < 128:
                break
        yield data[at : at + size]
        at += size


def read(path: Path, messages: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The metadata and the nodes; no message may have a field that the schema has not."""
    first, *rest = parts(path.read_bytes())
    metadata = messages["ChakraProtoMsg.GlobalMetadata"].FromString(first)
    nodes = [messages["ChakraProtoMsg.Node"].FromString(one) for one in rest]
    for message in (metadata, *nodes):
        clean = type(message).FromString(message.SerializeToString())
        clean.DiscardUnknownFields()
        assert clean.SerializeToString() == message.SerializeToString()
    return metadata, nodes


def said(message: Any) -> dict[str, Any]:
    return {attr.name: getattr(attr, attr.WhichOneof("value")) for attr in message.attr}


@pytest.fixture(scope="module")
def step() -> Timeline:
    plan = Plan(micro_batch=4, shard_size=4, cpu_offload=True, param_dtype="bf16")
    return simulate(Model.preset("gpt2-124m"), Cluster("A100", gpus=8), plan).timeline


def test_each_operation_is_a_node_of_the_schema_after_what_it_waited_for(step, tmp_path, messages):
    [path] = write_chakra(step, tmp_path / "step")
    metadata, nodes = read(path, messages)
    ops = [event for event in step.events if not event.is_memory]

    assert path.name == "step.0.et"
    assert said(metadata)["world_size"] == 8
    assert [node.name for node in nodes] == [event.label for event in ops]
    last: dict[str, int] = {}
    there: set[int] = set()
    for node, event in zip(nodes, ops, strict=True):
        deps = set(node.data_deps)
        assert {seq + 1 for seq in event.waits_on} & there <= deps <= there
        assert last.get(event.lane, node.id) in deps | {node.id}, "a lane works in order"
        assert node.duration_micros == pytest.approx(event.duration_s * 1e6, abs=1)
        there.add(node.id)
        last[event.lane] = node.id


def test_a_collective_says_its_kind_and_what_a_rank_puts_into_it(step, tmp_path, messages):
    [path] = write_chakra(step, tmp_path / "step")
    kinds = {"ALL_GATHER": set(), "REDUCE_SCATTER": set(), "ALL_REDUCE": set()}
    names = messages["ChakraProtoMsg.Node"].DESCRIPTOR.file.enum_types_by_name
    ops = [event for event in step.events if not event.is_memory]
    for node, event in zip(read(path, messages)[1], ops, strict=True):
        kind, about = names["NodeType"].values_by_number[node.type].name, said(node)
        assert about["is_cpu_op"] == (event.lane == "cpu")
        assert (kind == "COMM_COLL_NODE") == (event.op in COLLECTIVES)
        assert kind != "MEM_LOAD_NODE" or (event.op == Op.H2D and about["tensor_size"] == event.bytes)
        if event.op in COLLECTIVES:
            kinds[names["CollectiveCommType"].values_by_number[about["comm_type"]].name].add(event.op)
            assert about["comm_size"] == event.bytes // (event.group_size if event.op == Op.ALL_GATHER else 1)
    assert kinds == {name: {name} for name in kinds}
    assert {Op.H2D, Op.D2H} <= {event.op for event in ops}


def test_the_numbers_of_collectives_are_the_schemas(messages):
    enum = messages["ChakraProtoMsg.Node"].DESCRIPTOR.file.enum_types_by_name["CollectiveCommType"]

    assert {str(op): number for op, number in COMM_TYPES.items()} == {
        name: enum.values_by_name[name].number for name in map(str, COMM_TYPES)
    }


def test_each_rank_has_a_file_of_its_own(tmp_path, messages):
    timeline = timeline_of(*(event for rank in (0, 1) for event in (gather(0, 1, rank=rank), op(1, 2, rank=rank))))

    paths = write_chakra(timeline, tmp_path / "two")

    assert [path.name for path in paths] == ["two.0.et", "two.1.et"]
    assert [said(read(path, messages)[0])["rank"] for path in paths] == [0, 1]
