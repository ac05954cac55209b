"""Checkpoints: the whole training state on disk, every unit at the version of one step boundary.

A checkpoint is a folder `step-<steps done>` that appears whole or not at all:

    index.json            step, updates, config, and the size and CRC-32 of every other file
    <unit>.safetensors    master.<name>, exp_avg.<name>, exp_avg_sq.<name> in FP32: a shard per unit
    assets/               config.json, generation_config.json and the tokenizer's files

The order of the samples is a function of the seed and the step, so the step is the data position too.
"""
