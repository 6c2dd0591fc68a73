"""What can be asked of the trainer: defaults, TOML, --key=value, and what is said of the rest."""

import dataclasses
import re
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
    ("argument", "says"), [("--steps=x", "--steps"), ("--device=tpu", "tpu"), ("--config", "--config")]
)
def test_what_is_no_value_of_a_key_is_named_by_one_rank_only(capsys, argument, says):
    with pytest.raises(SystemExit, match="2"):
        read_config([argument], quiet=True)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(SystemExit, match="2"):
        read_config([argument])
    assert says in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--steps=0", "steps=0: it is a whole number, at least 1"),
        ("--global_batch=-8", "global_batch=-8"),
        ("--micro_batch=0", "micro_batch=0"),
        ("--seed=-1", "seed=-1: it is a whole number, at least 0"),
        ("--lr=nan", "lr=nan: it is a number above 0, such as 1e-3"),
        ("--lr=-1", "lr=-1"),
        ("--min_lr=-1", "min_lr=-1.0: it is a number, at least 0"),
        ("--requires_gradient_sync=false", "would never reduce gradients; use True or last"),
        ("--min_lr=1", "min_lr=1.0 is above lr=0.001: a schedule goes down"),
        ("--clip=0", "clip=0"),
        ("--beta2=1", "beta2=1.0: it is at least 0 and below 1"),
        ("--weight_decay=-1", "weight_decay=-1"),
        ("--warmup_steps=30", "warmup_steps=30, but there are 20 steps"),
        ("--keep=1", "keep=1: at least 2 checkpoints are kept"),
        ("--tensorboard=true", "tensorboard=True keeps something; say where with out=FOLDER"),
        ("--profile=4", "profile=4 keeps something; say where with out=FOLDER"),
        ("--async_save=true --out=x --checkpoint=full", "async_save=True writes sharded checkpoints"),
        ("--model=gpt2-lage", "did you mean 'gpt2-large'"),
        ("--model=teaching-llama --dropout=0.1", "dropout"),
    ],
)
def test_a_value_that_cannot_be_is_named(arguments, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        read_config(arguments.split())


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("--reshard_after_forward=true", True),
        ("--reshard_after_forward=none", None),
        ("--activation_checkpointing=none", "none"),
        ("--reshard_after_forward=2", 2),
        ("--requires_gradient_sync=last", "last"),
        ("--forward_prefetch=false", False),
        ("--backward_prefetch=BACKWARD_POST", "BACKWARD_POST"),
        ("--compile=true", True),
    ],
)
def test_words_are_read_as_in_toml(argument, value):
    got = getattr(read_config([argument]), argument[2:].partition("=")[0])
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize("path", sorted(TEACHING.parent.glob("*.toml")), ids=lambda path: path.stem)
def test_the_configs_that_are_there_can_be_read(path):
    assert read_toml(path).model_config.n_layer > 1


def test_help_shows_the_usage_and_every_key(capsys):
    with pytest.raises(SystemExit, match="0"):
        read_config(["--help"], "torchrun --standalone ...")
    printed = capsys.readouterr().out
    assert "torchrun --standalone ..." in printed
    for key in vars(TrainConfig()):
        assert f"--{key}" in printed
