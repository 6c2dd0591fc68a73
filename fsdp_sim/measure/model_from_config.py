"""`model_from_config`: a Hugging Face model that the simulator's tables do not know, traced as transformers has it."""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fsdp_sim.cost import Workload
from fsdp_sim.measure.model_from_module import model_from_module
from fsdp_sim.packages import need
from fsdp_sim.spec import Plan, may_change_shapes
from fsdp_sim.timeline import read_text
from fsdp_sim.words import in_brief

HEADS = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")


def model_from_config(
    source: str | Path | Mapping[str, Any], plan: Plan | None = None, *, progress: bool = True
) -> Workload:
    """Trace the module that transformers builds of a ``config.json``: no weights, no network, no code of others.

    Optional kernels (flash-linear-attention, mamba-ssm) are left out: what is traced is the module's own torch code,
    which takes longer and keeps more.

    Args:
        source: the file, the folder that holds it, or what is in it.
        plan: says how many sequences of how many tokens, and what `model_from_module` takes of it.
        progress: show a progress bar.

    Raises:
        ValueError: transformers does not know the model either, cannot build it, or it reads no tokens; what
            `model_from_module` cannot trace.
        ModuleNotFoundError: transformers is not installed.

    Example:
        >>> small = {"model_type": "arcee", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        ...          "intermediate_size": 128, "vocab_size": 256}
        >>> workload = model_from_config(small, Plan(seq_len=32), progress=False)
        >>> [unit.name for unit in workload.units], workload.tokens
        (['root', 'model.layers.0', 'model.layers.1'], 32)
    """
    need("a model that the simulator's tables do not know", "transformers")
    import transformers

    plan = plan or Plan()
    if isinstance(source, Mapping):
        path, where, given = None, "the config", dict(source)
    else:
        path = Path(source, "config.json") if Path(source).is_dir() else Path(source)
        where, given = str(path), json.loads(read_text(path))
    kind = given.get("model_type") if isinstance(given, dict) else given
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{where}: model_type is {in_brief(kind)}, which transformers {transformers.__version__} does not know "
            f"either; give the dimensions (Model)"
        )
    with _quiet(transformers):
        head, config = _built(path, given, transformers)
        inputs = {"input_ids": torch.zeros(plan.micro_batch, plan.seq_len, dtype=torch.long)}
        one_a_row = head.__name__.endswith(("ForSequenceClassification", "ForMultipleChoice"))  # and its loss is small
        if "labels" in inspect.signature(head.forward).parameters and not one_a_row:
            inputs["labels"] = inputs["input_ids"]
        name = Path(given["_name_or_path"]).name if isinstance(given.get("_name_or_path"), str) else ""
        try:
            return model_from_module(lambda: head(config), inputs, plan=plan, name=name or kind, progress=progress)
        except ValueError:
            raise
        except Exception as error:  # whatever its code says, such as that experts multiply in bf16 alone
            raise ValueError(
                f"{where}: {head.__name__} does not run on {plan.micro_batch} x {plan.seq_len:,} tokens with "
                f"param_dtype={plan.param_dtype!r}: {error}"
            ) from None


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without transformers' advice to install kernels, and without torch's tracebacks of what is told in a sentence."""
    of_fakes = logging.getLogger("torch._subclasses.fake_tensor")
    level, verbosity = of_fakes.level, transformers.logging.get_verbosity()
    of_fakes.setLevel(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        of_fakes.setLevel(level)
        transformers.logging.set_verbosity(verbosity)


def _built(path: Path | None, given: Mapping[str, Any], transformers: Any) -> tuple[Any, Any]:
    """The class of the model and its configuration, once it has been built without memory."""
    try:
        kind = transformers.CONFIG_MAPPING[given["model_type"]]
        config = kind(**given) if path is None else kind.from_json_file(path)  # which reads infinity too
        config.use_cache = False
        head = _head_of(config, transformers)
        if any(type(getattr(config, key)) in transformers.MODEL_MAPPING for key in config.sub_configs):
            raise ValueError("it holds several models; trace the module, on what it reads, with model_from_module")
        if head is None or head.main_input_name != "input_ids":
            raise ValueError("it has no class of it that reads tokens; trace the module with model_from_module")
        usual, code = type(config)(), _code_of(type(config), head)
        for odd, value in given.items():
            if may_change_shapes(odd, value) and not hasattr(usual, odd) and f'"{odd}"' not in code:
                raise ValueError(
                    f"its {type(config).__name__} has no {odd}; take it out of the file if it changes nothing"
                )
        with torch.device("meta"):
            head(config)
    except Exception as error:  # whatever transformers refuses
        here = f"transformers {transformers.__version__}"
        raise ValueError(f"{path or 'the config'}: {here} cannot build it: {' '.join(str(error).split())}") from None
    return head, config


def _code_of(*classes: type) -> str:
    """Of their files, which read some keys that no field declares: ``getattr(config, "head_dim", ...)``."""
    return "".join(inspect.getsource(sys.modules[one.__module__]) for one in classes)


def _head_of(config: Any, transformers: Any) -> Any:
    """The class that the file names, or the one with a loss over tokens."""
    named = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named
    mappings = [getattr(transformers, name)._model_mapping for name in HEADS]
    return next((of[type(config)] for of in mappings if type(config) in of), None)
