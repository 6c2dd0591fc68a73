"""Where torch does what a function of the mini-FSDP does: links to the lines of torch's source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = "torch/distributed/fsdp/_fully_shard"
FILES = (
    "_fully_shard", "_fsdp_state", "_fsdp_param_group", "_fsdp_param",
    "_fsdp_collectives", "_fsdp_init", "_fsdp_common", "_fsdp_api",
)  # fmt: skip
"""Searched in this order for what has the same name."""

ELSEWHERE = {
    "add_to_accumulated_grad": "_fsdp_param.FSDPParam.accumulate_unsharded_grad_if_needed",
    "keep_in_reduce_dtype": "_fsdp_param.FSDPParam.to_accumulated_grad_if_needed",
    "take_unsharded_grads": "_fsdp_param_group.FSDPParamGroup.post_backward",
    "register_post_backward": "_fsdp_param_group.FSDPParamGroup._register_post_backward_hook",
    "register_pre_backward": "_fsdp_state.FSDPState._register_pre_backward_hook",
    "in_backward": "_fsdp_common.is_bw",
    "all_gather_single": "_fsdp_collectives.DefaultAllGather",
    "reduce_scatter_single": "_fsdp_collectives.DefaultReduceScatter",
    "all_reduce_single": "_fsdp_collectives.foreach_reduce",
    "all_gather_copy_in": "_fsdp_collectives.all_gather_copy_in_cuda",
    "AllGatherResult.wait": "_fsdp_collectives.foreach_all_gather_copy_out",
    "foreach_reduce_scatter": "_fsdp_collectives.foreach_reduce",
    "hand_out_grads": "_fsdp_collectives.foreach_reduce",
    "get_mesh": "_fsdp_init._init_default_mesh",
    "post_forward_mesh_info": "_fsdp_init._get_post_forward_mesh_info",
    "set_separate_reduce_scatter_group": "_fsdp_param_group.FSDPParamGroup._set_separate_reduce_scatter_group",
    "add_partial": "_fsdp_collectives.foreach_reduce",
    "all_reduce": "_fsdp_collectives.foreach_reduce",
    "run_all_reduce_hook": "_fsdp_collectives.foreach_reduce",
    "Reduction": "_fsdp_param_group.AllReduceState",
    "after_reduce_scatter": "_fsdp_param_group.FSDPParamGroup.post_backward",
    "root_modules": "_fsdp_init._get_modules_and_states",
    "applied_to": "_fsdp_common._is_composable_with_fsdp",
    "outside_functorch": "_fsdp_common._disable_functorch_if_active",
    "managed_modules": "_fsdp_init._get_managed_modules",
    "managed_params": "_fsdp_init._get_managed_states",
    "move_to_device": "_fsdp_init._move_states_to_device",
    "pin": "_fsdp_param.FSDPParam._init_sharded_param",
    "to_device": "_fsdp_param.FSDPParam.all_gather_inputs",
    "grad_to_cpu": "_fsdp_collectives.foreach_reduce",
    "wait_for_grads": "_fsdp_param_group.FSDPParamGroup.finalize_backward",
    "validate_on_cpu": "_fsdp_param_group.FSDPParamGroup._validate_cpu_offload_params",
    "FSDPParam.shard": "_fsdp_param.FSDPParam._init_sharded_param",
    "FSDPParam.alloc_unsharded_param": "_fsdp_param.FSDPParam.alloc_all_gather_outputs",
    "AllGatherExtension": "_fsdp_param.ExtensionsData",
    "AllGatherExtension.all_gather_inputs": "_fsdp_param.FSDPParam.all_gather_inputs",
    "AllGatherExtension.unshard": "_fsdp_param.FSDPParam.init_unsharded_param",
    "extension_of": "_fsdp_param.FSDPParam._init_extensions",
    "FSDPParam.take_unsharded_grad": "_fsdp_param.FSDPParam.unsharded_grad_data",
    "owners_of": "_fsdp_param_group._get_param_module_infos",
    "dtypes_of_trainable": "_fsdp_param_group.FSDPParamGroup._init_mp_dtypes",
    "to_dtype": "_fsdp_common._to_dtype_if_needed",
    "cast_forward_inputs": "_fsdp_state.FSDPState._cast_forward_inputs",
    "cast_output_dtype": "_fsdp_state.FSDPState._cast_output_dtype",
    "all_gather_inputs": "_fsdp_collectives._get_param_all_gather_inputs",
    "Division": "_fsdp_collectives._get_gradient_divide_factors",
    "gradient_division": "_fsdp_collectives._get_gradient_divide_factors",
    "prefetch_unshard": "_fsdp_param_group.FSDPParamGroup._prefetch_unshard",
    "backward_prefetch": "_fsdp_param_group.FSDPParamGroup._backward_prefetch",
    "state_of": "_fsdp_state._get_module_fsdp_state",
    "Streams": "_fsdp_param_group.FSDPCommContext",
    "Streams.lazy_init": "_fsdp_param_group.FSDPCommContext.lazy_init",
    "Streams.get_all_gather_streams": "_fsdp_param_group.FSDPCommContext.get_all_gather_streams",
    "Streams.wait_all_gather_streams_on_event":
        "_fsdp_param_group.FSDPParamGroup._wait_all_gather_streams_on_event",
    "FSDPCommContext.wait_for_last_reductions": "_fsdp_state.FSDPState._root_post_backward_final_callback",
    "FSDPCommContext.release_all_gather_state": "_fsdp_param_group.FSDPParamGroup.wait_for_unshard",
    "FSDPCommContext.wait_for_reduce_scatters": "_fsdp_param_group.FSDPParamGroup.post_backward",
    "FSDPCommContext.wait_for_all_reduce_scatters": "_fsdp_state.FSDPState._root_post_backward_final_callback",
    "FSDPParam.local_data": "_fsdp_param.FSDPParam._sharded_local_tensor",
    "div_if_needed": "_fsdp_collectives._div_if_needed",
    "ReduceScatterState.wait": "_fsdp_param_group.FSDPParamGroup.post_backward",
    "ReduceScatterState.finish": "_fsdp_state.FSDPState._root_post_backward_final_callback",
}  # fmt: skip
"""What torch calls otherwise, or does in the middle of a larger function."""


MOST_LINES = 40  # of what is shown unfolded
STYLE = """
.fsd-read details { margin: 4px 0; } .fsd-read details details { margin-left: 18px; }
.fsd-read pre { margin: 2px 0 2px 18px; padding: 6px 10px; font-size: 12px; line-height: 1.4; overflow-x: auto;
  border-left: 3px solid #0072B2; }
.fsd-read details details pre { border-left-color: #8A94A0; max-height: 30em; overflow-y: auto; }"""


@dataclass(frozen=True)
class Symbol:
    """A symbol of torch's FSDP2 and where it stands.

    Attributes:
        end: its last line.
    """

    name: str
    path: str
    line: int
    end: int

    @property
    def lines(self) -> list[str]:
        """Its source, of the torch that is installed."""
        return (_torch().parent / self.path).read_text().splitlines(keepends=True)[self.line - 1 : self.end]

    @property
    def url(self) -> str:
        """The line in the source of the torch that is installed."""
        return f"https://github.com/pytorch/pytorch/blob/v{version('torch').partition('+')[0]}/{self.path}#L{self.line}"


@dataclass(frozen=True, repr=False)
class SourceLinks:
    """What the mini has and the symbols of torch; in a notebook the mini's lines, torch's below each, and a link."""

    rows: tuple[tuple[Callable[..., Any], Symbol], ...]

    def __str__(self) -> str:
        return "\n".join(
            f"{ours.__qualname__}: {symbol.name} ({symbol.path}:{symbol.line})" for ours, symbol in self.rows
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from fsdp_sim.viz.debugger import code_css  # plotly takes a while

        parts = []
        for ours, symbol in self.rows:
            lines = inspect.getsource(ours).splitlines(keepends=True)
            shown = "" if len(lines) > MOST_LINES else " open"
            link = f'<a href="{escape(symbol.url)}"><code>{escape(symbol.name)}</code></a>'
            parts.append(
                f"<details{shown}><summary><b>mini</b> <code>{escape(ours.__qualname__)}</code></summary>{_code(lines)}"
                f"<details><summary><b>torch</b> {link}, {len(symbol.lines)} lines</summary>{_code(symbol.lines)}"
                "</details></details>"
            )
        return f"<style>{code_css('.fsd-read')}{STYLE}</style><div class='fsd-read'>{''.join(parts)}</div>"


def _code(lines: Sequence[str]) -> str:
    """A function as HTML, without what its docstring says, which is about how to call it."""
    from fsdp_sim.viz.debugger import coloured_lines

    kept = without_docstring(textwrap.dedent("".join(lines)))
    return f"<pre>{chr(10).join(coloured_lines(tuple(kept)))}</pre>"


def without_docstring(source: str) -> list[str]:
    """The lines of a function or class, its own docstring left out."""
    (node,) = ast.parse(source).body
    lines = source.splitlines(keepends=True)
    if ast.get_docstring(node) is not None:  # type: ignore[arg-type]
        first = node.body[0]  # type: ignore[attr-defined]
        del lines[first.lineno - 1 : first.end_lineno]
    return lines


def in_torch(*functions: Callable[..., Any] | property) -> SourceLinks:
    """Functions, methods, properties or classes of `fsdp_sim.mini`, to read beside what does the same in torch.

    Raises:
        LookupError: one has no counterpart.
    """
    ours = [f.fget if isinstance(f, property) else f for f in functions]
    return SourceLinks(tuple((f, counterpart(f.__qualname__)) for f in ours))  # type: ignore[misc, union-attr]


def counterpart(name: str) -> Symbol:
    """What does in torch what ``name`` (``FSDPParamGroup.unshard``) does in the mini.

    Raises:
        LookupError: torch has nothing of that name, and nothing else is known.
    """
    owner, _, method = name.rpartition(".")
    known = ELSEWHERE.get(name) or (f"{ELSEWHERE[owner]}.{method}" if owner in ELSEWHERE else None)
    wanted = [known] if known else [f"{file}.{name}" for file in FILES]
    for file, _, path in (place.partition(".") for place in wanted):
        if path in defined(file):
            return Symbol(path, f"{FOLDER}/{file}.py", *defined(file)[path])
    raise LookupError(f"torch {version('torch')} has no counterpart of {name!r}: looked for {wanted[0]}")


def _torch() -> Path:
    """torch's folder, found without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise LookupError("torch is not installed")
    return Path(spec.origin).parent


@cache
def defined(file: str) -> dict[str, tuple[int, int]]:
    """The first and last lines of the classes, methods and functions of one of torch's files."""
    source = _torch().parent.joinpath(FOLDER, f"{file}.py").read_text()
    lines: dict[str, tuple[int, int]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                lines[f"{prefix}{child.name}"] = child.lineno, child.end_lineno or child.lineno
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(source), "")
    return lines
