"""What the one who teaches needs: plans with minute marks, and what to expect of each chapter's exercises.

Reading order: `sections` (where the course says what), `plans`, `expect`, `pages` (both as files of the repository),
`rollup` (what a class has done), `grading` (points for what was handed in). What was written by hand stands beside the
notebooks, in ``notebooks/instructor``, so most of this needs a checkout.
"""
