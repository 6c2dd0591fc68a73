"""A cluster is ranks and a link, in SI units inside."""

import pytest

from fsdp_sim.spec import Cluster


def test_units_at_the_edge_become_si():
    cluster = Cluster("gpu", gpus=8, bandwidth_gbps=400, latency_us=5)
    assert cluster.bandwidth_bytes_per_s == 50e9
    assert cluster.latency_s == pytest.approx(5e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gpus": 0}, r"Cluster\.gpus is 0; it must be a whole number >= 1 \(the world size\)"),
        ({"kind": "tpu"}, r"Cluster\.kind is 'tpu'; it must be 'gpu' or 'cpu'"),
        ({"bandwidth_gbps": 0}, r"Cluster\.bandwidth_gbps is 0; it must be a number > 0 \(gigabits per second\)"),
        ({"latency_us": -1}, r"Cluster\.latency_us is -1; it must be a number >= 0"),
    ],
)
def test_a_wrong_value_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        Cluster(**{"kind": "cpu", "gpus": 4, "bandwidth_gbps": 1.0} | wrong)
