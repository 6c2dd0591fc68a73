"""What a run measures of itself, and what the simulator predicts of the same step.

profiling, clocks          steps as timelines; all ranks on one clock
step_summary               what a recorded step says in one line
allocations                what a step holds in memory, by the simulator's categories
utilization                model FLOPs utilization, peak memory
simulated                  the run's settings, model and machine as the simulator knows them
piece_times, prediction    each piece of a step timed alone; what is predicted from them
"""
