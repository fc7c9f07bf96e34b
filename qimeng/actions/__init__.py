"""The vocabulary of macro optimizations.

A kind is registered by `register` or by an entry point of the group ``qimeng.actions``.
"""

from qimeng.actions import algebra, gather, graph_kinds, launch, library, schedule_kinds
from qimeng.actions.base import Context, GraphRewrite, Kind, ScheduleKind, check_schedule, find_region
from qimeng.actions.registry import (
    GROUP,
    check_action,
    kind_named,
    kinds,
    legal_actions,
    register,
    rewritten,
    unregister,
)
from qimeng.actions.text import action_text
from qimeng.family import MAX_ALTERNATIVES

__all__ = [
    "GROUP",
    "MAX_ALTERNATIVES",
    "Context",
    "GraphRewrite",
    "Kind",
    "ScheduleKind",
    "action_text",
    "algebra",
    "check_action",
    "check_schedule",
    "find_region",
    "gather",
    "graph_kinds",
    "kind_named",
    "kinds",
    "launch",
    "legal_actions",
    "library",
    "register",
    "rewritten",
    "schedule_kinds",
    "unregister",
]
