"""NaNs after a model was built on the meta device: buffers that nobody filled."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, WIDTH, POSITIONS = 2, 256, 16


stub = Edit({"model.reset_buffers()  # they are in no checkpoint: persistent=False": ""})


def case_04(make, weights, x):
    with torch.device("meta"):
        model = make()
    fully_shard(model)
    model.to_empty(device="cpu")
    model.reset_buffers()  # they are in no checkpoint: persistent=False
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    return model(x)


class Rotary(nn.Module):
    """A layer that turns its output by angles, as rotary position embeddings do; the frequencies are a buffer."""

    inv_freq: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.use_deterministic_algorithms(True)  # so that memory nobody wrote to shows: torch fills it with NaN
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("inv_freq", torch.empty(WIDTH), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        with torch.no_grad():
            self.inv_freq.copy_(10_000.0 ** (-torch.arange(WIDTH, device=self.inv_freq.device) / WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(x))[:, None] * self.inv_freq
        return self.layer(x) * angles.cos()


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    weights = {"layer.weight": torch.randn(WIDTH, WIDTH, generator=draw)}
    xs = [torch.randn(POSITIONS, WIDTH, generator=draw) for _ in range(RANKS)]
    return [(Rotary, weights if rank == 0 else {}, x) for rank, x in enumerate(xs)]


def turned(inputs: Inputs, inv_freq: torch.Tensor) -> list[torch.Tensor]:
    weight = inputs[0][1]["layer.weight"]
    angles = torch.arange(POSITIONS)[:, None] * inv_freq
    return [(x @ weight.T) * angles.cos() for _, _, x in inputs]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    return turned(inputs, 10_000.0 ** (-torch.arange(WIDTH) / WIDTH))


def every_rank_its_own(make, weights, x):
    model = make()
    fully_shard(model)
    return model(x)


EXERCISE = Exercise(
    title="Mend a model that is NaN after to_empty",
    kind=ExerciseKind.FAULT,
    difficulty=3,
    importance=5,
    minutes=20,
    contract="A model too large for one rank is made on the meta device, sharded, given memory, and filled from a "
    "state dict that only rank 0 has (`weights`; the others are given {}). All weights are right afterwards, but the "
    "output is NaN, on other machines zero, or different on each rank. Mend it. Return model(x). The model has "
    "reset_buffers(), which its constructor calls.",
    reference=case_04,
    stub=stub,
    why="to_empty gives every tensor memory that nobody has written to: parameters and buffers alike. The state dict "
    "brings the parameters. A buffer with persistent=False is in no state dict, so nothing brings it, and what the "
    "constructor computed was computed on the meta device, where there are no numbers. Buffers are not sharded and "
    "small: each rank computes its own again.",
    cause="a buffer that is in no state dict was given memory and never a value",
    hints=(
        "Which tensors of the model are in the state dict, and which are not? Compare named_buffers with its keys.",
        "The constructor's buffer was on the meta device. to_empty gave it memory; who writes the numbers?",
        "After to_empty, on every rank, call what computes the buffers.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (
                lambda inputs: turned(inputs, torch.zeros(WIDTH)),
                "the frequencies are zero, so nothing is turned: the buffer's numbers have to be computed, not its "
                "memory",
            ),
        ),
        abs_=1e-3,
    ),
    wrong=(
        Wrong(stub, "there are NaNs in it"),
        mutant(
            {"model.reset_buffers()": "model.inv_freq.zero_()"},
            "the frequencies are zero, so nothing is turned",
            name="zeros",
        ),
        mutant(
            {"model.reset_buffers()": "if torch.distributed.get_rank() == 0:\n    model.reset_buffers()"},
            "1 of 2 ranks are wrong",
            name="rank 0 alone",
        ),
        mutant(
            {
                "fully_shard(model)": "model.reset_buffers()\nfully_shard(model)",
                "model.reset_buffers()  # they are in no checkpoint: persistent=False": "",
            },
            "there are NaNs in it",
        ),
        Wrong(every_rank_its_own, "numbers differ"),
    ),
    shortcuts=(
        Wrong(lambda make, weights, x: torch.zeros_like(x), "all of it is zero"),
        Wrong(lambda make, weights, x: make()(x), "numbers differ"),
    ),
    covers=("pitfall 20", "pitfall 21"),
    stub_says="there are NaNs in it",
)
