"""Imported once by the fork server, so that no rank has to: torch, DTensor and the mini-FSDP."""

import torch
import torch.distributed.fsdp  # the slow ones: DTensor and torch's own fully_shard

import fsdp_sim.mini
import fsdp_sim.ranks.group

torch.set_num_threads(1)  # no OpenMP pool may exist before a fork
__all__ = ["fsdp_sim"]
