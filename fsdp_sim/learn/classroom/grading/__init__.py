"""Grades what was handed in, without running any of it where it could read or change anything.

Reading order: `submission` (the exercises' code as text), `written_function` (text as a function, made only in a rank),
`worker` (the process that judges, as root; the code runs in ranks of a user lent for it), `grade` (which starts it and
gives points). What comes back is data all the way: msgpack from the ranks, JSON from the worker.
"""

from fsdp_sim.learn.classroom.grading.grade import ExerciseGrade, grade, points
from fsdp_sim.learn.classroom.grading.submission import answers, of_assignment

__all__ = ["ExerciseGrade", "answers", "grade", "of_assignment", "points"]
