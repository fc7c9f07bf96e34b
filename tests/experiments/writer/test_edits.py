"""Answers as edits: applied to the present code they give the answer, whatever changed."""

from __future__ import annotations

import random

from experiments.writer.edits import edits_of, reply_of, with_lines_of
from qimeng.coder.llm.reply import _edited, _edits

BASE = "def region(x):\n    a = 1\n    b = 2\n    k[(4,)](x, B=64)\n    a = 1\n    return x\n"


def test_a_changed_line_is_one_edit() -> None:
    answer = BASE.replace("k[(4,)](x, B=64)", "k[(8,)](x, B=32)")
    found = edits_of(answer, BASE)
    assert found == "<<<<<<< SEARCH\n    k[(4,)](x, B=64)\n=======\n    k[(8,)](x, B=32)\n>>>>>>> REPLACE"
    long = BASE + "".join(f"# {n}\n" for n in range(60))
    assert reply_of(long.replace("B=64", "B=32"), long) == edits_of(long.replace("B=64", "B=32"), long)


def test_whatever_changes_the_edits_give_the_answer() -> None:
    rng, lines, without = random.Random(0), ["a", "b", "c", "", "  d", "e = 1"], 0
    for _ in range(1000):
        old = ["q", *(rng.choice(lines) for _ in range(rng.randint(3, 12))), "z"]
        new = list(old)
        for _ in range(rng.randint(1, 4)):
            place, way = rng.randrange(len(new)), rng.random()
            if way < 0.3 and len(new) > 2:
                del new[place]
            elif way < 0.6:
                new.insert(place, rng.choice(lines))
            else:
                new[place] = rng.choice(lines)
        base, answer = "\n".join(old) + "\n", "\n".join(new) + "\n"
        found = edits_of(answer, base)
        if found is None:
            without += 1
        else:
            assert _edited(base, list(_edits(found))) == answer
    assert without < 150


def test_the_whole_is_given_where_edits_are_longer_or_mean_nothing() -> None:
    for base in (None, BASE, "other\n", BASE + " \n", "x\ny"):
        assert reply_of(BASE, base) == f"```python\n{BASE}```"


def test_unchanged_lines_keep_their_numbers() -> None:
    answer = BASE.replace("B=64", "B=32")
    rewritten = answer.replace("(4,)", "((128 + 31) // 32,)").replace("b = 2", "b = (3 - 1)")
    wanted = answer.replace("(4,)", "((128 + 31) // 32,)")
    assert with_lines_of(BASE, answer, rewritten) == wanted
    assert with_lines_of(BASE, answer, rewritten + "more\n") == rewritten + "more\n"
