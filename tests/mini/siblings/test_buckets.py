"""Which parameters travel together, and when a bucket is sent."""

import doctest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fsdp_sim.mini.siblings import buckets
from fsdp_sim.mini.siblings.buckets import Bucket, assign_to_buckets
from tests.mini.models import Toy


def params(*numels, dtype=torch.float32):
    return [nn.Parameter(torch.empty(n, dtype=dtype)) for n in numels]


def numels(assigned):
    return [[p.numel() for p in bucket] for bucket in assigned]


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(buckets) == doctest.TestResults(failed=0, attempted=2)


def test_the_last_parameter_comes_first_and_a_full_bucket_may_be_too_full():
    assert numels(assign_to_buckets(params(1, 2, 3, 4), cap_bytes=5 * 4)) == [[4, 3], [2, 1]]


def test_a_parameter_larger_than_a_bucket_has_one_of_its_own():
    assert numels(assign_to_buckets(params(1, 100, 1), cap_bytes=4)) == [[1], [100], [1]]


def test_each_dtype_has_its_own_buckets():
    mixed = [*params(1, 2), *params(3, dtype=torch.bfloat16), *params(4)]
    assert numels(assign_to_buckets(mixed, cap_bytes=1000)) == [[4, 2, 1], [3]]


def test_buckets_are_those_that_torch_rebuilds_in_the_order_of_the_gradients(ranks):
    cap_bytes = 600

    def run():
        model = Toy(sizes=(7, 15, 17, 2))
        ddp = TorchDDP(model, bucket_cap_mb=cap_bytes / 2**20)
        theirs = []

        def hook(_, bucket):
            theirs.append(bucket.buffer().numel())
            return allreduce_hook(dist.group.WORLD, bucket)

        ddp.register_comm_hook(None, hook)
        for _ in range(2):
            theirs.clear()
            ddp(torch.randn(4, 4)).sum().backward()
        return theirs, [
            sum(p.numel() for p in bucket) for bucket in assign_to_buckets([*model.parameters()], cap_bytes)
        ]

    for theirs, ours in ranks(2, run):
        assert ours == theirs
        assert len(ours) > 1


def test_parts_of_a_bucket_are_views_side_by_side_and_padding_follows():
    bucket = Bucket(0, [nn.Parameter(torch.empty(2, 3)), nn.Parameter(torch.empty(1))], multiple_of=4)
    flat = bucket.zeros()
    for number, param in enumerate(bucket.params, start=1):
        bucket.part(flat, param).fill_(number)
    assert flat.tolist() == [1, 1, 1, 1, 1, 1, 2, 0]
