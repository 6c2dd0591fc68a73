"""What can be asked of the trainer: defaults, TOML, --key=value, and what is said of the rest."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from fsdp_sim.spec import Plan
from fsdp_sim.spec.texts import text_of
from labs.config import ALLOWED, KEYS, PLAN_API, PLAN_KEYS, TrainConfig, read_config
from labs.data import load_corpus

TEACHING = Path(__file__).parents[2] / "labs/configs/teaching.toml"


def test_the_teaching_config_is_the_default():
    config = read_config([f"--config={TEACHING}"])
    assert config.config == str(TEACHING)
    assert read_config([]) == TrainConfig()
    assert dataclasses.replace(config, config=None) == TrainConfig()


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path):
    (tmp_path / "c.toml").write_text("steps = 7\nlr = 1\nreshard_after_forward = false\n")
    config = read_config(["--config", str(tmp_path / "c.toml"), "--lr=0.5", "--seq-len=64"])
    assert (config.steps, config.lr, config.plan.seq_len, config.plan.reshard_after_forward) == (7, 0.5, 64, False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stepz = 3", r"c\.toml: unknown key 'stepz'; did you mean 'steps'\?"),
        ("config = 'other.toml'", r"c\.toml: unknown key 'config'"),
        ("steps = 'many'", r"c\.toml: TrainConfig\.steps is 'many'; it must be a whole number >= 1"),
        ("steps = 0", r"c\.toml: TrainConfig\.steps is 0; it must be a whole number >= 1"),
        ("steps =", r"c\.toml is not TOML"),
        ("steps = " + "[" * 10_000, "it nests too deep"),
        ("a = 1" + "0" * 5000, r"c\.toml is not TOML"),
        ("[" + "a." * 40_000 + "a]", "more than 100 kB, or a line with more than 1,000 dots"),
        ("\n".join(f"[a.b{n}]" for n in range(50_000)), "more than 100 kB"),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path, text, says):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ValueError, match=says):
        read_config([f"--config={tmp_path / 'c.toml'}"])


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"no config file at nowhere\.toml"):
        read_config(["--config=nowhere.toml"])


def test_an_unknown_argument_suggests_the_nearest():
    with pytest.raises(ValueError, match="unknown argument '--stepz=3'; did you mean '--steps'"):
        read_config(["--stepz=3"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["steps=3"], "unknown argument 'steps=3'; did you mean '--steps'"),
        (
            ["--config"],
            "--config has no value; it is None or a path (a file called none is ./none), as in --config=VALUE",
        ),
        (["--compile", "--steps=3"], "--compile has no value; it is True or False, as in --compile=VALUE"),
    ],
)
def test_what_is_no_key_with_a_value_is_named(arguments, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        read_config(arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--steps=0", "TrainConfig.steps is 0; it must be a whole number >= 1"),
        ("--global_batch=-8", "TrainConfig.global_batch is -8; "),
        ("--micro_batch=0", "TrainConfig.micro_batch is 0; it must be None or a whole number >= 1"),
        ("--seed=-1", "TrainConfig.seed is -1; it must be a whole number >= 0"),
        ("--lr=nan", "TrainConfig.lr is nan; it must be a number > 0 (such as 1e-3)"),
        ("--lr=-1", "TrainConfig.lr is -1; "),
        ("--min_lr=-1", "TrainConfig.min_lr is -1; it must be None or a number >= 0"),
        ("--requires_gradient_sync=false", "would never reduce gradients; use true or last"),
        ("--min_lr=1", "min_lr=1.0 is above lr=0.001: a schedule goes down"),
        ("--clip=0", "TrainConfig.clip is 0; it must be None or a number > 0 (such as 1.0)"),
        ("--beta2=1", "TrainConfig.beta2 is 1; it must be a number, at least 0 and below 1"),
        ("--weight_decay=-1", "TrainConfig.weight_decay is -1; it must be a number >= 0"),
        ("--warmup_steps=30", "warmup_steps=30, but there are 20 steps"),
        (
            "--keep=1",
            "TrainConfig.keep is 1; it must be a whole number >= 2 (in case the newest checkpoint is damaged)",
        ),
        ("--tensorboard=true", "tensorboard=true keeps something; say where with out=FOLDER"),
        ("--profile=4", "profile=4 keeps something; say where with out=FOLDER"),
        ("--async_save=true --out=x --checkpoint=full", "async_save=true writes sharded checkpoints"),
        ("--timeout_s=1e300", "TrainConfig.timeout_s is 1e+300; it must be a number > 0, at most 31536000 (a year)"),
        ("--out=", "TrainConfig.out is ''; it must be None or a path (a file called none is ./none)"),
        (
            "--schedule=cosin",
            "TrainConfig.schedule is 'cosin'; it must be 'constant' or 'cosine'; did you mean 'cosine'?",
        ),
        ("--model=gpt2-lage", "did you mean 'gpt2-large'"),
        ("--model=teaching-llama --dropout=0.1", "dropout"),
    ],
)
def test_a_value_that_cannot_be_is_named(arguments, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        read_config(arguments.split())


def toml(value):
    return json.dumps(value) if not isinstance(value, float) or math.isfinite(value) else str(value)


VALUES = ["true", "false", "none", "last", "off", "on", "BACKWARD_PRE", "", "x y", "=", "--x", True, False, -1, 0, 1, 2,
          10**400, 0.5, 1e-3, -0.0, math.inf, math.nan, (1,), ("Block", "Head")]  # fmt: skip


def outcome(make):
    """The configuration, or the sentence that refuses it."""
    try:
        return repr(dataclasses.replace(make(), config=None))
    except ValueError as error:
        return str(error).removeprefix("c.toml: ")


def typed(value, allowed):
    """As it is typed; None for what cannot be: a word that is to be a text, a number or word that is to be none."""
    takes_texts = allowed.test("any text")
    if isinstance(value, str):
        return None if value in ("true", "false", "none") and not allowed.test(value) else value
    return None if isinstance(value, tuple) or (takes_texts and value is not None) else str(value).lower()


@pytest.mark.parametrize("key", [key for key in ALLOWED if key != "config"])
def test_python_toml_and_the_command_line_mean_the_same(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    needs = {} if key == "out" else {"out": "run"}  # without a folder most of what is kept is refused
    legal = [getattr(TrainConfig(), key), *ALLOWED[key].names]
    for value in [*legal, *VALUES]:
        python = outcome(lambda: TrainConfig(**needs | {key: value}))  # noqa: B023 - called at once
        if value is not None:
            Path("c.toml").write_text("\n".join(f"{k} = {toml(v)}" for k, v in (needs | {key: value}).items()))
            assert outcome(lambda: read_config(["--config=c.toml"])) == python, value
        if (text := typed(value, ALLOWED[key])) is not None:
            got = outcome(lambda: read_config([f"--{k}={v}" for k, v in (needs | {key: text}).items()]))
            assert got == python, value


@pytest.mark.parametrize("key", PLAN_KEYS)
def test_a_key_of_the_plan_takes_what_the_plan_takes_however_it_is_written(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in [getattr(Plan(), key), *Plan.__dataclass_fields__[key].metadata["allowed"].names, *VALUES]:
        apis = [api for api in ("fsdp2", "fsdp1", "hsdp") if takes(api, key, value)]
        for api in apis or ["fsdp2"]:
            python = outcome(lambda: TrainConfig(api=api, **{key: value}))  # noqa: B023 - called at once
            assert not apis or python.startswith(("TrainConfig", "requires_gradient_sync=false", "activation_checkp"))
            if value is not None:
                Path("c.toml").write_text(f"api = '{api}'\n{key} = {toml(value)}\n")
                assert outcome(lambda: read_config(["--config=c.toml"])) == python, value
            if value is None or isinstance(value, bool | int):
                typed = [f"--api={api}", f"--{key}={text_of(value)}"]
                assert outcome(lambda: read_config(typed)) == python, value  # noqa: B023


def takes(api, key, value):
    """Whether the simulator's plan has it."""
    try:
        Plan(**{"api": PLAN_API.get(api, api), key: value})
    except ValueError:
        return False
    return not isinstance(value, str) or value != "none"  # here none is the default, whatever the key


@pytest.mark.parametrize("api", ["single", "ddp", "fsdp2", "fsdp1", "hsdp", "mini"])
def test_a_configuration_and_its_command_line_are_the_same(api):
    other = {"fsdp1": {"backward_prefetch": "off", "wrap": "Linear,MLP"}, "hsdp": {"shard_size": 2, "wrap": 1000}}
    config = TrainConfig(api=api, steps=3, lr=1, compile=True, **other.get(api, {}))
    assert read_config(config.arguments()) == config
    assert read_config(config.replace(steps=4).arguments()).steps == 4


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("reshard_after_forward", "true", True),
        ("reshard_after_forward", "none", None),
        ("reshard_after_forward", "2", 2),
        ("activation_checkpointing", "none", None),
        ("backward_prefetch", "none", None),
        ("backward_prefetch", "off", "none"),
        ("param_dtype", "none", "fp32"),
        ("requires_gradient_sync", "last", "last"),
        ("forward_prefetch", "False", False),
        ("backward_prefetch", "BACKWARD_POST", "BACKWARD_POST"),
        ("backward_prefetch", "2", 2),
        ("meta-init", "true", True),
        ("prompt", "none", "none"),
        ("prompt", "true", "true"),
        ("out", "true", "true"),
        ("out", "none", None),
        ("wrap", "1000", 1000),
        ("wrap", "Linear, MLP", ("Linear", "MLP")),
        ("global_batch", "1_000", 1000),
        ("lr", "1", 1.0),
    ],
)
def test_a_word_on_the_command_line_has_one_meaning(key, text, value):
    api = ["--api=fsdp1"] if text == "False" or (str(value) in ("BACKWARD_POST", "none") and key != "prompt") else []
    got = read_config([f"--{key}={text}", *api]).by_key()[key.replace("-", "_")]
    assert (got, type(got)) == (value, type(value))


def test_a_file_may_lack_what_is_typed(tmp_path):
    (tmp_path / "c.toml").write_text("save_every = 5\n")
    assert read_config([f"--config={tmp_path / 'c.toml'}", "--out=run"]).save_every == 5
    with pytest.raises(ValueError, match=r"c\.toml: save_every=5 keeps something"):
        read_config([f"--config={tmp_path / 'c.toml'}"])


@pytest.mark.parametrize("path", sorted(TEACHING.parent.glob("*.toml")), ids=lambda path: path.stem)
def test_the_configs_that_are_there_can_be_read(path):
    assert read_config([f"--config={path}"]).model_config.n_layer > 1


def test_the_config_for_gpus_says_how_often_its_steps_read_the_built_in_text():
    path = TEACHING.with_name("gpt2_124m.toml")
    config, train = read_config([f"--config={path}"]), load_corpus().train
    tokens = config.steps * config.global_batch * config.model_config.context
    said = re.search(r"read the built-in one (\d+) times", path.read_text())
    assert said
    assert int(said[1]) == pytest.approx(tokens / len(train), rel=0.05)


def test_help_shows_the_usage_and_every_key(capsys):
    with pytest.raises(SystemExit, match="0"):
        read_config(["--help"], "torchrun --standalone ...")
    printed = capsys.readouterr().out
    assert "torchrun --standalone ..." in printed
    for key in KEYS:
        assert f"--{key}" in printed
