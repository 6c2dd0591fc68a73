"""Imported once by the fork server, so that no rank has to: what the first step of FSDP would import, which is slow."""

import torch
import torch._dynamo  # every first optimizer step imports it
import torch.distributed.fsdp  # and DTensor with it

import fsdp_sim
import fsdp_sim.accelerators
import fsdp_sim.ranks.group

fsdp_sim.accelerators.hide()  # ranks on CPU cores are forked from here; the others are not
torch.set_num_threads(1)  # no OpenMP pool may exist before a fork
fsdp_sim.import_for_ranks()
__all__ = ["fsdp_sim"]
