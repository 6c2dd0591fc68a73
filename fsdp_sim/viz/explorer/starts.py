"""Where to begin in the explorer: plans to start from, and goals to reach from one."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_sim.forms import FormState
from fsdp_sim.simulation import Fit, Simulation
from fsdp_sim.words import human_bytes

ETHERNET = "Llama-3-70B on 64 H100, 100 Gbit/s Ethernet per node"
HSDP = "Llama-3-70B on 512 H100, HSDP"
PRESETS = {
    "GPT-2 124M on 8 A100": "model=gpt2-124m gpu=A100-SXM-80GB gpus=8 micro_batch=8",
    "Llama-3-8B on 8 H100": "model=llama3-8b gpu=H100-SXM-80GB gpus=8 seq_len=8192 activation_checkpointing=full",
    "Llama-3-8B on 64 H100": "model=llama3-8b gpu=H100-SXM-80GB gpus=64 seq_len=8192 activation_checkpointing=full",
    ETHERNET: (
        "model=llama3-70b gpu=H100-SXM-80GB gpus=64 bandwidth_gbps=12.5 latency_us=50 seq_len=8192 "
        "activation_checkpointing=full"
    ),
    HSDP: ("model=llama3-70b gpu=H100-SXM-80GB gpus=512 shard_size=64 seq_len=8192 activation_checkpointing=full"),
}


@dataclass(frozen=True)
class Goal:
    """What a plan is to reach on a given machine; a limit that is None is none.

    Attributes:
        start: the state one begins with; its model, GPUs, network and sequence are given and stay.
        mfu: at least so much of the peak FLOP/s.
        memory_gib: at most so much at the peak.
        exposed: at most this share of the step is exposed communication.
    """

    start: str
    mfu: float | None = None
    memory_gib: float | None = None
    exposed: float | None = None

    def conditions(self, state: FormState, sim: Simulation) -> list[tuple[str, bool]]:
        """Each condition with the number that a plan has, and whether it holds."""
        given = FormState.read(self.start)
        found = []
        if self.mfu is not None:
            found.append((f"MFU at least {self.mfu:.0%}: {sim.mfu:.1%}", sim.mfu >= self.mfu))
        if self.memory_gib is not None:
            most = int(self.memory_gib * 2**30)
            found.append(
                (
                    f"memory at most {human_bytes(most)}: {human_bytes(sim.peak_memory_bytes)}",
                    sim.peak_memory_bytes <= most,
                )
            )
        if self.exposed is not None:
            share = sim.exposed_comm_s / sim.step_time_s
            found.append((f"exposed at most {self.exposed:.0%} of the step: {share:.1%}", share <= self.exposed))
        found.append(("fits on the GPU", sim.fit is Fit.FITS))
        same = all(getattr(state, part) == getattr(given, part) for part in ("model", "cluster", "skews"))
        same = same and sim.plan.seq_len == given.plan.seq_len
        found.append(("the model, machine and sequence are those given", same))
        return found


GOALS = {
    "Llama-3-8B on 8 H100: 45% MFU in 40 GiB": Goal(PRESETS["Llama-3-8B on 8 H100"], mfu=0.45, memory_gib=40),
    "Llama-3-8B on two A100 of 40 GB: 30% MFU": Goal(
        "model=llama3-8b gpu=A100-SXM-40GB gpus=2 micro_batch=1 seq_len=4096", mfu=0.30
    ),
    "GPT-2 124M on two nodes, 10 Gbit/s per GPU: hide the wire": Goal(
        "model=gpt2-124m gpu=A100-SXM-80GB gpus=16 bandwidth_gbps=10 micro_batch=4", exposed=0.15
    ),
    "Llama-3-70B over Ethernet: 11% MFU, and it fits": Goal(PRESETS[ETHERNET], mfu=0.11),
    "Llama-3-70B on 512 H100: 40% MFU in 36 GiB": Goal(PRESETS[HSDP], mfu=0.40, memory_gib=36),
}
