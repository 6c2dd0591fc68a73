"""Lightning's FSDPStrategy, which is FSDP1, and DDPStrategy become ModelParallelStrategy and a function that shards.

Source: ``lightning_fabric.strategies.ModelParallelStrategy`` of Lightning 2.6, which is FSDP2's strategy.
"""

from __future__ import annotations

import libcst as cst

from fsdp_sim.migrate.arguments import DDP_SAYS, READERS, hybrid_mesh, unread
from fsdp_sim.migrate.sharding import FSDP, KEEPS, WRAPPER, Sharding, choose_units
from fsdp_sim.migrate.source import (
    Change,
    Script,
    arguments_of,
    calls_in,
    dotted,
    statements,
    targets_of,
    walk,
)

OF_FABRIC = {  # what FSDPStrategy takes, and its successor leaves to who makes it
    "accelerator": "ModelParallelStrategy takes none; the Fabric or the Trainer chooses one, or is given it.",
    "parallel_devices": "ModelParallelStrategy takes none; give the Fabric or the Trainer devices, and leave this out.",
    "precision": "ModelParallelStrategy takes none; give precision to the Fabric or the Trainer, and leave this out.",
}
PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")
WORDS = {"fsdp": "FSDPStrategy()", "fsdp_cpu_offload": "FSDPStrategy(cpu_offload=True)"}
WORDS |= {"ddp": "DDPStrategy()", "ddp_find_unused_parameters_true": "DDPStrategy(find_unused_parameters=True)"}
"""What the words that ``strategy=`` takes are short for."""
STAYS = ("process_group_backend", "timeout")
"""Arguments that both strategies have."""
OLD, DEEPSPEED = ("FSDPStrategy", "DDPStrategy"), "DeepSpeedStrategy"
DTYPES = {"bf16-mixed": "torch.bfloat16", "bf16": "torch.bfloat16"}


def trainers_of(script: Script) -> list[cst.Call]:
    """The calls that make a Fabric or a Trainer of Lightning."""
    return [one for one in calls_in(script.module) if _is_lightning(script, one, "Fabric", "Trainer")]


def strategies_of(script: Script) -> list[cst.CSTNode]:
    """What says a strategy that is migrated: a call of its class, or a word for one."""
    words = (arguments_of(call).get("strategy") for call in trainers_of(script))
    return [
        *(one for one in calls_in(script.module) if _is_lightning(script, one, *OLD, DEEPSPEED)),
        *(one for one in words if one is not None and (_word(one) in WORDS or _word(one).startswith("deepspeed"))),
    ]


class Strategies(Change):
    """Each becomes a ModelParallelStrategy; the function that shards stands before the statement that has it."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        trainers = trainers_of(script)
        self.given = arguments_of(trainers[0]) if trainers else {}
        self.has_fabric = any(_is_lightning(script, one, "Fabric") for one in trainers)
        self.new = ""

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        keyword, word = original_node.keyword, _word(original_node.value)
        if keyword is not None and keyword.value == "strategy" and word.startswith("deepspeed") and self.given:
            self._deepspeed(original_node)
        if keyword is None or keyword.value != "strategy" or word not in WORDS or not self.given:
            return updated_node
        call = cst.parse_expression(WORDS[word])
        assert isinstance(call, cst.Call)
        return updated_node.with_changes(value=self._strategy(call, WORDS[word], original_node, updated_node.value))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        if _is_lightning(self.script, original_node, DEEPSPEED):
            self._deepspeed(original_node)
        if not _is_lightning(self.script, original_node, *OLD):
            return updated_node
        return self._strategy(updated_node, self.script.name_of(original_node), original_node, updated_node)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        if not self.new:
            return updated_node
        made, self.new = statements(self.new, self.script.module.config_for_parsing), ""
        blank = cst.EmptyLine(indent=False)
        above = made[0].with_changes(leading_lines=[blank])
        return cst.FlattenSentinel(
            [above, updated_node.with_changes(leading_lines=[blank, *updated_node.leading_lines])]
        )

    def _strategy(self, call: cst.Call, name: str, at: cst.CSTNode, old: cst.BaseExpression) -> cst.BaseExpression:
        script, api = self.script, "ddp" if "DDP" in name.rpartition(".")[2] else "fsdp1"
        script.found.append(api)
        found, given = Sharding(), arguments_of(call)
        kept = [f"{name}={script.code(node)}" for name, node in given.items() if name in STAYS]
        checkpointed = ""
        for name, node in given.items():
            text = script.code(node)
            if text == "None":  # as if it were not given
                continue
            if name == "sharding_strategy" and _word(node).upper() in KEEPS:
                script.plan["sharding_strategy"] = _word(node).upper()
                found.arguments |= {"reshard_after_forward": said} if (said := KEEPS[_word(node).upper()]) else {}
            elif name == "auto_wrap_policy" and isinstance(script.value_of(node), cst.Set):
                found.units = f"isinstance(module, {_classes(script, node)})"
            elif name.startswith("activation_checkpointing"):
                checkpointed = _classes(script, node)
                script.plan["activation_checkpointing"] = "full"
            elif name == "cpu_offload" and text == "True":
                script.need(FSDP, "CPUOffloadPolicy")
                script.plan["cpu_offload"] = True
                script.use("offload")
                found.arguments["offload_policy"] = "CPUOffloadPolicy()"
            elif name == "state_dict_type":
                kept += ["save_distributed_checkpoint=False"] if _word(node) == "full" else []
            elif name == "device_mesh":
                script.look(
                    node, f"device_mesh={text[:40]}: ModelParallelStrategy makes its own mesh, of data and tensor "
                    "parallelism. Make this one with init_device_mesh in shard, and give it to fully_shard.", must=True,
                )  # fmt: skip
                found.refused = True
            elif api == "ddp" and name in DDP_SAYS and text != "False":
                script.look(node, DDP_SAYS[name])
            elif api == "fsdp1" and name in READERS:
                READERS[name](script, found, node)
            elif api == "fsdp1" and name in OF_FABRIC:
                script.look(node, f"{name}={text[:40]}: {OF_FABRIC[name]}", must=name != "accelerator")
                found.refused |= name != "accelerator"
            elif name in ("*", "**"):
                unread(script, found, node)
        if found.broadcast or api == "ddp":
            found.broadcast = "after"  # Fabric shards a model that may be on the CPU yet
        if found.refused:
            script.refused = True
            return old
        choose_units(script, found, at, by_class=api == "ddp")
        self._precision(found, api)
        found.arguments = {"mesh": 'device_mesh["data_parallel"]'} | found.arguments
        if "HYBRID" in str(script.plan.get("sharding_strategy")):
            found.arguments["mesh"] = hybrid_mesh(script)
        code = _checkpoints(script, found, checkpointed) + found.lines(script, "model") + "return model\n"
        self.new = "def shard(model, device_mesh):\n" + "".join(f"    {line}\n" for line in code.splitlines())
        module = _module_of(script, self.has_fabric)
        script.need(module, "ModelParallelStrategy")
        self._by_hand(at)
        parts = [
            *(["shard"] if self.has_fabric else []),
            f"data_parallel_size={self._gpus()}",
            "tensor_parallel_size=1",
        ]
        return cst.parse_expression(f"ModelParallelStrategy({', '.join([*parts, *kept])})")

    def _deepspeed(self, at: cst.CSTNode) -> None:
        self.script.found.append("deepspeed")
        self.script.look(
            at, "Lightning's DeepSpeedStrategy is not rewritten: write FSDPStrategy(auto_wrap_policy={Block}) in its "
            "place, with the class of your blocks, and migrate again. What its JSON says of precision and offloading "
            "fsdp-sim migrate CONFIG.json --as torch tells.", must=True,
        )  # fmt: skip

    def _by_hand(self, at: cst.CSTNode) -> None:
        script = self.script
        script.look(
            at, "ModelParallelStrategy's own sizes are others: data_parallel_size the number of nodes, and the GPUs of "
            "a node tensor parallel. So both are written out.",
        )  # fmt: skip
        if not self.has_fabric:
            script.look(
                at, "The Trainer shards where the LightningModule says so. Give it a method "
                "configure_model(self) with the line shard(self.model, self.device_mesh), and write for self.model the "
                "network that training_step calls.", must=True,
            )  # fmt: skip
        fabrics = _fabrics(script)
        for one in calls_in(script.module):
            owner, _, method = dotted(one.func).rpartition(".")
            if method == "setup" and owner in fabrics and len(one.args) > 1:
                script.look(
                    one, f"{script.code(one)[:60]} would shard the model after the optimizer took its parameters, "
                    f"which would then never change: model = {owner}.setup_module(model), make the optimizer of it, "
                    f"then {owner}.setup_optimizers(optimizer).", must=True, rule="fabric-joint-setup",
                )  # fmt: skip

    def _precision(self, found: Sharding, api: str) -> None:
        """FSDPStrategy made FSDP1's MixedPrecision of the Trainer's ``precision``; the new strategy only autocasts."""
        node = self.given.get("precision")
        word = _word(node) if node is not None else ""
        if node is not None and word in ("16-mixed", "16"):
            self.script.look(node, f'ModelParallelStrategy refuses precision="{word}": use "bf16-mixed".', must=True)
        elif word in DTYPES and api == "fsdp1" and "mp_policy" not in found.arguments:
            self.script.need("torch", "")
            self.script.need(FSDP, "MixedPrecisionPolicy")
            found.arguments["mp_policy"] = (
                f"MixedPrecisionPolicy(param_dtype={DTYPES[word]}, reduce_dtype={DTYPES[word]})"
            )
            self.script.plan |= {"param_dtype": "bf16", "reduce_dtype": "bf16"}
            self.script.use("mixed-precision")

    def _gpus(self) -> str:
        """How many GPUs there are in all, as code."""
        sizes = []
        for name, default in (("devices", "torch.cuda.device_count()"), ("num_nodes", "1")):
            node = self.given.get(name)
            text = self.script.code(node) if node is not None else default
            if _word(node) == "auto" or text == "-1":
                text = default
            if isinstance(node, cst.List):
                text = str(len(node.elements))
            sizes.append(text)
        if "torch." in sizes[0]:
            self.script.need("torch", "")
        if all(size.isdecimal() for size in sizes):
            return str(int(sizes[0]) * int(sizes[1]))
        return " * ".join(size for size in sizes if size != "1")


def _module_of(script: Script, has_fabric: bool) -> str:
    """Where the script's Lightning has its strategies."""
    packages = {name.partition(".")[0] for name in script.names.values()} & {*PACKAGES}
    package = next((name for name in PACKAGES if name in packages), "lightning")
    if package != "lightning":
        return f"{package}.strategies"
    return f"lightning.{'fabric' if has_fabric else 'pytorch'}.strategies"


def _is_lightning(script: Script, call: cst.Call, *names: str) -> bool:
    head, _, rest = script.name_of(call).partition(".")
    return head in PACKAGES and rest.rpartition(".")[2] in names


def _fabrics(script: Script) -> set[str]:
    """Names that hold a Fabric."""
    assigns = (one for one in walk(script.module) if isinstance(one, cst.Assign) and isinstance(one.value, cst.Call))
    return {
        dotted(targets_of(one)[0])
        for one in assigns
        if isinstance(one.value, cst.Call) and _is_lightning(script, one.value, "Fabric")
    }


def _word(node: cst.CSTNode | None) -> str:
    """What a literal string says; empty for anything else."""
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else ""
    return value if isinstance(value, str) else ""


def _classes(script: Script, node: cst.BaseExpression) -> str:
    """Classes for isinstance: of a set or a list of them, or of one."""
    value = script.value_of(node)
    if isinstance(value, cst.Set | cst.List | cst.Tuple):
        names = [script.code(one.value) for one in value.elements]
        return names[0] if len(names) == 1 else f"({', '.join(names)})"
    return script.code(node)


def _checkpoints(script: Script, found: Sharding, classes: str) -> str:
    """Lines that checkpoint before anything is sharded: a unit is then what wraps a block."""
    if not classes:
        return ""
    for name in ("apply_activation_checkpointing", "CheckpointWrapper"):
        script.need(WRAPPER, name)
    if found.units == f"isinstance(module, {classes})":
        found.units = "isinstance(module, CheckpointWrapper)"
    return f"apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, {classes}))\n"
