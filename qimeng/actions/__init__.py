"""The vocabulary of macro optimizations.

A kind is registered by `register` or by an entry point of the group ``qimeng.actions``.
"""

from qimeng.actions import algebra, cluster, graph_kinds, launch, library, lower_all, schedule_kinds
from qimeng.actions.base import Context, GraphRewrite, Kind, Remainder, ScheduleKind, find_region
from qimeng.actions.lower_all import each_lowered
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
    "Remainder",
    "ScheduleKind",
    "action_text",
    "algebra",
    "check_action",
    "cluster",
    "each_lowered",
    "find_region",
    "graph_kinds",
    "kind_named",
    "kinds",
    "launch",
    "legal_actions",
    "library",
    "lower_all",
    "register",
    "rewritten",
    "schedule_kinds",
    "unregister",
]
