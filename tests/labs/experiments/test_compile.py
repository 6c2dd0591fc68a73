"""What becomes a row, what the trainer adds, and GPUs; orders and memory are asserted by the lab's notebook."""

from types import SimpleNamespace

import pytest
import torch

from labs.cluster import process_group
from labs.experiments import compile as lab
from labs.experiments.compile import activation_checkpointing
from labs.experiments.compile import run_compile as the_lab
from labs.experiments.compile.__main__ import main
from labs.experiments.result import ResultRow


@pytest.mark.tail  # the lab's notebook runs it too
def test_rows_of_another_length_are_compiled_once_more_and_then_no_more():
    found = lab.orders(["right"], ranks=1, lengths=(32, 24, 16))["right"]
    assert [(row.predicted, row.measured) for row in lab.lengths_rows(found)] == [(2, 2), (0, 0)]


def test_counts_become_rows_of_the_result():
    rows = lab.order_rows({"sharded too early": lab.OrderMeasurement(1, 1, 0, 0, 0, 3.7)})
    assert rows == [
        ResultRow("sharded too early", "graphs", 1, 1, ""),
        ResultRow("sharded too early", "regions to compute again", 0, 0, ""),
        ResultRow("sharded too early", "graph breaks", 1, 1, ""),
    ]


@pytest.mark.tail
def test_the_trainer_measures_it_too_and_its_step_time(warm_torchrun):
    memory, time = lab.checkpointing(ranks=2, n_layer=2, hows=["full"])
    assert (memory.name, memory.quantity) == ("checkpointing full", "peak memory")
    assert memory.error == pytest.approx(0, abs=0.05)
    assert time.predicted is not None
    assert time.measured > 0


def test_on_gpus_it_predicts_for_the_gpus_that_train(monkeypatch):
    """The GPUs are faked by name: what is trained is not. The order of hooks is looked at on CPU cores, and said to."""
    gpu = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30)
    monkeypatch.setattr(process_group, "gpus", lambda: [gpu.name] * 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(the_lab, "orders", lambda *_, **__: {"right": None})
    monkeypatch.setattr(the_lab, "order_rows", lambda _: [])
    monkeypatch.setattr(the_lab, "lengths_rows", lambda _: [])
    on = []

    def train(*_, ranks, device):
        on.append((ranks, device))
        return SimpleNamespace(report={"tensor_bytes": 1, "compared": [], "step_s": 1.0}, losses=[1.0])

    monkeypatch.setattr(activation_checkpointing, "train", train)
    monkeypatch.setattr(the_lab, "train", train)
    result = lab.run(n_layer=1, device="cuda")

    peaks = [row.predicted for row in result.rows if row.quantity == "peak memory"]
    assert peaks == [lab.predict_peak_bytes(how, 2, 1, "cuda") / 1e6 for how in lab.HOW]
    assert not set(peaks) & {lab.predict_peak_bytes(how, 2, 1, "cpu") / 1e6 for how in lab.HOW}
    assert set(on) == {(2, "cuda")}
    assert result.hardware == "2 x NVIDIA H100 80GB HBM3, 80 GiB each"
    assert "looked at on 2 ranks on CPU cores" in result.notes[0]


@pytest.mark.parametrize(("ranks", "n_layer"), [(0, 2), (3, 2), (2, 0)])
def test_what_cannot_be_is_refused(ranks, n_layer, capsys):
    assert main(ranks, n_layer) == 2
    assert f"ranks={ranks}, n_layer={n_layer}" in capsys.readouterr().out
