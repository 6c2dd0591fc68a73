"""Hugging Face models under FSDP2: T5 learns to summarise, BERT to tell code from prose.

Each by hand, through Accelerate and through Lightning Fabric.

Read in this order:

    packages          what the lab needs besides torch, and the sentence when it is not there
    models            T5 and BERT, from a config or from pretrained weights
    wikihow           rows of title, text and headline: a CSV of your own, or the documentation inside torch.distributed
    batches           rows to tensors
    with_fully_shard  `fully_shard` on a Hugging Face model, the loss, one step
    with_accelerate   the same through Accelerate
    with_fabric       the same through Lightning Fabric
    measuring         what a rank sees: losses, units, collectives, bytes alive
    predicting        what the simulator says of it
    pitfalls          two mistakes, made and measured
    run_hugging_face  `run`: predicted beside measured

``python -m labs.experiments.hugging_face`` runs it; ``torchrun -m`` the same trains on ranks of its own.
"""
