"""What the one who teaches needs: plans with minute marks, and what to expect of each chapter's exercises.

Reading order: `sections` (where the course says what), `plans`, `expect`, `pages` (both as files of the repository).
What was written by hand stands beside the notebooks, in ``notebooks/instructor``, so all of this needs a checkout.
"""
