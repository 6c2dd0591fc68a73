"""Which modules and parameters a call manages."""

import torch
from torch import nn

from fsdp_sim.mini import fully_shard
from fsdp_sim.mini.modules import managed_modules, managed_params, move_to_device, root_modules
from tests.mini.models import Toy


def test_modules_inside_others_are_no_roots():
    model = Toy()
    assert root_modules([model.layers[0], model, model.head]) == (model,)
    assert root_modules([model.embed, model.head]) == (model.embed, model.head)


def test_what_is_sharded_already_is_left_out(ranks):
    def run():
        model = Toy()
        fully_shard(model.layers[1])
        managed = managed_modules((model,))
        return model.layers[1] in managed, model.layers[0] in managed, managed[-1] is model

    assert ranks(2, run) == [(False, True, True)] * 2


def test_tied_and_ignored_parameters():
    model = Toy(1)
    model.head.w = model.embed.w
    managed = managed_modules((model,))
    assert managed_params(managed, set(), None) == [model.embed.w, model.layers[0].w]
    assert managed_params(managed, {model.embed.w}, None) == [model.layers[0].w]


def test_meta_tensors_stay_where_they_are():
    with torch.device("meta"):
        on_meta = nn.Linear(2, 2)
    move_to_device(list(on_meta.parameters()), [on_meta], torch.device("cpu"))
    assert on_meta.weight.is_meta
