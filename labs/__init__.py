"""Labs: train a real GPT on real text with torch's own FSDP, under torchrun.

Read in this order: `labs.data` (what it is trained on), `labs.gpt` (the model), `labs.config` (what can be
asked of the trainer), `labs.train` (the training).
"""
