"""The labs: predict, run, measure, compare. Each is a module, run as ``python -m labs.lab.NAME``, and a notebook.

Read `result` first: what every lab returns.
"""
