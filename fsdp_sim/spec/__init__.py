"""What you ask for: frozen, validated descriptions of the plan and the cluster."""

from fsdp_sim.spec.cluster import Cluster
from fsdp_sim.spec.fields import Allowed, field, number, one_of, spec, text, whole
from fsdp_sim.spec.plan import Plan

__all__ = ["Allowed", "Cluster", "Plan", "field", "number", "one_of", "spec", "text", "whole"]
