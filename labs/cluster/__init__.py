"""Ranks and what starts them.

process_group     where a process stands: its rank, its device, its process group
torchrun          torchrun from Python
launch            Slurm, Kubernetes, and the settings of NCCL and the flight recorder
flight_recorder   who waits in which collective, and who never came
pretend           a cluster of which only the wire is modelled, on one device
"""
