"""What people say about bugs, and what a careful reader finds in published scripts."""

from __future__ import annotations

import argparse

from fsdp_sim.learn.statements import Misconception


def _loop_of_a_comment() -> bool:
    """Whether a loop with only a comment in it is a SyntaxError."""
    try:
        compile("for batch in loader:\n    # forward, backward, step\n", "example", "exec")
    except SyntaxError:
        return True
    return False


def _swallowed_bracket() -> bool:
    """Whether a bracket behind a comment sign is missing."""
    try:
        compile("model = FSDP(model,\n    sharding_strategy=SHARD_GRAD_OP # ZERO2)\n", "example", "exec")
    except SyntaxError:
        return True
    return False


def _flag_switches_off() -> bool:
    parser = argparse.ArgumentParser()
    parser.add_argument("--track_memory", action="store_false")
    return parser.parse_args(["--track_memory"]).track_memory is False and parser.parse_args([]).track_memory is True


MISCONCEPTIONS = (
    Misconception(
        "It hangs, so it is the network.",
        "Mostly it is the code: a rank has left out a collective, or issued one more, or another order. First ask "
        "which rank waits where.",
        ("misconception 35",),
    ),
    Misconception(
        "It converges differently from DDP: adjust the learning rate.",
        "FSDP computes what DDP does. A difference is a bug: clipping, scaler, dtype, groups of weight decay, seeds, "
        "data.",
        ("misconception 0.29",),
    ),
    Misconception(
        "The listing of the tutorial runs as it is shown.",
        "It uses names that it never defines: `nccl`, `LooseVersion`, a formatter of gigabytes. Each is a NameError.",
        ("misconception 4.130",),
    ),
    Misconception(
        "`fsdp_loss[1] += len(batch)` counts the samples.",
        "The batch is a dict: its length is the number of keys, so the average loss is wrong, whatever the batch "
        "size. And what it calls accuracy is a loss.",
        ("misconception 4.131",),
        lambda: len({"input_ids": [0] * 64, "labels": [0] * 64}) == 2,
    ),
    Misconception(
        "`--track_memory` switches memory tracking on.",
        "With `action=\"store_false\"` the flag switches it off, as do its neighbours. The defaults in the help are "
        "not those of the code either.",
        ("misconception 4.135",),
        _flag_switches_off,
    ),
    Misconception(
        "The best model is saved, whether or not validation runs.",
        "Without validation the loss to beat and the loss at hand are both infinite, and inf < inf is never true: "
        "there is no checkpoint at all.",
        ("misconception 4.136",),
        lambda: not float("inf") < float("inf"),
    ),
    Misconception(
        "`for batch in loader:` and then a comment, for the reader to fill in.",
        "A loop with only a comment in it is a SyntaxError. And that loop is for one process: no sampler, no care for "
        "who saves.",
        ("misconception 4.95",),
        _loop_of_a_comment,
    ),
    Misconception(
        "`sharding_strategy=SHARD_GRAD_OP # ZERO2)`.",
        "The comment has swallowed the bracket: a SyntaxError.",
        ("misconception 4.140",),
        _swallowed_bracket,
    ),
)  # fmt: skip
