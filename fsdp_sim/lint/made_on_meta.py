"""Makes a user's model on the meta device, in a process of its own: ``python -m fsdp_sim.lint.made_on_meta``.

Its arguments are the target and a file, to which what is known of the model goes as JSON; what went wrong too, under
``error``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

FILLS = ("init_weights", "_init_weights", "init_parameters", "reset_parameters", "initialize_weights")
"""Methods of a whole model that set what its modules do not."""


def main(target: str, out: str) -> None:
    Path(out).write_text(json.dumps(_tried(target)), encoding="utf-8")


def _tried(target: str) -> dict[str, Any]:
    try:
        return facts(made(target))
    except SystemExit as error:
        return {"error": f"{target} ends the process (exit status {error.code}) when it is imported or called"}
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        return {"error": f"{target} cannot be made: {type(error).__name__}: {said}"}


def made(target: str) -> Any:
    """The model: what the name stands for, called without arguments if it is no module yet.

    Raises:
        ValueError: there is no such name, or it makes no ``torch.nn.Module``.
    """
    import torch

    where, _, name = target.rpartition(":")
    sys.path.insert(0, str(Path.cwd()))
    with torch.device("meta"):
        if where.endswith(".py"):
            path = Path(where).resolve()
            sys.path.insert(0, str(path.parent))
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None:
                raise ValueError(f"{where} is no Python file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        found: Any = module
        for part in name.split("."):
            if not hasattr(found, part):
                raise ValueError(f"{where} has no {name}")
            found = getattr(found, part)
        if not isinstance(found, torch.nn.Module):
            found = found()
    if not isinstance(found, torch.nn.Module):
        raise ValueError(f"{name} gives a {type(found).__name__}, which is no torch.nn.Module")
    return found


def facts(model: Any) -> dict[str, Any]:
    """Parameters, buffers and modules of a model, and the unit of each when blocks are units and the root the rest."""
    from torch import nn

    from fsdp_sim.measure import block_names

    blocks = sorted(block_names(model), key=lambda name: name.count("."), reverse=True)

    def unit(name: str) -> str:
        return next((block for block in blocks if name.startswith(f"{block}.")), "")

    params: dict[int, dict[str, Any]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        one = params.setdefault(id(param), {
            "name": name, "unit": unit(name), "shape": list(param.shape),
            "dtype": str(param.dtype).removeprefix("torch."),
            "bytes": param.element_size(), "trainable": param.requires_grad, "also": [],
        })  # fmt: skip
        if one["name"] != name:
            one["also"].append([name, unit(name)])
    is_filled = any(callable(getattr(model, name, None)) for name in FILLS)
    named = [(name, module) for name, module in model.named_modules() if name]
    return {
        "class": type(model).__name__,
        "blocks": blocks,
        "params": list(params.values()),
        "unset_buffers": [
            f"{name}.{of}" for name, module in named if not is_filled and not hasattr(module, "reset_parameters")
            for of in sorted(module._non_persistent_buffers_set) if module._buffers.get(of) is not None
        ],
        "unset_modules": [
            name for name, module in named
            if not is_filled and not hasattr(module, "reset_parameters")
            and any(param is not None for param in module._parameters.values())
        ],
        "batch_norms": [
            name for name, module in named
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
            and module.track_running_stats
        ],
    }  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
