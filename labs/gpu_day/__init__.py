"""An hour on somebody's GPU, spent so that everybody learns from it: ``make gpu-day``.

    parts     what is done, in order of worth: checks, calibration, accuracy, the labs, a training, tests
    sizes     the largest models that have room on this GPU, by the simulator's word
    day       the parts one after the other, each in a process of its own, within so many minutes
    bundle    what they left as one file, without what is private; and into the repository

`__main__` is the command.
"""
