"""A prediction in a page: what a reader may answer, and what ``pages.js`` needs to judge the answer."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from fsdp_sim.learn import predict
from fsdp_sim.learn.predictions.prediction import CLOSE, Prediction
from fsdp_sim.learn.quantity import COUNT, SCALES, SHOWN, needs_unit, singular
from fsdp_sim.learn.verdict import with_code


def asked(name: str) -> Prediction:
    """The prediction that ``predict(name)`` asks for in a notebook.

    Raises:
        ValueError: there is none.
    """
    return predict(name).prediction  # type: ignore[union-attr]


def judged_by(prediction: Prediction) -> dict[str, Any]:
    """What judges an answer, so that a script need know no units."""
    told = {"name": prediction.name, "answer": prediction.answer, "why": with_code(prediction.why)}
    if prediction.choices:
        return {**told, "choices": prediction.choices}
    unit = prediction.unit
    return {
        **told,
        "how": prediction.how,
        "truth": prediction.value(prediction.answer),
        "close": CLOSE,
        "unit": unit,
        "needs_unit": needs_unit(unit),
        "one": singular(unit),
        "scales": SCALES.get(unit, COUNT),
        "shown": sorted((scale, name) for name, scale in SCALES.get(unit, {}).items() if name in SHOWN),
    }


def markup(prediction: Prediction) -> str:
    """The place where a page asks. Without scripts it says how to answer, and what follows can be unfolded."""
    data = escape(json.dumps(judged_by(prediction), ensure_ascii=False))
    how = escape(prediction.how)
    return f'<div class="prediction" id="predict-{prediction.name}" data-asked="{data}"><p>{how}</p></div>'
