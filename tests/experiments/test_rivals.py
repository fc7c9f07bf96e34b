"""The table of generated kernels beside what else computes the same."""

from experiments.rivals import rivals

WHERE = {"environment": {"device": "H100", "commit": "abcdefghij"}}


def test_the_fastest_configuration_is_held_against_each_rival() -> None:
    rows = [
        {"case": "a", "turns_ms": {"sparse(x=1)": 0.02, "sparse(x=2)": 0.01, "eager": 0.03, "torch csr": 0.5}} | WHERE,
        {"case": "b", "turns_ms": {"eager": 0.03}, "refused": "too dense"} | WHERE,
        {"case": "c", "failed": "RuntimeError"} | WHERE,
    ]
    text = rivals(rows)
    assert "| a | 10.0 | 3.00 | 50.00 | `sparse(x=2)` |" in text and "H100, commit abcdefg" in text
    assert "| b | – | – | – | refused |" in text and "| c |" not in text
