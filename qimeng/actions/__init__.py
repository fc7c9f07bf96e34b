"""The vocabulary of macro optimizations.

A kind is registered by `register` or by an entry point of the group ``qimeng.actions``.
"""

from qimeng.actions import gather, graph_kinds, schedule_kinds
from qimeng.actions.base import (
    GROUP,
    MAX_ALTERNATIVES,
    Context,
    Kind,
    ScheduleKind,
    action_text,
    check_action,
    check_schedule,
    kind_named,
    kinds,
    legal_actions,
    register,
    unregister,
)

__all__ = [
    "GROUP",
    "MAX_ALTERNATIVES",
    "Context",
    "Kind",
    "ScheduleKind",
    "action_text",
    "check_action",
    "check_schedule",
    "gather",
    "graph_kinds",
    "kind_named",
    "kinds",
    "legal_actions",
    "register",
    "schedule_kinds",
    "unregister",
]
