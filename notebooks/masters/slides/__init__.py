"""The course as slides with speaker notes: ``python -m notebooks.masters.slides [NAME ...] [--out FOLDER] [--pdf]``.

A deck is a chapter or a plan of the instructor's kit. Words come from the masters, figures and what was printed from
the saved notebooks; nothing is executed. What is shown is large, and what is said about it is in the notes (key S).

Reading order: `deck` (what a slide is), `words` (prose to questions, notes and HTML), `figures` (a figure as large as a
slide), `cells` (what a code cell shows), `chapters` (a notebook as a deck), `plans` (which slides a row of a plan
shows), `page` (a deck as files), `pdf` (a deck printed).
"""
