"""The training in pieces."""

from labs.loop.minimal import shard
from labs.model import build
from labs.model.gpt import GPTConfig


def test_shard_makes_units_of_the_blocks_and_then_of_the_root():
    model, units = build(GPTConfig.preset("teaching", n_layer=3)), []
    shard(model, lambda module, **options: units.append((module, options)), reshard_after_forward=False)
    assert [module for module, _ in units] == [*model.layers, model]
    assert all(options == {"reshard_after_forward": False} for _, options in units)
