"""Rows of measurements become requests, and a row that cannot says where it is wrong."""

import csv
from pathlib import Path

import pytest

from fsdp_sim.spec.gpus import gpu
from fsdp_sim.validate import RowError, read_csv
from fsdp_sim.validate.published import MEASURED

ROWS = {row.id: row for row in read_csv()}


def edited(tmp_path: Path, **cells: str) -> Path:
    """The first measurement, with some cells changed, as a file of one row."""
    header, first, *_ = csv.reader(MEASURED.read_text().splitlines())
    row = dict(zip(header, first, strict=True)) | cells
    path = tmp_path / "row.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)
    return path


def test_all_rows_are_understood() -> None:
    assert len(ROWS) == 234
    assert sum(row.source == "mosaicml/llm-foundry" for row in ROWS.values()) == 212


def test_every_gpu_of_the_measurements_is_in_the_catalogue() -> None:
    for row in ROWS.values():
        assert gpu(row.raw["gpu_type"]) == row.cluster.gpu


def test_a_row_says_how_it_was_trained() -> None:
    composer, titan, fms, nano = (ROWS[name] for name in ("c100", "c212", "c219", "c229"))

    assert (composer.plan.api, composer.plan.backward_prefetch, composer.plan.limit_all_gathers) == (
        "fsdp1",
        "BACKWARD_POST",
        True,
    )
    assert (titan.plan.api, titan.plan.reduce_dtype, titan.plan.activation_checkpointing) == (
        "fsdp2",
        "fp32",
        "selective",
    )
    assert (fms.plan.sharding_strategy, fms.plan.shard_size, fms.cluster.nodes) == ("HYBRID_SHARD", 8, 16)
    assert (nano.plan.api, nano.remark) == ("ddp", "no FSDP")


def test_the_fabric_is_the_one_the_source_states() -> None:
    assert ROWS["c219"].cluster.inter_link.bytes_per_s == 400e9 / 8 / 8
    assert ROWS["c100"].cluster.inter_link.bytes_per_s == 1600e9 / 8 / 8


def test_rows_unlike_the_others_are_named() -> None:
    remarks = {row.remark for row in ROWS.values()}

    assert remarks == {"", "quantised base model", "no FSDP", "DeepSpeed ZeRO-3"}


def test_a_step_time_may_be_given_as_throughput(tmp_path: Path) -> None:
    (row,) = read_csv(edited(tmp_path, step_time_s="", tokens_per_s_per_gpu="1000"))

    assert row.step_time_s == 8 * 2048 / 1000


def test_the_last_node_may_hold_fewer_gpus_than_its_kind(tmp_path: Path) -> None:
    (row,) = read_csv(edited(tmp_path, n_gpus="20"))

    assert (row.cluster.gpus, row.cluster.nodes) == (20, 4)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"n_layer": "eighty"}, r"line 2 \(id c000\), column n_layer: 'eighty' is not a whole number of at least 1"),
        ({"n_gpus": "-8"}, r"line 2 \(id c000\), column n_gpus: '-8' is not a whole number"),
        ({"seq_len": ""}, r"Plan.seq_len is ''; it must be a whole number"),
        ({"step_time_s": "nan"}, r"column step_time_s: 'nan' is not a number above 0"),
        ({"compile": "maybe"}, r"line 2 \(id c000\): Plan.compile is 'maybe'; it must be True or False"),
        ({"param_dtype": "int4"}, r"Plan.param_dtype is 'int4'; it must be"),
        ({"activation_checkpointing": "selektive"}, r"Plan.activation_checkpointing is 'selektive'; it must be"),
        ({"cpu_offload": "some"}, r"Plan.cpu_offload is 'some'; it must be True or False"),
        ({"sharding": "TP=8"}, r"column sharding: 'TP=8' is not a word that is known; write one of FULL_SHARD"),
        ({"sharding": "NO_SHARD", "framework": "FSDP2"}, r"column sharding: 'NO_SHARD' is not one that FSDP2 has"),
        ({"framework": "JAX"}, r"column framework: 'JAX' is not a stack that is known; name one of fsdp"),
        ({"attention_impl": "flex"}, r"column attention_impl: 'flex' is not an attention that is known"),
        ({"precision": "float8 rowwise"}, r"column precision: 'float8 rowwise' is not priced yet"),
        ({"fp8": "True"}, r"column fp8: 'True' is not priced yet"),
        ({"peak_memory_kind": "used"}, r"column peak_memory_kind: 'used' is not a kind that is known"),
        ({"inter_node": "carrier pigeon"}, r"no link is called 'carrier pigeon'"),
        ({"inter_node": "1,600 Gb/s per node"}, r"is not understood at '1,'"),
        ({"ffn_type": "geglu"}, r"Model.ffn_type is 'geglu'; it must be 'gelu', 'swiglu' or 'relu'"),
        ({"quantization": "nf4"}, r"has a column 'quantization', which is not understood; there are n_layer"),
        ({"gpu_type": "H1000"}, r"line 2 \(id c000\): no GPU is called 'H1000'; the nearest names are H100-SXM-80GB"),
        ({"d_model": "8191"}, r"line 2 \(id c000\): Model.n_head is 64, which does not divide d_model 8191"),
    ],
)
def test_a_wrong_cell_is_named_with_its_row(tmp_path: Path, cells: dict, message: str) -> None:
    with pytest.raises(RowError, match=message):
        read_csv(edited(tmp_path, **cells))


def test_a_word_for_checkpointing_is_what_its_stack_means_by_it(tmp_path: Path) -> None:
    for word, meaning in (("none", None), ("full", "full"), ("selective-op", "selective"), ("selective-block", 2)):
        (row,) = read_csv(edited(tmp_path, activation_checkpointing=word))

        assert row.plan.activation_checkpointing == meaning


def test_remarks_about_a_row_are_not_read(tmp_path: Path) -> None:
    (row,) = read_csv(edited(tmp_path, notes="twice as fast with fp8", fp8="False"))

    assert row.plan == ROWS["c000"].plan


def test_files_that_are_no_measurements(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(RowError, match="has no column 'n_layer'; it needs n_layer, d_model"):
        read_csv(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RowError, match="is not a text file in UTF-8"):
        read_csv(path)
    lines = MEASURED.read_text().splitlines()
    path.write_text(lines[0] + "\n" + lines[1] + ",too,many\n")
    with pytest.raises(RowError, match=r"line 2 \(id c000\) has not as many fields as the header"):
        read_csv(path)
