"""The links from the mini-FSDP to torch's source: each leads to a symbol that is there."""

import inspect
import pkgutil
import re
from html import unescape
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_group

import fsdp_sim.mini
from fsdp_sim.learn.in_torch import ELSEWHERE, counterpart, defined, in_torch
from fsdp_sim.mini.group import FSDPParamGroup

OURS = {
    "grad_tensors", "map_grad_tensors", "FSDPParamGroup.unit", "FSDPMeshInfo.replicate_mesh_size",
    "init_weights", "FSDPParam.was_gathered", "FSDPParam.unsharded_bytes",
    "local_tensor", "mixed_dtypes", "ReduceScatterState.wait_for_work",
    "Stream", "Stream.wait_event", "Stream.wait_stream", "Stream.record_event", "Streams.current_stream",
    "cast_wider_grads", "lay_out_partial", "leave_wider_grads", "wider_grads",
}  # fmt: skip
"""What the mini has and torch has not: names in messages, and initialisation that is right on CPU ranks too."""


def public() -> list[str]:
    """Every public function, class and method of the mini."""
    names = []
    for info in pkgutil.iter_modules(fsdp_sim.mini.__path__):
        module = import_module(f"fsdp_sim.mini.{info.name}")
        own = {name: item for name, item in vars(module).items() if getattr(item, "__module__", "") == module.__name__}
        for name, item in own.items():
            if info.ispkg or info.name in ("recording", "observer", "labels") or name.startswith("_"):
                continue
            if inspect.isfunction(item):
                names.append(name)
            if inspect.isclass(item):
                methods = [
                    key
                    for key, value in vars(item).items()
                    if isinstance(value, property | staticmethod) or inspect.isfunction(value)
                ]
                names += [name, *(f"{name}.{key}" for key in methods if not key.startswith("_"))]
    return sorted(names)


@pytest.mark.parametrize("name", public())
def test_what_is_public_in_the_mini_has_a_symbol_in_torch_or_is_known_to_be_ours(name: str) -> None:
    if name in OURS:
        with pytest.raises(LookupError, match="no counterpart"):
            counterpart(name)
        return
    symbol = counterpart(name)
    line = Path(torch.__file__).parents[1].joinpath(symbol.path).read_text().splitlines()[symbol.line - 1]
    assert symbol.name.rpartition(".")[2] in line
    assert line.lstrip().startswith(("def ", "class "))


def test_what_torch_calls_otherwise_is_there_and_the_mini_has_it() -> None:
    assert ELSEWHERE.keys() - set(public()) == set()
    places = {tuple(place.split(".", 1)) for place in ELSEWHERE.values()}
    assert {(file, symbol) for file, symbol in places if symbol not in defined(file)} == set()


def test_a_link_leads_to_the_line_of_the_torch_that_is_installed() -> None:
    links = in_torch(fsdp_sim.mini.fully_shard, FSDPParamGroup.post_backward)

    assert [ours.__qualname__ for ours, _ in links.rows] == ["fully_shard", "FSDPParamGroup.post_backward"]
    version = torch.__version__.partition("+")[0]
    assert f'href="https://github.com/pytorch/pytorch/blob/v{version}/torch/distributed/fsdp/' in links._repr_html_()
    assert "FSDPParamGroup.post_backward" in str(links)


def test_the_lines_of_the_mini_and_of_torch_are_read_together_without_docstrings() -> None:
    html = in_torch(FSDPParamGroup.unshard)._repr_html_()
    text = unescape(re.sub("<style>.*?</style>|<[^>]+>", "", html, flags=re.DOTALL))
    mini, _, theirs = text.partition("torch FSDPParamGroup.unshard")
    for read, function in ((mini, FSDPParamGroup.unshard), (theirs, torch_group.FSDPParamGroup.unshard)):
        lines = [line.strip() for line in inspect.getsource(function).splitlines()]
        assert lines[-1] in read
        assert "def unshard(self, async_op: bool = False)" in read
    assert inspect.getdoc(FSDPParamGroup.unshard)[:30] not in mini
