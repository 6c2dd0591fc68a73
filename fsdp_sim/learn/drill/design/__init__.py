"""Open design questions: free text with numbers, and the simulator as the judge of the numbers."""

from fsdp_sim.learn.drill.design.question import DesignQuestion, designs
from fsdp_sim.learn.drill.design.review import Design, Judgement

__all__ = ["Design", "DesignQuestion", "Judgement", "designs"]
