"""What people say about where the memory goes, and about what FSDP is."""

from __future__ import annotations

from fsdp_sim.learn.statements import Misconception
from fsdp_sim.learn.statements.evidence import ADAM_BYTES, collectives, parameters

MISCONCEPTIONS = (
    Misconception(
        "FSDP puts different layers on different GPUs, and each GPU owns its layers.",
        "That is pipeline parallelism. Under FSDP every rank computes every layer, and holds a slice of every "
        "parameter: one page of each chapter, not one chapter of the book. The slices are equal, so nothing has to be "
        "balanced.",
        ("misconception 1", "misconception 0.2", "misconception 0.8", "misconception 4.9", "misconception 4.15",
         "misconception 4.32", "misconception 4.33"),
    ),
    Misconception(
        "With N GPUs a rank needs 1/N of the memory, so 8 GPUs train a model 8 times as large.",
        "Parameters, gradients and optimizer state are divided by N, and nothing else: gathered units, the gradients "
        "of the unit in backward, the buffers of collectives, activations and logits stay. N times is a bound that is "
        "never reached.",
        ("misconception 17", "misconception 0.5", "misconception 1.1", "misconception 1.14", "misconception 1.27",
         "misconception 2.25", "misconception 3.5", "misconception 3.9"),
    ),
    Misconception(
        "FSDP takes 2 + 2 + 12 bytes a parameter: fp16 weights, fp16 gradients, and an fp32 master copy with Adam.",
        "That is the ZeRO paper's account. FSDP's fp32 shard *is* the master copy: 4 for it, 4 for its gradient, 8 "
        "for Adam. The sum is 16 either way; the bf16 copies of FSDP live only while a unit is gathered. And the "
        "paper's first 2 is the fp16 copy alone: the fp32 copy is counted among the 12.",
        ("misconception 15", "misconception 3.1", "misconception 3.2"),
        lambda: 2 + 2 + 12 == 4 + 4 + 8 == ADAM_BYTES,
    ),
    Misconception(
        "7 B parameters take 14 GB of weights, 14 of gradients and 28 of Adam: 56 GB, which fits one A100.",
        "That assumes that Adam works in bf16 without an fp32 copy. The usual account is 16 bytes a parameter: 112 "
        "GB, and 1,120 GB for 70 B.",
        ("misconception 16", "misconception 4.14"),
        lambda: 7e9 * ADAM_BYTES == 112e9 and 70e9 * ADAM_BYTES == 1120e9 and 7e9 * (2 + 2 + 4) == 56e9,
    ),
    Misconception(
        "With DDP each GPU needs the memory of the model times the number of GPUs.",
        "One GPU holds one copy, 16 bytes a parameter with Adam in fp32, however many GPUs there are. Only the sum "
        "over the cluster grows.",
        ("misconception 2", "misconception 0.3", "misconception 4.1"),
    ),
    Misconception(
        "A layer of 8 GB can be trained on GPUs with 6 GB free: that is what FSDP is for.",
        "It cannot. To compute the layer a rank gathers all of it, and 8 GB do not fit into 6. Cut the unit finer, or "
        "divide the computation too (tensor parallelism).",
        ("misconception 4.40",),
    ),
    Misconception(
        "One GPU computes its layers and sends the result to the next.",
        "No activation is ever sent. What travels is parameters and gradients: each unit's parameters are gathered on "
        "every rank, and each rank uses them on its own batch.",
        ("misconception 0.9", "misconception 0.16", "misconception 4.10", "misconception 4.19"),
        lambda: collectives() == {"ALL_GATHER", "REDUCE_SCATTER"},
    ),
    Misconception(
        "The GPUs work on a layer together, on the same batch.",
        "They are in the same layer at about the same time, each with rows of its own. With one shared batch all but "
        "one of N ranks would compute for nothing.",
        ("misconception 4.24", "misconception 4.25"),
    ),
    Misconception(
        "FSDP distributes the model instead of the data.",
        "It distributes the storage of the model. Computation is data parallel, exactly as with DDP.",
        ("misconception 0.30",),
    ),
    Misconception(
        "It is called SFDP.",
        "It is called FSDP, Fully Sharded Data Parallel; the other name exists in no library.",
        ("misconception 0.1",),
    ),
    Misconception(
        "GPT-2 of 124 M parameters on 4 GPUs: 75% less memory.",
        "The states shrink by 75%, from 2.0 to 0.5 GB a rank. For so small a model activations and logits weigh "
        "more, and they do not shrink: one copy of the logits of 12 × 1,024 tokens in fp32 is 2.47 GB.",
        ("misconception 0.15", "misconception 1.9"),
        lambda: 12 * 1024 * 50257 * 4 == 2_470_232_064
        and 1.9e9 < ADAM_BYTES * parameters("gpt2-124m") < 2.05e9 and ADAM_BYTES * parameters("gpt2-124m") / 4 < 0.51e9,
    ),
    Misconception(
        "For GPT-2 124M the optimizer state takes 2 GB and all states 3 GB.",
        "Adam keeps two fp32 numbers a parameter: 1.0 GB. With 0.5 GB of parameters and 0.5 GB of gradients that is "
        "2.0 GB, or 0.5 on 4 GPUs and 0.25 on 8.",
        ("misconception 1.8",),
        lambda: [round(n * parameters("gpt2-124m") / 1e9, 1) for n in (4, 8, ADAM_BYTES)] == [0.5, 1.0, 2.0],
    ),
    Misconception(
        "All numbers of the cluster together are 496 M, so a GPU needs about 2 GB.",
        "The number is right and the way to it is not: 2 GB is 124 M parameters × 4 numbers × 4 bytes, on each GPU. "
        "The cluster of four holds 7.9 GB.",
        ("misconception 0.13",),
        lambda: round(4 * 4 * 4 * 124e6 / 1e9, 1) == 7.9,
    ),
    Misconception(
        "A GPT-2 with 12 blocks of 7.08 M parameters has 162.6 M; the published 124 M comes from optimizations.",
        "It comes from tying: input embedding and head are one tensor. Untied it is 163.0 M at a context of 1,024. A "
        "block with all its biases and norms has 7,087,872; 7,079,424 is a block without biases. Whoever counts one "
        "model and then divides another gets a number of neither.",
        ("misconception 0.6", "misconception 0.7", "misconception 0.14"),
        lambda: parameters("gpt2-124m") + 50257 * 768 == 163_037_184 and 12 * 768**2 + 2 * 768 == 7_079_424
        and (parameters("gpt2-124m") - (50257 + 1024) * 768 - 2 * 768) / 12 == 7_087_872,
    ),
    Misconception(
        "80 GB train 20 B parameters with DDP, and eight of them 160 B with FSDP.",
        "80 GB / 16 bytes is 5 B, and 640 GB / 16 bytes is 40 B, if nothing but states were stored. 160 B parameters "
        "have 2,560 GB of states.",
        ("misconception 1.10", "misconception 1.11"),
        lambda: (80e9 / ADAM_BYTES, 8 * 80e9 / ADAM_BYTES, 160e9 * ADAM_BYTES) == (5e9, 40e9, 2560e9),
    ),
    Misconception(
        "BERT takes 440 MB under DDP, 220 MB on 2 GPUs, and 110 MB with mixed precision.",
        "440 MB are the weights alone; the states are 1.76 GB. Under mixed precision the shards stay fp32, so 220 MB "
        "of weights stay 220 MB, and a bf16 copy of each unit comes and goes on top.",
        ("misconception 4.11",),
        lambda: 110e6 * 4 == 440e6 and 110e6 * ADAM_BYTES == 1.76e9,
    ),
    Misconception(
        "14 GB per GPU fits consumer cards, so they train 13 B and more.",
        "14 GB would be states alone: gathered units, activations and logits come on top. 13 B parameters have 208 GB "
        "of states: nine cards of 24 GB before the first activation.",
        ("misconception 4.16", "misconception 4.17"),
        lambda: 13e9 * ADAM_BYTES == 208e9 and -(-208 // 24) == 9,
    ),
    Misconception(
        "Sharding over two GPUs gives a peak of 52 to 55%.",
        "Such a number counts parameters alone, for N = 2 and one size of unit. Gradients and Adam are halved too, "
        "activations are not, and the gathered units depend on the wrapping.",
        ("misconception 4.22", "misconception 4.31"),
    ),
    Misconception(
        "Of two GPUs each keeps 25% of a layer.",
        "Each keeps a half: 1/N with N = 2.",
        ("misconception 2.22",),
    ),
    Misconception(
        "FSDP keeps the model replicas synchronized.",
        "With full sharding there are no replicas: there is one copy of the parameters, in slices. Only hybrid "
        "sharding has replicas, one for each shard group.",
        ("misconception 4.18",),
    ),
    Misconception(
        "Seeing different batches on different GPUs makes FSDP train better.",
        "A larger global batch does what it does, with DDP as with FSDP. It is no merit of sharding.",
        ("misconception 4.39",),
    ),
    Misconception(
        "Model parallelism is one thing, and FSDP shards layer-wise.",
        "Tensor parallelism divides each matmul and sends activations in every layer; pipeline parallelism divides "
        "the layers and sends activations at the boundaries. FSDP cuts each parameter (FSDP1: each unit's flat one), "
        "and *gathers* layer by layer.",
        ("misconception 3.17", "misconception 3.19"),
    ),
)  # fmt: skip
