"""Checkpoints: what a run keeps so that it, or another one, can go on from there.

In reading order:

state, rng     what a checkpoint holds
agree          all ranks go on, or all fail
hashing        bytes to the disk and back, with their SHA-256
manifest       which files belong to a checkpoint
folder         the folder of checkpoints: one rename makes a checkpoint
index          which tensors a sharded checkpoint has, and where
storage        its bytes, moved for torch.distributed.checkpoint
staging        which of them a rank writes: the tensors, or copies of them
tensors        safetensors files, read in slices and written tensor by tensor
hugging_face_names  Hugging Face's names and layouts of the same weights
full           a full checkpoint: whole tensors, as safetensors
checkpointer   all of it together, on all ranks, also in the background
lock           one run at a time in a folder
convert        from one form of checkpoint to another, as a command
"""

from labs.checkpoint.agree import CheckpointError
from labs.checkpoint.checkpointer import Checkpointer, FoundCheckpoint
from labs.checkpoint.folder import newest_progress
from labs.checkpoint.lock import FolderInUseError, RunLock

__all__ = ["CheckpointError", "Checkpointer", "FolderInUseError", "FoundCheckpoint", "RunLock", "newest_progress"]
