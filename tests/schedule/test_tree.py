"""Which units run inside which."""

from fsdp_sim.schedule import Unit
from fsdp_sim.schedule.tree import in_order_of_modules, tree_of


def test_units_run_inside_the_innermost_unit_whose_name_begins_theirs():
    units = [
        Unit("root", segments=("embed", ..., "head")),
        Unit("layers.1", segments=("layers.1", ...)),
        Unit("layers.1.moe", segments=(...,)),
        Unit("layers.1.moe.expert"),
        Unit("layers.10"),  # not inside layers.1
        Unit("norm"),
    ]
    tree = tree_of(units)
    assert [child.unit.name for child in tree.children] == ["layers.1", "layers.10", "norm"]
    assert [node.unit.name for node in tree] == [
        "root", "layers.1", "layers.1.moe", "layers.1.moe.expert", "layers.10", "norm",
    ]  # fmt: skip


def test_the_root_may_stand_anywhere_and_need_not_be_called_so():
    tree = tree_of([Unit("layers.0"), Unit("model", segments=(...,)), Unit("layers.1")])
    assert tree.unit.name == "model"
    assert [child.unit.name for child in tree.children] == ["layers.0", "layers.1"]


def test_modules_of_one_container_stay_together():
    names = ["norm", "a.0", "b.0", "a.1", "b.1.x", "b.1"]
    nodes = tree_of([Unit("root", segments=(...,)), *(Unit(name) for name in names)]).children
    found = [node.unit.name for node in in_order_of_modules(nodes)]
    assert found == ["norm", "a.0", "a.1", "b.0", "b.1", "b.1.x"]
