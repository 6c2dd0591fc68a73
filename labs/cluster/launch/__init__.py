"""Starting the trainer on a cluster: a Slurm script, a manifest for Kubeflow Trainer, and the settings of both.

    sbatch --nodes=2 labs/cluster/launch/train.sbatch --model=gpt2 --api=hsdp    on Slurm
    kubectl create -f labs/cluster/launch/train-job.yaml    on Kubernetes with Kubeflow Trainer 2.2
    python -m labs.cluster.launch                                                   what each setting does, and when

train.sbatch      one torchrun per node, requeued when it is preempted or runs out of time
train-job.yaml    the same on Kubernetes
nodes.env         what is always set
settings.toml     NCCL, gloo and flight recorder: what each setting does and when

There was no cluster at hand: both files are checked by shellcheck, by the schema of Kubeflow Trainer's API and against
the options of torchrun and labs.train, and have not been run on one.
"""

from labs.cluster.launch.settings import EnvironmentVariable, read_settings

__all__ = ["EnvironmentVariable", "read_settings"]
