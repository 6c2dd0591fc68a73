"""What one piece of an old script becomes, and what is left to a person, with its line."""

import re
import textwrap
from pathlib import Path

import pytest

from fsdp_sim.lint import examples, lint, rules
from fsdp_sim.migrate import migration_of_script
from fsdp_sim.migrate.result import _said
from tests.some import some

IMPORTS = """
import functools
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp import ShardingStrategy, StateDictType, FullStateDictConfig
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel as DDP
"""
BLOCKS = """
class Block(nn.Module): ...
class Net(nn.Module):
    def __init__(self):
        self.layers = nn.ModuleList([Block() for _ in range(4)])
torch.cuda.set_device(0)
"""


def migrated(code, *blocks):
    """The new statements of a piece of script, and its migration."""
    text = IMPORTS + BLOCKS + textwrap.dedent(code)
    found, _ = migration_of_script(text, "train.py", blocks)
    return found.new.partition("torch.cuda.set_device(0)\n")[2], found


TEXTS = {f"{id}-{what}": getattr(one, what) for id, one in examples("script").items() for what in ("trap", "clean")}
SCRIPTS = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "scripts").glob("*.py"))}


WRAP = "auto_wrap_policy=ModuleWrapPolicy({Block})"


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ("sharding_strategy=ShardingStrategy.FULL_SHARD", "fully_shard(model)"),
        ("sharding_strategy=ShardingStrategy.SHARD_GRAD_OP", "fully_shard(model, reshard_after_forward=False)"),
        ("sharding_strategy=ShardingStrategy.HYBRID_SHARD", 'mesh_dim_names=("replicate", "shard")'),
        ("sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=m", "fully_shard(model, mesh=m)"),
        (
            "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)",
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)",
        ),
        ("cpu_offload=CPUOffload(offload_params=True)", "fully_shard(model, offload_policy=CPUOffloadPolicy())"),
        ("cpu_offload=CPUOffload(offload_params=False)", "fully_shard(model)"),
        ("ignored_modules=[head]", "ignored_params={p for module in [head] for p in module.parameters()}"),
        ("use_orig_params=True, limit_all_gathers=True", "fully_shard(model)"),
        (f"{WRAP}", "if isinstance(module, Block):\n        fully_shard(module)\nfully_shard(model)"),
        (
            "auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, "
            "transformer_layer_cls={Block, nn.Linear})",
            "isinstance(module, (Block, nn.Linear))",
        ),
        ("sync_module_states=True", "dist.broadcast(tensor.detach(), src=0)"),
        ("sync_module_states=True, device_id=0", "broadcast_from_rank0=True"),
    ],
)
def test_an_argument_of_fsdp1(given, becomes):
    new, found = migrated(f"model = FSDP(model, {given})\n")

    assert becomes in new
    assert found.by_hand == []


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("sharding_strategy=ShardingStrategy.NO_SHARD", "NO_SHARD is DDP"),
        ("param_init_fn=init", "to_empty"),
        ("auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=1000)", "--block"),
        ("**kwargs", "only running the script would tell"),
    ],
)
def test_what_is_not_certain_is_left_and_named_by_its_line(given, reason):
    new, found = migrated(f"model = FSDP(\n    model,\n    {given},\n)\n")

    assert "fully_shard(" not in new
    assert [(one.line, reason in one.what) for one in found.by_hand] == [
        (len((IMPORTS + BLOCKS).split("\n")) + 2, True)
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model.clip_grad_norm_(1.0)", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
        ("n = model.clip_grad_norm_(1.0)", "n = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()"),
        (
            "with model.no_sync():\n    loss.backward()",
            "model.set_requires_gradient_sync(False)\nloss.backward()\nmodel.set_requires_gradient_sync(True)",
        ),
        ("scaler = ShardedGradScaler(init_scale=2.0)", 'scaler = torch.amp.GradScaler("cuda", init_scale=2.0)'),
        ("ok = isinstance(model, FSDP)", "ok = isinstance(model, FSDPModule)"),
        (
            "with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):\n    s = model.state_dict()",
            "s = get_model_state_dict(model)",
        ),
        (
            "with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, "
            "rank0_only=True)):\n    s = model.state_dict()",
            "s = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))",
        ),
        (
            "s = FSDP.full_optim_state_dict(model, opt)",
            "s = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, "
            "cpu_offload=True))",
        ),
        ("s = FSDP.sharded_optim_state_dict(model, opt)", "s = get_optimizer_state_dict(model, opt)"),
        ("model.load_state_dict(s)", "set_model_state_dict(model, s, options=StateDictOptions(full_state_dict=True))"),
    ],
)
def test_a_call_on_the_wrapped_model(old, new):
    text, found = migrated(f"model = FSDP(model)\n{old}\n")

    assert text.endswith(f"{new}\n")
    assert found.by_hand == []


FUNCTIONS = [  # that make the wrap policy, and what is called with what they return
    ("def policies():\n    wrap = ModuleWrapPolicy({Block})\n    return None, wrap\n", "_, wrap = policies()", "wrap"),
    ("def policy():\n    return ModuleWrapPolicy({Block})\n", "wrap = policy()", "wrap"),
    ("wrap = 1\ndef other():\n    pass\n", "wrap = ModuleWrapPolicy({Block})", "wrap"),
]


@pytest.mark.parametrize(("before", "made", "given"), FUNCTIONS)
def test_a_policy_is_found_in_the_function_that_makes_it(before, made, given):
    text = f"{before}def main():\n    {made}\n    model = FSDP(Net(), auto_wrap_policy={given})\n    return model\n"
    new, found = migrated(text)

    assert "if isinstance(module, Block):" in new
    assert [one for one in found.by_hand if "--block" in one.what] == []


def test_a_policy_that_is_not_told_gives_way_to_the_blocks_that_are_named():
    text = "def main(wrap):\n    model = FSDP(Net(), auto_wrap_policy=wrap)\n"
    assert migrated(f"def policy():\n    wrap = policy()\n    return wrap\nwrap = policy()\n{text}")[1].by_hand
    assert "It is not told here by which classes wrap wraps" in migrated(text)[1].by_hand[0].what

    assert "if isinstance(module, Block):" in migrated(text, "Block")[0]
    assert (
        migrated(text, "Layer")[1].by_hand[0].what == "Layer is not defined in this script: import it from where it is."
    )


def test_ddp_sends_rank_0s_weights_and_its_blocks_are_found():
    new, found = migrated("model = DDP(Net().cuda(), device_ids=[0])\n")

    assert new.startswith("model = Net().cuda()\nfor tensor in (*model.parameters(), *model.buffers()):")
    assert "if isinstance(module, Block):" in new
    assert found.source == ["ddp"]


def test_what_ranks_gather_comes_before_the_test_of_the_rank():
    new, _ = migrated(
        """
        model = DDP(Net().cuda())
        if step % 10 == 0 and rank == 0:
            torch.save(model.module.state_dict(), "m.pt")
        """
    )

    gather = (
        "model_state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
    )
    assert new.endswith(
        f'if step % 10 == 0:\n    {gather}\n    if rank == 0:\n        torch.save(model_state, "m.pt")\n'
    )


def test_a_forward_on_one_rank_is_left_to_a_person():
    _, found = migrated("model = DDP(Net().cuda())\nif rank == 0:\n    model(x)\n")

    assert [one.rule for one in found.by_hand] == ["forward-on-one-rank"]


def test_what_stands_before_the_wrapper_is_not_changed():
    new, _ = migrated("model = Net()\nmodel.load_state_dict(s)\nmodel = DDP(model)\n")

    assert new.startswith("model = Net()\nmodel.load_state_dict(s)\n")


def test_checkpointing_comes_before_compile_before_sharding_before_the_optimizer():
    new, _ = migrated(
        """
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = Scheduler(optimizer)
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        model = torch.compile(model)
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
        """
    )

    order = ["apply_activation_checkpointing(", "module.compile()", "fully_shard(model)", "AdamW(", "Scheduler("]
    assert sorted(order, key=new.index) == order


def test_each_trap_that_is_named_is_one_of_lints():
    assert {of["rule"] for of in _said().values() if "rule" in of} <= set(rules())


def test_lines_end_as_they_did():
    text = IMPORTS + BLOCKS + "model = FSDP(model, sync_module_states=True, device_id=0)\nmodel.load_state_dict(s)\n"
    new, windows = (migration_of_script(one, "train.py")[0].new for one in (text, text.replace("\n", "\r\n")))

    assert windows == new.replace("\n", "\r\n")


def test_a_script_without_a_wrapper_has_nothing_to_do():
    found, _ = migration_of_script("print(1)\n", "train.py")

    assert (found.changed, found.diff) == (False, "")
    assert "nothing to do" in found.notes[0]


def test_what_is_no_python_is_refused():
    with pytest.raises(ValueError, match=r"train\.py is not Python: line 1"):
        migration_of_script("def (", "train.py")


TIED = """
class Tied(nn.Module):
    def __init__(self):
        self.wte = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(4, 8)
        self.head.weight = self.wte.weight

model = FSDP(Tied(), auto_wrap_policy=ModuleWrapPolicy({%s}))
"""


def test_weights_that_are_tied_across_units_are_named_and_those_of_the_root_are_not():
    _, one = migrated(TIED % "Block")
    _, two = migrated(TIED % "Block, nn.Embedding")

    assert one.by_hand == []
    assert any("Tied weights stay one parameter" in line for line in one.same)
    assert [(look.line, look.rule) for look in two.by_hand] == [
        (_line_of("self.head.weight =", TIED), "tied-across-units")
    ]
    assert "self.wte would be a unit alone" in two.by_hand[0].what


def test_weights_that_another_file_ties_are_named_with_that_file(tmp_path):
    (tmp_path / "model.py").write_text("from torch import nn\n" + TIED.partition("model =")[0])
    text = IMPORTS + "from model import Tied\nmodel = FSDP(Tied(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))\n"
    found, _ = migration_of_script(text, str(tmp_path / "train.py"))

    assert [one.what.partition(" share")[0] for one in found.by_hand] == ["model.py, line 8: self.head and self.wte"]


@pytest.mark.parametrize(
    ("code", "at", "must"),
    [
        ('with torch.device("meta"):\n    model = Net()\nmodel = FSDP(model)\n', 'with torch.device("meta")', True),
        ('model = Net().to_empty(device="cuda")\nmodel = FSDP(model)\n', "to_empty", False),
    ],
)
def test_a_model_on_the_meta_device_is_named_with_what_to_do(code, at, must):
    _, found = migrated(code)

    assert [(one.line, one.must) for one in found.look if one.rule == "meta-never-filled"] == [
        (_line_of(at, code), must)
    ]


def _line_of(piece, code):
    return (IMPORTS + BLOCKS + textwrap.dedent(code)).partition(piece)[0].count("\n") + 1


WRAPPING = [name for name, text in (TEXTS | SCRIPTS).items() if re.search(r"FSDP\(|DDP\(", text)]


@pytest.mark.parametrize("name", some(WRAPPING, first=8))
def test_a_migration_with_nothing_left_to_do_makes_no_trap(name, tmp_path):
    found, _ = migration_of_script((TEXTS | SCRIPTS)[name], f"{name}.py")
    if found.by_hand:
        return
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text((TEXTS | SCRIPTS)[name])
    new.write_text(found.new)

    before, after = ({one.rule for one in lint(str(path))[0].findings} for path in (old, new))
    assert after <= before | {one.rule for one in found.look}


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("import copy\nema = copy.deepcopy(model)\n", "deepcopy-of-shards"),
        ("model.module.generate(x)\n", "generate-without-hooks"),
    ],
)
def test_what_ddp_allowed_and_fsdp2_does_not_is_named_with_its_line(code, rule):
    code = f"model = DDP(Net().cuda())\nmodel(x)\n{code}"
    _, found = migrated(code)

    assert (_line_of(code.splitlines()[-1], code), rule) in [(one.line, one.rule) for one in found.look]


LIGHTNING = """
from torch import nn
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy
class Block(nn.Module): ...
"""


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ("'fsdp', devices=4", "ModelParallelStrategy(shard, data_parallel_size=4, tensor_parallel_size=1)"),
        ("'fsdp', devices=[0, 1], num_nodes=nodes", "data_parallel_size=2 * nodes, tensor_parallel_size=1"),
        ("'fsdp', devices='auto'", "data_parallel_size=torch.cuda.device_count(), tensor_parallel_size=1"),
        ("'fsdp_cpu_offload'", "CPUOffloadPolicy()"),
        ("'fsdp', precision='bf16-mixed'", "param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16"),
        ("FSDPStrategy(auto_wrap_policy={Block})", "if isinstance(module, Block):"),
        ("FSDPStrategy(sharding_strategy='SHARD_GRAD_OP')", "reshard_after_forward"),
        ("FSDPStrategy(sharding_strategy='HYBRID_SHARD')", 'mesh_dim_names=("replicate", "shard")'),
        ("FSDPStrategy(timeout=t)", "tensor_parallel_size=1, timeout=t)"),
        ("FSDPStrategy(accelerator='cuda')", "tensor_parallel_size=1)"),
        ("FSDPStrategy(state_dict_type='full')", "save_distributed_checkpoint=False"),
        (
            "FSDPStrategy(auto_wrap_policy={Block}, activation_checkpointing_policy={Block})",
            "if isinstance(module, CheckpointWrapper):",
        ),
        ("FSDPStrategy(activation_checkpointing_policy=None, device_mesh=None)", "fully_shard(model"),
        ("'ddp'", "broadcast_from_rank0=True"),
    ],
)
def test_a_strategy_of_lightning(given, becomes):
    found, _ = migration_of_script(f"{LIGHTNING}fabric = Fabric(strategy={given})\n", "train.py")

    assert becomes in found.new
    assert "FSDPStrategy" not in found.new
    assert found.by_hand == []
    assert "isinstance(module, None)" not in found.new
    assert compile(found.new, "train.py", "exec")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "fabric = Fabric(strategy='fsdp')\nmodel, optimizer = fabric.setup(model, optimizer)",
            "fabric.setup_module(model), make the optimizer of it, then fabric.setup_optimizers(optimizer)",
        ),
        ("import lightning as L\nL.Trainer(strategy='fsdp')", "configure_model(self) with the line shard(self.model"),
        ("Fabric(strategy='fsdp', precision='16-mixed')", 'refuses precision="16-mixed": use "bf16-mixed"'),
        (
            "Fabric(strategy=FSDPStrategy(device_mesh=(2, 4)))",
            "device_mesh=(2, 4): ModelParallelStrategy makes its own",
        ),
        ("Fabric(strategy=FSDPStrategy(**more))", "more may hold any arguments"),
        ("Fabric(strategy=FSDPStrategy(precision=MixedPrecision()))", "give precision to the Fabric or the Trainer"),
        ("Fabric(strategy='deepspeed_stage_3')", "write FSDPStrategy(auto_wrap_policy={Block}) in its place"),
    ],
)
def test_what_lightning_leaves_to_a_person(code, says):
    text = LIGHTNING if "L.Trainer" not in code else ""
    found, _ = migration_of_script(f"{text}{code}\n", "train.py")

    assert says in " ".join(one.what for one in found.by_hand)
