"""Graphs as objects: what another process gets of one."""

from __future__ import annotations

import pickle

from qimeng.testing import sample_graph


def test_a_graph_is_sent_without_what_others_worked_out_of_it() -> None:
    graph = sample_graph()
    graph.memo["worked out here"] = lambda: None  # cannot be pickled
    sent = pickle.loads(pickle.dumps(graph))
    assert not sent.memo and list(sent.nodes) == list(graph.nodes) and "worked out here" in graph.memo
