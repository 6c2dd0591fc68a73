"""The exercises: one file each, in the folder of their chapter, found by being there.

To add one, write ``<chapter>/<name>.py``; nothing else changes. `fsdp_sim.learn.exercise.Exercise` says what it holds:

- ``def <name>(...)``, the solution: what `fsdp_sim.learn.solution` and the solutions' notebooks show, so at most 30
  lines, readable alone. Where the stub is faulty code, ``stub = Edit({right: faulty, ...})``, or a function.
- ``EXERCISE``, with wrong answers and shortcuts, each with (part of) the message that it must get:
  ``mutant({old: new, ...}, message)`` where it is the solution with some text replaced, ``Wrong(function, message)``
  where it is another idea. An import that only the texts use ends in ``# noqa: F401 - in edits``.

What is wrong with an exercise is said where it is built, which is when its file is imported.

The judge, from `fsdp_sim.learn.judges` (a plan's from ``judges.plans``), and a file to begin from:

    predict a number        Numbers(truth, source, cases, where, unit)      collectives/elements_sent.py
    read a trace            Numbers, with timelines as cases                overlap/exposed_communication.py
    order a schedule        Order(truth, source, because)                   overlap/order_of_backward.py
    choose a plan           BestPlan(model, cluster, space, fixed, passes)  memory/plan_for_24_gb.py
    true or false           Claim(statement, measured, truth, holds)        unit/kept_for_backward.py
    write code on ranks     OnRanks(inputs, truth, causes, checks)          collectives/reduce_scatter_from_sends.py
    find the seeded fault   OnRanks; the stub is the faulty code            bug_hunt/case_26.py

Truth is computed, in the notebook's process, from the library or from all ranks' inputs: never stored. Where answers
are compared (the first four), a known wrong answer's message is also what a learner with the same answer is told. Where
code runs on ranks, the judge finds causes in the results (``causes``) and in the ranks' accounts (``checks``:
OnlyCollectives, BytesSent, PeakBytes, ExposedTime, CollectiveOrder).

To try one:

    python -m pytest tests/learn/test_exercises.py -k <name>
"""
