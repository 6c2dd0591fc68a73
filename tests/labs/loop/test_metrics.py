"""A line per step, exactly one, whatever interrupts and repeats them."""

import builtins
import importlib.util
import io
import json
import math
from pathlib import Path

import pytest

from labs.loop.metrics import Metrics


def record(step, **more):
    return {"step": step, "loss": 5.5 - step / 10, "step_s": 0.5, "tokens_per_s": 2048.0} | more


def lines(path: Path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(path, first, last, *, steps=10, **how):
    with Metrics(path, steps=steps, first_step=first, **how) as metrics:
        for step in range(first, last):
            metrics.step(record(step))


class TestFile:
    def test_has_a_line_per_step_as_soon_as_it_is_done(self, tmp_path):
        path = tmp_path / "m.jsonl"
        with Metrics(path, steps=2) as metrics:
            metrics.step(record(0, lr=1e-3, grad_norm=0.7, memory_bytes=2**30, mfu=0.4))
            more = {"lr": 1e-3, "grad_norm": 0.7, "memory_bytes": 2**30, "mfu": 0.4}
            assert lines(path) == [{"step": 0, "loss": 5.5, "step_s": 0.5, "tokens_per_s": 2048.0} | more]

    def test_what_happened_has_a_kind(self, tmp_path):
        with Metrics(tmp_path / "m.jsonl", steps=2) as metrics:
            metrics.event("saved", step=1, seconds=0.1)
        assert lines(tmp_path / "m.jsonl") == [{"kind": "saved", "step": 1, "seconds": 0.1}]

    def test_what_is_no_number_is_null(self, tmp_path):
        with Metrics(tmp_path / "m.jsonl", steps=2) as metrics:
            metrics.step(record(0, loss=math.nan, grad_norm=math.inf))
        (line,) = lines(tmp_path / "m.jsonl")
        assert (line["loss"], line["grad_norm"]) == (None, None)

    def test_a_new_run_replaces_an_older_ones(self, tmp_path):
        train(tmp_path / "m.jsonl", 0, 4)
        train(tmp_path / "m.jsonl", 0, 2)
        assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [0, 1]

    def test_other_ranks_write_and_print_nothing(self, tmp_path, capsys):
        train(tmp_path / "m.jsonl", 0, 2, rank=1)
        assert not (tmp_path / "m.jsonl").exists()
        assert capsys.readouterr() == ("", "")

    def test_a_full_disk_is_said_once_and_training_goes_on(self, capsys):
        full = Path("/dev/full")
        if not full.exists():
            pytest.skip("there is no /dev/full on this system")
        train(full, 0, 3)
        out, err = capsys.readouterr()
        assert out.count("step ") == 3
        assert err.startswith("labs.train: no more metrics in /dev/full: [Errno 28]")
        assert err.count("\n") == 1


class TestRewind:
    def test_steps_that_are_repeated_are_there_once(self, tmp_path):
        path = tmp_path / "m.jsonl"
        train(path, 0, 7)
        train(path, 4, 10)
        assert [line["step"] for line in lines(path)] == list(range(10))

    def test_what_happened_stays(self, tmp_path):
        path = tmp_path / "m.jsonl"
        with Metrics(path, steps=10) as metrics:
            metrics.step(record(0))
            metrics.event("saved", step=1)
            metrics.step(record(1))
            metrics.event("failed", step=2)
        train(path, 1, 2)
        assert [line.get("kind", line["step"]) for line in lines(path)] == [0, "saved", "failed", 1]

    @pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3, "loss": 1.0}', '"', "\x00"])
    def test_a_last_line_that_was_cut_short_goes(self, tmp_path, torn):
        path = tmp_path / "m.jsonl"
        train(path, 0, 3)
        with open(path, "a") as file:
            file.write(torn)  # no end of line: killed in the middle of it
        train(path, 4, 5)
        assert [line["step"] for line in lines(path)] == [0, 1, 2, 4]

    def test_in_the_middle_of_a_run(self, tmp_path):
        with Metrics(tmp_path / "m.jsonl", steps=10) as metrics:
            for step in range(3):
                metrics.step(record(step))
            metrics.rewind(1)
            metrics.step(record(1, loss=1.0))
        assert [(line["step"], line["loss"]) for line in lines(tmp_path / "m.jsonl")] == [(0, 5.5), (1, 1.0)]

    def test_the_old_file_is_there_until_the_new_one_is_complete(self, tmp_path, monkeypatch):
        path = tmp_path / "m.jsonl"
        train(path, 0, 3)
        before = path.read_bytes()

        def killed(*args):
            raise KeyboardInterrupt

        monkeypatch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            train(path, 1, 3)
        assert path.read_bytes() == before

    @pytest.mark.parametrize(
        "text",
        ["dear diary\n", "[1, 2]\n", '{"loss": 1.0}\n', '{"step": "one"}\n', '{"a": %s\n' % ("[" * 100_000)],
        ids=["prose", "list", "no step", "no number", "nested deep"],
    )
    def test_a_file_of_something_else_is_left_alone(self, tmp_path, text):
        path = tmp_path / "diary.txt"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"diary.txt, line 1 is not a line of metrics; give metrics= another file"):
            train(path, 3, 5)
        assert path.read_text() == text
        assert list(tmp_path.iterdir()) == [path]


class TestTensorBoard:
    def test_has_a_scalar_per_number_and_step_and_hides_what_is_repeated(self, tmp_path):
        accumulator = pytest.importorskip(
            "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
        )
        for first, last, loss in ((0, 4, 5.0), (2, 5, 4.0)):
            with Metrics(None, tmp_path, steps=5, first_step=first) as metrics:
                for step in range(first, last):
                    metrics.step(record(step, loss=loss, mfu=None))
        found = accumulator.EventAccumulator(str(tmp_path)).Reload()
        assert found.Tags()["scalars"] == ["loss", "step_s", "tokens_per_s"]
        assert [(e.step, e.value) for e in found.Scalars("loss")] == [(0, 5.0), (1, 5.0), (2, 4.0), (3, 4.0), (4, 4.0)]

    def test_without_it_the_error_says_how_to_get_it(self, tmp_path, monkeypatch):
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *more: None if name == "tensorboard" else find(name, *more)
        )
        with pytest.raises(ValueError, match=r"needs tensorboard, which is not installed: .*make dev"):
            Metrics(None, tmp_path, steps=1)

    def test_is_not_imported_unless_asked_for(self, monkeypatch):
        real = builtins.__import__

        def watched(name, *args, **kwargs):
            assert "tensorboard" not in name
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", watched)
        train(None, 0, 1)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class TestShown:
    def test_a_line_every_so_many_steps_and_the_last(self, capsys):
        train(None, 0, 10, log_every=4)
        printed = capsys.readouterr().out.splitlines()
        assert printed == [f"step {step:3d}  loss {5.5 - step / 10:.4f}" for step in (0, 4, 8, 9)]

    def test_the_loss_on_other_text_is_in_the_line(self, capsys):
        with Metrics(steps=5) as metrics:
            metrics.step(record(0, val_loss=4.25))
        assert capsys.readouterr().out == "step   0  loss 5.5000  val_loss 4.2500\n"

    def test_no_bar_where_there_is_no_terminal(self, capsys):
        train(None, 0, 3)
        assert capsys.readouterr().err == ""

    def test_the_bar_has_loss_speed_utilisation_memory_and_time_to_go(self, monkeypatch):
        shown = Terminal()
        monkeypatch.setattr("sys.stderr", shown)
        with Metrics(steps=10, first_step=4) as metrics:
            metrics.step(record(4, mfu=0.413, memory_bytes=3 * 2**30))
            metrics._bar.refresh()
        assert "5/10 [" in shown.getvalue()  # what a resumed run has done before is done
        assert "loss 5.1000, 2,048 tokens/s, MFU 41.3%, 3.00 GiB" in shown.getvalue()
        assert "<" in shown.getvalue().splitlines()[-1].partition("[")[2]  # elapsed<left

    def test_no_bar_when_it_is_not_wanted(self, monkeypatch):
        shown = Terminal()
        monkeypatch.setattr("sys.stderr", shown)
        train(None, 0, 3, bar=False)
        assert shown.getvalue() == ""
