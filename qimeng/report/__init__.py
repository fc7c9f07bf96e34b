"""Reports of results and of benchmarks, for people.

Deals in HTML files. Knows nothing about how anything was found.
"""

from qimeng.report.page import report, result_page, run_page

__all__ = ["report", "result_page", "run_page"]
