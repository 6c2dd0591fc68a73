"""An event names the line that issued it, and the lines that led there: the learner's and the mini's, no library's."""

import linecache
from pathlib import Path

import pytest
import torch

from fsdp_sim import ranks
from fsdp_sim.mini import fully_shard
from fsdp_sim.timeline import Event, Memory, Op, Phase, Recorder, Timeline
from fsdp_sim.timeline.call_sites import MINI, PACKAGE

HERE = __file__


def text(source: str) -> str:
    """The line that a ``file:line`` names."""
    name, _, line = source.rpartition(":")
    return linecache.getline(str(PACKAGE.parent / name) if name.startswith(MINI) else name, int(line)).strip()


def recorded(recorder: Recorder) -> Event:
    recorder.start()
    recorder.end(recorder.begin(Op.FWD, "a"))  # this very line
    return recorder.stop()[0]


def test_an_event_names_the_line_that_issued_it_and_those_that_led_there() -> None:
    event = recorded(Recorder())
    assert event.source.startswith(f"{HERE}:")
    assert text(event.source) == 'recorder.end(recorder.begin(Op.FWD, "a"))  # this very line'
    assert text(event.stack[-1]) == "event = recorded(Recorder())"


def test_a_block_is_named_by_its_with_statement() -> None:
    recorder = Recorder()
    recorder.start()
    with recorder.span(Op.OPTIM, ""):
        recorder.memory(Op.ALLOC, Memory.SHARDED, "a", 1)
    span, alloc = recorder.stop()
    assert text(span.source) == 'with recorder.span(Op.OPTIM, ""):'
    assert text(alloc.source) == 'recorder.memory(Op.ALLOC, Memory.SHARDED, "a", 1)'


def test_lines_of_libraries_and_of_the_recorder_are_left_out() -> None:
    recorder = Recorder()
    recorder.start()
    torch.nn.Identity().register_forward_hook(lambda *_: recorder.memory(Op.ALLOC, Memory.NONE, "", 1))
    module = torch.nn.Identity()
    module.register_forward_hook(lambda *_: recorder.memory(Op.ALLOC, Memory.NONE, "", 1))
    module(torch.ones(1))
    (event,) = recorder.stop()
    assert text(event.source).startswith("module.register_forward_hook(")
    assert text(event.stack[-1]) == "module(torch.ones(1))", "torch called the hook, and is not in between"
    assert not any("site-packages" in line or "recorder.py" in line for line in (event.source, *event.stack))


def test_the_same_code_in_two_files_is_told_apart() -> None:
    recorder, lines = Recorder(), []
    for file in ("one.py", "two.py"):
        names = {"recorder": recorder, "Op": Op}
        exec(compile("def step():\n    recorder.end(recorder.begin(Op.FWD, 'a'))", file, "exec"), names)
        recorder.start()
        names["step"]()
        lines.append(recorder.stop()[0].source)
    assert lines == ["one.py:2", "two.py:2"]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train() -> None:
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters())
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return ranks.run(train, 2, progress=False, show_output=False).timeline


def the(timeline: Timeline, op: Op, unit: str, phase: Phase) -> Event:
    return timeline.select(rank=1, op=op, unit=unit, phase=phase).events[0]


def test_the_mini_issues_and_the_learners_forward_led_to_it(timeline: Timeline) -> None:
    gather = the(timeline, Op.ALL_GATHER, "layers.1", Phase.FORWARD)
    assert gather.source.startswith("fsdp_sim/mini/collectives.py:"), "the same on every machine"
    assert "all_gather_single(" in text(gather.source)
    assert [text(line) for line in gather.stack[:2]] == ["loss = model(torch.ones(2, 4)).sum()", "x = layer(x)"]
    assert all(line.startswith(MINI) for line in gather.stack[2:])
    assert "self.unshard(" in "".join(text(line) for line in gather.stack[2:])


def test_in_backward_it_is_the_learners_call_of_backward_and_the_stack_says_prefetch(timeline: Timeline) -> None:
    gather = the(timeline, Op.ALL_GATHER, "layers.0", Phase.BACKWARD)
    assert text(gather.stack[0]) == "loss.backward()"
    assert any(line.startswith(f"{MINI}prefetch.py:") for line in gather.stack)
    reduce = the(timeline, Op.REDUCE_SCATTER, "layers.1", Phase.BACKWARD)
    assert text(reduce.stack[0]) == "loss.backward()"
    assert "reduce_scatter_single(" in text(reduce.source)


def test_the_optimizer_has_the_learners_line(timeline: Timeline) -> None:
    optimizer = the(timeline, Op.OPTIM, "", Phase.OPTIMIZER)
    assert text(optimizer.source) == "optimizer.step()"


def test_a_gradient_that_autograd_writes_has_the_learners_line_alone(timeline: Timeline) -> None:
    grads = timeline.select(rank=0, op=Op.ALLOC, category=Memory.UNSHARDED_GRAD).events
    assert {text(e.source) for e in grads} == {"loss.backward()"}


def test_every_event_of_a_run_has_a_line_that_exists(timeline: Timeline) -> None:
    for event in timeline:
        assert all(text(line) for line in (event.source, *event.stack)), event


def test_what_started_the_rank_is_left_out(timeline: Timeline) -> None:
    files = {line.rpartition(":")[0] for event in timeline for line in (event.source, *event.stack)}
    assert {name for name in files if not name.startswith(MINI)} == {HERE}


def test_a_collective_of_the_learners_own_has_their_line() -> None:
    def reduce() -> None:
        torch.distributed.all_reduce(torch.ones(1))

    (event,) = ranks.run(reduce, 1, progress=False, show_output=False).timeline.events
    assert text(event.source) == "torch.distributed.all_reduce(torch.ones(1))"
    assert Path(event.source.rpartition(":")[0]) == Path(HERE)


def test_lines_survive_a_file(timeline: Timeline, tmp_path: Path) -> None:
    timeline.to_jsonl(tmp_path / "run.jsonl")
    assert Timeline.from_jsonl(tmp_path / "run.jsonl").events == timeline.events
