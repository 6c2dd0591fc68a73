"""Rows of measurements become requests, and a row that cannot says where it is wrong."""

import csv
import re
import tomllib
from pathlib import Path

import pytest

from fsdp_sim.spec.gpus import gpu
from fsdp_sim.validate import Refused, RowError, published, read_csv
from fsdp_sim.validate.published import DATA, MEASURED

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


def test_every_row_is_read_or_refused_with_its_reason() -> None:
    refused = {row.id: row.why for row in published() if isinstance(row, Refused)}

    assert len(ROWS) + len(refused) == 234 + 105
    assert not ROWS.keys() & refused.keys()
    assert sum(row.source == "mosaicml/llm-foundry" for row in ROWS.values()) == 212
    assert all(re.search("out of scope|does not say|not known|SimpleFSDP", why) for why in refused.values())
    assert "line" not in refused["n027"]
    assert refused["n049"] == "the source does not say seq_len nor micro_batch"


def test_every_gpu_of_the_measurements_is_in_the_catalogue() -> None:
    for row in ROWS.values():
        assert gpu(row.raw["gpu_type"]) == row.cluster.gpu


def test_a_model_may_be_named_and_a_source_says_what_it_trains_with() -> None:
    full, compiled, lora, qlora = (ROWS[name] for name in ("n167", "n047", "n171", "n201"))

    assert (full.model.name, full.model.dtype, full.plan.stack, full.plan.lora_rank) == (
        "mistral-7b", "bf16", "hf-trainer-2024", None,
    )  # fmt: skip
    assert (compiled.plan.stack, compiled.plan.cross_entropy) == ("torchtitan-compiled", "compiled")
    assert (compiled.plan.fp8, compiled.plan.fp8_all_gather, compiled.peak_memory_kind) == (
        "tensorwise",
        True,
        "reserved",
    )
    assert (lora.plan.lora_rank, lora.plan.base_quantization) == (16, None)
    assert (qlora.plan.base_quantization, qlora.plan.param_dtype, qlora.remark) == (
        "gptq", "fp16", "LoRA, quantised base model",
    )  # fmt: skip


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
    remarks = {word for row in ROWS.values() for word in row.remark.split(", ")}

    assert remarks == {"", "LoRA", "quantised base model", "fp8", "no FSDP", "DeepSpeed ZeRO-3"}


def test_a_cause_is_told_of_rows_that_are_there() -> None:
    causes = tomllib.loads(DATA.joinpath("causes.toml").read_text())
    named = [row for of_kind in causes.values() for cause in of_kind for row in cause["rows"]]

    assert set(named) <= set(ROWS)
    for of_kind in causes.values():
        rows = [row for cause in of_kind for row in cause["rows"]]
        assert len(rows) == len(set(rows))


def test_a_model_has_the_loss_of_its_own_code() -> None:
    assert ROWS["n163"].plan.cross_entropy == ROWS["n189"].plan.cross_entropy == "shifted_uncast"
    assert ROWS["n167"].plan.cross_entropy == "shifted"


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
        ({"seq_len": ""}, r"line 2 \(id c000\): the source does not say seq_len"),
        ({"step_time_s": "nan"}, r"column step_time_s: 'nan' is not a number above 0"),
        ({"compile": "maybe"}, r"line 2 \(id c000\): Plan.compile is 'maybe'; it must be True or False"),
        ({"param_dtype": "int4"}, r"Plan.param_dtype is 'int4'; it must be"),
        ({"activation_checkpointing": "selektive"}, r"Plan.activation_checkpointing is 'selektive'; it must be"),
        ({"cpu_offload": "some"}, r"Plan.cpu_offload is 'some'; it must be True or False"),
        ({"sharding": "FSDP=8+TP=8"}, r"sharding 'FSDP=8\+TP=8': tensor parallelism is out of scope"),
        ({"sharding": "MiCS"}, r"column sharding: 'MiCS' is not a word that is known; write one of FULL_SHARD"),
        ({"sharding": "NO_SHARD", "framework": "FSDP2"}, r"column sharding: 'NO_SHARD' is not one that FSDP2 has"),
        ({"framework": "JAX"}, r"column framework: 'JAX' is not a stack that is known; name one of composer"),
        ({"attention_impl": "flex"}, r"column attention_impl: 'flex' is not an attention that is known"),
        ({"fp8": "nvfp4"}, r"column fp8: 'nvfp4' is not a recipe that is known; name one of rowwise_with_gw_hp"),
        ({"peak_memory_kind": "used"}, r"column peak_memory_kind: 'used' is not a kind that is known"),
        ({"inter_node": "carrier pigeon"}, r"no link is called 'carrier pigeon'"),
        ({"inter_node": "1,600 Gb/s per node"}, r"is not understood at '1,'"),
        ({"ffn_type": "glu"}, r"Model.ffn_type is 'glu'; it must be 'gelu'"),
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
    with pytest.raises(RowError, match="has no column 'seq_len'; it needs seq_len, micro_batch"):
        read_csv(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RowError, match="is not a text file in UTF-8"):
        read_csv(path)
    lines = MEASURED.read_text().splitlines()
    path.write_text(lines[0] + "\n" + lines[1] + ",too,many\n")
    with pytest.raises(RowError, match=r"line 2 \(id c000\) has not as many fields as the header"):
        read_csv(path)
