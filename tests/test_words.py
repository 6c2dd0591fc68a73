"""Quantities read as people write them, and a name that does not exist is answered with the one that was meant."""

import tracemalloc

import pytest

from fsdp_sim import Cluster, Model, words
from fsdp_sim.requests import request_of_texts
from fsdp_sim.spec import gpu, link


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0412, "41.2 ms"), (0.0, "0.00 ms"), (1.5, "1,500 ms"), (0.00321, "3.21 ms"), (2.5e-6, "0.0025 ms")],
)
def test_milliseconds_have_about_three_digits(seconds: float, text: str) -> None:
    assert words.human_ms(seconds) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.00 KiB"), (13 * 2**20, "13.0 MiB"), (3 * 2**39, "1.50 TiB")],
)
def test_bytes_have_binary_units(n_bytes: int, text: str) -> None:
    assert words.human_bytes(n_bytes) == text


def test_what_is_shorter_than_a_millisecond_is_said_in_microseconds() -> None:
    assert (words.human_latency(135.2e-6), words.human_latency(0.0412)) == ("135.2 us", "41.2 ms")


def test_a_difference_has_its_sign_and_no_negative_zero() -> None:
    assert [words.signed_ms(s) for s in (0.0012, -0.0012, -1e-9)] == ["+1.20 ms", "−1.20 ms", "+0.00 ms"]
    assert [words.signed_bytes(n) for n in (2**30, -(2**20))] == ["+1.00 GiB", "−1.00 MiB"]


def test_small_shares_keep_a_decimal() -> None:
    assert [words.percent(part, 100) for part in (0, 0.3, 9.96, 10.4, 98)] == ["0%", "0.3%", "10.0%", "10%", "98%"]


def test_without_a_near_name_all_are_listed() -> None:
    assert words.did_you_mean("gpsu", ["gpus", "model"]) == "did you mean gpus?"
    assert words.did_you_mean("zzz", iter(["gpus", "gpu"]), "it has") == "it has gpus, gpu"


@pytest.mark.parametrize(
    ("name", "what"),
    [("tensor_parallel", "tensor"), ("tp", "tensor"), ("TP-size", "tensor"), ("pipeline_parallel_degree", "pipeline"),
     ("cp", "context"), ("context_parallel_size", "context"), ("expert_parallel", "expert"), ("ep", "expert")],
)  # fmt: skip
def test_parallelism_that_is_out_of_scope_is_said_to_be(name: str, what: str) -> None:
    assert words.did_you_mean(name, ["gpus", "cpu_offload"]).startswith(f"{what} parallelism is out of scope")
    assert words.did_you_mean("cpu_ofload", ["gpus", "cpu_offload"]) == "did you mean cpu_offload?"


def test_the_likest_names_come_first_and_none_where_none_is_like_it() -> None:
    assert words.nearest("lama3-8b", ["gpt2-124m", "llama3-8b", "llama3-70b"], most=3) == ["llama3-8b", "llama3-70b"]
    assert words.nearest("zzz", ["gpt2-124m"]) == []


@pytest.mark.parametrize(("look_up", "wrong", "meant"), [
    (Model.preset, "mixtral", "no model is called 'mixtral'; the nearest names are mixtral-8x7b, mixtral-8x22b"),
    (Model.preset, "Llama4", "the nearest names are llama4-scout, llama4-maverick"),
    (Model.preset, "gpt2-xl", "the nearest names are gpt2-124m, gpt2-350m"),
    (gpu, "A100 40", "the nearest names are A100-SXM-40GB, A100-PCIe-40GB"),
    (gpu, "Zweig", "no GPU is called 'Zweig'; there are A10, "),
    (link, "NVLink", "the nearest names are NVLink2, NVLink3, NVLink4, NVLink4 H800, NVLink5"),
    (Cluster.from_file, "H100", "there is no cluster file H100; .* a GPU's name goes to gpu"),
    (lambda name: request_of_texts({name: "4"}), "batch", "there is no batch; did you mean micro_batch"),
])  # fmt: skip
def test_part_of_a_name_is_answered_with_those_that_have_it(look_up, wrong, meant) -> None:
    with pytest.raises(ValueError, match=meant):
        look_up(wrong)


def test_a_name_as_long_as_a_book_is_like_none_and_takes_no_memory_to_say_so() -> None:
    name = "gpus" * 100_000
    tracemalloc.start()
    assert words.nearest(name, ["gpus", "model"]) == []
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000
