"""The units of a module are those that `fully_shard` makes of it."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_sim.measure import units_from_module
from fsdp_sim.mini import fully_shard
from fsdp_sim.mini.observer import segments
from fsdp_sim.schedule import Unit, state_bytes
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Memory
from labs.model.gpt import GPT, GPTConfig


def meta_gpt(name: str = "teaching", **changes: object) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig.preset(name, **changes))


def numel(units: list[Unit]) -> int:
    return sum(torch.Size(param.shape).numel() for unit in units for param in unit.params)


def shapes(units: list[Unit]) -> dict[str, list[tuple[int, ...]]]:
    return {unit.name: sorted(param.shape for param in unit.params) for unit in units}


class Experts(nn.Module):
    """A block with units inside, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.router(x).softmax(-1)  # (B, 2)
        return self.scale * sum(weight[:, i, None] * expert(x) for i, expert in enumerate(self.experts))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), Experts(), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ---------------------------------------------------------------------- parameters


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["teaching", "gpt2"])
def test_every_parameter_of_the_gpt_is_in_one_unit_a_tied_one_once(name: str, tied: bool) -> None:
    model = meta_gpt(name, tied=tied)
    units = units_from_module(model)
    assert [unit.name for unit in units] == ["root", *(f"layers.{i}" for i in range(model.config.n_layer))]
    assert numel(units) == model.num_params()
    assert ("head.weight" in {param.name for param in units[0].params}) is not tied
    assert units[1].params == units[-1].params  # equal blocks


def test_frozen_parameters_and_dtypes_are_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False).bfloat16())
    model[0].weight.requires_grad_(False)
    (root,) = units_from_module(model)
    assert [(p.name, p.dtype, p.requires_grad) for p in root.params] == [
        ("0.weight", "fp32", False),
        ("1.weight", "bf16", True),
    ]


def test_a_dtype_that_the_schedule_does_not_know_is_named() -> None:
    with pytest.raises(ValueError, match=r"torch\.float8_e4m3fn"):
        units_from_module(nn.Linear(2, 2).to(torch.float8_e4m3fn))


# ---------------------------------------------------------------------- wrapping


def test_each_block_of_a_module_list_is_a_unit_wherever_it_is() -> None:
    units = units_from_module(Model())
    assert [unit.name for unit in units] == [
        "root",
        "blocks.0",
        "blocks.1",
        "blocks.1.experts.0",
        "blocks.1.experts.1",
        "blocks.2",
    ]
    assert {param.name for param in units[2].params} == {"scale", "router.weight", "router.bias"}
    assert units[0].segments == ("embed", ..., "head")
    assert units[2].segments == ("blocks.1.embed", ..., "blocks.1.head")
    assert units[3].segments == ("blocks.1.experts.0",)


def test_of_lists_in_a_list_the_members_are_units_for_a_list_has_no_forward() -> None:
    stages = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 2)])])
    assert [unit.name for unit in units_from_module(stages)] == ["root", "0.0", "0.1", "1.0"]


def test_the_order_of_wrap_does_not_matter() -> None:
    names = ["blocks.1.experts.0", "blocks.2", "blocks.1"]
    assert units_from_module(Model(), names) == units_from_module(Model(), names[::-1])


def test_root_alone_is_one_unit_that_computes_in_one_piece() -> None:
    (root,) = units_from_module(Model(), [])
    assert (root.name, root.segments) == ("root", ("root",))
    assert numel([root]) == sum(p.numel() for p in Model().parameters())


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (["blocks.0", "block.1"], r"wrap names 'block\.1', not a module of Model; there are \[.*'blocks\.1'"),
        ([""], r"wrap names '', not a module of Model; there are \['embed'"),
        (["blocks.0", "blocks.0"], r"wrap names 'blocks\.0' twice"),
        (["blocks"], r"wrap names 'blocks', a ModuleList without a forward, .* name the modules in it"),
    ],
)
def test_a_wrong_name_is_told_with_those_that_are_close(wrap: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        units_from_module(Model(), wrap)


# ---------------------------------------------------------------------- what fully_shard does


@pytest.fixture
def one_rank(tmp_path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("make", "wrap", "inputs"),
    [
        (lambda: GPT(GPTConfig.preset("teaching", n_layer=3)), None, torch.zeros(1, 4, dtype=torch.long)),
        (lambda: GPT(GPTConfig.preset("teaching", n_layer=2, tied=False)), [], torch.zeros(1, 4, dtype=torch.long)),
        (Model, None, torch.ones(2, 3)),
        (Model, ["blocks.1", "head"], torch.ones(2, 3)),
    ],
    ids=["gpt", "gpt, root only", "nested", "some"],
)
def test_units_are_the_groups_of_the_mini_fsdp(make, wrap: list[str] | None, inputs: torch.Tensor) -> None:
    model = make()
    units = units_from_module(model, wrap)
    modules = dict(model.named_modules())
    for unit in sorted(units[1:], key=lambda unit: -unit.name.count(".")):
        fully_shard(modules[unit.name])
    fully_shard(model)
    model(inputs)  # the first forward gives the groups their names
    groups = model._get_fsdp_state()._groups()
    whole = {group.unit: sorted(tuple(p.sharded_param.shape) for p in group.fsdp_params) for group in groups}
    assert list(whole) == [unit.name for unit in units]
    assert whole == shapes(units)
    names = [name for name, module in model.named_modules() if fully_shard.state(module) is not None]
    assert {group.unit: segments(group, names) for group in groups} == {
        unit.name: (unit.names_of_segments[0], unit.names_of_segments[-1]) for unit in units
    }


def test_buffers_are_whole_on_every_rank_and_counted_once() -> None:
    model, table = Model(), torch.zeros(8, 16)
    for module in (model, model.blocks[0], model.blocks[1]):
        module.register_buffer("table", table)
    model.blocks[1].experts[0].register_buffer("mask", torch.zeros(1, 4).expand(100, 4), persistent=False)

    units = {unit.name: unit for unit in units_from_module(model)}
    held = {name: unit.buffer_bytes for name, unit in units.items() if unit.buffer_bytes}
    assert held == {"blocks.1.experts.0": 4 * 4, "blocks.0": 4 * 8 * 16}
    assert state_bytes(list(units.values()), Plan(), 4)[Memory.SHARDED, "blocks.0"] == 4 * (12 + 2) + 4 * 8 * 16
