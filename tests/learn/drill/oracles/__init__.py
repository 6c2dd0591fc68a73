"""Independent computations of what the templates ask: one file for each topic, one function for each template.

A function takes what was drawn (``question.given``) by name and returns the answer: a number in the question's unit,
the option that is right, or the options in order.
"""
