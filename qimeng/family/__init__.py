"""Families of kernels: what one is (`base`), where they are registered (`registry`), how their schedules are stored."""

from qimeng.family.base import MAX_ALTERNATIVES, AnyFamily, Cost, Family, Move, Needs, NotConcerned, Sample, Unsupported
from qimeng.family.registry import (
    OTHER,
    concerned,
    covering,
    families,
    family_of,
    is_built_in,
    is_covered,
    plan_of,
    refusal,
    register_family,
    rivals,
    take_faults,
    uncovered,
    unregister_family,
    word_of,
)
from qimeng.family.stored import schedule_from_data
from qimeng.program.schedule import Schedule, count, family_field, power_of_two

__all__ = [
    "MAX_ALTERNATIVES",
    "OTHER",
    "AnyFamily",
    "Cost",
    "Family",
    "Move",
    "Needs",
    "NotConcerned",
    "Sample",
    "Schedule",
    "Unsupported",
    "concerned",
    "count",
    "covering",
    "families",
    "family_field",
    "family_of",
    "is_built_in",
    "is_covered",
    "plan_of",
    "power_of_two",
    "refusal",
    "register_family",
    "rivals",
    "schedule_from_data",
    "take_faults",
    "uncovered",
    "unregister_family",
    "word_of",
]
