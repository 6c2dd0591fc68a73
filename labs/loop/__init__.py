"""The training loop, and what a run needs around it.

step, optimizer            one step; AdamW and its schedule
minimal                    the training in a few functions: what notebooks use, without anything a real run needs
preflight                  what cannot work is refused before anything starts
run_state, progress        a run between two steps: what a checkpoint holds of it
stopping                   how a run is told to leave
metrics, speed, report     a line per step, what is in it; what a run came to
evaluation, end_of_run     the validation loss and a sample; what is measured and said at the end
nonfinite, saving          a step whose loss is NaN; a checkpoint that cannot be written
failure, failpoints        how a run ends that cannot go on; moments at which the fault tests make a rank fail
"""
