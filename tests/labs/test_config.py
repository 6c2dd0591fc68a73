"""What can be asked of the trainer: defaults, TOML, --key=value, and what is said of the rest."""

import dataclasses
from pathlib import Path

import pytest

from labs.config import TrainConfig, read_config, read_toml

TEACHING = Path(__file__).parents[2] / "labs/configs/teaching.toml"


def test_the_teaching_config_is_the_default():
    config = read_toml(TEACHING)
    assert config.config == str(TEACHING)
    assert read_config([]) == TrainConfig()
    assert dataclasses.replace(config, config=None) == TrainConfig()


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path):
    (tmp_path / "c.toml").write_text("steps = 7\nlr = 1\nreshard_after_forward = false\n")
    config = read_config(["--config", str(tmp_path / "c.toml"), "--lr=0.5", "--seq-len=64"])
    assert (config.steps, config.lr, config.seq_len, config.reshard_after_forward) == (7, 0.5, 64, False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stepz = 3", r"c\.toml: unknown key 'stepz'; did you mean 'steps'\?"),
        ("config = 'other.toml'", r"c\.toml: unknown key 'config'"),
        ("steps = 'many'", r"c\.toml: Expected `int`, got `str` - at `\$\.steps`"),
        ("steps = 0", r"c\.toml: steps=0: it is a whole number, at least 1"),
        ("steps =", r"c\.toml is not TOML"),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path, text, says):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ValueError, match=says):
        read_toml(tmp_path / "c.toml")


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"no config file at nowhere\.toml"):
        read_config(["--config=nowhere.toml"])


def test_an_unknown_argument_suggests_the_nearest():
    with pytest.raises(ValueError, match="unknown argument '--stepz=3'; did you mean '--steps'"):
        read_config(["--stepz=3"])


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--steps=x", "--steps"),
        ("--steps=0", "steps=0"),
        ("--global_batch=-8", "global_batch=-8"),
        ("--seed=-1", "seed=-1"),
        ("--lr=nan", "lr=nan"),
        ("--lr=-1", "lr=-1"),
        ("--model=gpt2-lage", "did you mean 'gpt2-large'"),
        ("--device=tpu", "tpu"),
        ("--config", "--config"),
    ],
)
def test_a_bad_value_is_named_by_one_rank_only(capsys, argument, says):
    with pytest.raises(SystemExit, match="2"):
        read_config([argument], quiet=True)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(SystemExit, match="2"):
        read_config([argument])
    assert says in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_help_shows_the_usage_and_every_key(capsys):
    with pytest.raises(SystemExit, match="0"):
        read_config(["--help"], "torchrun --standalone ...")
    printed = capsys.readouterr().out
    assert "torchrun --standalone ..." in printed
    for key in vars(TrainConfig()):
        assert f"--{key}" in printed
